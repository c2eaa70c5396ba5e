"""The main job, as a function: build -> train -> report. The command line and a notebook call the same one.

from hydra import compose, initialize
from lowmem.fit import fit
with initialize(config_path="conf", version_base=None):
    cfg = compose("config", overrides=["max_steps=20", "logger=csv"])
summary = fit(cfg, Path("outputs/notebook"))
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import Logger, WandbLogger
from omegaconf import DictConfig, OmegaConf

from lowmem import batch_size, build, checkpoint, model
from lowmem.check import check, check_architecture
from lowmem.data.tokens import Tokens
from lowmem.errors import Refused
from lowmem.instantiate import instantiate, plain
from lowmem.loss import Verified
from lowmem.memory import process
from lowmem.memory.advice import out_of_memory
from lowmem.memory.limit import capped, parse
from lowmem.memory.meter import MemoryMeter
from lowmem.memory.snapshot import recorded
from lowmem.module import CausalLM
from lowmem.plan import ahead
from lowmem.quiet import quiet
from lowmem.report import ran, step
from lowmem.report import summary as report
from lowmem.report.metrics import Metrics, peak_gib
from lowmem.report.sample import Sample
from lowmem.stop import Stop

log = logging.getLogger(__name__)


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
    quiet()
    check_architecture(cfg)
    cfg = ahead.chosen(_placed(cfg, output_dir), overrides)
    cfg = plain(batch_size.resolve(cfg))  # until here some values depend on a batch_size that is not known
    prediction = ahead.expected(cfg, overrides)
    start = checkpoint.find(cfg.resume) if cfg.resume else None
    run = None
    try:
        saved = checkpoint.Saved(start, cfg.max_steps) if start else None
        data = build.data(cfg, saved)
        before = process.rss_bytes()
        seed_everything(cfg.seed, verbose=False)  # just before the weights are drawn: what drew earlier does not matter
        module = build.module(cfg, data, saved)
        tokens = data.tokens
        output_dir.mkdir(parents=True, exist_ok=True)
        run = _assemble(cfg, output_dir, data, module)
        with (
            run.stop.listening(),
            capped(parse(cfg.memory.limit), cfg.device),
            recorded(output_dir, cfg.memory.snapshot, cfg.device),
        ):
            run.trainer.fit(module, data.train, data.val, ckpt_path=start, weights_only=True)
        about = {"overrides": list(overrides), "resumed_from": str(start) if start else None}
        about |= {"predicted": prediction.beside(before) if prediction else None, "rss_before_model_bytes": before}
        return _report(run, cfg, output_dir, tokens, module, about, choices)
    except (RuntimeError, MemoryError) as error:
        if run and mixes_dtypes(error, module.model):
            raise Refused(
                f"precision: the code of {type(module.model).__name__} computes partly in fp32, which its 16-bit "
                f"weights do not fit ({error}). Type precision=bf16, with which weights are fp32."
            ) from error
        if not _is_out_of_memory(error):
            raise
        held = run.meter.by_category() if run else {}
        planned = ahead.instead(cfg, overrides, prediction)
        raise OutOfMemory(out_of_memory(held, choices, cfg.batch_size, cfg.seq_len, planned)) from error
    finally:
        if run:
            run.close()


# --- train -------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What watches the training, to be asked afterwards."""

    trainer: Trainer
    loggers: list[Logger]
    meter: MemoryMeter
    metrics: Metrics
    sample: Sample
    stop: Stop

    def close(self) -> None:
        self.meter.close()
        self.metrics.close()
        for logger in self.loggers:
            logger.finalize("success" if self.trainer.state.finished else "failed")
            if isinstance(logger, WandbLogger):
                logger.experiment.finish()  # or the next job of a multirun would log into this run


