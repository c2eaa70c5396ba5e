"""How the host holds one weight between two steps: what `host_masters.py` steps is one of these.

    HostWeight      fp32, and its 16 bits on the device, or in host memory where weights stream
    SplitHostWeight      fp32 as two halves: the upper is the bf16 weight that streams, the lower waits beside it
    StochasticHostWeight    the bf16 weight alone: a step is rounded up or down at random

The optimizer knows a parameter by `wide`, an fp32 one; of the last two it holds nothing but the shape between steps.
"""

from collections.abc import Iterator
from hashlib import sha256

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowmem.memory.tracker import host_side
from lowmem.techniques.arithmetic import fp32_halves
from lowmem.techniques.optim.contract import InPieces, OnePass, Step
from lowmem.techniques.precision.contract import step_one
from lowmem.techniques.precision.weights_16bit import stochastically
from lowmem.techniques.weights.resident import Home, nowhere


class HostWeight:
    """One parameter: its 16-bit weight, and what the host holds of it."""

    rest: Tensor | None = None  # int16: what `checkpoint_tensor` has lost

    def __init__(self, name: str, weight: nn.Parameter, dtype: torch.dtype) -> None:
        self.name, self.weight = name, weight
        self.wide = nn.Parameter(weight.data, weight.requires_grad)  # fp32; the optimizer steps it
        self.home: Home | None = None  # where its 16 bits are, if they stream
        self.sum: Tensor | None = None  # flat; of the window's gradients, still scaled
        self.complete = False  # whether `sum` is of this window
        self.borrowed = False  # whether `sum` was made by somebody else, who will make the next one, too
        self._narrow(dtype)

    def _narrow(self, dtype: torch.dtype) -> None:
        """The weight becomes one of 16 bits. After an earlier fit it is one already."""
        self.wide.data = self.wide.data.float().contiguous()
        self.weight.data = narrowed(self.wide.data, dtype)

    def moved(self, home: Home | None) -> None:
        """Args: home: where its 16-bit weight is now; None: on the device."""
        self.home = home

    @property
    def narrow(self) -> Tensor:
        """The 16-bit weight of the last step, in host memory where it streams."""
        return self.weight.data if self.home is None else self.home.tensors[self.weight]

    @property
    def full_precision(self) -> Tensor:
        """The weight after the last step, with all its bits. `SplitHostWeight` computes it from its halves."""
        return self.wide.data

    @property
    def checkpoint_tensor(self) -> Tensor:
        """What a checkpoint holds of it, beside `rest`: no copy, and a storage of its own."""
        return self.full_precision

    def tensors(self) -> Iterator[Tensor]:
        """In host memory, but for `home`."""
        yield self.wide
        if (held := self.sum) is not None:  # read once: the host's thread may drop it
            yield held

    # --- its gradient ---------------------------------------------------------------------------------------------

    def add(self, start: int, piece: Tensor) -> None:
        """A piece of a gradient, in order. The first gradient is kept in its 16 bits, the second is added in fp32."""
        with host_side():
            if self.sum is None:
                self.sum = torch.empty(self.wide.numel(), dtype=piece.dtype)
            elif self.complete and self.sum.dtype != torch.float32:
                self.sum = self.sum.float()
            here = self.sum[start : start + piece.numel()]
            if self.complete:
                here.add_(piece)
            else:
                here.copy_(piece)
        self.complete = self.complete or start + piece.numel() == self.sum.numel()

    def use(self, start: int, piece: Tensor) -> None:
        """`add` for a gradient that is stepped at once: the only one of its window need not be copied."""
        if self.sum is None:
            self.sum, self.complete, self.borrowed = piece, True, True
        else:
            self.add(start, piece)

    def gradient(self) -> Tensor:
        """Of the window, as it is stored: scaled, in 16 or 32 bits."""
        return self.sum.view(self.wide.shape)

    def used(self, early: bool) -> None:
        """After a step. The buffer stays for the next window's gradients, except one in 16 bits, so the window's only
        gradient, that was stepped inside backward or given: no buffer is needed for the next."""
        if (early or self.borrowed) and self.sum.dtype != torch.float32:
            self.sum = None
        self.complete = self.borrowed = False

    # --- its step -------------------------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer, step: Step) -> None:
        """Args: step: of `wide`; its `narrow` receives the new weight."""
        if isinstance(optimizer, OnePass):
            optimizer.step_from(step, self.rest)
        else:
            self._widen(step.narrow)
            self._stepped(optimizer, step)
            self._write(step.narrow)

    def _widen(self, narrow: Tensor) -> None:
        """Before a step: `wide` is the weight."""

    def _write(self, narrow: Tensor) -> None:
        """After it: the new weight goes to where it is held."""
        fp32_halves.narrow(self.wide.data, narrow)

    def _forget(self) -> None:
        """Between steps the optimizer has nothing of it but the shape; on the CPU, where its state is restored to."""
        self.wide.data = nowhere(self.wide, torch.float32, "cpu")

    def _stepped(self, optimizer: Optimizer, step: Step) -> None:
        self.wide.grad = step.reading(step.gradient)
        step_one(optimizer, step.group, self.wide)
        self.wide.grad = None


