"""Lists the recipes that the planner chooses for common models and cards.

python -m benchmarks.plans                 # about forty minutes on two cores; nothing is downloaded or allocated
python -m benchmarks.plans --only QLoRA    # plans the recipes of one of the three tables; keeps the other two
"""

import argparse
import json
import os
import sys
from contextlib import suppress
from itertools import product
from pathlib import Path

from benchmarks.runner import measure, options_of, stored, write
from lowmem.system.units import GIB

MODELS = ("gpt2-xl", "llama-3.2-1b", "llama-3.1-8b", "qwen3-8b")
CARDS = (4, 8, 12, 16, 24, 80)  # GiB
TRAINED = {"all weights": "none", "LoRA": "lora", "QLoRA": "qlora"}  # heading of a table -> adapter
CELLS = {f"{cell[0]}, {cell[1]} on {cell[2]} GiB": cell for cell in product(TRAINED, MODELS, CARDS)}
RAM = 64


def row(adapter: str, model: str, card: str) -> dict:
    """Runs plan.py once. Returns figures of the first recipe that plan.py lists: the fastest recipe that fits, or the
    recipe that needs the least memory if none fits."""
    import plan
    from lowmem.command import cli

    folder = os.environ["ROW_FOLDER"]
    sys.argv = ["plan.py", f"model={model}", f"gpu={card}GiB", f"ram={RAM}GiB", f"hydra.run.dir={folder}"]
    if adapter != "none":
        sys.argv.append(f"adapter={adapter}")
    with suppress(SystemExit):  # plan.py exits with an error if no recipe fits
        cli.start(plan.main, config="plan")
    content = json.loads((Path(folder) / "plan.json").read_text())
    first = content["recipes"][0]
    return {key: first[key] for key in ("overrides", "changes", "fits")} | {
        "device_need_bytes": first["device"]["total"],
        "reserved_peak_bytes": first["reserved"],
        "device_peak_bytes": first["allocated"],
        "host_peak_bytes": first["host"]["total"],
        "peak_phase": first["device"]["phase"],
        "seconds": content["seconds"],
        "recipes": len(content["recipes"]),
        "fitting": sum(recipe["fits"] for recipe in content["recipes"]),
    }


def table(results: dict) -> str:
    lines = [
        f"The host has {RAM} GiB. Device: the smallest card on which the recipe runs, with half a GiB for the CUDA "
        "context; 2 % of each card stay free. None of these recipes was run on a card.",
    ]
    for trained in TRAINED:
        lines += ["", f"## {trained}", ""]
        lines += [
            "| model | card | fastest recipe that fits | changes | device GiB | host GiB | recipes that fit "
            "| planning time, s |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for name, (part, model, card) in CELLS.items():
            if part == trained and name in results:
                (planned,) = results[name]
                lines.append(f"| {' | '.join([model, f'{card} GiB', *columns(planned)])} |")
    return "\n".join(lines)


def columns(planned: dict) -> list[str]:
    recipe = " ".join(o for o in planned["overrides"] if not o.startswith(("model=", "adapter=")))
    recipe = f"`{recipe}`" if recipe else "as typed"
    bytes_of = [f"{planned[key] / GIB:.1f}" for key in ("device_need_bytes", "host_peak_bytes")]
    fitting = f"{planned['fitting']} of {planned['recipes']}"
    changes = ", ".join(planned["changes"]) or "nothing"
    recipe = recipe if planned["fits"] else f"none; the smallest: {recipe}"
    return [recipe, changes, *bytes_of, fitting, f"{planned['seconds']:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=TRAINED, help="plan one part; the other parts' results are kept")
    options = options_of(parser, row)
    rows = {
        name: ["-m", "benchmarks.plans", "--row", TRAINED[trained], model, str(card)]
        for name, (trained, model, card) in CELLS.items()
        if options.only in (None, trained)
    }
    before = stored("plans").get("rounds", {})
    results = {name: before[name] for name in CELLS if name in before} | measure(rows, 1)
    write("plans", {"rounds": results}, table(results))


if __name__ == "__main__":
    main()
