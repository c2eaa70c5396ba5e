"""Explains overrides that Hydra cannot use. One line of text, which may suggest the most similar valid override,
replaces Hydra's own message, which fills a page.

This module does not import torch.
"""

import os
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException

from lowmem.config.typed_lines import (
    CONF,
    EITHER,
    FLAGS,
    FOLDERS,
    FUNCTION,
    GLOB,
    UNSPLIT,
    VALUED,
    is_group,
    key,
    keys_known,
    parsed,
    quoted,
    unquoted,
)
from lowmem.system.errors import Refused

NEAR = 0.65  # minimum similarity by difflib, for a flag, or for a choice or key within a known group or section
CLOSE = 0.8  # minimum similarity for a key of any section; allows two swapped letters in a word of five
ARCHITECTURE = "model.architecture."
# names of keys in other trainers, or likely guesses -> lowmem's key; by similarity alone, a wrong key would be
# suggested
OTHER_NAMES = {
    **dict.fromkeys(("checkpoint.every", "checkpoint_every", "save_steps"), "save_every"),
    **dict.fromkeys(("evaluate.every", "evaluate_every", "eval_steps"), "val_every"),
    **dict.fromkeys(("log.every", "logging_steps"), "log_every"),
    **dict.fromkeys(("batch", "per_device_train_batch_size"), "batch_size"),
    **dict.fromkeys(("steps", "num_steps"), "max_steps"),
    "learning_rate": "lr",
    "num_train_epochs": "epochs",
    "optimizer": "optim",
}
# names of precisions in Lightning and other trainers -> lowmem's choice; by similarity alone, bf16 would be suggested
# for fp16
OTHER_PRECISIONS = {
    **dict.fromkeys(("fp16", "float16", "16-mixed"), "16"),
    **dict.fromkeys(("bfloat16", "bf16-mixed"), "bf16"),
    **dict.fromkeys(("fp32", "float32", "32-true"), "32"),
}
# group -> (choice to type, key for the name), for a file, folder or hub id that was typed as the group's choice
OF_A_PLACE = {"model": ("hf", "model.name"), "data": ("text", "data.path"), "adapter": ("lora", "adapter.path")}


class TakenOut(NamedTuple):
    """A removed choice of an earlier version of lowmem.

    Args:
        instead: the overrides to type.
        why: the reason for the removal.
        resumes: whether a run with `instead` can read the old checkpoints.
    """

    instead: str
    why: str
    resumes: bool = False


TAKEN_OUT = {
    "optim=adamw_fp8": TakenOut(
        "optim=adamw8bit",
        "float8 rounds small second moments to zero, so the weights of rare tokens grew without bound",
    ),
    **dict.fromkeys(
        ("strategy=deepspeed_zero2", "strategy=deepspeed_zero3"),
        TakenOut(
            "strategy=fsdp",
            "PyTorch's FSDP shards weights, gradients and optimizer state, and strategy=fsdp_offload replaces "
            "strategy.offload=true",
            resumes=True,
        ),
    ),
    "gradient_checkpointing=budget": TakenOut(
        "gradient_checkpointing=none compile=blocks compile.activation_memory_budget=0.5",
        "the budget is now a setting of compile=blocks and replaces gradient_checkpointing.fraction",
        resumes=True,
    ),
}
# key in an earlier version of lowmem -> its current name; an entry that ends in a dot is a prefix of keys
RENAMED = {
    "fit": "plan",
    "master.early_step": "precision.early_step",
    "trainer.plugins.precision.": "precision.",
}
# removed key -> the reason; also dropped from the overrides of an earlier run that is resumed, evaluated or exported
LEFT_OUT = {
    "master.skips_in_a_row": "one rule counts steps that are not finite, for all precisions",
    "weights.steps_in": "precision=bf16-sr runs its optimizer where the weights are",
    "weights_dtype": "precision= also chooses the dtype of the weights",
}
IN_HYDRA = {"hydra/launcher": ["basic"], "hydra/sweeper": ["basic"]}  # choices without a yaml in conf/


