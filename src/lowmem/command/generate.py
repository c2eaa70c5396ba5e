"""Implements `generate=<folder>`: continues `prompt=`, or each prompt of `sample_prompts=`, with an exported model, an
adapter, or the model/ folder of a run."""

import json
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lowmem.config.instantiate import instantiate
from lowmem.config.settle import Run
from lowmem.config.typed_lines import in_shell
from lowmem.model import loading
from lowmem.model.generation import TextGenerator, printable, prompt_ids
from lowmem.report.sample import prompts
from lowmem.system.errors import Refused
from lowmem.system.quiet_libraries import quiet
from lowmem.techniques.adapter.lora import base_dtype, load
from lowmem.training.task import is_model, with_model

log = logging.getLogger(__name__)


def generate(run: Run) -> str:
    """Returns the continuation of `prompt`. For `sample_prompts`, returns one line of JSON per prompt, with the keys
    prompt and text. If the tokenizer has a chat template, a text prompt becomes the message of a user.

    Raises:
        Refused: the folder has no model, or its model cannot be read; the adapter does not name its base model; or a
            prompt is invalid.
    """
    quiet()
    asked = [run.prompt] if run.prompt is not None else prompts(run.sample_prompts)
    folder = _folder(Path(run.generate).expanduser())
    network, tokenizer = _loaded(with_model(run, str(folder), "generate"))
    chats = tokenizer.chat_template is not None
    texts = _continued(run, network, tokenizer, [prompt_ids(tokenizer, prompt, chats) for prompt in asked])
    if run.prompt is None:
        rows = zip(asked, map(printable, texts), strict=True)
        return "\n".join(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False) for prompt, text in rows)
    text = printable(texts[0])
    if not text.strip():
        log.warning(
            f"generate={run.generate}: the completion of this prompt is empty or blank. Type another prompt=, or "
            "temperature=0.8 to sample less likely tokens."
        )
    return text


@torch.no_grad()
def _continued(
    run: Run, network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, each: Sequence[Tensor]
) -> list[str]:
    """Returns the continuation of each prompt. Sampling starts from the same seed for every prompt, so a continuation
    does not depend on the other prompts. With streamed weights, each copy of a block to the device serves up to
    `batch_size` prompts (1 with batch_size=auto), or a single prompt with weights.order=by_micro_batch. `each` has the
    token ids of each prompt, (1, T)."""
    device = torch.device(run.runs_on)
    # order=auto depends on gradient checkpointing, which does not matter without a backward pass
    chosen = run.order is not None and run.weights.arguments["order"] != "auto"
    order = {"order": "by_layer"} if run.streams and not chosen else {}
    weights = instantiate(run.weights)(network, head_in_tiles=run.loss_class.head_in_tiles, **order)
    weights.move_in(device)
    network.to(device).eval()
    writer, texts = TextGenerator(network, tokenizer, device), {}

    def write(number: int) -> None:
        texts[number] = writer.continuation(each[number], run.max_new_tokens, run.temperature)

    weights.start()
    try:
        writes = [partial(write, number) for number in range(len(each))]
        weights.run_forward_passes(writes, run.sized().batch_size, device, run.seed)
    finally:
        weights.stop()
    return [texts[number] for number in range(len(each))]


def _folder(place: Path) -> Path:
    """Returns the folder that contains the model: `place`, or its subfolder model/ if `place` is a run's folder. Raises
    Refused if neither contains a model."""
    for folder in (place, place / "model"):
        if is_model(str(folder)):
            return folder
    raise Refused(
        f"generate={place}: there is no model in this folder or in its model/ folder. Type the folder of an exported "
        f"model, or export the run: {in_shell('export', place)}."
    )


def _loaded(run: Run) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Returns the model and its tokenizer. An adapter is loaded together with its base model, which is quantized to 4
    bits if the adapter was trained on 4-bit weights. The dtype of the model is the base dtype that the adapter's folder
    names, or else the dtype of the model's configuration, or else fp32."""
    adapter = run.adapter.arguments.get("path")
    described = loading.Described(run.model, loading.architecture(run.model))
    dtype = base_dtype(adapter) or described.config.dtype or torch.float32
    network = loading.load(described, dtype, run.adapter_class.while_loading(adapter))
    instantiate(run.adapter)(network)
    if adapter:
        load(network, adapter)
    return network, loading.tokenizer_of(run)
