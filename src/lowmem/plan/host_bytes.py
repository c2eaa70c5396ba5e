"""Computes from a trace the host memory of each phase, and of the processes that share a host."""

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import torch

from lowmem.config.settle import Run
from lowmem.memory.tracker import Point
from lowmem.model.loading import describe, read_in, stored_in, stored_narrower
from lowmem.model.published_files import joins_tensors
from lowmem.offload.link import SLOT_BYTES, SLOTS
from lowmem.plan.column import DeviceBytes, HostBytes
from lowmem.plan.tracing.traces import MemoryTrace
from lowmem.saving.export import FILE_BYTES
from lowmem.system.units import GIB, MIB

BY_HOST = ("load", "save", "resume")  # phases without paged state, or with all of it read or written by the host
CUDA_ON_HOST = GIB  # host memory of CUDA's libraries: a margin, not a measurement
# Host memory of code and threads that the first step wakes: 12 to 20 MiB on two cores, in runs of 10M to 60M parameters
WOKEN = 12 * MIB
GENERATOR = GIB // 8  # host memory of torch.compile: 60 to 110 MiB with its first kernels, 5 to 10 for each more


def host_phases(
    trace: MemoryTrace, run: Run, device: Mapping[str, DeviceBytes], on_card: bool, libraries: int
) -> dict[str, HostBytes]:
    """Returns the bytes of a process by phase, without pages of weight files.

    Args: device: bytes by phase, which a CPU holds in the same memory; libraries: resident bytes after imports, before
    anything is built.
    """
    base = HostBytes(
        "load",
        libraries=libraries,
        cuda=CUDA_ON_HOST if on_card else 0,
        generator=GENERATOR if trace.generated else 0,
        staging=(2 * SLOTS + 2 * run.reads_weights) * SLOT_BYTES if on_card and trace.steps_on_host else 0,
    )
    phases = {"load": base.plus(**_bytes_of_loading(trace, run, on_card))}
    for name, sizes in _bytes_after_loading(trace, run, on_card).items():
        phases[name] = replace(base, phase=name).plus(threads=WOKEN, **sizes)
    if on_card:
        return phases
    return {name: phase.plus(**{k: v for k, v in device[name].rows.items() if v}) for name, phase in phases.items()}


def of_host(phases: Mapping[str, HostBytes], processes: int, first: int = 0, pages: int = 0) -> HostBytes:
    """Returns the bytes of all processes on a host in the phase that needs most.

    Args: first: bytes of weights that only rank 0 holds while it loads; pages: bytes of a process's paged state that
    have no room on its card.
    """
    every = {
        name: (phase if name in BY_HOST else phase.plus(optimizer=pages)).times(processes)
        for name, phase in phases.items()
    }
    every["load"] = every["load"].plus(weights=-(processes - 1) * first)
    return max(every.values(), key=attrgetter("total"))


def mapped(run: Run, parameters: int) -> int:
    """Returns the bytes of a folder's weight files if they are copied into elements of another size, are packed, or are
    split into masters that stream.

    Their pages then stay resident until all are read; else the pages become the tensors' own memory. The sizes of a
    hub's files are not known beforehand.
    """
    folder = Path(run.model.name).expanduser()
    if not (run.model.pretrained and folder.is_dir()):
        return 0
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    copied = _packs(run) or (run.masters and run.streams) or round(stored / parameters) != _reading(run)[0]
    return stored if copied else 0


