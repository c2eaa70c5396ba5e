"""A model cut into stages: consecutive blocks, balanced by bytes, so that each device holds a part of the weights.

A stage is the Hugging Face model itself, of which what other stages hold was emptied: a module keeps its place, its
hooks and the names of its weights, which have a shape and no memory (torch's meta device). Another stage's block hands
its input on; an embedding of the first stage answers zeros on the others, whose hidden states enter from outside in
front of block 0; norms of the last stage hand on. So masks, rotary embeddings and positions are made on every stage by
the model's own code, from the micro-batch's own tokens and positions, and the last stage is a model whose loss is
computed as ever.

What stands before the blocks and what behind them is not looked up by name: one pass over two tokens shows it. Source:
Huang et al. 2019, arXiv 1811.06965.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from lowmem.data.loader import MicroBatch
from lowmem.system.errors import Refused
from lowmem.techniques.gradient_checkpointing.policies import blocks

LOOKED_AT = 2  # tokens


class Output(NamedTuple):
    """Of a module, as it was called."""

    shape: torch.Size  # of its hidden states, (..., width)
    dtype: torch.dtype
    others: int | None  # values beside them in a tuple; None: no tuple


class Parts(NamedTuple):
    """What a forward pass calls: everything that holds weights is in one of these."""

    before: list[nn.Module]  # and whatever no pass over tokens calls
    blocks: list[nn.Module]
    after: list[nn.Module]
    outputs: dict[nn.Module, Output]  # of each that was called


def parts(model: PreTrainedModel) -> Parts:
    """Args: model: whole, on the host.

    Raises:
        Refused: one that is more than a list of blocks with something before and behind.
    """
    if model.base_model is model:
        raise refused(model, "is its own body")
    stack = blocks(model)
    inside = {part for block in stack for part in block.modules()}
    edges = [part for part in model.modules() if part not in inside and any(True for _ in part.parameters(False))]
    if any(block in set(edge.modules()) for edge in edges for block in stack):
        raise refused(model, "holds weights beside its blocks")
    called, outputs = _called(model, [*edges, *stack])
    first, last = called.index(stack[0]), len(called) - called[::-1].index(stack[-1])
    if called[first:last] != stack or set(called[:first]) & set(called[last:]):
        raise refused(model, "does not call its blocks one after the other")
    after = called[last:]
    return Parts([edge for edge in edges if edge not in after], stack, after, outputs)


@torch.no_grad()
def _called(model: PreTrainedModel, watched: list[nn.Module]) -> tuple[list[nn.Module], dict[nn.Module, Output]]:
    """(in which order, what each returned)."""
    called, outputs = [], {}

    def after(module: nn.Module, _: tuple, output: object) -> None:
        several = isinstance(output, tuple)
        hidden = output[0] if several else output
        if not isinstance(hidden, Tensor):
            raise refused(model, f"hands on no hidden states but {type(hidden).__name__}")
        outputs[module] = Output(hidden.shape, hidden.dtype, len(output) - 1 if several else None)

    hooks = [module.register_forward_pre_hook(lambda module, _: called.append(module)) for module in watched]
    hooks += [module.register_forward_hook(after) for module in watched]
    with torch.random.fork_rng(devices=[]):
        try:
            model(input_ids=torch.zeros(1, LOOKED_AT, dtype=torch.long), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
    return called, outputs


def balanced(sizes: Sequence[int], before: int, after: int, stages: int) -> list[int]:
    """The cut whose largest stage is smallest. Args: sizes: bytes of each block; before, after: those that the first
    and the last stage hold besides. Returns: the first block of each stage, and the number of blocks.

    Raises:
        Refused: fewer blocks than stages.
    """
    if stages > len(sizes):
        raise Refused(
            f"strategy=pipeline: devices={stages} are more than the {len(sizes)} blocks of this model, and each stage "
            f"holds at least one. Type devices={len(sizes)} or fewer."
        )
    count = len(sizes)

    def held(first: int, end: int) -> int:
        return sum(sizes[first:end]) + before * (first == 0) + after * (end == count)

    @cache
    def best(first: int, left: int) -> tuple[int, list[int]]:
        """(bytes of the largest, where each begins) of the blocks from `first` on, in so many stages."""
        if left == 1:
            return held(first, count), [first, count]
        ends = range(first + 1, count - left + 2)
        cuts = ((max(held(first, end), best(end, left - 1)[0]), [first, *best(end, left - 1)[1]]) for end in ends)
        return min(cuts, key=lambda cut: cut[0])

    return best(0, stages)[1]


class Division(NamedTuple):
    """Of a whole model: which stage holds what."""

    parts: Parts
    cuts: list[int]  # the first block of each stage, and the number of blocks
    holders: dict[nn.Parameter, list[int]]  # stages; more than one where a weight is tied

    @property
    def stages(self) -> int:
        return len(self.cuts) - 1

    def own(self, stage: int) -> list[nn.Module]:
        """Its modules; those inside a block are the block's."""
        before = self.parts.before if stage == 0 else []
        after = self.parts.after if stage == self.stages - 1 else []
        return [*before, *self.parts.blocks[self.cuts[stage] : self.cuts[stage + 1]], *after]

    def elsewhere(self, stage: int) -> set[nn.Module]:
        """Modules whose own tensors it does not have: those of a tied weight it has."""
        mine = {part for module in self.own(stage) for part in module.modules()}
        others = {part for block in self.parts.blocks for part in block.modules()}
        edges = {edge for edge in (*self.parts.before, *self.parts.after) if not self._has(edge, stage)}
        return (others | edges) - mine

    def _has(self, edge: nn.Module, stage: int) -> bool:
        return any(stage in self.holders[p] for p in edge.parameters(recurse=False))

    def told(self, model: nn.Module) -> tuple:
        """In words that mean the same in another process's model."""
        names, of = {module: name for name, module in model.named_modules()}, self.parts
        each = ([names[module] for module in modules] for modules in (of.before, of.blocks, of.after))
        return *each, {names[module]: output for module, output in of.outputs.items()}, self.cuts

    def bytes(self, stage: int) -> int:
        """Of its weights, one that another stage holds too included."""
        return sum(p.nbytes for p, stages in self.holders.items() if stage in stages)


