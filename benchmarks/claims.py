"""Compares claims that guides make about memory techniques with measurements.

python -m benchmarks.claims                  # about twenty-five minutes on two cores, 5 GiB of memory
python -m benchmarks.claims --only smollm2   # measures one of the two models and keeps the other model's figures

Each row trains a model in a separate process: GPT-2 small's architecture with random weights (124M parameters), or
SmolLM2-135M-Instruct with its trained weights (tests/support/real_model.py). train.py's default model, `tiny`, is not
used, because its 2.6M parameters need far less memory than the libraries of a process. The bytes of GPT-2 XL are
counted on fake tensors, which have shapes but no memory.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from benchmarks.runner import measure, medians, options_of, ratio, real_model, run_train, stored, write

STEPS = 6
MODELS = {
    "gpt2": ["model=gpt2", "model.pretrained=false", "seq_len=128", "batch_size=4", "lr=2e-4", "scheduler=constant"],
    "smollm2": ["model=hf", "data=stdlib", "seq_len=256", "batch_size=4", "lr=5e-5", "scheduler=constant"],
}
GROUPS = ("precision", "optim", "gradient_checkpointing", "accumulation", "accumulation.batches")
TOGETHER = ["accumulation=fixed", "accumulation.batches=4", "batch_size=1", "gradient_checkpointing=every_layer"]
ROWS = {
    "plain": [],
    "accumulation 4 x 1": ["accumulation=fixed", "accumulation.batches=4", "batch_size=1"],
    "batch 1": ["batch_size=1"],
    "checkpointing": ["gradient_checkpointing=every_layer"],
    "sqrt": ["gradient_checkpointing=sqrt"],
    "mixed precision": ["precision=bf16"],
    "16-bit weights": ["precision=bf16-true"],
    "Adafactor": ["optim=adafactor"],
    "8-bit Adam": ["optim=adam8bit"],
    "together": [*TOGETHER, "precision=bf16", "optim=adam8bit"],
}


def row(model: str, name: str) -> dict:
    """Runs train.py once. Returns the peak bytes, the speed, the final losses, and the numbers of parameters and
    threads. Args: model: a key of MODELS; name: a key of ROWS."""
    short = [f"max_steps={STEPS}", "val_every=1000", "val_sequences=16", "sample_tokens=0", "save_every=1000"]
    typed = {line.split("=")[0] for line in ROWS[name]}
    weights = [f"model.name={real_model()}"] if model == "smollm2" else []
    shared = [line for line in (*MODELS[model], *weights, *short, "logger=none") if line.split("=")[0] not in typed]
    summary = run_train([*shared, *ROWS[name]])
    keys = ("tokens_per_second", "val_loss", "train_loss", "parameters")
    return (
        {key: summary[key] for key in keys}
        | summary["peak_bytes_by_category"]
        | {"peak_bytes": summary["peak_bytes"]["device"], "threads": torch.get_num_threads()}
    )


# --- GPT-2 XL on fake tensors -----------------------------------------------------------------------------------------


def xl(batch_size: int, seq_len: int, *techniques: str) -> dict[str, int]:
    """Traces GPT-2 XL without dropout. Returns the device bytes at the peak, by category and as `total`."""
    from lowmem.config.settle import run_of
    from lowmem.plan.job import resolved
    from lowmem.plan.tracing.trace import trace

    lines = ["model=gpt2-xl", "model.pretrained=false", f"batch_size={batch_size}", f"seq_len={seq_len}", *techniques]
    lines += [f"model.architecture.{drop}=0.0" for drop in ("resid_pdrop", "embd_pdrop", "attn_pdrop")]
    top = max(trace(resolved(run_of(lines), on_card=True), on_card=True).phases.values(), key=lambda point: point.total)
    return top.bytes | {"total": top.total}


def xl_rows() -> dict[str, dict[str, int]]:
    """Returns a dict that maps each row to the bytes of GPT-2 XL at the peak, by category and as "total". Rows with
    batch_size=1 have micro-batches of 1 x 1024 tokens, the other rows have a single batch of 4 x 1024 tokens."""

    def counted(typed: list[str]) -> dict[str, int]:
        alone = "batch_size=1" in typed
        return xl(1 if alone else 4, 1024, *(line for line in typed if line.split("=")[0] in GROUPS))

    return {name: counted(typed) for name, typed in ROWS.items()}


# --- the table --------------------------------------------------------------------------------------------------------


class Measured:
    """The figures of a model. Peaks, losses and bytes are medians over the rounds; speeds are relative to the row
    "plain".

    Args:
        results: row -> results of the rounds.
    """

    def __init__(self, results: dict) -> None:
        self.peak, self.loss = medians(results, "peak_bytes"), medians(results, "val_loss")
        self.activations, self.state = medians(results, "activations"), medians(results, "optimizer")
        self.parameters, self.threads = (results["plain"][0].get(key) for key in ("parameters", "threads"))
        self.speed = {name: ratio(results, name, "plain", "tokens_per_second") for name in results}

    def saved_by(self, name: str, activations: bool = True) -> str:
        """Returns a phrase that compares a row with the row "plain": memory, speed and validation loss."""
        saved = f"{1 - self.peak[name] / self.peak['plain']:.0%} less at the peak"
        if activations:
            saved += f", {1 - self.activations[name] / self.activations['plain']:.0%} fewer activations"
        change = self.loss[name] - self.loss["plain"]
        return f"{saved}; {self.speed[name]:.2f} x the speed; loss {change:+.4f}"

    def state_of(self, name: str) -> str:
        return f"{self.state[name] / self.parameters:.2f} bytes of state per parameter"


class Claim(NamedTuple):
    """A row of the table. The fields are its cells, except `measured`, which makes the cell of a measured model."""

    claim: str
    measured: Callable[[Measured], str]
    xl: str  # for GPT-2 XL
    holds: str  # whether the claim holds, and why


def claims(sizes: dict) -> Iterator[Claim]:
    """Yields the rows of the table. Args: sizes: the result of `xl_rows`."""
    gib, four = 2**30, "accumulation 4 x 1"

    def at_xl(name: str) -> str:
        return f"{sizes[name]['total'] / gib:.1f} GiB instead of {sizes['plain']['total'] / gib:.1f}"

    def less_at_xl(name: str) -> str:
        return f"{1 - sizes[name]['total'] / sizes['plain']['total']:.0%}"

    yield Claim(
        "Gradient accumulation gives the update of a large batch with the memory of a micro-batch, slightly slower",
        lambda model: (
            f"{model.saved_by(four, activations=False)}; {model.peak[four] / model.peak['batch 1']:.2f} x the peak "
            "of batch 1"
        ),
        at_xl(four),
        "The update: yes, exactly, apart from other dropout masks "
        "(tests/training/test_accumulation.py). The memory is that of a micro-batch plus the "
        "gradients, which are kept between micro-batches. So it saves little where activations are small, and "
        f"{less_at_xl(four)} for GPT-2 XL. The speed depends on how well one sequence fills the machine.",
    )
    yield Claim(
        "Activation checkpointing saves 20-30 % of memory and costs about 20 % of time",
        lambda model: model.saved_by("checkpointing"),
        at_xl("checkpointing"),
        "The time: about. Checkpointing removes most activations, so the saving depends on their share of the peak: "
        f"{less_at_xl('checkpointing')} for GPT-2 XL with 4096 tokens. Where the logits are the largest tensor, "
        "loss=tiled is needed first.",
    )
    yield Claim(
        "Checkpointing every sqrt(n)-th layer makes memory grow with sqrt(n), for one more forward pass",
        lambda model: model.saved_by("sqrt"),
        at_xl("sqrt"),
        "Only for layers that store little besides their input (tests/techniques/gradient_checkpointing). A "
        "transformer block stores about 25 times its input, so for GPT-2 XL sqrt keeps "
        f"{sizes['sqrt']['activations'] / gib:.1f} GiB of activations and every_layer "
        f"{sizes['checkpointing']['activations'] / gib:.1f}.",
    )
    yield Claim(
        "Mixed precision is up to 2x faster and needs less memory",
        lambda model: f"bf16: {model.saved_by('mixed precision')}",
        at_xl("mixed precision"),
        "The speed: with bf16 on this CPU, which computes fp16 products in fp32. The memory: only if activations are "
        "the peak. Mixed precision adds 16-bit copies of the weights, and the loss still needs the logits in fp32.",
    )
    yield Claim(
        "`.half()` halves the model",
        lambda model: model.saved_by("16-bit weights"),
        at_xl("16-bit weights"),
        "Weights and gradients: yes. The optimizer's state stays in fp32, since 16 bits would lose small updates. The "
        "price is quality: most updates are smaller than half a rounding step of a 16-bit weight (docs/quality.md).",
    )
    yield Claim(
        "Adafactor saves around 50 % against Adam",
        lambda model: (
            f"{1 - (8 + model.state['Adafactor'] / model.parameters) / 16:.0%} less weights, gradients and state; "
            f"{model.saved_by('Adafactor', activations=False)}"
        ),
        at_xl("Adafactor"),
        "Yes, for weights, gradients and optimizer state.",
    )
    less = sizes["plain"]["optimizer"] - sizes["8-bit Adam"]["optimizer"]
    masters = stored("gpt2_xl")
    card, steps = masters["card"], masters["rounds"]["global-norm clipping"][0]
    yield Claim(
        "8-bit Adam saves about 8.5 GB for a model of 1.5 billion parameters, with the quality of 32 bits",
        lambda model: (
            f"{model.state_of('8-bit Adam')} instead of {model.state['plain'] / model.parameters:.2f}; "
            f"{model.saved_by('8-bit Adam', activations=False)}"
        ),
        f"{less / 1e9:.1f} GB less",
        "Yes. On a CPU the step of bitsandbytes is slow; lowmem replaces it by one pass in C++ if a compiler is found.",
    )
    yield Claim(
        "Micro-batch 1, accumulation 4, checkpointing, 16 bits and 8-bit Adam together need up to 3x less memory at "
        "the same speed",
        lambda model: (
            f"{model.peak['plain'] / model.peak['together']:.1f} x less; "
            f"{model.saved_by('together', activations=False)}"
        ),
        f"{sizes['plain']['total'] / sizes['together']['total']:.1f} x less: {at_xl('together')}",
        "For GPT-2 XL: yes. With few tokens the fp32 weights and gradients dominate, and none of the five techniques "
        "makes them smaller. The speed: only as far as the hardware speeds up 16-bit products.",
    )
    yield Claim(
        "GPT-2 XL trains on a 12 GB card with the fp16 model on the card, fp32 masters and optimizer on the host",
        lambda model: "",
        f"{card['every_layer']['total'] / gib:.2f} GiB on the card with precision=16-master, "
        f"{card['offload']['total'] / gib:.2f} with block inputs offloaded too; {steps['rss_peak'] / gib:.1f} GiB of "
        f"host memory and {steps['seconds_per_step']:.1f} s per step of 256 tokens on this CPU (gpt2_xl.md)",
        "By its bytes: yes, with less than half of the card. It was not run on a card.",
    )


def table(results: dict, sizes: dict) -> str:
    """Returns the table. Args: results: model -> {row: results of the rounds}; sizes: the result of `xl_rows`."""
    random, trained = (Measured(results[model]) for model in MODELS)
    columns = (
        "claim",
        "GPT-2 small, random weights, 4 x 128 tokens",
        "SmolLM2-135M, trained weights, 4 x 256 tokens",
        "shapes of GPT-2 XL, 4 x 1024 tokens",
        "does it hold?",
    )
    lines = [
        f"Each measured cell compares {STEPS} steps with fp32 and AdamW in one batch: bytes on the device, speed, and "
        "the change of the validation loss. Threads of the CPU: "
        f"{random.threads or os.cpu_count()} and {trained.threads}.",
        "",
        f"| {' | '.join(columns)} |",
        "|---|---|---|---|---|",
    ]
    for one in claims(sizes):
        lines.append(f"| {' | '.join([one.claim, one.measured(random), one.measured(trained), one.xl, one.holds])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="0: the table of what was measured before")
    parser.add_argument("--only", choices=MODELS, help="measure one model")
    options = options_of(parser, row)
    sizes, results = xl_rows(), stored("claims").get("rounds", {})
    for model in [options.only] if options.only else MODELS:
        if options.rounds:
            rows = {name: ["-m", "benchmarks.claims", "--row", model, name] for name in ROWS}
            results[model] = measure(rows, options.rounds)
    write("claims", {"rounds": results, "gpt2-xl": sizes}, table(results, sizes))


if __name__ == "__main__":
    main()
