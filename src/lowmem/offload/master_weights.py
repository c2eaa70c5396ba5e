"""Keeps 16-bit weights on the device and their fp32 masters on the host: the callback that joins both to the training
loop.

The card keeps only the 16-bit weights (2 bytes per parameter; with weights=streamed only the blocks that compute).
The host keeps what the optimizer steps (`host_weight.py`: fp32 masters, or another form of weights that stream), its
state, and the gradients of an optimizer step. In the order of a run this callback

    makes the masters of the loaded weights, before these are rounded and move to the device   `make`
    makes the optimizer that steps them                                                         `optimizer`
    sends each gradient to the host as soon as backward has made it                             `on_fit_start`
    makes each block wait for its own new weights                                               `on_fit_start`
    saves the masters under the names of the weights                                            `on_save_checkpoint`

Masters are stored by parameter, so tied weights stay tied; a frozen weight has none, and is rounded once. Source:
Micikevicius et al. 2018, arXiv 1710.03740, for masters; Ren et al. 2021, arXiv 2101.06840, for keeping them on the
host.
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

ROUNDINGS = "random_roundings"  # in a checkpoint: name -> how often a weight was rounded at random


class MasterWeights(Callback):
    """Updates 16-bit weights on the device from fp32 masters on the host.

    With `Update.early` each master steps as soon as the window's last gradient of it has arrived: the step then
    overlaps with backward, and gradients need no memory.
    """

    def __init__(self) -> None:
        self.link: Link | None = None  # made in `connect`
        self.masters: dict[nn.Parameter, HostWeight] = {}  # by weight, in the model's order
        self.rests: Mapping[str, Tensor] = {}  # the lower halves of weights that a checkpoint has loaded in 16 bits
        self._roundings: Mapping[str, int] = {}  # loaded from a checkpoint, by name
        self._hooks: list = []
        self._loss: Tensor | float = 0.0  # of this window's micro-batches until now, where masters step early

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        module.masters = self
        self.connect(trainer.precision_plugin, module.weights)

    def connect(self, precision: Precision, weights: WeightsOnDevice) -> None:
        """Registers `make` with the precision. Args: precision: says the dtype of the device's weights; weights: where
        they are."""
        self.precision, self.weights = precision, weights
        self.device = torch.device(precision.device)
        self.link = link_to(self.device)
        precision.when_converted(self.make)

    # --- masters and their optimizer ------------------------------------------------------------------------------

    def make(self, module: nn.Module) -> None:
        """Makes the masters. The precision calls this once the weights are loaded or restored, before they move to the
        device."""
        for name, p in module.named_parameters():  # a tied parameter is listed once
            if not p.requires_grad:
                p.data = p.data.to(self.precision.dtype)
            elif p not in self.masters:
                is_copied = p.dtype != torch.float32
                self.masters[p] = master = self._new(name, p)
                if self.weights.streams and type(master) is HostWeight and not is_copied:  # other classes hold copies
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
        """Makes the host's form of a parameter, whose weight gets 16 bits."""
        dtype = self.precision.dtype
        if self.precision.steps_on_host == "always":
            split = dtype == torch.bfloat16 and self.weights.waits_on_host(p)
            return (SplitHostWeight if split else HostWeight)(name, p, dtype)
        if p.dtype != dtype:  # a module that an adapter keeps in fp32: nothing is rounded
            return HostWeight(name, p, p.dtype)
        return StochasticHostWeight(name, p, dtype, torch.initial_seed(), self._roundings.get(name, 0))

    def optimizer(self, make: Callable[..., Optimizer], model: nn.Module) -> HostOptimizer:
        """Makes the optimizer. Args: make: a `MakeOptimizer`."""
        inner = make(model, lambda p: self.masters[p].wide, self._restored)
        return HostOptimizer(inner, self.masters, self.weights, self.link)

    def _restored(self, inner: Optimizer, wide: nn.Parameter) -> None:
        """Stores what a checkpoint has restored of one weight, where the weight's state belongs."""
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
            if p.grad is None:  # the sink has sent it
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
        self.weights.start()  # an evaluation without training

    def on_predict_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.weights.start()  # the log-probabilities of a reference

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, *_) -> None:
        self._loss = 0.0

    def on_before_backward(self, trainer: Trainer, module: LightningModule, loss: Tensor) -> None:
        """Reads the window's loss before the backward pass in which the first master may step. Earlier micro-batches
        only add to sums, so a card is not asked for each of their losses."""
        if not module.update.early:
            return
        self._loss = self._loss + loss.detach()
        if module.last_micro_batch and not bool(self._loss.isfinite()):
            raise NotFinite(
                f"The loss is {self._loss.item():g} in step {trainer.global_step + 1}, before any weight was updated. "
                "With clip=1.0 all gradients are checked before any update, and on_nonfinite=skip works."
            )

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.arrived()  # what follows reads the weights and masters without waiting for the link

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        self._end_thread()

    def teardown(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._end_thread()

    def _end_thread(self) -> None:
        """Ends the host thread, which may still be stepping. There is none if an earlier callback's `setup` failed."""
        if self.link is not None:
            self.link.close()

    # --- weights, read outside of a forward pass ------------------------------------------------------------------

    def arrived(self) -> None:
        """Returns when each weight is that of the last step."""
        self.link.finish()
        self.weights.finish()
        for p in self.masters:
            self.link.wait(p)

    def stored(self, p: nn.Parameter) -> Tensor:
        """Returns a weight in 16 bits as it was last stepped, wherever it is; it is called after `arrived`."""
        return self.masters[p].narrow if p in self.masters else self.weights.stored(p)

    def full_precision(self, p: nn.Parameter) -> Tensor:
        """Returns a weight with all its bits, as a copy if the host stores it in two halves. Exports and checkpoints
        call it, after `arrived`."""
        return self.masters[p].full_precision if p in self.masters else self.weights.stored(p)

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict) -> None:
        """Saves the masters under the names of the weights, so that any other precision can go on with them. Split ones
        are saved as their upper halves, with the lower ones beside them (`CausalLM.load_state_dict`), so there is
        never a copy of all."""
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
        # earlier versions stored it beside what the precision saves; a run that stepped on the device has none
        earlier = checkpoint.get(type(trainer.precision_plugin).__qualname__, {}).get("steps", {})
        self._roundings = checkpoint.get(ROUNDINGS, earlier)


def _readers(module: LightningModule) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Yields (module, the trained parameters for which its forward pass waits). A block waits for all of its
    parameters: compiled blocks and fused kernels read a child's weight without calling the child."""
    stack = set(stack_of(module.model))
    inside = {child for block in stack for child in block.modules()}
    for reader in module.modules():
        if reader in stack or reader not in inside:
            parameters = [p for p in reader.parameters(recurse=reader in stack) if p.requires_grad]
            if parameters:
                yield reader, parameters
