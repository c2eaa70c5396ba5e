"""Computes the reference model's log-probabilities of a preference data set, before training or an evaluation.

DPO and related losses compare the log-probability of each answer under the trained model with its log-probability under
a reference model: the model that training starts from. The reference model is not in memory during training. Instead, a
single pass without gradients, before training, computes two log-probabilities per pair (chosen and rejected answer) or
per rated answer (after its own prompt and after a mismatched prompt, `data/rated.py`). After the pass the model is
loaded again, for training. The log-probabilities are stored beside the cached tokens, 16 bytes per pair or rated
answer, and reused by resumed runs and by other jobs of a sweep.

The cache key consists of the precision, the tokens, their packing into rows, and a digest of the model's initial
weights and config. So after a change to the model, the template or seq_len, the log-probabilities are computed again.
Checkpoints also store the digest of the initial model.
"""

import gc
import hashlib
import json
import logging
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from tqdm import tqdm

from lowmem.config.instantiate import instantiate
from lowmem.config.settle import Run
from lowmem.data.loader import START, MicroBatch, Share, WindowLoader
from lowmem.data.pairs import AnswerRows
from lowmem.saving.checkpoint import Saved
from lowmem.system.atomic_files import atomic_write
from lowmem.system.errors import Refused
from lowmem.training import build
from lowmem.training.module import CausalLM

log = logging.getLogger(__name__)

STORED_EVERY = 60  # seconds between writes to the cache file during the pass


class ReferenceLogProbs:
    """The reference log-probabilities of one split, and their cache file.

    Args:
        rows: the rows of the split.
        name: "train" or "val".
        indices: indices of the rows that the run reads.
        key: the items of the cache key that all splits have in common.
    """

    def __init__(self, rows: AnswerRows, name: str, indices: np.ndarray, key: list) -> None:
        self.rows, self.name, self.indices = rows, name, indices
        stored_at = getattr(rows.split.ids, "filename", None)
        digest = hashlib.sha256(json.dumps([*key, rows.seq_len, rows.order, rows.batch.UNIT]).encode()).hexdigest()[:16]
        self.file = stored_at and Path(stored_at).with_name(f"{name}_reference_{digest}.npy")

    def read(self) -> np.ndarray:
        """Returns the stored log-probabilities, (pairs or answers, 2). Missing and non-finite values are NaN."""
        if self.file and self.file.exists():
            try:
                stored = _loaded(self.file)
                if stored.shape == (self.rows.unit_count, 2):
                    return np.where(np.isfinite(stored), stored, np.nan)
            except (OSError, EOFError, ValueError):
                log.info(f"cache_dir: {self.file} is damaged, so its log-probabilities are computed again.")
        return np.full((self.rows.unit_count, 2), np.nan)

    def missing(self) -> np.ndarray:
        """Returns the items of `indices` whose row has a pair, or a rated answer, with a missing log-probability
        (NaN)."""
        unknown = np.isnan(self.rows.reference).any(1)
        return np.array([row for row in self.indices if unknown[self.rows.units_of(np.array([row]))].any()], int)

    def store(self, numbers: np.ndarray) -> None:
        """Writes log-probabilities to the cache file. Where a number is NaN, the value in the file is kept, because
        another run may have stored it in the meantime. No-op if the tokens, and so the log-probabilities, have no cache
        file.

        Args:
            numbers: (pairs or answers, 2); NaN if not computed.

        Raises:
            Refused: the file cannot be written.
        """
        if self.file is None:
            return
        try:
            with atomic_write(self.file) as draft, draft.open("wb") as out:
                np.save(out, written := np.where(np.isnan(numbers), self.read(), numbers))
                out.write(_checksum(written))
        except OSError as error:
            raise Refused(
                f"cache_dir: the reference model's log-probabilities cannot be written to {self.file.parent} "
                f"({error.strerror}). Type cache_dir=<a writable folder with free space>."
            ) from error


