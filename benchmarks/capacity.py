"""Predicts the memory and time of training runs. The first table is about full fine-tuning of Llama-3.1-8B on cards of
141 to 4 GB, and the second table is about several models on cards of 8 to 80 GB.

python -m benchmarks.capacity            # about five minutes on two cores; nothing is downloaded or allocated

Recipes are predicted in the same way as in `plan.py search=false`. `python -m benchmarks.pictures` draws the
first table, and `python -m benchmarks.pages` copies the second table into README.md.

With master weights, the host's CPU runs the optimizer. The planner estimates the optimizer's time from the memory
bandwidth of the machine on which the planner runs. This benchmark instead uses the bandwidth that an optimizer step
reached in benchmarks/results/host_optimizer.json.
"""

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.runner import measure, medians, options_of, stored, write
from lowmem.plan.cost.machine import COMPUTE, MEMORY
from lowmem.system.units import GIB

if TYPE_CHECKING:
    from lowmem.plan.prediction import Prediction

LLAMA = ["model=llama-3.1-8b", "seq_len=2048"]
STREAMED = ["experiment=llama_8b_4gb"]  # the experiment also sets the keys of LLAMA
ON_CARD = ["precision=bf16", "optim=adamw8bit", "optim.in_backward=true", "clip=null", "batch_size=1"]
MASTERS = ["precision=bf16-master", "optim=adamw8bit", "clip=null", "gradient_checkpointing=offload", "loss=tiled"]
# Size of the card -> (card of conf/gpu.yaml or a bare size, overrides). Batch sizes are the largest that fit, with two
# exceptions: the first two recipes have batch_size=1, because a larger batch would hardly save time per token, and
# "4 GB" is the unchanged experiment.
RECIPES = {
    "141 GB": ("h200", [*LLAMA, "precision=bf16", "batch_size=1"]),
    "80 GB": ("h100", [*LLAMA, *ON_CARD]),
    "24 GB": ("rtx4090", [*LLAMA, *MASTERS, "batch_size=8"]),
    "12 GB": ("rtx3060", [*STREAMED, "batch_size=14"]),
    "8 GB": ("8GiB", [*STREAMED, "batch_size=8"]),
    "4 GB": ("4GiB", STREAMED),
    "4 GB, with a drive": ("4GiB", [*STREAMED, "weights.drive=scratch", "batch_size=3"]),
}
# Size of the card -> {"model, trained weights": overrides}
MODELS = {
    "8 GB": {
        "Llama-3.2-1B, all weights": ["experiment=llama_1b_8gb"],
        "Llama-3.1-8B, all weights": RECIPES["8 GB"][1],
        "Llama-3.1-70B, QLoRA": ["experiment=qlora_70b_8gb"],
    },
    "12 GB": {
        "GPT-2 XL (1.6B), all weights": ["experiment=gpt2_xl_12gb"],
        "Llama-3.1-8B, QLoRA": ["experiment=qlora_8b_12gb"],
        "Llama-3.1-8B, all weights": RECIPES["12 GB"][1],
    },
    "16 GB": {"Qwen3-8B, all weights": [*STREAMED, "model=qwen3-8b", "batch_size=16"]},
    "24 GB": {
        "Qwen2.5-1.5B, all weights": ["experiment=chat_full_24gb"],
        "Llama-3.1-8B, all weights": RECIPES["24 GB"][1],
    },
    "80 GB": {"Llama-3.1-8B, all weights": RECIPES["80 GB"][1]},
}
CARDS = {size: on for size, (on, _) in RECIPES.items()} | {"16 GB": "rtx4060ti-16gb"}
# Row -> (card, overrides). A recipe that is in both tables is predicted only once.
ROWS = RECIPES | {
    f"{model} on {size}": (CARDS[size], lines)
    for size, models in MODELS.items()
    for model, lines in models.items()
    if (CARDS[size], lines) not in RECIPES.values()
}
STEP = "adamw8bit, bf16 in and out, clipped"  # row of host_optimizer.json
PER = 10_000_000  # the milliseconds in this row are for updating this number of parameters
# Bytes per parameter that an update moves. It reads the gradient (2), the master (4) and the state (2), and writes the
# master (4), the state (2) and the 16-bit weight (2).
MOVED = 16
CORES = 2  # cores of the machine on which STEP was measured
MANY_CORES = 150e9  # upper limit of a host's memory bandwidth, bytes per second: half of eight channels of DDR5-4800


def row(name: str) -> dict:
    on, lines = ROWS[name]
    return predicted(on, lines)


