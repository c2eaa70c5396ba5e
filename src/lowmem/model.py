"""A Hugging Face causal language model, from its published weights or its architecture alone.

Weights come from safetensors files, memory-mapped and copied into the model one tensor at a time, in the dtype that the
precision asks for: never two copies in host memory.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lowmem.errors import Refused
from lowmem.stable_embedding import folded, stabilise


def architecture(
    name: str, pretrained: bool, trust_remote_code: bool, architecture: Mapping | None = None, **_: object
) -> PretrainedConfig:
    """The model's configuration: the yaml's own keys, on top of the published ones where weights are loaded.

    Raises:
        Refused: an unreachable model, a folder without weights, a key that the architecture does not have.
    """
    changes = {key: value for key, value in (architecture or {}).items() if key != "model_type"}
    if pretrained or architecture is None:
        config = _published(name, pretrained, trust_remote_code)
        _refuse_unknown(config, changes)
        config.update(changes)
        return config
    _refuse_unknown(_of_type(architecture["model_type"]), changes)
    return _of_type(architecture["model_type"], **changes)


def _of_type(model_type: str, **keys: object) -> PretrainedConfig:
    if model_type not in CONFIG_MAPPING:
        raise Refused(f"model.architecture.model_type={model_type}: transformers has no such architecture.")
    return AutoConfig.for_model(model_type, **keys)


def _refuse_unknown(config: PretrainedConfig, keys: Mapping) -> None:
    """transformers keeps any key it is given, so that a typing error would change nothing and say nothing."""
    unknown = [key for key in keys if not hasattr(config, key)]
    if unknown:
        raise Refused(
            f"model.architecture: {config.model_type} models have no {', '.join(unknown)}. "
            f"They have: {', '.join(sorted(key for key in config.to_dict() if not key.startswith('_')))}."
        )


def _published(name: str, pretrained: bool, trust_remote_code: bool) -> PretrainedConfig:
    folder = Path(name).expanduser()
    if folder.is_dir() and pretrained and not any(folder.glob("*.safetensors")):
        raise Refused(
            f"model.name={name}: this folder holds no *.safetensors weights. "
            "Give one that does, or type model.pretrained=false for a random start."
        )
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise Refused(
            f"model.name={name}: its configuration cannot be read ({reason}) Give a hub id that this machine "
            "reaches or a local folder, or type model.pretrained=false for a random start of a model of conf/model."
        ) from None


def build(
    config: PretrainedConfig,
    weights_dtype: torch.dtype,
    name: str,
    pretrained: bool,
    attention: str,
    trust_remote_code: bool,
    stable_embedding: bool = False,
    **_: object,
) -> PreTrainedModel:
    """The model on the host, in training mode, with every parameter in `weights_dtype`.

    Raises:
        Refused: weights that cannot be loaded or lack a tensor; an attention this machine does not have.
    """
    how = {"dtype": weights_dtype, "attn_implementation": attention, "trust_remote_code": trust_remote_code}
    try:
        model = _load(name, config, how) if pretrained else AutoModelForCausalLM.from_config(config, **how)
    except (ImportError, ValueError) as error:  # what transformers says of an attention it cannot use
        reason = str(error).strip().splitlines()[0]
        raise Refused(f"model.attention={attention}: {reason} Type model.attention=sdpa.") from None
    if stable_embedding:
        stabilise(model)
    wrong = {p.dtype for p in model.parameters()} - {weights_dtype}
    if wrong:
        raise Refused(f"model.name={name}: asked for {weights_dtype} weights and got {wrong}. Type precision=32.")
    # Models arrive in eval mode, where dropout and gradient checkpointing are silently off.
    return model.train()


def _load(name: str, config: PretrainedConfig, how: dict) -> PreTrainedModel:
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            name, config=config, use_safetensors=True, output_loading_info=True, **how
        )
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise Refused(f"model.name={name}: its weights cannot be loaded ({reason})") from None
    missing = sorted(info["missing_keys"]) + sorted(key for key, *_ in info["mismatched_keys"])
    if missing:
        raise Refused(
            f"model.name={name}: its files lack the weights {', '.join(missing[:5])} ({len(missing)} in all), which "
            "would start at random. Is model.architecture that of these weights?"
        )
    return model


def tokenizer(name: str, trust_remote_code: bool, **_: object) -> PreTrainedTokenizerBase:
    """The pretrained model's own."""
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise Refused(f"model.name={name}: its tokenizer cannot be read ({reason})") from None


def export(
    network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: str | None = None
) -> None:
    """Weights (safetensors), configuration and tokenizer in Hugging Face's format. Whole or not at all.

    Args:
        dtype: of the written weights, such as bfloat16; None: as they are.
    """
    draft = folder.with_name(f".{folder.name}.writing")
    with folded(network), _held_in(network, dtype):
        network.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(draft, folder)


@contextmanager
def _held_in(network: PreTrainedModel, dtype: str | None) -> Iterator[None]:
    held = {p: p.data for p in network.parameters()} if dtype else {}
    for p, data in held.items():
        p.data = data.to(getattr(torch, dtype))
    try:
        yield
    finally:
        for p, data in held.items():
            p.data = data


def positions(config: PretrainedConfig) -> int | None:
    """Longest sequence the architecture takes; None where it has no limit."""
    return getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
