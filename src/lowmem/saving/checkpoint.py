"""Writes checkpoints atomically and only between windows (optimizer steps), and verifies a checkpoint before its use.

    AtomicCheckpointIO    writes, reads and deletes one checkpoint, for Lightning
    Checkpoints           callback: decides when to save, and deletes old checkpoints
    newest, find          select and verify the checkpoint to start from
    Saved                 settings and counts of that checkpoint, and checks that this run can use it

A checkpoint is a file, or a folder if the strategy divides the model (`checkpoint_folder.py`). Any number of processes
can read either kind. A checkpoint gets its final name only when it is complete. CRC-32 checksums show damage to a
complete checkpoint. In a file the checksums are part of the zip archive: torch writes them, but never checks them. In a
folder the index contains the checksums of the tensors, and the index itself is a zip archive with checksums.
"""

import hashlib
import logging
import math
import re
import time
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from transformers import PreTrainedTokenizerBase

from lowmem.config.check import no_such_run
from lowmem.config.typed_lines import in_shell
from lowmem.data.loader import Position, WindowLoader
from lowmem.model.trainable import checkpoint_state
from lowmem.saving import by_name, checkpoint_folder
from lowmem.step.gradients import finite
from lowmem.system.atomic_files import atomic_write, delete, draft_of, put_back
from lowmem.system.errors import NotFinite, Refused
from lowmem.system.fail_together import fail_together
from lowmem.system.process import page_out
from lowmem.system.units import steps_or_seconds
from lowmem.techniques.strategy.contract import OneDevice

log = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d+)\.ckpt")


class AtomicCheckpointIO(CheckpointIO):
    """Writes checkpoints atomically. Lightning's own class builds the file in memory first, and does not sync it to the
    disk.

    Args:
        module: the module whose checkpoints are written. None: a single process writes, or checkpoints are only read or
            deleted.
    """

    def __init__(self, module: LightningModule | None = None) -> None:
        self.module = module

    def save_checkpoint(self, checkpoint: dict, path, storage_options=None) -> None:
        """Writes a checkpoint. All processes must call this method. If one of them cannot write, all raise OSError."""
        ranks = self.module.ranks if self.module else OneDevice()
        if ranks.divides:
            checkpoint_folder.save(Path(path), *by_name.tensors_and_rest(checkpoint, self.module), ranks)
            return
        with fail_together(ranks):
            if ranks.rank == 0:
                with atomic_write(Path(path)) as draft, draft.open("wb") as stream:
                    torch.save(checkpoint, stream)

    def load_checkpoint(self, path, map_location=None, weights_only: bool | None = True) -> dict:
        if Path(path).is_dir():
            return by_name.load(Path(path))
        # mmap=True: a tensor is read when it is copied into the model, so the file is never read into memory in full
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)

    def remove_checkpoint(self, path) -> None:
        """Renames a checkpoint and then deletes it. A process that is killed in between leaves a draft, not a broken
        checkpoint."""
        if Path(path).exists():
            delete(Path(path).rename(draft_of(Path(path))))


