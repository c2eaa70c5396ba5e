"""Builds the model of a run, and trains it, evaluates it or loads its weights for an export. The context manager
`training_session` yields the model and the callbacks that observed the run. When the `with` block ends, the
memory of the model on the card is freed, unless the model is sharded. `fit`, the search for batch_size=auto and the
benchmarks use `training_session`."""

import logging
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lowmem.config.instantiate import instantiate
from lowmem.config.settle import Run
from lowmem.config.typed_lines import in_shell
from lowmem.data.loader import Groups, Rows, ValidationLoader
from lowmem.data.packing import with_positions
from lowmem.data.token_store import Tokens
from lowmem.memory.cap import capped
from lowmem.memory.ledger import Side
from lowmem.memory.snapshot import recorded
from lowmem.model import loading
from lowmem.model.checks import FAILURES, refuse_architecture
from lowmem.report import drive_figures
from lowmem.saving import checkpoint
from lowmem.system import process
from lowmem.system.deterministic import deterministic
from lowmem.system.errors import DriveFailed, NotFinite, Refused, out_of_memory
from lowmem.techniques.loss.cross_entropy import Loss, Verified
from lowmem.techniques.strategy.contract import ONE_DEVICE, OneDevice
from lowmem.techniques.strategy.process_group import require_same
from lowmem.training import build, reference
from lowmem.training.module import CausalLM
from lowmem.training.task import TRAIN, Task
from lowmem.training.watchers import Watchers

log = logging.getLogger(__name__)


class DidNotFit(Exception):
    """Raised if a run is out of memory.

    Args:
        side: "device" or "host".
        held: category -> bytes on this side. On a device, these are the bytes at the sampled point with the most device
            bytes or, if no point was sampled, at the time of the error; on the host, the bytes at the time of the
            error. Empty if memory ran out before the callbacks existed.
    """

    def __init__(self, side: Side, held: dict[str, int]) -> None:
        super().__init__(f"Out of memory on the {side}.")
        self.side, self.held = side, held


@dataclass
class Training:
    """The model of a run, and the trainer, loggers and callbacks of its training, evaluation or export."""

    module: CausalLM
    tokens: Tokens
    trainer: Trainer
    loggers: list[Logger]
    watchers: Watchers
    saves: checkpoint.Checkpoints
    rss_before_model: int = 0  # bytes of resident host memory before the model was built
    # the checkpoint from which the work started, also for an evaluation or export; None: no checkpoint
    resumed_from: Path | None = None

    @property
    def stopped_early(self) -> bool:
        """Returns True if a callback such as early stopping ended training before its last step. Returns False after a
        stop signal, and after a checkpoint could not be written."""
        trainer = self.trainer
        ended = self.watchers.stop.interrupted or self.saves.ended_by
        return trainer.should_stop and trainer.global_step < trainer.max_steps and not ended

    def shard(self, p: nn.Parameter) -> Tensor:
        """Returns this process's shard of a weight, in full precision."""
        return self.module.full_precision(self.module.ranks.local(p))

    def close(self) -> None:
        self.watchers.meter.close()
        self.watchers.metrics.close()
        for logger in self.loggers:
            logger.finalize("success" if self.trainer.state.finished else "failed")
            if isinstance(logger, WandbLogger):
                logger.experiment.finish()  # otherwise the next job of a sweep would log to the same W&B run

    def free_card(self) -> None:
        """Frees weights, gradients and optimizer state, because the next run in this process, for example in a
        notebook, needs their memory. After an error the traceback would otherwise keep these tensors alive."""
        for optimizer in self.trainer.optimizers:
            optimizer.state.clear()
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            tensor.grad, tensor.data = None, tensor.new_empty(0)


