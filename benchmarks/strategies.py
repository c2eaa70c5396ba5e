"""Tests every strategy with every feature. The result of several processes must equal the result of a single process
that trains on the rows of all processes.

python -m benchmarks.strategies                    # about 20 minutes on two idle cores
python -m benchmarks.strategies --only ddp fsdp    # keeps the results of the other strategies

The results also have each rank's bytes, as shares of the bytes of a single process, and the number of collectives. The
cases are in tests/support/matrix.py. They run over gloo on a CPU, with two processes, or with four for a mesh of two
dimensions. NCCL and the time of a step are not tested, because this would need cards.
"""

import argparse
import logging
import multiprocessing
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.runner import ROOT, machine, stored, write

TESTS = ROOT / "tests" / "support"
WORST = 300  # time limit of a case in seconds; even a case that compiles on a busy machine takes less
SIGNS = {"exact": "exact", "refused": "refused", "not run": "not run", "differs": "**differs**"}


def run(strategy: str, folder: Path, before: dict, only: list[str] | None) -> dict:
    """Tests the features of a strategy. Returns their results, and the result of `shares_of_bytes` for the case "clip".

    Args:
        before: earlier results of this strategy.
        only: names of the features to test again; None: all features.
    """
    import matrix
    import pair

    pair.LIMIT = WORST
    logging.disable(logging.WARNING)
    devices = next(int(line.split("=")[1]) for line in matrix.STRATEGIES[strategy] if line.startswith("devices="))
    ranks, rows = pair.Ranks(multiprocessing.get_context("spawn"), devices), dict(before.get("features", {}))
    chosen = {name: feature for name, feature in matrix.features(folder).items() if only is None or name in only}
    try:
        for name, (case, bands) in chosen.items():
            rows[name] = measure_cell(ranks, matrix.typed(case, strategy, WORST), bands, name)
            print(f"{strategy:<22}{name:<40}{rows[name]}", flush=True)
        case = matrix.typed(matrix.features(folder)["clip"][0], strategy)
        return {"devices": devices, "features": rows} | shares_of_bytes(ranks, case)
    finally:
        ranks.close()


def measure_cell(ranks, case, bands: dict[str, float], name: str) -> dict:
    import matrix
    import pair
    from lowmem.system.errors import Refused

    if name == matrix.OF_PARTS and "strategy=ddp" in case.lines:
        return {"result": "not run", "why": "every rank has the same gradient"}
    if why := matrix.why_not(case):
        return {"result": "refused", "why": why}
    try:
        differences = pair.apart(ranks(case), pair.alone(case))
    except Refused as error:
        return {"result": "refused", "why": str(error)}
    except (pair.Failed, AssertionError) as error:
        return {"result": "differs", "why": str(error).strip().splitlines()[-1]}
    exact = all(differences[figure] <= band for figure, band in bands.items())
    return {"result": "exact" if exact else "differs", **differences, "bands": bands}


def shares_of_bytes(ranks, case) -> dict:
    """Returns two results of a case. "shares": for each rank, category -> bytes before the last step, divided by the
    bytes of a single process. "collectives": name -> number of rank 0's collectives in the last window that has two
    micro-batches."""
    import pair

    reports, alone = ranks(replace(case, counted=True)), pair.alone(case)["bytes"]
    shares = [{kind: rank["bytes"][kind] / alone[kind] for kind in alone} for rank in reports]
    return {"shares": shares, "collectives": reports[0]["collectives"][-2]}  # the last window has one micro-batch


def table(results: dict) -> str:
    names = list(next(iter(results.values()))["features"])
    lines = [
        "Largest difference of an element, of any step's gradients / of the final weights, relative to the largest "
        "element. `exact`: within the band of matrix.py (fp64 AdamW 1e-9; fp32 SGD 1e-6 of weights; 16 bits "
        "their roundings).",
        "",
        f"| feature | {' | '.join(results)} |",
        f"|---|{'---|' * len(results)}",
    ]
    for name in names:
        lines.append(f"| {name} | {' | '.join(cell(result['features'].get(name)) for result in results.values())} |")
    lines += ["", "| strategy | ranks | weights | gradients | optimizer state | collectives of a window of 2 |"]
    lines.append("|---|---|---|---|---|---|")
    for strategy, result in results.items():
        shares = (
            ", ".join(f"{rank[kind]:.3f}" for rank in result["shares"]) for kind in ("weights", "gradients", "state")
        )
        sent = ", ".join(f"{count} {name}" for name, count in result["collectives"].items() if "wait" not in name)
        lines.append(f"| {strategy} | {result['devices']} | {' | '.join(shares)} | {sent} |")
    lines += ["", "Bytes are each rank's share of what one process holds.", "", "Refused, and why:", ""]
    why = {}
    for strategy, result in results.items():
        for name, row in result["features"].items():
            if row["result"] == "refused":
                why.setdefault(row["why"], []).append(f"{strategy} x {name}")
    lines += [f"- {sentence} ({'; '.join(where)})" for sentence, where in why.items()]
    return "\n".join(lines)


def cell(row: dict | None) -> str:
    if row is None:
        return SIGNS["not run"]
    numbers = f" {row['gradients']:.0e} / {row['weights']:.0e}" if "gradients" in row else ""
    return SIGNS[row["result"]] + numbers


def main() -> None:
    sys.path.insert(0, str(TESTS))
    import matrix

    parser = argparse.ArgumentParser(prog="python -m benchmarks.strategies", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=matrix.STRATEGIES, default=list(matrix.STRATEGIES))
    parser.add_argument(
        "--features",
        nargs="+",
        choices=matrix.features(Path()),
        help="keep results of the others",
    )
    options = parser.parse_args()
    results = stored("strategies").get("strategies", {})
    with tempfile.TemporaryDirectory() as folder:
        rows = matrix.written(Path(folder))
        for strategy in options.only:
            results[strategy] = run(strategy, rows, results.get(strategy, {}), options.features)
            ordered = {name: results[name] for name in matrix.STRATEGIES if name in results}
            write("strategies", {"machine": machine(), "strategies": ordered}, table(ordered))


if __name__ == "__main__":
    main()
