"""Writes model/ of a run with an adapter: only the adapter, or the complete model with merged weights (merge=true, or a
base model that was initialized at random).

The folder of an adapter has PEFT's format: adapter_model.safetensors, and adapter_config.json, which names the base
model. A base model that was quantized to 4 bits differs from the published weights, and the adapter has learned to
compensate for the difference. So the adapter is merged into the dequantized 4-bit weights instead of the published
weights. Merging works layer by layer in fp32, and rounds each sum once.
"""

import json
import logging
from copy import deepcopy
from functools import partial
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import GENERATION_CONFIG_NAME

from lowmem.config.typed_lines import CONF
from lowmem.model.magnitude import Rounding
from lowmem.model.trainable import Packed
from lowmem.saving import export as plain
from lowmem.saving.export import ModelFolder, Weights
from lowmem.system.errors import Refused
from lowmem.techniques.adapter.lora import (
    BASE,
    BASE_DTYPE,
    CONFIG,
    EXPERTS,
    PREFIX,
    WEIGHTS,
    not_loaded_by_peft,
    parameters_of,
    stands_on_4_bits,
    targets_for_peft,
    tensors_for_peft,
)
from lowmem.techniques.adapter.stacks import ComputedExperts

log = logging.getLogger(__name__)


def export(
    network: PreTrainedModel, folder: ModelFolder, merged: bool, base: str | None, weights: Weights | None = None
) -> None:
    """Writes the adapter or the merged model, atomically. A model without an adapter is written with `export.export`.
    Merging changes `network`: it then has no adapter, and its weights are in host memory or, if the model is sharded,
    partly on the meta device.

    Args:
        network: the model.
        folder: the folder to write. If its dtype is None, a merged model is written in fp32, because rounding to the 16
            bits of the base model would change the outputs.
        merged: merge the adapter. An adapter of a base model that was initialized at random is always merged.
        base: the published model or the folder from which the base model was loaded; None if the base model was
            initialized at random.
        weights: reads the model's weights; None if the parameters themselves are in full precision.

    Raises:
        OverflowError: a weight is out of range of the folder's dtype.
        Refused: an adapted layer shares its weight with another layer, so the adapter cannot be merged.
        OSError: the folder cannot be written.
    """
    weights = weights or Weights(network)
    if not is_adapted(network):
        if merged:
            log.info("merge=true: this model has no adapter to merge, so it is exported unchanged.")
        plain.export(network, folder, weights)
        return
    if merged or base is None:
        if not merged:
            log.info(
                "merge=false: the base was initialized at random and exists only in this run, so the adapter is merged."
            )
        if weights.ranks.divides:
            _merge_later(network, weights)
            plain.export(network, folder._replace(dtype=folder.dtype or "float32"), weights)
            return
        for _, p in parameters_of(network):
            # With fp32 masters, matrices of the adapter that `freeze=` has frozen are in 16 bits, and trained matrices
            # are in fp32. PEFT multiplies the one by the other, so all need the same dtype.
            p.data = (full := weights.full(p)).to(torch.promote_types(full.dtype, torch.float32))
        network.cpu()  # because the merged model, by default in fp32, may not fit on the card
        merge(network, getattr(torch, folder.dtype or "float32"))
        plain.export(network, folder._replace(dtype=None))
    else:
        with folder.draft() as draft:
            write_adapter(network, draft, folder.dtype, base, weights)


def is_adapted(network: nn.Module) -> bool:
    return hasattr(network, "peft_config")


# --- merged ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def merge(network: PreTrainedModel, dtype: torch.dtype) -> None:
    """Merges the adapter in place, layer by layer, in fp32. 4-bit weights are dequantized.

    Args:
        network: the model, with all weights on this process.
        dtype: dtype of all weights after merging.

    Raises:
        OverflowError: a weight is out of range of the dtype.
        Refused: an adapted layer shares its weight with another layer.
    """
    _refuse_shared(network)
    rounding = Rounding(dtype)
    for name in _names(network):
        plain_layer = _merged(network.get_submodule(name))
        for key, p in plain_layer.named_parameters(recurse=False):
            p.data = rounding(f"{name}.{key}", p.data)
        network.set_submodule(name, plain_layer)
    for name, p in network.named_parameters():
        p.data = rounding(name, p.data)
    del network.peft_config
    rounding.tell()


