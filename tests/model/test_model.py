"""Tests the loading of models: stored weights get the requested dtype with one copy in memory; invalid architectures,
models that are not causal and unreadable files are refused."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
import transformers
from httpx import Request, Response
from huggingface_hub.errors import GatedRepoError
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from host_memory import Highest, linux
from lowmem.config.schema import Model
from lowmem.memory.meter import MemoryMeter
from lowmem.model import checks, loading
from lowmem.offload.host_weight import HostWeight
from lowmem.system.errors import Refused
from networks import network
from new_process import in_a_new_process


@pytest.fixture(params=["gpt2", "llama"])
def folder(request, tmp_path, small, config):
    """Returns a folder like a published model's, with weights in bfloat16, a configuration and a tokenizer."""
    from lowmem.data import token_store
    from lowmem.data.sources import text_files

    data = config().data
    texts = text_files.text(data.path, data.pattern, data.val_fraction)
    tokenizer = token_store.tokenize(texts, tmp_path / "cache", 400).tokenizer
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    network(request.param).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def spec(folder, **changes):
    how = {"name": str(folder), "pretrained": True, "trust_remote_code": False, "attention": "sdpa"}
    return Model.model_construct(**how | {"architecture": None} | changes)


def built(how, dtype=torch.float32):
    return loading.load(loading.Described(how, loading.architecture(how)), dtype)


def test_loaded_weights_equal_the_stored_weights_in_the_requested_dtype_and_the_model_is_in_training_mode(folder):
    saved = AutoModelForCausalLM.from_pretrained(folder)
    for dtype in (torch.float32, torch.float16):
        network = built(spec(folder), dtype)
        assert network.training and {p.dtype for p in network.parameters()} == {dtype}
        for (name, ours), theirs in zip(network.named_parameters(), saved.parameters(), strict=True):
            assert torch.equal(ours, theirs.to(dtype)), name


def test_weights_that_transformers_keeps_in_fp32_are_rounded_with_a_message(tmp_path, caplog):
    network("ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=16).save_pretrained(tmp_path)
    with caplog.at_level("INFO"):
        loaded = built(spec(tmp_path), torch.bfloat16)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert "such as model.layers.1.mlp.gate.weight. Here they are bfloat16" in caplog.text


@pytest.mark.rows("llama")
def test_fine_tuned_model_keeps_its_tokenizer_and_moves_its_embedding_by_less_than_0_1(command, folder, tmp_path):
    code, said = command("model=hf", f"model.name={folder}", "seq_len=16", "lr=1e-3", "max_steps=4")
    assert code == 0, said
    exported = PreTrainedTokenizerFast.from_pretrained(tmp_path / "run" / "model")
    assert exported.get_vocab() == PreTrainedTokenizerFast.from_pretrained(folder).get_vocab()
    before, after = (AutoModelForCausalLM.from_pretrained(f) for f in (folder, tmp_path / "run" / "model"))
    moved = (before.get_input_embeddings().weight.float() - after.get_input_embeddings().weight).abs().max()
    assert 0 < moved < 0.1  # fine-tuned, not started from random weights


@linux
@pytest.mark.rows("llama")
@pytest.mark.parametrize("copied", [True, pytest.param(False, marks=pytest.mark.wrong)])
def test_streamed_run_with_masters_keeps_no_weight_file_mapped_unless_copies_are_skipped(
    fit, folder, monkeypatch, copied
):
    """The master of the embedding is not split into a 16-bit weight and a remainder. Without a copy, this master would
    be a view of the file, and the file would stay mapped."""
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).save_pretrained(folder)
    mapped, on_train_start = [], MemoryMeter.on_train_start

    def looks(meter, trainer, module):
        mapped.extend(line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line)
        on_train_start(meter, trainer, module)

    monkeypatch.setattr(MemoryMeter, "on_train_start", looks)
    if not copied:
        monkeypatch.setattr(HostWeight, "leave_file", lambda self: None)
    streamed = ("weights=streamed", "precision=bf16-master", "gradient_checkpointing=every_layer")
    fit("model=hf", f"model.name={folder}", "seq_len=16", "max_steps=1", "plan=off", *streamed)
    assert bool(mapped) != copied


