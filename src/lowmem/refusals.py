"""Combinations that cannot work, each with the sentence that refuses it and the proof that it had to be refused.

The list is the whole of it: whatever is not here, and not refused by a technique about the model itself, is a
combination that is tested. `tests/test_refusals.py` runs every proof with the list emptied.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hydra.utils import get_object
from omegaconf import DictConfig

from lowmem.instantiate import instantiate
from lowmem.techniques import GROUPS, declared


@dataclass(frozen=True)
class Refusal:
    """Args: applies: to this config; says: what was asked, why not, what to type; proof: what happens if it is run."""

    applies: Callable[[DictConfig], bool]
    says: str
    proof: str


def in_backward(cfg: DictConfig) -> bool:
    return cfg.optim.in_backward


def scales_loss(cfg: DictConfig) -> bool:
    return getattr(get_object(cfg.trainer.plugins.precision._target_), "scales_loss", False)


def masters(cfg: DictConfig) -> bool:
    """Whether the optimizer steps on the host."""
    return get_object(cfg.trainer.plugins.precision._target_).optimizer_side == "host"


def accumulates(cfg: DictConfig) -> bool:
    if cfg.batch_size == "auto":  # the search ends at a batch_size that is not known yet
        return True
    return instantiate(cfg.accumulation).largest > 1


def needs_compiler(cfg: DictConfig) -> bool:
    return cfg.device != "cuda" and any(declared(cfg, group).generates_code for group in GROUPS)


REFUSALS = (
    Refusal(
        lambda cfg: in_backward(cfg) and cfg.clip is not None,
        "optim.in_backward=true: clip={clip} needs the norm of all gradients, and each is freed once it has stepped "
        "its parameter. Type clip=null; clip_value= works.",
        "clip=1e-6 changes nothing: no gradient is left to be clipped",
    ),
    Refusal(
        lambda cfg: in_backward(cfg) and scales_loss(cfg),
        "optim.in_backward=true: this precision scales the loss, and whether a step must be skipped is known only when "
        "every gradient exists. Type precision=bf16, bf16-true, bf16-sr or 32.",
        "one infinite gradient makes weights infinite, where the scaler would have skipped the step",
    ),
    Refusal(
        lambda cfg: in_backward(cfg) and accumulates(cfg),
        "optim.in_backward=true: every micro-batch would be an optimizer step, whatever accumulation says. Type "
        "accumulation=none, or optim.in_backward=false.",
        "two micro-batches of a window take two steps of the optimizer",
    ),
    Refusal(
        lambda cfg: masters(cfg) and in_backward(cfg),
        "optim.in_backward=true: with this precision the weights on the device have no optimizer; their masters step "
        "on the host, with clip=null and bf16-master as soon as each gradient is there. Type optim.in_backward=false.",
        "masters take no part in backward: the setting changes nothing",
    ),
    Refusal(
        lambda cfg: masters(cfg) and declared(cfg, "optim").pages,
        "This optim moves its state to host memory when the card is full, and with this precision the state is in host "
        "memory already. Type optim=adamw8bit.",
        "bitsandbytes does not page the state of parameters that are in host memory",
    ),
    Refusal(
        lambda cfg: masters(cfg) and not (cfg.trainer.get("strategy", "auto") == "auto" and _one(cfg.trainer)),
        "trainer.strategy, trainer.devices: this precision keeps the masters of one whole model beside one device. "
        "Type precision=bf16 for several, or leave both out.",
        "each process would step masters of its own on its own gradients",
    ),
    Refusal(
        lambda cfg: cfg.model.get("stable_embedding", False) and cfg.model.pretrained,
        "model.stable_embedding=true: a published model was not trained with a norm after its embedding, which would "
        "change what all its weights mean. Type model.pretrained=false for a random start, or optim.embedding_bits=32.",
        "weights that were trained without the norm compute other logits with it",
    ),
    Refusal(
        lambda cfg: cfg.batch_size == "auto" and "size" not in cfg.accumulation,
        "batch_size=auto: the micro-batch is chosen so that the effective batch stays, and accumulation does not say "
        "one. Type accumulation=effective_batch accumulation.size=64.",
        "the update would depend on the memory that happens to be free",
    ),
    Refusal(
        lambda cfg: cfg.batch_size == "auto" and cfg.memory.limit is None and _on_cpu(cfg),
        "batch_size=auto: on a CPU there is no card whose memory ends a try. Type memory.limit=12GiB for the card that "
        "you have in mind, or a number for batch_size.",
        "every try fits, until the kernel ends the process",
    ),
    Refusal(
        lambda cfg: (
            cfg.memory.limit is not None and declared(cfg, "gradient_checkpointing").compiles_blocks and _on_cpu(cfg)
        ),
        "memory.limit={limit}: on a CPU tensors are counted operator by operator, and the compiled blocks of this "
        "gradient_checkpointing allocate where they cannot be seen. Type gradient_checkpointing=every_layer, or "
        "memory.limit=null.",
        "a limit that the uncompiled run exceeds ends nothing",
    ),
    Refusal(
        lambda cfg: needs_compiler(cfg) and not any(map(shutil.which, ("c++", "g++", "clang++"))),
        "This optim or gradient_checkpointing generates code, and no C++ compiler is on the PATH. Install one, or type "
        "optim=adamw8bit gradient_checkpointing=every_layer.",
        "torch: InvalidCxxCompiler: No working C++ compiler found",
    ),
)


def refused(cfg: DictConfig) -> Iterator[str]:
    return (refusal.says.format(clip=cfg.clip, limit=cfg.memory.limit) for refusal in REFUSALS if refusal.applies(cfg))


def _one(trainer: DictConfig) -> bool:
    return trainer.get("devices", 1) in (1, "1", "auto", [0]) and trainer.get("num_nodes", 1) == 1


def _on_cpu(cfg: DictConfig) -> bool:
    import torch

    return cfg.device == "cpu" or (cfg.device == "auto" and not torch.cuda.is_available())
