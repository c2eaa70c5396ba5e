"""Weights whose masters and state are on a drive have the bits of weights that have them in memory."""

from itertools import product

import pytest

from lowmem.techniques.weights import drive as drives
from lowmem.techniques.weights.drive import Shelf
from made_up import LateLane
from same import same
from streams import lines, trained

PRECISIONS, OPTIMS, CLIPS = (
    ("bf16-master", "16-master", "bf16-sr"),
    ("adamw", "adamw8bit", "adafactor"),
    ("norm", "off"),
)
MATRIX = list(product(PRECISIONS, OPTIMS, CLIPS, ("fixed", "none")))
SAMPLE = [
    ("bf16-master", "adamw8bit", "off", "fixed"),
    ("16-master", "adamw", "norm", "fixed"),
    ("bf16-sr", "adamw8bit", "off", "none"),
    ("bf16-master", "adafactor", "norm", "none"),
]


def both(config, tmp_path, precision, optim, clip, accumulation, *lines_of_drive, lane=lambda: None, **more):
    """Trains with a drive and without."""
    arguments = list(
        lines("llama", "loss=tiled", "loss.columns=64", "max_steps=3", precision=precision, optim=optim, clip=clip)
    )
    arguments[3] = accumulation
    return tuple(
        trained(config, ["weights=streamed", *place], "llama", arguments, lane=lane(), **more)
        for place in ((), (f"weights.drive={tmp_path}", *lines_of_drive))
    )


@pytest.mark.parametrize(("precision", "optim", "clip", "accumulation"), SAMPLE)
def test_a_drive_changes_no_bit(config, tmp_path, precision, optim, clip, accumulation):
    memory, drive = both(config, tmp_path, precision, optim, clip, accumulation)
    assert drive.module.weights._shelves.drive.read_bytes > 0
    assert memory.same(drive)


@pytest.mark.parametrize(("precision", "optim", "clip", "accumulation"), SAMPLE[:2])
def test_nor_does_one_that_holds_the_weights_too(config, tmp_path, precision, optim, clip, accumulation):
    memory, drive = both(config, tmp_path, precision, optim, clip, accumulation, "weights.drive_holds=all")
    assert memory.same(drive)
