"""Traces a run: trains one window and evaluates once on fake tensors, and records memory and work. The planner predicts
memory and time from this trace.

The run's own module, callbacks and precision plugin run under Lightning's trainer, and a subclass of the run's memory
meter (`recorder.py`) measures them. The tensors are fake: they have a shape, a dtype and a storage whose bytes are
counted, but no memory. Most of the prediction therefore follows from the run's own code instead of formulas. Stand-ins
replace operators that behave differently on CUDA (`as_card.py`), optimizers that cannot step fake tensors
(`stand_in.py`), and communication between ranks (`one_rank.py`). Numbers that depend on data are assumed, for example
the number of documents in a row, and the number of tokens of each expert. Data-dependent checks, such as whether all
gradients are finite, return True.

The traced window may have fewer micro-batches than a window of the run:

- One device: a single micro-batch represents all micro-batches. `Steady` first creates the optimizer state and
  gradients that earlier windows and micro-batches would have left.
- Several devices: one rank is traced, and the other ranks are simulated (`one_rank.py`). Strategies keep buffers from
  one window to the next, so one window runs before the traced window. With gradient accumulation, both windows have two
  micro-batches.
- Overlapping micro-batches (weights.order=by_layer on one device, pipelines on several devices): the window has the
  number of micro-batches of the run's largest window.
"""

import logging
import os
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise, repeat
from pathlib import Path
from unittest.mock import patch

import hydra
import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

import lowmem
from lowmem.config.instantiate import instantiate
from lowmem.config.settle import Run
from lowmem.data.loader import START, MicroBatch, Window
from lowmem.data.opening import source_class
from lowmem.data.packing import with_positions
from lowmem.memory.ledger import plain_tensors, weights
from lowmem.model import document_attention
from lowmem.model import loading as model
from lowmem.model.blocks import stack_of
from lowmem.model.trainable import packed, parameters, trainable
from lowmem.offload.copy_lanes import AtOnceLane
from lowmem.offload.drive import Sizes
from lowmem.offload.host_optimizer import HostOptimizer
from lowmem.offload.host_weight import HostWeight
from lowmem.offload.micro_batches import Generators
from lowmem.plan.cost.allocator import from_the_start
from lowmem.plan.tracing import as_card
from lowmem.plan.tracing.one_rank import as_rank
from lowmem.plan.tracing.recorder import Recorder, by_place, of_phases
from lowmem.plan.tracing.shapes import ShapeMode, TraceTooLong
from lowmem.plan.tracing.stand_in import StandIn, stand_in, unseen
from lowmem.plan.tracing.traces import Trace
from lowmem.plan.tracing.traffic import EARLIER
from lowmem.step.one_weight import Step
from lowmem.step.optimizer import WindowOptimizer
from lowmem.system.errors import first_line
from lowmem.system.torch_private import boundaries_count_as_real, storage_key, tensors_count_as_real
from lowmem.techniques.optim.build import MakeOptimizer
from lowmem.techniques.strategy.contract import OneDevice
from lowmem.training import build
from lowmem.training.module import CausalLM

PACKAGE, TORCH, LIGHTNING, HYDRA = (Path(module.__file__).parent for module in (lowmem, torch, lightning, hydra))
PYTHON = Path(os.__file__).parent
# functions of lowmem through which a model calls operators; `_raised_by_a_model` skips their frames
INSIDE_OPERATORS = ("__torch_dispatch__", ShapeMode._computed.__name__, ShapeMode._experts.__name__)
EVENLY = (
    "the router decides how many tokens each expert gets, and the prediction assumes that tokens are spread evenly. "
    "The total is right; the estimate is too high if some experts get no tokens, and too low if one expert gets most "
    "of a long sequence."
)


def untraceable(error: Exception) -> str:
    """Returns the reason why a model cannot be traced: the trace was too long, or the model's code raised `error`,
    usually because the code needs real values.

    Raises:
        Exception: `error` itself, if other code raised it. A bug in lowmem must not look like a model that cannot be
            traced.
    """
    cause = error
    while cause.__cause__ is not None:  # a pipeline schedule wraps the errors of a stage
        cause = cause.__cause__
    if not isinstance(cause, TraceTooLong) and not _raised_by_a_model(cause):
        error.add_note(
            "This error occurred while the planner traced one step. Type plan=off to start without a prediction. If it "
            "occurs again, it comes from the run's own code, such as a callback; otherwise it is a bug in the planner."
        )
        raise error
    return f"this model cannot be traced by shape ({type(cause).__name__}: {first_line(cause)[:200]})."


