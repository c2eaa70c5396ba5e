"""Tests the extension points of 16-bit weights. The example of an extension is Kahan summation, a class of a few lines
that needs no change to lowmem."""

import csv

import pytest
import torch
from lightning.pytorch import Callback

import parity
from lowmem.system.errors import Refused
from lowmem.techniques.precision.weights_16bit import BFloat16Weights, SixteenBitWeights
from same import last, same

pytestmark = pytest.mark.kernels


class Kahan(SixteenBitWeights):
    """Stores the rounding error of each weight in 16 bits, and adds it before the next update."""

    dtype = torch.bfloat16

    def new_extra_state(self, p):
        return {"lost": torch.zeros_like(p.data)}

    def widen(self, p):
        return p.data.float().add_(self.extra_state(p)["lost"])

    def round(self, wide, p):
        p.data.copy_(wide)
        self.extra_state(p)["lost"].copy_(wide.sub_(p.data))


class Subtracting(Kahan):
    """In the deliberately wrong variant, the rounding error is subtracted instead of added."""

    def widen(self, p):
        return p.data.float().sub_(self.extra_state(p)["lost"])


class Unseen(Kahan):
    """In the deliberately wrong variant, the memory meter does not see the extra state."""

    def device_tensors(self):
        return ()


class Forgetful(Kahan):
    """In the deliberately wrong variant, the extra state is not restored on resume."""

    def load_state_dict(self, state_dict):
        pass


def chosen(precision):
    return "precision=bf16-true", f"precision._target_={precision.__module__}.{precision.__qualname__}"


class Widened(Callback):
    """Records the final weights as the precision widens them for an update."""

    def on_train_end(self, trainer, module):
        plugin = trainer.precision_plugin
        self.weights = {name: plugin.widen(p) for name, p in module.model.named_parameters()}


@pytest.mark.parametrize(("precision", "lost"), [(Kahan, False), (BFloat16Weights, True), (Subtracting, True)])
def test_only_kahan_summation_keeps_updates_below_the_spacing_of_bf16(config, precision, lost):
    """Steps are at most 1e-5, and the weights are about 0.02, where bf16 numbers are 1e-4 apart. The oracle keeps its
    weights in fp32."""
    cfg = config(*parity.overrides("precision=bf16-true"), "lr=1e-5", *chosen(precision)[1:], base=())
    widened = Widened()
    parity.run(cfg, callbacks=[widened])
    start, theirs = parity.expected(cfg, "adamw", "none", held_in="float32")
    # relative errors of the total update, of matrices and of vectors
    off = parity.errors(start, widened.weights, theirs)
    assert min(off) > 0.5 if lost else max(off) < 0.1


@pytest.mark.parametrize("precision", [Kahan, Unseen])
def test_extra_state_of_a_precision_is_counted_as_optimizer_memory_unless_hidden_from_the_meter(fit, precision):
    def held(precision):
        summary, run = fit(*chosen(precision), folder=precision.__name__)
        rows = csv.DictReader((run / "memory.csv").open())
        third = next(row for row in rows if (row["step"], row["phase"]) == ("3", "step"))
        return int(third["optimizer_bytes"]), summary["parameters"]

    (ours, parameters), (plain, _) = held(precision), held(BFloat16Weights)
    assert ours - plain == (2 * parameters if precision is Kahan else 0)


@pytest.mark.rows("Kahan-auto")
@pytest.mark.parametrize(("precision", "strategy"), [(Kahan, "auto"), (Kahan, "ddp"), (Forgetful, "auto")])
def test_resume_restores_extra_state_of_a_precision_and_all_bits_unless_loading_the_state_is_left_out(
    fit, precision, strategy
):
    lines = (*chosen(precision), "lr=1e-4", "scheduler=constant", f"strategy={strategy}")
    _, whole = fit(*lines, folder="whole")
    _, part = fit(*lines, "max_steps=2", folder="part")
    _, again = fit(*lines, f"resume={part}", folder="again")
    assert last(whole)[precision.__qualname__]["held"]
    assert same(last(whole), last(again)) == (precision is Kahan)


def test_extra_state_of_a_precision_with_fsdp_is_refused(fit):
    with pytest.raises(Refused, match=r"precision: Kahan stores extra state .* Type strategy=ddp\."):
        fit(*chosen(Kahan), "strategy=fsdp", "max_steps=1")
