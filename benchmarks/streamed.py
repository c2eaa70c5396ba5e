"""Weights that stream (weights=streamed): 8B parameters trained here, bytes, the link, and what it costs in time.

python -m benchmarks.streamed --part 8b        # Llama-3.1-8B from a random start: 20 minutes, 21 GiB of memory
python -m benchmarks.streamed --part reach     # device and host bytes by shape: no memory, some minutes
python -m benchmarks.streamed --part cpu       # beside resident weights, on an idle machine: 10 minutes, 6 GiB
python -m benchmarks.streamed --part link      # bytes of the link, counted beside the formula: seconds
python -m benchmarks.streamed --part picture   # docs/streamed-step.png: a minute

Without --part all of them, one after the other. Each keeps what the others left in results/streamed.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import psutil

from benchmarks import anatomy, turns
from benchmarks.runner import RESULTS, ROOT, environment, machine, measure, result, trained, write
from lowmem.units import GIB, MIB

QUIET = ["sample_tokens=0", "val_every=1000", "val_sequences=1", "save_every=1000", "logger=none", "plan=off"]

# --- 8B, trained here -------------------------------------------------------------------------------------------------

LLAMA = ["model=llama-3.1-8b", "model.pretrained=false"]
NO_MASTERS = ["precision=bf16-sr", "optim=adafactor", "weights=streamed", "loss=tiled", "clip=null", "batch_size=1"]
EIGHT = [
    *(*LLAMA, *NO_MASTERS, "gradient_checkpointing=every_layer", "seq_len=512", "max_steps=3", *QUIET),
    *("lr=1e-3", "scheduler=constant", "log_every=1", "+trainer.limit_val_batches=0"),
]
SMALLER = [f"model.architecture.{d}" for d in ("hidden_size=1024", "intermediate_size=3584", "num_hidden_layers=8")]
SMALLER += [f"model.architecture.{d}" for d in ("num_attention_heads=8", "num_key_value_heads=2")]
RESIDENT_ASKED = 21 * GIB
ENDED = 0.5 * GIB  # of memory left on the machine: below it the run is ended, and not somebody else's


class Told:
    """Says on the terminal what a long run has got to."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    def __call__(self, what: str) -> None:
        seconds, resident = time.perf_counter() - self.start, psutil.Process().memory_info().rss
        print(f"{seconds:7.1f} s  {resident / GIB:5.2f} GiB  {what}", file=sys.stderr, flush=True)


def eight(more: Sequence[str] = ()) -> dict:
    """A training without checkpoints and without an export, which would be 16 GB each."""
    from lightning.pytorch import Callback

    from lowmem import training
    from lowmem.check import check
    from lowmem.overrides import composed
    from lowmem.plan.job import resolved
    from lowmem.quiet import quiet

    tell, losses, moments = Told(), [], []

    class Telling(training.Stop):
        def on_fit_start(self, *_) -> None:
            tell("the model is built, and its weights have moved in")

        def on_train_start(self, trainer, *_) -> None:
            super().on_train_start(trainer, *_)
            moments.append(time.perf_counter())

        def on_before_backward(self, trainer, module, loss) -> None:
            tell(f"step {trainer.global_step + 1}: forward done")

        def on_train_batch_end(self, trainer, module, outputs: dict, *_) -> None:
            losses.append(float(outputs["loss"]))
            moments.append(time.perf_counter())
            tell(f"step {trainer.global_step}: loss {losses[-1]:.4f}")
            super().on_train_batch_end(trainer, module)

    assert issubclass(Telling, Callback)
    training.Stop = Telling
    cfg = resolved(composed([*EIGHT, *more]), on_card=False)
    check(cfg, {})
    quiet()
    tell("starts")
    with training.trained(cfg, Path(os.environ["ROW_FOLDER"]), keeps=False) as run:
        tell("trained")
        return {
            "parameters": sum(p.numel() for p in run.module.parameters()),
            "losses": losses,
            "seconds_per_step": [after - before for before, after in zip(moments, moments[1:], strict=False)],
            "seconds": time.perf_counter() - tell.start,
            "peak_bytes": run.meter.peak_bytes,
            "peak_bytes_by_phase": run.meter.by_phase(),
            "peak_bytes_by_category": run.meter.by_category(),
            "host_tensors": max(row.get("host_tensor_bytes", 0) for row in run.meter.rows()),
            "rss_before_model": run.rss_before_model,
        }


def watched(arguments: Sequence[str]) -> dict:
    """A row whose resident memory is watched from outside, and which is ended before the machine has none left."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "stdout"
        with out.open("w") as stdout:
            command = [sys.executable, *arguments]
            process = subprocess.Popen(command, cwd=ROOT, env=environment(folder), stdout=stdout)
        one, highest, least = psutil.Process(process.pid), 0, psutil.virtual_memory().available
        while process.poll() is None:
            highest = max(highest, _resident(one))
            least = min(least, psutil.virtual_memory().available)
            if least < ENDED:
                process.kill()
                raise SystemExit(f"ended: {highest / GIB:.2f} GiB resident, and the machine has no memory left")
            time.sleep(0.02)
        found = result(arguments, process.wait(), out.read_text(), "")
    return found | {"rss_peak": highest, "least_available": least}


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.Error:  # it has just ended
        return 0


def table_of_eight(one: Mapping) -> str:
    losses = ", ".join(f"{loss:.3f}" for loss in one["losses"])
    seconds = ", ".join(f"{s:.0f}" for s in one["seconds_per_step"])
    asked = "" if one["rss_peak"] <= RESIDENT_ASKED else " (missed)"
    return "\n".join(
        [
            f"`{' '.join(EIGHT[:13])}`, on this CPU, from a random start, nothing saved:",
            "",
            "| parameters, M | losses | seconds of each step | seconds in all | highest resident GiB | asked | device GiB |",
            "|---|---|---|---|---|---|---|",
            f"| {one['parameters'] / 1e6:,.0f} | {losses} | {seconds} | {one['seconds']:.0f} "
            f"| {one['rss_peak'] / GIB:.2f}{asked} | <= 21 | {one['peak_bytes']['device'] / GIB:.2f} |",
        ]
    )
