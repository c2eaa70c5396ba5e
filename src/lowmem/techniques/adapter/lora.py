"""LoRA and DoRA: the model is frozen, and two small matrices are trained beside each adapted linear layer.

Gradients, optimizer state and checkpoints shrink to a few percent of their size in full fine-tuning. An adapted layer
computes x W + (alpha / r) x A B instead of x W, where A and B have rank r. B is initialized to zero, so training starts
from the unchanged model. DoRA also trains a magnitude for each output feature, which is initialized to the norm of the
feature's weights.

A frozen layer needs its input only in the forward pass. Its adapter needs the input in backward too, for the gradient
of A, so autograd saves the input in the dtype in which x A is computed: the dtype of A, or under autocast the 16-bit
dtype of autocast. The adapter's weights are in fp32 even if the model has 16-bit weights, because 16 bits would lose
small updates. Exception: a precision with fp32 masters stores the adapter's weights in 16 bits on the device, and their
masters in host memory.

Adapted linear layers are instances of PEFT's classes; `stacks.py` implements adapted stacks of fused experts. An
adapter folder has PEFT's format: `adapter_config.json` and `adapter_model.safetensors`. This module reads adapter
folders, and `saving/export_adapter.py` writes them. Sources: Hu et al. 2021, arXiv 2106.09685; Liu et al. 2024, arXiv
2402.09353.
"""

import logging
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy, deepcopy
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lowmem.config.check import ADAPTER_CONFIG
from lowmem.model.linear_layers import linear_layers
from lowmem.model.trainable import parameters, trainable
from lowmem.system.errors import Refused, first_line, last_line
from lowmem.techniques.adapter.contract import Adapter
from lowmem.techniques.adapter.stacks import LORA, adapt, adapted_stacks, stacks_of

if TYPE_CHECKING:
    from peft import LoraConfig

log = logging.getLogger(__name__)

