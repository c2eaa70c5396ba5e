"""Trains with lowmem in this process, like `python train.py`, and returns the figures of the run.

The plan, checkpoints, evaluation, the export and W&B are off. A plan would take seconds, and a checkpoint of 8B
parameters minutes. The memory meter and metrics.csv are on.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import initialization

from benchmarks.card import recipes
from benchmarks.card.blocks import Blocks, flops_per_token
from benchmarks.card.case import Here
from lowmem.config.settle import Run, run_of
from lowmem.memory.meter import MemoryMeter
from lowmem.model import loading
from lowmem.system.quiet_libraries import quiet
from lowmem.training import training, watchers

POOL = (1 << 24) + 43  # numbers in the pool of initial weights; a prime, so that blocks of equal shape differ
STD = 0.02


@contextmanager
def drawn_at_once(device: str) -> Iterator[None]:
    """Returns a context manager in which weights are initialized by copies from a pool of random numbers.

    On the host, drawing 8B random numbers takes minutes, and copying 8B numbers takes seconds. Zeros or ones would not
    do, because a card multiplies them faster than trained weights. The pool is drawn on the device.
    """
    torch.manual_seed(0)
    pool = (STD * torch.randn(POOL, device=device)).cpu().repeat(2)
    if device == "cuda":
        torch.cuda.empty_cache()  # otherwise the run's reserved memory would include the pool
    start = 0

    def copied(tensor: Tensor, *_, **__) -> Tensor:
        nonlocal start
        with torch.no_grad():
            for piece in tensor.view(-1).split(POOL):
                piece.copy_(pool[start : start + len(piece)])
                start = (start + len(piece)) % POOL
        return tensor

    draws = dict.fromkeys(("normal_", "uniform_", "trunc_normal_", "kaiming_uniform_", "xavier_uniform_"), copied)
    draws = {name: draws.get(name, draw) for name, draw in initialization.TORCH_INIT_FUNCTIONS.items()}

    @contextmanager
    def as_drawn() -> Iterator[None]:
        with patch.dict(initialization.TORCH_INIT_FUNCTIONS, draws), initialization.guard_torch_init_functions():
            yield

    with patch.object(loading, "drawn_in_fp32", as_drawn):
        yield


def composed(name: str, here: Here, *more: str) -> Run:
    """Returns the checked settings of a run of `recipes.RUNS`."""
    return checked(recipes.typed(name, here, *more))


def checked(lines: Sequence[str]) -> Run:
    """Returns the settings for these overrides, after the checks that train.py makes."""
    from lowmem.config.check import check

    run = run_of(lines).sized().resolved()
    check(run, {})
    quiet()
    return run


def train(name: str, here: Here, watch: Blocks, *more: str) -> dict:
    """Trains a run for the steps of a watch.

    Args:
        name: name of a run of `recipes.RUNS`.
        more: further overrides, which take precedence.

    Returns:
        A row with the tokens per step, the FLOPs per token, the block, the losses, and the figures of `peaks`.
    """
    run = composed(name, here, f"max_steps={watch.all_steps}", *more)
    with (
        drawn_at_once(here.device),
        patch.object(watchers, "Stop", in_blocks(watch)),
        patch.object(MemoryMeter, "first", watch.warm_up),  # after the warm-up, the meter samples only every 20th step
        training.training_session(run, here.folder / "run", keeps=False) as trained,
    ):
        return {
            "run": name,
            "by": "lowmem",
            "tokens": run.windows.largest * run.batch_size * run.seq_len,
            "flops_per_token": flops_per_token(trained.module.model, run.seq_len),
            "blocks": [watch.as_dict()],
            "losses": watch.losses(),
            **peaks(trained.watchers.meter),
        }


def peaks(meter: MemoryMeter) -> dict[str, int | None]:
    """Returns the peak bytes of a run: of tensors on the device, of memory reserved by CUDA's allocator (None on a
    CPU), and of the process's resident memory."""
    reserved = [int(row["reserved_peak_bytes"]) for row in meter.rows() if row.get("reserved_peak_bytes")]
    return {
        "peak_bytes": meter.peak_bytes["device"],
        "reserved_bytes": max(reserved, default=None),
        "host_bytes": meter.peak_bytes["host_rss"],
    }


def in_blocks(watch: Blocks) -> type:
    """Returns a subclass of `Stop` that calls a watch when a step begins and ends, and passes it each step's loss."""

    class InBlocks(watchers.Stop):
        def on_train_batch_start(self, trainer, module, *_) -> None:
            if trainer.global_step:  # here all callbacks of the previous step have run
                watch.end()
            watch.begin()

        def on_train_batch_end(self, trainer, module, outputs: dict, *_) -> None:
            watch.add(outputs["loss"])
            super().on_train_batch_end(trainer, module)

        def on_train_end(self, trainer, module) -> None:
            watch.end()

    return InBlocks
