"""Tests `generate=`: completions are compared with plain transformers, and invalid commands are refused."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lowmem.command import cli
from lowmem.command.generate import generate
from lowmem.model.generation import TextGenerator, printable, prompt_ids
from lowmem.system.errors import Refused
from lowmem.techniques.weights.streamed import Streamed

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def run(small, tmp_path_factory):
    """Returns the folder of a run of two steps."""
    from lowmem.config.typed_lines import composed
    from lowmem.fit import fit

    folder = tmp_path_factory.mktemp("generates") / "run"
    fit(composed([*small, "max_steps=2"]), folder)
    return folder


def greedy(folder, ids, tokens):
    """Returns the prompt and its greedy completion, computed without a cache: one forward pass over all tokens per new
    token."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([ids])
    for _ in range(tokens):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0]


@pytest.mark.parametrize("folder", ["", "model"])
def test_text_generated_from_a_run_or_model_equals_greedy_transformers_and_creates_no_folder(
    command, run, tmp_path, folder
):
    own = f"hydra.run.dir={tmp_path}/outputs/2026-01-31/12-00-00"
    code, said = command(f"generate={run / folder}", "prompt=def return", "max_new_tokens=5", own)
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    ids = tokenizer("def return")["input_ids"]
    expected = tokenizer.decode(greedy(run / "model", ids, 5)[len(ids) :])
    assert code == 0 and said == printable(expected) + "\n"
    assert not (tmp_path / "outputs").exists()  # not even the folder of the day


def test_empty_or_blank_completion_is_reported_with_a_warning(config, run, monkeypatch, caplog):
    for written, warned in (("", True), (" \n\n", True), (" word\n", False)):
        caplog.clear()
        monkeypatch.setattr(TextGenerator, "continuation", lambda *_, written=written: written)
        assert generate(config(f"generate={run}", "prompt=def")) == written
        assert ("the completion of this prompt is empty or blank" in caplog.text) == warned


def test_sampled_text_is_reproducible_with_one_seed_and_differs_with_another(config, run):
    def written(*more):
        return generate(config(f"generate={run}", "prompt=def", "max_new_tokens=8", *more))

    assert written("temperature=1.5") == written("temperature=1.5") != written("temperature=1.5", "seed=1")


def test_streamed_weights_generate_the_text_of_resident_weights_and_copy_less_in_larger_batches(
    config, run, tmp_path, monkeypatch
):
    file = tmp_path / "prompts.txt"
    file.write_text("def return\nimport\nclass Name\n")
    lines = [f"generate={run}", f"sample_prompts={file}", "max_new_tokens=6", "temperature=1.5"]
    resident, fetched = generate(config(*lines)), []
    assert [json.loads(line)["prompt"] for line in resident.splitlines()] == file.read_text().splitlines()
    alone = [generate(config(f"generate={run}", f"prompt={p}", *lines[2:])) for p in file.read_text().splitlines()]
    assert [json.loads(line)["text"] for line in resident.splitlines()] == alone
    stop = Streamed.stop
    monkeypatch.setattr(Streamed, "stop", lambda self: (fetched.append(self.fetched), stop(self)))
    drive = [f"weights.drive={tmp_path}", "weights.drive_holds=all"]
    for more in ([], ["weights.order=by_micro_batch"], ["batch_size=2"], ["loss=tiled"], drive):
        assert generate(config(*lines, "weights=streamed", *more)) == resident
    at_once, one_by_one, in_twos = fetched[:3]
    assert at_once < in_twos < one_by_one < 3 * at_once + 9  # the last blocks stay in their two slots


def test_prompt_for_a_chat_model_is_rendered_as_a_user_message_by_its_template(run):
    chats = AutoTokenizer.from_pretrained(run / "model")
    chats.chat_template = TEMPLATE
    expected = chats("<|im_start|>user\nhi, {a: 1}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    assert prompt_ids(chats, "hi, {a: 1}", chat=True)[0].tolist() == expected
    assert prompt_ids(chats, [{"role": "user", "content": "hi, {a: 1}"}], chat=False)[0].tolist() == expected
    assert prompt_ids(chats, "hi", chat=False)[0].tolist() == chats("hi")["input_ids"]
    chats.chat_template = "{{ raise_exception('no users here') }}"
    with pytest.raises(Refused, match="no users here"):
        prompt_ids(chats, "hi", chat=True)


def test_generate_from_an_adapter_folder_equals_the_merged_model_and_is_refused_without_a_base_name(
    command, run, tmp_path
):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(run / "model"), LoraConfig(target_modules=["c_attn"]))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.5)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    tokenizer.save_pretrained(tmp_path / "adapter")
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    tokenizer.save_pretrained(tmp_path / "merged")
    lines = ("prompt=def return", "max_new_tokens=6")
    code, said = command(f"generate={tmp_path / 'adapter'}", *lines)
    merged, alone = (command(f"generate={folder}", *lines)[1] for folder in (tmp_path / "merged", run))
    assert code == 0 and said.startswith(f"{merged}adapter.path=") and merged != alone  # the log goes to stderr
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": None}))
    code, said = command(f"generate={tmp_path / 'adapter'}", *lines)
    assert code == 1 and "does not name its base model" in said


def test_generate_without_a_model_or_prompt_or_with_conflicting_keys_is_refused(command, tmp_path):
    (tmp_path / "empty").mkdir()
    for lines, says in (
        (("generate=/none", "prompt=x"), "there is no such run folder"),
        ((f"generate={tmp_path / 'empty'}", "prompt=x"), "there is no model in this folder"),
        ((f"generate={tmp_path}",), "Type prompt='...'"),
        ((f"generate={tmp_path}", "prompt=x", "sample_prompts=[a]"), "are both set"),
        ((f"generate={tmp_path}", "sample_prompts=/none.txt"), "cannot be read"),
        (("prompt=x",), "Also type generate="),
        (("generate=x", "prompt=x", "resume=x"), "one command can use only one of these keys"),
    ):
        code, said = command(*lines)
        assert code == 1 and says in said and "Traceback" not in said, said


def test_generation_stops_at_the_end_token_the_last_position_or_a_stop_request():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=12, eos_token_id=7, bos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()

    class Numbers:
        eos_token_id, chat_template = 7, None

        def decode(self, ids, skip_special_tokens):
            return "".join(f"{int(i)} " for i in ids)

        def __len__(self):
            return 40

        def __call__(self, text, add_special_tokens):
            return {"input_ids": [3]}

    writer, ids = TextGenerator(model, Numbers()), torch.tensor([[3, 4, 5]])
    free = writer.continuation(ids, 100).split()
    assert len(free) == 9  # the model has 12 positions
    asked = iter([False, False, True])
    stopping = TextGenerator(model, Numbers(), stopped=lambda: next(asked))
    assert stopping.continuation(ids, 100).split() == free[:3]
    model.generation_config.eos_token_id = int(free[1])
    assert writer.continuation(ids, 100).split() == free[: free.index(free[1]) + 1]
    assert writer.continuation(torch.ones(1, 12, dtype=torch.long), 100) == ""


def test_typed_prompt_with_quotes_brackets_and_braces_is_read_unchanged():
    typed = ["generate=a b", "prompt=What's [1, 2], {a: b}? 7"]
    from lowmem.config.typed_lines import composed

    assert composed(cli.prepare(typed)).prompt == "What's [1, 2], {a: b}? 7"
