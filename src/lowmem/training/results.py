"""Collects and writes the results of a run: summary.json, the table on the terminal, a plot of memory over the run
(memory.png), and the memory during one step (memory_step.csv). `fit.py` and `model_folder.py` call this module."""

from collections.abc import Mapping
from pathlib import Path

import torch

from lowmem.config.check import targets
from lowmem.config.settle import Command, Run
from lowmem.config.typed_lines import as_lines, as_mapping
from lowmem.model.trainable import Packed, parameters, trainable
from lowmem.report import drive_figures, ran, step
from lowmem.report.summary import plan_ratios, table, versions, write
from lowmem.saving.export_adapter import is_adapted
from lowmem.step.one_weight import RunsAs
from lowmem.step.optimizer import WindowOptimizer
from lowmem.system.terminal import folded
from lowmem.training.training import Training


def summary(training: Training, command: Command, predicted: dict | None = None) -> dict:
    """Returns the contents of summary.json. All ranks must call this function, because it gathers measurements of all
    ranks. `predicted` is the planner's prediction, or None if there is none."""
    typed = {"overrides": list(command.typed), "predicted": predicted}
    return _numbers(training, command.run) | _recipe(training, command) | typed


def _numbers(training: Training, run: Run) -> dict:
    module, watchers = training.module, training.watchers
    stop, meter, metrics = watchers.stop, watchers.meter, watchers.metrics
    return {
        "steps": training.trainer.global_step,
        "skipped_steps": module.skipped_steps,
        "tokens": module.tokens,  # tokens that the model computed, without padding
        "learned_tokens": module.learned_tokens,  # tokens with a label
        "tokens_per_second": metrics.tokens_per_second(),
        "learned_tokens_per_second": metrics.learned_tokens_per_second(),
        "seconds_per_step": metrics.seconds_per_step(),
        "first_step_seconds": metrics.first_step_seconds,
        "train_loss": metrics.train_loss,
        "lr": run.lr,
        "highest_lr": metrics.highest_lr,  # highest since the run started or was resumed
        "auxiliary_loss": metrics.auxiliary_loss,
        "val_loss": metrics.val_loss,
        "bits_per_byte": metrics.evaluated[0].get("bits_per_byte") if metrics.evaluated else None,
        "validation": metrics.evaluated,  # one entry per validation set
        # one number per validation set
        "validation_sequences": [val.micro_batches.count for val in training.trainer.val_dataloaders or ()],
        "metric": dict(metrics.own),
        "peak_bytes": meter.peak_bytes,
        "device_bytes": run.device_bytes,
        "peak_bytes_by_category": meter.by_category(),
        "peak_bytes_by_phase": meter.by_phase(),
        "measured": _measured(training),
        "drive": drive_figures.figures(module.weights.drive, meter.rows(), metrics.seconds_per_step()),
        "rss_before_model_bytes": training.rss_before_model,
        "batch_size": run.batch_size,
        "optimizer": _stepped_by(module.optimizer),
        "parameters": parameters(module.model),
        "trained_parameters": sum(p.numel() for _, p in trainable(module.model)),
        "interrupted": stop.interrupted,
        "signal": stop.signal.name if stop.signal else None,
        "stopped_early": training.stopped_early,
        "resumed_from": str(training.resumed_from) if training.resumed_from else None,
        "device": torch.cuda.get_device_name() if run.device == "cuda" else "cpu",
        "versions": versions(),
        "weights_bytes": sum(p.numel() * p.element_size() for p in module.model.parameters()),
        "ranks": module.ranks.all_gather(meter.peak_bytes | meter.held_bytes()),
    }


def _measured(training: Training) -> dict:
    """Returns the measured bytes, and the phase of the device's peak, under the keys of the planner's prediction."""
    meter, drive = training.watchers.meter, training.module.weights.drive_tensors()
    rows = {"temporaries" if name == "other" else name: size for name, size in meter.by_category().items()}
    return {
        "device": {"phase": meter.peak and meter.peak.phase} | rows,
        "host": {"libraries": training.rss_before_model, "total": meter.peak_bytes["host_rss"]},
        "drive": {"total": sum(tensor.nbytes for tensor in drive)},
        "allocated": meter.peak_bytes["device"],
        "reserved": meter.reserved(),
    }


def _stepped_by(optimizer: WindowOptimizer | None) -> str | None:
    """Returns the name of the optimizer's class and, if the optimizer has several implementations, of the
    implementation in use. Returns None if the run did not train."""
    if optimizer is None:
        return None
    optimizer = optimizer.inner
    how = f" ({optimizer.runs_as()})" if isinstance(optimizer, RunsAs) else ""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}{how}"


def _recipe(training: Training, command: Command) -> dict:
    """Returns the base model, the data and the chosen options, without local paths."""
    run, model = command.run, training.module.model
    of_hub = run.model.pretrained and not Path(run.model.name).expanduser().is_dir()
    places = [node["path"] for _, node in targets(run.data.plain()) if node.get("path") is not None]
    return {
        "base_model": run.model.name if of_hub else None,
        "pretrained": run.model.pretrained,
        "architecture": model.config.model_type,
        "adapter_alone": is_adapted(model) and run.model.pretrained and not run.merge,
        "base_in_4_bits": any(isinstance(module, Packed) for module in model.modules()),
        "recipe": as_mapping(ran.chosen(command.choices)),
        "data": [Path(place).name for place in places] or as_lines({"data": command.choices.get("data", "")}),
    }


def report(training: Training, command: Command, summary: Mapping[str, object]) -> None:
    """Writes summary.json, prints the table of results and the last sample, and sends the ratios of predicted to
    measured memory to the loggers."""
    for logger in training.loggers:
        logger.log_metrics(plan_ratios(summary), step=summary["steps"])
    write(command.folder / "summary.json", summary)
    print(f"\n{table(summary)}\n")
    if text := training.watchers.samples.text:
        print(folded(f"A sample:\n{text}\n"))


def draw(training: Training, command: Command, summary: Mapping[str, object]) -> None:
    """Draws the memory of one step and of the run (memory.png), sends the picture to the loggers, and writes the memory
    of one step as a table (memory_step.csv)."""
    from lowmem.report import picture  # importing matplotlib takes half a second

    run, folder, meter = command.run, command.folder, training.watchers.meter
    title = " ".join(ran.chosen(command.choices)) or run.model.name
    typed = " ".join(ran.besides(command.choices, command.typed))
    rows = picture.thinned(meter.rows(), summary["steps"])
    what = (rows, meter.timeline, title, typed, run.device_bytes, summary["drive"])
    picture.memory_picture(folder / "memory.png", *what)
    step.write(folder / "memory_step.csv", meter.timeline)
    picture.send(folder / "memory.png", training.loggers, summary["steps"], rows)
