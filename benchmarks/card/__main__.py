"""Everything that only a card can show, stage by stage.

    python -m benchmarks.card                  # all six, on a CUDA device: some thirty minutes
    python -m benchmarks.card --stages 3,5     # some of them; what is known of the others stays
    python -m benchmarks.card --resume         # what has no record yet
    python -m benchmarks.card --resume --retry # and again what failed or was ended
    python -m benchmarks.card --table          # only the page again, of what is in the file; needs no card
    python -m benchmarks.card --device cpu     # a rehearsal without a card: small, and on stand-ins

Every case is a process of its own with a time limit; one that fails is recorded with its last words, and the next one
runs. results/card.json is written after every case, and docs/card.md at the end of every stage.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
NEEDED = (
    *("torch", "lightning", "transformers", "tokenizers", "safetensors", "hydra", "omegaconf", "numpy"),
    *("psutil", "tqdm", "matplotlib"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns: 0; 1 where a case has no whole result; 2 where nothing could be run."""
    options = _options(arguments)
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        return _refused(f"{', '.join(missing)}: not installed, and nothing runs without. Type pip install -e . first.")
    if str(ROOT / "src") not in sys.path:  # lowmem itself need not be installed
        sys.path.insert(0, str(ROOT / "src"))
    from benchmarks.card import auto, correctness, link, memory, speed, xl
    from benchmarks.card.kit import Kit, NoCard, NoResults

    stages = {module.STAGE.number: module.STAGE for module in (link, correctness, memory, speed, xl, auto)}
    unknown = [word for word in options.stages if not word.isdigit() or int(word) not in stages]
    if unknown:
        return _refused(f"--stages: there is no stage {', '.join(unknown)}. Type some of {','.join(map(str, stages))}.")
    kit = Kit(options.device, options.to or _file(options.device), list(stages.values()))
    try:
        if options.table:
            return kit.table()
        return kit.run([stages[int(word)] for word in options.stages], options.resume, options.retry)
    except (NoCard, NoResults) as why:
        return _refused(str(why))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.card", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--stages", type=lambda typed: typed.split(","), default=list("123456"), help="such as 3,5")
    parser.add_argument("--resume", action="store_true", help="leave out what has a record")
    parser.add_argument("--retry", action="store_true", help="with --resume: but not what failed or was ended")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--to", type=Path, help="the file of results")
    return parser.parse_args(arguments)


def _file(device: str) -> Path:
    """A rehearsal's figures are nobody's results."""
    return ROOT / ("benchmarks/results/card.json" if device == "cuda" else ".cache/card/rehearsal.json")


def _refused(why: str) -> int:
    print(why, file=sys.stderr)
    return 2


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C does, so that no case outlives this process
    sys.exit(main())
