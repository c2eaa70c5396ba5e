"""Defines `Run`, which contains all settings of a run. `settled` of `check.py` creates an immutable `Run` from the
composed config once, and all other code reads the `Run`.

A `Run` has the keys of conf/config.yaml as typed attributes, and properties for facts that follow from several keys.
Some facts become known later: the device, the steps of epochs=, a batch size found by search. For each such fact,
`Run.knowing` makes a new `Run` from the same overrides.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from pydantic import PrivateAttr

from lowmem.config import schema
from lowmem.config.accumulation import WindowSize
from lowmem.config.declarations import Technique, groups, technique_of
from lowmem.config.instantiate import instantiate
from lowmem.config.typed_lines import composed
from lowmem.memory import cap
from lowmem.system.errors import Refused

ORDERS = ("auto", "by_layer", "by_micro_batch")  # values of weights.order


class Run(schema.Keys):
    """All settings of a run, immutable. `knowing` and `replacing` return a new run."""

    output_dir: str | None = None  # the folder of the results; None until `fit` sets it
    device: str  # `Keys` allows auto, cpu and cuda; tests also use meta
    _draft: DictConfig = PrivateAttr()  # the composed config, with its interpolations

    @classmethod
    def from_draft(cls, draft: DictConfig) -> "Run":
        """Returns the run of a composed config whose values have been checked."""
        kind = PlanRun if "gpu" in draft else Run
        run = kind.model_validate(OmegaConf.to_container(draft, resolve=True))
        run._draft = draft
        return run

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "Run":
        """Returns the run of plain values, as `as_dict` returns them."""
        return cls.from_draft(OmegaConf.create(values))

    def knowing(self, **facts: object) -> "Run":
        """Returns a run in which the values of `facts` are set and all values that depend on them are computed again. A
        mapping among `facts` changes only the keys that it contains."""
        return Run.from_draft(OmegaConf.merge(self._draft, facts))

    def replacing(self, key: str, value: object) -> "Run":
        """Returns a run in which a key, such as adapter or model.architecture, has exactly this value. A mapping
        replaces the old mapping and is not merged with it."""
        draft = self._draft.copy()
        OmegaConf.update(draft, key, value, merge=False)
        return Run.from_draft(draft)

    def sized(self) -> "Run":
        """Returns a run with batch_size=1 instead of batch_size=auto, for work that does not depend on the batch
        size."""
        return self.knowing(batch_size=1) if self.batch_size == "auto" else self

    def resolved(self) -> "Run":
        """Returns a run whose interpolations are replaced by their values. In the returned run, `knowing` changes only
        the given keys; values that were interpolated from these keys stay the same."""
        return Run.read(self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values, from which `Run.read` recreates the run."""
        return OmegaConf.to_container(self._draft, resolve=True)

    # --- techniques ---------------------------------------------------------------------------------------------------

    def technique(self, group: str) -> Technique:
        """Returns the declared properties of a group's chosen technique."""
        return self._techniques[group]

    @cached_property
    def _techniques(self) -> dict[str, Technique]:
        return {group: technique_of(getattr(self, group, None), group) for group in groups()}

    # --- the device ---------------------------------------------------------------------------------------------------

    @cached_property
    def runs_on(self) -> str:
        """Returns "cpu" or "cuda". device=auto uses CUDA if available."""
        import torch  # imported here, because commands read the settings before they need torch

        return self.device if self.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"

    @cached_property
    def limit(self) -> int | None:
        """Returns the bytes that tensors on the device may use; None without memory.limit."""
        return cap.parse_bytes(self.memory.limit)

    @property
    def device_bytes(self) -> int | None:
        """Returns the bytes of memory.limit, or else of the card's memory; None for a CPU without a limit."""
        import torch

        of_card = torch.cuda.get_device_properties().total_memory if self.runs_on == "cuda" else None
        return self.limit or of_card

    @property
    def needs_compiler(self) -> bool:
        """Returns whether the run needs a C++ compiler, to generate code for a CPU. (On a card, Triton generates the
        code.)"""
        return self.runs_on == "cpu" and any(self.technique(group).generates_code for group in ("optim", "compile"))

    @property
    def compiles_blocks(self) -> bool:
        """Returns whether torch.compile compiles each block. The memory meter cannot see allocations in compiled
        blocks."""
        return self.technique("compile").generates_code

    @property
    def checkpointing(self) -> Technique:
        return self.technique("gradient_checkpointing")

    @property
    def loss_class(self) -> type:
        """Returns the class of the loss, or `Loss` itself if the `_target_` is not a subclass of `Loss`, for example a
        function."""
        return _class_of(self.loss, "lowmem.techniques.loss.cross_entropy.Loss")

    @property
    def adapter_class(self) -> type:
        """Returns the class of the adapter, or `Adapter` itself if the `_target_` is not a subclass of `Adapter`, for
        example a function."""
        return _class_of(self.adapter, "lowmem.techniques.adapter.contract.Adapter")

    @property
    def exports_adapter(self) -> bool:
        """Returns whether an export contains only the adapter, and not the base model. A base model with random initial
        weights must be exported with its adapter."""
        return self.adapter_class.freezes_base and self.model.pretrained and not self.merge

    # --- several devices ----------------------------------------------------------------------------------------------

    @property
    def strategy_class(self) -> type:
        """Returns the class of the strategy, a subclass of `OneDevice`."""
        return get_object(self.strategy.target)

    @property
    def offloads(self) -> bool:
        """Returns whether a device's shard is offloaded to host memory and updated there."""
        return self.strategy.arguments.get("offload", False)

    @property
    def several(self) -> bool:
        """Returns whether there may be several processes, one per device. The class of the strategy has this attribute,
        too, but importing the class imports torch."""
        return not self.technique("strategy").one_process

    @property
    def loads_once(self) -> bool:
        """Returns whether only rank 0 has the full model in host memory while the model is loaded and sharded."""
        return not self.strategy_class.in_numbers

    @property
    def widens_as_sent(self) -> bool:
        """Returns whether rank 0 may load and send weights in the narrower dtype of their files, so that each rank
        converts its shard to the dtype of the run."""
        return self.strategy_class.widens

    @property
    def saves_parts(self) -> bool:
        """Returns whether each process has, and saves, only its own part of the model and of the optimizer state."""
        return self.strategy_class.divides

    @cached_property
    def data_ranks(self) -> int:
        """Returns the number of processes that read different data."""
        return self.strategy_class.data_ranks(self.devices, **self.strategy.arguments)

    # --- the schedule -------------------------------------------------------------------------------------------------

    @cached_property
    def windows(self) -> WindowSize | None:
        """Returns the `WindowSize` of the run, which gives the number of micro-batches of each window. Returns None
        with batch_size=auto, before the search has found a batch size."""
        if self.batch_size == "auto":
            return None
        shared = {"devices": self.data_ranks} if self.accumulation.arguments.get("devices") == 1 else {}
        return instantiate(self.accumulation, **shared)

    @property
    def accumulates(self) -> bool:
        """Returns whether a window may have several micro-batches; True before the search of batch_size=auto."""
        return self.windows is None or self.windows.largest > 1

    @property
    def in_backward(self) -> bool:
        """Returns whether the optimizer updates each parameter on the device during backward, as soon as its gradient
        exists."""
        return self.optim.in_backward

    @property
    def early(self) -> bool:
        """Returns whether updates are early: the host updates each weight, or its master, during backward, as soon as
        the weight's last gradient of the window is in host memory. Updates are not early with
        precision.early_step=false. With norm clipping (clip=) or a loss scale updates are not early either, because
        both need all gradients first."""
        early = self.precision.arguments.get("early_step", True)  # the classes of precisions have the same default
        return self.masters and early and self.clip is None and not self.scales_loss

    # --- dtypes, and where weights are --------------------------------------------------------------------------------

    @cached_property
    def _precision_class(self) -> type:
        return get_object(self.precision.target)

    @property
    def plugins(self) -> list[schema.Node]:
        """Returns the plugins of Lightning's Trainer: the precision, and plugins that the user added."""
        return [self.precision, *self.trainer.plugins.values()]

    @property
    def weights_dtype(self) -> str:
        """Returns the dtype of the trained weights, or of their masters: float32, bfloat16 or float16."""
        kind = self._precision_class
        return str(kind.weights_dtype or kind.dtype).removeprefix("torch.")

    @property
    def multiplies_in(self) -> str:
        """Returns the dtype of matmul inputs: float32, tensorfloat32, bfloat16 or float16."""
        kind = self._precision_class
        return "tensorfloat32" if kind.tf32 else str(kind.dtype).removeprefix("torch.")

    @property
    def product_bytes(self) -> int:
        """Returns the bytes per element of matmul inputs, and of the weights and gradients that are copied between host
        and device."""
        return self._precision_class.dtype.itemsize

    @property
    def loaded_in(self) -> str:
        """Returns the dtype to which a model's files are converted: float32, bfloat16 or float16. Weights with masters
        are converted to the dtype of the masters. If only an adapter is trained, base weights have no masters and are
        converted to the dtype in which the device stores them."""
        return self.multiplies_in if self.masters and self.adapter_class.freezes_base else self.weights_dtype

    @property
    def rounds_weights(self) -> bool:
        """Returns whether trained weights are stored in 16 bits only, so that each update is rounded and the remainder
        is lost."""
        return self.weights_dtype != "float32" and not self.adapter_class.freezes_base

    @property
    def scales_loss(self) -> bool:
        return self._precision_class.scales_loss

    @property
    def masters(self) -> bool:
        """Returns whether the optimizer runs on the host. There it updates masters, or streamed weights without
        masters."""
        where = self._precision_class.steps_on_host
        return where == "always" or (where == "if streamed" and self.streams)

    @cached_property
    def streams(self) -> bool:
        """Returns whether weights are in host memory and copied to the device block by block."""
        return get_object(self.weights.target).streams

    @property
    def begins(self) -> dict[str, bool | str]:
        """Returns a mapping from data.bos, or for a mixture from each data.parts.<name>.bos, to its value. The mapping
        is empty for data without this key."""
        data = self.data.arguments
        sources = {"data": data} | {f"data.parts.{name}": source for name, source in data.get("parts", {}).items()}
        return {f"{name}.bos": source["bos"] for name, source in sources.items() if "bos" in source}

    @property
    def drive_folder(self) -> str | None:
        """Returns the folder on a drive for masters and optimizer state; None if they are in memory."""
        return self.weights.arguments.get("drive")

    @property
    def reads_weights(self) -> bool:
        """Returns whether the 16-bit weights of blocks are also on the drive, and are read from it for each pass."""
        return self.drive_folder is not None and self.weights.arguments.get("drive_holds") == "all"

    @property
    def order(self) -> str | None:
        """Returns the order in which the micro-batches of a window pass through streamed blocks; None if weights are
        not streamed. With by_layer, the block inputs of all micro-batches exist at the same time, so weights.order=auto
        selects by_layer only if block inputs are offloaded to the host.

        Raises:
            Refused: an unknown order.
        """
        order = self.weights.arguments.get("order")
        if order not in (None, *ORDERS):
            raise Refused(f"weights.order={order}: there is no such order. Type one of {', '.join(ORDERS)}.")
        if order == "auto":
            return "by_layer" if self.checkpointing.inputs_on_host else "by_micro_batch"
        return order

    @property
    def by_layer(self) -> bool:
        """Returns whether all micro-batches of a window pass through a block before the next block is copied."""
        return self.streams and self.order == "by_layer"

    @property
    def overlaps(self) -> bool:
        """Returns True if several micro-batches of a window are in progress at the same time."""
        return self.by_layer or self.strategy_class.overlaps_micro_batches


