"""Times the training of a model with 1.24B parameters with alternative kernels: Liger's norm, rotary embedding and
SwiGLU, torch's flash attention, and torch's cuDNN attention.

All rows use the plain loop. Different kernels round differently, so `found` has the resulting difference between the
losses, in addition to the ratio of the speeds.
"""

from collections.abc import Callable, Iterator
from functools import partial
from unittest.mock import patch

from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import loops as others
from benchmarks.card.beside import NAME, PLAIN, compared, other
from benchmarks.card.blocks import Blocks, in_turns
from benchmarks.card.case import Here

ATTENTIONS = {"flash attention": SDPBackend.FLASH_ATTENTION, "cuDNN's attention": SDPBackend.CUDNN_ATTENTION}
FUSED = ("LigerRMSNorm", "LigerSwiGLUMLP")


def swapped(here: Here) -> Iterator[dict]:
    """Yields the row of the plain loop with its own kernels, then its row with each of the alternatives. The loops run
    in turns."""
    kernels: dict[str, Callable] = {}
    if here.on_card:  # a CPU has neither kernel
        kernels |= {f"{PLAIN}, {name}": partial(with_attention, one) for name, one in ATTENTIONS.items()}
    kernels[f"{PLAIN}, Liger's norm, rotary embedding and SwiGLU"] = with_liger
    # The plain loop is last, so that `in_turns` yields its row first: the other rows are compared with it.
    kernels[PLAIN] = others.plain
    runs, plain = {by: partial(_run, here, loop, by) for by, loop in kernels.items()}, {}
    for by, row in in_turns(runs, here):
        plain = row if by == PLAIN else plain
        yield (
            row
            | {"run": NAME, "by": by}
            | ({} if by == PLAIN else {"found": compared(row, plain, "speed over plain's")})
        )


def _run(here: Here, loop: Callable, by: str) -> dict:
    return other(here, loop, by, watch=Blocks(here, 8 if here.on_card else 2))


def with_liger(loop: others.Materials, watch: Blocks) -> None:
    """Trains with Liger's kernels. Raises: SystemExit: Liger has not replaced all modules of FUSED in this model."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from transformers.models.llama import modeling_llama

    # Liger replaces these functions and classes for the whole process; `patch` restores the originals
    own = {name: getattr(modeling_llama, name) for name in ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP")}
    with patch.multiple(modeling_llama, **own):
        _apply_liger_kernel_to_instance(
            loop.network, rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False
        )
        if missing := [part for part in FUSED if not _is_in(loop.network, part)]:
            raise SystemExit(f"Liger has not replaced {', '.join(missing)}.")
        others.plain(loop, watch)


def _is_in(network: nn.Module, name: str) -> bool:
    """Returns True if the qualified name of any module's forward method begins with `name`."""
    forwards = (getattr(module.forward, "__qualname__", "") for module in network.modules())
    return any(forward.startswith(name) for forward in forwards)


def with_attention(backend: SDPBackend, loop: others.Materials, watch: Blocks) -> None:
    with sdpa_kernel(backend):
        others.plain(loop, watch)
