"""Times blocks of optimizer steps. As in a user's run, the device is not synchronized between the steps of a block.

A loop calls `begin` before each step and `end` after it. The device is synchronized before the first timed step and
after the last one. If the device were synchronized at every step, a loop that never waits for the device would be as
slow as a loop that waits in every step.

`in_turns` runs each loop twice in one process, in the order A B B A, so that no loop has an advantage if the card slows
down as it warms up. Each block records the card's clock rate, temperature and power at its end.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from benchmarks.card.case import Here
from lowmem.model.trainable import packed

WARM_UP = 3  # untimed steps before each timed block of steps
# Part of a card's name -> dense bf16 TFLOPS of its data sheet, the denominator of model FLOPs utilization (MFU). The
# first match applies.
PEAK = {
    "H200": 989.4,
    "H100 PCIe": 756.5,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "A100": 312.0,
    "4090": 165.2,
    "5090": 209.5,
    "A10G": 70.0,
    "3060": 25.5,
}


class Blocks:
    """Times one block of optimizer steps.

    Args:
        steps: number of timed optimizer steps.
        warm_up: number of untimed steps before the timed steps.
    """

    def __init__(self, here: Here, steps: int, warm_up: int = WARM_UP) -> None:
        self.here, self.steps, self.warm_up = here, steps, warm_up
        self.all_steps = warm_up + steps
        self.begun = self.ended = 0
        self.seconds: float | None = None
        self.sensors: dict[str, float | None] = {}
        self._losses: list[Tensor] = []

    def begin(self) -> None:
        if self.begun == self.warm_up:
            if self.here.on_card:
                _sensors()  # starts NVML before the timed block
            self.here.settle()
            self._start = time.perf_counter()
        self.begun += 1
        self._losses.append(torch.zeros((), device=self.here.device))

    def add(self, loss: Tensor) -> None:
        """Adds a micro-batch's share of the step's mean loss. The sum stays on the device until `losses` reads it."""
        self._losses[-1] = self._losses[-1] + loss.detach()

    def end(self) -> None:
        self.ended += 1
        if self.ended == self.all_steps:
            self.sensors = _sensors() if self.here.on_card else {}  # while the card still computes
            self.here.settle()
            self.seconds = time.perf_counter() - self._start

    def losses(self) -> list[float]:
        return [float(loss) for loss in self._losses]

    def as_dict(self) -> dict:
        """Returns the number of timed steps, their total seconds, and the values of `_sensors`. Raises: SystemExit: the
        loop has made fewer than `all_steps` steps."""
        if self.seconds is None:
            raise SystemExit(f"The loop made {self.ended} of {self.all_steps} steps.")
        return {"steps": self.steps, "seconds": self.seconds, **self.sensors}


def _sensors() -> dict[str, float | None]:
    """Returns the card's clock rate in MHz, temperature in degrees Celsius and power in watts; None for a value that
    cannot be read, for example without NVML."""
    found: dict[str, float | None] = {"mhz": None, "celsius": None, "watts": None}
    with suppress(Exception):  # missing sensors must not stop the measurement
        found |= {"mhz": torch.cuda.clock_rate(), "celsius": torch.cuda.temperature()}
        found["watts"] = torch.cuda.power_draw() / 1000
    return found


def in_turns(loops: Mapping[str, Callable[[], dict]], here: Here) -> Iterator[tuple[str, dict]]:
    """Runs loops in the order A B C C B A. Yields (name, row) in the order C B A; a row has the blocks of the loop's
    two runs.

    Args:
        loops: name -> function that runs the loop once and returns a row with one block in `blocks`.
    """
    first: dict[str, dict] = {}
    for name in [*loops, *reversed(loops)]:
        row = attempt(loops[name])
        here.release()
        if name in first:
            yield name, both(first[name], row)
        else:
            first[name] = row


def attempt(run: Callable[[], dict]) -> dict:
    """Runs a loop and returns its row. After an error other than `LeftOut`, the row has no blocks, and its `why` is the
    error, so that the other loops are still measured."""
    from benchmarks.card.case import LeftOut

    try:
        return run()
    except LeftOut:
        raise
    except (Exception, SystemExit) as error:
        return {"why": f"{type(error).__name__}: {error}"[-1500:], "blocks": []}


def both(first: Mapping, second: Mapping) -> dict:
    """Merges the rows of two runs of a loop: the blocks of both runs, and the other figures of the second run."""
    why = first.get("why") or second.get("why")
    row = {**first, **second, "blocks": [*first["blocks"], *second["blocks"]]}
    return row | ({"why": why} if why else {})


def seconds_per_step(row: Mapping) -> float | None:
    """Returns the mean seconds of a step over all blocks of a row, or None if nothing was timed."""
    blocks: Sequence[Mapping] = row.get("blocks", ())
    steps = sum(block["steps"] for block in blocks)
    return sum(block["seconds"] for block in blocks) / steps if steps else None


# --- FLOPs --------------------------------------------------------------------------------------------------------


def flops_per_token(network: nn.Module, seq_len: int) -> float:
    """Returns the floating-point operations that training needs per token: 6 N + 12 L d T, as in appendix B of the PaLM
    paper (https://arxiv.org/abs/2204.02311). N is the number of weights, L the number of layers, d the width of all
    attention heads together, and T is `seq_len`. The factor is 4 instead of 6 for frozen weights, because they have no
    gradient.

    N includes the input embedding only if the output layer is tied to it. Recomputation is not included, so activation
    checkpointing lowers the MFU.
    """
    config, embedding = network.config.get_text_config(decoder=True), network.get_input_embeddings()
    is_tied = network.get_output_embeddings().weight is embedding.weight
    multiplied = [p for p in network.parameters() if is_tied or p is not embedding.weight]  # tied weights once
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    of_weights = sum((6.0 if p.requires_grad else 4.0) * p.numel() for p in multiplied)
    of_weights += 4.0 * sum(packed(network))  # quantized weights
    return of_weights + 12.0 * config.num_hidden_layers * width * seq_len


def peak_flops(card: str) -> float | None:
    """Returns the dense bf16 FLOP/s of the card's data sheet, or None if PEAK does not list the card."""
    return next((1e12 * peak for part, peak in PEAK.items() if part in card), None)
