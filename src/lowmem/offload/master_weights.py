"""Implements the callback that creates the fp32 masters of 16-bit weights in host memory, and connects the masters to
the training loop.

The card keeps only the 16-bit weights (2 bytes per parameter), and of streamed weights only those in use. Host memory
keeps the fp32 masters (`host_weight.py` describes other forms of masters), the optimizer state, and the gradients of an
optimizer step. (With weights.drive= a drive keeps masters and optimizer state of streamed weights.)

In the order of a run, the callback

    creates the masters from the loaded weights, before the weights are rounded and moved    `make`
    creates the optimizer of the masters                                                     `optimizer`
    sends each gradient to the host as soon as backward has computed it                      `on_fit_start`
    makes each block, and each module outside the blocks, wait for its updated weights       `on_fit_start`
    saves the masters under the names of the weights                                         `on_save_checkpoint`

There is one master per parameter, so tied weights stay tied. A frozen weight has no master, and is rounded once (not
with precision=bf16-sr, see `make`). Source for masters: Micikevicius et al. 2018, arXiv 1710.03740. Source for masters
on the host: Ren et al. 2021, arXiv 2101.06840.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from lowmem.model.blocks import stack_of
from lowmem.model.trainable import trainable
from lowmem.offload.edges import GradientSink
from lowmem.offload.host_optimizer import HostOptimizer
from lowmem.offload.host_weight import HostWeight, SplitHostWeight, StochasticHostWeight
from lowmem.offload.link import Link, link_to
from lowmem.offload.on_device import WeightsOnDevice
from lowmem.system.errors import NotFinite

ROUNDINGS = "random_roundings"  # key of a checkpoint: name of a weight -> number of its updates with random rounding


class MasterWeights(Callback):
    """Updates 16-bit weights, on the device or streamed, from fp32 masters on the host (with precision=bf16-sr without
    masters).

    With `Update.early` each weight is updated as soon as its last gradient of the window is on the host, so that the
    update overlaps with backward. If there is one micro-batch per window, or with weights.order=by_layer, the host
    frees the gradient of a block's weight right after the update.
    """

    def __init__(self) -> None:
        self.link: Link | None = None  # created in `connect`
        self.masters: dict[nn.Parameter, HostWeight] = {}  # weight -> its `HostWeight`, in the model's order
        self.rests: Mapping[str, Tensor] = {}  # name -> lower half of the fp32 weight, from a checkpoint; see `make`
        self._roundings: Mapping[str, int] = {}  # `ROUNDINGS` of the loaded checkpoint
        self._hooks: list = []
        # sum of the losses of this window's micro-batches so far; used only with early updates
        self._loss: Tensor | float = 0.0

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        module.masters = self
        self.connect(trainer.precision_plugin, module.weights)

    def connect(self, precision: Precision, weights: WeightsOnDevice) -> None:
        """Creates the link, and registers `make` with the precision. Args: precision: declares the dtype of the weights
        on the device; weights: stores the 16-bit weights."""
        self.precision, self.weights = precision, weights
        self.device = torch.device(precision.device)
        self.link = link_to(self.device)
        precision.when_converted(self.make)

    @property
    def in_fp32(self) -> bool:
        """True if every trained weight has an fp32 master; False with precision=bf16-sr, where only the weights that an
        adapter keeps in fp32 have one."""
        return self.precision.steps_on_host == "always"

    # --- masters and their optimizer ------------------------------------------------------------------------------

    def make(self, module: nn.Module) -> None:
        """Creates the masters, rounds the weights to 16 bits, and moves streamed weights into their `HostBlock`. The
        precision calls this method after the weights have been loaded or restored from a checkpoint, and before
        Lightning moves the model to the device. In a second fit, existing masters are kept."""
        for name, p in module.named_parameters():  # a tied parameter is listed once
            if not p.requires_grad:
                # without fp32 masters, weights were loaded in 16 bits, and frozen matrices of an adapter stay in fp32
                p.data = p.data.to(self.precision.dtype) if self.in_fp32 else p.data
            elif p not in self.masters:
                is_copied = p.dtype != torch.float32
                self.masters[p] = master = self._new(name, p)
                # an fp32 `HostWeight` may still be a view of the weight file; the other classes store copies
                if self.weights.streams and type(master) is HostWeight and not is_copied:
                    master.leave_file()
                if name in self.rests:
                    master.rest.copy_(self.rests[name])
                self.weights.bring_in(p)
                self.weights.put(p, name, master.master_tensors())
        self.rests = {}
        self.weights.move_in(self.device)
        for master in self.masters.values():
            master.moved(self.weights.host_block(master.weight))

    def _new(self, name: str, p: nn.Parameter) -> HostWeight:
        """Creates the `HostWeight` of a parameter, and rounds the parameter to 16 bits. With precision=bf16-sr nothing
        is rounded here: the parameter was loaded in bf16, or an adapter keeps it in fp32."""
        dtype = self.precision.dtype
        if self.in_fp32:
            split = dtype == torch.bfloat16 and self.weights.waits_on_host(p)
            return (SplitHostWeight if split else HostWeight)(name, p, dtype)
        if p.dtype != dtype:  # a weight of a module that an adapter keeps in fp32, so it is not rounded
            return HostWeight(name, p, p.dtype)
        return StochasticHostWeight(name, p, dtype, torch.initial_seed(), self._roundings.get(name, 0))

    def optimizer(self, make: Callable[..., Optimizer], model: nn.Module) -> HostOptimizer:
        """Creates the optimizer of the masters. Args: make: a `MakeOptimizer`; model: the model with the weights."""
        inner = make(model, lambda p: self.masters[p].wide, self._restored)
        return HostOptimizer(inner, self.masters, self.weights, self.link)

    def _restored(self, inner: Optimizer, wide: nn.Parameter) -> None:
        """Hands optimizer state that has just been restored from a checkpoint to `weights`, so that a drive can store
        the state. Each call hands on the state of one weight."""
        master = next(master for master in self.masters.values() if master.wide is wide)
        self.weights.bring_in(master.weight)
        self.weights.put(master.weight, master.name, inner.state[wide])

    # --- hooks ----------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        optimizer, early, clip_value = module.optimizer, module.update.early, module.update.clip_value

        def complete(p: nn.Parameter) -> None:
            if early and module.last_micro_batch:
                optimizer.step_early(p, clip_value)

        def send(p: nn.Parameter) -> None:
            if p.grad is None:  # an `Edge` has already sent the gradient through the `GradientSink`
                return
            if early and module.last_micro_batch:
                optimizer.collect_and_step(p, clip_value)
            else:
                optimizer.collect(p)

        def wait_for(parameters: Sequence[nn.Parameter]) -> Callable[..., None]:
            def wait(*_) -> None:
                for p in parameters:
                    self.link.wait(p)

            return wait

        self.weights.start(GradientSink(self.link, self.masters.__getitem__, complete))
        self._hooks = [p.register_post_accumulate_grad_hook(send) for _, p in trainable(module)]
        for reader, parameters in _readers(module):
            self._hooks.append(reader.register_forward_pre_hook(wait_for(parameters)))

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.weights.start()  # for an evaluation without training; during training this is a no-op

    def on_predict_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.weights.start()  # for the reference model's log-probabilities, which are computed before training

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, *_) -> None:
        self._loss = 0.0

    def on_before_backward(self, trainer: Trainer, module: LightningModule, loss: Tensor) -> None:
        """With early updates, checks that the window's loss is finite before any master is updated. Masters are updated
        only during the backward pass of the last micro-batch, so the host reads the loss from the card once per window.
        Raises: NotFinite: the loss is not finite."""
        if not module.update.early:
            return
        self._loss = self._loss + loss.detach()
        if module.last_micro_batch and not bool(self._loss.isfinite()):
            raise NotFinite(
                f"The loss is {self._loss.item():g} in step {trainer.global_step + 1}, before any weight was updated. "
                "With clip=1.0 all gradients are checked before any update, and on_nonfinite=skip works."
            )

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.arrived()  # later code reads weights and masters without waiting for the link

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        self._end_thread()

    def teardown(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._end_thread()

    def _end_thread(self) -> None:
        """Waits for all queued work, and ends the link's threads. A no-op if there is no link because the `setup` of an
        earlier callback failed."""
        if self.link is not None:
            self.link.close()

    # --- weights, read outside of a forward pass ------------------------------------------------------------------

    def arrived(self) -> None:
        """Waits until all weights, masters and optimizer state have the values of the last optimizer step."""
        self.link.finish()
        self.weights.finish()
        for p in self.masters:
            self.link.wait(p)

    def stored(self, p: nn.Parameter) -> Tensor:
        """Returns the current weight that forward and backward read, on the device or in host memory. Call `arrived`
        first."""
        return self.masters[p].narrow if p in self.masters else self.weights.stored(p)

    def full_precision(self, p: nn.Parameter) -> Tensor:
        """Returns a weight in the highest precision in which the run stores it; a copy if the host stores the weight in
        two halves. Call `arrived` first."""
        return self.masters[p].full_precision if p in self.masters else self.weights.stored(p)

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict) -> None:
        """Saves the masters (with precision=bf16-sr the 16-bit weights) under the names of the weights, so that a run
        with any other precision can resume from the checkpoint. The halves of split masters are saved separately, so
        saving needs no fp32 copy: the lower halves are under the key "rests", which `CausalLM.on_load_checkpoint`
        reads."""
        self.arrived()
        # a tied weight is listed once
        tensors = {id(p): self.masters[p].checkpoint_tensor for _, p in trainable(module)}
        for name, p in module.named_parameters(remove_duplicate=False):
            if p.requires_grad:
                checkpoint["state_dict"][name] = tensors[id(p)]
        if rests := {master.name: master.rest for master in self.masters.values() if master.rest is not None}:
            checkpoint["rests"] = rests
        rounded = (master for master in self.masters.values() if isinstance(master, StochasticHostWeight))
        checkpoint[ROUNDINGS] = {master.name: master.steps for master in rounded}

    def on_load_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict) -> None:
        # Earlier versions stored the counts in the precision's state. A checkpoint of a run whose optimizer was on the
        # device has no counts.
        earlier = checkpoint.get(type(trainer.precision_plugin).__qualname__, {}).get("steps", {})
        self._roundings = checkpoint.get(ROUNDINGS, earlier)


def _readers(module: LightningModule) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Yields (module, trained parameters whose updates the module's forward pass waits for). A block waits for all
    parameters of its submodules, too, because compiled blocks and fused kernels read a child's weight without calling
    the child. A module outside the blocks waits for its own parameters."""
    stack = set(stack_of(module.model))
    inside = {child for block in stack for child in block.modules()}
    for reader in module.modules():
        if reader in stack or reader not in inside:
            parameters = [p for p in reader.parameters(recurse=reader in stack) if p.requires_grad]
            if parameters:
                yield reader, parameters
