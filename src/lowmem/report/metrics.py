"""Writes the metrics of a run, such as loss, speed and learning rate, to metrics.csv, the loggers and the progress bar.

Loggers get the optimizer step as the x-axis. Sums are kept on the device and read only when they are logged, so that
metrics do not make the host wait for the GPU at every step.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from tqdm import tqdm

from lowmem.memory.meter import MemoryMeter
from lowmem.report.expert_balance import ExpertBalance
from lowmem.system import csv_rows
from lowmem.system.process import seconds_since_start
from lowmem.system.units import byte_size, duration, share_of_limit

COLUMNS = (
    "step",
    "tokens",
    "seconds",
    "train_loss",
    "val_loss",
    "bits_per_byte",
    "lr",
    "gradient_norm",
    "tokens_per_second",
    "skipped_steps",
    "auxiliary_loss",
    "learned_tokens",
)
# The speed is measured without these first steps: they allocate the optimizer state and warm up caches, and the memory
# meter tracks each of them.
WARM_UP_STEPS = 3
LONG = 60  # seconds: without a progress bar, the remaining time is logged after the warm-up if it is longer
# Format of the progress bars. It is shorter than tqdm's default format: with 80 columns, all figures of a run of 10,000
# steps and ten hours fit.
BAR = "|{bar}| {n_fmt}/{total_fmt} [{remaining} left{postfix}]"
SHOWN = {"disable": None, "dynamic_ncols": True}  # disable=None: no progress bar if the output is not a terminal


class Metrics(Callback):
    """A callback that logs the metrics of a run.

    Args:
        file: path of metrics.csv.
        log_every: number of optimizer steps between rows for training. Step 1 and the last step also get a row.
        sets: name of a validation set -> function that converts its nats per token to bits per byte.
        meter: the memory meter, whose peak is shown in the progress bar.
        resumed_at: the step at which the run resumes. Rows of `file` up to this step are kept.
    """

    def __init__(
        self,
        file: Path,
        log_every: int,
        sets: Mapping[str, Callable[[float], float]],
        meter: MemoryMeter,
        resumed_at: int,
    ) -> None:
        self.log_every, self.sets, self.meter = log_every, sets, meter
        self.own: Mapping[str, float] = {}  # results of the user's function (`metric=`) in the latest evaluation
        self.evaluated: list[dict[str, object]] = []  # results of each set in the latest evaluation
        self.first_step_seconds: float | None = None
        # seconds of each window after the warm-up, or of all windows if there is no window after the warm-up
        self.step_seconds: list[float] = []
        self._seconds, self._tokens, self._learned_tokens = 0.0, 0, 0  # totals of the windows in step_seconds
        self.val_loss = float("nan")
        self._lr, self.highest_lr = 0.0, 0.0  # learning rate of the current window; highest learning rate so far
        # Mean auxiliary loss, such as a router loss, in the latest row for training. None: no such row since the start
        # or the resume, or the model has no auxiliary loss.
        self.auxiliary_loss: float | None = None
        self._windows = 0
        self._loss_sum: torch.Tensor | float = 0.0
        self._auxiliary_sum: torch.Tensor | float = 0.0  # stays 0 if the model has no auxiliary loss
        self._loss_weight = 0
        self._since = 0.0
        others = [f"{column}_{name}" for name in [*sets][1:] for column in ("val_loss", "bits_per_byte")]
        self._file = file
        self._out, self._csv, earlier = csv_rows.open_csv(file, [*COLUMNS, *others], resumed_at)
        self.train_loss = float(earlier.get("train_loss", "nan"))
        self._start = time.perf_counter() - float(earlier.get("seconds", 0))
        self._logged_duration = False
        self._bar: tqdm | None = None
        self._evaluation: tqdm | None = None

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._bar = tqdm(total=trainer.max_steps, initial=trainer.global_step, bar_format=BAR, **SHOWN)
        self._balance = ExpertBalance(module.model)
        self._since = time.perf_counter()

    def on_train_batch_start(self, trainer: Trainer, *_) -> None:
        # read before the scheduler steps; torchao stores the learning rate as a tensor
        self._lr = float(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: dict, *_) -> None:
        if outputs["stepped"]:  # the loss of a skipped window may be inf or nan
            self._loss_sum += outputs["loss"] * outputs["weight"]
            self._loss_weight += outputs["weight"]
            if outputs["auxiliary_loss"] is not None:
                self._auxiliary_sum += outputs["auxiliary_loss"] * outputs["weight"]
            self.highest_lr = max(self.highest_lr, self._lr)
        if self.first_step_seconds is None:
            self.first_step_seconds = seconds_since_start()
        self._count_time(outputs["tokens"], outputs["learned_tokens"])
        self._bar.update(int(outputs["stepped"]))
        step = trainer.global_step
        if outputs["stepped"] and (step % self.log_every == 0 or step in (1, trainer.max_steps)):
            self._log_training(trainer, module)

    def _count_time(self, tokens: int, learned_tokens: int) -> None:
        now = time.perf_counter()
        self._windows += 1
        if self._windows == WARM_UP_STEPS + 1:  # drops the warm-up windows; only runs without later windows report them
            self.step_seconds, self._seconds, self._tokens, self._learned_tokens = [], 0.0, 0, 0
        self.step_seconds.append(now - self._since)
        self._seconds += now - self._since
        self._tokens += tokens
        self._learned_tokens += learned_tokens
        self._since = now

    def _log_training(self, trainer: Trainer, module: LightningModule) -> None:
        self.train_loss = float(self._loss_sum) / self._loss_weight
        if isinstance(self._auxiliary_sum, torch.Tensor):
            self.auxiliary_loss = float(self._auxiliary_sum) / self._loss_weight
        self._loss_sum, self._auxiliary_sum, self._loss_weight = 0.0, 0.0, 0
        metrics = {
            "train_loss": self.train_loss,
            "lr": self._lr,
            "tokens_per_second": self.tokens_per_second(),
            "skipped_steps": module.skipped_steps,
            **self._balance.read(),
        }
        if self.auxiliary_loss is not None:
            metrics["auxiliary_loss"] = self.auxiliary_loss
        if module.gradient_norm is not None:
            metrics["gradient_norm"] = float(module.gradient_norm)
        for way, size in self.meter.moved_bytes.items():
            metrics[f"drive_{way}_gb_per_second"] = size / self.step_seconds[-1] / 1e9
        self._write(trainer, module, "train", metrics)
        if self._bar.disable and self._windows > WARM_UP_STEPS and not self._logged_duration:  # without a progress bar
            self._logged_duration = True
            left = (trainer.max_steps - trainer.global_step) * self.seconds_per_step()
            if left > LONG:
                tqdm.write(f"step {trainer.global_step}: about {duration(left)} of training left.")
        device, size = self.meter.peak_bytes["device"], self.meter.size
        peak = byte_size(device or self.meter.peak_bytes["host_rss"])  # `device` is None if it was not measured
        share = f" ({share})" if (share := share_of_limit(device, size)) else ""
        self._bar.set_postfix_str(
            f"loss {self.train_loss:.3f}, {self.tokens_per_second():,.0f} tokens/s, peak {peak}{share}"
        )

    def on_train_end(self, *_) -> None:
        self._bar.close()

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Replaces the progress bar of training with a progress bar of the evaluation."""
        if not trainer.sanity_checking:
            micro_batches = sum(trainer.num_val_batches)
            if self._bar:
                self._bar.clear()
            shown = SHOWN | {"bar_format": f"evaluating {BAR}", "leave": False, "position": 0}
            self._evaluation = tqdm(total=micro_batches, **shown)

    def on_validation_batch_end(self, trainer: Trainer, *_) -> None:
        if not trainer.sanity_checking:
            self._evaluation.update()

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self._evaluation.close()
        self.val_loss = float("nan") if module.val_loss is None else module.val_loss
        trainer.callback_metrics["val_loss"] = torch.tensor(self.val_loss)  # Lightning's callbacks read it from there
        if not module.val_losses:  # the evaluation was interrupted
            return
        losses = zip(self.sets.items(), module.val_losses, module.val_figures, strict=True)
        self.evaluated = [
            {"name": name, "loss": loss} | (figures or of_tokens(loss, bits(loss)))
            for (name, bits), loss, figures in losses
        ]
        # If all answers of the first set have the same rating, one of its metrics is None. The accuracy is then
        # meaningless, and early stopping must read neither this accuracy nor that of the previous evaluation.
        trainer.callback_metrics.pop("accuracy", None)
        if "accuracy" in self.evaluated[0] and None not in self.evaluated[0].values():
            trainer.callback_metrics["accuracy"] = torch.tensor(self.evaluated[0]["accuracy"])
        metrics = dict(pair for number, results in enumerate(self.evaluated) for pair in _columns(results, number > 0))
        self._write(trainer, module, "val", metrics | self.own)
        message = "; ".join(map(_evaluated, self.evaluated))
        if self._bar:  # during training
            message = f"loss {self.train_loss:.3f}, {message}, {self._speed()}"
        tqdm.write(f"step {trainer.global_step}: {message}")
        self._since = time.perf_counter()  # the time of an evaluation does not count as part of the next step

    def _write(self, trainer: Trainer, module: LightningModule, split: str, metrics: dict[str, float | None]) -> None:
        """Writes metrics to the file and to the loggers. The loggers get `train_loss` under the name "train/loss". A
        metric that is None is an empty cell in the file, and is not sent to the loggers. Perplexity is sent only to the
        loggers. `split` is "train" or "val"."""
        step = trainer.global_step
        seconds = time.perf_counter() - self._start
        row = {column: value for column, value in metrics.items() if not column.startswith("perplexity")}
        # columns that are not known when the file is opened, such as the columns of a drive or of a user's metric
        if new := [column for column in row if column not in self._csv.fieldnames]:
            self._out.close()
            self._out, self._csv, _ = csv_rows.open_csv(self._file, [*self._csv.fieldnames, *new], until=math.inf)
        counted = {"tokens": module.tokens, "learned_tokens": module.learned_tokens}
        self._csv.writerow({"step": step, "seconds": round(seconds, 3)} | counted | row)
        self._out.flush()
        known = {column: value for column, value in metrics.items() if value is not None}
        named = {f"{split}/{column.removeprefix(f'{split}_')}": value for column, value in known.items()}
        for logger in trainer.loggers:
            logger.log_metrics(named | counted, step=step)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager for work, such as saving, whose time does not count as part of a step."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - before

    def tokens_per_second(self) -> float:
        """Returns the tokens per second on all devices in the windows of `step_seconds`; 0 before the first window.
        Includes tokens without a label, but not padding."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def learned_tokens_per_second(self) -> float:
        """Returns the learned tokens (tokens with a label) per second, in the windows that `tokens_per_second`
        counts."""
        return self._learned_tokens / self._seconds if self._seconds else 0.0

    def _speed(self) -> str:
        learned = f" ({self._learned_tokens / self._tokens:.0%} learned)" if self._learned_tokens < self._tokens else ""
        return f"{self.tokens_per_second():,.0f} tokens/s{learned}"

    def seconds_per_step(self) -> float | None:
        return median(self.step_seconds) if self.step_seconds else None

    def close(self) -> None:
        for bar in filter(None, (self._evaluation, self._bar)):
            bar.close()
        self._out.close()


def of_tokens(loss: float, bits_per_byte: float) -> dict[str, float]:
    """Returns perplexity and bits per byte as metrics, for a loss in nats per learned token and the same loss in bits
    per byte."""
    return {"perplexity": math.inf if loss >= 700 else math.exp(loss), "bits_per_byte": bits_per_byte}


def _columns(results: dict[str, object], other: bool) -> Iterator[tuple[str, object]]:
    """Yields the metrics of a validation set as pairs of column and value. If `other`, the set is not the first
    validation set, and the columns end with its name."""
    end = f"_{results['name']}" if other else ""
    return ((f"{'val_loss' if key == 'loss' else key}{end}", value) for key, value in results.items() if key != "name")


def _evaluated(results: dict[str, object]) -> str:
    name = f" of {results['name']}" if results["name"] else ""
    beside = (
        f"accuracy {results['accuracy']:.3f}"
        if "accuracy" in results
        else f"{results['bits_per_byte']:.3f} bits per byte"
    )
    return f"validation{name} {results['loss']:.3f}, {beside}"
