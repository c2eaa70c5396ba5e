"""Trains a mixture of experts of 1.2 billion parameters, streamed and resident: the same bits, and the memory of each.

python -m benchmarks.mixture     # about ten minutes on two cores, 8 GiB of memory and 6 GB of a temporary folder

All weights are trained for three steps in bf16 with stochastic rounding and Adafactor. The exported model is then the
base of a streamed QLoRA, whose experts are quantized to 4 bits.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.runner import row, run_train, write
from lowmem.system.units import GIB

ARCHITECTURE = {
    "model_type": "qwen3_moe",
    "vocab_size": 8192,
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 3072,
    "moe_intermediate_size": 768,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
RUN = [
    *("data=stdlib", "seq_len=256", "batch_size=1", "accumulation=fixed", "accumulation.batches=2", "max_steps=3"),
    *(
        "scheduler=constant",
        "lr=2e-3",
        "clip=null",
        "val_sequences=8",
        "logger=none",
        "sample_tokens=0",
        "loss=chunked",
    ),
]
ALL_WEIGHTS = ["precision=bf16-sr", "optim=adafactor"]
ROWS = {
    "all weights, resident": [*ALL_WEIGHTS, "gradient_checkpointing=every_layer"],
    **{
        f"all weights, streamed {order}": [
            *ALL_WEIGHTS,
            *("gradient_checkpointing=every_layer", "weights=streamed", f"weights.order={order}"),
        ]
        for order in ("by_layer", "by_micro_batch")
    },
    "QLoRA, streamed": [
        *("adapter=qlora", "precision=bf16-master", "gradient_checkpointing=every_layer", "weights=streamed"),
        "merge=false",
    ],
}


def train(lines: list[str], base: Path) -> dict:
    """Runs a row in this process. Args: base: the folder that the first row fills with a model, for QLoRA."""
    folder = Path(os.environ["ROW_FOLDER"])
    architecture = "{" + ", ".join(f"{key}: {json.dumps(value)}" for key, value in ARCHITECTURE.items()) + "}"
    model = ["model.name=mixture", "model.pretrained=false", f"model.architecture={architecture}"]
    if "adapter=qlora" in lines:
        model = [f"model.name={base}"]
    summary = run_train(["model=hf", *model, f"cache_dir={folder / 'cache'}", *RUN, *lines])
    files = sorted((folder / "model").glob("*.safetensors"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    if not base.exists():
        shutil.move(folder / "model", base)
    phases = summary["predicted"]["phases"]
    return {
        "parameters": summary["parameters"],
        "losses": [summary["first_loss"], summary["val_loss"]] if "first_loss" in summary else [summary["val_loss"]],
        "predicted": max(need["host"] for need in phases.values()),
        "measured": max(need["host"] for need in summary["peak_bytes_by_phase"].values()),
        "load": {"predicted": phases["load"]["host"], "measured": summary["peak_bytes_by_phase"]["load"]["host"]},
        "weights": digest.hexdigest(),
    }


def table(results: Mapping[str, dict]) -> str:
    lines = [
        "| `model=hf`, 1.2 billion parameters | held-out loss | host GiB predicted | measured | weights |",
        "|---|---|---|---|---|",
    ]
    for name, found in results.items():
        sizes = f"{found['predicted'] / GIB:.2f} | {found['measured'] / GIB:.2f}"
        lines.append(f"| {name} | {found['losses'][-1]:.6f} | {sizes} | `{found['weights'][:12]}` |")
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:2] == ["--row"]:
        print(json.dumps(train(sys.argv[3:], Path(sys.argv[2]))), flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        results = {}
        for name, lines in ROWS.items():
            results[name] = row(["-m", "benchmarks.mixture", "--row", f"{folder}/base", *lines])
            print(f"{name:<40}{results[name]}", flush=True)
    write("mixture", {"architecture": ARCHITECTURE, "rows": results}, table(results))


if __name__ == "__main__":
    main()
