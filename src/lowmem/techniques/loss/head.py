"""Runs a model without computing its logits, for losses that compute the logits in chunks or tiles.

A head multiplies hidden states (B, T, H) by a matrix (V, H). A loss that computes this product in chunks must still
run the rest of the model's code: layers between body and head (ModernBERT, BERT), and scale factors (Cohere, Granite)
or soft caps (Gemma, xLSTM) after the head. Models name these parts differently. So this module runs the model's own
forward pass, in which it replaces the head, or both head and body:

    enter     Called once per micro-batch. The body runs, and a pre-hook captures the head's input (B, T, H). The head
              gets only the first token of each row, and returns zeros (B, 1, V) without a product.
    finish    Called for each chunk or tile, if the model changes the head's output. The model's forward pass runs
              again: the body returns its previous output, and the head returns the product of the chunk or tile.

A replacement affects only calls from the thread that made it (`_Answers`), because with weights.order=by_layer several
micro-batches are in progress at the same time, each in its own thread.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowmem.model.magnitude import largest_magnitude, same
from lowmem.system.errors import Refused
from lowmem.system.torch_private import storage_key

UNEVEN = 5  # size of the first of two chunks, and of the first of two tiles, in the check `agrees`


class Head(NamedTuple):
    """The parts from which a loss computes the logits of a forward pass."""

    linear: nn.Linear
    hidden: Tensor  # (B, T, H), input of the head
    # maps a chunk or tile of the head's output (rows, columns) to its logits (rows, columns); None: the model returns
    # the head's output as logits
    finish: Callable[[Tensor], Tensor] | None


def enter(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Head:
    """Runs a forward pass in which the head's input is captured and the head returns zeros. The head's weight is not
    read.

    Args:
        model: the model.
        inputs: `MicroBatch.inputs`, each (B, T).

    Raises:
        Refused: the head is not an `nn.Linear`; the model does not call the head exactly once, with a positional
            argument, on all tokens; or the model changes the head's output and has no base model separate from the
            head.
    """
    head, body, here = model.get_output_embeddings(), model.base_model, get_ident()
    if type(head) is not nn.Linear:  # a subclass may compute more than a product
        raise _refused(model, "has no linear head")
    entered, products, outputs = [], [], []

    def before(_, args: tuple) -> tuple | None:
        if get_ident() != here:  # another thread computes another micro-batch
            return None
        if not args:
            raise _refused(model, "calls its head with keyword arguments")
        entered.append(args[0])
        return (args[0][:, :1], *args[1:])

    def zeros(hidden: Tensor) -> Tensor:
        return hidden.new_zeros(*hidden.shape[:-1], len(head.weight), dtype=multiplied_in(hidden))

    def after(_, __, product: Tensor) -> None:
        if get_ident() == here:
            products.append((product, _version(product)))

    def after_body(_, __, output: object) -> None:
        if get_ident() == here:
            outputs.append(output)

    hooks = [
        head.register_forward_pre_hook(before),
        head.register_forward_hook(after),
        body.register_forward_hook(after_body),
    ]
    try:
        with _answering(head, zeros):
            logits = model(**inputs, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    if len(entered) != 1 or entered[0].shape[:-1] != inputs["input_ids"].shape:
        raise _refused(model, "does not apply its head exactly once to every token")
    if _untouched(logits, *products[0]):
        return Head(head, entered[0], None)
    if body is model:
        raise _refused(model, "changes its logits after the head and has no base model separate from the head")

    def finish(product: Tensor) -> Tensor:
        with _answering(body, lambda *_, **__: outputs[0]), _answering(head, lambda *_, **__: product[None]):
            return model.forward(**inputs, use_cache=False).logits[0]

    return Head(head, entered[0], finish)


def multiplied_in(hidden: Tensor) -> torch.dtype:
    """Returns the dtype in which the head would compute: autocast's dtype if autocast is enabled, otherwise the dtype
    of `hidden`."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def finished(
    product: Tensor, finish: Callable[[Tensor], Tensor] | None, copy: bool = False
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Returns the logits in fp32, and a function that maps the gradient of the logits to the gradient of the head's
    output.

    Args:
        product: (rows, columns), a chunk or tile of the head's output.
        finish: see `Head`.
        copy: True: the caller will overwrite the logits, so they must not share memory with tensors that `finish` has
            saved for backward.
    """
    if finish is None:
        return product.float(), lambda d_logits: d_logits
    with torch.enable_grad():
        logits = finish(product.requires_grad_())

    def back(d_logits: Tensor) -> Tensor:
        return torch.autograd.grad(logits, product, d_logits.to(logits.dtype))[0]

    return logits.detach().to(torch.float32, copy=copy), back


def _untouched(logits: Tensor, product: Tensor, version: int) -> bool:
    """Returns True if the model returns its head's output as logits, without a change. Compares memory and version
    counters, not values: in `enter` the head returns zeros, which a soft cap would not change. Args: version: the
    version counter of `product` when the head returned it."""
    same = storage_key(logits) == storage_key(product)
    return same and logits.shape == product.shape and _version(product) == version


def _version(tensor: Tensor) -> int | None:
    """Returns the version counter of a tensor, or None for inference tensors, which have no counter."""
    return None if tensor.is_inference() else tensor._version


class _Answers(dict[int, Callable]):
    """Replacements of a module's forward pass: for each thread id, the function that this thread calls instead. Threads
    without an entry call the module's own forward pass. The module is patched while the dict is not empty."""

    def __init__(self, module: nn.Module) -> None:
        self.forward, self.patch = module.forward, patch.object(module, "forward", self)

    def __call__(self, *args, **kwargs) -> object:
        return self.get(get_ident(), self.forward)(*args, **kwargs)


