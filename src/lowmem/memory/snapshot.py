"""Implements memory.snapshot=true: records the last allocations and releases of CUDA's caching allocator with their
Python stacks, and writes them to a file if the run succeeds or runs out of device memory.

With memory.snapshot=false the events are recorded without stacks, which costs little. So a run that runs out of device
memory still writes a snapshot of its last allocations.
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
EVENTS = 200_000  # number of events in the ring buffer: a few steps of a large model


@contextmanager
def recorded(folder: Path, stacks: bool, device: str) -> Iterator[None]:
    """Context manager that records allocations. Writes a snapshot if the device runs out of memory and, with `stacks`,
    also if the `with` block succeeds. On a CPU it does nothing.

    Args:
        folder: the snapshot's folder.
        stacks: record Python stacks, and write the snapshot even if the block succeeds.
        device: the type of the device, cpu or cuda.
    """
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
    except OSError as error:  # logged and not raised, because it would hide the error that ended the run
        log.info(f"The memory snapshot {file} could not be written: {error.strerror}.")
        return
    page = str(file.with_suffix(".html"))
    opened = f"python -m torch.cuda._memory_viz trace_plot {shlex.quote(str(file))} -o {shlex.quote(page)}"
    log.info(f"The CUDA memory snapshot is {file}. To view it: {opened}")
