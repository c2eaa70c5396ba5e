"""Runs one training in one of these loops: lowmem as shipped, lowmem without its memory meter, a hand-written loop,
plain Lightning, or transformers.Trainer.

    python -m benchmarks.loops <loop> <recipe> <model>

All loops use equal weights, accumulation windows, optimizers and schedules, which lowmem builds, and the same precision
and clipping. A loop prints JSON with the seconds and losses of its steps, the speed over the timed steps, and the peak
bytes of live tensors. lowmem's meter measures this peak over its sampled steps; the other loops measure it in the third
step. `benchmarks.card` runs the other loops on a card, with its own models.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from statistics import mean, median
from typing import NamedTuple, Protocol

import torch

from benchmarks.runner import run_train
from benchmarks.turns import Turns
from lowmem.system.without_gc import undisturbed

# The timed steps are the twenty steps between the warm-up and the last step. In one of them (step 20) the meter tracks
# memory by category, as in every 20th step of a long run.
STEPS, WARM_UP = 24, 3
MODELS = {
    # 13.9M parameters
    "13.9M": {"vocab_size": 8192, "n_positions": 256, "n_embd": 384, "n_layer": 6, "n_head": 6, "T": 256},
    # train.py's default model
    "tiny": {"vocab_size": 4096, "n_positions": 256, "n_embd": 192, "n_layer": 4, "n_head": 4, "T": 128},
    # for tests that only check that a loop runs
    "thin": {"vocab_size": 512, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 2, "T": 16},
}
BATCH_SIZE = 8  # sequences per optimizer step
ON_CPU = "device=cpu"
FOUR = ["accumulation=fixed", "accumulation.batches=4", "batch_size=2"]
RECIPES = {
    "32": ["precision=32"],
    "bf16": ["precision=bf16"],
    "accumulation": FOUR,
    "checkpointing": ["gradient_checkpointing=every_layer"],
    "adafactor": ["optim=adafactor"],
    "adam8bit": ["optim=adam8bit"],
    "all": ["precision=bf16", "gradient_checkpointing=every_layer", "optim=adam8bit", *FOUR],
}


def shape(model: str, steps: int = STEPS) -> list[str]:
    """Returns the overrides for one of MODELS and a short run. All other settings have their defaults."""
    sizes = dict(MODELS[model])
    seq_len = sizes.pop("T")
    return [
        *(f"model.architecture.{key}={value}" for key, value in sizes.items()),
        f"seq_len={seq_len}",
        f"max_steps={steps}",
        f"val_every={steps}",
        "val_sequences=8",
        "sample_tokens=0",
    ]


def lowmem(recipe: str, model: str, metered: bool = True) -> dict:
    """Runs train.py as shipped, with memory meter, metrics, W&B (offline), plan and checkpoint. Args: metered: False:
    the memory meter measures nothing."""
    from lowmem.training import watchers

    if not metered:
        watchers.MemoryMeter = silent_meter()
    turns, losses = Turns(), []

    class InTurn(watchers.Stop):
        def on_train_batch_start(self, *_) -> None:
            turns.next()

        def on_train_batch_end(self, trainer, module, outputs: dict, *_) -> None:
            losses.append(outputs["loss"])
            super().on_train_batch_end(trainer, module)

    watchers.Stop = InTurn
    summary = run_train([*shape(model), *RECIPES[recipe], ON_CPU])
    phases = summary["peak_bytes_by_phase"]
    return {
        **speed(turns, model),
        "first_step_seconds": summary["first_step_seconds"],
        "losses": [float(loss) for loss in losses],
        "peak_bytes": max(
            (phases[p].get("device") or 0 for p in ("forward", "backward", "step") if p in phases), default=None
        ),
        "rss_bytes": summary["peak_bytes"]["host_rss"] - summary["rss_before_model_bytes"],
    }


def speed(turns: Turns, model: str) -> dict:
    tokens, timed = BATCH_SIZE * MODELS[model]["T"], turns.seconds[WARM_UP:]
    pages = median(turns.pages[WARM_UP:])
    return {"seconds": turns.seconds, "tokens_per_second": tokens / mean(timed), "pages_per_step": pages}


def silent_meter() -> type:
    """Returns a subclass of MemoryMeter whose hooks do nothing. It is used to find what the memory meter costs."""
    from lightning.pytorch import Callback

    from lowmem.memory.meter import MemoryMeter

    hooks = [name for name in vars(MemoryMeter) if name.startswith("on_")]
    return type("Silent", (MemoryMeter,), {name: getattr(Callback, name) for name in hooks})


# --- shared by the other loops -----------------------------------------------------------------------------------


class Materials(NamedTuple):
    """The model, the data and the optimizer of a loop, as lowmem builds them."""

    network: torch.nn.Module
    windows: list  # for each optimizer step, a list of micro-batches, each with input_ids and labels (B, T)
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    bf16: bool  # autocast
    checkpointing: bool
    device: str
    rss_before: int  # resident bytes before the model was built

    @property
    def micro_batches(self) -> int:
        """Returns the number of micro-batches per optimizer step."""
        return len(self.windows[0])


class Watches(Protocol):
    """Observes the steps of a loop."""

    def begin(self) -> None:
        """Called before the first micro-batch of each optimizer step."""

    def add(self, loss: torch.Tensor) -> None:
        """Called with the loss of each micro-batch, divided by the number of micro-batches of a step."""

    def end(self) -> None:
        """Called after each optimizer step."""


def materials(lines: Sequence[str], steps: int) -> Materials:
    """Builds the model, the data and the optimizer. Args: lines: overrides of train.py; steps: number of optimizer
    steps for which data is read."""
    from lightning.pytorch import seed_everything

    from lowmem.config.settle import run_of
    from lowmem.system import process
    from lowmem.training import build

    cfg = run_of([line for line in lines if not line.startswith("gradient_checkpointing")]).resolved()
    seed_everything(cfg.seed, verbose=False)
    data = build.data(cfg)
    before = process.rss_bytes()
    module = build.module(cfg, data).to(cfg.device)
    optimizer = module.update.optimizer(module.model)
    built = Materials(
        module.model.train(),
        [window.micro_batches for window in islice(data.train, steps)],
        optimizer,
        module.update.scheduler(optimizer),
        "precision=bf16" in lines,
        "gradient_checkpointing=every_layer" in lines,
        cfg.device,
        before,
    )
    if built.checkpointing:
        built.network.gradient_checkpointing_enable({"use_reentrant": False})
    return built


def loss_of(network: torch.nn.Module, batch: NamedTuple) -> torch.Tensor:
    """Returns the mean cross entropy over all tokens of a micro-batch, with the logits in fp32."""
    logits = network(**batch.inputs, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch.labels.flatten())


class Watch:
    """Records the time and the loss of every step, and the peak bytes of live tensors in the last warm-up step."""

    def __init__(self, of_loop: Materials, model: str) -> None:
        self.materials, self.model = of_loop, model
        self.turns = Turns()
        self.steps, self.losses = 0, [0.0]
        self.tracker, self.peak_bytes = None, 0

    def add(self, loss: torch.Tensor) -> None:
        """Adds a micro-batch's loss, divided by the number of micro-batches of a step."""
        self.losses[-1] = self.losses[-1] + loss.detach()

    def begin(self) -> None:
        self.turns.next()
        if self.steps == WARM_UP - 1:
            self._count()

    def _count(self) -> None:
        from lowmem.memory.ledger import Ledger, optimizer_state
        from lowmem.memory.tracker import StorageTracker

        ledger = Ledger()
        ledger.own("weights", lambda: list(self.materials.network.parameters()))
        ledger.own("optimizer", lambda: optimizer_state(self.materials.optimizer))
        self.tracker = StorageTracker(ledger.storages())
        self.tracker.__enter__()

    def end(self) -> None:
        self.steps += 1
        self.losses.append(0.0)
        if self.steps == WARM_UP:
            self._counted()

    def _counted(self) -> None:
        self.tracker.__exit__(None, None, None)
        self.peak_bytes = max(point.total for point in self.tracker.timeline())

    def result(self) -> dict:
        from lowmem.system import process

        return {
            **speed(self.turns, self.model),
            "losses": [float(loss) for loss in self.losses[:-1]],
            "peak_bytes": self.peak_bytes,
            "rss_bytes": process.peak_rss_bytes() - self.materials.rss_before,
        }


