"""Makes all ranks raise an error at the same point if one rank fails, so that the other ranks do not wait forever."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from lowmem.system.errors import DriveFailed, NotFinite, NotPublished, RankLost, Refused

KINDS = {kind.__name__: kind for kind in (Refused, NotFinite, NotPublished, DriveFailed, RankLost, OverflowError)}


class Ranks(Protocol):
    """The methods of a strategy (`techniques/strategy/contract.py`) that `fail_together` calls."""

    def all_gather(self, value: object) -> list: ...

    def leave_after_rank_0(self, task: str) -> AbstractContextManager: ...


@contextmanager
def fail_together(ranks: Ranks) -> Iterator[None]:
    """Context manager for work that every rank does, or that rank 0 does for all ranks. All ranks must enter the
    `with`. At the end of the `with`, the ranks tell each other whether their work succeeded. The work of rank 0 has no
    time limit. If another rank's work takes longer than the timeout of collectives, the ranks that wait for it fail.

    Raises:
        RankLost: rank 0 has exited before the end of the `with`, or sends no heartbeat. (If another rank is lost,
            `all_gather` raises torch's error, which `process_group.py` converts to RankLost.)
        Exception: this rank's own error. If this rank succeeded, the error of the lowest rank that failed: an OSError
            with errno and file, an error of a class in KINDS with its message, or a RuntimeError that names the rank
            and the original error.
    """
    failure = None
    with ranks.leave_after_rank_0("do its part"):
        try:
            yield
        except Exception as error:
            failure = error
    failures = ranks.all_gather(_packed(failure))
    if failure is not None:
        raise failure
    for rank, packed in enumerate(failures):
        if packed is not None:
            raise _unpacked(rank, *packed)


def _packed(failure: Exception | None) -> tuple[str, tuple] | None:
    """Returns an error's class name and the arguments from which other ranks can rebuild the error; None for no
    error."""
    if failure is None:
        return None
    if isinstance(failure, OSError):
        return "OSError", (failure.errno, failure.strerror, failure.filename and str(failure.filename))
    return type(failure).__name__, (str(failure),)


def _unpacked(rank: int, kind: str, arguments: tuple) -> Exception:
    if kind == "OSError":
        return OSError(*arguments)
    return KINDS[kind](*arguments) if kind in KINDS else RuntimeError(f"Rank {rank}: {kind}: {arguments[0]}")
