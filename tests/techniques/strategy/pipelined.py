"""Trains some steps with lowmem's module and Lightning's Trainer, in one process or in the ranks of a pipeline."""

from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing
from lightning.pytorch import Callback
from torch.distributed.pipelining import PipelineStage

import parity
from lowmem.config.instantiate import instantiate
from lowmem.config.settle import run_of
from lowmem.data.loader import Share, WindowLoader
from lowmem.memory.ledger import optimizer_state
from lowmem.model import loading
from lowmem.techniques.strategy import pipeline
from lowmem.techniques.strategy.contract import ONE_DEVICE
from lowmem.techniques.strategy.rank_0_turns import Turns
from lowmem.training.build import causal_lm

# Windows of 4, 1 and 4 micro-batches. The micro-batch of the second window has a single row.
LINES = ("model.architecture.num_hidden_layers=4", "batch_size=2", "accumulation=fixed", "max_steps=3")
UNTIED = "model.architecture.tie_word_embeddings=false"


class Seen(Callback):
    """Records for each window: unscaled gradients by name before clipping, their norm, the loss, and whether the
    optimizer stepped."""

    def __init__(self):
        self.gradients, self.norms, self.losses, self.stepped = [], [], [], []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        named, scale = module.model.named_parameters(), trainer.precision_plugin.gradient_scale
        self.gradients.append({name: p.grad / scale for name, p in named if p.grad is not None})
        self.norms.append(float(module.gradient_norm))

    def on_train_batch_end(self, trainer, module, outputs, *_):
        self.losses.append(float(outputs["loss"]))
        self.stepped.append(outputs["stepped"])


def trained(lines, dtype=None, ranks=ONE_DEVICE):
    """Trains, and returns a dict: the records of `Seen`, the final weights by name, generated token ids, and the bytes
    of weights and optimizer state.

    Args:
        dtype: name of the dtype to which the weights are cast; None: they are not cast.
        ranks: the strategy.
    """
    cfg = run_of(parity.overrides(*LINES, *lines))
    torch.manual_seed(0)
    module = causal_lm(cfg, loading.describe(cfg), ranks=ranks)
    module.model.to(dtype and getattr(torch, dtype))
    module.ranks.shard(module)
    seen = Seen()
    trainer = parity.trainer(cfg, [*map(instantiate, cfg.plugins)], [seen], module.ranks.lightning())
    trainer.fit(module, WindowLoader(parity.Ragged(), Share(cfg.batch_size), cfg.windows, seed=0))
    weights = {name: p.detach().clone() for name, p in module.model.named_parameters() if not p.is_meta}
    with torch.no_grad():
        ids = parity.Ragged().micro_batch([0]).input_ids[:, :5]
        written = module.model.eval().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6)
    bytes_of = {p: p.nbytes for p in module.model.parameters() if not p.is_meta}
    state = sum(tensor.nbytes for tensor in optimizer_state(trainer.optimizers[0]) if tensor.dim())
    saw = {key: getattr(seen, key) for key in ("gradients", "norms", "losses", "stepped")}
    return saw | {"written": written, "weights": weights, "weight_bytes": sum(bytes_of.values()), "state_bytes": state}


def together(processes, folder, cases, size=2):
    """Trains the cases in `size` processes. Returns a dict that maps the name of each case to a list with the results
    of each rank.

    Args:
        cases: maps names to (overrides, dtype as in `trained`, key of CHANGES).
    """
    how = processes.get_start_method()
    torch.multiprocessing.start_processes(_work, (size, str(folder), cases), size, start_method=how)
    by_rank = [torch.load(folder / f"{rank}.pt") for rank in range(size)]
    return {name: [seen[name] for seen in by_rank] for name in cases}


def _work(rank, size, folder, cases):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    try:
        every = {name: _seen(dist.PrefixStore(name, store), *case) for name, case in cases.items()}
        torch.save(every, Path(folder, f"{rank}.pt"))
    finally:
        dist.destroy_process_group()


def _seen(store, lines, dtype, change):
    options = [line for line in lines if line.startswith("strategy.")]
    order = []

    def noted(what, original):
        def called(stage, chunk, *args, **kwargs):
            order.append((what, chunk))
            return original(stage, chunk, *args, **kwargs)

        return called

    with (
        patch.object(PipelineStage, "forward_one_chunk", noted("forward", PipelineStage.forward_one_chunk)),
        patch.object(PipelineStage, "backward_one_chunk", noted("backward", PipelineStage.backward_one_chunk)),
        CHANGES[change](),
    ):
        ranks = instantiate(run_of(["strategy=pipeline", *options]).strategy)(timeout=60)
        ranks.turns = Turns(store, ranks.rank == 0, 60)
        with ranks.turns.heartbeat():
            seen = trained([line for line in lines if line not in options], dtype, ranks)
    return seen | {"order": order[:8]}  # of the first window


@contextmanager
def _scaled():
    """Averages gradients over micro-batches, as torch does by default if a stage has parameters."""

    def scaled(made):
        return lambda *args, **kwargs: made(*args, **{**kwargs, "scale_grads": True})

    every = {name: scaled(made) for name, made in pipeline.SCHEDULES.items()}
    shown = patch.object(pipeline.WindowOfStage, "parameters", lambda work: work.ranks.stage.model.parameters())
    with shown, patch.dict(pipeline.SCHEDULES, every):
        yield


CHANGES = {
    None: nullcontext,
    "gradients are means over micro-batches": _scaled,
    "tied gradients are not added": lambda: patch.object(pipeline.Pipeline, "_groups", lambda _: []),
    "each holder rounds for itself": lambda: patch.object(
        pipeline.Pipeline, "clear_gradients", pipeline.Divided.clear_gradients
    ),
}
