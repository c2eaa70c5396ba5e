"""Weights that stream have the bits of weights that stay, whatever computes again, and nothing stale is ever read.

The whole matrix is slow; of it every model, every policy, both masters, every loss and both counts of slots once.
"""

from functools import cache
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from lowmem.offload.home import Home
from lowmem.streamed import Streamed, _nowhere
from streams import MODELS, POLICIES, built, lines, trained

LOSSES = {"full": ["loss=full"], "chunked": ["loss=chunked", "loss.rows=7"], "tiled": ["loss=tiled", "loss.columns=64"]}
MASTERS = ("bf16-master", "16-master")
MATRIX = list(product(MODELS, POLICIES, LOSSES, (2, 3), MASTERS))
SAMPLE = [
    ("gpt2", "every_layer", "tiled", 2, "bf16-master"),
    ("llama", "every_k", "chunked", 3, "16-master"),
    ("qwen3", "sqrt", "full", 2, "16-master"),
    ("qwen3_moe", "selective", "chunked", 2, "bf16-master"),
    ("gpt2", "offload", "full", 3, "16-master"),
]


def streamed(slots=2, *more):
    return ["weights=streamed", f"weights.slots={slots}", *more]


@pytest.fixture(scope="module")
def resident():
    """(model, arguments) -> the same with weights that stay."""
    known = {}

    def run(config, model, arguments, **named):
        key = (model, arguments, str(named))
        if key not in known:
            known[key] = trained(config, ["weights=resident"], model, arguments, **named)
        return known[key]

    return run


def is_resident(config, resident, model, policy, loss, slots, precision):
    arguments = lines(model, *LOSSES[loss], "max_steps=3", precision=precision, policy=policy)
    one, other = resident(config, model, arguments), trained(config, streamed(slots), model, arguments)
    assert other.module.weights.fetched > 0 and (precision == "bf16-master" or one.skipped > 0)
    assert one.same(other)


@pytest.mark.parametrize(("model", "policy", "loss", "slots", "precision"), SAMPLE)
def test_weights_that_stream_have_the_bits_of_weights_that_stay(
    config, resident, model, policy, loss, slots, precision
):
    is_resident(config, resident, model, policy, loss, slots, precision)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "policy", "loss", "slots", "precision"), MATRIX)
def test_so_they_have_in_every_combination(config, resident, model, policy, loss, slots, precision):
    is_resident(config, resident, model, policy, loss, slots, precision)
