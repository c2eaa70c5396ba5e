"""Compares the files of published weights with the model class that reads them, before a weight is loaded.

transformers drops tensors that its class has no place for, and a configuration may tie a head of which the files hold
another one. Headers say what the files hold: names, shapes and dtypes, some kilobytes. They are loaded into a model
without memory, as transformers would load the files, so that renamed tensors and experts that it joins are understood.
"""

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter

from lowmem.system.torch_private import all_unexpected

ROWS = 4096  # of two embeddings, compared at once
# buffers that earlier versions wrote beside the weights: models compute them
_BUFFERS = re.compile(r"(^|\.)(inv_freq|position_ids|(attn|attention)\.(masked_)?bias)$")
_TRAINABLE = {"F64", "F32", "F16", "BF16"}


class Stored(NamedTuple):
    """A tensor in a file, by its header."""

    file: Path
    shape: list[int]
    dtype: str  # by the names of safetensors, such as BF16


class Compared(NamedTuple):
    """Describes in what the files and the model class differ."""

    unused: list[str]  # tensors that the class has no place for
    beyond: str | None  # one of them that belongs to a layer which the configuration does not have
    layers: int  # lower bound of the layers in the files; 0: no tensor is beyond
    own_head: bool  # the configuration ties the head, and the files hold another one


_compared: dict[tuple, Compared] = {}


def headers(folder: Path) -> dict[str, Stored]:
    """Returns name -> tensor that transformers would read from a folder: the tensors of one file, or of an index."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    files = [single] if single.is_file() else []
    if not files and index.is_file():
        files = [
            folder / name for name in sorted({*json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
        ]
    return {
        name: tensor for file in filter(Path.is_file, files) for name, tensor in _header(file, *_stamp(file)).items()
    }


def _stamp(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns


@cache  # a search for a recipe asks many times
def _header(file: Path, size: int, changed: int) -> dict[str, Stored]:
    """Returns the tensors of a file by name. Args: size, changed: of this file, which another one may replace."""
    with safe_open(file, "pt") as tensors:
        names = tensors.keys()
        parts = {name: tensors.get_slice(name) for name in names}
        return {name: Stored(file, part.get_shape(), part.get_dtype()) for name, part in parts.items()}


def quantised_as(stored: dict[str, Stored]) -> str | None:
    """Returns the dtype of weights that cannot be trained; None: all can."""
    kinds = (tensor.dtype for name, tensor in stored.items() if name.endswith("weight"))
    return next((kind for kind in kinds if kind not in _TRAINABLE), None)


def named(said: dict) -> str:
    """Returns in words how a configuration's `quantization_config` says that files are quantised."""
    bits = next((said[key] for key in ("bits", "w_bit", "wbits", "weight_bits") if said.get(key)), None)
    bits = bits or (4 if said.get("load_in_4bit") else 8 if said.get("load_in_8bit") else None)
    method = said.get("quant_method") or ("bitsandbytes" if bits else "quantization_config")
    return f"{method}, {bits} bits" if bits else method


def compare(folder: Path, config: PretrainedConfig) -> Compared | None:
    """Returns in what a folder's files differ from the model class; None: there are none, the class is in the folder
    itself, or it cannot load them, and `loading.load` will say why."""
    stored = headers(folder)
    if not stored or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    files = sorted({tensor.file for tensor in stored.values()})
    key = (*((file, *_stamp(file)) for file in files), config.to_json_string(use_diff=False))
    if key not in _compared:
        try:
            _compared[key] = _compare(config, stored)
        except Exception:  # whatever a class raises that cannot be built of this configuration
            return None
    return _compared[key]


def joins_tensors(config: PretrainedConfig) -> bool:
    """Return True if transformers joins tensors of the published files, such as the experts of a block, into one.

    A joined tensor is in memory, where another tensor would be pages of its file.
    """
    conversions = get_checkpoint_conversion_mapping(config.model_type) or ()
    return any(isinstance(conversion, WeightConverter) for conversion in conversions)


def _compare(config: PretrainedConfig, stored: dict[str, Stored]) -> Compared:
    tensors = {name: torch.empty(tensor.shape, device="meta") for name, tensor in stored.items()}
    kinds = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    kind = kinds[0] if isinstance(kinds, Sequence) else kinds
    how = {"config": config, "state_dict": tensors, "device_map": "meta", "output_loading_info": True}
    with all_unexpected() as unexpected, torch.random.fork_rng(devices=[]):
        model, info = kind.from_pretrained(None, **how)
    unused = sorted(name for name in unexpected if not _BUFFERS.search(name))
    numbers = {name: _layer_beyond(model, name) for name in sorted(info["unexpected_keys"])}
    beyond = {name: number for name, number in numbers.items() if number is not None}
    return Compared(unused, next(iter(beyond), None), 1 + max(beyond.values(), default=-1), _own_head(model, stored))


def _layer_beyond(model: PreTrainedModel, name: str) -> int | None:
    """Returns the number of a layer that a list of the model does not have; None: the tensor is none of such a layer.
    Layers that predict several tokens are counted behind the others, and no causal model class reads them."""
    predict = getattr(model.config.get_text_config(decoder=True), "num_nextn_predict_layers", None) or 0
    for found in re.finditer(r"(?<=\.)\d+(?=\.)", name):
        place, number = name[: found.start() - 1], int(found.group())
        blocks = _submodule(model, place) or _submodule(model, f"{model.base_model_prefix}.{place}")
        if isinstance(blocks, nn.ModuleList) and number >= len(blocks) + predict:
            return number
    return None


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _own_head(model: PreTrainedModel, stored: dict[str, Stored]) -> bool:
    """Returns whether the files hold different tensors where the configuration ties them."""

    def in_files(name: str) -> str | None:
        names = (name, name.removeprefix(f"{model.base_model_prefix}."))
        return next((each for each in names if each in stored), None)

    pairs = [(in_files(name), in_files(other)) for name, other in model.all_tied_weights_keys.items()]
    return any(_differ(stored, *pair) for pair in pairs if None not in pair)


def _differ(stored: dict[str, Stored], name: str, other: str) -> bool:
    """Returns whether two tensors of the files are different, read in pieces."""
    one, two = stored[name], stored[other]
    if name == other or one.shape != two.shape:
        return name != other
    with safe_open(one.file, "pt") as first, safe_open(two.file, "pt") as second:
        parts, others = first.get_slice(name), second.get_slice(other)
        rows = range(0, one.shape[0], ROWS)
        return any(not torch.equal(parts[start : start + ROWS], others[start : start + ROWS]) for start in rows)
