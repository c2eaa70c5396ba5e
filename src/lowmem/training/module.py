"""Defines the LightningModule of a run, whose `training_step` does one optimizer step for each window of micro-batches.

A window is the group of micro-batches of one optimizer step (gradient accumulation). One Lightning batch is one window,
so all checkpoints are saved between windows. `training_step` uses Lightning's manual optimization, because automatic
optimization counts steps that the loss scaler skipped, gives a short last window the wrong weight, and saves
checkpoints inside a window. The module calls techniques through interfaces such as `OneDevice` and `WindowOptimizer`.
docs/one-step.md shows in which thread and stream each part of a step runs.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lowmem.data.loader import MicroBatch, Position, Window
from lowmem.model.auxiliary_loss import AuxiliaryLoss, asked_for
from lowmem.model.trainable import checkpoint_state, trains_everything
from lowmem.offload.master_weights import MasterWeights
from lowmem.offload.micro_batches import Generators
from lowmem.offload.on_device import WeightsOnDevice
from lowmem.saving import by_name, random_states
from lowmem.saving.checkpoint_folder import CheckpointTensors
from lowmem.step.fp32_halves import joined
from lowmem.step.gradients import Gradients
from lowmem.step.optimizer import WindowOptimizer
from lowmem.system.lightning_private import call_before_optimizer_step
from lowmem.techniques.gradient_checkpointing.slices import Tiles
from lowmem.techniques.loss.cross_entropy import as_loss
from lowmem.techniques.optim.build import MakeOptimizer
from lowmem.techniques.strategy.contract import ONE_DEVICE, OneDevice
from lowmem.training.non_finite import NonFiniteSteps

log = logging.getLogger(__name__)


class Update(NamedTuple):
    """The settings of an optimizer step."""

    optimizer: MakeOptimizer
    # creates the learning rate schedule, whose `step` is called once per optimizer step
    scheduler: Callable[[Optimizer], LRScheduler]
    clip: float | None = None  # maximum global gradient norm; None: no clipping
    clip_value: float | None = None  # maximum absolute gradient element; applied before `clip`
    # early updates: inside backward, the host updates each weight, or its master, as soon as its gradient from the
    # window's last micro-batch has arrived in host memory (`Run.early`)
    early: bool = False
    # skip a step whose loss or gradient is not finite; if False, such a step ends the run (except an overflow that only
    # lowers the loss scale)
    skips_faults: bool = False


@dataclass(frozen=True)
class Placement:
    """Where and how a model computes: by default on one device that stores all weights."""

    weights: WeightsOnDevice = field(default_factory=WeightsOnDevice)  # stores the weights, on the device or the host
    tiles: Tiles | None = None  # modules that are computed in slices of tokens; None: no slices
    ranks: OneDevice = ONE_DEVICE  # the strategy
    # maximum number of forward passes that run as a group where no gradients are computed (evaluations, reference
    # log-probabilities); 1 without weights.order=by_layer
    at_once: int = 1


@dataclass
class LossSums:
    """Sums of the loss, and of the auxiliary loss, over the micro-batches of a window so far."""

    loss: Tensor
    auxiliary: Tensor | None = None  # None: no auxiliary loss has been added


class CausalLM(LightningModule):
    """Trains a causal language model with its loss, optimizer and schedule.

    Args:
        model: a Hugging Face causal language model.
        loss: a function of (model, micro-batch) that returns the summed fp32 loss.
        update: optimizer, schedule and gradient clipping.
        placement: where and how the model computes; None: on one device.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, MicroBatch], Tensor],
        update: Update,
        placement: Placement | None = None,
    ) -> None:
        super().__init__()
        placement = placement or Placement()
        self.automatic_optimization = False
        self.model, self.update = model, update
        self.loss = self.own_loss = as_loss(loss)  # strategy=pipeline replaces `loss`
        self.weights, self.tiles, self.ranks = placement.weights, placement.tiles, placement.ranks
        # the callback that runs the optimizer on the host, set by its `setup`; None: the optimizer is on the device
        self.masters: MasterWeights | None = None
        self.optimizer: WindowOptimizer | None = None  # created in `configure_optimizers`
        self.at_once = placement.at_once
        # Checkpoints do not contain frozen weights. Instead `Saved.check` compares a digest of the frozen weights.
        self.strict_loading = trains_everything(model)
        self.auxiliary_loss = AuxiliaryLoss(model) if asked_for(model) else None
        self.faults = NonFiniteSteps(update.skips_faults)
        self.position = Position()  # position in the training data after the last completed window
        # Numbers of input tokens (without padding) and of tokens with a label, on all devices, in all computed windows
        # so far, including windows whose step was skipped. A window in which no token counts in the loss is not
        # computed.
        self.tokens = self.learned_tokens = 0
        self.skipped_steps = 0  # windows without an optimizer step, including windows that were not computed
        # Global norm, before clipping, of the gradients of the last window that was computed. None: no window was
        # computed yet, a gradient is not finite, the window has no gradients, or early updates were used, which do not
        # compute the norm.
        self.gradient_norm: Tensor | None = None
        # stored in every checkpoint: digests of tokenizer and frozen weights, chat template, id of the W&B run, ...
        self.identity: dict[str, str] = {}
        # the "lowmem" entry of the loaded checkpoint, from which `on_train_start` restores the random states
        self._drawn: dict | None = None
        # name -> lower half of a weight that `load_state_dict` loads next, see `step/fp32_halves.py`
        self._rests: dict[str, Tensor] = {}

    @property
    def local_parameters(self) -> nn.Module:
        """Returns a module whose parameters are this process's shards, or all parameters if the model is not
        sharded."""
        return self.ranks.local_parameters(self.model)

    @property
    def device(self) -> torch.device:
        """Returns the device that computes. Lightning's own property is wrong for a sharded module, because Lightning
        does not move such a module to a device."""
        return self.ranks.place if self.ranks.divides else super().device

    # --- training ------------------------------------------------------------------------------------------------

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """Returns the loss of a micro-batch, summed over its tokens, pairs or rated answers."""
        if self.auxiliary_loss is not None:
            self.auxiliary_loss.count(micro_batch.real)
        return self.loss(self.model, micro_batch)

    def training_step(self, window: Window, _: int) -> dict:
        """Does one optimizer step. Skips the step if no token of the window counts in the loss, or if the loss or a
        gradient is not finite.

        Returns:
            The window's mean loss and auxiliary loss, its counts of tokens, its weight, and whether the optimizer
            stepped, for callbacks.

        Raises:
            NotFinite: see `_usable`.
        """
        if not window.weight:  # no token counts in the loss, so a step would only apply weight decay and old momentum
            return self._report(window, torch.zeros((), device=self.device), None, stepped=False)
        optimizer, precision, ranks = self.optimizer, self.trainer.precision_plugin, self.ranks

        # Runs the forward and backward passes of the micro-batches: one micro-batch after the other, all micro-batches
        # block by block (weights.order=by_layer), or in pipeline stages. With early updates or optim.in_backward=true,
        # each weight is updated here, as soon as its gradient is complete.
        loss_sum, auxiliary_sum = (ranks.run_window or self.run_window)(window)
        ranks.gather_gradients()

        loss = loss_sum / window.weight
        gradients = optimizer.finish(loss, precision.gradient_scale)  # the host waits for the device, once per window
        precision.update_scale(gradients.finite)
        self.gradient_norm = gradients.norm if gradients.finite else None
        stepped = self._usable(gradients, loss, window)
        if stepped:
            call_before_optimizer_step(self.trainer, optimizer)  # callbacks see gradients before they are clipped
            optimizer.clip(gradients.norm, self.update.clip_value, self.update.clip)
            self.optimizers().step()  # or queues the updates on the host; Lightning counts the step
            self.lr_schedulers().step()
        optimizer.drop_gradients(stepped)
        ranks.clear_gradients()
        return self._report(window, loss, auxiliary_sum, stepped)

    def run_window(self, window: Window) -> tuple[Tensor, Tensor | None]:
        """Runs the forward and backward passes of all micro-batches. All ranks must call this method.

        Returns:
            The sum of the losses over micro-batches and ranks, and the sum of the auxiliary losses, in which each
            auxiliary loss is multiplied by the weight of its micro-batch. The second sum is None if the model has no
            auxiliary loss.
        """
        sums = LossSums(torch.zeros((), device=self.device))
        runs = [partial(self._run_micro_batch, each, window.weight, sums) for each in window.micro_batches]
        generators = Generators.of_window(self.device, len(runs))
        self.weights.run_micro_batches(runs, generators)
        generators.resume(0)
        all_sum = self.ranks.all_sum
        return all_sum(sums.loss), None if sums.auxiliary is None else all_sum(sums.auxiliary)

    def _run_micro_batch(self, micro_batch: MicroBatch, weight: int, sums: LossSums) -> None:
        ranks = self.ranks
        with ranks.micro_batch_context(self.last_micro_batch):
            with self.trainer.precision_plugin.forward_context():
                loss = (self if ranks.forward is None else ranks.forward)(micro_batch)
            sums.loss += loss.detach()
            if self.auxiliary_loss is not None:
                auxiliary = self.auxiliary_loss.take() * micro_batch.weight
                sums.auxiliary = auxiliary.detach() + (0.0 if sums.auxiliary is None else sums.auxiliary)
                loss = loss + auxiliary
            self.manual_backward(loss * ranks.factor / weight)

    def _usable(self, gradients: Gradients, loss: Tensor, window: Window) -> bool:
        """Returns True if loss and gradients are finite, so that the optimizer can step. All ranks must call this
        method. Raises NotFinite if a value is not finite and either the step must not be skipped (on_nonfinite), or too
        many steps in a row were skipped. An overflow of scaled gradients after which the loss scale was lowered does
        not count: the step is skipped, and nothing is raised."""
        loss_is_finite = gradients.loss_is_finite
        if self.ranks.data_size < self.ranks.size:  # several ranks compute the loss of the same micro-batch
            loss_is_finite = not self.ranks.any(not loss_is_finite)
        usable = loss_is_finite and gradients.finite
        if usable:
            self.faults.in_a_row = 0
        elif not (loss_is_finite and self.trainer.precision_plugin.lowered_scale):
            self.faults.meet(self, loss, window)
        return usable

    def _report(self, window: Window, loss: Tensor, auxiliary_sum: Tensor | None, stepped: bool) -> dict:
        self.position = window.end
        self.skipped_steps += not stepped
        counted = {"tokens": window.input_tokens, "learned_tokens": window.learned_tokens, "weight": window.weight}
        if not window.weight:
            counted |= {"tokens": 0, "learned_tokens": 0}
        self.tokens += counted["tokens"]
        self.learned_tokens += counted["learned_tokens"]
        auxiliary_loss = None if auxiliary_sum is None else auxiliary_sum / window.weight
        return {"loss": loss, "auxiliary_loss": auxiliary_loss, **counted, "stepped": stepped}

    @property
    def last_micro_batch(self) -> bool:
        """Returns True if the current micro-batch, or between micro-batches the previous one, is the last of its
        window. In a pipeline, returns True if the last backward pass of the window has ended."""
        return self.weights.last

    @property
    def phase_after_backward(self) -> str:
        """Returns the phase of the memory meter that begins after a micro-batch's backward pass. After the last
        micro-batch this is "step", which includes the gradient norm. After other micro-batches it is "forward", or with
        weights.order=by_layer "backward"."""
        if self.last_micro_batch:
            return "step"
        return "backward" if self.weights.overlaps else "forward"

    def configure_optimizers(self) -> dict:
        if self.masters is not None:
            self.optimizer = self.masters.optimizer(self.update.optimizer, self.model)
        else:
            inner = self.update.optimizer(self.model, self.ranks.local)
            precision = self.trainer.precision_plugin
            self.optimizer = precision.optimizer(inner, self.ranks.local_parameters(self), self.ranks.norm)
        schedule = {"scheduler": self.update.scheduler(self.optimizer), "interval": "step"}
        return {"optimizer": self.optimizer, "lr_scheduler": schedule}

    # --- weights --------------------------------------------------------------------------------------------------

    def arrived(self) -> None:
        """Waits until all weights have the values of the last optimizer step. Call this method before code outside of a
        forward pass reads weights."""
        if self.masters is not None:
            self.masters.arrived()

    def stored(self, p: nn.Parameter) -> Tensor:
        """Returns the current value of a weight, on the device or in host memory. Call `arrived` first. Do not read
        `p.data`, which is valid for a streamed weight only while its block computes."""
        return (self.masters or self.weights).stored(p)

    def full_precision(self, p: nn.Parameter) -> Tensor:
        """Returns a weight in the highest precision in which the run stores the weight. If the host stores the weight
        in two halves, the result is a copy. Call `arrived` first."""
        return self.weights.stored(p) if self.masters is None else self.masters.full_precision(p)

    # --- evaluation ----------------------------------------------------------------------------------------------

    def on_validation_model_zero_grad(self) -> None:
        """Does nothing, instead of freeing gradients as Lightning would: gradients are already freed, or the strategy
        keeps them as zeroed buffers."""

    def on_validation_epoch_start(self) -> None:
        sets = len(self.trainer.num_val_batches)
        self._val_figure_sums: list[dict[str, Tensor]] = [{} for _ in range(sets)]
        self._val_loss_sums = torch.zeros(sets, device=self.device, dtype=torch.float64)  # one sum per set
        self._val_weights, self._val_batches = [0] * sets, 0
        self.val_losses: list[float] = []  # one loss per set; empty if the evaluation did not read all batches
        self.val_figures: list[dict[str, float | None]] = []  # per set: name -> value of the loss's other metrics

    def validation_step(self, micro_batches: Sequence[MicroBatch], _: int, dataloader_idx: int = 0) -> None:
        def evaluate(micro_batch: MicroBatch) -> None:
            self._val_loss_sums[dataloader_idx] += self(micro_batch)
            self._val_weights[dataloader_idx] += micro_batch.weight
            figures = self._val_figure_sums[dataloader_idx]
            for name, value in self.own_loss.figures().items():
                figures[name] = figures.get(name, 0.0) + value

        self.run_at_once([partial(evaluate, micro_batch) for micro_batch in micro_batches])
        self._val_batches += 1

    def run_at_once(self, computations: Sequence[Callable[[], None]], seed: int | None = None) -> None:
        """Runs forward passes without gradients, in groups of up to `Placement.at_once`.

        Args:
            computations: functions that each compute one forward pass.
            seed: seed at the beginning of every pass; None if the passes draw no random numbers.
        """
        self.weights.run_forward_passes(computations, self.at_once, self.device, seed)

    def on_validation_epoch_end(self) -> None:
        if self._val_batches == sum(self.trainer.num_val_batches):
            weights = self.ranks.all_sum(torch.tensor(self._val_weights))
            sums = zip(self.ranks.all_sum(self._val_loss_sums).tolist(), weights.tolist(), strict=True)
            losses = [loss / weight if weight else math.nan for loss, weight in sums]
            # broadcast, because all ranks must make equal decisions about the best checkpoint and early stopping
            self.val_losses = self.ranks.broadcast(losses)
            figures = [
                {name: self._mean(value, weight) for name, value in sums.items()}
                for sums, weight in zip(self._val_figure_sums, weights.tolist(), strict=True)
            ]
            self.val_figures = self.ranks.broadcast(figures)

    def _mean(self, value: Tensor, weight: int) -> float | None:
        """Returns the mean of a metric of `Loss.figures` over a validation set on all devices. If the count is 0,
        returns None for a metric with its own count, otherwise NaN. All ranks must call this method.

        Args:
            value: sum of the metric, or (sum, count).
            weight: the count, if `value` does not contain it.
        """
        total, *count = self.ranks.all_sum(value).reshape(-1).tolist()
        return None if count == [0] else total / ((count[0] if count else weight) or math.nan)

    @property
    def val_loss(self) -> float | None:
        """Returns the loss of the first validation set, or None if it is unknown or NaN. This loss selects the best
        checkpoint, and early stopping watches it by default."""
        return self.val_losses[0] if self.val_losses and not math.isnan(self.val_losses[0]) else None

    def predict_step(self, micro_batches: Sequence[MicroBatch], *_) -> list[Tensor]:
        """Computes the log-probabilities of each micro-batch's answers.

        Returns:
            One tensor in host memory per micro-batch. For pairs, its shape is (pairs, 2), with columns for the chosen
            and the rejected answer. For rated answers, its shape is (answers, 2), with columns for the answer after its
            own prompt and after a mismatched prompt.
        """
        found: list[list[Tensor]] = [[] for _ in micro_batches]

        def read(batch: MicroBatch, columns: list[Tensor]) -> None:
            with self.trainer.precision_plugin.forward_context():
                self(batch)
            answers, real = self.own_loss.take()
            columns.append(answers.logp[real].cpu())

        # For pairs, `compared` has one entry, the micro-batch itself, whose logp has both columns. For rated answers,
        # it has two entries with one column each: the micro-batch, and its answers after mismatched prompts.
        for batches in zip(*(micro_batch.compared for micro_batch in micro_batches), strict=True):
            self.run_at_once([partial(read, *pair) for pair in zip(batches, found, strict=True)])
        return [torch.cat(columns, dim=1) for columns in found]

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        held = checkpoint_state(self)
        checkpoint["state_dict"] = {name: one for name, one in checkpoint["state_dict"].items() if name in held}
        checkpoint["lowmem"] = (
            self.identity
            | {
                "position": self.position._asdict(),
                "order": self.trainer.train_dataloader.order,
                "tokens": self.tokens,
                "learned_tokens": self.learned_tokens,
                "skipped_steps": self.skipped_steps,
                "optimizer": self.update.optimizer.name,
                "stepped": [name for name, _ in by_name.stepped(self)],
            }
            | random_states.capture(self.ranks, self.device)
        )

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        saved = checkpoint["lowmem"]
        self.position = Position(**saved["position"])
        self.tokens, self.skipped_steps = saved["tokens"], saved["skipped_steps"]
        self.learned_tokens = saved.get("learned_tokens", self.tokens)
        if "learned_tokens" not in saved:
            log.info(
                "This checkpoint of an earlier version counted only learned tokens (with a label), so the number of "
                "tokens is too low."
            )
        self._drawn = saved
        self._rests = checkpoint.get("rests", {})

    def load_optimizer(self, optimizer: Optimizer, checkpoint: Mapping[str, object]) -> None:
        """Restores the optimizer's state from a checkpoint, on the device or in host memory."""
        optimizer.load_state_dict(by_name.optimizer_state(self, optimizer, checkpoint))

    def load_state_dict(self, state_dict: Mapping[str, Tensor], *args, **kwargs) -> object:
        """Loads the weights of a checkpoint. The lower halves of split masters come from the checkpoint's "rests". If
        the model is sharded or the checkpoint is a folder, one weight is loaded at a time."""
        held = dict(self.named_parameters())  # lists tied parameters once
        takes = self.masters is not None and self.masters.in_fp32
        in_halves = {name for name, p in held.items() if takes and p.dtype != torch.float32 and name in self._rests}
        for name, p in held.items() if takes else ():
            if name in state_dict and name not in in_halves:  # the master in the checkpoint may have more bits than `p`
                p.data = p.data.to(torch.promote_types(p.dtype, state_dict[name].dtype))
        if self.ranks.divides or isinstance(state_dict, CheckpointTensors):
            by_name.load_weights(self, state_dict, self._rests)
            self._rests = {}
            return None
        loaded = super().load_state_dict(state_dict, *args, **kwargs)
        for name, rest in self._rests.items():
            if name not in in_halves:
                held[name].data.copy_(joined(state_dict[name], rest))
        if takes:
            self.masters.rests = {name: self._rests[name] for name in in_halves}
        self._rests = {}
        return loaded

    def on_train_start(self) -> None:
        """Sets the model to training mode, and restores the random states of a checkpoint. Runs directly before the
        first window, so that no other code draws random numbers in between."""
        self.model.train()
        self.ranks.before_training(self)
        if self._drawn is not None:
            random_states.restore(self._drawn, self.ranks, self.device, self.position.window)
