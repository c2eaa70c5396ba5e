"""Runs train.py in a separate process, which waits for a signal in a given phase."""

import os
import signal
import sys
import time
from pathlib import Path

PHASES = ("load", "step", "evaluation", "save", "sampling", "export")
LONG = 20.0  # seconds of a wait without a signal; a test fails if a process needs half of this time to end


def live(root: str, arguments: list[str], phase: str | None, said: str, deaf: bool = False) -> None:
    """Runs train.py with `arguments`.

    Args:
        phase: element of PHASES in which the run waits; None: the run does not wait.
        said: file for the output.
        deaf: True is a deliberate mistake: no signal handlers are installed.
    """
    sys.path.insert(0, root)
    os.chdir(root)
    for number in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes of a shell ignore SIGINT

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
    """Patches a function that the phase calls, so that the function first creates the file `reached` and waits."""
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
        before(token_store, "load_bpe", LONG)  # at this time, the cache has a temporary file
    elif phase == "step":
        before(CausalLM, "training_step", 1.0, lambda module, *_: module.global_step == 2)
    elif phase == "evaluation":
        before(CausalLM, "validation_step", 1.0, lambda module, *_: not module.trainer.sanity_checking)
    elif phase == "save":
        before(checkpoint.torch, "save", 1.0)
    elif phase == "sampling":
        _ask_slowly(Samples, wait)
    elif phase == "export":
        before(
            token_store.PreTrainedTokenizerFast, "save_pretrained", LONG
        )  # at this time, the temporary folder already has the weights


def _ask_slowly(samples: type, wait) -> None:
    """Patches the sampling after the last step: before each check for a stop, it creates `reached` and waits 0.2 s."""
    draw = samples.on_validation_epoch_end

    def slow(self, trainer, module) -> None:
        stopped = self.at_end.stopped
        if trainer.global_step == trainer.max_steps:
            self.at_end.stopped = lambda: wait(0.2) or stopped()
        draw(self, trainer, module)

    samples.on_validation_epoch_end = slow
