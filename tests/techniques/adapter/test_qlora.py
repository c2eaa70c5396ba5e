"""Tests runs with QLoRA: evaluation and further training of their folders, and predictions of their memory."""

import csv
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from lowmem.command.generate import generate
from lowmem.plan.prediction import needs
from lowmem.plan.search.extend import extended
from lowmem.plan.target import Target
from lowmem.plan.tracing.trace import trace
from lowmem.system.errors import Refused
from lowmem.techniques.adapter.lora import load

pytestmark = pytest.mark.kernels
WORDS = ("def", "return", "self", "for", "in", "if", "else", "class", "import", "x", "=", "(", ")", ":", "0", "1")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Returns the folder of a small base model with a tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 20}
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt2", **sizes, bos_token_id=17, eos_token_id=17)
    ).save_pretrained(folder)
    ids = {word: number for number, word in enumerate([*WORDS, "?", "<end>"])}
    tokenizer = Tokenizer(WordLevel(ids, "?"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="?").save_pretrained(folder)
    return folder


@pytest.fixture
def of_base(base, fit):
    def run(*lines, folder):
        return fit("model=hf", f"model.name={base}", "seq_len=16", "max_steps=3", "lr=1e-2", *lines, folder=folder)

    return run


@pytest.mark.rows("*qlora*")
@pytest.mark.parametrize("adapter", ["lora", "dora", "qlora"])
def test_evaluated_adapter_folder_has_the_val_loss_of_its_run(of_base, adapter):
    summary, run = of_base(f"adapter={adapter}", "precision=bf16-master", folder="run")
    assert not (run / "model" / "config.json").exists()
    again, _ = of_base("precision=bf16-master", f"evaluate={run / 'model'}", folder="again")
    assert again["val_loss"] == pytest.approx(summary["val_loss"], rel=1e-5)
    assert again["parameters"] == summary["parameters"] > summary["trained_parameters"]


def test_merged_qlora_model_has_the_val_loss_of_its_run(of_base, base):
    summary, run = of_base("adapter=qlora", "merge=true", folder="run")
    merged, _ = of_base(f"evaluate={run / 'model'}", folder="merged")
    alone, _ = of_base(f"evaluate={base}", folder="alone")
    assert merged["val_loss"] == pytest.approx(summary["val_loss"], rel=1e-5)
    assert abs(alone["val_loss"] / summary["val_loss"] - 1) > 0.01


@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_adapter_merged_into_a_16_bit_base_is_exported_in_fp32(of_base, adapter):
    """In 16 bits a part of the trained change would be lost to rounding."""
    lines = (f"adapter={adapter}", "precision=bf16-master", "merge=true")
    summary, run = of_base(*lines, folder="run")
    held = load_file(run / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in held.values()} == {torch.float32}
    again, _ = of_base(f"evaluate={run / 'model'}", folder="wide")
    assert again["val_loss"] == pytest.approx(summary["val_loss"], rel=1e-3)


@pytest.mark.rows("bf16-master")
@pytest.mark.parametrize("trained", ["32", "bf16-master"])
def test_qlora_base_is_quantized_from_its_training_dtype_when_opened_in_fp32_or_bf16_master(
    of_base, trained, monkeypatch
):
    """Weights that are rounded to another dtype before they are quantized get different 4-bit codes. In the last,
    deliberately wrong evaluation the base is quantized from the dtype of the evaluation."""
    _, run = of_base("adapter=qlora", f"precision={trained}", folder="run")
    opened = []
    monkeypatch.setattr(
        "lowmem.training.build.load", lambda network, path: (load(network, path), opened.append(network))
    )
    for precision in ("32", "bf16-master"):
        of_base(f"precision={precision}", f"evaluate={run / 'model'}", folder=f"of{precision}")
    of_base("adapter=qlora", f"adapter.path={run / 'model'}", "max_steps=1", folder="on")
    same = [torch.cat([p for name, p in one.named_buffers() if name.endswith("codes")]) for one in opened]
    assert len(same) == 3 and torch.equal(same[0], same[1]) and torch.equal(same[0], same[2])
    monkeypatch.setattr("lowmem.training.build.base_dtype", lambda path: None)
    other = "32" if trained == "bf16-master" else "bf16-master"
    of_base(f"precision={other}", f"evaluate={run / 'model'}", folder="wrong")
    wrong = torch.cat([p for name, p in opened[-1].named_buffers() if name.endswith("codes")])
    assert not torch.equal(wrong, same[0])


def test_qlora_folder_is_refused_with_adapter_lora_and_a_lora_folder_warns_with_qlora(of_base, caplog):
    _, four = of_base("adapter=qlora", "max_steps=1", folder="four")
    _, plain = of_base("adapter=lora", "max_steps=1", folder="plain")
    with pytest.raises(Refused, match=r"trained on a base model quantized to 4 bits.* Type adapter=qlora"):
        of_base("adapter=lora", f"adapter.path={four / 'model'}", folder="refused")
    assert "to 4 bits. If it was not" not in caplog.text
    of_base("adapter=qlora", f"adapter.path={plain / 'model'}", "max_steps=1", folder="warned")
    assert "does not say that its base model was quantized to 4 bits" in caplog.text


def test_evaluation_of_an_adapter_folder_without_a_base_model_name_is_refused(of_base, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(Refused, match="does not name its base model"):
        of_base(f"evaluate={tmp_path}", folder="run")


# --- the plan --------------------------------------------------------------------------------------------------------

PHASES = ("forward", "backward", "step", "evaluation")
SHAPE = (
    *("model.architecture.n_embd=64", "model.architecture.n_layer=7", "model.architecture.vocab_size=300"),
    *("seq_len=64", "batch_size=4"),
)


def resolved(cfg):
    return cfg.resolved()


def far_off(config, folder, lines, adapter):
    """Returns the phases whose traced peak is more than 1 % off the measured peak."""
    with (folder / "memory.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["live_peak_bytes"]]
    steady = [row for row in rows if row["step"] == "3" or row["phase"] == "evaluation"]
    measured = {row["phase"]: int(row["live_peak_bytes"]) for row in steady}
    phases = trace(resolved(config(f"adapter={adapter}", *lines)), on_card=False).phases
    return [phase for phase in PHASES if abs(phases[phase].total / measured[phase] - 1) > 0.01]


@pytest.mark.rows("bf16-every_layer")
@pytest.mark.parametrize("checkpointing", ["none", "every_layer"])
@pytest.mark.parametrize("precision", ["32", "bf16", "bf16-master"])
def test_predicted_peaks_of_a_qlora_run_are_within_1_percent_of_the_measured_peaks(
    config, fit, precision, checkpointing
):
    lines = ["model.architecture.n_layer=3", *(line for line in SHAPE if "n_layer" not in line)]
    lines += ["max_steps=3", "val_every=3", f"precision={precision}", f"gradient_checkpointing={checkpointing}"]
    _, folder = fit("adapter=qlora", *lines)
    assert far_off(config, folder, lines, "qlora") == []
    assert far_off(config, folder, lines, "lora")  # wrong: the base of LoRA is not in 4 bits


@pytest.mark.matrix
def test_qlora_plan_extended_from_a_few_blocks_is_within_1_percent_of_the_full_trace(config):
    """4-bit weights are buffers. The extrapolated trace must include the buffers of all blocks."""

    def composed(recipe):
        lines = [line for line in SHAPE if line.split("=")[0] not in recipe]
        return resolved(config(*lines, *(f"{key}={value}" for key, value in ({"adapter": "qlora"} | recipe).items())))

    recipe = {"precision": "bf16-master", "optim": "adamw", "gradient_checkpointing": "every_layer", "loss": "full"}
    run = composed(recipe | {"batch_size": "4"})
    found, full = extended(run, on_card=True), replace(trace(run, on_card=True), events=[])
    short, exact = (needs(one, run, Target(on_card=True), 0) for one in (found, full))
    for phase, need in exact.phases.items():
        assert short.phases[phase].device == pytest.approx(need.device, rel=0.01), phase
        assert short.phases[phase].host == pytest.approx(need.host, rel=0.01), phase
    assert found.blocks == full.blocks and 7 * full.blocks[1] < found.weights
    lora = trace(composed(recipe | {"batch_size": "4", "adapter": "lora"}), on_card=True)
    assert found.parameters == full.parameters == lora.parameters
    assert full.weights < 0.6 * lora.weights


@pytest.mark.matrix
def test_predicted_host_memory_of_saving_merged_qlora_grows_by_4_bytes_per_parameter(config):
    cfg = resolved(config("adapter=qlora", "precision=bf16-master", *SHAPE))
    shapes = trace(cfg, on_card=True)
    both = (cfg.knowing(merge=on) for on in (False, True))
    alone, merged = (needs(shapes, one, Target(on_card=True), 0).phases["save"].host for one in both)
    assert merged - alone == 4 * shapes.parameters


@pytest.mark.rows("qlora")
@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_generate_with_an_adapter_run_repeats_the_last_greedy_sample_of_the_run(of_base, config, adapter):
    lines = (f"adapter={adapter}", "sample_tokens=6", "sample_prompts=[def return]")
    _, run = of_base(*lines, folder="run")
    row = json.loads((run / "samples.jsonl").read_text().splitlines()[-1])
    assert row["greedy"] and not (run / "model" / "config.json").exists()
    assert generate(config(f"generate={run}", "prompt=def return", "max_new_tokens=6")) == row["greedy"]


@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_push_of_an_adapter_whose_base_model_is_a_local_folder_is_refused(of_base, adapter):
    with pytest.raises(Refused, match=r"push=me/it: this adapter needs its base model .*, a folder .* Type merge=true"):
        of_base(f"adapter={adapter}", "max_steps=1", "push=me/it", folder="run")
