"""Runs the measurements that need a CUDA card: of speed, of the share of copying that computation hides, and of memory,
which is compared with its prediction.

    python -m benchmarks.card --minutes 9      # the most valuable cases that fit; type it again for the rest
    python -m benchmarks.card --only masters   # cases with this word in their names, even if they have been measured
    python -m benchmarks.card --list           # the cases, their seconds and their status
    python -m benchmarks.card --device cpu     # a rehearsal without a card: the same code with small models
    python -m benchmarks.card --predict h100   # predicts every run of lowmem for a card of conf/gpu.yaml; needs no card
    python -m benchmarks.card --table          # writes the page again from the file of results

Every case runs in a separate process. A case starts only if its estimated seconds fit in the rest of --minutes. It is
stopped after twice its estimate (ten times in a rehearsal; at least a minute), or when the minutes are over.
benchmarks/results/card.json is written after each case. A case with a result, even a failure, is not run again unless
--only names it. A case that was stopped because the minutes were over has no final result, so it is run again. The exit
code is 1 if a case failed, was stopped or found a wrong result, and 2 if no case could be run.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("torch", "lightning", "transformers", "tokenizers", "safetensors", "hydra", "omegaconf", "psutil", "pydantic")
# time limit of a case as a multiple of its estimate; a rehearsal may run on a busy machine
PATIENCE = {"cuda": 2, "cpu": 10}
LEAST = 60  # smallest time limit in seconds, unless fewer seconds are left


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0; 1 if a case failed, was stopped or found a wrong result; 2 if nothing could be run."""
    options = _options(arguments)
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        return _refused(f"Not installed: {', '.join(missing)}. Type pip install -e . first.")
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # this checkout takes precedence over an installed version
    from benchmarks.card import case, page, prediction
    from benchmarks.card.cases import CASES

    if options.predict:
        return prediction.write(options.predict)
    file = options.to or _file(options.device)
    try:
        known = _read(file)
    except (OSError, ValueError) as error:
        return _refused(f"--to {file}: no file of results of this command ({error}). Type another --to, or delete it.")
    if options.table:
        return page.write(file, known) if known["cases"] else _refused(f"{file} has no results of this command.")
    if options.list:
        for one in CASES:
            print(f"{_seconds(one, known):5.0f} s  {one.name}: {_status(one, known)}")
        return 0
    words = options.only.split(",") if options.only else []
    chosen = [one for one in CASES if any(word in one.name for word in words)] if words else CASES
    if not chosen:
        return _refused(f"--only {options.only}: no case has this in its name. --list shows the names.")
    if not options.minutes > 0:
        return _refused(f"--minutes {options.minutes:g}: no case fits. Type a larger number.")
    with case.alone() as is_alone:
        if not is_alone:
            return _refused("Another python -m benchmarks.card runs here, and both would be slow. Wait for its end.")
        return _run(chosen, known, file, options)


def _run(chosen: Sequence, known: dict, file: Path, options: argparse.Namespace) -> int:
    """Runs the chosen cases that fit in the minutes. Without --only, skips cases with a final result. Returns the exit
    code."""
    from benchmarks.card import case, page
    from lowmem.report.summary import write

    end, failed = time.monotonic() + 60 * options.minutes, False
    machine = case.described(options.device)
    if machine is None:
        return _refused("torch sees no CUDA device. Check nvidia-smi, or type --device cpu for a rehearsal.")
    known = known if known.get("machine") in (None, machine) else _set_aside(file)
    known["machine"] = machine
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write(file, known)
    except OSError as error:
        return _refused(f"--to {file}: cannot be written ({error.strerror}). Type another --to.")
    for one in [one for one in chosen if options.only or not _is_over(one, known)]:
        record = _case_record(one, known, options.device, end - time.monotonic())
        if record is None:
            continue
        known["cases"][one.name] = record
        write(file, known)
        failed |= record["status"] in ("failed", "ended") or any(map(page.is_wrong, record["rows"]))
        print(page.lines_of(record), flush=True)
    return page.write(file, known) or int(failed)


def _case_record(one, known: dict, device: str, left: float) -> dict | None:
    """Runs a case and returns its record. If its estimate exceeds the seconds left, returns None and does not run
    it."""
    from benchmarks.card import case

    seconds = _seconds(one, known)
    if seconds > left:
        print(f"{one.name}: not begun, it takes about {seconds:.0f} s and {max(0, left):.0f} s are left.", flush=True)
        return None
    print(f"{one.name}: about {seconds:.0f} s ...", flush=True)
    limit = max(LEAST, PATIENCE[device] * seconds)
    record = case.run(one, device, min(left, limit))
    return record | ({"again": True} if record["status"] == "ended" and left < limit else {})


def _is_over(case, known: dict) -> bool:
    """Returns True if a case has a final result. If a case was stopped because the minutes were over, its result is not
    final."""
    return not known["cases"].get(case.name, {"again": True}).get("again")


def _seconds(case, known: dict) -> float:
    """Returns the seconds that a case took when it was last completed, or its estimate if the record has no completed
    run."""
    record = known["cases"].get(case.name, {})
    return record["seconds"] if record.get("status") == "done" else case.seconds


def _status(case, known: dict) -> str:
    record = known["cases"].get(case.name)
    return "-" if record is None else record["status"]


def _set_aside(file: Path) -> dict:
    """Renames a file with results of another machine, and returns an empty record."""
    aside = file.with_stem(f"{file.stem}-{int(file.stat().st_mtime)}")
    file.replace(aside)
    print(f"{file.name} has results of another machine. They are in {aside.name} now.", flush=True)
    return {"cases": {}}


def _read(file: Path) -> dict:
    """Returns the results in a file, or an empty record if the file does not exist.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a file of results.
    """
    found = json.loads(file.read_text()) if file.exists() else {"cases": {}}
    if not isinstance(found, dict) or not isinstance(found.get("cases"), dict):
        raise ValueError("it has no cases")
    return found


def _file(device: str) -> Path:
    """Returns the file of results. Results of a rehearsal are not figures of a card, so they are not stored in
    benchmarks/results."""
    return ROOT / ("benchmarks/results/card.json" if device == "cuda" else ".cache/card/rehearsal.json")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.card", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=12.0, help="begin no case that takes longer than what is left")
    parser.add_argument("--only", metavar="WORDS", help="names or parts of names, separated by commas")
    parser.add_argument("--list", action="store_true", help="show the cases and run nothing")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--predict", metavar="CARD", help="a card of conf/gpu.yaml, such as h100")
    parser.add_argument("--table", action="store_true", help="write the page again and run nothing")
    parser.add_argument("--to", type=Path, help="the file of results")
    return parser.parse_args(arguments)


def _refused(why: str) -> int:
    print(why, file=sys.stderr)
    return 2


if __name__ == "__main__":
    for name in ("SIGTERM", "SIGHUP"):  # raise an exception, as Ctrl-C does, so that the case is killed too
        if signal.getsignal(getattr(signal, name)) == signal.SIG_DFL:  # SIGHUP stays ignored under nohup
            signal.signal(getattr(signal, name), lambda number, _: sys.exit(128 + number))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("Interrupted. The results of earlier cases are written, and the next call goes on with this case.")
