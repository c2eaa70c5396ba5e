"""Tests modules that are computed in slices of the sequence: gradients, memory, and refusals of modules that mix
tokens."""

import pytest
import torch
from test_policies import SEGMENTED, batch, gradients  # noqa: F401 (batch is a fixture)
from torch import nn

import parity
from host_memory import peak
from lowmem.data.loader import MicroBatch
from lowmem.system.errors import Refused
from lowmem.techniques.adapter.lora import LoRA
from lowmem.techniques.gradient_checkpointing import policies as checkpointing
from lowmem.techniques.gradient_checkpointing import slices as tiled_tokens
from lowmem.techniques.gradient_checkpointing.slices import SlicedModule, Tiles
from lowmem.techniques.loss import cross_entropy as losses
from networks import (
    network,
    shaped,
)
from same import last, same
from tolerances import FP32_REORDERED

pytestmark = pytest.mark.kernels
TOKENS = 7  # of 32: the last slice has four
EACH = {"none": checkpointing.none, **SEGMENTED}
SHAPES = ("gpt2", "llama", "gemma2")  # a fused LayerNorm; a block that ends with its MLP; a norm after the MLP


def tiled(model, apply=checkpointing.none, tokens=TOKENS):
    apply(model)
    Tiles(model, tokens)
    return model


def off(kept, found):
    """Returns the largest error of any gradient, relative to the largest element of that gradient. Asserts that the
    next random numbers (the last elements of the arguments) are equal."""
    *kept, one = kept
    *found, other = found
    assert torch.equal(one, other)
    return max(((a - b).abs().max() / a.abs().max()).item() for a, b in zip(kept, found, strict=True))


@pytest.mark.parametrize("model_type", SHAPES)
def test_sliced_gradients_equal_unsliced_gradients_with_every_checkpointing_policy(model_type, batch):  # noqa: F811
    kept = gradients(shaped(model_type, layers=3), batch)
    for name, apply in EACH.items():
        assert off(kept, gradients(tiled(shaped(model_type, layers=3), apply), batch)) < FP32_REORDERED, name


@pytest.mark.wrong
def test_dropping_the_short_last_slice_in_backward_changes_the_gradients(batch, monkeypatch):  # noqa: F811
    back = SlicedModule.back

    def short(self, x, d_out):
        whole = x.shape[1] // self.tokens * self.tokens
        d_x, d_weights = back(self, x[:, :whole], d_out[:, :whole])
        return torch.cat([d_x, torch.zeros_like(x[:, whole:])], dim=1), d_weights

    kept = gradients(shaped("llama"), batch)
    monkeypatch.setattr(SlicedModule, "back", short)
    assert off(kept, gradients(tiled(shaped("llama")), batch)) > 100 * FP32_REORDERED


def test_single_slice_of_the_whole_sequence_has_the_gradient_bits_of_no_slicing(batch):  # noqa: F811
    kept = gradients(shaped("llama", dropout=0.3), batch)
    found = gradients(tiled(shaped("llama", dropout=0.3), tokens=32), batch)
    assert all(torch.equal(a, b) for a, b in zip(kept, found, strict=True))


@pytest.mark.parametrize("forgetful", [False, True], ids=["right", "forgetful"])
def test_dropout_in_slices_repeats_masks_in_recomputation_unless_random_state_is_lost(batch, monkeypatch, forgetful):  # noqa: F811
    """Slices change the dropout masks, but with slices every policy gives the same masks as no checkpointing. The
    deliberately wrong variant (`forgetful`) does not restore the random state before recomputation."""
    kept = gradients(tiled(shaped("gpt2", dropout=0.3)), batch)
    assert not torch.equal(kept[0], gradients(shaped("gpt2", dropout=0.3), batch)[0])
    if forgetful:
        monkeypatch.setattr("lowmem.system.random_state.restored", lambda *_: None)
    for name, apply in EACH.items():
        again = gradients(tiled(shaped("gpt2", dropout=0.3), apply), batch)
        assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True)) != forgetful, name


