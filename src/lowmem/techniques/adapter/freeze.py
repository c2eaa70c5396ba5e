"""Freezes weights of the model by name (`freeze=`), in addition to the weights that an adapter freezes.

A frozen weight has no gradient, no optimizer state, no master and no weight decay, and checkpoints do not contain it.
The price is lower quality, because fewer weights can adapt to the data.
"""

import logging
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from lowmem.model.trainable import trainable
from lowmem.system.errors import Refused

log = logging.getLogger(__name__)


def none(model: nn.Module) -> None:
    """Adds no adapter (`adapter=none`): the model's own weights are trained."""


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freezes, in place, all parameters whose names match a pattern.

    Args:
        model: the model, with its adapter if there is one.
        patterns: fnmatch patterns for full parameter names, such as `transformer.wte.*`. A tied parameter is frozen if
            one of its names matches.

    Raises:
        Refused: a pattern matches no parameter, or no parameter is left to train.
    """
    every = list(model.named_parameters(remove_duplicate=False))
    before = {p for p in model.parameters() if not p.requires_grad}
    for pattern in patterns:
        named = [p for name, p in every if fnmatchcase(name, pattern)]
        if not named:
            raise Refused(
                f"freeze: no parameter name of {type(model).__name__} matches {pattern}. Names go from {every[0][0]} "
                f"to {every[-1][0]}; type a pattern such as '{every[0][0].rpartition('.')[0]}.*'."
            )
        if before.issuperset(named):
            log.warning(
                f"freeze: {pattern} has no effect, because adapter= already freezes the parameters that it matches."
            )
        for p in named:
            p.requires_grad_(False)
    left, total = sum(p.numel() for _, p in trainable(model)), sum(p.numel() for p in model.parameters())
    if not left:
        raise Refused(
            f"freeze={list(patterns)}: these patterns freeze every parameter, so nothing is left to train. Remove one "
            "of them."
        )
    if patterns:
        log.info(f"freeze: {left:,} of {total:,} parameters are trainable.")
