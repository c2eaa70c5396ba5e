"""DeepSpeed's engines: two processes train what one does on the rows of both. Not run where DeepSpeed is not installed.

What they hold and compute is measured by `zero.py`, once for all tests."""

from types import SimpleNamespace

import pytest
import torch

import zero
from lowmem.techniques.loss.cross_entropy import Function, Loss, full
from lowmem.techniques.strategy import deepspeed

EXACT = 1e-6  # of fp32, whose sums are added in another order
# AdamW divides by the root of a gradient's square: of those near its eps it keeps the noise, up to a share of lr
STATED = {"adamw": 1e-4, "scaled": 1e-4, "a step left out": 1e-4, "autocast": 1e-4}
NOISE = {"adamw": 1e-5, "scaled": 1e-5, "a step left out": 1e-5, "autocast": 5e-3}  # of the gradients


@pytest.fixture
def differs():
    pytest.importorskip("deepspeed", reason="needs pip install deepspeed")
    return zero.results()


@pytest.mark.process
@pytest.mark.parametrize("engine", zero.ENGINES)
@pytest.mark.parametrize("case", [case for case in zero.CASES if not case.startswith("wrong")])
def test_two_processes_train_what_one_does_on_the_rows_of_both(differs, engine, case):
    found = differs[engine][case]
    assert found["weights"] < STATED.get(case, EXACT)
    assert max(found["gradients"], found["norms"]) < NOISE.get(case, EXACT)
    assert found["engine"] == 0.0  # it computes with what was stepped


@pytest.mark.process
@pytest.mark.wrong
@pytest.mark.parametrize("engine", zero.ENGINES)
def test_gradients_that_are_a_mean_over_processes_are_seen(differs, engine):
    assert differs[engine]["wrong factor"]["gradients"] > 0.1


@pytest.mark.process
@pytest.mark.parametrize("engine", zero.ENGINES)
@pytest.mark.parametrize("case", ["sgd", "frozen"])
def test_each_process_holds_half_of_what_is_stepped_and_of_zero3_no_weight_stays_gathered(differs, engine, case):
    found = differs[engine][case]
    assert found["held"] == pytest.approx(found["of"] / 2, abs=2 * 12)  # a weight may have an odd number
    assert (found["gathered"] == 0) == engine.startswith("zero3")


@pytest.mark.process
@pytest.mark.parametrize("engine", zero.ENGINES)
def test_what_is_loaded_into_the_parts_is_what_is_computed_with(differs, engine):
    assert differs[engine]["sgd"]["written"] == 0.0


@pytest.mark.parametrize("kind", [deepspeed.ZeRO2, deepspeed.ZeRO3])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_waits_on_the_host_is_pinned_where_a_card_reads_it(monkeypatch, kind, device):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    kept = kind(device, 2, offload=True).offload_settings()
    places = [kept[key] for key in ("offload_optimizer", "offload_param") if key in kept]
    assert places == [{"device": "cpu", "pin_memory": device == "cuda"}] * (kind.stage - 1)
    assert not any(key.startswith("offload") for key in kind(device, 2).offload_settings())


def test_deepspeed_has_the_private_parts_that_are_leaned_on():
    """By name: what a new version has taken away or changed."""
    theirs = pytest.importorskip("deepspeed", reason="needs pip install deepspeed")
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as Stage2
    from deepspeed.utils.tensor_fragment import tensor_fragment

    assert hasattr(theirs.DeepSpeedEngine, "set_gradient_accumulation_boundary")
    assert hasattr(Stage2, "update_lp_params") and hasattr(tensor_fragment, "get_lp_grad_fragment")
    assert hasattr(Stage3, "empty_partition_cache") and hasattr(Stage3, "get_param_id")
    assert "deepspeed_shm_comm" in theirs.ops.__compatible_ops__


def test_a_run_of_elements_is_a_slice_of_the_flattened_whole():
    run = deepspeed.Fragment(torch.zeros(3), 4, torch.Size((3, 4)))
    ranks = object.__new__(deepspeed.ZeRO2)
    p = torch.nn.Parameter(torch.zeros(3, 4))
    ranks._runs = {p: run}
    assert ranks.shard_of(p, torch.arange(12.0).view(3, 4)).tolist() == [4.0, 5.0, 6.0]


def test_the_loss_is_computed_in_the_precision_of_the_run():
    """Within the engine, which turns off what is around it."""
    entered = []

    class Context:
        def __enter__(self):
            entered.append(True)

        def __exit__(self, *_):
            entered.append(False)

    class Module(torch.nn.Module):
        model = torch.nn.Linear(1, 1)
        trainer = SimpleNamespace(precision_plugin=SimpleNamespace(forward_context=Context))

        def loss(self, model, micro_batch):
            return entered.copy()

    assert deepspeed.Loss(Module())(None) == [True] and entered == [True, False]


def test_an_evaluation_and_a_check_of_the_loss_are_computed_in_the_engine():
    called = []

    class Checked(Loss):
        verify = "its check"

    loss = deepspeed.InEngine(lambda *given: called.append(given), Checked())
    loss("the model", "rows")
    loss.verify("the model", "few")
    assert loss.own_logits and called == [("rows",), ("few", "its check")]
    assert not deepspeed.InEngine(None, Function(full)).own_logits
