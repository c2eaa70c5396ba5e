"""Divides a model into pipeline stages of consecutive blocks, so that the largest stage has as few bytes as possible.

`pipeline.py` runs the stages. A stage is the complete Hugging Face model with replaced forward passes for the modules
of other stages:

    module                       on its own stage    on other stages
    embedding (before blocks)    computes            returns zeros; hidden states of the previous stage replace them
                                                     before block 0
    block                        computes            returns its input
    final norm (after blocks)    computes            returns its input

Replaced modules keep their names and hooks. `Stage.empty` replaces the weights of other stages by meta tensors, which
have shapes but no memory. On every stage the model's own code creates attention masks and rotary embeddings from the
token ids and position ids of the micro-batch. The last stage computes the loss as in a run without stages.

A forward pass over two tokens shows which modules are called before and after the blocks. transformers lists these
modules in `pp_plan`, but only for 85 of its 189 causal architectures (transformers 5.23; not for GPT-2), and `pp_plan`
does not describe the values that a block returns besides hidden states. Source: Huang et al. 2019, arXiv 1811.06965.
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
from lowmem.model.blocks import blocks
from lowmem.system.errors import Refused
from lowmem.system.units import quantity

LOOKED_AT = 2  # tokens of the forward pass that finds the modules


class Output(NamedTuple):
    """The format of a module's output: a tensor of hidden states, or a tuple that begins with hidden states."""

    shape: torch.Size  # shape of the hidden states: (..., width)
    dtype: torch.dtype
    others: int | None  # number of further values in the tuple; None: the output is a tensor


class Anatomy(NamedTuple):
    """The blocks of a model, and the modules with weights before and after the blocks."""

    before: list[nn.Module]  # modules before the blocks, and modules that a forward pass over token ids does not call
    blocks: list[nn.Module]
    after: list[nn.Module]  # modules after the blocks, in the order of their calls
    outputs: dict[nn.Module, Output]  # module called in a forward pass, including blocks -> format of its output


def anatomy(model: PreTrainedModel) -> Anatomy:
    """Finds a model's blocks, and the modules with weights before and after the blocks. Args: model: the complete
    model, on the host.

    Raises:
        Refused: the model has no list of blocks, or no base model separate from its head; a module that contains blocks
            has weights of its own; the blocks are not called one after another; a module with weights is called both
            before and after the blocks; or a block or a module with weights returns no tensor of hidden states.
    """
    if model.base_model is model:
        raise refused(model, "has no base model separate from its head")
    stack = blocks(model)
    inside = {module for block in stack for module in block.modules()}
    edges = [
        module for module in model.modules() if module not in inside and any(True for _ in module.parameters(False))
    ]
    if any(block in set(edge.modules()) for edge in edges for block in stack):
        raise refused(model, "has weights in a module that contains its blocks")
    called, outputs = _called(model, [*edges, *stack])
    start, end = called.index(stack[0]), len(called) - called[::-1].index(stack[-1])
    if called[start:end] != stack or set(called[:start]) & set(called[end:]):
        raise refused(model, "does not call its blocks one after another")
    after = called[end:]
    return Anatomy([edge for edge in edges if edge not in after], stack, after, outputs)


@torch.no_grad()
def _called(model: PreTrainedModel, watched: list[nn.Module]) -> tuple[list[nn.Module], dict[nn.Module, Output]]:
    """Runs a forward pass over two tokens. Returns: the watched modules in the order of their calls (once per call),
    and the output format of each called module. Raises: Refused: a watched module returns no tensor."""
    called, outputs = [], {}

    def after(module: nn.Module, _: tuple, output: object) -> None:
        several = isinstance(output, tuple)
        hidden = output[0] if several else output
        if not isinstance(hidden, Tensor):
            raise refused(model, f"has a module that returns a {type(hidden).__name__} instead of hidden states")
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
    """Divides blocks into stages so that the largest stage has as few bytes as possible.

    Args:
        sizes: bytes of each block.
        before: bytes of the first stage in addition to its blocks.
        after: bytes of the last stage in addition to its blocks.
        stages: number of stages.

    Returns:
        The index of the first block of each stage, followed by the number of blocks.

    Raises:
        Refused: there are fewer blocks than stages.
    """
    if stages > len(sizes):
        raise Refused(
            f"strategy=pipeline: each of the devices={stages} needs at least one block, and this model has "
            f"{quantity(len(sizes), 'block')}. Type devices={len(sizes)} or fewer."
        )
    count = len(sizes)

    def stage_bytes(first: int, end: int) -> int:
        return sum(sizes[first:end]) + before * (first == 0) + after * (end == count)

    @cache
    def best(first: int, left: int) -> tuple[int, list[int]]:
        """Divides the blocks from index `first` to the last block into `left` stages, as `balanced` does.

        Returns:
            The bytes of the largest of these stages, and their division in the format of `balanced`.
        """
        if left == 1:
            return stage_bytes(first, count), [first, count]
        ends = range(first + 1, count - left + 2)
        cuts = (
            (max(stage_bytes(first, end), best(end, left - 1)[0]), [first, *best(end, left - 1)[1]]) for end in ends
        )
        return min(cuts, key=lambda cut: cut[0])

    return best(0, stages)[1]


