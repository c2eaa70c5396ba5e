"""Compares 4-bit (NF4) layers with the layers of bitsandbytes, and tests for two bugs of bitsandbytes on a CPU."""

import pickle
from copy import deepcopy

import bitsandbytes
import pytest
import torch
import torch.nn.functional as F
from bitsandbytes.functional import has_avx512bf16
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from lowmem.memory.ledger import weights
from lowmem.plan.tracing.shapes import ShapeMode
from lowmem.system.errors import Refused
from lowmem.system.torch_private import tensors_count_as_real
from lowmem.techniques.adapter import nf4
from lowmem.techniques.adapter.nf4 import NF4Linear
from tolerances import FP32_REORDERED

pytestmark = pytest.mark.kernels
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((64, 64), (128, 192), (160, 100))  # (out, in)
LOST = 0.11  # limit of NF4's relative error for normally distributed weights; measured: 0.092


def bnb(layer, repacks=False):
    """Returns bitsandbytes' layer of the same matrix. With `repacks`, the layer repacks its matrix in an evaluation, as
    bitsandbytes does by default on a CPU with AVX512-BF16."""
    theirs = bitsandbytes.nn.Linear4bit(
        layer.in_features, layer.out_features, compute_dtype=layer.weight.dtype, quant_type="nf4", device="meta"
    )
    matrix = layer.weight.detach().clone()
    theirs.weight = bitsandbytes.nn.Params4bit(
        matrix, requires_grad=False, compress_statistics=True, quant_type="nf4", module=theirs
    )
    theirs.bias = layer.bias
    theirs = theirs.to("cpu")
    theirs.support_avx512bf16_for_cpu = repacks
    return theirs


def passed(layer, x, seed=1):
    """Returns (output, gradient of x)."""
    x = x.clone().requires_grad_()
    out = layer(x)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.dtype)
    out.backward(gradient)
    return out.detach(), x.grad


def lost(layer, matrix):
    return ((layer.weight.float() - matrix.float()).norm() / matrix.float().norm()).item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_nf4_layer_has_the_output_and_gradient_bits_of_bitsandbytes(rows, columns, dtype):
    layer, x = nn.Linear(columns, rows, dtype=dtype), torch.randn(2, 5, columns, dtype=dtype)
    ours, theirs = passed(NF4Linear(layer), x), passed(bnb(layer), x)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.wrong
@pytest.mark.parametrize("wrong", ["no mean of the scales", "columns first"])
def test_nf4_layer_with_a_deliberate_fault_differs_from_bitsandbytes(monkeypatch, wrong):
    layer, x = nn.Linear(64, 64), torch.randn(2, 64)
    ours = NF4Linear(layer)
    if wrong == "columns first":
        right = ours.dequantized
        monkeypatch.setattr(ours, "dequantized", lambda dtype: right(dtype).t())
    else:
        ours.mean.zero_()
    assert not any(map(torch.equal, passed(ours, x), passed(bnb(layer), x)))


@pytest.mark.parametrize(("rows", "columns"), [(32, 160), (33, 96), (5, 50), (3, 33)])
def test_nf4_relative_error_is_below_0_11_if_rows_end_inside_a_quantization_block(rows, columns):
    layer = nn.Linear(columns, rows)
    nn.init.normal_(layer.weight)
    assert lost(NF4Linear(layer), layer.weight) < LOST


@pytest.mark.wrong
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="another kernel")
def test_bitsandbytes_dequantizes_rows_that_end_inside_a_block_with_a_relative_error_above_0_22():
    """A bug of bitsandbytes 0.50.2, and the reason why NF4Linear flattens the matrix. If this test fails, bitsandbytes
    has fixed the bug."""
    layer = nn.Linear(160, 32)
    nn.init.normal_(layer.weight)
    theirs = bnb(layer)
    read = bitsandbytes.functional.dequantize_4bit(theirs.weight.data, theirs.weight.quant_state)
    assert ((read - layer.weight).norm() / layer.weight.norm()).item() > 2 * LOST


