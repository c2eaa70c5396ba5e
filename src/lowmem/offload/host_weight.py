"""Stores the master and the summed gradient of one weight in host memory. `HostOptimizer` updates these objects.

    class                   master on the host                          16-bit weight
    HostWeight              fp32, 4 bytes per parameter                 on the device, or in a `HostBlock` if streamed
    SplitHostWeight         lower 16 bits of fp32 (int16), 2 bytes      bf16 in a `HostBlock`: the master, rounded
    StochasticHostWeight    no master                                   bf16; updates are rounded up or down at random

The inner optimizer's parameter is `wide` (fp32). In `SplitHostWeight` and `StochasticHostWeight`, `wide` has its own
data only during an update; before and after the update it is a placeholder with the shape of the weight. With an
optimizer that is `OnePass` (for `SplitHostWeight`) or `InPieces` (for `StochasticHostWeight`), `wide` is a placeholder
during the update, too.

On a card the link's host thread adds gradients and updates weights: it calls `add`, `use`, `use_rows`, `gradient`,
`narrow`, `step`, `master_tensors` and `used`. Meanwhile other threads may call `tensors`, and may read `sum` and the
attributes that are not reassigned during training: `wide` (but not its data), `weight` and `host_block`. These threads
may call other methods, or change attributes, only while the host thread is idle.
"""

from collections.abc import Iterator
from hashlib import sha256

import torch
from torch import Tensor, nn

from lowmem.memory.tracker import host_side
from lowmem.offload.host_block import HostBlock, nowhere
from lowmem.step import fp32_halves
from lowmem.step.one_weight import InPieces, OnePass, Step
from lowmem.step.optimizer import WindowOptimizer
from lowmem.step.stochastic import stochastically


