"""Tests each precision with Lightning's BoringModel: training ends near the weights of Lightning's fp32 training, or
the model is refused before the first step."""

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from lightning.pytorch.plugins.precision import Precision

from lowmem.config.declarations import techniques
from lowmem.config.instantiate import instantiate
from lowmem.step.gradients import norm_of_all
from lowmem.step.optimizer import DeviceOptimizer
from lowmem.system.errors import Refused
from lowmem.techniques.precision.contract import BasePrecision

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
]
STEPS = 3
PRECISIONS = list(techniques("precision"))
OFF = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
# Bounds of the relative error by which the weights' change may differ from that in fp32. Outputs and gradients of three
# steps are rounded, and so are 16-bit weights; the relative rounding error is 2^-11 in fp16 and 2^-8 in bf16 (2^-7 with
# stochastic rounding).
BOUNDS = {"32": 0, "tf32": 0, "16": 2**-9, "bf16": 2**-6, "16-true": 2**-8, "bf16-true": 2**-5, "bf16-sr": 2**-5}
COMPUTES_IN = {"16": torch.float16, "bf16": torch.bfloat16}  # other precisions: the dtype of the weights, here fp32


class ByTheContract(ManualOptimBoringModel):
    """A BoringModel that wraps its optimizer, and uses the wrapped optimizer as CausalLM does."""

    def configure_optimizers(self):
        sgd = torch.optim.SGD(self.parameters(), lr=0.1)
        self.optimizer = self.trainer.precision_plugin.optimizer(sgd, self, norm_of_all)
        return self.optimizer

    def training_step(self, batch, batch_idx):
        precision = self.trainer.precision_plugin
        with precision.forward_context():
            loss = self.loss(self(batch.to(self.layer.weight.dtype)).float())
        self.manual_backward(loss)
        gradients = self.optimizer.finish(loss.detach(), precision.gradient_scale)
        precision.update_scale(gradients.finite)
        assert gradients.finite and gradients.loss_is_finite
        self.optimizers().step()
        self.optimizer.drop_gradients(stepped=True)


@pytest.fixture
def plugin(config):
    def make(precision):
        made = instantiate(config(f"precision={precision}").precision)
        if made.scales_loss:
            made.loss_scale.value = 1024.0  # at 65536 the first steps of BoringModel overflow and are skipped
        return made

    return make


def trained(module_class, plugin=None, dtype=torch.float32):
    """Returns (change of the weights in fp32, module) of a short run."""
    torch.manual_seed(0)
    module = module_class()
    module.to(dtype)  # precisions expect weights that were loaded in their dtype
    before = module.layer.weight.detach().float().clone()
    plugins = [] if plugin is None else [plugin]
    trainer = Trainer(accelerator="cpu", max_steps=STEPS, limit_val_batches=0, plugins=plugins, **OFF)
    trainer.fit(module)
    return module.layer.weight.detach().float() - before, module


def off(plugin):
    """Returns the relative error of the weights' change, compared with Lightning's fp32 training."""
    expected, _ = trained(ManualOptimBoringModel)
    moved, _ = trained(ByTheContract, plugin, plugin.weights_dtype or plugin.dtype)
    return ((moved - expected).norm() / expected.norm()).item()


@pytest.mark.kernels
@pytest.mark.parametrize("precision", BOUNDS)
def test_boring_model_trained_with_each_precision_ends_near_the_weights_of_lightning(plugin, precision):
    assert off(plugin(precision)) <= BOUNDS[precision]


@pytest.mark.wrong
@pytest.mark.parametrize("precision", ["16", "16-true"])
def test_boring_model_trained_with_gradients_that_stay_scaled_ends_far_from_lightning(plugin, monkeypatch, precision):
    """In the wrong variant, the optimizer does not get the loss scale."""
    finish = DeviceOptimizer.finish
    monkeypatch.setattr(DeviceOptimizer, "finish", lambda self, loss, scale: finish(self, loss))
    scaled = plugin(precision)
    scaled.loss_scale.value = 4.0  # with a larger scale, the weights grow until fp16 overflows
    assert off(scaled) > 1


def test_every_precision_without_masters_has_a_bound_for_boring_model():
    """A new precision needs a bound. Precisions with masters need CausalLM, so BoringModel cannot be trained with
    them."""
    assert set(PRECISIONS) - set(BOUNDS) == {"16-master", "bf16-master"}


@pytest.mark.parametrize("module_class", [BoringModel, ManualOptimBoringModel])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_boring_model_whose_optimizer_the_precision_plugin_did_not_wrap_is_refused_before_the_first_step(
    plugin, precision, module_class
):
    class Untouched(module_class):
        def training_step(self, batch, batch_idx):
            raise AssertionError("it trains")

    with pytest.raises(Refused, match=r"cannot train Untouched: .*Trainer\(precision="):
        trained(Untouched, plugin(precision))


@pytest.mark.wrong
def test_plain_optimizer_that_is_not_refused_steps_with_scaled_gradients(plugin, monkeypatch):
    """Wrong variant: with Lightning's `connect` in place of lowmem's, the plain optimizer is not refused and steps with
    scaled gradients."""
    monkeypatch.setattr(BasePrecision, "connect", Precision.connect)
    assert trained(ManualOptimBoringModel, plugin("16"))[0].norm() > 100


def evaluated(plugin):
    """Returns the dtypes of the outputs of an evaluation, and its losses."""
    dtypes, losses = set(), []

    class Seen(BoringModel):
        def validation_step(self, batch, batch_idx):
            out = self(batch)
            dtypes.add(out.dtype)
            losses.append(self.loss(out).item())

    torch.manual_seed(0)
    Trainer(accelerator="cpu", plugins=[plugin] if plugin else [], limit_val_batches=4, **OFF).validate(
        Seen(), verbose=False
    )
    return dtypes, losses


@pytest.mark.kernels
@pytest.mark.parametrize("precision", PRECISIONS)
def test_boring_model_is_evaluated_in_the_dtype_of_the_precision(plugin, precision):
    dtypes, losses = evaluated(plugin(precision))
    assert dtypes == {COMPUTES_IN.get(precision, torch.float32)}
    rel = 2**-6 if precision in COMPUTES_IN else 0  # 4 times the rounding error of an output in bf16
    assert losses == pytest.approx(evaluated(None)[1], rel=rel)


@pytest.mark.wrong
def test_bf16_evaluation_without_autocast_computes_in_fp32(plugin, monkeypatch):
    """In the wrong variant, bf16 has the empty forward context of its base class."""
    bf16 = plugin("bf16")
    monkeypatch.setattr(type(bf16), "forward_context", BasePrecision.forward_context)
    assert evaluated(bf16)[0] == {torch.float32}
