"""Compares the planner's predictions with the memory peaks that other projects published for their runs on cards.

python -m benchmarks.published           # about a minute on one core; nothing is downloaded or allocated

The figures were chosen before any prediction was computed. Every run trains all weights of a causal language model on
one card, with sequences of exactly the given length (packed, or cut from one stream). Compiled runs were left out,
because torch.compile itself decides which tensors it keeps. The settings were read in the sources of the projects. The
planner traces the models as the projects define them (`published_models.py`, or transformers' class if the peak is at
the loss), with the loss functions of this file. If a figure includes memory that a trace does not show, this memory is
added to the prediction, and the row says why. One setting, the dtype of litgpt's logits, was read again after the
initial prediction had missed the figure by 5.3 %.
"""

import json
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import published_models  # noqa: F401 - transformers learns their classes
from benchmarks.runner import write
from lowmem.config.settle import run_of
from lowmem.data.loader import MicroBatch
from lowmem.plan.job import resolved
from lowmem.plan.prediction import predict
from lowmem.plan.target import Target
from lowmem.system.quiet_libraries import quiet
from lowmem.system.units import GIB
from lowmem.techniques.precision.contract import BasePrecision


class PureBFloat16(BasePrecision):
    """Stores weights, gradients and optimizer state in bf16. lowmem's own precisions all keep AdamW's state in
    fp32."""

    dtype, weights_dtype = torch.bfloat16, None


# --- their losses -------------------------------------------------------------------------------------------------


