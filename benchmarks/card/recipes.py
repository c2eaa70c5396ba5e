"""The runs of lowmem that are measured on a card, as overrides of train.py.

`python -m benchmarks.card --predict h100` predicts each run without a card, and the page shows the prediction next to
the measurement. A rehearsal without a card runs these overrides with the shapes of `SMALL` and sequences of 16 tokens.
"""

from benchmarks.card.case import Here


def _shape(**sizes: object) -> list[str]:
    return [f"model.architecture.{key}={value}" for key, value in sizes.items()]


def _sized(batch_size: int, seq_len: int, batches: int = 1) -> list[str]:
    """Returns the overrides for steps with `batches` micro-batches of `batch_size` sequences."""
    lines = [f"batch_size={batch_size}", f"seq_len={seq_len}"]
    return lines + (["accumulation=fixed", f"accumulation.batches={batches}"] if batches > 1 else [])


# Overrides of every run. Tokens and weights are random, so that nothing is downloaded. W&B, evaluation and checkpoints
# are off.
QUIET = [
    *("data=random", "model.pretrained=false", "logger=csv", "plan=off", "scheduler=constant", "lr=1e-5"),
    *(
        "val_every=1000000",
        "val_sequences=1",
        "save_every=1000000",
        "sample_tokens=0",
        "+trainer.num_sanity_val_steps=0",
    ),
    *("+trainer.limit_val_batches=0", "log_every=10", "export=null"),
]
NO_TOKENS = _shape(bos_token_id="null", eos_token_id="null")
GPT2 = ["model=gpt2", *_shape(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)]
XL = ["model=gpt2-xl", *_shape(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)]
LLAMA_1B = ["model=llama-3.2-1b", *NO_TOKENS]
LLAMA_8B = ["model=llama-3.1-8b", *NO_TOKENS]
QUARTER = ["model.architecture.num_hidden_layers=8"]  # 8 of 32 layers
QWEN = ["model=qwen3-0.6b", *NO_TOKENS]
QWEN_1_7B = [*QWEN, *_shape(hidden_size=2048, intermediate_size=6144)]
QWEN_4B = [*QWEN, *_shape(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32)]

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1, "head_dim": 32, "vocab_size": 512}
TINY_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 512}
# override that selects a model -> overrides with its small shapes for a rehearsal
SMALL = {
    "model=gpt2": _shape(**TINY_GPT2),
    "model=gpt2-xl": _shape(**TINY_GPT2),
    **dict.fromkeys(("model=llama-3.2-1b", "model=llama-3.1-8b", "model=qwen3-0.6b"), _shape(**TINY)),
}

MASTERS = ["precision=bf16-master", "optim=adamw8bit"]
STREAMED = [*MASTERS, "clip=null", "gradient_checkpointing=offload", "loss=tiled"]
WINDOW = _sized(1, 2048, 8)
ONE_B = [*LLAMA_1B, *_sized(4, 2048, 2), "optim=adamw"]
LORA = [
    *("adapter.r=8", "optim=adamw", "precision=bf16-master", "gradient_checkpointing=every_layer", "loss=chunked"),
    *_sized(4, 1024),
]

RUNS = {
    "8B, streamed by layer, 8 x 2048": [*LLAMA_8B, *STREAMED, *WINDOW, "weights=streamed"],
    "8B, resident, 8 x 2048": [*LLAMA_8B, *STREAMED, *WINDOW],
    "8 of 32 layers of 8B, streamed": [*LLAMA_8B, *QUARTER, *STREAMED, *WINDOW, "weights=streamed"],
    "8 of 32 layers of 8B, resident": [*LLAMA_8B, *QUARTER, *STREAMED, *WINDOW],
    "1.24B, bf16": [*ONE_B, "precision=bf16", "loss=full"],
    "1.24B, bf16, compiled": [*ONE_B, "precision=bf16", "loss=full", "compile=blocks"],
    "1.24B, bf16, chunked loss": [*ONE_B, "precision=bf16", "loss=chunked"],
    "1.24B, bf16-true": [*ONE_B, "precision=bf16-true", "loss=full"],
    "1.24B, bf16-true, compiled": [*ONE_B, "precision=bf16-true", "loss=full", "compile=blocks"],
    "1.24B, bf16-true, tiled loss": [*ONE_B, "precision=bf16-true", "loss=tiled"],
    "1.24B, tf32": [*LLAMA_1B, *_sized(2, 2048, 2), "optim=adamw", "precision=tf32", "loss=chunked"],
    "1.24B, fp32": [*LLAMA_1B, *_sized(2, 2048, 2), "optim=adamw", "precision=32", "loss=chunked"],
    "1.7B, streamed by layer, 8 x 2048": [*QWEN_1_7B, *STREAMED, *WINDOW, "weights=streamed"],
    "4B, masters that step early, 2 x 2048": [
        *(*QWEN_4B, *MASTERS, *_sized(2, 2048), "clip=null", "gradient_checkpointing=every_layer", "loss=chunked")
    ],
    "4B, masters that step after clipping, 2 x 2048": [
        *(*QWEN_4B, *MASTERS, *_sized(2, 2048), "gradient_checkpointing=every_layer", "loss=chunked")
    ],
    "8B LoRA, streamed, 4 x 1024": [*LLAMA_8B, "adapter=lora", *LORA, "weights=streamed"],
    "8B LoRA, resident, 4 x 1024": [*LLAMA_8B, "adapter=lora", *LORA],
    # the host quantizes 8 of 32 layers in one minute, and all layers in four
    "8 of 32 layers of 8B, QLoRA, streamed, 4 x 1024": [
        *(*LLAMA_8B, *QUARTER, "adapter=qlora", *LORA, "weights=streamed")
    ],
    "8 of 32 layers of 8B, LoRA, streamed, 4 x 1024": [*LLAMA_8B, *QUARTER, "adapter=lora", *LORA, "weights=streamed"],
    "GPT-2 124M, bf16": [*GPT2, *_sized(8, 1024), "optim=adamw", "precision=bf16", "loss=full"],
    "GPT-2 XL, fp16 masters, 64 x 1024": [
        *(*XL, "experiment=gpt2_xl_12gb", "memory.limit=12GiB", "batch_size=4", "accumulation.size=64")
    ],
}


def typed(name: str, here: Here, *more: str) -> list[str]:
    """Returns the overrides of a run of `RUNS`. In a rehearsal, the model is small and the sequences are short.

    Args:
        more: further overrides, which take precedence.
    """
    lines = RUNS[name]
    small = [] if here.on_card else [line for first in SMALL if first in lines for line in SMALL[first]]
    return [*lines, *QUIET, *small, *([] if here.on_card else ["seq_len=16"]), f"device={here.device}", *more]
