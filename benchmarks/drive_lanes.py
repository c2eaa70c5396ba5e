"""Draws docs/drive.png. The picture shows when an optimizer step with weights.drive computes, updates weights, waits
for the drive, reads and writes.

The intervals are measured in the last step of a run on this CPU, with GPT-2 XL's shapes and 8 blocks. On a CPU, the
training thread both computes and updates weights, while four other threads read and write.

python -m benchmarks.drive_lanes --folder /mnt/scratch        # a minute
"""

import argparse
import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from threading import Lock
from unittest.mock import patch

from benchmarks.runner import ROOT
from benchmarks.streamed import ON_CPU, running
from lowmem.offload.drive import SwapFiles
from lowmem.offload.host_optimizer import HostOptimizer
from lowmem.offload.streamed import StreamedWeights
from lowmem.system.scratch_file import Disk
from lowmem.system.torch_private import in_backward
from lowmem.training import watchers

LANES = ("computes", "host steps", "waits for the drive", "reads", "writes")
STEPS = 4
Interval = tuple[float, float, int | None]  # start, end, number of the block; None: the embedding or the output layer


class Record:
    """Records intervals while `on` is True. `add` records an interval that has ended. The training thread calls `does`
    instead when an interval begins, because its intervals do not overlap."""

    def __init__(self) -> None:
        self.intervals: dict[str, list[Interval]] = defaultdict(list)
        self.files: dict[int, int | None] = {}  # descriptor -> number of the block
        self.on, self.doing, self.since = False, (None, None), 0.0
        self._lock = Lock()

    def add(self, lane: str, start: float, number: int | None) -> None:
        if self.on:
            with self._lock:
                self.intervals[lane].append((start, time.perf_counter(), number))

    def does(self, lane: str | None, number: int | None = None) -> tuple[str | None, int | None]:
        """Ends the training thread's current interval and begins another. Returns (lane, block) of the interval that
        has ended.

        Args:
            lane: one of LANES; None: nothing is recorded until the next call.
            number: number of the block; None: the embedding or the output layer.
        """
        before, since = self.doing, self.since
        self.doing, self.since = (lane, number), time.perf_counter()
        if before[0] is not None:
            self.add(before[0], since, before[1])
        return before


def recorded(folder: Path) -> Record:
    """Trains STEPS steps. Returns the record of the last step."""
    record = Record()
    enters, leaves, reached, step, turn = (
        StreamedWeights._enters, StreamedWeights._leaves, StreamedWeights._reached, HostOptimizer._step, SwapFiles.pin
    )  # fmt: skip

    def on_enter(self: StreamedWeights, number: int) -> None:
        enters(self, number)
        if not in_backward():
            record.does("computes", number)

    def on_leave(self: StreamedWeights, number: int, output: object) -> None:
        leaves(self, number, output)
        if not in_backward():
            record.does(None)

    def on_gradient(self: StreamedWeights, number: int) -> None:
        reached(self, number)
        record.does("computes", number)

    def on_step(self: HostOptimizer, master: object, *more: object) -> None:
        before = record.does("host steps", blocks.get(master.weight))
        step(self, master, *more)
        record.does(*before)

    def on_turn(self: SwapFiles, swap_file: object) -> None:
        before = record.does("waits for the drive", numbers.get(swap_file))
        turn(self, swap_file)
        record.does(*before)

    class Timed(Disk):
        def read(self, file: int, into: memoryview, start: int) -> int:
            return timed("reads", file, super().read, into, start)

        def write(self, file: int, data: memoryview, start: int) -> int:
            return timed("writes", file, super().write, data, start)

    def timed(lane: str, file: int, move: object, *arguments: object) -> int:
        start = time.perf_counter()
        count = move(file, *arguments)
        record.add(lane, start, record.files.get(file))
        return count

    class LastStep(watchers.Stop):
        def on_train_batch_start(self, trainer, module, *_) -> None:
            if trainer.global_step == STEPS - 1:
                weights = module.weights
                for number, block in enumerate(weights.blocks):
                    blocks.update(dict.fromkeys(block.parameters(), number))
                shelf_of = weights._on_drive._masters_of
                numbers.update({swap_file: blocks.get(p) for p, swap_file in shelf_of.items()})
                record.files = {swap_file._file._file: number for swap_file, number in numbers.items()}
                record.on = True

        def on_train_batch_end(self, trainer, module, *more) -> None:
            if record.on:
                module.weights.finish()
                record.does(None)
                record.on = False
            super().on_train_batch_end(trainer, module, *more)

    blocks, numbers = {}, {}
    patches = [
        patch.object(StreamedWeights, "_enters", on_enter),
        patch.object(StreamedWeights, "_leaves", on_leave),
        patch.object(StreamedWeights, "_reached", on_gradient),
        patch.object(HostOptimizer, "_step", on_step),
        patch.object(SwapFiles, "pin", on_turn),
        patch("lowmem.system.scratch_file.Disk", Timed),
        patch.object(watchers, "Stop", LastStep),
    ]
    for each in patches:
        each.start()
    lines = [*ON_CPU, "weights=streamed", f"weights.drive={folder}", f"max_steps={STEPS}", "seq_len=1024"]
    with tempfile.TemporaryDirectory() as rows, patch.dict(os.environ, ROW_FOLDER=rows), running(lines):
        pass
    return record


def draw(record: Record, file: Path) -> None:
    from lowmem.report.picture import plt

    first = min(start for lane in record.intervals.values() for start, _, _ in lane)
    blocks = 1 + max(number or 0 for lane in record.intervals.values() for *_, number in lane)
    colours = [plt.get_cmap("viridis")(0.1 + 0.8 * number / (blocks - 1)) for number in range(blocks)]
    figure, axes = plt.subplots(figsize=(11, 3), constrained_layout=True)
    for row, lane in enumerate(reversed(LANES)):
        for start, stop, number in record.intervals[lane]:
            colour = "lightgrey" if number is None else colours[number]
            axes.barh(row, stop - start, left=start - first, height=0.7, color=colour)
    axes.set_yticks(range(len(LANES)), reversed(LANES))
    axes.set_xlabel("seconds of one step")
    labels = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in [*colours, "lightgrey"]]
    names = [*(f"block {number}" for number in range(blocks)), "embedding"]
    figure.legend(labels, names, loc="outside right center", fontsize=8)
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="a folder on the drive")
    record = recorded(parser.parse_args().folder.absolute())
    draw(record, ROOT / "docs" / "drive.png")
    for lane in LANES:
        seconds = sum(stop - start for start, stop, _ in record.intervals[lane])
        print(f"{lane}: {len(record.intervals[lane])} intervals, {seconds:.2f} s")


if __name__ == "__main__":
    main()
