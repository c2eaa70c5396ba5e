"""Tests that only rank 0 reads or initializes weights, and that each rank gets its shards of the complete model."""

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from as_rank import as_rank
from host_memory import Highest, linux
from lowmem.memory.meter import MemoryMeter
from lowmem.model import loading
from lowmem.report.end_of_evaluation import EndOfEvaluation
from lowmem.report.sample import Samples
from lowmem.system.errors import Refused
from lowmem.system.stop import Stop
from lowmem.techniques.strategy.fsdp import FullyShard
from lowmem.techniques.strategy.parallel_styles import Group
from lowmem.techniques.strategy.rank_0_turns import Turns
from lowmem.techniques.strategy.tensor_parallel import TensorParallel
from lowmem.training import build
from networks import network

RANKS = 2
LLAMA = ("model=llama-3.2-1b", "model.pretrained=false", "model.architecture.hidden_size=32")
LLAMA += ("model.architecture.intermediate_size=48", "model.architecture.num_hidden_layers=2")
LLAMA += ("model.architecture.num_attention_heads=4", "model.architecture.num_key_value_heads=2")
LLAMA += ("model.architecture.head_dim=8", "model.architecture.vocab_size=301", "device=cpu", "plan=off", "seq_len=16")
GPT2 = ("model.architecture.vocab_size=301",)  # odd: two ranks cannot divide it evenly
NEW = [f"token{number}" for number in range(60)]  # more tokens than the embedding has spare rows
CASES = {
    "gpt2": GPT2,
    "gpt2, bf16": (*GPT2, "precision=bf16-sr", "optim=adamw"),
    "llama": LLAMA,
    "llama, untied, 16 bits": (*LLAMA, "model.architecture.tie_word_embeddings=false", "precision=bf16-sr"),
    "frozen": (*GPT2, "freeze=[transformer.wte.*]"),
    "adapter": (*GPT2, "adapter=lora"),
    "adapter with magnitudes": (*LLAMA, "adapter=dora"),
    "checkpointing, documents": (*LLAMA, "gradient_checkpointing=every_layer", "data.packing=documents"),
}
SHORT = ("gpt2, bf16", "llama", "adapter with magnitudes")  # the other cases have the mark `matrix`


@dataclass
class Tape:
    """The objects and tensors that rank 0 sends, in order. Rank 0 runs first; the other ranks then receive them."""

    said: list = field(default_factory=list)
    largest: int = 0  # bytes of the largest tensor sent

    def of(self, rank, monkeypatch):
        """Returns a function to replace this rank's `broadcast`: it takes an object, and returns the object that rank 0
        sent. Also replaces `dist.broadcast`, which sends tensors."""
        heard = iter(self.said)

        def first(said):
            if rank:
                return next(heard)
            self.said.append(said)
            return said

        def broadcast(tensor, source):
            assert source == 0 and tensor.dtype == torch.uint8
            self.largest = max(self.largest, tensor.nbytes)
            tensor.copy_(first(tensor.clone()))

        monkeypatch.setattr(dist, "broadcast", broadcast)
        return first


@contextmanager
def one_of(rank, strategy=FullyShard, **options):
    """Yields the strategy of one rank. No other rank exists, so the caller must replace all communication."""
    with as_rank(rank, RANKS, f"seen by {rank}") as mesh:
        ranks = strategy(devices=RANKS, **options)
        if strategy is FullyShard:
            ranks.mesh = mesh
        else:
            ranks.group = Group(mesh)
        ranks.rank_0_first = nullcontext
        yield ranks


def parts_of(ranks, network):
    """Returns a dict that maps each name to this rank's part of the parameter or buffer. A tied parameter has an entry
    for each of its names."""
    tensors = [*network.named_parameters(remove_duplicate=False), *network.named_buffers(remove_duplicate=False)]
    return {name: one.to_local() if isinstance(one, DTensor) else one for name, one in tensors}


def expected(ranks, whole):
    """Returns a dict that maps each name to this rank's shard of the parameter, or to the complete buffer. All shards
    of a parameter have equal lengths, except that the last may be shorter or empty."""
    named = dict(whole.named_parameters(remove_duplicate=False))
    parts = {name: [*p.chunk(RANKS), p[:0]][ranks.rank] for name, p in named.items()}
    return parts | dict(whole.named_buffers(remove_duplicate=False))


@pytest.mark.parametrize(
    "case", [one if one in SHORT else pytest.param(one, marks=pytest.mark.matrix) for one in CASES]
)
def test_each_rank_has_the_shards_of_a_model_built_by_one_process(config, monkeypatch, case):
    typed = CASES[case]
    cfg = config(*typed)
    data = build.data(cfg)
    torch.manual_seed(cfg.seed)
    whole = build.module(cfg, data)
    drawn, tape = torch.get_rng_state(), Tape()
    for rank in range(RANKS):
        torch.manual_seed(cfg.seed)
        with one_of(rank) as ranks:
            ranks.broadcast = tape.of(rank, monkeypatch)
            made = build.module(cfg, data, None, ranks)
            same(parts_of(ranks, made.model), expected(ranks, whole.model))
            assert torch.equal(torch.get_rng_state(), drawn)  # dropout draws next
            assert made.identity == whole.identity and made.strict_loading == whole.strict_loading
            tied = made.model.get_input_embeddings().weight is made.model.get_output_embeddings().weight
            assert tied == (whole.model.get_input_embeddings().weight is whole.model.get_output_embeddings().weight)
    assert tape.largest == max(p.nbytes for p in whole.parameters())  # never more than one tensor at a time


