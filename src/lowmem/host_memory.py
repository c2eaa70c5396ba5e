"""Does the host have the memory for masters, optimizer state and gradients? Asked before the weights are loaded."""

import torch
from omegaconf import DictConfig
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from lowmem.errors import Refused
from lowmem.memory.ledger import Ledger, optimizer_state
from lowmem.memory.link import SLOT_BYTES, SLOTS
from lowmem.memory.process import available_bytes
from lowmem.optim.build import MakeOptimizer
from lowmem.precision.master_callback import steps_early
from lowmem.refusals import accumulates, masters, scales_loss
from lowmem.units import GIB

PROBE = 256  # a matrix of this side has whole blocks of every optimizer that holds its state in blocks


def check_host(cfg: DictConfig, config: PretrainedConfig, make: MakeOptimizer) -> None:
    """Args: config: the architecture; make: the optimizer's.

    Raises:
        Refused: with the numbers, for a precision whose optimizer steps on the host.
    """
    if not masters(cfg):
        return
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    needs, free = host_bytes(cfg, parameters, state_bytes_per_parameter(make)), available_bytes()
    if sum(needs.values()) > free:
        each = ", ".join(f"{what} {size / GIB:.1f}" for what, size in needs.items() if size)
        raise Refused(
            f"The host would have to hold {sum(needs.values()) / GIB:.1f} GiB ({each}) and has {free / GIB:.1f} GiB "
            "free. Type optim=adamw8bit or adafactor for less state, precision=bf16-master clip=null for no gradients "
            "without accumulation, or take a smaller model."
        )


def host_bytes(cfg: DictConfig, parameters: int, state: float) -> dict[str, float]:
    """Bytes by what they hold; state: bytes per parameter."""
    early = steps_early(cfg.master.get("early_step", False), cfg.clip, scales_loss(cfg))
    gradient = 4 if accumulates(cfg) else 0 if early else 2
    on_cpu = cfg.device == "cpu"  # the device's weights are in host memory too
    staging = 0 if on_cpu else 2 * SLOTS * SLOT_BYTES  # in each direction
    each = {"masters": 4, "optimizer state": state, "gradients": gradient, "16-bit weights": 2 if on_cpu else 0}
    return {what: parameters * size for what, size in each.items()} | {"staging": staging}


def state_bytes_per_parameter(make: MakeOptimizer) -> float:
    """Of a large matrix, counted on the state that one step leaves."""
    probe = nn.Linear(PROBE, PROBE, bias=False)
    optimizer = make(probe)
    probe.weight.grad = torch.ones_like(probe.weight)
    optimizer.step()
    ledger = Ledger()
    ledger.own("optimizer", lambda: optimizer_state(optimizer))
    return ledger.bytes()["optimizer"] / probe.weight.numel()
