"""Computes the cross entropy of the next token, summed over the tokens that count.

A loss takes the model and a micro-batch, whose `labels` (B, T) [b, t] is the token that follows `input_ids[b, t]`, or
-100 if it is not to be learnt. It returns the *sum* in fp32, so that the caller can divide it by the tokens of the full
window.

`full` holds the logits (B, T, V) in the computation's dtype, again in fp32, and their gradient: with a vocabulary of
150 000 they are the peak of the run. `Chunked` holds the logits of a few rows and computes the gradient in the forward
pass, while the chunk's logits still exist, so nothing is computed twice. Same idea: Hsu et al. 2024, arXiv 2410.10989.
What the model computes before and after the product with the head stays the model's own (`head.py`).
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

VERIFIED = 16  # tokens per sequence
SLICE = 1 << 13  # tokens of the vocabulary whose 16-bit products wait to be added in fp32


class Loss:
    """The base class of a loss that `CausalLM` trains with, and of losses that wrap another one."""

    needs: type[MicroBatch] = MicroBatch  # its `weight` says over what the loss is a mean
    own_logits = False  # True if it computes the logits itself, which a class says by overriding `verify`
    shows: tuple[str, ...] = ()  # the names of its `figures`
    head_in_tiles = False  # True if it reads the head's weight in tiles of the vocabulary, which may come from the host
    of_pairs = False  # True for a function of answers that people compared or rated; no other loss computes it
    compares = False  # True: with the log-probabilities that a reference model gives the answers

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.own_logits = cls.verify is not Loss.verify

    def __call__(self, model: PreTrainedModel, batch: MicroBatch) -> Tensor:
        """Returns the sum over the tokens that count, fp32, shape ()."""
        raise NotImplementedError

    def figures(self) -> dict[str, Tensor]:
        """Returns what people look at besides the loss: sums over what `weight` counts, by name, for the last batch
        that was computed without gradients. One that is a mean over something else is (2,): its sum, and its count."""
        return {}

    def callbacks(self) -> list[Callback]:
        """Returns callbacks that this loss needs, such as a pass over the whole window before its first micro-batch."""
        return []

    def verify(self, model: PreTrainedModel, batch: MicroBatch) -> None:
        """Checks that the loss is that of the model's own logits; `Verified` and a pipeline call it before the first
        step.

        Args:
            batch: a few real tokens of two sequences.

        Raises:
            Refused: a model whose logits are another function of its head's input.
        """


class Function(Loss):
    """A plain function as a loss, such as `full` or one that a user's yaml names: it takes the model's logits."""

    def __init__(self, function: Callable[[PreTrainedModel, MicroBatch], Tensor]) -> None:
        self.function = function

    def __call__(self, model: PreTrainedModel, batch: MicroBatch) -> Tensor:
        return self.function(model, batch)


def as_loss(loss: object) -> Loss:
    """Returns a loss as it is, and a function as a `Function`.

    Raises:
        Refused: an object of another class: its `verify`, and weights of its own, would be missed without a word.
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
    """Computes the same number as `full` with the logits of at most `rows` tokens in memory at once."""

    def __init__(self, rows: int) -> None:
        if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
            raise Refused(f"loss.rows={rows}: give a whole number of tokens, at least 1, such as loss.rows=1024.")
        self.rows = rows

    def __call__(self, model: PreTrainedModel, batch: MicroBatch) -> Tensor:
        head = enter(model, batch.inputs)
        hidden, labels = head.hidden.flatten(0, 1), batch.labels.flatten()  # (B x T, H)
        hidden = hidden.to(multiplied_in(hidden))  # autocast does not act inside the function
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
    """Checks, before the first step and in the run's precision: that a loss which computes the logits itself computes
    the model's own; that a model whose rows hold several documents keeps them apart; that rows of different lengths do
    not depend on each other; and that modules computed in slices are the same function.

    Args: packed: rows hold several documents.
    """

    def __init__(self, packed: bool = False) -> None:
        self.packed, self.done = packed, False

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        loaders = trainer.train_dataloader, *_validation(trainer)
        self._verify(trainer, module, loaders, lambda: next(iter(trainer.train_dataloader)).micro_batches[0])

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.validating and not self.done:  # not before training either
            self._verify(trainer, module, _validation(trainer), lambda: next(iter(trainer.val_dataloaders[0]))[0])

    def _verify(
        self,
        trainer: Trainer,
        module: LightningModule,
        loaders: Iterable[WindowLoader | ValidationLoader],
        first: Callable[[], MicroBatch],
    ) -> None:
        """Args: loaders: whose rows are read; first: returns a micro-batch of them."""
        self.done = True
        for loader in loaders:
            _check_rows(module, loader)
        of_loss = module.loss.own_logits and not trainer.validating
        if not (self.packed or of_loss or module.tiles):
            return
        two_rows = first().each(lambda tensor: tensor[:2].to(module.device))
        few = two_rows.each(lambda tensor: tensor[:, :VERIFIED])
        module.model.eval()  # without dropout; the module's own `on_train_start` comes later
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
    rows = loader.sequences
    if rows.filler and not rows.positions:
        together = len(rows.example(loader.share.batch_size, 1).input_ids)
        lengths.check_rows(module.model, rows.longest, together)


