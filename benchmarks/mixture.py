"""Trains all weights of a mixture of experts with 1.3B parameters on this CPU, with resident weights and with streamed
weights. Then trains an adapter (QLoRA) of the exported model.

python -m benchmarks.mixture         # about 25 minutes on two cores, 9 GiB of memory, 6 GB of disk

The model has Qwen3-30B-A3B's architecture, about a twentieth of its parameters, and random weights. With master
weights, the exports of the resident run and of the streamed runs must have the same digest. bf16-sr has only a streamed
row: its random numbers depend on the order of updates, so a resident run and a streamed run would differ.
"""

import argparse
import csv
import json
import os
import tempfile
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import safe_open

from benchmarks.runner import row, run_train, write
from lowmem.system.units import GIB

SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
}
RUN = [
    *("batch_size=2", "accumulation=fixed", "accumulation.batches=2", "seq_len=256", "max_steps=3", "log_every=1"),
    *("lr=1e-3", "scheduler=constant", "clip=null", "gradient_checkpointing=every_layer", "loss=chunked"),
    *("val_sequences=4", "sample_tokens=0", "logger=csv", "plan=off"),
]
FULL = ["model=qwen3-30b-a3b", "model.pretrained=false", "optim=adafactor"]
FULL += [f"model.architecture.{key}={value}" for key, value in SHAPE.items()]
MASTERS, ROUNDED = [*FULL, "precision=bf16-master"], [*FULL, "precision=bf16-sr"]
BY_LAYER = ["weights=streamed", "weights.order=by_layer"]
QLORA = "QLoRA of the export, streamed"
FIRST = "masters, resident"
ROWS = {
    FIRST: [*MASTERS, "weights=resident"],
    "masters, streamed by layer": [*MASTERS, *BY_LAYER],
    "masters, streamed by micro-batch": [*MASTERS, "weights=streamed", "weights.order=by_micro_batch"],
    "bf16-sr, streamed by layer": [*ROUNDED, *BY_LAYER],
    QLORA: ["model=hf", "precision=bf16-master", "adapter=qlora", *BY_LAYER],
}


def one_row(name: str, folder: Path) -> dict:
    """Runs a row in this process. Args: folder: the row FIRST moves its export to this folder, and the row QLORA loads
    its model from there."""
    summary = run_train([*ROWS[name], *RUN, *([f"model.name={folder}"] if name == QLORA else [])])
    run = Path(os.environ["ROW_FOLDER"])
    exported = run / "model"
    with (run / "metrics.csv").open() as file:
        losses = [float(line["train_loss"]) for line in csv.DictReader(file) if line.get("train_loss")]
    if name == FIRST:
        exported = exported.rename(folder)
    phases = summary["peak_bytes_by_phase"]
    return {
        "parameters": summary["parameters"],
        "losses": losses,
        "seconds_per_step": summary["seconds_per_step"],
        "resident": summary["peak_bytes"]["host_rss"],
        "device": summary["peak_bytes"]["device"],
        "loading": phases["load"]["host"],
        "digest": digest(exported),
    }


def digest(folder: Path) -> str:
    """Returns the SHA-256 digest of the names and bytes of all tensors in a folder."""
    read = sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in sorted(tensors.keys()):
                read.update(name.encode())
                read.update(tensors.get_tensor(name).flatten().view(torch.uint8).numpy())
    return read.hexdigest()


def table(rows: dict[str, dict]) -> str:
    lines = [
        "| weights | loss of each step | SHA-256 of export | device GiB | resident GiB | while loading | s / step |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, figures in rows.items():
        losses = ", ".join(f"{loss:.4f}" for loss in figures["losses"])
        sizes = " | ".join(f"{figures[key] / GIB:.2f}" for key in ("device", "resident", "loading"))
        seconds = figures["seconds_per_step"]
        lines.append(f"| {name} | {losses} | {figures['digest'][:8]} | {sizes} | {seconds:.0f} |")
    count = rows[FIRST]["parameters"]
    about = (
        f"{count:,} parameters, on a CPU, where the device's memory is host memory too. QLoRA's resident memory "
        "contains the pages of the model's files, which the system may drop."
    )
    return "\n".join([about, "", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", nargs=2, metavar=("NAME", "FOLDER"), help="run one row in this process")
    options = parser.parse_args()
    if options.row:
        print(json.dumps(one_row(options.row[0], Path(options.row[1]))), flush=True)
        return
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ROWS:
            rows[name] = row(["-m", "benchmarks.mixture", "--row", name, f"{folder}/model"])
            print(name, rows[name], flush=True)
    write("mixture", {"rows": rows}, table(rows))


if __name__ == "__main__":
    main()
