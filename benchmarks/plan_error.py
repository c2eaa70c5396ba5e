"""Measures the planner's error by phase: predicted memory divided by measured memory, minus 1.

python -m benchmarks.plan_error          # about 25 minutes on two cores, 8 GiB of memory

Each row runs train.py in a separate process. Its summary.json has the prediction, which is made before the weights are
loaded, and the measurements of the memory meter. The planner and the meter count live tensors with the same tracker.
Therefore the table also compares the prediction with the growth of the process's resident memory, which the operating
system measures: the peak minus the value just before the model was built. Two further predictions deliberately omit
tensors (the optimizer state, and the activations inside a recomputed block). Their errors must be clearly negative.
"""

import argparse
import os
from statistics import median

from benchmarks.runner import measure, options_of, run_train, stored, write
from lowmem.system.units import GIB

STEPS = 3
SHORT = [f"max_steps={STEPS}", "val_every=1000", "sample_tokens=0", "save_every=1000", "scheduler=constant"]
LLAMA = [
    *("model=llama-3.2-1b", "model.pretrained=false", "model.architecture.num_hidden_layers=6"),
    *("model.architecture.hidden_size=1024", "model.architecture.intermediate_size=4096"),
    *("model.architecture.vocab_size=65536", "model.architecture.num_attention_heads=16"),
    *("model.architecture.bos_token_id=null", "model.architecture.eos_token_id=null"),
]
QWEN = [
    *("model=qwen3-0.6b", "model.pretrained=false", "model.architecture.num_hidden_layers=4"),
    *("model.architecture.vocab_size=50000", "model.architecture.bos_token_id=null"),
    "model.architecture.eos_token_id=null",
]
GPT2 = ["model=gpt2", "model.pretrained=false"]
DRY = [f"model.architecture.{name}_pdrop=0.0" for name in ("resid", "embd", "attn")]
FAMILIES = {"gpt2": GPT2, "llama": LLAMA, "qwen3": QWEN}


def sized(batch: int, length: int) -> list[str]:
    return [f"batch_size={batch}", f"seq_len={length}", f"val_sequences={batch}"]


USUAL, FEW = sized(4, 256), sized(1, 16)  # FEW: for techniques that are slow on a CPU, such as fp16
FOUR = ["batch_size=2", "accumulation.sizes={0: 4}"]
TECHNIQUES = {
    **{f"precision={p}": USUAL for p in ("32", "tf32", "bf16", "bf16-true", "bf16-sr", "bf16-master")},
    **{f"precision={p}": FEW for p in ("16", "16-true", "16-master")},
    **{f"optim={o}": USUAL for o in ("adam8bit", "adamw8bit", "lion8bit", "muon", "adafactor", "sgd")},
    **{f"optim={o}": FEW for o in ("adamw4bit", "paged_adamw8bit", "paged_adamw32bit")},
    "optim.in_backward=true": [*USUAL, "clip=null"],
    "accumulation=fixed": [*USUAL, "accumulation.batches=2", "batch_size=2"],
    "accumulation=effective_batch": [*USUAL, "accumulation.size=4", "batch_size=2"],
    "accumulation=by_epoch": [*USUAL, *FOUR],
    "accumulation=by_step": [*USUAL, *FOUR],
    **{f"gradient_checkpointing={g}": USUAL for g in ("every_layer", "every_k", "sqrt", "selective", "offload")},
    "gradient_checkpointing=offload_attention": USUAL,
    "compile=blocks": [*USUAL, "compile.activation_memory_budget=0.5"],
    "loss=chunked": USUAL,
}
MIXED = [
    ["precision=bf16", "gradient_checkpointing=every_layer"],
    ["precision=bf16", "optim=adam8bit", "loss=chunked"],
    ["precision=bf16-true", "optim=adafactor", "gradient_checkpointing=selective"],
    ["precision=bf16-sr", "optim=adamw8bit", "gradient_checkpointing=every_layer", "loss=chunked"],
    ["precision=bf16-master", "optim=adamw8bit", "gradient_checkpointing=every_layer", "loss=chunked"],
    ["precision=bf16-master", "optim=adamw", "clip=null", "loss=chunked"],
    ["precision=bf16-master", "optim=adafactor", "accumulation=fixed", "accumulation.batches=2"],
    ["precision=32", "optim=sgd", "gradient_checkpointing=offload"],
    ["precision=32", "optim=adafactor", "optim.in_backward=true", "clip=null", "gradient_checkpointing=every_layer"],
    ["precision=bf16", "optim=lion8bit", "accumulation=fixed", "accumulation.batches=2", "loss=chunked"],
]


def rows() -> dict[str, list[str]]:
    """Returns a dict that maps the name of each run to its overrides."""
    named = {"(as shipped)": [*GPT2, *USUAL]}
    for name, more in TECHNIQUES.items():
        named[name] = [*GPT2, *DRY, name, *more]
    for number, recipe in enumerate(MIXED):
        for family in ("gpt2", "llama") if number % 2 else ("llama", "qwen3"):
            size = sized(2, 512) if number % 3 else sized(8, 128)
            named[f"{family}: {' '.join(recipe)}"] = [*FAMILIES[family], *size, *recipe]
    for family in FAMILIES:
        for batch, length in ((1, 1024), (4, 64), (16, 64)):
            named[f"{family}: {batch} x {length}"] = [*FAMILIES[family], *sized(batch, length), "precision=bf16"]
    return named


