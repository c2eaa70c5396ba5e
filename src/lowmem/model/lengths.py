"""Checks that the result for a row or document does not depend on the lengths of other rows or documents.

Some models change their rotary embedding if the longest row of a call exceeds a length in their config. With
`longrope`, Phi-3 changes the angles of all positions in a call if one position is beyond the original length. With
dynamic NTK scaling, all angles depend on the longest row, which may belong to an earlier call. With such an embedding,
the result for a short document would depend on other documents, in its own or in an earlier micro-batch. `depends_from`
evaluates only the rotary embeddings, at a few positions for each of the config's lengths that OF_POSITIONS names. So
its cost does not grow with these lengths.

Other lengths in configs count tokens of a row: a sliding window, an attention chunk, a scale by position. A test must
show that such a count restarts at each document. With a full row, the test (`packed_attention.py`) would cost as much
as a training step. So `shortened` reduces these lengths, and a row of a few tokens suffices.
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

# Absolute tolerance for cosines and sines. If angles differ by more than rounding errors, at least one cosine or sine
# differs by a thousand times this tolerance.
ALIKE = 1e-4
# names of the keys in configs for lengths beyond which rotary embeddings may change
OF_POSITIONS = ("original_max_position_embeddings", "max_position_embeddings")
# lengths that count tokens of a row: names of their keys in configs, and of their attributes in modules
OF_A_ROW = ("sliding_window", "attention_chunk_size", "floor_scale", "index_topk", "window_size")

Angles = Callable[[Tensor], Tensor]  # positions (B, T) -> cosines and sines (B, T, D)


def check_rows(model: PreTrainedModel, longest: int, rows: int) -> None:
    """Checks that rows of a padded micro-batch do not depend on each other's lengths.

    Args:
        model: the model.
        longest: number of tokens in the longest row of the run.
        rows: number of rows per micro-batch.

    Raises:
        Refused: a row depends on the lengths of other rows, in its own or in an earlier micro-batch.
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
    """Checks that documents in packed rows do not depend on each other's lengths. Args: model: the model; longest:
    number of tokens in a row.

    Raises:
        Refused: a document depends on the lengths of other documents, in its own or in an earlier micro-batch.
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
    """Checks the config's lengths that OF_POSITIONS names, and returns the smallest one beyond which the rotary
    embedding of a row depends on the lengths of other rows. Returns None if no length below `longest` has this effect.

    Args:
        model: the model.
        longest: number of tokens in the longest row.
        together: True: test whether a row depends on other rows of its call, or on earlier calls; False: test only
            whether it depends on earlier calls.
    """
    rotary = [module for module in model.modules() if hasattr(module, "rope_type")]  # theirs: transformers' embeddings
    for length in sorted(_lengths(model.config.to_dict(), OF_POSITIONS) if rotary else ()):
        if length < longest and any(_depends(angles, length, longest, together) for angles in _all_angles(rotary)):
            return length
    return None


def _lengths(config: Mapping[str, object], names: tuple[str, ...]) -> set[int]:
    """Returns the lengths that a config and its nested configs store under the given names."""
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
    first, positions = torch.zeros(1, device=device), positions.to(device)  # the result has the dtype of `first`: fp32
    try:
        made = module(first, positions, **more)
    except IndexError:  # Qwen3.5 in transformers 5.17 needs the positions of three axes, which are equal for text
        made = module(first, positions.expand(3, *positions.shape), **more)
    parts = made if isinstance(made, tuple) else (made,)
    return torch.cat([torch.view_as_real(part).flatten(-2) if part.is_complex() else part for part in parts], -1)


def _depends(angles: Angles, length: int, longest: int, together: bool) -> bool:
    """Returns True if the angles at position `length - 1` or `length` depend on a row of `longest` tokens in an earlier
    call or, with `together`, in the same call."""
    far = torch.tensor([[longest - 1]])
    for own in torch.tensor([[[length - 1]], [[length]]]):
        angles(torch.zeros_like(own))  # a call with a short row resets the state of earlier calls
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
    """Context manager in which lengths that count tokens of a row (`OF_A_ROW`) are reduced, in configs and modules.
    Yields True if it has reduced at least one length.

    Args:
        model: the model.
        above, longest: lengths with above <= length < longest are reduced.
        to: the reduced length.
    """
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
