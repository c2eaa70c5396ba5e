"""Makes the other ranks wait for work of rank 0, without a time limit, but only while rank 0 is alive.

Neither a collective nor torch's store can do this: a collective has a timeout, and Python handles no signals during a
blocking wait of the store. So the other ranks poll the store. A turn is one piece of work of rank 0, and has a key in
the store:

    rank 0         main thread: works, then sets the key of the turn to DONE or FAILED
                   heartbeat thread: increments the value of BEAT about every second, until the run ends; after an
                   error the main thread sets BEAT to FAILED
    other ranks    polling thread (`_Look`): reads both keys
                   main thread: waits for the polling thread, handles signals; raises RankLost if the
                   heartbeat stops or rank 0 has failed
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from lowmem.system.errors import RankLost

BEAT = "rank 0"  # key in the store; its value is the number of heartbeats, or FAILED
DONE, FAILED = "done", "failed"
EVERY = 1.0  # seconds between heartbeats (less with a short timeout); also the longest wait for a thread to end
# Longest pause between two polls of the store, in seconds (the first pauses are shorter). The main thread checks the
# polling thread at intervals of the same length.
LOOK = 0.1


class Turns:
    """The turns of a run, on one rank: rank 0 works, and the other ranks wait.

    Args:
        store: the store of the rendezvous.
        first: True: this process is rank 0.
        timeout: seconds without a heartbeat after which `wait` raises RankLost.
    """

    def __init__(self, store: dist.Store, first: bool, timeout: float) -> None:
        self.store, self.first, self.timeout = store, first, timeout
        self._count = 0

    def next(self) -> str:
        """Returns the key of the next turn. All ranks must call this method for the same turns, in the same order."""
        self._count += 1
        return f"turn {self._count}"

    @contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Context manager in which a thread of rank 0 writes heartbeats to the store. After an error in the context,
        sets BEAT to FAILED. Does nothing on other ranks."""
        if not self.first:
            yield
            return
        self._say(BEAT, "0")
        ended, outcome = threading.Event(), FAILED
        thread = threading.Thread(target=self._beat, args=(ended,), daemon=True)
        thread.start()
        try:
            yield
            outcome = DONE
        finally:
            ended.set()
            # Join the thread for two reasons: a later heartbeat would overwrite FAILED, and a thread that still calls
            # the store when Python ends would abort the process.
            thread.join(EVERY)
            if outcome == FAILED:
                self._say(BEAT, FAILED)

    def _beat(self, ended: threading.Event) -> None:
        count = 0
        while not ended.wait(min(EVERY, self.timeout / 4)):
            self._say(BEAT, str(count := count + 1))

    @contextmanager
    def working(self, turn: str) -> Iterator[None]:
        """Context manager for rank 0's work in a turn. At its end, marks the turn as done or failed. Args: turn: the
        turn's key."""
        outcome = FAILED
        try:
            yield
            outcome = DONE
        finally:
            self._say(turn, outcome)

    def _say(self, key: str, value: str) -> None:
        with suppress(RuntimeError):  # the store's process has exited; the next collective raises an error
            self.store.set(key, value)

    def wait(self, turn: str, work: str) -> None:
        """Waits until rank 0 has ended a turn. Args: turn: the turn's key; work: name of the work, for messages.

        Raises:
            RankLost: rank 0 has failed or exited, or has sent no heartbeat for `timeout` seconds.
        """
        look = _Look(self.store, turn)
        beat, since = None, time.monotonic()
        try:
            while not look.ended.wait(LOOK):  # a short wait, so that signals are handled
                if look.beat != beat:
                    beat, since = look.beat, time.monotonic()
                if time.monotonic() - since > self.timeout:
                    raise RankLost(
                        f"Rank 0 has sent no heartbeat for {self.timeout:g} seconds (its task: {work}): it is stopped, "
                        "or cannot be reached."
                    )
        finally:
            look.ended.set()
            look.thread.join(EVERY)  # a short wait, so that signals are handled; ends early if the store responds
        if look.how != DONE:
            raise RankLost(f"Rank 0 failed or exited before it finished its task ({work}).")


class _Look:
    """Polls the store in a thread, because a read of the store blocks while the process that hosts the store is
    suspended."""

    def __init__(self, store: dist.Store, turn: str) -> None:
        self.store, self.turn = store, turn
        # ended: set by the thread when it stops polling, or by `wait` to stop it; how: the turn's outcome, FAILED until
        # it is known; beat: the last value of BEAT
        self.ended, self.how, self.beat = threading.Event(), FAILED, None
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()

    def _look(self) -> None:
        pause = 0.001
        with suppress(RuntimeError):  # the process that hosts the store is gone
            while not self.store.check([self.turn]) and self.beat != FAILED and not self.ended.wait(pause):
                self.beat = self.store.get(BEAT).decode()
                pause = min(2 * pause, LOOK)
            if self.store.check([self.turn]):
                self.how = self.store.get(self.turn).decode()
        self.ended.set()
