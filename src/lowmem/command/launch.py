"""Starts the ranks of a run on this machine, and watches them until they end. A rank is a process that runs the typed
command on one device.

With several devices, the process of the typed command is only a launcher, which does not import torch. The launcher
locks the run's folder, starts the ranks, and forwards signals to them. If a rank fails, the launcher ends the other
ranks, which would otherwise wait for the failed rank until a timeout of many minutes. Only the launcher prints the
error of a failed rank on the terminal.

    launcher           the main thread starts the ranks, checks every LOOK seconds whether they have ended, and
                       forwards signals; a second thread copies the stderr of rank 0 to the launcher's stderr
    rank 0             has the launcher's stdout and a pipe as stderr, and writes its log to train.log
    rank N = 1, 2 ...  writes to rank-N/output.log
    every rank         has two more pipes: stdin, which closes when the launcher exits, and a pipe for the rank's
                       report (`rank_environment.report`), one line of JSON
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from lowmem.command import sweep
from lowmem.config.typed_lines import in_shell
from lowmem.report import folders
from lowmem.system import processors, rank_environment, signals
from lowmem.system.errors import NotPublished, Refused
from lowmem.system.signals import Ended
from lowmem.techniques.strategy import lost_ranks

# seconds from the failure of a rank to SIGTERM to the other ranks; meanwhile, they may report their own errors
SETTLE = 2.0
GRACE = 5.0  # seconds from SIGTERM, or from the second signal, to SIGKILL
LOOK = 0.05  # seconds between two checks whether ranks have ended
LEAVES = 30.0  # seconds that a rank may take to exit after it has reported its failure
LAST = 20  # lines of a rank's log in an error message
WORDS = 1 << 16  # number of bytes that the launcher keeps of the end of rank 0's stderr
HERE = "127.0.0.1"
FINE = ("done", "interrupted")
# If ranks ended for different causes, the cause that comes first in this tuple is reported. A later cause, such as
# "lost", may be only a consequence of another rank's failure.
CAUSES = ("killed", "failed", "ended", "aborted", "lost", "not uploaded")


class RankEnded(Refused):
    """Raised by the launcher if a rank has failed. If all ranks reported the same error, this error is the message.
    Otherwise the message names one rank and contains its report or last output."""


@dataclass
class Rank:
    """The launcher's record of a rank's process.

    Args:
        number: number of the rank, from 0.
        reports: file descriptor of the pipe from which the launcher reads the rank's report.
        log: the file with the rank's output; for rank 0 train.log, which has only the log messages.
        last_stderr: the last WORDS bytes that rank 0 wrote to stderr, which no file contains; empty for other ranks.
        reader: the launcher's thread that reads the stderr of rank 0; None for other ranks.
        code: exit code of the process (negative for a signal); None while the process runs.
        at: time.monotonic() at which the launcher first saw the report or the end of the process; 0: not yet.
        ended_by_us: True: this rank had not failed, and the launcher has sent it SIGTERM or SIGKILL because another
            rank had failed, or SIGKILL after a second signal.
        report: the rank's report (`rank_environment.report`); empty without a report.
    """

    number: int
    process: subprocess.Popen
    reports: int
    log: Path
    last_stderr: bytearray = field(default_factory=bytearray)
    reader: threading.Thread | None = None
    code: int | None = None
    at: float = 0.0
    ended_by_us: bool = False
    report: dict[str, str] = field(default_factory=dict)
    _read: bytes = b""

    def runs(self) -> bool:
        if self.code is None:
            # poll first: if the process has ended, `_hear` then reads the report that the process wrote before its end
            self.code = self.process.poll()
            self._hear()
            if self.at == 0.0 and (self.code is not None or self.report):
                self.at = time.monotonic()
        return self.code is None

    def _hear(self) -> None:
        with suppress(BlockingIOError):  # nothing to read yet, or a child of the rank still has the pipe open
            self._read += os.read(self.reports, 2**16)
        if not self.report and b"\n" in self._read:
            self.report = json.loads(self._read.partition(b"\n")[0])

    @property
    def bad(self) -> bool:
        """Returns whether the rank has failed. Its process may still be running."""
        return (self.code is not None or bool(self.report)) and self.how not in FINE

    @property
    def how(self) -> str:
        """Returns how the rank has ended, or how it will end according to its report: "done", "interrupted" (by a
        signal, after a checkpoint), or one of CAUSES. The cause "ended" means that a signal has ended the rank without
        a checkpoint."""
        if self.report:
            return self.report["how"]
        if self.code == 0:
            return "done"
        if self.code - 128 in signals.ENDING or -self.code in signals.ENDING:
            return "ended"
        return "aborted" if self.code == -signal.SIGABRT else "killed"

    @property
    def signal(self) -> signal.Signals:
        """Returns the signal that interrupted or ended the rank."""
        if self.report:
            return signal.Signals[self.report["said"].partition(":")[0].split()[0]]
        return signal.Signals(self.code - 128 if self.code > 0 else -self.code)

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace", encoding="utf-8") if self.log.is_file() else ""

    def last_lines(self) -> list[str]:
        return [line.split("\r")[-1] for line in self.text.splitlines() if line.strip()][-LAST:]

    @property
    def watchdog_message(self) -> str | None:
        """Returns the message of NCCL's watchdog if the watchdog has ended this rank, else None."""
        return lost_ranks.watchdog_message(self.text + self.last_stderr.decode(errors="replace"))