@pytest.mark.rows("llama")
def test_run_with_a_drive_loads_in_bfloat16_only_if_all_file_headers_say_16_bit(config, folder, tmp_path, monkeypatch):
    """The dtype is determined by the headers of the weight files, no matter if the files are in a folder, in the hub's
    cache or on the hub. If the files are only on the hub, a plan uses the dtype of the configuration instead."""
    drive = (
        "precision=bf16-master",
        "weights=streamed",
        "gradient_checkpointing=every_layer",
        f"weights.drive={tmp_path}",
    )
    named = config("model=llama-3.2-1b", *drive)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    headers = {"BF16": 10}
    monkeypatch.setattr(loading, "get_safetensors_metadata", lambda name: SimpleNamespace(parameter_count=headers))

    def read(run, plans=False, **more):
        described = loading.describe(run, plans=True)
        return loading.read_in(run, described._replace(**more), plans=plans)

    assert read(named, plans=True) == torch.bfloat16 == read(named)
    assert read(config("model=llama-3.2-1b", *drive[:3])) == torch.float32  # no drive
    assert read(config("model=llama-3.2-1b", "precision=16-master", *drive[1:]), plans=True) == torch.float32
    headers |= {"F32": 1}  # a wider tensor, which config.json does not mention
    assert read(named) == torch.float32
    monkeypatch.setattr(loading, "get_safetensors_metadata", lambda name: 1 / 0)  # no network
    assert read(named) == torch.float32
    cached = tmp_path / "cache" / "models--meta-llama--Llama-3.2-1B"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    shutil.copytree(folder, cached / "snapshots" / "abc")
    assert read(named) == torch.bfloat16 == read(config("model=hf", f"model.name={folder}", *drive))
    save_file({"wide": torch.zeros(1)}, cached / "snapshots" / "abc" / "another.safetensors")
    assert read(named) == torch.float32 == read(named, plans=True)


def test_model_with_pretrained_false_does_not_start_from_the_stored_weights(folder):
    assert not torch.equal(
        built(spec(folder, pretrained=False)).get_input_embeddings().weight,
        built(spec(folder)).get_input_embeddings().weight,
    )


def test_typed_architecture_key_overrides_the_config_of_a_pretrained_model(folder):
    key = "resid_pdrop" if loading.architecture(spec(folder)).model_type == "gpt2" else "attention_dropout"
    changed = loading.architecture(spec(folder, architecture={"model_type": "any", key: 0.25}))
    assert getattr(changed, key) == 0.25


def test_files_that_lack_the_weights_of_a_third_layer_are_refused(folder):
    more = loading.architecture(spec(folder))
    layers = "n_layer" if more.model_type == "gpt2" else "num_hidden_layers"
    with pytest.raises(Refused, match="lack the weights"):
        built(spec(folder, architecture={"model_type": "any", layers: 3}))


@pytest.mark.process
@pytest.mark.matrix
def test_loading_holds_one_copy_of_the_weights(tmp_path):
    """A separate process measures the peak of its anonymous memory above the level before loading, relative to the size
    of the weights."""
    shape = {"n_embd": 512, "n_layer": 8, "n_head": 8, "vocab_size": 50_000, "n_positions": 64}
    code = """
import sys, torch, threading, time
from pathlib import Path
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from lowmem.config import schema
from lowmem.model import loading
how = dict(name=sys.argv[1], pretrained=True, trust_remote_code=False, attention="sdpa", architecture=None)
spec = schema.Model.model_construct(**how)
def anonymous():
    return next(int(l.split()[1]) for l in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in l) * 1024
described = loading.Described(spec, loading.architecture(spec))
before, peak, done = anonymous(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous()); time.sleep(0.0005)
thread = threading.Thread(target=watch); thread.start()
network = loading.load(described, torch.float32)
done = True; thread.join()
weights = sum(p.nbytes for p in network.parameters())
print((max(peak, anonymous()) - before) / weights)
"""
    big = AutoModelForCausalLM.from_config(loading._of_type("gpt2", **shape))
    big.to(torch.bfloat16).save_pretrained(tmp_path)  # not the requested dtype: every tensor is converted
    ratio = float(
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)],
            capture_output=True,
            text=True,
            check=True,
            timeout=240,
        ).stdout.split()[-1]
    )
    # one copy, and memory for the import of the model's class, for buffers and for one tensor that is converted
    assert 0.9 < ratio < 1.5


