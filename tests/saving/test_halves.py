"""Tests checkpoints that store an fp32 weight as two halves of 16 bits: every reader gets exactly the fp32 weight."""

import mmap
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from test_checkpoint import EACH

from host_memory import linux
from lowmem.command.generate import generate
from lowmem.saving.checkpoint import complete
from lowmem.step.fp32_halves import halves
from lowmem.system.process import page_out
from same import last, same

RUN = ("precision=bf16-master", "lr=1e-2", "max_steps=4")


def in_halves(run, folder):
    """Copies a run, and splits the fp32 weights of its only checkpoint into halves."""
    shutil.copytree(run, folder)
    (path,) = (folder / "checkpoints").glob("*")
    content = torch.load(path, weights_only=True)
    state, once = content["state_dict"], {}
    for name, wide in state.items():
        if wide.dtype == torch.float32 and wide.data_ptr() not in once:  # a tied weight is stored once
            once[wide.data_ptr()], content.setdefault("rests", {})[name] = halves(wide)
    content["state_dict"] = {name: once.get(wide.data_ptr(), wide) for name, wide in state.items()}
    torch.save(content, path)
    return folder


@pytest.fixture
def stopped(fit, tmp_path):
    """Returns (folder of a run that stopped after step 3 of 4, folder of a copy whose checkpoint has halves)."""
    _, run = fit(*RUN, "max_steps=3", "scheduler.total_steps=4", folder="part")
    return run, in_halves(run, tmp_path / "halves")


slow = pytest.mark.matrix


@pytest.mark.parametrize(
    ("precision", "forgets"),
    [("32", True), *(pytest.param(p, False, marks=slow) for p in ("32", "bf16-sr", "bf16-master"))],
)
def test_resume_from_16_bit_halves_equals_resume_from_fp32_weights_unless_lower_halves_are_ignored(
    fit, stopped, monkeypatch, precision, forgets
):
    """Wrong on purpose (forgets=True): only the upper halves are loaded."""
    if forgets:
        monkeypatch.setattr("lowmem.training.module.joined", lambda upper, rest: upper)
    one, other = (fit(*RUN, f"precision={precision}", f"resume={run}", folder=f"{run.name} on")[1] for run in stopped)
    assert same(last(one)["state_dict"], last(other)["state_dict"]) != forgets


@linux
def test_page_out_releases_only_the_pages_of_the_mapped_file(tmp_path, monkeypatch):
    flat = torch.arange(4 * EACH, dtype=torch.int16)
    torch.save({str(i): flat[i * EACH : (i + 1) * EACH] for i in range(4)}, tmp_path / "x.ckpt")
    mapped = torch.load(tmp_path / "x.ckpt", mmap=True, weights_only=True)
    asked = []
    let_go = SimpleNamespace(madvise=lambda start, size, _: asked.append((start.value, size.value)))
    monkeypatch.setattr("lowmem.system.process.ctypes.CDLL", lambda _: let_go)
    page_out(mapped.values())
    ((start, size),) = asked
    first = mapped["0"].data_ptr()
    assert first <= start and start + size <= first + flat.nbytes and size > flat.nbytes - 2 * mmap.PAGESIZE


# --- runs with streamed weights ---------------------------------------------------------------------------------------

STREAMED, RESIDENT = ("weights=streamed", "gradient_checkpointing=every_layer"), ("weights=resident",)
LONG = ("lr=1e-2", "max_steps=6", "accumulation=fixed", "accumulation.batches=2", "batch_size=2")


MASTERS, FP16 = ("precision=bf16-master",), ("precision=16-master",)
SR = ("precision=bf16-sr",)
TILED = (*MASTERS, "loss=tiled", "loss.columns=96")  # with this loss, embedding and head are streamed, too
ROUNDS = [(MASTERS, STREAMED, RESIDENT), (TILED, RESIDENT, STREAMED)]
MORE = [
    *((how, STREAMED, STREAMED) for how in (MASTERS, TILED, FP16, SR)),
    *((MASTERS, RESIDENT, STREAMED), (TILED, STREAMED, RESIDENT)),
    *((FP16, STREAMED, RESIDENT), (FP16, RESIDENT, STREAMED)),
    *(((*MASTERS, "optim=adamw8bit", "clip=null"), there, STREAMED) for there in (STREAMED, RESIDENT)),
]


@pytest.mark.rows("how0-first0-then0")
@pytest.mark.parametrize(("how", "first", "then"), [*ROUNDS, *(pytest.param(*r, marks=slow) for r in MORE)])
def test_resume_that_keeps_or_switches_streamed_weights_equals_the_unbroken_run(fit, how, first, then):
    lines = (*how, *LONG)
    _, whole = fit(*lines, *then, folder="whole")
    _, part = fit(*lines, *first, "max_steps=3", "scheduler.total_steps=6", folder="part")
    _, again = fit(*lines, *then, f"resume={part}", folder="again")
    one, other = last(whole), last(again)
    for key in ("state_dict", "optimizer_states", "lowmem", "lr_schedulers"):
        assert same(one[key], other[key]), key
    written = torch.load(complete(part / "checkpoints")[-1], weights_only=True)
    assert ("rests" in written) == (how[:1] == MASTERS and first is STREAMED)


@pytest.mark.parametrize(
    "how", [TILED, *(pytest.param(how, marks=slow) for how in (MASTERS, FP16, SR, (*SR, *TILED[1:])))]
)
def test_streamed_checkpoint_evaluated_or_exported_has_the_val_loss_and_model_file_of_its_run(fit, config, how):
    """The run is evaluated and exported twice: with streamed and with resident weights."""
    lines = (*how, *STREAMED)
    summary, run = fit(*lines, "max_steps=2")
    model = (run / "model" / "model.safetensors").read_bytes()
    content = last(run)["state_dict"]
    for name, tensor in load_file(run / "model" / "model.safetensors").items():
        assert same(tensor, content[f"model.{name}"])
    for number, weights in enumerate((STREAMED, RESIDENT)):
        evaluated, _ = fit(*how, *weights, f"evaluate={run}", folder=f"evaluated {number}")
        assert evaluated["val_loss"] == summary["val_loss"]
        _, folder = fit(*how, *weights, f"export={run}", folder=f"exported {number}")
        assert (folder / "model" / "model.safetensors").read_bytes() == model
    assert generate(config(*lines, f"generate={run}", "prompt=def", "max_new_tokens=4"))
