"""Checkpoints: always between windows, written aside, synced, then renamed.

A file under its final name is therefore complete; one that was cut short elsewhere (a full disk, a copy that broke off)
is recognised by its missing zip directory before anything heavy is built.
"""

import os
import re
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer

from lowmem.data.loader import Position, WindowLoader
from lowmem.errors import Refused
from lowmem.gradients import finite
from lowmem.memory.process import page_out
from lowmem.module import CausalLM

_NAME = re.compile(r"step-(\d+)\.ckpt")


class AtomicCheckpointIO(CheckpointIO):
    """Lightning's own builds the file in memory first and does not sync it."""

    def save_checkpoint(self, checkpoint: dict, path, storage_options=None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.writing")
        try:
            with draft.open("wb") as stream:
                torch.save(checkpoint, stream)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(draft, path)
        except (OSError, RuntimeError) as error:
            cause = error if isinstance(error, OSError) else error.__context__  # torch's writer hides why it stopped
            if isinstance(cause, OSError) and cause.errno:
                raise OSError(cause.errno, cause.strerror, str(path)) from error
            raise
        finally:
            draft.unlink(missing_ok=True)  # what was cut short may hold all the room that there was
        _sync_folder(path.parent)

    def load_checkpoint(self, path, map_location=None, weights_only: bool | None = True) -> dict:
        # mmap: tensors are read when they are copied into the model, never all at once beside it.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)

    def remove_checkpoint(self, path) -> None:
        Path(path).unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable (POSIX)."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Checkpoints(Callback):
    """Saves every `every` optimizer steps and keeps the last two.

    Args:
        metered: the meter's context around a save.
        paused: the clock's: a save is not part of a step.
    """

    def __init__(
        self,
        folder: Path,
        every: int,
        metered: Callable[[Trainer], AbstractContextManager] = lambda _: nullcontext(),
        paused: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        self.folder, self.every, self.metered, self.paused = folder, every, metered, paused

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: dict, *_) -> None:
        due = outputs["stepped"] and trainer.global_step % self.every == 0
        if due or trainer.should_stop:  # at the end, and after a signal, before the last evaluation
            self.save(trainer)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        if not self._file(trainer).exists():  # a signal between two windows, or in an evaluation
            self.save(trainer)

    def on_load_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict) -> None:
        page_out(checkpoint["state_dict"].values())  # the model has its copies by now

    def save(self, trainer: Trainer) -> None:
        trainer.precision_plugin.arrived()
        if not _all_finite(trainer.lightning_module):
            raise Refused(
                f"A weight is no longer finite at step {trainer.global_step}; nothing was saved. Type a smaller lr, or "
                "precision=bf16 or 32; resume= goes on from the last checkpoint."
            )
        with self.paused(), self.metered(trainer):
            trainer.save_checkpoint(self._file(trainer))
        for old in complete(self.folder)[:-2]:
            old.unlink()

    def _file(self, trainer: Trainer) -> Path:
        return self.folder / f"step-{trainer.global_step:08d}.ckpt"


def _all_finite(module: torch.nn.Module) -> bool:
    return all(finite(p.detach()) for p in module.parameters())


def complete(folder: Path) -> list[Path]:
    """Checkpoints of a folder that can be read, oldest first."""
    whole = [path for path in folder.glob("step-*.ckpt") if _NAME.fullmatch(path.name) and zipfile.is_zipfile(path)]
    return sorted(whole, key=_step)


def _step(path: Path) -> int:
    return int(_NAME.fullmatch(path.name)[1])


def find(resume: str) -> Path:
    """The checkpoint that `resume=` means: the file itself, or a run folder's newest complete one.

    Raises:
        Refused: when there is none, or it is cut short.
    """
    path = Path(resume).expanduser()
    if path.is_dir():
        whole = complete(path / "checkpoints") or complete(path)
        if not whole:
            raise Refused(f"resume={resume}: this folder has no complete checkpoint. Start without resume=.")
        return whole[-1]
    if not path.exists():
        raise Refused(f"resume={resume}: there is no such run folder or checkpoint. Runs are under outputs/.")
    if not zipfile.is_zipfile(path):
        others = [str(p) for p in complete(path.parent)]
        instead = f"Type resume={others[-1]}" if others else "Start without resume="
        raise Refused(f"resume={resume}: this checkpoint is incomplete; its end is missing. {instead}.")
    return path


class Saved:
    """What a checkpoint holds, read from the mapped file: asked before the model is built, and checked against it.

    Raises:
        Refused: a file of something else, a run that is already done, another model, optimizer or order of the data.
    """

    def __init__(self, path: Path, max_steps: int) -> None:
        self.path = path
        try:
            content = AtomicCheckpointIO().load_checkpoint(path)
            ours = content["lowmem"]
            steps = content["global_step"]
            self.position, self.order = Position(**ours["position"]), ours["order"]
            self.optimizer = ours["optimizer"]
            self.shapes = {name: tuple(tensor.shape) for name, tensor in content["state_dict"].items()}
        except Exception as error:  # torch names a dozen ways in which a file can be another file
            raise Refused(f"resume={path}: this is no checkpoint of lowmem ({type(error).__name__}).") from None
        if steps >= max_steps:
            raise Refused(
                f"resume={path}: {steps} steps are done and max_steps={max_steps}. Type max_steps={2 * steps}."
            )

    def check(self, module: CausalLM, train: WindowLoader) -> None:
        for name, tensor in module.state_dict().items():
            if self.shapes.get(name) != tuple(tensor.shape):
                raise Refused(
                    f"resume={self.path}: {name} is {self.shapes.get(name, 'missing')} there and {tuple(tensor.shape)} "
                    "in this model. Type the model= and model.architecture of that run, or start without resume=."
                )
        if self.order != train.order:
            raise Refused(
                f"resume={self.path}: that run read its data in another order ({self.order}, here {train.order}), so "
                "its place cannot be found. Type the data=, seq_len= and seed= of that run."
            )
        if self.optimizer != module.make_optimizer.name:
            raise Refused(
                f"resume={self.path}: {module.make_optimizer.name} cannot read the state of {self.optimizer}. Type the "
                "optim= of that run, or start from its exported model: model=hf model.name=<run folder>/model."
            )
