"""Trains GPT-2 XL (1558M parameters) with master weights on the host, and counts the bytes that a card needs for it.

python -m benchmarks.gpt2_xl             # about 20 minutes on two cores, 20 GiB of memory, 20 GiB of disk

For a card, the peak bytes of experiment=gpt2_xl_12gb are counted by category on fake tensors, which have shapes but no
memory. On the CPU, GPT-2 XL is trained from random weights with precision=bf16-master and 8-bit AdamW, on 1 x 256
tokens per step. Each run has its own process. The resident memory of the process is measured from its start to its end,
so the building of the model, the checkpoint and the export are included. If there is a CUDA device,
experiment=gpt2_xl_12gb is also run on it, once under a cap of 12 GiB and once under a cap of 6 GiB.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil

from benchmarks.claims import xl
from benchmarks.runner import ROOT, measure, medians, options_of, stored, write
from lowmem.system.units import GIB

MODEL = [
    "model=gpt2-xl",
    "model.pretrained=false",
    *(f"model.architecture.{d}_pdrop=0.0" for d in ("resid", "embd", "attn")),
]
SHORT = ["seq_len=256", "batch_size=1", "scheduler=constant", "lr=5e-5", "max_steps=10", "log_every=1", "logger=csv"]
QUIET = ["val_every=1000", "val_sequences=4", "sample_tokens=0", "save_every=1000"]
RECIPE = ["precision=bf16-master", "optim=adamw8bit", "gradient_checkpointing=every_layer", "loss=chunked"]
ROWS = {
    "without clipping": [*RECIPE, "clip=null"],
    "global-norm clipping": RECIPE,
}
ALONE = "forward and backward alone"
CAPS = ("12GiB", "6GiB")


def watched(arguments: list[str], seconds: float | None = None) -> tuple[dict, list[dict], list[dict], int]:
    """Runs train.py in a separate process and watches its resident memory.

    Args:
        seconds: time limit, after which the run is killed; None: no limit.

    Returns:
        (summary, rows of memory.csv, rows of metrics.csv, highest resident bytes). If the run was killed before it
        wrote a summary, the summary is {}.
    """
    folder, until = Path(os.environ["ROW_FOLDER"]), time.monotonic() + (seconds or float("inf"))
    with (folder / "said").open("w") as output:
        command = [sys.executable, "train.py", *arguments]
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        highest = 0
        while process.poll() is None and time.monotonic() < until:
            try:
                highest = max(highest, psutil.Process(process.pid).memory_info().rss)
            except psutil.Error:
                break
            time.sleep(0.02)
    if time.monotonic() >= until:
        process.kill()
    if process.wait() and time.monotonic() < until:
        raise SystemExit((folder / "said").read_text()[-3000:])
    run = Path(next(a for a in arguments if a.startswith("hydra.run.dir=")).split("=", 1)[1])
    summary = json.loads((run / "summary.json").read_text()) if (run / "summary.json").exists() else {}
    return summary, *(_rows(run / name) for name in ("memory.csv", "metrics.csv")), highest


def _rows(file: Path) -> list[dict]:
    """Returns the rows of a csv file; [] if the file does not exist. Omits incomplete rows, which a killed run may
    leave."""
    if not file.exists():
        return []
    with file.open(newline="") as lines:
        return [row for row in csv.DictReader(lines) if None not in row.values()]


def row(name: str) -> dict:
    """Measures a run, including its checkpoint and its export, and then another run that resumes from this
    checkpoint."""
    folder = Path(os.environ["ROW_FOLDER"])
    first, again = folder / "first", folder / "again"
    summary, memory, metrics, highest = watched([*MODEL, *SHORT, *QUIET, *ROWS[name], f"hydra.run.dir={first}"])
    peaks = {
        phase: [int(r["rss_peak_bytes"]) for r in memory if r["phase"] == phase] for phase in ("load", "step", "save")
    }
    before = [int(r["rss_bytes"]) for r in memory if r["phase"] == "step"][-1]
    checkpoint = next((first / "checkpoints").glob("*.ckpt")).stat().st_size
    _, resumed, _, _ = watched([f"resume={first}", "max_steps=12", f"hydra.run.dir={again}"])
    steady = [int(r["rss_peak_bytes"]) for r in resumed if r["phase"] in ("forward", "backward", "step")]
    return {
        "seconds_per_step": summary["seconds_per_step"],
        "losses": [float(r["train_loss"]) for r in metrics if r["train_loss"]],
        "rss_peak": highest,
        "device_peak": summary["peak_bytes"]["device"],
        "save_rise": peaks["save"][-1] - before,
        "checkpoint": checkpoint,
        "resume_peak": next(int(r["rss_peak_bytes"]) for r in resumed if r["phase"] == "load"),
        "resume_steady": max(steady),
    }


def alone() -> dict:
    """Returns the median seconds of a forward and backward pass without an optimizer. Each gradient is freed as soon as
    it has been computed."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from lowmem.techniques.gradient_checkpointing.policies import every_layer
    from lowmem.techniques.loss.cross_entropy import Chunked

    shape = {"n_embd": 1600, "n_layer": 48, "n_head": 25, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **shape), dtype=torch.bfloat16).train()
    every_layer(model)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    seconds = []
    for _ in range(6):
        ids = torch.randint(0, 50257, (1, 257))
        start = time.perf_counter()
        (Chunked(1024)(model, ids[:, :-1], ids[:, 1:]) / 256).backward()
        seconds.append(time.perf_counter() - start)
    return {"seconds_per_step": median(seconds[2:])}