class Division(NamedTuple):
    """The division of a model's modules and parameters into stages."""

    anatomy: Anatomy
    cuts: list[int]  # index of the first block of each stage, followed by the number of blocks
    holders: dict[nn.Parameter, list[int]]  # parameter -> indices of the stages that have it; several if it is tied

    @property
    def stages(self) -> int:
        return len(self.cuts) - 1

    def own(self, stage: int) -> list[nn.Module]:
        """Returns the modules of a stage: its blocks, on the first stage also the modules before the blocks, and on the
        last stage also the modules after the blocks."""
        before = self.anatomy.before if stage == 0 else []
        after = self.anatomy.after if stage == self.stages - 1 else []
        return [*before, *self.anatomy.blocks[self.cuts[stage] : self.cuts[stage + 1]], *after]

    def elsewhere(self, stage: int) -> set[nn.Module]:
        """Returns the modules whose own tensors, not counting tensors of submodules, exist only on other stages. A
        module outside the blocks is not returned if one of its weights is tied to a weight of this stage."""
        own = {submodule for module in self.own(stage) for submodule in module.modules()}
        others = {submodule for block in self.anatomy.blocks for submodule in block.modules()}
        edges = {edge for edge in (*self.anatomy.before, *self.anatomy.after) if not self._has(edge, stage)}
        return (others | edges) - own

    def _has(self, edge: nn.Module, stage: int) -> bool:
        return any(stage in self.holders[p] for p in edge.parameters(recurse=False))

    def to_names(self, model: nn.Module) -> tuple:
        """Returns the division as a tuple with names in place of modules, from which `from_names` rebuilds it in
        another process."""
        names, layers = {module: name for name, module in model.named_modules()}, self.anatomy
        each = ([names[module] for module in modules] for modules in (layers.before, layers.blocks, layers.after))
        return *each, {names[module]: output for module, output in layers.outputs.items()}, self.cuts

    def bytes(self, stage: int) -> int:
        """Returns the bytes of a stage's parameters. A parameter that is tied across stages counts on each of its
        stages."""
        return sum(p.nbytes for p, stages in self.holders.items() if stage in stages)


def divided(model: PreTrainedModel, stages: int) -> Division:
    """Divides a model into stages. Raises: Refused: see `anatomy` and `balanced`."""
    layers = anatomy(model)
    cuts = balanced([_bytes([block]) for block in layers.blocks], _bytes(layers.before), _bytes(layers.after), stages)
    return _division(model, layers, cuts)


def from_names(model: PreTrainedModel, names: tuple) -> Division:
    """Rebuilds a division for this process's model. Args: names: the result of `to_names` in another process."""
    *lists, outputs, cuts = names
    each = ([model.get_submodule(name) for name in section] for section in lists)
    return _division(model, Anatomy(*each, {model.get_submodule(name): out for name, out in outputs.items()}), cuts)


def _division(model: PreTrainedModel, layers: Anatomy, cuts: list[int]) -> Division:
    division = Division(layers, cuts, {p: [] for p in model.parameters()})
    for stage in range(division.stages):
        for p in {p: None for module in division.own(stage) for p in module.parameters()}:
            division.holders[p].append(stage)
    return division


def _bytes(modules: list[nn.Module]) -> int:
    """Returns the bytes of the modules' parameters and buffers. A tensor that is shared by several modules counts
    once."""
    tensors = {tensor: None for module in modules for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensor.nbytes for tensor in tensors)


