"""Lists features with which training on several devices must give the results of one process. For each feature, the
list has a test case and the tolerances of the comparison.

In fp64, rounding is too small to hide an error. In fp32 with plain SGD, several devices differ from one process only by
the order of sums. With 16-bit matmuls or weights, each rank also rounds its own sums, which are over a part of the
rows.
"""

import json
from dataclasses import replace
from pathlib import Path

from lowmem.config.refusals import refused
from lowmem.data.token_store import load_bpe, train_bpe
from pair import EXACT, PLAIN, Case, composed
from parity import BUDGET
from tolerances import BF16, FP16, SGD_FP32, UPDATE

STRATEGIES = {
    "ddp": ("strategy=ddp", "devices=2"),
    "fsdp": ("strategy=fsdp", "devices=2"),
    "fsdp_offload": ("strategy=fsdp_offload", "devices=2"),
    "tensor_parallel": ("strategy=tensor_parallel", "devices=2"),
    "pipeline": ("strategy=pipeline", "devices=2"),
    "fsdp_tensor_parallel": ("strategy=fsdp_tensor_parallel", "strategy.tensor_parallel_size=2", "devices=4"),
}
FP64 = {"gradients": 1e-9, "weights": 1e-9}
# Errors are relative to the largest element, but elements that are hundreds of times smaller also matter. Therefore the
# tolerances are small, but larger than the rounding error of fp32, 2**-24.
FP32 = {"gradients": 1e-4, "weights": SGD_FP32}
IN_BF16 = {"gradients": BF16, "weights": BF16}
IN_FP16 = {"gradients": FP16, "weights": FP16}
# for 8-bit optimizer state, in which an 8-bit code that is off by one changes an element's update by a fraction of the
# step
IN_8_BITS = {"gradients": UPDATE["optim=adam8bit"][0], "weights": UPDATE["optim=adam8bit"][0]}

WINDOWS = (
    "accumulation=fixed",
    "accumulation.batches=2",
)  # a window of 8 rows, then a window of 1 row, in which some ranks have no row
CLIP = "clip=0.5"
SCALED = "precision.init_scale=4096"


