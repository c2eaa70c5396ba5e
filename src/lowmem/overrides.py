"""What is typed: lines of key=value, as people write them, as Hydra reads them, and the config that they make of conf/.

Nothing heavy is imported: the command line reads its arguments with it.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

CONF = Path(__file__).resolve().parents[2] / "conf"


def key(line: str) -> str:
    """Of `+key=value`, `~key` and `key=value`."""
    return line.partition("=")[0].lstrip("+~")


def as_mapping(lines: Iterable[str]) -> dict[str, str]:
    """key -> value; a line without a value is left out."""
    return {key(line): line.partition("=")[2] for line in lines if "=" in line}


def as_lines(mapping: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in mapping.items()]


def without(keys: Collection[str], lines: Iterable[str]) -> list[str]:
    """The lines that say nothing of these keys."""
    return [line for line in lines if key(line) not in keys]


def quoted(line: str, conf: Path = CONF) -> str:
    """Hydra reads `precision=16` as the integer 16 and refuses it as a group's choice: quote it."""
    name, equals, value = line.partition("=")
    if not equals or not (conf / name).is_dir():
        return line
    return name + "=" + re.sub(r"(?<![^,\s])(\d+)(?![^,\s])", r"'\1'", value)


def unquoted(line: str) -> str:
    """As it was typed, of a line that Hydra was given."""
    return line.replace("'", "")


def composed(lines: Iterable[str], name: str = "config") -> DictConfig:
    """The config `name` of conf/ with these lines: in a command of Hydra's, and outside of one."""
    read = list(map(quoted, lines))
    if GlobalHydra.instance().is_initialized():
        return hydra.compose(name, read)
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose(name, read)
