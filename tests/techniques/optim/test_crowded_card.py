"""Tests paged optimizer state that does not fit on the card: its pages leave the card and return in every step.

Before the optimizer has any state, the test fills the card, leaving free memory for half of the state. The unpaged
optimizer then runs out of memory. The paged optimizer must step, and its weights must equal the weights that the
unpaged optimizer computes with enough memory, bit for bit. The test then restores the paged state in a new optimizer,
where it must be paged again.

On some machines a card hangs if its free memory is smaller than the paged state, and every later use of the card hangs
too. So the test on a card runs only with CROWD_THE_CARD=1.
"""

import gc
import os
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from devices import each_device
from lowmem.techniques.optim import build
from lowmem.training.build import optimizer
from same import same

STEPS = 4  # steps on the filled card, followed by the same number of steps with enough memory
MATRICES = 16
UNPAGED = "optim._target_=bitsandbytes.optim.AdamW32bit"
STATE = {"cpu": 1 << 20, "cuda": 1 << 30}  # bytes, at 8 per parameter


def model_on(device):
    """Returns a model whose gradients are already allocated."""
    side = round((STATE[device] / 8 / MATRICES) ** 0.5)
    model = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(MATRICES))).to(device)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return model


def begun(model):
    """Resets the model to its initial weights, and returns the model."""
    torch.manual_seed(0)
    for p in model.parameters():
        p.data.normal_()
    return model


def step(model, optimizer, numbers):
    """Makes a step for each number, which seeds the random gradients of its step."""
    for number in numbers:
        torch.manual_seed(1 + number)
        for p in model.parameters():
            p.grad.normal_()
        optimizer.step()


@contextmanager
def crowded(device):
    """Fills the card except for half of the size of the optimizer state. Does nothing on a CPU."""
    if device == "cpu":
        yield
        return
    release()
    free, leave = torch.cuda.mem_get_info()[0], STATE[device] // 2
    assert free > 2 * leave, f"other processes use the card: {free:,} bytes are free"
    taken = torch.empty(free - leave, dtype=torch.uint8, device=device)
    try:
        yield
    finally:
        taken.untyped_storage().resize_(0)  # the traceback of a failed test keeps the tensor alive
        release()


def release():
    gc.collect()
    torch.cuda.empty_cache()


def buffers(optimizer):
    return [state[key] for state in optimizer.state.values() for key in build.BUFFERS]


def weights(model):
    return [p.detach().cpu().clone() for p in model.parameters()]


@each_device
@pytest.mark.parametrize("lost", [False, True], ids=["kept", "lost"])
def test_paged_optimizer_on_a_full_card_has_the_weights_of_unpaged_state_unless_restored_without_state(
    config, monkeypatch, device, lost
):
    """In the deliberately wrong variant (`lost`), the second half of the steps begins without state. On a CPU the state
    is not paged."""
    if device == "cuda" and not os.environ.get("CROWD_THE_CARD"):
        pytest.skip("a card with less room than its pages need may hang: CROWD_THE_CARD=1 asks for it")
    if lost:
        monkeypatch.setattr(build, "_restore_paged", lambda *_: None)
    line = ("optim=paged_adamw32bit", f"device={device}")
    make, unpaged = optimizer(config(*line)), optimizer(config(*line, UNPAGED))
    model = begun(model_on(device))
    step(model, unpaged(model), range(2 * STEPS))
    expected = weights(model)
    with crowded(device):
        if device == "cuda":
            with pytest.raises(torch.OutOfMemoryError):
                unpaged(begun(model)).step()
            release()
        paged = make(begun(model))
        step(model, paged, range(STEPS))

    restored = make(model)
    restored.load_state_dict(paged.state_dict())
    if not lost:
        assert same(buffers(restored), buffers(paged))
        assert all(hasattr(b, "is_paged") == (device == "cuda") for b in (*buffers(paged), *buffers(restored)))
    step(model, restored, range(STEPS, 2 * STEPS))
    assert same(weights(model), expected) != lost
