"""Lists how a recipe's training differs from the typed training, and how large each difference is.

Accumulation, checkpointing, the chunks of the loss, and the place of tensors and of the step do not change the computed
update: such recipes are `AS_TYPED`, and these differences are not listed. A precision's class declares its arithmetic;
an optimizer's yaml declares whether it computes the update of another optimizer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from lowmem.config.declarations import techniques
from lowmem.config.settle import Run


class Tier(IntEnum):
    """The distance of a training from the typed training: a smaller value is closer."""

    AS_TYPED = 1
    CLOSE = 2  # matrix products in 16 bits with fp32 updates of the weights; optimizer state in fewer bits
    ANOTHER = 3  # weights that are rounded to 16 bits at every step; another optimizer


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
