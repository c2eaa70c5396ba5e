"""Builds the text of README.md in model/, the model card: base model, data, results, command and recipe.

All values come from summary.json. The only detail of the machine in the card is the name of the device, and paths are
shortened to their last component.
"""

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

import yaml

from lowmem.config.typed_lines import EITHER, FOLDERS, key
from lowmem.report.summary import predicted_and_measured
from lowmem.system.units import byte_size

NOT_SHOWN = (*FOLDERS, "output_dir", "resume", "evaluate", "export", "push", "hydra.")
# a path on a machine: it begins with /, ~/, ./ or ../, while a hub id begins with a name
PLACE = re.compile(r"""(?<![\w.-])(?:~|\.{1,2})?/[^\s,:'"\]}]+""")


def card(summary: Mapping) -> str:
    """Returns the model card: front matter in YAML for the hub, then Markdown. `summary` has the contents of
    summary.json."""
    head = {"base_model": summary["base_model"], "library_name": "peft" if summary["adapter_alone"] else "transformers"}
    head |= {"pipeline_tag": "text-generation", "tags": ["lowmem", *_tags(summary)]}
    known = {name: value for name, value in head.items() if value is not None}
    sections = [f"---\n{yaml.safe_dump(known, sort_keys=False)}---", *_sections(summary)]
    return "\n\n".join(sections) + "\n"


def _tags(summary: Mapping) -> list[str]:
    """Returns a list with the name of the adapter, or an empty list if the run trained no adapter."""
    return [summary["recipe"]["adapter"]] if "adapter" in summary["recipe"] else []


def _sections(summary: Mapping) -> Iterator[str]:
    base, data = summary["base_model"], ", ".join(summary["data"])
    start = f"[{base}](https://huggingface.co/{base})" if base else "random initial weights"
    if summary["pretrained"] and not base:
        start = "a model in a local folder"
    yield f"# {(base or summary['architecture']).rpartition('/')[2]}, trained on {data}"
    yield f"Trained from {start} on {data} with lowmem."
    if summary["adapter_alone"] and summary.get("base_in_4_bits"):
        yield "The adapter was trained on 4-bit weights (NF4). Load the base model in NF4, with double quantization."
    yield "## Results"
    if summary["validation"]:
        yield _table(*_evaluated(summary["validation"]))
    yield _table(("", ""), _figures(summary))
    yield "## Training command"
    typed = command(summary["overrides"])
    if "<" in typed:
        yield "Replace each name in `<>` with the path of your own file or folder."
    yield f"```\n{typed}\n```"
    if summary["recipe"]:
        yield _table(("group", "choice"), summary["recipe"].items())
    yield "## Framework versions"
    yield ", ".join(f"{name} {version}" for name, version in summary["versions"].items()) + f"; on {summary['device']}."


def _evaluated(sets: Sequence[Mapping]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns the header and the rows of the table of validation sets."""
    names = [name for name in sets[0] if name != "name"]
    of_tokens = "perplexity" in names
    head = ("loss (nats per token)" if name == "loss" and of_tokens else name.replace("_", " ") for name in names)
    rows = [(one["name"] or "validation", *(_number(one[name]) for name in names)) for one in sets]
    return ("set", *head), rows


def _figures(summary: Mapping) -> Iterator[tuple[str, str]]:
    yield "optimizer steps", f"{summary['steps']:,}"
    yield "tokens", f"{summary['tokens']:,}"
    if (learned := summary["learned_tokens"]) < summary["tokens"]:
        yield "learned tokens (with a label)", f"{learned:,}"
    own, every = summary["trained_parameters"], summary["parameters"]
    yield "parameters", f"{every:,} ({'all' if own == every else f'{own:,}'} trained)"
    yield "training loss", _number(summary["train_loss"])
    yield from ((name, _number(value)) for name, value in summary["metric"].items())
    for side, name in (("device", "peak device memory"), ("host_rss", "peak host memory")):
        if size := summary["peak_bytes"][side]:
            yield name, byte_size(size)
    pairs = [sides["device"] for sides in predicted_and_measured(summary).values() if "device" in sides]
    if pairs:
        yield "predicted peak device memory", byte_size(max(predicted for predicted, _ in pairs))
    yield "tokens per second", _number(summary["tokens_per_second"])


def command(overrides: list[str]) -> str:
    """Returns the command that repeats the run, without overrides whose key begins with an entry of NOT_SHOWN. Local
    paths are shortened as in `without_place`; readers replace them with their own paths."""
    typed = set(map(key, overrides))
    # overrides that set a key to null only because the other key of its pair is typed
    implied = {f"{other}=null" for pair in EITHER if typed >= {*pair} for other in pair}
    lines = [line for line in overrides if not key(line).startswith(NOT_SHOWN) and line not in implied]
    return shlex.join(["python", "train.py", *(without_place(line, "data=hub" in lines) for line in lines)])


def without_place(line: str, data_of_hub: bool) -> str:
    """Returns an override in which local paths are shortened to <name of the file or folder>: the values of keys named
    path or val_path, existing relative paths, and paths that begin with /, ~/, ./ or ../. `data_of_hub` is True if
    data=hub was typed; then values of data.path and data.val_path are hub ids, which are kept."""
    name, equals, value = line.partition("=")
    is_path = key(line).rpartition(".")[2] in ("path", "val_path") and not value.startswith(("{", "["))
    is_hub_id = data_of_hub and key(line) in ("data.path", "data.val_path")
    if (is_path and not is_hub_id) or ("/" in value and os.path.exists(value)):  # False for a long text
        return f"{name}{equals}<{PurePath(value).name}>"
    return name + equals + PLACE.sub(lambda place: f"<{PurePath(place[0]).name}>", value)


def _table(head: tuple[str, ...], rows: object) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def _number(value: float | None) -> str:
    return "-" if value is None or value != value else f"{value:.4g}"
