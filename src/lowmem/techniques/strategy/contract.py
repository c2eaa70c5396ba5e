"""The contract of a strategy: which part of a model and of the data a process has, and what it does with the others.

Whoever trains, evaluates or saves asks it through `CausalLM.ranks`, in the order in which a run does; each answer here
is that of a process that is alone. The engines are torch's:

    OneDevice             here: strategy=auto
      Several             `several.py`: what all have in common that are several processes, one per device
        DataParallel      `ddp.py`: the whole model on each, other data
        Divided           there too: parameters of which each holds a part
          FullyShard      `fsdp.py`: each weight, gradient and state divided among them
          TensorParallel  `tensor_parallel.py`: each matrix; in groups of ranks `fsdp_tensor_parallel.py`
          Pipeline        `pipeline.py`: whole blocks
          ZeRO2, ZeRO3    `deepspeed.py`: DeepSpeed's own engine
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from weakref import ref

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from lowmem.data.loader import MicroBatch, Window
from lowmem.memory.ledger import Ledger, Side
from lowmem.techniques.arithmetic.gradients import norm_of_all


class OneDevice:
    """Args: device: the type of the device that computes, cpu or cuda; devices: how many processes there are."""

    several = False  # whether there may be more processes than this one
    rank, size = 0, 1  # of all processes
    data_rank, data_size = 0, 1  # of those that read data of their own
    side: Side = "device"  # where what is divided waits, and is stepped
    side_of_weights: Side = "device"  # where the module's parameters and their gradients are between passes
    divides = False  # whether parameters are held in parts, each by another process
    in_numbers = True  # `divide` reads numbers on every rank; else rank 0 alone has them until then
    builds = True  # whether the model's numbers are read or drawn here; else they come from rank 0
    neediest = (0,)  # ranks worth tracing: no other needs more memory than the worst of these
    factor = 1.0  # the engine averages gradients over this many ranks; the loss is multiplied by it to undo that

    def __init__(self, device: str = "cpu", devices: int = 1) -> None:
        self.device = device

    @staticmethod
    def data_ranks(devices: int, **options: object) -> int:
        """Returns: `data_size`, which a config tells before there is any process. Args: options: those of its yaml.

        Raises:
            Refused: options that so many devices do not make up.
        """
        return 1

    def folder(self, of_run: Path) -> Path:
        """Of the files that this process writes alone."""
        return of_run

    def rank_0_first(self, what: str = "work alone") -> AbstractContextManager:
        """Wraps work that rank 0 does first, however long it takes, and then the others. Args: what: names the work in
        messages."""
        return nullcontext()

    def leave_after_rank_0(self, what: str = "work alone") -> AbstractContextManager:
        """Wraps work that all ranks do at once; the others leave it only after rank 0 has left it."""
        return nullcontext()

    # --- before the first step ------------------------------------------------------------------------------------

    def building(self) -> AbstractContextManager:
        """Wraps the code that makes the model's modules."""
        return nullcontext()

    def shard(self, module: LightningModule) -> None:
        """Keeps this rank's shard of the module, which comes whole, on the host and the same everywhere; it has no
        numbers on ranks that do not build them."""

    def lightning(self) -> Strategy | str:
        """Returns the strategy that Lightning's Trainer gets: it believes that it runs on one device."""
        return "auto"

    def before_training(self, module: LightningModule) -> None:
        """Is called once, when everything is restored and on its device."""

    def release(self) -> ref | None:
        """Frees what refers to the process group from C++, which is about to be left.

        Returns: DDP's Reducer, dead unless something else still refers to it; None: there was none.
        """
        return None

    # --- each window ----------------------------------------------------------------------------------------------

    run_window: Callable[[Window], tuple[Tensor, Tensor | None]] | None = None  # a strategy's; None: the module's own
    forward: Callable[[MicroBatch], Tensor] | None = None  # an engine's around the module; None: the module's own

    def micro_batch_context(self, last: bool) -> AbstractContextManager:
        """Wraps the forward and backward pass of one micro-batch. Args: last: whether it is the last of its window."""
        return nullcontext()

    def gather_gradients(self) -> None:
        """Is called when all gradients are made, and puts them where `local` parameters have theirs."""

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Returns the L2 norm over all ranks, each element counted once. Args: parameters: local ones that have
        a gradient."""
        return norm_of_all(parameters)

    def clear_gradients(self) -> None:
        """Is called when the step is done or skipped, and the local parameters have no gradients any more."""

    # --- parameters -----------------------------------------------------------------------------------------------

    def local(self, p: nn.Parameter) -> nn.Parameter:
        """Returns this rank's shard of a parameter, a plain tensor in the same memory: the optimizer steps it."""
        return p

    def local_parameters(self, model: nn.Module) -> nn.Module:
        """Returns a module whose `parameters` and `named_parameters` are the local ones, in the model's order."""
        return model

    def gathered(self, p: nn.Parameter, shard: Tensor) -> Tensor | None:
        """Returns the full tensor, in host memory and in the model's own layout, of which each rank passes its shard.
        The shard is laid out as this rank's shard of `p`: it is the weight itself, or a state of the weight's shape.
        All ranks call this in the same order; on another rank than 0 the result may be None."""
        return shard

    def as_dtensor(self, p: nn.Parameter, shard: Tensor) -> Tensor:
        """Returns what a checkpoint stores of such a shard: a DTensor in the same memory if `p` is one, else the full
        tensor in the model's own layout. All ranks call this in the same order."""
        return shard

    def shard_of(self, p: nn.Parameter, full: Tensor) -> Tensor:
        """Returns this rank's shard of a tensor that every rank has in full. Nothing is sent."""
        return full

    def register_memory(self, ledger: Ledger) -> None:
        """Tells the ledger of weights and gradients in other memory than the module's parameters and theirs."""

    def after_load(self) -> None:
        """Is called after a checkpoint was written into the local parameters."""

    # --- collectives of numbers and small objects, over the host --------------------------------------------------

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Returns the sum over the ranks that read data of their own."""
        return tensor

    def all_max(self, number: int) -> int:
        """Returns the largest of all ranks' numbers."""
        return number

    def any(self, flag: bool) -> bool:
        """Returns whether the flag is set on any rank."""
        return bool(self.all_max(int(flag)))

    def broadcast(self, value: object) -> object:
        """Returns on every rank what rank 0 passes: anything that can be pickled."""
        return value

    def all_gather(self, value: object) -> list:
        """Returns on every rank a list of what each of them passes, by rank."""
        return [value]

    def barrier(self) -> None:
        """Waits until every rank is here."""


ONE_DEVICE = OneDevice()  # without state, so that many may share it