def by_row(sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the tracker's bytes by category as rows of a column: what is in no other category is temporary."""
    return {"temporaries" if category == "other" else category: size for category, size in sizes.items()}


# --- loading ----------------------------------------------------------------------------------------------------------


def _bytes_of_loading(trace: MemoryTrace, run: Run, on_card: bool) -> dict[str, int]:
    """Returns the bytes of weights and masters while a model is loaded, and of the largest tensor of its file."""
    loaded, maps = _reading(run)
    read = 0 if maps and (_packs(run) or run.widens_as_sent) else trace.parameters * loaded
    here = 0 if on_card else trace.weights  # weights that are counted with the device
    weights, largest = max(read, trace.weights) - here, {"temporaries": trace.largest * loaded}
    if run.drive_folder is not None and not _packs(run):
        # Masters leave block by block while they are made of the weights that were loaded, all at once. Weights that
        # go there too, in their files' dtype, are pages of those files until then, which the system gives up. A base is
        # packed before any of it leaves.
        read -= trace.streamed if run.reads_weights and maps else 0
        return largest | {"weights": read - here, "staging": trace.drive.room}
    load = _kept_on_host(trace, on_card) if trace.streamed else _masters_and(weights, trace, run, on_card)
    if trace.streamed and _packs(run) and weights > sum(load.values()):
        load = {"weights": weights}
    return largest | load | ({} if run.drive_folder is None else {"staging": trace.drive.room})


def _kept_on_host(trace: MemoryTrace, on_card: bool) -> dict[str, int]:
    """None of these weights is on the device yet, and they are split into masters one at a time."""
    waiting = trace.streamed + trace.outside
    return {"weights": waiting + (trace.weights if on_card else 0), "masters": trace.host_bytes - waiting}


def _masters_and(weights: int, trace: MemoryTrace, run: Run, on_card: bool) -> dict[str, int]:
    """On a CPU weights are loaded where they stay, and frozen ones are narrowed there."""
    masters = trace.trained_parameters * getattr(torch, run.weights_dtype).itemsize if trace.steps_on_host else 0
    if on_card:
        return {"weights": weights, "masters": masters}
    return {"masters": masters} if masters >= weights else {"weights": weights}


def _packs(run: Run) -> bool:
    """Returns whether the model's own weights are packed into fewer bits, one by one, once they have been loaded."""
    return "weights" in run.technique("adapter").saves


def _reading(run: Run) -> tuple[int, bool]:
    """Returns (bytes per element of the weights as they are read, whether they are pages of their files, which the
    system gives up)."""
    loaded, described = getattr(torch, run.loaded_in), describe(run, plans=True)
    of_files = not joins_tensors(described.config)
    if run.drive_folder is not None or _packs(run):
        read = read_in(run, described, plans=True)
        return read.itemsize, of_files and stored_in(described, plans=True) == read
    maps = run.widens_as_sent and stored_narrower(run, described, loaded, plans=True) is not None
    return loaded.itemsize, of_files and maps


# --- training ---------------------------------------------------------------------------------------------------------


def _bytes_after_loading(trace: MemoryTrace, run: Run, on_card: bool) -> dict[str, dict[str, int]]:
    """Returns the bytes of tensors of each phase after loading."""
    traced = {name: _rows(trace, run, point) for name, point in trace.phases.items()}
    for name in ("forward", "backward", "step"):
        traced[name]["activations"] += trace.rounding
    traced["step"]["temporaries"] += 0 if on_card and not trace.steps_on_host else trace.unseen
    paged = {"optimizer": trace.paged}  # paged state moves when it is read: no copy
    saved = paged | {"temporaries": _copies(run, trace) if on_card else 0, "weights": _merged(run, trace, on_card)}
    read = paged | {"temporaries": trace.largest_trained * getattr(torch, run.weights_dtype).itemsize}
    resting = traced["evaluation"]
    return traced | {
        name: {row: size + more.get(row, 0) for row, size in resting.items()}
        for name, more in (("save", saved), ("resume", read))
    }


def _rows(trace: MemoryTrace, run: Run, point: Point) -> dict[str, int]:
    """Returns the host bytes of a point by row of the column, without what is on a drive."""
    sizes = by_row(point.host_bytes)
    if run.drive_folder is None:
        return sizes
    drive, weights = trace.drive, trace.streamed if trace.drive.weights else 0
    sizes["weights"] -= weights
    sizes["masters"] -= drive.masters
    sizes["optimizer"] -= drive.tensors - drive.masters - weights
    return sizes | {"staging": drive.room}


def _copies(run: Run, trace: MemoryTrace) -> int:
    """Returns the bytes of copies that are saved: a checkpoint's tensors are copied one after the other, and an
    export's file by file."""
    size = getattr(torch, run.weights_dtype).itemsize
    exported = trace.trained_parameters if run.exports_adapter else trace.parameters
    return max(trace.largest * size, min(FILE_BYTES, exported * size))


def _merged(run: Run, trace: MemoryTrace, on_card: bool) -> int:
    """Returns the bytes of host memory that a model takes when an adapter is merged into it: the model comes from the
    card, and a base stored in fewer bits grows."""
    if not run.merge:
        return 0
    merged = trace.parameters * getattr(torch, run.export_dtype or "float32").itemsize
    return max(trace.weights, merged) - (0 if on_card and not run.saves_parts else trace.weights)
