"""Compares claims of guides about memory techniques with measurements.

python -m benchmarks.claims              # about ten minutes on two cores, 4 GiB of memory

Each row trains GPT-2 small's architecture (124M parameters) in a separate process; in the default model, `tiny`, most
tensors have fewer than 4096 elements, for which 8-bit optimizers keep 32-bit state. The bytes of GPT-2 XL are counted
on fake tensors, which have a shape and no memory.
"""

import argparse
from collections.abc import Iterator

from benchmarks.runner import measure, medians, options_of, ratio, run_train, stored, write

STEPS = 6
MODEL = ["model=gpt2", "model.pretrained=false", "seq_len=128", "batch_size=4", "lr=2e-4", "scheduler=constant"]
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


def row(name: str) -> dict:
    """Runs train.py once and returns bytes, speed and the loss after the last step."""
    short = [f"max_steps={STEPS}", "val_every=1000", "val_sequences=16", "sample_tokens=0", "save_every=1000"]
    typed = {line.split("=")[0] for line in ROWS[name]}
    shared = [line for line in (*MODEL, *short, "logger=none") if line.split("=")[0] not in typed]
    summary = run_train([*shared, *ROWS[name]])
    keys = ("tokens_per_second", "val_loss", "train_loss", "parameters")
    return (
        {key: summary[key] for key in keys}
        | summary["peak_bytes_by_category"]
        | {"peak_bytes": summary["peak_bytes"]["device"]}
    )


# --- GPT-2 XL without memory ------------------------------------------------------------------------------------------


def xl(batch_size: int, seq_len: int, *techniques: str) -> dict[str, int]:
    """Traces GPT-2 XL without dropout and returns the device's bytes by category at their peak."""
    from lowmem.config.settle import run_of
    from lowmem.plan.job import resolved
    from lowmem.plan.tracing.trace import trace

    lines = ["model=gpt2-xl", "model.pretrained=false", f"batch_size={batch_size}", f"seq_len={seq_len}", *techniques]
    lines += [f"model.architecture.{drop}=0.0" for drop in ("resid_pdrop", "embd_pdrop", "attn_pdrop")]
    top = max(trace(resolved(run_of(lines), on_card=True), on_card=True).phases.values(), key=lambda point: point.total)
    return top.bytes | {"total": top.total}


def xl_rows() -> dict[str, dict[str, int]]:
    """Returns GPT-2 XL's bytes of each row, for a batch of 4 x 1024 tokens.

    Rows with four micro-batches of 1 x 1024 need the bytes of one micro-batch.
    """

    def counted(typed: list[str]) -> dict[str, int]:
        alone = "batch_size=1" in typed
        return xl(1 if alone else 4, 1024, *(line for line in typed if line.split("=")[0] in GROUPS))

    return {name: counted(typed) for name, typed in ROWS.items()}


# --- the table --------------------------------------------------------------------------------------------------------


