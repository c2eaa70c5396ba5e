"""Sweeps: a small one in every state, and one of fifty runs with long names."""

import os
import time
from itertools import product

import pytest

from lowmem import runs
from lowmem.units import MIB
from made_runs import finished

LONG = "data.path=a/folder/whose/name/is/longer/than/any/label/of/an/axis/"


@pytest.fixture
def sweep(tmp_path):
    """Three finished runs of which the second is beaten by the first, a failed, a running and two broken ones."""
    folder = tmp_path / "sweep"
    finished(folder / "0", [f"{LONG}0", "lr=0.001"], 600 * MIB, 1000.0)
    finished(folder / "1", [f"{LONG}1", "lr=0.002"], 900 * MIB, 900.0)
    finished(folder / "2", [f"{LONG}2", "lr=0.003"], 800 * MIB, 2000.0, device="NVIDIA H200")
    for number in range(3, 7):
        (finished(folder / str(number), [f"{LONG}{number}", f"lr=0.00{number + 1}"]) / "summary.json").unlink()
    (folder / "3" / runs.FAILED).write_text(
        "Traceback (most recent call last):\n  ...\nZeroDivisionError: </script><b>\n"
    )
    (folder / "4" / "summary.json").write_text('{"interrupted": fal')
    for path in (folder / "5").iterdir():
        os.utime(path, (time.time() - 3600,) * 2)
    (folder / "6" / "memory.csv").write_text("step,phase,live_peak_bytes\n1,forw")
    return folder


@pytest.fixture
def fifty(tmp_path):
    """Five of whose overrides differ, some of which are long; two failed."""
    folder = tmp_path / "fifty-runs-in-a-folder-with-a-long-name"
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
        (folder / str(i) / runs.FAILED).write_text(why)
    return folder