class SplitHostWeight(HostWeight):
    """fp32 in 4 bytes, of which the upper two are the bf16 weight that streams: exact, and no copy of it."""

    def _narrow(self, dtype: torch.dtype) -> None:
        with host_side():
            self.weight.data, self.rest = fp32_halves.halves(self.wide.data.float())
            self._forget()

    @property
    def full_precision(self) -> Tensor:
        return fp32_halves.joined(self.narrow, self.rest)

    @property
    def checkpoint_tensor(self) -> Tensor:
        return by_itself(self.narrow)

    def tensors(self) -> Iterator[Tensor]:
        yield from super().tensors()
        yield self.rest

    def _widen(self, narrow: Tensor) -> None:
        self.wide.data = fp32_halves.joined(narrow, self.rest)

    def _write(self, narrow: Tensor) -> None:
        fp32_halves.split_into(self.wide.data, narrow, self.rest)
        self._forget()


class StochasticHostWeight(HostWeight):
    """The bf16 weight alone: a step is rounded up or down, right in the mean.

    Random numbers are those of the parameter and the step, whenever it is made: nothing else that draws changes them.
    """

    def _narrow(self, dtype: torch.dtype) -> None:
        self._forget()
        self.steps, self.seed = 0, 0  # seed: the run's
        self.own: Tensor | None = None  # its 16 bits in host memory, where the weight itself is on the device

    def moved(self, home: Home | None) -> None:
        super().moved(home)
        if home is None:
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

    def tensors(self) -> Iterator[Tensor]:
        yield from super().tensors()
        if self.own is not None:
            yield self.own

    def step(self, optimizer: Optimizer, step: Step) -> None:
        held = self.narrow
        random = drawing(self.seed, self.name, self.steps)
        self.steps += 1
        if isinstance(optimizer, InPieces):
            optimizer.step_narrow(
                step._replace(narrow=held), lambda wide, here: stochastically(wide, here, random, on_host=True)
            )
        else:
            self.wide.data = held.float()
            self._stepped(optimizer, step)
            stochastically(self.wide.data, held, random, on_host=True)
            self._forget()
        if step.narrow is not held:
            step.narrow.copy_(held)


def narrowed(wide: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty_like(wide, dtype=dtype)
    fp32_halves.narrow(wide, out)
    return out


def by_itself(tensor: Tensor) -> Tensor:
    """The same memory as a storage of its own: `torch.save` writes whole storages, and a block's is one with the frozen
    weights that no checkpoint holds. Args: tensor: contiguous, in host memory."""
    flat = torch.from_numpy(tensor.detach().view(-1).view(torch.uint8).numpy())
    return flat.view(tensor.dtype).view(tensor.shape)


def drawing(*what: int | str) -> torch.Generator:
    """Of random numbers that these arguments decide. Of a seed a CPU's generator reads 32 bits: all depend on each."""
    return torch.Generator().manual_seed(int.from_bytes(sha256(repr(what).encode()).digest()[:4]))
