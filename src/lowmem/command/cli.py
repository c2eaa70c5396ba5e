"""Connects the shell, Hydra and the jobs of lowmem: converts typed lines to Hydra's arguments, and errors to readable
messages. train.py and plan.py call `start`.

The steps of a command:

- `start` converts the command line (`prepare`) and calls Hydra's main function.
- Hydra composes the config and calls the callbacks of conf/config.yaml: `TypedWins` (`typed_lines.py`), `Settle` here,
  and `Claim` (`folder_lock.py`), which locks the run's folder. Hydra calls `Report` (`sweep.py`) after a sweep.
- Hydra writes its files and calls the job, `run` or `plan`. With several devices, `run` starts the ranks (`launch.py`),
  unless torchrun has started them. Each rank is a process that goes through these steps, too.
- `_guarded` turns an error of the job into a message. When Hydra has returned, `start` prints the messages of all
  failed jobs and exits.

This module imports nothing heavy at its top, so that `--help` answers in well under a second.
"""

import atexit
import errno
import gc
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lowmem.command import folder_lock, help, launch, sweep
from lowmem.config import spelling
from lowmem.config.check import check_places, holds_adapter, settled
from lowmem.config.settle import Run
from lowmem.config.typed_lines import (
    CONF,
    in_place_of,
    key,
    keys_of_other_choices,
    keys_replaced,
    parted,
    quoted,
    unquoted,
    without,
)
from lowmem.report import folders
from lowmem.system import home, output_streams, rank_environment, signals
from lowmem.system.errors import FULL, NotPublished, RankLost, Refused, of_place
from lowmem.system.terminal import folded
from lowmem.system.without_gc import undisturbed

SWEEP = ("-m", "--multirun")
ALONE = ("generate", "show", "export")  # keys of work that only one process does, even if several ranks were started
LOADING = "Loading torch, Lightning and transformers ..."  # importing them takes about five seconds

NOTHING_FITS = 2  # the exit code of plan.py if no recipe fits

_failures: list[str] = []  # messages of failed jobs of this command
_unfit: list[Path] = []  # folders of this command's plans that have no fitting recipe


def _skip_last_collection() -> None:
    """Skips the garbage collection at exit, which would take a second and is not needed, because the operating system
    frees all memory of a process. Does nothing if Triton is loaded (CUDA builds of torch may load it), because Triton
    would report uncollected objects as leaks."""
    if "triton" not in sys.modules:
        gc.freeze()


def start(main: Callable[[], None], config: str = "config") -> None:
    """Runs a main function of Hydra with the arguments of sys.argv. Exits after a failure, usually with a message;
    exits with NOTHING_FITS if a plan has no fitting recipe. `config` names the yaml of conf/ that `main` reads."""
    atexit.register(_skip_last_collection)
    home.replace_if_read_only()
    output_streams.replace_closed()
    sys.stdout.reconfigure(errors="backslashreplace")  # otherwise a character that stdout cannot encode would end a run
    if config == "config" and not {"generate", "show"} & {key(line) for line in sys.argv[1:]}:
        output_streams.outlive_readers()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises errors instead of printing them
    _failures.clear()
    _unfit.clear()
    signals.received.clear()
    sweep.Report.failed, Settle.run = (), None
    OmegaConf.register_new_resolver("help", lambda _root_: help.text(_root_, CONF), replace=True)
    rank_environment.leashed()
    try:
        with signals.handled(signals.at_once):
            sys.argv[1:] = prepare(sys.argv[1:])
            with sweep.running(main) if config == "config" else nullcontext():
                main()
            sys.stdout.flush()
    except BrokenPipeError:  # as in `python plan.py | head -1`
        output_streams.discard(sys.stdout.fileno())
    except (HydraException, OmegaConfBaseException) as error:
        _exit(spelling.explained(error, parted(sys.argv[1:])[1], config))
    except Refused as error:
        _exit(str(error))
    except OSError as error:  # Hydra creates the folder before the job starts
        if not error.filename and error.errno not in FULL:
            raise
        _exit(_no_folder(error))
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        folder_lock.release()
    if failures := [*_failures, *sweep.Report.failed]:
        _exit("\n".join(failures))
    if _unfit:
        sys.exit(NOTHING_FITS)


def _no_folder(error: OSError) -> str:
    """Returns the message for a folder that Hydra cannot create. This is the run's folder, or in a sweep a job's
    folder."""
    if not {*sys.argv} & {*SWEEP}:
        return f"The output folder is not writable ({error}). Type hydra.run.dir=<a writable folder>."
    if error.errno == errno.ENAMETOOLONG:
        return f"The folder of a job cannot be created ({error}). Type hydra.sweep.subdir=<a shorter name>."
    return f"The folder of a job is not writable ({error}). Type hydra.sweep.dir=<a writable folder>."