class Squared(nn.Module):
    """Returns the square of the output of a linear layer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 96, bias=False)

    def forward(self, x):
        return self.linear(x).square()


def error_of_bf16(tokens):
    """Returns the relative error of the weight's bf16 gradient, compared with the fp64 gradient."""
    torch.manual_seed(0)
    x, d = torch.randn(1, 512, 64).bfloat16(), torch.randn(1, 512, 96).bfloat16()
    module = Squared().bfloat16()
    exact = Squared().double()
    exact.linear.weight.data = module.linear.weight.double()
    exact(x.double()).backward(d.double())
    SlicedModule(module, tokens)
    module(x).backward(d)
    wide = exact.linear.weight.grad
    return ((module.linear.weight.grad.double() - wide).norm() / wide.norm()).item()


def test_slices_in_16_bits_have_at_most_1_6_times_the_gradient_error_of_no_slicing(monkeypatch):
    whole, slices = error_of_bf16(512), error_of_bf16(16)
    assert slices < 1.6 * whole

    def narrow(sums, name, weight):  # the deliberately wrong variant: 16-bit sums, as in autograd
        gradient, weight.grad = weight.grad, None
        sums[name] = gradient if name not in sums else sums[name] + gradient

    monkeypatch.setattr(tiled_tokens, "_add", narrow)
    assert error_of_bf16(16) > 2 * whole


def test_sliced_module_called_twice_under_autocast_has_the_gradient_of_no_slicing(batch):  # noqa: F811
    """If autocast cached a 16-bit copy of the weight that does not require gradients, the second call would add nothing
    to the weight's gradient."""

    def both(module):
        x = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(0))
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x).float().sum() + module(x[:, :3]).float().sum()
        y.backward()
        return module.linear.weight.grad

    torch.manual_seed(0)
    plain, cut = Squared(), Squared()
    cut.load_state_dict(plain.state_dict())
    SlicedModule(cut, TOKENS)
    kept, found = both(plain), both(cut)
    assert (found - kept).norm() < 0.01 * kept.norm()


def test_lora_in_sliced_modules_has_unsliced_gradients_and_sums_only_adapter_weights(batch, monkeypatch):  # noqa: F811
    def adapted():
        model = shaped("llama", layers=2)
        LoRA(r=2, target=["*.mlp.*"])(model)
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.data.normal_(std=0.1)
        return model

    torch.manual_seed(0)
    kept = gradients(adapted(), batch)
    torch.manual_seed(0)
    summed = set()
    add = tiled_tokens._add

    def counted(sums, name, weight):
        summed.add(name)
        add(sums, name, weight)

    monkeypatch.setattr(tiled_tokens, "_add", counted)
    assert off(kept, gradients(tiled(adapted(), checkpointing.every_layer), batch)) < FP32_REORDERED
    assert summed and all("lora" in name for name in summed)


# --- bytes and passes -------------------------------------------------------------------------------------------------

B, T, H, WIDE, SLICE = 2, 256, 32, 512, 32


def highest(apply, tokens):
    ends = {"vocab_size": 50, "bos_token_id": None, "eos_token_id": None}
    model = network("llama", num_hidden_layers=3, hidden_size=H, intermediate_size=WIDE, **ends)
    tiled(model, apply, tokens)
    ids = torch.randint(0, 50, (B, T))
    return peak(model, lambda: losses.full(model, MicroBatch(ids, ids)))


@pytest.mark.parametrize("name", ["every_layer", "selective", "none"])
def test_mlp_activations_of_only_one_slice_exist_at_a_time(name):
    """Backward of one block needs six fp32 tensors of the MLP's width. Each of the other two blocks also keeps two such
    tensors with `selective`, and four with `none`."""
    held = {"every_layer": 6, "selective": 6 + 2 * 2, "none": 6 + 2 * 4}[name] * WIDE * 4
    sums = 2 * WIDE * H * 4  # the fp32 sums of three matrices exist together; without slices, one gradient at a time
    fell = highest(EACH[name], T) - highest(EACH[name], SLICE)
    assert fell == pytest.approx(held * B * (T - SLICE) - sums, rel=0.15)


def test_sliced_mlp_is_computed_twice_per_token_with_and_without_checkpointing(batch):  # noqa: F811
    rows = {}
    for name in ("none", "every_layer"):
        model, seen = shaped("llama", layers=2), []
        for layer in model.model.layers:
            layer.mlp.up_proj.register_forward_hook(lambda *called, seen=seen: seen.append(called[1][0].shape[1]))
        gradients(tiled(model, EACH[name]), batch)
        rows[name] = sum(seen) - 2  # each MLP is called with one token to find out what it returns
    assert rows == {"none": 2 * 2 * 32, "every_layer": 2 * 2 * 32}


