"""Reads the files of `torch.cuda.memory._dump_snapshot`."""

import pickle
from pathlib import Path


def events(file: Path) -> list[dict]:
    """Returns the allocator's events, grouped by device and in order within a device; [] if the file does not exist."""
    if not file.exists():
        return []
    return [event for trace in pickle.loads(file.read_bytes())["device_traces"] for event in trace]


def actions(file: Path) -> set[str]:
    return {event["action"] for event in events(file)}


def asked_by(file: Path, folder: Path) -> bool:
    """Returns True if the recorded stack of an event has a frame in a file below `folder`."""
    frames = (frame["filename"] for event in events(file) for frame in event.get("frames", ()))
    return any(Path(name).is_relative_to(folder) for name in frames)