@contextmanager
def training_session(
    run: Run,
    output_dir: Path,
    task: Task = TRAIN,
    keeps: bool = True,
    ranks: OneDevice = ONE_DEVICE,
    texts: build.Texts | None = None,
) -> Iterator[Training]:
    """Context manager that trains, evaluates or loads a model, and yields the `Training`. All ranks must enter
    the context manager.

    Args:
        run: settings that are checked and resolved, with a device and a number for batch_size.
        output_dir: folder for checkpoints and metrics.
        task: the work to do: train, evaluate, or export (which only loads the model).
        keeps: True: write checkpoints into `output_dir`.
        ranks: the strategy.
        texts: the run's data, if already open. If None, the data are opened here.

    Raises:
        DidNotFit: the run is out of memory, here or inside the `with` block.
        Refused: the data, the weights, a checkpoint or the values of model.architecture have an error that earlier
            checks did not find; the ranks read different data; early stopping has no loss or metric to watch; or
            training failed because of a drive, Lightning's settings, a value that is not finite (loss, gradient or
            weight), or a model that mixes fp32 activations with 16-bit weights.
        OSError: a file cannot be read or written.
    """
    training = network = None
    saved, settings = task.saved, ExitStack()  # `settings`: settings of the process, restored at the end
    try:
        if run.drive_folder is not None:
            settings.enter_context(process.allow_open_files())  # each swap file needs two file descriptors
        with ranks.rank_0_first("read the data"):  # the other ranks read cache files that rank 0 writes
            data = build.data(run, saved, ranks, texts)
        if ranks.several:
            _compare(data, ranks)
        if task.work == "train" and run.early_stop.patience is not None:
            _require_labels(run, data.val[0], ranks)
        before = process.rss_bytes()
        if run.evaluate is not None:
            log.info(_evaluated(run, data.val))
        module = _module(run, data, task, ranks)
        if saved and task.work == "train":
            saved.check_training(module, data.train)
        network = module.model
        ranks.folder(output_dir).mkdir(parents=True, exist_ok=True)
        training = _assembled(run, output_dir, data, module, task, keeps)
        training.rss_before_model = before
        with training.watchers.stop.listening():
            with (
                deterministic(run.deterministic),
                capped(run.limit, run.device),
                recorded(ranks.folder(output_dir), run.memory.snapshot, run.device),
            ):
                _work(training, data, task)
            yield training
    except NotFinite as error:
        raise Refused(_after_a_fault(error, training, run, output_dir)) from error
    except DriveFailed as error:
        raise Refused(f"{error} {_resume(training, output_dir)}") from error
    except MisconfigurationException as error:
        raise Refused(f"trainer, callbacks: Lightning rejected these settings: {error}") from error
    except (*FAILURES, ValueError, MemoryError, OSError) as error:
        if network is not None and mixes_dtypes(error, network):
            raise Refused(
                f"precision: {type(network).__name__} mixes fp32 activations with its 16-bit weights ({error}). Type "
                "precision=bf16, which has fp32 weights."
            ) from error
        side = out_of_memory(error)
        if side is None:
            begins = training is None or training.trainer.global_step == (saved.steps if saved else 0)
            if network is not None and begins and run.model.architecture is not None and not run.model.pretrained:
                refuse_architecture(error, lambda: loading.load(data.described, torch.float32))
            raise
        side = "device" if run.device == "cpu" else side
        raise DidNotFit(side, training.watchers.meter.by_category(side) if training else {}) from error
    finally:
        settings.close()
        if training:
            training.close()
            if run.device == "cuda" and not ranks.divides:
                training.free_card()


def _module(run: Run, data: build.Data, task: Task, ranks: OneDevice) -> CausalLM:
    """Builds the module. If the loss needs reference log-probabilities, and the work is not an export, also reads them
    from the cache or computes them."""

    def again(saved: checkpoint.Saved | None) -> CausalLM:
        seed_everything(run.seed, verbose=False)  # directly before weights are initialized
        return build.module(run, data, saved, ranks, trains=task.work == "train")

    if task.work == "export":
        return again(task.saved)
    return reference.module(run, data, task.saved, again)


