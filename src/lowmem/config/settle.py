"""Defines `Run`, which contains all settings of a run. `settled` of `check.py` creates an immutable `Run` from the
composed config once, and all other code reads the `Run`.

A `Run` has the keys of conf/config.yaml as typed attributes, and properties for facts that follow from several keys.
Some facts become known later: the device, the number of steps in epochs=, and a batch size that a search finds. When
such a fact is known, `Run.knowing` makes a new `Run` that contains it.
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
    """All settings of a run. A `Run` is immutable: `knowing` and `replacing` return a new `Run`."""

    output_dir: str | None = None  # the folder of the results; None until `fit` sets it
    device: str  # `Keys` allows auto, cpu and cuda; tests also use meta
    _draft: DictConfig = PrivateAttr()  # the composed config, with its interpolations

    @classmethod
    def from_draft(cls, draft: DictConfig) -> "Run":
        """Returns the run of a composed config. Raises pydantic's ValidationError for a wrong type or range; `settled`
        of `check.py` finds such errors first, and raises Refused."""
        kind = PlanRun if "gpu" in draft else Run
        run = kind.model_validate(OmegaConf.to_container(draft, resolve=True))
        run._draft = draft
        return run

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "Run":
        """Returns the run with the given plain values, such as the result of `as_dict`."""
        return cls.from_draft(OmegaConf.create(values))

    def knowing(self, **facts: object) -> "Run":
        """Returns a run in which the keys of `facts` have the given values, and interpolations that refer to these keys
        are resolved again. If a new value is a mapping, it changes only the keys that it contains."""
        return Run.from_draft(OmegaConf.merge(self._draft, facts))

    def replacing(self, key: str, value: object) -> "Run":
        """Returns a run in which a key, such as adapter or model.architecture, has exactly this value. Unlike in
        `knowing`, a mapping replaces the old mapping as a whole."""
        draft = self._draft.copy()
        OmegaConf.update(draft, key, value, merge=False)
        return Run.from_draft(draft)

    def sized(self) -> "Run":
        """Returns this run, with batch_size=1 in place of batch_size=auto, for work that does not depend on the batch
        size."""
        return self.knowing(batch_size=1) if self.batch_size == "auto" else self

    def resolved(self) -> "Run":
        """Returns a run in which interpolations are replaced by their values. The method `knowing` of the returned run
        changes only the given keys, and not the values that were interpolated from them."""
        return Run.read(self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        """Returns the values as plain Python objects. `Run.read` makes a run from them."""
        return OmegaConf.to_container(self._draft, resolve=True)

    # --- techniques ---------------------------------------------------------------------------------------------------

    def technique(self, group: str) -> Technique:
        """Returns the declared properties of the technique that the run has chosen in a group."""
        return self._techniques[group]

    @cached_property
    def _techniques(self) -> dict[str, Technique]:
        return {group: technique_of(getattr(self, group, None), group) for group in groups()}

    # --- the device ---------------------------------------------------------------------------------------------------

    @cached_property
    def runs_on(self) -> str:
        """Returns "cpu" or "cuda": for device=auto, "cuda" if torch finds a CUDA device."""
        import torch  # imported here, because commands read the settings before they need torch

        return self.device if self.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"

    @cached_property
    def limit(self) -> int | None:
        """Returns memory.limit in bytes; None: no limit. `memory/cap.py` says which memory the limit includes."""
        return cap.parse_bytes(self.memory.limit)

    @property
    def device_bytes(self) -> int | None:
        """Returns the bytes of memory.limit, or else of the card's memory; None for a CPU without a limit."""
        import torch

        of_card = torch.cuda.get_device_properties().total_memory if self.runs_on == "cuda" else None
        return self.limit or of_card

    @property
    def needs_compiler(self) -> bool:
        """Returns whether the run needs a C++ compiler, because it generates code for a CPU. (On a card, Triton
        compiles generated code.)"""
        return self.runs_on == "cpu" and any(self.technique(group).generates_code for group in ("optim", "compile"))

    @property
    def compiles_blocks(self) -> bool:
        """Returns whether torch.compile compiles each block. On a CPU, the memory meter cannot see allocations in
        compiled blocks."""
        return self.technique("compile").generates_code

    @property
    def checkpointing(self) -> Technique:
        return self.technique("gradient_checkpointing")

    @property
    def loss_class(self) -> type:
        """Returns the class of the loss. If the `_target_` is not a subclass of `Loss`, for example a function, returns
        `Loss`."""
        return _class_of(self.loss, "lowmem.techniques.loss.cross_entropy.Loss")

    @property
    def adapter_class(self) -> type:
        """Returns the class of the adapter. If the `_target_` is not a subclass of `Adapter`, for example a function,
        returns `Adapter`."""
        return _class_of(self.adapter, "lowmem.techniques.adapter.contract.Adapter")

    @property
    def exports_adapter(self) -> bool:
        """Returns whether an export contains only the adapter, and not the full model. A base model with random initial
        weights is always exported with its adapter, because its weights are stored nowhere else."""
        return self.adapter_class.freezes_base and self.model.pretrained and not self.merge

    # --- several devices ----------------------------------------------------------------------------------------------

    @property
    def strategy_class(self) -> type:
        """Returns the class of the strategy, a subclass of `OneDevice`."""
        return get_object(self.strategy.target)

    @property
    def offloads(self) -> bool:
        """Returns whether the strategy keeps each device's shard in host memory and updates the shard there."""
        return self.strategy.arguments.get("offload", False)

    @property
    def several(self) -> bool:
        """Returns whether there may be several processes, one per device. This property reads the declared properties
        of the strategy instead of its class, because importing the class would import torch."""
        return not self.technique("strategy").one_process

    @property
    def loads_once(self) -> bool:
        """Returns whether only rank 0 has the full model in host memory while the model is loaded and sharded."""
        return not self.strategy_class.in_numbers

    @property
    def widens_as_sent(self) -> bool:
        """Returns whether rank 0 may load and send weights in the dtype of their files if this dtype has fewer bits
        than the dtype of the run. Each rank then converts its shard to the dtype of the run."""
        return self.strategy_class.widens

    @property
    def saves_parts(self) -> bool:
        """Returns whether each process holds and saves only a part of the model and of the optimizer state."""
        return self.strategy_class.divides

    @cached_property
    def data_ranks(self) -> int:
        """Returns the number of parts into which the data are divided, one for each process or group of processes."""
        return self.strategy_class.data_ranks(self.devices, **self.strategy.arguments)

    # --- the schedule -------------------------------------------------------------------------------------------------

    @cached_property
    def windows(self) -> WindowSize | None:
        """Returns the number of micro-batches of each window, or None while batch_size is still auto."""
        if self.batch_size == "auto":
            return None
        shared = {"devices": self.data_ranks} if self.accumulation.arguments.get("devices") == 1 else {}
        return instantiate(self.accumulation, **shared)

    @property
    def accumulates(self) -> bool:
        """Returns whether a window may have several micro-batches. True while batch_size is still auto."""
        return self.windows is None or self.windows.largest > 1

    @property
    def in_backward(self) -> bool:
        """Returns whether the optimizer updates each parameter on the device during backward, as soon as its gradient
        exists."""
        return self.optim.in_backward

    @property
    def early(self) -> bool:
        """Returns whether the host updates each weight, or its master, already during the backward pass, as soon as its
        gradient from the window's last micro-batch has arrived in host memory. False if the optimizer runs on the
        device, with precision.early_step=false, and with norm clipping (clip=) or a loss scale, which need all
        gradients before the first update."""
        early = self.precision.arguments.get("early_step", True)  # the classes of precisions have the same default
        return self.masters and early and self.clip is None and not self.scales_loss

    # --- dtypes, and where weights are --------------------------------------------------------------------------------

    @cached_property
    def _precision_class(self) -> type:
        return get_object(self.precision.target)

    @property
    def plugins(self) -> list[schema.Node]:
        """Returns the plugins for Lightning's Trainer: the precision, and the plugins of trainer.plugins."""
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
        """Returns the bytes per element of matmul inputs. Weights and gradients have the same size per element when
        they are copied between host and device."""
        return self._precision_class.dtype.itemsize

    @property
    def loaded_in(self) -> str:
        """Returns the dtype in which the weights of a model are loaded: float32, bfloat16 or float16. This is
        `weights_dtype`, with one exception: if the optimizer runs on the host and only an adapter is trained, the base
        weights have no masters and are loaded in the dtype in which the device stores them."""
        return self.multiplies_in if self.masters and self.adapter_class.freezes_base else self.weights_dtype

    @property
    def rounds_weights(self) -> bool:
        """Returns whether trained weights are stored only in 16 bits, so that each update rounds them."""
        return self.weights_dtype != "float32" and not self.adapter_class.freezes_base

    @property
    def scales_loss(self) -> bool:
        return self._precision_class.scales_loss

    @property
    def masters(self) -> bool:
        """Returns whether the optimizer runs on the host. There it updates masters, or streamed weights without
        masters."""
        return self.keeps_masters or (self._precision_class.steps_on_host == "if streamed" and self.streams)

    @property
    def keeps_masters(self) -> bool:
        """Returns whether the precision keeps an fp32 master of each trained weight in host memory."""
        return self._precision_class.steps_on_host == "always"

    @cached_property
    def streams(self) -> bool:
        """Returns whether weights are in host memory and copied to the device block by block."""
        return get_object(self.weights.target).streams

    @property
    def begins(self) -> dict[str, bool | str]:
        """Returns the values of data.bos, and for a mixture of each data.parts.<name>.bos: key -> value. Empty for data
        without this key."""
        data = self.data.arguments
        sources = {"data": data} | {f"data.parts.{name}": source for name, source in data.get("parts", {}).items()}
        return {f"{name}.bos": source["bos"] for name, source in sources.items() if "bos" in source}

    @property
    def drive_folder(self) -> str | None:
        """Returns the folder on a drive for masters and optimizer state; None if they are in memory."""
        return self.weights.arguments.get("drive")

    @property
    def reads_weights(self) -> bool:
        """Returns whether the drive also stores the 16-bit weights of blocks, which each pass then reads from the
        drive."""
        return self.drive_folder is not None and self.weights.arguments.get("drive_holds") == "all"

    @property
    def order(self) -> str | None:
        """Returns the order in which the micro-batches of a window pass through streamed blocks, by_layer or
        by_micro_batch; None if weights are not streamed. With by_layer, the block inputs of all micro-batches exist at
        the same time, so weights.order=auto selects by_layer only if block inputs are offloaded to the host.

        Raises:
            Refused: `weights.order` is not in ORDERS.
        """
        order = self.weights.arguments.get("order")
        if order not in (None, *ORDERS):
            raise Refused(f"weights.order={order}: there is no such order. Type one of {', '.join(ORDERS)}.")
        if order == "auto":
            return "by_layer" if self.checkpointing.inputs_on_host else "by_micro_batch"
        return order

    @property
    def by_layer(self) -> bool:
        """Returns whether all micro-batches of a window pass through a streamed block before any of them passes through
        the next block."""
        return self.streams and self.order == "by_layer"

    @property
    def overlaps(self) -> bool:
        """Returns True if several micro-batches of a window are in progress at the same time."""
        return self.by_layer or self.strategy_class.overlaps_micro_batches