class HostWeight:
    """An fp32 master in host memory for one 16-bit weight, and the base class of `SplitHostWeight` and
    `StochasticHostWeight`.

    Args:
        name: the parameter's name.
        weight: the parameter. The constructor rounds its data to `dtype`.
        dtype: dtype of the weight in forward and backward: bf16 or fp16; fp32 if the weight is not rounded.
    """

    rest: Tensor | None = None  # int16, lower half of the fp32 weight; None: `checkpoint_tensor` has the full value

    def __init__(self, name: str, weight: nn.Parameter, dtype: torch.dtype) -> None:
        self.name, self.weight = name, weight
        self.wide = nn.Parameter(weight.data, weight.requires_grad)  # fp32; the parameter of the inner optimizer
        self.host_block: HostBlock | None = None  # stores the 16-bit weight, if it is streamed
        # Flat; the sum of the window's gradients, still multiplied by the loss scale. May stay allocated between
        # windows, with the values of the last window; `complete` is False then.
        self.sum: Tensor | None = None
        self.complete = False  # True: `sum` contains at least one full gradient of this window
        self.single_gradient = False  # True: `sum` contains a single gradient of this window
        # True: `use` has set `sum` to a gradient without a copy. `used` then frees `sum`, unless gradients were added.
        self.borrowed = False
        self._round_weight(dtype)

    def _round_weight(self, dtype: torch.dtype) -> None:
        """Keeps the weight's value in fp32 as the master, and rounds the weight to `dtype`. If the weight was loaded in
        16 bits, or an earlier fit has rounded it, the master starts from the 16-bit value."""
        self.wide.data = self.wide.data.float().contiguous()
        self.weight.data = rounded_to(self.wide.data, dtype)

    def leave_file(self) -> None:
        """Replaces the master by a copy, because it may be a view of a memory-mapped weight file. The pages of such a
        file stay in host memory as long as any tensor refers to the file."""
        with host_side():
            self.wide.data = self.wide.data.clone()

    def moved(self, host_block: HostBlock | None) -> None:
        """Tells this object where the 16-bit weight is stored. Call this method after `WeightsOnDevice.move_in`. Args:
        host_block: stores the weight; None if the weight is not streamed."""
        self.host_block = host_block

    @property
    def narrow(self) -> Tensor:
        """Returns the current 16-bit weight: in host memory if the weight is streamed, otherwise on the device.
        `StochasticHostWeight` returns a tensor in host memory in both cases."""
        return self.weight.data if self.host_block is None else self.host_block.tensor(self.weight)

    @property
    def full_precision(self) -> Tensor:
        """Returns the current weight in the highest precision that the host stores. `SplitHostWeight` joins its halves
        into a copy, and `StochasticHostWeight`, which has no master, returns the 16-bit weight."""
        return self.wide.data

    @property
    def checkpoint_tensor(self) -> Tensor:
        """Returns the tensor that a checkpoint stores under the weight's name: the master, or the 16-bit weight in a
        subclass without a full master. The tensor shares memory with the weight or master. A checkpoint also stores
        `rest` if it is not None."""
        return self.full_precision

    def master_tensors(self) -> dict[str, Tensor]:
        """Returns the master, or the lower half of the master, with its name as the key; empty if the weight has no
        master."""
        return {"master": self.wide}

    def tensors(self) -> Iterator[Tensor]:
        """Yields the tensors in host memory, except `sum` and the memory of the `HostBlock`."""
        yield self.wide

    # --- its gradient ---------------------------------------------------------------------------------------------

    def add(self, start: int, piece: Tensor) -> None:
        """Adds a piece of a gradient to `sum`. If `sum` is None, a new `sum` is allocated with the dtype of the
        gradient. A 16-bit `sum` is converted to fp32 before the second gradient of a window is added, and before an
        fp32 gradient (a sum over micro-batches, see `by_layer.py`) is added.

        Args:
            start: index of the first element of the piece in the gradient; the pieces of a gradient come in order.
            piece: flat, in host memory.
        """
        with host_side():
            if self.sum is None:
                self.sum = torch.empty(self.wide.numel(), dtype=piece.dtype)
            elif self.sum.dtype != torch.float32 and (self.complete or piece.dtype == torch.float32):
                self.sum = self.sum.float()
            target = self.sum[start : start + piece.numel()]
            if self.complete:
                target.add_(piece)
            else:
                target.copy_(piece)
            self.single_gradient = not self.complete
        self.complete = self.complete or start + piece.numel() == self.sum.numel()

    def use(self, start: int, piece: Tensor) -> None:
        """Adds a full gradient, like `add`. If `sum` is None, `piece` itself becomes `sum` without a copy, so the
        caller must not write to the memory of `piece` again. Args: start: 0; piece: the full gradient, flat."""
        if self.sum is None:
            self.sum, self.complete, self.single_gradient, self.borrowed = piece, True, True, True
        else:
            self.add(start, piece)

    def use_rows(self, at: Tensor, rows: Tensor) -> None:
        """Adds a gradient (V, H) of an embedding, which is zero except in some rows. `sum` still has V x H elements.

        Args:
            at: (N,), indices of rows. If an index occurs several times, its gradients are summed.
            rows: (N, H), the gradients of these rows.
        """
        with host_side():
            if self.sum is None:
                self.use(0, rows.new_zeros(self.wide.shape).index_add_(0, at, rows).view(-1))
                return
            if self.sum.dtype != torch.float32 and self.complete:
                self.sum = self.sum.float()
            if not self.complete:
                self.sum.zero_()
            self.sum.view(self.wide.shape).index_add_(0, at, rows.to(self.sum.dtype))
        self.single_gradient, self.complete = not self.complete, True

    def gradient(self) -> Tensor:
        """Returns the window's gradient in the shape of the weight, still multiplied by the loss scale, in 16 or 32
        bits."""
        return self.sum.view(self.wide.shape)

    def used(self, early: bool) -> None:
        """Marks the gradient as applied, after an update. `sum` is freed if it contains a single gradient that was
        borrowed or applied inside backward. Otherwise `sum` is kept as a buffer for the next window. (Gradients that
        are applied inside backward arrive one by one, so freeing them keeps few of them in host memory.)

        Args: early: the update ran inside backward.
        """
        if self.single_gradient and (early or self.borrowed):
            self.sum = None
        self.complete = self.borrowed = False

    # --- its step -------------------------------------------------------------------------------------------------

    def step(self, optimizer: WindowOptimizer, step: Step) -> None:
        """Updates the master, if there is one, and writes the new weight to `step.narrow`. Args: optimizer: the
        `HostOptimizer`; step: the arguments of the update."""
        if isinstance(optimizer.inner, OnePass):
            optimizer.inner.step_from(step, self.rest)
        else:
            self._widen(step.narrow)
            self._stepped(optimizer, step)
            self._write(step.narrow)

    def _widen(self, narrow: Tensor) -> None:
        """Sets `wide` to the fp32 weight before an update. A no-op here, because `wide` already has this value;
        overridden by `SplitHostWeight`."""

    def _write(self, narrow: Tensor) -> None:
        """Rounds `wide` into `narrow` after an update. (A subclass also stores the lower half of the master.)"""
        fp32_halves.round_into(self.wide.data, narrow)

    def _forget(self) -> None:
        """Replaces the data of `wide` by a placeholder that takes no memory. The placeholder is on the CPU, because
        torch moves restored optimizer state to the parameter's device."""
        self.wide.data = nowhere(self.wide, torch.float32, "cpu")

    def _stepped(self, optimizer: WindowOptimizer, step: Step) -> None:
        self.wide.grad = step.reading(step.gradient)
        optimizer.step_one(step.group, self.wide)
        self.wide.grad = None