def capped(cap: str, typed: Sequence[str] = ("device=cuda",), steps: int = 20, seconds: float | None = None) -> dict:
    """Runs experiment=gpt2_xl_12gb (64 x 1024 tokens per optimizer step) under a memory cap. Under the last cap of
    CAPS, which is the smallest, block inputs are offloaded.

    Args:
        cap: limit of device memory, such as 12GiB.
        typed: further overrides.
        steps: number of optimizer steps.
        seconds: time limit, after which the run is killed; None: no limit. The result of a killed run covers its
            completed steps.
    """
    folder = Path(os.environ["ROW_FOLDER"]) / "run"
    lines = ["experiment=gpt2_xl_12gb", "model.pretrained=false", f"memory.limit={cap}", f"max_steps={steps}"]
    lines += ["gradient_checkpointing=offload"] if cap == CAPS[-1] else []
    arguments = [*lines, "log_every=1", "logger=csv", *QUIET, *typed, f"hydra.run.dir={folder}"]
    summary, memory, metrics, highest = watched(arguments, seconds)
    logged = [row for row in metrics if row["train_loss"]]
    return {
        "steps": len(logged),
        "ended_early": not summary,
        **_pace(logged),
        "allocated_peak": _highest(memory, "allocated_peak_bytes") or _highest(memory, "live_peak_bytes"),
        "reserved_peak": _highest(memory, "reserved_peak_bytes"),
        "host_peak": highest,
        "predicted": summary.get("predicted"),
        "last_words": (folder.parent / "said").read_text(errors="replace")[-500:],
        "losses": [float(row["train_loss"]) for row in logged],
    }


def _pace(logged: list[dict]) -> dict[str, float | None]:
    """Returns the median seconds per step and the tokens per second, both without the first logged step. Both are None
    if fewer than two steps are logged."""
    times, tokens = ([float(row[key]) for row in logged] for key in ("seconds", "tokens"))
    if len(logged) < 2:
        return {"seconds_per_step": None, "tokens_per_second": None}
    each = [later - earlier for earlier, later in pairwise(times)]
    return {
        "seconds_per_step": median(each),
        "tokens_per_second": (tokens[-1] - tokens[0]) / (times[-1] - times[0]),
    }


def _highest(rows: list[dict], column: str) -> int | None:
    return max((int(row[column]) for row in rows if row.get(column)), default=None)


def on_the_card() -> dict[str, dict[str, int]]:
    recipe = ["experiment=gpt2_xl_12gb"]
    ways = {"every_layer": recipe, "offload": [*recipe, "gradient_checkpointing=offload"]}
    return {name: xl(4, 1024, *lines) for name, lines in ways.items()}


def table(results: dict, card: dict) -> str:
    lines = [
        "| on the card, GiB | weights | gradients | optimizer | activations | in all |",
        "|---|---|---|---|---|---|",
    ]
    columns = ("weights", "gradients", "optimizer", "activations", "total")
    for name, result in card.items():
        lines.append(f"| {name} | " + " | ".join(f"{result[column] / GIB:.2f}" for column in columns) + " |")
    lines += [
        "",
        "Activations include the head's gradient while the chunked loss sums it: fp32, 0.30 GiB.",
        "",
        "| on the CPU, 1 x 256 tokens | s per step | of forward and backward alone | highest resident GiB | "
        "training state GiB | saving adds GiB | highest while resuming, of the steady state | "
        "loss, first and last three steps |",
        "|---|---|---|---|---|---|---|---|",
    ]
    seconds = medians(results, "seconds_per_step")
    for name in ROWS:
        result = results[name][0]
        losses = [sum(three) / 3 for three in (result["losses"][:3], result["losses"][-3:])]
        lines.append(
            f"| {name} | {seconds[name]:.1f} | {seconds[name] / seconds[ALONE]:.2f} | {result['rss_peak'] / GIB:.2f} "
            f"| {result['checkpoint'] / GIB:.2f} | {result['save_rise'] / GIB:.3f} "
            f"| {result['resume_peak'] / result['resume_steady']:.2f} | {losses[0]:.2f}, {losses[1]:.2f} |"
        )
    lines.append(f"| {ALONE} | {seconds[ALONE]:.1f} | 1.00 | - | - | - | - | - |")
    for cap in CAPS:
        if cap in results:
            result = results[cap][0]
            lines += [
                "",
                f"On a CUDA device under {cap}: {result['tokens_per_second']:,.0f} tokens/s, "
                f"{result['allocated_peak'] / GIB:.2f} GiB allocated and {result['reserved_peak'] / GIB:.2f} reserved.",
            ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="only the table again, from earlier measurements")
    options = options_of(parser, lambda name: alone() if name == ALONE else capped(name) if name in CAPS else row(name))
    import torch

    rows = [ALONE, *ROWS, *(CAPS if torch.cuda.is_available() else ())]
    if options.table:
        results = stored("gpt2_xl")["rounds"]
    else:
        results = measure({name: ["-m", "benchmarks.gpt2_xl", "--row", name] for name in rows}, 1)
    card = on_the_card()
    write("gpt2_xl", {"rounds": results, "card": card}, table(results, card))


if __name__ == "__main__":
    main()
