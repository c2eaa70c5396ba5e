"""Defines the interface of losses (`Loss`), two losses (`loss=full` and `loss=chunked`), and the checks of the model
before training or evaluation (`Verified`).

A loss takes the model and a micro-batch. `labels[b, t]` is the token that follows `input_ids[b, t]`, or -100 if the
loss ignores this token (prompts, padding). A loss returns an fp32 *sum* over tokens (a preference loss: over pairs or
rated answers), not a mean: `CausalLM` divides by the number of labels, pairs or answers in the full window, on all
devices.

`full` is cross entropy as most code computes it, with tensors of shape (B, T, V): the logits in the compute dtype and
in fp32, their log-softmax, and gradients. With a vocabulary of 150,000 tokens, the memory use of a run often peaks
while these tensors exist. `Chunked` stores the logits of only one chunk of tokens at a time. It computes gradients in
the forward pass, while the logits of the chunk still exist, so the logits are computed only once, as in Liger Kernel
(Hsu et al. 2024, arXiv 2410.10989). The price is an fp32 sum of the gradient of the head's weight. All other code of
the model, before and after its head, still runs (`head.py`).
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FunctionType

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from transformers import PreTrainedModel

from lowmem.data.loader import IGNORED, MicroBatch, ValidationLoader, WindowLoader
from lowmem.model import lengths, packed_attention
from lowmem.model.head_tiles import matrix_of
from lowmem.system.errors import Refused
from lowmem.techniques.loss.head import agrees, enter, finished, multiplied_in

VERIFIED = 16  # maximum number of tokens per row in the checks of `Loss.verify` and `Tiles.verify`
# Tokens of the vocabulary in each 16-bit product that is added to an fp32 sum. A single product would need temporary
# memory for (V, H) elements.
SLICE = 1 << 13


class Loss:
    """Base class of losses that `CausalLM` trains with, and of losses that wrap another loss."""

    needs: type[MicroBatch] = MicroBatch  # class of the micro-batches that this loss takes
    own_logits = False  # True: computes the logits itself; set automatically for classes that override `verify`
    shows: tuple[str, ...] = ()  # names of the `figures` that early_stop.watch accepts
    head_in_tiles = False  # True: reads the head's weight in tiles, so the weight may be in host memory
    of_pairs = False  # True: a preference loss
    compares = False  # True: needs log-probabilities of a reference model

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.own_logits = cls.verify is not Loss.verify

    def __call__(self, model: PreTrainedModel, batch: MicroBatch) -> Tensor:
        """Returns the loss summed over tokens with a label, over pairs, or over rated answers: fp32, shape ()."""
        raise NotImplementedError

    def figures(self) -> dict[str, Tensor]:
        """Returns additional metrics, by name, of the most recent micro-batch whose loss was computed without
        gradients. An evaluation calls this method exactly once after each micro-batch. The loss may drop its
        intermediate results in this call.

        A metric of shape () is a sum over the micro-batch, and the caller divides the total by the total `weight` of
        all micro-batches. A metric of shape (2,) is (sum, count), and the caller divides the total sum by the total
        count.
        """
        return {}

    def callbacks(self) -> list[Callback]:
        """Returns callbacks that this loss needs, for example to run additional forward passes before the first
        micro-batch of a window."""
        return []

    def verify(self, model: PreTrainedModel, batch: MicroBatch) -> None:
        """Checks that the logits that the loss computes equal the model's logits. `Verified` and `Pipeline` call this
        method before the first step. The base class checks nothing.

        Args:
            model: the model.
            batch: a micro-batch of at most two rows with a few tokens each.

        Raises:
            Refused: the logits differ, or contain inf or nan; or the loss cannot compute the logits of this model.
        """


class Function(Loss):
    """A loss from a plain function of (model, micro-batch), such as `full` or a function in a user's yaml."""

    def __init__(self, function: Callable[[PreTrainedModel, MicroBatch], Tensor]) -> None:
        self.function = function

    def __call__(self, model: PreTrainedModel, batch: MicroBatch) -> Tensor:
        return self.function(model, batch)


def as_loss(loss: object) -> Loss:
    """Returns a `Loss` unchanged, and wraps a function in `Function`.

    Raises:
        Refused: `loss` is neither a `Loss` nor a function. A callable of another kind might have weights or a method
            `verify`, which would be ignored silently.
    """
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, FunctionType | partial):
        return Function(loss)
    raise Refused(
        f"loss._target_: {type(loss).__name__} is not a loss. Derive it from Loss of "
        "lowmem.techniques.loss.cross_entropy, and from nn.Module as well if it has weights or buffers, or name a "
        "function and type loss._partial_=true."
    )


