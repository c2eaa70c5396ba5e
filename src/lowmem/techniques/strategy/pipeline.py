"""`strategy=pipeline`: each device has consecutive blocks, and micro-batches pass from device to device.

    stage 0    F0 F1 F2 F3             B0 B1 B2 B3    F: forward, B: backward of micro-batches 0 to 3 (GPipe)
    stage 1       F0 F1 F2 F3       B0 B1 B2 B3       hidden states are sent to the next stage,
    stage 2          F0 F1 F2 F3 B0 B1 B2 B3          their gradients back to the previous stage

Each device stores the weights, gradients and optimizer state of its own stage only. Besides hidden states and their
gradients, the stages exchange the following once per window: the gradients of tied weights, the loss, and with
stochastic rounding the tied weights themselves. Other strategies that divide a model usually communicate more bytes.
The cost is idle time while the pipeline fills and drains: (S - 1) / (n + S - 1) of a step, for n micro-batches and S
stages that take equal time. With GPipe each stage stores the activations of all n micro-batches. With 1F1B a stage
starts backward as early as possible, and stores the activations of at most S micro-batches. Source: Huang et al. 2019,
arXiv 1811.06965; Narayanan et al. 2021, arXiv 2104.04473; torch.distributed.pipelining.

Each stage runs in its own process, with these objects:

    Stage            `stages.py`: makes the Hugging Face model compute one stage
    WindowOfStage    runs a window's micro-batches through the stage
    schedule         torch's GPipe or 1F1B: orders the forward and backward passes, sends and receives

All stages read the same rows. If embedding and head are tied, the first and the last stage each have a copy of the
weight. The gradients of both copies are summed before the step, so that the copies get equal updates (`clear_gradients`
describes stochastic rounding). In an evaluation, one micro-batch at a time passes through all stages.
"""

import logging
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from itertools import pairwise
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast, ModelOutput

from lowmem.data.loader import MicroBatch, Window
from lowmem.model.auxiliary_loss import asked_for
from lowmem.system.units import GIB
from lowmem.techniques.loss.cross_entropy import Function
from lowmem.techniques.strategy import load_in_parts
from lowmem.techniques.strategy.several import APART, Divided
from lowmem.techniques.strategy.stages import Division, Stage, divided, from_names, refused, same

T = TypeVar("T")
log = logging.getLogger(__name__)

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
HEADS = ("labels", "logits_to_keep", "return_dict")  # arguments of a causal LM that its body does not accept
SHOWN = 16  # tokens per row of the micro-batch with which the stages are compared with the full model