def run(folder: Path, typed: Sequence[str], size: int) -> signal.Signals | None:
    """Runs all ranks until they end.

    Args:
        folder: the run's folder, which the launcher has locked.
        typed: overrides, quoted for Hydra.
        size: number of ranks.

    Returns:
        The signal after which the ranks wrote a checkpoint and ended; None if all ranks are done.

    Raises:
        RankEnded: a rank has failed. See `_error_message`, which may also write failed.txt.
        NotPublished: the run is complete, but `push=` or `export_format=` failed.
        Ended: a signal has ended at least one rank immediately, without a checkpoint.
    """
    with _started(folder, typed, size) as ranks:
        sent = _watched(ranks)
    causes = [rank for rank in ranks if rank.how in CAUSES and not rank.ended_by_us]
    if causes:
        cause = min(causes, key=lambda rank: (CAUSES.index(rank.how), not rank.watchdog_message, rank.at))
        if cause.how == "not uploaded":
            raise NotPublished(cause.report["said"])
        if cause.how != "ended":
            raise RankEnded(_error_message(cause, ranks, folder))
        sent = sent or [cause.signal]
    if causes or any(rank.ended_by_us for rank in ranks):
        raise Ended(sent[-1], " and a second signal" if len(sent) > 1 else "")
    return next((rank.signal for rank in ranks if rank.how == "interrupted"), None)


@contextmanager
def _started(folder: Path, typed: Sequence[str], size: int) -> Iterator[list[Rank]]:
    """Context manager that starts the ranks and yields them. On exit, kills the ranks that are still running."""
    command = [sys.executable, str(sweep.script), *typed, f"hydra.run.dir={folder}"]
    world = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": HERE, "MASTER_PORT": free_port()}
    # Each rank starts threads for its share of the processors, unless the user has set OMP_NUM_THREADS. By default,
    # each rank would start threads for all processors.
    world |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", max(1, processors.usable() // size))}
    # unbuffered, so that the log contains the last output of a killed rank
    world |= {rank_environment.OF_RUN: folder, "PYTHONUNBUFFERED": 1}
    ranks: list[Rank] = []
    try:
        for number in range(size):
            ranks.append(_rank(number, command, world, folder))
        yield ranks
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.wait()
            rank.runs()
            rank.process.stdin.close()
            os.close(rank.reports)
            if rank.reader:
                rank.reader.join(1.0)  # with a timeout, because a child of the rank may still have the pipe open


def _rank(number: int, command: Sequence[str], world: dict[str, object], folder: Path) -> Rank:
    """Starts a rank. Rank 0 inherits the launcher's stdout, and a thread of the launcher copies the stderr of rank 0 to
    the launcher's stderr. The output of each other rank goes to its own output.log.

    The stdin of a rank is a pipe from the launcher. The pipe closes when the launcher exits for any reason, and then
    the rank exits, too. A rank runs in its own session, so that Ctrl-C in a terminal reaches the rank only through the
    launcher.
    """
    rank_folder = rank_environment.folder(folder, number)
    rank_folder.mkdir(exist_ok=True)
    reads, writes = os.pipe()
    os.set_blocking(reads, False)
    variables = {"RANK": number, "LOCAL_RANK": number, rank_environment.REPORTS: writes}
    env = os.environ | {key: str(value) for key, value in (world | variables).items()}
    out = None if number == 0 else (rank_folder / rank_environment.LOG).open("wb")
    streams = {"stdin": subprocess.PIPE, "stdout": out, "stderr": out or subprocess.PIPE, "pass_fds": (writes,)}
    process = subprocess.Popen(command, **streams, env=env, start_new_session=True)
    os.close(writes)
    if out:
        out.close()
    rank = Rank(number, process, reads, rank_folder / (rank_environment.LOG if number else "train.log"))
    if number == 0:
        rank.reader = threading.Thread(target=_pass_on, args=(process.stderr, rank.last_stderr), daemon=True)
        rank.reader.start()
    return rank


