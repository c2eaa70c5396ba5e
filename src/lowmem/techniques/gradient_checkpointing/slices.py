"""Computes modules that process each token independently (MLPs, norms) for one slice of the sequence at a time.

`tile.tokens` sets the number of tokens per slice. For backward, the MLP of a Llama block saves about six tensors of
shape (batch, tokens, 3 to 4 times the width), far more than the rest of the block. A token's result does not depend on
other tokens, so computing in slices gives the same results as computing the whole sequence at once, up to rounding. The
forward pass saves only the module's input. Backward recomputes each slice just before it computes the slice's
gradients, so only the activations of one slice exist at a time. Source: ALST, Bekman et al. 2025, arXiv 2506.13996.

    forward     _EndRecomputation    saves x (B, T, H)
                _InSlices            computes the slices without gradients, saves nothing
    backward    _InSlices            reads x from _EndRecomputation's saved tensors; for each slice: forward, backward

In a checkpointed block, slices add less computation than in a block without checkpointing. torch stops the
recomputation of a block as soon as all tensors that the block saves exist again ("early stop"). If x is the last of
these tensors, the recomputation ends before the module, and only `_InSlices` repeats the module's forward pass.

Cost in time: without checkpointing, one more forward pass of these modules. With checkpointing, one of the three
products of a Llama MLP is computed once more, which takes about 5 % of a step. If the block saves another tensor after
the MLP, for a norm (Gemma 2) or for the next block of a segment, all three products are computed once more. In a
measurement on a CPU (3 blocks of width 512 with MLPs of width 1536, 1 x 1024 tokens in fp32, slices of 256 tokens),
activations took 37 MiB instead of 55 MiB, and a step took 1.17 times as long as without slices. Slicing the norms
accounts for 4 of the 18 MiB that are saved, and for 0.1 of the 0.17 that is added to the time.

Cost in memory: during a module's backward pass, the gradients of its weights are summed over the slices in fp32, which
takes 4 bytes per trained parameter of the module. 16-bit sums would take half of this memory, but have larger rounding
errors. In a measurement (a matrix of 1376 x 512, 2048 tokens), errors were compared with the error of a single product
over all tokens. With fp32 sums the error was 1.4 times as large for every number of slices, because the product of each
slice is rounded. With bf16 sums it was 1.9 times as large with 4 slices, 3.2 times with 16 slices, and 4.3 times with
32 slices.
So slices save memory if few weights are trained, or if the micro-batch has many tokens compared to the MLP's weights.
With 16-bit weights that are all trained, slices save memory only if B x T is larger than about the width H.

A sliced module is a direct child of a block. It is called with a single tensor (B, T, H), and returns a tensor (B, T,
...). torch's own layers and activation functions are not sliced, because they save little besides their input. Mixtures
of experts are not sliced, because the fp32 gradients of all experts would take more memory than the activations of the
experts. Before the first step, or before an evaluation without training, the callback `Verified`
(`loss/cross_entropy.py`) calls `Tiles.verify`. It checks that the results of each module in slices equal its results
for the whole sequence.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from transformers import PreTrainedModel

from lowmem.data.loader import MicroBatch
from lowmem.model.auxiliary_loss import asked_for
from lowmem.model.magnitude import largest_magnitude, same
from lowmem.system.errors import Refused
from lowmem.system.random_state import captured, forked
from lowmem.techniques.gradient_checkpointing import selective
from lowmem.techniques.gradient_checkpointing.policies import blocks

log = logging.getLogger(__name__)


class Tiles:
    """Finds those children of a model's blocks that may be computed in slices, and replaces their forward passes.

    Args:
        model: the model.
        tokens: tokens per slice.

    Raises:
        Refused: the model has no list of blocks, or adds an auxiliary loss, whose gradient would not reach sliced
            modules.
    """

    def __init__(self, model: PreTrainedModel, tokens: int) -> None:
        self.tokens = tokens
        if asked_for(model):
            raise self._refused(
                "output_router_logits=true adds a loss whose gradient does not reach modules computed in slices"
            )
        try:
            stack = blocks(model)
        except Refused:
            raise self._refused(f"{type(model).__name__} has no list of blocks") from None
        self.sliced = [
            SlicedModule(child, tokens) for block in stack for child in block.children() if _has_interior(child)
        ]

    def verify(self, model: PreTrainedModel, batch: MicroBatch) -> None:
        """Compares each module's output for whole rows with its output when it is computed in slices. Args: model: the
        model; batch: the first tokens of one or two rows of the data.

        Raises:
            Refused: a module's results in slices differ from its results for whole rows; a module uses trained weights
                of another module; a module's results contain inf or nan; or no module can be computed in slices.
        """
        for module in self.sliced:
            module.comparing = True
        try:
            model(**batch.inputs, use_cache=False)
        finally:
            for module in self.sliced:
                module.comparing = False
        if wrong := {name(module) for module in self.sliced if module.agrees is False}:
            raise self._refused(f"{', '.join(sorted(wrong))} would compute different results in slices of the sequence")
        cut = {name(module) for module in self.sliced if module.agrees}
        if not cut:
            raise self._refused(f"no module in the blocks of {type(model).__name__} processes each token independently")
        log.info(f"tile.tokens={self.tokens}: {', '.join(sorted(cut))} are computed in slices of {self.tokens} tokens.")

    def _refused(self, why: str) -> Refused:
        return Refused(f"tile.tokens={self.tokens}: {why}. Type tile.tokens=null.")


def _has_interior(child: nn.Module) -> bool:
    """Returns True if a child of a block may be computed in slices. Excludes modules without weights, single torch
    layers, modules that contain an nn.ModuleList (such as experts), and modules with weights of three or more
    dimensions (convolutions, which mix tokens, and fused experts)."""
    weights = list(child.parameters())
    alone = type(child).__module__.startswith("torch.nn.") and not any(True for _ in child.children())
    several = any(isinstance(module, nn.ModuleList) for module in child.modules())
    return bool(weights) and not (alone or several or any(p.dim() > 2 for p in weights))


def name(sliced: "SlicedModule") -> str:
    return type(sliced.module).__name__


class SlicedModule(nn.Module):
    """Replaces the forward pass of a module: for an input with more tokens than a slice, the output is computed in
    slices.

    Args:
        module: the module. Only its `forward` is replaced.
        tokens: tokens per slice.
    """

    def __init__(self, module: nn.Module, tokens: int) -> None:
        super().__init__()
        self.module, self.tokens, self.unsliced = module, tokens, module.forward
        self.fits: bool | None = None  # True: the module returns one tensor (B, T, ...); None: not known yet
        # comparing: True while `Tiles.verify` runs; agrees: whether the module's results in slices equal its results
        # for whole rows; None: not compared
        self.comparing, self.agrees = False, None
        module.forward = self._called

    def forward(self, *args, **kwargs) -> object:
        return self.unsliced(*args, **kwargs)

    def _called(self, *args, **kwargs) -> object:
        if kwargs or len(args) != 1 or not isinstance(args[0], Tensor) or args[0].dim() != 3:
            return self.unsliced(*args, **kwargs)
        (x,) = args  # (B, T, H)
        if self.comparing and self._is_fit(x):
            self.agrees = self.agrees is not False and self._is_same(x)
        if x.shape[1] <= self.tokens or not self._is_fit(x):
            return self.unsliced(x)
        trainable = [p for p in self.parameters() if p.requires_grad]
        if not torch.is_grad_enabled() or not (x.requires_grad or trainable):
            return self.in_slices(x)
        entering = _EndRecomputation.apply(x if x.requires_grad else x.detach().requires_grad_())
        return _InSlices.apply(self, entering.grad_fn, entering, *trainable)

    def _is_fit(self, x: Tensor) -> bool:
        if self.fits is None:
            with torch.no_grad(), forked(x.device):
                out = self._compute(x[:, :1], self.stand_ins())
            self.fits = isinstance(out, Tensor) and out.shape[:2] == (x.shape[0], 1)
        return self.fits

    def _is_same(self, x: Tensor) -> bool:
        """Returns True if the module's results in slices equal its result for x, and the module uses no trained weights
        of other modules."""
        # the caller may be in inference mode, or have gradients disabled
        with torch.inference_mode(False), torch.enable_grad():
            entering = x.detach().clone().requires_grad_()
            expected = self.unsliced(entering)
        if any(leaf is not entering for leaf in _leaves(expected) - {*self.parameters()}):
            return False  # `_InSlices` would lose the gradient of a weight of another module
        # two slices of about 2/3 and 1/3 of the tokens
        slices = [self.unsliced(piece.contiguous()) for piece in x.split(2 * x.shape[1] // 3 or 1, dim=1)]
        dtypes = {tensor.dtype for tensor in (x, expected, *slices)}
        return same(torch.cat(slices, 1), expected, largest_magnitude(expected), dtypes)

    def in_slices(self, x: Tensor) -> Tensor:
        """Returns the module's output (B, T, ...) for an input (B, T, H), computed in slices. Called only where
        autograd has nothing to record."""
        weights, result, start = self.stand_ins(), None, 0
        for piece in x.split(self.tokens, dim=1):
            out = self._compute(piece, weights)  # (B, t, ...)
            if result is None:
                result = out.new_empty(*x.shape[:2], *out.shape[2:])
            result[:, start : start + piece.shape[1]] = out
            start += piece.shape[1]
        return result

    def back(self, x: Tensor, d_out: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """Computes the gradients slice by slice. Recomputes each slice before its backward pass.

        Args:
            x: (B, T, H), the module's input.
            d_out: (B, T, ...), gradient of the module's output.

        Returns:
            The gradient of x, and a list with the gradient of each trained weight; None for a weight that received no
            gradient.
        """
        d_x, sums, weights, start = torch.empty_like(x), {}, self.stand_ins(), 0
        for name, weight in weights.items():
            weight.register_post_accumulate_grad_hook(lambda weight, name=name: _add(sums, name, weight))
        for piece, d_piece in zip(x.split(self.tokens, 1), d_out.split(self.tokens, 1), strict=True):
            entering = piece.detach().contiguous().requires_grad_()
            with torch.enable_grad():
                out = self._compute(entering, weights)
            torch.autograd.backward(out, d_piece)
            d_x[:, start : start + piece.shape[1]] = entering.grad
            start += piece.shape[1]
        # Convert one by one, so that only one weight at a time has both an fp32 sum and a converted gradient.
        return d_x, [sums.pop(name).to(weight.dtype) if name in sums else None for name, weight in weights.items()]

    def stand_ins(self) -> dict[str, Tensor]:
        """Returns a new leaf tensor for each trained weight, by name. The new tensor shares the weight's memory.
        Without new tensors, autocast would cache 16-bit copies of the weights themselves here, where gradients are
        disabled. Other code that uses a weight would then get the cached copy, and compute no gradient of the
        weight."""
        return {name: p.detach().requires_grad_() for name, p in self.named_parameters() if p.requires_grad}

    def _compute(self, piece: Tensor, weights: dict[str, Tensor]) -> object:
        return functional_call(self, weights, (piece.contiguous(),))


class _EndRecomputation(torch.autograd.Function):
    """Saves x as the block's last saved tensor, so that torch's early stop ends the recomputation before it reaches the
    module."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, d_x):
        return d_x


