"""Tests that what a class offers stands in its base class, with a default: nobody asks whether it is there."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lowmem.data.mix import Mix
from lowmem.system.errors import Refused
from lowmem.techniques.loss.cross_entropy import Chunked, Loss, as_loss, full
from lowmem.training import build
from lowmem.training.module import CausalLM, Update


def test_source_of_another_class_is_refused(config):
    """A yaml may name anybody's class, one from before there were base classes too."""
    run = config()
    with pytest.raises(Refused, match=r"dict is not a data source\. Derive it from .*StoredSource"):
        build.open_texts(run.replacing("data", {"_target_": "builtins.dict"}))


def test_mixture_part_of_another_class_is_refused_by_its_name():
    with pytest.raises(Refused, match=r"data\.parts\.mine\._target_=.*dict is not a data source"):
        Mix({"mine": {}})


class Scaled(Loss, nn.Module):
    """A loss with a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))

    def __call__(self, model, batch):
        return self.scale * full(model, batch)


class Compared(Scaled):
    def verify(self, model, batch):
        pass


def test_loss_that_is_a_module_keeps_its_buffers():
    module = CausalLM(nn.Linear(2, 2), Scaled(), Update(None, None))
    assert "loss.scale" in module.state_dict()


def test_loss_with_verify_computes_its_own_logits():
    assert Compared().own_logits and Chunked(4).own_logits and not Scaled().own_logits
    assert not as_loss(full).own_logits and isinstance(as_loss(partial(full)), Loss)


@pytest.mark.parametrize("made", [nn.Linear(1, 1), SimpleNamespace(verify=print)])
def test_object_that_is_not_a_loss_is_refused(made):
    """Its `verify` would not be called, and its buffers not be saved."""
    with pytest.raises(
        Refused, match=r"is not a loss\. Derive it from Loss of lowmem\.techniques\.loss\.cross_entropy"
    ):
        as_loss(made)