def _exit(message: str) -> NoReturn:
    rank_environment.report("failed", message)
    sys.exit(folded(message, sys.stderr) if rank_environment.says(message) else 1)


def prepare(arguments: list[str]) -> list[str]:
    """Returns the arguments for Hydra: Hydra's flags, the overrides of an earlier run, the typed overrides, and the
    overrides that `in_place_of` adds, in this order. The earlier run is the run that resume=, evaluate= or export=
    names; its overrides are left out if a typed override replaces them. All overrides are quoted for Hydra.
    sweep.resume= is replaced by the flags and overrides of the earlier sweep. For work of one process (ALONE),
    strategy= and devices= are left out.

    Raises:
        Refused: an argument is wrong, or an override of the earlier run cannot be used. (Hydra and `Settle` find errors
            that show only in the composed config.)
    """
    if "COMP_LINE" in os.environ:  # tab completion: the command line typed so far, whose last word may be incomplete
        *words, last = os.environ["COMP_LINE"].split(" ")
        os.environ["COMP_LINE"] = " ".join([*map(quoted, words), last])
    arguments = _resumed_sweep(arguments)
    if old := [argument for argument in arguments if spelling.renamed(argument) != argument]:
        line = spelling.renamed(old[0]).lstrip("+~")
        raise Refused(
            f"{old[0]}: this key is now called {key(line)}. Type {line if '=' in line else f'{line}=<value>'}."
        )
    if "hydra/launcher=slurm" in arguments and find_spec("submitit") is None:
        raise Refused(
            "hydra/launcher=slurm: the package of this launcher is not installed. Type pip install "
            "hydra-submitit-launcher."
        )
    flags, typed, strays = parted(arguments)
    if strays:
        raise Refused(spelling.sets_nothing(strays[0]))
    shows = [flag for flag in flags if flag.partition("=")[0] in ("-c", "--cfg", "-i", "--info")]
    if shows and {*flags} & {*SWEEP}:
        raise Refused(f"{shows[0]}: this flag shows the config of one run, but -m starts several. Leave -m out.")
    earlier = _resumed_overrides(typed)
    lines = without(keys_replaced(typed) | keys_of_other_choices(typed, earlier), earlier) + typed
    lines += in_place_of(lines)
    if any(line.partition("=")[2] != "null" for line in lines if key(line) in ALONE):
        lines = [line for line in lines if key(line).partition(".")[0] not in ("strategy", "devices")]
    sweep = bool({*flags} & {*SWEEP})
    if {*flags} <= {*SWEEP}:  # --help and --cfg also accept wrong overrides
        spelling.check_lines(lines, sweep)
        if sweep:
            rank_environment.check_sweep()
    return [*flags, *(quoted(line, sweep) for line in lines)]


def _resumed_sweep(arguments: list[str]) -> list[str]:
    sweeps = [argument.removeprefix("sweep.resume=") for argument in arguments if argument.startswith("sweep.resume=")]
    if not sweeps:
        return arguments
    if len([argument for argument in arguments if argument not in ("-m", "--multirun")]) > 1:
        raise Refused("sweep.resume= repeats all overrides of the sweep. Leave out everything else.")
    return [*map(spelling.renamed, sweep.again(Path(sweeps[0]).expanduser()))]


def _resumed_overrides(arguments: list[str]) -> list[str]:
    """Returns the overrides of the run that `resume=`, `evaluate=` or `export=` names, under the current names of their
    keys and choices. Returns an empty list if no run is named, or if neither the named path nor the two folders above
    it have a file .hydra/overrides.yaml.

    Raises:
        Refused: an override can run code and was not typed again (the folder may come from somebody else), or the run
            cannot be resumed because lowmem no longer has one of its choices (`_refuse_taken_out`).
    """
    of_a_run = {"resume", "evaluate", "export"}
    lines = [unquoted(line) for line in arguments if key(line) in of_a_run]
    places = [line.partition("=")[2] for line in lines if line != "resume=auto"]
    for folder in (f for name in places for f in (Path(name).expanduser(), *Path(name).expanduser().parents[:2])):
        file = folder / ".hydra" / "overrides.yaml"
        if file.is_file():
            earlier = without(of_a_run.union(spelling.LEFT_OUT), folders.lines_of(file))
            _refuse_taken_out(earlier, arguments)
            renamed = _renamed(earlier)
            _refuse_code(renamed, arguments, folder)
            lines = without(keys_of_other_choices(set(renamed).difference(earlier), renamed), renamed)
            return _without_adapter(lines) if any(map(_holds_merged_model, places)) else lines
    return []


