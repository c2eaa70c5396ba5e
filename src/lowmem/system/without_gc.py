"""Pauses Python's garbage collector during imports and during a planner's search."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def undisturbed(said: str = "") -> Iterator[None]:
    """Pauses the collector. Args: said: printed for people who wait at a terminal.

    torch, Lightning and transformers create half a million objects that all stay. Searching them for garbage again and
    again takes a quarter of the time."""
    if said and sys.stderr.isatty():
        print(said, file=sys.stderr, flush=True)
    searching = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searching:
            gc.enable()
