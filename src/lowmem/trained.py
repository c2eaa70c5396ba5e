"""What of a model is trained: only that has gradients, state and masters, and only that is in a checkpoint.

Where nothing is frozen it is everything. Else the rest, the base, is not written with every checkpoint: a resume builds
it again, from the same files or the same seed, and a digest in the checkpoint tells whether it is the same.
"""

from hashlib import sha256

import torch
from torch import Tensor, nn

SAMPLE = 4096  # elements of each tensor that the digest reads, evenly spread: 8B parameters take no second


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter), a tied one once. Whoever holds, counts or saves something of each asks here."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def parameters(model: nn.Module) -> int:
    """How many, trained or not. A layer that holds some in fewer bits than torch's parameters says their number."""
    return sum(shape(p).numel() for p in model.parameters()) + sum(packed(model))


def shape(p: nn.Parameter) -> torch.Size:
    """Of the whole: of one that is gathered for its turn alone torch says that it is empty, and its strategy which
    shape it has then."""
    return getattr(p, "whole_shape", p.shape)


class Packed:
    """A layer that holds a matrix in fewer bits than torch's parameters have."""

    packed_elements: int
    transposed: bool  # it stands in the place of a Conv1D, whose matrix is (in, out)


def packed(model: nn.Module) -> list[int]:
    """Elements of each matrix that is no parameter of torch's."""
    return [part.packed_elements for part in model.modules() if isinstance(part, Packed)]


def is_whole(model: nn.Module) -> bool:
    """Whether every parameter is."""
    return all(p.requires_grad for p in model.parameters())


def saved(model: nn.Module) -> dict[str, Tensor]:
    """Of its state_dict what a checkpoint holds: everything, or where a parameter is frozen what is trained, under all
    of its names, with the buffers of modules in which something is."""
    everything = model.state_dict()
    if is_whole(model):
        return everything
    names = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    for path, part in model.named_modules(remove_duplicate=False):
        if trained(part):
            names |= {f"{path}.{name}".lstrip(".") for name, _ in part.named_buffers(recurse=False)}
    return {name: tensor for name, tensor in everything.items() if name in names}


def digest_of_base(model: nn.Module) -> str | None:
    """Of the names, shapes, dtypes and numbers that a checkpoint does not hold; None: it holds everything."""
    held, digest = saved(model), sha256()
    base = {name: tensor for name, tensor in model.state_dict().items() if name not in held}
    for name, tensor in base.items():
        flat = tensor.detach().flatten()
        some = flat[:: 1 + flat.numel() // SAMPLE].cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest() if base else None
