"""Small matrices beside the model's own, which stay as they are: gradients, state and checkpoints of 1 % of a model.

LoRA adds to each adapted layer's product x W the product x A B of two matrices of rank r, times alpha / r. B starts at
zero, so the model starts as it was. DoRA also trains the length of each row of W + A B. What is frozen keeps nothing
for its own gradient, but each adapter keeps what enters it, and computes it in its own dtype. Adapters are held in fp32
whatever the weights are held in, for 16 bits would lose their small updates; under masters the host holds them so.
Sources: Hu et al. 2021, arXiv 2106.09685; Liu et al. 2024, arXiv 2402.09353. The layers are peft's.
"""

import logging
import warnings
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lowmem.model.trainable import parameters, trainable
from lowmem.system.errors import Refused

if TYPE_CHECKING:
    from peft import LoraConfig

log = logging.getLogger(__name__)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# In the head of the weights' file, since peft's configuration has no word for it; and what was rounded to 4 bits.
BASE, BASE_DTYPE = {"base": "nf4"}, "base_dtype"
PREFIX = "base_model.model."  # of every name in a folder of peft's
RANK, ALL = 16, "all-linear"
ROUTERS = ("gate", "router", "shared_expert_gate")
# What a folder may ask for that is more than matrices beside those of linear layers, or changes these.
NOT_HERE = ("modules_to_save", "target_parameters", "trainable_token_indices", "layer_replication")


