"""Connects `host_masters.py` to the training loop: hooks on the model, early steps, checkpoints, gradients
that fail."""

from collections.abc import Callable, Iterator, Sequence

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lowmem.model.blocks import stack_of
from lowmem.model.trainable import trainable
from lowmem.system.errors import NotFinite
from lowmem.techniques.weights.edges import GradientSink


class MasterWeights(Callback):
    """Sends each gradient to the host as soon as it exists, and makes each block wait for its own new weights.

    With `Update.early` each master steps as soon as the window's last gradient of it has arrived: the step then
    overlaps with backward, and gradients need no memory.
    """

    def __init__(self) -> None:
        self._hooks: list = []
        self._loss: Tensor | float = 0.0  # of this window's micro-batches until now, where masters step early

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        self.plugin = trainer.precision_plugin
        self.on_host = self.plugin.optimizer_side == "host"  # bf16-sr steps on the host only if weights stream
        if self.on_host:
            self.plugin.weights = module.weights
        self.early = module.update.early

    # --- hooks ----------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        if not self.on_host:
            return

        def complete(p: nn.Parameter) -> None:
            if self.early and module.last_micro_batch:
                self.plugin.step_early(p, trainer.optimizers[0], module.update.clip_value)

        module.weights.start(GradientSink(self.plugin.link, lambda p: self.plugin.masters[id(p)], complete))

        def send(p: nn.Parameter) -> None:
            if p.grad is None:  # the sink has sent it
                return
            if self.early and module.last_micro_batch:
                self.plugin.collect_and_step(p, trainer.optimizers[0], module.update.clip_value)
            else:
                self.plugin.collect(p)

        def wait_for(parameters: Sequence[nn.Parameter]) -> Callable[..., None]:
            def wait(*_) -> None:
                for p in parameters:
                    self.plugin.link.wait(p)

            return wait

        self._hooks = [p.register_post_accumulate_grad_hook(send) for _, p in trainable(module)]
        for reader, parameters in _readers(module):
            self._hooks.append(reader.register_forward_pre_hook(wait_for(parameters)))

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        module.weights.start()  # an evaluation without training

    def on_predict_start(self, trainer: Trainer, module: LightningModule) -> None:
        module.weights.start()  # the log-probabilities of a reference

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, *_) -> None:
        self._loss = 0.0

    def on_before_backward(self, trainer: Trainer, module: LightningModule, loss: Tensor) -> None:
        """Reads the window's loss before the backward pass in which the first master may step. Earlier micro-batches
        only add to sums, so a card is not asked for each of their losses."""
        if not (self.on_host and self.early):
            return
        self._loss = self._loss + loss.detach()
        if module.last_micro_batch and not bool(self._loss.isfinite()):
            raise NotFinite(
                f"The loss is {self._loss.item():g} in step {trainer.global_step + 1}, before any weight was updated. "
                "With clip=1.0 all gradients are checked before any update, and on_nonfinite=skip works."
            )

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        if self.on_host:
            self.plugin.link.close()  # ends the host's thread, which may still be stepping

    def teardown(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        if self.on_host:
            self.plugin.arrived()  # what follows reads the weights and masters without waiting for the link

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict) -> None:
        """Saves the masters under the names of the weights, so that any other precision can go on with them. Split ones
        are saved as their upper halves, with the lower ones beside them (`CausalLM.load_state_dict`), so there is
        never a copy of all."""
        if not self.on_host:
            return
        self.plugin.arrived()
        # a tied weight is listed once
        tensors = {id(p): self.plugin.masters[id(p)].checkpoint_tensor for _, p in trainable(module)}
        for name, p in module.named_parameters(remove_duplicate=False):
            if p.requires_grad:
                checkpoint["state_dict"][name] = tensors[id(p)]
        rests = {master.name: master.rest for master in self.plugin.masters.values() if master.rest is not None}
        if rests:
            checkpoint["rests"] = rests


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
