"""Compares published weight files with the model class that reads them: before the weights are loaded, or afterwards if
loading has to download the files. `loading.py` and the planner call this module.

transformers silently ignores tensors that the model class does not use, and a config may tie the head to the embedding
although the files contain a separate head. The header of a file, some kilobytes, contains the names, shapes and dtypes
of the file's tensors. For the comparison, transformers itself loads tensors with these shapes on the meta device. So it
renames tensors and merges experts as it does with real weights.
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

ROWS = 4096  # maximum number of rows that a comparison reads at once from each of two matrices
# names of buffers that files of earlier transformers versions contain, and that model classes compute themselves
_BUFFERS = re.compile(r"(^|\.)(inv_freq|position_ids|(attn|attention)\.(masked_)?bias)$")
_TRAINABLE = {"F64", "F32", "F16", "BF16"}  # dtypes in which weights can be trained, by their names in safetensors


class TensorHeader(NamedTuple):
    """The header of a tensor in a file."""

    file: Path
    shape: list[int]
    dtype: str  # safetensors' name, such as BF16


class Compared(NamedTuple):
    """The differences between published files and their model class."""

    unused: list[str]  # names of tensors that the class does not use
    beyond: str | None  # name of a tensor of a layer that the config does not have; None: no such tensor
    layers: int  # number of layers in the files if `beyond` is set, otherwise 0
    own_head: bool  # True: the config ties the head, but the files contain a separate head


_compared: dict[tuple, Compared] = {}


def headers(folder: Path) -> dict[str, TensorHeader]:
    """Returns the headers, by name, of the tensors that transformers would read from a folder. These are the tensors in
    model.safetensors or, if this file does not exist, in all files that model.safetensors.index.json names."""
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


@cache  # because a search for a recipe calls this function many times
def _header(file: Path, size: int, changed: int) -> dict[str, TensorHeader]:
    """Returns the headers of a file's tensors, by name. Args: file: the file; size, changed: its size and modification
    time, which are part of the cache key."""
    with safe_open(file, "pt") as tensors:
        names = tensors.keys()
        parts = {name: tensors.get_slice(name) for name in names}
        return {name: TensorHeader(file, part.get_shape(), part.get_dtype()) for name, part in parts.items()}


def quantized_as(tensor_headers: dict[str, TensorHeader]) -> str | None:
    """Returns the dtype of the first tensor whose name ends in "weight" and whose dtype cannot be trained, such as
    F8_E4M3, or None if there is no such tensor."""
    kinds = (tensor.dtype for name, tensor in tensor_headers.items() if name.endswith("weight"))
    return next((kind for kind in kinds if kind not in _TRAINABLE), None)


def named(said: dict) -> str:
    """Returns a short description of a config's `quantization_config`, such as "gptq, 4 bits"."""
    bits = next((said[key] for key in ("bits", "w_bit", "wbits", "weight_bits") if said.get(key)), None)
    bits = bits or (4 if said.get("load_in_4bit") else 8 if said.get("load_in_8bit") else None)
    method = said.get("quant_method") or ("bitsandbytes" if bits else "quantization_config")
    return f"{method}, {bits} bits" if bits else method


def compare(folder: Path, config: PretrainedConfig) -> Compared | None:
    """Returns the differences between a folder's files and the model class. Returns None if the folder has no files
    that `headers` reads, if the model's code is in its repository instead of in transformers, or if the model cannot be
    built. In the last case, `loading.load` reports the reason."""
    tensor_headers = headers(folder)
    if not tensor_headers or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    files = sorted({tensor.file for tensor in tensor_headers.values()})
    key = (*((file, *_stamp(file)) for file in files), config.to_json_string(use_diff=False))
    if key not in _compared:
        try:
            _compared[key] = _compare(config, tensor_headers)
        except Exception:  # model classes raise errors of any class if they cannot be built from this config
            return None
    return _compared[key]


def joins_tensors(config: PretrainedConfig) -> bool:
    """Returns True if transformers joins tensors of the published files, such as the experts of a block, into one
    tensor. A joined tensor is copied into memory, while other tensors can stay in mapped pages of their file."""
    conversions = get_checkpoint_conversion_mapping(config.model_type) or ()
    return any(isinstance(conversion, WeightConverter) for conversion in conversions)


def _compare(config: PretrainedConfig, tensor_headers: dict[str, TensorHeader]) -> Compared:
    tensors = {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensor_headers.items()}
    kinds = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    kind = kinds[0] if isinstance(kinds, Sequence) else kinds
    how = {"config": config, "state_dict": tensors, "device_map": "meta", "output_loading_info": True}
    with all_unexpected() as unexpected, torch.random.fork_rng(devices=[]):
        model, info = kind.from_pretrained(None, **how)
    unused = sorted(name for name in unexpected if not _BUFFERS.search(name))
    numbers = {name: _layer_beyond(model, name) for name in sorted(info["unexpected_keys"])}
    beyond = {name: number for name, number in numbers.items() if number is not None}
    return Compared(
        unused, next(iter(beyond), None), 1 + max(beyond.values(), default=-1), _own_head(model, tensor_headers)
    )


def _layer_beyond(model: PreTrainedModel, name: str) -> int | None:
    """Returns the layer index in a tensor's name if the model has no layer with this index, otherwise None. Layers for
    multi-token prediction, which are numbered after all other layers, also give None, because causal model classes do
    not use them."""
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


def _own_head(model: PreTrainedModel, tensor_headers: dict[str, TensorHeader]) -> bool:
    """Returns True if the files contain both tensors of a tied pair, with different values or shapes."""

    def in_files(name: str) -> str | None:
        names = (name, name.removeprefix(f"{model.base_model_prefix}."))
        return next((each for each in names if each in tensor_headers), None)

    pairs = [(in_files(name), in_files(other)) for name, other in model.all_tied_weights_keys.items()]
    return any(_differ(tensor_headers, *pair) for pair in pairs if None not in pair)


def _differ(tensor_headers: dict[str, TensorHeader], name: str, other: str) -> bool:
    """Returns True if two tensors of the files have different values or shapes. Reads at most ROWS rows of each at
    once."""
    one, two = tensor_headers[name], tensor_headers[other]
    if name == other or one.shape != two.shape:
        return name != other
    with safe_open(one.file, "pt") as first, safe_open(two.file, "pt") as second:
        parts, others = first.get_slice(name), second.get_slice(other)
        rows = range(0, one.shape[0], ROWS)
        return any(not torch.equal(parts[start : start + ROWS], others[start : start + ROWS]) for start in rows)