def _refuse_shared(network: PreTrainedModel) -> None:
    """Raises Refused if an adapted layer shares its weight with another layer. In Zamba, such layers have separate
    adapters, and one weight cannot include the updates of several adapters."""
    from peft.tuners.lora import LoraLayer

    tied = getattr(network, "all_tied_weights_keys", None) or {}
    shared = {*tied, *tied.values()}
    for name, module in network.named_modules():
        if isinstance(module, LoraLayer) and f"{name}.weight" in shared:
            raise Refused(
                f"merge=true: {name} shares its weight with another layer of {type(network).__name__}, and each has "
                "a separate adapter, so the model cannot be merged. Type merge=false with a pretrained model."
            )


def _names(network: nn.Module) -> list[str]:
    """Returns the names of the layers that merging replaces: layers with an adapter, 4-bit layers, and stacks of
    experts that are in 4 bits or have LoRA."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # importing PEFT takes seconds

    names = [
        name
        for name, module in network.named_modules()
        if isinstance(module, BaseTunerLayer) or _computes_weights(module)
    ]
    # a base layer is replaced as part of the adapter layer around it
    return [name for name in names if not name.endswith(".base_layer")]


def _merged(layer: nn.Module) -> nn.Module:
    """Returns the ordinary layer, or stack of experts, that replaces an adapted or 4-bit one. Its weights are in fp32
    and include the adapter's update, if there is an adapter."""
    if _computes_weights(layer):
        return layer.unpacked(torch.float32)
    base = layer.get_base_layer()
    plain_layer = base.linear(torch.float32) if _computes_weights(base) else base
    plain_layer.weight.data = plain_layer.weight.data.float()
    layer.base_layer = plain_layer
    layer.merge()
    return base.as_found(plain_layer) if _computes_weights(base) else plain_layer


@torch.no_grad()
def _merge_later(network: PreTrainedModel, weights: Weights) -> None:
    """Replaces the adapted and 4-bit layers of a sharded model with ordinary layers. The weights of the ordinary layers
    are gathered and merged when the export reads them."""

    def gathered(layer: nn.Module, key: str) -> Tensor:
        full_weights = {id(p): nn.Parameter(weights.full(p).clone(), False) for p in layer.parameters()}
        copy = deepcopy(layer, full_weights).cpu()  # gathered weights are in host memory, so move buffers there too
        return getattr(_merged(copy), key).data

    _refuse_shared(network)
    for name in _names(network):
        layer = network.get_submodule(name)
        plain_layer = _without_numbers(layer)
        for key, p in plain_layer.named_parameters(recurse=False):
            if p.is_meta:
                weights.computed[p] = partial(gathered, layer, key)
        network.set_submodule(name, plain_layer)
    del network.peft_config


def _without_numbers(layer: nn.Module) -> nn.Module:
    """Returns the layer that replaces an adapted or 4-bit layer, with its weight on the meta device. The bias keeps its
    values."""
    base = layer if _computes_weights(layer) else layer.get_base_layer()
    if _computes_weights(base):
        return base.unpacked(torch.float32, "meta")
    plain_layer = deepcopy(base, {id(p): p for p in layer.parameters()})
    plain_layer.weight = nn.Parameter(torch.empty(base.weight.shape, device="meta"), False)
    return plain_layer


def _computes_weights(module: nn.Module) -> bool:
    """Returns True for a 4-bit layer, and for a stack of experts that is in 4 bits or has LoRA. Such layers compute
    their full weights in each forward pass."""
    from lowmem.techniques.adapter.nf4 import NF4Linear  # importing bitsandbytes takes seconds

    return isinstance(module, ComputedExperts | NF4Linear)


