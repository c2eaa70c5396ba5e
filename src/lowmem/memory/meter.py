"""Measures memory while the model is loaded, in every phase of every optimizer step, and in evaluations and saves.
Writes memory.csv and logger metrics.

    every phase          resident memory of the process (RSS) and its peak; bytes of the ledger's device side (weights,
                         gradients, optimizer state) at the end of the phase; on CUDA the caching allocator's statistics
    sampled steps        live tensor bytes by category (`StorageTracker`). In training, the first 3 steps of a run or a
                         resume and every `every`-th step are sampled; in an evaluation, the first batch of each
                         validation set and the work after the last batch. Nothing is sampled if blocks are compiled
    end of each step     if a drive is used, the bytes on it, and the bytes that the step read from it and wrote to it

The peak counters of the process and of CUDA are global; only this meter may reset them.
"""

import csv
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lowmem.memory import ledger
from lowmem.memory.ledger import Ledger, Side
from lowmem.memory.tracker import Point, StorageTracker, highest, thinned
from lowmem.system import csv_rows, process
from lowmem.system.scratch_file import Drive
from lowmem.system.units import CATEGORIES, GIB

log = logging.getLogger(__name__)

CUDA_COLUMNS = ("allocated_bytes", "allocated_peak_bytes", "reserved_bytes", "reserved_peak_bytes", "retries", "ooms")
# column that is logged for each phase -> "host" or "device", the memory that the column describes
SIDES = {"rss_peak_bytes": "host"}
SIDES |= dict.fromkeys(("held_bytes", "live_peak_bytes", "allocated_peak_bytes", "reserved_peak_bytes"), "device")
DRIVE_COLUMNS = ("drive_bytes", "drive_read_bytes", "drive_written_bytes")
COLUMNS = (
    *("step", "phase", "rss_bytes", "rss_peak_bytes", "held_bytes", "live_peak_bytes"),
    *(f"{category}_bytes" for category in CATEGORIES),
    "host_tensor_bytes",
    *DRIVE_COLUMNS,
    *CUDA_COLUMNS,
    "device_percent",  # the phase's peak on the device, in percent of the card's memory or of memory.limit
)


