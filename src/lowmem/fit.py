"""The main job, as a function: check -> plan -> train -> report. The command line and a notebook call the same one.

from hydra import compose, initialize
from lowmem.fit import fit
with initialize(config_path="conf", version_base=None):
    cfg = compose("config", overrides=["max_steps=20", "logger=csv"])
summary = fit(cfg, Path("outputs/notebook"))
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from omegaconf import DictConfig

from lowmem import batch_size, checkpoint, model
from lowmem.check import check
from lowmem.errors import Refused
from lowmem.instantiate import plain
from lowmem.memory.advice import out_of_memory
from lowmem.plan import at_start
from lowmem.quiet import quiet
from lowmem.report import ran, step
from lowmem.report import summary as report
from lowmem.settings import Settings
from lowmem.terminal import folded
from lowmem.training import DidNotFit, Training, trained


class OutOfMemory(Refused):
    """The run did not fit: what was held, and what to try."""


def fit(
    cfg: DictConfig, output_dir: Path, choices: Mapping[str, str] | None = None, overrides: Sequence[str] = ()
) -> dict:
    """Train as `cfg` says and leave the results in `output_dir`.

    Args:
        choices: group -> chosen yaml, for messages.
        overrides: what the user typed, for the summary.

    Returns:
        What summary.json holds.

    Raises:
        Refused: a run that cannot work, or that ran out of memory, in a sentence.
    """
    choices = choices or {}
    check(cfg, choices)
    if cfg.resume is not None:
        checkpoint.find(cfg.resume)  # before anything is planned for it
    quiet()
    model.check_architecture(cfg)
    cfg = at_start.with_recipe(_placed(cfg, output_dir), overrides)
    cfg = plain(batch_size.resolve(cfg))  # until here some values depend on a batch_size that is not known
    prediction = at_start.checked(cfg, overrides)
    try:
        with trained(cfg, output_dir) as training:
            summary = _summary(training, cfg) | {"overrides": list(overrides)}
            summary["predicted"] = prediction.beside(training.rss_before_model) if prediction else None
            _report(training, cfg, output_dir, summary, choices)
            return summary
    except DidNotFit as error:
        planned = at_start.smaller_recipe(cfg, overrides, prediction)
        raise OutOfMemory(out_of_memory(error.held, choices, cfg.batch_size, cfg.seq_len, planned)) from error


def _placed(cfg: DictConfig, output_dir: Path) -> DictConfig:
    """A copy with its folder, and with the device that `auto` means."""
    cfg = cfg.copy()
    cfg.output_dir = str(output_dir)
    cfg.device = Settings(cfg).device
    return cfg


def _summary(training: Training, cfg: DictConfig) -> dict:
    meter, metrics, module = training.meter, training.metrics, training.module
    return {
        "steps": training.trainer.global_step,
        "skipped_steps": module.skipped_steps,
        "tokens": module.tokens,
        "tokens_per_second": metrics.tokens_per_second(),
        "seconds_per_step": metrics.seconds_per_step(),
        "first_step_seconds": metrics.first_step_seconds,
        "train_loss": metrics.train_loss,
        "auxiliary_loss": metrics.auxiliary_loss,
        "val_loss": metrics.val_loss,
        "bits_per_byte": metrics.bits_per_byte(metrics.val_loss),
        "peak_bytes": meter.peak_bytes,
        "peak_bytes_by_category": meter.by_category(),
        "peak_bytes_by_phase": meter.by_phase(),
        "rss_before_model_bytes": training.rss_before_model,
        "batch_size": cfg.batch_size,
        "optimizer": report.stepped_by(training.trainer.optimizers[0]),
        "parameters": sum(p.numel() for p in module.model.parameters()),
        "interrupted": training.stop.interrupted,
        "resumed_from": str(training.resumed_from) if training.resumed_from else None,
        "device": torch.cuda.get_device_name() if cfg.device == "cuda" else "cpu",
        "versions": report.versions(),
    }


def _report(
    training: Training, cfg: DictConfig, output_dir: Path, summary: Mapping[str, object], choices: Mapping[str, str]
) -> None:
    """Everything a run leaves besides its curves and checkpoints, and the table on the terminal."""
    from lowmem.report import picture  # matplotlib takes half a second

    for logger in training.loggers:
        logger.log_metrics(report.plan_ratios(summary), step=summary["steps"])
    with training.trainer.precision_plugin.widest(training.module):
        model.export(training.module.model, training.tokens.tokenizer, output_dir / "model", cfg.export_dtype)
    title = " ".join(ran.chosen(choices)) or cfg.model.name
    typed = " ".join(ran.besides(choices, summary["overrides"]))
    card = torch.cuda.get_device_properties().total_memory if cfg.device == "cuda" else None
    meter, room = training.meter, Settings(cfg).limit or card
    picture.memory_picture(output_dir / "memory.png", meter.rows(), meter.timeline, title, typed, room)
    step.write(output_dir / "memory_step.csv", meter.timeline)
    picture.send(output_dir / "memory.png", training.loggers, summary["steps"])
    report.write(output_dir / "summary.json", summary)
    print(f"\n{report.table(summary)}\n")
    if training.sample.text:
        print(folded(f"A sample:\n{training.sample.text}\n"))
    shown = output_dir.relative_to(Path.cwd()) if output_dir.is_relative_to(Path.cwd()) else output_dir
    print("\n".join(f"wrote {shown / path.name}" for path in sorted(output_dir.iterdir()) if path.name[0] != "."))
