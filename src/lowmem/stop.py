"""When training ends: at `max_steps`, or after the window during which Ctrl-C was pressed."""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch import Callback, LightningModule, Trainer

log = logging.getLogger(__name__)


class Stop(Callback):
    """Ends training between windows; Lightning then evaluates once more. A second Ctrl-C ends the program at once."""

    def __init__(self) -> None:
        self.interrupted = False

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_) -> None:
        if self.interrupted or trainer.global_step >= trainer.max_steps:
            trainer.should_stop = True

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Around the whole of `Trainer.fit`: Lightning puts back, at its very end, the handlers that it found.

        A handler left behind would swallow the next Ctrl-C and keep this callback, and through it the model, for ever.
        """
        if threading.current_thread() is not threading.main_thread():  # Python handles signals nowhere else
            yield
            return
        previous = signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    def _interrupt(self, *_) -> None:
        self.interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        log.info("Stopping after this step, with a checkpoint. Ctrl-C again stops at once, without one.")
