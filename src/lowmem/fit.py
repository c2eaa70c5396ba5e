"""Runs a command from its settings to its results. A command that trains is checked and planned, trains, reports its
results, and exports the model. The command line calls `fit`, and a notebook can call it, too:

    from pathlib import Path
    from hydra import compose, initialize
    from lowmem.fit import fit
    with initialize(config_path="conf", version_base="1.3"):
        cfg = compose("config", overrides=["max_steps=20", "logger=csv"])
    summary = fit(cfg, Path("outputs/notebook"))
"""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from lowmem.config.check import check, settled
from lowmem.config.settle import Command, Config
from lowmem.config.typed_lines import replaced
from lowmem.model import loading
from lowmem.plan import at_start, batch_size
from lowmem.plan.advice import advice, out_of_memory
from lowmem.plan.prediction import Prediction
from lowmem.report import folders, hints, show
from lowmem.report.sample import example
from lowmem.report.summary import write as write_summary
from lowmem.system.errors import FULL, Refused
from lowmem.system.quiet_libraries import quiet
from lowmem.techniques.strategy.contract import OneDevice
from lowmem.techniques.strategy.process_group import process_group
from lowmem.training import build, model_folder, results
from lowmem.training.task import Task, find_checkpoint, find_task, lines_of_older, summary_of, with_model
from lowmem.training.training import DidNotFit, Training, training_session

log = logging.getLogger(__name__)


class OutOfMemory(Refused):
    """The run is out of memory. The message says what filled the memory, and what to try."""


def fit(
    cfg: Config,
    output_dir: Path,
    choices: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
) -> dict:
    """Does the work that the settings ask for, and writes the results into a folder.

    Args:
        cfg: the settings: a config that Hydra has composed, or a `Run`.
        output_dir: the folder for all results.
        choices: config group -> chosen yaml, for messages and results.
        overrides: the overrides that the user typed, for the summary.

    Returns:
        The run's summary, as in summary.json; an empty dictionary if the command only shows data.

    Raises:
        Refused: the run cannot work, or is out of memory. The message says why and what to type.
        NotPublished: the run is complete, but its model could not be converted to GGUF or uploaded.
        OSError: a file cannot be read or written, for example because the disk is full.
    """
    choices, run = choices or {}, settled(cfg)
    check(run, choices)
    quiet()
    run = run.knowing(output_dir=str(output_dir), device=run.runs_on)
    command = Command(run, output_dir, choices, overrides, overrides)
    with process_group(run) as ranks:
        if ranks.rank == 0:
            hints.tell_folders(run, output_dir)
        saved = find_checkpoint(run, output_dir, ranks)  # first, to refuse an unusable checkpoint early
        command = _with_lines(command, lines_of_older(run, saved))
        with ranks.rank_0_first("count the rows"):  # the other ranks read cache files that rank 0 writes
            command, texts = _counted(command, ranks)
        task = find_task(command.run, saved)
        if task.work == "nothing":
            return summary_of(task.saved)
        if task.work == "show":
            return _show(command, texts)
        if task.work == "train":
            return _train(command, task, ranks, texts)
        return (_evaluate if task.work == "evaluate" else _export)(command, task, ranks, texts)


def _with_lines(command: Command, lines: Mapping[str, str]) -> Command:
    """Returns the command with additional overrides, `lines` (key -> value), which replace overrides of the same
    keys."""
    run = command.run
    for key, value in lines.items():
        run = run.replacing(key, value)
    return replace(command, run=run, lines=replaced(command.lines, lines))


def _counted(command: Command, ranks: OneDevice) -> tuple[Command, build.Texts | None]:
    """Replaces epochs= with max_steps=, set to the number of optimizer steps in these epochs.

    Returns:
        The changed command, and the tokenized data, which were opened to count the steps. Without epochs=, and with
        evaluate= or export=, these are the unchanged command and None.
    """
    run = command.run
    if run.epochs is None or run.evaluate is not None or run.export is not None:
        return command, None
    texts = build.open_texts(run)
    run = run.knowing(max_steps=texts.steps_in(run, ranks))
    log.info(f"epochs={run.epochs}: {run.max_steps} optimizer steps.")
    lines = replaced(command.lines, {"epochs": None, "max_steps": str(run.max_steps)})
    return replace(command, run=run, lines=lines), texts


def _train(command: Command, task: Task, ranks: OneDevice, texts: build.Texts | None) -> dict:
    """Resolves plan= and batch_size=auto, checks the predicted memory, trains, and writes the results.

    Raises:
        Refused: no recipe or batch size fits; the run is predicted to need more memory than is available; a checkpoint
            could not be written; or see `_training`.
    """
    loading.check_architecture(command.run)
    if ranks.rank == 0:
        hints.tell_lr(command.run)
        saved = task.saved
        hints.tell_schedule(command.run, saved and (saved.asked, saved.steps, saved.lr))
        hints.tell_compilation(command.run)
    run = at_start.with_recipe(command.run, command.lines)
    run = batch_size.resolve(run).resolved()
    command = replace(command, run=run)
    prediction = at_start.checked(run, command.lines) if ranks.rank == 0 else None  # rank 0 checks for all ranks
    seconds = at_start.seconds_per_step(run, prediction) if prediction else None
    if seconds:
        at_start.log_duration(run.max_steps - (task.saved.steps if task.saved else 0), seconds)
    with _training(command, task, ranks, texts, prediction) as training:
        predicted = prediction and prediction.based_on(training.rss_before_model).as_dict()
        summary = results.summary(training, command, predicted)
        if prediction:
            summary["predicted"]["seconds_per_step"] = seconds
        if training.saves.ended_by:
            raise model_folder.without_checkpoint(training, command, summary)
        if ranks.rank == 0:
            results.draw(training, command, summary)
        return _ended(training, command, task, summary)


