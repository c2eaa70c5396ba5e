"""Runs one of two processes that train a small model with DeepSpeed: once, by `results`, for all of its tests.

Each case is trained for three windows twice: by one process on the rows of both, and by both, where the last
micro-batch of a window has rows for one of them only. The differences at the end go into a file of JSON.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lowmem.command.launch import free_port
from lowmem.data.loader import MicroBatch
from lowmem.techniques.gradient_checkpointing import policies as checkpointing
from lowmem.techniques.gradient_checkpointing.slices import Tiles
from lowmem.techniques.loss.cross_entropy import Chunked, full
from lowmem.techniques.loss.tiled import Tiled
from lowmem.techniques.strategy import deepspeed

LIMIT = 600  # seconds that all cases may take
ENGINES = {f"zero{stage}{' offload' * offload}": (stage, offload) for stage in (2, 3) for offload in (False, True)}


@cache
def results() -> dict[str, dict]:
    """engine -> case -> what differs; and what is refused."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "DS_ACCELERATOR": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=LIMIT)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    return json.loads(said[0].splitlines()[-1])


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "bos_token_id", "eos_token_id"), 0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=101, n_positions=32, n_embd=24, n_layer=2, n_head=2, **none)).train()


def llama() -> nn.Module:
    """Its head is a matrix of its own."""
    torch.manual_seed(0)
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes = {"vocab_size": 101, "hidden_size": 24, "intermediate_size": 40, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**heads, **sizes, tie_word_embeddings=False)).train()


def frozen(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        p.requires_grad_("1" in name)


def windows() -> list[list[MicroBatch]]:
    """Returns windows of 3, 1 and 2 micro-batches of 4 rows; of the last one's the second process has none."""
    draw = torch.Generator().manual_seed(1)

    def drawn(last: bool) -> MicroBatch:
        ids, labels = (torch.randint(0, 101, (4, 16), generator=draw) for _ in range(2))
        labels[torch.rand(4, 16, generator=draw) < 0.4] = -100
        return MicroBatch(ids, labels).each(lambda part: part[:2]) if last else MicroBatch(ids, labels)

    return [[drawn(number == count - 1) for number in range(count)] for count in (3, 1, 2)]


def sgd(groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1)


def adamw(groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)


class Case:
    """Args: change: what is done with the model before it is divided; skipped: the window without a step."""

    def __init__(
        self,
        model: Callable[[], nn.Module] = gpt2,
        loss: Callable = full,
        optimizer: Callable = sgd,
        change: Callable[[nn.Module], None] = lambda model: None,
        context: Callable = contextlib.nullcontext,
        value: float | None = None,
        scale: float = 1.0,
        skipped: int | None = None,
        wrong: bool = False,
    ) -> None:
        self.model, self.loss, self.optimizer, self.change, self.context = model, loss, optimizer, change, context
        self.value, self.scale, self.skipped, self.wrong = value, scale, skipped, wrong


CASES = {
    "sgd": Case(),
    "adamw": Case(optimizer=adamw),
    "clipped by value": Case(value=0.01),
    "scaled": Case(scale=1024.0, optimizer=adamw),
    "a step left out": Case(skipped=1, optimizer=adamw),
    "autocast": Case(context=partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=False)),
    "frozen": Case(change=frozen),
    "every_layer": Case(change=checkpointing.every_layer),
    "every_k": Case(change=partial(checkpointing.every_k, k=2)),
    "selective": Case(change=checkpointing.selective),
    "offload": Case(change=checkpointing.offload),
    "chunked": Case(loss=Chunked(7)),
    "tiled": Case(loss=Tiled(40)),
    "a head of its own": Case(llama, Chunked(7), change=checkpointing.every_layer),
    "wrong factor": Case(wrong=True),
}


