"""Loads a Hugging Face causal language model: with published weights, or with random weights for an architecture.

Published weights are memory-mapped from safetensors files. A tensor that already has the requested dtype stays in
mapped pages of its file, unless it is joined with other tensors or quantized, or gets additional rows. transformers
converts the remaining tensors individually, in at most four threads, so host memory need not hold two copies of the
model. Random weights are drawn in fp32 and rounded to the requested dtype, one tensor at a time. So, up to rounding, a
seed gives the same initial weights in every dtype.
"""

import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
from huggingface_hub import get_safetensors_metadata, snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    initialization,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

from lowmem.config import schema
from lowmem.config.check import ADAPTER_CONFIG, POSITIONS, check_hub_id, check_positions, holds_adapter
from lowmem.config.settle import Run
from lowmem.config.typed_lines import in_shell
from lowmem.model import published_files, vocabulary
from lowmem.model.checks import FAILURES
from lowmem.model.published_files import Compared
from lowmem.system.errors import Refused, first_line, last_line, refuse_gated

log = logging.getLogger(__name__)

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}  # safetensors' name -> dtype


class Described(NamedTuple):
    """The settings, configuration and tokenizer of a model. Weights are not part of this description."""

    spec: schema.Model  # the settings `model.*`
    config: PretrainedConfig  # the configuration; its vocab_size does not count added tokens
    tokenizer: PreTrainedTokenizerBase | None = None  # None: will be trained on the data, or is not needed
    # tokens that were added to the tokenizer; None: the run needs no additional tokens, or will train a tokenizer that
    # has them
    added: vocabulary.Added | None = None

    @property
    def grown(self) -> PretrainedConfig:
        """Returns the configuration with a vocab_size that has room for the added tokens."""
        return self.config if self.added is None else vocabulary.grown(self.config, self.added.rows)

    @property
    def at_random(self) -> "Described":
        """Returns the description of a model with this architecture and random weights."""
        return self._replace(spec=self.spec.model_copy(update={"pretrained": False}))


def describe(run: Run, plans: bool = False) -> Described:
    """Reads the configuration and the tokenizer of a run's model without loading weights, and adds to the tokenizer the
    tokens that the run needs.

    Args:
        run: the settings.
        plans: True: the caller will not load weights with this description. In this case, the configuration of a hub id
            is read only if `model.architecture` has no model_type, and the tokenizer is read only if the run needs
            additional tokens.

    Raises:
        Refused: see `architecture` and `tokenizer`.
    """
    spec, wanted = run.model, vocabulary.wanted(run)
    says_all = "model_type" in (spec.architecture or {})
    elsewhere = plans and says_all and not _is_folder(spec.name)
    config = architecture(spec.model_copy(update={"pretrained": False}) if elsewhere else spec)
    tokens = tokenizer_of(run) if wanted or not plans else None
    grows = wanted and tokens is not None  # a tokenizer that is trained on the data later will include these tokens
    return Described(spec, config, tokens, vocabulary.add(tokens, wanted, vocab_size(config)) if grows else None)


def architecture(spec: schema.Model) -> PretrainedConfig:
    """Returns the model's configuration. With published weights, the keys of `model.architecture`, except dtype,
    override published keys.

    Raises:
        Refused: the folder contains an adapter; the configuration cannot be read; the weight files of a folder are
            missing or damaged; the weights are quantized, or have layers that the configuration does not have (files of
            a hub id are checked only if they are on this machine); `model.architecture` lacks model_type, has a key
            that the architecture does not have, or has a value with which the architecture does not work; or the model
            is not a causal language model.
    """
    _refuse_adapter(spec.name)
    name, pretrained, config = spec.name, spec.pretrained, _configuration(spec)
    # with random weights, the decoder of an encoder-decoder model can be built
    halves = pretrained and getattr(config, "is_encoder_decoder", False)
    own_code = getattr(config, "auto_map", None) or {}  # modeling code in the model's repository
    if halves or not (type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in own_code):
        kind = "an encoder-decoder" if getattr(config, "is_encoder_decoder", False) else "not a causal language model"
        raise Refused(
            f"model.name={name}: {config.model_type} is {kind}, and lowmem trains only causal (decoder-only) language "
            "models. Type model=gpt2, or model.name=<a causal model>."
        )
    if pretrained:
        _refuse_quantized(spec, config)
        _check_weights_files(name)
        _agree_with_files(spec, config)
    elif hasattr(config, "quantization_config"):  # describes only the published weights, which are not loaded
        del config.quantization_config
    return config