def full(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    logits = model(**batch.inputs, use_cache=False).logits.flatten(0, 1)  # (B x T, V)
    return F.cross_entropy(logits.float(), batch.labels.flatten(), ignore_index=IGNORED, reduction="sum")


class Chunked(Loss):
    """Computes the loss of `full`, one chunk of tokens at a time. Args: rows: maximum number of tokens per chunk; only
    the logits of one chunk are in memory at a time. Raises: Refused: `rows` is not a whole number of at least 1."""

    def __init__(self, rows: int) -> None:
        if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
            raise Refused(f"loss.rows={rows}: give a whole number of tokens, at least 1, such as loss.rows=1024.")
        self.rows = rows

    def __call__(self, model: PreTrainedModel, batch: MicroBatch) -> Tensor:
        head = enter(model, batch.inputs)
        hidden, labels = head.hidden.flatten(0, 1), batch.labels.flatten()  # (B x T, H)
        hidden = hidden.to(multiplied_in(hidden))  # autocast has no effect inside the autograd function
        weight, bias = matrix_of(head.linear), head.linear.bias
        chunks = counted(labels, batch.known_learned_tokens).split(self.rows)
        return _ChunkedCrossEntropy.apply(hidden, weight, bias, labels, chunks, head.finish)

    def verify(self, model: PreTrainedModel, batch: MicroBatch) -> None:
        if not agrees(model, batch.inputs):
            raise Refused(
                f"loss=chunked: logits of {type(model).__name__} computed in chunks differ from the model's own, so "
                "training would optimize a different function. Type loss=full."
            )


class Verified(Callback):
    """A callback that raises Refused unless all of these checks pass. The checks run before the first step, or before
    the evaluation of a run that does not train:

    - padded rows do not depend on each other's lengths (`lengths.check_rows`)
    - documents in packed rows do not attend to each other, and do not depend on each other's lengths
      (`packed_attention.verify`, which also switches to attention with a mask if the model needs a mask)
    - a loss that computes logits itself computes the model's logits (`Loss.verify`; only before training)
    - modules that are computed in slices give the results of the unsliced modules (`Tiles.verify`)

    All checks except the first one run the model in the run's precision. All ranks run the checks, because a forward
    pass of a divided model contains collectives.

    Args:
        packed: True: rows contain several documents.
    """

    def __init__(self, packed: bool = False) -> None:
        self.packed, self.done = packed, False

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        loaders = trainer.train_dataloader, *_validation(trainer)
        self._verify(trainer, module, loaders, lambda: next(iter(trainer.train_dataloader)).micro_batches[0])

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.validating and not self.done:  # a run that only evaluates
            self._verify(trainer, module, _validation(trainer), lambda: next(iter(trainer.val_dataloaders[0]))[0])

    def _verify(
        self,
        trainer: Trainer,
        module: LightningModule,
        loaders: Iterable[WindowLoader | ValidationLoader],
        first: Callable[[], MicroBatch],
    ) -> None:
        """Runs the checks.

        Args:
            trainer: the trainer.
            module: the `CausalLM`.
            loaders: the loaders for the check of padded rows.
            first: returns a micro-batch for the other checks; not called if the run needs none of them.
        """
        self.done = True
        for loader in loaders:
            _check_rows(module, loader)
        of_loss = module.loss.own_logits and not trainer.validating
        if not (self.packed or of_loss or module.tiles):
            return
        two_rows = first().each(lambda tensor: tensor[:2].to(module.device))
        few = two_rows.each(lambda tensor: tensor[:, :VERIFIED])
        module.model.eval()  # no dropout; `CausalLM.on_train_start` sets training mode later
        with trainer.precision_plugin.forward_context():
            if self.packed:
                packed_attention.verify(module.model, two_rows.input_ids)
            with torch.no_grad():
                if of_loss:
                    module.loss.verify(module.model, few)
                if module.tiles:
                    module.tiles.verify(module.model, few)


def _validation(trainer: Trainer) -> Iterator[ValidationLoader]:
    return (groups.micro_batches for groups in trainer.val_dataloaders or ())


def _check_rows(module: LightningModule, loader: WindowLoader | ValidationLoader) -> None:
    """Checks that padded rows of a loader do not depend on each other's lengths. Does nothing if the loader does not
    pad rows, or if its micro-batches have position ids (`packed_attention.verify` checks packed documents). Raises:
    Refused."""
    rows = loader.sequences
    if rows.filler and not rows.positions:
        together = len(rows.example(loader.share.batch_size, 1).input_ids)
        lengths.check_rows(module.model, rows.longest, together)


def counted(labels: Tensor, count: int | None = None) -> Tensor:
    """Returns the indices of positions with a label.

    If the number of labels is unknown, the host must wait until the device has counted them. The losses of this package
    have no other point where the host waits for the value of a tensor. In a trace with fake tensors `learned.all()` is
    True, so the trace assumes that all positions have a label.

    Args:
        labels: (N,), -100: no label.
        count: the number of labels; None: unknown.
    """
    if count == len(labels):
        return torch.arange(count, device=labels.device)
    learned = labels != IGNORED
    if count is not None:
        return torch.nonzero_static(learned, size=count).squeeze(1)
    return torch.arange(len(labels), device=labels.device) if learned.all() else learned.nonzero().squeeze(1)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes sum_i -log softmax(head(hidden_i))[label_i], one chunk of positions at a time."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, chunks, finish):  # noqa: PLR0913
        """Returns the sum in fp32.

        Args:
            hidden: (N, H), input of the head at all N positions.
            weight: (V, H), the head's weight.
            bias: (V,), the head's bias, or None.
            labels: (N,).
            chunks: one tensor (rows,) per chunk, with the indices of positions with a label.
            finish: see `Head`.
        """
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        matrix = weight.to(hidden.dtype)
        d_hidden = torch.zeros_like(hidden) if needs_hidden else None
        # Sums in fp32, 4 bytes per element of the head: a 16-bit sum over thousands of tokens would lose small terms.
        wide = torch.promote_types(weight.dtype, torch.float32)
        d_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=wide) if needs_bias else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        # Logits are computed only at positions with a label. The hidden states of these positions are copied chunk by
        # chunk, so that memory use does not depend on the number of labels, which the planner does not know.
        for chunk in chunks:
            rows_hidden, rows_labels = hidden.index_select(0, chunk), labels[chunk]
            product = F.linear(rows_hidden, matrix, None if bias is None else bias.to(hidden.dtype))
            logits, back = finished(product, finish)  # (rows, V), fp32
            del product
            logp = torch.log_softmax(logits, dim=-1)
            total += F.nll_loss(logp, rows_labels, reduction="sum")
            if any(ctx.needs_input_grad):
                d_product = logp.exp_()  # the gradient is softmax minus one-hot
                d_product[torch.arange(len(rows_labels), device=logits.device), rows_labels] -= 1.0
                d_product = back(d_product)
                d_rows = d_product.to(hidden.dtype)
                if needs_weight:
                    _add_product(d_weight, d_rows, rows_hidden)
                if needs_hidden:
                    # rows_hidden is not read again, so its memory is reused
                    d_hidden.index_copy_(0, chunk, torch.mm(d_rows, matrix, out=rows_hidden))
                if needs_bias:
                    d_bias += d_product.sum(0)
                del d_product, d_rows
            del logits, logp, rows_hidden, back  # freed before the next chunk allocates its tensors
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx, d_total):
        # d_total contains the loss scale, so fp32 sums are multiplied before they are rounded to the weight's dtype.
        # d_hidden was rounded in `forward` already.
        def scaled(gradient, dtype):
            return None if gradient is None else gradient.mul_(d_total).to(dtype)

        d_hidden, d_weight, d_bias = ctx.saved_tensors
        each = (d_hidden, None if d_hidden is None else d_hidden.dtype), (d_weight, ctx.dtype), (d_bias, ctx.dtype)
        return *(scaled(*gradient) for gradient in each), None, None, None


def _add_product(total: Tensor, d_rows: Tensor, rows_hidden: Tensor) -> None:
    """Adds d_rows.T @ rows_hidden to total. Args: total: (V, H), fp32 or wider; d_rows: (rows, V); rows_hidden: (rows,
    H)."""
    if total.dtype == d_rows.dtype:
        total.addmm_(d_rows.T, rows_hidden)
        return
    for tile, columns in zip(total.split(SLICE), d_rows.split(SLICE, dim=1), strict=True):
        tile.add_(columns.T @ rows_hidden)
