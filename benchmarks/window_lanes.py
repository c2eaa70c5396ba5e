"""Draws docs/window.png. The picture shows when an accumulation window computes, copies and updates weights, with
weights.order=by_micro_batch and with weights.order=by_layer.

A small model is trained on a CPU, where copies run synchronously. A simulated clock assumes the times of a card with a
slow link. The forward pass of a block takes 1 unit and its backward pass 3 units, a copy of its 16-bit weights takes 4
units, and its update on the host takes 2 units.

python -m benchmarks.window_lanes        # half a minute
"""

import tempfile
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.runner import ROOT
from lowmem.config.settle import run_of
from lowmem.fit import fit
from lowmem.system.torch_private import in_backward
from lowmem.techniques.weights.streamed import Streamed

BLOCKS, MICRO_BATCHES = 4, 4
FORWARD, BACKWARD, COPY, STEP = 1.0, 3.0, 4.0, 2.0  # time units per block; COPY: for its 16-bit weights
LANES = ("computes", "copies up", "copies down", "host steps")
MODEL = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": BLOCKS, "num_attention_heads": 2}
MODEL |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 300, "tie_word_embeddings": "false"}
LINES = [
    *("model=llama-3.2-1b", "model.pretrained=false", "data=random", "lr=1e-3", "seq_len=16", "batch_size=1"),
    *(f"model.architecture.{key}={value}" for key, value in MODEL.items()),
    *("model.architecture.bos_token_id=null", "model.architecture.eos_token_id=null"),
    *("accumulation=fixed", f"accumulation.batches={MICRO_BATCHES}", "precision=bf16-master", "optim=adamw8bit"),
    *("clip=null", "weights=streamed", "gradient_checkpointing=offload", "loss=full", "max_steps=1", "val_every=1000"),
    *("sample_tokens=0", "logger=none", "plan=off", "device=cpu"),
]
Interval = tuple[float, float, int]  # start, end, number of the block


class At:
    """An event that is complete at a time of the simulated clock."""

    def __init__(self, time: float) -> None:
        self.time = time

    def synchronize(self) -> None:
        """No-op: `Clock.copy` copies at once."""


