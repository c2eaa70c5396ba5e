"""Compares the memory that training on preference pairs needs in lowmem and in TRL's DPOTrainer, and the memory that
fine-tuning on the same number of rows needs.

python -m benchmarks.preference          # about ten minutes on two cores; with TRL after pip install -e '.[trl]'

All runs train the same architecture from random weights, in fp32 with AdamW, on the same pairs or on their chosen
answers. The figure is the peak of live tensors, including the weights of the trained model and, if the run keeps a
reference model, the weights of this model. TRL is run twice. One run computes the log-probabilities of the reference
model in each step, as TRL does by default, and the other run computes all of them before the first step.
"""

import json
import os
import random
import sys
from importlib.util import find_spec
from pathlib import Path

from benchmarks.runner import measure, medians, run_train, write
from lowmem.system.units import MIB

PAIRS, TOKENS, VOCABULARY = 4, 256, 50257
MODEL = [
    *("model=gpt2", "model.pretrained=false", "model.architecture.n_layer=4", "model.architecture.n_embd=256"),
    *(f"model.architecture.{name}_pdrop=0.0" for name in ("resid", "embd", "attn")),
    *("model.architecture.n_head=4", f"model.architecture.vocab_size={VOCABULARY}"),
]
RUN = [
    *("precision=32", "optim=adamw", "max_steps=2", "val_every=1000", "save_every=1000", "scheduler=constant"),
    *("sample_tokens=0", "plan=off", "logger=none", f"seq_len={TOKENS}", "data.too_long=cut"),
]
OURS = {
    "lowmem, fine-tuning on the same number of rows": [
        "data=jsonl",
        "data.prompt=prompt",
        "data.completion=chosen",
        "loss=tiled",
    ],
    "lowmem, loss=dpo": ["data=preference", "loss=dpo"],
    "lowmem, loss=orpo": ["data=preference", "loss=orpo"],
}
THEIRS = {"TRL, DPO": False, "TRL, DPO, reference before": True}


def pairs(folder: Path) -> Path:
    """Writes preference pairs whose answers are longer than a row, so that all rows are full. Returns the file."""
    draw, file = random.Random(0), folder / "pairs.jsonl"
    words = ["".join(draw.choices("aeioulnrstmdkp", k=draw.randint(2, 6))) for _ in range(3000)]

    def text(count: int) -> str:
        return " ".join(draw.choices(words, k=count))

    records = [{"prompt": text(20), "chosen": f" {text(400)}", "rejected": f" {text(400)}"} for _ in range(64)]
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return file


def ours(name: str, folder: Path) -> dict:
    rows = PAIRS if "preference" in OURS[name][0] else 2 * PAIRS
    typed = [*MODEL, *RUN, *OURS[name], f"data.path={pairs(folder)}", f"batch_size={rows}"]
    summary = run_train([*typed, f"cache_dir={folder}/tokens"])
    return {"peak_bytes": summary["peak_bytes"]["device"], "weights_bytes": summary["weights_bytes"]}


def theirs(before: bool, folder: Path) -> dict:
    """Trains with TRL's DPOTrainer, starting from the export of a run of lowmem.

    Args:
        before: True: the log-probabilities of the reference model are computed before the first step.
    """
    ours("lowmem, loss=dpo", folder)
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    from lowmem.memory.tracker import StorageTracker

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    records = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    config = DPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=PAIRS,
        max_steps=2,
        max_length=TOKENS,
        precompute_ref_log_probs=before,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
    )
    made = DPOTrainer(model, args=config, train_dataset=Dataset.from_list(records), processing_class=tokenizer)
    models = [model, *([made.ref_model] if getattr(made, "ref_model", None) is not None else [])]
    weights = sum(p.nbytes for each in models for p in each.parameters())
    with StorageTracker({}) as tracker:
        made.train()
    return {"peak_bytes": weights + max(point.total for point in tracker.timeline()), "weights_bytes": weights}


def table(results: dict) -> str:
    peak, weights = medians(results, "peak_bytes"), medians(results, "weights_bytes")
    lines = [
        f"{PAIRS} pairs, so {2 * PAIRS} rows of {TOKENS} tokens; a vocabulary of {VOCABULARY:,}.",
        "",
        "| run | live tensors at the peak, MiB | of them weights | beside loss=dpo |",
        "|---|---|---|---|",
    ]
    for name in results:
        share = peak[name] / peak["lowmem, loss=dpo"]
        lines.append(f"| {name} | {peak[name] / MIB:,.0f} | {weights[name] / MIB:,.0f} | {share:.2f} |")
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:]:
        name, folder = sys.argv[1], Path(os.environ["ROW_FOLDER"])
        print(json.dumps(ours(name, folder) if name in OURS else theirs(THEIRS[name], folder)))
        return
    names = (*OURS, *THEIRS) if find_spec("trl") else OURS
    results = measure({name: ["-m", "benchmarks.preference", name] for name in names}, rounds=1)
    write("preference", {"rounds": results}, table(results))


if __name__ == "__main__":
    main()
