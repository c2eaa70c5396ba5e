"""Tests precision plugins in Lightning's trainer: dtypes, gradients that callbacks see, and skipped steps."""

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from documents import split
from lowmem.config.accumulation import fixed
from lowmem.config.instantiate import instantiate
from lowmem.data.loader import Share, WindowLoader
from lowmem.data.packing import Joined
from lowmem.model import loading
from lowmem.offload.master_weights import MasterWeights
from lowmem.step.optimizer import DeviceOptimizer
from lowmem.system.errors import Refused
from lowmem.techniques.loss import cross_entropy as losses
from lowmem.techniques.precision.fp32_weights import Float16Autocast
from lowmem.training.build import optimizer
from lowmem.training.module import CausalLM, Update
from tolerances import ADAMW_REORDERED, FP16

pytestmark = pytest.mark.kernels
DTYPES = {"32": torch.float32, "16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture
def trained(config):
    """Returns a function that takes overrides, trains on random tokens with Lightning's trainer, and returns the module
    and the trainer."""

    def run(*overrides, callbacks=(), steps=4, batches=1, ckpt=None):
        cfg = config(*overrides)
        torch.manual_seed(0)
        network = loading.load(loading.describe(cfg), torch.float32)
        update = Update(optimizer(cfg), instantiate(cfg.scheduler), cfg.clip, cfg.clip_value)
        module = CausalLM(network, instantiate(cfg.loss), update)
        ids = torch.randint(0, 300, (40 * 16 + 1,), generator=torch.Generator().manual_seed(1)).numpy()
        train = WindowLoader(Joined(split(ids), 16, "train"), Share(4), fixed(batches), seed=0)
        off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        trainer = Trainer(
            accelerator="cpu",
            max_steps=steps,
            max_epochs=-1,
            plugins=list(map(instantiate, cfg.plugins)),
            callbacks=list(callbacks),
            **dict.fromkeys(off, False),
        )
        trainer.fit(module, train)
        return module, trainer

    return run


class Norms(Callback):
    """Records the gradient norm that callbacks see before each optimizer step."""

    def __init__(self):
        self.seen = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        self.seen.append(torch.nn.utils.get_total_norm(grads).item())


@pytest.mark.parametrize(
    ("precision", "dtype"), [("32", torch.float32), ("16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_forward_computes_in_the_precision_dtype_with_fp32_weights(trained, monkeypatch, precision, dtype):
    seen = set()

    def spying(network, batch):
        logits = network(**batch.inputs, use_cache=False).logits
        seen.add(logits.dtype)
        return losses.F.cross_entropy(logits.flatten(0, 1).float(), batch.labels.flatten(), reduction="sum")

    monkeypatch.setattr(losses, "full", spying)
    module, _ = trained(f"precision={precision}")
    assert seen == {dtype}
    assert {p.dtype for p in module.parameters()} == {torch.float32}


@pytest.mark.parametrize("batches", [1, 3])
def test_fused_adamw_clips_unscaled_gradients_under_fp16(trained, batches):
    """Lightning hands a fused optimizer gradients that are still scaled, and refuses to clip them."""
    runs = {}
    for name, overrides in {
        "fused": ("precision=16", "optim=adamw"),
        "unfused": ("precision=16", "optim=adamw", "optim.fused=false"),
        "fp32": ("precision=32", "optim=adamw"),
    }.items():
        norms = Norms()
        module, _ = trained(*overrides, "clip=0.5", callbacks=[norms], batches=batches)
        runs[name] = (norms.seen, torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert runs["fused"][0] == pytest.approx(runs["unfused"][0], rel=ADAMW_REORDERED)
    assert runs["fused"][0][0] == pytest.approx(runs["fp32"][0][0], rel=FP16)
    assert min(runs["fused"][0]) > 0.5  # clipping changes the gradients
    fused, unfused = runs["fused"][1], runs["unfused"][1]
    assert (fused - unfused).norm() / unfused.norm() < ADAMW_REORDERED


@pytest.mark.wrong
def test_clipping_before_unscaling_leaves_under_1_percent_of_the_gradient_norm(trained, monkeypatch):
    """In the deliberately wrong variant, gradients are clipped while they are still multiplied by the loss scale."""
    right = Norms()
    trained("precision=16", "clip=0.5", callbacks=[right])

    def clip_first(self, *how):
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.5)
        return finish(self, *how)

    finish = DeviceOptimizer.finish
    monkeypatch.setattr(DeviceOptimizer, "finish", clip_first)
    wrong = Norms()
    trained("precision=16", "clip=0.5", callbacks=[wrong])
    assert wrong.seen[0] < 0.01 * right.seen[0]


class Gradients(Callback):
    """Records the module's gradient norm, and the norm and the loss scale of the gradients that parameters hold (norm
    None and scale 1 if they hold no gradients)."""

    def on_before_optimizer_step(self, trainer, module, optimizer):
        grads = [p.grad.float() for p in module.parameters() if p.grad is not None]
        self.true = float(module.gradient_norm)
        self.stored = float(torch.nn.utils.get_total_norm(grads)) if grads else None
        self.scale = optimizer.scale if grads else 1.0


@pytest.mark.parametrize(
    ("precision", "scaled", "stored"),
    [
        *[(precision, False, True) for precision in ("32", "bf16", "16", "bf16-true")],
        ("16-true", True, True),
        *[(precision, False, False) for precision in ("16-master", "bf16-master")],
    ],
)
def test_callbacks_see_the_unscaled_gradient_norm_in_every_precision(trained, precision, scaled, stored):
    """A norm that still contains the loss scale would be 65,536 times as large. 16-bit products change the norm by
    about 1 %."""
    seen, wide = Gradients(), Gradients()
    trained("precision=32", "clip=null", callbacks=[wide], steps=1)
    hooks = [] if stored else [MasterWeights()]
    trained(f"precision={precision}", "clip=null", callbacks=[*hooks, seen], steps=1)
    assert seen.true == pytest.approx(wide.true, rel=0.1)
    assert (seen.stored is not None) == stored and (seen.scale > 1 and stored) == scaled
    if stored:
        assert seen.stored / seen.scale == pytest.approx(seen.true, rel=1e-3)


class Clipped(Callback):
    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.before = [p.grad.clone() for g in optimizer.param_groups for p in g["params"]]

    def on_before_zero_grad(self, *_):
        raise AssertionError("not called in manual optimization")


def test_clip_value_is_applied_before_the_norm_clip(trained, monkeypatch):
    before, after = Clipped(), {}
    step = torch.optim.AdamW.step

    def spy(self, closure=None):
        after["grads"] = [p.grad.clone() for g in self.param_groups for p in g["params"]]
        return step(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    trained("clip=0.05", "clip_value=0.01", callbacks=[before], steps=1)
    expected = [g.clamp(-0.01, 0.01) for g in before.before]
    factor = 0.05 / (torch.nn.utils.get_total_norm(expected) + 1e-6)
    assert factor < 1
    for ours, theirs in zip(after["grads"], expected, strict=True):
        torch.testing.assert_close(ours, theirs * factor)


class Overflow(Callback):
    """Makes a parameter's gradient infinite in these windows, as an overflow would."""

    def __init__(self, windows):
        self.windows, self.factors = windows, []

    def on_after_backward(self, trainer, module):
        self.batch = trainer.fit_loop.epoch_loop.batch_idx
        if self.batch in self.windows:
            next(module.parameters()).grad.fill_(float("inf"))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        lr = trainer.optimizers[0].param_groups[0]["lr"]
        self.factors.append((outputs["stepped"], trainer.global_step, module.lr_schedulers().last_epoch, lr))


def test_skipped_fp16_step_counts_neither_as_optimizer_step_nor_as_schedule_step(trained):
    """With max_steps=10 and three overflows, thirteen windows give ten updates and ten steps of the schedule."""
    overflow = Overflow({0, 4, 5})
    module, trainer = trained("precision=16", "max_steps=10", "scheduler=linear", callbacks=[overflow], steps=10)
    stepped = [s for s, *_ in overflow.factors]
    assert len(stepped) == 13 and sum(stepped) == 10 and module.skipped_steps == 3
    assert trainer.global_step == 10 and overflow.factors[-1][2] == 10
    assert {state["step"].item() for state in trainer.optimizers[0].state.values()} == {10}
    assert module.tokens == 13 * 4 * 16  # tokens of skipped steps are counted, too
    assert trainer.precision_plugin.loss_scale.value == 2.0**16 / 2**3
    for (did, step, epoch, lr), (_, earlier, _, lr_before) in zip(overflow.factors[1:], overflow.factors, strict=False):
        assert step == epoch == earlier + did
        assert (lr == lr_before) == (not did)


def test_skipped_fp16_step_leaves_the_weights_unchanged(trained):
    clean, _ = trained("precision=16", steps=1)
    weights = {n: p.detach().clone() for n, p in clean.named_parameters()}

    class Compare(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 1:
                assert not outputs["stepped"]
                for name, p in module.named_parameters():
                    assert torch.equal(p, weights[name])
                raise KeyError("seen")

    with pytest.raises(KeyError, match="seen"):
        trained("precision=16", callbacks=[Overflow({1}), Compare()])


def test_fp16_overflow_in_every_step_ends_the_run_with_a_refusal(trained):
    with pytest.raises(Refused, match=r"In step 1 the gradient of .* is not finite"):
        trained("precision=16", callbacks=[Overflow(range(1000))], steps=1000)


def test_loss_scale_and_its_growth_counter_are_restored_from_a_state_dict():
    one, other = Float16Autocast(init_scale=512.0, growth_interval=3), Float16Autocast(growth_interval=3)
    for _ in range(2):
        one.loss_scale.update(True)
    other.load_state_dict(one.state_dict())
    assert other.loss_scale.value == 512.0
    other.loss_scale.update(True)  # the third step without overflow
    assert other.loss_scale.value == 1024.0


def test_backward_and_optimizer_step_under_bf16_run_outside_autocast(trained):
    seen = []

    class Look(Callback):
        def on_before_backward(self, *_):
            seen.append(torch.is_autocast_enabled("cpu"))

        def on_before_optimizer_step(self, *_):
            seen.append(torch.is_autocast_enabled("cpu"))

    trained("precision=bf16", callbacks=[Look()], steps=1)
    assert seen == [False, False]
