"""Tells users about a run: prints its files and the commands that use them, and logs advice about folders, learning
rate and compilation."""

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path

from lowmem.config.instantiate import instantiate
from lowmem.config.settle import Run
from lowmem.config.typed_lines import in_shell
from lowmem.system.terminal import folded
from lowmem.techniques.scheduler import preview

log = logging.getLogger(__name__)


def tell_files(output_dir: Path) -> None:
    """Prints a sentence with the run's folder and the names of the files and folders in it, except hidden ones."""
    paths = sorted(path for path in output_dir.iterdir() if path.name[0] != ".")
    print(folded(f"wrote {_shown(output_dir)}/: {', '.join(path.name + '/' * path.is_dir() for path in paths)}"))


def tell_export(output_dir: Path) -> None:
    """Prints the folder of an exported model, if one was written."""
    if (output_dir / "model").is_dir():
        print(f"wrote {_shown(output_dir / 'model')}")


def tell_commands(
    output_dir: Path, work: str, summary: Mapping[str, object], max_steps: int, prompt: Callable[[], str]
) -> None:
    """Prints commands that users can copy: a command that generates text, if a model was exported and the run was not
    interrupted, and after training also commands that evaluate and resume the run. Prints nothing for a run from a
    notebook.

    Args:
        output_dir: the run's folder.
        work: the work of the run, such as "train".
        summary: the content of summary.json.
        max_steps: the run's max_steps.
        prompt: returns a prompt for the command that generates text.
    """
    if not (output_dir / ".hydra").is_dir():  # a run from a notebook has no command to repeat
        return
    shown, lines = _shown(output_dir), []
    if (output_dir / "model").is_dir() and not summary["interrupted"]:
        lines.append(f"{in_shell('generate', shown)} {in_shell('prompt', prompt())}")
    if work == "train":
        more = f" max_steps={2 * max_steps}" if summary["steps"] == max_steps else ""
        lines += [in_shell("evaluate", shown), in_shell("resume", shown) + more]
    if lines:
        print("", *lines, sep="\npython train.py ")


def tell_folders(run: Run, output_dir: Path) -> None:
    """Logs the folder into which `export=` writes, and the new folder if `resume=` continues a run outside of the run's
    old folder."""
    if run.export is not None:
        instead = " and replaces the old one" if (output_dir / "model").exists() else ""
        log.info(f"export={run.export}: writes {_shown(output_dir / 'model')}{instead}.")
    if run.resume in (None, "auto"):
        return
    named = Path(run.resume).expanduser().resolve()
    if output_dir.resolve() not in (named, *named.parents):
        log.info(
            f"resume={run.resume}: continues in a new folder, {_shown(output_dir)}. The old folder is not changed."
        )


def tell_lr(run: Run) -> None:
    """Logs advice if a new run trains an adapter of a pretrained model with the model's default learning rate, which is
    meant for training all weights."""
    if run.adapter_class.freezes_base and run.model.pretrained and run.lr == run.model.lr and run.resume is None:
        log.info(
            f"lr={run.lr} is meant for training all weights. Adapters need a learning rate ten times as high or more: "
            "with AdamW, type lr=2e-4."
        )


def tell_schedule(run: Run, resumed: tuple[str, int, float] | None = None) -> None:
    """Logs advice in two cases: the run ends during its warmup or with the warmup's last step; or the run resumes
    another run, and its next learning rate differs from the one that the other run would have had. Gives no advice
    about a resumed run whose next learning rate is already that of its last step, as with a constant schedule. A no-op
    if the scheduler cannot be previewed (`preview`).

    Args:
        resumed: the override that names the run to resume, the number of steps of that run, and the learning rate that
            its next step would have had; None if the run does not resume another run.
    """
    schedule, last = preview(instantiate(run.scheduler), run.optim.arguments.get("lr", run.lr)), run.max_steps - 1
    if schedule is None:
        return
    if schedule.warm_up > max(last, 1):
        longer = schedule.warm_up > run.max_steps
        log.info(
            f"The warmup of {schedule.warm_up} steps is {'longer than' if longer else 'as long as'} this run "
            f"(max_steps={run.max_steps}): the learning rate {'ends at' if longer else 'reaches'} "
            f"{schedule.at(last):.3g}{f', below lr={run.lr:g}' if longer else ' only in the last step'}. "
            "Type scheduler.warmup=0.03."
        )
    if resumed is None:
        return
    asked, steps, before = resumed
    now = schedule.at(steps)
    if not math.isclose(now, before, rel_tol=1e-6) and now != schedule.at(last):
        log.info(
            f"{asked}: the learning rate of step {steps + 1} is {now:.3g} and would have been {before:.3g} in that "
            "run, because a different max_steps=, epochs=, lr= or scheduler= changes the schedule. For a constant "
            f"learning rate, type scheduler=constant scheduler.warmup=0 lr={before or now / 10:.2g}."
        )


def tell_compilation(run: Run) -> None:
    """Logs that the first step takes long, if torch.compile compiles the run's optimizer in this step."""
    if run.technique("optim").generates_code:
        log.info(
            "optim: the first step compiles this optimizer once per weight shape, which takes 3 to 5 s each (about 30 "
            "s for the 7 shapes of a Llama, longer on a busy machine). Later runs use the compile cache."
        )


def _shown(output_dir: Path) -> Path:
    return output_dir.relative_to(Path.cwd()) if output_dir.is_relative_to(Path.cwd()) else output_dir