class MemoryMeter(Callback):
    """Measures the memory of each phase of a run.

    Args:
        file: path of memory.csv.
        log_every: number of steps between rows in the loggers. Sampled steps are logged in addition.
        limit: end the run if live tensors of the device side exceed this many bytes; None: no limit, or a card, where
            `cap.py` enforces the limit. With a limit every step is sampled.
        resumed_at: an existing `file` keeps its rows up to this step; later rows are removed.
        size: memory of the device in bytes, or memory.limit; None: a CPU without a limit.
    """

    tracker = StorageTracker
    first, every = 3, 20  # the first `first` steps of a run or a resume, and every `every`-th step, are sampled

    def __init__(
        self, file: Path, log_every: int = 10, limit: int | None = None, resumed_at: int = 0, size: int | None = None
    ) -> None:
        self.log_every, self.limit, self.size = log_every, limit, size
        if limit:
            self.every = 1
        self.ledger = Ledger()
        # "device" is None with compiled blocks on a CPU, since allocations of compiled code cannot be tracked
        self.peak_bytes: dict[str, int | None] = {"device": 0, "host_rss": 0}
        self.peak: Point | None = None  # the point with the most device bytes in all sampled phases
        self.timeline: list[Point] = []  # thinned timeline of the last sampled training step
        self._highest: dict[str, dict[str, int]] = {}  # phase -> column -> the maximum in the file
        self._out, self._csv, _ = csv_rows.open_csv(file, COLUMNS, resumed_at)
        self._tracker: StorageTracker | None = None
        self._phase: str | None = None
        self._step = self._start = 0  # _start: the step at which the run was resumed, or 0
        # phase -> its row, which `_close_window` writes after an optimizer step, an evaluation, a save, or the load
        self._window: dict[str, dict] = {}
        self._held: dict[tuple[str, int], int] = {}  # cache: (phase, bytes of gradients) -> bytes of the device side
        self._cuda: torch.device | None = None
        self.compiled = False  # True: blocks are compiled, so memory by category cannot be tracked
        self._drive: Drive | None = None
        self.moved_bytes: dict[str, int] = {}  # bytes "read" and "written" by the last step; empty without a drive
        self._moved_before: dict[str, int] = {}
        self._loaded: dict[str, int] = {}  # columns of the phase "load", measured before the sanity check
        for row in self.rows():  # rows of the steps before a resume
            self._note(row)

    # --- Lightning's hooks ----------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        self._parameters, self._buffers = ledger.parameters(module), ledger.buffers(module)
        # registered before all other owners, because a storage counts for its first owner
        self.ledger.own("optimizer", module.weights.drive_tensors, "drive")
        self._drive = module.weights.drive
        side = module.ranks.side
        self.ledger.own("weights", lambda: self._buffers)
        self.ledger.own("weights", lambda: self._parameters, side)
        self.ledger.own("weights", module.weights.device_tensors)
        self.ledger.own("gradients", lambda: ledger.gradients(self._parameters), side)

    def on_sanity_check_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Measures memory after the model is loaded, so that the sanity check (an evaluation before the first step)
        does not count as loading."""
        self._cuda = module.device if module.device.type == "cuda" else None
        self._loaded = self._resident()

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._buffers = ledger.buffers(module)  # moving a module to a card replaces its buffers
        if not module.ranks.divides:  # after an evaluation a sharded model may still have gathered (full) parameters
            self._parameters = ledger.parameters(module)
        self._cuda = module.device if module.device.type == "cuda" else None
        optimizer = module.optimizer
        self.ledger.own("optimizer", lambda: ledger.paged_state(optimizer), "host")
        side = "device" if module.masters is None else "host"
        side = side if module.ranks.side == "device" else module.ranks.side
        self.ledger.own("optimizer", lambda: ledger.optimizer_state(optimizer), side)
        self.ledger.own("optimizer", trainer.precision_plugin.device_tensors)
        self.ledger.own("masters", optimizer.masters_on_host, "host")
        self.ledger.own("gradients", optimizer.gradients_on_host, "host")
        self.ledger.own("weights", module.weights.host_tensors, "host")
        self.ledger.own("other", module.weights.staging_buffers, "host")
        if self.compiled:
            log.info("Memory by category is not measured: allocations inside compiled graphs cannot be tracked.")
            self.peak_bytes["device"] = 0 if self._cuda else None
        self._step = self._start = trainer.global_step
        self._window = {"load": self._read("load") | self._loaded | self._drive_row()}
        self._close_window(trainer)

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch, batch_idx: int) -> None:
        self._step = trainer.global_step + 1
        if self._step - self._start <= self.first or self._step % self.every == 0:
            self._held.clear()
            self._track()
        self._enter("forward")

    def on_before_backward(self, trainer: Trainer, module: LightningModule, loss) -> None:
        self._enter("backward")

    def on_after_backward(self, trainer: Trainer, module: LightningModule) -> None:
        self._settle()
        self._enter(module.phase_after_backward)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_) -> None:
        self._settle()
        self._leave()
        self.timeline = self._untrack() or self.timeline
        *_, last = self._window.values()
        last.update(self._drive_row())
        self._close_window(trainer)

    def on_validation_batch_start(self, trainer: Trainer, module: LightningModule, batch, batch_idx: int, *_) -> None:
        if batch_idx == 0 and not trainer.sanity_checking:
            self._track()
            self._enter("evaluation")

    def on_validation_batch_end(self, trainer: Trainer, module: LightningModule, *_) -> None:
        self._untrack("evaluation")

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        if self._phase:
            self._leave()
            self._close_window(trainer)

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        self._untrack(self._phase)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Measures work after the last micro-batch of an evaluation, such as generating samples."""
        self._track()
        self._enter("evaluation")
        try:
            yield
        finally:
            self._untrack("evaluation")

    @contextmanager
    def saving(self, trainer: Trainer) -> Iterator[None]:
        self._enter("save")
        try:
            yield
        finally:  # a save that fails is measured, too
            self._leave()
            self._close_window(trainer)

    def rows(self) -> Iterator[dict]:
        """Yields the rows of memory.csv, without empty columns. Rows are read from the file, because all rows of a long
        run would take too much memory."""
        if not self._out.closed:
            self._out.flush()
        with Path(self._out.name).open(encoding="utf-8") as written:
            for row in csv.DictReader(written):
                yield {column: value if column == "phase" else int(value) for column, value in row.items() if value}

    def close(self) -> None:
        self._out.close()

    # --- phases ---------------------------------------------------------------------------------------------------

    def _enter(self, phase: str) -> None:
        self._leave()
        self._phase = phase
        if self._tracker:
            self._tracker.phase = phase
        process.reset_peak_rss()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._cuda)

    def _leave(self) -> None:
        """Ends the current phase, if any, and stores its row. If a phase occurs several times in a window, its row has
        the maximum of each column."""
        if self._phase is None:
            return
        row, seen = self._read(self._phase), self._window.get(self._phase, {})
        self._window[self._phase] = seen | {k: max(row[k], seen.get(k, 0)) for k in row}
        self._phase = None

    def _read(self, phase: str) -> dict:
        row = self._resident() | {"held_bytes": self._held_bytes(phase)}
        if phase == "load":
            row |= self._live_row(Point(phase, self.ledger.bytes(), {}))
        return row

    def _resident(self) -> dict[str, int]:
        """Returns the columns of resident memory and, on CUDA, of the caching allocator's statistics."""
        rss, peak = process.rss_and_peak()
        row = {"rss_bytes": rss, "rss_peak_bytes": peak}
        if self._cuda:
            stats = torch.cuda.memory_stats(self._cuda)
            kinds = ("allocated_bytes.all.", "reserved_bytes.all.")
            keys = [kind + which for kind in kinds for which in ("current", "peak")]
            keys += ["num_alloc_retries", "num_ooms"]
            row |= {column: stats.get(key, 0) for column, key in zip(CUDA_COLUMNS, keys, strict=True)}
        return row

    def _held_bytes(self, phase: str) -> int:
        """Returns the bytes of the ledger's device side. The sum is cached, because computing it takes most of the time
        of a measurement. The cache key is (phase, bytes of gradients), because at the end of a phase usually only the
        bytes of gradients differ from step to step. Sampled steps clear the cache, and compute the sum in every
        phase."""
        key = phase, sum(gradient.nbytes for gradient in ledger.gradients(self._parameters))
        if self._tracker is not None or key not in self._held:
            self._held[key] = sum(self.ledger.bytes().values())
        return self._held[key]

    def _drive_row(self) -> dict[str, int]:
        """Returns the columns of a drive: bytes stored, and bytes read and written since the last call. Returns an
        empty dictionary without a drive."""
        if self._drive is None:
            return {}
        moved, before = {"read": self._drive.read_bytes, "written": self._drive.written_bytes}, self._moved_before
        self.moved_bytes = {way: size - before.get(way, 0) for way, size in moved.items()}
        self._moved_before = moved
        by_way = {f"drive_{way}_bytes": size for way, size in self.moved_bytes.items()}
        return {"drive_bytes": sum(self.ledger.bytes("drive").values())} | by_way

    def _close_window(self, trainer: Trainer) -> None:
        """Writes the rows in `_window`, one per phase. Also logs the metrics of `curve` if a row was sampled, and at
        every `log_every`-th step."""
        for phase, row in self._window.items():
            row = {"step": self._step, "phase": phase} | row
            device = row.get("allocated_peak_bytes", row.get("live_peak_bytes", 0))
            if self.size and device:
                row["device_percent"] = round(100 * device / self.size)
            self._csv.writerow(row)
            self._note(row)
            if self.peak_bytes["device"] is not None:
                self.peak_bytes["device"] = max(self.peak_bytes["device"], device)
            self.peak_bytes["host_rss"] = max(self.peak_bytes["host_rss"], row["rss_peak_bytes"])
        sampled = any("live_peak_bytes" in row for row in self._window.values())
        if sampled or self._step % self.log_every == 0:
            self._out.flush()
            metrics = curve(self._window)
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.global_step)
        self._window = {}

    def _note(self, row: dict) -> None:
        highest = self._highest.setdefault(row["phase"], {})
        for column in row.keys() - {"step", "phase"}:
            highest[column] = max(row[column], highest.get(column, 0))

    # --- live tensors by category ---------------------------------------------------------------------------------

    def _track(self) -> None:
        if not self.compiled:
            self._tracker = self.tracker(self.ledger.storages(), self.limit, self._cuda and self._cuda.type)
            self._tracker.__enter__()

    def _settle(self) -> None:
        if self._tracker:
            self._tracker.settle(self.ledger.storages())

    def _untrack(self, phase: str | None = None) -> list[Point]:
        """Stops tracking and stores the peaks. Args: phase: the phase that has not ended yet; None: all phases have
        ended. Returns: the thinned timeline; empty if no tracker is active."""
        if self._tracker is None:
            return []
        self._tracker.__exit__(None, None, None)
        points = self._points(self._tracker)
        for name, point in highest(points).items():
            row = self._live_row(point)
            of_phase = self._window.setdefault(name, self._read(name) if name == phase else {})
            if row["live_peak_bytes"] >= of_phase.get("live_peak_bytes", 0):  # evaluations are tracked repeatedly
                of_phase.update(row)
            if self.peak is None or point.total > self.peak.total:
                self.peak = point
        self._tracker = None
        return points

    def _points(self, tracker: StorageTracker) -> list[Point]:
        """Returns the thinned timeline. The full timeline is not kept in memory, because a point takes 300 bytes and a
        window may have a million points."""
        return list(thinned(tracker.timeline(), len(tracker.events) + 1))

    def _live_row(self, point: Point) -> dict:
        by_category = {f"{category}_bytes": size for category, size in point.bytes.items()}
        host = sum(self.ledger.bytes("host").values())
        return {"live_peak_bytes": point.total, "host_tensor_bytes": host} | by_category

    def by_category(self, side: Side = "device") -> dict[str, int]:
        """Returns the bytes of each category. For the device, these are the bytes at the sampled point with the most
        device bytes, or the ledger's current bytes if nothing was sampled. For the host and a drive, they are the
        ledger's current bytes."""
        return dict(self.peak.bytes) if self.peak and side == "device" else self.ledger.bytes(side)

    def by_phase(self) -> dict[str, dict[str, int]]:
        """Returns the peaks of each phase in bytes. "host" is the peak resident memory of the process. "device" is the
        peak of allocated bytes on CUDA; on a CPU it is the peak of live tensors, as far as they were sampled. The key
        "device" is missing if nothing was measured."""
        peaks = {}
        for phase, sizes in self._highest.items():
            device = sizes.get("allocated_peak_bytes", sizes.get("live_peak_bytes"))
            measured = {} if device is None else {"device": device}
            peaks[phase] = measured | {"host": sizes["rss_peak_bytes"]}
        return peaks

    def reserved(self) -> int:
        """Returns the peak of the bytes reserved by CUDA's caching allocator; 0 on a CPU."""
        return max((sizes.get("reserved_peak_bytes", 0) for sizes in self._highest.values()), default=0)

    def held_bytes(self) -> dict[str, int]:
        """Returns the bytes of weights, gradients and optimizer state: for each category, the sum of its bytes on the
        device and the ledger's current bytes on the host. Each sampled phase gives one value for the bytes on the
        device, taken at the phase's point with the most device bytes; the largest of these values counts."""
        host, phases = self.ledger.bytes("host"), self._highest.values()
        return {
            name: max((sizes.get(f"{name}_bytes", 0) for sizes in phases), default=0) + host[name]
            for name in ("weights", "gradients", "optimizer")
        }


def curve(window: dict[str, dict]) -> dict[str, float]:
    """Converts a window's rows to metrics for loggers, in GiB:

        memory/<host or device>_<phase>_<column>_gib
        memory/drive_gib, memory/drive_read_gib, memory/drive_written_gib    if a drive is used
        memory/device_<category>_gib                                         at the window's peak, in sampled steps

    Args: window: phase -> row.
    """
    metrics = {}
    for phase, row in window.items():
        for column, side in SIDES.items():
            if column in row:
                metrics[f"memory/{side}_{phase}_{column.removesuffix('_bytes')}_gib"] = row[column] / GIB
        metrics |= {f"memory/{c.removesuffix('_bytes')}_gib": row[c] / GIB for c in DRIVE_COLUMNS if c in row}
    sampled = [row for row in window.values() if "live_peak_bytes" in row]
    if sampled:
        top = max(sampled, key=lambda row: row["live_peak_bytes"])
        metrics |= {f"memory/device_{category}_gib": top[f"{category}_bytes"] / GIB for category in CATEGORIES}
    return metrics
