"""Checks that the result for a row or document does not depend on the lengths of other rows or documents.

Some models change their rotary embedding beyond a length in their config, depending on the longest row of a call: with
`longrope`, Phi-3 uses other angles for all positions if one position is beyond the original length, and dynamic NTK
scales all angles by the longest length so far. Then the result for a short document would depend on the documents it is
batched with. `depends_from` evaluates only the rotary embeddings, at single positions on both sides of each such
length, which is cheap at any length.

Other lengths count tokens of a row: a sliding window, an attention chunk, a scale by position. Testing whether these
restart at each document with a real row would cost as much as a step. `shortened` reduces these lengths, so that a few
tokens are enough.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowmem.system.errors import Refused

ALIKE = 1e-4  # tolerance of cosines and sines; different angles differ by a thousand times more at some frequency
# Names of lengths in configs and modules.
OF_POSITIONS = ("original_max_position_embeddings", "max_position_embeddings")
OF_A_ROW = ("sliding_window", "attention_chunk_size", "floor_scale", "index_topk", "window_size")

Angles = Callable[[Tensor], Tensor]  # positions (B, T) -> cosines and sines (B, T, D)


def check_rows(model: PreTrainedModel, longest: int, rows: int) -> None:
    """Checks rows that are padded to the longest row of their micro-batch.

    Args:
        model: the model.
        longest: tokens of the longest row of the run.
        rows: rows per micro-batch.

    Raises:
        Refused: a row depends on other rows of its micro-batch, or on earlier micro-batches.
    """
    if (length := depends_from(model, longest, together=rows > 1)) is None:
        return
    alone = rows > 1 and depends_from(model, longest, together=False) is None
    raise Refused(
        f"data.packing=padded: if a row is longer than {length:,} tokens, {type(model).__name__} changes the rotary "
        f"embedding (RoPE) of all rows, so rows would depend on each other. Type seq_len={length}"
        f"{' or, unless the data are pairs, batch_size=1' * alone}."
    )


def check_documents(model: PreTrainedModel, longest: int) -> None:
    """Checks rows with several documents. Args: model: the model; longest: tokens of a row.

    Raises:
        Refused: a document depends on other documents of its micro-batch.
    """
    if (length := depends_from(model, longest, together=True)) is None:
        return
    alone = depends_from(model, longest, together=False) is None
    raise Refused(
        f"data.packing=documents: if a document or the padding of a row is longer than {length:,} tokens, "
        f"{type(model).__name__} changes the rotary embedding (RoPE) of all documents, so documents would depend on "
        f"each other. Type "
        f"seq_len={length}{' or, unless the data are pairs, data.packing=padded batch_size=1' * alone}."
    )


def depends_from(model: nn.Module, longest: int, together: bool) -> int | None:
    """Returns the smallest length beyond which the rotary embedding of a row depends on other rows; None: there is no
    such length below `longest`.

    Args:
        model: the model.
        longest: tokens of the longest row.
        together: also test rows in one call; if False, only a dependence on earlier calls is tested.
    """
    rotary = [module for module in model.modules() if hasattr(module, "rope_type")]  # theirs: transformers' embeddings
    for length in sorted(_lengths(model.config.to_dict(), OF_POSITIONS) if rotary else ()):
        if length < longest and any(_depends(angles, length, longest, together) for angles in _all_angles(rotary)):
            return length
    return None


def _lengths(config: Mapping[str, object], names: tuple[str, ...]) -> set[int]:
    """Returns the lengths with the given names in a config and its nested configs."""
    inside = [_lengths(value, names) for value in config.values() if isinstance(value, Mapping)]
    own = {config[name] for name in names if isinstance(config.get(name), int)}
    return own.union(*inside)


def _all_angles(rotary: list[nn.Module]) -> Iterator[Angles]:
    for module in rotary:
        of_layers = "layer_type" in inspect.signature(module.forward).parameters
        for more in [{"layer_type": kind} for kind in module.rope_type] if of_layers else [{}]:
            yield partial(_angles, module, more)


def _angles(module: nn.Module, more: dict[str, str], positions: Tensor) -> Tensor:
    device = next((buffer.device for buffer in module.buffers()), torch.device("cpu"))
    made = module(torch.zeros(1, device=device), positions.to(device), **more)  # fp32, the dtype of the first argument
    parts = made if isinstance(made, tuple) else (made,)
    return torch.cat([torch.view_as_real(part).flatten(-2) if part.is_complex() else part for part in parts], -1)


def _depends(angles: Angles, length: int, longest: int, together: bool) -> bool:
    """Returns True if the angles at position `length - 1` or `length` change when a row of `longest` tokens is in the
    call (`together`) or was in an earlier call."""
    far = torch.tensor([[longest - 1]])
    for own in torch.tensor([[[length - 1]], [[length]]]):
        angles(torch.zeros_like(own))  # a short call resets state of earlier calls
        alone, others = angles(own), []
        if together:
            others.append(angles(torch.cat([own, far]))[..., :1, :, :])
        angles(far)
        others.append(angles(own))
        angles(torch.zeros_like(own))
        if not all(torch.allclose(alone, other, rtol=0.0, atol=ALIKE) for other in others):
            return True
    return False


@contextmanager
def shortened(model: PreTrainedModel, above: int, longest: int, to: int) -> Iterator[bool]:
    """Context manager that sets all lengths that count tokens of a row to `to`, in configs and modules, if they are at
    least `above` and below `longest`. Yields True if there are any."""
    configs = {id(part.config): part.config for part in model.modules() if "config" in vars(part)}
    held = [
        (owner, name)
        for owner in (*model.modules(), *configs.values())
        for name in OF_A_ROW
        if isinstance(value := vars(owner).get(name), int) and above <= value < longest
    ]
    with ExitStack() as stack:
        for owner, name in held:
            stack.enter_context(patch.object(owner, name, to))
        yield bool(held)
