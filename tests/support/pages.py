"""Parses README.md and docs/. Each checker returns the errors of one kind in a page, such as refused commands or names
that do not exist."""

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
    """Yields each line of fenced shell code (or fenced code without a language), each indented line, and each span in
    backticks."""
    for language, _, block in FENCED.findall(text):
        if language in ("", "sh"):
            yield from block.splitlines()
    text = FENCED.sub("", text)
    yield from re.findall(r"^ {4,}(\S.*)$", text, re.MULTILINE)
    yield from inline(text)


def overrides(text: str) -> dict[tuple[str, str], None]:
    """Returns the pairs (key, value) of the overrides on a page without duplicates, in order. Skips lines with -sc
    (shell completion)."""
    lines = (line for line in code(text) if " -sc " not in line)
    return dict.fromkeys(found for line in lines for found in OVERRIDE.findall(line))


def inline(text: str) -> Iterator[str]:
    unindented = re.sub(r"^ {4,}.*$", "", FENCED.sub("", text), flags=re.MULTILINE)
    return (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", unindented))


def commands(text: str) -> list[str]:
    """Returns the commands of train.py, plan.py and compare.py without duplicates, except commands with a
    <placeholder>."""
    lines = (line for line in code(text) if re.match(r"python (train|plan|compare)\.py ", line) and "<" not in line)
    return list(dict.fromkeys(re.sub(r"\s+# .*", "", line) for line in lines))


def choices(command: str) -> list[list[str]]:
    """Returns lists of overrides that cover a command: one list or, with -m, a list for each choice of each swept key.
    In such a list, the other swept keys have their defaults. Returns [] for shell completion (-sc)."""
    if " -sc " in command:  # a flag of Hydra
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
    """Returns "command: error" for each error with which Hydra or lowmem refuses a command of train.py or plan.py
    before a model is built."""
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
    """Returns the dotted paths of all keys in a parsed yaml file. Keys in entries of a list have the path of the list
    as a prefix, without an index."""
    if isinstance(node, list):
        return set().union(*(keys_of(one, path) for one in node if isinstance(one, dict)))
    if not isinstance(node, dict):
        return set()
    return set().union(*({f"{path}{key}"} | keys_of(value, f"{path}{key}.") for key, value in node.items()))


def known_keys() -> set[str]:
    """Returns the keys in conf/, including every choice of every group, and the keys of Hydra."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("plan", return_hydra_config=True)
    known = keys_of(OmegaConf.to_container(cfg, resolve=False)) | {"sweep.resume"}
    for file in CONF.glob("*/**/*.yaml"):
        text, folder = file.read_text(), file.parent.relative_to(CONF)
        known |= keys_of(yaml.safe_load(text), "" if "@package _global_" in text else ".".join([*folder.parts, ""]))
    return known


KEYS = known_keys()
# Globs of the files whose names and words the pages may mention.
KINDS = ("Makefile", "*.py", "*.toml", "src/**/*.py", "conf/**/*.yaml", "benchmarks/**/*.py")
SOURCES = "\n".join(f"{file.stem}\n{file.read_text()}" for kind in KINDS for file in ROOT.glob(kind))


def own_files(text: str) -> set[str]:
    """Returns the files that a page tells its reader to create, as docs/add-a-technique.md does with `file=` after a
    fence."""
    return {name for _, where, _ in FENCED.findall(text) for name in re.findall(r"file=(\S+)", where)}


def unknown_keys(text: str) -> list[str]:
    """Returns overrides whose key is not in KEYS or whose choice has no file, and dotted names in backticks that look
    like keys but are not in KEYS."""
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
    """Returns names in backticks that do not occur in SOURCES, such as removed keys, classes or columns."""
    words = [name for name in inline(text) if re.fullmatch(r"[A-Za-z_][\w-]*", name)]
    return [name for name in words if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", SOURCES)]


# --- files and figures -----------------------------------------------------------------------------------------------


def missing_files(text: str, folder: Path) -> list[str]:
    """Returns links, pictures, paths, benchmark modules, flags of benchmark modules, and make targets that do not
    exist. Also returns links whose text names a file that is not the target of the link."""
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
    """Returns the numbers in texts of links to benchmarks/results/ that the linked file does not contain, and a note if
    a table differs from its results."""
    wrong = []
    for said, link in re.findall(r"\[([^\]]*)\]\(([^)\s]*benchmarks/results/[^)\s]+)\)", text):
        there = (folder / link).read_text()
        figures = re.findall(r"[-+]?\d[\d,]*(?:\.\d+)?", said)
        wrong += [f"{n} ({link})" for n in figures if not re.search(rf"(?<![\d.,]){re.escape(n)}(?![\d.]*\d)", there)]
    if filled(text, folder) != text:
        wrong.append("a table that is not that of its results: python -m benchmarks.pages")
    return wrong
