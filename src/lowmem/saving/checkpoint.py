"""Writes checkpoints atomically and always between windows, and verifies them before they are used.

A checkpoint is a file, or a folder if several processes shard the model (`checkpoint_folder.py`); any number of
processes can read either. A checkpoint under its final name was complete when it was written. Later damage is found
with the CRC-32 that torch writes for every tensor into the zip archive but never checks itself.
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
    """Writes checkpoints atomically. Lightning's own class builds the file in memory first and does not sync it.

    Args:
        module: the module whose checkpoints are written and read; None: a single process.
    """

    def __init__(self, module: LightningModule | None = None) -> None:
        self.module = module

    def save_checkpoint(self, checkpoint: dict, path, storage_options=None) -> None:
        """Writes a checkpoint; all processes call this. Raises: OSError: on all processes, if one of them cannot
        write."""
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
        # mmap: each tensor is read when it is copied into the model, so the checkpoint is never fully in memory
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)

    def remove_checkpoint(self, path) -> None:
        """Renames a checkpoint before it is deleted: a process that is killed meanwhile leaves a draft, and not a
        broken checkpoint."""
        if Path(path).exists():
            delete(Path(path).rename(draft_of(Path(path))))


class Checkpoints(Callback):
    """Saves every `every` optimizer steps or minutes, and at the end, and deletes old checkpoints.

    Args:
        every: `save_every`: optimizer steps, or minutes as in 30min.
        keep: "last": the newest two, in case one is damaged; "best": the newest and the one with the lowest validation
            loss, which is saved after its evaluation; a number: that many of the newest.
        metered: the memory meter's context around a save.
        paused: the clock's context around a save, which does not count as part of a step.
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
        self.ended_by: str | None = None  # why training ended: the checkpoint that could not be written
        self._since = 0.0  # time of the last save, successful or not

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._since = time.monotonic()
        drafts = self.folder.glob(".step-*.ckpt.writing")  # left by a process of this run that was killed in a save
        for draft in drafts if module.ranks.rank == 0 else ():
            delete(draft)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: dict, *_) -> None:
        due = outputs["stepped"] and (trainer.global_step % self.steps == 0 or self._late(module.ranks))
        if due or trainer.should_stop:  # at the end, and after a signal, before the last evaluation
            self.save(trainer)

    def _late(self, ranks: OneDevice) -> bool:
        """Returns whether a save is due by the clock of rank 0, since the clocks of ranks differ."""
        return self.seconds < math.inf and ranks.broadcast(time.monotonic() - self._since >= self.seconds)

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        training = (
            trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        )  # not evaluate=, which saves nothing
        if self.keep != "best" or not training or module.val_loss is None or module.val_loss >= self.best_loss:
            return
        self.best_step, self.best_loss = trainer.global_step, module.val_loss
        self.save(trainer)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        if self.saved_step != trainer.global_step:  # training ended for another reason
            self.save(trainer)

    def on_load_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict) -> None:
        for tensors in (checkpoint["state_dict"], checkpoint.get("rests", {})):
            page_out(tensor for tensor in tensors.values() if not tensor.is_meta)  # the model has copied them
        self.saved_step = checkpoint["global_step"]

    def state_dict(self) -> dict:
        return {"best_step": self.best_step, "best_loss": self.best_loss}

    def load_state_dict(self, state_dict: dict) -> None:
        if self._path(state_dict["best_step"]).exists():  # a resume may go on in another folder
            self.best_step, self.best_loss = state_dict["best_step"], state_dict["best_loss"]

    def save(self, trainer: Trainer) -> None:
        """Saves a checkpoint. If it cannot be written, training ends, older checkpoints stay, and nothing more is
        saved: the run then writes only its weights (`model_folder.without_checkpoint`).

        Raises:
            NotFinite: a weight is inf or nan.
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
        # Later steps belong to an earlier attempt: this run resumed from an older checkpoint. Keep them.
        until_now = [path for path in complete(self.folder) if _step(path) <= self.saved_step]
        for old in until_now[:-newest]:
            if self.keep != "best" or _step(old) != self.best_step:
                AtomicCheckpointIO().remove_checkpoint(old)


def _all_finite(trainer: Trainer) -> bool:
    """Returns whether all weights of this process are finite."""
    module = trainer.lightning_module
    weights = (module.stored(module.ranks.local(p)) for p in module.parameters())
    return all(finite(weight) for weight in weights if not weight.is_meta)


def complete(folder: Path) -> list[Path]:
    """Returns the checkpoints of a folder that are complete, oldest first."""
    return [path for path in _named(folder) if _has_its_end(path)]


def _has_its_end(path: Path) -> bool:
    if path.is_dir():
        return checkpoint_folder.has_its_end(path)
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # not a readable zip archive
        return False


def _named(folder: Path) -> list[Path]:
    for old in folder.glob(".step-*.ckpt.old"):  # left by a process that was killed while it replaced a checkpoint
        with suppress(OSError):  # the folder belongs to another user
            put_back(folder / old.stem.removeprefix("."))
    return sorted((path for path in folder.glob("step-*.ckpt") if _NAME.fullmatch(path.name)), key=_step)


def _step(path: Path) -> int:
    return int(_NAME.fullmatch(path.name)[1])


def intact(path: Path) -> bool:
    """Returns True if the file or folder has exactly the bytes that were written.

    A CRC-32 finds any flipped bit and any changed run of up to four bytes; it misses one in 4 billion other errors,
    such as a page of zeros. It reads 1 GB in 0.3 s; a cryptographic digest takes a second.
    """
    if path.is_dir():
        return checkpoint_folder.intact(path)
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except PermissionError:
        raise
    except Exception:  # zipfile raises half a dozen errors for broken tables
        return False


def newest(folder: Path) -> Path | None:
    """Returns the newest intact checkpoint of the run's folder, which `resume=auto` uses, or None."""
    for path in reversed(_named(folder / "checkpoints")):
        if intact(path):
            return path
        log.warning(f"{path} is damaged; skipping it.")
    log.info(f"resume=auto: {folder} has no checkpoint, so training starts from step 0.")
    return None


