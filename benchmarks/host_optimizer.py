"""Compares the times and the errors of optimizers that run on the host, and the losses that a model reaches with them.

python -m benchmarks.host_optimizer      # about ten minutes on two cores

Times are milliseconds per 10M parameters. Each optimizer is timed in a separate process, on four matrices with the
shape of GPT-2 XL's MLP weights (1600 x 6400), which have 41M parameters together.
"""

import argparse
import json
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn

from benchmarks.runner import measure, medians, ratio, run_train, stored, write

SHAPE, MATRICES, STEPS = (1600, 6400), 4, 12
FUSED = "torch AdamW, fused, fp32 state"
RULE = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def torch_fused(parameters: list) -> Callable[[], None]:
    return torch.optim.AdamW(parameters, **RULE, fused=True).step


def ours(parameters: list) -> Callable[[], None]:
    from lowmem.techniques.optim.adamw8bit import HostAdamW8bit

    return HostAdamW8bit(parameters, **RULE).step


def ours_without_a_compiler(parameters: list) -> Callable[[], None]:
    from lowmem.techniques.optim import adamw8bit

    adamw8bit.library = lambda source: None
    return ours(parameters)


def ours_fused_pass(dtype: torch.dtype) -> Callable[[list], Callable[[], None]]:
    """Returns a factory, which is called with the master weights. The factory returns a function that performs an
    optimizer step. This step also unscales and clips 16-bit gradients, and writes 16-bit weights."""

    def make(parameters: list) -> Callable[[], None]:
        from lowmem.step.gradients import Reading
        from lowmem.step.one_weight import Step
        from lowmem.techniques.optim.adamw8bit import HostAdamW8bit

        optimizer = HostAdamW8bit(parameters, **RULE)
        each = [(p, p.grad.to(dtype), torch.empty(p.shape, dtype=dtype)) for p in parameters]

        def step() -> None:
            for p, gradient, rounded in each:
                optimizer.step_from(Step(gradient, optimizer.param_groups[0], p, Reading(2.0**-10, 1.0, 0.5), rounded))

        return step

    return make


def torchaos(parameters: list) -> Callable[[], None]:
    from torchao.optim import AdamW8bit

    return AdamW8bit(parameters, **RULE).step


def bitsandbytes_(parameters: list) -> Callable[[], None]:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters, **RULE).step


def deepspeeds(parameters: list) -> Callable[[], None]:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(parameters, **RULE).step


STEP = {
    FUSED: torch_fused,
    "adamw8bit": ours,
    "adamw8bit, bf16 in and out, clipped": ours_fused_pass(torch.bfloat16),
    "adamw8bit, fp16 in and out, unscaled, clipped": ours_fused_pass(torch.float16),
    "adamw8bit without a compiler": ours_without_a_compiler,
    "torchao AdamW8bit": torchaos,
    "bitsandbytes AdamW8bit": bitsandbytes_,
    "DeepSpeedCPUAdam, fp32 state": deepspeeds,
}


def timed(name: str) -> dict:
    parameters = [nn.Parameter(torch.randn(SHAPE)) for _ in range(MATRICES)]
    for p in parameters:
        p.grad = torch.randn(SHAPE) * 1e-3
    try:
        step = STEP[name](parameters)
    except ImportError as error:
        return {"milliseconds": None, "reason": str(error)}
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    tens_of_millions = sum(p.numel() for p in parameters) / 1e7
    return {"milliseconds": 1e3 * median(seconds[2:]) / tens_of_millions}


# --- error and convergence --------------------------------------------------------------------------------------------


def errors() -> dict[str, dict[str, float]]:
    """Returns a dict that maps each kind of gradients to a dict: implementation of 8-bit AdamW -> error after 20 steps.
    The kinds are KINDS in test_adamw8bit.py. An error is the norm of the difference from fp32 AdamW's update, divided
    by the norm of fp32 AdamW's update."""
    import sys
    from pathlib import Path

    sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / folder) for folder in ("support", "techniques/optim")]
    from test_adamw8bit import KINDS, trained

    from lowmem.techniques.optim.adamw8bit import HostAdamW8bit

    rule = RULE | {"weight_decay": 0.0}

    def error(kind: str, make: Callable) -> float:
        exact = trained(lambda p: torch.optim.AdamW(p, **rule), kind)
        return ((trained(lambda p: make(p, **rule), kind) - exact).norm() / exact.norm()).item()

    from bitsandbytes.optim import AdamW8bit

    return {kind: {"adamw8bit": error(kind, HostAdamW8bit), "bitsandbytes": error(kind, AdamW8bit)} for kind in KINDS}


LEARNS = {"adamw": ["optim=adamw"], "adamw8bit": ["optim=adamw8bit"], "bitsandbytes": ["optim=paged_adamw8bit"]}


def learned(name: str) -> dict:
    """Trains `tiny` on train.py's default data for 500 steps. Returns the validation loss."""
    summary = run_train([*LEARNS[name], "max_steps=500", "logger=none", "sample_tokens=0"])
    return {"val_loss": summary["val_loss"]}


def table(results: dict, wrong: dict, learned: dict) -> str:
    milliseconds = medians(results, "milliseconds")
    lines = ["| step | ms per 10M parameters | of torch's fused AdamW |", "|---|---|---|"]
    for name in results:
        missing = results[name][0]["milliseconds"] is None
        times = "-" if missing else f"{ratio(results, name, FUSED, 'milliseconds'):.2f}"
        lines.append(f"| {name} | {'not installed' if missing else f'{milliseconds[name]:.1f}'} | {times} |")
    lines += ["", "| gradients | error of 20 steps, adamw8bit | bitsandbytes |", "|---|---|---|"]
    lines += [f"| {kind} | {error['adamw8bit']:.4f} | {error['bitsandbytes']:.4f} |" for kind, error in wrong.items()]
    lines += ["", "| `tiny`, 500 steps | validation loss | of adamw |", "|---|---|---|"]
    base = learned["adamw"][0]["val_loss"]
    lines += [f"| {n} | {runs[0]['val_loss']:.4f} | {runs[0]['val_loss'] / base:.4f} |" for n, runs in learned.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--times", action="store_true", help="time the steps again, keep the losses of before")
    parser.add_argument("--row", help="time one step in this process")
    parser.add_argument("--learn", help="train with one optimizer in this process")
    options = parser.parse_args()
    if options.row or options.learn:
        print(json.dumps(timed(options.row) if options.row else learned(options.learn)), flush=True)
        return
    results = measure({name: ["-m", "benchmarks.host_optimizer", "--row", name] for name in STEP}, options.rounds)
    if options.times:
        learns = stored("host_optimizer")["learnt"]
    else:
        learns = measure({name: ["-m", "benchmarks.host_optimizer", "--learn", name] for name in LEARNS}, 1)
    wrong = errors()
    result = {"rounds": results, "errors": wrong, "learnt": learns}
    write("host_optimizer", result, table(results, wrong, learns))


if __name__ == "__main__":
    main()
