"""Trains a real model with each technique, and measures what it learns and what it forgets.

python -m benchmarks.quality                    # about two hours on two cores
python -m benchmarks.quality --minutes 30       # continues an earlier call for half an hour
python -m benchmarks.quality --only precision   # one part

SmolLM2-135M-Instruct (tests/support/real_model.py) is trained on the modules of transformers with a copyright of 2026,
which are newer than the model. The validation set `new` has whole folders of such modules that are held out. The
validation set `old` has the help texts of the Python language, which the model has probably seen before. Rows with the
same seed train on the same batches. A difference matters only if it is larger than the spread between seeds. Rows with
stored results are not measured again.
"""

import argparse
import math
import os
import pydoc_data.topics
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import mean

import transformers

from benchmarks.runner import machine, options_of, real_model, row, run_train, stored, write
from lowmem.system.process import processor

STEPS, SEEDS = 30, (0, 1, 2)
PRECISIONS = ("32", "bf16", "bf16-master", "bf16-sr", "bf16-true", "16-master")  # each is trained with each of SEEDS
UNTRAINED = "max_steps=1 lr=1e-12"
BASE = [
    *("data=text", "seq_len=256", "batch_size=4", f"max_steps={STEPS}", "scheduler.warmup_steps=4", "val_sequences=32"),
    *("val_every=1000", "save_every=1000", "logger=none", "sample_tokens=0", "plan=off", "lr=5e-5"),
]
HELD_OUT = 8  # every eighth folder is held out
OPTIMIZERS = {
    **dict.fromkeys(("adam8bit", "adamw8bit", "adamw4bit", "adafactor", "muon"), ()),
    "lion8bit": ("lr=1e-5",),
    "sgd": ("lr=0.02",),
}
PARTS: Mapping[str, Mapping[str, list[str]]] = {
    "untrained": {UNTRAINED: ["max_steps=1", "lr=1e-12"]},
    "seeds": {
        f"precision={precision} seed={seed}": [f"precision={precision}", f"seed={seed}"]
        for seed in SEEDS
        for precision in PRECISIONS
    },
    "precision": {f"precision={name}": [f"precision={name}"] for name in ("16", "16-true")},
    "optim": {
        f"optim={name} precision=bf16-master": [f"optim={name}", "precision=bf16-master", *lines]
        for name, lines in OPTIMIZERS.items()
    },
    "adapter": {
        f"adapter={name} precision=bf16": [f"adapter={name}", "precision=bf16", "lr=5e-4"]
        for name in ("lora", "dora", "qlora")
    },
    "lr": {
        f"lr={lr} precision=bf16": [f"lr={lr}", "precision=bf16"] for lr in ("1e-5", "2e-5", "5e-5", "1e-4", "2e-4")
    },
    "weights": {
        "weights=streamed precision=bf16-master optim=adamw8bit clip=null": [
            *("weights=streamed", "precision=bf16-master", "optim=adamw8bit", "clip=null"),
            "gradient_checkpointing=every_layer",
        ]
    },
    "optim_in_fp32": {f"optim={name}": [f"optim={name}", *lines] for name, lines in OPTIMIZERS.items()},
}