def _raised_by_a_model(error: Exception) -> bool:
    """Returns True if the model's code raised the error: some stack frames lie outside of torch, Python's standard
    library and INSIDE_OPERATORS, and the innermost of these frames does not belong to lowmem, Lightning or Hydra."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    files = [Path(code.co_filename) for code in codes if code.co_name not in INSIDE_OPERATORS]
    callers = [file for file in files if TORCH not in file.parents and not _of_python(file)]
    return bool(callers) and not {PACKAGE, LIGHTNING, HYDRA} & {*callers[-1].parents}


def _of_python(file: Path) -> bool:
    return PYTHON in file.parents and "site-packages" not in file.parts


def trace(run: Run, on_card: bool, depth: int | None = None, capability: float | None = None, rank: int = 0) -> Trace:
    """Trains one window and evaluates once, on fake tensors, and returns the recorded memory and work.

    Args:
        run: resolved settings, with a number for batch_size.
        on_card: True: trace the memory of a run on CUDA, even on a machine without CUDA; False: of a run on a CPU.
        depth: number of blocks of the traced model; None: all blocks.
        capability: the card's compute capability; None: see `as_card.kernels`.
        rank: the rank to trace if the run has several devices.

    Raises:
        Refused: train.py would also refuse the run; or the run has several devices, and this process belongs to a
            process group, so it cannot simulate ranks.
        Exception: the model's code needs real values, or the trace is too long. `untraceable` distinguishes these
            errors from a bug in lowmem.
    """
    run = _here(run)
    config = of_depth(model.describe(run, plans=True).grown, depth)
    with quietly():  # a probe's step warns that there is no card
        make, scratch = _optimizer(run, on_card)
        instantiate(run.adapter)  # imports the adapter's library, which must not happen in the fake tensor mode
    mode = ShapeMode(over_gloo=not on_card)
    with (
        quietly(),
        as_rank(run, rank) as ranks,
        mode,
        tensors_count_as_real(),
        _documents(run, on_card, capability) if with_positions(run.data.arguments) else nullcontext(),
        patch.object(AtOnceLane, "copy", mode.counting("travel", AtOnceLane.copy)),
        as_card.kernels(on_card, capability) as attention,
        tempfile.TemporaryDirectory() as folder,
    ):
        module = _module(run, config, make, ranks)
        of_model = {
            "parameters": parameters(module.model),
            "largest": max(*(p.numel() for p in module.model.parameters()), *packed(module.model)),
        }
        ranks.shard(module)
        of_shard = _of_shard(module) if ranks.several else {}
        before = 1 if ranks.several else 0
        recorder = Recorder(Path(folder) / "memory.csv", before)
        recorder.mark_blocks(module.model)
        plugins = list(map(instantiate, run.plugins))
        steady = Steady(mode, run, before)
        trainer = _trainer(
            plugins, [recorder, *build.callbacks(run), steady, *module.own_loss.callbacks()], ranks, before + 1
        )
        rows = source_class(run.data.target).rows_class(run.data.arguments)
        several = run.windows.largest if run.overlaps else 2 if ranks.several and run.accumulates else 1
        mode.micro_batches = several
        micro_batches = [rows.example(run.batch_size, run.seq_len) for _ in range(several)]
        trainer.fit(module, Windows(micro_batches), [Evaluation(micro_batches[: module.at_once])])
        recorder.close()
        of_shard = of_shard or _of_shard(module)  # after `fit`, the weights have the precision's dtype
    (window, *others), workspaces = recorder.recordings, {}
    places = by_place(window.points, recorder.marks, on_card)
    for recording in others:
        places |= by_place(recording.points, [], on_card)
    events = window.events
    if attention:
        workspaces = _workspaces(run, recorder, attention)
        events = from_the_start(events, window.existing, recorder.weights, workspaces)
    return Trace(
        **of_model,
        **of_shard,
        weights=recorder.weights,
        waits_on_host=run.offloads,
        steps_on_host=module.masters is not None,
        unseen=round(scratch * of_shard["largest_trained"]),
        generated=run.technique("optim").generates_code,
        paged=optimizer.paged if isinstance(optimizer := module.optimizer.inner, StandIn) else 0,
        host_bytes=recorder.host_bytes,
        streamed=sum(blocks := [host_block.flat.nbytes for host_block in module.weights.host_blocks]),
        slots=module.weights.slot_count * max(blocks) if run.streams else 0,
        outside=sum(edge.weight.nbytes for edge in module.weights.edges),
        head=sum(edge.weight.nbytes for edge in module.weights.edges if edge.head is not None),
        drive=module.weights.on_drive(module.optimizer.stored_beside()) if run.streams else Sizes(),
        leaves=max((a.bytes["gradients"] - b.bytes["gradients"] for a, b in pairwise(window.points)), default=0),
        phases=of_phases(places, on_card),
        places=places,
        events=events,
        workspace=sum(workspaces.values()),
        work=mode.work,
        sent=mode.sent,
        offloaded=sum(window.pinned),
        rounding=sum((1 << (n - 1).bit_length()) - n for n in window.pinned) if on_card else 0,
        ahead=0 if module.masters is None else module.masters.link.ahead,
        advice=attention and attention.advice,
        estimate=EVENLY if mode.spread else None,
        neediest=ranks.neediest,
    )


def _workspaces(run: Run, recorder: Recorder, attention: as_card.Attend) -> dict[int, int]:
    """Returns the sizes in bytes of the cuBLAS workspaces that the run's first window allocates. The key of each size
    is the index of an event of the traced window; the workspace is allocated just before this event."""
    existing, begins = recorder.recordings[0].existing, recorder.begins
    forward = begins.get("forward first", begins.get("forward start", existing))
    places = forward - existing, begins.get("backward end", forward) - existing
    return dict(zip(places, as_card.workspaces(run, attention.capability), strict=True))


@contextmanager
def _documents(run: Run, on_card: bool, capability: float | None) -> Iterator[None]:
    """Context manager that fixes the number of documents per packed row. A run derives this number from the values of
    the positions, but fake tensors have no values. If attention is computed document by document, each row is assumed
    to have two documents. If one kernel call computes all documents, each row is assumed to have one document: the
    bytes that the call saves for backward do not depend on the number of documents."""
    at_once = on_card and run.product_bytes == 2 and (capability is None or capability >= 8.0)
    number = 1 if at_once else 2

    def first_tokens(_: Callable, rows: int, tokens: int, __: torch.device) -> Tensor:
        return torch.zeros(number * rows + 1, dtype=torch.int32)

    def lengths_of(first: Tensor, tokens: int) -> list[int]:
        ends = [tokens * document // (len(first) - 1) for document in range(len(first))]
        return [end - start for start, end in pairwise(ends)]

    assumed = patch.multiple(document_attention, first_tokens=first_tokens, lengths_of=lengths_of)
    with boundaries_count_as_real(), assumed:
        yield


def _here(run: Run) -> Run:
    """Returns a copy of the run for the trace, without a drive. `device` and the device of the precision are cpu,
    because fake tensors are on the CPU."""
    precision = {"precision": {"device": "cpu"}} if "device" in run.precision.arguments else {}
    in_memory = {"weights": {"drive": None}} if run.drive_folder is not None else {}
    return run.knowing(device="cpu", **precision, **in_memory)


def _module(run: Run, config: PretrainedConfig, make: MakeOptimizer, ranks: OneDevice) -> CausalLM:
    """Builds the run's own module with fake tensors, without initializing weights or moving them between devices."""
    described = model.Described(run.model, config).at_random
    where = patch.object(nn.Module, "to", lambda module, *_, **__: module)  # peft moves adapters
    with where, patch.object(PreTrainedModel, "initialize_weights", lambda model: None):
        module = build.causal_lm(run, described, ranks=ranks)
    module.update = module.update._replace(optimizer=make)
    module.to = lambda *_, **__: module
    return module


