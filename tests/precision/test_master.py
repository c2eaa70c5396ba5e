"""16-bit weights on the device, fp32 masters on the host: the bits of the naive loop with two whole models."""

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch
from lightning.pytorch import Trainer
from omegaconf import OmegaConf

import parity
from conftest import ROOT
from lowmem import fit, model
from lowmem.data.loader import WindowLoader
from lowmem.memory.link import StagedLink
from lowmem.precision import master as masters
from lowmem.precision.master import BFloat16Master, Float16Master
from lowmem.precision.plugin import FullPrecision

PRECISIONS = ("16-master", "bf16-master")
OPTIMIZERS = ("adamw", "adamw8bit", "adafactor")
CLIPS = {
    "norm": ["clip=0.5"],
    "value": ["clip=null", "clip_value=0.002"],
    "both": ["clip=0.02", "clip_value=0.002"],
    "off": ["clip=null"],
}
SCHEDULERS, ACCUMULATIONS, CHECKPOINTINGS, LOSSES = (
    sorted(file.stem for file in (ROOT / "conf" / group).glob("*.yaml"))
    for group in ("scheduler", "accumulation", "gradient_checkpointing", "loss")
)


INIT_SCALE = "trainer.plugins.precision.init_scale={}"


def configured(config, precision, optim, clip, accumulation, scheduler, *more):
    """Six steps: windows of four micro-batches and, where an epoch ends, a short one."""
    named = (f"precision={precision}", f"optim={optim}", f"accumulation={accumulation}")
    lines = parity.overrides(*named, *more)
    lines = [line for line in lines if line.split("=")[0] not in ("scheduler", "scheduler.warmup_steps")]
    return config(
        *lines, f"scheduler={scheduler}", "scheduler.warmup_steps=2", *CLIPS[clip], "max_steps=6", *more, base=()
    )


def build(cfg):
    spec = OmegaConf.to_container(cfg.model)
    torch.manual_seed(0)
    return fit._module(cfg, spec, model.architecture(**spec))


def windows(cfg):
    return WindowLoader(parity.Ragged(), cfg.batch_size, fit.instantiate(cfg.accumulation), seed=0)


def naive(cfg):
    """Two whole models and a whole copy of the gradients: (fp32 weights, 16-bit weights, windows that were skipped)."""
    wide, narrow = build(cfg), build(cfg).model
    dtype = torch.float16 if cfg.trainer.plugins.precision._target_.endswith(".Float16Master") else torch.bfloat16
    for p in narrow.parameters():
        p.data = p.data.to(dtype)
    optimizer = fit.optimizer(cfg)(wide.model)
    schedule = fit.instantiate(cfg.scheduler)(optimizer)
    pairs = list(zip(wide.model.parameters(), narrow.parameters(), strict=True))
    scale, steps, skipped = cfg.trainer.plugins.precision.get("init_scale", 1.0), 0, 0
    for window in windows(cfg):
        for micro_batch in window.micro_batches:
            loss = wide.loss(narrow, micro_batch.input_ids, micro_batch.labels) / window.tokens
            (loss * scale).backward()
            for w, p in pairs:
                w.grad = p.grad.float() if w.grad is None else w.grad + p.grad.float()
                p.grad = None
        gradients = [w.grad for w, _ in pairs]
        torch._foreach_mul_(gradients, 1 / scale)
        if all(g.isfinite().all() for g in gradients):
            if cfg.clip_value is not None:
                torch.nn.utils.clip_grad_value_(wide.model.parameters(), cfg.clip_value)
            if cfg.clip is not None:
                torch.nn.utils.clip_grad_norm_(wide.model.parameters(), cfg.clip)
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                for w, p in pairs:
                    p.copy_(w)
            steps += 1
        else:
            scale, skipped = scale / 2, skipped + 1
        optimizer.zero_grad()
        if steps == cfg.max_steps:
            return [w.detach() for w, _ in pairs], [p.detach() for _, p in pairs], skipped


def ours(cfg, lane=None):
    """The same of the real module under the real trainer."""
    module = build(cfg)
    plugins = list(fit.instantiate(cfg.trainer.plugins).values())
    if lane is not None:
        plugins[0].link = StagedLink(lane, slot_bytes=4096, slots=2)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=cfg.max_steps,
        max_epochs=-1,
        plugins=plugins,
        callbacks=list(fit.instantiate(cfg.callbacks).values()),
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    )
    trainer.fit(module, windows(cfg))
    assert trainer.global_step == cfg.max_steps
    parameters = list(module.model.parameters())
    return [plugins[0].master(p).detach() for p in parameters], [p.detach() for p in parameters], module.skipped_steps


