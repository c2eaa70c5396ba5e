"""Implements `generate=<folder>`: an exported model, an adapter or a run's model/ continues `prompt=`."""

import logging
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from lowmem.config.instantiate import instantiate
from lowmem.config.settle import Run
from lowmem.config.typed_lines import in_shell
from lowmem.model import loading
from lowmem.model.generation import TextGenerator, printable, prompt_ids
from lowmem.system.errors import Refused
from lowmem.system.quiet_libraries import quiet
from lowmem.techniques.adapter.lora import base_dtype, load
from lowmem.training.task import is_model, with_model

log = logging.getLogger(__name__)


def generate(run: Run) -> str:
    """Returns the model's continuation of the prompt, which is a user's turn if the tokenizer has a chat template.

    Raises:
        Refused: there is no model, it cannot be read, or it is an adapter that does not name its base.
    """
    quiet()
    folder = _folder(Path(run.generate).expanduser())
    network, tokenizer = _loaded(with_model(run, str(folder), "generate"))
    ids = prompt_ids(tokenizer, run.prompt, chat=tokenizer.chat_template is not None)
    set_seed(run.seed)
    network.to(run.runs_on).eval()
    text = printable(TextGenerator(network, tokenizer).continuation(ids, run.max_new_tokens, run.temperature))
    if not text.strip():
        log.warning(
            f"generate={run.generate}: after this prompt the model writes nothing that can be seen: it ends at once, "
            "or writes blanks. Type another prompt=, or temperature=0.8 to draw less likely tokens."
        )
    return text


def _folder(place: Path) -> Path:
    """Returns the folder of the model: model/ of a run."""
    for folder in (place, place / "model"):
        if is_model(str(folder)):
            return folder
    raise Refused(
        f"generate={place}: no model is here, nor in its model/. Give an exported model, or export that of a run: "
        f"{in_shell('export', place)}."
    )


def _loaded(run: Run) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Returns the model in the dtype of its file; an adapter with its base, in 4 bits if it was trained so."""
    adapter = run.adapter.arguments.get("path")
    described = loading.Described(run.model, loading.architecture(run.model))
    network = loading.load(described, base_dtype(adapter) or described.config.dtype or torch.float32)
    instantiate(run.adapter)(network)
    if adapter:
        load(network, adapter)
    return network, loading.tokenizer_of(run)