def divided(model: PreTrainedModel, stages: int) -> Division:
    """Raises: Refused."""
    of = parts(model)
    cuts = balanced([_bytes([block]) for block in of.blocks], _bytes(of.before), _bytes(of.after), stages)
    return _held(model, of, cuts)


def heard(model: PreTrainedModel, told: tuple) -> Division:
    """What another process has told of its own model."""
    *lists, outputs, cuts = told
    each = ([model.get_submodule(name) for name in names] for names in lists)
    return _held(model, Parts(*each, {model.get_submodule(name): one for name, one in outputs.items()}), cuts)


def _held(model: PreTrainedModel, of: Parts, cuts: list[int]) -> Division:
    division = Division(of, cuts, {p: [] for p in model.parameters()})
    for stage in range(division.stages):
        for p in {p: None for module in division.own(stage) for p in module.parameters()}:
            division.holders[p].append(stage)
    return division


def _bytes(modules: list[nn.Module]) -> int:
    """A weight once."""
    held = {tensor: None for module in modules for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensor.nbytes for tensor in held)


class Stage:
    """One part of a model, which from now on answers as that part. What arrives is flat, (N, H): N is that of the
    longest micro-batch of a window."""

    def __init__(self, model: PreTrainedModel, division: Division, stage: int) -> None:
        self.model, self.division, self.number = model, division, stage
        self.first, self.last = stage == 0, stage == division.stages - 1
        of = division.parts
        self.width, self.dtype = of.outputs[of.blocks[0]].shape[-1], of.outputs[of.blocks[0]].dtype
        self.holders = division.holders
        self.works = False  # while a forward pass runs, not while blocks are computed again
        self._entering: Tensor | None = None  # then
        self._changes = ExitStack()
        numbers = {block: number for number, block in enumerate(of.blocks)}
        for module in of.outputs.keys() - {*division.own(stage)}:
            passed_on = partial(_passed_on, of.outputs[module], numbers.get(module))
            answer = partial(_zeros, of.outputs[module]) if module in of.before else passed_on
            self._changes.enter_context(patch.object(module, "forward", answer))
        if not self.first:
            hook = of.blocks[0].register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
            self._changes.callback(hook.remove)

    def undo(self) -> None:
        """The model is whole again, if it was not emptied."""
        self._changes.close()

    def empty(self) -> None:
        """What other stages hold loses its memory."""
        now = {
            p: p if self.number in stages else nn.Parameter(p.detach().to("meta"), p.requires_grad)
            for p, stages in self.holders.items()
        }
        others = {part for block in self.division.parts.blocks for part in block.modules()}
        others -= {part for module in self.division.own(self.number) for part in module.modules()}
        for part in self.model.modules():
            for name, p in part.named_parameters(recurse=False):
                setattr(part, name, now[p])
            for name, buffer in part.named_buffers(recurse=False) if part in others else ():
                setattr(part, name, buffer.to("meta"))
        self.holders = {now[p]: stages for p, stages in self.holders.items()}

    def hidden(self, **inputs: object) -> Tensor:
        """(B x T, H): what leaves every stage but the last. Within `entered`. Args: inputs: of the model's body.

        Raises:
            Refused: hidden states of another dtype than the weights.
        """
        hidden = self.model.base_model(**inputs)[0]
        if hidden.dtype != self.dtype:
            raise refused(self.model, f"has hidden states in {hidden.dtype} between blocks whose weights have another")
        return hidden.flatten(0, 1)

    @contextmanager
    def entered(self, arrived: Tensor | None, ids: Tensor) -> Iterator[None]:
        """Within it the model computes on what the stage before sent. Args: arrived: (N, H), N at least B x T; None: on
        the first stage; ids: (B, T) tokens."""
        self.works = True
        self._entering = None if arrived is None else arrived[: ids.numel()].view(*ids.shape, self.width)
        try:
            yield
        finally:
            self.works, self._entering = False, None

    def _enter(self, _: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if self._entering is None:
            return None
        return ((self._entering, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": self._entering})


@torch.no_grad()
def same(model: PreTrainedModel, division: Division, micro_batch: MicroBatch) -> bool:
    """Whether its parts in a row are the model, which says so itself: without dropout, and whole."""
    whole, hidden = model(**micro_batch.inputs, use_cache=False).logits, None
    for number in range(division.stages):
        stage = Stage(model, division, number)
        try:
            with stage.entered(hidden, micro_batch.input_ids):
                if stage.last:
                    return torch.equal(model(**micro_batch.inputs, use_cache=False).logits, whole)
                hidden = stage.hidden(**micro_batch.inputs, use_cache=False)
        finally:
            stage.undo()


def _passed_on(output: Output, number: int | None, *args: object, **kwargs: object) -> Tensor | tuple:
    """Args: number: of a block; it adds nothing to a cache but its length, which is asked of any of them."""
    hidden = args[0] if args else kwargs["hidden_states"]
    for held in (one for one in (*args, *kwargs.values()) if isinstance(one, Cache)):
        nothing = hidden.new_zeros(hidden.shape[0], 1, hidden.shape[1], 1)
        held.update(nothing, nothing, number)
    return hidden if output.others is None else (hidden, *[None] * output.others)


def _zeros(output: Output, *args: object, **kwargs: object) -> Tensor:
    """In the place of what makes hidden states of tokens, positions (B, T), or other hidden states (B, T, width)."""
    given = next(one for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
    around = given.shape[: len(output.shape) - 1]
    return torch.zeros(*around, output.shape[-1], dtype=output.dtype, device=given.device)


def refused(model: nn.Module, why: str) -> Refused:
    return Refused(f"strategy=pipeline: {type(model).__name__} {why}. Type strategy=fsdp, which divides any model.")