def _loaded(file: Path) -> np.ndarray:
    """Returns the array of a cache file. Raises ValueError if the checksum does not match. Files of earlier versions
    have no checksum."""
    with file.open("rb") as stream:
        array, checksum = np.load(stream), stream.read()
    if checksum not in (b"", _checksum(array)):
        raise ValueError(f"{file} is damaged")
    return array


def _checksum(array: np.ndarray) -> bytes:
    return zlib.crc32(np.ascontiguousarray(array)).to_bytes(4, "little")


def module(run: Run, data: build.Data, saved: Saved | None, again: Callable[[Saved | None], CausalLM]) -> CausalLM:
    """Returns the module to train or to evaluate. If its loss compares with a reference model, first stores the
    reference log-probabilities in the rows of `data`. At most one model is in memory at any time. All ranks must call
    this function.

    Args:
        run: the settings.
        data: the loaders. Their rows receive the log-probabilities.
        saved: the checkpoint to continue from or to evaluate; None: no checkpoint.
        again: builds the module. Called with `saved`, or with None for the initial model.

    Raises:
        Refused: the initial model of the run is unknown, or is not the initial model that the settings produce now; a
            log-probability is not finite; or the cache file cannot be written.
    """
    built = again(saved)
    if not built.own_loss.compares:
        return built
    start, ranks = built.identity["start"], built.ranks
    _check(run, start, saved)
    wanted = list(_wanted(run, data, start))
    for split in wanted:
        split.rows.reference = ranks.broadcast(split.read() if ranks.rank == 0 else None)
    unknown = [(split, rows) for split in wanted if len(rows := split.missing())]
    if not unknown:
        return built
    if saved is not None:
        del built
        gc.collect()  # the module is part of reference cycles
        built = again(None)
        if built.identity["start"] != start:
            raise Refused(
                f"{saved.asked}: this loss compares with the initial model of the run, whose log-probabilities are not "
                "all in cache_dir, and the initial model is now a different one. Type the model=, adapter=, "
                "precision= and, after a random start, seed= of that run."
            )
    for split, rows in unknown:
        if not ranks.divides:
            # Move the module back to host memory, where masters are created: a pass over an earlier split may have
            # moved it to the card.
            built.cpu()
        _compute(run, built, split, rows)
    del built
    gc.collect()
    return again(saved)


def _check(run: Run, start: str | None, saved: Saved | None) -> None:
    if saved is not None and start is None:
        raise Refused(
            f"{saved.asked}: this run was trained with a loss that has no reference model, and the typed loss= needs "
            "one. Type the loss= of that run."
        )
    if saved is None and run.evaluate is not None:
        raise Refused(
            f"evaluate={run.evaluate}: this loss= compares with the initial model of a run, which an exported model "
            "does not name. Type evaluate=<the run folder>, or loss=simpo, which needs no reference model."
        )


def _wanted(run: Run, data: build.Data, start: str) -> Iterator[ReferenceLogProbs]:
    key = [start, run.weights_dtype, {"_target_": run.precision.target, **run.precision.arguments}]
    if run.evaluate is None:
        yield ReferenceLogProbs(data.train.sequences, "train", _read_in_training(run, data.train), key)
    for loader in data.val:
        yield ReferenceLogProbs(loader.sequences, "val", np.arange(loader.count), key)


def _read_in_training(run: Run, train: WindowLoader) -> np.ndarray:
    """Returns the indices of the rows that training reads in max_steps steps. If steps may be skipped, returns the
    indices of all rows, because training then reads further rows."""
    every = np.arange(len(train.sequences))
    if run.scales_loss or run.on_nonfinite == "skip":
        return every
    position, steps = START, 0
    while position.epoch == 0 and steps < run.max_steps:
        position, steps = train.after(position), steps + 1
    return every if position.epoch else np.sort(train.between(START, position))


