"""README.md and docs/ taken apart, and what of them is not true: each checker returns the words that are wrong."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import yaml
from benchmarks.pages import filled
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from lowmem.config.check import check, settled
from lowmem.config.typed_lines import quoted
from lowmem.plan.job import shared

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))

FENCED = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
OVERRIDE = re.compile(r"(?<![\w/.\-=\[{(,])[+~]?([a-z_]\w*(?:[./]\w+)*)=([^\s`|]*)")
FILES = (".png", ".csv", ".json", ".md", ".txt", ".py", ".yaml", ".yml", ".html", ".log", ".ckpt", ".pickle", ".gguf")


# --- code ------------------------------------------------------------------------------------------------------------


def code(text: str) -> Iterator[str]:
    """Every line that a shell could be given, and every span in backticks."""
    for language, _, block in FENCED.findall(text):
        if language in ("", "sh"):
            yield from block.splitlines()
    text = FENCED.sub("", text)
    yield from re.findall(r"^ {4,}(\S.*)$", text, re.MULTILINE)
    yield from inline(text)


def overrides(text: str) -> dict[tuple[str, str], None]:
    """(key, value) of what is typed anywhere on a page, in its order."""
    lines = (line for line in code(text) if " -sc " not in line)
    return dict.fromkeys(found for line in lines for found in OVERRIDE.findall(line))


def inline(text: str) -> Iterator[str]:
    unindented = re.sub(r"^ {4,}.*$", "", FENCED.sub("", text), flags=re.MULTILINE)
    return (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", unindented))


def commands(text: str) -> list[str]:
    """Returns the commands of train.py, plan.py and compare.py, as one would type them; not those with a
    <placeholder>."""
    lines = (line for line in code(text) if re.match(r"python (train|plan|compare)\.py ", line) and "<" not in line)
    return list(dict.fromkeys(re.sub(r"\s+# .*", "", line) for line in lines))


def choices(command: str) -> list[list[str]]:
    """The overrides of a command, and of a sweep each choice by itself."""
    if " -sc " in command:  # a flag of Hydra's, with words of its own
        return []
    words = shlex.split(command)[2:]
    lines = [quoted(word) for word in words if not word.startswith(("-", "sweep.resume=", "resume="))]
    if " -m " not in command:
        return [lines]
    parsed = OverridesParser.create().parse_overrides(lines)
    fixed = [o.input_line for o in parsed if not o.is_sweep_override()]
    swept = [o for o in parsed if o.is_sweep_override()]
    each = [f"{o.get_key_element()}={c}" for o in swept if o.is_discrete_sweep() for c in o.sweep_string_iterator()]
    return [[*fixed, one] for one in each]


def refused(text: str) -> list[str]:
    """Commands that Hydra or lowmem refuses before anything is built."""
    wrong = []
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for command in commands(text):
            if "compare.py" not in command:
                wrong += [f"{command}: {error}" for error in _refusals(command)]
    return wrong


def _refusals(command: str) -> Iterator[Exception]:
    for lines in choices(command):
        try:
            plans = "plan.py" in command
            run = settled(compose("plan" if plans else "config", overrides=lines))
            check(shared(run, lines) if plans else run, {})
        except Exception as error:
            yield error


# --- names -----------------------------------------------------------------------------------------------------------


def keys_of(node: object, path: str = "") -> set[str]:
    """Paths of every key of a yaml; the entries of a list stand under the list."""
    if isinstance(node, list):
        return set().union(*(keys_of(one, path) for one in node if isinstance(one, dict)))
    if not isinstance(node, dict):
        return set()
    return set().union(*({f"{path}{key}"} | keys_of(value, f"{path}{key}.") for key, value in node.items()))


def known_keys() -> set[str]:
    """Returns the keys of conf/ with every choice of every group, and Hydra's."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("plan", return_hydra_config=True)
    known = keys_of(OmegaConf.to_container(cfg, resolve=False)) | {"sweep.resume"}
    for file in CONF.glob("*/**/*.yaml"):
        text, folder = file.read_text(), file.parent.relative_to(CONF)
        known |= keys_of(yaml.safe_load(text), "" if "@package _global_" in text else ".".join([*folder.parts, ""]))
    return known


