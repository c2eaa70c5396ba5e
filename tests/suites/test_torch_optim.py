"""Tests every optimizer of conf/optim with the optimizer inputs of torch's own tests (`optim_db`), on the device and
with masters in host memory."""

import copy
import inspect
import sys
import unittest
import warnings
from functools import partial
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
from torch import nn

import host_masters
from lowmem.config.declarations import techniques
from lowmem.step.gradients import norm_of_all
from lowmem.system.errors import Refused
from lowmem.techniques.optim import adamw8bit, build
from lowmem.techniques.optim.build import MakeOptimizer
from lowmem.techniques.precision.fp32_weights import FullPrecision
from lowmem.training.build import optimizer
from typed import typed_run

pytestmark = pytest.mark.matrix
OPTIMIZERS = list(techniques("optim"))
# maps optimizers of conf/optim to the optimizers of torch whose inputs they get; all others get the inputs of AdamW
TORCHS = {"adafactor": ("Adafactor",), "muon": ("Muon", "AdamW"), "sgd": ("SGD",)}
RENAMED = {"adafactor": {"beta2_decay": "decay_rate", "d": "clip_threshold"}}
WRITTEN_HERE = ("adamw8bit", "muon")  # classes that check their arguments themselves
WAYS = ("device", "masters")


@pytest.fixture(scope="module")
def database():
    """Returns a dict that maps the name of each torch optimizer to torch's test inputs for this optimizer."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(action="ignore"):
        if find_spec("expecttest") is None:  # torch's test module imports expecttest, but `optim_db` does not need it
            stand_in = ModuleType("expecttest")
            stand_in.TestCase = unittest.TestCase
            patch.setitem(sys.modules, "expecttest", stand_in)
        common = pytest.importorskip("torch.testing._internal.common_optimizers", exc_type=ImportError)
    # undoes an effect of the import: flags such as cudnn.deterministic become read-only for all tests of this process
    setattr(torch.backends, "__allow_nonbracketed_mutation_flag", True)
    return {info.optim_cls.__name__: info for info in common.optim_db}


@pytest.fixture
def made(config, database, monkeypatch):
    """Returns the optimizer classes of conf/optim together with torch's test inputs."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # compiling torchao's step takes seconds
    return Made(config, database)


class Made:
    def __init__(self, config, database):
        self.config, self.database = config, database

    def maker(self, optim):
        return optimizer(self.config(f"optim={optim}", "lr=1e-2"))

    def named(self, optim, arguments):
        """Returns torch's arguments under our names, or None if the class lacks one."""
        ours = {RENAMED.get(optim, {}).get(key, key): value for key, value in arguments.items()}
        offered = inspect.signature(self.maker(optim).make.func).parameters.keys()
        if optim != "adamw":  # the classes of bitsandbytes and torchao have this argument but refuse it
            offered -= {"amsgrad"}
        return ours if ours.keys() <= offered else None

    def inputs(self, optim):
        """Yields (description, function that makes the optimizer) for each of torch's inputs that the class
        supports."""
        maker = self.maker(optim)
        for info in map(self.database.get, TORCHS.get(optim, ("AdamW",))):
            for one in info.optim_inputs_func(device="cpu"):
                if (named := self.named(optim, one.kwargs)) is not None:
                    make = partial(maker.make.func, **(maker.make.keywords | named))
                    yield one.desc, MakeOptimizer(make, maker.embedding_bits)

    def errors(self, optim):
        """Yields (description, parameters or None, arguments) of each input that torch's constructors refuse and whose
        arguments the class has."""
        for info in map(self.database.get, TORCHS.get(optim, ("AdamW",))):
            for error in info.optim_error_inputs_func(device="cpu", dtype=torch.float32):
                one = error.optimizer_error_input
                named = self.named(optim, one.kwargs)
                if error.error_on.name == "CONSTRUCTION_ERROR" and named is not None:
                    yield one.desc, one.params, named


