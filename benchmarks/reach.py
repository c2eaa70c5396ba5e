"""Finds, by tracing shapes, the longest packed rows that fit on a card with and without a (tokens, tokens) mask.

python -m benchmarks.reach               # about ten minutes on two cores; nothing is downloaded or allocated
"""

import argparse
from unittest.mock import patch

from benchmarks.runner import measure, options_of, write
from lowmem.system.units import GIB

LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
CARDS = (8, 12, 24)
ROWS_OF = ("with a mask", "without")
LONG = ["batch_size=1", "data=jsonl", "data.packing=documents", "gradient_checkpointing=offload", "loss=chunked"]
LONG += ["tile.tokens=4096", "clip=null", "logger=none"]
RECIPES = {
    "Llama-3.2-1B, all weights": ["model=llama-3.2-1b", "precision=bf16-master", "optim=adamw8bit"],
    "Llama-3.2-1B, LoRA": ["model=llama-3.2-1b", "precision=bf16-true", "adapter=lora"],
    "Llama-3.1-8B, QLoRA": ["model=llama-3.1-8b", "precision=bf16-true", "adapter=qlora"],
}


def row(recipe: str, rows_of: str) -> dict[str, int]:
    """Returns a dict from the length of a row, in tokens as text, to the bytes of card memory that a run with such rows
    needs. Args: recipe: a key of RECIPES; rows_of: one of ROWS_OF."""
    from lowmem.config.cards import card
    from lowmem.config.settle import run_of
    from lowmem.model import packed_attention
    from lowmem.model.document_attention import BY_DOCUMENT, MASKED
    from lowmem.plan.prediction import predict
    from lowmem.plan.target import Target

    target = Target(on_card=True, card=card("80GiB"))
    masked = patch.object(packed_attention, "BY_DOCUMENT", MASKED if rows_of == ROWS_OF[0] else BY_DOCUMENT)
    with masked:
        return {
            str(length): predict(run_of([*RECIPES[recipe], *LONG, f"seq_len={length}"]).resolved(), target).device.total
            for length in LENGTHS
        }


def table(results: dict) -> str:
    lines = [
        "The longest of " + ", ".join(f"{length:,}" for length in LENGTHS) + " tokens in a row that fits, with one row "
        f"in a micro-batch, and {', '.join(f'`{line}`' for line in LONG[3:7])}. Predicted by shape, 2 % of each card "
        "kept free; none of these was run on a card.",
        "",
        "| recipe | documents of a row | " + " | ".join(f"{size} GiB" for size in CARDS) + " | GiB at 32,768 |",
        "|---" * (3 + len(CARDS)) + "|",
    ]
    for name, (needs,) in results.items():
        recipe, rows_of = name.split(": ")
        fitting = [[length for length in LENGTHS if needs[str(length)] <= 0.98 * size * GIB] for size in CARDS]
        cells = [f"{max(lengths):,}" if lengths else "-" for lengths in fitting]
        lines.append(f"| {recipe} | {rows_of} | {' | '.join(cells)} | {needs['32768'] / GIB:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    options_of(parser, row)
    names = [(recipe, rows_of) for recipe in RECIPES for rows_of in ROWS_OF]
    results = measure({": ".join(name): ["-m", "benchmarks.reach", "--row", *name] for name in names}, 1)
    write("reach", {"rounds": results}, table(results))


if __name__ == "__main__":
    main()