def _holds_merged_model(named: str) -> bool:
    folder = Path(named).expanduser()
    return (folder / "config.json").is_file() and not holds_adapter(folder)


def _without_adapter(lines: list[str]) -> list[str]:
    """Returns the overrides of a run for the model that the run exported: without its adapter, which is merged into the
    weights, and without `freeze`, whose patterns may name matrices of the adapter."""
    merged = {key(line) for line in lines if key(line).split(".")[0] in ("adapter", "freeze")}
    return [*without(merged, lines), "adapter=none"]


def _refuse_code(earlier: list[str], arguments: list[str], folder: Path) -> None:
    dangerous = [line for line in earlier if "_target_" in line or "trust_remote_code" in line or key(line) == "metric"]
    if missing := without(set(map(key, arguments)), dangerous):
        raise Refused(
            f"{folder}: the overrides of this run are used again, except those that can run code. Type them again if "
            f"you trust them: {' '.join(missing)}"
        )


def _refuse_taken_out(earlier: list[str], arguments: list[str]) -> None:
    """Raises Refused if the command resumes a run with a choice that lowmem no longer has. Two cases are allowed: the
    choice has a replacement that can read the run's checkpoints, and a choice of its group was typed; or the run is
    only evaluated or exported."""
    resumed = [unquoted(line) for line in arguments if key(line) == "resume"]
    for line in [line for line in earlier if line in spelling.TAKEN_OUT] if resumed else ():
        instead, why, resumes = spelling.TAKEN_OUT[line]
        if not resumes:
            raise Refused(
                f"{resumed[0]}: {line} was removed ({why}), and no other optimizer can read its state. Type {instead} "
                "model=hf model.name=<run folder>/model to start a new run from its weights; export=<run folder> "
                "writes that folder."
            )
        if key(line) not in map(key, arguments):
            raise Refused(f"{resumed[0]}: {line} was removed ({why}). Also type {instead} to continue this run.")


def _renamed(lines: list[str]) -> list[str]:
    """Returns the overrides with the current names of keys and choices. An earlier version of lowmem may have recorded
    other names."""
    instead = [new for line in lines if line in spelling.TAKEN_OUT for new in spelling.TAKEN_OUT[line].instead.split()]
    return [*instead, *map(spelling.renamed, without(set(map(key, instead)), lines))]


def _works_alone(run: Run) -> bool:
    return any(getattr(run, name) is not None for name in ALONE)


class Settle(Callback):
    """The Hydra callback that checks the composed config and stores the resulting `Run`, before anything is written."""

    # None: the job itself calls `settled`, because ${hydra:...} in an override cannot be resolved before the job starts
    run: Run | None = None

    def on_run_start(self, config: DictConfig, **_) -> None:
        if any("${hydra:" in line for line in OmegaConf.to_container(config.hydra.overrides.task)):
            return
        task = [key for key in config if key != "hydra"]
        try:
            Settle.run = settled(OmegaConf.masked_copy(config, task))
            if config.hydra.job.name != "plan" and not _works_alone(Settle.run):
                rank_environment.check(Settle.run.devices)
        except Refused as error:
            _exit(str(error))


def run(cfg: DictConfig) -> float:
    """Runs one job, and turns errors into messages. Hydra calls this function once per run, or in a sweep once per job.
    In a sweep, this function runs the job in another process (`sweep.job`).

    Returns:
        The validation loss, which a sweeper may minimize. It is nan after a failure and for work without a summary.
        Without a validation loss, it is nan in a sweep, and None outside of a sweep.

    Raises:
        Ended: a signal has interrupted the run (or the current job of a sweep), which then wrote a checkpoint; or a
            signal has ended the run immediately.
        KeyboardInterrupt: Ctrl-C has interrupted the current job of a sweep.
    """
    hydra = HydraConfig.get()
    if hydra.mode == RunMode.MULTIRUN:
        job_of_sweep = sweep.job(Path(hydra.runtime.output_dir), hydra.job.num, list(hydra.overrides.task))
        loss = folders.figure(job_of_sweep, "validation loss")
        return float("nan") if loss is None else loss

    summary = _guarded(_fit_or_generate, cfg)
    if not summary:
        return float("nan")
    if summary["interrupted"]:
        rank_environment.report("interrupted", summary["signal"])
        raise signals.Ended(signal.Signals[summary["signal"]])
    rank_environment.report("done")
    return summary["val_loss"]


