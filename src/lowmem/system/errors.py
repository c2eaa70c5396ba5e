"""Defines the errors that users see as a message without a traceback, and functions that find the cause of an error."""

import errno
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}  # disk or quota full, disk broken or read-only
DENIED = {errno.EACCES, errno.EPERM}

# Out-of-memory messages of CUDA, Triton, NCCL, cuBLAS, cuDNN and similar libraries. Only a few of these errors are a
# torch.OutOfMemoryError.
_OF_DEVICE = re.compile(r"\bout of memory\b|_STATUS_ALLOC_FAILED")
# out-of-memory messages of torch on a CPU, and of the operating system
_OF_HOST = re.compile("can't allocate memory|Cannot allocate memory")


class Refused(Exception):
    """The run cannot work as requested. The message names the setting, and says what is wrong with it and what to type
    instead."""


class NotFinite(Refused):
    """A loss, gradient or weight is inf or nan. `training/training.py` adds advice to the message."""


class NotPublished(Refused):
    """model/ could not be uploaded (push=) or converted (export_format=). The run itself is complete, and its folder is
    not marked as failed."""


class DriveFailed(Refused):
    """A file on the drive of weights.drive= could not be created, read or written. `training/training.py` adds the
    command that continues the run."""


class RankLost(Refused):
    """Another rank did not start, has exited or does not answer, or another program took the port at which the ranks
    meet. If the other rank was lost after the start, the message usually names the collective, or the task of rank 0,
    for which this rank waited."""


def out_of_memory(error: BaseException) -> Literal["device", "host"] | None:
    """Returns the memory that ran out ("device": the card's; "host": the host's), or None if the error has another
    cause."""
    if isinstance(error, RuntimeError | MemoryError) and _OF_DEVICE.search(str(error)):
        return "device"
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return "host"
    return "host" if isinstance(error, RuntimeError) and _OF_HOST.search(str(error)) else None


def refuse_gated(error: BaseException, key: str, name: str, page: str) -> None:
    """Raises Refused if the cause of an error is a gated Hugging Face repository, whose license must be accepted first.
    Returns if the error has another cause.

    Args:
        key: the configuration key that names the repository.
        name: the value of the key.
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
    """Returns whether the user can fix an error by typing another path. This is so in three cases:

    - the disk is full, broken or read-only;
    - access to a file in one of `places` is denied;
    - the error names one of `places` or a parent folder of it, for example because the folder does not exist.

    All other errors come from the code or the network.
    """
    if not error.filename or error.errno in FULL:
        return error.errno in FULL
    file, typed = _absolute(str(error.filename)), [_absolute(place) for place in places if place]
    within = error.errno in DENIED and any(file.is_relative_to(place) for place in typed)
    return within or any(place.is_relative_to(file) for place in typed)


def _absolute(place: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(place)))  # unlike Path.expanduser, os.path.expanduser never raises


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of its class if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def last_line(error: BaseException) -> str:
    """Returns the last line of an error's message, or the name of its class if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
