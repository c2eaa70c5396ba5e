"""The main job, as a function: check -> plan -> train -> report -> export. The command line and a notebook call it.

from hydra import compose, initialize
from lowmem.fit import fit
with initialize(config_path="conf", version_base=None):
    cfg = compose("config", overrides=["max_steps=20", "logger=csv"])
summary = fit(cfg, Path("outputs/notebook"))
"""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from omegaconf import DictConfig

from lowmem import batch_size, build, checkpoint, model
from lowmem.adapter.export import export, is_adapted
from lowmem.asked import Asked, asked, summary_of, with_model
from lowmem.check import check, targets
from lowmem.errors import Refused
from lowmem.export import Gathered
from lowmem.generation import end_tokens
from lowmem.memory.advice import out_of_memory
from lowmem.overrides import as_lines, as_mapping, in_shell, replaced
from lowmem.plan import at_start
from lowmem.plan.prediction import Prediction
from lowmem.quiet import quiet
from lowmem.report import hints, ran, show, step
from lowmem.report import summary as report
from lowmem.report.hub import push
from lowmem.report.model_card import card
from lowmem.runs import folders
from lowmem.settle import Run, settled
from lowmem.strategy.group import joined
from lowmem.strategy.one_device import OneDevice
from lowmem.terminal import folded
from lowmem.together import together
from lowmem.trained import parameters, shape
from lowmem.trained import trained as trained_of
from lowmem.training import DidNotFit, Training, trained

log = logging.getLogger(__name__)


class OutOfMemory(Refused):
    """The run did not fit: what was held, and what to try."""


def fit(
    cfg: DictConfig | Run,
    output_dir: Path,
    choices: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
) -> dict:
    """Train as `cfg` says and leave the results in `output_dir`.

    Args:
        choices: group -> chosen yaml, for messages.
        overrides: what the user typed, for the summary.

    Returns:
        What summary.json holds; nothing, where data was only shown.

    Raises:
        Refused: a run that cannot work, or that ran out of memory, in a sentence.
    """
    choices, run = choices or {}, settled(cfg)
    check(run, choices)
    quiet()
    run = _placed(run, output_dir)
    with joined(run) as ranks:
        return _fitted(run, output_dir, choices, overrides, ranks)


def _fitted(run: Run, output_dir: Path, choices: Mapping[str, str], overrides: Sequence[str], ranks: OneDevice) -> dict:
    if ranks.rank == 0:
        hints.tell_folders(run, output_dir)
    with ranks.in_turn("count the rows"):  # what the first has written the others read
        run, typed, texts = _counted(run, overrides, ranks)
    wanted = asked(run, output_dir, ranks)  # before anything is planned for it
    if wanted.work == "nothing":
        return summary_of(wanted.saved)
    run, prediction = _planned(run, typed, wanted, first=ranks.rank == 0)
    if wanted.work == "show":
        _show(run, texts)
        return {}
    try:
        with _named(output_dir), trained(run, output_dir, wanted, ranks=ranks, texts=texts) as training:
            summary = _summary(training, run) | _what(training, run, choices) | {"overrides": list(overrides)}
            summary["predicted"] = prediction.based_on(training.rss_before_model).as_dict() if prediction else None
            if wanted.work == "export":
                summary |= summary_of(wanted.saved)
            if wanted.work == "train" and prediction:
                summary["predicted"]["seconds_per_step"] = at_start.refined(run, prediction, training.metrics)
            if training.saves.ended_by:
                raise _without_its_checkpoint(training, run, output_dir, summary, choices)
            if ranks.rank == 0:
                if wanted.work == "train":
                    _picture(training, run, output_dir, summary, choices)
                _report(training, output_dir, summary)
            training.stop.waits_no_longer(summary["interrupted"])
            takes_part = ranks.divides or ranks.rank == 0
            if wanted.exports and takes_part and not summary["interrupted"]:  # then its checkpoint is what goes on
                _export(training, run, output_dir, summary)
            if ranks.rank == 0:
                (output_dir / folders.FAILED).unlink(missing_ok=True)  # of an earlier life of this run
                hints.tell_files(output_dir)
                hints.tell_commands(output_dir, wanted.work, summary, run.max_steps)
            return summary
    except DidNotFit as error:
        planned = at_start.smaller_recipe(run, typed, prediction)
        raise OutOfMemory(out_of_memory(error.held, choices, run.batch_size, run.seq_len, planned)) from error


def _placed(run: Run, output_dir: Path) -> Run:
    """A copy with its folder, and with the device that `auto` means."""
    return run.knowing(output_dir=str(output_dir), device=run.runs_on)