class Checkpoints(Callback):
    """Callback that saves a checkpoint at regular intervals (`every`) and at the end of training, and deletes old
    checkpoints.

    Args:
        folder: the folder for the checkpoints.
        every: value of `save_every`: a number of optimizer steps, or a time such as 30min.
        keep: which checkpoints to keep. "last": the newest two, in case one is damaged. "best": the newest checkpoint,
            and the checkpoint with the lowest validation loss; a checkpoint is also saved after each evaluation that
            lowers this loss. A number N: the newest N checkpoints. If the run was resumed from a checkpoint that was
            not the newest, checkpoints of steps that the run has not reached again are kept, too.
        metered: returns a context in which the memory meter attributes memory to saving.
        paused: returns a context in which time does not count as part of a step.
    """

    def __init__(
        self,
        folder: Path,
        every: int | str,
        keep: int | str = "last",
        metered: Callable[[Trainer], AbstractContextManager] = lambda _: nullcontext(),
        paused: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        self.folder, self.keep, self.metered, self.paused = folder, keep, metered, paused
        self.steps, self.seconds = steps_or_seconds(every)
        self.best_step, self.best_loss = -1, math.inf
        self.saved_step = -1
        # why a checkpoint could not be written, for the error message that ends the run; None: no such failure
        self.ended_by: str | None = None
        self._since = 0.0  # time of the last attempt to save; before the first attempt, the start of training

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._since = time.monotonic()
        drafts = self.folder.glob(".step-*.ckpt.writing")  # left by a process that was killed while saving or deleting
        for draft in drafts if module.ranks.rank == 0 else ():
            delete(draft)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: dict, *_) -> None:
        due = outputs["stepped"] and (trainer.global_step % self.steps == 0 or self._late(module.ranks))
        if due or trainer.should_stop:  # training ends, perhaps after a signal: save before the last evaluation
            self.save(trainer)

    def _late(self, ranks: OneDevice) -> bool:
        """Returns True if `every` is a time that has passed since the last attempt to save. Rank 0 decides for all
        ranks, because their clocks differ. All processes must call this method."""
        return self.seconds < math.inf and ranks.broadcast(time.monotonic() - self._since >= self.seconds)

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        training = (
            trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        )  # False in evaluate=, which saves no checkpoint, and in the sanity check before training
        if self.keep != "best" or not training or module.val_loss is None or module.val_loss >= self.best_loss:
            return
        self.best_step, self.best_loss = trainer.global_step, module.val_loss
        self.save(trainer)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        if self.saved_step != trainer.global_step:  # for example: early stopping after an evaluation
            self.save(trainer)

    def on_load_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict) -> None:
        for tensors in (checkpoint["state_dict"], checkpoint.get("rests", {})):
            # The model has copied the weights, so evict the mapped pages of the file. If masters are stored in two
            # halves, `MasterWeights.make` copies the lower halves ("rests") later, and reads their pages again.
            page_out(tensor for tensor in tensors.values() if not tensor.is_meta)
        self.saved_step = checkpoint["global_step"]

    def state_dict(self) -> dict:
        return {"best_step": self.best_step, "best_loss": self.best_loss}

    def load_state_dict(self, state_dict: dict) -> None:
        if self._path(state_dict["best_step"]).exists():  # the run may have been resumed in another folder
            self.best_step, self.best_loss = state_dict["best_step"], state_dict["best_loss"]

    def save(self, trainer: Trainer) -> None:
        """Saves a checkpoint, and then deletes old ones. All processes must call this method. If the checkpoint cannot
        be written, training ends, older checkpoints are kept, and later calls save nothing. The run then writes its
        weights to model/ instead (`model_folder.without_checkpoint`).

        Raises:
            NotFinite: a weight of any process is inf or nan.
            DriveFailed: the drive that stores masters or optimizer state could not be read or written.
        """
        if self.ended_by:
            return
        trainer.lightning_module.arrived()
        ranks = trainer.lightning_module.ranks
        if ranks.any(not _all_finite(trainer)):
            raise NotFinite(f"A weight is inf or nan at step {trainer.global_step}, so no checkpoint was saved.")
        self._since = time.monotonic()
        try:
            with self.paused(), self.metered(trainer), trainer.lightning_module.weights.being_read():
                trainer.save_checkpoint(self._path(trainer.global_step))
        except OSError as error:
            self.ended_by = f"{self._path(trainer.global_step)} cannot be written ({error.strerror})"
            trainer.should_stop = True
            return
        self.saved_step = trainer.global_step
        if ranks.rank == 0:
            self._prune()

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.ckpt"

    def _prune(self) -> None:
        newest = {"last": 2, "best": 1}.get(self.keep, self.keep)
        # Checkpoints of later steps belong to an earlier attempt: this run resumed from an older one. Keep them.
        until_now = [path for path in complete(self.folder) if _step(path) <= self.saved_step]
        for old in until_now[:-newest]:
            if self.keep != "best" or _step(old) != self.best_step:
                AtomicCheckpointIO().remove_checkpoint(old)


