"""Tests the command plan.py: its table, plan.json, and its messages for runs that cannot be planned."""

import json
import sys

import pytest
from test_trace import MODELS

from lowmem.command import cli
from lowmem.config import cards
from lowmem.config.settle import run_of
from lowmem.config.typed_lines import CONF
from lowmem.plan import prediction
from lowmem.plan.prediction import PHASES
from lowmem.plan.search import extend


@pytest.fixture
def planned(small, tmp_path, monkeypatch, capsys):
    """Returns a function that runs `python plan.py` with these arguments, and returns (exit code, printed text,
    plan.json or None)."""
    import plan

    def run(*arguments):
        typed = {argument.split("=")[0] for argument in arguments}
        base = (*(line for line in small if not line.startswith("plan=")), f"hydra.run.dir={tmp_path}/plan")
        if "model" in typed:  # another model has other architecture keys
            base = tuple(line for line in base if not line.startswith("model."))
        lines = [line for line in base if line.split("=")[0] not in typed]
        monkeypatch.setattr(sys, "argv", ["plan.py", *lines, *arguments])
        code, said = 0, ""
        try:
            cli.start(plan.main, config="plan")
        except SystemExit as stop:
            code, said = (stop.code, "") if isinstance(stop.code, int) else (1, str(stop.code))
        out, file = capsys.readouterr(), tmp_path / "plan" / "plan.json"
        return code, out.out + out.err + said, json.loads(file.read_text()) if file.exists() else None

    return run


# Choices for four groups. With FOUR and the batch_size of the fixture `small`, the search has a single recipe.
FOUR = ("precision=bf16", "optim=adamw", "gradient_checkpointing=none", "loss=full")
STREAMED = ("precision=bf16-master", "optim=adamw8bit", "gradient_checkpointing=every_layer", "loss=full")


def test_plan_prints_the_chosen_train_command_in_its_first_line(planned):
    code, said, written = planned("gpu=2GiB", "ram=64GiB", *FOUR)
    assert code == 0
    first = said.splitlines()[0]
    assert first == " ".join(["python train.py", *written["chosen"]]) and "gpu=" not in first
    assert {"overrides", "device", "host", "drive", "allocated", "reserved", "phases"} <= set(written["recipes"][0])
    for recipe in written["recipes"]:
        assert tuple(recipe["phases"]) == PHASES and recipe["fits"] and recipe["relative_step_time"] >= 1
        assert recipe["allocated"] == max(need["device"] for need in recipe["phases"].values())
    assert min(recipe["relative_step_time"] for recipe in written["recipes"]) == 1
    assert "recipes fit" in said and "as typed" in said


PRESETS = sorted(yaml.stem for yaml in (CONF / "experiment").glob("*.yaml"))
TINY = ("model=tiny", "model.architecture.n_embd=32", "model.architecture.n_head=2", "seq_len=16")


@pytest.mark.matrix
@pytest.mark.parametrize("preset", PRESETS)
def test_plan_of_every_preset_succeeds_and_lists_recipes(planned, preset):
    few = STREAMED if run_of([f"experiment={preset}"]).streams else FOUR
    code, said, written = planned(f"experiment={preset}", "gpu=2GiB", "ram=64GiB", *TINY, *few)
    assert code == 0 and written["recipes"], said


@pytest.mark.matrix
@pytest.mark.parametrize("line", ["strategy=pipeline", "gradient_checkpointing=sqrt", "freeze=[transformer.h.1.*]"])
def test_runs_that_are_not_linear_in_depth_are_traced_in_full_by_the_search(planned, line):
    devices = ["devices=2"] if "pipeline" in line else []
    code, said, written = planned("gpu=2GiB", "ram=64GiB", "optim=adamw", "batch_size=2", "loss=full", line, *devices)
    assert code == 0 and line in said.splitlines()[0] and all(recipe["traced"] for recipe in written["recipes"]), said


