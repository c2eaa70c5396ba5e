"""Folders as train.py leaves them, without training."""

import json
from pathlib import Path

from lowmem.units import CATEGORIES, MIB


def finished(folder: Path, overrides: list[str], peak: int = 800 * MIB, speed: float = 1000.0, **more) -> Path:
    """A run as train.py leaves it, of 40 steps."""
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