@linux
@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@in_a_new_process
def test_loading_weight_shards_holds_the_weights_and_one_more_tensor_unless_all_files_are_read_first(
    tmp_path, dtype, wrong
):
    """In fp32 the weights are new tensors, converted one by one; in the dtype of the files they are pages of the files.
    The wrong variant first copies all files to memory."""
    shape = {"vocab_size": 8000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 3}
    config = loading._of_type("llama", **shape, num_attention_heads=4)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    network.to_empty(device="cpu").save_pretrained(tmp_path, max_shard_size="10MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 4
    with Highest() as highest:
        read = [load_file(file) for file in tmp_path.glob("*.safetensors")] if wrong else []
        read = [{name: tensor.clone() for name, tensor in one.items()} for one in read]
        weights = sum(p.nbytes for p in built(spec(tmp_path), dtype).parameters())
    largest = 8000 * 512 * dtype.itemsize
    held = weights if dtype == torch.float32 else 0
    assert (highest.rise < held + largest + 4e6) != wrong


@pytest.mark.parametrize(
    ("architecture", "said"),
    [
        ({"n_embd": 32}, "model_type"),
        ({"model_type": "gpt2", "n_positions": "abc"}, "does not accept these values"),
        ({"model_type": "gpt2", "n_embd": 32.5}, "does not accept these values"),
        ({"model_type": "gpt2", "attn_pdrop": 3.0}, "attn_pdrop=3.0: give a number from 0 to 1"),
        (
            {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 3},
            "num_key_value_heads=3: num_attention_heads=4 is not divisible",
        ),
    ],
)
def test_architecture_without_a_model_type_or_with_invalid_values_is_refused(architecture, said):
    with pytest.raises(Refused, match=said):
        loading.architecture(spec("x", pretrained=False, architecture=architecture))


def test_architecture_that_fails_without_a_message_is_refused_with_the_name_of_the_error(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", fail)
    architecture = {**WIDTHS, "model_type": "llama", "max_position_embeddings": 64}
    with pytest.raises(Refused, match=r"cannot be built with these values\. AssertionError: AssertionError"):
        built(spec("x", pretrained=False, architecture=architecture), torch.float32)


GEMMA3 = "{model_type: gemma3, text_config: {hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, "
GEMMA3 += "num_key_value_heads: 1, head_dim: 16, intermediate_size: 64, vocab_size: 512}}"


def test_tokenizer_of_a_model_with_a_nested_text_config_fits_its_vocabulary_and_sets_its_end_token(fit):
    _, run = fit("model=hf", "model.name=x", "model.pretrained=false", f"model.architecture={GEMMA3}", "max_steps=1")
    exported = AutoConfig.from_pretrained(run / "model")
    assert exported.get_text_config().vocab_size == 512
    assert 256 < len(AutoTokenizer.from_pretrained(run / "model")) <= 512
    assert exported.get_text_config().eos_token_id == AutoTokenizer.from_pretrained(run / "model").eos_token_id


def test_default_configuration_of_every_causal_family_passes_the_checks_of_its_values():
    checked = 0
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = CONFIG_MAPPING[model_type]()
        except Exception:  # some classes have no default values
            continue
        loading._refuse_impossible(config, {"num_hidden_layers": 2})
        checked += 1
    assert checked > 0.9 * len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_uneven_key_value_heads_are_accepted_with_latent_attention():
    architecture = {"model_type": "deepseek_v3", "num_attention_heads": 4, "num_key_value_heads": 3}
    loading.architecture(spec("x", pretrained=False, architecture=architecture))


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"hidden_act": "foo"}, "KeyError: 'foo'"), ({"intermediate_size": -1}, "RuntimeError: .*negative dimension")],
)
def test_architecture_that_cannot_be_built_is_refused_with_the_reason(changed, said):
    architecture = {**WIDTHS, "model_type": "llama", "max_position_embeddings": 64, **changed}
    with pytest.raises(Refused, match=f"model.architecture: llama cannot be built with these values. {said}"):
        built(spec("x", pretrained=False, architecture=architecture), torch.float32)