@pytest.mark.matrix
def test_plan_table_is_not_wider_than_the_terminal(planned, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, said, written = planned("gpu=2GiB", "ram=64GiB", "precision=bf16-sr", "gradient_checkpointing=none")
    command, *table = said.split("planned in")[0].splitlines()
    assert command == " ".join(["python train.py", *written["chosen"]])  # in one line, so that it can be copied
    assert max(map(len, table)) <= 80
    (head,) = [line for line in table if line.startswith("time  ")]
    assert head.split() == ["time", "device", "spare", "PyTorch", "host", "peak", "in"]
    changes = table[table.index(head) + 1]
    assert changes.startswith("as typed:")
    first = table[table.index(head) + 2].split()
    best = written["recipes"][0]
    need, reserves = best["device"]["total"] / 2**30, best["reserved"] / 2**30
    assert first[:4] == ["1.00", f"{need:.2f}", f"{0.98 * 2 - need:+.2f}", f"{reserves + 0.5:.2f}"]


@pytest.mark.matrix
def test_plan_lists_recipes_that_change_the_training_only_with_may_change_and_no_more_than_necessary(planned):
    fixed = ("ram=64GiB", "gradient_checkpointing=none", "loss=full", "batch_size=1")
    code, said, written = planned("gpu=2GiB", *fixed)
    assert code == 0 and {tuple(recipe["changes"]) for recipe in written["recipes"]} == {()}
    assert "No recipe changes the training. Type may_change=precision,optim" in said
    _, said, written = planned("gpu=2GiB", *fixed, "may_change=precision,optim")
    changed = {tuple(recipe["changes"]) for recipe in written["recipes"]}
    assert {(), ("bf16",), ("bf16", "8-bit state")} <= changed and "No recipe changes" not in said
    assert not any("may_change" in line for line in written["chosen"])
    # bf16-sr changes the training more, so it is listed only if no recipe closer to the typed training fits
    assert ("bf16-sr",) not in changed


def test_plan_without_a_fitting_recipe_names_the_missing_memory(planned):
    code, said, written = planned("gpu=1MiB", "ram=64GiB", *FOUR)
    assert code == 2 and written["chosen"] is None
    assert "Nothing fits. The smallest recipe exceeds the card by 0.5 GiB" in said and "does not fit" in said


@pytest.mark.matrix
def test_plan_without_a_fitting_recipe_names_the_largest_model_that_fits(planned):
    typed = ("model=gpt2", "model.pretrained=false", "seq_len=32", "batch_size=1")
    _, said, _ = planned("gpu=1GiB", "ram=64GiB", *typed, *FOUR, "model.attention=sdpa")
    assert "The largest model of conf/model that would fit instead: tiny." in said


def test_plan_with_search_false_prints_the_memory_of_one_run_by_phase(planned):
    code, said, written = planned("gpu=2GiB", "ram=64GiB", "search=false", "precision=16-master", "optim=adamw8bit")
    (recipe,) = written["recipes"]
    need = recipe["device"]["total"] / 2**30
    assert code == 0 and "It fits a card of 2.0 GiB and a host of 64.0 GiB." in said
    assert "device, highest in backward" in said and f"Needs a {need:.1f} GiB card" in said
    assert recipe["device"]["phase"] == "backward" and recipe["fits"] and recipe["reserved"] >= 2**21
    assert all(f"\n{phase} " in f"\n{said}" for phase in PHASES)


@pytest.mark.matrix
def test_plan_keeps_typed_keys_of_optimizer_and_loss(planned):
    typed = ("precision=bf16", "loss=chunked", "loss.rows=16", "optim=adamw", "optim.betas=[0.8,0.9]", "batch_size=4")
    code, said, written = planned("gpu=RTX3060", "ram=64GiB", *typed)
    assert code == 0 and {"optim.betas=[0.8,0.9]", "loss.rows=16"} <= {*written["chosen"]}, said
    assert "rtx3060 (11.63 GiB, as torch reports it)" in said


@pytest.mark.matrix
def test_plan_of_batch_size_auto_chooses_a_recipe_for_the_card(planned):
    typed = ("precision=bf16", "optim=adamw", "gradient_checkpointing=none", "loss=full")
    auto = ("batch_size=auto", "accumulation=effective_batch", "accumulation.size=4")
    code, said, written = planned("gpu=2GiB", "ram=64GiB", *typed, *auto)
    assert code == 0 and written["chosen"] and "gpu=" not in said.splitlines()[0]


def test_plan_of_a_run_that_does_not_fit_exits_with_code_2(planned):
    code, said, _ = planned("gpu=1MiB", "ram=64GiB", "search=false")
    assert code == 2 and "It does not fit a card" in said


def test_plan_with_device_cpu_ignores_a_present_card(planned, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(cards, "here", lambda: cards.named("rtx3060"))
    code, said, _ = planned("device=cpu", "search=false", "ram=64GiB")
    assert code == 0 and "card" not in said


@pytest.mark.matrix
def test_plan_for_gpu_rtx3060_counts_11_63_gib_and_a_cuda_context_of_0_45_gib(planned):
    code, said, written = planned("gpu=rtx3060", "ram=64GiB", *FOUR)
    assert code == 0 and "include 0.45 GiB for the CUDA context" in said
    assert "Card: rtx3060 (11.63 GiB, as torch reports it)." in said and "gpu=" not in said.splitlines()[0]
    assert written["gpu_bytes"] == round(11.63 * 2**30)
    auto = ("batch_size=auto", "accumulation=effective_batch", "accumulation.size=4")
    assert planned("gpu=rtx3060", "ram=64GiB", *FOUR, *auto)[2]["chosen"]


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["gpu=12"], "gpu=12: give a size such as 12GiB"),
        (["gpu=12TB"], "gpu=12TB: give a size such as 12GiB"),
        (["ram=-3GiB"], "ram=-3GiB: give a size such as 12GiB"),
        (["gpu=0GiB"], "gpu=0GiB: give a size such as 12GiB"),
        (["search=maybe"], "search=maybe: give true or false"),
        (["model=gpt5"], "model=gpt5: there is no such choice. Type model=gpt2, or one of "),
        (["model=hf", "model.name=no/such-model"], "its configuration cannot be read"),
        (["gpu=1GiB", "optim.in_backward=true"], "Type clip=null"),
        (["gpu=rtx3070"], "or a card: rtx3060, "),
        (["gpu=t4", "precision=bf16", "search=false"], "Type precision=16, 16-master or 32"),
        (["devices=8", "search=false"], "Type strategy=ddp if the model fits on each device, or strategy=fsdp"),
        (["devices=0"], "devices=0: give a whole number of at least 1"),
        (["devices=2", "strategy=single"], "strategy=single: there is no such choice"),
        (["devices=2", "strategy=fsdp", "precision=bf16-master"], "Type precision=bf16 or bf16-sr for several"),
        (["gpu=abc"], "gpu=abc: give a size such as 12GiB"),
        (["may_change=model"], "may_change=model: give precision, optim, or both as precision,optim, or null"),
        (["rows=-1"], "rows=-1: give a whole number of at least 1"),
        (["batch_size=auto", "search=false"], "batch_size=auto: search=false predicts one run"),
    ],
)
def test_invalid_plan_command_is_refused_with_a_message_and_no_traceback(planned, typed, says):
    code, said, written = planned(*typed)
    assert code != 0 and says in said and "Traceback" not in said and written is None


