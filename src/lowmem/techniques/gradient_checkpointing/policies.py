"""Gradient checkpointing: saves the input of each segment of blocks, not its interior, and recomputes the interior.

One boundary of (batch, tokens, width) per segment stays, and in backward the interior of one segment at a time. It
costs one more forward pass, about a third of the step. Source: Chen et al. 2016, arXiv 1604.06174.

A single block is torch's own non-reentrant checkpoint around its forward. A Hugging Face model calls its blocks one by
one, each with arguments of its own, so a hook of a segment's first block opens the segment and a hook of its last block
closes it; in between the checkpoint drops what autograd saves.
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
    """Keeps every activation, which is what models do by default."""


def every_layer(model: nn.Module) -> None:
    """Each block keeps only its input: n boundaries and the interior of one block."""
    segments(model, 1)


def segments(model: nn.Module, k: int | None = None) -> None:
    """Each segment of blocks keeps only the input of its first block, and backward recomputes a segment at a time.

    Args:
        k: blocks per segment: n / k boundaries and the interior of k blocks. None: about sqrt(n) segments of about
            sqrt(n) blocks.
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
    """Each block keeps its matrix products and its attention, unless the model changes them in place, and recomputes
    the cheap rest."""
    for block in blocks(model):
        Alone(block, contexts=kept_results.contexts)


def offload(model: nn.Module) -> None:
    """Does what `every_layer` does with the boundaries in host memory: they come back one block ahead of the backward
    pass."""
    chain = Chain()
    for number, block in enumerate(blocks(model)):
        Alone(block, boundary=partial(chain.make, number))


def offload_attention(model: nn.Module) -> None:
    """Does what `offload` does, and attention's results wait in host memory, too: it alone is not computed again, since
    its time grows with the square of the sequence."""
    chain = Chain()
    for number, block in enumerate(blocks(model)):
        send = partial(chain.make, number)
        Alone(block, boundary=send, contexts=partial(kept_results.attention_contexts, send))


class Recomputed:
    """The base class of what backward recomputes. `_repeating`: the blocks are called by the recomputation."""

    _repeating = False

    def _repeat(self, boundary: Boundary, calls: list["Call"]) -> None:
        self._repeating = True
        try:
            hidden = boundary.fetch()
            with forked(hidden.device):
                for call in calls:
                    hidden = call.again(hidden)
        finally:
            self._repeating = False


class Alone(Recomputed):
    """A block of which autograd keeps only the input.

    Args:
        boundary: keeps that input until backward.
        contexts: () -> contexts of the forward pass and of the recomputation.
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
        boundary, call = self.boundary(_hidden(args, kwargs)), Call(self.block, args, kwargs)
        # The call leaves this list when it is made: it refers to the block's input, which only the boundary may keep.
        first_call = [partial(self.forward, *args, **kwargs)]

        def run() -> object:
            return first_call.pop()() if first_call else self._repeat(boundary, [call])

        return checkpoint(run, use_reentrant=False, preserve_rng_state=False, context_fn=self.contexts)


class Segment(Recomputed):
    """Consecutive blocks of which autograd keeps only the input of the first."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        self.blocks = blocks
        self._pass: Iterator | None = None  # torch's checkpoint, while the segment is open
        self._calls: list[Call] = []
        self._output: Tensor | None = None  # of the previous block: shows whether the model passes it on unchanged
        for block in blocks:
            block.register_forward_pre_hook(self._before, with_kwargs=True)
            # Also after an exception: a hook that stays would drop saved tensors of the next job of a sweep.
            block.register_forward_hook(self._after, with_kwargs=True, always_call=True)

    def _before(self, block: nn.Module, args: tuple, kwargs: dict) -> None:
        if self._repeating or not block.training or not torch.is_grad_enabled():
            return
        _refuse_cache(block, args, kwargs)
        entered = _hidden(args, kwargs)
        if self._pass is not None and entered is not self._output:
            self._close()  # the model changed the hidden states between two blocks, so a new segment begins
        if self._pass is None:
            self._calls = []
            repeat = partial(self._repeat, OnDevice(entered), self._calls)
            self._pass = open_checkpoint(repeat)
            next(self._pass)
        self._calls.append(Call(block, args, kwargs))

    def _after(self, block: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        if self._pass is None or self._repeating:
            return
        self._output = output[0] if isinstance(output, tuple) else output
        if block is self.blocks[-1] or output is None:  # None: it raised
            self._close(completed=output is not None)

    def _close(self, completed: bool = True) -> None:
        closing, self._pass, self._output, self._calls = self._pass, None, None, []
        if completed:
            next(closing, None)
        else:
            closing.close()


class Call:
    """The arguments of a block's call without the hidden states, which are recomputed."""

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


def _refuse_cache(block: nn.Module, args: tuple, kwargs: dict) -> None:
    if any(isinstance(argument, Cache) for argument in (*args, *kwargs.values())):
        raise Refused(
            f"gradient_checkpointing: {type(block).__name__} writes to a KV cache during training, and recomputation "
            "would write its keys and values twice. Type gradient_checkpointing=none, and loss=chunked or a smaller "
            "batch_size to save memory."
        )


def _hidden(args: tuple, kwargs: dict) -> Tensor:
    """Returns the hidden states: Hugging Face's blocks take them first, or by this name."""
    return args[0] if args else kwargs["hidden_states"]
