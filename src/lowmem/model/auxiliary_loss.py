"""Reads the loss that a model adds to that of its tokens: the balance of a mixture of experts, if its config asks for
it.

A model computes it in its forward pass (`output_router_logits`), multiplies it by a factor of its config and adds it to
the loss, if it gets labels. Names and factors differ from model to model. So the model gets labels, and a loss function
that returns zero for its tokens: the rest of its loss is the auxiliary one.

It multiplies, for each expert, the share of tokens sent to it by its mean probability, and both are means over the real
tokens of one micro-batch: prompts count, filler does not. The model gets a mask that says so, and its body, which would
hand the mask on to attention, does not. A product of means over a micro-batch is not that over a window: the window's
is the mean of its micro-batches', weighted by the tokens to be learnt. Source: Fedus et al. 2021, arXiv 2101.03961.
"""

import torch
from torch import Tensor, nn

from lowmem.system.errors import Refused


class AuxiliaryLoss:
    """Listens to the forward passes of a model. Args: model: `asked_for` returns True for it."""

    def __init__(self, model: nn.Module) -> None:
        self._last: Tensor | None = None
        self._passes = 0  # under way: several with weights.order=by_layer
        self._real: Tensor | None = None  # (B, T) bool, of the pass that begins next; a pass begins without a pause
        self._mask: Tensor | None = None  # of the pass that has begun last
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.base_model.register_forward_pre_hook(self._before_body, with_kwargs=True)
        model.register_forward_hook(self._after, always_call=True)

    def count(self, real: Tensor | None) -> None:
        """Says which tokens the next forward pass counts. Args: real: (B, T) bool; None: all."""
        self._real = real

    def take(self) -> Tensor:
        """Returns the auxiliary loss of the last forward pass, a scalar, and forgets it."""
        last, self._last = self._last, None
        return last

    def _before(self, model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if not self._passes:
            self._theirs, model.loss_function = model.loss_function, _nothing
        self._passes += 1
        self._mask, self._real = self._real, None
        mask = {} if self._mask is None else {"attention_mask": self._mask}
        return args, kwargs | {"labels": kwargs["input_ids"]} | mask

    def _before_body(self, body: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Takes the mask away again."""
        mask, self._mask = self._mask, None
        if mask is None:
            return None
        kept = {name: value for name, value in kwargs.items() if value is not mask}
        return tuple(None if value is mask else value for value in args), kept

    def _after(self, model: nn.Module, args: tuple, output: object) -> None:
        self._passes -= 1
        if not self._passes:
            model.loss_function = self._theirs
        if output is None:  # it raised
            return
        if getattr(output, "aux_loss", None) is None:
            raise Refused(
                f"model.architecture.output_router_logits=true: {type(model).__name__} computes no auxiliary loss. "
                "Type +model.architecture.output_router_logits=false."
            )
        self._last = output.loss


def asked_for(model: nn.Module) -> bool:
    """Returns whether a model's config asks for an auxiliary loss."""
    config = getattr(model, "config", None)  # theirs: a model of transformers
    return config is not None and bool(getattr(config.get_text_config(decoder=True), "output_router_logits", False))


def _nothing(logits: Tensor, *_, **__) -> Tensor:
    return torch.zeros((), device=logits.device)
