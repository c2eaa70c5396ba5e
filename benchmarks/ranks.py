"""Compares the predicted and the measured memory of two ranks on a CPU, for each of STRATEGIES.

It also predicts the memory and the received bytes of training a model with 70B parameters on 8, 64 and 512 cards.

python -m benchmarks.ranks          # about 15 minutes on two cores

Each row of the measured table is a run of train.py with two ranks over gloo. When rank 0 starts, it makes the
prediction in its own process, with a simulated process group. Each rank measures its live tensors. A prediction is for
the rank that needs the most memory, so it is compared with the higher of the two measured peaks. The rows of the other
table are predicted, not measured.
"""

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.runner import ROOT, machine, stored, write
from lowmem.system.units import GIB, MIB

PHASES = ("forward", "backward", "step", "evaluation")
SHORT = ("max_steps=3", "val_every=1000", "val_sequences=2", "sample_tokens=0", "save_every=1000", "logger=none")
LLAMA = ("model=llama-3.2-1b", "model.pretrained=false", "model.architecture.tie_word_embeddings=false")
LLAMA += ("model.architecture.bos_token_id=null", "model.architecture.eos_token_id=null", "lr=1e-4")
LLAMA += ("model.architecture.num_attention_heads=8", "model.architecture.num_key_value_heads=8")
SIZES = {  # (hidden size, intermediate size, blocks, vocabulary size)
    "10M": (256, 768, 6, 8192),
    "60M": (512, 1536, 12, 24576),
}
STRATEGIES = ("ddp", "fsdp", "fsdp_offload", "tensor_parallel", "pipeline")
WAYS = {
    "as it is": ("batch_size=2", "accumulation=none"),
    "4 micro-batches, checkpointing": ("batch_size=1", "accumulation=fixed", "gradient_checkpointing=every_layer"),
}
PAPER = ("model=llama-3.1-70b", "gpu=h100", "seq_len=2048", "precision=bf16", "gradient_checkpointing=every_layer")
PAPER += ("loss=chunked", "batch_size=1", "accumulation=fixed", "search=false")
GROUPS = ("strategy=fsdp_tensor_parallel", "strategy.tensor_parallel_size=8")
ON_PAPER = [
    *(((f"strategy={name}",), devices) for name in ("fsdp", "fsdp_offload") for devices in (8, 64, 512)),
    *((GROUPS, devices) for devices in (64, 512)),
    (("strategy=tensor_parallel",), 8),
    *((("strategy=pipeline", f"accumulation.batches={4 * devices}"), devices) for devices in (8, 64)),
]


def shape(size: str) -> list[str]:
    hidden, inner, blocks, vocabulary = SIZES[size]
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": blocks, "vocab_size": vocabulary}
    sizes["head_dim"] = hidden // 8
    return [f"model.architecture.{key}={value}" for key, value in sizes.items()]


