"""What one of several processes cannot do, all of them give up at the same place: else the others would wait for it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from lowmem.errors import NotFinite, Refused

KINDS = {kind.__name__: kind for kind in (Refused, NotFinite)}


class Ranks(Protocol):
    """What is asked here of a strategy (`strategy/one_device.py`)."""

    def all_gather(self, said: object) -> list: ...

    def watched(self, what: str) -> AbstractContextManager: ...


@contextmanager
def together(ranks: Ranks) -> Iterator[None]:
    """Around what every process does, or rank 0 for all, however long that takes. In the end each tells the others how
    it went.

    Raises:
        RankLost: of rank 0, which was stopped meanwhile, or is gone.
        Exception: a process's own; on one whose own part went well, what the first other one failed of: an OSError with
            its number and file, a sentence for the user, or a RuntimeError that names the process.
    """
    failure = None
    with ranks.watched("do its part"):
        try:
            yield
        except Exception as error:
            failure = error
    said = ranks.all_gather(_said(failure))
    if failure is not None:
        raise failure
    for rank, one in enumerate(said):
        if one is not None:
            raise _heard(rank, *one)


def _said(failure: Exception | None) -> tuple[str, tuple] | None:
    """What can be sent of it: of its kind and its arguments only what everybody has."""
    if failure is None:
        return None
    if isinstance(failure, OSError):
        return "OSError", (failure.errno, failure.strerror, failure.filename and str(failure.filename))
    return type(failure).__name__, (str(failure),)


def _heard(rank: int, kind: str, what: tuple) -> Exception:
    if kind == "OSError":
        return OSError(*what)
    return KINDS[kind](*what) if kind in KINDS else RuntimeError(f"Rank {rank}: {kind}: {what[0]}")
