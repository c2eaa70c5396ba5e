"""`generate=<folder>`: what an exported model, an adapter or a run's model/ writes behind `prompt=`."""

import logging
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from lowmem import model
from lowmem.adapter.lora import base_dtype, load
from lowmem.errors import Refused
from lowmem.generation import TextGenerator, printable, prompt_ids
from lowmem.instantiate import instantiate
from lowmem.overrides import in_shell
from lowmem.quiet import quiet
from lowmem.settle import Run
from lowmem.task import is_model, with_model

log = logging.getLogger(__name__)


def generate(run: Run) -> str:
    """What the model writes behind the prompt, which is a user's turn where its tokenizer has a chat template.

    Raises:
        Refused: no model there; one that cannot be read; an adapter that does not say what it stands on.
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
            f"generate={run.generate}: behind this prompt the model writes nothing that can be seen: it ends at once, "
            "or writes blanks. Type another prompt=, or temperature=0.8 to draw less likely tokens."
        )
    return text


def _folder(named: Path) -> Path:
    """Of a run its model/."""
    for folder in (named, named / "model"):
        if is_model(str(folder)):
            return folder
    raise Refused(
        f"generate={named}: no model is here, nor a model/ in it. Give an exported model, or write that of a run: "
        f"{in_shell('export', named)}."
    )


def _loaded(run: Run) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """In the dtype of its file; an adapter beside what it was trained on, 4 bits where that had them."""
    adapter = run.adapter.arguments.get("path")
    described = model.Described(run.model, model.architecture(run.model))
    network = model.load(described, base_dtype(adapter) or described.config.dtype or torch.float32)
    instantiate(run.adapter)(network)
    if adapter:
        load(network, adapter)
    return network, model.tokenizer_of(run)