class PlanRun(Run, schema.PlanKeys):
    """All settings of plan.py: a run, and the card and the host for which the run is planned."""


# The argument of `fit` and `plan`: a run, or a config that was composed elsewhere, for example in a notebook.
Config = DictConfig | Run


def run_of(lines: Iterable[str], name: str = "config") -> Run:
    """Returns the run of typed overrides, without checking them. Args: lines: overrides that were checked before; name:
    the yaml of conf/ that they override."""
    return Run.from_draft(composed(lines, name))


def _class_of(node: schema.Node, base_name: str) -> type:
    """Returns the class of a node if it derives from the base class, else the base class. The base class is given by
    name, since importing it imports torch."""
    kind, base = get_object(node.target), get_object(base_name)
    return kind if isinstance(kind, type) and issubclass(kind, base) else base


@dataclass(frozen=True)
class Command:
    """A run, and the command line that started it.

    Args:
        run: the settings.
        folder: folder of the results.
        choices: group -> chosen yaml, for messages.
        typed: the typed overrides, for the summary; empty if a notebook passes none to `fit`.
        lines: the typed overrides as `fit` changes them, such as max_steps= in place of epochs=. The planner composes
            recipes from these lines.
    """

    run: Run
    folder: Path
    choices: Mapping[str, str]
    typed: Sequence[str]
    lines: Sequence[str]