def _trainer(plugins: list, callbacks: list[Callback], ranks: OneDevice, windows: int) -> Trainer:
    trainer = Trainer(
        accelerator="cpu",
        strategy=ranks.lightning(),
        max_steps=windows,
        max_epochs=-1,
        val_check_interval=windows,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        plugins=plugins,
        callbacks=callbacks,
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    )
    trainer.strategy.world_size = 1  # otherwise Lightning all-reduces a stop flag
    return trainer


def _of_shard(module: CausalLM) -> dict:
    """Returns the values of some fields of `ModelSizes`, by name, for this rank's shard of the model. In
    `trained_in_blocks`, sharded parameters count in full."""
    own = [module.ranks.local(p) for _, p in trainable(module.model) if not p.is_meta]
    return {
        "trained_parameters": sum(p.numel() for p in own),
        "largest_trained": max(p.numel() for p in own),
        "trained_in_blocks": sum(p.numel() for block in stack_of(module.model) for _, p in trainable(block)),
        "gradients": sum(p.nbytes for p in own),
        "blocks": _blocks(module.model),
    }


def _blocks(model: nn.Module) -> tuple[int, int]:
    """Returns the number of blocks, and the bytes that the weights of the largest block take on the device."""
    sizes = [
        sum(tensor.nbytes for weight in weights(block) for tensor in plain_tensors(weight)) for block in stack_of(model)
    ]
    return len(sizes), max(sizes, default=0)


