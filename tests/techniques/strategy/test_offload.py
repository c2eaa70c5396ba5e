"""Tests fsdp_offload on a device that is not the CPU.

A run on a CPU cannot show that shards stay in host memory while another device computes. Here the meta device
computes, and the tests look at which tensors are moved to it.
"""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from test_loading import LLAMA
from torch import nn

from as_rank import as_rank
from lowmem.techniques.strategy.fsdp import FullyShard
from lowmem.techniques.strategy.several import AmongSeveral, Several
from lowmem.training.module import CausalLM

DEVICE = torch.device("meta")


@pytest.fixture
def seen(fit, monkeypatch):
    """Returns a function that runs a step with zero gradients on `DEVICE`, and returns a dict that maps each kind of
    tensor to the types of the devices that hold such tensors. "told" is the share of the weights that rank 0
    reports."""
    found = {}

    def step(module, window, _):
        found["parameters"] = {p.device.type for p in module.parameters()}
        found["buffers"] = {buffer.device.type for buffer in module.buffers()}
        found["batch"] = {t.device.type for one in window.micro_batches for t in one.tensors.values()}
        found["sums"] = module.device.type
        for p in module.local_parameters.parameters():
            p.grad = torch.zeros_like(p)
        module.optimizers().step()
        module.lr_schedulers().step()
        states = module.optimizers().optimizer.state.values()
        found["state"] = {value.device.type for state in states for value in state.values() if value.dim()}
        return {
            "loss": torch.zeros(()),
            "auxiliary_loss": None,
            "tokens": 1,
            "learned_tokens": 1,
            "weight": 1,
            "stepped": True,
        }

    def run():
        monkeypatch.setattr(Several, "place", DEVICE)
        monkeypatch.setattr(CPUAccelerator, "setup_device", lambda *_: None)  # it requires a CPU
        monkeypatch.setattr(CausalLM, "training_step", step)
        how = ("strategy=fsdp_offload", "max_steps=1", "clip=null", "+trainer.limit_val_batches=0", "optim=adamw")
        summary, _ = fit(*LLAMA, *how, "export=null", "loss=full")
        found["told"] = summary["ranks"][0]["weights"] / summary["weights_bytes"]
        return found

    return run


RIGHT = {"parameters": {"cpu"}, "state": {"cpu"}, "buffers": {"meta"}, "batch": {"meta"}, "sums": "meta", "told": 1.0}


def test_fsdp_offload_keeps_shards_on_the_host_and_buffers_on_the_device(seen):
    assert seen() == RIGHT


def test_model_to_device_of_lightning_moves_offloaded_shards_and_the_optimizer_step_fails(seen, monkeypatch):
    monkeypatch.setattr(AmongSeveral, "model_to_device", SingleDeviceStrategy.model_to_device)
    with pytest.raises(RuntimeError, match="float32 and meta"):  # the optimizer's error for shards on the device
        seen()


def test_gradient_norm_of_offloaded_shards_is_reduced_on_the_device(monkeypatch):
    """Cards can then reduce over their fast link. Only the norm of the shards is moved to the device, not the
    gradients."""
    monkeypatch.setattr(Several, "place", DEVICE)
    added = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: added.append(tensor))
    with as_rank(0, 2):
        ranks, p = FullyShard(devices=2, offload=True), nn.Parameter(torch.ones(4))
        p.grad = torch.full((4,), 3.0)
        norm = ranks.norm([ranks.local(p)])
    assert [one.device for one in (norm, *added)] == [DEVICE, DEVICE] and added[0].dim() == 0
    assert p.grad.device.type == "cpu"
