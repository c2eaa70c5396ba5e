"""Errors that a user can cause. Each is shown as a sentence instead of a traceback."""

import errno
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}  # a disk is full, broken or mounted read-only
DENIED = {errno.EACCES, errno.EPERM}

# CUDA's, Triton's and NCCL's words, and those of cuBLAS, cuDNN and their kin. Few of them are torch.OutOfMemoryErrors.
_OF_DEVICE = re.compile(r"\bout of memory\b|_STATUS_ALLOC_FAILED")
_OF_HOST = re.compile("can't allocate memory|Cannot allocate memory")  # torch's allocator for CPUs; the system


class Refused(Exception):
    """The run cannot work. The message says what was asked, why it cannot work and what to type instead."""


class NotFinite(Refused):
    """A loss, gradient or weight is inf or nan. The message says which and where; `training/training.py` adds
    advice."""


class NotPublished(Refused):
    """model/ could not be uploaded (push=) or converted (export_format=). The run itself is complete, and its folder is
    not marked as failed."""


class DriveFailed(Refused):
    """A drive that holds a part of the run failed in the middle of it. `training/training.py` adds how to go on."""


class RankLost(Refused):
    """Another rank is gone or does not answer. The message names the collective that waited for it."""


def out_of_memory(error: BaseException) -> Literal["device", "host"] | None:
    """Returns whose memory ran out. None: the error has another cause."""
    if isinstance(error, RuntimeError | MemoryError) and _OF_DEVICE.search(str(error)):
        return "device"
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return "host"
    return "host" if isinstance(error, RuntimeError) and _OF_HOST.search(str(error)) else None


def refuse_gated(error: BaseException, key: str, name: str, page: str) -> None:
    """Raises Refused if an error comes from a hub's gate: the owner of a repository asks for an agreement first.

    Args:
        key: the key that names the repository; page: its address behind https://huggingface.co/.
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
    """Returns True if another place mends the error: a disk is full, access to a file in one of `places` is denied, or
    one of them does not exist or is not a folder. Other errors are faults of the code, or of the network."""
    if not error.filename or error.errno in FULL:
        return error.errno in FULL
    file, typed = _absolute(str(error.filename)), [_absolute(place) for place in places if place]
    within = error.errno in DENIED and any(file.is_relative_to(place) for place in typed)
    return within or any(place.is_relative_to(file) for place in typed)


def _absolute(place: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(place)))  # unlike Path.expanduser, it raises nothing
