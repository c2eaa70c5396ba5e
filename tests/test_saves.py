"""Tests that each technique saves the memory that it declares, measured in live tensors of a run.

The tests are generated from conf/. The yaml of a technique declares, for each category of memory that it reduces, the
largest share of the default run's bytes that may remain. Weights, gradients and optimizer state are measured in a run
in which they are large relative to activations (`WIDE`), and activations in a run in which activations are large
(`LONG`).
"""

import pytest
import torch
from benchmarks.techniques import WITH

from lowmem.config.declarations import techniques
from pair_oracle import LOSSES
from parity import CHOICES, SIBLINGS, shipped_but

WIDE = ("model.architecture.n_embd=256", "model.architecture.n_layer=4", "seq_len=8", "batch_size=1")
LONG = ("model.architecture.n_layer=8", "model.architecture.vocab_size=1024", "seq_len=128", "batch_size=8")
SHAPES = {"weights": WIDE, "gradients": WIDE, "optimizer": WIDE, "activations": LONG}
# Why a choice is not measured here. "the yardstick" is a default choice, with which the others of its group are
# compared.
SAVES_NOTHING = {
    "precision=32": "the yardstick",
    "optim=adamw": "the yardstick",
    "accumulation=none": "the yardstick",
    "gradient_checkpointing=none": "the yardstick",
    "weights=resident": "the yardstick",
    "loss=full": "the yardstick",
    "compile=none": "the yardstick",
    "compile=blocks": "compiled, unseen: test_blocks.py measures it",
    "adapter=none": "the yardstick",
    **{f"loss={name}": "another objective, in the bytes of loss=tiled: test_preference.py counts" for name in LOSSES},
    "precision=tf32": "faster products alone",
    "optim=paged_adamw32bit": "pages on CUDA alone",
}


@pytest.fixture(scope="module")
def known():
    """Returns a cache: a dict that maps (shape, overrides) to the bytes by category at the peak of a run."""
    return {}


@pytest.fixture
def held_bytes(fit, known):
    """Returns a function that takes a shape and overrides, and returns the bytes by category at the peak of a run."""

    def run(shape, *lines):
        if (shape, lines) not in known:
            typed = {line.split("=")[0] for line in lines}
            beside = [line for line in shape if line.split("=")[0] not in typed]
            with torch.compiler.set_stance(
                "force_eager"
            ):  # compiling takes seconds, and does not change the memory of optimizer state
                summary, _ = fit("max_steps=2", "clip=null", *beside, *lines)
            known[shape, lines] = summary["peak_bytes_by_category"]
        return known[shape, lines]

    return run


def too_much(held_bytes, saves, *lines):
    """Returns {category: remaining share of the default run's bytes} for the categories in which more remains than
    `saves` declares."""
    left = {kind: held_bytes(SHAPES[kind], *lines)[kind] / held_bytes(SHAPES[kind])[kind] for kind in saves}
    return {kind: share for kind, share in left.items() if share > saves[kind]}


@pytest.mark.parametrize("technique", CHOICES)
def test_technique_declares_the_memory_that_it_saves_or_has_a_reason_not_to(technique):
    group, name = technique.split("=")
    assert bool(techniques(group)[name].saves) != (technique in SAVES_NOTHING), (
        f"conf/{group}/{name}.yaml: say what it saves in `declares: {{saves: {{<category>: <share of the shipped run "
        f"that is left>}}}}` ({', '.join(SHAPES)}), or give the reason in SAVES_NOTHING of {__file__}."
    )


@pytest.mark.matrix_rows(*SIBLINGS)
@pytest.mark.parametrize("technique", [technique for technique in CHOICES if technique not in SAVES_NOTHING])
def test_technique_saves_the_memory_that_it_declares(held_bytes, technique):
    group, name = technique.split("=")
    found = too_much(held_bytes, techniques(group)[name].saves, technique, *WITH.get(technique, []))
    assert found == {}, f"{technique} leaves these shares of the shipped run's bytes: declares.saves says less"


IDLE = {
    "optim": ["optim=adamw"],
    "gradient_checkpointing": ["gradient_checkpointing=none"],
    "precision": ["precision=32"],
    "weights": ["weights=resident", "precision=bf16-master"],
    "loss": ["loss=full"],
    "accumulation": ["accumulation=none"],
    "adapter": ["adapter=none"],
}


@pytest.mark.wrong
@pytest.mark.matrix_rows(*shipped_but("precision=16-master", "loss=chunked", "optim=adafactor"))
@pytest.mark.parametrize("technique", [technique for technique in CHOICES if technique not in SAVES_NOTHING])
def test_technique_that_does_nothing_saves_less_memory_than_declared(held_bytes, technique):
    """Wrong on purpose: the default choice of the group is compared with what the technique declares, and must exceed
    every declared share."""
    group, name = technique.split("=")
    saves = techniques(group)[name].saves
    found = too_much(held_bytes, saves, *IDLE[group])
    assert found.keys() == saves.keys(), f"conf/{group}/{name}.yaml: {IDLE[group][0]} saves what it declares, too"