def _refuse_adapter(name: str) -> None:
    """Raises Refused if the folder of a model contains an adapter, which transformers would load together with the
    model. Args: name: `model.name`."""
    if not _is_folder(name) or not holds_adapter(folder := Path(name).expanduser()):
        return
    alone = f", or delete {ADAPTER_CONFIG} to load the model alone" if (folder / "config.json").is_file() else ""
    raise Refused(
        f"model.name={name}: this folder contains an adapter. Type model.name=<its base model> adapter=lora "
        f"adapter.path={name}{alone}."
    )


def _refuse_quantized(spec: schema.Model, config: PretrainedConfig, dtype: str | None = None) -> None:
    """Raises Refused if the configuration says that the weights are quantized, or if `dtype` is not None.

    Args:
        spec: the settings `model.*`.
        config: the model's configuration.
        dtype: a quantized dtype that was found in the headers of the files; None: check only the configuration.
    """
    parts = (part.to_dict() for part in (config, config.get_text_config(decoder=True)))
    says = next((part["quantization_config"] for part in parts if part.get("quantization_config")), None)
    if not says and dtype is None:
        return
    how = published_files.named(says) if says else dtype
    raise Refused(
        f"model.name={spec.name}: its weights are quantized ({how}), and lowmem cannot train quantized weights or an "
        "adapter on them. Use the original 16-bit model, with adapter=qlora to save memory."
    )


def _agree_with_files(spec: schema.Model, config: PretrainedConfig) -> Compared | None:
    """Compares the weight files on this machine with the model class. If the configuration ties the output layer to the
    embedding, but the files contain different values for them, sets tie_word_embeddings to False in `config`.

    Returns:
        The differences, or None if the files are not on this machine or cannot be compared.

    Raises:
        Refused: the files contain quantized weights, or layers that the configuration does not have.
    """
    folder = _folder_here(spec.name)
    if folder is None:
        return None
    if kind := published_files.quantized_as(published_files.headers(folder)):
        _refuse_quantized(spec, config, kind)
    found = published_files.compare(folder, config)
    if found and found.beyond:
        depth = config.get_text_config(decoder=True).num_hidden_layers
        raise Refused(
            f"model.name={spec.name}: its files hold {found.beyond}, but config.json says {depth} layers, so it "
            "probably belongs to other weights. Use the config.json of these weights, or type "
            f"model.architecture={{num_hidden_layers:{found.layers}}}."
        )
    if found and found.own_head:
        _untie(config)
    return found


def _untie(config: PretrainedConfig) -> None:
    config.tie_word_embeddings = config.get_text_config(decoder=True).tie_word_embeddings = False


def _tell_differences(spec: schema.Model, found: Compared | None) -> None:
    """Logs the number of tensors in the files that the model class does not use, and the name of the first such tensor.
    Logs another message if the configuration ties the output layer to the embedding although the files contain
    different values for them."""
    if found and found.unused:
        first, *more = found.unused
        which = f"{1 + len(more)} tensors in its files are" if more else "a tensor in its files is"
        log.info(
            f"model.name={spec.name}: {which} not used ({'for example ' if more else ''}{first}): the model class has "
            f"no such parameter. The exported model/ will not contain {'them' if more else 'it'}."
        )
    if found and found.own_head:
        log.info(
            f"model.name={spec.name}: config.json ties the output layer to the embedding, but the files hold two "
            "different matrices. Both are trained, and the exported config.json will say tie_word_embeddings=false."
        )


def _configuration(spec: schema.Model) -> PretrainedConfig:
    architecture = deepcopy(spec.architecture)  # because the constructor of a configuration may change its arguments
    changes = {key: value for key, value in (architecture or {}).items() if key != "model_type"}
    if spec.pretrained or architecture is None:
        config = _published(spec.name, spec.pretrained, spec.trust_remote_code)
        _refuse_unknown(config, changes)
        config.update({key: value for key, value in changes.items() if key != "dtype"})  # keep the dtype of config.json
    else:
        if not isinstance(architecture.get("model_type"), str):
            raise Refused(
                "model.architecture: model_type is missing. Type, for example, model.architecture.model_type=llama."
            )
        _refuse_unknown(_of_type(architecture["model_type"]), changes)
        config = _of_type(architecture["model_type"], **changes)
    _refuse_impossible(config, changes)
    return config