class Odd(nn.Module):
    """A model with weights large enough for 8-bit state, a bias, a scalar without dimensions and an empty parameter."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(100, 64)
        self.linear = nn.Linear(64, 80)
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 64))


class Training:
    """A model and its optimizer, on the device or with masters in host memory."""

    def __init__(self, make, way, weights=None):
        torch.manual_seed(0)
        self.model, self.masters = Odd(), None
        for name, p in self.model.named_parameters():
            p.data.copy_(p.data if weights is None else weights[name])
        if way == "masters":
            self.masters = host_masters.made(self.model)
            self.optimizer = self.masters.optimizer(make, self.model)
        else:
            self.optimizer = FullPrecision().optimizer(make(self.model), self.model, norm_of_all)

    def step(self, seeds):
        for seed in seeds:
            draw = torch.Generator().manual_seed(seed)
            for p in self.model.parameters():
                p.grad = torch.randn(p.shape, generator=draw).to(p.dtype)
                if self.masters is not None:
                    self.optimizer.collect(p)
            self.optimizer.step()
        return self

    def weights(self):
        full = (lambda p: p) if self.masters is None else self.masters.full_precision
        return {name: full(p).detach().clone() for name, p in self.model.named_parameters()}


def through_a_file(state, tmp_path):
    torch.save(state, tmp_path / "state")
    return torch.load(tmp_path / "state", weights_only=True)


COPIES = {"as it is": lambda state, _: state, "deepcopy": lambda state, _: copy.deepcopy(state), "file": through_a_file}


def differing(make, way, copied):
    """Trains, and then continues twice: with the same optimizer, and with a new one that gets a copy of the state.
    Returns the names of the weights that differ afterwards."""
    first = Training(make, way).step(range(3))
    second = Training(make, way, first.weights())
    second.optimizer.load_state_dict(copied(first.optimizer.state_dict()))
    before = first.weights()
    one, two = first.step(range(3, 6)).weights(), second.step(range(3, 6)).weights()
    assert all(not torch.equal(one[name], before[name]) for name in one if one[name].numel())
    assert all(weight.isfinite().all() for weight in one.values())
    return {name for name in one if not torch.equal(one[name], two[name])}


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_optimizer_continues_bit_by_bit_from_its_state_dict(made, tmp_path, optim, way, copied):
    if optim == "adamw4bit" and copied == "deepcopy":
        pytest.skip("torchao 0.18 cannot clone 4-bit state")
    found = {desc: differing(make, way, lambda s: COPIES[copied](s, tmp_path)) for desc, make in made.inputs(optim)}
    assert len(found) >= 3 and not any(found.values()), found


@pytest.mark.wrong
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optim", [optim for optim in OPTIMIZERS if optim != "sgd"])  # SGD has no state
def test_optimizer_without_its_restored_state_gives_different_weights(made, optim, way):
    def without_state(state):
        return state | {"state": {}}

    assert {"tokens.weight", "linear.weight"} <= differing(made.maker(optim), way, without_state)


@pytest.mark.wrong
def test_restored_4_bit_state_in_the_memory_of_the_saved_state_gives_different_weights(made, monkeypatch):
    """In the wrong variant, `Tensor.to` copies the state. For torchao's 4-bit state it returns the same memory, so both
    optimizers change one state."""
    monkeypatch.setattr(build, "_copied", lambda value, device: value.to(device, copy=True))
    assert differing(made.maker("adamw4bit"), "device", lambda state: state)


# --- copies of the optimizer itself ----------------------------------------------------------------------------------

COPIED = [
    optim
    if optim in ("adafactor", "adamw", "adamw8bit", "muon", "sgd")
    else pytest.param(
        optim,
        marks=pytest.mark.xfail(
            raises=(AttributeError, NotImplementedError), strict=True, reason="its library cannot copy an optimizer"
        ),
    )
    for optim in OPTIMIZERS
]


@pytest.mark.parametrize("optim", COPIED)
def test_deepcopy_of_an_optimizer_continues_bit_by_bit(made, optim):
    def step(model, stepped, seeds):
        for seed in seeds:
            draw = torch.Generator().manual_seed(seed)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=draw)
            stepped.step()
        return list(model.parameters())

    for desc, make in made.inputs(optim):
        model = Odd()
        ours = make(model)
        step(model, ours, range(3))
        other, theirs = copy.deepcopy((model, ours))
        assert all(map(torch.equal, step(model, ours, range(3, 6)), step(other, theirs, range(3, 6)))), desc


# --- groups and missing gradients ------------------------------------------------------------------------------------


def moved(make, way, prepare):
    """Returns the names of weights that a step changes. Args: prepare: called with the training before this step."""
    training = Training(make, way).step(range(2))
    before = training.weights()
    prepare(training)
    return {name for name, weight in training.step([2]).weights().items() if not torch.equal(weight, before[name])}


def stop_vectors(training):
    for group in training.optimizer.param_groups:
        group["lr"] = group["lr"] * (group["role"] != "vector")  # in torchao lr is a tensor


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_each_parameter_group_of_an_optimizer_steps_with_its_own_lr(made, optim, way):
    for desc, make in made.inputs(optim):
        assert moved(make, way, stop_vectors) == {"tokens.weight", "linear.weight"}, desc
    every = {"tokens.weight", "linear.weight", "linear.bias", "scalar"}
    assert moved(made.maker(optim), way, lambda training: None) == every  # without changes of lr, all weights change


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_optimizer_step_without_gradients_changes_no_weights(made, optim):
    for desc, make in made.inputs(optim):
        training = Training(make, "device").step(range(2))
        before = training.weights()
        training.optimizer.zero_grad()
        training.optimizer.step()
        assert all(map(torch.equal, training.weights().values(), before.values())), desc


# --- refused arguments -----------------------------------------------------------------------------------------------


def typed_words(optim, arguments, own):
    """Returns the overrides for these arguments, or None if `arguments` is empty or contains tensors."""
    if not arguments or "tensor(" in str(arguments):
        return None
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in arguments.items()}
    words = [f"{'' if key in own else '+'}optim.{key}={value}".replace(" ", "") for key, value in values.items()]
    return [f"optim={optim}", *words]


NEGATIVE = [{key: -1.0} for key in ("lr", "eps", "weight_decay", "momentum")]


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_optimizer_arguments_that_torch_refuses_are_refused_when_typed(made, small, optim):
    run = made.config(f"optim={optim}")
    wrong = [named for _, _, named in made.errors(optim)] + [n for n in NEGATIVE if made.named(optim, n)]
    typed = [words for one in wrong if (words := typed_words(optim, one, run.optim.plain())) is not None]
    assert len(typed) >= 3
    for words in typed:
        with pytest.raises(Refused, match=r"^optim\.\w+=.*: give "):
            typed_run([*small, *words])


def accepted(made, optim):
    """Returns the descriptions of torch's invalid inputs that an optimizer class accepts."""
    cls = made.maker(optim).make.func
    found = set()
    inputs = [*made.errors(optim), *((str(one), None, one) for one in NEGATIVE if made.named(optim, one))]
    for desc, params, named in inputs:
        with warnings.catch_warnings(action="error"):
            try:
                cls(params if params is not None else [nn.Parameter(torch.ones(2, 3))], **({"lr": 1e-2} | named))
                found.add(desc)
            except (ValueError, TypeError, UserWarning):
                pass
    return found - {"only support 2D parameters"}  # torch's Muon refuses vectors; ours updates them with AdamW


@pytest.mark.parametrize("optim", WRITTEN_HERE)
def test_optimizer_classes_of_lowmem_refuse_all_arguments_that_torch_refuses(made, optim):
    assert accepted(made, optim) == set()


@pytest.mark.wrong
def test_optimizer_class_without_argument_checks_accepts_invalid_arguments(made, monkeypatch):
    """In the wrong variant, the constructor of torch's AdamW, which checks the arguments, is replaced."""
    monkeypatch.setattr(adamw8bit.torch.optim, "AdamW", lambda *_: None)
    assert {"weight_decay should > 0", "beta1 should be between 0 and 1"} <= accepted(made, "adamw8bit")