def _evaluate(command: Command, task: Task, ranks: OneDevice, texts: build.Texts | None) -> dict:
    """Evaluates a run, an exported model or an adapter, and writes the results. After the missing evaluation of a
    resumed run, also writes the model."""
    run = command.run if task.saved else with_model(command.run, command.run.evaluate)
    command = _unplanned(replace(command, run=run))
    with _training(command, task, ranks, texts) as training:
        return _ended(training, command, task, results.summary(training, command))


def _export(command: Command, task: Task, ranks: OneDevice, texts: build.Texts | None) -> dict:
    """Writes model/ of a run. If the command writes into the run folder itself, it changes no other file, except that
    it removes failed.txt if the run is complete. Any other folder also gets summary.json."""
    command, evaluated = _unplanned(command), summary_of(task.saved)
    in_place = command.folder.resolve() == task.saved.run.resolve()
    with (
        TemporaryDirectory() as unused,
        _training(replace(command, folder=Path(unused)), task, ranks, texts) as training,
    ):
        summary = results.summary(training, command) | evaluated
        if ranks.rank == 0 and not in_place:
            write_summary(command.folder / "summary.json", summary)
        return _left(training, command, task, summary, finished=bool(evaluated) or not in_place)


def _show(command: Command, texts: build.Texts | None) -> dict:
    """Prints examples of the data, without building a model."""
    data = build.data(_unplanned(command).run, texts=texts)
    print(show.page(data.train, data.tokens.tokenizer, command.run.show, sys.stdout.isatty()))
    return {}


def _unplanned(command: Command) -> Command:
    """Checks the architecture, and returns the command with resolved settings. This function is for work without
    training, which needs no plan; it replaces batch_size=auto with 1."""
    run = command.run.sized()
    loading.check_architecture(run)
    return replace(command, run=run.resolved())


@contextmanager
def _training(
    command: Command,
    task: Task,
    ranks: OneDevice,
    texts: build.Texts | None = None,
    prediction: Prediction | None = None,
) -> Iterator[Training]:
    """Context manager that trains or evaluates, or only loads a model to export it. The model and the data stay open
    until the `with` block ends.

    Raises:
        OutOfMemory: the run is out of memory, here or inside the `with` block. The message says what to try.
        Refused: see `training_session`.
        OSError: a file cannot be read or written. If the disk is full, the error names a file or the run folder.
    """
    run = command.run
    try:
        with training_session(run, command.folder, task, ranks=ranks, texts=texts) as training:
            yield training
    except OSError as error:
        if error.filename or error.errno not in FULL:
            raise
        # some errors of a full disk have no file name; the file is in the run folder
        raise OSError(error.errno, error.strerror, str(command.folder)) from error
    except DidNotFit as error:
        smaller = at_start.smaller_recipe(run, command.lines, prediction) if error.side == "device" else None
        windows = {0: 1}
        with suppress(Refused):  # an evaluation does not use accumulation.size, which may not fit its batch_size
            windows = run.windows.sizes
        tries = advice(command.choices, run.batch_size, run.seq_len, windows)
        raise OutOfMemory(out_of_memory(error.side, error.held, tries, smaller)) from error


def _ended(training: Training, command: Command, task: Task, summary: dict) -> dict:
    """Reports the results, then writes and publishes the model. Returns: the summary."""
    if training.module.ranks.rank == 0:
        results.report(training, command, summary)
    training.watchers.stop.waits_no_longer(summary["interrupted"])
    return _left(training, command, task, summary)


def _left(training: Training, command: Command, task: Task, summary: dict, finished: bool = True) -> dict:
    """Writes the model, prints the commands that a user may type next, and converts the model to GGUF and uploads it if
    the settings ask for this. An interrupted run, and an evaluation without resume=, write no model.

    Args:
        finished: True if the run is complete. Then failed.txt, which an earlier attempt may have left, is removed.

    Returns:
        The summary.
    """
    exports = task.exports and not summary["interrupted"]  # an interrupted run can be resumed from its checkpoint
    if exports:
        model_folder.leave(training, command, summary)
    if training.module.ranks.rank == 0:
        if finished:
            (command.folder / folders.FAILED).unlink(missing_ok=True)
        (hints.tell_export if task.work == "export" else hints.tell_files)(command.folder)
        hints.tell_commands(
            command.folder, task.work, summary, command.run.max_steps, partial(example, training.tokens)
        )
        if exports and command.run.export_format == "gguf":
            model_folder.convert(command)
        if exports and command.run.push is not None:
            model_folder.upload(command)
    return summary