CONFIG, WEIGHTS = ADAPTER_CONFIG, "adapter_model.safetensors"
# Entries of the header of WEIGHTS that describe a quantized base, because PEFT's config has no keys for them. BASE: the
# base model was quantized to 4 bits. BASE_DTYPE: the key for the dtype that the base weights had before quantization.
# EXPERTS: fused experts were quantized too (older versions of lowmem did not quantize them).
BASE, BASE_DTYPE, EXPERTS = {"base": "nf4"}, "base_dtype", {"experts": "nf4"}
PREFIX = "base_model.model."  # PEFT's prefix of the tensor names in WEIGHTS
RANK, ALL = 16, "all-linear"  # defaults of r and target
WITH_EXPERTS = {"none": False, "lora": True}  # value of `experts`: whether fused experts get LoRA
# Keys of an adapter folder's config whose values may differ from PEFT's defaults. Either this module or PEFT applies
# the value, or the value does not affect an adapter that is already trained.
UNDERSTOOD = {
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out"),
    *("target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("peft_type", "task_type", "auto_mapping", "peft_version", "inference_mode", "init_lora_weights", "revision"),
    *("base_model_name_or_path", "megatron_config", "megatron_core", "runtime_config", "ensure_weight_tying"),
    *("eva_config", "corda_config", "loftq_config", "lora_ga_config"),  # read only by initializations
}
# Supported values of init_lora_weights. With most other values, PEFT changes the base weights when it adds the adapter.
INITIALIZATIONS = (True, False, "gaussian", "orthogonal", "eva")
# A Mamba mixer that uses its CUDA kernels passes the weights of these linear layers to a kernel instead of calling the
# layers, so adapters of these layers would have no effect.
READ_BY_MAMBA = ("x_proj", "dt_proj", "out_proj")


class LoRA(Adapter):
    """Adds LoRA to a model in place, and freezes the model's own weights.

    With `path`, the adapter folder decides r, alpha, target and experts; if one of these arguments is not None, it must
    agree with the folder. `dropout` is not read from the folder. Calling the object always adds an untrained adapter,
    into which `load` later loads the folder's tensors.

    Args:
        r: rank; None: 16, or the folder's rank.
        alpha: scales the LoRA update by alpha / r, or by alpha / sqrt(r) if the folder's config has `use_rslora`; None:
            2 r, or the folder's value.
        dropout: dropout probability for the input of A.
        target: all-linear, or patterns for the names of linear layers, such as q_proj or *.mlp.*; None: the folder's
            layers, or all-linear without a folder. Only layers that compute a matrix product, plus a bias if they have
            one, can be adapted. The head, routers, layers that share the embedding's matrix, and layers whose weights a
            Mamba kernel reads are never adapted.
        path: adapter folder to start from; None: a new adapter, with B = 0.
        experts: lora: each fused expert also gets matrices of rank r; none: fused experts get no matrices; None: as in
            the folder, or none without a folder. Experts that are separate linear layers are selected by `target`.

    Raises:
        Refused: `path` is not an adapter folder, or its config cannot be read; its adapter is of an unsupported kind,
            contradicts an argument, or needs another adapter= (lora instead of dora, dora instead of lora, or qlora for
            a quantized base); or fused experts would get matrices together with dropout or DoRA.
    """

    freezes_base = True
    magnitudes = False

    def __init__(
        self,
        r: int | None = None,
        alpha: float | None = None,
        dropout: float = 0.0,
        target: str | Sequence[str] | None = None,
        path: str | None = None,
        experts: Literal["none", "lora"] | None = None,
    ) -> None:
        # Imported here, because the import takes seconds, and most runs do not need it.
        from peft import LoraConfig

        self.target, self.path, self.adapts_experts = target, path, WITH_EXPERTS.get(experts)
        if path is not None:
            self.config = self._of_folder(r, alpha)
        else:
            r = r or RANK
            self.config = LoraConfig(r=r, lora_alpha=alpha or 2 * r, use_dora=self.magnitudes, task_type="CAUSAL_LM")
        self.config.lora_dropout = dropout
        if self.adapts_experts is None:
            self.adapts_experts = bool(_stacks_of(self.config))
        if self.adapts_experts and (dropout or self.magnitudes):
            key = "adapter.dropout=0" if dropout else "adapter=lora"
            raise Refused(
                "adapter.experts=lora: the matrices of experts are added to their weights, which allows neither "
                f"dropout nor DoRA. Type {key}, or adapter.experts=none."
            )

    def __call__(self, model: PreTrainedModel) -> None:
        """Adds the adapter in place.

        Raises:
            Refused: a pattern of the target matches no layer that can be adapted; the adapter folder names no layer of
                the model, or names a layer or stack that cannot be adapted; the target contradicts the adapter folder;
                fused experts should get matrices, but the model has no fused experts; PEFT cannot adapt the model, or
                could not load the DoRA adapter that the run would export.
        """
        own_count, linear, stacks = parameters(model), _linear(model), self._stacks(model)
        if self.path is None:
            names = _chosen(model, linear, ALL if self.target is None else self.target)
        else:
            names = self._names_of_folder(model, linear)
        if not names and self.path and not stacks:
            raise Refused(
                f"adapter.path={self.path}: {CONFIG} names no layer of {type(model).__name__}. Type the model= that "
                "the adapter was trained on."
            )
        if not names and not stacks:
            raise Refused("adapter.target=[]: this names no layer. Type adapter.target=all-linear, or adapter=none.")
        config = deepcopy(self.config)
        config.fan_in_fan_out = any(isinstance(layer, Conv1D) for layer in linear.values())
        if config.use_dora and (renamed := _renamed(config, model, names)):
            ends = sorted({name.rpartition(".")[2] for name in names if name not in renamed})
            others = f", or adapter.target=[{','.join(ends)}]" if ends and self.path is None else ""
            raise Refused(
                f"adapter=dora: PEFT cannot open DoRA adapters of {renamed[0]} and {len(renamed) - 1} other layers of "
                f"{type(model).__name__}, because it takes their names for names of experts. Type adapter=lora{others}."
            )
        _inject(config, model, names)
        for name in stacks:
            scaling = config.lora_alpha / (config.r**0.5 if config.use_rslora else config.r)
            experts, _, key = name.rpartition(".")
            adapt(model.get_submodule(experts), key, config.r, scaling)
        for _, p in trainable(model):
            p.data = p.data.float()
        for name in names:
            _measure(model.get_submodule(name))
        added = sum(p.numel() for _, p in trainable(model))
        log.info(
            f"adapter: {len(names)} of {len(linear)} linear layers{_and(stacks)} have an adapter: {added:,} trainable "
            f"parameters beside {own_count:,} frozen ones. Without an adapter: {_left_out(model)}."
        )

    def _stacks(self, model: PreTrainedModel) -> list[str]:
        """Returns the names of the stacks of fused experts that get matrices; empty if experts are not adapted.

        Raises:
            Refused: experts should be adapted, but the model has no fused experts, or lacks a stack that the adapter
                folder names.
        """
        if not self.adapts_experts:
            return []
        every, patterns = stacks_of(model), _stacks_of(self.config)
        for pattern in patterns:
            if not any(_meant(name, pattern) for name in every):
                raise Refused(
                    f"adapter.path={self.path}: this adapter changes {pattern}, which is not a stack of experts of "
                    f"{type(model).__name__}. Type the model= that the adapter was trained on."
                )
        if not every:
            raise Refused(
                f"adapter.experts=lora: {type(model).__name__} has no fused experts. Experts that are linear layers "
                "are chosen by adapter.target. Type adapter.experts=none."
            )
        return [name for name in every if any(_meant(name, pattern) for pattern in patterns or ["*"])]

    def _of_folder(self, r: int | None, alpha: float | None) -> "LoraConfig":
        """Returns the config of `path`, prepared for a new adapter. Args: r, alpha: the arguments of `LoRA`.
        Raises: Refused: the folder has no readable adapter of a supported kind, or the adapter contradicts an argument
        or needs another adapter=."""
        from peft import LoraConfig, PeftConfig, PeftType

        line, folder = f"adapter.path={self.path}", _complete(self.path)
        try:
            config = PeftConfig.from_pretrained(str(folder))
        except (ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
            raise Refused(f"{line}: {CONFIG} cannot be read ({error}). Type another folder.") from None
        problem = None
        if config.peft_type != PeftType.LORA:
            problem = f"is of type {config.peft_type}"
        elif more := _beyond(config, LoraConfig()):
            problem = f"has {', '.join(more)}"
        if problem:
            raise Refused(
                f"{line}: this adapter {problem}, which is not supported. Type a folder with a LoRA or DoRA adapter "
                "without this."
            )
        config.target_modules = config.target_modules or set()
        if config.use_dora != self.magnitudes:
            plain = "qlora" if stands_on_4_bits(folder) else "lora"
            kind, instead = ("DoRA", "dora") if config.use_dora else ("LoRA", plain)
            raise Refused(f"{line}: this is a {kind} adapter. Type adapter={instead}.")
        self._check_base(folder)
        if self.adapts_experts not in (None, bool(_stacks_of(config))):
            raise self._decided_by_folder(f"adapter.experts={'lora' if self.adapts_experts else 'none'}")
        for name, typed, stored in (("r", r, config.r), ("alpha", alpha, config.lora_alpha)):
            if typed not in (None, stored):
                raise self._decided_by_folder(f"adapter.{name}={typed}")
        config.init_lora_weights, config.inference_mode = True, False  # the folder's values do not matter here
        log.info(f"{line}: this adapter was trained on {config.base_model_name_or_path or 'an unnamed base model'}.")
        return config

    def _check_base(self, folder: Path) -> None:
        """Checks that the adapter and this run agree on whether the base model is quantized. PEFT's config does not
        contain this information, so the header of the weight file is read. Logs a warning if this run quantizes the
        base, but the header does not say that the adapter was trained on a quantized base.

        Raises:
            Refused: the adapter was trained on a quantized base, but this run does not quantize its base.
        """
        if stands_on_4_bits(folder) and not self.in_4_bits:
            raise Refused(
                f"adapter.path={self.path}: this adapter was trained on a base model quantized to 4 bits, and this "
                "adapter= does not quantize its base model. Type adapter=qlora."
            )
        if self.in_4_bits and not stands_on_4_bits(folder):
            log.warning(
                f"adapter.path={self.path}: this adapter does not say that its base model was quantized to 4 bits. If "
                "it was not, type adapter=lora."
            )

    def _names_of_folder(self, model: nn.Module, linear: dict[str, nn.Module]) -> list[str]:
        """Returns the names of the linear layers that the folder's adapter changes. Raises: Refused: one of these
        layers cannot be adapted, or `target` matches a different set of layers or has a pattern without a match."""
        from peft.tuners.tuners_utils import check_target_module_exists

        if self.config.target_modules == ALL:
            names = _chosen(model, linear, ALL)
        else:
            weights = [name for name in _parameters_of(self.config) if _is_weight(name)]
            names = [
                name
                for name, _ in model.named_modules()
                if check_target_module_exists(self.config, name)
                or any(_meant(f"{name}.weight", weight) for weight in weights)
            ]
        if beyond := [name for name in names if name not in linear]:
            raise Refused(
                f"adapter.path={self.path}: this adapter changes {beyond[0]}, but only linear layers that compute a "
                "plain product can be adapted, except heads and routers. Type a folder with another adapter."
            )
        if self.target is not None and {*names} != {*_chosen(model, linear, self.target)}:
            raise self._decided_by_folder(f"adapter.target={self.target}")
        return names

    def _decided_by_folder(self, typed: str) -> Refused:
        """Returns the error for an argument that contradicts the folder. Args: typed: the argument, as key=value."""
        key = typed.partition("=")[0]
        return Refused(f"{typed}: {CONFIG} in {self.path} has another value. Remove {key}.")


class DoRA(LoRA):
    """LoRA that also trains a magnitude for each output feature. Each forward pass divides the magnitudes by the norms
    of the adapted weights. To get these norms, it computes the product A B, which has the shape of W."""

    magnitudes = breaks_graphs = True


def stands_on_4_bits(folder: Path) -> bool:
    """Returns True if the header of an adapter folder's weight file says that the base model was quantized to 4 bits.
    PEFT does not write this metadata; lowmem does."""
    return BASE.items() <= _head(folder).items()


def experts_in_4_bits(path: str) -> bool:
    """Returns True if the header of an adapter folder's weight file says that fused experts were quantized to 4
    bits."""
    return EXPERTS.items() <= _head(path).items()


def base_dtype(path: str | None) -> torch.dtype | None:
    """Returns the dtype that an adapter's base weights had before they were quantized. To get the base that the adapter
    was trained on, a run that starts from the adapter must quantize weights of this dtype. Returns None if `path` is
    None, or if the header of the weight file does not name a dtype of torch. Raises: Refused: see `_complete`."""
    name = path and _head(path).get(BASE_DTYPE)
    dtype = getattr(torch, name, None) if name else None
    return dtype if isinstance(dtype, torch.dtype) else None


def _head(path: str) -> dict[str, str]:
    """Returns the metadata in the header of an adapter folder's weight file; empty if the file has no metadata or is
    damaged. Raises: Refused: see `_complete`."""
    with suppress(SafetensorError), safe_open(_complete(path) / WEIGHTS, "pt") as file:
        return file.metadata() or {}
    return {}


def _complete(path: str) -> Path:
    """Returns the folder that adapter.path names. Raises: Refused: the folder lacks a file of an adapter."""
    folder = Path(path).expanduser()
    if not all((folder / name).is_file() for name in (CONFIG, WEIGHTS)):
        raise Refused(
            f"adapter.path={path}: the folder must contain {CONFIG} and {WEIGHTS}. Type a folder written by PEFT, or "
            "by a run with merge=false."
        )
    return folder


def load(model: PreTrainedModel, path: str) -> None:
    """Loads the tensors of an adapter folder into a model that already has the adapter.

    Raises:
        Refused: the weight file is damaged, or the names or shapes of its tensors do not match the adapter.
    """
    from peft import set_peft_model_state_dict

    names = _names_in_folder(model)
    try:
        saved = load_file(Path(path).expanduser() / WEIGHTS)
        tensors = {name.removeprefix(PREFIX): tensor for name, tensor in saved.items()}
        if {*tensors} == {*names.values()}:  # without PEFT's function, which renames tensors of some architectures
            model.load_state_dict({ours: tensors[name] for ours, name in names.items()}, strict=False)
            return
        result = set_peft_model_state_dict(model, tensors)
        wrong = [*result.unexpected_keys, *sorted({*names} & {*result.missing_keys})]
    except (SafetensorError, RuntimeError) as error:
        wrong = [last_line(error)]
    if wrong:
        raise Refused(
            f"adapter.path={path}: the tensors of this adapter do not match the layers of this model ({wrong[0]}). "
            "Type the model= that the adapter was trained on."
        )


def targets_for_peft(model: PreTrainedModel) -> dict[str, list[str] | None]:
    """Returns the values of `target_modules` and `target_parameters` that make PEFT adapt the same layers and stacks of
    experts as the model's adapter does.

    If a model has fused experts, PEFT mistakes names such as gate_proj in `target_modules` for the names that experts
    had in older versions of transformers, and adapts the experts instead of these layers. So the weights of such layers
    are listed in `target_parameters`. PEFT's adapter of a 2-D parameter in this list has the tensor names and shapes of
    a linear layer's adapter.
    """
    (config,) = model.peft_config.values()
    names = [*_adapted(model)]
    renamed = _renamed(config, model, names)
    adapted = adapted_stacks(model)
    ends = {".".join(name.split(".")[-3:]) for name in adapted}
    stacks = ends if adapted == [name for name in stacks_of(model) if any(_meant(name, e) for e in ends)] else adapted
    return {
        "target_modules": _shortest(model, [name for name in names if name not in renamed]),
        "target_parameters": [*(f"{name}.weight" for name in renamed), *sorted(stacks)] or None,
    }


def not_loaded_by_peft(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of tensors that PEFT could not load, because it would rename them and then not find the new
    names in the model; empty if this version of PEFT does not rename tensors. Args: tensors: the tensors of an adapter
    folder, by name."""
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers
    except ImportError:
        return []
    (config,) = model.peft_config.values()
    return sorted({*tensors} - {*convert_peft_adapter_state_dict_for_transformers(model, config, dict(tensors))})


def _renamed(config: "LoraConfig", model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """Returns the layer names in `names` that PEFT would mistake for old names of fused experts; empty if this version
    of PEFT does not rename layers."""
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:
        return []

    def is_kept(name: str) -> bool:
        alone = copy(config)
        alone.target_modules, alone.target_parameters = {name}, None
        alone.rank_pattern, alone.alpha_pattern = {}, {}
        try:
            convert_peft_config_for_transformers(alone, model, None)
        except ValueError:  # PEFT would join this layer with another layer
            return False
        return {*alone.target_modules} == {name}

    kept = {end: is_kept(end) for end in {name.rpartition(".")[2] for name in names}}
    return [name for name in names if not kept[name.rpartition(".")[2]]]


def _inject(config: "LoraConfig", model: PreTrainedModel, names: Sequence[str]) -> None:
    """Adds PEFT's adapters to exactly the layers `names`, and freezes all other parameters.

    The names are passed to PEFT in the keys of a state dict, not in `target_modules`: PEFT would rewrite some names in
    `target_modules` before matching them, and adapt the wrong layers (see `targets_for_peft`). Sets
    `config.target_modules` afterwards, to values that select the same layers.

    Raises:
        Refused: PEFT cannot adapt the model.
        RuntimeError: the layers that PEFT has adapted are not `names`.
    """
    from peft import inject_adapter_in_model

    config.target_modules, config.target_parameters = set(), None
    if not names:  # only fused experts have an adapter
        model.requires_grad_(False)
        model.peft_config = {"default": config}
        return
    try:
        with warnings.catch_warnings(action="ignore"):  # PEFT warns of Conv1D's transposed matrix and the empty target
            inject_adapter_in_model(
                config, model, state_dict={f"{name}.lora_A.weight": torch.empty(0) for name in names}
            )
    except (ValueError, TypeError, NotImplementedError) as error:
        raise Refused(
            f"adapter: PEFT cannot adapt this {type(model).__name__} ({first_line(error).rstrip('.')}). "
            "Type adapter.target=[<names of other linear layers>], or adapter=none."
        ) from None
    if (adapted := {*_adapted(model)}) != {*names}:
        different = sorted(adapted ^ {*names})
        raise RuntimeError(f"PEFT adapted other layers than those it was given: {different[0]} of {len(different)}.")
    config.target_modules = {*_shortest(model, names)}


def _beyond(config: "LoraConfig", default: "LoraConfig") -> list[str]:
    """Returns the unsupported settings of a folder's config, each as text for an error message. Args: default: a config
    with PEFT's default values, which are supported."""
    values, usual = config.to_dict(), default.to_dict()
    more = [key for key in values if key not in UNDERSTOOD and (values[key] or None) != (usual.get(key) or None)]
    if _stacks_of(config) and (config.rank_pattern or config.alpha_pattern):
        more.append("rank_pattern or alpha_pattern for fused experts (PEFT makes them of older names, such as w1)")
    if config.init_lora_weights not in INITIALIZATIONS:
        more.append(f"init_lora_weights={config.init_lora_weights}")
    return more


def _parameters_of(config: "LoraConfig") -> list[str]:
    return [*(config.target_parameters or [])]


def _stacks_of(config: "LoraConfig") -> list[str]:
    """Returns the names in `target_parameters` that are stacks of experts."""
    return [name for name in _parameters_of(config) if not _is_weight(name)]


def _is_weight(name: str) -> bool:
    """Returns True if a name in `target_parameters` belongs to the weight of a linear layer, and False if it belongs to
    a stack of experts."""
    return name.endswith(".weight")


def tensors_for_peft(model: PreTrainedModel, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns all tensors of the adapter, by name. The names are those in an adapter folder, but without PREFIX. Args:
    values: the values of parameters, by name; must contain all names that `parameters_of` returns."""
    return {name: values[ours] for ours, name in _names_in_folder(model).items()}


def parameters_of(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns a (name, parameter) pair for each parameter of the adapter, including parameters that `freeze=` has
    frozen."""
    return [
        (name, p)
        for name, p in model.named_parameters()
        if any(part.startswith("lora_") for part in name.split("."))  # lora_A, lora_B, lora_magnitude_vector
    ]


def has_frozen(model: nn.Module) -> bool:
    """Returns True if `freeze=` has frozen at least one parameter of the adapter."""
    return not all(p.requires_grad for _, p in parameters_of(model))


def _names_in_folder(model: nn.Module) -> dict[str, str]:
    """Returns a dict that maps the name of each parameter of the adapter to its name in an adapter folder, without
    PREFIX.
    Names in a folder do not contain "default", PEFT's name for the adapter: x.lora_A.weight instead of
    x.lora_A.default.weight. PEFT wraps a module with fused experts once for each adapted stack, and the wrapper of the
    last stack is the outermost one. In the tensor names of a stack, `base_layer` is repeated once for each wrapper
    around this stack's own wrapper.
    """
    names = {
        name: name.replace(".default.weight", "" if "lora_magnitude_vector" in name else ".weight")
        for name, _ in parameters_of(model)
    }
    for experts, stacks in groupby(adapted_stacks(model), lambda name: name.rpartition(".")[0]):
        for outside, stack in enumerate(reversed([*stacks])):
            for matrix in ("lora_A", "lora_B"):
                names[f"{stack}{LORA}.{matrix}"] = f"{experts}{'.base_layer' * outside}.{matrix}.weight"
    return names


def _linear(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Returns the linear layers that can be adapted, by name: all of `linear_layers`, except layers whose weights a
    Mamba kernel reads."""
    no_adapter = _read_by_kernels(model)
    return {name: layer for name, layer in linear_layers(model).items() if name not in no_adapter}


def _read_by_kernels(model: nn.Module) -> set[str]:
    """Returns the names of the layers whose weights a Mamba mixer passes to its kernel. Mixers are recognized by their
    attributes A_log and D."""
    mixers = [name for name, module in model.named_modules() if hasattr(module, "A_log") and hasattr(module, "D")]
    return {f"{name}.{layer}" for name in mixers for layer in READ_BY_MAMBA}


def _chosen(model: PreTrainedModel, linear: dict[str, nn.Module], target: str | Sequence[str]) -> list[str]:
    """Returns the names in `linear` that match `target`, in the order of `linear`. A pattern may omit the first
    components of a name: q_proj matches model.layers.0.self_attn.q_proj.

    Args:
        model: the model, for error messages.
        linear: the layers that can be adapted, by name.
        target: all-linear, or patterns.

    Raises:
        Refused: a pattern matches no name in `linear`.
    """
    if target == ALL:
        target = ["*"]
    for pattern in target:
        if not any(_meant(name, pattern) for name in linear):
            named = [name for name, _ in model.named_modules() if name and _meant(name, pattern)]
            reason = (
                f"{named[0]} cannot be adapted (only linear layers can, other than the head, routers and layers whose "
                "weight a kernel reads)"
                if named
                else f"{type(model).__name__} has no layer of this name"
            )
            ends = sorted({name.rpartition(".")[2] for name in linear})
            raise Refused(f"adapter.target={pattern}: {reason}. Type some of [{','.join(ends)}], or {ALL}.")
    return [name for name in linear if any(_meant(name, pattern) for pattern in target)]


def _shortest(model: nn.Module, chosen: list[str]) -> list[str]:
    """Returns values for `target_modules` that select exactly the layers `chosen`: the last components of their names
    if the names of all other modules end differently, otherwise the full names."""
    ends = {name.rpartition(".")[2] for name in chosen}
    ending_so = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in ends]
    return sorted(ends) if ending_so == chosen else chosen


def _meant(name: str, pattern: str) -> bool:
    """Returns True if a pattern matches the full name, or the last components of the name."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _adapted(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the layers that PEFT has adapted, by name. Fused experts are not included."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def _measure(layer: nn.Module) -> None:
    """Recomputes DoRA's magnitudes in fp32, in place. If they had been computed in 16 bits, their rounding errors would
    change the model before training. Does nothing for LoRA."""
    for vector in layer.lora_magnitude_vector.values():
        none = torch.zeros(())
        vector.weight.data = vector.get_weight_norm(layer.get_base_layer().weight.detach().float(), none, 1.0)


def _left_out(model: PreTrainedModel) -> str:
    """Returns text for a log line that names weights without an adapter: embeddings, the head, and stacks of fused
    experts without LoRA."""
    head, tied = model.get_output_embeddings(), model.get_input_embeddings().weight
    left_out = ["embeddings"]
    if head is not None:
        left_out.append("the head (tied to them)" if head.weight is tied else "the head")
    adapted = {*adapted_stacks(model)}
    fused = [name for name in stacks_of(model) if name not in adapted]
    return ", ".join([*left_out, *([f"{len(fused)} fused expert tensors such as {fused[0]}"] if fused else [])])


def _and(stacks: Sequence[str]) -> str:
    return f" and {len(stacks)} {'stacks' if len(stacks) > 1 else 'stack'} of experts" if stacks else ""
