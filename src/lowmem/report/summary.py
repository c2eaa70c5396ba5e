"""Writes summary.json, and formats the table of results that is printed at the end of a run."""

import json
import math
import platform
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lowmem.report import drive_figures
from lowmem.system.atomic_files import atomic_write
from lowmem.system.units import WORDS, byte_size, share_of_limit, unit

RANKS = 8  # with more ranks, the table has only the ranks with the lowest and the highest device peak
OF_RANK = ("device", "host_rss", "weights", "gradients", "optimizer")
PACKAGES = ("torch", "lightning", "transformers", "tokenizers", "bitsandbytes", "torchao", "hydra-core", "numpy")


def versions() -> dict[str, str]:
    """Returns a dict with the versions of Python and of the installed packages of PACKAGES, by name."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def write(file: Path, summary: Mapping) -> None:
    """Writes the summary atomically. Numbers that are inf or nan, which JSON lacks, become null."""
    with atomic_write(file) as draft:
        draft.write_text(json.dumps(_plain(summary), indent=2) + "\n", encoding="utf-8")


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(summary: Mapping) -> str:
    """Returns a table of results with two columns: name and value."""
    peak, categories = summary["peak_bytes"], summary["peak_bytes_by_category"]
    extra, share = summary["auxiliary_loss"], share_of_limit(peak["device"], summary["device_bytes"])
    rows = [
        ("parameters", f"{summary['parameters']:,}"),
        *([("  trained", f"{own:,}")] if (own := summary["trained_parameters"]) < summary["parameters"] else []),
        ("optimizer", summary["optimizer"] or "-"),
        ("optimizer steps", _steps(summary)),
        *_lr_rows(summary),
        *_token_rows(summary),
        ("train loss", _number(summary["train_loss"], ".4f")),
        *([("  auxiliary loss", _number(extra, ".4f"))] if extra is not None else []),
        ("validation loss", _number(summary["val_loss"], ".4f")),
        *_evaluation_rows(summary),
        ("tokens/s", _number(summary["tokens_per_second"] or None, ",.0f")),
        ("seconds per step", _number(summary["seconds_per_step"], ".4f")),
        ("peak device memory", ", ".join(filter(None, (_size(peak["device"]), share)))),
        *((f"  {WORDS[category]}", byte_size(size)) for category, size in categories.items()),
        ("peak host memory", _host(peak["host_rss"], summary["rss_before_model_bytes"])),
        *drive_figures.lines(summary["drive"]),
        *_plan_rows(summary),
        *_rank_rows(summary),
    ]
    return "\n".join(f"{name:<26}{value}" for name, value in rows)


def _token_rows(summary: Mapping) -> Iterator[tuple[str, str]]:
    """Yields a row with the number of tokens that the model computed, and a row with the number of learned tokens
    (tokens with a label) if it is smaller."""
    tokens, learned = summary["tokens"], summary["learned_tokens"]
    yield "tokens", f"{tokens:,}"
    if learned < tokens:
        yield "  learned", f"{learned:,} ({learned / tokens:.0%} of the tokens have a label)"


def _evaluation_rows(summary: Mapping) -> Iterator[tuple[str, str]]:
    """Yields a row for each metric of the validation set except the loss. If there are several sets, yields instead a
    row for each set with all metrics of the set. Then yields a row for each value of a user's metric."""
    sets = summary["validation"]
    for data_set in sets:
        figures = [(key.replace("_", " "), _number(value, ".4g")) for key, value in data_set.items() if key != "name"]
        if len(sets) == 1:
            yield from figures[1:]  # without the loss, which has its own row
        else:
            yield f"  {data_set['name']}", ", ".join(f"{name} {value}" for name, value in figures)
    yield from ((name, _number(value, ".4g")) for name, value in summary["metric"].items())


def _lr_rows(summary: Mapping) -> Iterator[tuple[str, str]]:
    """Yields a row if no step reached the requested learning rate. A resumed run gets no row, because it may have
    reached the requested learning rate before."""
    highest, asked = summary["highest_lr"], summary["lr"]
    if 0 < highest < asked and not summary["resumed_from"]:
        yield "highest learning rate", f"{highest:.3g} (lr={asked:g})"