# --- the other loops ---------------------------------------------------------------------------------------------


def plain(loop: Materials, watch: Watches) -> None:
    """Trains with a short hand-written loop."""
    for window in loop.windows:
        watch.begin()
        for micro_batch in window:
            micro_batch = micro_batch.each(lambda tensor: tensor.to(loop.device))
            with torch.autocast(loop.device, torch.bfloat16, cache_enabled=False) if loop.bf16 else nullcontext():
                loss = loss_of(loop.network, micro_batch) / len(window)
            loss.backward()
            watch.add(loss)
        torch.nn.utils.clip_grad_norm_(loop.network.parameters(), 1.0)
        loop.optimizer.step()
        loop.schedule.step()
        loop.optimizer.zero_grad(set_to_none=True)
        watch.end()


def lightning(loop: Materials, watch: Watches) -> None:
    """Trains with Lightning, without a logger, checkpoints, a progress bar or a model summary.

    A hook clips the gradients, because with mixed precision Lightning refuses to clip gradients for a fused optimizer.
    """
    from lightning.pytorch import Callback, LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = loop.network

        def training_step(self, micro_batch, _: int) -> torch.Tensor:
            loss = loss_of(self.network, micro_batch)
            watch.add(loss / loop.micro_batches)
            return loss

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)

        def configure_optimizers(self) -> dict:
            return {"optimizer": loop.optimizer, "lr_scheduler": {"scheduler": loop.schedule, "interval": "step"}}

    class Steps(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
            if batch_idx % loop.micro_batches == 0:
                watch.begin()

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
            if (batch_idx + 1) % loop.micro_batches == 0:
                watch.end()

    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    Trainer(
        accelerator="gpu" if loop.device == "cuda" else "cpu",
        devices=1,
        max_steps=len(loop.windows),
        accumulate_grad_batches=loop.micro_batches,
        precision="bf16-mixed" if loop.bf16 else "32-true",
        callbacks=[Steps()],
        **dict.fromkeys(off, False),
    ).fit(Module(), Batches(loop.windows))


class Batches:
    """An iterable of the micro-batches of all windows, in order."""

    def __init__(self, windows: list) -> None:
        self.windows = windows

    def __iter__(self) -> Iterator:
        return (micro_batch for window in self.windows for micro_batch in window)


def trainer(loop: Materials, watch: Watches) -> None:
    """Trains with transformers.Trainer. `materials` has already enabled activation checkpointing in the model."""
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    class InOrder(adding_losses(Trainer, watch)):
        def _get_train_sampler(self, *_) -> SequentialSampler:
            return SequentialSampler(rows)

    rows = [
        {"input_ids": ids, "labels": labels, "shift_labels": labels}
        for micro_batch in Batches(loop.windows)
        for ids, labels in zip(micro_batch.input_ids, micro_batch.labels, strict=True)
    ]
    arguments = TrainingArguments(**trainer_arguments(loop))
    InOrder(loop.network, arguments, train_dataset=rows, **trainer_parts(loop, watch)).train()


def adding_losses(trainer: type, watch: Watches) -> type:
    """Returns a subclass of a `Trainer` that passes each micro-batch's loss to a watch."""

    class AddingLosses(trainer):
        def training_step(self, *args, **kwargs) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            watch.add(loss)
            return loss

    return AddingLosses


def trainer_arguments(loop: Materials) -> dict[str, object]:
    """Returns arguments of TrainingArguments (or of a subclass) with which a `Trainer` trains like the other loops."""
    return {
        "output_dir": tempfile.gettempdir(),  # nothing is saved
        "per_device_train_batch_size": len(loop.windows[0][0].input_ids),
        "gradient_accumulation_steps": loop.micro_batches,
        "max_steps": len(loop.windows),
        "max_grad_norm": 1.0,
        "bf16": loop.bf16,
        "remove_unused_columns": False,
        "use_cpu": loop.device == "cpu",
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def trainer_parts(loop: Materials, watch: Watches) -> dict[str, object]:
    """Returns keyword arguments of a `Trainer`: the optimizer with its schedule, and a callback that calls the `begin`
    and `end` of a watch."""
    from transformers import TrainerCallback

    class Steps(TrainerCallback):
        def on_step_begin(self, *_, **__) -> None:
            watch.begin()

        def on_step_end(self, *_, **__) -> None:
            watch.end()

    return {"optimizers": (loop.optimizer, loop.schedule), "callbacks": [Steps()]}


OTHERS = {"plain": plain, "lightning": lightning, "trainer": trainer}


def other(loop: Callable[[Materials, Watches], None], recipe: str, model: str) -> dict:
    """Runs one of the other loops on the CPU and returns its result."""
    of_loop = materials([*shape(model), *RECIPES[recipe], ON_CPU], STEPS)
    watch = Watch(of_loop, model)
    with same_products(of_loop.bf16):
        loop(of_loop, watch)
    return watch.result()


def same_products(bf16: bool, device: str = "cpu") -> AbstractContextManager:
    """Returns a context manager in which the other loops compute 16-bit matmuls in fp32 wherever lowmem does, that is,
    on a CPU without 16-bit instructions. On such a CPU, 16-bit matmuls would take ten times as long as fp32 matmuls,
    and would round differently from lowmem's."""
    from lowmem.techniques.precision.cpu_products import widened

    return widened(torch.bfloat16 if bf16 else torch.float32, device)


LOOPS = {
    "lowmem": lowmem,
    "lowmem-unmetered": partial(lowmem, metered=False),
    **{name: partial(other, loop) for name, loop in OTHERS.items()},
}


if __name__ == "__main__":
    name, recipe, model = sys.argv[1:]
    with undisturbed():
        from lowmem.training import build  # noqa: F401
    print(json.dumps(LOOPS[name](recipe, model)), flush=True)
