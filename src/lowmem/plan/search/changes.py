"""Lists what a recipe changes of the training that was typed, and how far it moves away from it.

Accumulation, checkpointing, the chunks of the loss, and where tensors lie and are stepped change no mathematics: they
are `AS_TYPED` and not named. The class of a precision declares what it does; the yaml of an optimizer declares whose
update it makes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from lowmem.config.declarations import techniques
from lowmem.config.settle import Run


class Tier(IntEnum):
    """Ranks how far a training is from the typed one: a smaller value is closer."""

    AS_TYPED = 1
    CLOSE = 2  # products in 16 bits, with weights that are updated in fp32; state in fewer bits
    ANOTHER = 3  # weights that are rounded at every step; another optimizer


@dataclass(frozen=True)
class Change:
    tier: Tier
    says: str


def changes(asked: Run, recipe: Run, named: Mapping[str, str], option: Mapping[str, str]) -> list[Change]:
    """Lists the changes from `asked` to `recipe`. Args: named: group -> technique of `asked`; option: of `recipe`."""
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
    return []  # masters, with matrix products in the same dtype


def _of_optimizer(asked: str, name: str) -> list[Change]:
    one, other = techniques("optim")[asked], techniques("optim")[name]
    if (one.update_of or asked) != (other.update_of or name):
        return [Change(Tier.ANOTHER, f"{name} for {asked}")]
    return [] if name == one.on_host else [Change(Tier.CLOSE, f"{other.state_bits}-bit state")]
