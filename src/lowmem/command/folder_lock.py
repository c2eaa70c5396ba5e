"""Locks the folder of a run, plan or sweep before anything is written to it. If the command ends before it has written
any file besides Hydra's files and logs of ranks, the folder is restored to its earlier state (except for a job of a
sweep).

Hydra writes `.hydra/` and a log before the job starts. So `Claim`, a callback that Hydra calls before it writes these
files, locks the folder. Unless the command names a folder or exports a run, `Claim` creates a new folder. The folder
stays locked until the command exits, so that a run cannot be resumed while it is in progress.

With several ranks, only one process locks the folder: the launcher, or rank 0 if torchrun has started the ranks. This
process tells the other ranks the path of the folder.
"""

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

from lowmem.config.typed_lines import as_mapping, in_shell, key, quoted
from lowmem.report import folders
from lowmem.report.folders import FAILED
from lowmem.system import folder_locks, rank_environment
from lowmem.system.errors import Refused
from lowmem.system.terminal import folded

HYDRAS = (".hydra", "train.log", "plan.log", "multirun.yaml")  # files that Hydra writes before a job starts
# Files and folders that a command itself writes. A folder that contains one of them belongs to an earlier run or plan.
LEFT = (
    *("summary.json", FAILED, "metrics.csv", "memory.csv", "memory_step.csv", "memory.png", "checkpoints", "model"),
    *("plan.json", rank_environment.LOG),
)
RANKS = "rank-[0-9]*"
LOGS = f"{RANKS}/{rank_environment.LOG}"
OF_SWEEP = "LOWMEM_JOB"  # environment variable with the folder that a sweep has created for its job


@dataclass
class Claimed:
    """A locked folder, and a record of its content before the command.

    Args:
        lock: file descriptor of the open folder, on which the lock is taken.
        created: the folders that this command created, the innermost first.
        overwritten: file -> its content before the command, for files that Hydra or a rank overwrites.
        other_files: path relative to the folder -> modification time in ns, for files that Hydra does not write; None
            for a job of a sweep, whose folder is not restored.
    """

    folder: Path
    lock: int
    created: list[Path]
    overwritten: dict[Path, bytes]
    other_files: dict[str, int] | None

    def untouched(self) -> bool:
        """Returns whether nothing was written to the folder since this command locked it, except Hydra's files and logs
        of ranks. Returns False for a job of a sweep."""
        return self.other_files is not None and self.folder.is_dir() and _other_files(self.folder) == self.other_files

    def give_back(self) -> None:
        """Restores the folder if only Hydra has written to it, and releases the lock."""
        if self.untouched():
            _remove(self.folder)
            for file, content in self.overwritten.items():
                with suppress(OSError):  # if it cannot be written now, Hydra has not overwritten it either
                    file.parent.mkdir(exist_ok=True)
                    file.write_bytes(content)
            with suppress(OSError):  # the folder is not empty: another program has put a file there
                for folder in self.created:
                    folder.rmdir()
        os.close(self.lock)


@contextmanager
def _or_exit() -> Iterator[None]:
    """Context manager that exits with a message if the name of a folder cannot be resolved. Hydra would only warn, and
    continue without a lock."""
    try:
        yield
    except OmegaConfBaseException as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        sys.exit(
            folded(
                f"The name of the output folder cannot be resolved ({reason}). Type hydra.run.dir=<a folder>.",
                sys.stderr,
            )
        )