def check_lines(lines: Sequence[str], sweep: bool = False) -> None:
    """Checks the typed overrides as far as possible without composing a config. `sweep` says whether they start several
    jobs.

    Raises:
        Refused: a line removes a needed group, names a choice that does not exist or was removed, has an empty value
            for a key of FOLDERS, changes a declared property of a technique, sets `hydra` itself, or in a sweep uses
            glob() for a key that is not a group; or two alternative keys are both set.
    """
    keys = {key(line) for line in lines if line[0] != "~" and not line.endswith("=null")}
    for name, alternative in EITHER:
        if {name, alternative} <= keys:
            raise Refused(f"{name} and {alternative}: set only one of these two keys. Leave the other out.")
    for line in lines:
        group, choices = key(line), _chosen(line)
        if group == "hydra":
            raise Refused(
                f"{line}: hydra is a section, not a group. Type hydra.<key>=<value>, such as hydra.run.dir=<a folder>."
            )
        if "declares" in group.split("."):
            raise Refused(
                f"{line}: a run cannot change what a technique declares, since checks and plans rely on it. Leave it "
                f"out, or change conf/{group.partition('.')[0]}/<the technique>.yaml."
            )
        if group in FOLDERS and unquoted(line).endswith("="):
            raise Refused(f"{line}: the value is empty. Type {group}=<a folder>, or {group}=. for the current folder.")
        if sweep and not is_group(group) and group not in UNSPLIT and GLOB.search(unquoted(line).partition("=")[2]):
            raise Refused(
                f"{line}: glob() lists the choices of a group, but {group} is not a group. Type "
                f"{group}=<value>,<value>."
            )
        if not is_group(group):
            continue
        if choices == [""]:
            raise Refused(f"{line}: there is no such choice. Type {group}=<one of {', '.join(_choices(group))}>.")
        if group in _needed() and (line.startswith("~") or "null" in choices):
            raise Refused(
                f"{line}: every run needs a choice for {group}. Type {group}=<one of {', '.join(_choices(group))}>."
            )
        if taken := TAKEN_OUT.keys() & {f"{group}={choice}" for choice in choices}:
            typed = taken.pop()
            raise Refused(f"{typed} was removed: {TAKEN_OUT[typed].why}. Type {TAKEN_OUT[typed].instead}.")
        if wrong := [choice for choice in choices if choice != "null" and choice not in _choices(group)]:
            if group in OF_A_PLACE and ("/" in wrong[0] or os.path.exists(wrong[0])):
                raise Refused(_of_place(group, wrong[0]))
            like = _choice_like(wrong[0], group)
            raise Refused(f"{group}={wrong[0]}: there is no such choice. Type {group}={like}.")


def renamed(line: str) -> str:
    """Returns an override of an earlier version of lowmem with the current name of its key."""
    begin = next((old for old in RENAMED if key(line) == old or (old[-1] == "." and key(line).startswith(old))), None)
    return line if begin is None else line.replace(begin, RENAMED[begin], 1)


def sets_nothing(word: str) -> str:
    """Returns the message for a word that is neither an override nor a flag of Hydra."""
    name, _, value = word.lstrip("-").partition("=")
    name = name.strip("+~") or "<key>"
    what = "there is no such flag" if word.startswith("-") else "this is not an override"
    if word.startswith("--") and (flag := get_close_matches(word.partition("=")[0], FLAGS + VALUED, 1, NEAR)):
        return f"{word}: {what}. Type {flag[0]}, or --help."
    line = _in_shell(f"{name}={value}") if value else f"{name}=<value>"
    without_dashes = ", without dashes" if word.startswith("-") else ""
    return f"{word}: {what}. Type {line}{without_dashes}, or --help."


def explained(error: Exception, lines: Sequence[str], name: str = "config") -> str:
    """Returns why Hydra cannot compose the config `name` with these lines."""
    try:
        return next(_unknown(lines, name))
    except (StopIteration, HydraException):
        pass  # all keys exist, or the config cannot be composed at all: `error` has another cause
    if isinstance(error, OverrideParseException):
        return _unreadable(unquoted(error.override))
    if isinstance(error, MissingConfigException) and error.options:  # a group of Hydra's own, such as hydra/launcher
        return f"There is no {error.missing_cfg_file}. Type one of {', '.join(error.options)}."
    if several := re.match(r"Ambiguous value for argument '(.*)'|Sweep parameters '(.*)' requires", str(error)):
        line = unquoted(several[1] or several[2])
        return f"{line}: several values need -m, which starts a sweep. Type -m, or {key(line)}='[...]' for a list."
    messages = [str(cause).strip().partition("\n")[0].rstrip(" .") for cause in (error, error.__cause__) if cause]
    return ". ".join(filter(None, messages)) + "."