EXPERTS = {
    "model_type": "mixtral",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "num_local_experts": 2,
    "num_experts_per_tok": 3,
}


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (RuntimeError("shape '[9, 64, 3, 10]' is invalid for input of size 7"), True),  # sizes depend on the batch
        (RuntimeError("CUDA error: unspecified launch failure"), False),
        (TypeError("shape '[1, 3, 3, 10]' is invalid for input of size 96"), False),
    ],
    ids=["same error of another batch", "other message", "other class"],
)
def test_error_is_refused_as_impossible_architecture_only_if_the_model_alone_raises_the_same_error(error, refused):
    architecture = {"model_type": "mpt", "d_model": 32, "n_heads": 3, "n_layers": 1}

    def build():
        return built(spec("x", pretrained=False, architecture=architecture), torch.float32)

    if refused:
        with pytest.raises(Refused, match=r"mpt cannot compute a forward pass with these values\. RuntimeError: shape"):
            checks.refuse_architecture(error, build)
    else:
        checks.refuse_architecture(error, build)


@pytest.mark.parametrize("precision", ["32", "bf16-true", "bf16-master"])
def test_run_with_more_experts_per_token_than_experts_is_refused_in_its_first_step(command, tmp_path, precision):
    architecture = {**EXPERTS, "vocab_size": 512, "max_position_embeddings": 64}
    lines = ("model=hf", "model.name=x", "model.pretrained=false", "seq_len=16", "lr=1e-3", "max_steps=1")
    code, said = command(*lines, f"precision={precision}", f"model.architecture={architecture}".replace("'", ""))
    assert code == 1 and "mixtral cannot compute a forward pass" in said and "Traceback" not in said
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_model_with_two_positions_trains_on_rows_of_two_tokens(fit):
    fit("model.architecture.n_positions=2", "seq_len=2", "max_steps=1", "val_sequences=2", "sample_tokens=0")


@pytest.mark.parametrize(
    ("model_type", "longest"), [("xlnet", None), ("gpt2", 1024), ("musicgen", 2048), ("gemma3", 131072)]
)
def test_number_of_positions_is_read_from_the_text_config_of_the_model(model_type, longest):
    try:
        config = loading._of_type(model_type)
    except Refused:
        pytest.skip(
            f"this transformers makes no {model_type} of default values"
        )  # musicgen, at least until transformers 5.18
    assert loading.positions(config) == longest


# --- only causal models train ----------------------------------------------------------------------------------------

WIDTHS = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
ENCODERS = {
    "bert": WIDTHS,
    "rembert": WIDTHS | {"input_embedding_size": 16, "output_embedding_size": 16},  # does not declare is_causal
    "xlm": {"vocab_size": 300, "emb_dim": 32, "n_layers": 2, "n_heads": 2},
}
CAUSAL = {
    "bert": WIDTHS | {"is_decoder": True},
    "bloom": {"vocab_size": 300, "hidden_size": 32, "n_layer": 2, "n_head": 2},  # does not declare is_causal
    "bart": {"vocab_size": 300, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 2},  # only its decoder
    "gpt2": {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 2},
}


