"""Rewrites config.json and tokenizer_config.json of an exported folder so that older programs can read them, too.

transformers 4, and servers and converters written for it, do not know some keys that transformers 5 writes. Such
programs fail, or silently use a default. So config.json gets the old keys in addition to the new keys, and in
tokenizer_config.json old keys replace new keys. transformers 5 reads old and new keys.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import get_tokenizer_config

CONFIG, TOKENIZER = "config.json", "tokenizer_config.json"
PLAIN = "PreTrainedTokenizerFast"  # class that reads tokenizer.json unchanged, in transformers 4 and 5
# names of tokenizer classes that transformers 4 does not have
_NEW = {"TokenizersBackend", "PythonBackend", "SentencePieceBackend", "MistralCommonBackend"}
_ALSO = {  # model_type -> older key -> newer key
    "gpt2": {"n_ctx": "n_positions"},
    "qwen3_moe": {"num_experts": "num_local_experts"},
}
_PLAIN_ROTARY = {"rope_theta": ("rope_theta",), "partial_rotary_factor": ("partial_rotary_factor",)}
_OF_NEOX = {"rotary_emb_base": ("rope_theta",), "rotary_pct": ("partial_rotary_factor",)}
_OF_GEMMA = {"rope_theta": ("rope_theta",), "rope_local_base_freq": ("sliding_attention", "rope_theta")}
_ROTARY = {  # model_type -> older key -> path of keys in rope_parameters; other models use _PLAIN_ROTARY
    "gpt_neox": _OF_NEOX,
    "gpt_neox_japanese": _OF_NEOX,
    "gemma3_text": _OF_GEMMA,
    "gemma3n_text": _OF_GEMMA,
    "modernbert-decoder": {
        "global_rope_theta": ("full_attention", "rope_theta"),
        "local_rope_theta": ("sliding_attention", "rope_theta"),
    },
    "olmo3": _PLAIN_ROTARY,
}
# keys with the number of layers for multi-token prediction
_PREDICTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
_ON_TOKENIZERS = ("is_local", "local_files_only")  # keys that describe how this machine found the tokenizer


def rewrite_config(folder: Path, tied: bool | None) -> None:
    """Rewrites config.json as `old_config` does, and sets `tie_word_embeddings` to `tied`, which says whether embedding
    and output layer share their weight. If `tied` is None, because the model has no output layer, `tie_word_embeddings`
    stays unchanged."""

    def rewritten(config: dict) -> dict:
        return old_config(config if tied is None else _with_tie(config, tied))

    _rewrite(folder / CONFIG, rewritten)


def old_config(config: dict) -> dict:
    """Returns the configuration with the older keys added, also in nested configurations. The number of layers for
    multi-token prediction is set to 0, because the classes of causal models do not load the weights of these layers."""
    config = {key: old_config(value) if _is_config(value) else value for key, value in config.items()}
    config |= {old: config[new] for old, new in _ALSO.get(config.get("model_type"), {}).items() if new in config}
    config |= {"torch_dtype": config["dtype"]} if "dtype" in config else {}
    config |= {key: 0 for key in _PREDICTS if config.get(key)}
    return config | _rotary(config)


def _is_config(value: object) -> bool:
    return isinstance(value, dict) and "model_type" in value


def _with_tie(config: dict, tied: bool) -> dict:
    """Returns the configuration with `tie_word_embeddings` set to `tied`, also in a nested text configuration."""
    inner = {key: _with_tie(value, tied) for key, value in config.items() if _is_config(value) and key == "text_config"}
    return config | inner | {"tie_word_embeddings": tied}


def _rotary(config: dict) -> dict:
    """Returns the older keys of rotary position embeddings."""
    rope, names = config.get("rope_parameters"), _ROTARY.get(config.get("model_type"))
    if not rope or (names is None and any(isinstance(value, dict) for value in rope.values())):
        # no rotary embeddings, or an entry per layer type in an architecture that transformers 4 does not have
        return {}
    main, keys = rope.get("full_attention", rope), {}
    for name, (*kinds, key) in (names or _PLAIN_ROTARY).items():
        place = rope[kinds[0]] if kinds else main
        keys |= {name: place[key]} if key in place else {}
    return keys | {"rope_scaling": _scaling(main, config)}


def _scaling(rope: dict, config: dict) -> dict | None:
    """Returns the value of the older key `rope_scaling`, or None if positions are not scaled."""
    rest = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor", "type")}
    kind = rest.pop("rope_type", "default")
    if kind == "default" and not rest:
        return None
    if config.get("model_type") == "phi3":  # transformers 4 accepts only these keys
        return {"type": kind} | {key: rest[key] for key in ("short_factor", "long_factor") if key in rest}
    return {"rope_type": kind, "type": kind} | rest


def rewrite_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Rewrites tokenizer_config.json; a no-op for a slow tokenizer. The class that the tokenizer's original folder
    names is kept if it opens `folder` as an identical tokenizer; otherwise the class becomes `PLAIN`."""
    if not tokenizer.is_fast:  # the class of a slow tokenizer does not read tokenizer.json
        return
    came_with = _class_of(tokenizer)
    _rewrite(folder / TOKENIZER, lambda config: old_tokenizer(config, tokenizer, came_with))
    if came_with != PLAIN and not _opens_as(folder, tokenizer):
        _rewrite(folder / TOKENIZER, lambda config: old_tokenizer(config, tokenizer, PLAIN))


def _class_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the name of the tokenizer's class in the configuration of its original folder. Returns `PLAIN` if the
    folder or the class is missing, or if transformers 4 does not have the class."""
    said, place = None, tokenizer.name_or_path  # "" if this run has trained the tokenizer
    with suppress(OSError):  # the original folder may have been deleted
        said = get_tokenizer_config(place, local_files_only=True).get("tokenizer_class") if place else None
    return PLAIN if said is None or said in _NEW else said


def old_tokenizer(config: dict, tokenizer: PreTrainedTokenizerBase, name: str) -> dict:
    """Returns the content of tokenizer_config.json with old keys. `config` is the content with new keys, and `name` is
    the tokenizer's class."""
    config = {key: value for key, value in config.items() if key not in _ON_TOKENIZERS} | {"tokenizer_class": name}
    if isinstance(config.get("extra_special_tokens"), list):  # transformers 4 expects a dict of names
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    if name != PLAIN:  # some classes of transformers 4 read these keys instead of tokenizer.json
        ids = tokenizer("a").input_ids
        config |= {"add_bos_token": ids[:1] == [tokenizer.bos_token_id]}
        config |= {"add_eos_token": ids[-1:] == [tokenizer.eos_token_id]}
    return config


def _opens_as(folder: Path, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns True if transformers opens the folder as a tokenizer that is identical to `tokenizer`."""
    opened = AutoTokenizer.from_pretrained(folder)
    return opened.is_fast and opened.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def _rewrite(file: Path, change: Callable[[dict], dict]) -> None:
    said = json.loads(file.read_text(encoding="utf-8"), object_hook=_number)
    text = json.dumps(change(said), indent=2, sort_keys=True, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")


def _number(value: dict) -> dict | float:
    """Converts {"__float__": "Infinity"}, as transformers 5 writes inf and nan, to a float. Returns other objects
    unchanged."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value
