"""Converts an exported model folder to a GGUF file, for llama.cpp and programs based on llama.cpp.

The tensors are read from the folder's files, one at a time, and the GGUF file is added to the folder. Before the file
gets its final name, `llama_cpp.compare` checks that llama.cpp, reading the file, and transformers, reading the folder,
tokenize texts alike and compute log-probabilities that differ only by rounding. Without this check, rows in a wrong
order or a wrong tokenizer would produce plausible nonsense without an error. If llama.cpp is not installed, the check
is skipped, and the file name says "unverified".
"""

import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lowmem.model.generation import end_of_turn
from lowmem.saving import llama_cpp
from lowmem.system.atomic_files import atomic_write
from lowmem.system.errors import Refused

log = logging.getLogger(__name__)

NAME, UNVERIFIED = "model.gguf", "model.unverified.gguf"
CONVERTER = "convert_hf_to_gguf.py of llama.cpp"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # safetensors and GGUF use these names
# parts of pre-tokenizers, as in tokenizer.json; `_pre` compares them with the tokenizer of a model
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Family(NamedTuple):
    """How llama.cpp stores an architecture.

    Args:
        name: llama.cpp's name for the architecture.
        of_config: converts the model's configuration to a mapping from names of GGUFWriter's methods to their
            arguments.
        fixed: key of the configuration that a GGUF file does not store -> the values that llama.cpp supports.
        transposed: suffixes of the names of weights that transformers stores as (inputs, outputs), and llama.cpp as
            (outputs, inputs).
        pairs: True: llama.cpp's rotary embeddings of this architecture rotate pairs of adjacent elements, while
            transformers rotates pairs of elements that are half a head apart. So the rows of query and key projections
            are reordered.
    """

    name: str
    of_config: Callable[[PreTrainedConfig], Mapping[str, Any]]
    fixed: Mapping[str, tuple]
    transposed: tuple[str, ...] = ()
    pairs: bool = False


def _of_llama(config: PreTrainedConfig) -> dict[str, Any]:
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    return {
        "add_context_length": config.max_position_embeddings,
        "add_embedding_length": config.hidden_size,
        "add_block_count": config.num_hidden_layers,
        "add_feed_forward_length": config.intermediate_size,
        "add_head_count": heads,
        "add_head_count_kv": config.num_key_value_heads,
        "add_key_length": head,
        "add_value_length": head,
        "add_rope_dimension_count": head,
        "add_rope_freq_base": config.rope_parameters["rope_theta"],
        "add_layer_norm_rms_eps": config.rms_norm_eps,
    }


def _of_gpt2(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        "add_context_length": config.n_positions,
        "add_embedding_length": config.n_embd,
        "add_block_count": config.n_layer,
        "add_feed_forward_length": config.n_inner or 4 * config.n_embd,
        "add_head_count": config.n_head,
        "add_layer_norm_eps": config.layer_norm_epsilon,
    }


_SILU = {"hidden_act": ("silu", "swish")}
_GELU = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
}
FAMILIES = {  # transformers' model_type -> how llama.cpp stores the model
    "llama": Family("llama", _of_llama, _SILU, pairs=True),
    "qwen2": Family("qwen2", _of_llama, _SILU),
    "qwen3": Family("qwen3", _of_llama, _SILU | {"attention_bias": (False,)}),
    "gpt2": Family("gpt2", _of_gpt2, _GELU, transposed=("c_attn.weight", "c_proj.weight", "c_fc.weight")),
}