# --- only the adapter ------------------------------------------------------------------------------------------------


def write_adapter(network: PreTrainedModel, folder: Path, dtype: str | None, base: str, weights: Weights) -> None:
    """Writes the adapter in PEFT's format.

    Args:
        network: the model with the adapter.
        folder: an existing folder.
        dtype: dtype of the written weights; None: the dtype of the adapter.
        base: the published model or the folder from which the base model was loaded.
        weights: reads the model's weights.

    Raises:
        OverflowError: a weight is out of range of the dtype.
        OSError: a file cannot be written.
    """
    adapter = tensors_for_peft(network, {name: weights.full(p) for name, p in parameters_of(network)})
    tensors = {PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in adapter.items()}
    if dtype:
        rounding = Rounding(getattr(torch, dtype))
        tensors = {name: rounding(name, tensor) for name, tensor in tensors.items()}
        rounding.tell()
    if lost := not_loaded_by_peft(network, tensors):
        log.warning(
            f"model/: PEFT renames {len(lost)} tensors of {type(network).__name__} and will not load them, such as "
            f"{lost[0]}. adapter.path= of lowmem loads them; with merge=true the model needs no PEFT."
        )
    save_file(tensors, folder / WEIGHTS, {"format": "pt", **_base_of(network)})
    (folder / CONFIG).write_text(
        json.dumps(_peft_config(network, base), indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )
    # PEFT does not read this file, but it says which tokens end an answer. `save_pretrained` would reject contradictory
    # values of a published base model, such as a temperature without do_sample.
    (folder / GENERATION_CONFIG_NAME).write_text(network.generation_config.to_json_string(), encoding="utf-8")


def _base_of(network: PreTrainedModel) -> dict[str, str]:
    """Returns the entries of the weight file's header that describe a quantized base model. Returns an empty dict if
    the base model is not quantized."""
    from lowmem.techniques.adapter.nf4 import NF4Stack

    packed_layers = [module for module in network.modules() if isinstance(module, Packed)]
    if not packed_layers:
        return {}
    experts = any(isinstance(layer, NF4Stack) for layer in packed_layers)
    dtype = str(packed_layers[0].dtype).removeprefix("torch.")
    return BASE | {BASE_DTYPE: dtype} | (EXPERTS if experts else {})


def _peft_config(network: PreTrainedModel, base: str) -> dict:
    """Returns PEFT's configuration. Sets become sorted lists, so that equal adapters give equal files."""
    (config,) = network.peft_config.values()
    settings = config.to_dict() | {
        "base_model_name_or_path": str(Path(base).expanduser().absolute())
        if Path(base).expanduser().is_dir()
        else base,
        "inference_mode": True,
        "task_type": "CAUSAL_LM",
        "fan_in_fan_out": _has_conv1d(network),
        **targets_for_peft(network),
    }
    return {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}


def _has_conv1d(network: PreTrainedModel) -> bool:
    """Returns True if the base model stores some of its matrices transposed, as GPT-2 does."""
    return any(
        isinstance(module, Conv1D) or (isinstance(module, Packed) and module.transposed) for module in network.modules()
    )


# --- opened again ----------------------------------------------------------------------------------------------------


def base_of(folder: Path) -> str | None:
    """Returns the name or path of the base model in an adapter's configuration, or None if the configuration has
    none."""
    return json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")


def adapter_config_of(folder: Path) -> dict:
    """Returns the settings of the group `adapter` for a run that starts from the adapter in a folder: the contents of
    the yaml for this kind of adapter, with `path` set to the folder."""
    kind = "lora.DoRA" if json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("use_dora") else "lora.LoRA"
    kind = "qlora.QLoRA" if stands_on_4_bits(folder) else kind
    nodes = (yaml.safe_load(file.read_text(encoding="utf-8")) for file in sorted((CONF / "adapter").glob("*.yaml")))
    return next(node for node in nodes if node["_target_"] == f"lowmem.techniques.adapter.{kind}") | {
        "path": str(folder)
    }