def _compare(data: build.Data, ranks: OneDevice) -> None:
    """Compares the data of all ranks by digests of the tokenizer, of the order of the training rows and, except for
    streams, of the first and last row of each split. Each rank reads the files on its own machine, where a copy may be
    out of date. All ranks must call this function. Raises Refused if a digest differs."""

    def rows(sequences: Rows) -> str | None:
        if not sequences.numbered:  # the `order` of a stream already contains digests of its files
            return None
        ends = sequences.micro_batch(np.array([0, len(sequences) - 1]))
        return sha256(ends.input_ids.numpy().tobytes() + ends.labels.numpy().tobytes()).hexdigest()

    digests = {
        "the tokenizer": checkpoint.fingerprint(data.tokens.tokenizer),
        "the training data": (data.train.order, rows(data.train.sequences)),
        "the validation data": [(loader.name, loader.count, rows(loader.sequences)) for loader in data.val],
    }
    require_same(
        ranks, digests, "read different data. Give all ranks the same files, and a cache_dir built from these files"
    )


def _work(training: Training, data: build.Data, task: Task) -> None:
    trainer, module, saved = training.trainer, training.module, task.saved
    start = {"ckpt_path": saved.path if saved else None, "weights_only": True}
    val = [Groups(loader, module.at_once) for loader in data.val]
    if task.work == "train":
        drive_figures.log_access(module.weights.drive)
        trainer.fit(module, data.train, val, **start)
        return
    if saved:
        trainer.fit_loop.load_state_dict(saved.progress)  # so that results are reported for the checkpoint's step
    if task.work == "evaluate":
        trainer.validate(module, val, verbose=False, **start)
        return
    trainer.strategy.connect(module)  # `global_step` reads the number of optimizer steps from the connected module
    content = checkpoint.AtomicCheckpointIO().load_checkpoint(saved.path)
    module.on_load_checkpoint(content)
    module.load_state_dict(content["state_dict"], strict=module.strict_loading)


def _evaluated(run: Run, sets: list[ValidationLoader]) -> str:
    """Returns a log line with the number of evaluated sequences of each validation set."""
    counts = ", ".join(
        f"{loader.count:,} of {len(loader.sequences):,} sequences{f' of {loader.name}' if loader.name else ''}"
        for loader in sets
    )
    share = ""
    if run.data.arguments.get("val_path", "") is None:
        share = (
            f". They are held out from data.path (data.val_fraction={run.data.val_fraction}); type data.val_path=<a "
            "file or folder> to evaluate all of another text"
        )
    return f"evaluate={run.evaluate}: evaluating {counts} (val_sequences={run.val_sequences}){share}."


def _after_a_fault(error: NotFinite, training: Training, run: Run, output_dir: Path) -> str:
    """Returns the message of an error with advice that applies to this run's precision, settings and checkpoints."""
    instead = [f"a smaller lr (now {float(training.trainer.optimizers[0].param_groups[0]['lr']):g})"]
    if run.scales_loss:
        instead.append("precision=bf16 or bf16-master, which have the range of fp32")
    if not (run.on_nonfinite == "skip" or run.in_backward or run.early):
        instead.append("on_nonfinite=skip")
    return f"{error} Type {', or '.join(instead)}. {_resume(training, output_dir)}"


def _resume(training: Training | None, output_dir: Path) -> str:
    last = checkpoint.complete(output_dir / "checkpoints") or [training and training.resumed_from]
    if not last[-1]:
        return "There is no checkpoint yet."
    return f"{in_shell('resume', last[-1])} continues from the last checkpoint."


