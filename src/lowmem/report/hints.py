"""Prints in which folder a run goes on, where its files are, and the commands that use them."""

import logging
from collections.abc import Mapping
from pathlib import Path

from lowmem.config.settle import Run
from lowmem.config.typed_lines import in_shell

log = logging.getLogger(__name__)


def tell_files(output_dir: Path, pattern: str = "*") -> None:
    shown = _shown(output_dir)
    print("\n".join(f"wrote {shown / path.name}" for path in sorted(output_dir.glob(pattern)) if path.name[0] != "."))


def tell_commands(output_dir: Path, work: str, summary: Mapping[str, object], max_steps: int) -> None:
    """Prints the commands that use what the run has left, to be copied."""
    if not (output_dir / ".hydra").is_dir():  # a notebook's run: nobody typed a command to repeat
        return
    shown, lines = _shown(output_dir), []
    if (output_dir / "model").is_dir() and not summary["interrupted"]:
        lines.append(f"{in_shell('generate', shown)} prompt='Once upon a time'")
    if work == "train":
        more = f" max_steps={2 * max_steps}" if summary["steps"] == max_steps else ""
        lines += [in_shell("evaluate", shown), in_shell("resume", shown) + more]
    if lines:
        print("", *lines, sep="\npython train.py ")


def tell_folders(run: Run, output_dir: Path) -> None:
    """Logs if a run is resumed in a new folder, and where `export=` writes."""
    if run.export is not None:
        instead = ", in place of the one that is there" if (output_dir / "model").exists() else ""
        log.info(f"export={run.export}: writes {_shown(output_dir / 'model')}{instead}.")
    if run.resume in (None, "auto"):
        return
    named = Path(run.resume).expanduser().resolve()
    if output_dir.resolve() not in (named, *named.parents):
        log.info(f"resume={run.resume}: goes on in a new folder, {_shown(output_dir)}. The old one stays as it is.")


def tell_lr(run: Run) -> None:
    """Logs if an adapter of a published model has the step size that the model's own weights want."""
    if run.any("freezes_base") and run.model.pretrained and run.lr == run.model.lr and run.resume is None:
        log.info(
            f"lr={run.lr} suits a training of all weights. An adapter wants ten times as much or more: with AdamW "
            "lr=2e-4."
        )


def _shown(output_dir: Path) -> Path:
    return output_dir.relative_to(Path.cwd()) if output_dir.is_relative_to(Path.cwd()) else output_dir
