"""Compares the memory and the time per step of full fine-tuning, LoRA, DoRA and QLoRA, and the errors of merging.

python -m benchmarks.adapters            # about ten minutes on two cores, 3 GiB of memory
python -m benchmarks.adapters --small    # a model of 1M parameters, to test the code; saves nothing

The model is a Llama of 44M random parameters, because bytes and seconds do not depend on the values. Each row runs
train.py in a separate process. Memory is both predicted and measured. A merge error is the relative difference between
the logits of the merged model and the logits of the model with its adapter. To measure merge errors, the matrix B of
each adapter is drawn at random, because an adapter that was trained for a few steps hardly changes the logits.
"""

import argparse
import json
import os

from benchmarks.runner import measure, medians, run_train, write
from lowmem.system.units import MIB

ADAPTERS = ("none", "lora", "dora", "qlora")
RECIPES = {
    "fp32": ["precision=32"],
    "bf16-master, blocks computed again": ["precision=bf16-master", "gradient_checkpointing=every_layer"],
}
STEPS, WORDS = 6, 8192
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 1, "head_dim": 64}
RANK, DRAWN = 16, 0.005  # DRAWN: standard deviation of B; the adapter then changes the logits by about 20 %


def model(small: bool) -> list[str]:
    keys = (SMALL if small else SHAPE) | {"vocab_size": WORDS, "bos_token_id": "null", "eos_token_id": "null"}
    lines = [f"model.architecture.{key}={value}" for key, value in keys.items()]
    return ["model=llama-3.2-1b", "model.pretrained=false", *lines]


def run(adapter: str, recipe: str, small: bool) -> dict:
    """Trains once. Returns the numbers of parameters, the predicted and measured bytes, and the seconds per step."""
    lines = [f"adapter={adapter}", *([f"adapter.r={RANK}"] if adapter != "none" else []), *RECIPES[recipe]]
    size = ["batch_size=4", "seq_len=256", "val_sequences=4", f"max_steps={STEPS}", "val_every=1000", "sample_tokens=0"]
    summary = run_train([*model(small), *size, *lines, "logger=none", "lr=1e-4"])
    predicted = summary["predicted"]
    libraries, before = predicted["host"]["libraries"], summary["rss_before_model_bytes"]
    return {
        "parameters": summary["parameters"],
        "trained_parameters": summary["trained_parameters"],
        "predicted_bytes": predicted["allocated"],
        "measured_bytes": summary["peak_bytes"]["device"],
        **{f"{kind}_bytes": summary["peak_bytes_by_category"][kind] for kind in ("weights", "gradients", "optimizer")},
        "predicted_growth": max(need["host"] for need in predicted["phases"].values()) - libraries,
        "measured_growth": summary["peak_bytes"]["host_rss"] - before,
        "seconds_per_step": summary["seconds_per_step"],
    }


def merge_errors(adapter: str, small: bool) -> dict:
    """Returns a dict that maps the name of a model to the relative difference of its logits from the logits of the
    model with its adapter.

    "without": the base model. "float32" and "bfloat16": the adapter is merged and the logits are computed in this
    dtype. QLoRA's adapter is merged into the dequantized 4-bit base. "original" (QLoRA only): its adapter is merged in
    fp32 into the base before quantization.
    """
    import torch
    from torch import nn

    from lowmem.config.instantiate import instantiate
    from lowmem.config.settle import run_of
    from lowmem.model import loading as models
    from lowmem.saving.export_adapter import merge

    ids = torch.randint(0, WORDS, (2, 64), generator=torch.Generator().manual_seed(0))
    cfg = run_of([*model(small), f"adapter={adapter}", f"adapter.r={RANK}"])

    def built() -> nn.Module:
        torch.manual_seed(0)
        return models.load(models.describe(cfg), torch.float32).eval()

    @torch.no_grad()
    def logits(network: nn.Module) -> torch.Tensor:
        return network(input_ids=ids, use_cache=False).logits.float()

    def adapted() -> nn.Module:
        network = built()
        instantiate(cfg.adapter)(network)
        for name, p in network.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, std=DRAWN, generator=torch.Generator().manual_seed(len(name)))
        return network.eval()

    exact = logits(adapted())

    def off(network: nn.Module) -> float:
        return ((logits(network) - exact).norm() / exact.norm()).item()

    errors = {"without": off(built())}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        network = adapted()
        merge(network, dtype)
        errors[name] = off(network.to(dtype))
    if adapter == "qlora":
        network, base = adapted(), built()
        layers = {name: layer for name, layer in network.named_modules() if hasattr(layer, "lora_A")}
        for name, layer in layers.items():
            layer.base_layer = base.get_submodule(name)
        merge(network, torch.float32)
        errors["original"] = off(network)
    return errors


def table(results: dict, merged: dict) -> str:
    rows = {name: rounds[0] for name, rounds in results.items()}
    seconds = medians(results, "seconds_per_step")
    lines = [
        f"{next(iter(rows.values()))['parameters']:,} parameters; rank {RANK}.",
        "",
        "| adapter | recipe | trained parameters | weights MiB | gradients MiB | state MiB | peak MiB, predicted / "
        "measured | resident MiB, predicted / measured | seconds per step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        adapter, _, recipe = name.partition(": ")
        sizes = " | ".join(f"{row[f'{kind}_bytes'] / MIB:.1f}" for kind in ("weights", "gradients", "optimizer"))
        pairs = (f"{row[f'predicted_{figure}'] / MIB:.1f} / {row[f'measured_{figure}'] / MIB:.1f}" for figure in COUNTS)
        count = f"{row['trained_parameters']:,}"
        lines.append(f"| {adapter} | {recipe} | {count} | {sizes} | {' | '.join(pairs)} | {seconds[name]:.3f} |")
    lines += [
        "",
        "| adapter | logits off without it | merged in fp32 | rounded to bf16 | merged into the original base |",
        "|---|---|---|---|---|",
    ]
    for name, (off,) in merged.items():
        original = f"{off['original']:.2%}" if "original" in off else "-"
        lines.append(f"| {name} | {off['without']:.1%} | {off['float32']:.1e} | {off['bfloat16']:.2%} | {original} |")
    return "\n".join(lines)


COUNTS = ("bytes", "growth")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="a model that takes seconds, printed and not kept")
    parser.add_argument("--row", nargs=2, metavar=("ADAPTER", "RECIPE"), help="run one row in this process")
    options = parser.parse_args()
    if options.row is not None:
        adapter, recipe = options.row
        done = merge_errors(adapter, options.small) if recipe == "merge" else run(adapter, recipe, options.small)
        print(json.dumps(done), flush=True)
        return
    # With these thresholds glibc returns freed blocks of 64 KiB or more immediately, so resident memory excludes them.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    how = ["-m", "benchmarks.adapters", *(["--small"] if options.small else []), "--row"]
    rows = {f"{adapter}: {recipe}": [*how, adapter, recipe] for recipe in RECIPES for adapter in ADAPTERS}
    results = measure(rows, 1 if options.small else options.rounds)
    merged = measure({adapter: [*how, adapter, "merge"] for adapter in ADAPTERS[1:]}, 1)
    if options.small:
        print(table(results, merged))
    else:
        write("adapters", {"rounds": results, "merged": merged}, table(results, merged))


if __name__ == "__main__":
    main()