def check(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Checks, before training, that this module can convert a model. Raises Refused if the model or its tokenizer is
    not supported."""
    why, family = None, FAMILIES.get(config.model_type)
    if family is None:
        why = f"of {config.model_type} models; {', '.join(FAMILIES)} are supported"
    elif other := [key for key, values in family.fixed.items() if getattr(config, key) not in values]:
        why = f"with {other[0]}={getattr(config, other[0])}"
    elif _rope(config) not in ("default", "linear", *(["llama3"] if family.pairs else [])):
        why = f"with rope_type={_rope(config)}"
    elif (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0) != 1.0:
        why = "with partial rotary embeddings"
    elif "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        why = "with sliding windows"
    elif (rust := getattr(tokenizer, "backend_tokenizer", None)) is None or _pre(json.loads(rust.to_str())) is None:
        why = "with this tokenizer"
    if why:
        raise Refused(
            f"export_format=gguf: lowmem writes no GGUF {why}. Leave it out, and convert model/ with {CONVERTER}."
        )


def write(folder: Path) -> Path:
    """Converts the exported model in a folder to a GGUF file in the same folder, and returns the file's path. First
    deletes GGUF files of an earlier call.

    Args:
        folder: a model in Hugging Face's format that passed `check`.

    Raises:
        Refused: llama.cpp does not support a tensor, cannot open the file, tokenizes a text differently from
            transformers, or computes log-probabilities that differ from those of transformers by more than rounding
            explains.
        OSError: the file cannot be written.
    """
    for old in (folder / NAME, folder / UNVERIFIED):
        old.unlink(missing_ok=True)
    verifies = llama_cpp.is_installed()
    file = folder / (NAME if verifies else UNVERIFIED)
    with atomic_write(file) as draft:
        _write(folder, draft)
        if verifies:
            llama_cpp.compare(draft, folder)
    if verifies:
        log.info(f"{file}: llama.cpp computes the same log-probabilities as transformers.")
    else:
        log.info(f"{file}: not compared with llama.cpp. Type pip install xllamacpp, and export again.")
    return file


def _write(folder: Path, file: Path) -> None:
    import gguf

    config = AutoConfig.from_pretrained(folder)
    family = FAMILIES[config.model_type]
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family.name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(file, family.name)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(folder.resolve().parent.name)
    for method, value in family.of_config(config).items():
        getattr(writer, method)(value)
    if _rope(config) == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
    _add_tokenizer(writer, folder, config.vocab_size)
    tensors = [*_tensors(folder, config, family)]
    for tensor in tensors:
        name = names.get_name(tensor.name, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise Refused(f"llama.cpp has no place for {tensor.name}.")
        kind = next(gguf.GGMLQuantizationType[kind] for kind, dtype in DTYPES.items() if dtype == tensor.dtype)
        writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), tensor.bytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(tensor.read().to(tensor.dtype).contiguous().view(torch.uint8).numpy())
    writer.close()


# --- tensors ---------------------------------------------------------------------------------------------------------


class GgufTensor(NamedTuple):
    """A tensor of the GGUF file.

    Args:
        name: the tensor's name in transformers.
        shape: the tensor's shape as GGUFWriter takes it, in torch's order of dimensions. The file stores the reverse.
        dtype: the tensor's dtype in the file.
        read: returns the tensor's values, in any dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _tensors(folder: Path, config: PreTrainedConfig, family: Family) -> Iterator[GgufTensor]:
    """Yields the tensors of the GGUF file: the tensors of the folder and, for rope_type=llama3, the factors of the
    rotary frequencies. Vectors are in fp32, as llama.cpp requires; other tensors have the same dtype as in the
    folder."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                values = tensors.get_slice(name)
                shape, dtype, change = values.get_shape(), DTYPES[values.get_dtype()], None
                if name.endswith(family.transposed):
                    shape, change = shape[::-1], Tensor.t
                elif family.pairs and (kind := re.search(r"\.([qk])_proj\.", name)):
                    heads = config.num_attention_heads if kind[1] == "q" else config.num_key_value_heads
                    change = partial(_in_pairs, heads=heads)
                dtype = torch.float32 if len(shape) == 1 else dtype
                yield GgufTensor(name, tuple(shape), dtype, partial(_read, file, name, change))
    if _rope(config) == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config)  # (head_dim / 2,)
        plain = config.rope_parameters["rope_theta"] ** (-torch.arange(len(scaled)) / len(scaled))
        yield GgufTensor("rope_freqs.weight", tuple(scaled.shape), torch.float32, lambda: plain / scaled)


def _read(file: Path, name: str, change: Callable[[Tensor], Tensor] | None) -> Tensor:
    with safe_open(file, "pt") as tensors:
        tensor = tensors.get_tensor(name)
        return change(tensor) if change else tensor


def _in_pairs(tensor: Tensor, heads: int) -> Tensor:
    """Reorders the rows of a query or key projection for llama.cpp, where the two rows of a rotated pair are adjacent.
    In transformers the two rows are half a head apart."""
    halves = tensor.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).reshape(tensor.shape)


def _rope(config: PreTrainedConfig) -> str:
    return (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")


# --- the tokenizer ---------------------------------------------------------------------------------------------------


def _pre(tokenizer: Mapping[str, Any]) -> str | None:
    """Returns llama.cpp's name for a tokenizer's pre-tokenization, which splits a text into words. Returns None if this
    module does not support the tokenizer.

    Args:
        tokenizer: the content of tokenizer.json.
    """
    if tokenizer["model"]["type"] != "BPE" or tokenizer["model"].get("byte_fallback"):
        return None
    if (tokenizer.get("normalizer") or {"type": "NFC"})["type"] != "NFC":
        return None
    cuts = tokenizer["pre_tokenizer"] or {}
    steps = [
        {key: value for key, value in step.items() if key != "trim_offsets"}
        for step in cuts.get("pretokenizers", [cuts])
    ]
    words, digits = _BYTES | {"use_regex": True}, {"type": "Digits", "individual_digits": True}
    known = {"gpt-2": [words], "smollm": [digits, words]}
    for name, number in {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}.items():
        split = {"type": "Split", "pattern": {"Regex": _WORDS % number}, "behavior": "Isolated", "invert": False}
        known[name] = [split, _BYTES]
    return next((name for name, wanted in known.items() if steps == wanted), None)


def _add_tokenizer(writer: object, folder: Path, vocab_size: int) -> None:
    """Adds the tokenizer to a `GGUFWriter`. An embedding row without a token gets the name [PAD<id>]."""
    import gguf

    tokenizer = AutoTokenizer.from_pretrained(folder)
    added = tokenizer.added_tokens_decoder
    by_id = {number: token for token, number in tokenizer.get_vocab().items()}
    kinds = [gguf.TokenType.NORMAL if number in by_id else gguf.TokenType.UNUSED for number in range(vocab_size)]
    for number, token in added.items():
        kinds[number] = gguf.TokenType.CONTROL if token.special else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre(json.loads(tokenizer.backend_tokenizer.to_str())))
    writer.add_token_list([by_id.get(number, f"[PAD{number}]") for number in range(vocab_size)])
    writer.add_token_types(kinds)
    # gguf warns if config.json has default ids of special tokens that are outside of the vocabulary
    logging.getLogger("gguf").setLevel(logging.ERROR)
    special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=vocab_size)
    # say whether texts begin with a bos token; otherwise llama.cpp uses the default of the tokenizer's type
    special.add_special_token["bos"] = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    special.add_to_gguf(writer, quiet=True)
    ends = GenerationConfig.from_pretrained(folder).eos_token_id
    if others := {*(ends if isinstance(ends, list) else [ends])} - {tokenizer.eos_token_id, None}:
        turn = end_of_turn(tokenizer)
        writer.add_eot_token_id(turn if turn in others else min(others))
