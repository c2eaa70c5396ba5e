"""Tests that selective checkpointing gives the same gradients as no checkpointing, even if a model changes tensors in
place."""

import weakref
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention

from host_memory import peak
from lowmem.data.loader import MicroBatch
from lowmem.system import torch_private
from lowmem.techniques.gradient_checkpointing import boundary, selective
from lowmem.techniques.gradient_checkpointing import policies as checkpointing
from lowmem.techniques.loss import cross_entropy as losses
from networks import network

BATCH, TOKENS, WIDTH = 2, 8, 16


def scaled(x, h):
    x *= 2


def gated(x, h):
    x.mul_(torch.sigmoid(h))


def added(x, h):
    x += h


def through_a_view(x, h):
    x.view(-1, WIDTH)[:, :5].mul_(3)


def unseen_by_autograd(x, h):
    x.data.mul_(2)


def without_a_count(x, h):
    torch._foreach_mul_([x], 2.0)


def untouched(x, h):
    pass


CHANGES = (scaled, gated, added, through_a_view, unseen_by_autograd, without_a_count)


class Block(nn.Module):
    """Changes the output of a linear layer in place, and then uses the changed output."""

    def __init__(self, change):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.change = change

    def forward(self, h):  # (B, T, W)
        x = self.up(h)  # a matrix product (B * T, W), and a tensor (B, T, W) in the same memory
        self.product = weakref.ref(x.untyped_storage())
        self.change(x, h)
        return h + self.down(torch.tanh(x))


