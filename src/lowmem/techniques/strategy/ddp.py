"""`ddp`: the whole model on every device, each with other rows; their gradients are added once per window.

It saves nothing but time. What it costs: an all-reduce of all gradients per optimizer step, which overlaps with
the last backward pass. Source: Li et al. 2020, arXiv 2006.15704; torch.nn.parallel.DistributedDataParallel.
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
    """Gradients live in the buckets that are sent, from before the first window on: they are never there twice."""

    def __init__(self, device: str = "cpu", devices: int = 1, timeout: float = 600) -> None:
        super().__init__(device, devices, timeout)
        self.forward = None
        self._step = ExitStack()
        self._idle: set[str] = set()  # of no backward pass yet
        self._watching: list[RemovableHandle] = []

    def before_training(self, module: LightningModule) -> None:
        self._module, self._seed = module, torch.initial_seed()
        super().before_training(module)
        self.forward = DistributedDataParallel(module, broadcast_buffers=False, gradient_as_bucket_view=True)
        named = trainable(module.model)
        self._make_gradients([p for _, p in named])
        for _, p in named:
            p.grad = None
        rebuild_buckets(self.forward)  # as it would before the second window, when there were all of them twice
        self._make_gradients([p for _, p in named])
        self._idle = {name for name, _ in named}
        for name, p in named:
            self._watching.append(p.register_post_accumulate_grad_hook(lambda _, name=name: self._idle.discard(name)))

    def release(self) -> ref | None:
        if self.forward is None:  # the run has ended before it was made
            return None
        reducer = ref(self.forward.reducer)
        self.forward = None
        self._watch_no_more()
        gc.collect()  # the wrapper is part of a cycle
        return reducer

    def _make_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Zeros, added up and laid into the buckets: what micro-batches before a window's last make goes there too, and
        else the first of them would make others beside."""
        self.forward.reducer.prepare_for_backward([])
        for p in reversed(parameters):  # about as a backward pass comes to them, in which order buckets are filled
            p.backward(torch.zeros_like(p))

    def micro_batch_context(self, last: bool) -> AbstractContextManager:
        return nullcontext() if last else self.forward.no_sync()

    def new_local(self, p: nn.Parameter) -> nn.Parameter:
        """Not `p` itself: a step that widens it for a moment would take DDP's hooks off, and nothing would be added any
        more."""
        return nn.Parameter(p.detach(), p.requires_grad)

    def gather_gradients(self) -> None:
        if self._watching:
            self._check_used()
        try:
            check_reduced(self.forward)
        except RuntimeError:
            raise Refused(
                "strategy=ddp: the last micro-batch of this window has not used every weight, so that ranks would wait "
                "for gradients that nobody makes. Type strategy=tensor_parallel, whose ranks read the same rows."
            ) from None
        for p, local in self._locals.items():
            local.grad = p.grad
        if self._module.trainer.precision_plugin.draws:  # all round at random alike, or their weights would part
            cards = [torch.cuda.current_device()] if self.device == "cuda" else []
            self._step.enter_context(torch.random.fork_rng(cards))
            torch.manual_seed(self._seed + self._module.position.window + 1)

    def _check_used(self) -> None:
        """DDP would wait for the gradients of all, and send none of those that share a bucket with a missing one."""
        self._watch_no_more()
        if unused := next(filter(None, self.all_gather(sorted(self._idle))), None):
            raise Refused(
                f"strategy=ddp: no forward pass uses {', '.join(unused[:3])}{' and others' * (len(unused) > 3)}, so "
                f"that ranks would wait for gradients that nobody makes. Type freeze=[{','.join(unused[:3])}], with "
                "patterns of the names of all such weights."
            )

    def _watch_no_more(self) -> None:
        while self._watching:
            self._watching.pop().remove()

    def clear_gradients(self) -> None:
        self._step.close()
        for p in self._locals:
            if p.grad is not None:
                p.grad.zero_()
