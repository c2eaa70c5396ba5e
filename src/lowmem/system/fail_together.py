"""Makes all processes fail at the same point when one process fails, so that other processes do not wait for it
forever."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from lowmem.system.errors import NotFinite, Refused

KINDS = {kind.__name__: kind for kind in (Refused, NotFinite, OverflowError)}


class Ranks(Protocol):
    """The methods of a strategy (`techniques/strategy/contract.py`) that are called here."""

    def all_gather(self, value: object) -> list: ...

    def leave_after_rank_0(self, task: str) -> AbstractContextManager: ...


@contextmanager
def fail_together(ranks: Ranks) -> Iterator[None]:
    """Wraps work that every process does, or that rank 0 does for all of them. At the end of the `with`, each rank
    tells the other ranks whether its work succeeded; the work may take as long as it needs.

    Raises:
        RankLost: rank 0 was stopped meanwhile, or has exited.
        Exception: this process's own error; if its work succeeded, the error of the first rank that failed: an OSError
            with its errno and file, an error with a message for the user, or a RuntimeError that names the rank.
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
    """Returns the error's class name and the arguments from which every rank can rebuild it; None if nothing failed."""
    if failure is None:
        return None
    if isinstance(failure, OSError):
        return "OSError", (failure.errno, failure.strerror, failure.filename and str(failure.filename))
    return type(failure).__name__, (str(failure),)


def _unpacked(rank: int, kind: str, arguments: tuple) -> Exception:
    if kind == "OSError":
        return OSError(*arguments)
    return KINDS[kind](*arguments) if kind in KINDS else RuntimeError(f"Rank {rank}: {kind}: {arguments[0]}")
