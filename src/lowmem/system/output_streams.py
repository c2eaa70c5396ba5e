"""Lets a command continue although nobody reads its output: if the caller has closed stdout or stderr, or if the reader
of a pipe has exited, as in `python train.py | head -3`. Otherwise a run would end without writing its model."""

import io
import os
import sys

NAMES = ("stdout", "stderr")


def replace_closed() -> None:
    """Replaces stdout and stderr by the null device if the caller has closed them."""
    for name in NAMES:
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))


def outlive_readers() -> None:
    """Replaces stdout and stderr by streams that discard their data once the reader of their pipe has exited. Streams
    that a notebook or a test has replaced are kept."""
    for name in NAMES:
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):
            pipe = _Pipe(stream.fileno(), "w", closefd=False)
            how = {"encoding": stream.encoding, "errors": stream.errors, "line_buffering": stream.line_buffering}
            buffer = pipe if stream.write_through else io.BufferedWriter(pipe)
            setattr(sys, name, io.TextIOWrapper(buffer, **how, write_through=stream.write_through))


def discard(descriptor: int) -> None:
    """Discards all data that will be written to a file descriptor."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


class _Pipe(io.FileIO):
    """A file descriptor for writing, which discards the data if it is a pipe whose reader has exited."""

    def write(self, data: bytes) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            discard(self.fileno())
            return len(data)
