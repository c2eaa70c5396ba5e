"""The interface of a strategy, which divides the model or the data over processes, and provides the collectives for
this.

`process_group.py` creates the strategy of a run. Code that builds, trains, evaluates or saves a model gets the strategy
under the name `ranks`, for example as `CausalLM.ranks`. `OneDevice` implements all methods for a single process. Its
subclasses use torch's sharding and collectives:

    OneDevice             this module: strategy=auto
      Several             `several.py`: base class of strategies with several processes, one process per device
        DataParallel      `ddp.py`: each process has the full model, and reads its own share of the data
        Divided           `several.py`: base class of strategies in which a process has only a part of the parameters
          FullyShard      `fsdp.py`: each weight, gradient and optimizer state is sharded over all processes
          TensorParallel  `tensor_parallel.py`: each process computes with its shards of the matrices
            FullyShardTensorParallel  `fsdp_tensor_parallel.py`: tensor parallelism in groups, FSDP over the groups
          Pipeline        `pipeline.py`: each process has consecutive blocks
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
    """The strategy of a single process, and the base class of all strategies.

    All ranks must call the methods in the same order, because a subclass may communicate in them. Only these methods
    never communicate: `data_ranks`, `folder`, `widen`, `sent_as`, `lightning`, `release`, `local`, `local_parameters`
    and `shard_of`.

    Args:
        device: the type of the device that computes, cpu or cuda.
        devices: the number of processes.
    """

    several = False  # True: there may be more than one process
    rank, size = 0, 1  # this process's rank, and the number of processes
    data_rank, data_size = 0, 1  # index of this process's share of the data, and the number of shares
    # "host": parameters and gradients are in host memory between passes, and the CPU runs the optimizer
    side: Side = "device"
    divides = False  # True: a process has only a part of the parameters
    shards_matrices = False  # True: a process may have only shards of matrices; False: matrices are complete
    adds_in_blocks = False  # True: blocks all-reduce activations in their forward pass
    overlaps_micro_batches = False  # True: several micro-batches of a window are in progress at the same time
    widens = False  # True: rank 0 may send weights with fewer bits than the run's dtype; each rank converts its shard
    in_numbers = True  # True: every rank builds the model with weights; False: only rank 0 does (see `shard`)
    builds = True  # True: this rank loads or initializes the weights; False: it receives the weights from rank 0
    neediest = (0,)  # ranks to trace for a memory plan: one of them has the highest peak
    factor = 1.0  # factor of the loss; cancels torch's averaging of gradients over this number of ranks

    def __init__(self, device: str = "cpu", devices: int = 1) -> None:
        self.device = device

    @staticmethod
    def data_ranks(devices: int, **options: object) -> int:
        """Returns the `data_size` that the strategy will have. Needs no process group.

        Args:
            devices: number of devices.
            options: the keys of the strategy's yaml.

        Raises:
            Refused: the options do not fit the number of devices.
        """
        return 1

    def folder(self, run_folder: Path) -> Path:
        """Returns the folder for files that only this process writes."""
        return run_folder

    def rank_0_first(self, work: str = "work alone") -> AbstractContextManager:
        """Context manager for work that rank 0 does first. The other ranks wait, without a time limit, and then do the
        work too. Args: work: name of the work, for messages. Raises: RankLost: on the other ranks, if rank 0 fails,
        exits or cannot be reached."""
        return nullcontext()

    def leave_after_rank_0(self, work: str = "work alone") -> AbstractContextManager:
        """Context manager for work that all ranks do at the same time. At its end, the other ranks wait without a time
        limit until rank 0 has finished. Args, Raises: see `rank_0_first`."""
        return nullcontext()

    # --- before the first step ------------------------------------------------------------------------------------

    def building(self) -> AbstractContextManager:
        """Context manager for the code that builds the model."""
        return nullcontext()

    def widen(self, read: torch.dtype, dtype: torch.dtype) -> None:
        """Sets the result of `sent_as` for weights that were loaded with fewer bits than the run's dtype. Called only
        on rank 0. Args: read: dtype of the loaded weights; dtype: the run's dtype, to which each rank converts its
        shard."""

    def sent_as(self, tensor: Tensor) -> torch.dtype:
        """Returns the dtype that a tensor of the loaded model will have in the run."""
        return tensor.dtype

    def shard(self, module: LightningModule) -> None:
        """Replaces the module's parameters by this rank's shards, if `divides` is True. Before this call, every rank
        has the modules of the full model: with weights in host memory if `builds` is True, otherwise on the meta
        device. Raises: Refused: the strategy cannot divide this model."""

    def lightning(self) -> Strategy:
        """Returns the strategy for Lightning's Trainer: a strategy for one device, even if there are several ranks."""
        return InPlace()

    def before_training(self, module: LightningModule) -> None:
        """Called once before the first step, when weights and optimizer state are on their devices. In a resumed run
        they have been restored from the checkpoint by then; the random states are restored after this call."""

    def release(self) -> ref | None:
        """Drops references to the process group, and to C++ objects that refer to the group. Called before the process
        leaves the group.

        Returns:
            A weak reference to DDP's Reducer; it is dead unless other objects still refer to the Reducer. None: this
            process has no Reducer.
        """
        return None

    # --- each window ----------------------------------------------------------------------------------------------

    run_window: Callable[[Window], tuple[Tensor, Tensor | None]] | None = None  # None: use `CausalLM.run_window`
    # the module's forward pass as wrapped by DDP; None: use the module's own forward pass
    forward: Callable[[MicroBatch], Tensor] | None = None

    def micro_batch_context(self, last: bool) -> AbstractContextManager:
        """Context manager for the forward and backward pass of one micro-batch. Args: last: True for the last
        micro-batch of a window."""
        return nullcontext()

    def gather_gradients(self) -> None:
        """Sets `grad` of the parameters that `local` returns, and sums gradients over ranks where backward has not done
        so. Called after the last backward pass of a window. Raises: Refused: a gradient is missing or was not
        summed, or differs between ranks whose copies of a weight must stay equal."""

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Returns the L2 norm of the gradients of the full model. An element that is present on several ranks counts
        once. Args: parameters: the local parameters that have a gradient."""
        return norm_of_all(parameters)

    def clear_gradients(self) -> None:
        """Frees or resets the gradients of the model's parameters, after the gradients of local parameters have been
        freed. Called at the end of each window that was computed, even if its step was skipped."""

    # --- parameters -----------------------------------------------------------------------------------------------

    def local(self, p: nn.Parameter) -> nn.Parameter:
        """Returns this rank's shard of a parameter as a plain parameter, which shares the shard's memory. The optimizer
        updates local parameters."""
        return p

    def local_parameters(self, model: nn.Module) -> nn.Module:
        """Returns a module whose `parameters` and `named_parameters` are the local parameters, in the model's order."""
        return model

    def gathered(self, p: nn.Parameter, shard: Tensor) -> Tensor | None:
        """Gathers a full tensor in host memory, in the layout of the unsharded model. All ranks must call this method.

        Args:
            p: the parameter.
            shard: this rank's shard of the weight, or of an optimizer state with the shape of the weight; it has the
                shape of `local(p)`.

        Returns:
            The full tensor on rank 0; the full tensor or None on other ranks.
        """
        return shard.cpu()

    def as_dtensor(self, p: nn.Parameter, shard: Tensor) -> Tensor:
        """Returns the tensor that a checkpoint stores for a shard: a DTensor that shares the shard's memory, or the
        full tensor in the layout of the unsharded model. All ranks must call this method. Args: see `gathered`."""
        return shard

    def shard_of(self, p: nn.Parameter, full: Tensor) -> Tensor:
        """Returns this rank's shard of a full tensor, without communication. Args: p: the parameter whose placement
        determines the shard; full: a tensor in the layout of the unsharded model."""
        return full

    # --- collectives of numbers and small objects -----------------------------------------------------------------

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Returns the sum of a tensor over the ranks that read different data."""
        return tensor

    def all_max(self, number: int) -> int:
        """Returns the maximum over all ranks."""
        return number

    def any(self, flag: bool) -> bool:
        """Returns True if the flag is set on any rank."""
        return bool(self.all_max(int(flag)))

    def broadcast(self, value: object) -> object:
        """Returns rank 0's value on every rank. Args: value: anything that can be pickled."""
        return value

    def all_gather(self, value: object) -> list:
        """Returns the list of all ranks' values, in order of rank, on every rank."""
        return [value]

    def barrier(self) -> None:
        """Waits until every rank has called this method."""


ONE_DEVICE = OneDevice()  # never changes, so all callers share it