def no_such_key(line: str, known: Iterable[str]) -> str:
    """Returns the message for an override whose key is not among `known`, the keys that exist."""
    name, _, value = line.lstrip("+").partition("=")
    if name in LEFT_OUT:
        return f"{name} was removed: {LEFT_OUT[name]}. Leave it out."
    if owners := _owners(name):
        return f"{line}: only some choices of {name.partition('.')[0]} have this key. Also type {' or '.join(owners)}."
    if groups := [group for group in sorted(_groups()) if name in _choices(group)]:
        return f"{line}: there is no key {name}. Type {' or '.join(f'{group}={name}' for group in groups)}."
    near = OTHER_NAMES.get(name) or nearest(name, {*known, *_groups()})
    if near is None:
        return f"{line}: there is no key {name}. Type --help for a list of all keys."
    if is_group(near) and value not in _choices(near):
        return f"{line}: there is no key {name}. Type {near}={_choice_like(value, near)}."
    return f"{line}: there is no key {name}. Type {_in_shell(f'{near}={value}')}."


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Returns the dotted key of `known` that was probably meant: a key whose last component is equal or similar to the
    last component of `word`. Returns None if there is no such key. Hydra's own keys are suggested only if `word` begins
    with "hydra."."""
    ours = (name for name in known if word.startswith("hydra.") or not name.startswith("hydra."))
    names = sorted(ours, key=lambda name: (name.count("."), name))
    parent, _, last = word.rpartition(".")
    ends = [name for name in names if _last(name) == last]
    if ends and (not parent or parent not in names):
        return get_close_matches(word, ends, 1, 0)[0]
    siblings = {_last(name): name for name in names if name.rpartition(".")[0] == parent}
    if parent and (near := get_close_matches(last, siblings, 1, NEAR)):
        return siblings[near[0]]
    anywhere = {_last(name): name for name in reversed(names)} | ({} if parent else siblings)
    near = get_close_matches(last, anywhere, 1, CLOSE)
    return next((anywhere[name] for name in near if name[0] in last[:2]), None)  # do not suggest export for port


def keys_of(values: Mapping, prefix: str = "") -> Iterator[str]:
    """Yields all dotted keys of a nested mapping, including its sections."""
    for name, value in values.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from keys_of(value, f"{prefix}{name}.")


def _unknown(lines: Sequence[str], name: str) -> Iterator[str]:
    """Yields a message for each unknown key, and for each + before a key that exists."""
    typed = [line for line in map(unquoted, lines) if is_group(key(line)) or "/" not in key(line)]
    jobs = _known({key(line): _chosen(line) for line in typed if is_group(key(line)) and line[0] not in "+~"}, name)
    known = set.intersection(*jobs)  # each job of a sweep gets all lines
    for line in (part for each in typed for part in _parts(each, known)):
        is_there = key(line) in known or is_group(key(line))
        if line[0] == "+" != line[1] and (is_there or key(line) in set.union(*jobs)):
            yield f"{line}: this key already exists, so leave out the +. Type {_in_shell(line[1:])}."
        elif line[0] == "~" and not is_there:
            yield f"{line}: there is no key {key(line)} to remove."
        elif line[0] not in "+~" and not is_there:
            yield _no_such_argument(line, known) if key(line).startswith(ARCHITECTURE) else no_such_key(line, known)


def _parts(line: str, known: Collection[str]) -> Iterator[str]:
    """Yields one override per key of a section: memory.limit=1GiB for memory={limit: 1GiB}. Yields other overrides
    unchanged."""
    name, _, value = line.partition("=")
    mapping = _parsed(line) if value.lstrip().startswith("{") and _is_section(name, known) else None
    if isinstance(mapping, Mapping):  # not the values of a sweep
        yield from (f"{below}={_written(value)}" for below, value in _leaves(name, mapping, known))
    else:
        yield line


def _parsed(line: str) -> object:
    return OverridesParser.create().parse_override(line).value()


def _written(value: object) -> str:
    """Returns a parsed value in Hydra's syntax."""
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_written(below)}' for key, below in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str) and not _is_read_as(value):
        return "'" + value.replace("'", r"\'") + "'"
    return str(value)


def _is_read_as(text: str) -> bool:
    """Returns True if Hydra reads a text without quotes as this text."""
    try:
        return _parsed(f"key={text}") == text
    except HydraException:
        return False


