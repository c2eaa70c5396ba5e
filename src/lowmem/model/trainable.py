"""The trainable parameters of a model: they alone have gradients, state and masters, and are in a checkpoint.

Where nothing is frozen, that is every parameter. Otherwise the frozen base is not written with every checkpoint: a
resume builds it again, from the same files or the same seed, and a digest in the checkpoint tells whether it is the
same.
"""

from collections.abc import Callable, Mapping
from hashlib import sha256

import torch
from torch import Tensor, nn

SAMPLE = 4096  # elements of each tensor that the digest reads, evenly spread: 8B parameters take no second


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns (name, parameter) of each that requires a gradient, a tied one once."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def parameters(model: nn.Module) -> int:
    """Returns the number of parameters, frozen ones too. A `Packed` layer says how many its packed bits stand for."""
    return sum(p.numel() for p in model.parameters()) + sum(packed(model))


class Packed:
    """The base class of layers that hold a matrix in fewer bits than any dtype of torch's parameters: in buffers, which
    have no gradient."""

    packed_elements: int
    transposed: bool  # it replaces a Conv1D, whose matrix is (in, out)


def stored_weights(module: nn.Module) -> list[Tensor]:
    """Returns the tensors in which a module stores its weights: parameters, and the bits and scales of `Packed`
    layers."""
    every = (layer for layer in module.modules() if isinstance(layer, Packed))
    return [*module.parameters(), *(buffer for layer in every for buffer in layer.buffers(recurse=False))]


def packed(model: nn.Module) -> list[int]:
    """Returns the number of elements of each matrix that a `Packed` layer holds."""
    return [module.packed_elements for module in model.modules() if isinstance(module, Packed)]


def trains_everything(model: nn.Module) -> bool:
    """Returns whether no parameter is frozen."""
    return all(p.requires_grad for p in model.parameters())


def checkpoint_state(model: nn.Module) -> dict[str, Tensor]:
    """Returns the entries of the state_dict that a checkpoint holds: all of them, or, where a parameter is frozen, the
    trainable ones under all of their names, and the buffers of modules that have one."""
    everything = model.state_dict()
    if trains_everything(model):
        return everything
    names = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    for path, module in model.named_modules(remove_duplicate=False):
        if trainable(module):
            names |= {f"{path}.{name}".lstrip(".") for name, _ in module.named_buffers(recurse=False)}
    return {name: tensor for name, tensor in everything.items() if name in names}


def digest_of_base(model: nn.Module, sent_as: Callable[[Tensor], torch.dtype]) -> str | None:
    """Returns a digest of the names, shapes, dtypes and numbers that a checkpoint does not hold; None: it holds all.
    Args: sent_as: returns the dtype in which the run has a tensor."""
    stored = checkpoint_state(model)
    base = {name: tensor for name, tensor in model.state_dict().items() if name not in stored}
    return digest(base, sent_as) if base else None


def digest(tensors: Mapping[str, Tensor], sent_as: Callable[[Tensor], torch.dtype]) -> str:
    """Returns a digest of names, shapes, dtypes and some of the numbers. Args: sent_as: see `digest_of_base`."""
    read = sha256()
    for name, tensor in tensors.items():
        flat = tensor.detach().flatten()
        some = flat[:: 1 + flat.numel() // SAMPLE].cpu().to(sent_as(tensor)).contiguous()
        read.update(f"{name} {tuple(tensor.shape)} {some.dtype}".encode())
        read.update(some.view(torch.uint8).numpy().tobytes())
    return read.hexdigest()
