"""Converts typed overrides (key=value) to the form that Hydra reads, and composes the config from them.

The command line uses this module before anything heavy is imported, so this module does not import torch.
"""

import os
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Quote, QuotedString
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, read_write

CONF = Path(__file__).resolve().parents[3] / "conf"
# Keys whose value is plain text, even if some of its characters have a meaning for Hydra (see TEXTS).
FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "cache_dir")  # created if they are missing
# names of files, folders or hub repositories
PLACES = ("data.path", "data.val_path", "model.name", "resume", "evaluate", "export")
PLACES += ("tokenizer", "generate", "data.template", "adapter.path", "weights.drive", "drive")
UNSPLIT = (*FOLDERS, "may_change", "prompt")  # even in a sweep, commas do not separate values
FIELDS = ("data.field", "data.prompt", "data.completion", "data.messages")  # a file may call its fields anything
TEXTS = (*UNSPLIT, *PLACES, *FIELDS, "data.pattern", "logger.wandb.project", "logger.wandb.name", "logger.wandb.group")
NAMED = ("data.val_path",)  # keys whose value is a single path, or a mapping of names to paths
MAPPING = re.compile(r"\{\s*[\w.-]+\s*:.*\}")
# Pairs of alternative keys. Typing both is refused. If one is typed and a yaml sets the other, the first key of the
# pair wins (but see `in_place_of`). If the command names an earlier run (resume=, evaluate=, export=), typing one key
# of a pair replaces both keys of that run.
EITHER = (("epochs", "max_steps"), ("scheduler.warmup", "scheduler.warmup_steps"))
# Values that are passed to Hydra without quotes: null, ???, and words that are neither booleans nor numbers (`_text`).
WORD = re.compile(r"null|\?\?\?|(?!(?:true|false)$)[a-z_./-][\w./-]*", re.ASCII | re.IGNORECASE)
QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
FUNCTION = re.compile(r"[a-z_]+\(.*\)", re.DOTALL)  # such as choice(a,b), which a sweep evaluates
GLOB = re.compile(r"(?:^|(?<=,))\s*glob\(.*?\)", re.DOTALL)

FLAGS = ("-m", "--multirun", "-r", "--run", "-h", "--help", "--hydra-help", "--version", "--resolve", "-sc")
FLAGS += ("--shell-completion",)
VALUED = ("-c", "--cfg", "-p", "--package", "-i", "--info", "-cp", "--config-path", "-cn", "--config-name", "-cd")
VALUED += ("--config-dir", "--experimental-rerun")


def key(line: str) -> str:
    """Returns the key of an override, which may begin with + or ~."""
    return line.partition("=")[0].lstrip("+~")


def as_mapping(lines: Iterable[str]) -> dict[str, str]:
    """Returns a dict from key to value, for the lines that have a value."""
    return {key(line): line.partition("=")[2] for line in lines if "=" in line}


def keys_replaced(lines: Iterable[str]) -> set[str]:
    """Returns the keys that these overrides replace: their own keys, and the alternatives of their keys in EITHER."""
    keys = set(map(key, lines))
    return keys.union(*(pair for pair in EITHER if keys.intersection(pair)))


def keys_of_other_choices(typed: Iterable[str], earlier: Iterable[str]) -> set[str]:
    """Returns the keys of earlier overrides that must be dropped because the newly typed choices of groups do not have
    them, such as weights.drive after weights=resident."""
    chosen = {group: name for group, name in as_mapping(typed).items() if is_group(group)}
    lost = set()
    for group, name in chosen.items():
        file = CONF / group / f"{name}.yaml"
        if file.is_file() and "@package" not in (text := file.read_text(encoding="utf-8")):
            has = OmegaConf.merge(OmegaConf.load(CONF / "config.yaml").get(group) or {}, OmegaConf.create(text))
            below = [key(line) for line in earlier if key(line).startswith(f"{group}.")]
            lost |= {name for name in below if name.split(".")[1] not in has}
    return lost


def in_place_of(lines: Sequence[str]) -> list[str]:
    """Returns an override `<first key>=null` for each pair of EITHER of which only the second key was typed, together
    with an experiment. The experiment may set the first key, which would otherwise win."""
    keys = set(map(key, lines))
    return [f"{name}=null" for name, other in EITHER if "experiment" in keys and other in keys and name not in keys]


def as_lines(mapping: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in mapping.items()]