def equal(one, other):
    return one[2] == other[2] and all(torch.equal(a, b) for k in (0, 1) for a, b in zip(one[k], other[k], strict=True))


# --- bit-equality -----------------------------------------------------------------------------------------------------

QUICK = [("none", "cosine"), ("fixed", "linear"), ("by_epoch", "constant")]


@pytest.mark.parametrize("optim", OPTIMIZERS)
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_bits_of_the_naive_loop(config, precision, clip, optim):
    for accumulation, scheduler in QUICK[:: 1 if optim == "adamw" else 2]:
        cfg = configured(config, precision, optim, clip, accumulation, scheduler)
        assert equal(ours(cfg), naive(cfg)), (accumulation, scheduler)


@pytest.mark.slow
@pytest.mark.parametrize("optim", OPTIMIZERS)
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_bits_of_the_naive_loop_with_every_accumulation_and_schedule(config, precision, clip, optim):
    for accumulation, scheduler in product(ACCUMULATIONS, SCHEDULERS):
        cfg = configured(config, precision, optim, clip, accumulation, scheduler)
        assert equal(ours(cfg), naive(cfg)), (accumulation, scheduler)


@pytest.mark.parametrize("checkpointing", [pytest.param(c, marks=pytest.mark.slow) for c in CHECKPOINTINGS])
@pytest.mark.parametrize("clip", ["norm", "off"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_bits_of_the_naive_loop_with_every_checkpointing(config, precision, clip, checkpointing):
    for optim, loss in product(OPTIMIZERS, LOSSES):
        more = (f"gradient_checkpointing={checkpointing}", f"loss={loss}")
        cfg = configured(config, precision, optim, clip, "fixed", "linear", *more)
        assert equal(ours(cfg), naive(cfg)), (optim, loss)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_checkpointed_chunked_run_has_the_bits_of_the_naive_loop(config, precision):
    """The small sibling of the one above."""
    more = ("gradient_checkpointing=every_layer", "loss=chunked")
    cfg = configured(config, precision, "adamw8bit", "both", "fixed", "cosine", *more)
    assert equal(ours(cfg), naive(cfg))


@pytest.mark.parametrize("clip", ["norm", "off"])
def test_an_overflow_skips_the_step_and_halves_the_scale_as_the_naive_scaler_does(config, clip):
    cfg = configured(config, "16-master", "adamw", clip, "fixed", "linear", INIT_SCALE.format(2.0**30))
    found = ours(cfg)
    assert found[2] > 3 and equal(found, naive(cfg))


def test_stepping_early_changes_no_bit(config):
    """Also where a window of four micro-batches has summed three of them before the last steps."""
    for accumulation in ("none", "fixed"):
        early, late = (
            ours(
                configured(
                    config, "bf16-master", "adamw8bit", "value", accumulation, "linear", f"master.early_step={e}"
                )
            )
            for e in ("true", "false")
        )
        assert equal(early, late)


def test_tied_weights_stay_tied(config):
    def both(tied):
        cfg = configured(
            config, "bf16-master", "adamw", "norm", "fixed", "linear", f"model.architecture.tie_word_embeddings={tied}"
        )
        return ours(cfg), naive(cfg)

    (tied, theirs), (untied, _) = both("true"), both("false")
    assert len(tied[0]) == len(untied[0]) - 1 and equal(tied, theirs)


# --- deliberately wrong variants --------------------------------------------------------------------------------------


def masters_from_rounded_weights(monkeypatch):
    right = BFloat16Master.convert_module

    def wrong(self, module):
        for p in module.parameters():
            p.data = p.data.to(self.dtype).float()
        return right(self, module)

    monkeypatch.setattr(BFloat16Master, "convert_module", wrong)


def clipped_before_unscaling(monkeypatch):
    right = Float16Master.unscale

    def wrong(self, optimizer):
        finite = right(self, optimizer)
        self._norms = [norm * self.gradient_scale for norm in self._norms]
        return finite

    monkeypatch.setattr(Float16Master, "unscale", wrong)


def one_gradient_dropped(monkeypatch):
    right = masters.Master.add

    def wrong(self, start, piece):
        if not (self.complete and "layers.1.mlp.up" in self.name):  # all but the first of each window
            right(self, start, piece)

    monkeypatch.setattr(masters.Master, "add", wrong)


def summed_in_16_bits(monkeypatch):
    right = masters.Master.add

    def wrong(self, start, piece):
        if self.complete:
            self.sum = self.sum.to(piece.dtype)
            self.sum[start : start + piece.numel()].add_(piece)
        else:
            right(self, start, piece)

    monkeypatch.setattr(masters.Master, "add", wrong)


@pytest.mark.parametrize(
    "wrong", [masters_from_rounded_weights, clipped_before_unscaling, one_gradient_dropped, summed_in_16_bits]
)
def test_a_wrong_variant_has_other_bits(config, wrong, monkeypatch):
    cfg = configured(config, "16-master", "adamw", "norm", "fixed", "linear")
    assert equal(ours(cfg), naive(cfg))
    wrong(monkeypatch)
    assert not equal(ours(cfg), naive(cfg))


# --- the staged link, as beside a card --------------------------------------------------------------------------------


class SlowLane:
    """A device whose copies run later, on a thread of their own; what it "computes" is computed at once."""

    def __init__(self):
        self.copies, self.moved = ThreadPoolExecutor(1), 0

    def staging(self, size):
        return torch.empty(size, dtype=torch.uint8)

    def mark(self):
        return Reached(None)

    def copy(self, to, source, after):
        self.moved += to.nbytes

        def late():
            after.synchronize()
            time.sleep(0.0005)
            with torch.no_grad():
                to.copy_(source)

        return Reached(self.copies.submit(late))

    def hold(self, until):
        until.synchronize()


class Reached:
    def __init__(self, future):
        self.future = future

    def synchronize(self):
        if self.future is not None:
            self.future.result()


@pytest.mark.parametrize("clip", ["norm", "off"])
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_the_staged_link_has_the_bits_of_the_naive_loop(config, clip, optim):
    for precision, loss in zip(PRECISIONS, LOSSES, strict=True):
        cfg = configured(config, precision, optim, clip, "fixed", "linear", f"loss={loss}", "max_steps=3")
        assert equal(ours(cfg, SlowLane()), naive(cfg))


def test_over_the_link_go_two_bytes_per_parameter_and_micro_batch_and_two_back(config):
    lane, cfg = SlowLane(), configured(config, "bf16-master", "adamw", "norm", "none", "linear", "max_steps=3")
    parameters = sum(p.numel() for p in ours(cfg, lane)[0])
    assert lane.moved == 3 * (2 + 2) * parameters


def test_not_waiting_for_a_weight_has_other_bits(config, monkeypatch):
    """The deliberately wrong variant: the next forward pass reads what has not come back yet."""
    cfg = configured(config, "bf16-master", "adamw", "norm", "none", "linear", "max_steps=3")
    monkeypatch.setattr(StagedLink, "wait", lambda self, weight: None)
    try:
        assert not equal(ours(cfg, SlowLane()), naive(cfg))
    except RuntimeError as error:  # where it came back while backward was still reading the old one
        assert "modified by an inplace operation" in str(error)


@pytest.mark.parametrize("disturbed", [False, True])
def test_what_the_loop_does_meanwhile_does_not_disturb_the_host_thread(config, monkeypatch, disturbed):
    """The loop drops gradients and steps the schedule while the host still steps; disturbed: it drops those, too."""
    right = masters.step_one

    def slow(optimizer, group, p):
        time.sleep(0.002)
        if p.grad is not None:  # without one an optimizer says nothing and steps nothing
            right(optimizer, group, p)

    monkeypatch.setattr(masters, "step_one", slow)
    if disturbed:
        monkeypatch.setattr(BFloat16Master, "drop_gradients", FullPrecision.drop_gradients)
    cfg = configured(config, "bf16-master", "adamw", "norm", "none", "linear", "max_steps=3")
    assert equal(ours(cfg, SlowLane()), naive(cfg)) != disturbed


def test_an_error_of_the_host_thread_ends_the_run(config, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("on the host")

    monkeypatch.setattr(masters, "_step", broken)
    with pytest.raises(ZeroDivisionError, match="on the host"):
        ours(configured(config, "bf16-master", "adamw", "off", "none", "linear"), SlowLane())
