"""Quantizes published weights to NF4 while transformers loads them. Of the weights that are quantized here, only one at
a time is unquantized in memory: a matrix, or a stack of experts together with the tensors from which transformers
builds the stack.

If a model were quantized only after loading, all weights that are not memory-mapped from their files, such as joined
experts, would be in host memory unquantized at the same time: up to 57 GiB for a mixture of experts with 30B
parameters. transformers reads and converts tensors, joins experts into stacks, and then calls the quantizer for each
weight. The quantizer in this module creates the layers of `nf4.py`, with the codes that `nf4.quantize` would compute
after loading.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from lowmem.model.experts import fused_experts
from lowmem.model.linear_layers import linear_layers
from lowmem.model.trainable import Packed
from lowmem.techniques.adapter.nf4 import NF4Linear, pack_experts
from lowmem.techniques.adapter.stacks import NF4

METHOD = "lowmem_nf4"  # name of the quantizer in the registry of transformers


@register_quantization_config(METHOD)
class NF4WhileLoading(QuantizationConfigMixin):
    """The argument `quantization_config` of from_pretrained. Args: with_experts: see `nf4.quantize`."""

    def __init__(self, with_experts: bool = True) -> None:
        self.quant_method, self.with_experts = METHOD, with_experts


@register_quantizer(METHOD)
class NF4Quantizer(HfQuantizer):
    """Replaces each layer or stack of experts by its quantized version as soon as the weight is loaded.

    Some layers and stacks are left to `nf4.quantize`, which runs after loading: tied weights, weights that transformers
    loads in a dtype other than the model's dtype for the weight, and subclasses of nn.Linear with their own forward
    pass, which may compute more than a product. After loading, the quantizer's settings are removed from the model.
    """

    is_trainable = True

    def is_serializable(self) -> bool:
        return False

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs) -> None:
        tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
        matrices = {
            f"{name}.weight"
            for name, layer in linear_layers(model).items()
            if isinstance(layer, Conv1D) or type(layer).forward is nn.Linear.forward
        }
        experts = fused_experts(model) if self.quantization_config.with_experts else {}
        self.stacks = [f"{name}.{key}" for name, keys in experts.items() for key in keys]
        self.left = ({*matrices} | {*self.stacks}) - tied  # names of weights to quantize that are not loaded yet
        self.shapes = {name: p.shape for name, p in model.named_parameters()}

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs) -> bool:
        return param_name in self.left

    def get_quantize_ops(self) -> "Pack":
        return Pack(self)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs) -> None:
        # put stacks in the order of `nf4.quantize`, because a digest of the buffers depends on their order
        for name in self.stacks:
            experts, _, key = name.rpartition(".")
            parts = model.get_submodule(experts)._modules
            if key + NF4 in parts:
                parts[key + NF4] = parts.pop(key + NF4)
        for name, p in model.named_parameters():
            if p.shape != self.shapes[name]:  # transformers 5.17 does not check shapes if there is a quantizer
                raise RuntimeError(f"{name} has shape {tuple(p.shape)}, expected {tuple(self.shapes[name])}.")
        for module in model.modules():
            if isinstance(module, NF4Linear) and module.bias is not None:
                module.bias.requires_grad_(False)
            if isinstance(module, Packed):
                del module._is_hf_initialized
            if isinstance(module, PreTrainedModel):
                vars(module.config).pop("_is_quantized", None)
        self.remove_quantization_config(model)
        del model.is_quantized


class Pack(ConversionOps):
    """The operation that transformers calls with loaded tensors. It puts quantized layers and stacks into the model,
    and returns the tensors that it has not quantized."""

    def __init__(self, quantizer: NF4Quantizer) -> None:
        self.quantizer = quantizer

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Tensor | list[Tensor]], *, model: PreTrainedModel, missing_keys: set[str], **kwargs
    ) -> dict[str, Tensor | list[Tensor]]:
        others = {}
        for name in [*input_dict]:
            found = input_dict.pop(name)
            tensor = found[0] if isinstance(found, list) else found
            if name not in self.quantizer.left or not self._packs(model, name, tensor):
                others[name] = found
            else:
                missing_keys.discard(name)
            self.quantizer.left.discard(name)
        return others

    def _packs(self, model: PreTrainedModel, name: str, tensor: Tensor) -> bool:
        """Quantizes a weight, and replaces its layer or stack in the model. Returns False, without any effect, if the
        shape or dtype of `tensor` is not what the model expects."""
        place, _, key = name.rpartition(".")
        layer = model.get_submodule(place)
        expected = getattr(layer, key)  # on the meta device
        if (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
            return False
        layer.register_parameter(key, nn.Parameter(tensor, requires_grad=False))
        if isinstance(layer, nn.Linear | Conv1D):
            packed = NF4Linear(layer)
            model.set_submodule(place, packed)
        else:
            pack_experts(layer, [key])
            packed = layer
        for part in packed.modules():
            part._is_hf_initialized = True  # otherwise transformers would initialize the module again
        return True
