"""One training: built, trained and evaluated, and everything that watched it, to be asked while it is still there."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import Logger, WandbLogger
from omegaconf import DictConfig, OmegaConf

from lowmem import build, checkpoint
from lowmem.data.tokens import Tokens
from lowmem.errors import Refused
from lowmem.instantiate import instantiate
from lowmem.loss import Verified
from lowmem.memory import process
from lowmem.memory.limit import capped
from lowmem.memory.meter import MemoryMeter
from lowmem.memory.snapshot import recorded
from lowmem.module import CausalLM
from lowmem.report.metrics import Metrics, peak_gib
from lowmem.report.sample import Sample
from lowmem.settings import Settings
from lowmem.stop import Stop


class DidNotFit(Exception):
    """Memory ran out. held: bytes by category at the highest point, as far as it was seen."""

    def __init__(self, held: dict[str, int]) -> None:
        super().__init__("Out of memory.")
        self.held = held


@dataclass
class Training:
    """What was trained, and what watched."""

    module: CausalLM
    tokens: Tokens
    trainer: Trainer
    loggers: list[Logger]
    meter: MemoryMeter
    metrics: Metrics
    sample: Sample
    stop: Stop
    rss_before_model: int = 0  # bytes
    resumed_from: Path | None = None

    def close(self) -> None:
        self.meter.close()
        self.metrics.close()
        for logger in self.loggers:
            logger.finalize("success" if self.trainer.state.finished else "failed")
            if isinstance(logger, WandbLogger):
                logger.experiment.finish()  # or the next job of a multirun would log into this run


@contextmanager
def trained(cfg: DictConfig, output_dir: Path, keeps: bool = True) -> Iterator[Training]:
    """Args: cfg: checked, resolved, with a device and a number for batch_size; keeps: checkpoints, in `output_dir`.

    Raises:
        DidNotFit: also from what is done inside the `with`.
        Refused: what only the data, the weights or a checkpoint can tell.
    """
    training = network = None
    try:
        start = checkpoint.find(cfg.resume) if cfg.resume else None
        saved = checkpoint.Saved(start, cfg.max_steps) if start else None
        data = build.data(cfg, saved)
        before = process.rss_bytes()
        seed_everything(cfg.seed, verbose=False)  # just before the weights are drawn: what drew earlier does not matter
        module = build.module(cfg, data, saved)
        network = module.model
        output_dir.mkdir(parents=True, exist_ok=True)
        training = _assembled(cfg, output_dir, data, module, keeps)
        training.rss_before_model, training.resumed_from = before, start
        with training.stop.listening():
            with (
                capped(Settings(cfg).limit, cfg.device),
                recorded(output_dir, cfg.memory.snapshot, cfg.device),
            ):
                training.trainer.fit(module, data.train, data.val, ckpt_path=start, weights_only=True)
            yield training
    except (RuntimeError, MemoryError) as error:
        if network is not None and mixes_dtypes(error, network):
            raise Refused(
                f"precision: the code of {type(network).__name__} computes partly in fp32, which its 16-bit "
                f"weights do not fit ({error}). Type precision=bf16, with which weights are fp32."
            ) from error
        if not _is_out_of_memory(error):
            raise
        raise DidNotFit(training.meter.by_category() if training else {}) from error
    finally:
        if training:
            training.close()


def _assembled(cfg: DictConfig, output_dir: Path, data: build.Data, module: CausalLM, keeps: bool) -> Training:
    limit = Settings(cfg).limit if cfg.device == "cpu" else None
    meter = MemoryMeter(output_dir / "memory.csv", cfg.log_every, limit=limit)
    bits_per_byte = data.tokens.bits_per_byte(data.val.predicted)
    metrics = Metrics(output_dir / "metrics.csv", cfg.log_every, lambda: peak_gib(meter.peak_bytes), bits_per_byte)
    stop = Stop(keeps)
    sample = Sample(data.tokens.tokenizer, cfg.sample_tokens, cfg.seed, lambda: stop.interrupted)
    saves = checkpoint.Checkpoints(output_dir / "checkpoints", cfg.save_every, meter.saving, metrics.paused)
    plugins = [*instantiate(cfg.trainer.plugins).values(), checkpoint.AtomicCheckpointIO()]
    callbacks = [stop, meter, metrics, *instantiate(cfg.callbacks).values(), Verified()]
    callbacks += [saves, sample] if keeps else [sample]
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
    return Training(module, data.tokens, trainer, loggers, meter, metrics, sample, stop)


def mixes_dtypes(error: BaseException, network: torch.nn.Module) -> bool:
    """Whether an error is that of a product of 16-bit weights with fp32 activations."""
    narrow = any(p.dtype.itemsize == 2 for p in network.parameters())
    return narrow and re.search("same dtype|mixed dtype|scalar type", str(error)) is not None


def _is_out_of_memory(error: BaseException) -> bool:
    on_cpu = "can't allocate memory" in str(error)
    return on_cpu or isinstance(error, torch.OutOfMemoryError | MemoryError)