class Pipeline(Divided):
    """Pipeline parallelism. Args: schedule: 1f1b or gpipe."""

    overlaps_micro_batches = True

    def __init__(self, device: str = "cpu", devices: int = 1, timeout: float = 600, schedule: str = "1f1b") -> None:
        super().__init__(device, devices, timeout)
        self.data_rank, self.data_size, self.factor = 0, 1, 1.0
        self.schedule, self.timeout = SCHEDULES[schedule], timedelta(seconds=timeout)

    @staticmethod
    def data_ranks(devices: int, **_: object) -> int:
        return 1

    # --- before the first step ------------------------------------------------------------------------------------

    def shard(self, module: LightningModule) -> None:
        """Reduces the model to this rank's stage, in place. Also replaces the module's loss by `evaluated`, and wraps
        the model's forward pass in `_answering`. Both replacements serve passes without gradients, which go through all
        stages. In training, the last stage calls the original loss.

        Raises:
            Refused: the model cannot be divided into stages; the logits of the stages differ from the logits of the
                undivided model; a stage would have no trained weights; the model adds an auxiliary loss; the logits
                that the loss computes differ from the model's logits; or this rank's parameters differ from the
                parameters of rank 0.
        """
        model, self.module = module.model, module
        division = from_names(model, load_in_parts.on_rank_0(self, lambda: self._shown(module).to_names(model)))
        load_in_parts.shard_and_send(model, self, lambda: self._cut(module, division), self.place)
        model.forward = self._answering(model.forward)
        self._tied = self._groups()
        log.info(self._describe_stages(division))

    def _cut(self, module: LightningModule, division: Division) -> set[nn.Module]:
        """Reduces the meta model to this rank's stage, and replaces the module's loss. Returns: see
        `Division.elsewhere`."""
        self.stage, self.loss = Stage(module.model, division, self.rank), module.loss
        module.loss = Function(self.evaluated)
        elsewhere = division.elsewhere(self.rank)
        self.stage.empty()
        return elsewhere

    def _shown(self, module: LightningModule) -> Division:
        """Divides a full model into stages, and checks the division with forward passes. Raises: Refused."""
        with torch.compiler.set_stance("force_eager"):  # compiled code would keep references to the full weights
            division = divided(module.model, self.size)
            self._check(module, division)
        return division

    def _check(self, module: LightningModule, division: Division) -> None:
        """Checks that the model adds no auxiliary loss, that each stage has trained weights, and that both the stages
        and the loss compute the same logits as the full model. Raises: Refused."""
        model = module.model
        if asked_for(model):
            raise refused(model, "adds an auxiliary loss, which the last stage can compute only for its own blocks")
        for stage in range(self.size):
            if not any(p.requires_grad and stage in stages for p, stages in division.holders.items()):
                raise refused(model, f"has no trainable weights on stage {stage} with this freeze= and adapter=")
        training = model.training
        try:
            model.eval()  # disables dropout
            shown = _random_rows(model)
            if not same(model, division, shown):
                raise refused(model, "computes different results when its blocks are divided into stages")
            with torch.no_grad():
                module.loss.verify(model, shown)
        finally:
            model.train(training)

    def _describe_stages(self, division: Division) -> str:
        cuts = ", ".join(
            f"{first} to {end - 1} ({division.bytes(stage) / GIB:.2f} GiB)"
            for stage, (first, end) in enumerate(pairwise(division.cuts))
        )
        return f"strategy=pipeline: blocks (bytes of weights) of each stage: {cuts}."

    @property
    def neediest(self) -> tuple[int, ...]:
        """Returns the indices of the stages that may need the most memory: the first (embedding), the last (logits),
        the stage with the most bytes of weights, and the stage with the most activations (blocks times stored
        micro-batches). With GPipe all stages store equally many micro-batches. With 1F1B, stage s (from 0) of S stages
        stores up to S - s micro-batches, but a window with fewer than S micro-batches uses GPipe (`_schedule`)."""
        cuts, stages = self.stage.division.cuts, range(self.size)
        blocks = [cuts[n + 1] - cuts[n] for n in stages]
        stored = [count * (self.size - n) for n, count in enumerate(blocks)]
        sizes = (blocks.__getitem__, stored.__getitem__, self.stage.division.bytes)
        return tuple(sorted({0, *(max(stages, key=size) for size in sizes), self.size - 1}))

    def _groups(self) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
        """Returns a pair for each trained weight that this stage shares with other stages: the weight, and the process
        group of all stages that have it."""
        shared = {tuple(stages): None for stages in self.stage.holders.values() if len(stages) > 1}
        # all ranks must take part in creating each group
        groups = {stages: dist.new_group(stages, timeout=self.timeout) for stages in shared}
        own = ((p, tuple(stages)) for p, stages in self.stage.holders.items() if self.rank in stages)
        return [(p, groups[stages]) for p, stages in own if stages in groups and p.requires_grad]

    def before_training(self, module: LightningModule) -> None:
        super().before_training(module)
        torch.manual_seed(torch.initial_seed() + self.rank * APART)  # different dropout masks per stage

    # --- each window ----------------------------------------------------------------------------------------------

    def run_window(self, window: Window) -> tuple[Tensor, None]:
        """Runs forward and backward of all micro-batches. Returns: the sum of the losses, on every stage; and None in
        place of the sum of auxiliary losses, because a pipeline refuses models with an auxiliary loss."""
        work = WindowOfStage(self, window)
        numbers = torch.arange(len(window.micro_batches))
        schedule = self._schedule(work, len(numbers))
        schedule.step(number=numbers, target=numbers, return_outputs=False)
        self.module.weights.last = True  # read by hooks that `after_backward` calls
        work.after_backward()
        for p, group in self._tied:
            dist.all_reduce(p.grad, group=group)
        return self._of_last(work.loss_sum), None

    def _schedule(self, work: "WindowOfStage", count: int) -> PipelineScheduleSingle:
        """Creates torch's schedule. Each window needs a new schedule, because a schedule has buffers for a fixed number
        and length of micro-batches. A new schedule costs a small message that passes from the first stage to the last
        and back. With this message torch checks that every stage was given the shapes of its inputs and outputs. GPipe
        is used for a window with fewer micro-batches than stages, because torch's 1F1B raises an error for it."""
        stage = self.stage
        travels = torch.empty(work.rows, stage.width, dtype=stage.dtype, device="meta", requires_grad=True)
        arrives, leaves = () if stage.first else (travels,), work.loss_sum.to("meta") if stage.last else travels
        place = PipelineStage(work, self.rank, self.size, self.place, input_args=arrives, output_args=leaves)
        schedule = self.schedule if count >= self.size else ScheduleGPipe
        return schedule(place, count, loss_fn=work.before_backward, scale_grads=False)

    def clear_gradients(self) -> None:
        """With stochastic rounding, also broadcasts tied weights from the lowest stage that has them, because each
        stage rounded its copy with its own random numbers."""
        super().clear_gradients()
        if self.module.trainer.precision_plugin.draws:
            for p, group in self._tied:
                dist.broadcast(p.data, self.stage.holders[p][0], group=group)

    # --- evaluation -----------------------------------------------------------------------------------------------

    def evaluated(self, model: PreTrainedModel, micro_batch: MicroBatch) -> Tensor:
        """Computes a micro-batch's loss through all stages. `shard` makes this method the loss of the module. All
        stages must call it, with gradients disabled. Returns: the loss, on every stage."""
        inputs = micro_batch.inputs | {"use_cache": False}
        loss = self._through(inputs, lambda: self.loss(model, micro_batch))
        return self._of_last(torch.zeros((), device=micro_batch.labels.device) if loss is None else loss)

    def _answering(self, forward: Callable[..., ModelOutput]) -> Callable[..., ModelOutput]:
        """Wraps the model's forward pass, so that a call in eval mode without gradients goes through all stages, and
        returns the logits on every stage. All stages must make the call. Such calls come, for example, from samples
        (`report/sample.py`) and user-defined metrics (`report/own_metric.py`). Other calls run the stage's own forward
        pass."""

        @wraps(forward)
        def answered(*args, **kwargs) -> ModelOutput:
            if self.stage.works or self.module.model.training or torch.is_grad_enabled():
                return forward(*args, **kwargs)
            kwargs |= dict(zip(("input_ids",), args, strict=True)) if args else {}
            output = self._through({k: v for k, v in kwargs.items() if k not in HEADS}, lambda: forward(**kwargs))
            logits = self._of_last(self._room(None if output is None else output.logits))
            return CausalLMOutputWithPast(logits=logits, past_key_values=kwargs.get("past_key_values"))

        return answered

    def _room(self, tensor: Tensor | None) -> Tensor:
        """Returns a tensor for `_of_last`: on the last stage `tensor` itself, contiguous; on other stages an
        uninitialized tensor with the shape and dtype of the last stage's tensor. All stages must call this method.
        Args: tensor: None on stages other than the last."""
        box = [None if tensor is None else (tensor.shape, tensor.dtype)]
        dist.broadcast_object_list(box, self.size - 1, device=torch.device("cpu"))
        shape, dtype = box[0]
        return torch.empty(shape, dtype=dtype, device=self.place) if tensor is None else tensor.contiguous()

    def _through(self, inputs: dict, last: Callable[[], T]) -> T | None:
        """Computes a forward pass through all stages, which must all call this method.

        Args:
            inputs: arguments of the model's body.
            last: called on the last stage, in place of the model's body.

        Returns:
            The result of `last` on the last stage; None on other stages.
        """
        stage, ids = self.stage, inputs["input_ids"]
        arrived = torch.empty(ids.numel(), stage.width, dtype=stage.dtype, device=ids.device)
        if not stage.first:
            dist.recv(arrived, self.rank - 1)
        with stage.entered(None if stage.first else arrived, ids):
            if stage.last:
                return last()
            left = stage.hidden(**inputs)
        dist.send(left, self.rank + 1)
        return None

    def _of_last(self, tensor: Tensor) -> Tensor:
        """Overwrites `tensor` on every stage with the last stage's tensor, and returns it."""
        dist.broadcast(tensor, self.size - 1)
        return tensor

    def all_sum(self, tensor: Tensor) -> Tensor:
        return tensor  # all stages read the same rows

    # --- parameters -----------------------------------------------------------------------------------------------

    def holders(self, p: nn.Parameter) -> int:
        return len(self.stage.holders[p])

    def gathered(self, p: nn.Parameter, shard: Tensor) -> Tensor | None:
        """Sends the full tensor to rank 0, from the lowest rank that has the weight. Returns: the tensor on both ranks;
        None on other ranks."""
        owner = self.stage.holders[p][0]
        if self.rank == owner:
            shard = shard.cpu()
            if owner:
                dist.send(shard.contiguous(), 0)
            return shard
        if self.rank:
            return None
        received = torch.empty(shard.shape, dtype=shard.dtype)
        dist.recv(received, owner)
        return received

    def shard_of(self, p: nn.Parameter, full: Tensor) -> Tensor:
        return full.to("meta") if p.is_meta else full


