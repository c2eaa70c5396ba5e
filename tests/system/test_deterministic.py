"""Tests that deterministic=true has an effect only during a run, and that it refuses operators without a deterministic
algorithm."""

import pytest
import torch

from lowmem.system.deterministic import REFUSED, deterministic
from lowmem.system.errors import Refused
from lowmem.training.module import CausalLM


@pytest.mark.parametrize("wanted", [True, False])
def test_deterministic_algorithms_are_enabled_during_a_run_if_requested(fit, monkeypatch, wanted):
    seen, step = [], CausalLM.training_step

    def looking(self, *arguments):
        seen.append(
            (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
        )
        return step(self, *arguments)

    monkeypatch.setattr(CausalLM, "training_step", looking)
    fit(f"deterministic={str(wanted).lower()}", "max_steps=1")
    assert seen == [(wanted, False)] and not torch.are_deterministic_algorithms_enabled()


def test_operator_without_a_deterministic_algorithm_is_refused(fit, monkeypatch):
    def breaks(*_):
        raise RuntimeError(f"scatter_cuda {REFUSED}, but you set 'torch.use_deterministic_algorithms(True)'.")

    monkeypatch.setattr(CausalLM, "training_step", breaks)
    with pytest.raises(Refused, match=r"deterministic=true: torch has no deterministic algorithm for scatter_cuda"):
        fit("deterministic=true", "max_steps=1")
    assert not torch.are_deterministic_algorithms_enabled()


def test_unrelated_errors_under_deterministic_algorithms_are_raised_unchanged():
    with pytest.raises(RuntimeError, match="out of luck"), deterministic(True):
        raise RuntimeError("out of luck")
    assert torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.gpu
def test_deterministic_attention_on_a_card_repeats_its_gradients_bit_by_bit():
    q, k, v = (torch.randn(4, 8, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def gradients():
        with deterministic(True):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return torch.autograd.grad(out.float().square().sum(), (q, k, v))

    first = gradients()
    assert all(torch.equal(one, other) for _ in range(5) for one, other in zip(first, gradients(), strict=True))
