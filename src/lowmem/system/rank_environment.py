"""Reads the rank of this process from the environment variables that torchrun defines. Also lets a rank report how it
ends, and lets ranks agree on the output folder.

Ranks are started in one of two ways:

- by lowmem's own command (`lowmem.command.launch`), which claims the output folder and collects the ranks' reports;
- by torchrun, or by another launcher that sets torchrun's variables. The ranks use a store (a TCPStore) to agree on the
  output folder. If torchrun hosts the store, and several ranks raise the same error, the ranks also use the store so
  that only one of them prints the error to the terminal.

This module imports torch only to use the store, so that a process knows its rank before torch is imported.
"""

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path

from lowmem.system.errors import Refused

OF_RUN = "LOWMEM_RANK_OF"  # environment variable: the folder that lowmem's own command has claimed for its ranks
REPORTS = "LOWMEM_REPORTS"  # environment variable: the file descriptor to which a rank writes its report
NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")  # environment variables of torchrun's protocol
MEETING = ("MASTER_ADDR", "MASTER_PORT")  # environment variables: the address of the store
LOG = "output.log"  # name of the file with the output of a rank or a job, in its folder
# maximum number of characters that a report keeps of the beginning, and of the end, of a long message (see
# `_shortened`)
MOST = 4000
ORPHANED = 30.0  # seconds that a rank has to write a checkpoint after the command that started it has exited
LOOK = 0.1  # seconds between two polls of the store; Python handles signals between them


def is_rank() -> bool:
    """Returns whether this process was started as a rank, even as the only rank of a run: RANK and WORLD_SIZE are set,
    and all variables of NUMBERS that are set are numbers."""
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys() and not _no_numbers()


def _no_numbers() -> list[str]:
    return [key for key in NUMBERS if not os.environ.get(key, "0").isdecimal()]


def number() -> int:
    return int(os.environ["RANK"]) if is_rank() else 0


def size() -> int:
    return int(os.environ["WORLD_SIZE"]) if is_rank() else 1


def on_this_machine() -> int:
    """Returns how many ranks run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", size())) if is_rank() else 1


def of_run() -> Path | None:
    """Returns the run's folder if lowmem's own command has started this rank; otherwise None."""
    return Path(os.environ[OF_RUN]) if OF_RUN in os.environ else None


def folder(run: Path, rank: int) -> Path:
    """Returns the folder for the files that only the given rank writes. The folder of rank 0 is the run's folder."""
    return run / f"rank-{rank}" if rank else run


def check(devices: int) -> None:
    """Raises Refused if the value of a variable of NUMBERS is not a number; if this process is a rank, and the number
    of ranks differs from `devices`; or if SLURM has started several processes, each of which would start all ranks."""
    if wrong := _no_numbers():
        raise Refused(
            f"{wrong[0]}={os.environ[wrong[0]]}: this is not a number. Start ranks with torchrun; for a run without "
            "torchrun, unset RANK and WORLD_SIZE."
        )
    if is_rank():
        if size() != devices:
            raise Refused(
                f"devices={devices}: {size()} processes were started (WORLD_SIZE={size()}). Type devices={size()} or "
                f"torchrun --nproc-per-node {devices}; for a run without torchrun, unset RANK and WORLD_SIZE."
            )
        return
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")  # tasks of this srun; the job may have more
    if devices > 1 and tasks.isdigit() and int(tasks) > 1:
        raise Refused(
            f"devices={devices}: SLURM started {tasks} tasks (SLURM_STEP_NUM_TASKS), and each would start all ranks. "
            "In a job with --ntasks-per-node=1, type srun torchrun --nnodes=<nodes> --nproc-per-node=<ranks per node> "
            f"... train.py devices={devices}."
        )


def check_sweep() -> None:
    """Raises Refused if a sweep was started as several ranks, each of which would run the whole sweep."""
    if size() > 1:
        raise Refused(
            f"-m: {size()} processes were started, and each would run the whole sweep. Type python train.py -m ... "
            f"devices={size()} without torchrun: it starts the ranks of each job."
        )


# --- a rank that lowmem's own command has started ------------------------------------------------------------------


def leashed() -> None:
    """Ends this rank when the command that started it exits for any reason. The rank gets SIGTERM and, if it is still
    running ORPHANED seconds later, SIGKILL. A thread watches stdin, which is closed when the command exits. A no-op in
    all other processes."""
    if of_run() is not None:
        threading.Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    with suppress(OSError):
        os.read(0, 1)  # returns only when stdin is closed
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHANED)
    os.kill(os.getpid(), signal.SIGKILL)