def _assembled(run: Run, output_dir: Path, data: build.Data, module: CausalLM, task: Task, keeps: bool) -> Training:
    folder = module.ranks.folder(output_dir)
    watchers = Watchers.for_run(run, data, folder, task.saved.steps if task.resumes else 0, keeps)
    saving, paused = watchers.meter.saving, watchers.metrics.paused
    saves = checkpoint.Checkpoints(output_dir / "checkpoints", run.save_every, run.checkpoint.keep, saving, paused)
    plugins = [*map(instantiate, run.plugins), checkpoint.AtomicCheckpointIO(module)]
    callbacks = _callbacks(run, module.own_loss, watchers, saves if keeps else None)
    loggers = _loggers(run, task, module.ranks)
    module.identity["tokenizer"] = checkpoint.fingerprint(data.tokens.tokenizer)
    for logger in loggers:  # log the settings before training starts, so that a failed run has logged them, too
        logger.log_hyperparams(run.as_dict())
        if isinstance(logger, WandbLogger):
            module.identity["wandb"] = logger.version  # a resumed run logs to the same W&B run
    ours = {
        "accelerator": "gpu" if run.device == "cuda" else "cpu",
        "devices": 1,
        "strategy": module.ranks.lightning(),
        "max_steps": run.max_steps,
        "max_epochs": -1,  # the loader counts epochs
        "val_check_interval": run.val_every,
        "check_val_every_n_epoch": None,
        "inference_mode": not module.ranks.several,  # fully_shard needs version counters of tensors
        "num_sanity_val_steps": 1,  # so an evaluation that needs too much memory fails before the first step
        "default_root_dir": folder,
        "logger": loggers or False,
        **dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    }
    trainer = Trainer(plugins=plugins, callbacks=callbacks, **(ours | run.trainer.arguments))
    start = task.saved.path if task.saved else None
    return Training(module, data.tokens, trainer, loggers, watchers, saves, resumed_from=start)


def _require_labels(run: Run, val: ValidationLoader, ranks: OneDevice) -> None:
    """Checks that the first validation set has tokens that count in the loss. Otherwise its loss is NaN, and early
    stopping would end training at the first evaluation. All ranks must call this function. Raises Refused if no token
    counts in the loss."""
    if not ranks.any(any(micro_batch.weight for micro_batch in val)):
        raise Refused(
            f"early_stop.patience={run.early_stop.patience}: the first {val.count:,} validation sequences have no "
            "token that counts in the loss, so there is no loss to watch. Type a larger val_sequences, another "
            "data.val_path, or early_stop.patience=null."
        )


def _callbacks(run: Run, loss: Loss, watchers: Watchers, saves: checkpoint.Checkpoints | None) -> list[Callback]:
    """Returns the callbacks in the order in which Lightning calls them. Raises Refused if the loss does not report the
    metric early_stop.watch."""
    callbacks = [watchers.stop, watchers.meter, watchers.metrics, *build.callbacks(run)]
    callbacks += loss.callbacks()  # must come after the callbacks that start the measurements of a window
    callbacks.append(Verified(with_positions(run.data.arguments)))
    if run.early_stop.patience is not None:
        watch = run.early_stop.watch
        if watch not in ("val_loss", *loss.shows):
            raise Refused(
                f"early_stop.watch={watch}: loss={run.loss.target.rpartition('.')[2]} does not report {watch}. Type "
                "early_stop.watch=val_loss, or train on pairs: data=preference loss=dpo."
            )
        mode = "min" if watch == "val_loss" else "max"
        # strict=False, because the accuracy is missing if all answers of a set have the same rating
        callbacks.append(EarlyStopping(watch, patience=run.early_stop.patience, mode=mode, strict=False))
    return [*callbacks, *filter(None, [saves, watchers.own, watchers.samples])]


def _loggers(run: Run, task: Task, ranks: OneDevice) -> list[Logger]:
    if task.work == "export":
        return []
    if ranks.rank:  # some Lightning callbacks need loggers either on all ranks or on no rank
        return [DummyLogger() for _ in run.logger]
    if task.resumes and task.saved.wandb and "wandb" in run.logger:
        run = run.knowing(logger={"wandb": {"run_id": task.saved.wandb}})
    # a factory returns None if the logger's package is not installed
    return [logger for logger in map(instantiate, run.logger.values()) if logger is not None]


def mixes_dtypes(error: BaseException, network: torch.nn.Module) -> bool:
    """Returns True if the network has 16-bit weights and the error says that dtypes differ."""
    has_16_bits = any(p.dtype.itemsize == 2 for p in network.parameters())
    return has_16_bits and re.search("same dtype|mixed dtype|scalar type", str(error)) is not None
