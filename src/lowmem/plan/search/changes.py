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


def changes(typed: Run, recipe: Run, named: Mapping[str, str], option: Mapping[str, str]) -> list[Change]:
    """Lists the changes from `typed` to `recipe`. Args: named: group -> technique of `typed`; option: of `recipe`."""
    changed = []
    if option["precision"] != named["precision"]:
        changed += _of_precision(typed, recipe, option["precision"])
    if option["optim"] != named["optim"]:
        changed += _of_optimizer(named["optim"], option["optim"])
    return changed


def _of_precision(typed: Run, recipe: Run, name: str) -> list[Change]:
    if recipe.rounds_weights:
        return [Change(Tier.ANOTHER, name)]
    if typed.rounds_weights or recipe.multiplies_in != typed.multiplies_in:
        return [Change(Tier.CLOSE, name)]
    return []  # masters, with matrix products in the same dtype


def _of_optimizer(typed_name: str, name: str) -> list[Change]:
    typed, chosen = techniques("optim")[typed_name], techniques("optim")[name]
    if (typed.update_of or typed_name) != (chosen.update_of or name):
        return [Change(Tier.ANOTHER, f"{name} for {typed_name}")]
    return [] if name == typed.on_host else [Change(Tier.CLOSE, f"{chosen.state_bits}-bit state")]