def _counted(run: Run, typed: Sequence[str], ranks: OneDevice) -> tuple[Run, Sequence[str], build.Texts | None]:
    """epochs= as the steps that they take, in the lines too, which recipes are made of; only open data tells them."""
    if run.epochs is None or run.evaluate is not None or run.export is not None:
        return run, typed, None
    texts = build.open_texts(run)
    run = run.knowing(max_steps=texts.steps_in(run, ranks))
    log.info(f"epochs={run.epochs}: {run.max_steps} optimizer steps.")
    return run, replaced(typed, {"epochs": None, "max_steps": str(run.max_steps)}), texts


def _planned(run: Run, overrides: Sequence[str], wanted: Asked, first: bool = True) -> tuple[Run, Prediction | None]:
    """With the recipe and the batch size that were asked for, as plain values; and what they are predicted to need.

    Args: first: of several ranks, whose word holds for all.
    """
    if wanted.work != "train":  # a plan is one of training
        run = with_model(run, run.evaluate) if wanted.work == "evaluate" and not wanted.saved else run
        run = run.knowing(batch_size=1) if run.batch_size == "auto" else run
        model.check_architecture(run)
        return run.resolved(), None
    model.check_architecture(run)
    run = at_start.with_recipe(run, overrides)
    run = batch_size.resolve(run).resolved()
    prediction = at_start.checked(run, overrides) if first else None
    if prediction:
        at_start.tell_duration(run, prediction, run.max_steps - (wanted.saved.steps if wanted.saved else 0))
    return run, prediction


def _show(run: Run, texts: build.Texts | None) -> None:
    """Before a model is built."""
    data = build.data(run, texts=texts)
    print(show.page(data.train, data.tokens.tokenizer, run.show, sys.stdout.isatty()))


@contextmanager
def _named(output_dir: Path) -> Iterator[None]:
    """A full disk does not say whose file it is that it has no room for: it is one of the run's."""
    try:
        yield
    except OSError as error:
        if error.filename or not error.errno:
            raise
        raise OSError(error.errno, error.strerror, str(output_dir)) from error


def _summary(training: Training, run: Run) -> dict:
    meter, metrics, module = training.meter, training.metrics, training.module
    return {
        "steps": training.trainer.global_step,
        "skipped_steps": module.skipped_steps,
        "tokens": module.tokens,
        "tokens_per_second": metrics.tokens_per_second(),
        "seconds_per_step": metrics.seconds_per_step(),
        "first_step_seconds": metrics.first_step_seconds,
        "train_loss": metrics.train_loss,
        "auxiliary_loss": metrics.auxiliary_loss,
        "val_loss": metrics.val_loss,
        "bits_per_byte": metrics.evaluated[0]["bits_per_byte"] if metrics.evaluated else None,
        "validation": metrics.evaluated,  # each set
        "validation_sequences": [one.count for one in training.trainer.val_dataloaders or ()],  # of each set
        "metric": dict(metrics.own()),
        "peak_bytes": meter.peak_bytes,
        "peak_bytes_by_category": meter.by_category(),
        "peak_bytes_by_phase": meter.by_phase(),
        "rss_before_model_bytes": training.rss_before_model,
        "batch_size": run.batch_size,
        "optimizer": report.stepped_by(next(iter(training.trainer.optimizers), None)),
        "parameters": parameters(module.model),
        "trained_parameters": sum(shape(p).numel() for _, p in trained_of(module.model)),
        "interrupted": training.stop.interrupted,
        "signal": training.stop.signal.name if training.stop.signal else None,
        "stopped_early": training.stopped_early,
        "resumed_from": str(training.resumed_from) if training.resumed_from else None,
        "device": torch.cuda.get_device_name() if run.device == "cuda" else "cpu",
        "versions": report.versions(),
        "weights_bytes": sum(shape(p).numel() * p.element_size() for p in module.model.parameters()),  # of all ranks
        "ranks": module.ranks.every(meter.peak_bytes | meter.held()),
    }


def _what(training: Training, run: Run, choices: Mapping[str, str]) -> dict:
    """Was trained on what and how, without a place of this machine."""
    of_hub = run.model.pretrained and not Path(run.model.name).expanduser().is_dir()
    places = [node["path"] for _, node in targets(run.data.plain()) if node.get("path") is not None]
    return {
        "base_model": run.model.name if of_hub else None,
        "pretrained": run.model.pretrained,
        "architecture": training.module.model.config.model_type,
        "adapter_alone": is_adapted(training.module.model) and run.model.pretrained and not run.merge,
        "recipe": as_mapping(ran.chosen(choices)),
        "data": [Path(place).name for place in places] or as_lines({"data": choices.get("data", "")}),
    }


