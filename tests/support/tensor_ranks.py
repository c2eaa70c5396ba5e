"""Trains on the ranks of a tensor-parallel group for `test_tensor_parallel.py`, and compares the results with the
results of one process."""

import re
from contextlib import ExitStack
from datetime import timedelta
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lowmem.data.loader import MicroBatch
from lowmem.model.trainable import trainable
from lowmem.system.errors import Refused
from lowmem.system.quiet_libraries import quiet
from lowmem.system.torch_private import TorchDispatchMode
from lowmem.techniques.adapter.lora import LoRA
from lowmem.techniques.gradient_checkpointing import policies
from lowmem.techniques.gradient_checkpointing.slices import Tiles
from lowmem.techniques.loss.cross_entropy import Chunked, Function, full
from lowmem.techniques.loss.tiled import Tiled
from lowmem.techniques.strategy import tensor_parallel
from lowmem.techniques.strategy.fsdp_tensor_parallel import FullyShardTensorParallel
from lowmem.techniques.strategy.parallel_styles import HeadShard
from lowmem.techniques.strategy.several import Divided
from lowmem.techniques.strategy.tensor_parallel import TensorParallel

VOCABULARY, TOKENS, STEPS = 64, 12, 3
LOSSES = {"full": full, "chunked": Chunked(5), "tiled": Tiled(7)}


class Collectives(TorchDispatchMode):
    """Counts collectives. torch's `CommDebugMode` is not suitable, because its hooks replace the tensors that layers
    receive."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace in ("c10d", "_c10d_functional") and not re.search("wait|wrap", str(func))
        return func(*args, **(kwargs or {}))


class Held(nn.Module):
    """Stands in for a run's module; has only the members that a strategy reads."""

    def __init__(self, model):
        super().__init__()
        self.model, self.loss = model, Function(full)


