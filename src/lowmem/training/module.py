"""The LightningModule: one window of micro-batches in, one optimizer step out. It knows no technique by name.

Lightning's automatic optimization counts a step that the loss scaler skipped, weights a short last window wrongly and
saves checkpoints inside a window. So the step is written out here: one Lightning batch is one whole window, which makes
every checkpoint stand between windows by construction.

`training_step` reads downwards: forward and backward of each micro-batch, gradients gathered, checked, clipped, stepped
and cleared. The module calls its strategy (`ranks`) and the precision plugin, and two calls come back: `ranks.forward`
is an engine around `forward`, and `optimizer.step` clips in `on_before_optimizer_step`, as Lightning has it.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lowmem.data.loader import MicroBatch, Position, Window
from lowmem.model.auxiliary_loss import AuxiliaryLoss
from lowmem.model.trainable import checkpoint_state, trains_everything
from lowmem.saving import by_name, random_states
from lowmem.saving.checkpoint_folder import Stored
from lowmem.techniques.arithmetic.fp32_halves import joined
from lowmem.techniques.gradient_checkpointing.slices import Tiles
from lowmem.techniques.loss.cross_entropy import as_loss
from lowmem.techniques.optim.build import MakeOptimizer
from lowmem.techniques.strategy.contract import ONE_DEVICE, OneDevice
from lowmem.techniques.weights.resident import Resident
from lowmem.training.non_finite import NonFiniteSteps
from lowmem.training.passes import MicroBatchPass, run_forward_passes, states_of

log = logging.getLogger(__name__)


class Update(NamedTuple):
    """Holds the optimizer, its schedule and its bounds on gradients. A bound of None is off."""

    optimizer: MakeOptimizer
    scheduler: Callable[[Optimizer], LRScheduler]  # stepped once per optimizer step
    clip: float | None = None  # largest global gradient norm
    clip_value: float | None = None  # largest absolute gradient element, applied before the norm
    early: bool = False  # masters on the host step as their gradients arrive
    skips_faults: bool = False  # a step whose loss or gradient is not finite is skipped; else it ends the run


@dataclass(frozen=True)
class Placement:
    """Says where a model computes: by default on one device."""

    weights: Resident = field(default_factory=Resident)  # where weights are while no block needs them
    tiles: Tiles | None = None  # the modules that are computed in slices
    ranks: OneDevice = ONE_DEVICE  # the strategy
    at_once: int = 1  # forward passes of an evaluation that go through a block in one turn of it


@dataclass
class LossSums:
    """The losses of a window's micro-batches, summed as they come."""

    loss: Tensor
    auxiliary: Tensor | None = None