def published(config, folder, *shape):
    """Saves a model with 16-bit weights, a tokenizer, and an end token that only its generation config names. Returns
    the overrides that load this model and add the tokens NEW."""
    cfg = config(*LLAMA, *shape)
    data = build.data(cfg)
    network = build.module(cfg, data).model.to(torch.bfloat16)
    network.generation_config.eos_token_id = 7
    network.save_pretrained(folder)
    data.tokens.tokenizer.save_pretrained(folder)
    return ("model=hf", f"model.name={folder}", "device=cpu", "seq_len=16", f"model.added_tokens=[{','.join(NEW)}]")


def test_pretrained_weights_with_added_tokens_are_read_by_rank_0_only(config, monkeypatch, tmp_path):
    cfg = config(*published(config, tmp_path / "published"), "plan=off")
    data, tape = build.data(cfg), Tape()
    whole = build.module(cfg, data)
    for rank in range(RANKS):
        with one_of(rank) as ranks, monkeypatch.context() as patched:
            if rank:
                patched.setattr(loading, "_load", lambda *_: pytest.fail("read again"))
            ranks.broadcast = tape.of(rank, monkeypatch)
            made = build.module(cfg, data, None, ranks)
            same(parts_of(ranks, made.model), expected(ranks, whole.model))
            assert made.model.generation_config.eos_token_id == 7
            assert made.model.config.vocab_size == whole.model.config.vocab_size > 301


PUBLISHED = {
    "fp32": ("precision=32",),
    "frozen": ("precision=32", "freeze=['*embed*','*layers.0.*']"),
    "adapter": ("precision=32", "adapter=lora"),  # its initial weights are drawn in the dtype of the base
    "16 bits": ("precision=bf16-sr",),  # the dtype of the files, so nothing is widened
}


@pytest.mark.parametrize("strategy", [FullyShard, TensorParallel])
@pytest.mark.parametrize("case", PUBLISHED)
def test_shards_of_16_bit_weights_widened_while_sent_equal_the_shards_of_one_process(
    config, monkeypatch, tmp_path, case, strategy
):
    """The single process reads the weights in the run's dtype. Its digest of a frozen base is compared as well."""
    typed = [line for line in published(config, tmp_path / "published") if "added_tokens" not in line]
    cfg = config(*typed, *PUBLISHED[case], "plan=off")
    data, tape, load = build.data(cfg), Tape(), loading.load
    torch.manual_seed(0)
    whole, read = build.module(cfg, data), []
    monkeypatch.setattr(
        loading, "load", lambda described, dtype, *more: read.append(dtype) or load(described, dtype, *more)
    )
    for rank in range(RANKS):
        with one_of(rank, strategy) as ranks:
            ranks.broadcast = tape.of(rank, monkeypatch)
            torch.manual_seed(0)
            made = build.module(cfg, data, None, ranks)
            assert made.identity == whole.identity
            if strategy is FullyShard:
                same(parts_of(ranks, made.model), expected(ranks, whole.model))
            else:
                torch.manual_seed(0)
                ranks._lay_out(alone := build.module(cfg, data))
                same(parts_of(ranks, made.model), parts_of(ranks, alone.model))
    assert read[0] == (torch.float32 if case == "adapter" else torch.bfloat16)


def test_computed_buffers_are_not_rounded_when_weights_are_read_in_16_bits(config, monkeypatch, tmp_path):
    """Gemma multiplies embeddings by a buffer that holds the square root of their width. 16 bits would round it."""
    network("gemma3_text", hidden_size=80).to(torch.bfloat16).save_pretrained(tmp_path)
    build.data(config(*LLAMA)).tokens.tokenizer.save_pretrained(tmp_path)
    cfg = config("model=hf", f"model.name={tmp_path}", "device=cpu", "seq_len=16", "plan=off")
    data, tape = build.data(cfg), Tape()
    whole = build.module(cfg, data)
    for rank in range(RANKS):
        with one_of(rank) as ranks:
            ranks.broadcast = tape.of(rank, monkeypatch)
            same(parts_of(ranks, build.module(cfg, data, None, ranks).model), expected(ranks, whole.model))


WIDE = ("model.architecture.hidden_size=512", "model.architecture.intermediate_size=1408")
WIDE += ("model.architecture.num_hidden_layers=8",)