def _refuse_impossible(config: PretrainedConfig, typed: Mapping[str, object]) -> None:
    """Raises Refused for two kinds of values that transformers accepts in a configuration, but with which the model
    fails: a num_key_value_heads in `model.architecture` that does not divide the number of heads, and a dropout
    probability that is not between 0 and 1. Args: typed: keys and values of `model.architecture`."""
    values = config.get_text_config(decoder=True).to_dict()
    heads, groups = values.get("num_attention_heads"), typed.get("num_key_value_heads")
    # not checked for multi-head latent attention (config keys such as kv_lora_rank) and JetMoe (kv_channels), which do
    # not group query heads by num_key_value_heads
    shares = not any("lora_rank" in key or key == "kv_channels" for key in values)
    if shares and isinstance(heads, int) and isinstance(groups, int) and groups > 0 and heads % groups:
        raise Refused(
            f"model.architecture.num_key_value_heads={groups}: num_attention_heads={heads} is not divisible by it, but "
            "equally many heads must share each key and value."
        )
    for key, value in values.items():
        if "drop" in key and isinstance(value, int | float) and not 0 <= value <= 1:
            raise Refused(f"model.architecture.{key}={value}: give a number from 0 to 1.")


def vocab_size(config: PretrainedConfig) -> int:
    """Returns vocab_size, the number of rows of the embedding. Multimodal models have this key in a nested
    configuration."""
    return config.get_text_config(decoder=True).vocab_size


def tokenizer_of(run: Run) -> PreTrainedTokenizerBase | None:
    """Returns the tokenizer that `tokenizer=` names, or the tokenizer of `model.name` if this key is not set. Returns
    None if the key is not set and the model has only an architecture. In this case, a tokenizer will be trained on the
    data."""
    spec = run.model
    if run.tokenizer is not None:
        return tokenizer(run.tokenizer, spec.trust_remote_code, key="tokenizer")
    published = spec.pretrained or spec.architecture is None
    return tokenizer(spec.name, spec.trust_remote_code) if published else None


def _of_type(model_type: str, **keys: object) -> PretrainedConfig:
    if model_type not in CONFIG_MAPPING:
        raise Refused(f"model.architecture.model_type={model_type}: transformers has no such architecture.")
    try:
        return AutoConfig.for_model(model_type, **keys)
    except Exception as error:  # a value has a wrong type, or two values contradict each other
        raise Refused(f"model.architecture: {model_type} does not accept these values. {last_line(error)}") from None


def _is_read(config: PretrainedConfig, key: str) -> bool:
    """Returns True if the source file of the model class reads a key from the config. Some model classes read keys that
    the class of the config does not declare, such as head_dim in qwen3_moe."""
    network = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if network is None:
        return False
    code = inspect.getsource(sys.modules[network.__module__])
    return re.search(rf"""config, ["']{re.escape(key)}["']|config\.{re.escape(key)}\b""", code) is not None


def _refuse_unknown(config: PretrainedConfig, keys: Mapping) -> None:
    """Raises Refused for keys that the architecture does not have, such as misspelled keys, because transformers would
    silently store them."""
    known = config.to_dict()
    unknown = [key for key in keys if key not in known and not hasattr(config, key)]
    unknown = [key for key in unknown if not _is_read(config, key)]
    if unknown:
        raise Refused(
            f"model.architecture: {config.model_type} models have no {', '.join(unknown)}. "
            f"They have: {', '.join(sorted(key for key in known if not key.startswith('_')))}."
        )


def _published(name: str, pretrained: bool, trust_remote_code: bool) -> PretrainedConfig:
    place = _place(name)
    if Path(place).is_dir() and pretrained and not any(Path(place).glob("*.safetensors")):
        raise Refused(
            f"model.name={name}: this folder contains no *.safetensors files. "
            "Give a folder that does, or type model.pretrained=false for random initial weights."
        )
    try:
        return AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        refuse_gated(error, "model.name", name, name)
        raise Refused(
            f"model.name={name}: its configuration cannot be read ({first_line(error)}) Give a local folder or a "
            "hub id that this machine can reach, or train a model of conf/model from scratch: model.pretrained=false."
        ) from None