def _all_finite(trainer: Trainer) -> bool:
    """Returns True if all weights of this process are finite."""
    module = trainer.lightning_module
    weights = (module.stored(module.ranks.local(p)) for p in module.parameters())
    return all(finite(weight) for weight in weights if not weight.is_meta)


def complete(folder: Path) -> list[Path]:
    """Returns the complete checkpoints in a folder, sorted by step. Does not verify their checksums. Raises
    PermissionError if a checkpoint may not be read."""
    return [path for path in _named(folder) if _has_its_end(path)]


def _has_its_end(path: Path) -> bool:
    if path.is_dir():
        return checkpoint_folder.has_its_end(path)
    try:
        with path.open("rb") as file:  # `is_zipfile` returns False for an unreadable path
            return zipfile.is_zipfile(file)
    except (zipfile.BadZipFile, FileNotFoundError):  # broken, or removed by its run
        return False


def _named(folder: Path) -> list[Path]:
    """Returns the checkpoints in a folder, complete or not, sorted by step. First puts back a checkpoint that a process
    was replacing when it was killed."""
    for old in folder.glob(".step-*.ckpt.old"):
        with suppress(OSError):  # the folder may belong to another user
            put_back(folder / old.stem.removeprefix("."))
    return sorted((path for path in folder.glob("step-*.ckpt") if _NAME.fullmatch(path.name)), key=_step)


def _step(path: Path) -> int:
    return int(_NAME.fullmatch(path.name)[1])


def intact(path: Path) -> bool:
    """Returns True if all CRC-32 checksums of a checkpoint match its content.

    A CRC-32 detects a single flipped bit, and any change within four adjacent bytes. Of all other changes, such as a
    page that was replaced by zeros, a CRC-32 misses one in 4 billion. Checking 1 GB takes 0.3 s; a cryptographic digest
    would take 1 s.

    Raises:
        PermissionError: the checkpoint may not be read.
    """
    if path.is_dir():
        return checkpoint_folder.intact(path)
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except PermissionError:
        raise
    except Exception:  # zipfile raises many kinds of errors for a broken archive
        return False


def newest(folder: Path) -> Path | None:
    """Returns the newest intact checkpoint of a run for `resume=auto`, or None if the run has no intact checkpoint.
    `folder` is the run folder. Raises PermissionError if a checkpoint may not be read."""
    for path in reversed(_named(folder / "checkpoints")):
        if intact(path):
            return path
        log.warning(f"{path} is damaged; skipping it.")
    log.info(f"resume=auto: {folder} has no checkpoint, so training starts from step 0.")
    return None


def find(named: str, key: str = "resume") -> Path:
    """Finds and verifies the checkpoint that resume=, evaluate= or export= names. If the value is a run folder or the
    folder checkpoints/ of a run, its newest complete checkpoint is taken, and refused if it is damaged.

    Args:
        named: the typed value: a checkpoint, a run folder, or the folder checkpoints/ of a run.
        key: the typed key, for error messages.

    Raises:
        Refused: the checkpoint does not exist, is incomplete or is damaged.
        PermissionError: a checkpoint may not be read.
    """
    path, typed = Path(named).expanduser(), f"{key}={named}"
    if path.is_dir() and not _is_one(path):
        checkpoints = complete(path / "checkpoints") or complete(path)
        if not checkpoints:
            exported = key == "evaluate" and (path / "model").is_dir()  # by export=, which leaves no checkpoint
            advice = f"Type {in_shell(key, path / 'model')}." if exported else _instead(key)
            raise Refused(f"{typed}: this folder has no complete checkpoint. {advice}")
        path = checkpoints[-1]
    if not path.exists():
        raise no_such_run(key, named)
    if not _has_its_end(path):
        missing = "one of its files is missing or truncated" if path.is_dir() else "the file is truncated"
        raise Refused(f"{typed}: this checkpoint is incomplete ({missing}). {_instead(key, path)}")
    if not intact(path):
        raise Refused(f"{typed}: {path.name} is damaged (its checksum does not match). {_instead(key, path)}")
    return path