class WindowOfStage(nn.Module):
    """The module that torch's schedule calls on a stage. Each call of `forward` computes the next micro-batch of a
    window."""

    def __init__(self, ranks: Pipeline, window: Window) -> None:
        super().__init__()
        self.ranks, self.window = ranks, window
        self._coming = iter(window.micro_batches)
        # number of tokens of the window's largest micro-batch; all hidden states are padded to (rows, H)
        self.rows = max(micro_batch.input_ids.numel() for micro_batch in window.micro_batches)
        self.loss_sum = torch.zeros((), dtype=torch.promote_types(ranks.stage.dtype, torch.float32), device=ranks.place)
        self._backward = False  # True: `before_backward` was called, and `after_backward` has not followed yet
        ranks.module.weights.last = False

    def forward(self, *arrived: Tensor, number: Tensor) -> Tensor:
        """Computes the next micro-batch.

        Args:
            arrived: one tensor, the hidden states (rows, H) of the previous stage; empty on the first stage.
            number: (1,), index of the micro-batch. Not used, because in a memory plan it is a fake tensor without a
                value.

        Returns:
            The loss on the last stage, otherwise the hidden states (rows, H) to send.
        """
        self.after_backward()
        ranks, stage, micro_batch = self.ranks, self.ranks.stage, next(self._coming)
        with self._precision.forward_context(), stage.entered(*(arrived or [None]), micro_batch.input_ids):
            if stage.last:
                loss = ranks.loss(stage.model, micro_batch)
                self.loss_sum += loss.detach()
                return loss.to(self.loss_sum.dtype)  # the dtype in the schedule's output_args
            hidden = stage.hidden(**micro_batch.inputs, use_cache=False)
        leaves = F.pad(hidden, (0, 0, 0, self.rows - len(hidden)))
        leaves.register_hook(lambda _: self.before_backward(self.loss_sum))  # loss_sum is 0 on this stage
        return leaves

    def before_backward(self, loss: Tensor, _: Tensor | None = None) -> Tensor | None:
        """Calls Lightning's hooks before a backward pass. On the last stage, torch's schedule calls this method as its
        loss function, right after each forward pass; with GPipe the backward passes come later. On other stages, a hook
        calls this method when the gradient of the stage's output has arrived. Returns: on the last stage the loss,
        divided by the window's weight and multiplied by the loss scale if there is one; None on other stages."""
        self._backward = True
        scaled = self._precision.pre_backward(loss / self.window.weight, self.ranks.module)
        return scaled if self.ranks.stage.last else None

    def after_backward(self) -> None:
        """Calls Lightning's hooks for the end of a backward pass, if `before_backward` has been called since the last
        call of this method. Called before each forward pass and at the end of a window. So the hooks run only once
        after several backward passes in a row. With GPipe these are all backward passes of a window, with 1F1B only the
        last ones. On the last stage with GPipe, where `before_backward` follows each forward pass, the hooks also run
        before each forward pass except the first."""
        if self._backward:
            self._precision.post_backward(self.loss_sum, self.ranks.module)
        self._backward = False

    @property
    def _precision(self) -> Precision:
        return self.ranks.module.trainer.precision_plugin


def _random_rows(model: PreTrainedModel) -> MicroBatch:
    """Returns a micro-batch of two rows of random tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.get_input_embeddings().num_embeddings, (2, SHOWN + 1), generator=generator)
    return MicroBatch(ids[:, :-1], ids[:, 1:])
