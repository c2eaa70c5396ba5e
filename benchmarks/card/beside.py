"""Times the training of a model with the shapes of Llama-3.2-1B (1.24B parameters) in lowmem and in other loops.

All loops that `loops` runs train equal random weights on equal rows, with the optimizer and schedule that lowmem builds
and with lowmem's clipping. The weights are in fp32, with bf16 autocast. A step has 8 sequences of 2048 tokens, in two
micro-batches. `variants` and `tf32` time other recipes, in lowmem only.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks import loops as others
from benchmarks.card import ours, recipes
from benchmarks.card.blocks import Blocks, attempt, flops_per_token, in_turns, seconds_per_step
from benchmarks.card.case import Here, LeftOut

NAME = "1.24B, bf16"
NEEDED = 60  # GiB: 18.4 of fp32 weights, gradients and AdamW state, 25 of activations, 10 of logits, and a margin
VARIANTS = (
    *("1.24B, bf16-true", "1.24B, bf16, chunked loss", "1.24B, bf16-true, tiled loss"),
    *("1.24B, bf16, compiled", "1.24B, bf16-true, compiled"),
)
PLAIN = "a plain PyTorch loop"


def loops(here: Here) -> Iterator[dict]:
    """Yields the rows of lowmem and of a plain loop, which run twice each and in turns, then the rows of Lightning,
    transformers.Trainer and TRL's SFTTrainer, which run once each.

    Raises:
        LeftOut: the card is too small.
    """
    _require(here)
    in_order = {
        PLAIN: partial(other, here, others.plain, PLAIN),
        "lowmem": lambda: ours.train(NAME, here, Blocks(here, steps(here))),
    }
    rows = {by: row | {"run": NAME, "by": by} for by, row in in_turns(in_order, here)}
    yield rows["lowmem"]
    yield rows[PLAIN] | {"found": compared(rows["lowmem"], rows[PLAIN])}
    for name, loop in frameworks().items():
        row = attempt(partial(other, here, loop, name)) | {"run": NAME, "by": name}
        here.release()
        yield row | {"found": compared(rows["lowmem"], row)}


def frameworks() -> dict[str, Callable]:
    """Returns a dict that maps the name of a framework to its training loop, a function of `Materials` and a watch."""

    def sft(loop: others.Materials, watch: Blocks) -> None:
        from benchmarks.card.sft import sft as train  # imported here, because TRL may not be installed

        train(loop, watch)

    return {"Lightning": others.lightning, "transformers.Trainer": others.trainer, "TRL SFTTrainer": sft}


def variants(here: Here) -> Iterator[dict]:
    """Yields the row of each recipe of VARIANTS in lowmem. Raises: LeftOut: the card is too small."""
    _require(here)
    for name in VARIANTS:
        yield attempt(lambda name=name: ours.train(name, here, Blocks(here, steps(here) // 2))) | {"run": name}
        here.release()


def tf32(here: Here) -> Iterator[dict]:
    """Runs a recipe with TF32 matmuls and with fp32 matmuls in turns, and yields a row for each."""
    fast, slow = "1.24B, tf32", "1.24B, fp32"
    rows = dict(in_turns({n: lambda n=n: ours.train(n, here, Blocks(here, 5)) for n in (fast, slow)}, here))
    times = [seconds_per_step(rows[name]) for name in (slow, fast)]
    found = {} if None in times else {"speed over that of fp32": times[0] / times[1]}
    yield rows[fast] | {"run": fast, "found": found}
    yield rows[slow] | {"run": slow}


def steps(here: Here) -> int:
    return 20 if here.on_card else 2


def other(here: Here, loop: Callable, by: str, run: str = NAME, watch: Blocks | None = None) -> dict:
    """Trains with one of the other loops and returns its row.

    Args:
        by: name of the loop.
        run: name of a run of `recipes.RUNS`.
        watch: times the loop's steps; None: `Blocks` of `steps(here)` steps.
    """
    watch = watch or Blocks(here, steps(here))
    typed = recipes.typed(run, here, f"max_steps={watch.all_steps}")
    with ours.drawn_at_once(here.device):
        of_loop = others.materials(typed, watch.all_steps)
    if here.on_card:
        torch.cuda.reset_peak_memory_stats()
    with others.same_products(of_loop.bf16, here.device):
        loop(of_loop, watch)
    first = of_loop.windows[0]
    return {
        "run": run,
        "by": by,
        "tokens": sum(micro_batch.input_ids.numel() for micro_batch in first),
        "flops_per_token": flops_per_token(of_loop.network, first[0].input_ids.shape[1]),
        "blocks": [watch.as_dict()],
        "losses": watch.losses(),
        "peak_bytes": torch.cuda.max_memory_allocated() if here.on_card else None,
        "reserved_bytes": torch.cuda.max_memory_reserved() if here.on_card else None,
    }


def compared(mine: dict, theirs: dict, speed: str = "lowmem's speed over this loop's") -> dict[str, object]:
    """Returns the ratio of two loops' speeds, and the largest relative difference between their losses of the same
    step; {} if a loop failed.

    Args:
        speed: name of the ratio, which is the speed of `mine` divided by the speed of `theirs`.
    """
    times = [seconds_per_step(row) for row in (mine, theirs)]
    if None in times:
        return {}
    pairs = list(zip(mine["losses"], theirs["losses"], strict=True))
    return {
        speed: times[1] / times[0],
        "losses apart": max(abs(a / b - 1) for a, b in pairs),
    }


def _require(here: Here) -> None:
    if here.gib() < NEEDED:
        raise LeftOut(f"it needs {NEEDED} GiB and the card has {here.gib():.0f}")
