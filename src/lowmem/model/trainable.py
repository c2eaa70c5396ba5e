"""Lists the trainable parameters of a model, and the tensors that checkpoints contain. Only trainable parameters have
gradients, optimizer state and masters.

Checkpoints do not contain frozen parameters. A resumed run loads frozen parameters from the model's files, or
initializes them again from the seed. To detect changed values, the run then compares a digest of all tensors that the
checkpoint does not contain with the digest that the checkpoint stores.
"""

from collections.abc import Callable, Mapping
from hashlib import sha256

import torch
from torch import Tensor, nn

# maximum number of elements per tensor, evenly spaced, that a digest reads; for 8B parameters this takes less than 1 s
SAMPLE = 4096


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns a pair (name, parameter) for each parameter that requires a gradient. Tied parameters are listed once."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def parameters(model: nn.Module) -> int:
    """Returns the number of parameters, including frozen parameters. For a `Packed` layer, counts the elements that its
    matrix had before quantization."""
    return sum(p.numel() for p in model.parameters()) + sum(packed(model))


class Packed:
    """Base class of layers with a quantized matrix, which is stored in buffers."""

    packed_elements: int  # number of elements of the matrix before quantization
    transposed: bool  # True: the layer replaces a Conv1D, whose matrix is (in, out)
    largest: float  # largest absolute value in the dequantized matrix


def stored_weights(module: nn.Module) -> list[Tensor]:
    """Returns the tensors in which a module stores its weights: its parameters, and the buffers of `Packed` layers
    (packed values and scales)."""
    every = (layer for layer in module.modules() if isinstance(layer, Packed))
    return [*module.parameters(), *(buffer for layer in every for buffer in layer.buffers(recurse=False))]


def packed(model: nn.Module) -> list[int]:
    """Returns, for each `Packed` layer, the number of elements of its matrix."""
    return [module.packed_elements for module in model.modules() if isinstance(module, Packed)]


def trains_everything(model: nn.Module) -> bool:
    """Returns True if no parameter is frozen."""
    return all(p.requires_grad for p in model.parameters())


def checkpoint_state(model: nn.Module) -> dict[str, Tensor]:
    """Returns the part of the state_dict that checkpoints contain. If no parameter is frozen, this is the full
    state_dict. Otherwise it has the trainable parameters (a tied parameter under each of its names), and the buffers of
    each module that contains a trainable parameter, directly or in a submodule."""
    everything = model.state_dict()
    if trains_everything(model):
        return everything
    names = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    for path, module in model.named_modules(remove_duplicate=False):
        if trainable(module):
            names |= {f"{path}.{name}".lstrip(".") for name, _ in module.named_buffers(recurse=False)}
    return {name: tensor for name, tensor in everything.items() if name in names}


def digest_of_base(model: nn.Module, sent_as: Callable[[Tensor], torch.dtype]) -> str | None:
    """Returns a digest of the tensors of the state_dict that checkpoints do not contain, or None if checkpoints contain
    all of them. Args: model: the model; sent_as: returns the dtype in which the run uses a tensor."""
    stored = checkpoint_state(model)
    base = {name: tensor for name, tensor in model.state_dict().items() if name not in stored}
    return digest(base, sent_as) if base else None


def digest(tensors: Mapping[str, Tensor], sent_as: Callable[[Tensor], torch.dtype]) -> str:
    """Returns a SHA-256 digest of names, shapes, dtypes and a sample of the values. Args: tensors: name -> tensor;
    sent_as: see `digest_of_base`."""
    read = sha256()
    for name, tensor in tensors.items():
        flat = tensor.detach().flatten()
        some = flat[:: 1 + flat.numel() // SAMPLE].cpu().to(sent_as(tensor)).contiguous()
        read.update(f"{name} {tuple(tensor.shape)} {some.dtype}".encode())
        read.update(some.view(torch.uint8).numpy().tobytes())
    return read.hexdigest()
