"""Builds the text of `--help`: groups and keys with their comments in conf/ and their current values.

The descriptions are the comments of the yaml files, so that a key is documented in one place. `hydra.help.template` in
conf/config.yaml refers to the text, and Hydra prints the text. This module imports nothing heavy, so that `--help`
answers in well under a second.
"""

import re
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

WIDTH, COLUMN = 80, 26
LINE = re.compile(r"(?P<indent> *)(?:- )?(?P<key>\w[\w.-]*):(?P<value>(?: [^#]*)?)(?:# (?P<comment>.*))?")


def text(cfg: DictConfig, conf: Path) -> str:
    """Returns the help text, in which each `$` is doubled, because Hydra substitutes variables in the template.

    Args:
        cfg: the composed config, including Hydra's section.
        conf: the folder of the yaml files.
    """
    keys = comments(conf / f"{cfg.hydra.job.config_name}.yaml") | comments(conf / "config.yaml")
    choices = {key.removeprefix("defaults."): None for key in keys if key.startswith("defaults.")}
    choices |= {group: choice for group, choice in cfg.hydra.runtime.choices.items() if group in choices}
    shown, typed = set(keys), partial(_typed, cfg)
    lines = [f"python {cfg.hydra.job.name}.py <group>=<choice> ... <key>=<value> ...", ""]
    lines += ["Groups: one override swaps a technique, the model or the data.", ""]
    for group, choice in choices.items():
        lines += _group(conf / group, choice, keys[f"defaults.{group}"])
    lines += ["", "Keys, with their current values:", ""]
    for key, comment in keys.items():
        if comment and not key.startswith("defaults."):
            lines += _entry(typed(key), comment)
    lines += ["", "Keys of the choices above. Type another choice before --help to see its keys.", ""]
    for group, choice in choices.items():
        file = conf / group / f"{choice}.yaml"
        lines += _keys_of(typed, shown, group, file) if file.is_file() else []
    return "\n".join(lines).replace("$", "$$")


def comments(file: Path) -> dict[str, str | None]:
    """Returns a dict from each dotted key to the comment on its line (None: no comment), in the order of the file."""
    by_key: dict[str, str | None] = {}
    above: list[tuple[int, str]] = []  # (indent, key) of the sections that enclose a line
    for match in filter(None, map(LINE.fullmatch, file.read_text(encoding="utf-8").splitlines())):
        indent = len(match["indent"])
        above = [section for section in above if section[0] < indent]
        by_key[".".join([*(key for _, key in above), match["key"]])] = match["comment"]
        if not match["value"].strip():
            above.append((indent, match["key"]))
    return by_key


def heading(file: Path) -> str:
    """Returns the comment at the top of a choice's yaml."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if "@package" not in line]
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return " ".join(line.removeprefix("# ").strip() for line in lines[:end])


def _group(folder: Path, choice: str | None, comment: str) -> Iterator[str]:
    others = sorted(file.stem for file in folder.glob("*.yaml") if file.stem != choice)
    yield from _entry(f"{folder.name}={choice or 'null'}", comment)
    file = folder / f"{choice}.yaml"
    if file.is_file():  # a user's own yaml may be in another folder
        yield from _entry("", f"{choice}: {heading(file)}")
    yield from _entry("", f"or {', '.join(others)}")


def _keys_of(typed: Callable[[str], str], shown: set[str], group: str, file: Path) -> Iterator[str]:
    """Yields lines for the keys of a choice that are not in `shown`, and adds these keys to `shown`. A key with a
    comment gets an entry. The keys without a comment are listed after the entries, except sections and keys that begin
    with an underscore."""
    prefix, others = "" if "# @package _global_" in file.read_text(encoding="utf-8") else f"{group}.", []
    new = {prefix + key: comment for key, comment in comments(file).items() if prefix + key not in shown}
    for key, comment in new.items():
        if comment:
            yield from _entry(typed(key), comment)
        elif not re.search(r"(^|\.)_", key) and key != "defaults" and not typed(key).endswith("."):
            others.append(typed(key))
    shown |= new.keys()
    yield from textwrap.wrap(", ".join(others), WIDTH, initial_indent="  ", subsequent_indent="  ")


def _typed(cfg: DictConfig, key: str) -> str:
    """Returns `key=value` with the current value, as a user types it: `clip=null`. A section is shown as `trainer.`, a
    key without a value as `model.name=???`, and a removed key as `~clip`."""
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(cfg, parent) if parent else cfg
    if not isinstance(node, DictConfig):
        return f"~{key}"
    if OmegaConf.is_missing(node, name):
        return f"{key}=???"
    if name not in node:
        return f"~{key}"
    value = node[name]
    if isinstance(value, DictConfig):
        return f"{key}."
    spelled = {None: "null", True: "true", False: "false"}
    return f"{key}={spelled[value] if value is None or isinstance(value, bool) else value}".replace(", ", ",")


def _entry(typed: str, comment: str) -> list[str]:
    """Returns the lines of an entry in two columns. If the key is too long for its column, the comment begins on the
    next line."""
    indent = " " * COLUMN
    wrapped = textwrap.wrap(comment, WIDTH - COLUMN, break_long_words=False, break_on_hyphens=False)
    head = f"  {typed}".ljust(COLUMN)
    if len(head) > COLUMN or not head.endswith(" "):
        return [head, *(indent + line for line in wrapped)]
    return [head + wrapped[0], *(indent + line for line in wrapped[1:])]
