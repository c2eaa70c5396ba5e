"""`generate=<folder>`: what an exported model, an adapter or a run's model/ writes behind `prompt=`."""

import json
from pathlib import Path

import torch
from omegaconf import DictConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from lowmem import model
from lowmem.adapter.export import stands_on_4_bits
from lowmem.errors import Refused
from lowmem.generation import continuation, printable, prompt_ids
from lowmem.overrides import in_shell
from lowmem.quiet import quiet
from lowmem.settings import Settings

ADAPTER, MODEL = "adapter_config.json", "config.json"


def generate(cfg: DictConfig) -> str:
    """What the model writes behind the prompt, which is a user's turn where its tokenizer has a chat template.

    Raises:
        Refused: no model there; one that cannot be read; an adapter that does not say what it stands on.
    """
    quiet()
    folder = _folder(Path(cfg.generate).expanduser())
    network, tokenizer = _loaded(folder, cfg.model.trust_remote_code)
    ids = prompt_ids(tokenizer, cfg.prompt, chat=tokenizer.chat_template is not None)
    set_seed(cfg.seed)
    network.to(Settings(cfg).device).eval()
    return printable(continuation(network, tokenizer, ids, cfg.max_new_tokens, cfg.temperature))


def _folder(named: Path) -> Path:
    """Of a run its model/."""
    for folder in (named, named / "model"):
        if (folder / ADAPTER).is_file() or (folder / MODEL).is_file():
            return folder
    raise Refused(
        f"generate={named}: no model is here, nor a model/ in it. Give an exported model, or write that of a run: "
        f"{in_shell('export', named)}."
    )


def _loaded(folder: Path, trust_remote_code: bool) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """In the dtype of its file."""
    adapter = folder / ADAPTER
    place = _base(adapter) if adapter.is_file() else str(folder)
    spec = {"name": place, "pretrained": True, "trust_remote_code": trust_remote_code}
    config = model.architecture(**spec)
    network = model.build(config, config.dtype or torch.float32, attention="sdpa", **spec)
    if adapter.is_file():
        from peft import PeftModel  # five seconds of imports

        if stands_on_4_bits(folder):
            from lowmem.adapter.nf4 import quantise

            quantise(network)
        network = PeftModel.from_pretrained(network, folder)
    return network, model.tokenizer(**spec | {"name": str(folder)})


def _base(adapter: Path) -> str:
    base = json.loads(adapter.read_text()).get("base_model_name_or_path")
    if not base:
        raise Refused(
            f"generate={adapter.parent}: this adapter does not say which model it belongs to. Type merge=true with the "
            "run that made it, or write base_model_name_or_path into its adapter_config.json."
        )
    return base