def _compute(run: Run, built: CausalLM, split: ReferenceLogProbs, missing: np.ndarray) -> None:
    """Computes the log-probabilities of the rows `missing`, and stores them in `split.rows` and in the cache file. All
    ranks must call this function; each computes a share of the rows, and rank 0 writes the file. Raises Refused if a
    log-probability is not finite, or if the cache file cannot be written."""
    ranks, rows = built.ranks, split.rows
    computed, known = rows.units_of(missing), rows.reference
    if ranks.rank == 0:
        log.info(
            f"Computing the reference model's log-probabilities of {computed.size:,} {rows.batch.UNIT} of the "
            f"{split.name} split before training; they are stored."
        )
        split.store(known)  # raises an error now, before the long pass, if the folder is not writable
    rows.reference = None
    batches = _Batches(rows, missing, build.share_of(run, ranks), built.at_once)
    collector = _Collector(split, known, batches)
    trainer = Trainer(
        accelerator="gpu" if run.device == "cuda" else "cpu",
        devices=1,
        strategy=ranks.lightning(),
        inference_mode=not ranks.several,
        plugins=list(map(instantiate, run.plugins)),
        callbacks=[*build.callbacks(run), collector],
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    )
    try:
        trainer.predict(built, batches, return_predictions=False)
        for of_rank in ranks.all_gather(known):
            known = np.where(np.isnan(known), of_rank, known)
    finally:
        rows.reference = known
        if ranks.rank == 0:
            split.store(known)
    if len(wrong := computed[~np.isfinite(known[computed]).all(1)]):  # equal on all ranks
        raise Refused(
            f"loss=: the reference model's log-probability of {rows.batch.UNIT[:-1]} {int(wrong[0]) + 1:,} of the "
            f"{split.name} split is not finite, so the loss cannot compare with it. Type precision=bf16, which has the "
            "range of fp32 and fp32 weights, or another model=."
        )


class _Collector(Callback):
    """Callback that collects the log-probabilities that this rank computes. Rank 0 writes its values to the cache file
    every `STORED_EVERY` seconds, because the pass may take hours."""

    def __init__(self, split: ReferenceLogProbs, known: np.ndarray, batches: "_Batches") -> None:
        self.split, self.known, self.batches = split, known, batches
        self.micro_batches, self.stored_at = 0, time.monotonic()

    def on_predict_batch_end(self, trainer: Trainer, module: CausalLM, outputs: list[Tensor], *_) -> None:
        for values in outputs:
            self.known[self.batches.units[self.micro_batches]] = values.numpy()
            self.micro_batches += 1
        if module.ranks.rank == 0 and time.monotonic() >= self.stored_at + STORED_EVERY:
            self.split.store(self.known)
            self.stored_at = time.monotonic()


class _Batches:
    """Yields groups of micro-batches. The rows of a micro-batch have similar lengths.

    Args:
        rows: all rows of a split.
        indices: indices of the rows to yield.
        share: this rank's share of each global micro-batch.
        at_once: number of micro-batches per group.

    Attributes:
        units: for each yielded micro-batch, the indices of its pairs or rated answers.
    """

    def __init__(self, rows: AnswerRows, indices: np.ndarray, share: Share, at_once: int) -> None:
        self.rows, self.share, self.at_once = rows, share, at_once
        self.indices = rows.arranged_by_length(indices)
        self.units: list[np.ndarray] = []

    def __len__(self) -> int:
        return -(-len(self.indices) // (self.share.rows_per_step * self.at_once))

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        step, group = self.share.rows_per_step, []
        for begin in tqdm(range(0, len(self.indices), step), desc="reference", disable=None, leave=False, delay=2):
            chosen = self.indices[begin : begin + step]
            own = chosen[self.share.places()]
            self.units.append(self.rows.units_of(own) if len(own) else own)
            group.append(self.share.rows_of(self.rows.micro_batch(chosen)))
            if len(group) == self.at_once:
                yield group
                group = []
        if group:
            yield group