def in_shell(name: str, value: object) -> str:
    """Returns `name=value`, quoted for a shell."""
    return shlex.quote(f"{name}={value}")


def without(keys: Collection[str], lines: Iterable[str]) -> list[str]:
    """Returns the overrides that do not set any of these keys."""
    return [line for line in lines if key(line) not in keys]


def replaced(lines: Iterable[str], recipe: Mapping[str, str | None]) -> list[str]:
    """Returns the overrides with the values of a recipe in place of earlier values. A value of None removes the
    override of its key."""
    return [*without(recipe, lines), *as_lines({name: value for name, value in recipe.items() if value is not None})]


def as_only_source(name: str) -> str:
    """Returns the key of a mixture's source as it would be without the mixture: data.path for data.parts.code.path."""
    return re.sub(r"^data\.parts\.[^.]+\.", "data.", name)


def is_group(name: str) -> bool:
    return "." not in name and name not in ("", "hydra") and (CONF / name).is_dir()


def quoted(line: str, sweep: bool = False) -> str:
    """Returns an override, quoted so that Hydra does not read a group's choice 16 as an integer, or a path as an
    expression.

    Args:
        sweep: True: commas separate values, even in paths. Not split are values of keys in UNSPLIT, and a text that as
            a whole is an existing path.
    """
    name, equals, value = line.partition("=")
    if equals and is_group(_group(line)):
        return name + "=" + re.sub(r"(?<![^,\s[])(\d+)(?![^,\s\]])", r"'\1'", _enumerated(line))
    known = as_only_source(key(line))
    if known in NAMED and MAPPING.fullmatch(value) and not os.path.exists(value):
        return name + equals + re.sub(r"""(?<=:)([^'",}\s][^,}]*)""", lambda m: _text(os.path.expanduser(m[1])), value)
    if not equals or known not in TEXTS or re.fullmatch(rf"(?:{QUOTED})(?:,(?:{QUOTED}))*", value):
        return line
    if known in FOLDERS + PLACES:
        value = os.path.expanduser(value)
    values = [value]
    if sweep and key(line) not in UNSPLIT and not os.path.exists(value):
        if FUNCTION.fullmatch(value):
            return line
        values = [item.strip() for item in value.split(",")]
    return name + "=" + ",".join(map(_text, values))


def _group(line: str) -> str:
    return key(line).partition("@")[0]  # precision for precision@package


def _enumerated(line: str) -> str:
    """Returns the value of a group's override with choice(), sort(), shuffle(), range() and glob() expanded to choices.
    (Hydra removes quotes inside a function, so a job would get the integer 16 instead of the choice 16.) The value may
    contain several calls of glob(), separated by commas."""
    value = line.partition("=")[2]
    if "(" not in value:
        return value
    try:
        sweep = OverridesParser.create().parse_override(line)
        items = sweep.value().list if isinstance(sweep.value(), ChoiceSweep) else [sweep.value()]
        if any(isinstance(item, Glob) for item in items):
            return ",".join(dict.fromkeys(chain.from_iterable(_named(item, CONF / _group(line)) for item in items)))
        return ",".join(sweep.sweep_string_iterator())
    except HydraException:  # not a sweep function, or not valid: Hydra reports the error
        return value


def _named(item: object, group: Path) -> list[str]:
    """Returns the choices that one item of a sweep selects in a group."""
    if not isinstance(item, Glob):
        return ["null" if item is None else item.text if isinstance(item, QuotedString) else str(item)]
    # Hydra reads the 16 in [16,32*] as an integer
    patterns = Glob([*map(str, item.include)], [*map(str, item.exclude)])
    return patterns.filter(sorted(file.stem for file in group.glob("*.yaml")))


