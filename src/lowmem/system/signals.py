"""Handles signals that end a program: SIGINT (Ctrl-C), SIGHUP (a closed terminal), and SIGTERM (from a cluster's
scheduler or a spot machine).

A command installs its handlers before it imports torch, so this module must not import torch.
"""

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
received: list[signal.Signals] = []  # signals that were passed to a handler during the current command
# A signal within this time after a signal that was passed to a handler is ignored. The `timeout` command, or a sweep
# that stops a job, may deliver a signal twice: to the process, and to its process group.
ECHO_SECONDS = 0.2


class Ended(SystemExit):
    """Ends the program after a signal: either immediately, or after an orderly stop, where raising `Ended` only sets
    the exit code. The exit code is 128 plus the number of the signal, as in shells. This class is not an `Exception`,
    so that `except Exception` does not catch it.

    Args:
        sent: the signal.
        why: text that follows the name of the signal in the message `said`, which is for a program that ends
            immediately.
    """

    def __init__(self, sent: signal.Signals, why: str = "") -> None:
        self.signal, self.said = sent, f"{sent.name}{why}: ended at once."
        super().__init__(128 + sent)


def at_once(sent: signal.Signals) -> None:
    raise Ended(sent)


@contextmanager
def handled(handler: Callable[[signal.Signals], None]) -> Iterator[Callable[[], None]]:
    """Calls `handler` for each signal of ENDING inside the `with`, except for repetitions (see ECHO_SECONDS). Signals
    that the process ignores (nohup, `&`) stay ignored, and handlers of C code stay installed. In a thread other than
    the main thread, this is a no-op.

    Yields:
        A function that installs the handlers again if other code has replaced them.
    """
    previous = {sent: signal.getsignal(sent) for sent in ENDING}
    # None: C code has installed a handler, which Python could not restore.
    ours = [sent for sent, before in previous.items() if before not in (signal.SIG_IGN, None)]
    # Python allows only its main thread to install handlers.
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
    """Returns the `Ended` that caused an error, or None if a signal did not cause the error. C++ code and cleanup code
    may replace `Ended` by another error, so the chain of causes and contexts is searched. Ctrl-C in a terminal also
    ends compilers that this process has started, which raises a CalledProcessError; for this error, returns a new
    `Ended` with the last signal in `received`, if there is one."""
    seen: set[int] = set()  # two errors may be each other's context
    while error is not None and id(error) not in seen:
        if isinstance(error, Ended):
            return error
        if isinstance(error, subprocess.CalledProcessError) and received:
            return Ended(received[-1])
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None
