"""Writes the results of the cases as a Markdown page next to the file of results: card.md in benchmarks/results for
runs on a card."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.card import prediction
from benchmarks.card.blocks import peak_flops, seconds_per_step
from benchmarks.card.cases import CASES
from lowmem.system.units import GIB

HEAD = "| run | by | tokens/s | s per step, predicted / measured | MFU | tensors GiB, predicted / measured "
HEAD += "| reserved GiB | host GiB, predicted / measured | clock MHz, degrees C |"


def write(file: Path, known: Mapping) -> int:
    """Writes the page next to the file of results, and prints it. Returns 0, the exit code."""
    text = page(known)
    file.with_suffix(".md").write_text(text)
    print(f"\n{text}\nwrote {file.with_suffix('.md')}")
    return 0


def lines_of(record: Mapping) -> str:
    """Returns a case's status and seconds in one line, then one line per row."""
    lines = [f"  {record['status']} in {record['seconds']:.0f} s{_because(record)}"]
    for row in record["rows"]:
        speed = f"{tokens_per_second(row):,.0f} tokens/s" if row.get("blocks") else ""
        parts = [speed, _findings(row), short(row["why"]) if "why" in row else ""]
        parts += ["NOT RIGHT"] if is_wrong(row) else []
        lines.append(f"  {row['run']}, {row.get('by', 'lowmem')}: {'; '.join(filter(None, parts))}")
    return "\n".join(lines)


def is_wrong(row: Mapping) -> bool:
    """Returns True if the case has marked this row as wrong."""
    return row.get("right") is False


def page(known: Mapping) -> str:
    """Returns the page as Markdown."""
    parts = [*_top(known["machine"]), *_speeds(known), *_findings_table(known), *_missing(known)]
    return "\n".join(parts).rstrip() + "\n"


def _top(machine: Mapping) -> list[str]:
    card, size = machine["card"] or "no card: a rehearsal", machine.get("card_bytes")
    parts = [card, size and f"{size / GIB:.1f} GiB", machine.get("driver") and f"driver {machine['driver']}"]
    parts += [f"{machine['processor']}, {machine['cores']} cores"]
    parts += [f"{package} {version}" for package, version in machine["versions"].items()]
    return [
        *("# Measured on a card", "", f"By `python -m benchmarks.card` on {', '.join(filter(None, parts))}.", ""),
        "Random weights and random tokens. A speed is the mean over blocks of unsynchronized steps after a warm-up. "
        "MFU is the share of the data sheet's dense bf16 peak that the model's own operations use (6 N + 12 L d T per "
        "token); recomputed operations do not count. " + _of_predictions(),
        "",
    ]


def _of_predictions() -> str:
    """Returns a sentence about the machine that the predictions assume, which may differ from the machine that was
    measured; "" without predictions."""
    card, cores = (prediction.stored().get(key) for key in ("card", "cores"))
    return (
        f"Predictions are for an {card.upper()} with {cores} host cores, at the rates of conf/gpu.yaml, and were made "
        "without it ([assumptions](../card/prediction.py))."
        if card
        else ""
    )


def _rows(known: Mapping) -> Iterator[dict]:
    for case in CASES:
        yield from known["cases"].get(case.name, {}).get("rows", ())


def _speeds(known: Mapping) -> list[str]:
    """Returns the lines of the table of timed rows; [] without timed rows."""
    peak = peak_flops(known["machine"]["card"] or "")
    is_real = bool(known["machine"]["card"])  # no predictions for the small models of a rehearsal
    lines = [f"| {' | '.join(_cells(row, peak, is_real))} |" for row in _rows(known) if row.get("blocks")]
    return [HEAD, f"|{'---|' * HEAD.count(' |')}", *lines, ""] if lines else []


def _cells(row: Mapping, peak: float | None, is_real: bool = True) -> Iterator[str]:
    expected = prediction.predicted(row["run"]) if is_real and row["by"] == "lowmem" else {}
    seconds = seconds_per_step(row)
    yield from (row["run"], row["by"], f"{tokens_per_second(row):,.0f}")
    yield both(expected.get("seconds_per_step"), seconds, "{:.3f}")
    yield f"{row['flops_per_token'] * tokens_per_second(row) / peak:.1%}" if peak else "-"
    yield both(_gib(expected, "peak_bytes"), _gib(row, "peak_bytes"), "{:.2f}")
    yield both(None, _gib(row, "reserved_bytes"), "{:.2f}")
    yield both(_gib(expected, "host_bytes"), _gib(row, "host_bytes"), "{:.1f}")
    yield "; ".join(f"{_or_dash(block.get('mhz'))}, {_or_dash(block.get('celsius'))}" for block in row["blocks"])


def _gib(figures: Mapping, key: str) -> float | None:
    return figures[key] / GIB if figures.get(key) is not None else None


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def both(predicted: float | None, measured: float | None, form: str) -> str:
    """Returns "predicted / measured", or only the measured value without a prediction. "-" stands for a measured value
    of None."""
    values = [predicted, measured] if predicted is not None else [measured]
    return " / ".join("-" if value is None else form.format(value) for value in values)


def tokens_per_second(row: Mapping) -> float:
    return row["tokens"] / seconds_per_step(row)


def _findings_table(known: Mapping) -> list[str]:
    """Returns the lines of the table of findings other than speed and memory; [] without findings."""
    lines = [
        f"| {row['run']} | {row.get('by', 'lowmem')} | {what} | {shown(value)} |"
        for row in _rows(known)
        for what, value in row.get("found", {}).items()
    ]
    return ["| run | by | finding | value |", "|---|---|---|---|", *lines, ""] if lines else []


def shown(value: object) -> str:
    """Returns a finding as a cell of a table."""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {shown(one)}" for key, one in value.items())
    return "-" if value is None else str(value).replace("|", " ")


def _findings(row: Mapping) -> str:
    return ", ".join(f"{what}: {shown(value)}" for what, value in row.get("found", {}).items())


def _missing(known: Mapping) -> list[str]:
    """Returns a line for each case that was not measured or not completed, and for each row that failed or is wrong."""
    lines = []
    for case in CASES:
        record = known["cases"].get(case.name)
        if record is None:
            lines.append(f"- **{case.name}**: not measured yet")
        elif record["status"] != "done":
            lines.append(f"- **{case.name}** {record['status']}{_because(record)}")
        for row in record["rows"] if record else ():
            if "why" in row:
                lines.append(f"- **{row['run']}**, {row.get('by', 'lowmem')}: {short(row['why'])}")
            elif is_wrong(row):
                lines.append(f"- **{row['run']}**, {row.get('by', 'lowmem')}: NOT RIGHT")
    return [*lines, ""] if lines else []


def _because(record: Mapping) -> str:
    return f": {short(record['why'])}" if "why" in record else ""


def short(why: str) -> str:
    """Returns the last 300 characters of the last line of a text. In a traceback, this line is the error."""
    return (why.strip().splitlines() or [""])[-1][-300:]