class HandsOut(nn.Module):
    """Returns its product and a value computed from the product; the model then changes the product in place."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, h):
        x = self.up(h)
        return x, torch.exp(x + 1).mean()


class ChangesOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(HandsOut() for _ in range(3))

    def forward(self, h):
        total = 0.0
        for block in self.blocks:
            h, extra = block(h)
            h.mul_(2)
            h, total = torch.tanh(h), total + extra
        return h * total


def stack(change):
    return nn.Sequential(*(Block(change) for _ in range(3))).train()


MODELS = {change.__name__: partial(stack, change) for change in CHANGES} | {"after the block": ChangesOutputs}


def gradients(make, apply):
    torch.manual_seed(0)
    model = make().train()
    apply(model)
    x = torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)
    model(x).square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def watch_nothing(monkeypatch):
    """In the deliberately wrong variant, changes in place are not detected."""
    monkeypatch.setattr(selective.KeptResult, "see", lambda *_: None)
    monkeypatch.setattr(selective, "_written", lambda *_: ())


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_selective_checkpointing_of_results_changed_in_place_gives_the_gradient_bits_of_no_checkpointing(
    make, monkeypatch
):
    kept = gradients(make, checkpointing.none)
    assert equal(kept, gradients(make, checkpointing.selective))
    watch_nothing(monkeypatch)
    assert not equal(kept, gradients(make, checkpointing.selective))


def gemma3n():
    """Returns a model whose blocks add in place to the outputs of linear layers."""
    shape = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 500, "laurel_rank": 8}
    shape |= {
        "layer_types": ["full_attention"] * 2,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0] * 2,
    }
    model = network("gemma3n_text", **shape)
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)  # weights that start at zero would make other gradients zero
    return model


def test_selective_checkpointing_of_gemma3n_gives_the_gradient_bits_of_no_checkpointing(monkeypatch):
    ids = torch.randint(0, 500, (2, 16))

    def bits(apply):
        model = gemma3n()
        apply(model)
        losses.full(model, MicroBatch(ids, ids)).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    kept = bits(checkpointing.none)
    assert equal(kept, bits(checkpointing.selective))
    watch_nothing(monkeypatch)
    assert not equal(kept, bits(checkpointing.selective))


@torch.library.custom_op("lowmem_test::attention", mutates_args=())
def attention(x: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """Stands for attention on a card, where one operator also draws the random numbers of dropout."""
    return x * torch.rand(x.shape).gt(dropout_p) if dropout_p else x.clone()


attention.register_autograd(lambda ctx, gradient: (gradient, None))


class Drops(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.up, self.dropout = nn.Linear(WIDTH, WIDTH, bias=False), dropout

    def forward(self, h):
        return h + nn.functional.dropout(attention(torch.tanh(self.up(h)), self.dropout), 0.3)


def test_selective_checkpointing_of_attention_with_dropout_gives_the_gradient_bits_of_no_checkpointing(monkeypatch):
    monkeypatch.setattr(selective, "EXPENSIVE", (*selective.EXPENSIVE, attention._opoverload))

    def make(dropout):
        return nn.Sequential(*(Drops(dropout) for _ in range(3)))

    for dropout in (0.0, 0.3):
        kept = gradients(partial(make, dropout), checkpointing.none)
        assert equal(kept, gradients(partial(make, dropout), checkpointing.selective))
    monkeypatch.setattr(selective, "_drew_from", lambda *_: None)  # the deliberately wrong variant
    assert not equal(kept, gradients(partial(make, 0.3), checkpointing.selective))


@pytest.mark.parametrize(("change", "held"), [(untouched, True), (scaled, False)])
def test_selective_checkpointing_keeps_a_result_until_backward_unless_the_result_is_changed_in_place(change, held):
    model = nn.Sequential(Block(change)).train()
    checkpointing.selective(model)
    loss = model(torch.randn(BATCH, TOKENS, WIDTH)).sum()
    assert (model[0].product() is not None) == held
    loss.backward()
    assert model[0].product() is None


@pytest.mark.parametrize("change", [untouched, scaled])
def test_selective_checkpointing_has_equal_peak_bytes_with_fake_and_real_tensors(change):
    """The planner predicts with fake tensors."""

    def bytes_at_peak():
        model = stack(change)
        checkpointing.selective(model)
        x = torch.randn(BATCH, TOKENS, WIDTH)
        return peak(model, lambda: model(x).sum(), inputs=[x])

    found = bytes_at_peak()
    with FakeTensorMode():
        assert bytes_at_peak() == found


def test_second_backward_pass_with_selective_checkpointing_raises_an_error():
    model = nn.Sequential(Block(untouched)).train()
    checkpointing.selective(model)
    loss = model(torch.randn(BATCH, TOKENS, WIDTH)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="every_layer"):
        loss.backward()


def test_function_compiled_inside_a_selective_block_stays_compiled_and_has_the_gradient_bits_of_eager_blocks():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    def compiled():
        torch.compiler.reset()
        model = stack(untouched)
        for block in model:
            block.change = torch.compile(gated, backend=backend)
        return model

    kept = gradients(partial(stack, gated), checkpointing.none)
    assert equal(kept, gradients(compiled, checkpointing.selective)) and graphs


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_recomputed_in_selective_contexts_has_the_bits_of_the_forward_pass():
    """Flex attention is a higher-order operator, which most dispatch modes do not support."""
    x = torch.randn(1, 2, 16, 16)
    forward, again = selective.contexts()
    with forward:
        first = flex_attention(x, x, x)
    with again:
        assert torch.equal(flex_attention(x, x, x), first)


# --- attention's results in host memory -------------------------------------------------------------------------------


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        q, k, v = self.qkv(h).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)  # (B, heads, T, D) each
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return h + self.out(mixed.transpose(1, 2).flatten(2))


class Counts(torch_private.TorchDispatchMode):
    """Counts the calls of attention operators in forward and in backward."""

    def __init__(self):
        super().__init__()
        self.forward, self.backward = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.forward += func in torch_private.ATTENTION
        self.backward += func in torch_private.ATTENTION_BACKWARD
        return func(*args, **(kwargs or {}))


def attending():
    return nn.Sequential(*(Attends() for _ in range(3))).train()


class First(selective.OffloadedTensor):
    """In the first wrong variant, each block gets the results of the first block."""

    of_first: ClassVar[dict] = {}

    def __init__(self, tensor, send):
        super().__init__(self.of_first.setdefault(tensor.shape, tensor.detach()), send)


class Flat(selective.OffloadedTensor):
    """In the second wrong variant, a fetched result is viewed as contiguous, whatever the strides of the saved
    tensor."""

    def __init__(self, tensor, send):
        super().__init__(tensor, send)
        self.shape = tensor.shape

    def fetch(self):
        return self._boundary.fetch().view(self.shape)


@pytest.mark.parametrize("wrong", [None, First, Flat])
def test_offload_attention_computes_attention_once_and_gives_the_gradients_of_none_unless_results_are_mixed_up(
    monkeypatch, wrong
):
    kept = gradients(attending, checkpointing.none)
    if wrong is not None:
        monkeypatch.setattr(selective, "OffloadedTensor", wrong)
    with Counts() as counts:
        again = gradients(attending, checkpointing.offload_attention)
    assert (counts.forward, counts.backward) == (3, 3)
    assert equal(kept, again) == (wrong is None)
    with Counts() as counts:
        gradients(attending, checkpointing.offload)
    assert (counts.forward, counts.backward) == (6, 3)


def test_offload_attention_stores_block_inputs_and_attention_results_in_host_memory():
    on_host = {}
    for name in ("offload", "offload_attention"):
        tensors, make = [], boundary.OnHost.__init__

        def seen(self, tensor, *more, tensors=tensors, make=make):
            make(self, tensor, *more)
            tensors.append(self.host.nbytes)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(boundary.OnHost, "__init__", seen)
            gradients(attending, getattr(checkpointing, name))
        on_host[name] = sum(tensors)
    results = 3 * BATCH * (TOKENS * WIDTH + 2 * TOKENS) * 4  # the output, and a number per head and token, in fp32
    assert on_host["offload_attention"] == on_host["offload"] + results
