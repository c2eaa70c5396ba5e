"""Finds the best `lr` of the optimizers in FACTORS on `tiny`, as a multiple of the model's own `lr`, which is meant for
AdamW. Comments in conf/optim name these multiples.

python -m benchmarks.learning_rates      # about half an hour on two cores
"""

import argparse

from benchmarks.runner import measure, options_of, run_train, stored, write

BASE, STEPS = 2e-3, 150  # BASE: model.lr of tiny; STEPS: a third of the default run's steps
FACTORS = {
    "adamw": (0.5, 1, 2),
    "adam8bit": (0.5, 1, 2),
    "adamw8bit": (0.5, 1, 2),
    "paged_adamw8bit": (0.5, 1, 2),  # bitsandbytes' AdamW8bit
    "adamw4bit": (0.5, 1, 2),
    "adafactor": (0.5, 1, 2, 4),
    "muon": (0.1, 0.25, 0.5, 1, 2, 4),
    "lion8bit": (0.05, 0.1, 0.2, 0.5, 1),
    "sgd": (50, 150, 500, 1500, 5000),
}


def row(optim: str, lr: str) -> dict:
    arguments = [f"optim={optim}", f"lr={lr}", f"max_steps={STEPS}", "logger=none", "sample_tokens=0"]
    # A step multiplies weights by 1 - lr * weight_decay. This override keeps lr * weight_decay constant.
    decay = [] if optim == "adam8bit" else [f"optim.weight_decay={0.1 * BASE / float(lr)}"]
    summary = run_train([*arguments, *decay])
    return {"val_loss": summary["val_loss"], "bits_per_byte": summary["bits_per_byte"]}


def table(results: dict) -> str:
    lines = ["| optimizer | validation loss at lr = factor x 2e-3 | best factor |", "|---|---|---|"]
    for optim, factors in FACTORS.items():
        losses = {factor: results[f"{optim} x {factor}"][0]["val_loss"] for factor in factors}
        each = ", ".join(f"{factor}: {loss:.3f}" for factor, loss in losses.items())
        lines.append(f"| {optim} | {each} | {min(losses, key=losses.get)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--add", action="store_true", help="measure only the rows that have no result yet")
    options = options_of(parser, row)
    rows = {
        f"{optim} x {factor}": ["-m", "benchmarks.learning_rates", "--row", optim, str(factor * BASE)]
        for optim, factors in FACTORS.items()
        for factor in factors
    }
    earlier = stored("learning_rates")["rounds"] if options.add else {}
    results = earlier | measure({name: row for name, row in rows.items() if name not in earlier}, rounds=1)
    write("learning_rates", {"steps": STEPS, "rounds": results}, table(results))


if __name__ == "__main__":
    main()
