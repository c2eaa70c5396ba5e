"""Makes run folders with the files that train.py writes, without training."""

import json
import math
import platform
from itertools import product
from pathlib import Path

from lowmem.report import folders
from lowmem.system.units import CATEGORIES, MIB


def finished(folder: Path, overrides: list[str], peak: int = 800 * MIB, speed: float = 1000.0, **more) -> Path:
    """Makes the folder of a finished run of 40 steps, and returns it.

    Args:
        peak: peak of device memory in bytes.
        speed: tokens per second.
        more: further keys of the summary.
    """
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "hydra.yaml").write_text("hydra:\n  job:\n    name: train\n")
    (folder / ".hydra" / "overrides.yaml").write_text("".join(f"- {line}\n" for line in overrides))
    share = dict(zip(CATEGORIES, (0.2, 0.2, 0.4, 0.15, 0.05), strict=True))
    summary = {"interrupted": False, "overrides": overrides, "val_loss": 3.0, "bits_per_byte": 1.2, "device": "cpu"}
    summary |= {"tokens_per_second": speed, "peak_bytes": {"device": peak, "host_rss": 3 * peak}}
    summary |= {"peak_bytes_by_category": {c: int(s * peak) for c, s in share.items()}}
    summary |= {"predicted": {"phases": {"step": {"device": int(1.02 * peak), "host": 0}}}}
    summary |= {"peak_bytes_by_phase": {"step": {"device": peak, "host": 1}}}
    (folder / "summary.json").write_text(json.dumps(summary | more))
    lines = ["step,tokens,seconds,train_loss,val_loss"]
    lines += [f"{step},{100 * step},{step / 10},{5 - step / 20}," for step in range(1, 41)] + ["40,4000,4.1,,3.0"]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    head = ["step", "phase", "rss_peak_bytes", "live_peak_bytes", *(f"{c}_bytes" for c in CATEGORIES)]
    rows = [
        [step, phase, 3 * peak, size, *(int(s * size) for s in share.values())]
        for step in range(1, 41)
        for phase, size in (("forward", peak // 2), ("backward", int(0.9 * peak)), ("step", peak))
    ]
    (folder / "memory.csv").write_text("\n".join(",".join(map(str, row)) for row in [head, *rows]) + "\n")
    lines = [f"{row[1]},{','.join(map(str, row[4:]))}" for row in rows[-3:]]
    (folder / "memory_step.csv").write_text("\n".join(["phase," + ",".join(head[4:]), *lines]) + "\n")
    return folder


# (file, its content, or a dict of the keys to replace in its JSON). Such files are left by runs that were interrupted,
# were killed while they wrote a file, or were made by another version.
DAMAGES = (
    *(("summary.json", {"validation": []} | more) for more in ({}, {"interrupted": True, "val_loss": None})),
    *(("summary.json", {key: value}) for key in ("val_loss", "tokens_per_second") for value in (None, "x", math.nan)),
    *(("summary.json", {"peak_bytes": value}) for value in (None, [], {"device": None}, {"device": math.inf})),
    *(("summary.json", {"peak_bytes_by_category": value}) for value in (None, [1], {"weights": None, "other": 1})),
    ("summary.json", {"tokens_per_second": 0.0, "seconds_per_step": None}),  # of a run without steps
    ("summary.json", {"predicted": {"phases": {"step": {"device": None, "host": 0}}}}),
    ("summary.json", {"device": None, "drive": [], "ranks": {}}),
    *(("summary.json", text) for text in ('{"interrupted": false, "overr', "[]", "", b"\xff\xfe")),
    *(("metrics.csv", text) for text in ("step,tokens,seconds,train_loss,val_loss\n", "", "a," + "x" * 200_000)),
    ("metrics.csv", "step,tokens,seconds,train_loss,val_loss\n1,nan,inf,nan,\n"),
    ("memory.csv", "step,phase,rss_peak_bytes,live_peak_bytes\n"),
    ("memory_step.csv", "phase\n"),
    (".hydra/overrides.yaml", b"\xff\xfe"),
)


def damaged(folder: Path) -> list[str]:
    """Makes an undamaged run, and a run with each of DAMAGES. Returns the names of their folders."""
    finished(folder / "0", ["lr=0.001"])
    for number, (file, content) in enumerate(DAMAGES, start=1):
        path = finished(folder / str(number), ["lr=0.001"]) / file
        if isinstance(content, dict):
            content = json.dumps(json.loads(path.read_text()) | content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return [str(number) for number in range(1 + len(DAMAGES))]


LONG = "data.path=a/folder/whose/name/is/longer/than/any/label/of/an/axis/"


def written_here(folder: Path) -> None:
    """Records in the run folder that the process of the run was on this machine."""
    with (folder / ".hydra" / "hydra.yaml").open("a") as file:
        file.write(f"  callbacks:\n    claim:\n      host: {platform.node()}\n")


def sweep(folder: Path) -> Path:
    """Makes three finished runs (the second needs more memory than the first and is slower), a failed run, a running
    run and two broken runs. Returns their parent folder."""
    finished(folder / "0", [f"{LONG}0", "lr=0.001"], 600 * MIB, 1000.0)
    finished(folder / "1", [f"{LONG}1", "lr=0.002"], 900 * MIB, 900.0)
    finished(folder / "2", [f"{LONG}2", "lr=0.003"], 800 * MIB, 2000.0, device="NVIDIA H200")
    for number in range(3, 7):
        (finished(folder / str(number), [f"{LONG}{number}", f"lr=0.00{number + 1}"]) / "summary.json").unlink()
    (folder / "3" / folders.FAILED).write_text(
        "Traceback (most recent call last):\n  ...\nZeroDivisionError: </script><b>\n"
    )
    (folder / "4" / "summary.json").write_text('{"interrupted": fal')
    written_here(folder / "5")
    (folder / "6" / "memory.csv").write_text("step,phase,live_peak_bytes\n1,forw")
    return folder


def fifty(folder: Path) -> Path:
    """Makes fifty runs that differ in five overrides, some of which are long. Two of the runs failed. Returns their
    parent folder."""
    models = ("some-organisation/a-model-with-a-long-name-0.6B-instruct", "some-organisation/another-long-name-1.7B")
    precisions, optims = ("32", "bf16", "16-master", "bf16-sr", "bf16-master"), ("adamw", "adam8bit", "muon")
    optims += ("paged_adamw8bit", "adafactor")
    for i, (model, precision, optim) in enumerate(product(models, precisions, optims)):
        kept = ("none", "every_layer", "selective", "offload")[i % 4]
        typed = [f"model.name={model}", f"precision={precision}", f"optim={optim}", f"gradient_checkpointing={kept}"]
        typed += [f"{LONG}{i % 7}/of-a-corpus.txt", "model=hf", "max_steps=40"]
        finished(folder / str(i), typed, (300 + 37 * i * i % 4000) * MIB, 400.0 + 613 * i % 2000)
    for i, why in ((7, "OutOfMemory: device memory ran out. Held at the peak, by category: " * 5), (31, "killed")):
        (folder / str(i) / "summary.json").unlink()
        (folder / str(i) / folders.FAILED).write_text(why)
    return folder