def of_depth(config: PretrainedConfig, depth: int | None) -> PretrainedConfig:
    """Changes a config in place so that its model has only the first `depth` blocks, and returns the config. Lists with
    one value per block are shortened, too. With depth=None, the config does not change."""
    if depth is not None:
        for key, value in vars(config).items():
            if isinstance(value, list) and len(value) == config.num_hidden_layers:
                setattr(config, key, value[:depth])
        config.num_hidden_layers = depth
    return config


def _optimizer(run: Run, on_card: bool) -> tuple[MakeOptimizer, float]:
    """Returns a factory of an optimizer that can step fake tensors, and the temporary memory inside the real
    optimizer's operators, in bytes per element (0.0 if its operators can be traced or need no such memory)."""
    make, compiled, scratch = build.optimizer(run), run.technique("optim").generates_code, 0.0
    if run.technique("optim").steps_by is None:
        # Optimizers' CUDA kernels need no temporary memory. Compiled code is assumed to need as much as on a CPU.
        if compiled or run.masters or not on_card:
            scratch = _once(unseen, run, make)
        make = _once(stand_in, run, make, on_card or compiled, on_card)
    return (as_card.foreach(make) if on_card else make), scratch


_probed: dict[tuple, object] = {}  # cache: (probe function, optimizer, arguments) -> result


def _once(probe: Callable, run: Run, make: MakeOptimizer, *more: object) -> object:
    """Returns the result of a probe function for the run's optimizer (cached). A probe executes real optimizer steps,
    which takes time, and returns the same result for every trace."""
    key = (probe, str(run.optim.plain()), *more)
    if key not in _probed:
        _probed[key] = probe(make, *more)
    return _probed[key]


@contextmanager
def quietly() -> Iterator[None]:
    """Context manager that mutes logs and warnings. The real run logs the important messages again."""
    logging.disable(logging.CRITICAL)  # torch logs a traceback for each data-dependent check of a fake tensor
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)


