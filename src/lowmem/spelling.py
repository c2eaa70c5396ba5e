"""What was typed and is not there: one sentence with the nearest right line, in the place of Hydra's page of text.

Nothing heavy is imported.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches

from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf

from lowmem.errors import Refused
from lowmem.overrides import CONF, FUNCTION, composed, is_group, key, unquoted

NEAR = 0.7  # of difflib: below it a suggestion is a guess
IN_HYDRA = {"hydra/launcher": ["basic"], "hydra/sweeper": ["basic"]}  # choices that have no yaml here


def check_lines(lines: Sequence[str]) -> None:
    """What a line alone can tell.

    Raises:
        Refused: a group that is taken out.
    """
    for line in lines:
        name, nothing = key(line), "null" in line.partition("=")[2].split(",")
        if is_group(name) and name in _needed() and (line.startswith("~") or nothing):
            raise Refused(f"{line}: a run needs one. Type {name}=<one of {', '.join(_choices(name))}>.")


def sets_nothing(word: str) -> str:
    """A sentence about a word that is neither a line nor a flag of Hydra's."""
    name, _, value = word.lstrip("-").partition("=")
    return f"{word}: this sets nothing. Type {_in_shell(f'{name}={value}') if value else f'{name}=<value>'}, or --help."


def explained(error: Exception, lines: Sequence[str], name: str = "config") -> str:
    """Why Hydra cannot make the config `name` with these lines."""
    try:
        return next(_unknown(lines, name))
    except (StopIteration, HydraException):
        pass  # it is something else
    if isinstance(error, OverrideParseException):
        return _unreadable(unquoted(error.override))
    said = [str(one).strip().partition("\n")[0].rstrip(" .") for one in (error, error.__cause__) if one]
    return ". ".join(filter(None, said)) + "."


def no_such_key(line: str, known: Iterable[str]) -> str:
    """A sentence about a line whose key is none of those `known`."""
    name, _, value = line.lstrip("+").partition("=")
    groups = [group for group in _groups() if "/" not in group]
    near = nearest(name, {*known, *groups})
    if near is None:
        return f"{line}: nothing reads {name}. Type --help for what there is."
    if is_group(near) and value not in _choices(near):
        return f"{line}: nothing reads {name}. Type {near}={_choice_like(value, near)}."
    return f"{line}: nothing reads {name}. Type {_in_shell(f'{near}={value}')}."


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Of dotted keys: beside it, or with the same end, or with an end that is spelt nearly so."""
    names = sorted(known, key=lambda name: (name.count("."), name))
    parent, _, last = word.rpartition(".")
    beside = {_last(name): name for name in names if name.rpartition(".")[0] == parent}
    if near := get_close_matches(last, beside, 1, NEAR):
        return beside[near[0]]
    if ends := [name for name in names if _last(name) == last]:
        return next(iter(get_close_matches(word, ends, 1, 0)))
    anywhere = {_last(name): name for name in reversed(names)}
    return next((anywhere[name] for name in get_close_matches(last, anywhere, 1, NEAR)), None)


def keys_of(values: Mapping, prefix: str = "") -> Iterator[str]:
    """Dotted, of sections too."""
    for name, value in values.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from keys_of(value, f"{prefix}{name}.")


def _unknown(lines: Sequence[str], name: str) -> Iterator[str]:
    """A sentence for every choice and key that is not there."""
    typed = [line for line in map(unquoted, lines) if not line.startswith("-")]
    chosen = {key(line): _chosen(line) for line in typed if is_group(key(line)) and line[0] not in "+~"}
    for group, choices in chosen.items():
        for choice in choices:
            if choice != "null" and choice not in _choices(group):
                yield f"{group}={choice}: there is no {group}/{choice}. Type {group}={_choice_like(choice, group)}."
    known = _known(chosen, name)
    for line in typed:
        is_there = key(line) in known or is_group(key(line))
        if line[0] == "+" != line[1] and is_there:
            yield f"{line}: this is there already. Type {_in_shell(line[1:])}."
        elif line[0] == "~" and not is_there:
            yield f"{line}: there is no {key(line)} to take out."
        elif line[0] not in "+~" and not is_there:
            yield _no_such_argument(line) if key(line).startswith("model.architecture.") else no_such_key(line, known)


def _known(chosen: Mapping[str, Sequence[str]], name: str) -> set[str]:
    """Keys that there are with these choices; of a sweep's, with any of them."""
    known: set[str] = set()
    for i in range(max(map(len, chosen.values()), default=0) or 1):
        lines = [f"{group}={choices[min(i, len(choices) - 1)]}" for group, choices in chosen.items() if choices]
        known |= {*keys_of(OmegaConf.to_container(composed(lines, name, whole=True), resolve=False))}
    return known


def _chosen(line: str) -> list[str]:
    value = line.partition("=")[2]
    return [] if FUNCTION.fullmatch(value) else re.split(r",\s*", value.strip("[]"))


def _choice_like(choice: str, group: str) -> str:
    choices = _choices(group)
    near = get_close_matches(choice, choices, 1, NEAR)
    if not near:
        return f"<one of {', '.join(choices)}>"
    return f"{near[0]}, or one of {', '.join(one for one in choices if one != near[0])}"


def _no_such_argument(line: str) -> str:
    return f"{line}: the yaml of this model does not have it. If its architecture does, type {_in_shell('+' + line)}."


def _unreadable(line: str) -> str:
    name, _, value = line.partition("=")
    text = value.replace("'", "").replace('"', "")
    like = f"{name}='{text}'"
    return f"{line}: this cannot be read. Type text with special characters so: {_in_shell(like)}."


def _choices(group: str) -> list[str]:
    return sorted(file.stem for file in (CONF / group).glob("*.yaml")) + IN_HYDRA.get(group, [])


def _groups() -> list[str]:
    return [
        folder.relative_to(CONF).as_posix() for folder in (*CONF.glob("*"), *CONF.glob("hydra/*")) if folder.is_dir()
    ]


def _needed() -> set[str]:
    """Groups that have a default."""
    defaults = OmegaConf.to_container(OmegaConf.load(CONF / "config.yaml").defaults)
    return {group for one in defaults if isinstance(one, dict) for group, choice in one.items() if choice is not None}


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _in_shell(line: str) -> str:
    return shlex.quote(line)