def features(folder: Path) -> dict[str, tuple[Case, dict[str, float]]]:
    """Returns a dict: feature -> (case, tolerances). Args: folder: the folder that `written` has filled."""
    text, tokenizer = places(folder)
    exact, plain = Case((*WINDOWS, *EXACT, CLIP)), Case((*WINDOWS, *PLAIN, CLIP))

    def also(case: Case, *lines: str, **how) -> Case:
        return replace(case, lines=(*case.lines, *lines), **how)

    def read(*lines: str) -> Case:
        return also(exact, *lines, f"cache_dir={folder}/cache", "val_sequences=2", from_data=True)

    return {
        # windows and clipping
        "accumulation": (also(exact, "clip=null"), FP64),
        "ranks of 2 and 1 micro-batches": (also(exact, "accumulation.batches=3", together=2), FP64),
        "no accumulation": (Case(("accumulation=none", *EXACT, CLIP), together=8), FP64),
        "effective_batch": (Case(("accumulation=effective_batch", "accumulation.size=8", *EXACT, CLIP)), FP64),
        "clip": (exact, FP64),
        "clip_value": (also(exact, "clip=null", "clip_value=0.003"), FP64),
        "clip and clip_value": (also(exact, "clip_value=0.003"), FP64),
        "fp32 SGD": (plain, FP32),
        # precision
        "precision=tf32": (also(plain, "precision=tf32"), FP32),
        "precision=bf16": (also(plain, "precision=bf16"), IN_BF16),
        "precision=bf16-true": (also(plain, "precision=bf16-true"), IN_BF16),
        "precision=bf16-sr": (also(plain, "precision=bf16-sr"), IN_BF16),
        "precision=16": (also(plain, "precision=16", SCALED), IN_FP16),
        "precision=16-true": (also(plain, "precision=16-true", SCALED), IN_FP16),
        "an overflow on one rank": (also(plain, "precision=16", SCALED, overflow=(2, 1, "loss")), IN_FP16),
        "16-true, an overflow on one rank": (
            also(plain, "precision=16-true", SCALED, overflow=(2, 1, "loss")),
            IN_FP16,
        ),
        OF_PARTS: (also(plain, "precision=16", SCALED, overflow=(2, 1, "element")), IN_FP16),
        # activations and loss
        **{f"gradient_checkpointing={name}": (also(exact, f"gradient_checkpointing={name}"), FP64) for name in KINDS},
        "compile.activation_memory_budget": (also(plain, *BUDGET), FP32),
        "compile=blocks": (also(plain, "compile=blocks", "compile.backend=aot_eager"), FP32),
        "loss=chunked": (also(plain, "loss=chunked", "loss.rows=7"), FP32),
        "loss=tiled": (also(plain, "loss=tiled", "loss.columns=64"), FP32),
        "tile.tokens": (also(exact, "tile.tokens=4"), FP64),
        # optimizers
        **{f"optim={name}": (also(plain, f"optim={name}", "lr=1e-3"), IN_8_BITS) for name in IN_BLOCKS},
        "optim=adafactor": (also(plain, "optim=adafactor", "lr=1e-3"), FP32),
        "optim=muon": (also(plain, "optim=muon", "lr=1e-3"), IN_8_BITS),
        # trained parameters and models
        "adapter=lora": (also(plain, "adapter=lora", "lr=1"), FP32),
        "adapter=dora": (also(plain, "adapter=dora", "lr=1"), FP32),
        "adapter=qlora": (also(plain, "adapter=qlora", "lr=1"), FP32),
        "adapter.experts=lora": (
            also(plain, "adapter=lora", "adapter.experts=lora", "lr=1", network="qwen3_moe", apart=True),
            FP32,
        ),
        "freeze": (also(exact, "freeze=['*embed*','*layers.0.*']"), FP64),
        "a mixture's auxiliary loss": (also(plain, network="qwen3_moe", apart=True), FP32),
        "tied embeddings (GPT-2)": (also(exact, network="gpt2"), FP64),
        # data
        "data: packed": (read("data=jsonl", f"data.path={text}", "data.packing=documents"), FP64),
        "data: padded": (read("data=jsonl", f"data.path={text}", "data.packing=padded"), FP64),
        "data: joined": (read("data=jsonl", f"data.path={text}", "data.packing=joined"), FP64),
        "data: a stream": (
            read("data=hub", f"data.path={text.parent}", f"tokenizer={tokenizer}", *STREAM),
            FP64,
        ),
    }


OF_PARTS = "an overflow in one rank's part"  # not for strategy=ddp, where all ranks have equal gradients
KINDS = ("every_layer", "every_k", "sqrt", "selective", "offload", "offload_attention")
IN_BLOCKS = ("adam8bit", "adamw8bit", "lion8bit")
STREAM = ("data.streaming=true", "data.block=8", "data.val_rows=2")


def typed(case: Case, strategy: str, timeout: int = 40) -> Case:
    return replace(case, lines=(*case.lines, *STRATEGIES[strategy], f"strategy.timeout={timeout}"))


def why_not(case: Case) -> str | None:
    """Returns the message with which the config of a case is refused; None if the config is not refused."""
    return next(iter(refused(composed(case))), None)


def places(folder: Path) -> tuple[Path, Path]:
    return folder / "text" / "train.jsonl", folder / "tokenizer"


def written(folder: Path) -> Path:
    """Writes documents of several lengths and a byte-level tokenizer. Returns the folder."""
    text, tokenizer = places(folder)
    text.parent.mkdir()
    tokenizer.mkdir()
    lines = (json.dumps({"text": f"{i} " + "ab cd "[: i % 5 + 1] * (i % 3 + 1)}) for i in range(41))
    text.write_text("\n".join(lines))
    train_bpe([], 257, tokenizer / "tokenizer.json")
    load_bpe(tokenizer / "tokenizer.json").save_pretrained(tokenizer)
    return folder
