"""Describes a run by the choices that were typed, for a picture's title, a run's name and its tags."""

from collections.abc import Mapping, Sequence

IDLE = (None, "none", "null", "auto")  # choices without an effect


def chosen(choices: Mapping[str, str | None]) -> list[str]:
    """Returns `group=choice` for every group whose choice has an effect, the model first.

    Args:
        choices: as Hydra lists them, the last group of the config's defaults first.
    """
    ours = {group: choice for group, choice in choices.items() if "/" not in group and group != "logger"}
    named = [f"{group}={choice}" for group, choice in reversed(ours.items()) if choice not in IDLE]
    return sorted(named, key=lambda line: not line.startswith("model="))


def besides(choices: Mapping[str, str | None], overrides: Sequence[str]) -> list[str]:
    """Returns the typed overrides that do not choose from a group."""
    return [line for line in overrides if line.lstrip("+").partition("=")[0] not in choices]