class Adapted(nn.Module):
    """Adds a second, trained path, as LoRA does, so that gradients arrive even if the gradient through `layer` is
    wrong."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.beside = layer, nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return self.layer(x) + self.beside(x)


def around_an_evaluation(layer):
    """Returns (gradient of the input, gradient of the first layer's trained weight), before and after an evaluation."""
    stack, x = nn.Sequential(Adapted(layer()), Adapted(layer())), torch.randn(4, 64)

    def gradients():
        stack.train().zero_grad()
        return passed(stack, x)[1], stack[0].beside.weight.grad.clone()

    before = gradients()
    with torch.no_grad():
        stack.eval()(x)
    return before, gradients()


def test_gradients_through_nf4_layers_are_unchanged_after_an_evaluation():
    before, after = around_an_evaluation(lambda: NF4Linear(nn.Linear(64, 64)))
    assert all(map(torch.equal, before, after))


@pytest.mark.skipif(not has_avx512bf16(), reason="bitsandbytes repacks where a CPU has AVX512-BF16")
def test_gradients_through_bitsandbytes_layers_change_after_an_evaluation():
    """A bug of bitsandbytes, and the reason why lowmem has its own NF4Linear. The gradients exist, but are wrong."""
    before, after = around_an_evaluation(lambda: bnb(nn.Linear(64, 64, bias=False), repacks=True))
    assert not any(torch.allclose(one, other, rtol=0.05) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nf4_layer_under_autocast_equals_a_dequantized_linear_in_forward_and_backward(dtype):
    layer, x = nn.Linear(64, 128), torch.randn(4, 64)
    ours = NF4Linear(layer)
    plain = ours.linear(torch.float32)
    found = []
    for one in (ours, plain):
        inside = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=dtype, cache_enabled=False):
            out = one(inside)
        assert out.dtype == dtype
        out.sum().backward()
        found.append((out.detach(), inside.grad))
    assert all(map(torch.equal, *found)) and found[0][1].dtype == torch.float32


def test_nf4_layer_saves_no_tensor_for_backward():
    kept = []
    x = torch.randn(4, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda tensor: tensor):
        NF4Linear(nn.Linear(64, 64))(x)
        assert kept == []
        nn.Linear(64, 64)(x)
    assert kept


def test_nf4_layer_of_a_conv1d_computes_with_the_transposed_matrix():
    layer, x = Conv1D(96, 32), torch.randn(4, 32)
    ours = NF4Linear(layer)
    plain = ours.as_found(ours.linear(torch.float32))
    assert isinstance(plain, Conv1D) and plain.weight.shape == layer.weight.shape
    matrix = plain.weight.t().contiguous()  # the product with a transposed view may add in another order
    assert torch.equal(ours.weight, matrix) and torch.equal(ours(x), F.linear(x, matrix, layer.bias))
    assert (plain(x) - ours(x)).abs().max() < FP32_REORDERED * ours(x).abs().max()
    assert (plain(x) - layer(x)).abs().max() > 1000 * FP32_REORDERED * ours(x).abs().max()  # not quantized
    assert lost(plain, layer.weight) < LOST


def test_ledger_counts_codes_scales_table_and_mean_of_an_nf4_layer_and_none_is_trainable():
    ours = NF4Linear(nn.Linear(1024, 1024, bias=False))
    held = sum(tensor.nbytes for tensor in weights(ours))
    assert held == 2**20 // 2 + 2**14 + 4 * 2**6 + 1024 + 4  # codes, scales, second-level scales, the table, the mean
    assert not list(ours.parameters())


def test_matrix_quantized_to_4_bits_in_pieces_has_the_bits_of_a_matrix_quantized_at_once(monkeypatch):
    matrix = torch.randn(70, 100)
    whole = nf4.quantized(matrix)
    monkeypatch.setattr(nf4, "PIECE", 3 * nf4.BLOCK)
    pieces = nf4.quantized(matrix)
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)


def test_nf4_layer_traced_by_shape_has_the_buffer_shapes_and_dtypes_of_a_real_layer():
    real = NF4Linear(nn.Linear(100, 160))
    with ShapeMode(), tensors_count_as_real():
        traced = NF4Linear(nn.Linear(100, 160))
        x = torch.empty(2, 100, requires_grad=True)
        traced(x).sum().backward()
        assert x.grad.shape == x.shape
    shapes = [{name: (b.shape, b.dtype) for name, b in one.named_buffers()} for one in (real, traced)]
    assert shapes[0] == shapes[1]
    assert torch.isfinite(NF4Linear(nn.Linear(64, 64)).weight).all()  # the trace left no fake tensor behind


def small(model_type, **keys):
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    keys = sizes | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32} | keys
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **keys))


def in_4_bits(model):
    return {name for name, part in model.named_modules() if isinstance(part, NF4Linear)}


def test_every_matrix_except_embedding_and_head_is_quantized_to_4_bits():
    for tied in (True, False):
        model = small("llama", tie_word_embeddings=tied)
        nf4.quantize(model)
        assert len(in_4_bits(model)) == 2 * 7 and type(model.lm_head) is nn.Linear
        assert {name.rpartition(".")[2] for name in in_4_bits(model)} == {
            *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        }
    model = small("gpt2", n_embd=64, n_layer=2, n_head=2)
    nf4.quantize(model)
    assert len(in_4_bits(model)) == 2 * 4


def test_routers_of_a_mixture_of_experts_are_not_quantized():
    model = small("qwen2_moe", num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32)
    nf4.quantize(model)
    assert in_4_bits(model) and not any("gate" in name.split(".")[-2:] for name in in_4_bits(model))
    assert not any(name.endswith("shared_expert_gate") for name in in_4_bits(model))


def test_pickled_or_copied_model_with_4_bit_experts_has_the_logits_of_the_original_model():
    model = small("qwen3_moe", num_experts=4, moe_intermediate_size=32, num_experts_per_tok=2).eval()
    nf4.quantize(model)
    ids = torch.arange(8)[None]
    for other in (pickle.loads(pickle.dumps(model)), deepcopy(model)):
        assert torch.equal(other(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_fused_4_bit_experts_equal_experts_quantized_as_separate_layers(rows, columns, dtype):
    experts = torch.randn(3, rows, columns, dtype=dtype)
    expected = []
    for expert in experts:
        layer = nn.Linear(columns, rows, bias=False, dtype=dtype)
        layer.weight.data = expert
        expected.append(NF4Linear(layer).weight)
    assert torch.equal(nf4.NF4Stack(experts).dequantized(dtype), torch.stack(expected))


@pytest.mark.wrong
def test_experts_quantized_to_4_bits_as_a_single_matrix_differ_from_experts_quantized_one_by_one():
    experts = torch.randn(3, 128, 192) * torch.tensor([1.0, 4.0, 9.0])[:, None, None]
    layer = nn.Linear(192, 3 * 128, bias=False)
    layer.weight.data = experts.flatten(0, 1)
    assert not torch.equal(nf4.NF4Stack(experts).dequantized(torch.float32).flatten(0, 1), NF4Linear(layer).weight)


def test_quantizing_a_model_without_blocks_to_4_bits_is_refused():
    model = small("llama", num_hidden_layers=0)
    with pytest.raises(Refused, match="adapter=lora"):
        nf4.quantize(model)
