"""Replaces an optimizer that cannot step fake tensors by a stand-in, which allocates the same amount of memory as the
real optimizer.

Some optimizers, such as 8-bit optimizers, pass raw pointers to C++, CUDA or compiled code. Fake tensors have no memory
to which a pointer could point. But the state of these optimizers takes a fixed number of bytes per element of a
parameter (a rate), and so does the temporary memory of a step. To measure the rates, the real optimizer steps real
parameters of each role (matrix, embedding, vector): first a module with one parameter, and then a module with two
parameters. The state that the second parameter adds gives the rate of the state.
"""

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowmem.memory.ledger import Ledger, optimizer_state
from lowmem.memory.tracker import StorageTracker
from lowmem.step.one_weight import OnePass, Step
from lowmem.system import process
from lowmem.techniques.optim.build import PAGED_FROM, MakeOptimizer, pageable

SIDE = 256  # rows and columns of a probe parameter that is not small: a multiple of all block sizes of quantized state
WIDE = 2048  # rows and columns of the probe of `unseen`: large enough that malloc uses mmap for its temporary memory
SMALL = 1024  # elements of a small probe parameter (fewer than THRESHOLD)
THRESHOLD = 4096  # parameters with fewer elements have 32-bit state in 8-bit optimizers


class Rate(NamedTuple):
    """Bytes of optimizer memory per element of a parameter. Each role has a rate for small parameters (fewer than
    THRESHOLD elements), and a rate for all other parameters."""

    tensors: tuple[float, ...]  # an entry for each tensor of the state
    scratch: float  # temporary memory of a step
    pageable: float  # the part of the state that CUDA pages on a card if the parameter has PAGED_FROM elements or more

    @property
    def state(self) -> float:
        return sum(self.tensors)


def stand_in(make: MakeOptimizer, one_kernel: bool, pages: bool) -> MakeOptimizer:
    """Measures an optimizer by stepping real parameters, and returns a factory of its stand-in.

    Args:
        make: factory of the optimizer.
        one_kernel: True: the update of a parameter is a single kernel (CUDA or compiled), so `scratch` is 0.
        pages: True: the run is planned for a card, where CUDA can page state.
    """
    with torch.compiler.set_stance("force_eager"):  # compiling takes seconds, and does not change the size of the state
        rates = {
            (role, small): _rate(make, one_kernel, role, small)
            for role in ("matrix", "embedding", "vector")
            for small in (False, True)
        }
    one_pass = isinstance(make(nn.Linear(1, 1)), OnePass)
    kind = OnePassStandIn if one_pass else StandIn
    return MakeOptimizer(partial(kind, rates=rates, pages=pages), make.embedding_bits)


def unseen(make: MakeOptimizer) -> float:
    """Measures the temporary memory inside the operators or the compiled code of an optimizer step, in bytes per
    element.

    The memory tracker cannot see this memory, so this function measures by how much the resident memory of the process
    grows during a real step. This takes about 5 s if code has to be compiled.
    """
    probe = nn.Linear(WIDE, WIDE, bias=False)
    optimizer = make(probe)
    probe.weight.grad = torch.full_like(probe.weight, 1e-3)
    optimizer.step()
    process.trim()
    process.reset_peak_rss()
    before = process.rss_bytes()
    optimizer.step()
    return max(0, process.peak_rss_bytes() - before) / WIDE**2


