"""Runs the jobs of a sweep (-m), each as a command in its own process, and prints the table of results.

Hydra's basic launcher runs all jobs in one process, so memory that one job leaks would not be available to the next
job, and a crash would end the whole sweep. So `job`, which `cli.run` calls for each job that Hydra launches, starts
`python train.py <overrides of the job>` and waits for this process. This works with any launcher and sweeper that calls
`cli.run` once per job. Hydra's other launchers would not suffice: joblib reuses its workers, and submitit starts all
local jobs at once and hides the results of other jobs after the first failure.
"""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from inspect import unwrap
from pathlib import Path

import yaml
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from lowmem.command.folder_lock import OF_SWEEP
from lowmem.config.typed_lines import CONF, in_shell, unquoted
from lowmem.report import folders
from lowmem.system.errors import Refused
from lowmem.system.rank_environment import LOG
from lowmem.system.signals import Ended
from lowmem.system.terminal import folded

script = CONF.parent / "train.py"  # the script that jobs and ranks run


@contextmanager
def running(main: Callable) -> Iterator[None]:
    """Context manager inside which jobs and ranks run the script that defines `main`: train.py, or a modified copy of
    train.py."""
    global script
    before, script = script, Path(unwrap(main).__code__.co_filename)
    try:
        yield
    finally:
        script = before


def job(folder: Path, number: int, typed: Sequence[str]) -> folders.RunFolder:
    """Runs a job in its own process, prints a line about its result, and returns the job's folder with the content of
    its files. If the folder already contains a complete job with the same overrides, the job is not run again.

    Args:
        folder: the folder of the job.
        number: number of the job in the sweep, from 0, for messages.
        typed: the overrides of the job, quoted for Hydra.

    Raises:
        KeyboardInterrupt: after Ctrl-C, once the job has ended (usually with a checkpoint).
        Ended: after any other signal to the sweep, once the job has ended (usually with a checkpoint).
    """
    plain = list(map(unquoted, typed))
    earlier = folders.load(folder)
    if earlier.status == "done" and earlier.overrides == plain:
        print(f"job {number} was already done", flush=True)
        return earlier
    for name in (folders.FAILED, "summary.json"):
        (folder / name).unlink(missing_ok=True)
    code, stderr, sent = _run([sys.executable, str(script), *typed, f"hydra.run.dir={folder}"], folder)
    if code == 130:
        sent = sent or signal.SIGINT
    summarised = (folder / "summary.json").exists()
    failed = not summarised or (code != 0 and not sent)
    if failed and not (folder / folders.FAILED).exists():
        _write(folder / folders.FAILED, reason(code, stderr))
    if sent:
        sweep = folders.sweep_of(folder) or folder.parent
        print(
            f"job {number} was interrupted; to continue the sweep, type python train.py "
            f"{in_shell('sweep.resume', sweep)}",
            flush=True,
        )
        raise KeyboardInterrupt if sent == signal.SIGINT else Ended(sent)
    ended = folders.load(folder)
    if failed and ended.status != "failed":  # failed.txt could not be written, for example because the disk is full
        ended = folders.RunFolder(folder, plain, None, "failed", reason(code, stderr))
    print(folded(f"job {number} {_line(ended)}"), flush=True)  # Hydra has already printed the overrides of the job
    return ended


def _run(command: list[str], folder: Path) -> tuple[int, str, signal.Signals | None]:
    """Runs a command and returns its exit code (negative for a signal), its stderr, and the last signal that the sweep
    received meanwhile and passed on to the command (None: no signal)."""
    log, passed_on = folder / LOG, None
    _write(log, "")
    streams = {"stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    with (
        (log if log.exists() else Path(os.devnull)).open("a", encoding="utf-8") as out,
        subprocess.Popen(command, stdout=out, **streams, env=os.environ | {OF_SWEEP: str(folder)}) as process,
    ):
        while True:
            try:
                stderr = process.communicate()[1]
                break
            # the job ends after its current optimizer step, or at once after a second signal
            except (KeyboardInterrupt, Ended) as sent:
                passed_on = sent.signal if isinstance(sent, Ended) else signal.SIGINT
                # the terminal also sends Ctrl-C to the job, which ignores the second copy
                process.send_signal(passed_on)
    _write(log, stderr, "a")
    return process.returncode, stderr, passed_on