def at_random(model_type, keys, dtype=torch.float32):
    how = spec("x", pretrained=False, architecture={"model_type": model_type} | keys)
    torch.manual_seed(0)
    return built(how, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", ENCODERS)
def test_encoder_that_attends_to_later_tokens_is_refused(model_type, dtype):
    network = at_random(model_type, ENCODERS[model_type], dtype)
    with pytest.raises(Refused, match=f"{type(network).__name__} is an encoder here.*Choose a causal model"):
        checks.check_causal(network)
    assert network.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", CAUSAL)
def test_causal_model_passes_the_causality_check_without_drawing_random_numbers(model_type, dtype):
    network = at_random(model_type, CAUSAL[model_type], dtype)
    before = torch.get_rng_state()
    checks.check_causal(network)
    assert network.training and torch.equal(torch.get_rng_state(), before)
    assert not checks._looks_ahead(network)  # also for models whose attention declares is_causal


def test_causality_check_of_a_known_causal_model_runs_no_forward_pass(monkeypatch):
    monkeypatch.setattr(checks, "_looks_ahead", lambda _: pytest.fail("looked"))
    checks.check_causal(at_random("gpt2", CAUSAL["gpt2"]))


@pytest.mark.rows("gpt2")
def test_run_of_an_encoder_is_refused_unless_is_decoder_is_set(command, folder, tmp_path):
    at_random("bert", WIDTHS | {"vocab_size": 400}).save_pretrained(tmp_path / "encoder")
    PreTrainedTokenizerFast.from_pretrained(folder).save_pretrained(tmp_path / "encoder")
    lines = ("model=hf", f"model.name={tmp_path}/encoder", "seq_len=16", "lr=1e-3", "max_steps=1")
    code, said = command(*lines)
    assert (
        code == 1
        and "BertLMHeadModel is an encoder here" in said
        and "type model.architecture={is_decoder:true}" in said
    )
    assert not (tmp_path / "run" / "checkpoints").exists()
    code, said = command(*lines, "model.architecture={is_decoder:true}")
    assert code == 0, said


@pytest.mark.parametrize(
    ("name", "pretrained"),
    [("t5", True), ("t5", False), ("bart", True)],  # with pretrained=False, bart is a causal model without encoder
)
def test_encoder_decoder_model_is_refused(tmp_path, name, pretrained):
    widths = {"d_model": 32, "vocab_size": 300}
    config = AutoConfig.for_model(name, **widths)
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(Refused, match=f"{name} is an encoder-decoder, .*causal"):
        loading.architecture(spec(tmp_path, pretrained=pretrained))


# --- folders -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["/nonexistent", "~/no such folder", "./x", "a/b/c"])
def test_missing_model_folder_is_refused(name):
    for pretrained in (True, False):
        with pytest.raises(Refused, match="there is no such folder"):
            loading.architecture(spec(name, pretrained=pretrained))
    with pytest.raises(Refused, match="there is no such folder"):
        loading.tokenizer(name, False)


def test_model_name_of_a_file_or_unreachable_hub_id_is_refused_and_a_home_folder_is_loaded(folder, monkeypatch):
    with pytest.raises(Refused, match=f"this is a file.*model.name={folder}"):
        loading.architecture(spec(folder / "model.safetensors"))
    with pytest.raises(Refused, match="hub id that this machine can reach"):
        loading.architecture(spec("somebody/something"))
    monkeypatch.setenv("HOME", str(folder.parent))
    assert built(spec("~/model")).training and len(loading.tokenizer("~/model", False))


@pytest.fixture
def gate(monkeypatch):
    """Makes every download fail as for a gated repository, and returns the repository's name."""
    name = "meta-llama/Llama-3.2-1B"
    answer = Response(403, request=Request("GET", f"https://huggingface.co/{name}/resolve/main/config.json"))

    def refused(*args, **how):
        raise GatedRepoError("403 Client Error. Cannot access gated repo.", response=answer)

    monkeypatch.setattr(transformers.utils.hub, "hf_hub_download", refused)
    return name


SENTENCE = (
    r"model\.name={name}: this repository is gated, .*Accept the license on https://huggingface\.co/{name}, "
    r"log in with `hf auth login` or set HF_TOKEN, and run the command again\."
)


def test_gated_model_is_refused_with_login_advice(gate):
    with pytest.raises(Refused, match=SENTENCE.format(name=gate)):
        loading.architecture(spec(gate))
    with pytest.raises(Refused, match=SENTENCE.format(name=gate)):
        loading.tokenizer(gate, False)


def test_gated_model_with_a_known_architecture_is_planned_without_access(config, gate):
    cfg = config("model=llama-3.2-1b-instruct")
    assert loading.describe(cfg, plans=True).config.hidden_size == 2048
    with pytest.raises(Refused, match=SENTENCE.format(name=f"{gate}-Instruct")):
        loading.describe(cfg)


def test_unreadable_model_folder_is_refused_with_permission_denied(folder, monkeypatch):
    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(loading.os, "listdir", denied)  # not chmod, because root can read every folder
    with pytest.raises(Refused, match=r"permission denied\. Give a folder"):
        loading.architecture(spec(folder))


def test_model_folder_with_an_adapter_is_refused_with_both_ways_to_load_it(folder):
    """transformers would load the adapter together with the model."""
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(Refused, match=r"Type model\.name=.* adapter\.path=.*, or delete adapter_config\.json"):
        loading.architecture(spec(folder))
    (folder / "config.json").unlink()
    with pytest.raises(Refused, match=r"contains an adapter\. Type model\.name=.* adapter\.path=\S+\.$"):
        loading.architecture(spec(folder))


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_truncated_weight_file_is_refused(folder, kept):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(Refused, match=r"model\.safetensors has .* bytes, .*truncated or damaged.*Copy the file again"):
        loading.architecture(spec(folder))  # a run calls this before it tokenizes its data
    (folder.parent / "checkpoints").mkdir()
    with pytest.raises(Refused, match=f"Export it again: export={folder.parent}"):
        loading.architecture(spec(folder))