class SplitHostWeight(HostWeight):
    """An fp32 master in two 16-bit parts: the streamed bf16 weight, which is the rounded master, and the lower 16 bits
    in `rest`. `fp32_halves.joined` restores the exact fp32 value. For weight and master together, the host stores 4
    bytes per parameter instead of 6."""

    def _round_weight(self, dtype: torch.dtype) -> None:
        with host_side():
            if self.weight.dtype == dtype:  # loaded in bf16, so the lower half is zero
                self.rest = torch.zeros(self.weight.shape, dtype=torch.int16)
            else:
                self.weight.data, self.rest = fp32_halves.halves(self.wide.data.float())
            self._forget()

    @property
    def full_precision(self) -> Tensor:
        return fp32_halves.joined(self.narrow, self.rest)

    @property
    def checkpoint_tensor(self) -> Tensor:
        return by_itself(self.narrow)

    def master_tensors(self) -> dict[str, Tensor]:
        return {"rest": self.rest}

    def tensors(self) -> Iterator[Tensor]:
        yield from super().tensors()
        yield self.rest

    def _widen(self, narrow: Tensor) -> None:
        self.wide.data = fp32_halves.joined(narrow, self.rest)

    def _write(self, narrow: Tensor) -> None:
        fp32_halves.split_into(self.wide.data, narrow, self.rest)
        self._forget()


class StochasticHostWeight(HostWeight):
    """A bf16 weight without a master: each update is rounded up or down at random, so that the expected value of the
    rounding error is zero. If the weight is not streamed, updates change a copy of the weight in host memory (`own`),
    which is then copied to the device.

    The random numbers of an update depend only on the seed, the parameter's name and the number of the parameter's
    earlier updates. So neither the order in which weights are updated nor random numbers drawn elsewhere change the
    result.

    Args:
        name, weight, dtype: see `HostWeight`.
        seed: the run's seed.
        steps: number of earlier updates of this weight with random rounding; 0, or restored from a checkpoint.
    """

    def __init__(self, name: str, weight: nn.Parameter, dtype: torch.dtype, seed: int = 0, steps: int = 0) -> None:
        super().__init__(name, weight, dtype)
        self.seed, self.steps = seed, steps

    def _round_weight(self, dtype: torch.dtype) -> None:
        self._forget()
        self.own: Tensor | None = None  # host copy of the 16-bit weight, if the weight is on the device

    def moved(self, host_block: HostBlock | None) -> None:
        super().moved(host_block)
        if host_block is None:
            with host_side():
                self.own = self.weight.data.clone(memory_format=torch.contiguous_format)

    @property
    def narrow(self) -> Tensor:
        return super().narrow if self.own is None else self.own

    @property
    def full_precision(self) -> Tensor:
        return self.narrow

    @property
    def checkpoint_tensor(self) -> Tensor:
        return by_itself(self.narrow)

    def master_tensors(self) -> dict[str, Tensor]:
        return {}

    def tensors(self) -> Iterator[Tensor]:
        yield from super().tensors()
        if self.own is not None:
            yield self.own

    def step(self, optimizer: WindowOptimizer, step: Step) -> None:
        stored = self.narrow
        random = drawing(self.seed, self.name, self.steps)
        self.steps += 1
        if isinstance(optimizer.inner, InPieces):
            optimizer.inner.step_narrow(
                step._replace(narrow=stored), lambda wide, target: stochastically(wide, target, random, on_host=True)
            )
        else:
            self.wide.data = stored.float()
            self._stepped(optimizer, step)
            stochastically(self.wide.data, stored, random, on_host=True)
            self._forget()
        if step.narrow is not stored:
            step.narrow.copy_(stored)


def rounded_to(wide: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty_like(wide, dtype=dtype)
    fp32_halves.round_into(wide, out)
    return out


def by_itself(tensor: Tensor) -> Tensor:
    """Returns a tensor that shares memory with `tensor`. The storage of the result has only the bytes of `tensor`.
    `torch.save` writes full storages, and the storage of a `HostBlock` contains all weights of the block, including
    frozen weights, which a checkpoint must not store. Args: tensor: contiguous, in host memory."""
    flat = torch.from_numpy(tensor.detach().view(-1).view(torch.uint8).numpy())
    return flat.view(tensor.dtype).view(tensor.shape)


def drawing(*key: int | str) -> torch.Generator:
    """Returns a CPU random number generator. Its seed is a 32-bit hash of all arguments."""
    return torch.Generator().manual_seed(int.from_bytes(sha256(repr(key).encode()).digest()[:4]))