class Stage:
    """Makes a model compute one stage, by replacing the forward passes of other stages' modules. Hidden states from the
    previous stage have the shape (N, H): N is B x T, or in training the number of tokens of the window's largest
    micro-batch, to which smaller micro-batches are padded.

    Args:
        model: the complete model, changed in place.
        division: the division of the model into stages.
        stage: index of the stage.
    """

    def __init__(self, model: PreTrainedModel, division: Division, stage: int) -> None:
        self.model, self.division, self.number = model, division, stage
        self.first, self.last = stage == 0, stage == division.stages - 1
        layers = division.anatomy
        self.width, self.dtype = layers.outputs[layers.blocks[0]].shape[-1], layers.outputs[layers.blocks[0]].dtype
        self.holders = division.holders
        self.works = False  # True only within `entered`, so not while backward recomputes activations
        self._entering: Tensor | None = None  # hidden states from the previous stage, for this forward pass
        self._changes = ExitStack()
        numbers = {block: number for number, block in enumerate(layers.blocks)}
        for module in layers.outputs.keys() - {*division.own(stage)}:
            passed_on = partial(_passed_on, layers.outputs[module], numbers.get(module))
            answer = partial(_zeros, layers.outputs[module]) if module in layers.before else passed_on
            self._changes.enter_context(patch.object(module, "forward", answer))
        if not self.first:
            hook = layers.blocks[0].register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
            self._changes.callback(hook.remove)

    def undo(self) -> None:
        """Restores the forward passes. The model is complete again, unless `empty` was called."""
        self._changes.close()

    def empty(self) -> None:
        """Replaces the parameters that this stage does not have, and the buffers of other stages' blocks, by meta
        tensors, which need no memory."""
        replacements = {
            p: p if self.number in stages else nn.Parameter(p.detach().to("meta"), p.requires_grad)
            for p, stages in self.holders.items()
        }
        others = {submodule for block in self.division.anatomy.blocks for submodule in block.modules()}
        others -= {submodule for module in self.division.own(self.number) for submodule in module.modules()}
        for submodule in self.model.modules():
            for name, p in submodule.named_parameters(recurse=False):
                setattr(submodule, name, replacements[p])
            for name, buffer in submodule.named_buffers(recurse=False) if submodule in others else ():
                setattr(submodule, name, buffer.to("meta"))
        self.holders = {replacements[p]: stages for p, stages in self.holders.items()}

    def hidden(self, **inputs: object) -> Tensor:
        """Computes the hidden states (B x T, H) to send to the next stage. Must be called within `entered`, on a stage
        other than the last. Args: inputs: arguments of the model's body.

        Raises:
            Refused: the hidden states do not have the dtype that `anatomy` found.
        """
        hidden = self.model.base_model(**inputs)[0]
        if hidden.dtype != self.dtype:
            raise refused(
                self.model, f"has {hidden.dtype} hidden states between blocks, although its weights have another dtype"
            )
        return hidden.flatten(0, 1)

    @contextmanager
    def entered(self, arrived: Tensor | None, ids: Tensor) -> Iterator[None]:
        """Context manager for a forward pass of this stage, in which hidden states from the previous stage replace the
        input of block 0.

        Args:
            arrived: hidden states (N, H) with N >= B x T; None: this is the first stage.
            ids: (B, T), token ids.
        """
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
    """Returns True if running all stages one after another gives logits that are bit-identical to the logits of the
    complete model. Dropout must be off. Raises: Refused: see `Stage.hidden`."""
    expected, hidden = model(**micro_batch.inputs, use_cache=False).logits, None
    for number in range(division.stages):
        stage = Stage(model, division, number)
        try:
            with stage.entered(hidden, micro_batch.input_ids):
                if stage.last:
                    return torch.equal(model(**micro_batch.inputs, use_cache=False).logits, expected)
                hidden = stage.hidden(**micro_batch.inputs, use_cache=False)
        finally:
            stage.undo()


def _passed_on(output: Output, number: int | None, *args: object, **kwargs: object) -> Tensor | tuple:
    """Replaces the forward pass of another stage's block, or of another stage's module after the blocks. Returns the
    hidden states unchanged, and None for each further value of the module's output. Appends zeros of width 1 as keys
    and values to a KV cache, because a model may read the length of the cache from any block.

    Args:
        output: format of the module's output.
        number: index of the block; None: the module is not a block.
        args, kwargs: arguments of the module.
    """
    hidden = args[0] if args else kwargs["hidden_states"]
    for kv_cache in (argument for argument in (*args, *kwargs.values()) if isinstance(argument, Cache)):
        nothing = hidden.new_zeros(hidden.shape[0], 1, hidden.shape[1], 1)
        kv_cache.update(nothing, nothing, number)
    return hidden if output.others is None else (hidden, *[None] * output.others)


def _zeros(output: Output, *args: object, **kwargs: object) -> Tensor:
    """Replaces, on stages other than the first, the forward pass of a module before the blocks. Returns zeros of the
    module's output shape, usually (B, T, width)."""
    received = next(argument for argument in (*args, *kwargs.values()) if isinstance(argument, Tensor))
    leading = received.shape[: len(output.shape) - 1]
    return torch.zeros(*leading, output.shape[-1], dtype=output.dtype, device=received.device)


def refused(model: nn.Module, why: str) -> Refused:
    return Refused(f"strategy=pipeline: {type(model).__name__} {why}. Type strategy=fsdp, which shards any model.")