class Clock:
    """A copy lane with simulated times. Also simulates the times of the link's work: gradient copies and updates.

    Args:
        weights: the streamed weights of the trained model.
        link: the run's link. Its `fetch` and `update_block` are wrapped.
    """

    registers = True

    def __init__(self, weights: Streamed, link: object) -> None:
        self.now = 0.0
        self.free = dict.fromkeys(LANES, 0.0)
        self.intervals: dict[str, list[Interval]] = defaultdict(list)
        self.numbers = {id(p): number for number, block in enumerate(weights.blocks) for p in block.parameters()}
        self.host_blocks = {id(host_block): number for number, host_block in enumerate(weights.host_blocks)}
        self.sizes = {number: host_block.flat.nbytes for number, host_block in enumerate(weights.host_blocks)}
        self.memory = {host_block.flat.data_ptr(): number for number, host_block in enumerate(weights.host_blocks)}
        for number, block in enumerate(weights.blocks):
            block.mlp.register_forward_pre_hook(lambda *_, number=number: self.computes(number))
        self.fetch, self.update_block = link.fetch, link.update_block
        link.fetch, link.update_block = self.fetches, self.steps

    def takes(self, lane: str, number: int, start: float, duration: float) -> float:
        """Records an interval of a lane. Returns its start, which is `start` or, if later, the time at which the lane
        becomes free. In an evaluation, records nothing and returns `start`."""
        if not (torch.is_grad_enabled() or in_backward()):
            return start
        start = max(start, self.free[lane])
        self.free[lane] = start + duration
        self.intervals[lane].append((start, start + duration, number))
        return start

    def computes(self, number: int) -> None:
        duration = BACKWARD if in_backward() else FORWARD
        self.takes("computes", number, self.now, duration)
        self.now = max(self.now, self.free["computes"])

    # --- a lane -------------------------------------------------------------------------------------------------------

    def staging(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def mark(self) -> At:
        return At(self.now)

    def copy(self, to: Tensor, source: Tensor, after: At) -> At:
        to.copy_(source)
        if source.data_ptr() not in self.memory:  # weights outside of blocks, such as rows of the embedding
            return At(self.now)
        self.takes("copies up", self.memory[source.data_ptr()], max(self.now, after.time), COPY)
        return At(self.free["copies up"])

    def hold(self, until: At) -> None:
        self.now = max(self.now, until.time)

    def register(self, _: Tensor) -> None:
        """No-op."""

    def unregister(self, _: Tensor) -> None:
        """No-op."""

    # --- a link -------------------------------------------------------------------------------------------------------

    def fetches(self, gradient: Tensor, receive: object) -> None:
        """Records the copy of a gradient to the host if the weight is in a block. Then calls the link's `fetch`."""
        number = self.numbers.get(id(getattr(getattr(receive, "__self__", None), "weight", None)))
        if number is not None:
            start = self.takes("copies down", number, self.now, COPY * gradient.nbytes / self.sizes[number])
            self.now = max(self.now, start)  # staging memory has space for one waiting gradient
        self.fetch(gradient, receive)

    def steps(self, host_block: object, compute: object) -> None:
        """Records the update of a weight if the weight is in a block. Then calls the link's `update_block`."""
        if id(host_block) in self.host_blocks:
            number = self.host_blocks[id(host_block)]
            self.takes("host steps", number, self.free["copies down"], STEP / len(host_block.spans))
        self.update_block(host_block, compute)


@contextmanager
def clocked() -> object:
    """Yields a list to which each training appends its clock."""
    clocks, start = [], Streamed.start

    def with_clock(self: Streamed, sink: object = None) -> None:
        if sink is not None:
            self.lane = Clock(self, sink.link)
            clocks.append(self.lane)
        start(self, sink)

    with patch.object(Streamed, "start", with_clock):
        yield clocks


def measured(order: str) -> Clock:
    with clocked() as clocks, tempfile.TemporaryDirectory() as folder:
        fit(run_of([*LINES, f"weights.order={order}"]), Path(folder) / "run")
    return clocks[0]


def draw(clocks: dict[str, Clock], file: Path) -> None:
    from lowmem.report.picture import plt

    end = max(max(clock.free.values()) for clock in clocks.values())
    figure, panels = plt.subplots(len(clocks), 1, figsize=(11, 4.4), sharex=True, constrained_layout=True)
    colours = [plt.get_cmap("viridis")(0.1 + 0.8 * number / (BLOCKS - 1)) for number in range(BLOCKS)]
    for axes, (order, clock) in zip(panels, clocks.items(), strict=True):
        for row, lane in enumerate(reversed(LANES)):
            for start, stop, number in clock.intervals[lane]:
                axes.barh(row, stop - start, left=start, height=0.7, color=colours[number], edgecolor="white", lw=0.4)
        computing = sum(stop - start for start, stop, _ in clock.intervals["computes"])
        total = max(clock.free.values())
        axes.set_title(f"weights.order={order}: {total:.0f}, of which {computing:.0f} compute", fontsize=10, loc="left")
        axes.set_yticks(range(len(LANES)), reversed(LANES))
        axes.set_xlim(0, end)
    panels[-1].set_xlabel("time; computing a block in forward takes 1")
    labels = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours]
    figure.legend(labels, [f"block {number}" for number in range(BLOCKS)], loc="outside right center")
    figure.savefig(file, dpi=110)


def main() -> None:
    clocks = {order: measured(order) for order in ("by_micro_batch", "by_layer")}
    draw(clocks, ROOT / "docs" / "window.png")
    for order, clock in clocks.items():
        copies = {lane: len(clock.intervals[lane]) for lane in LANES}
        print(f"{order}: {max(clock.free.values()):.1f}; {copies}")


if __name__ == "__main__":
    main()