def _is_one(folder: Path) -> bool:
    """Returns True if a folder is a checkpoint, False if it is a run folder or the folder checkpoints/ of a run."""
    return (folder / checkpoint_folder.INDEX).exists() or _NAME.fullmatch(folder.name) is not None


def _instead(key: str, broken: Path | None = None) -> str:
    """Returns advice on what to type instead of a missing, incomplete or damaged checkpoint."""
    others = [path for path in complete(broken.parent) if path != broken] if broken else []
    if good := next(filter(intact, reversed(others)), None):
        return f"Type {in_shell(key, good)}."
    return "Start without resume=." if key == "resume" else f"Type another {key}=."


class Saved:
    """The settings and counts in a checkpoint. They are read before the model is built, and the values of weights and
    optimizer state are not read.

    Args:
        path: the checkpoint.
        key: the key that named the checkpoint, for error messages.

    Raises:
        Refused: the file or folder is not a checkpoint of lowmem.
    """

    def __init__(self, path: Path, key: str = "resume") -> None:
        self.path, self.key, self.asked = path, key, f"{key}={path}"
        self.run = path.absolute().parents[1]  # the folder of the run, unless the checkpoint has been moved
        try:
            content = AtomicCheckpointIO().load_checkpoint(path)
            ours = content["lowmem"]
            self.steps, self.progress = content["global_step"], content["loops"]["fit_loop"]
            self.position, self.order = Position(**ours["position"]), ours["order"]
            self.optimizer = ours["optimizer"]
            self.lr = float(content["optimizer_states"][0]["param_groups"][0]["lr"])  # of the next step
            # digest of the tokenizer, and id of the W&B run; None: the run did not save this value
            self.tokenizer, self.wandb = ours.get("tokenizer"), ours.get("wandb")
            # tokens with which texts begin; None: tokenized as by earlier versions of lowmem, without such tokens
            self.begin = ours.get("begin")
            self.template = ours.get("template")  # chat template; None: the run had no conversations
            self.start = ours.get("start")  # digest of the initial model, if the loss has a reference model
            # digest of the frozen weights, which the checkpoint leaves out; None: the checkpoint has all weights
            self.base = ours.get("base")
            self.shapes = {name: tuple(tensor.shape) for name, tensor in content["state_dict"].items()}
        except Exception as error:  # torch raises many kinds of errors for files that are not checkpoints
            raise Refused(f"{self.asked}: this is not a lowmem checkpoint ({type(error).__name__}).") from None

    def check(self, module: LightningModule, tokenizer: PreTrainedTokenizerBase) -> None:
        """Checks that the weights fit this model, and that the saved run and this run have equal frozen weights,
        tokenizers, chat templates and beginning tokens. Does not compare a tokenizer, a chat template or beginning
        tokens that one of the two runs lacks. Raises Refused if a check fails."""
        shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint_state(module).items()}
        for name in [*shapes, *self.shapes]:
            if self.shapes.get(name) != shapes.get(name):
                raise Refused(
                    f"{self.asked}: {name} is {self.shapes.get(name, 'missing')} in the checkpoint and "
                    f"{shapes.get(name, 'missing')} in {self._trains(module)}. Type the model= and "
                    f"model.architecture{', adapter= and freeze=' * self._partial(module)} of that run."
                )
        if self.base != module.identity.get("base"):
            raise Refused(
                f"{self.asked}: the checkpoint holds only the trained weights, and the frozen weights of this run are "
                "different ones. Type the model=, precision= and, after a random start, seed= of that run."
            )
        if self.tokenizer not in (None, fingerprint(tokenizer)):
            raise Refused(
                f"{self.asked}: that run had a different tokenizer. Type its data= and model=, or use its exported "
                f"model, which includes the tokenizer: {in_shell('evaluate', self.run / 'model')}."
            )
        template = module.identity.get("template")
        if None not in (self.template, template) and self.template != template:
            raise Refused(
                f"{self.asked}: that run formatted its conversations with a different chat template. Type the "
                "data.template= of that run."
            )
        begin = module.identity.get("begin")
        if None not in (self.begin, begin) and self.begin != begin:
            raise Refused(
                f"{self.asked}: texts began with the tokens {self.begin} in that run, and begin with {begin} in this "
                "run. Type the data.bos= of that run."
            )

    def _partial(self, module: LightningModule) -> bool:
        return not (self.base is None and module.strict_loading)

    def _trains(self, module: LightningModule) -> str:
        return "the trained weights of this run" if self._partial(module) else "this model"

    def check_training(self, module: LightningModule, train: WindowLoader) -> None:
        """Checks that the optimizer and the order of the data are unchanged, so that training can continue where it
        stopped. Raises Refused if they have changed."""
        if self.order != (order := _comparable(self.order, train.order)):
            differ, keys = _differences(self.order, order)
            is_of_earlier_chat = self.template is not None and self.begin is None and keys == "data="
            instead = (
                " If data= has not changed, an earlier version of lowmem split these conversations into rows "
                "differently: start from that run's exported model, model=hf model.name=<run folder>/model."
            )
            raise Refused(
                f"{self.asked}: that run read its data in a different order, so the position in the data is unknown: "
                f"{differ}. Type the {keys} of that run.{instead * is_of_earlier_chat}"
            )
        if self.optimizer != module.update.optimizer.name:
            raise Refused(
                f"{self.asked}: {module.update.optimizer.name} cannot read the state of {self.optimizer}. Type the "
                "optim= of that run, or start from its exported model: model=hf model.name=<run folder>/model."
            )