def _report(training: Training, output_dir: Path, summary: Mapping[str, object]) -> None:
    """The run in numbers: to the loggers, into its folder and on the terminal."""
    for logger in training.loggers:
        logger.log_metrics(report.plan_ratios(summary), step=summary["steps"])
    report.write(output_dir / "summary.json", summary)
    print(f"\n{report.table(summary)}\n")
    if training.samples.text:
        print(folded(f"A sample:\n{training.samples.text}\n"))


def _picture(
    training: Training, run: Run, output_dir: Path, summary: Mapping[str, object], choices: Mapping[str, str]
) -> None:
    """Where the bytes were, drawn and as a table."""
    from lowmem.report import picture  # matplotlib takes half a second

    title = " ".join(ran.chosen(choices)) or run.model.name
    typed = " ".join(ran.besides(choices, summary["overrides"]))
    card = torch.cuda.get_device_properties().total_memory if run.device == "cuda" else None
    meter, room = training.meter, run.limit or card
    picture.memory_picture(output_dir / "memory.png", meter.rows(), meter.timeline, title, typed, room)
    step.write(output_dir / "memory_step.csv", meter.timeline)
    picture.send(output_dir / "memory.png", training.loggers, summary["steps"])


def _export(training: Training, run: Run, output_dir: Path, summary: Mapping[str, object]) -> None:
    """Last of all: it needs the most room, and what it may lack cannot take anything else along.

    Raises:
        Refused: what is missing and how to get it, where the folder cannot be written.
    """
    try:
        _write_model(training, run, output_dir / "model", summary)
    except OSError as error:
        raise Refused(
            f"{output_dir / 'model'} cannot be written: {error.strerror}. Everything else of this run is in place. "
            f"Make room, and type {in_shell('export', training.resumed_from if run.export else output_dir)}."
        ) from error
    if run.push is None or training.module.ranks.rank:
        return
    trained_in = training.resumed_from if run.export else output_dir
    if summary["adapter_alone"] and summary["base_model"] is None:
        log.warning(
            f"push={run.push}: not uploaded, since this adapter stands on a folder that only this machine has. Type "
            f"{in_shell('export', trained_in)} merge=true push={run.push}."
        )
    else:
        push(output_dir / "model", run.push, trained_in)


def _write_model(training: Training, run: Run, folder: Path, summary: Mapping[str, object]) -> None:
    """Raises: OSError: on every rank, where the folder cannot be written."""
    base = run.model.name if run.model.pretrained else None
    network, tokenizer = training.module.model, training.tokens.tokenizer
    network.generation_config.eos_token_id = end_tokens(tokenizer, network)
    ranks = training.module.ranks
    gathered = Gathered(network, ranks if ranks.divides else OneDevice(), training.part)
    with gathered.together() as writes:
        if writes:
            what = (network, tokenizer, folder, run.export_dtype, run.merge, base, card(summary))
            export(*what, gathered.whole, gathered.dtype_of if ranks.divides else None)


def _without_its_checkpoint(
    training: Training, run: Run, output_dir: Path, summary: Mapping[str, object], choices: Mapping[str, str]
) -> Refused:
    """Writes the weights alone, which need less room than a checkpoint, and then what else fits.

    Returns: the error that ends the run: what could be written, and what can be done with it.
    """
    training.stop.waits_no_longer(summary["interrupted"])
    folder, ranks = output_dir / "model", training.module.ranks
    alone = summary["adapter_alone"]
    start = in_shell("adapter.path", folder) if alone else f"model=hf {in_shell('model.name', folder)}"
    try:
        with together(ranks):
            if ranks.divides or ranks.rank == 0:
                _write_model(training, run, folder, summary)
        left = (
            f"The weights alone, of step {summary['steps']}, are in {folder}. Type {in_shell('evaluate', folder)}, "
            f"{in_shell('generate', folder)} prompt='...', or {start} to start another run from them. Without the "
            "optimizer's state resume= cannot go on from them."
        )
    except OSError as error:
        left = f"Nor can {folder}: {error.strerror}. Make room."
    if ranks.rank == 0:
        with suppress(OSError):  # the weights are what matters
            _report(training, output_dir, summary)
            _picture(training, run, output_dir, summary, choices)
    return Refused(f"{training.saves.ended_by} {left} {checkpoint.going_on(training.saves.folder)}")