class StandIn(Optimizer):
    """An optimizer that computes no real update, but allocates state and temporary memory by measured rates.

    Args:
        params: parameter groups with a `role`.
        rates: (role, True for parameters with fewer than THRESHOLD elements) -> `Rate`.
        pages: True: the run is planned for a card, where CUDA can page state. Paged state is only counted (`paged`) and
            not allocated, because on a card torch's allocator does not allocate it.
    """

    def __init__(self, params, rates: Mapping[tuple[str, bool], Rate], pages: bool = False) -> None:
        super().__init__(params, {"lr": 0.0})
        self.rates, self.pages = rates, pages

    @property
    def paged(self) -> int:
        """Returns the bytes of state that CUDA pages; 0 for a run on a CPU."""
        return sum(state.get("paged", 0) for state in self.state.values())

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._touch(group, p, p.grad, p)
        return loss

    def _touch(self, group: dict, p: Tensor, gradient: Tensor, weight: Tensor) -> None:
        rate = self.rates[group["role"], p.numel() < THRESHOLD]
        if not self.state[p]:
            leaves = rate.pageable if self.pages and p.numel() >= PAGED_FROM else 0.0
            stays = (rate.state - leaves,) if leaves else rate.tensors
            self.state[p]["paged"] = round(leaves * p.numel())
            self.state[p] |= {key: _bytes(size, p) for key, size in enumerate(stays)}
        _bytes(rate.scratch, p)
        weight.add_(gradient)  # like a fused kernel, reads the gradient, and reads and writes weight and state
        for state in self.state[p].values():
            if isinstance(state, Tensor):
                state.neg_()


class OnePassStandIn(StandIn, OnePass):
    def step_from(self, step: Step, rest: Tensor | None = None) -> None:
        self._touch(step.group, step.p, step.gradient, step.p if rest is None else step.narrow)
        step.narrow.fill_(0.0) if rest is None else rest.neg_()


def _bytes(rate: float, p: Tensor) -> Tensor:
    return torch.empty(round(rate * p.numel()), dtype=torch.uint8, device=p.device)


class Probe(nn.Module):
    """A module with `count` real parameters of a role, which a real optimizer steps."""

    def __init__(self, role: str, small: bool, count: int) -> None:
        super().__init__()
        n = SMALL if small else SIDE * SIDE
        columns = 32 if small else SIDE
        make = {
            "matrix": lambda: nn.Linear(columns, n // columns, bias=False),
            "embedding": lambda: nn.Embedding(n // columns, columns),
            "vector": lambda: nn.LayerNorm(n, bias=False),
        }[role]
        self.probed = nn.ModuleList(make() for _ in range(count))


def _rate(make: MakeOptimizer, one_kernel: bool, role: str, small: bool) -> Rate:
    (of_1, scratch, pageable), (of_2, *_) = (_stepped(make, Probe(role, small, n)) for n in (1, 2))
    elements = SMALL if small else SIDE * SIDE
    tensors = tuple(size / elements for size in (Counter(of_2) - Counter(of_1)).elements())
    return Rate(tensors, 0.0 if one_kernel else scratch / elements, pageable / elements)


def _stepped(make: MakeOptimizer, probe: Probe) -> tuple[list[int], int, int]:
    """Steps a real optimizer twice and measures the second step, because the first step creates the state.

    Returns:
        Bytes of each tensor of the state.
        Bytes of temporary tensors at the peak, without temporary memory inside an operator or compiled code.
        Bytes of pageable state.
    """
    optimizer = make(probe)
    ledger = Ledger()
    ledger.own("weights", lambda: [t for p in probe.parameters() for t in (p, p.grad)])
    ledger.own("optimizer", lambda: optimizer_state(optimizer))
    for p in probe.parameters():
        p.grad = torch.full_like(p, 1e-3)
    optimizer.step()
    with StorageTracker(ledger.storages()) as tracker:
        optimizer.step()
    top = max(point.total for point in tracker.timeline())
    state = [owned.bytes for owned in ledger.storages().values() if owned.owner.category == "optimizer"]
    return state, top - sum(ledger.bytes().values()), sum(t.nbytes for t in pageable(optimizer))


def state_bytes_per_parameter(make: MakeOptimizer) -> tuple[float, float]:
    """Measures the optimizer state of a matrix in real steps. Returns: Two numbers of bytes per element: of the state,
    and of the part of the state that CUDA can page."""
    state, _, leaves = _stepped(make, Probe("matrix", small=False, count=1))
    return sum(state) / SIDE**2, leaves / SIDE**2
