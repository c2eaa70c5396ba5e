"""Implements memory.snapshot=true: records every allocation of CUDA's caching allocator with its line of Python.

Without it the allocator's last events are still recorded, without the lines, which costs little: a run that runs out of
memory leaves a picture of its last allocations.
"""

import logging
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lowmem.system.errors import out_of_memory

log = logging.getLogger(__name__)

FILE = "memory_snapshot.pickle"
EVENTS = 200_000  # that the ring holds: some steps of a large model


@contextmanager
def recorded(folder: Path, stacks: bool, device: str) -> Iterator[None]:
    """Records inside the `with`. Args: stacks: record the lines too, and write the file even if the run ends well."""
    if device != "cuda":
        yield
        return
    memory = torch.cuda.memory
    memory._record_memory_history(context="all" if stacks else None, stacks="python", max_entries=EVENTS)
    try:
        yield
        if stacks:
            _dump(folder / FILE)
    except Exception as error:
        if out_of_memory(error) == "device":
            _dump(folder / FILE)
        raise
    finally:
        memory._record_memory_history(enabled=None)


def _dump(file: Path) -> None:
    try:
        torch.cuda.memory._dump_snapshot(str(file))
    except OSError as error:  # it must not hide the error that ended the run
        log.info(f"The memory snapshot {file} could not be written: {error.strerror}.")
        return
    page = str(file.with_suffix(".html"))
    opened = f"python -m torch.cuda._memory_viz trace_plot {shlex.quote(str(file))} -o {shlex.quote(page)}"
    log.info(f"The CUDA memory snapshot is {file}. To view it: {opened}")