def _fit_or_generate(run: Run, output_dir: Path, choices: dict[str, str], typed: list[str]) -> dict | None:
    """Trains, evaluates, exports, generates text or shows rows, as the run's keys say. If this process is a launcher,
    the ranks do the work. Returns the summary; None after generating, and an empty dictionary after showing rows. If
    only rank 0 does the work, the other ranks return None."""
    if rank_environment.number() and _works_alone(run):
        return None
    check_places(run)
    if run.generate is not None:
        return _generate(run)
    if run.devices > 1 and run.several and not rank_environment.is_rank():
        return _ranks(output_dir, run.devices)
    with undisturbed():
        from lowmem.fit import fit  # imports torch

    return fit(run, output_dir, choices, typed)


def _generate(run: Run) -> None:
    with undisturbed():
        from lowmem.command.generate import generate
    _log_beside_stdout()
    print(generate(run))


def _ranks(output_dir: Path, size: int) -> dict:
    """Runs the ranks and returns the summary that rank 0 has written. If a signal interrupted the ranks, returns only
    the keys `interrupted` and `signal`."""
    overrides = HydraConfig.get().overrides
    of_hydra = [line for line in overrides.hydra if key(line) not in ("hydra.run.dir", "hydra.mode")]
    interrupted = launch.run(output_dir, [*overrides.task, *of_hydra], size)
    if interrupted:
        return {"interrupted": True, "signal": interrupted.name}
    return json.loads((output_dir / "summary.json").read_text(encoding="utf-8"))


def _log_beside_stdout() -> None:
    """Sends log messages to stderr, because other programs may read the generated text from stdout."""
    for handler in logging.getLogger().handlers:
        if getattr(handler, "stream", None) is sys.stdout:  # theirs: any handler of logging
            handler.setStream(sys.stderr)


def plan(cfg: DictConfig) -> None:
    """Runs the job of plan.py: predicts the memory and time of a run."""
    _guarded(_plan, cfg)


def _plan(run: Run, output_dir: Path, choices: dict[str, str], typed: list[str]) -> None:
    with undisturbed(LOADING):
        from lowmem.plan.job import plan

    content = plan(run, output_dir, choices, typed)
    if not any(recipe["fits"] for recipe in content["recipes"]):
        _unfit.append(output_dir)


def _guarded(job: Callable[[Run, Path, dict[str, str], list[str]], dict | None], cfg: DictConfig) -> dict | None:
    """Calls a job and returns its result. After a failure, returns None and adds a message to `_failures`, which
    `start` prints.

    Raises:
        Ended: a signal has ended the job immediately.
    """
    hydra = HydraConfig.get()
    output_dir = Path(hydra.runtime.output_dir)
    # unresolved interpolations stay in the overrides; composing a config from the overrides resolves them
    overrides = OmegaConf.to_container(hydra.overrides.task)
    debug, places = False, [str(output_dir)]
    try:
        debug, run = cfg.debug, Settle.run or settled(cfg)
        places += _words(run.as_dict())
        return job(run, output_dir, dict(hydra.runtime.choices), list(map(unquoted, overrides)))
    except BrokenPipeError:
        output_streams.discard(sys.stdout.fileno())
        return None
    except (Exception, signals.Ended) as error:
        if ended := signals.ending(error):
            rank_environment.report("ended", ended.said)
            _leave(output_dir, ended.said)
            if rank_environment.number() or not rank_environment.of_run():
                print(ended.said, file=sys.stderr)
            raise ended from None
        message = _message(error, debug, places)
        how = {RankLost: "lost", NotPublished: "not uploaded"}.get(type(error), "failed")
        rank_environment.report(how, message)
        _failures.append(message)
        if not isinstance(error, NotPublished):
            _leave(output_dir, message)
        return None


def _words(value: object) -> Iterator[str]:
    """Yields the string values of a nested config, among them the paths that the user typed."""
    if isinstance(value, str):
        yield value
    for below in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _words(below)


def _message(error: Exception, debug: bool, places: list[str]) -> str:
    """Returns a message for an error that the user can fix, and a traceback for any other error. With debug=true,
    returns a traceback for every error."""
    if isinstance(error, OmegaConfBaseException) and not debug:
        return str(error)
    if isinstance(error, OSError) and of_place(error, places) and not debug:
        return (
            f"{error.filename}: {error.strerror}. Type a path that is readable and writable, on a disk that is not "
            "full."
        )
    if isinstance(error, Refused) and not debug:
        return str(error)
    return "".join(traceback.format_exception(error))


def _leave(output_dir: Path, message: str) -> None:
    """Writes the error message of a failed run to failed.txt in the run's folder. A no-op if only Hydra has written to
    the folder, because `folder_lock.release` then restores the folder. Also a no-op in a rank that has not claimed the
    folder: the launcher or rank 0 has claimed it."""
    if folder_lock.untouched() or rank_environment.of_run() or rank_environment.number():
        return
    with suppress(OSError):  # the run may have failed because the disk is full
        (output_dir / folders.FAILED).write_text(message + "\n", encoding="utf-8")