def _pass_on(stream: IO[bytes], tail: bytearray) -> None:
    """Copies a stream to the launcher's stderr, in a thread. `tail` receives the last WORDS bytes of the stream."""
    with stream:
        while block := os.read(stream.fileno(), WORDS):
            tail += block
            del tail[:-WORDS]
            with suppress(OSError):  # stderr is closed
                os.write(2, block)


def free_port() -> int:
    """Returns a free port of this machine. If another process opens the port before the ranks do, the ranks report an
    error."""
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        return probe.getsockname()[1]


def _watched(ranks: Sequence[Rank]) -> list[signal.Signals]:
    """Waits until all ranks have ended, and returns the signals that the launcher received meanwhile.

    Each signal is forwarded to all running ranks. After the first signal, ranks have as much time as they need to write
    a checkpoint. GRACE seconds after a second signal, the remaining ranks are killed. SETTLE seconds after a rank has
    failed, the other ranks receive SIGTERM, and GRACE seconds later SIGKILL.
    """
    received: list[signal.Signals] = []
    # (time, signal) pairs: at this time, the signal is sent to the ranks that are still running
    due: list[tuple[float, signal.Signals]] = []

    def hand_on(sent: signal.Signals) -> None:
        received.append(sent)
        for rank in ranks:
            if rank.runs():
                rank.process.send_signal(sent)
        if len(received) > 1:
            due[:] = [(time.monotonic() + GRACE, signal.SIGKILL)]

    with signals.handled(hand_on):
        while running := [rank for rank in ranks if rank.runs()]:
            if not due and any(rank.bad for rank in ranks):
                end = time.monotonic() + SETTLE
                due += [(end, signal.SIGTERM), (end + GRACE, signal.SIGKILL)]
            if due and time.monotonic() >= due[0][0]:
                _end(running, due.pop(0)[1], at_once=len(received) > 1)
                due = due or [(time.monotonic() + GRACE, signal.SIGKILL)]
            time.sleep(LOOK)
    return received


def _end(running: Sequence[Rank], sent: signal.Signals, at_once: bool) -> None:
    """Sends a signal to running ranks. Without `at_once`, leaves out ranks that have failed less than LEAVES seconds
    ago, because they may still be exiting."""
    for rank in running:
        if rank.bad and not at_once and time.monotonic() < rank.at + LEAVES:
            continue
        rank.ended_by_us |= not rank.bad
        rank.process.send_signal(sent)


def _error_message(rank: Rank, ranks: Sequence[Rank], folder: Path) -> str:
    """Returns the error message for the rank whose failure ended the run. If all ranks reported the same error, returns
    this error without the number of a rank. Otherwise, if the rank sent no report or its report is a traceback, also
    writes the message to failed.txt."""
    reported = rank.report.get("said")
    if reported and all(other.report.get("said") == reported for other in ranks):
        return reported
    message = f"Rank {rank.number} of {len(ranks)}: "
    if reported and not reported.startswith("Traceback"):  # the report already says what to type
        return message + reported
    last = reported.splitlines() if reported else rank.last_lines()
    message += folders.line(reported) if reported else rank.watchdog_message or f"{sweep.reason(rank.code, '')}."
    if last:
        message += f"\nIts last lines of output ({rank.log}):\n" + "\n".join(f"  {line}" for line in last)
    message += f"\n{_again(folder)}"
    with suppress(OSError):  # the launcher writes this file, since a killed rank cannot
        (folder / folders.FAILED).write_text(message + "\n", encoding="utf-8")
    return message


def _again(folder: Path) -> str:
    """Returns advice on how to continue after a rank has crashed or was killed."""
    if any(folder.glob("checkpoints/step-*.ckpt")):
        return (
            f"Add resume=auto {in_shell('hydra.run.dir', folder)} to the same command to continue from its last "
            "checkpoint."
        )
    return "The run has no checkpoint yet. Type the same command again; if it sets hydra.run.dir=, add resume=auto."
