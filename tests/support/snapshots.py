"""Reads the files of `torch.cuda.memory._dump_snapshot`."""

import pickle
from pathlib import Path


def events(file: Path) -> list[dict]:
    """Returns the events of the allocator on all devices, in order; none if there is no file."""
    if not file.exists():
        return []
    return [event for trace in pickle.loads(file.read_bytes())["device_traces"] for event in trace]


def actions(file: Path) -> set[str]:
    return {event["action"] for event in events(file)}


def asked_by(file: Path, folder: Path) -> bool:
    """Returns whether any event names a line of Python in a folder."""
    frames = (frame["filename"] for event in events(file) for frame in event.get("frames", ()))
    return any(Path(name).is_relative_to(folder) for name in frames)