class _InSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx, sliced, input_node, x, *weights):
        """Computes a module in slices.

        Args:
            sliced: the `SlicedModule`.
            input_node: the autograd node of `_EndRecomputation`, which has saved x.
            x: (B, T, H).
            weights: the trained weights. Not read; passed so that autograd expects their gradients from `backward`.
        """
        ctx.sliced, ctx.input_node, ctx.random_states = sliced, input_node, captured(x.device)
        ctx.autocast = _autocast(x.device.type)
        with selective.paused():
            return sliced.in_slices(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        (x,) = ctx.input_node.saved_tensors
        with forked(x.device, ctx.random_states), torch.autocast(**ctx.autocast):
            d_x, d_weights = ctx.sliced.back(x, d_out)
        return None, None, d_x, *d_weights


def _autocast(device: str) -> dict:
    """Returns the current autocast settings as arguments of torch.autocast. `_InSlices.backward` restores these
    settings, because a backward pass usually runs outside of autocast."""
    enabled = torch.is_autocast_enabled(device)
    return {"device_type": device, "enabled": enabled, "dtype": torch.get_autocast_dtype(device)}


def _add(sums: dict[str, Tensor], name: str, weight: Tensor) -> None:
    gradient, weight.grad = weight.grad, None
    if name in sums:
        sums[name].add_(gradient)
    else:
        sums[name] = gradient.to(torch.promote_types(gradient.dtype, torch.float32))


def _leaves(out: Tensor) -> set[Tensor]:
    """Returns the leaf tensors that a backward pass from `out` would reach."""
    nodes: Sequence = [out.grad_fn]
    seen, leaves = set(nodes), set()
    while nodes:
        nodes = {node for current in nodes if current is not None for node, _ in current.next_functions} - seen
        seen |= nodes
        leaves |= {node.variable for node in nodes if hasattr(node, "variable")}
    return leaves
