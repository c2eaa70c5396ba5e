"""Compares the predicted and the measured host memory of runs on a CPU, with and without malloc's cache of freed
memory.

python -m benchmarks.host_memory         # about five minutes on two cores

glibc's malloc keeps freed memory for later allocations, so the resident memory exceeds the live bytes that the planner
predicts. With low thresholds (RETURNS), malloc returns freed blocks of 64 KiB or more to the system immediately. The
rows show that malloc's cache explains most of the difference, except while the model is loaded.
"""

import argparse
import os

from benchmarks.runner import measure, options_of, real_model, run_train, write
from lowmem.system.units import GIB

RUN = [
    *("data=stdlib", "seq_len=256", "batch_size=4", "max_steps=4", "val_sequences=16", "sample_tokens=0"),
    "logger=csv",
]
RECIPES = (
    "precision=32",
    "precision=bf16 adapter=lora",
    "precision=bf16-master weights=streamed gradient_checkpointing=every_layer optim=adamw8bit clip=null",
)
RETURNS = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}


def row(*lines: str) -> dict[str, dict[str, int]]:
    """Runs a recipe in this process. Returns a dict that maps each phase to its peak bytes of host memory, "predicted"
    and "measured"."""
    folder = os.environ["ROW_FOLDER"]
    model = ["model=hf", f"model.name={real_model()}", f"cache_dir={folder}/cache"]
    summary = run_train([*model, *RUN, *lines])
    predicted, measured = summary["predicted"]["phases"], summary["peak_bytes_by_phase"]
    return {
        phase: {"predicted": predicted[phase]["host"], "measured": sizes["host"]}
        for phase, sizes in measured.items()
        if phase in predicted
    }


def table(results: dict[str, list[dict]]) -> str:
    lines = [
        "| `python train.py` ... | malloc | phase | predicted GiB | measured GiB | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for name, (phases,) in results.items():
        recipe, _, malloc = name.rpartition(", ")
        for phase, sizes in phases.items():
            predicted, measured = sizes["predicted"], sizes["measured"]
            figures = f"{predicted / GIB:.3f} | {measured / GIB:.3f} | {predicted / measured:.3f}"
            lines.append(f"| `{recipe}` | {malloc} | {phase} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options_of(parser, row)
    results = {}
    for malloc, variables in {"as usual": {}, "returns freed memory": RETURNS}.items():
        os.environ.update(variables)
        rows = {f"{name}, {malloc}": ["-m", "benchmarks.host_memory", "--row", *name.split()] for name in RECIPES}
        results |= measure(rows, rounds=1)
    write("host_memory", {"rounds": results}, table(results))


if __name__ == "__main__":
    main()