def _write(file: Path, text: str, mode: str = "w") -> None:
    with suppress(OSError):  # for example if the disk is full; the terminal shows the text anyway
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open(mode, encoding="utf-8") as out:
            out.write(text)


def reason(code: int, stderr: str) -> str:
    """Returns a message that says why a job or a rank failed. The message names the signal that ended the process.
    After exit code 0, it says that the summary is missing. For other exit codes, it is the last line of `stderr`, or
    names the exit code if `stderr` is blank. A `code` that is negative or above 128 stands for a signal."""
    if code > 128:
        return f"ended by {signal.Signals(code - 128).name}"
    if code == 0:
        return "exited with code 0, but wrote no summary"
    if code < 0:
        name = signal.Signals(-code).name
        why = " (the host may have run out of memory, or somebody killed the process)" if name == "SIGKILL" else ""
        return f"killed by {name}{why}"
    return next((line for line in reversed(stderr.splitlines()) if line.strip()), f"exit code {code}")


# columns that are shown when a job is done; the table at the end shows all columns
SHOWN = ("validation loss", "bits per byte", "device GiB")


def _line(run: folders.RunFolder) -> str:
    if run.reason:
        return f"{run.status}: {folders.line(run.reason)}"
    measured = (column for column in SHOWN if folders.figure(run, column) is not None)
    written = (folders.written([run], column) for column in measured)
    figures = ", ".join(f"{value} {title}" for title, (value,) in written)
    return f"{run.status}: {figures}"


class Report(Callback):
    """The Hydra callback that prints the table of results at the end of a sweep."""

    failed: tuple[str, ...] = ()  # a line about the failed jobs of the sweep; empty if no job failed

    def on_multirun_end(self, config: DictConfig, **_) -> None:
        if config.hydra.job.name != "train":
            return
        sweep = Path(config.hydra.sweep.dir)
        every = folders.runs_below(sweep)
        print(folded(f"\n{folders.table(every, [str(run.folder.relative_to(sweep)) for run in every])}\n"))
        print(f"To plot their curves: {shlex.join(['python', 'compare.py', config.hydra.sweep.dir])}")
        failed = [run.folder for run in every if run.status == "failed"]
        if failed:  # the reason for each failure was printed when the job ended
            Report.failed = (
                f"{len(failed)} of {len(every)} jobs failed: "
                f"{', '.join(str(folder.relative_to(sweep)) for folder in failed)}. The full error of the first is in "
                f"{failed[0] / folders.FAILED}.",
            )


def again(folder: Path) -> list[str]:
    """Returns the arguments that continue a sweep in its folder. Complete jobs will not be run again.

    Raises:
        Refused: the folder does not belong to a sweep, or its multirun.yaml is damaged.
    """
    file = folder / "multirun.yaml"
    if not file.is_file():
        raise Refused(
            f"sweep.resume={folder}: this is not the folder of a sweep. Type a folder with a multirun.yaml in it."
        )
    try:
        typed = yaml.safe_load(file.read_text(encoding="utf-8"))["hydra"]["overrides"]
        task, hydra_lines = [*typed["task"]], [*map(str, typed["hydra"])]
    except (ValueError, LookupError, TypeError, yaml.YAMLError):
        message = f"{file} is damaged: it should list the overrides of the sweep. Type them again, with another folder."
        raise Refused(message) from None
    kept = [line for line in hydra_lines if not line.startswith(("hydra.sweep.dir=", "hydra.mode="))]
    return ["-m", *task, *kept, f"hydra.sweep.dir={folder}"]
