"""When training ends: at `max_steps`, or after the window during which Ctrl-C was pressed."""

import logging
import signal
import threading

from lightning.pytorch import Callback, LightningModule, Trainer

log = logging.getLogger(__name__)


class Stop(Callback):
    """Ends training between windows; Lightning then evaluates once more. A second Ctrl-C ends the program at once."""

    def __init__(self) -> None:
        self.interrupted = False
        self._previous = None

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        if threading.current_thread() is threading.main_thread():  # Python handles signals nowhere else
            self._previous = signal.signal(signal.SIGINT, self._interrupt)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_) -> None:
        if self.interrupted or trainer.global_step >= trainer.max_steps:
            trainer.should_stop = True

    def teardown(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    def _interrupt(self, *_) -> None:
        self.interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        log.info("Stopping after this step, with a checkpoint. Ctrl-C again stops at once, without one.")
