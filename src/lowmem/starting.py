"""Imports without Python's search for garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def undisturbed() -> Iterator[None]:
    """torch, Lightning and transformers make half a million objects that all stay: to look through them again and again
    for some that do not is a quarter of the time."""
    searching = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searching:
            gc.enable()
