"""Trains the runs in RECIPES, to compare their metrics and the bits of their exported models before and after a
refactoring.

    python tests/support/recipe_bits.py --to before.json
    python tests/support/recipe_bits.py --against before.json [--only WORDS]

The bits depend on the machine and its libraries. Therefore both commands must run on the same machine, and before.json
is not committed.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL = [
    *("device=cpu", "logger=none", "plan=off", "sample_tokens=0", "val_sequences=4", "max_steps=4", "batch_size=2"),
    *("seq_len=32", "log_every=1", "save_every=1000000", "val_every=2", "lr=1e-2", "scheduler=constant"),
]
GPT2 = [f"model.architecture.{key}" for key in ("n_embd=64", "n_layer=4", "n_head=4", "vocab_size=512")]
DROPOUT = ["model.architecture.resid_pdrop=0.1", "model.architecture.embd_pdrop=0.1"]
TWO = ["accumulation=fixed", "accumulation.batches=2"]
BF16 = ["precision=bf16-master", "optim=adamw8bit"]
STREAMED = [*BF16, "weights=streamed", "loss=tiled", *TWO, *DROPOUT]
BY_LAYER = [*STREAMED, "gradient_checkpointing=offload", "weights.order=by_layer"]
PAIRS = ["data=preference", "data.path=examples/preference.jsonl", "batch_size=2", "seq_len=128"]
LORA = ["adapter=lora", "adapter.r=4"]
LLAMA = ["model=llama-3.2-1b", "model.pretrained=false"]
LLAMA += [
    f"model.architecture.{key}"
    for key in (
        *("hidden_size=64", "intermediate_size=128", "num_hidden_layers=4", "num_attention_heads=4"),
        *("num_key_value_heads=2", "head_dim=16", "vocab_size=512", "bos_token_id=null", "eos_token_id=null"),
    )
]

RECIPES = {
    **{f"precision={name}": [f"precision={name}", *TWO, *DROPOUT] for name in ("32", "tf32", "16", "bf16")},
    **{f"precision={name}": [f"precision={name}", *TWO] for name in ("16-true", "bf16-true", "bf16-sr")},
    **{f"precision={name}": [f"precision={name}", *TWO, *DROPOUT] for name in ("16-master", "bf16-master")},
    "plain, clip_value": ["clip_value=0.001", *TWO],
    "step in backward": ["optim.in_backward=true", "clip=null"],
    "bf16-true, step in backward": ["precision=bf16-true", "optim.in_backward=true", "clip=null"],
    "16-true, adafactor": ["precision=16-true", "optim=adafactor"],
    "16, adam8bit, overflowing": ["precision=16", "optim=adam8bit", f"precision.init_scale={2**30}"],
    "16, a scale that is no power of two": ["precision=16", *TWO, "precision.init_scale=1000"],
    "16-master, adamw8bit, overflowing": [
        *("precision=16-master", "optim=adamw8bit", "precision.init_scale=1e9", *TWO)
    ],
    "masters, accumulation and clip": [*BF16, *TWO, "clip=0.1"],
    "masters, clip_value": ["precision=16-master", *TWO, "clip=0.1", "clip_value=0.001"],
    "masters, early": [*BF16, *TWO, "clip=null"],
    "masters, early, clip_value": [*BF16, "clip=null", "clip_value=0.001"],
    "masters, adafactor": ["precision=bf16-master", "optim=adafactor"],
    "masters, muon": ["precision=bf16-master", "optim=muon"],
    "masters, lion8bit": ["precision=bf16-master", "optim=lion8bit"],
    "masters, adam8bit": ["precision=16-master", "optim=adam8bit"],
    "streamed by micro-batch": [*STREAMED, "gradient_checkpointing=every_layer", "weights.order=by_micro_batch"],
    "streamed by layer": BY_LAYER,
    "streamed by layer, early": [*BY_LAYER, "clip=null"],
    "streamed by layer, bf16-sr, early": [*BY_LAYER, "precision=bf16-sr", "clip=null"],
    "streamed, bf16-sr, clipped": [*STREAMED, "precision=bf16-sr", "gradient_checkpointing=every_layer"],
    "streamed, 16-master, adamw": [
        *(*STREAMED, "precision=16-master", "optim=adamw", "gradient_checkpointing=every_layer")
    ],
    "streamed, some resident, full loss": [
        *(*STREAMED, "loss=full", "weights.resident_blocks=2", "gradient_checkpointing=every_layer")
    ],
    "drive, state": [*BY_LAYER, "weights.drive={folder}"],
    "drive, all": [*BY_LAYER, "clip=null", "weights.drive={folder}", "weights.drive_holds=all"],
    "LoRA": LORA,
    "LoRA, masters": [*LORA, "precision=bf16-master", *TWO],
    "LoRA, streamed": [*LORA, *STREAMED, "gradient_checkpointing=every_layer"],
    "QLoRA": ["adapter=qlora", "adapter.r=4", "precision=bf16-true"],
    "QLoRA, streamed": [*STREAMED, "adapter=qlora", "adapter.r=4", "gradient_checkpointing=every_layer"],
    "dpo": [*PAIRS, "loss=dpo", *TWO],
    "dpo, streamed by layer": [*PAIRS, *BY_LAYER, "loss=dpo"],
    "kto": [*PAIRS, "loss=kto", *TWO],
    "kto, masters": [*PAIRS, "loss=kto", *BF16, *TWO],
    "chunked loss, sliced tokens": ["loss=chunked", "tile.tokens=16", *TWO],
    "selective checkpointing": ["gradient_checkpointing=selective", *DROPOUT],
    "sqrt checkpointing": ["gradient_checkpointing=sqrt", *DROPOUT],
    "ddp": ["strategy=ddp", "devices=2", *TWO, *DROPOUT],
    "ddp, bf16-sr": ["strategy=ddp", "devices=2", "precision=bf16-sr"],
    "fsdp": ["strategy=fsdp", "devices=2", *TWO, *DROPOUT],
    "fsdp, 16-true": ["strategy=fsdp", "devices=2", "precision=16-true", "optim=adafactor"],
    "fsdp_offload": ["strategy=fsdp_offload", "devices=2"],
    "tensor_parallel": ["strategy=tensor_parallel", "devices=2", *TWO],
    "tensor_parallel, Llama": [*LLAMA, "strategy=tensor_parallel", "devices=2", *TWO],
    "tensor_parallel, LoRA": ["strategy=tensor_parallel", "devices=2", *LORA],
    "fsdp_tensor_parallel": ["strategy=fsdp_tensor_parallel", "strategy.tensor_parallel_size=2", "devices=4"],
    "pipeline": ["strategy=pipeline", "devices=2", *TWO, *DROPOUT],
    "pipeline, Llama": [*LLAMA, "strategy=pipeline", "devices=2", *TWO],
    "kto, ddp": [*PAIRS, "loss=kto", "strategy=ddp", "devices=2", *TWO],
}


def bits(lines: list[str], folder: Path) -> dict[str, object]:
    """Trains a recipe. Returns its "rows" (the losses, gradient norm and skipped steps of each row of metrics.csv) and
    "weights" (a digest of the exported model). If training fails, returns the last line of stderr as "error"."""
    lines = [line.format(folder=folder / "drive") for line in lines]
    (folder / "drive").mkdir()
    model = [] if {*LLAMA} <= {*lines} else GPT2
    typed = [*SMALL, *model, *lines, f"hydra.run.dir={folder}/run", f"cache_dir={tempfile.gettempdir()}/recipe_bits"]
    done = subprocess.run([sys.executable, "train.py", *typed], cwd=ROOT, capture_output=True, text=True, timeout=900)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1:]}
    rows = list(csv.DictReader((folder / "run" / "metrics.csv").open(encoding="utf-8")))
    names = ("train_loss", "val_loss", "gradient_norm", "skipped_steps")
    digest = sha256()
    for file in sorted((folder / "run" / "model").rglob("*.safetensors")):
        digest.update(file.read_bytes())
    return {
        "rows": [{name: row[name] for name in names if row.get(name)} for row in rows],
        "weights": digest.hexdigest(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, help="file to write")
    parser.add_argument("--against", type=Path, help="file to compare with")
    parser.add_argument("--only", default="", help="words of the names of recipes")
    typed = parser.parse_args()
    before = json.loads(typed.against.read_text()) if typed.against else {}
    found, different = json.loads(typed.to.read_text()) if typed.to and typed.to.exists() else {}, []
    for name, lines in RECIPES.items():
        if not all(word in name for word in typed.only.split()):
            continue
        with tempfile.TemporaryDirectory() as folder:
            found[name] = bits(lines, Path(folder))
        same = name not in before or before[name] == found[name]
        different += [] if same else [name]
        print(
            f"{name}: {'same' if same and before else found[name].get('error', 'done')}" if same else f"{name}: OTHER",
            flush=True,
        )
        if typed.to:
            typed.to.write_text(json.dumps(found, indent=1))
    sys.exit(f"other bits: {', '.join(different)}" if different else 0)


if __name__ == "__main__":
    main()
