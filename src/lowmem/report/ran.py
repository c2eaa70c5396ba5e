"""Describes a run by its chosen techniques and typed overrides, for the title of memory.png, the summary and W&B's
tags."""

from collections.abc import Mapping, Sequence

IDLE = (None, "none", "null", "auto")  # choices without an effect


def chosen(choices: Mapping[str, str | None]) -> list[str]:
    """Returns "group=technique" for each group whose technique has an effect, the model first. The logger and Hydra's
    own groups are left out.

    Args:
        choices: group -> technique, in Hydra's order: the last group of the config's defaults comes first.
    """
    ours = {group: choice for group, choice in choices.items() if "/" not in group and group != "logger"}
    named = [f"{group}={choice}" for group, choice in reversed(ours.items()) if choice not in IDLE]
    return sorted(named, key=lambda line: not line.startswith("model="))


def besides(choices: Mapping[str, str | None], overrides: Sequence[str]) -> list[str]:
    """Returns the typed overrides that do not choose the technique of a group."""
    return [line for line in overrides if line.lstrip("+").partition("=")[0] not in choices]
