"""Tests of several strategies and of behaviour that ranks must share, all in one process."""

import math
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.strategies import strategy as strategies
from packaging.version import Version

from lowmem.step.gradients import Gradients
from lowmem.system.errors import Refused
from lowmem.techniques.loss.cross_entropy import Function
from lowmem.techniques.strategy.contract import OneDevice
from lowmem.techniques.strategy.ddp import DataParallel
from lowmem.techniques.strategy.fsdp import FullyShard
from lowmem.techniques.strategy.in_place import InPlace
from lowmem.techniques.strategy.several import Several
from lowmem.techniques.strategy.tensor_parallel import TensorParallel
from lowmem.training import training
from lowmem.training.module import CausalLM


def spare(module):
    module.model.spare = torch.nn.Parameter(torch.ones(1))


def frozen(module):
    module.model.spare = torch.nn.Parameter(torch.ones(1), requires_grad=False)


@pytest.mark.parametrize("weight", [spare, frozen])
def test_weight_that_no_forward_pass_uses_is_refused_under_ddp_unless_frozen(fit, monkeypatch, weight):
    ready = DataParallel.before_training

    def with_one_more(self, module):
        weight(module)
        ready(self, module)

    monkeypatch.setattr(DataParallel, "before_training", with_one_more)
    if weight is frozen:
        assert fit("strategy=ddp", "max_steps=2")[0]["steps"] == 2
        return
    with pytest.raises(Refused, match=r"no forward pass uses spare, .* Type freeze=\[spare\]"):
        fit("strategy=ddp", "max_steps=2")


def test_weight_unused_in_the_last_micro_batch_is_refused_before_the_ddp_step(fit, monkeypatch):
    """If it were not refused, DDP would not reduce the gradients of this weight's bucket."""
    ready, steps = DataParallel.before_training, []

    def with_one_more(self, module):
        spare(module)
        loss = module.loss
        module.loss = Function(
            lambda model, batch: loss(model, batch) + (0.0 if module.last_micro_batch else model.spare.sum())
        )
        ready(self, module)

    monkeypatch.setattr(DataParallel, "before_training", with_one_more)
    monkeypatch.setattr(DataParallel, "clear_gradients", lambda self: steps.append(self))
    with pytest.raises(Refused, match="the last micro-batch of this optimizer step did not use every weight"):
        fit("strategy=ddp", "max_steps=2", "accumulation=fixed", "accumulation.batches=2")
    assert steps == []


@pytest.mark.parametrize("follows", [True, False], ids=["follows", "move ignored"])
def test_optimizer_parameters_follow_weights_that_ddp_moves_unless_the_move_is_ignored(fit, monkeypatch, follows):
    """A move to a card replaces the `data` of each weight. The optimizer's parameters must then use the new memory,
    even if restoring a checkpoint created them before the move. In the deliberately wrong variant, they keep the old
    memory."""
    move, step, seen = SingleDeviceStrategy.model_to_device, CausalLM.training_step, []

    def moving(self):
        for p in self.model.parameters():
            p.data = p.data.clone()
        move(self)

    def looking(self, window, index):
        seen.append(all(self.ranks.local(p).data_ptr() == p.data_ptr() for p in self.model.parameters()))
        return step(self, window, index)

    monkeypatch.setattr(SingleDeviceStrategy, "model_to_device", moving)
    monkeypatch.setattr(CausalLM, "training_step", looking)
    if not follows:
        monkeypatch.setattr(Several, "moved", lambda self: None)
    fit("strategy=ddp", "max_steps=1", "precision=bf16-sr", "optim=adamw", "export=null", "sample_tokens=0")
    assert seen == [follows]


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_sharded_checkpoint_is_evaluated_under_no_grad_but_not_in_inference_mode_before_torch_2_15(
    fit, monkeypatch, mode
):
    """On cards Lightning would evaluate in inference mode. Up to torch 2.14 this fails, because tensors of
    fully_shard have no version counter in inference mode."""
    _, run = fit("strategy=fsdp", "max_steps=1", "export=null")
    join, trainer = dist.init_process_group, training.Trainer
    monkeypatch.setattr(dist, "init_process_group", lambda _, **how: join("cpu:gloo,cuda:gloo", **how))
    if mode == "inference_mode":
        monkeypatch.setattr(training, "Trainer", lambda **how: trainer(**(how | {"inference_mode": True})))
    fails = mode == "inference_mode" and Version(torch.__version__) < Version("2.15")
    with pytest.raises(RuntimeError, match="Inference tensors") if fails else nullcontext():
        assert math.isfinite(fit("strategy=fsdp", f"evaluate={run}")[0]["val_loss"])


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "lightning"])
@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_weights_and_optimizer_state_stay_on_the_device_after_a_run_unless_lightning_ends_the_run(
    fit, monkeypatch, strategy, ours
):
    """The deliberately wrong variant is Lightning's own teardown, which copies weights and state to the host."""
    moved, move = [], strategies._optimizers_to_device
    monkeypatch.setattr(CausalLM, "cpu", lambda module: moved.append("weights"))
    monkeypatch.setattr(strategies, "_optimizers_to_device", lambda *which: moved.append("state") or move(*which))
    monkeypatch.setattr(Callback, "on_train_end", lambda *_: moved.clear())  # ignore moves before the end of training
    if not ours:
        monkeypatch.delattr(InPlace, "teardown")
    fit(f"strategy={strategy}", "max_steps=1")
    assert moved == ([] if ours else ["state", "weights"])