def texts(folder: Path) -> list[str]:
    """Writes the training texts and the two validation sets. Returns the overrides that name their folders."""
    train, new, old = (folder / name for name in ("train", "new", "old"))
    for place in (train, new, old):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
    models = Path(transformers.__file__).parent / "models"
    files = [file for file in sorted(models.glob("*/*.py")) if "Copyright 2026" in file.read_text()[:400]]
    numbers = {name: number for number, name in enumerate(sorted({file.parent.name for file in files}))}
    for file in files:
        place = train if numbers[file.parent.name] % HELD_OUT else new
        (place / f"{file.parent.name}_{file.stem}.txt").write_text(file.read_text())
    (old / "topics.txt").write_text("\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items())))
    return [f"data.path={train}", f"data.val_path={{new:{new},old:{old}}}"]


def train(*lines: str) -> dict:
    """Trains a row in this process. Returns the bits per byte of both validation sets, the seconds per step, the peak
    device bytes and the number of trained parameters."""
    folder = Path(os.environ["ROW_FOLDER"])
    model = ["model=hf", f"model.name={real_model()}", f"cache_dir={folder / 'cache'}"]
    summary = run_train([*model, *BASE, *texts(folder / "texts"), *lines])
    sets = {held["name"]: held["bits_per_byte"] for held in summary["validation"]}
    return {
        **sets,
        "seconds_per_step": summary["seconds_per_step"],
        "device_peak": summary["peak_bytes"]["device"],
        "trained_parameters": summary["trained_parameters"],
    }


def table(results: Mapping[str, dict]) -> str:
    """Returns Markdown. The first table compares each row with the fp32 row of the same seed (0 if the row names no
    seed), or with the untrained model if this fp32 row has no result. `seeds` makes the second table."""
    lines = [
        "| `python train.py` ... | bits per byte: new | against fp32 | old | against fp32 | s per step |",
        "|---|---|---|---|---|---|",
    ]
    start = results.get(UNTRAINED)
    for name, figures in results.items():
        plain = results.get(f"precision=32 seed={name.rpartition('seed=')[2] if 'seed=' in name else 0}", start)
        change = [f"{figures[held] - plain[held]:+.4f}" if plain else "-" for held in ("new", "old")]
        seconds = f"{figures['seconds_per_step']:.2f}" if figures["seconds_per_step"] else "-"
        lines.append(
            f"| `{name}` | {figures['new']:.4f} | {change[0]} | {figures['old']:.4f} | {change[1]} | {seconds} |"
        )
    elsewhere = [f"`{name}` ({figures['processor']})" for name, figures in results.items() if "processor" in figures]
    if elsewhere:
        lines += ["", f"Measured on another processor: {', '.join(elsewhere)}."]
    return "\n".join([*lines, "", *seeds(results)])


def seeds(results: Mapping[str, dict]) -> list[str]:
    """Returns the lines of a table that compares PRECISIONS with fp32, seed by seed. Returns [] if a seed has no result
    of fp32."""
    lines = [
        "| precision | new against fp32: mean of seeds | least | largest | fp32 itself: spread of seeds |",
        "|---|---|---|---|---|",
    ]
    plain = {seed: results.get(f"precision=32 seed={seed}") for seed in SEEDS}
    if not all(plain.values()):
        return []
    spread = max(one["new"] for one in plain.values()) - min(one["new"] for one in plain.values())
    for precision in PRECISIONS[1:]:
        rows = [results.get(f"precision={precision} seed={seed}") for seed in SEEDS]
        if all(rows):
            change = [one["new"] - plain[seed]["new"] for seed, one in zip(SEEDS, rows, strict=True)]
            lines.append(
                f"| {precision} | {mean(change):+.4f} | {min(change):+.4f} | {max(change):+.4f} | {spread:.4f} |"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, help="one part of the table")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no row after this many minutes")
    options = options_of(parser, train)
    end = time.monotonic() + 60 * options.minutes
    before = {"machine": machine(), **stored("quality")}
    results, first = before.get("rows", {}), before["machine"]
    for part, rows in PARTS.items():
        for name, lines in rows.items():
            if name not in results and part == (options.only or part) and time.monotonic() < end:
                here = {} if processor() == first["processor"] else {"processor": processor()}
                results[name] = row(["-m", "benchmarks.quality", "--row", *lines]) | here
                print(f"{name:<48}{results[name]}", flush=True)
                ordered = {name: results[name] for part in PARTS.values() for name in part if name in results}
                write("quality", {"machine": first, "steps": STEPS, "rows": ordered}, table(ordered))


if __name__ == "__main__":
    main()