def find(named: str, key: str = "resume") -> Path:
    """Returns the checkpoint that was typed for `key=`; for a run folder, its newest checkpoint.

    Raises:
        Refused: the checkpoint does not exist, is cut short or is damaged.
    """
    path, typed = Path(named).expanduser(), f"{key}={named}"
    if path.is_dir() and not _is_one(path):
        checkpoints = complete(path / "checkpoints") or complete(path)
        if not checkpoints:
            raise Refused(f"{typed}: this folder has no complete checkpoint. {_instead(key)}")
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
    """Returns whether a folder is a checkpoint, and not a run folder."""
    return (folder / checkpoint_folder.INDEX).exists() or _NAME.fullmatch(folder.name) is not None


def _instead(key: str, broken: Path | None = None) -> str:
    """Returns advice on what to type instead of a checkpoint that cannot be used."""
    others = [path for path in complete(broken.parent) if path != broken] if broken else []
    if good := next(filter(intact, reversed(others)), None):
        return f"Type {in_shell(key, good)}."
    return "Start without resume=." if key == "resume" else f"Type another {key}=."


class Saved:
    """The content of a checkpoint, read from the mapped file or the folder's index before the model is built.

    Args:
        key: the setting that named the checkpoint, for messages.

    Raises:
        Refused: the file is not a checkpoint, or belongs to another model, optimizer, tokenizer or order of the data.
    """

    def __init__(self, path: Path, key: str = "resume") -> None:
        self.path, self.key, self.asked = path, key, f"{key}={path}"
        self.run = path.absolute().parents[1]  # the run's folder, unless the checkpoint was moved
        try:
            content = AtomicCheckpointIO().load_checkpoint(path)
            ours = content["lowmem"]
            self.steps, self.progress = content["global_step"], content["loops"]["fit_loop"]
            self.position, self.order = Position(**ours["position"]), ours["order"]
            self.optimizer = ours["optimizer"]
            self.lr = float(content["optimizer_states"][0]["param_groups"][0]["lr"])  # learning rate of the next step
            self.tokenizer, self.wandb = ours.get("tokenizer"), ours.get("wandb")  # None: the run did not save one
            # begin tokens of every text; None: tokenized by an earlier version of lowmem
            self.begin = ours.get("begin")
            self.template = ours.get("template")  # chat template; None: the run had no conversations
            self.start = ours.get("start")  # digest of the initial weights, which a loss uses as reference
            # digest of the weights that the checkpoint leaves out; None: it contains all weights
            self.base = ours.get("base")
            self.shapes = {name: tuple(tensor.shape) for name, tensor in content["state_dict"].items()}
        except Exception as error:  # torch raises a dozen kinds of errors for other files
            raise Refused(f"{self.asked}: this is not a lowmem checkpoint ({type(error).__name__}).") from None

    def check(self, module: LightningModule, tokenizer: PreTrainedTokenizerBase) -> None:
        """Checks that the weights belong to this model, and that the model was trained with this tokenizer."""
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
        """Checks that optimizer and data are unchanged, so that training continues where it stopped."""
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


# Settings that determine the order of the data -> the key to type. Any other difference comes from data=.
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
    """Returns `own` without the digests of texts if `saved`, of an older checkpoint, lacks them."""
    if isinstance(saved, dict) and isinstance(own, dict):
        return {key: _comparable(saved.get(key), value) for key, value in own.items() if key in saved or key != "text"}
    if isinstance(saved, list) and isinstance(own, list) and len(saved) == len(own):
        return [_comparable(*both) for both in zip(saved, own, strict=True)]
    return own


def _differences(saved: dict, own: dict) -> tuple[str, str]:
    """Returns how two orders of data differ: a sentence, and the keys to type."""
    saved, own = ({"packing": "joined"} | order for order in (saved, own))
    shared = [key for key in _TYPED if key in saved and key in own and saved[key] != own[key]]
    differ = [f"{_TYPED[key]} was {saved[key]} in that run and is {own[key]} now" for key in shared]
    keys = [f"{_TYPED[key]}=" for key in shared]
    if not keys or any(saved.get(key) != own.get(key) for key in {"text", "documents"} & saved.keys() & own.keys()):
        differ, keys = [*differ, "the text differs"], [*keys, "data="]
    return ", ".join(differ), " and ".join(keys)


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns a digest that is equal for tokenizers that map tokens to the same ids."""
    return hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()