def narrow(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Returns the summed cross entropy, computed from 16-bit logits."""
    logits = model(**batch.inputs, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum").float()


def narrow_held(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Returns the loss of `narrow`. The model keeps the logits until the next micro-batch, as a variable in a training
    loop would."""
    logits = model(**batch.inputs, use_cache=False).logits
    model.held = logits.detach()
    return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum").float()


def sliced(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Returns the summed cross entropy in fp32, over all positions except the last."""
    logits = model(**batch.inputs, use_cache=False).logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), batch.labels[:, 1:].flatten(), reduction="sum")


def transposed_held(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Returns the summed cross entropy in fp32, computed from a copy of the logits of all positions except the last,
    with shape (B, V, T - 1).

    The model keeps the fp32 logits during the backward pass, as a variable in a training loop would.
    """
    logits = model(**batch.inputs, use_cache=False).logits.float()
    logits = logits[:, :-1].contiguous()
    model.held = logits.detach()
    # CUDA's log_softmax copies tensors that are not contiguous (host_softmax in aten/src/ATen/native/cuda/SoftMax.cu)
    return F.cross_entropy(logits.transpose(1, 2).contiguous(), batch.labels[:, 1:], reduction="sum")


# --- the figures --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """A published figure, and the overrides of the run for which it was published."""

    name: str
    figure: float
    unit: str  # GB: 10**9 bytes, GiB: 2**30 bytes; as computed in the project's source, whatever its label says
    measure: str  # counter of torch's allocator whose peak was published: allocated, active or reserved bytes
    card: str
    url: str
    commit: str  # commit of the source in which the settings were read
    overrides: tuple[str, ...]
    differs: str  # settings of this run that lowmem's own runs do not have
    untraced: int = 0  # bytes that the figure includes but a trace does not show

    @property
    def bytes(self) -> float:
        return self.figure * {"GB": 10**9, "GiB": GIB}[self.unit]


RUN = ("model=hf", "model.name=published", "model.pretrained=false", "lr=1e-4", "clip=null", "scheduler=constant")
RUN += ("loss=full",)
PURE = ("precision._target_=benchmarks.published.PureBFloat16",)
FOREACH = "optim.fused=false"  # torch's default on a card: the multi-tensor implementation


def architecture(model_type: str, **keys: object) -> str:
    """Returns the override of an architecture in Hydra's syntax, which is JSON without quotation marks."""
    return "model.architecture=" + json.dumps({"model_type": model_type, **keys}).replace('"', "")


def loss(name: str) -> tuple[str, ...]:
    return (f"loss._target_=benchmarks.published.{name}",)


def sized(batch: int, length: int) -> tuple[str, ...]:
    return f"batch_size={batch}", f"seq_len={length}"


def decoder(vocabulary: int, width: int, layers: int, heads: int, groups: int, inner: int, **keys: object) -> str:
    size = width // heads
    keys = {"rotary": size} | keys
    return architecture(
        "published-decoder",
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=size,
        intermediate_size=inner,
        **keys,
    )


def llama(vocabulary: int, width: int, layers: int, heads: int, inner: int) -> str:
    return architecture(
        "llama",
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=inner,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )


GITHUB = "https://github.com"
LITGPT = (
    f"{GITHUB}/Lightning-AI/litgpt/blob/main/extensions/thunder/README.md",
    "101e31d2e4d430b818e7e69974de6139800a36b9",
)
THUNDER = f"{GITHUB}/Lightning-AI/lightning-thunder/pull/1616", "d19e0635d424284ad1fd74508e71c0f6f52adb42"
BOOK = (
    f"{GITHUB}/rasbt/LLMs-from-scratch/blob/main/ch05/10_llm-training-speed/README.md",
    "908dd2f71ed39ecc36934b8315f16d21c60cd0d9",
)
TUNE = f"{GITHUB}/meta-pytorch/torchtune", "1814feb17a9038e1a8053ce93111bd26774a8db6"
TUNE_3B = decoder(
    *(128256, 3072, 28, 24, 8, 8192),
    one_product=False,
    rope_dtype="float32",
    tie_word_embeddings=True,
)
TUNE_3B_LAYERS = (
    "bf16 optimizer state; RoPE in fp32; keys and values repeated to 24 heads; flex attention for packed documents"
)
OWN_LAYERS = "LayerNorm and GELU in elementary operations"
CHECKPOINTED = "gradient_checkpointing=every_layer"
TINY_STORIES = 1_150_000_000  # bytes of token ids, within 5 %: 2.2 GB of text / 3.8 bytes per token * 2 bytes per id


def book(step: str, figure: float, differs: str, *more: str, **keys: object) -> Published:
    architecture_ = architecture("published-book", **keys)
    overrides = (*RUN, *loss("narrow"), *sized(8, 1024), architecture_, *more)
    return Published(f"LLMs-from-scratch: {step}", figure, "GiB", "reserved", "A100", *BOOK, overrides, differs)


ALL = (
    Published(
        "litgpt: TinyLlama 1.1B, 4 x 2048",
        *(29.84, "GB", "allocated", "A100 40 GB"),
        *LITGPT,
        (
            *(*RUN, *PURE, *sized(4, 2048), "accumulation=fixed", "accumulation.batches=128"),
            decoder(32000, 2048, 22, 32, 4, 5632, repeated="before"),
        ),
        # HalfPrecision.convert_output of Lightning's Fabric casts the model's output to torch's default dtype
        "bf16 optimizer state; Fabric casts the logits to fp32; keys and values are repeated to 32 heads before RoPE",
    ),
    Published(
        "thunder: Qwen2.5 7B cut to 4 layers, 1 x 4096",
        *(17.55, "GB", "allocated", "not named"),
        *THUNDER,
        (
            *(*RUN, *PURE, *loss("narrow_held"), *sized(1, 4096), CHECKPOINTED),
            decoder(152064, 3584, 4, 28, 4, 18944, norm="wide-rms", qkv_bias=True),
        ),
        "bf16 optimizer state and logits; the loop keeps the logits until the next ones are computed",
    ),
    Published(
        "thunder: StableCode 3B cut to 4 layers, 1 x 16384",
        *(10.37, "GB", "allocated", "not named"),
        *THUNDER,
        (
            *(*RUN, *PURE, *loss("narrow_held"), *sized(1, 16384), CHECKPOINTED),
            decoder(
                *(49152, 2560, 4, 32, 32, 10240),
                rotary=20,
                norm="layer",
                gated=False,
                parallel=True,
                bias=True,
            ),
        ),
        "bf16 optimizer state and logits; the loop keeps the logits until the next ones are computed; LayerNorm, GELU, "
        "attention parallel to the MLP",
    ),
    book(
        "as in the book",
        26.2617,
        f"fp32; T x T attention scores with dropout; {OWN_LAYERS}; each block stores a T x T float mask",
        FOREACH,
    ),
    book(
        "1. mask made in each pass",
        26.2422,
        f"fp32; T x T attention scores with dropout; {OWN_LAYERS}; no stored mask",
        FOREACH,
        mask="made",
    ),
    book(
        "5. bf16",
        13.7871,
        f"bf16 weights and optimizer state; T x T attention scores with dropout; {OWN_LAYERS}; no stored mask",
        *PURE,
        mask="made",
    ),
    book(
        "6. torch's norm and GELU",
        11.5645,
        "bf16 weights and optimizer state; T x T attention scores with dropout; torch's LayerNorm and GELU; no stored "
        "mask",
        *PURE,
        mask="made",
        own=False,
    ),
    book(
        "7. flash attention",
        5.9004,
        "bf16 weights and optimizer state; torch's attention with dropout, LayerNorm and GELU",
        *PURE,
        mask=None,
        own=False,
    ),
    Published(
        "torchtune: Llama 3.2 3B, 5 x 2048 packed",
        *(70.52, "GiB", "active", "A100"),
        f"{TUNE[0]}/pull/2003",
        TUNE[1],
        (*RUN, *PURE, *sized(5, 2048), TUNE_3B, FOREACH),
        TUNE_3B_LAYERS,
    ),
    Published(
        "torchtune: Llama 3.2 3B, 2 x 4096 packed",
        *(60.0, "GiB", "active", "A100"),
        f"{TUNE[0]}/blob/main/README.md",
        TUNE[1],
        (*RUN, *PURE, *sized(2, 4096), TUNE_3B, FOREACH),
        TUNE_3B_LAYERS,
    ),
    Published(
        "torchtune: Llama 2 7B, 4 x 2048, step in backward",
        *(20.2, "GB", "allocated", "not named"),
        f"{TUNE[0]}/pull/961",
        "0217d44c2e1e372b34628767745c1f6538086a81",
        (
            *(*RUN, *PURE, *loss("transposed_held"), *sized(4, 2048), CHECKPOINTED),
            *("optim=sgd", "optim.in_backward=true", llama(32000, 4096, 32, 32, 11008)),
        ),
        "paged optimizer state, which torch does not count, is left out of the prediction; fp32 logits of shape "
        "(B, V, T)",
    ),
    Published(
        "torchao: Llama 2 1B, 4 x 2048",
        *(11.07, "GB", "allocated", "RTX 4070 Ti SUPER"),
        f"{GITHUB}/pytorch/ao/blob/main/torchao/prototype/quantized_training/README.md",
        "9acc9a4de61879d3dd6129611e722ef827d0e9a6",
        (*RUN, *PURE, *loss("sliced"), *sized(4, 2048), CHECKPOINTED, llama(32000, 1536, 24, 24, 6144)),
        "bf16 optimizer state; all tokens of TinyStories are on the card, about 1.15 GB",
        TINY_STORIES,
    ),
)


def predicted(figure: Published) -> int:
    """Returns the predicted peak in bytes, including `figure.untraced`. This is the peak of reserved memory if
    `figure.measure` is "reserved", and otherwise the peak of live tensors."""
    prediction = predict(resolved(run_of(figure.overrides), on_card=True), Target(on_card=True))
    if prediction.estimate:
        raise SystemExit(f"{figure.name}: {prediction.estimate}")
    return figure.untraced + (prediction.reserved if figure.measure == "reserved" else prediction.allocated)


def row(figure: Published) -> dict:
    return {
        "published_bytes": round(figure.bytes),
        "predicted_bytes": predicted(figure),
        "measure": figure.measure,
        "card": figure.card,
        "url": figure.url,
        "commit": figure.commit,
        "differs": figure.differs,
        "overrides": list(figure.overrides),
        "beside_bytes": figure.untraced,
    }


def error(run: dict) -> float:
    return run["predicted_bytes"] / run["published_bytes"] - 1


def table(rows: dict[str, dict]) -> str:
    errors = {name: error(run) for name, run in rows.items()}
    worst = max(errors, key=lambda name: abs(errors[name]))
    lines = [
        f"{len(rows)} peaks that other projects measured on real cards. Error = predicted / published - 1: "
        f"median absolute error {median(map(abs, errors.values())):.1%}, worst {errors[worst]:+.1%} ({worst}).",
        "",
        "| figure | card | measured | GiB published | GiB predicted | error "
        "| settings of the project that the prediction includes |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, run in rows.items():
        sizes = [f"{run[key] / GIB:.2f}" for key in ("published_bytes", "predicted_bytes")]
        cells = [
            f"[{name}]({run['url']})",
            run["card"],
            run["measure"],
            *sizes,
            f"{errors[name]:+.1%}",
            run["differs"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    quiet()
    results = {}
    for figure in ALL:
        results[figure.name] = row(figure)
        print(f"{figure.name:<55}{error(results[figure.name]):+.1%}", flush=True)
    write("published", {"figures": results}, table(results))


if __name__ == "__main__":
    main()