# Entry of `WindowLoader.order` -> key that sets it. Differences in other entries come from data=.
_TYPED = {
    "seq_len": "seq_len",
    "seed": "seed",
    "packing": "data.packing",
    "too_long": "data.too_long",
    "together": "batch_size",  # sequences per micro-batch of all processes
    "block": "data.block",
    "val_rows": "data.val_rows",
}


def _comparable(saved: object, own: object) -> object:
    """Returns `own` without the digests of texts (keys "text") that `saved` lacks. Checkpoints of older versions of
    lowmem have no such digests."""
    if isinstance(saved, dict) and isinstance(own, dict):
        return {key: _comparable(saved.get(key), value) for key, value in own.items() if key in saved or key != "text"}
    if isinstance(saved, list) and isinstance(own, list) and len(saved) == len(own):
        return [_comparable(*both) for both in zip(saved, own, strict=True)]
    return own


def _differences(saved: dict, own: dict) -> tuple[str, str]:
    """Returns two texts for an error message: the differences between two orders of the data, and the keys to type."""
    saved, own = ({"packing": "joined"} | order for order in (saved, own))
    shared = [key for key in _TYPED if key in saved and key in own and saved[key] != own[key]]
    differ = [f"{_TYPED[key]} was {saved[key]} in that run and is {own[key]} now" for key in shared]
    keys = [f"{_TYPED[key]}=" for key in shared]
    if not keys or any(saved.get(key) != own.get(key) for key in {"text", "documents"} & saved.keys() & own.keys()):
        differ, keys = [*differ, "the text differs"], [*keys, "data="]
    return ", ".join(differ), " and ".join(keys)


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns a digest of a tokenizer's vocabulary. Tokenizers with equal tokens and ids have equal digests."""
    return hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()
