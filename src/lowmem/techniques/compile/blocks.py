"""Compiles a model's blocks: torch.compile fuses the operators of a block, which saves passes over memory and time.

Only the `forward` of each block is compiled. Its hooks and its checkpoint stay outside of the compiled code, so weights
may stream, shard and be computed again as they are without it. Blocks that do the same share one graph, so the time
for compilation does not grow with depth. It is one graph per block, and not one for the model: a graph in which the
same blocks are computed twice would hold what several of them store at once (pytorch issue 193193).

With a budget, torch.compile also decides what each block keeps for backward: the fastest choice within a share of the
bytes. It is gradient checkpointing by the compiler, so gradient_checkpointing=none goes with it.

Evaluations and samples are not compiled: their shapes differ from call to call, and each would be compiled anew.

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

# Graphs of one kind of block: micro-batches have one shape, and a few others at the end of an epoch. From the second
# shape on torch lets sizes vary. Models with several kinds of blocks have as many graphs for each kind.
MOST_GRAPHS = 64


def none(model: nn.Module) -> None:
    """Leaves blocks as they are."""


def compile_blocks(model: nn.Module, backend: str, activation_memory_budget: float | None = None) -> None:
    """Compiles the forward pass of each block, and with it its backward pass, when training first calls it.

    Args:
        backend: inductor generates code; aot_eager only makes the graphs, without a compiler, and
            aot_eager_decomp_partition also decides what to keep.
        activation_memory_budget: the share of the activations' bytes that compiled code keeps for backward: torch
            recomputes the cheapest of the others. 0 keeps only a block's input; None: torch's default, which is 1.

    Raises:
        Refused: the budget is not a share, or this torch does not have it.
    """
    _check(activation_memory_budget)
    torch.compiler.reset()  # code that earlier jobs of a sweep compiled would count against the limit of graphs
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
    """Returns the first line of torch's message, and the one that explains it, if there is one."""
    first, *others = str(error).strip().splitlines() or [type(error).__name__]
    explained = [line.partition("Explanation: ")[2] for line in others if "Explanation: " in line]
    return ": ".join([first, *explained[:1]]).rstrip(".")