def _check_weights_files(name: str) -> None:
    """Opens every weight file of a local folder, so that safetensors compares the header with the length of the file.
    Tensors are not read. No-op for a hub id.

    Raises:
        Refused: a file is truncated or damaged.
    """
    folder = Path(_place(name))
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError as error:
            is_of_a_run = (folder.parent / "checkpoints").is_dir()
            again = f"Export it again: {in_shell('export', folder.parent)}" if is_of_a_run else "Copy the file again"
            raise Refused(
                f"model.name={name}: {file.name} has {file.stat().st_size:,} bytes, which does not match its header: "
                f"the file is truncated or damaged ({first_line(error)}). {again}."
            ) from None


def _place(name: str, key: str = "model.name") -> str:
    """Returns a hub id unchanged, or a folder with `~` expanded.

    Raises:
        Refused: the name is a file, a folder that cannot be read, or a path that does not exist and cannot be a hub id.
    """
    folder = Path(os.path.expanduser(name))
    try:
        if folder.is_dir():
            os.listdir(folder)
            return str(folder)
    except OSError as error:
        raise Refused(
            f"{key}={name}: {(error.strerror or str(error)).lower()}. Give a folder that you can read."
        ) from None
    if folder.exists():
        raise Refused(f"{key}={name}: this is a file. Give the folder that it is in: {key}={folder.parent}.")
    check_hub_id(key, name)
    return name


def read_in(run: Run, described: Described, in_16_bits: bool = False, plans: bool = False) -> torch.dtype:
    """Returns the dtype in which `causal_lm` (`training/build.py`) loads a run's weights, unless `stored_narrower` or a
    saved adapter (`adapter.path`) determines another dtype.

    This is `run.loaded_in`, with one exception. With weights.drive=, host memory may not have room for fp32 copies, so
    weights that are published in the dtype of matmul inputs are loaded in this dtype. With `in_16_bits`, this holds for
    all weights. The exception does not apply to a model to which tokens are added.

    Args:
        run: the settings.
        described: the model.
        in_16_bits: True: a checkpoint will replace the weights.
        plans: True: the caller will not load the weights, so no request is sent to the hub.
    """
    wide, products = getattr(torch, run.loaded_in), getattr(torch, run.multiplies_in, None)
    if run.drive_folder is None or described.added is not None:
        return wide
    return products if in_16_bits or stored_in(described, plans) == products else wide


def stored_in(described: Described, plans: bool) -> torch.dtype | None:
    """Returns the dtype of a model's published weights if all of them are bf16, or all of them are fp16. Otherwise
    returns None. Also returns None for random weights, for a model to which tokens are added, and if the files cannot
    be inspected. Weights that are loaded in the returned dtype stay in mapped pages of their files, except joined
    tensors (see `joins_tensors`). The operating system can evict these pages if memory is short.

    The dtype is read from the headers of the files, on this machine or on the hub. If the files have not been
    downloaded and `plans` is True, the dtype of the configuration is returned instead, which may be fp32 or None.
    """
    spec = described.spec
    if not spec.pretrained or described.added is not None:
        return None
    kinds = _dtypes_here(spec.name) or (_dtypes_on_hub(spec.name) if not plans else {described.config.dtype})
    return next(iter(kinds)) if len(kinds) == 1 else None


def stored_narrower(run: Run, described: Described, dtype: torch.dtype, plans: bool = False) -> torch.dtype | None:
    """Returns the dtype of a model's published weights (`stored_in`) if it has fewer bytes per element than `dtype`,
    otherwise None. With a strategy that `widens`, rank 0 can leave such weights in mapped pages of their files until it
    sends them to the other ranks. With an adapter that freezes the base weights the result is None, because the
    adapter's initial values are drawn in the dtype of the base weights."""
    stored = None if run.adapter_class.freezes_base else stored_in(described, plans)
    return stored if stored is not None and stored.itemsize < dtype.itemsize else None


def _is_folder(name: str) -> bool:
    return os.path.isdir(os.path.expanduser(name))


def _folder_here(name: str) -> Path | None:
    """Returns a model's folder, or the cached folder of a hub id. Returns None if the model has not been downloaded."""
    place = _place(name)
    if not Path(place).is_dir():
        try:
            place = snapshot_download(place, local_files_only=True)
        except OSError:
            return None
    return Path(place)


