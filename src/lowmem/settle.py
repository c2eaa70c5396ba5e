"""The config is settled once: `settled` makes a frozen `Run` of what was composed, and everything behind it reads that.

A `Run` has the keys of conf/config.yaml as attributes, with their types, and what follows from several of them as
properties. What becomes known later (the device, the steps of epochs=, a batch size that was searched for) makes
another `Run` of the same lines, in which every value that depends on it is worked out again.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import PrivateAttr

from lowmem import schema
from lowmem.accumulation import WindowSize
from lowmem.errors import Refused
from lowmem.instantiate import instantiate
from lowmem.memory import cap
from lowmem.overrides import composed
from lowmem.techniques import Technique, groups, technique_of


def steps_early(wanted: bool, clip: float | None, scales_loss: bool) -> bool:
    """Whether masters step as their gradients arrive: a norm, or a loss scale, needs all gradients first."""
    return wanted and clip is None and not scales_loss


class Run(schema.Keys):
    """A run as it was asked for. It does not change; `knowing` and `replacing` return another one."""

    output_dir: str | None = None  # known as soon as there is a folder
    device: str  # typed is one of Keys'; tests also compare in float64 and ask for meta
    weights_dtype: str
    _draft: DictConfig = PrivateAttr()  # as it was composed, with its interpolations

    @classmethod
    def of(cls, draft: DictConfig) -> "Run":
        """Args: draft: composed, of values that are known to be right."""
        kind = PlanRun if "gpu" in draft else Run
        run = kind.model_validate(OmegaConf.to_container(draft, resolve=True))
        run._draft = draft
        return run

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "Run":
        """Args: values: of `as_dict`."""
        return cls.of(OmegaConf.create(values))

    def knowing(self, **facts: object) -> "Run":
        """Another run, of which these keys have these values, and what depends on them follows. A mapping sets only the
        keys that it has."""
        return Run.of(OmegaConf.merge(self._draft, facts))

    def replacing(self, key: str, value: object) -> "Run":
        """Another run, in which nothing is left of what this key had, such as adapter or model.architecture."""
        draft = self._draft.copy()
        OmegaConf.update(draft, key, value, merge=False)
        return Run.of(draft)

    def sized(self) -> "Run":
        """Another run with a number for batch_size, for what does not depend on which number it is."""
        return self.knowing(batch_size=1) if self.batch_size == "auto" else self

    def resolved(self) -> "Run":
        """Another run whose values do not depend on each other any more: `knowing` sets single ones."""
        return Run.read(self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        """Plain values, of which `Run.read` makes the same run."""
        return OmegaConf.to_container(self._draft, resolve=True)

    # --- techniques ---------------------------------------------------------------------------------------------------

    def technique(self, group: str) -> Technique:
        """What the technique that was chosen of a group declares."""
        return self._techniques[group]

    def any(self, flag: str) -> bool:
        """Whether one of the run's techniques declares it."""
        return any(getattr(technique, flag) for technique in self._techniques.values())

    @cached_property
    def _techniques(self) -> dict[str, Technique]:
        return {group: technique_of(getattr(self, group, None), group) for group in groups()}

    # --- the device ---------------------------------------------------------------------------------------------------

    @cached_property
    def runs_on(self) -> str:
        """cpu or cuda."""
        import torch  # not above: a command's arguments are read before it is needed

        return self.device if self.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"

    @cached_property
    def limit(self) -> int | None:
        """Bytes that the device's tensors may take, where memory.limit says so."""
        return cap.parse_bytes(self.memory.limit)

    @property
    def needs_compiler(self) -> bool:
        """For code that runs on a CPU; on a card Triton makes it."""
        return self.runs_on == "cpu" and self.any("generates_code")

    # --- several devices ----------------------------------------------------------------------------------------------

    @property
    def _strategy_class(self) -> type:
        return get_object(self.strategy.target)

    @property
    def several(self) -> bool:
        """Whether there may be several processes, one per device."""
        return self._strategy_class.several

    @property
    def loads_once(self) -> bool:
        """Whether of several processes rank 0 alone has the whole model in host memory, for a time."""
        return not self._strategy_class.in_numbers

    @property
    def saves_parts(self) -> bool:
        """Whether each of them writes what it has of the model and its optimizer."""
        return self._strategy_class.divides

    @cached_property
    def data_ranks(self) -> int:
        """How many of them read data of their own."""
        return self._strategy_class.data_ranks(self.devices, **self.strategy.arguments)

    # --- the schedule -------------------------------------------------------------------------------------------------

    @cached_property
    def windows(self) -> WindowSize | None:
        """None while batch_size=auto: a search ends at a size that is not known yet."""
        if self.batch_size == "auto":
            return None
        shared = {"devices": self.data_ranks} if self.accumulation.arguments.get("devices") == 1 else {}
        return instantiate(self.accumulation, **shared)

    @property
    def accumulates(self) -> bool:
        """Whether a window may have several micro-batches."""
        return self.windows is None or self.windows.largest > 1

    @property
    def in_backward(self) -> bool:
        """Whether each gradient steps its parameter as soon as it exists."""
        return self.optim.in_backward

    @property
    def early(self) -> bool:
        """Whether masters step as their gradients arrive."""
        wanted = self.masters and self.master is not None and self.master.early_step
        return steps_early(wanted, self.clip, self.scales_loss)

    # --- dtypes, and where weights are --------------------------------------------------------------------------------

    @cached_property
    def _precision_class(self) -> type:
        return get_object(self.trainer.plugins.precision.target)

    @property
    def multiplies_in(self) -> str:
        """What its matrix products read: float32, tensorfloat32, bfloat16 or float16."""
        kind = self._precision_class
        return "tensorfloat32" if kind.tf32 else str(kind.dtype).removeprefix("torch.")

    @property
    def product_bytes(self) -> int:
        """Bytes of an element of what products read: of activations, and of the weights and gradients that travel
        between the host and the device."""
        return self._precision_class.dtype.itemsize

    @property
    def loaded_in(self) -> str:
        """float32, bfloat16 or float16: what a checkpoint of the model is read into. Weights that are to have masters
        come as those; where an adapter is all that is trained, none has, and they come as the device holds them."""
        return self.multiplies_in if self.masters and self.any("freezes_base") else self.weights_dtype

    @property
    def rounds_weights(self) -> bool:
        """Whether a step's sum is rounded to 16 bits, and nothing keeps what is lost."""
        return self.weights_dtype != "float32" and not self.any("stays_wide")

    @property
    def scales_loss(self) -> bool:
        return self._precision_class.scales_loss

    @property
    def masters(self) -> bool:
        """Whether the optimizer steps on the host."""
        return self._precision_class.optimizer_side == "host"

    @cached_property
    def streams(self) -> bool:
        """Whether weights wait in host memory for the turn of their block."""
        return get_object(self.weights.target).streams


