"""Reads the loss that a model adds to that of its tokens: the balance of a mixture of experts, if its config asks for
it.

A model computes it in its forward pass (`output_router_logits`), multiplies it by a factor of its config and adds it to
the loss, if it gets labels. Names and factors differ from model to model. So the model gets labels, and a loss function
that returns zero for its tokens: the rest of its loss is the auxiliary one, a mean over the tokens of a micro-batch.
Source: Fedus et al. 2021, arXiv 2101.03961.
"""

import torch
from torch import Tensor, nn

from lowmem.system.errors import Refused


class AuxiliaryLoss:
    """Listens to the forward passes of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._last: Tensor | None = None
        self._passes = 0  # under way: several with weights.order=by_layer
        if asked_for(model):
            model.register_forward_pre_hook(self._before, with_kwargs=True)
            model.register_forward_hook(self._after, always_call=True)

    def take(self) -> Tensor | None:
        """Returns the auxiliary loss of the last forward pass, a scalar, and forgets it; None if the model adds
        none."""
        last, self._last = self._last, None
        return last

    def _before(self, model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if not self._passes:
            self._theirs, model.loss_function = model.loss_function, _nothing
        self._passes += 1
        return args, kwargs | {"labels": kwargs["input_ids"]}

    def _after(self, model: nn.Module, args: tuple, output: object) -> None:
        self._passes -= 1
        if not self._passes:
            model.loss_function = self._theirs
        if output is None:  # it raised
            return
        if getattr(output, "aux_loss", None) is None:
            raise Refused(
                f"model.architecture.output_router_logits=true: {type(model).__name__} has no auxiliary loss to add to "
                "its own. Type model.architecture.output_router_logits=false."
            )
        self._last = output.loss


def asked_for(model: nn.Module) -> bool:
    config = getattr(model, "config", None)  # theirs: a model of transformers
    return config is not None and bool(getattr(config.get_text_config(decoder=True), "output_router_logits", False))


def _nothing(logits: Tensor, *_, **__) -> Tensor:
    return torch.zeros((), device=logits.device)
