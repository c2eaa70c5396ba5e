"""Tests `python train.py`: the files that it writes, and its error messages."""

import csv
import json
import shlex
import signal
import subprocess
import sys
import time

import pytest
import torch

from conftest import ROOT

SUMMARY_KEYS = {
    "steps",
    "tokens",
    "learned_tokens",
    "learned_tokens_per_second",
    "tokens_per_second",
    "seconds_per_step",
    "first_step_seconds",
    "train_loss",
    "val_loss",
    "peak_bytes",
    "peak_bytes_by_category",
    "parameters",
    "overrides",
    "versions",
}


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """Returns a dict that tests share: the run folder, and what the run has printed once `finished` has started it."""
    return {"folder": tmp_path_factory.mktemp("finished") / "run"}


@pytest.fixture
def finished(command, known):
    """Returns (folder of a run of four steps, what the run has printed). All tests share this run."""
    if "said" not in known:
        code, said = command("sample_tokens=5", "sample_prompts=['def ']", f"hydra.run.dir={known['folder']}")
        assert code == 0, said
        known["said"] = said
    return known["folder"], known["said"]


def test_run_leaves_a_summary_metrics_memory_by_phase_a_picture_and_a_checkpoint(finished):
    run, _ = finished
    summary = json.loads((run / "summary.json").read_text())
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["steps"] == 4 and summary["tokens"] == 4 * 4 * 16
    assert set(summary["peak_bytes"]) == {"device", "host_rss"}
    assert set(summary["peak_bytes_by_category"]) == {"weights", "gradients", "optimizer", "activations", "other"}
    assert sum(summary["peak_bytes_by_category"].values()) == summary["peak_bytes"]["device"]
    measured = summary["measured"]
    assert measured["allocated"] == summary["peak_bytes"]["device"] and measured["device"]["phase"] == "backward"
    assert measured["host"]["total"] == summary["peak_bytes"]["host_rss"] > measured["host"]["libraries"]
    assert "max_steps=4" in summary["overrides"] and "torch" in summary["versions"]
    rows = list(csv.DictReader((run / "metrics.csv").open()))
    assert [int(r["step"]) for r in rows if r["train_loss"]] == [1, 2, 3, 4]
    assert {r["phase"] for r in csv.DictReader((run / "memory.csv").open())} == {
        "load",
        "forward",
        "backward",
        "step",
        "evaluation",
        "save",
    }
    assert (run / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-00000004.ckpt"]


def test_run_prints_its_figures_a_sample_and_the_names_of_its_files_without_a_traceback(finished):
    _, said = finished
    for shown in ("bits per byte", "tokens/s", "activations", "A sample:\ndef ", "samples.jsonl", "summary.json"):
        assert shown in said
    assert "Traceback" not in said


def test_exported_model_has_the_weights_of_the_last_checkpoint_and_a_matching_tokenizer(command, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert command()[0] == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    saved = torch.load(tmp_path / "run" / "checkpoints" / "step-00000004.ckpt", weights_only=True)["state_dict"]
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter, saved[f"model.{name}"]), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    text = "def return self"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert exported.config.eos_token_id == tokenizer.eos_token_id
    assert exported.config.vocab_size >= len(tokenizer)


@pytest.mark.rows("adamw-32", "adafactor-bf16", "adam8bit-16")
@pytest.mark.parametrize("precision", ["32", "16", "bf16"])
@pytest.mark.parametrize("optim", ["adamw", "adam8bit", "adafactor"])
def test_run_with_typed_precision_and_optim_completes_all_steps(command, tmp_path, precision, optim):
    code, said = command(f"precision={precision}", f"optim={optim}")
    assert code == 0, said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert f"precision={precision}" in summary["overrides"] and summary["steps"] == 4


@pytest.mark.rows("loss=chunked", "scheduler=linear", "logger=none")
@pytest.mark.parametrize(
    "choice",
    [
        "optim=adamw8bit",
        "scheduler=constant",
        "scheduler=linear",
        "accumulation=fixed",
        "gradient_checkpointing=every_layer",
        "loss=chunked",
        "logger=none",
    ],
)
def test_run_with_a_single_typed_choice_completes_all_steps(command, tmp_path, choice):
    code, said = command(choice)
    assert code == 0, said
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 4


REFUSED = {
    ("optim=adamx",): ["optim=adamx", "adafactor", "adamw"],
    ("precision=17",): ["precision=17", "bf16"],
    ("learning_rate=1",): ["there is no key learning_rate"],
    ("optim.beta=1",): ["Type optim.betas=1"],
    ("+optim.betaz=1", "+scheduler.foo=2"): ["conf/optim/adamw.yaml", "'betaz'", "conf/scheduler/cosine.yaml", "'foo'"],
    ("batch_size=0",): ["batch_size=0", "at least 1"],
    ("batch_size=many",): ["batch_size=many", "whole number"],
    ("lr=-1", "clip=0", "seq_len=0"): ["lr=-1", "clip=0", "seq_len=0"],
    ("seq_len=257",): ["seq_len=257", "up to 256 tokens"],
    ("model=hf",): ["model.name", "type model.name="],
    ("model=hf", "model.name=nobody/nothing"): ["model.name=nobody/nothing", "model.pretrained=false"],
    ("+model.architecture.n_layers=3",): ["n_layers", "n_layer"],
    ("model.architecture.model_type=gpt99",): ["gpt99"],
    ("resume=/nowhere",): ["resume=/nowhere", "no such"],
    ("device=cuda",): ["device=cuda", "device=cpu"],
    ("device=tpu",): ["device=tpu", "auto, cpu, cuda"],
    ("accumulation=fixed", "accumulation.batches=0"): ["accumulation.batches=0", "a whole number of at least 1"],
    ("data.path=/nowhere",): ["data.path=/nowhere"],
    ("data.pattern=*.nothing",): ["matches data.pattern=*.nothing"],
    ("data.val_fraction=2",): ["val_fraction=2"],
    ("seq_len=200", "data.val_path={tiny}"): ["seq_len=200", "validation"],
    ("data.val_path={empty}",): ["{empty}"],
    ("data.path={tiny}",): ["one sequence needs", "give more text"],
    ("model=hf", "model.name={empty}"): ["safetensors", "model.pretrained=false"],
    ("resume={truncated}",): ["incomplete"],
    ("resume={empty}",): ["no complete checkpoint"],
    ("optim=adamw8",): ["optim=adamw8bit"],
    ("resume={foreign}",): ["not a lowmem checkpoint"],
    ("hydra.run.dir={tiny}/inside",): ["output folder", "hydra.run.dir="],
    ("optim=adam8bit", "optim.embedding_bits=16"): ["8 or 32"],
    ("optim.in_backward=maybe",): ["true or false"],
    ("export_dtype=int8",): ["export_dtype=int8", "float32, bfloat16, float16"],
    ("precision=bf16-master", "precision.early_step=soon"): ["precision.early_step=soon", "true or false"],
    ("model.attention=fast",): ["fast", "model.attention=sdpa"],
    ("model.attention=flash_attention_2",): ["flash", "model.attention=sdpa"],
    ("+trainer.detect_anomalies=true",): ["detect_anomalies", "detect_anomaly"],
}


@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_invalid_command_is_refused_with_a_message_and_leaves_no_run_folder(command, tmp_path, arguments):
    places = {name: tmp_path / name for name in ("tiny", "empty", "truncated", "foreign")}
    places["tiny"].write_text("a few words")
    places["empty"].mkdir()
    (places["empty"] / "config.json").write_text('{"model_type": "gpt2"}')
    torch.save({"x": torch.zeros(1000)}, places["foreign"])
    places["truncated"].write_bytes(places["foreign"].read_bytes()[:-100])
    code, said = command(*(a.format(**places) for a in arguments))
    assert code == 1
    assert "Traceback" not in said
    for part in REFUSED[arguments]:
        assert part.format(**places) in said, said
    assert not (tmp_path / "run").exists()


def test_debug_true_shows_the_traceback_of_a_refusal(command):
    code, said = command("device=cuda", "debug=true")
    assert code == 1 and "Traceback" in said and "Refused" in said


def test_unwritable_cache_folder_is_refused(command, tmp_path):
    (tmp_path / "file").write_text("in the way")
    code, said = command(f"cache_dir={tmp_path}/file/cache")
    assert code == 1 and "Traceback" not in said and f"{tmp_path}/file/cache" in said


def test_unexpected_error_keeps_its_traceback(command, monkeypatch):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("lowmem.training.build.data", broken)
    code, said = command()
    assert code == 1 and "Traceback" in said and "ZeroDivisionError" in said


def test_out_of_memory_error_lists_memory_by_category_and_advice(command, monkeypatch):
    from lowmem.techniques.loss import cross_entropy

    def too_much(model, batch):
        model(**batch.inputs).logits.sum()
        if model.training:
            torch.empty(2**60)  # bytes; no host has so much memory, so the allocator raises an error
        return torch.zeros(())

    monkeypatch.setattr(cross_entropy, "full", too_much)
    code, said = command("model.architecture.n_embd=256", "batch_size=64")
    assert code == 1 and "Traceback" not in said
    lines = [line for line in said.splitlines() if line.endswith(" GiB")]
    held = {line[:18].strip(): float(line.split()[-2]) for line in lines}
    assert list(held) == ["weights", "gradients", "optimizer state", "activations", "temporaries"]
    assert held["weights"] > 0 and held["activations"] > 0
    tries = said[said.index("Try") :]
    order = ["precision=bf16", "optim=adam8bit", "batch_size=32", "gradient_checkpointing=every_layer", "loss=chunked"]
    assert sorted(order, key=tries.index) == order


@pytest.mark.process
def test_help_does_not_import_torch_lightning_transformers_wandb_or_numpy():
    code = (
        "import sys, runpy; sys.argv = ['train.py', '--help']\n"
        "try: runpy.run_path('train.py', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'lightning', 'transformers', 'wandb', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=240
    ).stdout
    assert "Groups: one override swaps a technique" in out and out.strip().endswith("[]")


def test_completed_run_restores_the_earlier_sigint_handler(command):
    before = signal.getsignal(signal.SIGINT)
    assert command()[0] == 0
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.process
def test_run_continues_and_writes_its_model_after_the_reader_of_its_output_has_exited(small, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-u", "train.py", *small, "log_every=1", f"hydra.run.dir={tmp_path}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=120) == 0
    assert (tmp_path / "model" / "model.safetensors").exists() and not (tmp_path / "failed.txt").exists()


@pytest.mark.process
@pytest.mark.parametrize("closed", ["1", "2"], ids=["stdout", "stderr"])
def test_run_with_a_closed_output_stream_writes_its_model(small, tmp_path, closed):
    run = shlex.join([sys.executable, "train.py", *small, f"hydra.run.dir={tmp_path}"])
    done = subprocess.run(f"{run} {closed}>&-", shell=True, cwd=ROOT, capture_output=True, timeout=120)
    assert done.returncode == 0 and (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.process
def test_ctrl_c_ends_a_run_with_a_checkpoint_and_a_summary(small, tmp_path):
    """The run is a separate process, which receives a real signal."""
    arguments = [*(a for a in small if not a.startswith("max_steps")), "max_steps=100000", f"hydra.run.dir={tmp_path}"]
    process = subprocess.Popen(
        [sys.executable, "train.py", *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    metrics = tmp_path / "metrics.csv"
    deadline = time.monotonic() + 120
    while (
        process.poll() is None
        and time.monotonic() < deadline
        and not (metrics.exists() and metrics.read_text().count("\n") > 3)
    ):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 130, said
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["interrupted"] and 0 < summary["steps"] < 100000
    assert (tmp_path / "checkpoints" / f"step-{summary['steps']:08d}.ckpt").exists()
    assert "Traceback" not in said


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32", "bf16", "16-master"])
def test_run_on_a_card_has_a_prediction_a_peak_and_an_exported_model(fit, precision):
    summary, run = fit(f"precision={precision}", "device=cuda", "plan=check", "sample_tokens=8", "val_every=2")
    assert summary["steps"] == 4 and summary["device"] == torch.cuda.get_device_name()
    assert summary["predicted"]["reserved"] > 0 and summary["peak_bytes"]["device"] > 0
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in (run / "model").iterdir()}