def _text(value: str) -> str:
    if WORD.fullmatch(value) and not _is_number(value):
        return value
    return QuotedString(value, Quote.single).with_quotes()


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def unquoted(line: str) -> str:
    """Returns an override without the quotes that `quoted` has added to a choice or to a single value. Quotes in a
    mapping and around several values of a sweep stay. Values that `quoted` has expanded, such as ~ and choice(), stay
    expanded."""
    name, equals, value = line.partition("=")
    if is_group(_group(line)):
        return name + equals + value.replace("'", "")
    if as_only_source(key(line)) in TEXTS and re.fullmatch(QUOTED, value):
        # Hydra escapes quotation marks, and only those backslashes that directly precede a quotation mark or the end
        escaped = rf"(\\+)({value[0]}|\Z)"
        return name + equals + re.sub(escaped, lambda match: match[1][: len(match[1]) // 2] + match[2], value[1:-1])
    return line


def parted(arguments: Iterable[str]) -> tuple[list[str], list[str], list[str]]:
    """Returns three lists: Hydra's flags with their values, overrides, and the remaining arguments."""
    flags, lines, strays = [], [], []
    before = ""
    for word in arguments:
        if word.startswith("-"):
            (flags if word in FLAGS or word.partition("=")[0] in VALUED else strays).append(word)
        elif before in VALUED:
            flags.append(word)
        else:
            (lines if key(word) and ("=" in word or word.startswith("~")) else strays).append(word)
        before = word
    return flags, lines, strays


def composed(lines: Iterable[str], name: str = "config", whole: bool = False) -> DictConfig:
    """Composes the config `name` of conf/ with these overrides. Works inside and outside of a Hydra job.

    Args:
        whole: True: keep Hydra's own section.
    """
    lines = list(lines)
    cfg = _composed(lines, name, whole)
    let_typed_win(cfg, lines)
    return cfg


def _composed(lines: Iterable[str], name: str = "config", with_hydra: bool = False) -> DictConfig:
    """Composes the config as Hydra does, without `let_typed_win`."""
    overrides = list(map(quoted, lines))
    if GlobalHydra.instance().is_initialized():
        return hydra.compose(name, overrides, return_hydra_config=with_hydra)
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose(name, overrides, return_hydra_config=with_hydra)


def let_typed_win(cfg: DictConfig, lines: Sequence[str]) -> None:
    """Removes from the config, in place, the keys that an experiment sets for a choice that was overridden. An
    experiment may choose a technique of a group and set keys of this technique, such as effective_batch and
    `accumulation.size`. If a different choice was typed, or was set by a later experiment of experiment=[a,b], Hydra
    would apply these keys to the different choice."""
    typed = as_mapping(map(unquoted, lines))
    names = map(str.strip, typed.get("experiment", "").strip("[]").split(","))
    files = {name: file for name in names if (file := CONF / "experiment" / f"{name}.yaml").is_file()}
    experiments = {name: OmegaConf.load(file) for name, file in files.items()}
    choices = {name: _choices_of(experiment) for name, experiment in experiments.items()}
    of_all = {group: choice for own in choices.values() for group, choice in own.items()}  # the last experiment wins
    for group in dict.fromkeys(filter(is_group, chain(*experiments.values()))):
        choice = typed.get(group, of_all.get(group))
        kept = [name for name, own in choices.items() if own.get(group, of_all.get(group, choice)) == choice]
        if len(kept) < len(experiments):
            own_lines = [line for line in lines if key(line).startswith(f"{group}.")]
            alone = _composed([f"experiment=[{','.join(kept)}]", f"{group}={choice}", *own_lines])
            cfg[group] = OmegaConf.create(OmegaConf.to_container(alone[group]))


def _choices_of(experiment: DictConfig) -> dict[str, str]:
    """Returns a dict from group to choice, for the choices in an experiment's yaml."""
    # other entries, such as _self_, are plain text
    entries = [entry for entry in experiment.get("defaults", []) if isinstance(entry, Mapping)]
    return {name.removeprefix("override /"): choice for entry in entries for name, choice in entry.items()}


class TypedWins(Callback):
    """The Hydra callback that applies `let_typed_win` to the composed config before a run starts."""

    def on_run_start(self, config: DictConfig, **_) -> None:
        with read_write(config):
            let_typed_win(config, OmegaConf.to_container(config.hydra.overrides.task))


def keys_known(lines: Iterable[str], name: str) -> Mapping[str, object]:
    """Returns the config `name`, composed with these overrides, as a nested mapping that includes Hydra's section.
    Interpolations are not resolved."""
    return OmegaConf.to_container(composed(lines, name, whole=True), resolve=False)


@cache
def parsed(text: str) -> dict:
    """Returns the values of a yaml as Hydra reads them: 1e-3 is a number, and interpolations stay text."""
    return OmegaConf.to_container(OmegaConf.create(text))


def chosen_by(lines: Iterable[str]) -> dict[str, str]:
    """Returns a dict from each group to the yaml that these overrides or the defaults choose."""
    return dict(composed(lines, whole=True).hydra.runtime.choices)
