"""Ends training at `max_steps`, or after the current window if a signal came."""

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning.pytorch import Callback, LightningModule, Trainer

from lowmem.system import signals

log = logging.getLogger(__name__)


class Stop(Callback):
    """Ends training between windows, and an evaluation between micro-batches. A second signal ends the program
    immediately.

    This callback comes first: if it stops an evaluation, no other callback sees the evaluation begin.

    Args:
        keeps: the run writes checkpoints. Without checkpoints a signal ends the run immediately.
    """

    def __init__(self, keeps: bool = True) -> None:
        self.signal: signal.Signals | None = None  # received by any process, once all processes know of it
        self._sent: signal.Signals | None = None  # received by this process
        self._keeps, self._trainer, self._single_rank = keeps, None, True
        self._install: Callable[[], None] = lambda: None

    @property
    def interrupted(self) -> bool:
        return self.signal is not None

    def on_sanity_check_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._install()  # Lightning has installed a handler before this one, which calls a collective

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._install()  # the evaluation may be the only work

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._install()
        self._trainer = trainer if self._keeps else None
        self._single_rank = not module.ranks.several

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_) -> None:
        self._agree(module)
        if self.interrupted or trainer.global_step >= trainer.max_steps:
            trainer.should_stop = True

    def _agree(self, module: LightningModule) -> None:
        """Makes all ranks end after the same window, whichever rank received the signal."""
        if number := module.ranks.all_max(self._sent or 0):
            self.signal = signal.Signals(number)

    def on_validation_batch_start(self, trainer: Trainer, module: LightningModule, *_) -> None:
        self._agree(module)
        if self.interrupted:
            raise StopIteration  # ends the loop over micro-batches, like an exhausted loader

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handles signals inside the `with`: during `Trainer.fit`, which restores the previous handlers, and while the
        summary is written.

        A handler that stays installed would swallow the next signal and keep this callback and its model alive.
        """
        with signals.handled(self._stop) as self._install:
            try:
                yield
            finally:
                self._trainer = None

    def waits_no_longer(self, known: bool) -> None:
        """Lets signals end the program immediately from now on, since the remaining work can be repeated. Args: known:
        the summary already says `interrupted`."""
        self._trainer = None
        if self.interrupted and not known:
            raise signals.Ended(self.signal)

    def _stop(self, sent: signal.Signals) -> None:
        if self._sent:
            raise signals.Ended(self._sent, " and a second signal")
        if self._trainer is None:
            raise signals.Ended(sent)
        self._sent = sent
        if self._single_rank:
            self.signal = sent
            self._trainer.should_stop = True  # set here, so that a late signal ends training, too
        log.info(
            f"{sent.name}: stopping after this step with a checkpoint. Send it again to stop at once without a "
            "checkpoint."
        )