class Module(nn.Module):
    """The part of `CausalLM` that a strategy uses."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model, self.loss = case.model(), case.loss
        case.change(self.model)
        self.trainer = SimpleNamespace(precision_plugin=SimpleNamespace(forward_context=case.context))
        self.position = SimpleNamespace(window=0)

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        return self.loss(self.model, micro_batch)


def share(micro_batch: MicroBatch, rank: int) -> MicroBatch:
    own = micro_batch.each(lambda part: part[2 * rank : 2 * rank + 2])
    return own if len(own.input_ids) else micro_batch.nothing


def trained(case: Case, ranks: deepspeed.ZeRO2 | None) -> tuple[Module, dict[str, list]]:
    """Returns: the module, and its weights, gradients and norms of each window, whole."""
    module = Module(case)
    if ranks:
        ranks.shard(module)
    parts = [ranks.local(p) if ranks else p for p in module.model.parameters()]
    stepped = [p for p in parts if p.requires_grad]
    optimizer = case.optimizer([{"params": stepped}])
    if ranks:
        ranks.before_training(module)
    seen = {"norms": [], "gradients": []}

    def whole(get: Callable[[nn.Parameter], Tensor]) -> list[Tensor]:
        given = zip(module.model.parameters(), parts, strict=True)
        return [ranks.gathered(p, get(part)) if ranks else get(part).clone() for p, part in given if part.requires_grad]

    for number, window in enumerate(windows()):
        tokens = sum(one.learned_tokens for one in window)
        for micro_batch in window:
            backward(case, ranks, module, micro_batch, tokens, micro_batch is window[-1])
        if ranks:
            ranks.gather_gradients()
        for p in stepped:
            p.grad.mul_(1 / case.scale)
        if case.value:
            nn.utils.clip_grad_value_(stepped, case.value)
        norm = ranks.norm(stepped) if ranks else nn.utils.get_total_norm([p.grad for p in stepped])
        seen["norms"].append(norm)
        seen["gradients"] += whole(lambda p: p.grad)
        nn.utils.clip_grads_with_norm_(stepped, 0.2, norm)
        if number != case.skipped:
            optimizer.step()
        optimizer.zero_grad()
        if ranks:
            ranks.clear_gradients()
    return module, seen | {"weights": whole(lambda p: p.data)}


def backward(case: Case, ranks, module: Module, micro_batch: MicroBatch, tokens: int, last: bool) -> None:
    if not ranks:
        with case.context():
            loss = module(micro_batch)
        (loss * case.scale / tokens).backward()
        return
    with ranks.micro_batch_context(last), case.context():
        loss = ranks.forward(share(micro_batch, ranks.rank))
        (loss * case.scale * (1.0 if case.wrong else ranks.factor) / tokens).backward()


def largest(some: list[Tensor], others: list[Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(some, others, strict=True))


def gathered(module: Module, stage: int) -> list[Tensor]:
    """Returns the weights that DeepSpeed computes with."""
    import deepspeed as theirs

    every = list(module.model.parameters())
    with theirs.zero.GatheredParameters(every) if stage == 3 else contextlib.nullcontext():
        return [p.detach().clone() for p in every]


def compared(case: Case, stage: int, offload: bool) -> dict:
    kind = deepspeed.ZeRO3 if stage == 3 else deepspeed.ZeRO2
    ranks = kind("cpu", 2, 60, offload, **({"whole_below": 1} if stage == 3 else {}))
    alone, (module, both) = trained(case, None)[1], trained(case, ranks)
    held = gathered(module, stage)
    moves = [p.requires_grad for p in module.model.parameters()]
    return {
        **{key: largest(alone[key], both[key]) for key in ("weights", "gradients", "norms")},
        "engine": largest(both["weights"], [p for p, one in zip(held, moves, strict=True) if one]),
    } | facts(ranks, module)


def facts(ranks: deepspeed.ZeRO2, module: Module) -> dict:
    """Returns other facts for the tests: bytes, and whether values written into the shards are those it
    computes with."""
    stepped = [p for p in module.model.parameters() if p.requires_grad]
    elements = sum(ranks.local(p).numel() for p in stepped)
    numbers = [torch.randn(p.whole_shape if ranks.stage == 3 else p.shape) for p in stepped]
    for p, number in zip(stepped, numbers, strict=True):
        dist.broadcast(number, 0)
        ranks.local(p).data.copy_(ranks.shard_of(p, number))
    ranks.after_load()
    there = zip(gathered(module, ranks.stage), module.model.parameters(), strict=True)
    written = [one for one, p in there if p.requires_grad]
    return {
        "held": elements,
        "of": sum(number.numel() for number in numbers),
        "gathered": sum(p.numel() for p in module.model.parameters()),
        "written": largest(written, numbers),
    }


def graphs(ranks: deepspeed.ZeRO3 | None) -> int:
    """Returns the graphs that torch.compile makes of the two equal blocks of a model, in two passes."""
    module, made = Module(Case()), []

    def counting(graph: torch.fx.GraphModule, _: list) -> Callable:
        made.append(graph)
        return graph.forward

    for block in checkpointing.blocks(module.model):
        block.compile(backend=counting)
    if ranks:
        ranks.shard(module)
        ranks.before_training(module)
    for number in range(2):
        backward(CASES["sgd"], ranks, module, windows()[0][0], 1, bool(number))
    return len(made)


def slices() -> str:
    """Returns the refusal for MLPs that are computed in slices of 4 tokens."""
    module, ranks = Module(Case()), deepspeed.ZeRO3("cpu", 2, 60, whole_below=1)
    Tiles(module.model, 4)
    ranks.shard(module)
    ranks.before_training(module)
    try:
        backward(CASES["sgd"], ranks, module, windows()[0][0], 1, True)
    except (AttributeError, RuntimeError) as error:
        return str(error)
    return ""


def sixteen() -> str:
    """Returns what is stepped if weights have 16 bits."""
    module, ranks = Module(Case(change=lambda model: model.bfloat16())), deepspeed.ZeRO2("cpu", 2, 60)
    ranks.shard(module)
    (dtype,) = {ranks.local(p).dtype for p in module.model.parameters()}
    return str(dtype)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    deepspeed.BUCKET = 1500  # elements: smaller than some weights, larger than others
    asked = sys.argv[1:]
    said = {
        name: {case: compared(CASES[case], *engine) for case in CASES if not asked or case in asked}
        for name, engine in ENGINES.items()
    }
    divided = graphs(deepspeed.ZeRO3("cpu", 2, 60, whole_below=1))
    said["refused"] = {"graphs": divided, "graphs alone": graphs(None), "stepped": sixteen(), "slices": slices()}
    dist.destroy_process_group()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