class Claim(Callback):
    """The Hydra callback that locks the folder of a run or a sweep before Hydra writes to it. An error ends the process
    with a message, since Hydra would turn an exception into a warning.

    Args:
        host: null in conf/config.yaml, and not used. `on_run_start` sets this key of the config to the name of this
            machine, so that Hydra writes the name to .hydra/hydra.yaml, where `report/folders.py` reads it.
    """

    now: Claimed | None = None  # the folder that this process has claimed

    def __init__(self, host: str | None = None) -> None:
        self.host = host

    def on_run_start(self, config: DictConfig, **_) -> None:
        HydraConfig.instance().set_config(config.copy())  # Hydra itself sets it later, too late to resolve ${hydra:...}
        if rank_environment.of_run() or rank_environment.number():
            run = rank_environment.of_run() or _agreed(None)
            with read_write(config):  # only the process that has locked the folder writes Hydra's files
                config.hydra.run.dir = str(run)
                config.hydra.output_subdir = None
                log_file = OmegaConf.select(config, "hydra.job_logging.handlers.file")
                if rank_environment.number() and log_file is not None:
                    log_file.filename = os.devnull  # a rank's printed output contains its log messages
            _redirect(run)
            return
        with _or_exit():
            folder = Path(config.hydra.run.dir)
        of_sweep = os.environ.get(OF_SWEEP) == str(folder.absolute())

        def goes_on() -> bool:
            works_on = {name: _value(config, name) for name in ("evaluate", "export", "resume")}
            return of_sweep or _goes_on(folder, config.hydra.job.name == "plan", works_on)

        typed = _sets("hydra.run.dir", config.hydra.overrides.hydra)
        exported = None if typed or config.hydra.job.name == "plan" else _exported(_value(config, "export"))
        if exported:
            claimed = _claimed("export", exported, True, lambda: True)
        else:
            claimed = _claimed("hydra.run.dir", folder, typed, goes_on)
        Claim.now = replace(claimed, other_files=None) if of_sweep else claimed
        with read_write(config):
            config.hydra.run.dir = str(claimed.folder)
            if exported:  # keep the .hydra/ of the exported run, which records how it was trained
                config.hydra.output_subdir = None
            config.hydra.callbacks.claim.host = platform.node()
        if rank_environment.size() > 1:
            _agreed(claimed.folder.absolute())

    def on_multirun_start(self, config: DictConfig, **_) -> None:
        HydraConfig.instance().set_config(config.copy())
        with _or_exit():
            folder = Path(config.hydra.sweep.dir)
        typed = OmegaConf.to_container(config.hydra.overrides.task)
        names_folder = _sets("hydra.sweep.dir", config.hydra.overrides.hydra)
        Claim.now = _claimed("hydra.sweep.dir", folder, names_folder, lambda: _typed_before(folder) == typed)
        if Claim.now.folder != folder:
            with read_write(config):
                config.hydra.sweep.dir = str(Claim.now.folder)
                # Hydra composes the config of each job from these overrides
                config.hydra.overrides.hydra.append(quoted(f"hydra.sweep.dir={Claim.now.folder}"))


def _value(config: DictConfig, key: str) -> str | None:
    """Returns the value of a key, or None if the value cannot be resolved. (The job will report this error.)"""
    try:
        return config.get(key)
    except OmegaConfBaseException:
        return None


def _redirect(run: Path) -> None:
    """Redirects the output of a rank to a file in the run's folder. A no-op if the launcher (`launch.py`) has started
    the rank, because the launcher has already redirected the output."""
    if rank_environment.of_run() is None:
        try:
            rank_environment.redirected(run)
        except OSError as error:
            message = (
                f"{error.filename}: {error.strerror}. Each rank writes its output there, so type hydra.run.dir=<a "
                "writable folder>."
            )
            sys.exit(folded(message, sys.stderr))


def _agreed(claimed: Path | None) -> Path:
    try:
        return rank_environment.agreed(claimed)
    except Exception as error:
        message = (
            f"The ranks cannot connect to each other at MASTER_ADDR and MASTER_PORT ({error}). Start them with "
            "torchrun; for a single process, unset RANK and WORLD_SIZE."
        )
        sys.exit(folded(message, sys.stderr))


def release() -> None:
    """Releases the claimed folder when a command ends, restores the folder if only Hydra has written to it, and removes
    the config that `Claim` has set in Hydra."""
    HydraConfig.instance().cfg = None
    if Claim.now is not None:
        Claim.now.give_back()
        Claim.now = None


def untouched() -> bool:
    return Claim.now is not None and Claim.now.untouched()


def _sets(name: str, lines: Iterable[str]) -> bool:
    return name in map(key, lines)


def _claimed(key: str, folder: Path, typed: bool, goes_on: Callable[[], bool]) -> Claimed:
    """Claims a folder, or exits with a message.

    Args:
        key: the key that names the folder, for messages.
        typed: True: claim exactly this folder, because the user typed it, or exports the run in it; False: claim a new
            folder, if necessary with a number appended to its name (`_new`).
        goes_on: returns True if the command may write to a folder that already contains a run.
    """
    try:
        return _this(folder, key, goes_on) if typed else _new(folder)
    except Refused as error:
        sys.exit(folded(str(error), sys.stderr))
    except OSError as error:
        message = f"The output folder is not writable ({error}). Type {key}=<a writable folder>."
        sys.exit(folded(message, sys.stderr))
    except Exception as error:  # for example a damaged multirun.yaml; nothing may start without a lock
        sys.exit(
            folded(
                f"{key}={folder}: the files of this folder cannot be read ({error}). Type another folder.", sys.stderr
            )
        )


def _new(folder: Path) -> Claimed:
    """Creates and locks a new folder: `folder`, or its first free variant with -2, -3, ... appended."""
    above = _not_there(folder.parent)
    for number in count(1):
        path = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            if (claimed := _locked(path, [path, *above])) is not None:  # None: another command has locked it first
                return claimed