def counted(labels: Tensor, count: int | None = None) -> Tensor:
    """Returns the indices of the labels (N,) to be learnt. Args: count: of them; None: it is not known.

    An unknown count is read from the labels, for which the host has to wait for a card. Only here does a loss read
    values: a trace by shape has none, and assumes that all are learnt."""
    if count == len(labels):
        return torch.arange(count, device=labels.device)
    learnt = labels != IGNORED
    if count is not None:
        return torch.nonzero_static(learnt, size=count).squeeze(1)
    return torch.arange(len(labels), device=labels.device) if learnt.all() else learnt.nonzero().squeeze(1)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes sum_i -log softmax(head(hidden_i))[label_i], one chunk of rows after the other."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, chunks, finish):  # noqa: PLR0913
        """Takes hidden (N, H); weight (V, H); bias (V) or None; labels (N); chunks: the indices of the labels to be
        learnt, in parts; finish: that of `Head`. Returns the sum in fp32."""
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        matrix = weight.to(hidden.dtype)
        d_hidden = torch.zeros_like(hidden) if needs_hidden else None
        # In fp32, 4 bytes per element of the head: a sum over thousands of rows in 16 bits would lose the small ones.
        wide = torch.promote_types(weight.dtype, torch.float32)
        d_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=wide) if needs_bias else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        # Positions that do not count never reach the head. They are left out chunk by chunk, so that the bytes do not
        # depend on their number, which a prediction does not know.
        for chunk in chunks:
            rows_hidden, rows_labels = hidden.index_select(0, chunk), labels[chunk]
            product = F.linear(rows_hidden, matrix, None if bias is None else bias.to(hidden.dtype))
            logits, back = finished(product, finish)  # (rows, V), fp32
            del product
            logp = torch.log_softmax(logits, dim=-1)
            total += F.nll_loss(logp, rows_labels, reduction="sum")
            if any(ctx.needs_input_grad):
                d_product = logp.exp_()  # softmax minus one-hot is the gradient of the sum
                d_product[torch.arange(len(rows_labels), device=logits.device), rows_labels] -= 1.0
                d_product = back(d_product)
                d_rows = d_product.to(hidden.dtype)
                if needs_weight:
                    _add_product(d_weight, d_rows, rows_hidden)
                if needs_hidden:
                    # the product may overwrite rows_hidden, which is not read again
                    d_hidden.index_copy_(0, chunk, torch.mm(d_rows, matrix, out=rows_hidden))
                if needs_bias:
                    d_bias += d_product.sum(0)
                del d_product, d_rows
            del logits, logp, rows_hidden, back  # before the next chunk's are made
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx, d_total):
        def scaled(gradient, dtype):  # scales before it rounds to 16 bits, so that a loss scale has its effect
            return None if gradient is None else gradient.mul_(d_total).to(dtype)

        d_hidden, d_weight, d_bias = ctx.saved_tensors
        each = (d_hidden, None if d_hidden is None else d_hidden.dtype), (d_weight, ctx.dtype), (d_bias, ctx.dtype)
        return *(scaled(*gradient) for gradient in each), None, None, None


def _add_product(total: Tensor, d_rows: Tensor, rows_hidden: Tensor) -> None:
    """Adds d_rows (rows, V) transposed x rows_hidden (rows, H) to total (V, H)."""
    if total.dtype == d_rows.dtype:
        total.addmm_(d_rows.T, rows_hidden)
        return
    for tile, columns in zip(total.split(SLICE), d_rows.split(SLICE, dim=1), strict=True):
        tile.add_(columns.T @ rows_hidden)
