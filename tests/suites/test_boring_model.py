"""Lightning's BoringModel with each precision: trained as Lightning trains it, or refused before the first step."""

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
# The distance of the weights' movement from that of fp32, as a part of it. A number in fp16 is off by 2^-11 of itself,
# one in bf16 by 2^-8 (stochastic rounding: 2^-7): outputs and gradients of three steps are, and 16-bit weights, too.
BOUNDS = {"32": 0, "tf32": 0, "16": 2**-9, "bf16": 2**-6, "16-true": 2**-8, "bf16-true": 2**-5, "bf16-sr": 2**-5}
COMPUTES_IN = {"16": torch.float16, "bf16": torch.bfloat16}  # others: in the dtype in which the weights were loaded


class ByTheContract(ManualOptimBoringModel):
    """Wraps its optimizer and uses the result as CausalLM does."""

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
    """Returns (movement of the weights, module) of a short run."""
    torch.manual_seed(0)
    module = module_class()
    module.to(dtype)  # the caller loads weights in their dtype
    before = module.layer.weight.detach().float().clone()
    plugins = [] if plugin is None else [plugin]
    trainer = Trainer(accelerator="cpu", max_steps=STEPS, limit_val_batches=0, plugins=plugins, **OFF)
    trainer.fit(module)
    return module.layer.weight.detach().float() - before, module


def off(plugin):
    expected, _ = trained(ManualOptimBoringModel)
    moved, _ = trained(ByTheContract, plugin, plugin.weights_dtype or plugin.dtype)
    return ((moved - expected).norm() / expected.norm()).item()


@pytest.mark.kernels
@pytest.mark.parametrize("precision", BOUNDS)
def test_boring_model_with_our_optimizer_moves_as_in_lightning(plugin, precision):
    assert off(plugin(precision)) <= BOUNDS[precision]


@pytest.mark.wrong
@pytest.mark.parametrize("precision", ["16", "16-true"])
def test_gradients_that_stay_scaled_are_caught(plugin, monkeypatch, precision):
    """The deliberately wrong variant: the optimizer is not told the loss scale."""
    finish = DeviceOptimizer.finish
    monkeypatch.setattr(DeviceOptimizer, "finish", lambda self, loss, scale: finish(self, loss))
    scaled = plugin(precision)
    scaled.loss_scale.value = 4.0  # at more the weights grow until fp16 overflows
    assert off(scaled) > 1


def test_precisions_are_trained_or_step_on_the_host():
    """A new precision gets a bound, unless its masters need CausalLM."""
    assert set(PRECISIONS) - set(BOUNDS) == {"16-master", "bf16-master"}


@pytest.mark.parametrize("module_class", [BoringModel, ManualOptimBoringModel])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_boring_model_with_a_plain_optimizer_is_refused_before_the_first_step(plugin, precision, module_class):
    class Untouched(module_class):
        def training_step(self, batch, batch_idx):
            raise AssertionError("it trains")

    with pytest.raises(Refused, match=r"cannot train Untouched: .*Trainer\(precision="):
        trained(Untouched, plugin(precision))


@pytest.mark.wrong
def test_a_plain_optimizer_that_is_not_refused_steps_scaled_gradients(plugin, monkeypatch):
    """The deliberately wrong variant: Lightning's own `connect`."""
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
    rel = 2**-6 if precision in COMPUTES_IN else 0  # twice the rounding of an output in bf16
    assert losses == pytest.approx(evaluated(None)[1], rel=rel)


@pytest.mark.wrong
def test_an_evaluation_without_autocast_is_caught(plugin, monkeypatch):
    """The deliberately wrong variant: the context of an evaluation is Lightning's empty one."""
    bf16 = plugin("bf16")
    monkeypatch.setattr(type(bf16), "forward_context", BasePrecision.forward_context)
    assert evaluated(bf16)[0] == {torch.float32}