# --- which modules ----------------------------------------------------------------------------------------------------


class Shift(nn.Module):
    """Computes each token's output from the previous token."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        return self.linear(x.roll(1, dims=1))


class Borrowing(nn.Module):
    """Computes with a weight that it does not own."""

    def __init__(self, weight):
        super().__init__()
        self.linear, self.borrowed = nn.Linear(32, 32), [weight]

    def forward(self, x):
        return self.linear(x) @ self.borrowed[0]


def asked(model, tokens=TOKENS):
    tiles = Tiles(model, tokens)
    ids = torch.randint(0, 500, (2, 16))
    with torch.no_grad():
        tiles.verify(model.eval(), MicroBatch(ids, ids))


@pytest.mark.parametrize(
    "other", [Shift, lambda: Borrowing(nn.Parameter(torch.eye(32)))], ids=["mixes tokens", "borrows a weight"]
)
def test_module_that_mixes_tokens_or_borrows_a_weight_is_refused_for_slicing(other):
    model = shaped("llama", layers=2)
    model.model.layers[1].mlp = other()
    with pytest.raises(Refused, match=r"(Shift|Borrowing) would compute different results.* Type tile.tokens=null"):
        asked(model)


def test_slicing_a_model_without_sliceable_modules_or_with_router_logits_is_refused():
    with pytest.raises(Refused, match="no module in the blocks of OPTForCausalLM"):
        asked(shaped("opt", layers=2))
    with pytest.raises(Refused, match="Linear has no list of blocks"):
        Tiles(nn.Linear(2, 2), 2)
    with pytest.raises(Refused, match="output_router_logits"):
        Tiles(network("mixtral", output_router_logits=True), 2)


def test_log_names_only_norms_of_mixtral_and_mlps_of_gpt2_as_sliced(caplog):
    caplog.set_level("INFO", logger="lowmem")
    asked(network("mixtral"))
    asked(shaped("gpt2", layers=2))
    assert [record.message.split(" are ")[0] for record in caplog.records if "tile" in record.message] == [
        "tile.tokens=7: MixtralRMSNorm",
        "tile.tokens=7: GPT2MLP",
    ]


# --- runs -------------------------------------------------------------------------------------------------------------

RUN = ("tile.tokens=5", "gradient_checkpointing=every_layer", "model.architecture.resid_pdrop=0.1", "save_every=2")


def test_resumed_run_with_slices_has_the_checkpoint_bits_of_an_unbroken_run(fit):
    _, whole = fit(*RUN, folder="whole")
    fit(*RUN, "max_steps=2", "scheduler.total_steps=4", folder="half")
    _, other = fit(*RUN, f"resume={whole.parent / 'half'}", folder="other")
    assert same(last(whole), last(other))


def test_evaluation_in_slices_has_the_val_loss_of_an_evaluation_without_slices(fit, caplog):
    caplog.set_level("INFO", logger="lowmem")
    _, run = fit(*RUN, folder="trained")
    whole, _ = fit(f"evaluate={run}", folder="whole")
    caplog.clear()
    found, _ = fit(f"evaluate={run}", "tile.tokens=5", folder="slices")
    assert "GPT2MLP are computed in slices" in caplog.text
    assert found["val_loss"] == pytest.approx(whole["val_loss"], rel=FP32_REORDERED)


@pytest.mark.parametrize("name", ["every_layer", "sqrt"])
def test_streamed_weights_with_slices_give_the_bits_of_resident_weights(config, name):
    def weights(*more):
        lines = parity.overrides("precision=bf16-master", f"gradient_checkpointing={name}", "tile.tokens=5", *more)
        return parity.run(config(*lines, "max_steps=2", base=()), wide=True)[1]

    resident, streamed = weights(), weights("weights=streamed", "weights.slots=3")
    assert all(torch.equal(resident[name], streamed[name]) for name in resident)


@pytest.mark.parametrize("value", ["0", "abc", "true"])
def test_invalid_tile_tokens_is_refused(command, value):
    code, said = command(f"tile.tokens={value}")
    assert code == 1 and f"tile.tokens={value}: give a whole number of tokens, at least 1, or null" in said
