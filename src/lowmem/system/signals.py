"""Handles signals that end a program: Ctrl-C, a closed terminal, and the SIGTERM of a cluster or a spot machine.

Signals are handled from the first line of a command on, so this module does not import torch.
"""

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
received: list[signal.Signals] = []  # signals that this command has received
# `timeout`, a process group and a sweep that stops a job deliver one signal twice within this time
ECHO_SECONDS = 0.2


class Ended(SystemExit):
    """A signal that ends the program immediately. It is not an `Exception`, so that `except Exception` does not catch
    it. The exit code is the usual one of shells: 128 plus the number of the signal."""

    def __init__(self, sent: signal.Signals, why: str = "") -> None:
        self.signal, self.said = sent, f"{sent.name}{why}: ended at once."
        super().__init__(128 + sent)


def at_once(sent: signal.Signals) -> None:
    raise Ended(sent)


@contextmanager
def handled(handler: Callable[[signal.Signals], None]) -> Iterator[Callable[[], None]]:
    """Passes these signals to `handler` inside the `with`. Signals that are ignored (nohup, `&`) stay ignored.

    Yields:
        A function that installs the handlers again if other code has replaced them.
    """
    previous = {sent: signal.getsignal(sent) for sent in ENDING}
    # Python handles signals in its main thread alone; None: a handler written in C, which could not be restored
    ours = [sent for sent, before in previous.items() if before not in (signal.SIG_IGN, None)]
    ours = ours if threading.current_thread() is threading.main_thread() else []
    last = -ECHO_SECONDS

    def handle(number: int, _) -> None:
        nonlocal last
        if time.monotonic() - last > ECHO_SECONDS:
            last = time.monotonic()
            received.append(signal.Signals(number))
            handler(received[-1])

    def install() -> None:
        for sent in ours:
            signal.signal(sent, handle)

    try:
        install()
        yield install
    finally:
        for sent in ours:
            signal.signal(sent, previous[sent])


def ending(error: BaseException | None) -> Ended | None:
    """Returns the signal that caused an error, or None. C++ code and cleanup code may turn a signal into another error,
    and Ctrl-C in a terminal also ends the compilers that this process has started."""
    seen: set[int] = set()  # two errors may be each other's context
    while error is not None and id(error) not in seen:
        if isinstance(error, Ended):
            return error
        if isinstance(error, subprocess.CalledProcessError) and received:
            return Ended(received[-1])
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None
