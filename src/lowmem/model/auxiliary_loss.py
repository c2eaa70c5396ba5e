"""Reads the auxiliary load-balancing loss of a mixture-of-experts model, if its config sets output_router_logits.
`CausalLM` adds this loss to the loss of each micro-batch.

A transformers model that gets labels computes the auxiliary loss in its forward pass, multiplies it by a factor of its
config and adds the product to the language modeling loss. The names of the attributes and factors differ between
models. So hooks pass labels to the model, and replace its loss function by a function that returns zero. The model then
returns only the auxiliary loss, times its factor.

The auxiliary loss is proportional to a sum over experts. Each expert's term is the share of tokens that are routed to
this expert, multiplied by the mean probability that the router assigns to it. Both factors are means over the real
tokens of a micro-batch, including prompts but not padding. To exclude padding, the model gets an attention mask that
marks the real tokens. A second hook removes the mask before it reaches the model's body, whose attention would use it.
The auxiliary loss of a window is the mean over the window's micro-batches, weighted by `MicroBatch.weight`, which is
for example the number of tokens with a label. This mean differs from the auxiliary loss of one large micro-batch with
the same tokens.
Source: Fedus et al. 2021, arXiv 2101.03961.
"""

import torch
from torch import Tensor, nn

from lowmem.system.errors import Refused


class AuxiliaryLoss:
    """Reads the auxiliary loss in hooks on a model's forward pass. A forward pass raises Refused if the model class
    computes no auxiliary loss. Args: model: a model for which `asked_for` returns True."""

    def __init__(self, model: nn.Module) -> None:
        self._last: Tensor | None = None  # auxiliary loss of the last forward pass, times its factor
        self._passes = 0  # number of forward passes in progress; may exceed 1 with weights.order=by_layer
        self._real: Tensor | None = None  # (B, T) bool, mask for the next forward pass
        self._mask: Tensor | None = None  # mask of the latest forward pass, until `_before_body` removes it
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.base_model.register_forward_pre_hook(self._before_body, with_kwargs=True)
        model.register_forward_hook(self._after, always_call=True)

    def count(self, real: Tensor | None) -> None:
        """Selects the tokens that the auxiliary loss of the next forward pass includes. Args: real: (B, T) bool, True
        for included tokens; None: all tokens are included."""
        self._real = real

    def take(self) -> Tensor:
        """Returns the auxiliary loss of the last forward pass, times its factor, as a scalar. Call this method only
        once per forward pass, because it drops the reference to the loss."""
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
        """Removes the mask from the arguments of the model's body."""
        mask, self._mask = self._mask, None
        if mask is None:
            return None
        kept = {name: value for name, value in kwargs.items() if value is not mask}
        return tuple(None if value is mask else value for value in args), kept

    def _after(self, model: nn.Module, args: tuple, output: object) -> None:
        self._passes -= 1
        if not self._passes:
            model.loss_function = self._theirs
        if output is None:  # the forward pass raised an error
            return
        if getattr(output, "aux_loss", None) is None:
            raise Refused(
                f"model.architecture.output_router_logits=true: {type(model).__name__} computes no auxiliary loss. "
                "Type +model.architecture.output_router_logits=false."
            )
        self._last = output.loss


def asked_for(model: nn.Module) -> bool:
    """Returns True if a model's config sets output_router_logits."""
    config = getattr(model, "config", None)  # theirs: a model of transformers
    return config is not None and bool(getattr(config.get_text_config(decoder=True), "output_router_logits", False))


def _nothing(logits: Tensor, *_, **__) -> Tensor:
    return torch.zeros((), device=logits.device)
