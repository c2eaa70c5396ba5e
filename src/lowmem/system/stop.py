"""Ends training at `max_steps`, or after the current window if a signal was received."""

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning.pytorch import Callback, LightningModule, Trainer

from lowmem.system import signals

log = logging.getLogger(__name__)


class Stop(Callback):
    """A callback that ends training at `max_steps`. If any rank has received a signal, the callback ends training after
    the current window; an evaluation during training ends before its next batch. A second signal ends the program
    immediately, and so does a signal before training starts, after `waits_no_longer`, or in a command that does not
    train.

    Must be the first callback: if it stops an evaluation before a batch, the hooks of the other callbacks do not run
    for that batch.

    Args:
        keeps: whether the run writes checkpoints. Without checkpoints the first signal ends the program immediately.
    """

    def __init__(self, keeps: bool = True) -> None:
        self.signal: signal.Signals | None = None  # received by any rank; set when all ranks know the signal
        self._sent: signal.Signals | None = None  # received by this rank
        self._keeps, self._trainer, self._single_rank = keeps, None, True
        self._install: Callable[[], None] = lambda: None

    @property
    def interrupted(self) -> bool:
        return self.signal is not None

    def on_sanity_check_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._install()  # replaces a handler that Lightning has installed meanwhile, and that calls a collective

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._install()  # a command may evaluate without training

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._install()
        self._trainer = trainer if self._keeps else None
        self._single_rank = not module.ranks.several

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_) -> None:
        self._agree(module)
        if self.interrupted or trainer.global_step >= trainer.max_steps:
            trainer.should_stop = True

    def _agree(self, module: LightningModule) -> None:
        """Tells all ranks whether any of them has received a signal, and which signal, so that all ranks end after the
        same window. A collective call."""
        if number := module.ranks.all_max(self._sent or 0):
            self.signal = signal.Signals(number)

    def on_validation_batch_start(self, trainer: Trainer, module: LightningModule, *_) -> None:
        self._agree(module)
        if self.interrupted:
            raise StopIteration  # ends the loop over batches, like an exhausted loader

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Context manager that handles signals while the Trainer works and while results are written. At its end, the
        previous handlers are restored. Otherwise a signal in later code, for example in a notebook, would raise
        `Ended`."""
        with signals.handled(self._stop) as self._install:
            try:
                yield
            finally:
                self._trainer = None

    def waits_no_longer(self, known: bool) -> None:
        """Lets later signals end the program immediately, because the remaining work can be repeated. Args: known:
        whether the summary already says `interrupted`. Raises: Ended: a signal was received that the summary does not
        mention."""
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
            self._trainer.should_stop = True  # a signal after `on_train_batch_end` must end training, too
        log.info(
            f"{sent.name}: stopping after this step with a checkpoint. Send it again to stop at once without a "
            "checkpoint."
        )