class LoRA:
    """model -> None: puts the adapter in, and freezes everything else.

    Args:
        r: rank; None: 16, or the folder's.
        alpha: its product is multiplied by alpha / r; None: 2 r, or the folder's.
        dropout: of what enters A.
        target: all-linear, or patterns of names of linear layers such as q_proj or *.mlp.*; None: the former, or the
            folder's. Never embeddings and the head.
        path: a folder of peft's to start from; None: B is zero.

    Raises:
        Refused: a folder that is none, or of another kind of adapter, or contradicts what was typed.
    """

    magnitudes = False
    in_4_bits = False  # its base

    def __init__(
        self,
        r: int | None = None,
        alpha: float | None = None,
        dropout: float = 0.0,
        target: str | Sequence[str] | None = None,
        path: str | None = None,
    ) -> None:
        # Here, not where it is used: it takes seconds, and a model may be built of tensors without memory.
        from peft import LoraConfig

        self.target, self.path = target, path
        if path is not None:
            self.config = self._of_folder(Path(path).expanduser(), r, alpha)
        else:
            r = r or RANK
            self.config = LoraConfig(r=r, lora_alpha=alpha or 2 * r, use_dora=self.magnitudes, task_type="CAUSAL_LM")
        self.config.lora_dropout = dropout

    def __call__(self, model: PreTrainedModel) -> None:
        """Raises: Refused: a target that is no linear layer, or that another layer computes with."""
        from peft import inject_adapter_in_model

        whole, linear = parameters(model), _linear(model)
        config = deepcopy(self.config)
        if self.path is None:
            config.target_modules = _shortest(model, _chosen(model, linear, self.target or ALL))
        config.fan_in_fan_out = any(isinstance(part, Conv1D) for part in linear.values())
        try:
            with warnings.catch_warnings(action="ignore"):  # of Conv1D, whose matrix lies the other way round
                inject_adapter_in_model(config, model)
        except (ValueError, NotImplementedError) as error:
            raise Refused(
                f"adapter: peft cannot adapt this {type(model).__name__} ({str(error).splitlines()[0]}) Type "
                "adapter.target=[<names of other linear layers>], or adapter=none."
            ) from None
        adapted = _adapted(model)
        if self.path is not None:
            self._check_targets(model, adapted, linear)
        for _, p in trainable(model):
            p.data = p.data.float()
        for part in adapted.values():
            _measure(part)
        own = sum(p.numel() for _, p in trainable(model))
        log.info(
            f"adapter: {len(adapted)} of {len(linear)} linear layers are adapted ({_kinds(adapted)}), and {own:,} "
            f"parameters are trained beside {whole:,}. Not adapted: {_left_out(model)}."
        )

    def _of_folder(self, folder: Path, r: int | None, alpha: float | None) -> "LoraConfig":
        from peft import LoraConfig, PeftConfig

        said = f"adapter.path={self.path}"
        if not all((folder / name).is_file() for name in (CONFIG, WEIGHTS)):
            raise Refused(f"{said}: there are no {CONFIG} and {WEIGHTS}. Give a folder that peft or merge=false wrote.")
        try:
            config = PeftConfig.from_pretrained(str(folder))
        except (ValueError, TypeError, KeyError) as error:
            raise Refused(f"{said}: {CONFIG} cannot be read ({error}). Give another folder.") from None
        more = [name for name in NOT_HERE if getattr(config, name, None)]
        more += ["bias"] if getattr(config, "bias", "none") != "none" else []
        if not isinstance(config, LoraConfig) or more:
            what = f"has {', '.join(more)}" if more else f"is a {getattr(config, 'peft_type', None)} adapter"
            raise Refused(f"{said}: it {what}, which is not trained here. Give a LoRA or DoRA of linear layers alone.")
        if config.use_dora != self.magnitudes:
            kind = "with" if config.use_dora else "without"
            raise Refused(f"{said}: it is one {kind} DoRA's magnitudes. Choose the other adapter=, which is its kind.")
        self._check_base(folder)
        for name, typed, there in (("r", r, config.r), ("alpha", alpha, config.lora_alpha)):
            if typed is not None and typed != there:
                raise Refused(f"adapter.{name}={typed}: {self.path} has {there}. Leave adapter.{name} out.")
        config.init_lora_weights, config.inference_mode = True, False  # whatever it began as
        log.info(f"{said}: it was trained on {config.base_model_name_or_path or 'a base that it does not name'}.")
        return config

    def _check_base(self, folder: Path) -> None:
        """A folder of peft's does not say what its base was held in."""
        if stands_on_4_bits(folder) and not self.in_4_bits:
            raise Refused(
                f"adapter.path={self.path}: it has learnt beside a base in 4 bits, and this adapter= holds another. "
                "Type adapter=qlora."
            )
        if self.in_4_bits and not stands_on_4_bits(folder):
            log.warning(
                f"adapter.path={self.path}: nothing in it says that its base was in 4 bits. If it was not, type "
                "adapter=lora."
            )

    def _check_targets(self, model: nn.Module, adapted: dict[str, nn.Module], linear: dict[str, nn.Module]) -> None:
        if beyond := [name for name in adapted if name not in linear]:
            raise Refused(
                f"adapter.path={self.path}: it adapts {beyond[0]}, and embeddings and heads are not adapted here. Give "
                "a folder without it."
            )
        if self.target is not None and {*adapted} != {*_chosen(model, linear, self.target)}:
            raise Refused(f"adapter.target={self.target}: {self.path} adapts others ({_kinds(adapted)}). Leave it out.")


class DoRA(LoRA):
    """The same, with the length of each row of the sum trained beside its direction. Costs a product of A and B, as
    large as the matrix, in every forward pass."""

    magnitudes = True


def stands_on_4_bits(folder: Path) -> bool:
    """Whether its base was held in 4 bits."""
    return BASE.items() <= _head(folder).items()


def base_dtype(path: str | None) -> torch.dtype | None:
    """Of the weights that an adapter's base in 4 bits was made of, where its folder says so. Of others they would be
    other 4 bits, which it has not learnt beside."""
    name = path and _head(Path(path).expanduser()).get(BASE_DTYPE)
    return getattr(torch, name) if name else None


def _head(folder: Path) -> dict[str, str]:
    """What stands before the tensors; nothing, of a file that `load` refuses."""
    with suppress(SafetensorError), safe_open(folder / WEIGHTS, "pt") as file:
        return file.metadata() or {}
    return {}


