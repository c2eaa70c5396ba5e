"""Checks a model with forward passes over three tokens, on the device of the weights."""

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lowmem.system.errors import Refused, last_line
from lowmem.system.random_state import forked

# Errors that models of transformers raise if they cannot work with the values of their config. ValueError is not
# listed, because constructors also raise it for an attention implementation that they do not support.
FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError)


def check_causal(model: PreTrainedModel) -> None:
    """Checks that no position sees later tokens. If at least one module has a bool attribute `is_causal`, and this
    attribute is True in all such modules, the model is not tested. Otherwise, the test computes two forward passes that
    differ only after position 0, and compares the logits of position 0, with a relative tolerance of 1e-4.

    Raises:
        Refused: the model is not causal. Its loss would fall to 0, because each position sees the token that it should
            predict.
    """
    says = {module.is_causal for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool)}
    if says == {True} or not _looks_ahead(model):
        return
    key = next((key for key in ("is_decoder", "causal") if getattr(model.config, key, None) is False), None)
    instead = f", or type model.architecture={{{key}:true}} to train it as a decoder" if key else ""
    raise Refused(
        f"model.name={model.config.name_or_path or model.config.model_type}: {type(model).__name__} is an encoder "
        "here: its attention is not causal, so every position sees the token that it should predict. "
        f"Choose a causal model, such as model=gpt2{instead}."
    )


def refuse_architecture(error: Exception, build: Callable[[], PreTrainedModel]) -> None:
    """Explains an error in a run's first step by raising Refused if the model alone raises the same error in a forward
    pass over three tokens. Otherwise returns. transformers also builds models that cannot compute a forward pass, for
    example a model that is configured to route each token to more experts than it has.

    Args:
        error: the error of the run.
        build: builds the model with random fp32 weights, on the CPU.

    Raises:
        Refused: the model alone raises an error of the same class, and the last lines of the two messages differ at
            most in numbers, such as tensor sizes.
    """
    try:
        model = build()
    except Exception:  # must not hide the error of the run
        return
    try:
        _first_logits(model, (0, 1, 2))
    except (*FAILURES, ValueError) as again:
        if type(again) is type(error) and _without_numbers(again) == _without_numbers(error):
            raise Refused(
                f"model.architecture: {model.config.model_type} cannot compute a forward pass with these values. "
                f"{type(error).__name__}: {last_line(error)}"
            ) from error


def _without_numbers(error: Exception) -> str:
    return re.sub(r"\d+", "0", last_line(error))


def _looks_ahead(model: PreTrainedModel) -> bool:
    """Returns True if later tokens change the logits of position 0 by more than 1e-4, relative to the largest of these
    logits. In untrained encoders this relative change is a few thousandths. Returns False if the forward pass raises a
    ValueError or one of FAILURES, because training will raise the error again and report it."""
    try:
        logits, changed = (_first_logits(model, row) for row in ((0, 1, 2), (0, 3, 4)))
    except (*FAILURES, ValueError):
        return False
    return bool((logits - changed).abs().max() > 1e-4 * logits.abs().max())


@torch.no_grad()
def _first_logits(model: PreTrainedModel, row: Sequence[int]) -> Tensor:
    """Returns the logits (V,) of position 0 for a row of token ids, computed in eval mode and converted to fp32."""
    training, device = model.training, next(model.parameters()).device
    ids = torch.tensor([row], device=device) % model.get_input_embeddings().num_embeddings  # (1, T)
    model.eval()
    try:
        with forked(device):
            return model(input_ids=ids, use_cache=False).logits[0, 0].float()
    finally:
        model.train(training)
