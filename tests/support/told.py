"""A run as typed, in a process of its own, that waits at a given moment until it has been sent a signal."""

import os
import signal
import sys
import time
from pathlib import Path

PHASES = ("load", "step", "evaluation", "save", "sampling", "export")
LONG = 20.0  # seconds: what is not cut takes longer than half of it, which is all that any test allows


def live(root: str, arguments: list[str], phase: str | None, said: str, deaf: bool = False) -> None:
    """Args: phase: where it waits; said: the file for what it prints; deaf: the deliberately wrong variant, whose
    handlers are not installed."""
    sys.path.insert(0, root)
    os.chdir(root)
    for number in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a process of a shell's background

    import train

    from lowmem.command import cli
    from lowmem.system import signals

    if deaf:
        signals.ENDING = ()
    if phase:
        _arrange(phase, Path(said).with_suffix(".reached"))
    sys.argv = ["train.py", *arguments]
    cli.start(train.main)


def _arrange(phase: str, reached: Path) -> None:
    """Makes the phase's function say that it was reached, and take its time."""
    from lowmem.data import token_store
    from lowmem.report.sample import Samples
    from lowmem.saving import checkpoint
    from lowmem.training.module import CausalLM

    def wait(seconds: float) -> None:
        reached.touch()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.02)

    def before(where: object, name: str, seconds: float, due=lambda *_: True) -> None:
        original = getattr(where, name)

        def slow(*arguments, **named):
            if due(*arguments):
                wait(seconds)
            return original(*arguments, **named)

        setattr(where, name, slow)

    if phase == "load":
        before(token_store, "load_bpe", LONG)  # a draft of the cache is there
    elif phase == "step":
        before(CausalLM, "training_step", 1.0, lambda module, *_: module.global_step == 2)
    elif phase == "evaluation":
        before(CausalLM, "validation_step", 1.0, lambda module, *_: not module.trainer.sanity_checking)
    elif phase == "save":
        before(checkpoint.torch, "save", 1.0)
    elif phase == "sampling":
        _ask_slowly(Samples, wait)
    elif phase == "export":
        before(token_store.PreTrainedTokenizerFast, "save_pretrained", LONG)  # the weights are in the draft already


def _ask_slowly(samples: type, wait) -> None:
    """At the last evaluation, when all steps are done."""
    draw = samples.on_validation_epoch_end

    def slow(self, trainer, module) -> None:
        stopped = self.at_end.stopped
        if trainer.global_step == trainer.max_steps:
            self.at_end.stopped = lambda: wait(0.2) or stopped()
        draw(self, trainer, module)

    samples.on_validation_epoch_end = slow