@contextmanager
def _answering(module: nn.Module, answer: Callable) -> Iterator[None]:
    """Context manager that replaces a module's forward pass by a function, for calls from this thread."""
    answers = module.forward if isinstance(module.forward, _Answers) else _Answers(module)
    if not answers:
        answers.patch.__enter__()
    answers[get_ident()] = answer
    try:
        yield
    finally:
        del answers[get_ident()]
        if not answers:
            answers.patch.__exit__(None, None, None)


def _refused(model: nn.Module, why: str) -> Refused:
    return Refused(
        f"loss: {type(model).__name__} {why}, so this loss cannot compute its logits in pieces. Type loss=full, or "
        "another model= for data=preference."
    )


def agrees(model: PreTrainedModel, inputs: dict[str, Tensor], tiled: bool = False) -> bool:
    """Returns True if the logits that a loss computes with `enter` and `finished` equal the model's logits, up to
    rounding. Computes the logits in two chunks of unequal size, to detect code after the head whose result for a token
    depends on the token's position or on its neighbors.

    Args:
        model: the model.
        inputs: `MicroBatch.inputs`, each (B, T).
        tiled: True: also divide the vocabulary into two tiles of unequal size.

    Raises:
        Refused: see `enter`; or the head's output contains inf or nan.
    """
    theirs = model(**inputs, use_cache=False).logits.float().flatten(0, 1)
    head = enter(model, inputs)
    products = head.linear.forward(head.hidden.flatten(0, 1))  # without hooks, like the products of chunks
    try:
        ours = torch.cat([_finished(head, chunk, tiled) for chunk in products.tensor_split([UNEVEN])])
    except RuntimeError:  # the model's code after the head cannot compute a chunk
        return False
    if ours.shape != theirs.shape:
        return False
    # The tolerance is relative to the head's output: the logits may be huge where the model masks them. `same` accepts
    # inf and nan that are at the same places in both results, because a soft cap may overflow.
    return same(ours, theirs, largest_magnitude(products), [products.dtype], least=0.0)


def _finished(head: Head, products: Tensor, tiled: bool) -> Tensor:
    tiles = products.tensor_split([UNEVEN], dim=1) if tiled else [products]
    return torch.cat([finished(tile, head.finish)[0] for tile in tiles], dim=1)
