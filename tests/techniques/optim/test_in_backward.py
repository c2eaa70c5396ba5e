"""Tests that optimizer steps during backward are bit-identical to steps after backward, and that two gradients never
exist together."""

import pytest
import torch

import parity
from lowmem.memory.tracker import StorageTracker
from lowmem.techniques.optim.in_backward import StepInBackward
from lowmem.training.module import CausalLM

pytestmark = pytest.mark.kernels
BACKWARD = ("optim.in_backward=true", "clip=null")


@pytest.mark.rows("32-adamw", "bf16-true-adafactor", "bf16-true-adam8bit")
@pytest.mark.parametrize("optim", ["adamw", "adam8bit", "adafactor", "sgd", "muon"])
@pytest.mark.parametrize("precision", ["32", "bf16-true"])
def test_step_in_backward_has_the_bits_of_a_step_after_backward(config, optim, precision):
    techniques = (f"optim={optim}", f"precision={precision}")
    _, after = parity.run(config(*parity.overrides(*techniques), "clip=null", base=()))
    _, within = parity.run(config(*parity.overrides(*techniques), *BACKWARD, base=()))
    assert all(torch.equal(after[name], within[name]) for name in after)


def test_clip_value_in_backward_has_the_bits_of_clip_value_after_backward(config):
    techniques = ("optim=sgd", "clip_value=0.001", "clip=null")
    _, after = parity.run(config(*parity.overrides(), *techniques, base=()))
    _, free = parity.run(config(*parity.overrides(), "optim=sgd", "clip=null", base=()))
    _, within = parity.run(config(*parity.overrides(), *techniques, "optim.in_backward=true", base=()))
    assert all(torch.equal(after[name], within[name]) for name in after)
    assert not all(torch.equal(after[name], free[name]) for name in after)


def gradient_bytes(config, monkeypatch, *overrides):
    """Returns three sizes in bytes: the peak of all gradients that exist together, the total of all gradients, and the
    largest gradient."""
    most, right = 0, CausalLM.manual_backward

    def watched(self, loss):
        nonlocal most
        parameters = list(self.model.parameters())

        def look(_):
            nonlocal most
            most = max(most, sum(p.grad.nbytes for p in parameters if p.grad is not None))

        hooks = [p.register_post_accumulate_grad_hook(look) for p in parameters]
        right(self, loss)
        for hook in hooks:
            hook.remove()

    monkeypatch.setattr(CausalLM, "manual_backward", watched)
    _, weights = parity.run(config(*parity.overrides(), "optim=sgd", "clip=null", "max_steps=1", *overrides, base=()))
    sizes = [p.nbytes for p in weights.values()]
    return most, sum(sizes), max(sizes)


def test_step_in_backward_never_holds_two_gradients(config, monkeypatch):
    together, every, largest = gradient_bytes(config, monkeypatch)
    assert together == every
    alone, every, largest = gradient_bytes(config, monkeypatch, "optim.in_backward=true")
    assert alone <= largest < every / 3


def test_step_in_backward_lowers_the_peak_memory_by_most_of_the_gradients(fit):
    # a micro-batch of one short sequence: weights, gradients and state are nearly everything
    small = ("batch_size=1", "seq_len=2", "optim=sgd", "clip=null", "model.architecture.n_embd=128")
    together, _ = fit(*small)
    alone, _ = fit(*small, "optim.in_backward=true", folder="alone")
    weights = together["parameters"] * 4
    saved = together["peak_bytes"]["device"] - alone["peak_bytes"]["device"]
    assert 0.75 * weights < saved <= weights


def test_step_in_backward_adds_no_hook_if_disabled_and_removes_its_hooks_at_teardown(config):
    p = torch.nn.Parameter(torch.zeros(2))
    callback = StepInBackward(enabled=False, clip_value=None)
    callback.on_train_start(None, None)
    assert not callback._hooks
    callback._hooks = [p.register_post_accumulate_grad_hook(lambda p: None)]
    callback.teardown(None, None, "fit")
    assert not p._post_accumulate_grad_hooks and not callback._hooks
    with StorageTracker({}):
        p.sum().backward()
    assert p.grad is not None
