"""Compiles a model's blocks with torch.compile, which fuses the operators of a block. This saves memory traffic and
time.

Only the `forward` of each block is compiled. Hooks and activation checkpointing stay outside of the compiled code, so
streaming, sharding and recomputation work as they do without compilation. Blocks with equal code and shapes share a
graph, so compilation time hardly grows with depth. The model is not compiled as a single graph, because a graph that
contains checkpointed blocks would store the activations of several blocks at once (pytorch issue 193193).

With an activation memory budget, torch.compile also decides which activations each block saves for backward: within the
budget, it minimizes the time of recomputation. This is activation checkpointing by the compiler, so use the budget with
gradient_checkpointing=none.

Evaluations and samples run without compilation, because their shapes vary, and torch may compile again for a new shape.

Source: pytorch.org/docs/stable/generated/torch.compile.html, "regional compilation".
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps

import torch
from torch import nn

from lowmem.model.blocks import blocks
from lowmem.system.errors import Refused
from lowmem.system.torch_private import allow_graphs, compilation_errors, has_memory_budget, within_budget

# Number of graphs that torch may compile per kind of block, unless torch's own limit is higher. Rows that are packed to
# seq_len have one shape, except at the end of an epoch. With data.packing=padded, micro-batches differ in length. From
# the second shape on, torch compiles with dynamic sizes, so a few graphs are usually enough.
MOST_GRAPHS = 64


def none(model: nn.Module) -> None:
    """Does not compile anything."""


def compile_blocks(model: nn.Module, backend: str, activation_memory_budget: float | None = None) -> None:
    """Replaces the forward pass of each block by a version that torch compiles at its first call in training.

    Args:
        model: the model.
        backend: backend of torch.compile. inductor generates and compiles code. aot_eager runs the traced graphs
            without generated code, so it needs no C++ compiler. aot_eager_decomp_partition does the same, with
            inductor's decompositions and its rules for saving activations.
        activation_memory_budget: bytes that a block may save for backward, as a fraction of the bytes that torch saves
            by default, from 0 (only the block's input) to 1. torch chooses the activations that take the least time to
            recompute. None: torch's default of 1.

    Raises:
        Refused: the budget is not between 0 and 1; this version of torch does not support budgets; or the model has no
            list of blocks. Later, a call of a block in training raises Refused if torch.compile fails.
    """
    _check(activation_memory_budget)
    torch.compiler.reset()  # graphs of earlier jobs of a sweep would count toward MOST_GRAPHS
    for block in blocks(model):
        block.forward = _compiled(block, backend, activation_memory_budget)


def _check(budget: float | None) -> None:
    if budget is not None and not 0 <= budget <= 1:
        raise Refused(f"compile.activation_memory_budget={budget}: give a number between 0 and 1, or null.")
    if budget is not None and not has_memory_budget():
        raise Refused(
            f"compile.activation_memory_budget={budget}: torch {torch.__version__} does not have this setting. Type "
            "compile.activation_memory_budget=null gradient_checkpointing=every_layer."
        )


def _compiled(block: nn.Module, backend: str, budget: float | None) -> Callable:
    plain = block.forward
    compiled = torch.compile(plain, fullgraph=True, backend=backend)

    @wraps(plain)
    def forward(*args, **kwargs) -> object:
        if not block.training or not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        try:
            with allow_graphs(MOST_GRAPHS), nullcontext() if budget is None else within_budget(budget):
                return compiled(*args, **kwargs)
        except compilation_errors() as error:
            raise Refused(
                f"compile=blocks: torch.compile failed on {type(block).__name__} ({_reason(error)}). Type compile=none."
            ) from error

    return forward


def _reason(error: Exception) -> str:
    """Returns the first line of torch's error message, followed by the explanation in a later line, if any."""
    first, *others = str(error).strip().splitlines() or [type(error).__name__]
    explained = [line.partition("Explanation: ")[2] for line in others if "Explanation: " in line]
    return ": ".join([first, *explained[:1]]).rstrip(".")
