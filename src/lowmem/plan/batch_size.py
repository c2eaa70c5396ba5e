"""batch_size=auto: the largest divisor of the effective batch whose micro-batch fits, predicted and then tried.

The planner predicts the largest size that fits. If a trial shows that the prediction is wrong, or with plan=off,
bisection finds the size. Each trial is a separate process that trains two steps and evaluates once under the memory
cap, so an out-of-memory error cannot affect the run. On CUDA the caching allocator is capped. On a CPU the meter counts
live tensors and ends the trial when they exceed `memory.limit`, long before the operating system would kill the
process. The effective batch size, and so the update, does not change. Lightning's batch size finder matches error
strings, and saves a full checkpoint first (Lightning #9625, #11295).
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

STEPS = 2  # optimizer state exists from the second step on
DOES_NOT_FIT = 3  # exit code of a trial


def resolve(run: Run) -> Run:
    """Returns the run with a number for batch_size."""
    if run.batch_size != "auto":
        return run
    total, devices = run.accumulation.size, run.accumulation.devices
    sizes = [n for n in divisors(total // devices) if run.plan == "off" or _is_predicted_to_fit(run, n)]
    if run.plan != "off" and sizes and fits(run, sizes[-1]):  # the prediction is right: no larger size fits
        size = sizes[-1]
    else:
        size = largest(sizes, lambda batch_size: fits(run, batch_size))
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
    """Returns the largest of ascending sizes that fits, by bisection: if a size fits, all smaller sizes fit too."""
    low, high = 0, len(sizes)  # sizes[:low] fit, sizes[high:] do not
    while low < high:
        middle = (low + high) // 2
        if fits(sizes[middle]):
            low = middle + 1
        else:
            high = middle
    return sizes[low - 1] if low else None


def fits(run: Run, batch_size: int) -> bool:
    """Returns True if a trial process with this batch size does not run out of memory."""
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
    """Runs one trial: reads the run's settings from stdin and answers by the exit code. Its files are deleted."""
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
