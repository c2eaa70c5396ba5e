"""Tests techniques that change how a model computes, on every family of causal language models in transformers.

python -m benchmarks.architectures          # ten minutes on two cores, twenty on one (--workers=1)
python -m benchmarks.architectures gemma2   # only this family; printed, and saved only with --save

`SMALL` and `VALUES` make every family small: `SMALL` has rules for the names of config keys, and `VALUES` has special
values for some families. `TELLING` sets scaling factors and caps to values that change the result, so that a technique
that ignores them gives a wrong result. The table has a row for each family and a column for each test. `right` in a
column means:

- starts as typed: with lowmem's default techniques (for families in `OWN_LOSS`, with another loss) the loss is positive
  and all gradients are finite
- all kinds: the small model has at least as many kinds of blocks (sliding and full attention, dense layers and experts,
  ...) as a model with transformers' default values; if the attributes of all blocks of that larger model differ, only
  the names and classes of the blocks' modules are compared
- full = chunked: the losses and gradients of loss=full and loss=chunked differ by no more than the rounding errors of
  fp32 sums in different orders
- every_layer, selective, offload: the loss and gradients are bit-identical to those without checkpointing, and the
  forward pass calls a block that lowmem finds
- bf16-master: after two steps the weights are bit-identical to those of a naive loop with an fp32 and a bf16 model
- lora: only LoRA matrices have gradients; PEFT, given the saved adapter, computes lowmem's logits up to rounding;
  PEFT's merged weights are bit-identical to lowmem's
- qlora: the loss and gradients are bit-identical to those of LoRA on the dequantized weights
- plan: the planner predicts the memory of a run from a trace, without an estimate
"""

import argparse
import re
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
import transformers
from lightning.pytorch import Trainer
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.runner import stored, write
from lowmem.config.instantiate import instantiate
from lowmem.config.settle import Run, run_of
from lowmem.data.loader import START, MicroBatch, Window
from lowmem.model import loading
from lowmem.model.blocks import blocks as blocks_of
from lowmem.model.blocks import stack_of
from lowmem.model.trainable import trainable
from lowmem.plan.prediction import predict
from lowmem.plan.search.extend import kind_of
from lowmem.plan.target import Target
from lowmem.plan.tracing.trace import quietly
from lowmem.saving.export import Weights
from lowmem.saving.export_adapter import WEIGHTS, merge, write_adapter
from lowmem.step.fp32_halves import rounded
from lowmem.system.errors import Refused
from lowmem.system.quiet_libraries import quiet
from lowmem.techniques.adapter.lora import not_loaded_by_peft
from lowmem.techniques.adapter.nf4 import NF4Linear
from lowmem.techniques.adapter.stacks import ComputedExperts
from lowmem.techniques.precision.cpu_products import widened
from lowmem.training import build
from lowmem.training.training import mixes_dtypes