def load(model: PreTrainedModel, path: str) -> None:
    """The numbers of a folder into an adapter that is in the model.

    Raises:
        Refused: other tensors than the adapter's.
    """
    from peft import set_peft_model_state_dict

    try:
        held = load_file(Path(path).expanduser() / WEIGHTS)
        found = set_peft_model_state_dict(model, {name.removeprefix(PREFIX): one for name, one in held.items()})
        ours = {name for name, _ in trainable(model)}
        wrong = [*found.unexpected_keys, *sorted(ours & {*found.missing_keys})]
    except (SafetensorError, RuntimeError) as error:
        wrong = [str(error).strip().splitlines()[-1].strip()]
    if wrong:
        raise Refused(
            f"adapter.path={path}: its tensors are not those of this model's layers ({wrong[0]}). Type the model= that "
            "it was trained on."
        )


def _linear(model: PreTrainedModel) -> dict[str, nn.Module]:
    """By name, but for the head and what is tied to an embedding, with whose matrices others compute, and for routers,
    whose choice of experts would change."""
    tokens = model.get_input_embeddings().weight
    kinds = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear | Conv1D)}
    head = model.get_output_embeddings()
    return {
        name: part
        for name, part in kinds.items()
        if part is not head and not is_router(name) and not _holds(part, tokens)
    }


def is_router(name: str) -> bool:
    return name.rpartition(".")[2] in ROUTERS


def _holds(part: nn.Module, weight: Tensor) -> bool:
    """Asked of its parameters: a matrix in 4 bits would be made anew for the question."""
    return any(p is weight for p in part.parameters(recurse=False))


def _chosen(model: PreTrainedModel, linear: dict[str, nn.Module], target: str | Sequence[str]) -> list[str]:
    """Names of the layers that are meant; a pattern may leave out what is before them."""
    if target == ALL:
        target = ["*"]
    for pattern in target:
        if not any(_meant(name, pattern) for name in linear):
            named = [name for name, _ in model.named_modules() if name and _meant(name, pattern)]
            what = f"{named[0]} is none" if named else f"{type(model).__name__} has no layer of that name"
            ends = sorted({name.rpartition(".")[2] for name in linear})
            raise Refused(
                f"adapter.target={pattern}: linear layers are adapted, without the head, and {what}. Type some of "
                f"[{','.join(ends)}], or {ALL}."
            )
    return [name for name in linear if any(_meant(name, pattern) for pattern in target)]


def _shortest(model: nn.Module, chosen: list[str]) -> list[str]:
    """The same layers by the ends of their names, where these say it: a folder's config has them."""
    ends = {name.rpartition(".")[2] for name in chosen}
    ending_so = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in ends]
    return sorted(ends) if ending_so == chosen else chosen


def _meant(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _adapted(model: nn.Module) -> dict[str, nn.Module]:
    from peft.tuners.lora import LoraLayer

    return {name: part for name, part in model.named_modules() if isinstance(part, LoraLayer)}


def _measure(part: nn.Module) -> None:
    """DoRA's magnitudes in fp32: measured in 16 bits they would begin by changing the model."""
    for vector in part.lora_magnitude_vector.values():
        none = torch.zeros(())
        vector.weight.data = vector.get_weight_norm(part.get_base_layer().weight.detach().float(), none, 1.0)


def _kinds(adapted: dict[str, nn.Module]) -> str:
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in adapted))


def _left_out(model: PreTrainedModel) -> str:
    """The head, embeddings, and experts that are fused into one tensor, which is no layer."""
    head, tied = model.get_output_embeddings(), model.get_input_embeddings().weight
    said = ["embeddings"]
    if head is not None:
        said.append("the head, which is tied to them" if head.weight is tied else "the head")
    fused = [name for name, p in model.named_parameters() if p.dim() > 2]
    return ", ".join([*said, *([f"{len(fused)} fused tensors of experts such as {fused[0]}"] if fused else [])])
