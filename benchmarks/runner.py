"""Runs the rows of a benchmark in separate processes, and writes the results as JSON and as a table.

A row is a command whose last line of output is a JSON object. Every second round runs the rows in reverse order (a b c,
c b a, ...), so that no row has an advantage if the machine slows down. `medians` and `ratio` summarize the rounds.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from math import nan
from pathlib import Path
from statistics import median

from lowmem.report.summary import versions
from lowmem.system.process import processor

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def measure(rows: Mapping[str, Sequence[str]], rounds: int) -> dict[str, list[dict]]:
    """Runs every row in every round. Returns a dict that maps the name of each row to its results, one per round. Args:
    rows: name -> arguments of `python`."""
    results: dict[str, list[dict]] = {name: [] for name in rows}
    for number in range(1, rounds + 1):
        for name, arguments in list(rows.items())[:: 1 if number % 2 else -1]:
            results[name].append(row(arguments))
            print(f"round {number}/{rounds}  {name:<32}{results[name][-1]}", flush=True)
    return results


def row(arguments: Sequence[str]) -> dict:
    """Runs a row in a separate process. Returns the result, which the process prints as its last line."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment(folder),
            capture_output=True,
            text=True,
        )
    return result(arguments, done.returncode, done.stdout, done.stderr)


def options_of(parser: ArgumentParser, measured: Callable[..., dict]) -> Namespace:
    """Adds `--row` to the parser and returns the typed options. If `--row` was typed, instead prints the row's result
    and ends the process.

    Args:
        measured: function that measures a row and returns its result. Its arguments are the words after `--row`.
    """
    parser.add_argument("--row", nargs="*", help="measure one row in this process")
    options = parser.parse_args()
    if options.row is not None:
        print(json.dumps(measured(*options.row)), flush=True)
        sys.exit()
    return options


def environment(folder: str | Path) -> dict[str, str]:
    """Returns the environment variables of a row's process. Args: folder: a folder for files of the process."""
    return os.environ | {"WANDB_SILENT": "true", "ROW_FOLDER": str(folder)}


def result(arguments: Sequence[str], code: int, stdout: str, stderr: str) -> dict:
    """Returns the JSON object in a process's last line of output. Raises: SystemExit: the process failed."""
    if code:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{stdout[-2000:]}{stderr[-4000:]}")
    return json.loads(stdout.strip().splitlines()[-1])


def run_train(arguments: Sequence[str]) -> dict:
    """Runs train.py with these arguments in this process and returns its summary.json."""
    import train

    from lowmem.command import cli

    folder = os.environ["ROW_FOLDER"]
    sys.argv = ["train.py", *arguments, f"hydra.run.dir={folder}"]
    cli.start(train.main)
    return json.loads((Path(folder) / "summary.json").read_text())


def medians(results: Mapping[str, Sequence[Mapping]], key: str) -> dict[str, float]:
    """Returns a dict that maps each row to the median of a figure over the rounds. A figure that was not measured
    (None) counts as nan."""
    return {name: median(nan if run[key] is None else run[key] for run in rounds) for name, rounds in results.items()}


def ratio(results: Mapping[str, Sequence[Mapping]], name: str, against: str, key: str) -> float:
    """Returns the median, over the rounds, of the ratio between the figures of the rows `name` and `against` in the
    same round."""
    return median(a[key] / b[key] for a, b in zip(results[name], results[against], strict=True))


def real_model() -> Path:
    """Returns the folder of a small trained model. tests/support/real_model.py downloads the model once."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from real_model import folder

    return folder()


def machine() -> dict[str, object]:
    return {"processor": processor(), "cores": os.cpu_count(), "system": platform.system(), "versions": versions()}


def stored(name: str) -> dict:
    """Returns the contents of results/<name>.json; {} if the file does not exist."""
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def write(name: str, result: Mapping, table: str) -> None:
    """Writes results/<name>.json and .md, and prints the table.

    Args:
        result: contents of the JSON file. If they lack the key "machine", a description of this machine is added.
    """
    RESULTS.mkdir(exist_ok=True)
    result = {"machine": machine(), **result}
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    where = result["machine"]
    about = ", ".join(f"{package} {version}" for package, version in where["versions"].items())
    head = f"Measured on {where['processor']}, {where['cores']} cores, {where['system']}; {about}."
    (RESULTS / f"{name}.md").write_text(f"# {name}\n\n{head}\n\n{table}\n")
    print(table)