@pytest.mark.parametrize("strategy", [FullyShard, TensorParallel])
def test_process_group_of_cpu_ranks_on_a_machine_with_a_card_has_the_typed_timeout(strategy, monkeypatch, group_of_one):
    """torch creates a separate group for the CPU ranks, with a separate timeout."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    *_, group = strategy(timeout=7).mesh.get_all_groups()
    assert group is not group_of_one
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)


def test_rank_without_loggers_runs_callbacks_that_need_a_logger(fit, monkeypatch):
    """LearningRateMonitor raises an error on every rank whose trainer has no logger."""
    loggers = training._loggers
    monkeypatch.setattr(training, "_loggers", lambda cfg, asked, _: loggers(cfg, asked, SimpleNamespace(rank=1)))
    summary, run = fit(
        "+callbacks.rate._target_=lightning.pytorch.callbacks.LearningRateMonitor",
        *("+logger.rows._target_=lightning.pytorch.loggers.CSVLogger", "+logger.rows.save_dir=${output_dir}"),
        *("sample_tokens=2", "val_every=2", "max_steps=2", "+trainer.log_every_n_steps=1"),
    )
    assert summary["steps"] == 2 and not [*run.rglob("version_0")]


def test_rank_reports_the_validation_loss_that_rank_0_broadcasts(fit, monkeypatch):
    def broadcast(self, said):
        return [0.25] if isinstance(said, list) and said and isinstance(said[0], float) else said

    monkeypatch.setattr(OneDevice, "broadcast", broadcast)
    assert fit("max_steps=1", "sample_tokens=0")[0]["val_loss"] == 0.25


@pytest.mark.parametrize(("data_size", "asked"), [(1, True), (2, False)])
def test_non_finite_loss_of_another_rank_skips_the_step_only_if_ranks_read_the_same_rows(data_size, asked):
    """If each rank reads different rows, the loss is already summed over ranks, so ranks do not exchange whether they
    can step."""
    met = []
    module = SimpleNamespace(
        ranks=SimpleNamespace(data_size=data_size, size=2, any=lambda _: True),  # another rank met a fault
        trainer=SimpleNamespace(precision_plugin=SimpleNamespace(lowered_scale=True)),
        faults=SimpleNamespace(in_a_row=0, meet=lambda *_: met.append("fault")),
    )
    fine = Gradients(torch.ones(()), finite=True, loss_is_finite=True)
    assert CausalLM._usable(module, fine, torch.ones(()), None) == (not asked)
    assert met == ["fault"] * asked


def test_ranks_and_windows_draw_different_random_numbers():
    def drawn(rank, window):
        torch.manual_seed(0)
        ranks = Several.__new__(Several)  # without a process group
        ranks.data_rank = rank
        ranks.before_training(SimpleNamespace(position=SimpleNamespace(window=window)))
        return float(torch.rand(()))

    assert len({drawn(rank, window) for rank in range(4) for window in range(4)}) == 16
    assert drawn(1, 2) == drawn(1, 2)


def test_finished_run_frees_card_memory_although_its_model_is_referenced(config, tmp_path):
    with training.training_session(config("max_steps=1", "batch_size=4").resolved(), tmp_path, keeps=False) as run:
        (optimizer,) = run.trainer.optimizers
        weights = [*run.module.parameters()]
        assert optimizer.state and all(p.numel() for p in weights)
    run.free_card()
    assert not optimizer.state and not any(p.untyped_storage().nbytes() for p in weights)