def network(kind, dtype=torch.float64, **changes):
    """Returns a model of two blocks, with grouped key-value heads unless `kind` is gpt2. All parameters, including the
    weights of norms, are random, so that each affects the result."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": kind == "qwen3"}
    if kind == "gpt2":
        shape = {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 16,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        }
    ends = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(shape | ends | changes)), dtype=dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model.train()


def live(rank, size, store, cases, results):
    """Runs one rank, which compares one case after another until it receives None.

    Args:
        store: file for the rendezvous of the ranks.
        cases: pipe with the arguments of `compared` for each case, and None at the end.
        results: pipe to which rank 0 sends the figures of each case, or the message with which the case was refused.
    """
    quiet()
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
    try:
        while (case := cases.recv()) is not None:
            try:
                found = compared(size, **case)
            except Refused as refused:
                found = str(refused)
            if rank == 0:
                results.send(found)
    finally:
        dist.destroy_process_group()


def compared(size, kind="llama", dtype=torch.float64, loss="full", optimizer="AdamW", wrong=None, groups=1, **how):
    """Trains on a group of ranks, and on all rows in one process. Returns a dict of figures by name. Some figures are
    the largest absolute differences between the group and the single process: in the weights after sharding
    ("conversion"), in the loss and the gradients of the first window, and in the weights after STEPS windows.

    Args:
        wrong: key of WRONG, or None.
        groups: number of data-parallel groups.
        how: arguments of `change`; also `changes`: changed keys of the model's config.
    """
    how_made = {"dtype": dtype, **how.pop("changes", {})}
    one, ours = network(kind, **how_made), network(kind, **how_made)
    for model in (one, ours):
        change(model, **how)
    with ExitStack() as patches:
        for target, name, instead in WRONG.get(wrong, ()):
            patches.enter_context(patch.object(target, name, instead))
        ranks = TensorParallel("cpu", size)
        if groups > 1:
            ranks = FullyShardTensorParallel("cpu", size, tensor_parallel_size=size // groups)
        before = {name: p.detach().clone() for name, p in one.named_parameters()}
        ranks.shard(Held(ours))
        figures = {"conversion": distance(ranks, ours, before, lambda p: p)}
        figures["parts"] = all(torch.equal(ranks.shard_of(p, before[name]), ranks.local(p)) for name, p in named(ours))
        figures["share"] = sum(ranks.local(p).numel() for p in ours.parameters()) / sum(
            map(torch.numel, one.parameters())
        )
        figures["tied"] = ours.get_input_embeddings().weight is ours.get_output_embeddings().weight
        return figures | stepped(ranks, one, ours, LOSSES[loss], getattr(torch.optim, optimizer))


def change(model, adapter=False, checkpointing=None, tile=None):
    if adapter:
        torch.manual_seed(1)
        LoRA(r=4)(model)
        for _, p in trainable(model):  # B too
            p.data = 0.1 * torch.randn_like(p, dtype=torch.float64)
    if checkpointing:
        getattr(policies, checkpointing)(model)
    if tile:
        model.tiles = Tiles(model, tile)


def stepped(ranks, one, ours, loss, optimizer):
    weight = {"lr": 1e-2} | ({"weight_decay": 0.1} if optimizer is torch.optim.AdamW else {})
    alone = optimizer([p for _, p in trainable(one)], **weight)
    together = optimizer([ranks.local(p) for _, p in trainable(ours)], **weight)
    rows = torch.randint(
        VOCABULARY, (STEPS, 2, 2 * ranks.data_size, TOKENS), generator=torch.Generator().manual_seed(2)
    )
    figures = {}
    for window in rows:
        ranks.clear_gradients()
        alone.zero_grad()
        sums = torch.zeros(2, dtype=torch.float64)
        for batch in window:
            part = batch.chunk(ranks.data_size)[ranks.data_rank]
            for at, (model, read, factor) in enumerate(((one, batch, 1.0), (ours, part, ranks.factor))):
                with Collectives() as said:
                    summed = loss(model, MicroBatch(read, read.roll(-1, 1)))
                    sums[at] += summed.detach()
                    (summed * factor / window.numel()).backward()
        ranks.gather_gradients()
        if not figures:
            figures = gradients(ranks, one, ours) | {"loss": (sums[0] - ranks.all_sum(sums[1])).abs().item()}
            figures["collectives"] = said.count  # of one micro-batch, in the forward and backward pass
        alone.step()
        together.step()
    held = {name: p.detach() for name, p in one.named_parameters()}
    return figures | {"weights": distance(ranks, ours, held, lambda p: p)}


def gradients(ranks, one, ours):
    expected = {name: p.grad for name, p in trainable(one)}
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in expected.values()]))
    return {
        "gradients": distance(ranks, ours, expected, lambda p: p.grad),
        "norm": abs(ranks.norm([ranks.local(p) for _, p in trainable(ours)]).item() / norm.item() - 1.0)
        if norm.dtype == torch.float32
        else 0.0,  # not compared in fp64, because the group computes the norm in fp32
        "bits": all(same(ranks.local(p).grad) for p in ours.parameters() if ranks.holders(p) > 1 and p.requires_grad),
    }


def named(model):
    return list(model.named_parameters())


def distance(ranks, model, expected, of):
    """Returns the largest absolute difference between elements of gathered and expected tensors. Args: expected:
    tensors by name; of: function that takes a local parameter and returns the tensor to gather."""
    wholes = {name: ranks.gathered(p, of(ranks.local(p)).detach()) for name, p in named(model) if name in expected}
    return max((wholes[name] - tensor).abs().max().item() for name, tensor in expected.items())


def same(tensor):
    """Returns True if this tensor has equal values on all ranks."""
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(every, tensor.contiguous())
    return all(torch.equal(every[0], one) for one in every)


def without_sums(self, module):
    styles = tensor_parallel.divide(module.model, self.group)
    return {name: style for name, style in styles.items() if style != tensor_parallel.SUMMED}


# Deliberately wrong variants: name -> patches (object, attribute, replacement).
WRONG = {
    "heads": ((tensor_parallel, "FUSED", 1),),  # query, key and value are divided as one matrix
    "counted twice": ((TensorParallel, "holders", lambda *_: 1),),
    "not summed": (
        (TensorParallel, "gather_gradients", Divided.gather_gradients),
    ),  # gradients of replicated weights are neither summed nor compared between ranks
    "no sum in the plan": ((TensorParallel, "laid_out", without_sums),),
    "own tiles": ((HeadShard, "joined", lambda _, *of_tiles: of_tiles),),
}