def asks(*_, **__):
    raise RuntimeError("data-dependent: how many tokens does expert 3 get?")


@pytest.mark.parametrize("search", ["false", "true"])
def test_plan_of_an_untraceable_model_is_refused_and_suggests_plan_off(planned, monkeypatch, search):
    monkeypatch.setattr(prediction if search == "false" else extend, "trace", asks)
    code, said, written = planned("gpu=2GiB", "ram=64GiB", f"search={search}", *MODELS["gpt2"])
    assert code == 1 and written is None and "Traceback" not in said
    assert "cannot be predicted: this model cannot be traced by shape (RuntimeError: data-dependent" in said
    assert "Type plan=off memory.limit=10GiB (or another limit) to train without a prediction." in said


def test_error_inside_the_planner_keeps_its_traceback(planned, monkeypatch):
    """A bug in the planner is printed with its traceback, and with the advice to type plan=off."""

    monkeypatch.setattr("lowmem.plan.tracing.trace.of_phases", None)
    code, said, _ = planned("gpu=1GiB", "search=false")
    assert code == 1 and "Traceback" in said and "Type plan=off to start without a prediction" in said


@pytest.mark.usefixtures("as_with_compiler")
def test_plan_of_compiled_blocks_is_marked_as_an_estimate(planned):
    _, said, written = planned("gpu=2GiB", "search=false", "compile=blocks")
    assert "An estimate: compiled blocks cannot be traced" in said and written["recipes"][0]["estimate"]


