"""Tests that initial weights depend only on the seed. If they depended on anything else, a comparison of techniques
would also compare initializations."""

import pytest
import torch

from lowmem.config.typed_lines import CONF
from lowmem.model import loading

PRECISIONS = [yaml.stem for yaml in sorted((CONF / "precision").glob("*.yaml"))]
OPTIMIZERS = [yaml.stem for yaml in sorted((CONF / "optim").glob("*.yaml"))]


class Started(Exception):
    """Raised after a run has built its model."""


@pytest.fixture
def start(fit, monkeypatch):
    """Returns a function that takes overrides and returns the initial weights of a run."""
    kept = []

    def keep(cfg, output_dir, data, module, *_):
        kept.append([p.detach().clone() for p in module.model.parameters()])
        raise Started

    monkeypatch.setattr("lowmem.training.training._assembled", keep)

    def run(*overrides):
        torch.rand(len(kept) + 1)  # random numbers that are drawn before a run must not change its weights
        with pytest.raises(Started):
            fit(*overrides)
        return kept.pop()

    return run


def same(ours, shipped):
    return all(torch.equal(a, b.to(a.dtype)) for a, b in zip(ours, shipped, strict=True))


@pytest.mark.rows("16-master")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_initial_weights_do_not_depend_on_precision_or_plan(start, precision):
    shipped = start()
    assert not same(start("seed=1"), shipped)
    assert same(start(f"precision={precision}"), shipped)
    assert same(start(f"precision={precision}", "plan=check"), shipped)


@pytest.mark.usefixtures("as_with_compiler")
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_initial_weights_do_not_depend_on_the_optimizer(start, optim):
    assert same(start(f"optim={optim}"), start())


def test_initial_weights_do_not_depend_on_the_planners_probe_of_the_optimizer_state(start):
    """Probing the state of lion8bit draws random numbers."""
    assert same(start("precision=bf16-master", "optim=lion8bit", "plan=check"), start())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_initial_weights_drawn_in_fp32_do_not_depend_on_the_dtype(dtype):
    def weight(dtype):
        torch.manual_seed(0)
        return torch.nn.init.xavier_uniform_(torch.empty(300, 32, dtype=dtype))

    assert not torch.equal(weight(dtype), weight(torch.float32).to(dtype))
    with loading.drawn_in_fp32():
        assert torch.equal(weight(dtype), weight(torch.float32).to(dtype))