def row(*arguments: str) -> dict:
    """Runs train.py once. Returns pairs [predicted bytes, measured bytes] for the peak, for the growth of resident
    memory and for each phase, and some figures of the prediction alone."""
    summary = run_train([*SHORT, *arguments, "logger=none"])
    predicted, measured = summary["predicted"], summary["peak_bytes_by_phase"]
    libraries, before = predicted["host"]["libraries"], summary["rss_before_model_bytes"]
    host = max(need["host"] for need in predicted["phases"].values())
    return {
        "peak": [predicted["allocated"], summary["peak_bytes"]["device"]],
        "growth": [host - libraries, summary["peak_bytes"]["host_rss"] - before],
        "phases": {
            phase: [predicted["phases"][phase]["device"], measured[phase]["device"]]
            for phase in ("load", "forward", "backward", "step", "evaluation")
            if measured.get(phase, {}).get("device")
        },
        "state": predicted["device"]["optimizer"],
        "tensors": host - libraries,
        "estimate": predicted["estimate"],
    }


def dropped_block() -> float:
    """Returns the ratio of the right prediction to a wrong one, for a run with gradient checkpointing. The wrong
    prediction omits the activations inside the block that is being recomputed."""
    from lowmem.config.settle import run_of
    from lowmem.plan.job import resolved
    from lowmem.plan.tracing.trace import trace

    def peak(checkpointing: str) -> tuple[int, int]:
        typed = [*GPT2, *DRY, *sized(8, 512), "precision=bf16-true", "optim=sgd", "loss=chunked", "loss.rows=128"]
        cfg = run_of([*typed, f"gradient_checkpointing={checkpointing}"])
        point = trace(resolved(cfg, on_card=False), on_card=False).phases["backward"]
        return point.total, point.bytes["activations"]

    (total, some), (_, every) = peak("every_layer"), peak("none")
    return total / (total - (every - some) / 11)  # checkpointing saves the inner activations of 11 of the 12 blocks


def error(pair: list) -> float:
    return pair[0] / pair[1] - 1


def table(results: dict, block: float) -> str:
    runs = {name: rounds[0] for name, rounds in results.items()}
    counted = {name: run for name, run in runs.items() if run["peak"][1] and not run["estimate"]}
    lines = [
        f"{len(runs)} runs; live tensors are counted in {len(counted)} of them. Error = predicted / measured - 1.",
        "",
        "| quantity | runs | median absolute error | largest error | run with the largest error |",
        "|---|---|---|---|---|",
    ]

    def line(figure: str, errors: dict[str, float]) -> str:
        worst = max(errors, key=lambda name: abs(errors[name]))
        middle = median(abs(e) for e in errors.values())
        return f"| {figure} | {len(errors)} | {middle:.2%} | {errors[worst]:+.2%} | {worst} |"

    lines.append(line("live tensors, peak", {name: error(run["peak"]) for name, run in counted.items()}))
    for phase in ("load", "forward", "backward", "step", "evaluation"):
        errors = {n: error(run["phases"][phase]) for n, run in counted.items() if phase in run["phases"]}
        lines.append(line(f"live tensors, {phase}", errors))
    large = {name: run for name, run in runs.items() if run["tensors"] >= GIB and not run["estimate"]}
    lines.append(line("growth of resident memory", {name: error(run["growth"]) for name, run in large.items()}))
    estimates = {name: error(run["growth"]) for name, run in runs.items() if run["estimate"]}
    lines.append(line("growth of resident memory, predictions marked as estimates", estimates))
    plain = runs["(as shipped)"]
    dropped = (plain["peak"][0] - plain["state"]) / plain["peak"][1] - 1
    lines += [
        "",
        f"Predictions that are wrong on purpose: without the optimizer state {dropped:+.1%}; without the activations "
        f"inside one recomputed block {1 / block - 1:+.1%}.",
        "",
        "| run | peak GiB, predicted / measured | error | growth of resident GiB | error |",
        "|---|---|---|---|---|",
    ]
    for name, run in runs.items():
        peak, growth = run["peak"], run["growth"]
        peaks = f"{peak[0] / GIB:.3f} / {peak[1] / GIB:.3f} | {error(peak):+.2%}" if name in counted else "- | -"
        grown = f"{growth[0] / GIB:.2f} / {growth[1] / GIB:.2f} | {error(growth):+.1%}"
        lines.append(f"| {name.replace('|', ' ')}{' (estimate)' if run['estimate'] else ''} | {peaks} | {grown} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="rows whose name contains this, printed and not kept")
    parser.add_argument("--table", action="store_true", help="only the table again, from earlier measurements")
    options = options_of(parser, row)
    # With these thresholds glibc returns freed blocks of 64 KiB or more immediately, so resident memory excludes them.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    chosen = {name: more for name, more in rows().items() if options.only is None or options.only in name}
    if options.table:
        results = stored("plan_error")["rounds"]
    else:
        results = measure({name: ["-m", "benchmarks.plan_error", "--row", *more] for name, more in chosen.items()}, 1)
    if options.only is None:
        write("plan_error", {"rounds": results}, table(results, dropped_block()))


if __name__ == "__main__":
    main()