def _this(folder: Path, key: str, goes_on: Callable[[], bool]) -> Claimed:
    """Locks exactly this folder, and creates it if it is missing.

    Raises:
        Refused: another command has locked the folder, or has left files in it and `goes_on` returns False.
    """
    created = _not_there(folder)
    folder.mkdir(parents=True, exist_ok=True)
    claimed = _locked(folder, created)
    if claimed is None:
        raise Refused(
            f"{key}={folder}: another run is writing to this folder. Type another folder, or, when that run has ended, "
            f"{in_shell('resume', folder)}."
        )
    files = [name for name in (*HYDRAS, *LEFT) if (folder / name).exists()]
    if files and not goes_on():
        os.close(claimed.lock)
        instead = _instead(folder)
        raise Refused(f"{key}={folder}: another run is in this folder ({files[0]}). Type {instead}another folder.")
    return claimed


def _instead(folder: Path) -> str:
    """Returns advice on how to continue the run or sweep in this folder. Returns an empty string if the folder contains
    a plan, or results that were computed from another run."""
    if (folder / "plan.json").exists() or _uses_a_run(folder):
        return ""
    line = "resume=auto"
    if any(folder.glob("checkpoints/step-*.ckpt")):
        line = in_shell("resume", folder)
    if (folder / "multirun.yaml").exists():
        line = in_shell("sweep.resume", folder)
    return f"{line} to continue it, or "


def _not_there(folder: Path) -> list[Path]:
    """Returns the missing folders of a path, the innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def _locked(folder: Path, created: list[Path]) -> Claimed | None:
    """Locks a folder and records its content; returns None if another process holds the lock."""
    handle = os.open(folder, os.O_RDONLY)
    if folder_locks.lock(handle) is False:  # None: the file system has no locks, and the folder is used without one
        os.close(handle)
        return None
    overwritten = {file: file.read_bytes() for file in _hydras(folder) if file.is_file()}
    return Claimed(folder, handle, created, overwritten, _other_files(folder))


def _goes_on(folder: Path, plans: bool, works_on: Mapping[str, str | None]) -> bool:
    """Returns whether a command may write to a folder that is already in use. A plan may overwrite an earlier plan, and
    an evaluation or export may overwrite the results of an earlier evaluation or export. In a run's folder, a command
    may write if `resume=` is auto, or names the folder or a path in it.

    Args:
        folder: the folder.
        plans: whether the command is plan.py.
        works_on: the values of evaluate, export and resume.
    """
    if (folder / "plan.json").exists():  # a plan can be repeated, so nothing is lost
        return plans
    if _uses_a_run(folder):  # these results can be computed again
        return works_on["evaluate"] is not None or works_on["export"] is not None
    resume = works_on["resume"]
    if resume is None:
        return False
    place = Path(str(resume)).expanduser().resolve()
    return resume == "auto" or folder.resolve() in (place, *place.parents)


def _exported(named: str | None) -> Path | None:
    """Returns the folder of the run that `export=` names, into which model/ is written. Returns None if `export=` is
    not set, if it names a checkpoint, whose weights may differ from the run's model, or if the run is still in
    progress."""
    run = Path(str(named)).expanduser()
    there = named is not None and (run / "checkpoints").is_dir() and not folder_locks.is_locked(run)
    return run if there else None


def _uses_a_run(folder: Path) -> bool:
    """Returns whether this folder contains results that an earlier command with `evaluate=` or `export=` computed from
    another run."""
    return not as_mapping(folders.typed_in(folder)).keys().isdisjoint(("evaluate", "export"))


def _typed_before(sweep: Path) -> list[str] | None:
    file = sweep / "multirun.yaml"
    return yaml.safe_load(file.read_text(encoding="utf-8"))["hydra"]["overrides"]["task"] if file.is_file() else None


def _hydras(folder: Path) -> list[Path]:
    """Returns the files that Hydra writes, and the logs of ranks, which are overwritten as well."""
    return [*(folder / ".hydra").glob("*"), *(folder / name for name in HYDRAS), *folder.glob(LOGS)]


def _other_files(folder: Path) -> dict[str, int]:
    ranks = [*folder.glob(RANKS)]
    known = {*HYDRAS, *(path.name for path in ranks)}
    files = [path for path in folder.iterdir() if path.name not in known]
    files += [path for rank in ranks for path in rank.iterdir() if path.name != rank_environment.LOG]
    return {str(path.relative_to(folder)): path.lstat().st_mtime_ns for path in files}


def _remove(folder: Path) -> None:
    shutil.rmtree(folder / ".hydra", ignore_errors=True)
    for file in (*(folder / name for name in HYDRAS), *folder.glob(LOGS)):
        with suppress(OSError):
            file.unlink(missing_ok=True)
    for rank in folder.glob(RANKS):
        with suppress(OSError):
            rank.rmdir()