class PlanRun(Run, schema.PlanKeys):
    """A run that plan.py was asked about."""


def run_of(lines: Iterable[str], name: str = "config") -> Run:
    """The run that these lines make. Args: lines: known to be right; name: which of conf/ they are composed with."""
    return Run.of(composed(lines, name))


def settled(cfg: DictConfig | Run) -> Run:
    """Args: cfg: composed; a run, which is settled, is returned as it is.

    Raises:
        Refused: a value of another type or range, a key that nothing reads, an interpolation of what is not there. All
            are said at once.
    """
    if isinstance(cfg, Run):
        return cfg
    try:
        errors = list(_missing(cfg)) or schema.errors(cfg)
    except OmegaConfBaseException as error:
        said = str(error).partition("\n")[0]
        errors = [f"{error.full_key}: {said}. Type a value for it, or ${{<key>}} of a key that there is."]
    if errors:
        raise Refused("\n".join(errors))
    return Run.of(cfg)


def _missing(cfg: DictConfig) -> Iterator[str]:
    for key in cfg:  # an interpolation of what is not there is told of where it was typed, not where it is used
        OmegaConf.is_missing(cfg, key) or cfg[key]
    return (f"{key} has no value: type {key}=<value>." for key in sorted(OmegaConf.missing_keys(cfg)))


@dataclass(frozen=True)
class Command:
    """A run, and what is known of how it was asked for. A notebook has typed nothing.

    folder: of its results. choices: group -> chosen yaml, for messages. typed: lines, for the summary. lines: the same
    for composing recipes, with the steps that epochs= takes.
    """

    run: Run
    folder: Path
    choices: Mapping[str, str]
    typed: Sequence[str]
    lines: Sequence[str]