class PlanRun(Run, schema.PlanKeys):
    """All settings of plan.py: a run, the machine for which the run is planned, and the search for recipes."""


# What `fit` and `plan` accept: a run, or a composed config, for example from a notebook.
Config = DictConfig | Run


def run_of(lines: Iterable[str], name: str = "config") -> Run:
    """Returns the run of these typed overrides of conf/<name>.yaml, without the checks of `check.py`."""
    return Run.from_draft(composed(lines, name))


def _class_of(node: schema.Node, base_name: str) -> type:
    """Returns the class of a node if it is a subclass of the base class, else the base class. The base class is given
    by name, because an import at the top of this file would import torch."""
    kind, base = get_object(node.target), get_object(base_name)
    return kind if isinstance(kind, type) and issubclass(kind, base) else base


@dataclass(frozen=True)
class Command:
    """A run, and the command line that started it.

    Args:
        run: the settings.
        folder: folder of the results.
        choices: group -> chosen yaml, for messages and results.
        typed: the typed overrides, for the summary; empty if a notebook passes none to `fit`.
        lines: the typed overrides as `fit` changes them, such as max_steps= in place of epochs=. The planner composes
            recipes from these lines.
    """

    run: Run
    folder: Path
    choices: Mapping[str, str]
    typed: Sequence[str]
    lines: Sequence[str]
