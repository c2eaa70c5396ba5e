"""Errors that a user can cause. Each is shown as a sentence instead of a traceback."""

import errno
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}  # a disk is full, broken or mounted read-only
DENIED = {errno.EACCES, errno.EPERM}

# messages of CUDA, Triton, NCCL, cuBLAS, cuDNN and similar libraries; few of these errors are torch.OutOfMemoryError
_OF_DEVICE = re.compile(r"\bout of memory\b|_STATUS_ALLOC_FAILED")
# messages of torch on a CPU, and of the operating system
_OF_HOST = re.compile("can't allocate memory|Cannot allocate memory")


class Refused(Exception):
    """The run cannot work. The message says what was asked for, why it cannot work, and what to type instead."""


class NotFinite(Refused):
    """A loss, gradient or weight is inf or nan. The message names the value and its location; `training/training.py`
    adds advice."""


class NotPublished(Refused):
    """model/ could not be uploaded (push=) or converted (export_format=). The run itself is complete, and its folder is
    not marked as failed."""


class DriveFailed(Refused):
    """A drive that stores weights or optimizer state failed during the run. `training/training.py` adds the command
    that continues the run."""


class RankLost(Refused):
    """Another rank has exited or does not answer. The message names the collective that waited for it."""


def out_of_memory(error: BaseException) -> Literal["device", "host"] | None:
    """Returns which memory ran out, or None if the error has another cause."""
    if isinstance(error, RuntimeError | MemoryError) and _OF_DEVICE.search(str(error)):
        return "device"
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return "host"
    return "host" if isinstance(error, RuntimeError) and _OF_HOST.search(str(error)) else None


def refuse_gated(error: BaseException, key: str, name: str, page: str) -> None:
    """Raises Refused if the error says that a Hugging Face repository is gated: its owner requires an agreement first.

    Args:
        key: the key that names the repository.
        page: the repository's path after https://huggingface.co/.
    """
    from huggingface_hub.errors import GatedRepoError

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, GatedRepoError):
        cause = cause.__cause__ or cause.__context__
    if cause is not None:
        raise Refused(
            f"{key}={name}: this repository is gated, and no token with access was found. Accept the license on "
            f"https://huggingface.co/{page}, log in with `hf auth login` or set HF_TOKEN, and run the command again."
        ) from None


def of_place(error: OSError, places: Iterable[str]) -> bool:
    """Returns True if choosing another path fixes the error: a disk is full, access to a file in one of `places` is
    denied, or one of `places` does not exist or is not a folder. Other errors come from the code or the network."""
    if not error.filename or error.errno in FULL:
        return error.errno in FULL
    file, typed = _absolute(str(error.filename)), [_absolute(place) for place in places if place]
    within = error.errno in DENIED and any(file.is_relative_to(place) for place in typed)
    return within or any(place.is_relative_to(file) for place in typed)


def _absolute(place: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(place)))  # unlike Path.expanduser, it raises nothing
