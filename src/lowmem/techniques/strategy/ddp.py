"""`strategy=ddp`: every device has the full model and reads different rows; gradients are all-reduced once per window.

This saves time, but no memory. The cost is one all-reduce of all gradients per window, which overlaps with the window's
last backward pass. Source: Li et al. 2020, arXiv 2006.15704; torch.nn.parallel.DistributedDataParallel.
"""

import gc
from contextlib import AbstractContextManager, ExitStack, nullcontext
from weakref import ref

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lowmem.model.trainable import trainable
from lowmem.system.errors import Refused
from lowmem.system.torch_private import check_reduced, rebuild_buckets
from lowmem.techniques.strategy.several import Several


class DataParallel(Several):
    """Data parallelism with torch's DDP. From the first window on, gradients are views of DDP's buckets, so there is no
    second copy of the gradients in memory."""

    def __init__(self, device: str = "cpu", devices: int = 1, timeout: float = 600) -> None:
        super().__init__(device, devices, timeout)
        self.forward = None
        self._step = ExitStack()  # restores the random state in `clear_gradients`, see `gather_gradients`
        self._idle: set[str] = set()  # names of trained parameters that have not received a gradient yet
        self._watching: list[RemovableHandle] = []

    def before_training(self, module: LightningModule) -> None:
        self._module, self._seed = module, torch.initial_seed()
        super().before_training(module)
        self.forward = DistributedDataParallel(module, broadcast_buffers=False, gradient_as_bucket_view=True)
        named = trainable(module.model)
        self._make_gradients([p for _, p in named])
        for _, p in named:
            p.grad = None
        # Rebuild the buckets now, while no gradient refers to the old buckets. Otherwise DDP would rebuild them in a
        # later forward pass, when gradients still keep the old buckets in memory.
        rebuild_buckets(self.forward)
        self._make_gradients([p for _, p in named])
        self._idle = {name for name, _ in named}
        for name, p in named:
            self._watching.append(p.register_post_accumulate_grad_hook(lambda _, name=name: self._idle.discard(name)))

    def release(self) -> ref | None:
        super().release()
        if self.forward is None:  # the run ended before the DDP wrapper was created
            return None
        reducer = ref(self.forward.reducer)
        self.forward = None
        self._watch_no_more()
        gc.collect()  # the wrapper is part of a reference cycle
        return reducer

    def _make_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Creates zero gradients that are views of DDP's buckets, by backward passes that reduce them over all
        ranks. Without such gradients, the first micro-batches of the first window, which do not reduce gradients, would
        create gradients outside of the buckets."""
        self.forward.reducer.prepare_for_backward([])
        # DDP assigns parameters to buckets in the order of their gradients; a backward pass computes gradients in about
        # the reverse order of the parameters
        for p in reversed(parameters):
            p.backward(torch.zeros_like(p))

    def micro_batch_context(self, last: bool) -> AbstractContextManager:
        return nullcontext() if last else self.forward.no_sync()

    def new_local(self, p: nn.Parameter) -> nn.Parameter:
        """Returns a new parameter that shares the memory of `p`. If an optimizer step temporarily converted `p` itself
        to fp32, DDP's hooks would be lost, and gradients would no longer be reduced."""
        return nn.Parameter(p.detach(), p.requires_grad)

    def gather_gradients(self) -> None:
        if self._watching:
            self._check_used()
        try:
            check_reduced(self.forward)
        except RuntimeError:
            raise Refused(
                "strategy=ddp: the last micro-batch of this optimizer step did not use every weight, so ranks would "
                "wait for gradients that are never computed. Type strategy=tensor_parallel, where all ranks train on "
                "the same rows."
            ) from None
        for p, local in self._locals.items():
            local.grad = p.grad
        # all ranks must round with equal random numbers, so that their weights stay equal
        if self._module.trainer.precision_plugin.draws:
            cards = [torch.cuda.current_device()] if self.device == "cuda" else []
            self._step.enter_context(torch.random.fork_rng(cards))
            torch.manual_seed(self._seed + self._module.position.window + 1)

    def _check_used(self) -> None:
        """Checks after the first window that every trained parameter has received a gradient on every rank. DDP does
        not reduce a bucket in which a gradient is missing. Raises: Refused, on all ranks: a parameter has received no
        gradient on some rank."""
        self._watch_no_more()
        if unused := next(filter(None, self.all_gather(sorted(self._idle))), None):
            raise Refused(
                f"strategy=ddp: no forward pass uses {', '.join(unused[:3])}{' and others' * (len(unused) > 3)}, so "
                f"ranks would wait for gradients that are never computed. Type freeze=[{','.join(unused[:3])}], with "
                "patterns for the names of all unused weights."
            )

    def _watch_no_more(self) -> None:
        while self._watching:
            self._watching.pop().remove()

    def clear_gradients(self) -> None:
        self._step.close()
        for p in self._locals:
            if p.grad is not None:
                p.grad.zero_()
