"""Compiles a model's blocks: torch.compile fuses the operators of a block, which saves passes over memory and time.

Only the `forward` of each block is compiled. Its hooks and its checkpoint stay outside of the compiled code, so weights
may stream, shard and be computed again as they are without it. Blocks that do the same share one graph, so the time
for compilation does not grow with depth. It is one graph per block, and not one for the model: a graph in which the
same blocks are computed twice would hold what several of them store at once (pytorch issue 193193).

Evaluations and samples are not compiled: their shapes differ from call to call, and each would be compiled anew.

Source: pytorch.org/docs/stable/generated/torch.compile.html, "regional compilation".
"""

from collections.abc import Callable
from functools import wraps

import torch
from torch import nn

from lowmem.model.blocks import blocks
from lowmem.system.errors import Refused
from lowmem.system.torch_private import allow_graphs, compilation_errors

# Graphs of one kind of block: micro-batches have one shape, and a few others at the end of an epoch. From the second
# shape on torch lets sizes vary. Models with several kinds of blocks have as many graphs for each kind.
MOST_GRAPHS = 64


def none(model: nn.Module) -> None:
    """Leaves blocks as they are."""


def compile_blocks(model: nn.Module, backend: str) -> None:
    """Compiles the forward pass of each block, and with it its backward pass, when training first calls it.

    Args:
        backend: inductor generates code; aot_eager only makes the graphs, without a compiler.
    """
    torch.compiler.reset()  # code that earlier jobs of a sweep compiled would count against the limit of graphs
    for block in blocks(model):
        block.forward = _compiled(block, backend)


def _compiled(block: nn.Module, backend: str) -> Callable:
    plain = block.forward
    compiled = torch.compile(plain, fullgraph=True, backend=backend)

    @wraps(plain)
    def forward(*args, **kwargs) -> object:
        if not block.training or not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        try:
            with allow_graphs(MOST_GRAPHS):
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
