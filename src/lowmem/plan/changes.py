"""What a recipe changes of the training that was typed, and how far that is from it.

Accumulation, checkpointing, the loss's chunks, where things lie and who steps them change no mathematics: they are
`AS_TYPED` and not named. What a precision does its class says; of an optimizer its yaml says whose update it makes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from omegaconf import DictConfig

from lowmem.settings import SIXTEEN, Settings
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


def changes(asked: DictConfig, recipe: DictConfig, named: Mapping[str, str], option: Mapping[str, str]) -> list[Change]:
    """Args: named: group -> its technique in `asked`; option: the same of `recipe`."""
    return [*_of_precision(Settings(asked), Settings(recipe), option), *_of_optimizer(named["optim"], option["optim"])]


def _of_precision(asked: Settings, recipe: Settings, option: Mapping[str, str]) -> list[Change]:
    name = option["precision"]
    if recipe.rounds_weights and not asked.rounds_weights:
        return [Change(Tier.ANOTHER, name)]
    if recipe.multiplies_in != asked.multiplies_in and recipe.multiplies_in in SIXTEEN:
        return [Change(Tier.CLOSE, name)]
    return []


def _of_optimizer(asked: str, name: str) -> list[Change]:
    one, other = techniques("optim")[asked], techniques("optim")[name]
    update, updates = one.update_of or asked, other.update_of or name
    if update != updates:
        return [Change(Tier.ANOTHER, f"{name} for {asked}")]
    return [Change(Tier.CLOSE, f"{other.state_bits}-bit state")] if one.state_bits != other.state_bits else []