def _assemble(cfg: DictConfig, output_dir: Path, data: build.Data, module: CausalLM) -> Run:
    limit = parse(cfg.memory.limit) if cfg.device == "cpu" else None
    meter = MemoryMeter(output_dir / "memory.csv", cfg.log_every, limit=limit)
    bits_per_byte = data.tokens.bits_per_byte(data.val.predicted)
    metrics = Metrics(output_dir / "metrics.csv", cfg.log_every, lambda: peak_gib(meter.peak_bytes), bits_per_byte)
    sample, stop = Sample(data.tokens.tokenizer, cfg.sample_tokens, cfg.seed), Stop()
    saves = checkpoint.Checkpoints(output_dir / "checkpoints", cfg.save_every, meter.saving, metrics.paused)
    plugins = [*instantiate(cfg.trainer.plugins).values(), checkpoint.AtomicCheckpointIO()]
    callbacks = [meter, metrics, *instantiate(cfg.callbacks).values(), Verified(), stop, saves, sample]
    loggers = [logger for logger in instantiate(cfg.logger).values() if logger is not None]
    for logger in loggers:  # before training starts, so that a run that dies still says what it was
        logger.log_hyperparams(OmegaConf.to_container(cfg, resolve=True))
    ours = {
        "accelerator": "gpu" if cfg.device == "cuda" else "cpu",
        "devices": 1,
        "max_steps": cfg.max_steps,
        "max_epochs": -1,  # epochs are the loader's affair
        "val_check_interval": cfg.val_every,
        "check_val_every_n_epoch": None,
        "num_sanity_val_steps": 1,  # an evaluation that does not fit fails before the first step, not hours later
        "default_root_dir": output_dir,
        "logger": loggers or False,
        **dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    }
    theirs = {key: value for key, value in cfg.trainer.items() if key not in ("_target_", "plugins")}
    trainer = Trainer(plugins=plugins, callbacks=callbacks, **(ours | theirs))
    return Run(trainer, loggers, meter, metrics, sample, stop)


def _placed(cfg: DictConfig, output_dir: Path) -> DictConfig:
    """A copy with its folder, and with the device that `auto` means."""
    cfg = cfg.copy()
    cfg.output_dir = str(output_dir)
    if cfg.device == "auto":
        cfg.device = "cuda" if torch.cuda.is_available() else "cpu"
    return cfg


def mixes_dtypes(error: BaseException, network: torch.nn.Module) -> bool:
    """Whether an error is that of a product of 16-bit weights with fp32 activations."""
    narrow = any(p.dtype.itemsize == 2 for p in network.parameters())
    return narrow and re.search("same dtype|mixed dtype|scalar type", str(error)) is not None


def _is_out_of_memory(error: BaseException) -> bool:
    on_cpu = "can't allocate memory" in str(error)
    return on_cpu or isinstance(error, torch.OutOfMemoryError | MemoryError)


# --- report ------------------------------------------------------------------------------------------------------


def _report(
    run: Run,
    cfg: DictConfig,
    output_dir: Path,
    tokens: Tokens,
    module: CausalLM,
    about: Mapping[str, object],
    choices: Mapping[str, str],
) -> dict:
    """Everything a run leaves besides its curves and checkpoints, and the table on the terminal."""
    from lowmem.report import picture  # matplotlib takes half a second

    summary = _summary(run, cfg, tokens, module) | about
    for logger in run.loggers:
        logger.log_metrics(report.beside(summary), step=summary["steps"])
    with run.trainer.precision_plugin.widest(module):
        model.export(module.model, tokens.tokenizer, output_dir / "model", cfg.export_dtype)
    title = " ".join(ran.chosen(choices)) or cfg.model.name
    typed = " ".join(ran.besides(choices, about["overrides"]))
    card = torch.cuda.get_device_properties().total_memory if cfg.device == "cuda" else None
    room = parse(cfg.memory.limit) or card
    picture.memory_picture(output_dir / "memory.png", run.meter.rows(), run.meter.timeline, title, typed, room)
    step.write(output_dir / "memory_step.csv", run.meter.timeline)
    picture.send(output_dir / "memory.png", run.loggers, summary["steps"])
    report.write(output_dir / "summary.json", summary)
    print(f"\n{report.table(summary)}\n")
    if run.sample.text:
        print(f"A sample:\n{run.sample.text}\n")
    print("\n".join(f"wrote {path}" for path in sorted(output_dir.iterdir()) if not path.name.startswith(".")))
    return summary


def _summary(run: Run, cfg: DictConfig, tokens: Tokens, module: CausalLM) -> dict:
    meter, metrics = run.meter, run.metrics
    return {
        "steps": run.trainer.global_step,
        "skipped_steps": module.skipped_steps,
        "tokens": module.tokens,
        "tokens_per_second": metrics.tokens_per_second(),
        "seconds_per_step": metrics.seconds_per_step(),
        "first_step_seconds": metrics.first_step_seconds,
        "train_loss": metrics.train_loss,
        "auxiliary_loss": metrics.auxiliary_loss,
        "val_loss": metrics.val_loss,
        "bits_per_byte": metrics.bits_per_byte(metrics.val_loss),
        "trigram_bits_per_byte": tokens.trigram_bits_per_byte,
        "peak_bytes": meter.peak_bytes,
        "peak_bytes_by_category": meter.by_category(),
        "peak_bytes_by_phase": meter.by_phase(),
        "batch_size": cfg.batch_size,
        "parameters": sum(p.numel() for p in module.model.parameters()),
        "interrupted": run.stop.interrupted,
        "device": torch.cuda.get_device_name() if cfg.device == "cuda" else "cpu",
        "versions": report.versions(),
    }
