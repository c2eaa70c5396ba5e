"""Decides what a command does: train, show the data, evaluate a run or an exported model, export a run, or nothing.

If the run to resume has done all its steps, the command does the remaining work: the last evaluation and the export, or
only the export. If nothing remains, resume=auto does nothing, and any other resume= is refused. resume=auto also treats
a run that early stopping has ended as a run that has done all its steps; any other resume= continues its training.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from lowmem.config.check import holds_adapter
from lowmem.config.settle import Run
from lowmem.data.sources.source import OLDER
from lowmem.saving import checkpoint
from lowmem.saving.checkpoint import Saved
from lowmem.saving.export_adapter import adapter_config_of, base_of
from lowmem.system.errors import Refused
from lowmem.system.fail_together import fail_together
from lowmem.techniques.strategy.contract import ONE_DEVICE, OneDevice

log = logging.getLogger(__name__)

Work = Literal["train", "evaluate", "export", "show", "nothing"]


class Task(NamedTuple):
    """The work of a command, and the checkpoint from which the work starts (None: no checkpoint)."""

    work: Work
    saved: Saved | None = None

    @property
    def exports(self) -> bool:
        """Returns True if the command writes model/: it trains, exports, or does the remaining work of a resumed
        run."""
        return self.work in ("train", "export") or self.resumes

    @property
    def resumes(self) -> bool:
        return self.saved is not None and self.saved.key == "resume"


TRAIN = Task("train")


def find_checkpoint(run: Run, output_dir: Path, ranks: OneDevice = ONE_DEVICE) -> Saved | None:
    """Returns the checkpoint from which the command starts. Returns None if the command needs no checkpoint, or if
    resume=auto finds none. All ranks must call this function; rank 0 finds and verifies the checkpoint.

    Raises:
        Refused: the checkpoint does not exist, is incomplete or damaged, or is not a checkpoint of lowmem.
    """

    def find_for_all(find: Callable[[], Path | None]) -> Path | None:
        with fail_together(ranks):
            path = find() if ranks.rank == 0 else None
        return ranks.broadcast(path)

    if run.show is not None:
        return None
    if run.export is not None:
        return Saved(find_for_all(lambda: checkpoint.find(run.export, "export")), "export")
    if run.evaluate is not None:
        if is_model(run.evaluate):
            return None
        return Saved(find_for_all(lambda: checkpoint.find(run.evaluate, "evaluate")), "evaluate")
    if run.resume is None:
        return None
    auto = run.resume == "auto"
    path = find_for_all(lambda: checkpoint.newest(output_dir) if auto else checkpoint.find(run.resume))
    return path and Saved(path)


def find_task(run: Run, saved: Saved | None) -> Task:
    """Returns the work to do, given the checkpoint of `find_checkpoint`. Raises Refused if the run to resume has done
    more than max_steps steps, or if no work remains and resume= is not auto."""
    if run.show is not None:
        return Task("show")
    if run.export is not None:
        return Task("export", saved)
    if run.evaluate is not None:
        return Task("evaluate", saved)
    return Task(_left(saved, run.max_steps, run.resume == "auto"), saved) if saved else TRAIN


def lines_of_older(run: Run, saved: Saved | None) -> dict[str, str]:
    """Returns overrides (key -> value) with which the data are tokenized without a beginning-of-text token, as in
    earlier versions of lowmem. Returns an empty dict if there is no checkpoint, if the checkpoint stores its run's
    beginning tokens, or if no data.bos= is auto."""
    if saved is None or saved.begin is not None:
        return {}
    return {key: OLDER for key, bos in run.begins.items() if bos == "auto"}


def is_model(named: str) -> bool:
    """Returns True if a path is the folder of an exported model or adapter."""
    folder = Path(named).expanduser()
    return (folder / "config.json").is_file() or holds_adapter(folder)


def with_model(run: Run, folder: str, key: str = "evaluate") -> Run:
    """Returns the run with its model and tokenizer replaced by the exported model in a folder. If the folder contains
    an adapter, the run gets the adapter, the adapter's base model, and the tokenizer in the folder.

    Args:
        run: the settings.
        folder: an exported model or adapter.
        key: the key that the user typed, for the error message.

    Raises:
        Refused: the adapter does not name its base model.
    """
    place = Path(folder).expanduser()
    adapter = holds_adapter(place)
    name = base_of(place) if adapter else str(place)
    if name is None:
        raise Refused(
            f"{key}={folder}: this adapter does not name its base model. Write base_model_name_or_path into its "
            "adapter_config.json, or type export=<its run folder> merge=true."
        )
    model = {"name": name, "pretrained": True}
    run = run.replacing("model.architecture", None).knowing(model=model, tokenizer=str(place) if adapter else None)
    return run.replacing("adapter", adapter_config_of(place)) if adapter else run


def summary_of(saved: Saved) -> dict:
    """Returns the contents of summary.json of a checkpoint's run. Returns an empty dict if the file is missing or
    damaged, if the run was interrupted, or if the run did not end at the step of the checkpoint."""
    try:
        summary = json.loads((saved.run / "summary.json").read_text(encoding="utf-8"))
        return summary if summary["steps"] == saved.steps and not summary["interrupted"] else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _left(saved: Saved, max_steps: int, auto: bool) -> Work:
    summary = summary_of(saved)
    if saved.steps < max_steps and not (auto and summary.get("stopped_early")):
        return "train"
    if saved.steps <= max_steps:
        if not summary:
            log.info(f"{saved.asked}: all {saved.steps} steps are done; running the missing last evaluation.")
            return "evaluate"
        if not (saved.run / "model").is_dir():
            log.info(f"{saved.asked}: training and evaluation are done; writing the missing export.")
            return "export"
        if auto:
            log.info(f"{saved.asked}: all {saved.steps} steps, the evaluation and the export are done.")
            return "nothing"
    raise Refused(
        f"{saved.asked}: {saved.steps} steps are done and max_steps={max_steps}. Type a larger max_steps, such as "
        f"max_steps={2 * saved.steps}."
    )
