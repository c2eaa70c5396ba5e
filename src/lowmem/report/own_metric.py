"""Calls a user's function (`metric=module.function`) at the end of each evaluation, and adds its values to the metrics.

The function has the signature (model, tokenizer) -> {name: value}. Lightning's sanity check also calls the function
once before the first step of a new run, so that its errors are found before training.
"""

from collections.abc import Callable, Mapping
from numbers import Real

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from transformers import PreTrainedTokenizerBase

from lowmem.report.end_of_evaluation import EndOfEvaluation
from lowmem.report.metrics import COLUMNS, Metrics
from lowmem.system.errors import Refused, out_of_memory

Metric = Callable[[torch.nn.Module, PreTrainedTokenizerBase], Mapping[str, float]]


class OwnMetric(Callback):
    """A callback that calls the user's function.

    Args:
        name: name of the function, for messages.
        function: the user's function.
        metrics: gets the values.
        at_end: the context of computations at the end of an evaluation.
    """

    def __init__(self, name: str, function: Metric, metrics: Metrics, at_end: EndOfEvaluation) -> None:
        self.name, self.function, self.metrics, self.at_end = name, function, metrics, at_end

    def on_validation_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        if self.at_end.stopped():
            return
        with self.at_end.computing(trainer, module):
            torch.manual_seed(self.at_end.seed)  # all ranks must draw equal numbers and run equal forward passes
            values = self._called(module.model)
        if not trainer.sanity_checking:
            self.metrics.own = values

    def _called(self, model: torch.nn.Module) -> dict[str, float]:
        requires_grad = {p: p.requires_grad for p in model.parameters()}
        try:
            values = self.function(model, self.at_end.tokenizer)
        except Exception as error:
            if out_of_memory(error):
                raise
            raise Refused(
                f"metric={self.name}: the function raised {type(error).__name__} ({error}). Fix it or type "
                "metric=null; debug=true prints the traceback."
            ) from error
        finally:
            for p, required in requires_grad.items():  # the function may have changed requires_grad
                p.requires_grad_(required)
        if not isinstance(values, Mapping) or not all(map(_is_figure, values.items())):
            raise Refused(
                f"metric={self.name}: the function returned {str(values)[:80]!r}, but must return a dict of numbers, "
                f"such as {{'accuracy': 0.5}}. These columns of metrics.csv are reserved: {', '.join(COLUMNS)}."
            )
        return {name: float(value) for name, value in values.items()}


def _is_figure(item: tuple[object, object]) -> bool:
    name, value = item
    scalar = isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    fits = isinstance(name, str) and name not in ("", *COLUMNS) and "," not in name and name.isprintable()
    return fits and scalar
