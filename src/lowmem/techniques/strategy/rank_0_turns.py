"""Lets the other ranks wait for work that rank 0 does alone, however long it takes.

A collective would wait with a time limit, and a wait of torch's store blocks signals. So rank 0 writes a heartbeat into
the store from a thread, which stops when the process is stopped or killed, and reports there if it failed; the others
look at it.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from lowmem.system.errors import RankLost

BEAT = "rank 0"  # key of the store: a count, or FAILED
DONE, FAILED = "done", "failed"
EVERY = 1.0  # seconds between two heartbeats
LOOK = 0.1  # seconds at most between two looks; fewer while the wait has been short


class Turns:
    """Args: store: the store of the rendezvous; first: this is rank 0; timeout: seconds without a heartbeat after which
    rank 0 is lost."""

    def __init__(self, store: dist.Store, first: bool, timeout: float) -> None:
        self.store, self.first, self.timeout = store, first, timeout
        self._count = 0

    def next(self) -> str:
        """Returns the key of the next turn: all ranks take the same turns in the same order."""
        self._count += 1
        return f"turn {self._count}"

    @contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Writes heartbeats while rank 0 works."""
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
            # A later beat would overwrite the last word, and a thread inside the store aborts the process when Python
            # ends.
            thread.join(EVERY)
            if outcome == FAILED:
                self._say(BEAT, FAILED)

    def _beat(self, ended: threading.Event) -> None:
        count = 0
        while not ended.wait(min(EVERY, self.timeout / 4)):
            self._say(BEAT, str(count := count + 1))

    @contextmanager
    def working(self, turn: str) -> Iterator[None]:
        """Marks a turn as done or failed; rank 0 calls it."""
        outcome = FAILED
        try:
            yield
            outcome = DONE
        finally:
            self._say(turn, outcome)

    def _say(self, key: str, value: str) -> None:
        with suppress(RuntimeError):  # the process that holds the store is gone; a collective will say so
            self.store.set(key, value)

    def wait(self, turn: str, work: str) -> None:
        """Waits until rank 0 has done a turn. Args: work: what rank 0 does, for messages.

        Raises:
            RankLost: rank 0 has failed, has ended or gave no sign of life.
        """
        look = _Look(self.store, turn)
        beat, since = None, time.monotonic()
        try:
            while not look.ended.wait(LOOK):  # lets signals in
                if look.beat != beat:
                    beat, since = look.beat, time.monotonic()
                if time.monotonic() - since > self.timeout:
                    raise RankLost(
                        f"Rank 0 has sent no heartbeat for {self.timeout:g} seconds (its task: {work}): it is stopped, "
                        "or cannot be reached."
                    )
        finally:
            look.ended.set()
            look.thread.join(EVERY)  # as above, if the store answers
        if look.how != DONE:
            raise RankLost(f"Rank 0 failed or exited before it finished its task ({work}).")


class _Look:
    """Reads the store in a thread: if the process that holds the store is stopped, it does not answer."""

    def __init__(self, store: dist.Store, turn: str) -> None:
        self.store, self.turn = store, turn
        self.ended, self.how, self.beat = threading.Event(), FAILED, None
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()

    def _look(self) -> None:
        pause = 0.001
        with suppress(RuntimeError):  # the process that holds the store is gone
            while not self.store.check([self.turn]) and self.beat != FAILED and not self.ended.wait(pause):
                self.beat = self.store.get(BEAT).decode()
                pause = min(2 * pause, LOOK)
            if self.store.check([self.turn]):
                self.how = self.store.get(self.turn).decode()
        self.ended.set()
