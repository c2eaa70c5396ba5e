"""The same training in four loops: lowmem as shipped, a hand-written one, plain Lightning, transformers.Trainer.

    python -m benchmarks.loops <loop> <precision> <model>

Each prints {"tokens_per_second", "seconds_per_step", ...} over the steps after the third. Same model, data, optimizer,
schedule, clipping and precision; only who drives differs.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch

from benchmarks.runner import trained

STEPS, WARM_UP = 23, 3  # the meter's break-down is taken once in the last twenty, as it is in a long run
MODELS = {
    # 13.9M parameters
    "13.9M": {"vocab_size": 8192, "n_positions": 256, "n_embd": 384, "n_layer": 6, "n_head": 6, "T": 256},
    # the default of train.py
    "tiny": {"vocab_size": 4096, "n_positions": 256, "n_embd": 192, "n_layer": 4, "n_head": 4, "T": 128},
}
BATCH_SIZE, LR, WARM_UP_RATE = 8, 2e-3, 50


def overrides(precision: str, model: str, steps: int = STEPS) -> list[str]:
    """What makes train.py run this benchmark's model; everything else as shipped."""
    shape = dict(MODELS[model])
    seq_len = shape.pop("T")
    return [
        f"precision={precision}",
        *(f"model.architecture.{key}={value}" for key, value in shape.items()),
        f"seq_len={seq_len}",
        f"max_steps={steps}",
        f"val_every={steps}",
        "val_sequences=8",
        "sample_tokens=0",
    ]


def lowmem(precision: str, model: str, metered: bool = True) -> dict:
    """train.py as shipped: meter, metrics, W&B (offline), checkpoint."""
    from lowmem import fit

    if not metered:
        fit.MemoryMeter = silent_meter()
    summary = trained(overrides(precision, model))
    speed = summary["tokens_per_second"]
    seconds = BATCH_SIZE * MODELS[model]["T"] / speed  # the mean, as the other loops report it
    return {
        "tokens_per_second": speed,
        "seconds_per_step": seconds,
        "first_step_seconds": summary["first_step_seconds"],
    }


def silent_meter() -> type:
    """A meter that measures nothing, to tell what measuring costs."""
    from lightning.pytorch import Callback

    from lowmem.memory.meter import MemoryMeter

    hooks = [name for name in vars(MemoryMeter) if name.startswith("on_")]
    return type("Silent", (MemoryMeter,), {name: getattr(Callback, name) for name in hooks})


# --- what the other loops share ----------------------------------------------------------------------------------


def materials(model: str) -> tuple[torch.nn.Module, Iterator[torch.Tensor], Callable, Callable]:
    """(network, batches of (B, T + 1) tokens, optimizer of a module, schedule of an optimizer)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from lowmem.optim.build import parameter_groups
    from lowmem.scheduler import cosine

    shape = dict(MODELS[model])
    sequences = packed(shape.pop("T"), min(4096, shape["vocab_size"]))
    torch.manual_seed(0)
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **shape, **drop)).train()
    order = torch.randperm(len(sequences))
    batches = (torch.stack([sequences[i] for i in order[n : n + BATCH_SIZE]]) for n in range(0, len(order), BATCH_SIZE))

    def optimizer(module: torch.nn.Module) -> torch.optim.Optimizer:
        groups = parameter_groups(module)
        return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    return network, batches, optimizer, partial(cosine, warmup_steps=WARM_UP_RATE, total_steps=STEPS)


class packed(torch.utils.data.Dataset):
    """The default corpus as (T + 1,) token tensors, from the cache that train.py uses."""

    def __init__(self, seq_len: int, vocab_size: int) -> None:
        from lowmem.data import corpus
        from lowmem.data.loader import Sequences
        from lowmem.data.tokens import tokenize

        tokens = tokenize(corpus.stdlib(0.05), Path(".cache"), vocab_size)
        self.sequences = Sequences(tokens.train, seq_len, "train")

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, i: int) -> torch.Tensor:
        batch = self.sequences.micro_batch([int(i)])
        return torch.cat([batch.input_ids[0], batch.labels[0, -1:]])


def loss_of(network: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """rows (B, T + 1) -> mean cross entropy."""
    logits = network(input_ids=rows[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


class Clock:
    """Tokens per second of the steps after the warm-up."""

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step, self.steps = tokens_per_step, 0

    def tick(self) -> None:
        self.steps += 1
        if self.steps == WARM_UP:
            self.start = time.perf_counter()

    def result(self) -> dict:
        seconds = (time.perf_counter() - self.start) / (self.steps - WARM_UP)
        return {"tokens_per_second": self.tokens_per_step / seconds, "seconds_per_step": seconds}


def clock(model: str) -> Clock:
    return Clock(BATCH_SIZE * MODELS[model]["T"])


# --- the other loops ---------------------------------------------------------------------------------------------


def plain(precision: str, model: str) -> dict:
    """By hand: the least that trains."""
    network, batches, make_optimizer, make_schedule = materials(model)
    optimizer = make_optimizer(network)
    schedule, timer = make_schedule(optimizer), clock(model)
    for _ in range(STEPS):
        rows = next(batches)
        with torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext():
            loss = loss_of(network, rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        timer.tick()
    return timer.result()


def lightning(precision: str, model: str) -> dict:
    """Lightning with everything off that can be, clipping by hand because it refuses to clip for a fused optimizer."""
    from lightning.pytorch import Callback, LightningModule, Trainer

    network, batches, make_optimizer, make_schedule = materials(model)
    timer = clock(model)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def training_step(self, rows: torch.Tensor, _: int) -> torch.Tensor:
            return loss_of(self.network, rows)

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)

        def configure_optimizers(self) -> dict:
            optimizer = make_optimizer(self.network)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make_schedule(optimizer), "interval": "step"}}

    class Tick(Callback):
        def on_train_batch_end(self, *_) -> None:
            timer.tick()

    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        precision="bf16-mixed" if precision == "bf16" else "32-true",
        callbacks=[Tick()],
        **dict.fromkeys(off, False),
    )
    trainer.fit(Module(), Batches(batches))
    return timer.result()


class Batches:
    def __init__(self, batches: Iterator[torch.Tensor]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self.batches


def trainer(precision: str, model: str) -> dict:
    """transformers.Trainer with the matching arguments. It shifts the labels itself: T inputs, T - 1 targets."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    network, _, make_optimizer, make_schedule = materials(model)
    timer = clock(model)

    class Tick(TrainerCallback):
        def on_step_end(self, *_, **__) -> None:
            timer.tick()

    class Rows(packed):
        def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
            ids = super().__getitem__(i)[:-1]
            return {"input_ids": ids, "labels": ids}

    arguments = TrainingArguments(
        output_dir=os.environ["ROW_FOLDER"],
        per_device_train_batch_size=BATCH_SIZE,
        max_steps=STEPS,
        max_grad_norm=1.0,
        bf16=precision == "bf16",
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    optimizer = make_optimizer(network)
    shape = MODELS[model]
    Trainer(
        network,
        arguments,
        train_dataset=Rows(shape["T"], min(4096, shape["vocab_size"])),
        optimizers=(optimizer, make_schedule(optimizer)),
        callbacks=[Tick()],
    ).train()
    return timer.result()


LOOPS = {
    "lowmem": lowmem,
    "lowmem-unmetered": partial(lowmem, metered=False),
    "plain": plain,
    "lightning": lightning,
    "trainer": trainer,
}


if __name__ == "__main__":
    name, precision, model = sys.argv[1:]
    result = LOOPS[name](precision, model)
    print(json.dumps(result), flush=True)