def _dtypes_here(name: str) -> set[torch.dtype | None]:
    """Returns the dtypes of the weights in a folder or in the cache of a hub id. The set is empty if no weights are on
    this machine. None in the set stands for every dtype other than bf16 and fp16."""
    kinds, folder = set(), _folder_here(name)
    for file in folder.glob("*.safetensors") if folder else ():
        with safe_open(file, "pt") as weights:
            kinds |= {_DTYPES.get(weights.get_slice(key).get_dtype()) for key in weights.keys()}  # noqa: SIM118
    return kinds


def _dtypes_on_hub(name: str) -> set[torch.dtype | None]:
    """Returns the dtypes of the weights of a hub id, like `_dtypes_here`, or an empty set after an error. Downloads
    only the headers of the files, some kilobytes each."""
    try:
        return {_DTYPES.get(kind) for kind in get_safetensors_metadata(name).parameter_count}
    except Exception:  # loading the weights will raise the error again, and report it
        return set()


def load(
    described: Described, weights_dtype: torch.dtype, quantization: QuantizationConfigMixin | None = None
) -> PreTrainedModel:
    """Returns the model in training mode, with every parameter in `weights_dtype`. The parameters are in host memory,
    or on the meta device in a rank that does not load weights (`Divided.building`).

    Args:
        described: the model.
        weights_dtype: dtype of the parameters.
        quantization: quantizes published weights while they are loaded; None: no weight is quantized.

    Raises:
        Refused: the weights cannot be loaded, or a tensor is missing or has a wrong shape; weights that had to be
            downloaded are quantized, or have layers that the configuration does not have; the architecture cannot be
            built; or the model, or this machine, does not support the attention implementation.
    """
    spec = described.spec
    how = {"dtype": weights_dtype, "trust_remote_code": spec.trust_remote_code}

    def load_with(attention: str) -> PreTrainedModel:
        if spec.pretrained:
            published = {"attn_implementation": attention, "quantization_config": quantization}
            return _load(spec, described.config, how | published)
        with drawn_in_fp32():
            try:
                return AutoModelForCausalLM.from_config(described.grown, attn_implementation=attention, **how)
            except FAILURES as error:
                raise Refused(
                    f"model.architecture: {described.grown.model_type} cannot be built with these values. "
                    f"{type(error).__name__}: {last_line(error)}"
                ) from error

    model = _with_attention(spec.attention, load_with)
    if described.added and spec.pretrained:
        vocabulary.grow(model, described.added)
    others = {name: p for name, p in model.named_parameters() if p.dtype != weights_dtype}
    for p in others.values():  # weights that transformers keeps in fp32, such as routers
        p.data = p.data.to(weights_dtype)
    if others:
        dtype = str(weights_dtype).removeprefix("torch.")
        log.info(
            f"model.name={spec.name}: transformers keeps {len(others)} weights in fp32, such as {next(iter(others))}. "
            f"Here they are {dtype} like all weights."
        )
    # from_pretrained returns models in eval mode, where dropout and gradient checkpointing are silently off.
    return model.train()


def _with_attention(attention: str, build_with: Callable[[str], PreTrainedModel]) -> PreTrainedModel:
    """Builds a model with an attention implementation. If `sdpa` was requested and the model does not support it,
    builds the model with `eager` instead.

    Raises:
        Refused: an implementation other than `sdpa` was requested, and the model or this machine does not support it;
        or the model cannot be built with `eager` either.
    """
    drawn = torch.get_rng_state()
    try:
        return build_with(attention)
    except (ImportError, ValueError) as error:
        reason = first_line(error)
    torch.set_rng_state(drawn)  # so that the second attempt draws the same random numbers as the first
    try:
        model = build_with("eager")
    except (ImportError, ValueError) as error:
        raise Refused(f"The model cannot be built: {first_line(error)}") from None
    if attention != "sdpa":
        raise Refused(f"model.attention={attention}: {reason} Type model.attention=sdpa.")
    log.info(
        f"model.attention=sdpa: {type(model).__name__} does not support it. Using eager, which keeps attention scores "
        "in memory."
    )
    return model


