"""Trains with a naive loop over two full models, and with lowmem. The resulting weights must be bit-identical."""

from contextlib import nullcontext
from unittest.mock import patch

import numpy as np
import torch

import parity
from lowmem.config.instantiate import instantiate
from lowmem.data.loader import Share, WindowLoader
from lowmem.model import loading
from lowmem.offload import master_weights
from lowmem.offload.link import StagedLink
from lowmem.techniques.precision.cpu_products import widened
from lowmem.training.build import callbacks, causal_lm, optimizer

PRECISIONS = ("16-master", "bf16-master")
OPTIMIZERS = ("adamw", "adamw8bit", "adafactor")
CLIPS = {
    "norm": ["clip=0.5"],
    "value": ["clip=null", "clip_value=0.002"],
    "both": ["clip=0.02", "clip_value=0.002"],
    "off": ["clip=null"],
}


def configured(config, precision, optim, clip, accumulation, scheduler, *more):
    """Returns the config of a run of six steps. With `fixed` accumulation, a window has four micro-batches, except for
    a short window at the end of each epoch."""
    named = (f"precision={precision}", f"optim={optim}", f"accumulation={accumulation}")
    lines = parity.overrides(*named, *more)
    lines = [line for line in lines if line.split("=")[0] not in ("scheduler", "scheduler.warmup_steps")]
    return config(
        *lines, f"scheduler={scheduler}", "scheduler.warmup_steps=2", *CLIPS[clip], "max_steps=6", *more, base=()
    )


def linked_by(lane):
    """Returns a context manager in which fp32 masters exchange gradients and weights with the device over `lane`."""
    return patch.object(master_weights, "link_to", lambda device: StagedLink(lane, slot_bytes=4096, slots=2))


def build(cfg):
    torch.manual_seed(0)
    return causal_lm(cfg, loading.describe(cfg))


def windows(cfg):
    rows = parity.rows_for(parity.pairs_loss(cfg))
    return WindowLoader(rows, Share(cfg.batch_size), instantiate(cfg.accumulation), seed=0)


def naive(cfg):
    """Trains with an fp32 model and a 16-bit model, and sums all gradients in fp32. Returns (fp32 weights, 16-bit
    weights, number of skipped windows)."""
    dtype = torch.float16 if cfg.precision.target.endswith(".Float16Master") else torch.bfloat16
    with widened(dtype, cfg.device):  # as in lowmem, because another order of sums would change bits
        return _naive(cfg, dtype)


def _naive(cfg, dtype):
    wide, narrow = build(cfg), build(cfg).model.to(cfg.device)
    for p in narrow.parameters():
        p.data = rounded(p.data.cpu(), dtype).to(cfg.device)
    stepping = optimizer(cfg)(wide.model)
    schedule = instantiate(cfg.scheduler)(stepping)
    pairs = list(zip(wide.model.parameters(), narrow.parameters(), strict=True))
    scale, steps, skipped = cfg.precision.arguments.get("init_scale", 1.0), 0, 0
    for window in windows(cfg):
        for micro_batch in window.micro_batches:
            loss = wide.loss(narrow, micro_batch.each(lambda part: part.to(cfg.device))) / window.weight
            (loss * scale).backward()
            for w, p in pairs:
                gradient = p.grad.float().cpu()
                w.grad = gradient if w.grad is None else w.grad + gradient
                p.grad = None
        gradients = [w.grad for w, _ in pairs]
        torch._foreach_mul_(gradients, 1 / scale)
        if all(g.isfinite().all() for g in gradients):
            if cfg.clip_value is not None:
                torch.nn.utils.clip_grad_value_(wide.model.parameters(), cfg.clip_value)
            if cfg.clip is not None:
                torch.nn.utils.clip_grad_norm_(wide.model.parameters(), cfg.clip)
            stepping.step()
            schedule.step()
            with torch.no_grad():
                for w, p in pairs:
                    p.copy_(rounded(w, dtype))
            steps += 1
        else:
            scale, skipped = scale / 2, skipped + 1
        stepping.zero_grad()
        if steps == cfg.max_steps:
            return [w.detach() for w, _ in pairs], [p.detach().cpu() for _, p in pairs], skipped


def rounded(wide, dtype):
    """Rounds fp32 weights as lowmem's masters do: to fp16 with ties to even; to bf16 with ties away from zero, so that
    the bf16 value and 16 more bits restore the fp32 value."""
    if dtype == torch.float16:
        return wide.half()
    upper = (wide.numpy().view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)
    return torch.from_numpy(upper.astype(np.uint16).view(np.int16)).view(torch.bfloat16)


def ours(cfg, lane=None):
    """Trains with lowmem's module and Lightning's trainer. Returns (fp32 weights, 16-bit weights, number of skipped
    windows)."""
    module = build(cfg)
    plugins = list(map(instantiate, cfg.plugins))
    trainer = parity.trainer(cfg, plugins, callbacks(cfg))
    with nullcontext() if lane is None else linked_by(lane):
        trainer.fit(module, windows(cfg))
    assert trainer.global_step == cfg.max_steps
    parameters = list(module.model.parameters())
    return (
        [module.full_precision(p).detach().cpu() for p in parameters],
        [p.detach().cpu() for p in parameters],
        module.skipped_steps,
    )


def equal(one, other):
    return one[2] == other[2] and all(torch.equal(a, b) for k in (0, 1) for a, b in zip(one[k], other[k], strict=True))
