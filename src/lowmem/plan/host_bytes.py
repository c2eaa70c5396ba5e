"""Computes the host memory of a run from its trace: for each phase of one process, and for all processes on a host."""

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

# Phases in which paged optimizer state does not exist (load), or is already counted as host memory (save, resume).
BY_HOST = ("load", "save", "resume")
CUDA_ON_HOST = GIB  # host memory of CUDA's libraries: an assumed margin, not a measurement
# Host memory of the code that the first step loads, and of the threads that it starts. Runs of models with 10 to
# 60 million parameters needed 12 to 20 MiB on two cores.
WOKEN = 12 * MIB
# Host memory of torch.compile if it compiles the optimizer step: 60 to 110 MiB were measured for the first kernels, and
# 5 to 10 MiB for each later one.
GENERATOR = GIB // 8


def host_phases(
    trace: MemoryTrace, run: Run, device: Mapping[str, DeviceBytes], on_card: bool, libraries: int
) -> dict[str, HostBytes]:
    """Returns the host memory of one process in each phase, without the pages of memory-mapped weight files.

    Args:
        trace: the trace of the run.
        run: the settings.
        device: phase -> device memory. For a run on a CPU, these bytes are added to the host memory.
        on_card: True: the run is planned for a card; False: for a CPU.
        libraries: resident bytes of the process after imports, before the model is built.
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
    """Returns the host memory of all processes on a host, in the phase that needs the most memory.

    Args:
        phases: phase -> host memory of one process.
        processes: number of processes on the host.
        first: bytes of weights in phase "load" that are in the memory of rank 0 only.
        pages: bytes per process of paged optimizer state that do not fit on the card.
    """
    every = {
        name: (phase if name in BY_HOST else phase.plus(optimizer=pages)).times(processes)
        for name, phase in phases.items()
    }
    every["load"] = every["load"].plus(weights=-(processes - 1) * first)
    return max(every.values(), key=attrgetter("total"))


def mapped(run: Run, parameters: int) -> int:
    """Returns the bytes of memory-mapped weight files that are resident in addition to the loaded tensors, while a
    model is loaded from a folder.

    The weights are copied if they are converted to another dtype, quantized, or split into streamed weights and
    masters. Then the pages of the files stay resident beside the copies. In all other cases the pages are the memory of
    the tensors themselves, so the result is 0. The result is also 0 for a model with random initial weights, and for a
    model on the hub, because the sizes of its files are not known before the download.
    """
    folder = Path(run.model.name).expanduser()
    if not (run.model.pretrained and folder.is_dir()):
        return 0
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    copied = _packs(run) or (run.masters and run.streams) or round(stored / parameters) != _reading(run)[0]
    return stored if copied else 0


def by_row(sizes: Mapping[str, int]) -> dict[str, int]:
    """Converts bytes per category of the memory tracker to bytes per row of a report. The category "other" becomes the
    row "temporaries"; every other category has the same name as its row."""
    return {"temporaries" if category == "other" else category: size for category, size in sizes.items()}


# --- loading ----------------------------------------------------------------------------------------------------------


def _bytes_of_loading(trace: MemoryTrace, run: Run, on_card: bool) -> dict[str, int]:
    """Returns the bytes of host memory while a model is loaded, by row of the report. The rows are weights, masters, a
    temporary copy of the largest tensor, and the buffers of a drive."""
    loaded, maps, joins = _reading(run)
    arrives_packed = _packs(run) and run.model.pretrained
    read = 0 if arrives_packed or (maps and run.widens_as_sent) else trace.parameters * loaded
    here = 0 if on_card else trace.weights  # weights that are already counted as device memory
    weights, largest = max(read, trace.weights) - here, {"temporaries": trace.largest * loaded}
    if arrives_packed and joins:
        largest = {"temporaries": 2 * trace.largest * loaded}  # the joined tensor and its parts
    if run.drive_folder is not None and not _packs(run):
        # All weights are loaded first. Then masters are created and written to the drive, block by block. If the drive
        # also stores the 16-bit weights of the blocks, and their dtype is the dtype of the model's files, the loaded
        # weights of the blocks are memory-mapped pages of these files. The system can drop such pages, so they do not
        # count.
        read -= trace.streamed if run.reads_weights and maps else 0
        return largest | {"weights": read - here, "staging": trace.drive.room}
    load = _kept_on_host(trace, on_card) if trace.streamed else _masters_and(weights, trace, run, on_card)
    if trace.streamed and _packs(run) and weights > sum(load.values()):
        load = {"weights": weights}
    return largest | load | ({} if run.drive_folder is None else {"staging": trace.drive.room})


def _kept_on_host(trace: MemoryTrace, on_card: bool) -> dict[str, int]:
    """Returns the bytes of host memory while a model with streamed weights is loaded, by row of the report: the
    streamed weights, the masters, and the weights that are moved to the card later."""
    waiting = trace.streamed + trace.outside
    others = trace.weights - trace.slots if on_card else 0  # resident weights, which are moved to the device later
    return {"weights": waiting + others, "masters": trace.host_bytes - waiting}


def _masters_and(weights: int, trace: MemoryTrace, run: Run, on_card: bool) -> dict[str, int]:
    """Returns the bytes of host memory while a model with resident weights is loaded, by row of the report. On a CPU,
    each weight is loaded into its final memory: a trained weight becomes its master, and a frozen weight is rounded in
    place. So only the larger of the two rows counts."""
    masters = trace.trained_parameters * getattr(torch, run.weights_dtype).itemsize if trace.steps_on_host else 0
    if on_card:
        return {"weights": weights, "masters": masters}
    return {"masters": masters} if masters >= weights else {"weights": weights}


def _packs(run: Run) -> bool:
    """Returns True if the adapter quantizes the base weights. Pretrained weights are then quantized one by one, while
    they are loaded."""
    return "weights" in run.technique("adapter").saves


def _reading(run: Run) -> tuple[int, bool, bool]:
    """Returns how weights are loaded.

    Returns:
        Bytes per element of the loaded weights.
        Whether the loaded weights are pages of memory-mapped files, which the system can drop; False if transformers
            joins tensors. Determined only for runs with a drive, with quantized base weights, or with a strategy that
            converts weights after sending them (`Run.widens_as_sent`); False for all other runs.
        Whether transformers joins several tensors of the files into one weight.
    """
    loaded, described = getattr(torch, run.loaded_in), describe(run, plans=True)
    joins = joins_tensors(described.config)
    if run.drive_folder is not None or _packs(run):
        read = read_in(run, described, plans=True)
        return read.itemsize, not joins and stored_in(described, plans=True) == read, joins
    maps = run.widens_as_sent and stored_narrower(run, described, loaded, plans=True) is not None
    return loaded.itemsize, not joins and maps, joins


# --- training ---------------------------------------------------------------------------------------------------------


def _bytes_after_loading(trace: MemoryTrace, run: Run, on_card: bool) -> dict[str, dict[str, int]]:
    """Returns the bytes of tensors in host memory, for each phase after loading and each row of the report."""
    traced = {name: _rows(trace, run, point) for name, point in trace.phases.items()}
    for name in ("forward", "backward", "step"):
        traced[name]["activations"] += trace.rounding
    traced["step"]["temporaries"] += 0 if on_card and not trace.steps_on_host else trace.unseen
    paged = {"optimizer": trace.paged}  # a read of paged state moves its pages to the host; no copy is made
    saved = paged | {"temporaries": _copies(run, trace) if on_card else 0, "weights": _merged(run, trace, on_card)}
    read = paged | {"temporaries": trace.largest_trained * getattr(torch, run.weights_dtype).itemsize}
    resting = traced["evaluation"]
    return traced | {
        name: {row: size + more.get(row, 0) for row, size in resting.items()}
        for name, more in (("save", saved), ("resume", read))
    }


def _rows(trace: MemoryTrace, run: Run, point: Point) -> dict[str, int]:
    """Returns the bytes of host memory at a point of the trace, by row of the report. If the run uses a drive,
    subtracts the tensors on the drive, and adds the buffers for swapping."""
    sizes = by_row(point.host_bytes)
    if run.drive_folder is None:
        return sizes
    drive, weights = trace.drive, trace.streamed if trace.drive.weights else 0
    sizes["weights"] -= weights
    sizes["masters"] -= drive.masters
    sizes["optimizer"] -= drive.tensors - drive.masters - weights
    return sizes | {"staging": drive.room}


def _copies(run: Run, trace: MemoryTrace) -> int:
    """Returns the bytes of temporary copies in host memory while a run on a card saves. A checkpoint copies one tensor
    at a time from the card; an export copies the tensors of one file at a time."""
    size = getattr(torch, run.weights_dtype).itemsize
    exported = trace.trained_parameters if run.exports_adapter else trace.parameters
    return max(trace.largest * size, min(FILE_BYTES, exported * size))


def _merged(run: Run, trace: MemoryTrace, on_card: bool) -> int:
    """Returns the additional bytes of host memory for exporting a model with a merged adapter: the model is copied from
    the card to the host, and a quantized base is dequantized. Returns 0 if the adapter is not merged."""
    if not run.merge:
        return 0
    merged = trace.parameters * getattr(torch, run.export_dtype or "float32").itemsize
    return max(trace.weights, merged) - (0 if on_card and not run.saves_parts else trace.weights)