class Steady(Callback):
    """Creates the tensors that earlier windows and micro-batches of a run would have left before the traced window: the
    optimizer state, the gradients of an earlier micro-batch (with gradient accumulation), and the host's sums of
    gradients (with host masters).

    During the traced window, this callback sets `mode.phase`, so that only the work of this window is counted. In the
    trainer's list, only the callbacks of the loss come after `Steady`, so the work of their hooks is counted, too.

    Args:
        mode: the fake tensor mode, which counts work by phase.
        run: the settings.
        before: number of windows that run before the traced window. If it is not 0, these windows create the tensors,
            and `Steady` creates none.
    """

    def __init__(self, mode: ShapeMode, run: Run, before: int) -> None:
        self.mode, self.accumulates, self.early, self.before = mode, run.accumulates, run.early, before
        self.overlaps = run.overlaps
        self.counts = False  # whether the work of the current window is counted

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._count(module.optimizer)
        if self.before:
            return
        self._step_all(module)
        if self.accumulates or module.masters is not None:
            self._make_gradients(module)
        if module.masters is not None and (self.overlaps or not self.accumulates):
            module.optimizer.mark_used(self.early)  # as after the optimizer step of a previous window

    def _count(self, optimizer: WindowOptimizer) -> None:
        """Wraps methods of the optimizer so that the phases "sum", "step" and "update" count the work of gradient sums,
        gradient norms and updates, even inside backward."""
        counting, clip = self.mode.counting, optimizer.clip

        def clipped(*args) -> None:
            clip(*args)
            self.mode.phase = self.mode.phase and "update"  # the update follows immediately

        optimizer.clip = clipped
        if isinstance(optimizer, HostOptimizer):
            link = optimizer.link
            link.fetch, link.update = counting("sum", link.fetch), counting("update", link.update)
            link.update_block = counting("update", link.update_block)
            known: dict[tuple, Counter] = {}
            for weight in optimizer.masters.values():
                weight.step = self._one_of_a_kind(weight, known)
        else:
            optimizer.use_up = counting("step", optimizer.use_up)
            optimizer.step_one = counting("update", optimizer.step_one)

    def _one_of_a_kind(self, weight: HostWeight, known: dict[tuple, Counter]) -> Callable[..., None]:
        """Returns a replacement for `weight.step` that saves time: it steps only the first weight of each kind
        (streamed or not, shape, dtypes, optimizer options, conversion of the gradient, phase). For every other weight
        of a kind, it counts the work of the first weight again. Args: known: kind -> work; filled by the
        replacement."""
        step = weight.step

        def stepped(optimizer: HostOptimizer, asked: Step) -> None:
            options = str({key: value for key, value in asked.group.items() if key != "params"})
            dtypes = asked.gradient.dtype, asked.narrow.dtype
            kind = (weight.host_block is None, asked.p.shape, dtypes, options, asked.reading, self.mode.phase)
            if kind in known:
                self.mode.work.update(known[kind])
            else:
                before = self.mode.work.copy()
                step(optimizer, asked)
                known[kind] = self.mode.work - before

        return stepped

    def _step_all(self, module: LightningModule) -> None:
        """Creates the optimizer state of every trained parameter, as a first step does. Of each kind (parameter group,
        shape, stride and dtype), steps only two parameters, and gives the other parameters state of the same sizes
        (`another`). Steps every parameter if the precision stores further tensors on the device (`device_tensors`)."""
        optimizer, masters = module.optimizer, {} if module.masters is None else module.masters.masters
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        kinds: dict[tuple, list[Tensor]] = {}
        for p in module.parameters():
            stepped = masters[p].wide if p in masters else p
            if id(stepped) not in groups:
                continue
            group = groups[id(stepped)]
            kind = kinds.setdefault((id(group), stepped.shape, stepped.stride(), stepped.dtype), [])
            kind.append(stepped)
            if len(kind) > 2 and not any(True for _ in module.trainer.precision_plugin.device_tensors()):
                optimizer.state[stepped] = another(*(optimizer.state[p] for p in kind[:2]))
                continue
            data = stepped.data
            if stepped is not p:  # between two steps, a master may be a placeholder without memory
                stepped.data = torch.empty_like(data)
            stepped.grad = torch.empty_like(stepped)
            optimizer.step_one(group, stepped)
            stepped.grad = None
            if stepped is not p:
                stepped.data = data

    def _make_gradients(self, module: LightningModule) -> None:
        def run() -> None:
            for _, p in trainable(module):
                p.backward(torch.empty(p.shape, dtype=p.dtype))  # sets `p.grad` and calls the hooks of p

        count = 2 if self.accumulates else 1  # the second gradient converts the host's sums to fp32
        module.weights.run_micro_batches([run] * count, Generators.alike(module.device, count, seed=None))

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, window: Window, _: int) -> None:
        self.counts = trainer.global_step == self.before
        self._begin("forward", last=len(window.micro_batches) == 1)

    def on_before_backward(self, trainer: Trainer, module: LightningModule, _: Tensor) -> None:
        self._begin("backward", module.last_micro_batch)

    def on_after_backward(self, trainer: Trainer, module: LightningModule) -> None:
        self._begin(module.phase_after_backward, last=True)

    def _begin(self, phase: str, last: bool) -> None:
        if self.counts:
            self.mode.phase = phase if last or self.overlaps else EARLIER + phase

    def on_train_batch_end(self, *_) -> None:
        self.mode.phase = None


def another(first: object, second: object) -> object:
    """Returns optimizer state for a third parameter, built from the states of two parameters. The third parameter
    shares each tensor that the first two parameters share; all other tensors are new."""
    if isinstance(second, Tensor):
        return second if storage_key(second) == storage_key(first) else torch.empty_like(second)
    if isinstance(second, dict):
        return {key: another(first[key], value) for key, value in second.items()}
    if isinstance(second, list | tuple):
        return type(second)(map(another, first, second))
    return second


class Windows:
    """A training loader that yields a single window forever."""

    def __init__(self, micro_batches: list[MicroBatch]) -> None:
        tokens = sum(micro_batch.labels.numel() for micro_batch in micro_batches)
        self.window = Window(micro_batches, tokens, tokens, tokens, START)

    def __iter__(self) -> Iterator[Window]:
        return repeat(self.window)


class Evaluation:
    """A validation loader that yields one group of micro-batches."""

    def __init__(self, micro_batches: list[MicroBatch]) -> None:
        self.micro_batches = micro_batches

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        yield self.micro_batches