def predicted_and_measured(summary: Mapping) -> dict[str, dict[str, tuple[int, int]]]:
    """Returns a dict that maps each phase to a dict with (predicted, measured) peaks in bytes, under the keys "device"
    and "host". Peaks that were not measured are left out."""
    if not summary.get("predicted"):
        return {}
    pairs: dict[str, dict[str, tuple[int, int]]] = {}
    for phase, need in summary["predicted"]["phases"].items():
        measured = summary["peak_bytes_by_phase"].get(phase, {})
        sides = {side: (need[side], measured[side]) for side in ("device", "host") if measured.get(side)}
        if sides:
            pairs[phase] = sides
    return pairs


def plan_ratios(summary: Mapping) -> dict[str, float]:
    """Returns metrics for the loggers, by name: predicted bytes divided by measured bytes."""
    return {
        f"plan/{phase}_{side}_predicted_over_measured": predicted / measured
        for phase, sides in predicted_and_measured(summary).items()
        for side, (predicted, measured) in sides.items()
    }


def _plan_rows(summary: Mapping) -> list[tuple[str, str]]:
    """Returns a row per phase with predicted and measured peaks. Host memory is left out if Python and its libraries
    take more than half of it, because then the comparison says little about the model."""
    least = 2 * summary["rss_before_model_bytes"]
    rows = []
    for phase, sides in predicted_and_measured(summary).items():
        each = [_pair(side, *pair) for side, pair in sides.items() if side != "host" or pair[1] >= least]
        rows += [(f"  {phase}", ", ".join(each))] if each else []
    return [("predicted / measured", ""), *rows] if rows else []


def _pair(side: str, predicted: int, measured: int) -> str:
    size, name, digits = unit(max(predicted, measured))
    return f"{side} {predicted / size:,.{digits}f} / {measured / size:,.{digits}f} {name}"


def highest(summary: Mapping, side: str) -> int:
    """Returns the highest peak of all ranks in bytes. `side` is "device" or "host_rss". Raises TypeError if a peak was
    not measured (None)."""
    return max(peak[side] for peak in [summary["peak_bytes"], *summary.get("ranks", ())])


def _rank_rows(summary: Mapping) -> list[tuple[str, str]]:
    """Returns a row for each rank if there are several ranks. With more than RANKS ranks, returns only the rows of the
    ranks with the lowest and the highest device peak."""
    ranks = dict(enumerate(summary.get("ranks", ())))
    if len(ranks) < 2:
        return []
    if len(ranks) > RANKS:
        order = sorted(ranks, key=lambda number: ranks[number]["device"] or 0)
        ranks = {number: ranks[number] for number in (order[0], order[-1])}
    size, name, digits = unit(max(max(rank[kind] or 0 for kind in OF_RANK) for rank in ranks.values()))

    def shown(rank: Mapping) -> str:
        known = (None if rank[kind] is None else rank[kind] / size for kind in OF_RANK)
        device, host, weights, gradients, state = (_number(value, f",.{digits}f") for value in known)
        share = rank["weights"] / summary["weights_bytes"]
        return f"{device}, {host}; {weights} ({share:.1%}), {gradients}, {state}"

    explained = "peak device, peak host; weights (share), gradients, optimizer"
    rows = ((f"  rank {number}", shown(rank)) for number, rank in ranks.items())
    return [(f"{name} of {len(summary['ranks'])} ranks", explained), *rows]


def _steps(summary: Mapping) -> str:
    skipped = summary["skipped_steps"]
    return f"{summary['steps']:,}" + (
        f" (and {skipped} skipped: inf, nan or fp16 overflow, or no learned token)" if skipped else ""
    )


def _size(size: int | None) -> str:
    unseen = "not measured: torch.compile hides its allocations"
    return unseen if size is None else byte_size(size)


def _host(size: int, before_model: int) -> str:
    return f"{byte_size(size)} ({byte_size(before_model)} before the model was loaded)"


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None or not math.isfinite(value) else format(value, spec)
