"""Collects the callbacks that observe a run: stop signals, memory, loss and speed, samples, and a user's metric."""

from pathlib import Path
from typing import NamedTuple

from hydra.utils import get_object

from lowmem.config.settle import Run
from lowmem.data.bits_per_byte import bits_per_byte
from lowmem.memory.meter import MemoryMeter
from lowmem.report.end_of_evaluation import EndOfEvaluation
from lowmem.report.metrics import Metrics
from lowmem.report.own_metric import OwnMetric
from lowmem.report.sample import Samples
from lowmem.system import csv_rows
from lowmem.system.stop import Stop
from lowmem.training.build import Data


class Watchers(NamedTuple):
    stop: Stop
    meter: MemoryMeter
    metrics: Metrics
    samples: Samples
    own: OwnMetric | None  # the user's metric function; None: no `metric=`

    @classmethod
    def for_run(cls, run: Run, data: Data, folder: Path, resumed_at: int, keeps: bool) -> "Watchers":
        """Creates the callbacks.

        Args:
            run: the settings.
            data: the run's loaders and tokenizer.
            folder: the folder for the callbacks' files.
            resumed_at: the step of the checkpoint to resume; 0 for a new run. Existing files keep their rows up to this
                step, and later rows are removed.
            keeps: True if the run writes checkpoints.
        """
        stop, limit = Stop(keeps), run.limit if run.device == "cpu" else None
        meter = MemoryMeter(folder / "memory.csv", run.log_every, limit, resumed_at, run.device_bytes)
        meter.compiled = run.compiles_blocks
        sets = {loader.name: bits_per_byte(data.tokens, loader) for loader in data.val}
        metrics = Metrics(folder / "metrics.csv", run.log_every, sets, meter, resumed_at)
        at_end = EndOfEvaluation(data.tokens.tokenizer, run.seed, stop, meter)
        csv_rows.cut_after(folder / "samples.jsonl", resumed_at)
        samples = Samples(data.prompts, run.sample_tokens, run.seq_len, folder / "samples.jsonl", at_end)
        own = OwnMetric(run.metric, get_object(run.metric), metrics, at_end) if run.metric is not None else None
        return cls(stop, meter, metrics, samples, own)
