"""Lists the combinations of settings that cannot work, each with its error message. `check.py` refuses these
combinations at the start of a run.

The list is complete for pairs of techniques: every other pair is tested, or is refused by a technique because of the
model. `check_values` refuses wrong combinations of other keys. For each refusal, a test in
`tests/config/test_refusals.py` shows what would go wrong without the refusal.
"""

import shutil
from collections.abc import Callable, Iterator
from typing import NamedTuple

from lowmem.config.schema import Node
from lowmem.config.settle import Run


class Refusal(NamedTuple):
    """A refused combination of settings.

    Args:
        applies: returns True for a run that is to be refused.
        says: the message: what was asked for, why it cannot work, and what to type instead. `refused` fills in its
            {placeholders}.
    """

    applies: Callable[[Run], bool]
    says: str


REFUSALS = (
    Refusal(
        lambda run: run.in_backward and run.clip is not None,
        "optim.in_backward=true: clip={clip} needs the norm over all gradients, but each gradient is freed right after "
        "its update. Type clip=null; clip_value= still works.",
    ),
    Refusal(
        lambda run: run.in_backward and run.scales_loss,
        "optim.in_backward=true: this precision uses loss scaling, and whether a step must be skipped is known only "
        "when all gradients exist. Type precision=bf16, bf16-true, bf16-sr or 32.",
    ),
    Refusal(
        lambda run: run.in_backward and run.accumulates,
        "optim.in_backward=true: every micro-batch would run an optimizer step, so gradients cannot be accumulated. "
        "Type accumulation=none, or optim.in_backward=false.",
    ),
    Refusal(
        lambda run: run.on_nonfinite == "skip" and (run.in_backward or run.early),
        "on_nonfinite=skip: some weights are updated before all gradients are computed, and these updates cannot be "
        "undone when a later gradient is inf or nan. Type on_nonfinite=stop, or clip=1.0 optim.in_backward=false to "
        "update only when all gradients exist.",
    ),
    Refusal(
        lambda run: run.masters and run.in_backward,
        "optim.in_backward=true: with this precision the optimizer runs on the host, which already updates each weight "
        "as soon as its gradient arrives if clip=null and the precision does not scale the loss. Type "
        "optim.in_backward=false.",
    ),
    Refusal(
        lambda run: run.masters and run.technique("optim").pages,
        "optim: a paged optimizer moves its state to host memory when the card is full, but with this precision the "
        "state is always in host memory. Type optim=adamw8bit.",
    ),
    Refusal(
        lambda run: run.trainer.arguments.get("strategy", "auto") != "auto" or not _on_one_device(run.trainer),
        "trainer.strategy, trainer.devices: Lightning would start additional processes, and each would write a "
        "separate run folder. Leave both out, and type strategy=ddp devices=2, for example.",
    ),
    Refusal(
        lambda run: not run.several and run.devices != 1,
        "devices={devices}: strategy=auto uses one device. Type strategy=ddp if the model fits on each device, or "
        "strategy=fsdp to shard it.",
    ),
    Refusal(
        lambda run: run.several and run.streams,
        "weights=streamed: the host stores one full copy of the model, for one device. Type strategy=auto devices=1, "
        "or for several devices weights=resident precision=bf16-sr optim=adamw strategy=fsdp_offload, where the host "
        "stores one shard per device.",
    ),
    Refusal(
        lambda run: run.several and run.masters and not run.streams,
        "strategy: with this precision the host updates one full copy of the weights, for one device. Type "
        "precision=bf16 or bf16-sr for several devices, or strategy=auto devices=1.",
    ),
    Refusal(
        lambda run: run.several and run.in_backward,
        "optim.in_backward=true: a parameter would be updated before the gradients of the other devices are added. "
        "Type optim.in_backward=false.",
    ),
    Refusal(
        lambda run: run.several and run.technique("optim").pages,
        "optim: a paged optimizer moves its state to host memory when the card is full, which was measured on one "
        "device only. Type optim=adamw strategy=fsdp to shard the state, or strategy=fsdp_offload to also keep it in "
        "host memory.",
    ),
    Refusal(
        lambda run: (
            run.strategy_class.shards_matrices
            and (run.technique("optim").steps_by == "matrix" or run.technique("optim").state_bits < 32)
        ),
        "strategy: it shards each matrix, but this optim takes means over rows of the full matrix or quantizes its "
        "state in blocks, so its update of a shard would differ. Type optim=adamw, or strategy=ddp.",
    ),
    Refusal(
        lambda run: (
            run.saves_parts and run.technique("optim").generates_code and run.technique("optim").state_bits < 32
        ),
        "strategy: each rank saves its shard as plain tensors, but the state of this optim is a tensor subclass, which "
        "cannot be saved that way. Type optim=adamw8bit or adam8bit with strategy=pipeline, or optim=adamw.",
    ),
    Refusal(
        lambda run: run.several and run.batch_size == "auto",
        "batch_size=auto: the search works on one device only. Type a number for batch_size; plan.py predicts the "
        "memory of each rank.",
    ),
    Refusal(
        lambda run: run.several and run.plan not in ("check", "off"),
        "plan={plan}: with several devices, a run cannot choose a recipe when it starts. Type plan=check, or run "
        "plan.py with the same overrides, which prints a command to copy.",
    ),
    Refusal(
        lambda run: run.strategy_class.adds_in_blocks and run.compiles_blocks,
        "strategy: devices exchange activations inside each block, and torch.compile cannot tell the size of these "
        "activations. Type compile=none.",
    ),
    Refusal(
        lambda run: run.strategy_class.overlaps_micro_batches and run.loss_class.of_pairs,
        "strategy=pipeline: a preference loss reports statistics of the answers on every rank, but only the last stage "
        "computes the loss. Type strategy=fsdp, ddp or tensor_parallel.",
    ),
    Refusal(
        lambda run: run.strategy_class.overlaps_micro_batches and _merges(run) and run.adapter_class.in_4_bits,
        "strategy=pipeline: the adapter would be merged at the end (merge=true, or a model with random initial "
        "weights), but each stage has only the 4-bit weights of its blocks. Type merge=false with a pretrained model, "
        "adapter=lora, or strategy=fsdp.",
    ),
    Refusal(
        lambda run: run.streams and not run.masters and not run.several,
        "weights=streamed: this precision runs the optimizer on the device, where a streamed weight exists only while "
        "its block computes. Type precision=bf16-master gradient_checkpointing=every_layer (precision=16-master or "
        "bf16-sr and other kinds of gradient_checkpointing that recompute blocks also work), or weights=resident.",
    ),
    Refusal(
        lambda run: run.streams and run.masters and not run.checkpointing.saves and not run.several,
        "weights=streamed: without gradient checkpointing, backward reads every block's weights again, after the "
        "weights of other blocks have overwritten them on the device. Type gradient_checkpointing=every_layer.",
    ),
    Refusal(
        lambda run: run.by_layer and run.checkpointing.joins_blocks,
        "weights.order=by_layer: this gradient_checkpointing recomputes several blocks at once, so the weights of all "
        "of them would have to be copied to the device for each micro-batch. Type gradient_checkpointing=every_layer, "
        "or offload for less memory, or weights.order=by_micro_batch.",
    ),
    Refusal(
        lambda run: run.batch_size == "auto" and "size" not in run.accumulation.arguments and not run.several,
        "batch_size=auto: the search keeps the effective batch size, but this accumulation does not set one. Type "
        "accumulation=effective_batch accumulation.size=64.",
    ),
    Refusal(
        lambda run: run.batch_size == "auto" and run.limit is None and run.runs_on == "cpu" and not run.several,
        "batch_size=auto: the search tries sizes until the card runs out of memory, and this run uses a CPU. Type "
        "memory.limit=12GiB to simulate a card of that size, or a number for batch_size.",
    ),
    Refusal(
        lambda run: run.compiles_blocks and run.checkpointing.sees_operators,
        "compile=blocks: this gradient_checkpointing chooses for each operator whether to store its result, and "
        "compiled blocks do not expose their operators. Type gradient_checkpointing=none "
        "compile.activation_memory_budget=0.5, where torch.compile makes that choice, or "
        "gradient_checkpointing=every_layer.",
    ),
    Refusal(
        lambda run: run.compiles_blocks and run.adapter_class.breaks_graphs,
        "compile=blocks: torch.compile cannot trace the layers of this adapter. Type compile=none, or adapter=lora.",
    ),
    Refusal(
        lambda run: run.limit is not None and run.compiles_blocks and run.runs_on == "cpu",
        "memory.limit={limit}: on a CPU, memory is counted after each operator, and allocations inside compiled blocks "
        "are invisible to it. Type compile=none, or memory.limit=null.",
    ),
    Refusal(
        lambda run: run.tile.tokens is not None and run.compiles_blocks,
        "tile.tokens={tokens}: torch.compile cannot trace modules that are computed in slices. Type compile=none, or "
        "tile.tokens=null.",
    ),
    Refusal(
        lambda run: run.needs_compiler and not any(map(shutil.which, ("c++", "g++", "clang++"))),
        "optim, compile: one of these choices generates code for the CPU, but no C++ compiler is on the PATH. Install "
        "one, or type optim=adamw8bit compile=none.",
    ),
)


def refused(run: Run) -> Iterator[str]:
    values = {
        "clip": run.clip,
        "limit": run.memory.limit,
        "tokens": run.tile.tokens,
        "devices": run.devices,
        "plan": run.plan,
    }
    return (refusal.says.format(**values) for refusal in REFUSALS if refusal.applies(run))


def _merges(run: Run) -> bool:
    return run.adapter_class.freezes_base and not run.exports_adapter


def _on_one_device(trainer: Node) -> bool:
    arguments = trainer.arguments
    return arguments.get("devices", 1) in (1, "1", "auto", [0]) and arguments.get("num_nodes", 1) == 1
