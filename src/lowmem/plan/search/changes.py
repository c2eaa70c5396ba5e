"""Lists how the training of a recipe differs from the training that the user typed, and how large each difference is.
The planner prefers recipes with smaller differences.

Only precision and optimizer are compared. All other choices of a recipe (such as micro-batch size, checkpointing, the
chunks of the loss, the strategy, and where tensors are stored and updated) do not change the update, apart from
rounding and dropout. So recipes that differ only in these choices are `AS_TYPED`. The class of a precision declares its
dtypes. The yaml of an optimizer declares whether the optimizer computes the same update as another optimizer
(`update_of`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from lowmem.config.declarations import techniques
from lowmem.config.settle import Run


class Tier(IntEnum):
    """How far a training (a precision with an optimizer) is from the typed training; a smaller value is closer."""

    AS_TYPED = 1
    CLOSE = 2  # another dtype of matrix products or of optimizer state; fp32 weights instead of 16-bit weights
    ANOTHER = 3  # another precision that rounds weights to 16 bits at every update; another update rule


@dataclass(frozen=True)
class Change:
    tier: Tier
    says: str


def changes(typed: Run, recipe: Run, named: Mapping[str, str], option: Mapping[str, str]) -> list[Change]:
    """Lists the changes from `typed` to `recipe`. Args: named: group -> technique in `typed`; option: group ->
    technique in `recipe`."""
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
    return []  # matrix products in the same dtype, for example with masters in host memory


def _of_optimizer(typed_name: str, name: str) -> list[Change]:
    typed, chosen = techniques("optim")[typed_name], techniques("optim")[name]
    if (typed.update_of or typed_name) != (chosen.update_of or name):
        return [Change(Tier.ANOTHER, f"{name} for {typed_name}")]
    return [] if name == typed.on_host else [Change(Tier.CLOSE, f"{chosen.state_bits}-bit state")]
