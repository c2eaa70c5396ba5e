"""What rank 0 does alone, however long it takes: the others look into the store whether it is done, and lives.

A collective would wait for it with a time limit, and a wait of the store's own lets no signal in. So rank 0 writes a
beat there from a thread, which stops when the process is stopped or killed, and says when it has failed.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from lowmem.system.errors import RankLost

BEAT = "rank 0"  # key of the store: a count, or FAILED
DONE, FAILED = "done", "failed"
EVERY = 1.0  # seconds between two beats
LOOK = 0.1  # seconds at most between two looks; of a wait that was short so far less


class Turns:
    """Args: store: where they have met; first: whether this is rank 0; timeout: seconds without a beat after which it
    is lost."""

    def __init__(self, store: dist.Store, first: bool, timeout: float) -> None:
        self.store, self.first, self.timeout = store, first, timeout
        self._count = 0

    def next(self) -> str:
        """All ranks take the same turns in the same order."""
        self._count += 1
        return f"turn {self._count}"

    @contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Around all that rank 0 does."""
        if not self.first:
            yield
            return
        self._say(BEAT, "0")
        ended, how = threading.Event(), FAILED
        thread = threading.Thread(target=self._beat, args=(ended,), daemon=True)
        thread.start()
        try:
            yield
            how = DONE
        finally:
            ended.set()
            # Its beat would be the last word; and one that stands in the store when Python ends aborts the process.
            thread.join(EVERY)
            if how == FAILED:
                self._say(BEAT, FAILED)

    def _beat(self, ended: threading.Event) -> None:
        count = 0
        while not ended.wait(min(EVERY, self.timeout / 4)):
            self._say(BEAT, str(count := count + 1))

    @contextmanager
    def working(self, turn: str) -> Iterator[None]:
        """By rank 0."""
        how = FAILED
        try:
            yield
            how = DONE
        finally:
            self._say(turn, how)

    def _say(self, key: str, said: str) -> None:
        with suppress(RuntimeError):  # who holds the store is gone, and of that a collective tells
            self.store.set(key, said)

    def wait(self, turn: str, what: str) -> None:
        """By the others. Args: what: rank 0 does, for messages.

        Raises:
            RankLost: it has failed, is gone or was not heard of.
        """
        look = _Look(self.store, turn)
        beat, since = None, time.monotonic()
        try:
            while not look.ended.wait(LOOK):  # signals come in
                if look.beat != beat:
                    beat, since = look.beat, time.monotonic()
                if time.monotonic() - since > self.timeout:
                    raise RankLost(
                        f"Rank 0 was to {what}, and has not been heard of for {self.timeout:g} seconds: it is stopped, "
                        "or cannot be reached."
                    )
        finally:
            look.ended.set()
            look.thread.join(EVERY)  # as above, if the store answers
        if look.how != DONE:
            raise RankLost(f"Rank 0 was to {what}, and has failed or is gone.")


class _Look:
    """In a thread: where the store is held by a process that is stopped, it gives no answer."""

    def __init__(self, store: dist.Store, turn: str) -> None:
        self.store, self.turn = store, turn
        self.ended, self.how, self.beat = threading.Event(), FAILED, None
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()

    def _look(self) -> None:
        pause = 0.001
        with suppress(RuntimeError):  # who holds the store is gone
            while not self.store.check([self.turn]) and self.beat != FAILED and not self.ended.wait(pause):
                self.beat = self.store.get(BEAT).decode()
                pause = min(2 * pause, LOOK)
            if self.store.check([self.turn]):
                self.how = self.store.get(self.turn).decode()
        self.ended.set()