@linux
@pytest.mark.parametrize("narrower", [True, False], ids=["widened while sent", "widened first"])
def test_rank_0_needs_memory_for_its_shards_and_two_tensors_unless_the_model_is_widened_first(
    config, monkeypatch, tmp_path, narrower
):
    """The deliberately wrong variant reads the model in the run's dtype before sending it, instead of widening each
    tensor when it is sent."""
    folder = tmp_path / "published"
    typed = [line for line in published(config, folder, *WIDE) if "added_tokens" not in line]
    cfg = config(*typed, "plan=off")
    data = build.data(cfg)
    if not narrower:
        monkeypatch.setattr(loading, "stored_narrower", lambda *_: None)
    monkeypatch.setattr(dist, "broadcast", lambda tensor, source: None)
    with one_of(0) as ranks:
        ranks.broadcast = lambda said: said
        with Highest() as memory:
            made = build.module(cfg, data, None, ranks)
    full = 4 * sum(p.numel() for p in made.model.parameters())
    largest = 4 * max(p.numel() for p in made.model.parameters())
    slack = full / 8  # for module objects and pages of the heap
    assert (memory.rise < full / RANKS + 2 * largest + slack) == narrower
    assert narrower or memory.rise > full


@pytest.mark.parametrize("case", ["gpt2", "llama", pytest.param("llama, untied, 16 bits", marks=pytest.mark.matrix)])
def test_shards_that_rank_0_sends_to_tensor_parallel_ranks_equal_the_shards_of_the_full_model(
    config, monkeypatch, case
):
    even = "model.architecture.vocab_size=302"  # even, so embedding and head are divided too
    cfg = config(*CASES[case], *([even] if case == "llama" else []))
    data, tape = build.data(cfg), Tape()
    for rank in range(RANKS):
        with one_of(rank, TensorParallel) as ranks:
            torch.manual_seed(cfg.seed)
            whole = build.module(cfg, data)
            ranks._lay_out(whole)
            torch.manual_seed(cfg.seed)
            ranks.broadcast = tape.of(rank, monkeypatch)
            made = build.module(cfg, data, None, ranks)
            same(parts_of(ranks, made.model), parts_of(ranks, whole.model))
            assert any(isinstance(p, DTensor) for p in made.parameters())


def test_shards_of_a_rank_differ_from_the_shards_of_another_rank(config, monkeypatch):
    cfg = config(*GPT2)
    data = build.data(cfg)
    whole = build.module(cfg, data)
    with one_of(0) as ranks:
        ranks.broadcast = Tape().of(0, monkeypatch)
        made = build.module(cfg, data, None, ranks)
        ranks.rank = 1
        with pytest.raises(AssertionError):
            same(parts_of(ranks, made.model), expected(ranks, whole.model))


def test_rank_whose_model_has_other_parameters_than_the_model_of_rank_0_is_refused(config, monkeypatch):
    cfg = config(*LLAMA)
    data = build.data(cfg)
    with one_of(1) as ranks:
        untied = dict(build.module(cfg, data).model.named_parameters())
        told = {name: (p.shape, p.dtype) for name, p in untied.items()} | {"lm_head.weight": (301, 32)}
        ranks.broadcast = lambda said: told if isinstance(said, dict) else said
        with pytest.raises(Refused, match=r"lm_head\.weight of LlamaForCausalLM differs.* Type strategy=ddp"):
            build.module(cfg, data, None, ranks)


def same(found, asked):
    assert found.keys() == asked.keys()
    for name, one in found.items():
        assert one.dtype == asked[name].dtype and torch.equal(one, asked[name]), name


@pytest.fixture
def alone(group_of_one):
    """Returns the FSDP strategy of the only rank of a group."""
    ranks = FullyShard(devices=1)
    ranks.turns = Turns(dist.HashStore(), first=True, timeout=60)
    return ranks


def test_fsdp_weights_gathered_for_an_evaluation_are_resharded_after_the_forward_pass(config, alone):
    """In training, weights outside the blocks stay gathered from forward to backward."""
    cfg = config(*GPT2)
    made = build.module(cfg, build.data(cfg), None, alone).model
    ids, whole = torch.tensor([[1, 2, 3]]), {name for name, _ in made.named_parameters() if ".h." not in name}

    def gathered():
        return {name for name, p in made.named_parameters() if not isinstance(p, DTensor)}

    with torch.no_grad():
        made(ids)
    assert gathered() == set()
    loss = made(ids).logits.sum()
    assert gathered() == whole
    loss.backward()
    assert gathered() == set()


def test_samples_of_sharded_ranks_are_generated_with_synced_gpus(config, alone, monkeypatch, tmp_path):
    """A rank whose text has ended must take part in the forward passes of the other ranks, which would hang
    otherwise."""
    cfg = config(*GPT2)
    data = build.data(cfg)
    made, how = build.module(cfg, data, None, alone).eval(), []
    right = made.model.generate
    monkeypatch.setattr(made.model, "generate", lambda *args, **kwargs: (how.append(kwargs), right(*args, **kwargs))[1])
    ids = torch.tensor([[1, 2]])
    at_end = EndOfEvaluation(data.tokens.tokenizer, 0, Stop(), MemoryMeter(tmp_path / "memory.csv"))
    Samples([ids], 3, 16, tmp_path / "samples.jsonl", at_end)._rows(made, 1)
    assert [one["synced_gpus"] for one in how] == [True, True]
