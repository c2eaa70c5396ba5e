"""Runs a case in a process of its own, ends it at its time limit, and returns its result or its last output."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.card.case import RESULT, UNFINISHED
from benchmarks.runner import ROOT, environment

SCRATCH = ROOT / ".cache" / "card"  # on the project's disk, because checkpoints are written and /tmp may be memory
PREFIX = "case-"  # names of the cases' folders begin with it
LINES, CHARACTERS = 12, 2000  # at most so many of the last output are recorded
# Environment variables that the user may have set and that would change the measurements.
NOT_OURS = (
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG"),
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_CUDA_SANITIZER"),
)

NONE: Mapping[str, str] = {}
EVERY_CARD = "CARDS_OF_THE_KIT"  # CUDA_VISIBLE_DEVICES as the user set it; empty: all

stopped = threading.Event()  # set when the kit stops: no further case may begin
_running: set[subprocess.Popen] = set()


def case(
    module: str, name: str, device: str, text: Path, seconds: float, threads: int | None = None, more: Mapping = NONE
) -> dict:
    """Runs one case and returns its record.

    Args:
        threads: CPU threads that its operators may use; None: all.
        more: environment variables of this case alone.
    """
    return ended(["-m", "benchmarks.card.case", module, name, device, str(text)], seconds, threads, more)


def ended(arguments: Sequence[str], seconds: float, threads: int | None = None, more: Mapping = NONE) -> dict:
    """Runs `python` in a temporary folder, for at most some seconds. Args: arguments: the arguments of `python`.

    Returns:
        status (done, left out, failed or ended); seconds; result; and, if the result is missing or incomplete, why.
    """
    start = time.monotonic()
    SCRATCH.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=SCRATCH, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with (folder / "said").open("w") as said:
            # in a process group of its own, so that the processes that it starts end with it
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                env=_environment(folder, threads) | dict(more),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        _running.add(process)
        try:
            record = _record(process, folder, 0.0 if stopped.is_set() else seconds)
        finally:
            _end(process)
    return record | {"seconds": round(time.monotonic() - start, 1)}


def _record(process: subprocess.Popen, folder: Path, seconds: float) -> dict:
    try:
        code = process.wait(seconds)
        why = _words(folder)
        why += f" ({_exit(code)})" if code < 0 or not why else ""
        status = "failed"
    except subprocess.TimeoutExpired:
        _end(process)
        why = f"{_words(folder)} (it was ended after {seconds:.0f} s)"
        status = "ended"
    try:
        left = json.loads((folder / RESULT).read_text())
    except (OSError, ValueError):
        left = {"status": UNFINISHED}
    return left | {"status": status, "why": why} if left["status"] == UNFINISHED else left


def _exit(code: int) -> str:
    """Returns how a process ended that printed no reason itself."""
    if code >= 0:
        return f"exit code {code}"
    out_of_memory = "; so the kernel ends what the host has no memory for" if -code == signal.SIGKILL else ""
    return f"ended by signal {-code}, {signal.strsignal(-code)}{out_of_memory}"


def _end(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # processes that it started may outlive it
    process.wait()
    _running.discard(process)


def end_all() -> None:
    stopped.set()
    for process in list(_running):
        _end(process)


def _words(folder: Path) -> str:
    lines = (folder / "said").read_text(errors="replace").strip().splitlines()
    return "\n".join(lines[-LINES:])[-CHARACTERS:]


def _environment(folder: Path, threads: int | None) -> dict[str, str]:
    """Returns the environment variables of a case.

    The path includes the tests, because the oracle is there. The Hugging Face hub and W&B are offline. One device is
    visible, because transformers.Trainer would take them all.
    """
    paths = [str(ROOT / part) for part in ("src", "tests/support", "tests")] + [os.environ.get("PYTHONPATH", "")]
    more = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    more |= {"PYTHONUNBUFFERED": "1"}  # otherwise the output of a killed process is lost
    more |= {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    more |= {EVERY_CARD: os.environ.get("CUDA_VISIBLE_DEVICES", "")}  # for the stage that needs several
    more |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # numbers the cards as nvidia-smi does
    more |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
    return {key: value for key, value in environment(folder).items() if key not in NOT_OURS} | more
