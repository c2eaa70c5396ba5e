"""Runs one case of `python -m benchmarks.card` in a separate process, with a time limit.

A case is a function in a module of this package. It takes a `Here` and yields dictionaries, from which `page.py` makes
the rows of its tables. Each row is written as soon as it is measured, so a case that fails or is stopped keeps its
earlier rows.

python -m benchmarks.card.case <module:function> <device> <folder>
"""

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from benchmarks.runner import ROOT
from lowmem.report.summary import write
from lowmem.system.folder_locks import lock
from lowmem.system.without_gc import undisturbed

SCRATCH = ROOT / ".cache" / "card"  # in the checkout, because cases write checkpoints and /tmp may be in memory
RESULT = "result.json"
LINES, CHARACTERS = 12, 2000  # limits of the recorded end of a failed case's output
# Environment variables that would change the measurement. A case's process does not inherit them.
NOT_OURS = (
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG"),
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_CUDA_SANITIZER"),
)


class LeftOut(Exception):
    """Raised by a case that cannot be measured on this machine. The message says why."""


@dataclass(frozen=True)
class Case:
    """A case of the benchmark.

    Args:
        name: the name on the command line and in the page.
        seconds: estimated seconds of the case's process on an H100. The time limit is a multiple of the estimate.
        run: "module:function", which takes a `Here` and yields rows.
        environment: additional environment variables of the case's process on a card, for settings that torch reads
            once per process.
    """

    name: str
    seconds: float
    run: str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Here:
    """Where a case runs. Args: device: cuda, or cpu for a rehearsal; folder: a temporary folder of the case."""

    device: str
    folder: Path

    @property
    def on_card(self) -> bool:
        return self.device == "cuda"

    def settle(self) -> None:
        """Waits until the device has finished its work."""
        import torch

        if self.on_card:
            torch.cuda.synchronize()

    def release(self) -> None:
        """Frees the device memory and the pinned host memory that torch caches in this process."""
        import torch

        gc.collect()
        if self.on_card:
            torch.cuda.empty_cache()
            with suppress(AttributeError):  # a private function, because torch has no public one
                torch._C._host_emptyCache()

    def gib(self) -> float:
        """Returns the card's memory in GiB; in a rehearsal, the memory of an H100."""
        import torch

        return torch.cuda.get_device_properties(0).total_memory / 2**30 if self.on_card else 79.1

    def host_gib(self) -> float:
        """Returns the available host memory in GiB; in a rehearsal, the memory of a typical host with an H100."""
        from lowmem.system.process import available_bytes

        return available_bytes() / 2**30 if self.on_card else 120.0


# --- the process of a case ----------------------------------------------------------------------------------------


def main() -> None:
    path, device, folder = sys.argv[1:]
    module, function = path.split(":")
    here, rows = Here(device, Path(folder)), []
    with undisturbed():
        run = getattr(import_module(module), function)
    try:
        for row in run(here):
            rows.append(row)
            write(here.folder / RESULT, {"status": "unfinished", "rows": rows})
        write(here.folder / RESULT, {"status": "done", "rows": rows})
    except LeftOut as why:
        write(here.folder / RESULT, {"status": "left out", "why": str(why), "rows": rows})


def described(device: str) -> dict | None:
    """Returns a description of the machine, the card, the card's driver and the versions of packages; None if `device`
    is cuda and torch finds no CUDA device.

    A separate process initializes CUDA, so that the process that starts the cases takes no memory of the card.
    """
    code = f"import json; from benchmarks.card import case; print(json.dumps(case.here_is({device!r})))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=_environment(tempfile.gettempdir()), capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr[-CHARACTERS:])
    return json.loads(done.stdout.splitlines()[-1])


def here_is(device: str) -> dict | None:
    """Computes the result of `described`, in its separate process."""
    import torch

    from benchmarks.runner import machine

    found = machine()
    if device == "cpu":
        return found | {"card": None}
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    with suppress(Exception):  # nvidia-ml-py may not be installed
        import pynvml

        pynvml.nvmlInit()
        found["driver"] = pynvml.nvmlSystemGetDriverVersion()
    return found | {"card": properties.name, "card_bytes": properties.total_memory}


# --- the process that starts it -----------------------------------------------------------------------------------


def run(case: Case, device: str, limit: float) -> dict:
    """Runs a case for at most `limit` seconds.

    Returns:
        The record of the case: `status` (done, left out, failed, or ended by the limit), `rows`, `seconds` and, unless
        the status is done, `why`.
    """
    start = time.monotonic()
    SCRATCH.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="case-", dir=SCRATCH, ignore_cleanup_errors=True) as folder:
        said = Path(folder) / "said"
        command = [sys.executable, "-m", "benchmarks.card.case", case.run, device, folder]
        with said.open("w") as output:
            # in its own process group, so that os.killpg below also ends the case's child processes
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=_environment(folder) | (dict(case.environment) if device == "cuda" else {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        try:
            code, status = process.wait(limit), "failed"
            why = "" if code >= 0 else f"ended by signal {-code}, {signal.strsignal(-code)}"
        except subprocess.TimeoutExpired:
            status, why = "ended", f"ended after {limit:.0f} s"
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        record = _read(Path(folder) / RESULT)
        if record["status"] == "unfinished":
            words = "\n".join(said.read_text(errors="replace").strip().splitlines()[-LINES:])[-CHARACTERS:]
            record |= {"status": status, "why": f"{words}\n{why}".strip() or "it printed nothing"}
    return record | {"seconds": round(time.monotonic() - start, 1)}


@contextmanager
def alone() -> Iterator[bool]:
    """Yields False if another process runs cases in this checkout, else True. Two processes would slow each other
    down."""
    SCRATCH.mkdir(parents=True, exist_ok=True)
    handle = os.open(SCRATCH, os.O_RDONLY)
    try:
        yield lock(handle) is not False
    finally:
        os.close(handle)


def _read(file: Path) -> dict:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return {"status": "unfinished", "rows": []}


def _environment(folder: str) -> dict[str, str]:
    """Returns the environment variables of a case's process. They omit `NOT_OURS`, put this checkout first in the
    import path, keep libraries offline, and show the process a single card."""
    paths = [str(ROOT / part) for part in ("src", "tests/support", "tests")] + [os.environ.get("PYTHONPATH", "")]
    ours = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",  # otherwise the output of a killed process is lost
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
        "TMPDIR": folder,
        "ROW_FOLDER": folder,
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # numbers the cards as nvidia-smi does
    }
    return {key: value for key, value in os.environ.items() if key not in NOT_OURS} | ours


if __name__ == "__main__":
    # import this module by its full name, as the cases do: otherwise there would be two LeftOut classes
    from benchmarks.card import case

    case.main()
