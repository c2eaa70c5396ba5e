"""Activation (gradient) checkpointing: saves the input of each segment of blocks, and recomputes the other activations.

Each yaml in conf/gradient_checkpointing selects a function of this module, which changes a model in place before
training. All of these functions except `none` raise Refused if the model has no list of blocks. With the other
functions, memory holds one boundary for each segment, which is the input (batch, tokens, width) of the segment's first
block. A segment's activations are all in memory only during the backward pass of this segment. `selective` and
`offload_attention` save further results. The recomputation costs at most one more forward pass, which adds up to a
third to the time of a step. Source: Chen et al. 2016, arXiv 1604.06174.

A segment is one block or several:

    one block         `Alone`: torch's non-reentrant checkpoint around the block's forward pass
    several blocks    `Segment`: a Hugging Face model calls its blocks one by one, with separate arguments. So a
                      pre-hook of the segment's first block opens torch's checkpoint, and a hook of the last block
                      closes it. In between, the checkpoint discards the tensors that autograd saves.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Cache

from lowmem.model.blocks import blocks
from lowmem.system.errors import Refused
from lowmem.system.random_state import captured, forked, restored
from lowmem.system.torch_private import open_checkpoint
from lowmem.techniques.gradient_checkpointing import selective as kept_results
from lowmem.techniques.gradient_checkpointing.boundary import Boundary, Chain, OnDevice


def none(model: nn.Module) -> None:
    """Changes nothing: autograd saves all activations."""


def every_layer(model: nn.Module) -> None:
    """Saves only the input of each block. For n blocks, memory holds n boundaries, and during backward also the
    activations of one block."""
    segments(model, 1)


def segments(model: nn.Module, k: int | None = None) -> None:
    """Saves only the input of each segment of blocks; backward recomputes one segment at a time.

    Args:
        model: the model.
        k: blocks per segment. For n blocks, memory holds n / k boundaries, and during backward also the activations of
            k blocks. None: about sqrt(n) segments of about sqrt(n) blocks.

    Raises:
        Refused: k is not a whole number of at least 1, or the model has no list of blocks.
    """
    if k is not None and (not isinstance(k, int) or k < 1):
        raise Refused(
            f"gradient_checkpointing.k={k}: a segment needs at least 1 block. Give a whole number of at least 1."
        )
    stack = blocks(model)
    count = max(1, round(math.sqrt(len(stack))))
    cuts = range(0, len(stack), k) if k else [len(stack) * i // count for i in range(count)]
    for start, end in pairwise([*cuts, len(stack)]):
        Alone(stack[start]) if end == start + 1 else Segment(stack[start:end])


def selective(model: nn.Module) -> None:
    """Saves the block inputs, and the results of matrix products and fused attention that the model does not change in
    place. Backward recomputes all other activations. This recomputation takes little time, except for experts that are
    computed by grouped products."""
    for block in blocks(model):
        Alone(block, contexts=kept_results.contexts)


def offload(model: nn.Module) -> None:
    """Like `every_layer`, but stores the block inputs in host memory. While backward computes block n + 1, the input of
    block n is copied back to the device."""
    chain = Chain()
    for number, block in enumerate(blocks(model)):
        Alone(block, boundary=partial(chain.make, number))


def offload_attention(model: nn.Module) -> None:
    """Like `offload`, but also stores the results of fused attention in host memory. So backward does not recompute
    attention, whose time grows with the square of the sequence length. Attention that does not run in one of torch's
    fused kernels, such as eager or flex attention, is still recomputed."""
    chain = Chain()
    for number, block in enumerate(blocks(model)):
        send = partial(chain.make, number)
        Alone(block, boundary=send, contexts=partial(kept_results.attention_contexts, send))


class Recomputed:
    """Base class of `Alone` and `Segment`. `_repeating` is True while the recomputation calls the blocks."""

    _repeating = False

    def _repeat(self, boundary: Boundary, calls: list["BlockCall"]) -> None:
        self._repeating = True
        try:
            hidden = boundary.fetch()
            with forked(hidden.device):
                for call in calls:
                    hidden = call.again(hidden)
        finally:
            self._repeating = False


class Alone(Recomputed):
    """A segment of one block.

    Args:
        block: the block, whose `forward` is replaced.
        boundary: creates the boundary that stores the block's input until backward.
        contexts: returns (context of the forward pass, context of the recomputation); passed to torch as `context_fn`.
    """

    def __init__(
        self,
        block: nn.Module,
        boundary: Callable[[Tensor], Boundary] = OnDevice,
        contexts: Callable = lambda: (nullcontext(), nullcontext()),
    ) -> None:
        self.block, self.boundary, self.contexts, self.forward = block, boundary, contexts, block.forward
        block.forward = self._checkpointed

    def _checkpointed(self, *args, **kwargs) -> object:
        if self._repeating or not self.block.training or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        _refuse_cache(self.block, args, kwargs)
        entered = _hidden(args, kwargs)
        version, boundary, call = entered._version, self.boundary(entered), BlockCall(self.block, args, kwargs)
        # A list, so that `run` can drop the call, whose arguments refer to the block's input. Until backward only the
        # boundary may refer to this input.
        first_call = [partial(self.forward, *args, **kwargs)]

        def run() -> object:
            return first_call.pop()() if first_call else self._repeat(boundary, [call])

        output = checkpoint(run, use_reentrant=False, preserve_rng_state=False, context_fn=self.contexts)
        _refuse_change(self.block, entered, version)  # a copy of the input to the host may still be in progress
        return output


class Segment(Recomputed):
    """A segment of several consecutive blocks, which saves only the input of the first block. If a block does not get
    the tensor that the previous block has returned, a new segment begins at this block."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        self.blocks = blocks
        self._pass: Iterator | None = None  # torch's checkpoint, while the segment is open
        self._calls: list[BlockCall] = []
        self._output: Tensor | None = None  # hidden states that the previous block returned
        self._entered: tuple[Tensor, int] | None = None  # input of the open segment, and its version
        for block in blocks:
            block.register_forward_pre_hook(self._before, with_kwargs=True)
            # always_call: after an exception, a checkpoint that stays open would affect the next job of a sweep
            block.register_forward_hook(self._after, with_kwargs=True, always_call=True)

    def _before(self, block: nn.Module, args: tuple, kwargs: dict) -> None:
        if self._repeating or not block.training or not torch.is_grad_enabled():
            return
        _refuse_cache(block, args, kwargs)
        entered = _hidden(args, kwargs)
        if self._pass is not None and entered is not self._output:
            self._close()  # the model replaced the hidden states between two blocks
        if self._pass is None:
            self._calls = []
            repeat = partial(self._repeat, OnDevice(entered), self._calls)
            self._entered = entered, entered._version
            self._pass = open_checkpoint(repeat)
            next(self._pass)
        self._calls.append(BlockCall(block, args, kwargs))

    def _after(self, block: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        if self._pass is None or self._repeating:
            return
        self._output = output[0] if isinstance(output, tuple) else output
        if block is self.blocks[-1] or output is None:  # the output is None if the block raised an error
            self._close(completed=output is not None)

    def _close(self, completed: bool = True) -> None:
        closing, self._pass, self._output, self._calls = self._pass, None, None, []
        entered, self._entered = self._entered, None
        if completed:
            next(closing, None)
            _refuse_change(self.blocks[0], *entered)
        else:
            closing.close()


class BlockCall:
    """A call of a block: its arguments without the hidden states, and the random states before the call. `again`
    repeats the call with given hidden states and the same random states."""

    def __init__(self, block: nn.Module, args: tuple, kwargs: dict) -> None:
        hidden = _hidden(args, kwargs)
        self.block, self.args = block, args[1:]
        self.kwargs = kwargs if args else {k: v for k, v in kwargs.items() if k != "hidden_states"}
        self.by_position = bool(args)
        self.random_states = captured(hidden.device)

    def again(self, hidden: Tensor) -> Tensor:
        restored(self.random_states, hidden.device)
        entering = {} if self.by_position else {"hidden_states": hidden}
        output = self.block(*([hidden] if self.by_position else []), *self.args, **self.kwargs, **entering)
        return output[0] if isinstance(output, tuple) else output


def _refuse_change(block: nn.Module, entered: Tensor, version: int) -> None:
    """Raises Refused if the input of a block was changed in place since it had the given version."""
    if entered._version != version:
        raise Refused(
            f"gradient_checkpointing: {type(block).__name__} changes its input in place, so backward cannot recompute "
            "it. Type gradient_checkpointing=none."
        )


def _refuse_cache(block: nn.Module, args: tuple, kwargs: dict) -> None:
    if any(isinstance(argument, Cache) for argument in (*args, *kwargs.values())):
        raise Refused(
            f"gradient_checkpointing: {type(block).__name__} writes to a KV cache during training, and recomputation "
            "would write its keys and values twice. Type gradient_checkpointing=none, and loss=chunked or a smaller "
            "batch_size to save memory."
        )


def _hidden(args: tuple, kwargs: dict) -> Tensor:
    """Returns the hidden states of a call: the first positional argument, or else the argument `hidden_states`."""
    return args[0] if args else kwargs["hidden_states"]
