"""Defines the contract of a strategy: which part of the model and of the data a process has, and what it exchanges.

Code that trains, evaluates or saves calls it through `CausalLM.ranks`. The methods stand in the order in which a run
calls them, and do here what a single process does. The engines are torch's:

    OneDevice             here: strategy=auto
      Several             `several.py`: what all strategies for several processes share, one process per device
        DataParallel      `ddp.py`: each process has the full model, and other data
        Divided           there too: each process has a shard of each parameter
          FullyShard      `fsdp.py`: each weight, gradient and optimizer state is sharded over all processes
          TensorParallel  `tensor_parallel.py`: each matrix is sharded; in groups of ranks `fsdp_tensor_parallel.py`
          Pipeline        `pipeline.py`: each process has some of the blocks
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from weakref import ref

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from lowmem.data.loader import MicroBatch, Window
from lowmem.memory.ledger import Side
from lowmem.step.gradients import norm_of_all
from lowmem.techniques.strategy.in_place import InPlace


class OneDevice:
    """The strategy of a single process, and the base class of all others.

    Args: device: the type of the device that computes, cpu or cuda; devices: the number of processes.
    """

    several = False  # True if there may be more than one process
    rank, size = 0, 1  # among all processes
    data_rank, data_size = 0, 1  # among processes that read other data
    side: Side = "device"  # where parameters and gradients are between passes, and are stepped
    divides = False  # True if a process has only a shard of the parameters
    shards_matrices = False  # True if it has a part of each matrix, not some matrices in full
    adds_in_blocks = False  # True if devices exchange activations inside a block
    overlaps_micro_batches = False  # True if several micro-batches of a window are under way at once
    widens = False  # True if weights that rank 0 has read in fewer bits may be widened as they are sent
    in_numbers = True  # True if every rank has the weights before `shard`; False: only rank 0 has them
    builds = True  # this rank reads or draws the model's weights; False: they come from rank 0
    neediest = (0,)  # ranks worth tracing: no other needs more memory than the worst of these
    factor = 1.0  # the engine averages gradients over this many ranks; the loss is multiplied by it to undo that

    def __init__(self, device: str = "cpu", devices: int = 1) -> None:
        self.device = device

    @staticmethod
    def data_ranks(devices: int, **options: object) -> int:
        """Returns the `data_size` that a config leads to, before any process starts. Args: options: keys of the
        strategy's yaml.

        Raises:
            Refused: the options need another number of devices.
        """
        return 1

    def folder(self, run_folder: Path) -> Path:
        """Returns the folder for files that this process alone writes."""
        return run_folder

    def rank_0_first(self, work: str = "work alone") -> AbstractContextManager:
        """Wraps work that rank 0 does first, however long it takes, and that the other ranks do afterwards. Args: work:
        its name in messages."""
        return nullcontext()

    def leave_after_rank_0(self, work: str = "work alone") -> AbstractContextManager:
        """Wraps work that all ranks do at once; the others leave it only after rank 0 has left it."""
        return nullcontext()

    # --- before the first step ------------------------------------------------------------------------------------

    def building(self) -> AbstractContextManager:
        """Wraps the code that makes the model's modules."""
        return nullcontext()

    def widen(self, read: torch.dtype, dtype: torch.dtype) -> None:
        """Is told that rank 0 has read weights in another dtype than the run's, to which they are widened as they are
        sent."""

    def sent_as(self, tensor: Tensor) -> torch.dtype:
        """Returns the dtype that a tensor of the loaded model has in the run."""
        return tensor.dtype

    def shard(self, module: LightningModule) -> None:
        """Keeps only this rank's shard of the module. Before, the full module is on the host, the same on every rank,
        but without values on ranks that do not build it."""

    def lightning(self) -> Strategy:
        """Returns the strategy for Lightning's Trainer, which always sees one device."""
        return InPlace()

    def before_training(self, module: LightningModule) -> None:
        """Is called once, after everything was restored and moved to its device."""

    def release(self) -> ref | None:
        """Drops references to the process group and frees C++ objects that have one, before the group is left.

        Returns: a reference to DDP's Reducer, which is dead unless something else refers to it; None: there was none.
        """
        return None

    # --- each window ----------------------------------------------------------------------------------------------

    run_window: Callable[[Window], tuple[Tensor, Tensor | None]] | None = None  # the strategy's own; None: the module's
    forward: Callable[[MicroBatch], Tensor] | None = None  # the engine's forward pass; None: the module's own

    def micro_batch_context(self, last: bool) -> AbstractContextManager:
        """Wraps the forward and backward pass of one micro-batch. Args: last: True for the last one of a window."""
        return nullcontext()

    def gather_gradients(self) -> None:
        """Is called when backward has made all gradients. It moves them to the parameters that `local` returns."""

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Returns the L2 norm of the gradients over all ranks; each element counts once. Args: parameters: local ones
        that have a gradient."""
        return norm_of_all(parameters)

    def clear_gradients(self) -> None:
        """Is called after a step, done or skipped, when the local parameters have no gradients any more."""

    # --- parameters -----------------------------------------------------------------------------------------------

    def local(self, p: nn.Parameter) -> nn.Parameter:
        """Returns this rank's shard of a parameter: a plain tensor in the same memory, which the optimizer steps."""
        return p

    def local_parameters(self, model: nn.Module) -> nn.Module:
        """Returns a module whose `parameters` and `named_parameters` are the local ones, in the model's order."""
        return model

    def gathered(self, p: nn.Parameter, shard: Tensor) -> Tensor | None:
        """Returns the full tensor, in host memory and in the model's own layout, of which each rank passes its shard.
        The shard is laid out as this rank's shard of `p`: it is the weight itself, or a state of the weight's shape.
        All ranks call this in the same order; on another rank than 0 the result may be None."""
        return shard.cpu()

    def as_dtensor(self, p: nn.Parameter, shard: Tensor) -> Tensor:
        """Returns what a checkpoint stores of such a shard: a DTensor in the same memory if `p` is one, else the full
        tensor in the model's own layout. All ranks call this in the same order."""
        return shard

    def shard_of(self, p: nn.Parameter, full: Tensor) -> Tensor:
        """Returns this rank's shard of a tensor that every rank has in full. Nothing is sent."""
        return full

    # --- collectives of numbers and small objects, over the host --------------------------------------------------

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Returns the sum over the ranks that read other data."""
        return tensor

    def all_max(self, number: int) -> int:
        """Returns the largest of all ranks' numbers."""
        return number

    def any(self, flag: bool) -> bool:
        """Returns True if the flag is set on any rank."""
        return bool(self.all_max(int(flag)))

    def broadcast(self, value: object) -> object:
        """Returns rank 0's value on every rank. Args: value: anything that can be pickled."""
        return value

    def all_gather(self, value: object) -> list:
        """Returns on every rank the list of all ranks' values, in order of rank."""
        return [value]

    def barrier(self) -> None:
        """Waits until every rank has called this."""


ONE_DEVICE = OneDevice()  # it has no state, so all can share it