@contextmanager
def drawn_in_fp32() -> Iterator[None]:
    """Context manager in which the initial values of 16-bit parameters are drawn in fp32 and rounded, one tensor at a
    time. If they were drawn in 16 bits, most distributions would give values that differ from the fp32 values of the
    same seed by more than rounding."""

    def widened(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def drawn(tensor: Tensor, *args, **kwargs) -> Tensor:
            if tensor.dtype not in (torch.float16, torch.bfloat16):
                return draw(tensor, *args, **kwargs)
            wide = torch.empty_like(tensor, dtype=torch.float32)
            draw(wide, *args, **kwargs)
            with torch.no_grad():
                return tensor.copy_(wide)

        return drawn

    draws = {name: widened(draw) for name, draw in initialization.TORCH_INIT_FUNCTIONS.items()}
    # Constructors of torch's modules call functions of torch.nn.init. The guard redirects these calls to `draws`.
    with patch.dict(initialization.TORCH_INIT_FUNCTIONS, draws), initialization.guard_torch_init_functions():
        yield


def _of_missing(model: PreTrainedModel, missing: Sequence[str]) -> str:
    """Returns advice for an error message about weights that the files lack, or whose shape in the files differs from
    the shape in the model."""
    head, named = model.get_output_embeddings(), dict(model.named_parameters())
    if head is not None and all(named.get(name) is head.weight for name in missing):
        return "If the output layer shares the embedding's weight, type model.architecture={tie_word_embeddings:true}."
    return "Check that model.architecture matches these weights."


def _load(spec: schema.Model, config: PretrainedConfig, how: dict) -> PreTrainedModel:
    name, here = spec.name, _folder_here(spec.name)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            _place(name),
            config=config,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # wrong shapes are refused below, with a message that names the shapes
            **how,
        )
    except SafetensorError as error:  # usually the file was not downloaded or copied completely
        raise Refused(
            f"model.name={name}: a weights file is damaged or incomplete ({first_line(error)}). Download it again."
        ) from None
    except (OSError, RuntimeError) as error:
        raise Refused(f"model.name={name}: its weights cannot be loaded ({first_line(error)})") from None
    if mismatched := sorted(info["mismatched_keys"]):
        key, found, expected = mismatched[0]
        raise Refused(
            f"model.name={name}: {key} has shape {tuple(found)} in the files, and {tuple(expected)} in the model. "
            f"{_of_missing(model, [key])}"
        )
    if missing := sorted(info["missing_keys"]):
        raise Refused(
            f"model.name={name}: its files lack the weights {', '.join(missing[:5])} ({len(missing)} in all), which "
            f"would be initialized at random. {_of_missing(model, missing)}"
        )
    if here is None:  # from_pretrained has downloaded the files
        _tell_differences(spec, _agree_with_files(spec, model.config))
    return model


def tokenizer(name: str, trust_remote_code: bool, key: str = "model.name") -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a folder or a hub id.

    Args:
        name: the folder or hub id.
        trust_remote_code: run code of the repository.
        key: the key whose value is `name`, for error messages.

    Raises:
        Refused: the tokenizer cannot be read.
    """
    place = _place(name, key)
    try:
        return AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        refuse_gated(error, key, name, name)
        none = Path(place).is_dir() and not (Path(place) / "tokenizer.json").exists()
        why = "the folder has no tokenizer.json" if none else first_line(error)
        raise Refused(
            f"{key}={name}: this tokenizer cannot be read ({why}). Give a folder that contains a tokenizer, or a hub "
            "id."
        ) from None


def check_architecture(run: Run) -> None:
    """Checks a run's model before the weights are loaded. If `model.name` is a folder with published weights, also logs
    differences between the weight files and the model class.

    Raises:
        Refused: see `describe`; or seq_len exceeds the maximum sequence length of the architecture.
    """
    check_positions(run.seq_len, positions(describe(run, plans=True).config))
    if run.model.pretrained and _is_folder(run.model.name):
        _tell_differences(run.model, _agree_with_files(run.model, _configuration(run.model)))


def positions(config: PretrainedConfig) -> int | None:
    """Returns the maximum sequence length in the configuration, or None if no key of POSITIONS has a positive value."""
    text = config.get_text_config(decoder=True)
    return next(
        (longest for key in POSITIONS if isinstance(longest := getattr(text, key, None), int) and longest > 0), None
    )