def predicted(on: str, lines: list[str], cores: int = CORES) -> dict:
    """Predicts the memory of a run and the time of its steps.

    Args:
        on: a card of conf/gpu.yaml, or a bare size such as 8GiB.
        cores: number of host cores on which the optimizer of master weights runs.
    """
    from lowmem.config.cards import card
    from lowmem.config.drives import space
    from lowmem.config.settle import run_of
    from lowmem.plan.cost.machine import machine
    from lowmem.plan.cost.step_time import of_trace
    from lowmem.plan.job import resolved
    from lowmem.plan.prediction import predict
    from lowmem.plan.target import Target

    run = resolved(run_of(lines), on_card=True)
    drive = space("200GB", run.drive_folder) if run.drive_folder else None
    target = Target(on_card=True, card=card(on), drive=drive)
    need = predict(run, target)
    rates = machine(on_card=True, card=target.card, products=run.multiplies_in)
    rates = replace(rates, host=replace(rates.host, bandwidth=bandwidth(cores)))
    window = of_trace(rates, run, need.trace)
    tokens = run.windows.largest * run.batch_size * run.seq_len
    return {
        "overrides": lines,
        "card": on,
        "card_bytes": need.device.total,
        "card_size_bytes": target.device_memory,
        "peak_bytes": need.allocated,
        "reserved_bytes": need.reserved,
        "smallest_cap_bytes": need.device.total - need.device.context,
        "tensor_bytes_by_category": by_category(need),
        "host_bytes": need.host.total,
        "drive_bytes": need.drive.total,
        "parameters": need.parameters,
        "tokens_per_step": tokens,
        "seconds_per_step": window.seconds,
        "seconds_per_1000_tokens": 1000 * window.seconds / tokens,
        "of_them_passes": 1000 * window.passes / tokens,
        "fits": need.fits(target),
    }


def by_category(need: "Prediction") -> dict[str, int]:
    """Returns a dict that maps each category to the bytes that torch has allocated for it at the peak. `other` has the
    bytes that belong to no other category."""
    named = {kind: getattr(need.device, kind) for kind in ("weights", "gradients", "optimizer", "activations")}
    return named | {"other": need.allocated - sum(named.values())}


def bandwidth(cores: int) -> float:
    """Returns the memory bandwidth of a host in bytes per second: the measured bandwidth times `cores` / CORES, but at
    most MANY_CORES."""
    steps = stored("host_optimizer")["rounds"][STEP]
    seconds = medians({STEP: steps}, "milliseconds")[STEP] / 1000
    return min(MANY_CORES, cores / CORES * MOVED * PER / seconds)


def table(results: dict) -> str:
    lines = [
        "Predicted by the planner; none of these recipes has been run on a card. Each optimizer step has one "
        "micro-batch of `batch_size` sequences of 2,048 tokens. *card GiB* is the size of the smallest card that the "
        "recipe works on, CUDA context included. *host GiB* is the peak resident memory of the process.",
        "",
        f"Times are counted: operations at {COMPUTE:.0%} of the products and bytes at {MEMORY:.0%} of the bandwidth "
        "that conf/gpu.yaml has of each card. [These shares](plan_time.md) were fitted on a CPU, not on a card.",
        "",
        "Assumptions: two cores of the host run the optimizer of masters, in the time that [was measured on an AMD "
        "EPYC](host_optimizer.md). A drive reads 3.5 GB/s and writes 1.5 GB/s. A card with a bare size is as fast as "
        "an RTX 3060.",
        "",
        "| card | what is typed after `python train.py` | card GiB | host GiB | drive GiB | s per 1,000 tokens |",
        "|---|---|---|---|---|---|",
    ]
    for name in RECIPES:
        (need,) = results[name]
        sizes = [f"{need[key] / GIB:.1f}" for key in ("card_bytes", "host_bytes", "drive_bytes")]
        typed = f"`{' '.join(need['overrides'])}`"
        cells = [f"{name} ({need['card']})", typed, *sizes, f"{need['seconds_per_1000_tokens']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Models that fit on a card. An experiment says how many sequences make an optimizer step.",
        "",
        "| card | model, trained weights | `python train.py` ... | card GiB | host GiB | s per 1,000 tokens |",
        "|---|---|---|---|---|---|",
    ]
    for size, models in MODELS.items():
        for model, typed in models.items():
            (name,) = (name for name, of in ROWS.items() if of == (CARDS[size], typed))
            (need,) = results[name]
            sizes = [f"{need[key] / GIB:.1f}" for key in ("card_bytes", "host_bytes")]
            cells = [size, model, f"`{' '.join(typed)}`", *sizes, f"{need['seconds_per_1000_tokens']:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="write the table of the stored results again")
    options = options_of(parser, row)
    if options.table:
        results = stored("capacity")["rounds"]
    else:
        results = measure({name: ["-m", "benchmarks.capacity", "--row", name] for name in ROWS}, 1)
    if too_large := [name for name, (need,) in results.items() if not need["fits"]]:
        raise SystemExit(f"does not fit: {', '.join(too_large)}")
    write("capacity", {"rounds": results}, table(results))


if __name__ == "__main__":
    main()
