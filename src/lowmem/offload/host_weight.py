"""Stores one weight on the host between two steps; `host_optimizer.py` steps objects of these classes.

    HostWeight              fp32, and its 16 bits on the device, or in host memory where weights stream
    SplitHostWeight         fp32 as two halves: the upper is the bf16 weight that streams, the lower is stored with it
    StochasticHostWeight    the bf16 weight alone: a step is rounded up or down at random

The optimizer knows a parameter by `wide`, which is fp32; in the last two classes it has only a shape between steps. On
a card the link's host thread calls `add`, `use`, `use_rows`, `gradient`, `step` and `used`. The training thread may ask
for `tensors` meanwhile, and calls the other methods when the host thread has nothing to do.
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
    """One parameter's 16-bit weight, and what the host stores of it: here an fp32 master."""

    rest: Tensor | None = None  # int16: what `checkpoint_tensor` lacks of the fp32 weight

    def __init__(self, name: str, weight: nn.Parameter, dtype: torch.dtype) -> None:
        self.name, self.weight = name, weight
        self.wide = nn.Parameter(weight.data, weight.requires_grad)  # fp32; the optimizer steps it
        self.host_block: HostBlock | None = None  # where its 16 bits are, if they stream
        self.sum: Tensor | None = None  # flat; the sum of the window's gradients, still scaled
        self.complete = False  # True if `sum` holds at least one full gradient of this window
        self.alone = False  # True if `sum` holds one gradient alone
        self.borrowed = False  # True: the buffer of `sum` belongs to the link, and is not to be kept
        self._narrow(dtype)

    def _narrow(self, dtype: torch.dtype) -> None:
        """Turns the weight into 16 bits. After an earlier fit it already is."""
        self.wide.data = self.wide.data.float().contiguous()
        self.weight.data = narrowed(self.wide.data, dtype)

    def leave_file(self) -> None:
        """Copies a master that may still be pages of a weight file. All pages of a file stay resident as long as one
        tensor of it is left."""
        with host_side():
            self.wide.data = self.wide.data.clone()

    def moved(self, host_block: HostBlock | None) -> None:
        """Is called when the 16-bit weight has a new place. Args: host_block: where it is now; None: on the device."""
        self.host_block = host_block

    @property
    def narrow(self) -> Tensor:
        """Returns the 16-bit weight of the last step, in host memory if it streams."""
        return self.weight.data if self.host_block is None else self.host_block.tensor(self.weight)

    @property
    def full_precision(self) -> Tensor:
        """Returns the weight after the last step, with all its bits. `SplitHostWeight` computes it from its halves."""
        return self.wide.data

    @property
    def checkpoint_tensor(self) -> Tensor:
        """Returns what a checkpoint stores, besides `rest`: not a copy, but with a storage of its own."""
        return self.full_precision

    def master_tensors(self) -> dict[str, Tensor]:
        """Returns what the host stores of the weight beside its 16 bits, by name."""
        return {"master": self.wide}

    def tensors(self) -> Iterator[Tensor]:
        """Yields the tensors in host memory, except `sum` and those in its `HostBlock`."""
        yield self.wide

    # --- its gradient ---------------------------------------------------------------------------------------------

    def add(self, start: int, piece: Tensor) -> None:
        """Adds a piece of a gradient; pieces come in order. A window's only gradient stays in 16 bits. A second one is
        added in fp32, and so are the sums over micro-batches that `by_layer.py` sends."""
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
            self.alone = not self.complete
        self.complete = self.complete or start + piece.numel() == self.sum.numel()

    def use(self, start: int, piece: Tensor) -> None:
        """Adds a gradient that is stepped at once: the only one of its window is not copied."""
        if self.sum is None:
            self.sum, self.complete, self.alone, self.borrowed = piece, True, True, True
        else:
            self.add(start, piece)

    def use_rows(self, at: Tensor, rows: Tensor) -> None:
        """Adds the gradient of an embedding, whose other rows are zero: the only one of its window becomes dense.

        Args: at: (N,) row numbers; rows: (N, H); rows of the same number are added up.
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
        self.alone, self.complete = not self.complete, True

    def gradient(self) -> Tensor:
        """Returns the window's gradient as it is stored: scaled, in 16 or 32 bits."""
        return self.sum.view(self.wide.shape)

    def used(self, early: bool) -> None:
        """Is called after a step. The buffer stays for the next window's gradients, except one of a single gradient
        that was borrowed or stepped inside backward: the next window needs no buffer then."""
        if self.alone and (early or self.borrowed):
            self.sum = None
        self.complete = self.borrowed = False

    # --- its step -------------------------------------------------------------------------------------------------

    def step(self, optimizer: WindowOptimizer, step: Step) -> None:
        """Steps the weight. Args: step: of `wide`; its `narrow` receives the new weight."""
        if isinstance(optimizer.inner, OnePass):
            optimizer.inner.step_from(step, self.rest)
        else:
            self._widen(step.narrow)
            self._stepped(optimizer, step)
            self._write(step.narrow)

    def _widen(self, narrow: Tensor) -> None:
        """Writes the weight into `wide` before a step."""

    def _write(self, narrow: Tensor) -> None:
        """Writes the new weight to where it is stored after a step."""
        fp32_halves.narrow(self.wide.data, narrow)

    def _forget(self) -> None:
        """Leaves the optimizer only a shape between steps. It is on the CPU, since the optimizer's state is restored to
        the parameter's device."""
        self.wide.data = nowhere(self.wide, torch.float32, "cpu")

    def _stepped(self, optimizer: WindowOptimizer, step: Step) -> None:
        self.wide.grad = step.reading(step.gradient)
        optimizer.step_one(step.group, self.wide)
        self.wide.grad = None


class SplitHostWeight(HostWeight):
    """fp32 in 4 bytes, the upper two of which are the bf16 weight that streams: exact, without a copy of it."""

    def _narrow(self, dtype: torch.dtype) -> None:
        with host_side():
            if self.weight.dtype == dtype:  # it was loaded so: nothing is lost
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
    """The bf16 weight alone: a step is rounded up or down at random, so that the mean is right.

    The random numbers depend on the parameter and the step alone, not on when it is done or on what else draws.

    Args: seed: the run's; steps: how often the weight was rounded before.
    """

    def __init__(self, name: str, weight: nn.Parameter, dtype: torch.dtype, seed: int = 0, steps: int = 0) -> None:
        super().__init__(name, weight, dtype)
        self.seed, self.steps = seed, steps

    def _narrow(self, dtype: torch.dtype) -> None:
        self._forget()
        self.own: Tensor | None = None  # its 16 bits in host memory, if the weight itself is on the device

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


def narrowed(wide: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty_like(wide, dtype=dtype)
    fp32_halves.narrow(wide, out)
    return out


def by_itself(tensor: Tensor) -> Tensor:
    """Returns the same memory as a storage of its own: `torch.save` writes full storages, and a block's storage
    includes frozen weights, which no checkpoint stores. Args: tensor: contiguous, in host memory."""
    flat = torch.from_numpy(tensor.detach().view(-1).view(torch.uint8).numpy())
    return flat.view(tensor.dtype).view(tensor.shape)


def drawing(*key: int | str) -> torch.Generator:
    """Returns a generator whose random numbers depend on all these arguments: they are hashed to the 32 bits of a seed
    that a CPU's generator reads."""
    return torch.Generator().manual_seed(int.from_bytes(sha256(repr(key).encode()).digest()[:4]))
