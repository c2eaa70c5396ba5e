"""Runs all benchmarks in EVERY, one after the other. None of them needs a card or a scratch drive.

python -m benchmarks                 # more than seven hours on two cores
python -m benchmarks --only speed    # only the named benchmarks

All except `pictures` and `pages` write benchmarks/results/<name>.json and .md, which name the versions of packages and
the machine.
"""

import argparse
import subprocess
import sys

from benchmarks.runner import ROOT

EVERY = {
    "side_by_side": "lowmem, a plain loop, Lightning and transformers.Trainer",
    "overhead": "time and memory that the meter and the training loop cost",
    "techniques": "memory and speed of each technique: docs/techniques.md",
    "anatomy": "the pictures of docs/how-memory-works.md",
    "adapters": "LoRA, DoRA and QLoRA beside full fine-tuning",
    "speed": "what checkpointing and the chunked loss cost in time",
    "learning_rates": "the best lr of each optimizer",
    "claims": "claims of guides, compared with measurements",
    "quality": "validation losses of a real model with each technique",
    "preference": "training on pairs beside fine-tuning, and beside TRL where it is installed",
    "chat_templates": "learned tokens of conversations beside TRL's, where it is installed",
    "host_optimizer": "the optimizer's step on the host",
    "gpt2_xl": "GPT-2 XL with masters on the host",
    "streamed": "weights that stream: memory, time and copied bytes, and 8B parameters trained here",
    "mixture": "a mixture of 1.3B parameters trained here: streamed beside resident, and QLoRA of its export",
    "architectures": "every causal family of transformers under the techniques that reach into a model",
    "prepare": "tokenizing 1 and 3 GB of text",
    "packing": "packed documents in every causal family: exact or refused",
    "strategies": "several processes beside one: every strategy with every feature",
    "ranks": "predicted and measured memory of two ranks, for every strategy",
    "plan_error": "predicted memory divided by measured memory",
    "host_memory": "predicted and measured host memory of a real model, with and without malloc's cache",
    "plan_time": "predicted times of steps beside measured times",
    "published": "peaks that other projects measured on cards, beside predicted peaks",
    "plans": "recipes that the planner chooses for known models and cards",
    "capacity": "Llama-3.1-8B on cards of 141 to 4 GB: docs/capacity.svg",
    "reach": "the longest packed rows that fit on a card",
    "pictures": "the pictures of docs/, from stored results",
    "pages": "the tables of docs/, from stored results",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=EVERY, default=list(EVERY))
    failed = []
    for name in parser.parse_args().only:
        print(f"\n{name}: {EVERY[name]}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], cwd=ROOT).returncode:
            failed.append(name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
