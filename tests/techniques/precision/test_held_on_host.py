"""Tests how the host updates weights and stores them between steps: random numbers, memory and checkpoints."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import parity
from host_masters import made
from lowmem.config.instantiate import instantiate
from lowmem.offload import host_weight
from lowmem.offload.host_weight import HostWeight, SplitHostWeight, StochasticHostWeight
from lowmem.offload.master_weights import MasterWeights
from lowmem.offload.on_device import WeightsOnDevice
from lowmem.saving.checkpoint import complete
from lowmem.techniques.optim.adamw8bit import HostAdamW8bit
from lowmem.techniques.optim.build import MakeOptimizer
from lowmem.techniques.precision.masters import BFloat16Master
from lowmem.techniques.precision.weights_16bit import BFloat16Stochastic
from lowmem.training.build import callbacks
from streams import built, lines
from two_models import configured, windows

STREAMED = ("weights=streamed", "gradient_checkpointing=every_layer")


def stepped_at_random(seed, steps):
    """Returns two parameters after the last of `steps` updates. Each update starts from 1 and adds a quarter of bf16's
    spacing."""
    torch.manual_seed(seed)
    two = nn.ParameterList(torch.ones(64, 64, dtype=torch.bfloat16) for _ in range(2))
    masters = made(two, BFloat16Stochastic())
    optimizer = masters.optimizer(MakeOptimizer(partial(torch.optim.SGD, lr=1.0)), two)
    for _ in range(steps):
        for p in two:
            p.data.fill_(1.0)
            masters.masters[p].own.fill_(1.0)
            p.grad = torch.full_like(p, -(2**-9))
            optimizer.collect(p)
        optimizer.step()
    return [p.data for p in two]


def test_stochastic_rounding_draws_different_numbers_per_parameter_step_and_seed():
    found = [weight for steps in (1, 2) for seed in (0, 1) for weight in stepped_at_random(seed, steps)]
    assert all(0.2 < (weight > 1).float().mean() < 0.3 for weight in found)
    assert not any(torch.equal(one, other) for i, one in enumerate(found) for other in found[:i])
    assert torch.equal(found[0], stepped_at_random(0, 1)[0])


@pytest.mark.parametrize(
    ("precision", "chosen", "right"),
    [
        ("bf16-master", ["adapter=lora"], True),
        ("bf16-sr", ["freeze=['*c_proj*']"], True),
        ("bf16-master", ["freeze=['*c_proj*']"], False),
        ("bf16-sr", ["adapter=lora"], True),
    ],
    ids=["lora bf16-master", "frozen bf16-sr", "views", "lora bf16-sr"],
)
def test_checkpoint_of_streamed_weights_stores_trained_weights_only_unless_stored_as_views(
    fit, monkeypatch, precision, chosen, right
):
    """The deliberately wrong variant saves weights as views of their block's memory, which also holds frozen
    weights."""
    if not right:
        monkeypatch.setattr(host_weight, "by_itself", lambda tensor: tensor)
    _, run = fit(f"precision={precision}", *chosen, *STREAMED, "max_steps=1", "model.architecture.n_embd=64")
    content = torch.load(complete(run / "checkpoints")[-1], weights_only=True)["state_dict"]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in content.values()}
    tensors = {one.data_ptr(): one.nbytes for one in content.values()}
    assert (sum(storages.values()) == sum(tensors.values())) == right


@pytest.mark.parametrize("weights", ["resident", "streamed"])
@pytest.mark.parametrize("precision", ["bf16-master", "bf16-sr"])
def test_each_of_two_fits_of_a_module_whose_weights_the_host_updates_changes_all_weights(config, precision, weights):
    optim = "adafactor" if precision == "bf16-sr" else "adamw8bit"
    cfg = configured(config, *lines("llama", f"weights={weights}", "max_steps=1", precision=precision, optim=optim))
    module = built(cfg, "llama")
    for _ in range(2):
        before = [p.detach().clone() for p in module.model.parameters()]
        trainer = parity.trainer(cfg, list(map(instantiate, cfg.plugins)), callbacks(cfg))
        trainer.fit(module, windows(cfg))
        assert {p.dtype for p in module.model.parameters()} == {torch.bfloat16}
        assert not any(torch.equal(p, old) for p, old in zip(module.model.parameters(), before, strict=True))


def test_host_optimizer_updates_a_non_contiguous_weight():
    layer = nn.Linear(128, 64, bias=False)
    layer.weight.data = torch.randn(128, 64).t()
    masters = made(layer)
    before = layer.weight.detach().clone()
    optimizer = masters.optimizer(MakeOptimizer(partial(HostAdamW8bit, lr=1.0)), layer)
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.collect(layer.weight)
    optimizer.step()
    assert layer.weight.lt(before).all()
    halves = SplitHostWeight("w", nn.Parameter(torch.randn(128, 64).t()), torch.bfloat16)
    assert halves.narrow.is_contiguous() and halves.rest.is_contiguous()
    own = StochasticHostWeight("w", nn.Parameter(torch.randn(128, 64).t().bfloat16()), torch.bfloat16)
    own.moved(None)
    assert own.narrow.is_contiguous()


def test_full_precision_of_a_frozen_streamed_weight_is_its_16_bit_value_while_the_parameter_is_nan(config):
    module = built(configured(config, *lines("llama", *STREAMED)), "llama")
    frozen = module.model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
    expected = frozen.detach().bfloat16()
    masters = made(module.model, weights=module.weights)
    assert frozen.isnan().all() and torch.equal(masters.full_precision(frozen), expected)
    module.weights.stop()


@pytest.mark.parametrize("early", [True, False], ids=["early update", "late update"])
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_row_gradients_of_an_embedding_sum_like_dense_gradients(micro_batches, early):
    torch.manual_seed(0)
    by_rows, dense = (HostWeight("w", nn.Parameter(torch.zeros(11, 8)), torch.bfloat16) for _ in range(2))
    for _ in range(3):  # windows
        for _ in range(micro_batches):
            at = torch.tensor([3, 9, 3, 0])
            rows = torch.randn(4, 8).bfloat16()
            rows[2] = 0  # the token of row 2 is also the token of row 0
            by_rows.use_rows(at, rows)
            dense.use(0, torch.zeros(11, 8).bfloat16().index_copy_(0, at[[0, 1, 3]], rows[[0, 1, 3]]).view(-1))
        assert torch.equal(by_rows.gradient(), dense.gradient()) and by_rows.sum.dtype == dense.sum.dtype
        for master in (by_rows, dense):
            assert master.complete
            master.used(early)


def test_gradient_of_a_master_is_released_after_its_step_but_an_fp32_sum_is_kept():
    """An embedding's gradient has V x H elements. If it were kept, a third tensor of this size would exist while the
    next gradient is added."""
    master = HostWeight("w", nn.Parameter(torch.zeros(4)), torch.bfloat16)
    piece = torch.ones(4, dtype=torch.bfloat16)
    master.use(0, piece)
    assert master.sum is piece and master.complete
    master.used(early=False)
    assert master.sum is None
    for _ in range(2):  # two micro-batches in a window: their fp32 sum is kept
        master.use(0, piece)
    master.used(early=False)
    assert master.sum.tolist() == [2.0] * 4 and master.sum.dtype == torch.float32 and not master.complete
    master.use(0, piece)
    assert master.gradient().tolist() == [1.0] * 4


def test_gradient_freed_while_host_memory_is_counted_raises_no_error():
    class Dropping(HostWeight):
        """A weight whose gradient has been freed at the second read."""

        _reads = 0

        @property
        def sum(self):
            self._reads += 1
            return torch.ones(4) if self._reads == 1 else None

        @sum.setter
        def sum(self, _):
            self._reads = 0

    assert all(torch.is_tensor(one) for one in Dropping("w", nn.Parameter(torch.zeros(4)), torch.float16).tensors())


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [
        ({"random_roundings": {"weight": 3, "bias": 2}}, 3),
        ({"BFloat16Stochastic": {"steps": {"weight": 3}}}, 3),  # of an earlier version
        ({"BFloat16Stochastic": {"held": {}}}, 0),  # from a run whose optimizer ran on the device
        ({}, 0),
    ],
    ids=["saved", "earlier version", "updated on the device", "nothing saved"],
)
def test_stochastic_rounding_continues_from_the_step_of_its_checkpoint(checkpoint, expected):
    callback, precision = MasterWeights(), BFloat16Stochastic()
    callback.on_load_checkpoint(SimpleNamespace(precision_plugin=precision), None, checkpoint)
    callback.precision = precision
    host_weight = callback._new("weight", nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)))
    assert host_weight.steps == expected


def test_masters_are_created_once_per_run_even_if_setup_runs_twice():
    """If masters were created twice, streamed weights would be read from their NaN placeholders."""
    calls = []
    callback, precision = MasterWeights(), BFloat16Master()
    callback.make = calls.append
    for _ in range(2):
        callback.setup(SimpleNamespace(precision_plugin=precision), SimpleNamespace(weights=WeightsOnDevice()), "fit")
    module = nn.Linear(2, 2)
    precision.convert_module(module)
    assert calls == [module]


def test_teardown_of_masters_after_an_error_before_setup_raises_nothing():
    """The setup of an earlier callback may fail, before the link to the host exists."""
    callback = MasterWeights()
    callback.on_exception(None, None, RuntimeError())
    callback.teardown(None, None, "fit")