def row(strategy: str, size: str, way: str) -> dict:
    """Trains on two ranks. Returns the bytes by phase that rank 0 predicted and that each rank measured. If training
    fails, returns a dict with the single key "refused", whose value is the last line of the error."""
    with TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        lines = [*LLAMA, *shape(size), *SHORT, *WAYS[way], "seq_len=128", f"strategy={strategy}", "devices=2"]
        command = [sys.executable, "train.py", *lines, f"hydra.run.dir={run}"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            return {"refused": done.stderr.strip().splitlines()[-1] if done.stderr else "no word"}
        predicted = json.loads((run / "summary.json").read_text())["predicted"]
        files = (run / "memory.csv", run / "rank-1" / "memory.csv")
        return {
            "predicted": {phase: predicted["phases"][phase]["device"] for phase in PHASES},
            "estimate": predicted["estimate"],
            "exchanged": predicted["exchanged_bytes_per_step"],
            "measured": [highest(file) for file in files],
        }


def on_paper(lines: tuple[str, ...], devices: int) -> dict:
    """Runs plan.py. Returns the bytes that a card needs and that a host with eight cards needs, the bytes that a card
    receives per optimizer step (from its own node and from other nodes), and the seconds of planning."""
    with TemporaryDirectory() as folder:
        typed = [*PAPER, *lines, f"devices={devices}", f"hydra.run.dir={folder}"]
        done = subprocess.run([sys.executable, "plan.py", *typed], capture_output=True, text=True, cwd=ROOT)
        if done.returncode not in (0, 2):  # 2: the recipe does not fit
            raise SystemExit(done.stderr)
        planned = json.loads((Path(folder) / "plan.json").read_text())
    need = planned["recipes"][0]
    return {
        "device_need_bytes": need["device"]["total"],
        "host_need_bytes": need["host"]["total"],
        "exchanged_bytes_per_step": need["exchanged_bytes_per_step"],
        "seconds": planned["seconds"],
    }


def highest(file: Path) -> dict[str, int]:
    with file.open() as lines:
        rows = [row for row in csv.DictReader(lines) if row["live_peak_bytes"] and int(row["step"]) > 1]
    return {phase: max(int(r["live_peak_bytes"]) for r in rows if r["phase"] == phase) for phase in PHASES}


def error(result: dict) -> float:
    """Returns predicted peak / measured peak - 1. The predicted peak is the maximum over the phases, and the measured
    peak is the maximum over phases and ranks."""
    return max(result["predicted"].values()) / max(max(ranks.values()) for ranks in result["measured"]) - 1


def table(results: dict[str, dict], paper: dict[str, dict]) -> str:
    return f"{_measured(results)}\n\n{_on_paper(paper)}"


def _on_paper(paper: dict[str, dict]) -> str:
    lines = [
        f"Predicted: `{' '.join(PAPER)}`, on 80 GB cards, eight per node. Received: by one card per optimizer step, "
        "from its node and from other nodes.",
        "",
        "| strategy | devices | card GiB | host GiB per node | GiB received from the node "
        "| GiB received from other nodes | planning time, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in paper.items():
        strategy, devices = name.split(" on ")
        sizes = (result["device_need_bytes"], result["host_need_bytes"], *result["exchanged_bytes_per_step"].values())
        cells = [f"`{strategy}`", devices, *(f"{size / GIB:.1f}" for size in sizes), f"{result['seconds']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _measured(results: dict[str, dict]) -> str:
    lines = [
        "Two ranks over gloo on a CPU: peak of live device tensors, and bytes received per optimizer step, MiB.",
        "",
        "| model, strategy, way | predicted | rank 0 | error | rank 1 | received per rank and step |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        if "refused" in result:
            lines.append(f"| {name} | - | {result['refused']} | | | |")
            continue
        rank_0, rank_1 = (max(ranks.values()) / MIB for ranks in result["measured"])
        predicted, comes = max(result["predicted"].values()) / MIB, sum(result["exchanged"].values()) / MIB
        lines.append(f"| {name} | {predicted:.2f} | {rank_0:.2f} | {error(result):+.2%} | {rank_1:.2f} | {comes:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=[*SIZES, "none"], help="measure one model only")
    parser.add_argument("--no-paper", dest="paper", action="store_false", help="leave the predictions on paper out")
    options = parser.parse_args()
    sizes = [size for size in SIZES if options.size in (None, size)]
    results = {"rounds": {}, "paper": {}} | stored("ranks")

    def measured(section: str, name: str, result: dict) -> None:
        results[section][name] = result
        write("ranks", results | {"machine": machine()}, table(results["rounds"], results["paper"]))

    for size in sizes:
        for strategy in STRATEGIES:
            for way in WAYS:
                measured("rounds", f"{size}, {strategy}, {way}", row(strategy, size, way))
    for lines, devices in ON_PAPER if options.paper else ():
        measured("paper", f"{' '.join(lines)} on {devices}", on_paper(lines, devices))


if __name__ == "__main__":
    main()