def _leaves(name: str, value: object, known: Collection[str]) -> Iterator[tuple[str, object]]:
    """Yields (dotted key, value) for each key of a section and its subsections."""
    if isinstance(value, Mapping) and _is_section(name, known):
        for last, below in value.items():
            yield from _leaves(f"{name}.{last}", below, known)
    else:
        yield name, value


def _is_section(name: str, known: Iterable[str]) -> bool:
    return any(other.startswith(f"{name}.") for other in known)


def _known(chosen: Mapping[str, Sequence[str]], name: str) -> list[set[str]]:
    """Returns sets of the keys that exist with these choices of groups: one set for the first choice of every group,
    one for the second choice of every group (the last choice if a group has fewer), and so on. Without a sweep there is
    a single set."""
    known = []
    for i in range(max(map(len, chosen.values()), default=0) or 1):
        lines = [f"{group}={choices[min(i, len(choices) - 1)]}" for group, choices in chosen.items() if choices]
        known.append({*keys_of(keys_known(lines, name))})
    return known


def _chosen(line: str) -> list[str]:
    """Returns the choices in an override of a group: one choice, or several choices in a sweep. Returns an empty list
    for an override that removes the group, and for a function that cannot be expanded."""
    value = unquoted(quoted(line)).partition("=")[2]
    return [] if FUNCTION.fullmatch(value) or line.startswith("~") else re.split(r",\s*", value.strip("[]"))


def _owners(name: str) -> list[str]:
    """Returns the choices, as group=choice, whose yaml contains this key."""
    group, _, last = name.partition(".")
    files = sorted((CONF / group).glob("*.yaml")) if last and is_group(group) else []
    return [
        f"{group}={file.stem}"
        for file in files
        if re.search(rf"^{re.escape(last)}:", file.read_text(encoding="utf-8"), re.M)
    ]


def _choice_like(choice: str, group: str) -> str:
    choices = _choices(group)
    same = OTHER_PRECISIONS.get(choice) if group == "precision" else None
    longer = [name for name in choices if name.startswith(choice)]  # adamw8 means adamw8bit, and not adamw
    near = [same] if same else longer if len(longer) == 1 else get_close_matches(choice, choices, 1, NEAR)
    if not near:
        return f"<one of {', '.join(choices)}>"
    return f"{near[0]}, or one of {', '.join(name for name in choices if name != near[0])}"


def _of_place(group: str, place: str) -> str:
    """Returns the message for a file, folder or hub id that was typed as the choice of a group."""
    choice, name = OF_A_PLACE[group]
    if group == "data":
        of_hub = not (os.path.exists(place) or place.startswith(("/", "~", ".")))
        ending = place.rpartition(".")[2]
        choice = ending if ending in ("jsonl", "csv", "parquet") else "hub" if of_hub else choice
    line = f"Type {group}={choice} {_in_shell(f'{name}={place}')}."
    return f"{group}={place}: this is a path or a hub id, not a choice of {group}. {line}"


def _no_such_argument(line: str, known: Iterable[str]) -> str:
    """Returns the message for a key below model.architecture that the yaml of the model does not list. The architecture
    may still have this argument, since a yaml need not list all arguments."""
    existing = [name for name in known if name.startswith(ARCHITECTURE)]
    if existing and get_close_matches(_last(key(line)), map(_last, existing), 1, NEAR):
        return no_such_key(line, existing)
    return (
        f"{line}: the yaml of this model does not list this key. If the architecture has it, type "
        f"{_in_shell('+' + line)}."
    )


def _unreadable(line: str) -> str:
    name, _, value = line.partition("=")
    text = re.sub(r"['\"\\]", "", value)
    return f"{line}: Hydra cannot parse this value. Type text with special characters in quotes: '{name}=\"{text}\"'."


def _choices(group: str) -> list[str]:
    return sorted(file.stem for file in (CONF / group).glob("*.yaml")) + IN_HYDRA.get(group, [])


def _groups() -> list[str]:
    return [folder.name for folder in CONF.iterdir() if is_group(folder.name)]


@cache  # called for every typed line
def _needed() -> set[str]:
    """Returns the groups that have a default choice."""
    defaults = parsed((CONF / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    chosen = (item for item in defaults if isinstance(item, dict))
    return {group for item in chosen for group, choice in item.items() if choice is not None}


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _in_shell(line: str) -> str:
    return shlex.quote(line)
