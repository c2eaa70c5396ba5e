"""Implements batch_size=auto, for a run on one device: finds the largest batch_size that fits and divides
accumulation.size (or accumulation.size / accumulation.devices, if accumulation.devices is typed). The effective batch
size does not depend on batch_size.

The planner predicts which sizes fit, and a trial checks the largest of them. If this size does not fit, further trials
find the largest size that fits, by bisection among the smaller sizes that are predicted to fit. If no size is predicted
to fit, the run is refused without a trial. A size whose memory cannot be predicted counts as a size that fits, so
without predictions the first trial has the largest size. With plan=off nothing is predicted, and bisection among all
sizes finds the batch_size.

Each trial is a separate process, so an out-of-memory error cannot affect the run. A trial runs Lightning's sanity check
(an evaluation), trains STEPS steps, and evaluates at least once. On CUDA, memory.limit caps the caching allocator;
without memory.limit, a trial may use all free memory of the card. On a CPU, memory.limit must be set: the memory meter
counts the bytes of live tensors, and ends the trial when the sum exceeds memory.limit.

Lightning's batch size finder is not used, because it recognizes out-of-memory errors by their text, and saves a full
checkpoint before its first trial (Lightning #9625, #11295).
"""

import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from lowmem.config.accumulation import divisors
from lowmem.config.settle import Run
from lowmem.plan.at_start import could_fit
from lowmem.system.errors import Refused
from lowmem.system.quiet_libraries import quiet
from lowmem.system.units import quantity
from lowmem.training.training import DidNotFit, training_session

log = logging.getLogger(__name__)

STEPS = 2  # optimizer steps of a trial; optimizer state exists during forward and backward from the second step on
DOES_NOT_FIT = 3  # exit code of a trial


def resolve(run: Run) -> Run:
    """Returns the run with a number for batch_size. A run that already has a number is returned unchanged.

    Raises:
        Refused: batch_size=1 does not fit, or is predicted not to fit; the prediction refuses the run; or a trial
            failed for a reason other than memory.
    """
    if run.batch_size != "auto":
        return run
    total, devices = run.accumulation.size, run.accumulation.devices
    sizes = [n for n in divisors(total // devices) if run.plan == "off" or _is_predicted_to_fit(run, n)]
    if run.plan != "off" and sizes and fits(run, sizes[-1]):  # larger sizes are predicted not to fit, and are not tried
        size = sizes[-1]
    else:
        untried = sizes if run.plan == "off" else sizes[:-1]
        size = largest(untried, lambda batch_size: fits(run, batch_size))
    if size is None:
        raise Refused(
            f"batch_size=auto: even one sequence of seq_len={run.seq_len} does not fit. Type a smaller seq_len, "
            "gradient_checkpointing=every_layer, or loss=chunked."
        )
    micro_batches = quantity(total // (size * devices), "micro-batch")
    log.info(f"batch_size=auto: chose {size}, which makes {micro_batches} per optimizer step.")
    return run.knowing(batch_size=size)


def _is_predicted_to_fit(run: Run, batch_size: int) -> bool:
    return could_fit(run.knowing(batch_size=batch_size))


def largest(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Finds the largest size that fits, by bisection; None if no size fits. Args: sizes: ascending sizes; fits: returns
    whether a size fits; if a size fits, all smaller sizes must also fit."""
    low, high = 0, len(sizes)  # sizes[:low] fit, sizes[high:] do not
    while low < high:
        middle = (low + high) // 2
        if fits(sizes[middle]):
            low = middle + 1
        else:
            high = middle
    return sizes[low - 1] if low else None


def fits(run: Run, batch_size: int) -> bool:
    """Runs a trial in a separate process, and returns whether it fits in memory. Raises: Refused: the trial failed for
    another reason."""
    trial = {
        "batch_size": batch_size,
        "max_steps": STEPS,
        "val_sequences": batch_size,
        "sample_tokens": 0,
        "metric": None,
    }
    trial = run.knowing(**trial, resume=None).as_dict() | {"logger": {}}
    done = subprocess.run(
        [sys.executable, "-m", "lowmem.plan.batch_size"], input=json.dumps(trial), capture_output=True, text=True
    )
    if done.returncode not in (0, DOES_NOT_FIT):
        raise Refused(f"batch_size=auto: the trial with batch_size={batch_size} failed:\n{done.stderr.strip()}")
    log.info(f"batch_size={batch_size} {'fits' if done.returncode == 0 else 'does not fit'}.")
    return done.returncode == 0


def main() -> None:
    """Runs one trial in this process: reads the run's settings from stdin, trains, and deletes the files of the trial.
    The exit code is 0 if the trial fits, and DOES_NOT_FIT if it runs out of memory. After any other error the exit code
    is 1, and the error is printed to stderr."""
    quiet()
    run = Run.read(json.loads(sys.stdin.read()))
    try:
        with tempfile.TemporaryDirectory() as folder, training_session(run, Path(folder), keeps=False):
            pass
    except DidNotFit:
        sys.exit(DOES_NOT_FIT)
    except Refused as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
