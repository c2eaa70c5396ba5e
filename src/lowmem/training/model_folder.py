"""Writes the folder model/ of a run: the trained model or its adapter, with a model card. Also converts the model to
GGUF (export_format=gguf) and uploads the folder (push=). `fit.py` calls this module.

`leave` writes the folder after all other results, because it is the largest: if it fills the disk, the other results
are complete. If a checkpoint could not be written, `without_checkpoint` writes the folder before the other results,
because the folder is then the only copy of the latest weights.
"""

from collections.abc import Mapping
from contextlib import suppress

from lowmem.config.settle import Command
from lowmem.config.typed_lines import in_shell
from lowmem.model.generation import end_tokens
from lowmem.saving import checkpoint, gguf
from lowmem.saving.export import ModelFolder, Weights
from lowmem.saving.export_adapter import export
from lowmem.saving.hub import push
from lowmem.saving.model_card import card
from lowmem.system.errors import NotPublished, Refused
from lowmem.system.fail_together import fail_together
from lowmem.techniques.strategy.contract import ONE_DEVICE
from lowmem.training import results
from lowmem.training.training import Training


def leave(training: Training, command: Command, summary: Mapping[str, object]) -> None:
    """Writes the folder. All ranks call this function, and rank 0 writes. If the model is sharded, the other ranks send
    their shards to rank 0.

    Raises:
        Refused: the folder cannot be written, a weight does not fit into `export_dtype`, or the adapter cannot be
            merged. The message says what to type.
    """
    try:
        _write(training, command, summary)
    except OSError as error:
        raise Refused(
            f"{command.folder / 'model'} cannot be written: {error.strerror}. All other files of this run are "
            f"complete: free disk space, then type {_export_again(command)}."
        ) from error
    except OverflowError as error:
        dtype = command.run.export_dtype
        raise Refused(
            f"export_dtype={dtype}: {error} All other files of this run are complete: type {_export_again(command)} "
            f"export_dtype={_wider(dtype)}."
        ) from error


def convert(command: Command) -> None:
    """Converts model/ to a GGUF file. Raises NotPublished if the conversion fails; the rest of the run is complete."""
    try:
        gguf.write(command.folder / "model")
    except (Refused, OSError) as error:
        why = f"{error.filename}: {error.strerror}." if isinstance(error, OSError) else error
        push = f" push={command.run.push}" if command.run.push else ""
        raise NotPublished(
            f"export_format=gguf: {why} The run is complete, and model/ has everything but a GGUF file. Convert it "
            f"with {gguf.CONVERTER}, or type {_export_again(command)} export_format=huggingface{push}."
        ) from error


def upload(command: Command) -> None:
    """Uploads model/ to the Hugging Face hub. Raises NotPublished if the upload fails; the rest of the run is
    complete."""
    push(command.folder / "model", command.run.push, _export_again(command))


def _export_again(command: Command) -> str:
    return in_shell("export", command.run.export or command.folder)


def _write(training: Training, command: Command, summary: Mapping[str, object]) -> None:
    """Writes the folder. If the model is sharded, all ranks take part, and all raise the errors below.

    Raises:
        OSError: the folder cannot be written.
        OverflowError: a weight does not fit into `export_dtype`.
        Refused: the adapter cannot be merged.
    """
    run, ranks = command.run, training.module.ranks
    if not ranks.divides and ranks.rank:
        return
    base = run.model.name if run.model.pretrained else None
    network, tokenizer = training.module.model, training.tokens.tokenizer
    network.generation_config.eos_token_id = end_tokens(tokenizer, network)
    weights = Weights(network, training.shard, ranks if ranks.divides else ONE_DEVICE)
    folder = ModelFolder(command.folder / "model", tokenizer, run.export_dtype, card(summary))
    with weights.writing() as writes:
        if writes:
            export(network, folder, run.merge, base, weights)


def _wider(dtype: str) -> str:
    return "float32" if dtype == "bfloat16" else "bfloat16"


def without_checkpoint(training: Training, command: Command, summary: Mapping[str, object]) -> Refused:
    """Writes the results of a run whose training has ended because a checkpoint could not be written: first the
    weights, which need less space than a checkpoint, and then the other results if the disk has space for them. All
    ranks call this function.

    Returns:
        The error that ends the run. Its message says what was written and how to continue.

    Raises:
        Refused: the adapter cannot be merged.
    """
    training.watchers.stop.waits_no_longer(summary["interrupted"])
    folder, ranks, ways = command.folder / "model", training.module.ranks, []
    try:
        with fail_together(ranks):
            _write(training, command, summary)
    except OSError as error:
        written = f"{folder} cannot be written either ({error.strerror})"
    except OverflowError as error:
        written = f"{folder} cannot be written with export_dtype={command.run.export_dtype} ({error})"
    else:
        start = (
            in_shell("adapter.path", folder)
            if summary["adapter_alone"]
            else f"model=hf {in_shell('model.name', folder)}"
        )
        written = f"only the weights were written, to {folder}"
        ways += [in_shell("evaluate", folder), f"{start} to start another run from these weights"]
    if ranks.rank == 0:
        with suppress(OSError):  # the other results are optional: the disk may be full
            results.report(training, command, summary)
            results.draw(training, command, summary)
    if checkpoints := checkpoint.complete(training.saves.folder):
        ways.append(f"{in_shell('resume', checkpoints[-1])} to continue from the last checkpoint")
    return Refused(
        f"{training.saves.ended_by}, so training ended at step {summary['steps']}, and {written}. Free disk space, and "
        f"type {', or '.join(ways) or 'the same line again'}."
    )
