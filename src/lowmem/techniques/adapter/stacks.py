"""Fused experts with LoRA or in 4 bits: each stack of matrices is computed when the experts' forward pass reads it.

transformers stores fused experts as stacks, parameters of shape (experts, rows, columns), and the forward pass of the
experts reads each stack as an attribute. `read_when_used` replaces the class of a module with experts by a subclass
with the mixin `ComputedExperts`, in which these attributes are properties. Reading a property dequantizes the stack if
it is in 4 bits, and adds the product of its LoRA matrices if it has any. A computed stack exists only while the experts
compute. Autograd would keep the stack until backward, so the experts' forward pass is checkpointed and recomputed in
backward, even inside blocks that gradient_checkpointing= checkpoints. This costs one more forward pass of the experts.
"""

from collections.abc import Iterable
from copy import copy
from functools import cache
from math import sqrt

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowmem.model.experts import fused_experts

# Suffixes of the names of a stack's child modules
NF4 = "_nf4"  # child that stores the stack in 4 bits (`NF4Stack`)
LORA = "_lora"  # child with the trained LoRA matrices (`StackLoRA`), whose product is added to the stack


class ComputedExperts:
    """Mixin for a module with fused experts. During a forward pass, the first access to a stack's attribute computes
    the stack, and later accesses return this tensor. Outside of a forward pass, the attribute returns the stack's
    parameter, without LoRA. A quantized stack has no parameter: outside of a forward pass, each access computes the
    stack, with LoRA."""

    # during a forward pass: the dtype of products, and the stacks computed so far, by name; None outside of it
    _open: tuple[torch.dtype, dict[str, Tensor]] | None = None

    def forward(self, *args, **kwargs) -> Tensor:
        x = args[0] if args else next(iter(kwargs.values()))
        dtype = dtype_of_products(x)

        def computed(*args, **kwargs) -> Tensor:
            self._open = (dtype, {})
            try:
                return super(ComputedExperts, self).forward(*args, **kwargs)
            finally:
                self._open = None

        return checkpoint(computed, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    def __reduce__(self) -> tuple:
        """Makes the module copyable and picklable, although its class is created at run time."""
        return _module, (plain_class(self), tuple(sorted(computed_stacks(self)))), self.__dict__

    def unpacked(self, dtype: torch.dtype, device: str | None = None) -> nn.Module:
        """Returns a module of transformers' own class, in which the computed stacks are frozen parameters, with LoRA
        added. Other parameters are shared with this module.

        Args:
            dtype: dtype of the computed stacks.
            device: "meta": the computed stacks are meta tensors, without values; None: they are on the device of this
                module.
        """
        plain, names = copy(self), computed_stacks(self)
        plain.__class__ = plain_class(self)
        plain._parameters = dict(self._parameters)
        plain._modules = {name: part for name, part in self._modules.items() if not name.endswith((NF4, LORA))}
        for name in names:
            shape = stack_weights(self, name).shape
            stack = torch.empty(shape, dtype=dtype, device=device) if device else read(self, name, dtype)
            plain.register_parameter(name, nn.Parameter(stack, requires_grad=False))
        return plain


class StackLoRA(nn.Module):
    """The LoRA matrices of a stack, of rank r for each expert, with PEFT's shapes, names and initialization.

    Args:
        stack: the stack or its `NF4Stack`, of shape (experts, rows, columns); only shape and device are used.
        transposed: True: rows are the input features, as in gpt-oss. False: columns are the input features.
        r: rank.
        scaling: factor of the product of the two matrices.
    """

    def __init__(self, stack: Tensor, transposed: bool, r: int, scaling: float) -> None:
        super().__init__()
        experts, *ends = stack.shape
        inputs, outputs = ends if transposed else reversed(ends)
        self.transposed, self.experts, self.scaling = transposed, experts, scaling
        self.lora_A = nn.Parameter(torch.empty(experts * r, inputs, device=stack.device))
        self.lora_B = nn.Parameter(torch.zeros(outputs, r * experts, device=stack.device))
        nn.init.kaiming_uniform_(self.lora_A, a=sqrt(5))

    def added_to(self, stack: Tensor) -> Tensor:
        """Returns the sum of a stack and the scaled product of the LoRA matrices, computed in the dtype of the
        stack."""
        a = self.lora_A.to(stack.dtype).unflatten(0, (self.experts, -1))  # (experts, r, inputs)
        b = self.lora_B.to(stack.dtype).unflatten(1, (-1, self.experts)).permute(2, 0, 1)  # (experts, outputs, r)
        return torch.baddbmm(stack, *((a.mT, b.mT) if self.transposed else (b, a)), alpha=self.scaling)


def read_when_used(experts: nn.Module, names: Iterable[str]) -> None:
    """Changes a module's class, so that the attributes of stacks become properties that compute the stacks. Args:
    experts: the module with the stacks; names: names of stacks with an `_nf4` or `_lora` child."""
    experts.__class__ = _class(plain_class(experts), tuple(sorted({*computed_stacks(experts), *names})))


def adapt(experts: nn.Module, name: str, r: int, scaling: float) -> None:
    """Adds LoRA to a stack. Args: experts: the module with the stack; name: name of the stack, which is a 3-D parameter
    or is stored in 4 bits; r, scaling: see `StackLoRA`."""
    stack = StackLoRA(stack_weights(experts, name), getattr(experts, "is_transposed", False), r, scaling)
    experts.add_module(name + LORA, stack)
    read_when_used(experts, [name])


def stack_weights(experts: nn.Module, name: str) -> nn.Parameter | nn.Module:
    """Returns the `NF4Stack` of a quantized stack, otherwise the stack's parameter."""
    return experts._modules.get(name + NF4, experts._parameters.get(name))


def computed_stacks(experts: nn.Module) -> list[str]:
    """Returns the names of the stacks that are quantized or have LoRA, and are therefore computed when they are
    read."""
    parts = (part for part in experts._modules if part.endswith((NF4, LORA)))
    return list(dict.fromkeys(part.removesuffix(NF4).removesuffix(LORA) for part in parts))


def stacks_of(model: nn.Module) -> list[str]:
    """Returns the full names of all stacks of fused experts, including quantized stacks, in the order of the model."""
    stored = fused_experts(model)
    return [
        f"{name}.{key}"
        for name, module in model.named_modules()
        for key in dict.fromkeys([*computed_stacks(module), *stored.get(name, ())])
    ]


def adapted_stacks(model: nn.Module) -> list[str]:
    """Returns the full names of the stacks with LoRA, in the order of the model."""
    return [name.removesuffix(LORA) for name, module in model.named_modules() if isinstance(module, StackLoRA)]


def read(experts: nn.Module, name: str, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a stack (experts, rows, columns), dequantized if it is in 4 bits, and with LoRA added if it has any.

    Args:
        experts: the module with the stack.
        name: name of the stack.
        dtype: dtype of the result; None: the dtype of the parameter, or the dtype that a quantized stack had before its
            quantization.
    """
    base = stack_weights(experts, name)
    dtype = dtype or base.dtype
    stack = base.to(dtype) if isinstance(base, Tensor) else base.dequantized(dtype)
    added = experts._modules.get(name + LORA)
    return stack if added is None else added.added_to(stack)


def dtype_of_products(x: Tensor) -> torch.dtype:
    """Returns the dtype of matrix products with the input x: autocast's dtype if autocast is enabled, otherwise the
    dtype of x."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def plain_class(experts: nn.Module) -> type[nn.Module]:
    """Returns the class that transformers gave the module, without `ComputedExperts`."""
    return type(experts).__mro__[2] if isinstance(experts, ComputedExperts) else type(experts)


def _module(kind: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    made = _class(kind, names)
    return made.__new__(made)


@cache
def _class(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    def opened(name: str) -> property:
        def get(experts: ComputedExperts) -> Tensor:
            if experts._open is None:  # outside of a forward pass, code such as FSDP reads the parameter itself
                return experts._parameters[name] if name in experts._parameters else read(experts, name)
            dtype, found = experts._open
            if name not in found:
                found[name] = read(experts, name, dtype)
            return found[name]

        return property(get)

    return type(f"Computed{kind.__name__}", (ComputedExperts, kind), {name: opened(name) for name in names})
