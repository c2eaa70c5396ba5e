"""Tests whether the planner ranks recipes in the order of their measured speeds, and fits the two efficiencies of the
planner's roofline model.

python -m benchmarks.plan_time           # about ten minutes on two cores

The twelve recipes were chosen before anything was measured. Each recipe runs in a separate process, in alternating
rounds. The ranking is judged by Kendall's tau over the pairs of recipes whose measured times differ by more than 5 %.
The fitted efficiencies, which the table compares with `COMPUTE` and `MEMORY` of lowmem/plan/cost/machine.py, minimize
the summed squared error of log(seconds).
"""

import argparse
from dataclasses import asdict, replace
from itertools import combinations, product
from math import exp, log
from statistics import median

from benchmarks.runner import measure, medians, options_of, run_train, stored, write
from lowmem.plan.cost.machine import COMPUTE, MEMORY, Machine, measured
from lowmem.plan.cost.step_time import of_trace

SHORT = ["max_steps=7", "val_every=1000", "val_sequences=4", "sample_tokens=0", "save_every=1000", "scheduler=constant"]
MODEL = [
    *("model=gpt2", "model.pretrained=false", "model.architecture.n_layer=6", "seq_len=256", "batch_size=4"),
    *(f"model.architecture.{name}_pdrop=0.0" for name in ("resid", "embd", "attn")),
]
SHARES = [number / 20 for number in range(4, 31)]  # candidates for each efficiency: 0.20, 0.25, ..., 1.50
RECIPES = {  # five precisions, seven optimizers
    "32": ["precision=32"],
    "32, every_layer": ["precision=32", "gradient_checkpointing=every_layer"],
    "32, adafactor": ["precision=32", "optim=adafactor"],
    "32, adam8bit": ["precision=32", "optim=adam8bit"],
    "32, muon": ["precision=32", "optim=muon"],
    "bf16": ["precision=bf16"],
    "bf16, chunked": ["precision=bf16", "loss=chunked"],
    "bf16, sgd": ["precision=bf16", "optim=sgd"],
    "bf16, 4 x 1": ["precision=bf16", "batch_size=1", "accumulation=fixed", "accumulation.batches=4"],
    "bf16-sr, adafactor": ["precision=bf16-sr", "optim=adafactor"],
    "bf16-true, lion8bit": ["precision=bf16-true", "optim=lion8bit"],
    "bf16-master, adamw8bit": ["precision=bf16-master", "optim=adamw8bit"],
}


def typed(name: str) -> list[str]:
    mine = {line.split("=")[0] for line in RECIPES[name]}
    return [*(line for line in MODEL if line.split("=")[0] not in mine), *RECIPES[name]]


def row(name: str) -> dict:
    """Returns the measured seconds per step."""
    return {"seconds": run_train([*SHORT, *typed(name), "logger=none", "plan=off"])["seconds_per_step"]}


def traced() -> dict[str, tuple]:
    """Returns a dict that maps the name of each recipe to its run and its trace."""
    from lowmem.config.settle import run_of
    from lowmem.plan.job import resolved
    from lowmem.plan.tracing.trace import trace

    runs = {name: resolved(run_of(typed(name)), on_card=False) for name in RECIPES}
    return {name: (run, trace(run, on_card=False)) for name, run in runs.items()}


def counted(rates: dict, traces: dict[str, tuple], compute: float, memory: float) -> dict[str, float]:
    """Returns a dict that maps the name of each recipe to the seconds per step that the planner predicts.

    Args:
        rates: the fields of the measured `Machine`.
        traces: the result of `traced`.
        compute: share of the matmul rate that operators reach.
        memory: share of the memory bandwidth that operators reach.
    """
    here = Machine(**rates)
    flops = {dtype: compute * rate for dtype, rate in here.flops.items()}
    reached = replace(here, flops=flops, bandwidth=memory * here.bandwidth)
    return {name: of_trace(reached, run, trace).seconds for name, (run, trace) in traces.items()}


def fitted(rates: dict, traces: dict[str, tuple], timed: dict[str, float]) -> tuple[float, float]:
    """Returns the efficiencies (compute, memory) of SHARES that fit the measured seconds best. Args: timed: name of a
    recipe -> measured seconds per step."""

    def error(shares: tuple[float, float]) -> float:
        guess = counted(rates, traces, *shares)
        return sum(log(guess[name] / seconds) ** 2 for name, seconds in timed.items())

    return min(product(SHARES, SHARES), key=error)


def tau(guess: dict[str, float], timed: dict[str, float]) -> float:
    """Returns Kendall's tau over the pairs of recipes whose values in `timed` differ by more than 5 %."""
    pairs = [(a, b) for a, b in combinations(guess, 2) if max(timed[a], timed[b]) / min(timed[a], timed[b]) > 1.05]
    agree = sum((guess[a] < guess[b]) == (timed[a] < timed[b]) for a, b in pairs)
    return (2 * agree - len(pairs)) / len(pairs)


def table(results: dict, guess: dict[str, float], shares: tuple[float, float]) -> str:
    seconds = medians(results, "seconds")
    fastest = {"counted": min(guess.values()), "measured": min(seconds.values())}
    close = sum(s <= 1.5 * fastest["measured"] for s in seconds.values())
    errors = {name: abs(log(guess[name] / seconds[name])) for name in seconds}
    worst = max(errors, key=errors.get)
    lines = [
        f"Kendall's tau {tau(guess, seconds):.2f} (asked: at least 0.9). {close} of the {len(seconds)} recipes take at "
        f"most 1.5 times the fastest. The counted seconds are off by a factor of {exp(median(errors.values())):.2f} "
        f"(median) and {exp(errors[worst]):.2f} (worst, {worst}).",
        "",
        f"The efficiencies that fit these times best: {shares[0]:.2f} of the rate of matrix products, {shares[1]:.2f} "
        f"of the bandwidth. The planner uses {COMPUTE:.2f} and {MEMORY:.2f}.",
        "",
        "| recipe | measured s per step | counted | measured, relative | counted, relative |",
        "|---|---|---|---|---|",
    ]
    for name in sorted(seconds, key=lambda name: seconds[name]):
        cells = f"{seconds[name]:.2f} | {guess[name]:.2f} | {seconds[name] / fastest['measured']:.2f}"
        lines.append(f"| {name} | {cells} | {guess[name] / fastest['counted']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--table", action="store_true", help="count again, and compare with earlier measurements")
    options = options_of(parser, row)
    if options.table:
        before = stored("plan_time")
        results, rates = before["rounds"], before["rates"]
    else:
        rates = asdict(measured(on_card=False))
        results = measure({name: ["-m", "benchmarks.plan_time", "--row", name] for name in RECIPES}, options.rounds)
    traces = traced()
    guess = counted(rates, traces, COMPUTE, MEMORY)
    shares = fitted(rates, traces, medians(results, "seconds"))
    content = {"rates": rates, "rounds": results, "counted": guess, "fitted": shares}
    write("plan_time", content, table(results, guess, shares))


if __name__ == "__main__":
    main()
