"""Pauses Python's garbage collector during imports, while the planner searches recipes, and in the separate process
that traces a run."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def undisturbed(message: str = "") -> Iterator[None]:
    """Context manager that pauses the garbage collector.

    torch, Lightning and transformers create half a million objects that stay alive. Garbage collections that scan these
    objects would take a quarter of the import time.

    Args:
        message: printed to stderr at the beginning if stderr is a terminal; "": nothing is printed.
    """
    if message and sys.stderr.isatty():
        print(message, file=sys.stderr, flush=True)
    searching = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searching:
            gc.enable()