def report(how: str, message: str = "") -> None:
    """Reports to lowmem's command, if it started this rank, how the rank ends. The command reads only a rank's first
    report.

    Args:
        how: "done": the run is complete, whatever the exit code will be (threads of libraries may fail while the
            process exits); "interrupted": by a signal, with a checkpoint; "ended": immediately, by a signal; "lost":
            the error is a `RankLost`; "not uploaded": the run is complete except for upload or conversion of the model;
            "failed": by another error.
        message: "done": empty; "interrupted": the name of the signal; "ended": a sentence that begins with the name of
            the signal; otherwise the error message.
    """
    if REPORTS in os.environ:
        with suppress(OSError):  # the command itself is gone
            os.write(int(os.environ[REPORTS]), json.dumps({"how": how, "said": _shortened(message)}).encode() + b"\n")


def _shortened(message: str) -> str:
    """Returns the message if it has at most MOST characters. Of a longer message, such as a traceback, returns the
    first line (at most MOST characters), a line with "...", and the complete lines among the last MOST characters. So
    the report fits into the buffer of a pipe."""
    if len(message) <= MOST:
        return message
    return "\n".join((message.splitlines()[0][:MOST], "  ...", *message[-MOST:].splitlines()[1:]))


# --- errors that several ranks have are printed once ---------------------------------------------------------------


def says(message: str) -> bool:
    """Returns whether the caller should print an error on this rank's stderr.

    With lowmem's own command, all ranks except rank 0 print the error to stderr, which is their own log, and the
    command itself prints an error that a rank has reported. With torchrun, a rank whose stderr is redirected to
    its own log prints each error there, and the first rank with an error also writes this error to the terminal (in
    this function). If stderr is not redirected, only the first rank with the error prints it. If the store is not
    hosted by torchrun's agent, or is no longer available, every rank counts as the first rank with the error.
    """
    if of_run() is not None:
        return number() > 0
    is_first = not _reported_before(message)
    if _terminal and is_first:
        os.write(_terminal[0], f"rank {number()}: {message}\n".encode())
    return is_first or bool(_terminal)


def _reported_before(message: str) -> bool:
    if size() == 1 or not _of_agent():
        return False
    with suppress(Exception):  # the process that hosts the store has exited
        return _store().add(sha256(message.encode()).hexdigest(), 1) > 1
    return False


# --- ranks started by torchrun -------------------------------------------------------------------------------------

_terminal: list[int] = []  # file descriptor of the original stderr, if the output of this rank is redirected to its log


def redirected(run: Path) -> None:
    """Redirects this rank's stdout and stderr to its own log. Called in ranks that torchrun started. (lowmem's own
    command does this for the ranks that it starts, except for rank 0.)"""
    log = folder(run, number()) / LOG
    log.parent.mkdir(exist_ok=True)
    _terminal.append(os.dup(sys.stderr.fileno()))
    with log.open("wb") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    sys.stdout.reconfigure(line_buffering=True)  # keeps the last lines in the log if the rank is killed


def agreed(claimed: Path | None) -> Path:
    """Returns the run's folder, on which all ranks agree: rank 0 writes it to the store, and the other ranks wait for
    it and read it. If rank 0 fails before it has a folder, torchrun ends the waiting ranks. With another launcher rank
    0 hosts the store, so the waiting ranks lose their connection and raise an error.

    Args:
        claimed: on rank 0, the folder that this rank has claimed; None on other ranks.
    """
    store = _store()
    if claimed is not None:
        store.set("folder", str(claimed))
        return claimed
    while not store.check(["folder"]):
        time.sleep(LOOK)
    return Path(store.get("folder").decode())


@cache  # the store is closed when its last reference is deleted
def _store():
    """Returns torchrun's store. If another launcher has set the environment variables, returns a store that rank 0
    hosts, and that torch's process group will use, too. Raises: Refused: a variable of MEETING is not set."""
    from datetime import timedelta

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # otherwise two C++ traces if a host does not answer
    from torch.distributed import PrefixStore, TCPStore

    if unset := [key for key in MEETING if key not in os.environ]:
        raise Refused(f"{unset[0]} is not set")
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts = number() == 0 and not _of_agent()
    how = {"wait_for_workers": False, "multi_tenant": True, "timeout": timedelta(seconds=60)}
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store and its keys survive a restart
    return PrefixStore(f"launched/{life}", TCPStore(*where, is_master=hosts, **how))


def _of_agent() -> bool:
    """Returns whether torchrun's agent hosts the store, which then outlives the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
