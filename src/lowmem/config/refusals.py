"""Lists combinations that cannot work, each with the sentence that refuses it and the name of the test that proves it.

The list is complete: a combination that is not in it, and that no technique refuses for the sake of the model, is
tested. A proof runs the refused combination: it is test_proof_<name> of `tests/config/test_refusals.py`.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from lowmem.config.schema import Node
from lowmem.config.settle import Run


@dataclass(frozen=True)
class Refusal:
    """Describes a refused combination.

    Args: applies: returns whether a run is refused; says: the sentence: what was asked, why it cannot work, what to
    type instead; proof: the name of its test.
    """

    applies: Callable[[Run], bool]
    says: str
    proof: str


REFUSALS = (
    Refusal(
        lambda run: run.in_backward and run.clip is not None,
        "optim.in_backward=true: clip={clip} needs the norm of all gradients, and each is freed once it has stepped "
        "its parameter. Type clip=null; clip_value= works.",
        "clipping_in_backward_clips_nothing",
    ),
    Refusal(
        lambda run: run.in_backward and run.scales_loss,
        "optim.in_backward=true: this precision scales the loss, and whether a step must be skipped is known only when "
        "every gradient exists. Type precision=bf16, bf16-true, bf16-sr or 32.",
        "loss_scaling_in_backward_lets_an_overflow_through",
    ),
    Refusal(
        lambda run: run.in_backward and run.accumulates,
        "optim.in_backward=true: every micro-batch would be an optimizer step, whatever accumulation says. Type "
        "accumulation=none, or optim.in_backward=false.",
        "accumulation_in_backward_steps_at_every_micro_batch",
    ),
    Refusal(
        lambda run: run.on_nonfinite == "skip" and (run.in_backward or run.early),
        "on_nonfinite=skip: weights step while other gradients are still being computed, and one that is not finite "
        "comes too late to skip the earlier steps. Type on_nonfinite=stop, or clip=1.0 optim.in_backward=false, which "
        "wait for all.",
        "an_early_step_cannot_be_taken_back",
    ),
    Refusal(
        lambda run: run.masters and run.in_backward,
        "optim.in_backward=true: with this precision the weights on the device have no optimizer; the host steps them, "
        "with clip=null and no loss scale as soon as each gradient is there. Type optim.in_backward=false.",
        "masters_take_no_part_in_backward",
    ),
    Refusal(
        lambda run: run.masters and run.any("pages"),
        "This optim moves its state to host memory when the card is full, and with this precision the state is in host "
        "memory already. Type optim=adamw8bit.",
        "the_state_of_parameters_in_host_memory_is_not_paged",
    ),
    Refusal(
        lambda run: run.trainer.arguments.get("strategy", "auto") != "auto" or not _on_one_device(run.trainer),
        "trainer.strategy, trainer.devices: Lightning would start processes that write folders of their own. Type "
        "strategy=ddp devices=2, say, and leave both out.",
        "lightning_starts_processes_with_folders_of_their_own",
    ),
    Refusal(
        lambda run: not run.several and run.devices != 1,
        "devices={devices}: strategy=auto uses one device. Type strategy=ddp, where the model fits on each, or "
        "strategy=fsdp, which divides it.",
        "one_device_leaves_the_others_idle",
    ),
    Refusal(
        lambda run: run.several and run.streams,
        "weights=streamed: the host holds one whole model, for one device. Type weights=resident precision=bf16-sr "
        "optim=adamw strategy=fsdp_offload for several, where the host holds one shard for each, or strategy=auto "
        "devices=1.",
        "each_process_would_hold_all_that_streams",
    ),
    Refusal(
        lambda run: run.several and run.masters and not run.streams,
        "strategy: with this precision the host steps one full model, for one device. Type precision=bf16 for "
        "several, or bf16-sr where the engine is torch's, or strategy=auto devices=1.",
        "each_process_would_step_masters_of_its_own",
    ),
    Refusal(
        lambda run: run.several and run.in_backward,
        "optim.in_backward=true: a gradient would step its parameter before those of the other devices are added. "
        "Type optim.in_backward=false.",
        "a_step_in_backward_does_not_wait_for_other_ranks",
    ),
    Refusal(
        lambda run: run.several and run.any("pages"),
        "This optim moves its state to host memory when the card is full, which is measured on one device only. Type "
        "optim=adamw, whose state strategy=fsdp divides, or fsdp_offload, which holds it there.",
        "paged_state_is_not_divided",
    ),
    Refusal(
        lambda run: run.any("divides") and (run.any("needs_whole") or run.technique("optim").state_bits < 32),
        "strategy: it shards each matrix, and this optim takes means over rows of the full matrix, or holds its "
        "state in blocks: on a shard its update would be another one. Type optim=adamw, or strategy=ddp.",
        "an_optimizer_of_whole_matrices_steps_parts_otherwise",
    ),
    Refusal(
        lambda run: (
            run.saves_parts and run.technique("optim").generates_code and run.technique("optim").state_bits < 32
        ),
        "strategy: each rank saves its shard as plain numbers, and the state of this optim is tensors of a class of "
        "its own, which cannot be saved so. Type optim=adamw8bit or adam8bit with strategy=pipeline, or optim=adamw.",
        "state_of_a_kind_of_its_own_is_not_saved_by_ranks",
    ),
    Refusal(
        lambda run: run.several and run.batch_size == "auto",
        "batch_size=auto: the search is for one device. Type a number; plan.py predicts it for each rank.",
        "a_batch_size_that_each_rank_finds_for_itself",
    ),
    Refusal(
        lambda run: run.several and run.plan not in ("check", "off"),
        "plan={plan}: a recipe is chosen before ranks are started. Type plan=check, or the same words behind plan.py, "
        "which answers with a command.",
        "a_recipe_that_each_rank_chooses_for_itself",
    ),
    Refusal(
        lambda run: run.any("adds_in_blocks") and run.any("compiles_blocks"),
        "strategy: inside of each block devices add up their results, and torch.compile cannot tell how many bytes "
        "those have. Type compile=none gradient_checkpointing=selective, or every_layer.",
        "compiled_blocks_do_not_add_over_devices",
    ),
    Refusal(
        lambda run: run.any("overlaps_micro_batches") and run.any("of_pairs"),
        "strategy=pipeline: the last stage alone sees the answers, which are compared and shown on all. Type "
        "strategy=fsdp, ddp or tensor_parallel.",
        "the_first_stage_sees_no_answer",
    ),
    Refusal(
        lambda run: run.any("overlaps_micro_batches") and _merges(run) and "weights" in run.technique("adapter").saves,
        "strategy=pipeline: the adapter would be merged at the end (merge=true, or a model that starts at random), and "
        "each stage has the 4-bit weights of its own blocks alone. Type merge=false with a published model, "
        "adapter=lora, or strategy=fsdp.",
        "a_stage_has_4_bits_of_its_own_blocks_alone",
    ),
    Refusal(
        lambda run: run.streams and not run.masters and not run.several,
        "weights=streamed: this precision steps on the device, where weights are only while their block runs. Type "
        "precision=bf16-master gradient_checkpointing=every_layer, or weights=resident. 16-master and bf16-sr step on "
        "the host, too, and any gradient_checkpointing works that computes blocks again.",
        "weights_that_stream_are_not_there_to_be_stepped",
    ),
    Refusal(
        lambda run: run.streams and run.masters and run.any("keeps_all") and not run.several,
        "weights=streamed: without gradient checkpointing autograd reads every block's weights again in backward, "
        "when those of other blocks lie in their place. Type gradient_checkpointing=every_layer.",
        "autograd_reads_weights_that_have_left",
    ),
    Refusal(
        lambda run: run.streams and run.technique("gradient_checkpointing").compiles_blocks,
        "weights=streamed: this gradient_checkpointing lets torch.compile choose what a block keeps for backward, and "
        "its memory was never measured with streamed weights. Type gradient_checkpointing=every_layer compile=blocks.",
        "compiled_blocks_that_choose_what_they_keep_are_not_measured",
    ),
    Refusal(
        lambda run: run.by_layer and run.any("joins_blocks"),
        "weights.order=by_layer: this gradient_checkpointing computes several blocks again at once, and all of them "
        "would have to travel for each micro-batch. Type gradient_checkpointing=every_layer, or offload for less "
        "memory, or weights.order=by_micro_batch.",
        "a_segment_of_several_blocks_is_open_for_one_micro_batch_alone",
    ),
    Refusal(
        lambda run: run.batch_size == "auto" and "size" not in run.accumulation.arguments and not run.several,
        "batch_size=auto: the search keeps the effective batch as it is, and this accumulation has none. "
        "Type accumulation=effective_batch accumulation.size=64.",
        "auto_without_an_effective_batch_would_decide_the_update",
    ),
    Refusal(
        lambda run: run.batch_size == "auto" and run.limit is None and run.runs_on == "cpu" and not run.several,
        "batch_size=auto: the search tries sizes until memory runs out, and a CPU has no card whose memory could. Type "
        "memory.limit=12GiB for the card that you have in mind, or a number for batch_size.",
        "auto_on_a_cpu_without_a_limit_has_no_try_that_fails",
    ),
    Refusal(
        lambda run: run.technique("compile").compiles_blocks and run.any("sees_operators"),
        "compile=blocks: this gradient_checkpointing decides for each operator of a block whether its result is "
        "stored, and compiled blocks have no operators. Type gradient_checkpointing=budget compile=none, which decides "
        "it for compiled blocks, or gradient_checkpointing=every_layer.",
        "compiled_blocks_have_no_operators_to_choose_from",
    ),
    Refusal(
        lambda run: run.technique("compile").compiles_blocks and run.any("breaks_graphs"),
        "compile=blocks: torch.compile cannot follow the layers of this adapter. Type compile=none, or adapter=lora.",
        "layers_that_torch_compile_cannot_follow",
    ),
    Refusal(
        lambda run: run.limit is not None and run.any("compiles_blocks") and run.runs_on == "cpu",
        "memory.limit={limit}: on a CPU tensors are counted operator by operator, and compiled blocks "
        "allocate where they cannot be seen. Type compile=none gradient_checkpointing=every_layer, or "
        "memory.limit=null.",
        "a_limit_does_not_see_into_compiled_blocks",
    ),
    Refusal(
        lambda run: run.tile.tokens is not None and run.any("compiles_blocks"),
        "tile.tokens={tokens}: torch.compile decides what these blocks store, and does not see into slices. Type "
        "compile=none gradient_checkpointing=every_layer, or tile.tokens=null.",
        "compiled_blocks_do_not_see_into_slices",
    ),
    Refusal(
        lambda run: run.needs_compiler and not any(map(shutil.which, ("c++", "g++", "clang++"))),
        "This optim, compile or gradient_checkpointing generates code, and no C++ compiler is on the PATH. Install "
        "one, or type optim=adamw8bit compile=none gradient_checkpointing=every_layer.",
        "without_a_compiler_torch_fails_in_the_first_step",
    ),
    Refusal(
        lambda run: (
            run.technique("strategy").package is not None and find_spec(run.technique("strategy").package) is None
        ),
        "strategy: its engine is not installed. Type pip install {package}, or strategy=fsdp, which is torch's own.",
        "without_its_engine_a_strategy_does_not_start",
    ),
    Refusal(
        lambda run: run.any("steps_wide") and run.weights_dtype != "float32",
        "strategy: its engine steps weights in fp32, and would hold them beside those of 16 bits: it would not round "
        "as this precision does, and save no memory. Type precision=bf16, 16 or 32, or strategy=fsdp.",
        "an_engine_that_steps_fp32_does_not_round_to_16_bits",
    ),
    Refusal(
        lambda run: run.any("gathers_in_hooks") and run.any("compiles_blocks"),
        "strategy: its engine gathers a module's weights when the module is called, and there torch.compile gives up. "
        "Type compile=none gradient_checkpointing=every_layer, or strategy=fsdp.",
        "compiled_blocks_do_not_gather_their_weights",
    ),
    Refusal(
        lambda run: run.any("gathers_in_hooks") and run.tile.tokens is not None,
        "tile.tokens={tokens}: this strategy's engine gathers a module's weights when the module is called, and slices "
        "use the weights without calling it. Type tile.tokens=null, or strategy=fsdp.",
        "slices_do_not_gather_their_weights",
    ),
)


def refused(run: Run) -> Iterator[str]:
    values = {
        "clip": run.clip,
        "limit": run.memory.limit,
        "tokens": run.tile.tokens,
        "devices": run.devices,
        "plan": run.plan,
        "package": run.technique("strategy").package,
    }
    return (refusal.says.format(**values) for refusal in REFUSALS if refusal.applies(run))


def _merges(run: Run) -> bool:
    return run.any("freezes_base") and (run.merge or not run.model.pretrained)


def _on_one_device(trainer: Node) -> bool:
    arguments = trainer.arguments
    return arguments.get("devices", 1) in (1, "1", "auto", [0]) and arguments.get("num_nodes", 1) == 1