class CausalLM(LightningModule):
    """Trains a causal language model with its loss, optimizer and schedule.

    Args:
        model: a Hugging Face causal language model.
        loss: (model, micro-batch) -> summed fp32 loss.
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
        self.loss = self.own_loss = as_loss(loss)  # a strategy may wrap `loss`
        self.weights, self.tiles, self.ranks = placement.weights, placement.tiles, placement.ranks
        self.at_once = placement.at_once
        # a checkpoint has no frozen weights; `Saved.check` compares those with the run's
        self.strict_loading = trains_everything(model)
        self.auxiliary_loss = AuxiliaryLoss(model)
        self.faults = NonFiniteSteps(update.skips_faults)
        self.position = Position()  # after the last completed window
        # tokens of all windows, including skipped steps: those that the model computed, and those with a label
        self.tokens = self.learned_tokens = 0
        self.skipped_steps = 0
        # of the last window, before clipping; None: unknown, since the host stepped each gradient as it arrived
        self.gradient_norm: Tensor | None = None
        self.identity: dict[str, str] = {}  # the tokenizer's digest and the like, in every checkpoint
        self.last_micro_batch = False  # whether the current micro-batch is its window's last
        self._drawn: dict | None = None  # the checkpoint whose random states a resumed run restores
        # the lower halves of weights that are loaded next, see `techniques/arithmetic/fp32_halves.py`
        self._rests: dict[str, Tensor] = {}
        # gives a precision with masters those of weights in 16 bits; None: there is none, as in an export
        self._load_rests: Callable[[Mapping[str, Tensor]], None] | None = None

    def setup(self, stage: str) -> None:
        precision = self.trainer.precision_plugin
        precision.global_norm = self.ranks.norm
        self._load_rests = precision.load_rests if precision.optimizer_side == "host" else None

    @property
    def local_parameters(self) -> nn.Module:
        """Returns the module whose parameters are this process's shard of the model's."""
        return self.ranks.local_parameters(self.model)

    @property
    def device(self) -> torch.device:
        """Returns the device that computes. Lightning would return the one to which it moved the module, and nobody
        moves a sharded one."""
        return self.ranks.place if self.ranks.divides else super().device

    # --- training ------------------------------------------------------------------------------------------------

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """Returns the summed loss."""
        self.auxiliary_loss.count(micro_batch.real)
        return self.loss(self.model, micro_batch)

    def training_step(self, window: Window, _: int) -> dict:
        if not window.weight:
            return self._nothing_to_learn(torch.zeros((), device=self.device), window)
        self._look_ahead([window.micro_batches])
        loss_sum, auxiliary_sum = (self.ranks.run_window or self.run_window)(window)
        self.ranks.gather_gradients()
        mean = loss_sum / window.weight
        stepped = self._step(mean, window)
        self.position = window.end
        self.tokens += window.input_tokens
        self.learned_tokens += window.learned_tokens
        auxiliary_loss = None if auxiliary_sum is None else auxiliary_sum / window.weight
        counted = {"tokens": window.input_tokens, "learned_tokens": window.learned_tokens, "weight": window.weight}
        return {"loss": mean, "auxiliary_loss": auxiliary_loss, **counted, "stepped": stepped}

    def run_window(self, window: Window) -> tuple[Tensor, Tensor | None]:
        """Computes forward and backward of all micro-batches.

        Returns: the sum of their losses, and of their auxiliary losses or None, over all ranks.
        """
        sums = LossSums(torch.zeros((), device=self.device))
        passes, last = [], len(window.micro_batches) - 1
        for number, states in enumerate(states_of(last + 1, self.device)):
            run = partial(self._run_micro_batch, window.micro_batches[number], window.weight, sums)
            begins = partial(setattr, self, "last_micro_batch", number == last)
            passes.append(MicroBatchPass(run, begins, self.device, states))
        self.weights.run_micro_batches(passes)
        passes[0].restore()
        all_sum = self.ranks.all_sum
        return all_sum(sums.loss), None if sums.auxiliary is None else all_sum(sums.auxiliary)

    def _look_ahead(self, groups: Iterable[Sequence[MicroBatch]]) -> None:
        """Tells a loss that depends on all micro-batches at once about them. Args: groups: evaluated at once, each."""
        found: list[Tensor] = []
        for group in groups:
            rows = [micro_batch.ahead for micro_batch in group]
            if None in rows:
                return
            found += self._without_gradients(rows, self.own_loss.ahead)
        self.own_loss.prepare(self.ranks.all_sum(torch.stack(found).sum(0)))

    def _without_gradients(self, micro_batches: Sequence[MicroBatch], then: Callable[[], Tensor]) -> list[Tensor]:
        """Computes losses as an evaluation does, and returns what `then` reads of each."""
        found: list[Tensor | None] = [None] * len(micro_batches)

        def compute(number: int) -> None:
            with self.trainer.precision_plugin.forward_context():
                self(micro_batches[number])
            found[number] = then()

        training = self.model.training
        self.model.eval()
        with torch.no_grad():
            self.run_at_once([partial(compute, number) for number in range(len(micro_batches))])
        self.model.train(training)
        return found

    @property
    def phase_after_backward(self) -> str:
        """Returns the phase that begins when a micro-batch's backward pass has ended. Where micro-batches overlap the
        next one is in backward, too. The step begins with the norm of the gradients."""
        if self.last_micro_batch:
            return "step"
        return "backward" if self.weights.overlaps else "forward"

    def _run_micro_batch(self, micro_batch: MicroBatch, weight: int, sums: LossSums) -> None:
        ranks = self.ranks
        with ranks.micro_batch_context(self.last_micro_batch):
            with self.trainer.precision_plugin.forward_context():
                loss = (self if ranks.forward is None else ranks.forward)(micro_batch)
            sums.loss += loss.detach()
            if (auxiliary := self.auxiliary_loss.take()) is not None:
                auxiliary = auxiliary * micro_batch.weight
                sums.auxiliary = auxiliary.detach() + (0.0 if sums.auxiliary is None else sums.auxiliary)
                loss = loss + auxiliary
            self.manual_backward(loss * ranks.factor / weight)

    def _nothing_to_learn(self, nothing: Tensor, window: Window) -> dict:
        """Skips a window without a label that counts: a step would apply weight decay and old momentum."""
        self.skipped_steps += 1
        self.position = window.end
        counted = {"tokens": 0, "learned_tokens": 0, "weight": 0}
        return {"loss": nothing, "auxiliary_loss": None, **counted, "stepped": False}

    def _step(self, loss: Tensor, window: Window) -> bool:
        """Makes one optimizer step, or none if scaled gradients overflowed or a number is not finite."""
        optimizer = self.optimizers()
        stepped = self._may_step(optimizer.optimizer, loss, window)
        if stepped:
            optimizer.step()  # calls `on_before_optimizer_step` of the callbacks, then ours
            self.lr_schedulers().step()
        else:
            self.skipped_steps += 1
        self.trainer.precision_plugin.drop_gradients(optimizer.optimizer)
        self.ranks.clear_gradients()
        return stepped

    def _may_step(self, optimizer: Optimizer, loss: Tensor, window: Window) -> bool:
        precision = self.trainer.precision_plugin
        usable = precision.unscale(optimizer)
        self.gradient_norm = precision.norm(self.local_parameters) if usable else None
        # The only number that each window reads from the device. Where masters step early, `MasterWeights` has read the
        # loss before the first step.
        watched = loss if self.gradient_norm is None else loss + self.gradient_norm
        finite = self.update.early or bool(watched.isfinite())
        if self.ranks.data_size < self.ranks.size:  # some ranks compute the same loss, each by itself
            finite = not self.ranks.any(not finite)
        if finite and usable:
            self.faults.none()
        elif not (finite and precision.lowered_scale):  # an overflow that a smaller loss scale may end is no fault
            self.faults.meet(self, loss, window)
            precision.forget()
        return finite and usable

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Clips, after every callback has seen the gradients. A stored gradient is the true one times the precision's
        `gradient_scale`, which is 1 except in 16-true; masters have none at the parameters. `gradient_norm` is true."""
        precision = self.trainer.precision_plugin
        precision.clip(self.local_parameters, self.update.clip_value, self.update.clip, self.gradient_norm)

    def configure_optimizers(self) -> dict:
        precision = self.trainer.precision_plugin
        made = self.update.optimizer(self.model, lambda p: precision.master(self.ranks.local(p)), precision.restored)
        optimizer = precision.prepare_optimizer(made)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.update.scheduler(optimizer), "interval": "step"},
        }

    # --- evaluation ----------------------------------------------------------------------------------------------

    def on_validation_model_zero_grad(self) -> None:
        """Keeps Lightning from dropping gradients: a step has dropped them, or `ranks` keeps their memory, zeroed."""

    def on_validation_epoch_start(self) -> None:
        sets = len(self.trainer.num_val_batches)
        self._val_figure_sums: list[dict[str, Tensor]] = [{} for _ in range(sets)]
        self._val_loss_sums = torch.zeros(sets, device=self.device, dtype=torch.float64)  # one sum per set
        self._val_weights, self._val_batches = [0] * sets, 0
        self.val_losses: list[float] = []  # one per set; empty if the evaluation was cut short
        self.val_figures: list[dict[str, float | None]] = []  # one per set: what the loss shows besides itself

    def validation_step(self, micro_batches: Sequence[MicroBatch], index: int, dataloader_idx: int = 0) -> None:
        if index == 0 and micro_batches[0].ahead is not None:
            self._look_ahead(self._groups_of(dataloader_idx))

        def evaluate(micro_batch: MicroBatch) -> None:
            self._val_loss_sums[dataloader_idx] += self(micro_batch)
            self._val_weights[dataloader_idx] += micro_batch.weight
            figures = self._val_figure_sums[dataloader_idx]
            for name, value in self.own_loss.figures().items():
                figures[name] = figures.get(name, 0.0) + value

        self.run_at_once([partial(evaluate, micro_batch) for micro_batch in micro_batches])
        self._val_batches += 1

    def _groups_of(self, number: int) -> Iterator[Sequence[MicroBatch]]:
        """Yields what this evaluation reads of a set. Args: number: of the set."""
        trainer = self.trainer
        count = (trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)[number]
        for group in islice(trainer.val_dataloaders[number], count):
            yield [micro_batch.to(self.device) for micro_batch in group]

    def run_at_once(self, computations: Sequence[Callable[[], None]], seed: int | None = None) -> None:
        """Runs forward passes without gradients, so many of them at once as `Placement.at_once` says. Args: seed: of
        the random numbers of each; None: they draw none."""
        run_forward_passes(self.weights, computations, self.at_once, self.device, seed)

    def on_validation_epoch_end(self) -> None:
        if self._val_batches == sum(self.trainer.num_val_batches):
            weights = self.ranks.all_sum(torch.tensor(self._val_weights))
            sums = zip(self.ranks.all_sum(self._val_loss_sums).tolist(), weights.tolist(), strict=True)
            losses = [loss / weight if weight else math.nan for loss, weight in sums]
            self.val_losses = self.ranks.broadcast(losses)  # all ranks must decide alike whether to save and to stop
            figures = [
                {name: self._mean(value, weight) for name, value in sums.items()}
                for sums, weight in zip(self._val_figure_sums, weights.tolist(), strict=True)
            ]
            self.val_figures = self.ranks.broadcast(figures)

    def _mean(self, value: Tensor, weight: int) -> float | None:
        """Returns the mean of one of the loss's `figures`, which have been summed; None: it is one of a kind of answer
        that the set does not have."""
        total, *count = self.ranks.all_sum(value).reshape(-1).tolist()
        return None if count == [0] else total / ((count[0] if count else weight) or math.nan)

    @property
    def val_loss(self) -> float | None:
        """Returns the loss of the first set, which chooses the best checkpoint and ends training early."""
        return self.val_losses[0] if self.val_losses and not math.isnan(self.val_losses[0]) else None

    def predict_step(self, micro_batches: Sequence[MicroBatch], *_) -> list[Tensor]:
        """Returns the log-probabilities of the answers of each micro-batch in host memory: (pairs, 2), or (answers, 2)
        of rated answers, each in its row and in the one that is read ahead."""

        def log_probabilities() -> Tensor:
            answers, real = self.own_loss.take()
            return answers.logp[real].cpu()

        rows = [list(micro_batches), [micro_batch.ahead for micro_batch in micro_batches]]
        read = [self._without_gradients(each, log_probabilities) for each in rows if None not in each]
        return [torch.cat(columns, dim=1) for columns in zip(*read, strict=True)]

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
        """Restores the optimizer's state of a checkpoint, each tensor where the optimizer keeps it."""
        optimizer.load_state_dict(by_name.optimizer_state(self, optimizer, checkpoint))

    def load_state_dict(self, state_dict: Mapping[str, Tensor], *args, **kwargs) -> object:
        """Loads weights one by one where the checkpoint holds them in two halves, or in shards."""
        if self.ranks.divides or isinstance(state_dict, Stored):
            by_name.load_weights(self, state_dict, self._rests)
            self._rests = {}
            return None
        held = dict(self.named_parameters())  # tied parameters once
        takes = self._load_rests is not None
        narrow = {name for name, p in held.items() if takes and p.dtype != torch.float32 and name in self._rests}
        for name, p in held.items() if takes else ():
            if name in state_dict and name not in narrow:  # a master of more bits than the model was read in
                p.data = p.data.to(torch.promote_types(p.dtype, state_dict[name].dtype))
        loaded = super().load_state_dict(state_dict, *args, **kwargs)
        for name, rest in self._rests.items():
            if name not in narrow:
                held[name].data.copy_(joined(state_dict[name], rest))
        if takes:
            self._load_rests({name: self._rests[name] for name in narrow})
        self._rests = {}
        return loaded

    def on_train_start(self) -> None:
        """Restores random states last, directly before the first window: it does not matter who drew numbers
        earlier."""
        self.model.train()
        self.ranks.before_training(self)
        if self._drawn is not None:
            random_states.restore(self._drawn, self.ranks, self.device, self.position.window)