KEYS = known_keys()
# Everything in which a name may be looked up: the code itself, and how it is called.
KINDS = ("Makefile", "*.py", "*.toml", "src/**/*.py", "conf/**/*.yaml", "benchmarks/**/*.py")
SOURCES = "\n".join(f"{file.stem}\n{file.read_text()}" for kind in KINDS for file in ROOT.glob(kind))


def own_files(text: str) -> set[str]:
    """Returns the files that a page lets its reader create: docs/add-a-technique.md."""
    return {name for _, where, _ in FENCED.findall(text) for name in re.findall(r"file=(\S+)", where)}


def unknown_keys(text: str) -> list[str]:
    """Overrides of which conf/ knows no key or choice, and dotted keys that it does not have."""
    wrong = [f"{key}={value}" for key, value in overrides(text) if not _known(key, value, text)]
    return wrong + [name for name in inline(text) if _looks_like_a_key(name) and name not in KEYS]


def _known(key: str, value: str, page: str) -> bool:
    if not (CONF / key).is_dir():
        return key in KEYS
    names = [re.sub(r"^glob\((.*)\)$", r"\1", name.strip("'\".:;")) for name in value.split(",")]
    files = (f"conf/{key}/{name}.yaml" for name in names if name and not name.startswith("<"))
    return all(any(ROOT.glob(file)) or file in own_files(page) for file in files)


def _looks_like_a_key(name: str) -> bool:
    first = name.split(".")[0]
    return bool(re.fullmatch(r"[a-z_]\w*(\.\w+)+", name)) and first in KEYS and not name.endswith(FILES)


def unknown_names(text: str) -> list[str]:
    """Words in backticks that occur nowhere in the code: a key, a class, a column that has gone."""
    words = [name for name in inline(text) if re.fullmatch(r"[A-Za-z_][\w-]*", name)]
    return [name for name in words if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", SOURCES)]


# --- files and figures -----------------------------------------------------------------------------------------------


def missing_files(text: str, folder: Path) -> list[str]:
    """Links, pictures, paths of the repository, modules of benchmarks and targets of make that are not there, and links
    to a file by the name of another."""
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    paths = re.findall(r"(?<![\w/.~-])(?:src|tests|conf|docs|benchmarks)/[\w./*-]*[\w/*]", FENCED.sub("", text))
    wrong = [link for link in links if not (folder / link).exists()]
    named = re.findall(r"\[`([^`\]]+)`\]\(([^)#\s]+)", text)
    wrong += [
        f"{name} ({link})" for name, link in named if name.endswith(FILES) and not f"/{link}".endswith(f"/{name}")
    ]
    paths = [path for path in paths if path not in links and path not in own_files(text)]
    wrong += [path for path in paths if not any(ROOT.glob(path.rstrip("/")))]
    for module, flags in re.findall(r"python -m\s+(benchmarks[\w.]*)((?: --[\w-]+)*)", text):
        file = ROOT / module.replace(".", "/")
        file = file / "__main__.py" if file.is_dir() else file.with_suffix(".py")
        told = file.read_text() if file.exists() else ""
        wrong += [f"{module} {flag}".strip() for flag in ("", *flags.split()) if not told or flag not in told]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    made = [span.split()[1] for span in code(text) if re.match(r"make [a-z]", span)]
    return wrong + [f"make {target}" for target in made if target not in targets]


def wrong_figures(text: str, folder: Path) -> list[str]:
    """Numbers in a link to results that do not stand there, and tables that differ from their results."""
    wrong = []
    for said, link in re.findall(r"\[([^\]]*)\]\(([^)\s]*benchmarks/results/[^)\s]+)\)", text):
        there = (folder / link).read_text()
        figures = re.findall(r"[-+]?\d[\d,]*(?:\.\d+)?", said)
        wrong += [f"{n} ({link})" for n in figures if not re.search(rf"(?<![\d.,]){re.escape(n)}(?![\d.]*\d)", there)]
    if filled(text, folder) != text:
        wrong.append("a table that is not that of its results: python -m benchmarks.pages")
    return wrong