LAYERS, WIDTH, HEADS, VOCABULARY, BATCH, TOKENS = 4, 64, 4, 512, 2, 16
SECONDS = 60  # time limit of one cell
REORDERED = 1e-5  # tolerance for fp32 sums in another order, relative to the largest element
ROUNDINGS = 4  # tolerance for an adapter's logits, in units of `rounding_of`
# pattern -> largest value of the config keys that match it. The first matching pattern applies.
SMALL = {
    r"vocab_size": VOCABULARY,
    r"^num_experts$|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts": 4,
    r"experts_per_tok|top_?k$|^moe_k$": 2,
    r"^n_group$|topk_group|num_expert_group": 1,
    r"key_value_heads|num_kv_heads|num_key_heads": 2,
    r"mamba\w*heads|^mamba_n_heads": 2 * WIDTH // 16,
    r"heads$|^n_head$": HEADS,
    r"head_?dim|dim_head|d_kv|kv_channels|d_head": WIDTH // HEADS,
    r"^attention_hidden_size$": 2 * WIDTH,
    r"^(hidden_size|n_embd|d_model|dim|embed_dim|embedding_(size|dim)|word_embed_proj_dim|hidden_dim)$": WIDTH,
    r"^(hidden_size_global|adapter_(in_dim|out_dim|input_size))$": WIDTH,
    r"intermediate|ffn|n_inner|d_ff|dff|dim_ff|d_inner": 2 * WIDTH,
    r"lora_rank|rotary_dim": 8,
    r"sliding_window|window_size|chunk_size$": 8,
    r"position|seq_len|n_ctx": 128,
    r"image_size": 28,
}
# pattern -> value of the config keys that match it. Unlike a factor of 1 or a cap that no logit reaches, these values
# change the result.
TELLING = {
    r"logit_scale|logits_scaling|lm_head_multiplier|logits?_mup|output_multiplier": 0.5,
    r"final_logit_softcapping|logits_soft_cap|output_logit_soft_cap": 0.2,
}
NUMBER_OF_LAYERS = r"num_hidden_layers$|^n_layers?$|^num_layers$|(decoder|encoder)_layers$|^num_blocks$|^depth$"
# family -> number of blocks of the small model, for families whose first `LAYERS` blocks do not include all kinds of
# blocks.
DEPTHS = {
    **dict.fromkeys(("deepseek_v4", "jamba", "kimi_linear", "kolibri1", "lfm3"), 5),
    **dict.fromkeys(("bailing_hybrid", "beam", "flint", "gemma3", "gemma3_text", "inkling_text", "mimo_v2_flash"), 6),
    "inkling2_text": 7,
}
_LINEAR_AND_HYBRID = ["linear_attention", "hybrid"] * 2  # two hybrid blocks, which share their weights
# model_type -> config values, for families that cannot be built by the rules alone, or only without one of their kinds
# of blocks. The values also apply to a text decoder with this model_type inside a multimodal model.
VALUES = {
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
            "full_attention": None,
        },
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots3_note_text": {"head_dim": 2 * WIDTH // HEADS},
    "gemma3n_text": {
        "num_hidden_layers": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
        "intermediate_size": 2 * WIDTH,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        "num_kv_shared_layers": 2,
    },
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": WIDTH // HEADS,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds": False,  # axial positions fix the length of every row
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
        "hash_seed": 0,
        "hidden_dropout_prob": 0.0,  # Reformer's dropout draws its own seeds, which a run cannot set
        "local_attention_probs_dropout_prob": 0.0,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": _LINEAR_AND_HYBRID, "attention_head_dim": 2 * WIDTH // HEADS, "mamba_dt_rank": 4},
    "zamba2": {
        "layers_block_type": _LINEAR_AND_HYBRID,
        "hybrid_layer_ids": [1, 3],
        "attention_head_dim": 2 * WIDTH // HEADS,
    },
}
_DRAFTS = "it drafts tokens from the keys and values of another model, and cannot be trained alone"
_SOUND = "transformers passes its causal class the config of the whole model instead of that of the decoder"
IMPOSSIBLE = {
    "gemma4_assistant": _DRAFTS,
    "gemma4_unified_assistant": _DRAFTS,
    "musicgen": _SOUND,
    "musicgen_melody": _SOUND,
}


# --- a family, made small ---------------------------------------------------------------------------------------------


class Depth(NamedTuple):
    """The number of layers of a family's model with default values, and of the family's small model."""

    full: int
    small: int


def shrunk(model_type: str) -> dict:
    """Returns the architecture of a family's small model, in the form of `architecture` in the yaml files of
    conf/model."""
    full = CONFIG_MAPPING[model_type]()
    text = full.get_text_config(decoder=True)
    layers = next(
        (getattr(text, key) for key in ("num_hidden_layers", "n_layer", "num_layers") if hasattr(text, key)), 0
    )
    return {"model_type": model_type, **_small(full.to_dict(), Depth(layers, DEPTHS.get(model_type, LAYERS)))}


def _small(keys: Mapping, depth: Depth) -> dict:
    own = VALUES.get(keys.get("model_type"), {})
    depth = depth._replace(full=keys.get("num_hidden_layers", depth.full))
    keys = {key: UNSAID.get(key) if value is None else value for key, value in keys.items()}
    small = {key: _value(key, value, depth) for key, value in keys.items() if key not in NOT_OF_THE_MODEL}
    heads, groups = keys.get("num_attention_heads"), keys.get("num_key_value_heads")
    if heads is not None and heads == groups:  # one key head per query head
        small["num_key_value_heads"] = small["num_attention_heads"]
    if "expand" in keys and "num_heads" in keys:  # a state-space model: heads * head_dim is its inner width
        small["num_heads"] = int(small["expand"] * small["hidden_size"]) // small["head_dim"]
    if keys.get("mamba_d_ssm"):
        small["mamba_d_ssm"] = small["mamba_n_heads"] * small["mamba_d_head"]
    if "qk_nope_head_dim" in keys and keys.get("qk_head_dim"):
        small["qk_head_dim"] = small["qk_nope_head_dim"] + small["qk_rope_head_dim"]
    return small | own


