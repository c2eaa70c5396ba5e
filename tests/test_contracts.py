"""Tests the base classes of data sources and losses: an object of another class is refused, and optional members have
defaults."""

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


def test_data_target_that_is_not_a_data_source_is_refused(config):
    """A yaml may name any class, for example one written for an earlier version without base classes."""
    run = config()
    with pytest.raises(Refused, match=r"dict is not a data source\. Derive it from .*StoredSource"):
        build.open_texts(run.replacing("data", {"_target_": "builtins.dict"}))


def test_mixture_part_that_is_not_a_data_source_is_refused_and_named():
    with pytest.raises(Refused, match=r"data\.parts\.mine\._target_=.*dict is not a data source"):
        Mix({"mine": {}})


class Scaled(Loss, nn.Module):
    """A loss with a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))

    def __call__(self, model, batch):
        return self.scale * full(model, batch)


class Compared(Scaled):
    def verify(self, model, batch):
        pass


def test_loss_that_is_a_module_has_its_buffers_in_the_state_dict():
    module = CausalLM(nn.Linear(2, 2), Scaled(), Update(None, None))
    assert "loss.scale" in module.state_dict()


def test_only_losses_with_a_verify_method_are_marked_as_computing_their_own_logits():
    assert Compared().own_logits and Chunked(4).own_logits and not Scaled().own_logits
    assert not as_loss(full).own_logits and isinstance(as_loss(partial(full)), Loss)


@pytest.mark.parametrize("made", [nn.Linear(1, 1), SimpleNamespace(verify=print)], ids=["module", "with verify"])
def test_object_that_is_not_a_loss_is_refused(made):
    """If such objects were accepted, their `verify` would not be called, and their buffers would not be saved."""
    with pytest.raises(
        Refused, match=r"is not a loss\. Derive it from Loss of lowmem\.techniques\.loss\.cross_entropy"
    ):
        as_loss(made)
