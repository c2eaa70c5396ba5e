"""What a recipe changes of the training that was typed, and how far that is from it.

Accumulation, checkpointing, the loss's chunks, where things lie and who steps them change no mathematics: they are
`AS_TYPED` and not named. What a precision does its class says; of an optimizer its yaml says whose update it makes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from lowmem.settle import Run
from lowmem.techniques import techniques


class Tier(IntEnum):
    """How far a training is from the one that was typed: a smaller one is closer."""

    AS_TYPED = 1
    CLOSE = 2  # products in 16 bits, with weights that are updated in fp32; state in fewer bits
    ANOTHER = 3  # weights that are rounded at every step; another optimizer


@dataclass(frozen=True)
class Change:
    tier: Tier
    says: str


def changes(asked: Run, recipe: Run, named: Mapping[str, str], option: Mapping[str, str]) -> list[Change]:
    """Args: named: group -> its technique in `asked`; option: the same of `recipe`."""
    found = []
    if option["precision"] != named["precision"]:
        found += _of_precision(asked, recipe, option["precision"])
    if option["optim"] != named["optim"]:
        found += _of_optimizer(named["optim"], option["optim"])
    return found


def _of_precision(asked: Run, recipe: Run, name: str) -> list[Change]:
    if recipe.rounds_weights:
        return [Change(Tier.ANOTHER, name)]
    if asked.rounds_weights or recipe.multiplies_in != asked.multiplies_in:
        return [Change(Tier.CLOSE, name)]
    return []  # masters of the same products


def _of_optimizer(asked: str, name: str) -> list[Change]:
    one, other = techniques("optim")[asked], techniques("optim")[name]
    if (one.update_of or asked) != (other.update_of or name):
        return [Change(Tier.ANOTHER, f"{name} for {asked}")]
    return [] if name == one.on_host else [Change(Tier.CLOSE, f"{other.state_bits}-bit state")]
