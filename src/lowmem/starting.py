"""Work without Python's search for garbage: imports, and a planner's search."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def undisturbed(said: str = "") -> Iterator[None]:
    """Args: said: to whoever looks at a terminal, and waits.

    torch, Lightning and transformers make half a million objects that all stay: to look through them again and again
    for some that do not is a quarter of the time."""
    if said and sys.stderr.isatty():
        print(said, file=sys.stderr, flush=True)
    searching = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searching:
            gc.enable()
