"""Measures everything that only a card can show, in nine stages: speed, memory, correctness, races and the link.

    python -m benchmarks.card                  # all nine, on CUDA: forty minutes, or fifty with two devices
    python -m benchmarks.card --stages 3,5     # only these stages; earlier results of the others stay in the file
    python -m benchmarks.card --resume         # the cases that have no record yet
    python -m benchmarks.card --retry          # the same, and those that failed or were ended
    python -m benchmarks.card --table          # writes the page again from the file; needs no card
    python -m benchmarks.card --device cpu     # a rehearsal without a card: small models, and stand-ins for CUDA

Every case runs in a process of its own with a time limit. If a case fails, its last lines of output are recorded and
the next case runs. results/card.json is written after every case, and results/card.md at the end of every stage.
Checkpoints of up to 16 GB are written under .cache/card and removed. One case may hang a card, so it runs only if
CROWD_THE_CARD=1 is set. The exit code is 1 if a case has no complete result or a wrong one.
"""

import argparse
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDED = (
    *("torch", "lightning", "transformers", "tokenizers", "safetensors", "hydra", "omegaconf", "numpy"),
    *("psutil", "tqdm", "matplotlib", "pydantic", "jinja2", "yaml", "antlr4"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0; 1 if a case has no complete result or a wrong one; 2 if nothing could be run; 130 after Ctrl-C."""
    options = _options(arguments)
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        return _refused(f"{', '.join(missing)}: not installed, and nothing runs without. Type pip install -e . first.")
    if old := list(_too_old()):
        return _refused(f"{', '.join(old)}. Type pip install -e . first.")
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # imports this checkout, even if another one is installed
    from benchmarks.card import auto, correctness, link, memory, sanitizer, several, speed, streamed, xl
    from benchmarks.card.kit import Kit
    from lowmem.system.errors import Refused

    modules = (link, correctness, memory, speed, xl, auto, streamed, several, sanitizer)
    stages = {str(module.STAGE.number): module.STAGE for module in modules}
    wanted = dict.fromkeys(word.strip() for word in options.stages.split(",")) if options.stages is not None else stages
    if unknown := [word for word in wanted if word not in stages]:
        return _refused(
            f"--stages: there is no stage {', '.join(map(repr, unknown))}. Type some of {','.join(stages)}."
        )
    file = options.to or _file(options.device)
    kit = Kit(options.device, file, list(stages.values()))
    try:
        if options.table:
            return kit.table()
        return kit.run([stages[word] for word in wanted], options.resume, options.retry)
    except Refused as why:
        return _refused(str(why))
    except KeyboardInterrupt:
        print(f"Stopped. What had ended by then stands in {file}; --resume runs the rest.", file=sys.stderr)
        return 130


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.card", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--stages", help="such as 3,5; without it all of them")
    parser.add_argument("--resume", action="store_true", help="leave out what has a record")
    parser.add_argument("--retry", action="store_true", help="the same, but not what failed or was ended")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--to", type=Path, help="the file of results")
    return parser.parse_args(arguments)


def _too_old() -> Iterator[str]:
    """Yields a message for each package that is older than pyproject.toml requires."""
    asked = re.findall(r'"(torch|lightning|transformers)>=([\d.]+)', (ROOT / "pyproject.toml").read_text())
    for package, least in asked:
        if _numbers(version(package)) < _numbers(least):
            yield f"{package} {version(package)} is installed, and {least} or newer is needed"


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:3]]


def _file(device: str) -> Path:
    """Returns the file of results; a rehearsal's figures are no results, and go to .cache."""
    return ROOT / ("benchmarks/results/card.json" if device == "cuda" else ".cache/card/rehearsal.json")


def _refused(why: str) -> int:
    print(why, file=sys.stderr)
    return 2


if __name__ == "__main__":
    for name in ("SIGTERM", "SIGHUP"):  # they raise, as Ctrl-C does, so that no case outlives this process
        if signal.getsignal(getattr(signal, name)) == signal.SIG_DFL:  # nohup ignores SIGHUP, and it stays ignored
            signal.signal(getattr(signal, name), lambda number, _: sys.exit(128 + number))
    sys.exit(main())