def test_planned_fsdp_on_8_devices_divides_weights_and_optimizer_state(planned):
    typed = ("gpu=2GiB", "ram=64GiB", "search=false", *MODELS["gpt2"])
    one = planned(*typed)[2]["recipes"][0]["phases"]
    eight = planned(*typed, "devices=8", "strategy=fsdp")[2]["recipes"][0]["phases"]
    # Each of the 40 tensors is divided along its first dimension. An element has 12 bytes: a weight and two moments in
    # fp32. Most devices get 38 of the embedding's 300 rows. AdamW's step counts are not divided.
    embedding, counts, workspaces = 3 * 4 * 64, 40 * 4, 2 * cards.WORKSPACE
    alone, of_eight = (phases["save"]["device"] - workspaces for phases in (one, eight))
    expected = (alone - 300 * embedding - counts) / 8 + 38 * embedding + counts
    assert of_eight == pytest.approx(expected, abs=4)


@pytest.mark.matrix
def test_gemma_2_from_a_folder_is_planned_and_trained_with_the_predicted_peak(
    planned, command, config, small, tmp_path
):
    """Gemma 2 alternates two kinds of blocks, soft-caps attention scores and logits, and does not support sdpa
    attention."""
    import torch
    from transformers import Gemma2Config, Gemma2ForCausalLM

    from lowmem.data import token_store
    from lowmem.data.sources import text_files

    data = config().data
    texts = text_files.text(data.path, data.pattern, data.val_fraction)
    token_store.tokenize(texts, tmp_path / "cache", 300).tokenizer.save_pretrained(tmp_path / "gemma2")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "head_dim": 16, "vocab_size": 300}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 8, "pad_token_id": 0}
    torch.manual_seed(0)
    Gemma2ForCausalLM(Gemma2Config(**shape)).to(torch.bfloat16).save_pretrained(tmp_path / "gemma2")
    typed = ("model=hf", f"model.name={tmp_path / 'gemma2'}", "lr=1e-3", "batch_size=2")
    code, said = command(*typed, "max_steps=3", "val_every=3", "plan=check", "optim=adamw")
    assert code == 0, said
    measured = json.loads((tmp_path / "run" / "summary.json").read_text())
    predicted = measured["predicted"]["phases"]["backward"]["device"]
    assert predicted == measured["peak_bytes_by_phase"]["backward"]["device"]

    code, said, written = planned(*typed, "search=false", "gpu=2GiB", "ram=64GiB")
    assert code == 0 and "It fits a card" in said and written["recipes"][0]["estimate"] is None
    some = ("precision=bf16", "optim=adamw", "gradient_checkpointing=every_layer", "loss=full")
    code, said, written = planned(*typed, *some, "gpu=2GiB", "ram=64GiB")
    assert code == 0 and " model=hf " in said.splitlines()[0], said
    assert all(recipe["fits"] and recipe["estimate"] is None for recipe in written["recipes"])


@pytest.mark.parametrize(("typed", "size"), [("precision=bf16", 4), ("precision=bf16-true", 2)])
def test_planned_end_of_a_run_on_a_card_needs_host_memory_only_for_the_export(planned, typed, size):
    """Lightning's teardown would copy the weights and both moments of AdamW to the host, which needs three times the
    memory of the export."""
    _, _, written = planned("gpu=2GiB", typed, "optim=adamw", "loss=full", "search=false")
    (recipe,) = written["recipes"]
    ends, trains = (recipe["phases"][name]["host"] for name in ("save", "evaluation"))
    assert ends - trains == size * recipe["parameters"]
