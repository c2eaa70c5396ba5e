"""What a config means, worked out once: the run, its plan and the refusals ask here."""

from functools import cached_property

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from lowmem.accumulation import WindowSize
from lowmem.instantiate import instantiate
from lowmem.memory import limit
from lowmem.techniques import GROUPS, Technique, declared

SIXTEEN = ("bfloat16", "float16")  # products in 16 bits


def steps_early(wanted: bool, clip: float | None, scales_loss: bool) -> bool:
    """Whether masters step as their gradients arrive: a norm, or a loss scale, needs all gradients first."""
    return wanted and clip is None and not scales_loss


class Settings:
    """Args: cfg: composed; it does not change any more. What is never asked is never worked out."""

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg

    @cached_property
    def device(self) -> str:
        """cpu or cuda."""
        import torch  # not above: a command's arguments are read before it is needed

        asked = self.cfg.device
        return asked if asked != "auto" else "cuda" if torch.cuda.is_available() else "cpu"

    @cached_property
    def limit(self) -> int | None:
        """Bytes that the device's tensors may take, where memory.limit says so."""
        return limit.parse(self.cfg.memory.limit)

    @property
    def _strategy_class(self) -> type:
        return get_object(self.cfg.strategy._target_)

    @property
    def several(self) -> bool:
        """Whether there may be several processes, one per device."""
        return self._strategy_class.several

    @property
    def loads_once(self) -> bool:
        """Whether of several processes rank 0 alone has the whole model in host memory, for a time."""
        return not getattr(self._strategy_class, "in_numbers", True)

    @property
    def saves_parts(self) -> bool:
        """Whether each of them writes what it has of the model and its optimizer."""
        return self._strategy_class.divides

    @cached_property
    def data_ranks(self) -> int:
        """How many of them read data of their own."""
        ours = ("_target_", "_partial_", "declares")
        options = {key: value for key, value in self.cfg.strategy.items() if key not in ours}
        return self._strategy_class.data_ranks(self.cfg.devices, **options)

    @cached_property
    def strategy(self) -> Technique:
        return declared(self.cfg, "strategy")

    @cached_property
    def windows(self) -> WindowSize | None:
        """None while batch_size=auto: a search ends at a size that is not known yet."""
        if self.cfg.batch_size == "auto":
            return None
        shared = {"devices": self.data_ranks} if self.cfg.accumulation.get("devices") == 1 else {}
        return instantiate(OmegaConf.merge(self.cfg.accumulation, shared))

    @property
    def accumulates(self) -> bool:
        """Whether a window may have several micro-batches."""
        return self.windows is None or self.windows.largest > 1

    @property
    def in_backward(self) -> bool:
        """Whether each gradient steps its parameter as soon as it exists."""
        return self.cfg.optim.in_backward

    @cached_property
    def _precision_class(self) -> type:
        return get_object(self.cfg.trainer.plugins.precision._target_)

    @property
    def multiplies_in(self) -> str:
        """What its matrix products read: float32, tensorfloat32, bfloat16 or float16."""
        kind = self._precision_class
        return "tensorfloat32" if kind.tf32 else str(kind.dtype).removeprefix("torch.")

    @property
    def loaded_in(self) -> str:
        """float32, bfloat16 or float16: what a checkpoint of the model is read into. Weights that are to have masters
        come as those; where an adapter is all that is trained, none has, and they come as the device holds them."""
        return self.multiplies_in if self.masters and self.adapter.freezes_base else self.cfg.weights_dtype

    @property
    def rounds_weights(self) -> bool:
        """Whether a step's sum is rounded to 16 bits, and nothing keeps what is lost."""
        return self.cfg.weights_dtype != "float32" and not self.adapter.stays_wide

    @property
    def scales_loss(self) -> bool:
        return getattr(self._precision_class, "scales_loss", False)

    @property
    def masters(self) -> bool:
        """Whether the optimizer steps on the host."""
        return self._precision_class.optimizer_side == "host"

    @cached_property
    def streams(self) -> bool:
        """Whether weights wait in host memory for the turn of their block."""
        return get_object(self.cfg.weights._target_).streams

    @property
    def early(self) -> bool:
        """Whether masters step as their gradients arrive."""
        wanted = self.masters and self.cfg.master.get("early_step", False)
        return steps_early(wanted, self.cfg.clip, self.scales_loss)

    @cached_property
    def precision(self) -> Technique:
        return declared(self.cfg, "precision")

    @cached_property
    def optim(self) -> Technique:
        return declared(self.cfg, "optim")

    @cached_property
    def checkpointing(self) -> Technique:
        return declared(self.cfg, "gradient_checkpointing")

    @cached_property
    def adapter(self) -> Technique:
        return declared(self.cfg, "adapter")

    @property
    def needs_compiler(self) -> bool:
        """For code that runs on a CPU; on a card Triton makes it."""
        return self.device == "cpu" and any(declared(self.cfg, group).generates_code for group in GROUPS)