def verdicts(results: dict, sizes: dict) -> Iterator[tuple[str, str, str, str]]:
    """Yields (claim, measurement on 124M parameters, bytes of GPT-2 XL, whether the claim holds here and why)."""
    peak, speed = medians(results, "peak_bytes"), {n: ratio(results, n, "plain", "tokens_per_second") for n in results}
    activations, state = medians(results, "activations"), medians(results, "optimizer")
    p, gib, four = results["plain"][0]["parameters"], 2**30, "accumulation 4 x 1"

    def saved(name: str) -> str:
        return (
            f"{1 - peak[name] / peak['plain']:.0%} of the peak, {1 - activations[name] / activations['plain']:.0%} of "
            f"the activations, {speed[name]:.2f} x the speed"
        )

    def at_xl(name: str) -> str:
        return f"{sizes[name]['total'] / gib:.1f} GiB of {sizes['plain']['total'] / gib:.1f}"

    def at_xl_saved(name: str) -> float:
        return 1 - sizes[name]["total"] / sizes["plain"]["total"]

    yield (
        "Accumulation gives the large batch's update at the micro-batch's memory, slightly slower",
        f"the update: exactly (test_accumulation.py). Peak {peak[four] / peak['plain']:.2f} of batch 4 and "
        f"{peak[four] / peak['batch 1']:.2f} of batch 1; {speed[four]:.2f} x the speed",
        at_xl(four),
        f"The update: yes. The memory: of a micro-batch and the gradients, which stay between micro-batches: where "
        f"activations are few that is no gain, at XL's shapes it is {at_xl_saved(four):.0%}. How much slower depends "
        "on how well one sequence fills the machine: 128 tokens do not.",
    )
    yield (
        "Checkpointing saves 20-30 % of memory and costs about 20 % of time",
        saved("checkpointing"),
        at_xl("checkpointing"),
        "The time: about. The memory: it saves most of the activations, so of the peak what their share of it is: "
        f"{1 - peak['checkpointing'] / peak['plain']:.0%} with 512 tokens, "
        f"{at_xl_saved('checkpointing'):.0%} with 4096.",
    )
    yield (
        "Keeping every sqrt(n)-th layer makes memory grow with sqrt(n), for one forward pass",
        saved("sqrt"),
        at_xl("sqrt"),
        "For thin layers yes (test_policies.py). A transformer block is some 25 boundaries thick: "
        f"every_layer needs {sizes['checkpointing']['activations'] / gib:.1f} GiB of activations at XL's shapes, sqrt "
        f"{sizes['sqrt']['activations'] / gib:.1f}. On 124M the logits hide the difference.",
    )
    yield (
        "Mixed precision: up to 2x faster, less memory",
        f"bf16: {saved('mixed precision')}",
        at_xl("mixed precision"),
        "The speed: on this CPU for bf16; fp16 products it computes in fp32. The memory: not where the logits are the "
        "peak, because the loss needs them in fp32 besides; loss=chunked mends that.",
    )
    yield (
        "`.half()` halves the model",
        f"{saved('16-bit weights')}",
        at_xl("16-bit weights"),
        "Weights and gradients, yes. Not the optimizer's state, which is fp32: in 16 bits it would lose small updates.",
    )
    yield (
        "Adafactor saves around 50 % against Adam",
        f"of weights, gradients and state {1 - (8 + state['Adafactor'] / p) / 16:.0%}, of the peak "
        f"{1 - peak['Adafactor'] / peak['plain']:.0%}; {speed['Adafactor']:.2f} x the speed",
        at_xl("Adafactor"),
        "Yes, of what is held per parameter.",
    )
    less = sizes["plain"]["optimizer"] - sizes["8-bit Adam"]["optimizer"]
    masters = stored("gpt2_xl")
    card, steps = masters["card"], masters["rounds"]["global-norm clipping"][0]
    rates = stored("learning_rates")["rounds"]
    ours, theirs = (rates[f"{optim} x 1"][0]["val_loss"] for optim in ("adam8bit", "adamw"))
    yield (
        "8-bit Adam saves about 8.5 GB on a 1.5 G model at 32-bit quality",
        f"{state['8-bit Adam'] / p:.2f} bytes of state per parameter for {state['plain'] / p:.2f}; validation loss of "
        f"`tiny` after 150 steps {ours:.3f} for {theirs:.3f}; {speed['8-bit Adam']:.2f} x the speed",
        f"{less / 1e9:.1f} GB less ({less / gib:.1f} GiB)",
        "Yes; without CUDA it is slow.",
    )
    yield (
        "Micro-batch 1, accumulation 4, checkpointing, 16 bits, 8-bit Adam: up to 3x less memory, speed kept",
        f"{peak['plain'] / peak['together']:.1f} x less, {speed['together']:.2f} x the speed",
        f"{sizes['plain']['total'] / sizes['together']['total']:.1f} x less: {at_xl('together')}",
        "At XL's shapes yes. With few tokens fp32 weights and gradients remain, which none of the five touches. The "
        "speed is not kept here: 8-bit steps are slow without CUDA, and a micro-batch of 128 tokens is small.",
    )
    yield (
        "GPT-2 XL trains on a 12 GB card: fp16 model there, fp32 model and optimizer on the host",
        f"{steps['rss_peak'] / gib:.1f} GiB of host memory in all, {steps['seconds_per_step']:.1f} s per step of 256 "
        "tokens on this CPU (gpt2_xl.md)",
        f"{card['every_layer']['total'] / gib:.2f} GiB on the card with precision=16-master, "
        f"{card['offload']['total'] / gib:.2f} with offloaded boundaries; the rows above together "
        f"{sizes['together']['total'] / gib:.1f}",
        "By its bytes: yes, with less than half of them. No card was there to run it on.",
    )


def table(results: dict, sizes: dict) -> str:
    columns = (
        "claimed",
        "measured here, 124M parameters, 4 x 128 tokens",
        "GPT-2 XL's shapes, 4 x 1024 tokens",
        "holds?",
    )
    head = f"| {' | '.join(columns)} |"
    return "\n".join([head, "|---|---|---|---|", *(f"| {' | '.join(row)} |" for row in verdicts(results, sizes))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="0: the table of what was measured before")
    options = options_of(parser, row)
    sizes = xl_rows()
    if options.rounds == 0:  # makes only the table again, from earlier measurements
        results = stored("claims")["rounds"]
    else:
        results = measure({name: ["-m", "benchmarks.claims", "--row", name] for name in ROWS}, options.rounds)
    write("claims", {"rounds": results, "gpt2-xl": sizes}, table(results, sizes))


if __name__ == "__main__":
    main()