# Values that replace None, for keys that are None by default in some families.
UNSAID = {"num_key_value_heads": HEADS, "head_dim": WIDTH // HEADS, "num_experts_per_tok": 2}
NOT_OF_THE_MODEL = ("transformers_version", "architectures", "id2label", "label2id", "dtype", "torch_dtype")


def _value(key: str, value: object, depth: Depth) -> object:
    if isinstance(value, Mapping):
        if value and all(str(k).isdigit() for k in value):  # keys are layer numbers
            return {k: _small(v, depth) for k, v in value.items() if int(k) < depth.small}
        family_key = {"model_type": value["model_type"]} if "model_type" in value else {}
        return family_key | (dict(value) if key.startswith("rope") else _small(value, depth))
    if isinstance(value, list):
        return value[: depth.small] if len(value) == depth.full else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    for pattern, telling in TELLING.items():
        if re.search(pattern, key):
            return telling
    if re.search(r"token_(id|index)", key):
        return value if value < VOCABULARY else 3
    if (
        key == "vocab_size"
    ):  # even if the default is smaller (byte-level models): tokens are drawn from 4 to VOCABULARY - 2
        return VOCABULARY
    largest = next((most for pattern, most in SMALL.items() if re.search(pattern, key)), 256 if value > 256 else value)
    if re.search(NUMBER_OF_LAYERS, key):
        largest = depth.small
    return min(value, largest) if isinstance(value, int) else value


# --- kinds of blocks ------------------------------------------------------------------------------------------------


class Kinds(NamedTuple):
    """The number of a model's blocks, of their kinds, and of their structures. Blocks of one kind have equal modules,
    attributes and parameter shapes; blocks of one structure have modules of equal names and classes."""

    blocks: int
    kinds: int
    structures: int

    def lacks(self, full: "Kinds") -> bool:
        """Returns True if this small model has fewer kinds of blocks than the full model. If the full model has more
        blocks than this one and no two blocks of the full model have equal attributes (for example, because a factor
        depends on the block's number), only structures are compared."""
        numbered = full.kinds == full.blocks > self.blocks
        return self.structures < full.structures or (self.kinds < full.kinds and not numbered)


def kinds_of(config: PretrainedConfig) -> Kinds:
    with quietly(), torch.device("meta"):
        blocks = stack_of(AutoModelForCausalLM.from_config(config))
    kinds = [kind_of(block) for block in blocks]
    structures = {tuple((name, class_name) for name, class_name, _ in modules) for modules, _ in kinds}
    return Kinds(len(blocks), len({*kinds}), len(structures))


def all_kinds(architecture: dict) -> str:
    """Compares the kinds of blocks of the small model with those of a model with transformers' default values."""
    model_type = architecture["model_type"]
    small = kinds_of(loading.describe(configured(architecture)).grown)
    try:
        keys = CONFIG_MAPPING[model_type]().to_dict()
        unsaid = {key: value for key, value in UNSAID.items() if keys.get(key, value) is None}
        full = kinds_of(CONFIG_MAPPING[model_type](**unsaid))
    except Exception as error:
        return f"not compared: the default values build no model ({_last_line(error)})"
    return f"wrong: {small.kinds} of {full.kinds} kinds of blocks" if small.lacks(full) else "right"


# --- the cells -----------------------------------------------------------------------------------------------------


@cache
def _composed(*overrides: str) -> Run:
    cfg = run_of(["model=hf", "model.name=shrunk", *overrides])
    return cfg.knowing(model={"pretrained": False}, device="cpu", batch_size=BATCH)


# model_type -> overrides, for families with which lowmem refuses the default loss. They are not added if a cell sets
# the loss, so "full = chunked" shows the refusal.
OWN_LOSS = {"prophetnet": ["loss=full"]}


def configured(architecture: dict, *overrides: str) -> Run:
    own_loss = (
        [] if any(line.startswith("loss=") for line in overrides) else OWN_LOSS.get(architecture["model_type"], [])
    )
    run = _composed(f"seq_len={TOKENS}", "max_steps=2", "lr=1e-3", "logger=none", *own_loss, *overrides)
    return run.replacing("model.architecture", architecture).resolved()


def build_module(cfg: Run):
    """Returns (the module, random tokens: (BATCH, TOKENS + 1) int64)."""
    torch.manual_seed(0)
    module = build.causal_lm(cfg, loading.describe(cfg))
    return module, torch.randint(4, VOCABULARY - 1, (BATCH, TOKENS + 1))


def gradients(cfg: Run) -> tuple[float, dict[str, Tensor]]:
    module, ids = build_module(cfg)
    torch.manual_seed(1)
    value = module.loss(module.model, MicroBatch(ids[:, :-1], ids[:, 1:]))
    value.backward()
    return value.item(), {name: p.grad for name, p in module.model.named_parameters() if p.grad is not None}


def starts(architecture: dict) -> str:
    value, computed = gradients(configured(architecture))
    assert computed and all(g.isfinite().all() for g in computed.values()), "gradients that are not finite"
    return "right" if value > 0 else f"wrong: a loss of {value}"


def chunked(architecture: dict) -> str:
    module, ids = build_module(configured(architecture, "loss=chunked", "loss.rows=7"))
    module.model.eval()
    module.loss.verify(module.model, MicroBatch(ids[:, :-1], ids[:, 1:]))
    value, exact = gradients(configured(architecture, "loss=full"))
    ours, computed = gradients(configured(architecture, "loss=chunked", "loss.rows=7"))
    largest = max(g.abs().max().item() for g in exact.values())
    wrong = max((computed[name] - g).abs().max().item() for name, g in exact.items()) / largest
    return (
        "right"
        if abs(ours / value - 1) < REORDERED and wrong < REORDERED
        else f"wrong: {ours / value - 1:.1g}, {wrong:.1g}"
    )


def checkpointed(name: str) -> Callable[[dict], str]:
    def cell(architecture: dict) -> str:
        cfg = configured(architecture, f"gradient_checkpointing={name}")
        (value, exact), (ours, again) = gradients(configured(architecture)), gradients(cfg)
        if value != ours or not all(torch.equal(again[key], g) for key, g in exact.items()):
            return "wrong gradients"
        return "right" if blocks_are_called(architecture) else "wrong: blocks of another part of the model"

    return cell


def blocks_are_called(architecture: dict) -> bool:
    """Returns True if a forward pass over text calls any of the blocks that lowmem finds. Otherwise lowmem has found
    the blocks of another part of the model, such as an image encoder."""
    module, ids = build_module(configured(architecture))
    blocks, called = blocks_of(module.model), set()
    for block in blocks:
        block.register_forward_hook(lambda block, *_: called.add(block))
    module.loss(module.model, MicroBatch(ids[:, :-1], ids[:, 1:]))
    return bool(called)  # one called block is enough: some blocks may read only images


class Windows:
    """An iterable of two identical accumulation windows with one micro-batch each."""

    def __init__(self, ids: Tensor) -> None:
        self.micro_batch = MicroBatch(ids[:, :-1], ids[:, 1:])

    def __iter__(self) -> Iterator[Window]:
        for _ in range(2):
            tokens = self.micro_batch.learned_tokens
            yield Window([self.micro_batch], tokens, tokens, tokens, START)


def masters(architecture: dict) -> str:
    """Compares the weights after two SGD steps with precision=bf16-master with those of a naive loop, which keeps an
    fp32 model and a bf16 model."""
    cfg = configured(architecture, "precision=bf16-master", "optim=sgd", "clip=null", "scheduler=constant")
    module, ids = build_module(cfg)
    plugins = list(map(instantiate, cfg.plugins))
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(
        accelerator="cpu",
        max_steps=2,
        max_epochs=-1,
        plugins=plugins,
        callbacks=build.callbacks(cfg),
        **dict.fromkeys(off, False),
    )
    torch.manual_seed(1)
    try:
        trainer.fit(module, Windows(ids))
    except RuntimeError as error:
        if mixes_dtypes(error, module.model):
            return f"refused: {error}"
        raise
    (wide, _), (narrow, _) = build_module(cfg), build_module(cfg)
    for p in narrow.model.parameters():
        full, p.data = p.data, torch.empty_like(p.data, dtype=torch.bfloat16)
        rounded(full, p.data)
    stepping, pairs = wide.update.optimizer(wide.model), list(zip(wide.parameters(), narrow.parameters(), strict=True))
    torch.manual_seed(1)
    narrow.model.train()
    for _ in range(2):
        with widened(torch.bfloat16, "cpu"):  # as in the run: products in fp32 if the CPU has no bf16 instructions
            (narrow.loss(narrow.model, MicroBatch(ids[:, :-1], ids[:, 1:])) / (BATCH * TOKENS)).backward()
        for w, p in pairs:
            w.grad, p.grad = None if p.grad is None else p.grad.float(), None
        stepping.step()
        with torch.no_grad():
            for w, p in pairs:
                rounded(w.data, p.data)
    for p, (w, _) in zip(module.parameters(), pairs, strict=True):
        exact = w if p.requires_grad else w.bfloat16().float()  # a frozen weight has no master
        if not torch.equal(module.full_precision(p), exact):
            return "wrong weights"
    return "right"


def adapted(architecture: dict) -> str:
    """Tests LoRA. Only LoRA matrices may have gradients. PEFT, given the saved adapter, must adapt the same layers and
    compute the same logits up to rounding. Merging must not change the logits beyond rounding, and the merged weights
    must be bit-identical to PEFT's. If PEFT does not load all tensors of the adapter, the logits and merged weights of
    PEFT are not compared, and the cell says "refused"."""
    module, ids = build_module(configured(architecture, "adapter=lora", "adapter.r=4"))
    network, batch = module.model, MicroBatch(ids[:, :-1], ids[:, 1:])
    for _, p in trainable(network):
        torch.nn.init.normal_(p, std=0.05)  # B starts at zero, so the adapter would change nothing
    torch.manual_seed(1)
    module.loss(network, batch).backward()
    having = {name for name, p in network.named_parameters() if p.grad is not None and p.grad.isfinite().all()}
    if not having or any("lora_" not in name for name in having):
        return f"wrong: gradients of {len(having)} tensors"
    network.eval()
    base, _ = build_module(configured(architecture))
    with torch.no_grad(), TemporaryDirectory() as folder:
        unmerged = network(**batch.inputs, use_cache=False).logits
        write_adapter(network, Path(folder), None, "base", Weights(network))
        lost = not_loaded_by_peft(network, load_file(Path(folder) / WEIGHTS))
        opened = PeftModel.from_pretrained(base.model, folder).eval()
        if layers_with(opened.get_base_model()) != layers_with(network):
            return "wrong: PEFT adapts other layers"
        computed = {} if lost else {"by PEFT": opened(**batch.inputs, use_cache=False).logits}
        merge(network, torch.float32)
        computed["merged"] = network(**batch.inputs, use_cache=False).logits
        theirs = opened.merge_and_unload().state_dict()
    different = [name for name, weight in network.state_dict().items() if not torch.equal(weight, theirs[name])]
    for name, logits in computed.items():
        wrong = apart(logits, unmerged)
        if wrong >= REORDERED and wrong >= ROUNDINGS * rounding_of(network, batch):
            return f"wrong: {name} {wrong:.1g}"
    if lost:
        return f"refused: PEFT renames {len(lost)} tensors and does not load them, such as {lost[0]}"
    return "right" if not different else f"wrong: merged {different[0]}"


def apart(logits: Tensor, right: Tensor) -> float:
    """Returns the largest difference between the logits, relative to the largest absolute value of `right`. Elements
    that are not finite in either tensor are left out."""
    finite = right.isfinite() & logits.isfinite()
    return ((logits - right)[finite].abs().max() / right[finite].abs().max()).item()


@torch.no_grad()
def rounding_of(network: torch.nn.Module, batch: MicroBatch) -> float:
    """Returns the largest relative change of the logits if every weight is replaced by one of its two adjacent fp32
    numbers, chosen at random. Changes the weights of `network`."""
    right = network(**batch.inputs, use_cache=False).logits
    torch.manual_seed(2)
    for p in network.parameters():
        p.data = torch.nextafter(p, torch.randn_like(p) * torch.inf)
    return apart(network(**batch.inputs, use_cache=False).logits, right)


def layers_with(network: torch.nn.Module) -> set[str]:
    """Returns the names of the layers that have LoRA's matrices."""
    return {name.rpartition(".lora_A")[0] for name, _ in network.named_parameters() if ".lora_A" in name}


def quantized(architecture: dict) -> str:
    """Tests that the loss and gradients of QLoRA are bit-identical to those of LoRA on a model with the dequantized
    weights."""
    found = []
    for plain in (False, True):
        module, ids = build_module(configured(architecture, "adapter=qlora", "adapter.r=4"))
        network = module.model
        if plain:
            for name, layer in [*network.named_modules()]:
                if isinstance(layer, NF4Linear | ComputedExperts):
                    network.set_submodule(name, layer.unpacked(torch.float32))
        torch.manual_seed(1)
        for _, p in trainable(network):
            torch.nn.init.normal_(p, std=0.05)
        value = module.loss(network, MicroBatch(ids[:, :-1], ids[:, 1:]))
        value.backward()
        found.append([value.detach(), *(p.grad for _, p in trainable(network) if p.grad is not None)])
    return "right" if all(map(torch.equal, *found)) else "wrong: another loss or gradient"


def planned(architecture: dict) -> str:
    cfg = configured(architecture, "gradient_checkpointing=every_layer", "loss=chunked")
    estimate = predict(cfg, Target(on_card=True)).estimate
    return "right" if estimate is None else f"estimate: {estimate}"


CELLS = {
    "starts as typed": starts,
    "all kinds": all_kinds,
    "full = chunked": chunked,
    "every_layer": checkpointed("every_layer"),
    "selective": checkpointed("selective"),
    "offload": checkpointed("offload"),
    "bf16-master": masters,
    "lora": adapted,
    "qlora": quantized,
    "plan": planned,
}


def family(model_type: str, names: Sequence[str] = tuple(CELLS)) -> dict[str, str]:
    """Returns a dict that maps the name of a cell to its answer: "right", or text that begins with another of
    KINDS_OF_ANSWERS. If the first cell is not "right", the other cells are not run.

    Args:
        names: names of the cells to run, in the order of CELLS.
    """
    if model_type in IMPOSSIBLE:
        return {"starts as typed": f"not built: {IMPOSSIBLE[model_type]}"}
    try:
        architecture = shrunk(model_type)
        cells = {}
        for name in names:
            cells[name] = _answer(CELLS[name], architecture)
            if name == "starts as typed" and cells[name] != "right":
                return cells
        return cells
    except Exception as error:
        return {"starts as typed": f"not built: {_last_line(error)}"}


def _answer(cell: Callable[[dict], str], architecture: dict) -> str:
    def stop(*_) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        return cell(architecture)
    except Refused as error:
        return f"refused: {error}"
    except Exception as error:
        kind = "not built" if cell is starts else "failed"
        return f"{kind}: {_last_line(error)}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1].strip()[:160]}"


KINDS_OF_ANSWERS = ("right", "estimate", "refused", "wrong", "failed", "not compared", "not built")

# --- the table -----------------------------------------------------------------------------------------------------


def table(rows: Mapping[str, Mapping[str, str]]) -> str:
    """Returns Markdown: a table, then the full text of each answer that is not "right". The table has a row of counts
    for each kind of answer, and a row for each family."""
    lines = ["| | " + " | ".join(CELLS) + " |", "|---" * (len(CELLS) + 1) + "|"]
    for kind in KINDS_OF_ANSWERS:
        counts = [Counter(_kind(row.get(cell)) for row in rows.values())[kind] for cell in CELLS]
        lines.append(f"| **{kind}** | " + " | ".join(map(str, counts)) + " |")
    lines += [f"| {name} | " + " | ".join(_kind(row.get(cell)) for cell in CELLS) + " |" for name, row in rows.items()]
    details = [
        f"- {name}, {cell}: {text}" for name, row in rows.items() for cell, text in row.items() if text != "right"
    ]
    return "\n".join([*lines, "", *details])


def _kind(text: str | None) -> str:
    return "-" if text is None else next(kind for kind in KINDS_OF_ANSWERS if text.startswith(kind))


def _prepare() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    quiet()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--save", action="store_true", help="replace these cells in the results")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS), help="cells other than the first")
    typed = parser.parse_args()
    names = [name for name in CELLS if name in typed.cells or CELLS[name] is starts]
    families = typed.families or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    with ProcessPoolExecutor(typed.workers, initializer=_prepare) as pool:
        results = {}
        for name, row in zip(families, pool.map(partial(family, names=names), families), strict=True):
            results[name] = row
            print(f"{name:<28}{' '.join(_kind(row.get(cell)) for cell in CELLS)}", flush=True)
    complete = not typed.families and len(names) == len(CELLS)
    if not complete and not typed.save:
        print(table(results))
        return
    if not complete:
        before = stored("architectures")["families"]
        results = before | {name: before.get(name, {}) | row for name, row in results.items()}
    write("architectures", {"families": results}, table(results))


if __name__ == "__main__":
    main()
