"""Enters a model's head without its logits: finds the head's input, and what the model does to the logits afterwards.

A head multiplies hidden states (B, T, H) by a matrix (V, H). To compute that product in chunks and still compute the
same function, everything around it must be the model's own: layers between the body and the head (ModernBERT, BERT),
factors (Cohere, Granite) and caps (Gemma, xLSTM) after it, whatever their names are. So the model itself runs, but its
head gets a single token, and the input that it would have had is caught there. If the model changes what the head
returns, its forward pass is entered once more per chunk, in which body and head return what is already known.
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

UNEVEN = 5  # tokens of the first of two chunks; also tokens of the vocabulary in the first of two tiles


class Head(NamedTuple):
    """The head's part of one forward pass."""

    linear: nn.Linear
    hidden: Tensor  # (B, T, H): the head's input
    finish: Callable[[Tensor], Tensor] | None  # products (N, V) -> logits (N, V); None: they are the logits


def enter(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Head:
    """Runs a forward pass in which the head sees only the first token and returns zeros, without reading its weight.

    Args:
        inputs: fields of `MicroBatch`, each (B, T).

    Raises:
        Refused: the head is not one matrix that is applied once to every token.
    """
    head, body, here = model.get_output_embeddings(), model.base_model, get_ident()
    if type(head) is not nn.Linear:  # a subclass may compute more than a product
        raise _refused(model, "has no linear head")
    entered, products, outputs = [], [], []

    def before(_, args: tuple) -> tuple | None:
        if get_ident() != here:  # another micro-batch is under way in its own thread
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
    """Returns the dtype in which the head would multiply: autocast acts on modules alone."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def finished(
    product: Tensor, finish: Callable[[Tensor], Tensor] | None, copy: bool = False
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Returns the fp32 logits of a product with the head, and a function from their gradient to the product's.

    Args: finish: that of `Head`; copy: the logits will be overwritten, and the tensors from which they are made must
    stay.
    """
    if finish is None:
        return product.float(), lambda d_logits: d_logits
    with torch.enable_grad():
        logits = finish(product.requires_grad_())

    def back(d_logits: Tensor) -> Tensor:
        return torch.autograd.grad(logits, product, d_logits.to(logits.dtype))[0]

    return logits.detach().to(torch.float32, copy=copy), back


def _untouched(logits: Tensor, product: Tensor, version: int) -> bool:
    """Returns True if a model returns its head's result unchanged. Values do not decide it: a cap does not change small
    ones."""
    same = storage_key(logits) == storage_key(product)
    return same and logits.shape == product.shape and _version(product) == version


def _version(tensor: Tensor) -> int | None:
    """Returns how often a tensor was changed in place; None for inference tensors, which do not count it."""
    return None if tensor.is_inference() else tensor._version


class _Answers(dict[int, Callable]):
    """Stands in for a module's forward pass, by thread: micro-batches whose passes are under way at once, each in a
    thread of its own, begin and end in the same order, and none may find what another one has put here."""

    def __init__(self, module: nn.Module) -> None:
        self.forward, self.patch = module.forward, patch.object(module, "forward", self)

    def __call__(self, *args, **kwargs) -> object:
        return self.get(get_ident(), self.forward)(*args, **kwargs)


@contextmanager
def _answering(module: nn.Module, answer: Callable) -> Iterator[None]:
    """Lets a function answer this thread's calls of a module."""
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
    """Returns True if the input that `enter` caught leads to the model's own logits up to rounding, also in uneven
    chunks: a function that depends on a token's place or neighbours fails there.

    Args: inputs: fields of `MicroBatch`, each (B, T); tiled: also in uneven tiles of the vocabulary.
    """
    theirs = model(**inputs, use_cache=False).logits.float().flatten(0, 1)
    head = enter(model, inputs)
    products = head.linear.forward(head.hidden.flatten(0, 1))  # without hooks, which would not run for a chunk
    try:
        ours = torch.cat([_finished(head, chunk, tiled) for chunk in products.tensor_split([UNEVEN])])
    except RuntimeError:  # it expects the shape of the full product
        return False
    if ours.shape != theirs.shape:
        return False
    # Relative to the products: masked logits are as large as numbers can be. A cap may overflow, in both.
    return same(ours, theirs, largest_magnitude(products), [products.dtype], least=0.0)


def _finished(head: Head, products: Tensor, tiled: bool) -> Tensor:
    tiles = products.tensor_split([UNEVEN], dim=1) if tiled else [products]
    return torch.cat([finished(tile, head.finish)[0] for tile in tiles], dim=1)
