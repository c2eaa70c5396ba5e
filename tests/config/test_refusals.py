"""Tests that each refused command line prints a message before anything is built. For each refusal, a test named
test_without_refusal_... shows what would happen without the refusal."""

import os
import subprocess
import sys
from contextlib import nullcontext, suppress
from importlib import import_module

import pytest
import torch
from lightning.pytorch import Trainer

import parity
import streams
from host_masters import made
from lowmem.config import check, refusals
from lowmem.config.instantiate import instantiate
from lowmem.data.loader import MicroBatch, Share, WindowLoader
from lowmem.model import loading as model
from lowmem.offload import host_optimizer
from lowmem.plan import at_start, batch_size
from lowmem.saving import checkpoint_folder
from lowmem.system import rank_environment
from lowmem.system.errors import NotFinite, Refused
from lowmem.techniques.compile.blocks import compile_blocks
from lowmem.techniques.gradient_checkpointing import policies
from lowmem.techniques.loss.cross_entropy import full
from lowmem.techniques.optim.build import pageable
from lowmem.techniques.precision.weights_16bit import NarrowOptimizer
from lowmem.techniques.strategy import ddp
from lowmem.techniques.strategy.contract import OneDevice
from lowmem.techniques.strategy.process_group import process_group
from lowmem.techniques.weights.streamed import Streamed
from lowmem.training import build
from lowmem.training.build import optimizer
from networks import network

# maps the words after `test_without_refusal_` in a test's name to a refused command line, in the order of REFUSALS
TYPED = {
    "clipping_in_backward_clips_nothing": ["optim.in_backward=true"],
    "loss_scaling_in_backward_lets_an_overflow_through": ["optim.in_backward=true", "clip=null", "precision=16"],
    "accumulation_in_backward_steps_at_every_micro_batch": [
        "optim.in_backward=true",
        "clip=null",
        "accumulation=fixed",
    ],
    "an_early_step_cannot_be_undone": ["precision=bf16-master", "clip=null", "on_nonfinite=skip"],
    "in_backward_has_no_effect_on_masters": ["precision=bf16-master", "optim.in_backward=true", "clip=null"],
    "optimizer_state_in_host_memory_is_not_paged": ["precision=bf16-master", "optim=paged_adamw8bit"],
    "lightning_ranks_claim_separate_run_folders": ["+trainer.strategy=ddp"],
    "only_one_of_two_devices_trains": ["devices=2"],
    "each_process_holds_all_streamed_weights": ["strategy=ddp", "weights=streamed"],
    "masters_take_gradients_before_ranks_exchange_them": ["strategy=ddp", "precision=16-master"],
    "a_step_in_backward_does_not_wait_for_other_ranks": ["strategy=ddp", "optim.in_backward=true", "clip=null"],
    "paged_state_is_not_sharded": ["strategy=ddp", "optim=paged_adamw8bit"],
    "whole_matrix_optimizers_update_shards_differently": ["strategy=fsdp", "optim=adafactor"],
    "state_of_a_tensor_subclass_cannot_be_saved": ["strategy=pipeline", "optim=adamw4bit"],
    "ranks_find_different_batch_sizes": [
        "strategy=ddp",
        "batch_size=auto",
        "accumulation=effective_batch",
        "memory.limit=1GiB",
    ],
    "ranks_choose_different_recipes": ["strategy=ddp", "plan=auto"],
    "torch_compile_fails_with_tensor_parallel": ["strategy=tensor_parallel", "compile=blocks"],
    "preference_metrics_fail_on_the_first_stage": ["strategy=pipeline", "loss=dpo"],
    "a_stage_cannot_read_4_bit_weights_of_other_stages": ["strategy=pipeline", "adapter=qlora"],
    "an_optimizer_cannot_update_streamed_weights": ["weights=streamed"],
    "autograd_reads_overwritten_streamed_weights": ["weights=streamed", "precision=bf16-master"],
    "several_blocks_per_checkpoint_fail_with_by_layer": [
        "weights=streamed",
        "precision=bf16-master",
        "gradient_checkpointing=sqrt",
        "weights.order=by_layer",
    ],
    "batch_size_auto_fails_without_an_effective_batch": ["batch_size=auto", "memory.limit=1GiB"],
    "batch_size_auto_on_a_cpu_chooses_the_largest_size": ["batch_size=auto", "accumulation=effective_batch"],
    "selective_checkpointing_recomputes_all_of_compiled_blocks": ["compile=blocks", "gradient_checkpointing=selective"],
    "torch_compile_fails_on_dora_layers": ["compile=blocks", "adapter=dora"],
    "a_memory_limit_does_not_count_compiled_blocks": ["memory.limit=1GiB", "compile=blocks"],
    "torch_compile_fails_with_tiled_modules": ["tile.tokens=4", "compile=blocks"],
    "a_missing_compiler_fails_in_the_first_step": ["optim=adamw4bit"],
}


def test_every_refusal_has_a_refused_command_line_and_a_test_without_the_refusal():
    without = [name for name in globals() if name.startswith("test_without_refusal_")]
    told = "a refusal needs a line in TYPED and a test_without_refusal_<name> that runs it with the list emptied"
    assert [f"test_without_refusal_{name}" for name in TYPED] == without, told
    assert len(TYPED) == len(refusals.REFUSALS), told


@pytest.mark.parametrize(("refusal", "line"), [*zip(refusals.REFUSALS, TYPED.values(), strict=True)], ids=TYPED)
def test_refused_command_line_builds_nothing_and_says_what_to_type(command, tmp_path, refusal, line, monkeypatch):
    monkeypatch.setattr(build, "data", None)  # a call would raise a TypeError
    if line == ["optim=adamw4bit"]:
        monkeypatch.setattr(refusals.shutil, "which", lambda name: None)
    code, said = command(*line)
    assert code == 1 and "ype " in said and "Traceback" not in said
    template = refusal.says
    assert template[: template.find("{") if "{" in template else None] in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "allowed",
    [
        ["optim.in_backward=true", "clip=null", "clip_value=0.1", "precision=bf16-sr"],
        ["optim.in_backward=true", "clip=null", "accumulation=effective_batch", "accumulation.size=4"],
        ["precision=16-true"],
        ["precision=16-master", "clip_value=0.1", "accumulation=fixed", "optim=lion8bit"],
        ["precision=bf16-master", "+trainer.strategy=auto", "+trainer.devices=1", "optim=muon"],
        ["optim=adam8bit", "optim.embedding_bits=32"],
    ],
    ids=" ".join,
)
def test_command_line_close_to_a_refused_one_trains_4_steps(fit, allowed):
    summary, _ = fit(*allowed)
    assert summary["steps"] == 4


# --- without the refusals: what goes wrong ----------------------------------------------------------------------------


def trained(config, *techniques):
    return parity.run(config(*parity.overrides(), *techniques, base=()))[1]


def test_without_refusal_clipping_in_backward_clips_nothing(config):
    clipped = trained(config, "optim.in_backward=true", "optim=sgd", "clip=1e-6")
    free = trained(config, "optim.in_backward=true", "optim=sgd", "clip=null")
    assert all(torch.equal(clipped[name], free[name]) for name in free)


def test_without_refusal_loss_scaling_in_backward_lets_an_overflow_through(config, monkeypatch):
    step_one = NarrowOptimizer.step_one

    def overflowing(self, group, p):
        p.grad.fill_(float("inf"))
        step_one(self, group, p)

    monkeypatch.setattr(NarrowOptimizer, "step_one", overflowing)
    lines = ("optim.in_backward=true", "clip=null", "precision=16-true", "optim=sgd", "max_steps=1")
    weights = trained(config, *lines)  # the step is not skipped
    assert not any(p.isfinite().all() for p in weights.values())


def test_without_refusal_accumulation_in_backward_steps_at_every_micro_batch(config, monkeypatch):
    steps = []
    step = torch.optim.AdamW.step

    def counting(self, closure=None):
        if any(p.grad is not None for group in self.param_groups for p in group["params"]):
            steps.append([id(p) for group in self.param_groups for p in group["params"]])
        return step(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", counting)
    trained(config, "optim.in_backward=true", "clip=null", "accumulation=fixed", "batch_size=4", "max_steps=1")
    assert steps.count(steps[0]) == 3  # the micro-batches of one window of 9 sequences


def test_without_refusal_an_early_step_cannot_be_undone(config, monkeypatch):
    fetch, step, stepped = host_optimizer.HostOptimizer._fetch, host_optimizer.HostOptimizer._step, []

    def broken(self, p, receive):
        if self.masters[p].name.endswith("layers.0.input_layernorm.weight"):  # one of the last gradients of backward
            p.grad.fill_(float("inf"))
        fetch(self, p, receive)

    def recording(self, one, *how):
        step(self, one, *how)
        stepped.append(one.name)

    monkeypatch.setattr(refusals, "REFUSALS", ())
    monkeypatch.setattr(host_optimizer.HostOptimizer, "_fetch", broken)
    monkeypatch.setattr(host_optimizer.HostOptimizer, "_step", recording)
    with pytest.raises(Refused, match=r"layers\.0\.input_layernorm\.weight is not finite"):
        trained(config, "precision=bf16-master", "clip=null", "on_nonfinite=skip")
    assert stepped and not any("layers.0.input_layernorm.weight" in name for name in stepped)


def test_without_refusal_in_backward_has_no_effect_on_masters(config, monkeypatch):
    monkeypatch.setattr(refusals, "REFUSALS", ())
    lines = ("precision=bf16-master", "clip=null")
    assert all(
        torch.equal(one, other)
        for one, other in zip(
            trained(config, *lines).values(), trained(config, *lines, "optim.in_backward=true").values(), strict=True
        )
    )


def test_without_refusal_optimizer_state_in_host_memory_is_not_paged(config):
    made = optimizer(config("optim=paged_adamw8bit"))(torch.nn.Linear(256, 256, bias=False))
    for p in (p for group in made.param_groups for p in group["params"]):
        p.grad = torch.ones_like(p)
    made.step()
    assert not any(getattr(t, "is_paged", False) for state in made.state.values() for t in state.values())


def test_without_refusal_lightning_ranks_claim_separate_run_folders(monkeypatch):
    """Lightning starts the second rank without lowmem's environment variables, so the second rank starts a new run."""
    started = []

    class Started:
        returncode = 0

        def __init__(self, command, env, cwd):
            started.append((command, env))

        def poll(self):
            return 0

    monkeypatch.setattr(subprocess, "Popen", Started)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # Lightning also writes to os.environ
    trainer = Trainer(accelerator="cpu", strategy="ddp", devices=2, logger=False, enable_checkpointing=False)
    monkeypatch.setattr(sys, "argv", ["train.py", "+trainer.strategy=ddp", "+trainer.devices=2"])
    trainer.strategy.launcher.launch(lambda: None)
    ((command, env),) = started
    assert command[-len(sys.argv) + 1 :] == sys.argv[1:]
    monkeypatch.setattr(os, "environ", env)
    assert (
        rank_environment.number() == 0 and rank_environment.of_run() is None
    )  # so the second rank claims another folder


def test_without_refusal_only_one_of_two_devices_trains(fit, monkeypatch):
    monkeypatch.setattr(refusals, "REFUSALS", ())
    one, two = fit(folder="one")[0], fit("devices=2", folder="two")[0]
    same = ("tokens", "train_loss", "val_loss")
    assert [one[key] for key in same] == [two[key] for key in same]  # as if the second device had read no row


def moved_in(config, *lines):
    """Returns a module whose weights were moved to host memory as precision= and weights= require."""
    cfg = config(*lines, base=())
    module = build.causal_lm(cfg, model.describe(cfg))
    made(module, instantiate(cfg.precision), module.weights)
    return module


def test_without_refusal_each_process_holds_all_streamed_weights(config):
    """The host blocks are not in shared memory, so each process has a copy of them."""
    typed = parity.overrides("precision=bf16-master", "weights=streamed")
    for strategy in ("strategy=auto", "strategy=ddp"):  # the strategy makes no difference
        module = moved_in(config, *typed, strategy)
        waits = [p for p in module.model.parameters() if module.weights.host_block(p)]
        host_blocks = {id(host_block): host_block for host_block in map(module.weights.host_block, waits)}.values()
        held = [host_block.flat for host_block in host_blocks]
        assert sum(flat.numel() for flat in held) >= sum(p.numel() for p in waits) > 0.5 * module.model.num_parameters()
        assert not any(flat.is_shared() for flat in held)


def test_without_refusal_masters_take_gradients_before_ranks_exchange_them(config):
    """By the time DDP's hook would average a gradient over the ranks, the gradient is None, because it was already sent
    to the host."""
    seen = []

    class Exchange:
        def __init__(self, p):  # like DDP: a hook that reads the complete gradient
            p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))

    layer, cfg = torch.nn.Linear(4, 4), config("precision=bf16-master")
    optimizer = made(layer, instantiate(cfg.precision)).optimizer(build.optimizer(cfg), layer)
    for p in layer.parameters():
        p.register_post_accumulate_grad_hook(optimizer.collect)
        Exchange(p)
    layer(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    assert seen == [None, None]


def test_without_refusal_a_step_in_backward_does_not_wait_for_other_ranks(fit, monkeypatch):
    """The communication hook replaces every averaged gradient by zeros. A step that waits for the averaged gradients
    changes no weight."""
    ready, seen = ddp.DataParallel.before_training, {}

    def cancelled(_, bucket):
        taken_back = torch.futures.Future()
        taken_back.set_result(bucket.buffer().zero_())
        return taken_back

    def among_others(self, module):
        ready(self, module)
        self.forward.register_comm_hook(None, cancelled)
        seen.update(module=module, before=[p.detach().clone() for p in module.model.parameters()])

    monkeypatch.setattr(refusals, "REFUSALS", ())
    monkeypatch.setattr(ddp.DataParallel, "before_training", among_others)
    monkeypatch.setattr(ddp.DataParallel, "local", lambda self, p: p)  # the parameters with backward hooks
    monkeypatch.setattr(ddp.DataParallel, "local_parameters", lambda self, model: model)

    def moved(*lines):
        fit("strategy=ddp", "optim=sgd", "optim.weight_decay=0", "max_steps=1", "clip=null", *lines)
        after = seen["module"].model.parameters()
        return [not torch.equal(one, other) for one, other in zip(seen["before"], after, strict=True)]

    assert not any(moved("on_nonfinite=stop"))
    assert any(moved("optim.in_backward=true"))


def test_without_refusal_paged_state_is_not_sharded(config):
    large = torch.nn.Linear(400, 400, bias=False)
    with process_group(config("strategy=ddp")) as ranks:
        made = optimizer(config("optim=paged_adamw8bit"))(large, ranks.local)
    for p in (p for group in made.param_groups for p in group["params"]):
        p.grad = torch.ones_like(p)
    made.step()
    assert [state.numel() for state in pageable(made)] == [400 * 400, 400 * 400]


@pytest.mark.parametrize(
    ("optim", "is_another"), [("adafactor", True), ("muon", True), ("adam8bit", True), ("sgd", False)]
)
def test_without_refusal_whole_matrix_optimizers_update_shards_differently(config, optim, is_another):
    """The first of two ranks has the upper half of a matrix. Its 5,000 elements are not a multiple of the block size of
    the 8-bit optimizer."""
    whole, half = torch.nn.Linear(100, 100, bias=False), torch.nn.Linear(100, 50, bias=False)
    with torch.no_grad():
        half.weight.copy_(whole.weight[:50])
    optimizers = [optimizer(config(f"optim={optim}", "lr=0.1"))(layer) for layer in (whole, half)]
    for _ in range(3):
        gradient = torch.randn(100, 100) * torch.logspace(-4, 0, 100)[:, None]
        whole.weight.grad, half.weight.grad = gradient, gradient[:50].clone()
        [one.step() for one in optimizers]
    assert torch.equal(whole.weight[:50], half.weight) != is_another


@pytest.mark.parametrize("kind", ["OptimState4bit", "Tensor"])
def test_without_refusal_state_of_a_tensor_subclass_cannot_be_saved(tmp_path, kind):
    """For comparison, a plain tensor is saved without an error."""
    of_its_own = kind == "OptimState4bit"
    made = import_module("torchao.optim.subclass_4bit").OptimState4bit.zeros if of_its_own else torch.zeros
    with pytest.raises((ValueError, NotImplementedError)) if of_its_own else nullcontext():
        checkpoint_folder.save(tmp_path / "step.ckpt", {"state": made((64, 64))}, {}, OneDevice())


def test_without_refusal_ranks_find_different_batch_sizes(config, monkeypatch):
    """A rank with less free memory makes more micro-batches. In the last micro-batch this rank would wait for ranks
    that have finished."""
    cfg = config("batch_size=auto", "accumulation=effective_batch", "accumulation.size=8")
    numbers = []
    for room in (8, 4):
        monkeypatch.setattr(batch_size, "fits", lambda cfg, size, room=room: size <= room)
        found = batch_size.resolve(cfg).batch_size
        loader = WindowLoader(parity.Ragged(), Share(found), instantiate(cfg.knowing(batch_size=found).accumulation), 0)
        numbers.append(len(next(iter(loader)).micro_batches))
    assert numbers == [1, 2]


def test_without_refusal_ranks_choose_different_recipes(config):
    """The choice depends on free memory: the fastest recipe fits on a rank with 1 GiB, but not on a rank with 3 MiB."""
    keeps_all = ("model.architecture.n_layer=6", "batch_size=16", "gradient_checkpointing=none", "plan=auto")
    assert [at_start.could_fit(config(*keeps_all, f"memory.limit={free}")) for free in ("1GiB", "3MiB")] == [
        True,
        False,
    ]


@pytest.mark.matrix
@pytest.mark.skipif(torch.__version__.startswith("2.11"), reason="which compiles them; nobody has compared the numbers")
def test_without_refusal_torch_compile_fails_with_tensor_parallel(fit, monkeypatch):
    monkeypatch.setattr(refusals, "REFUSALS", ())
    with pytest.raises(Refused, match=r"torch\.compile failed"):
        fit("strategy=tensor_parallel", *parity.BUDGET)


def test_without_refusal_preference_metrics_fail_on_the_first_stage():
    """Only the last stage of a pipeline calls the loss, but every rank calls `figures`."""
    from lowmem.techniques.loss.preference import DPO, KTO

    for loss in (DPO(), KTO()):
        with pytest.raises(TypeError, match="NoneType"):
            loss.figures()


def test_without_refusal_a_stage_cannot_read_4_bit_weights_of_other_stages():
    from lowmem.techniques.adapter.nf4 import quantize
    from lowmem.techniques.strategy.stages import Stage, divided

    model = network("llama")
    quantize(model)
    Stage(model, divided(model, 2), 0).empty()
    first, *_, last = model.model.layers
    assert first.mlp.up_proj.cpu().weight.norm() > 0
    with pytest.raises(NotImplementedError, match="no data"):
        last.mlp.up_proj.cpu()


def test_without_refusal_an_optimizer_cannot_update_streamed_weights():
    streaming = network("llama")
    made = torch.optim.AdamW(streaming.parameters())
    Streamed(streaming).move_in(torch.device("cpu"))
    for p in streaming.parameters():
        p.grad = torch.ones(p.shape)
    with pytest.raises(RuntimeError, match="single memory location"):
        made.step()


def test_without_refusal_autograd_reads_overwritten_streamed_weights(config):
    arguments = streams.lines("llama", "max_steps=2", policy="none")
    right = streams.trained(config, ["weights=resident"], "llama", arguments)
    with suppress(NotFinite):  # with two slots, each slot would still contain the weights of its block
        assert not streams.trained(config, ["weights=streamed", "weights.slots=3"], "llama", arguments).same(right)


def test_without_refusal_several_blocks_per_checkpoint_fail_with_by_layer(config):
    by_layer = ["weights=streamed", "weights.order=by_layer"]
    with pytest.raises(RuntimeError, match="SavedTensorHooks"):  # a segment is closed by another thread
        streams.trained(config, by_layer, "llama", streams.lines("llama", "max_steps=2", policy="sqrt"))


def test_without_refusal_batch_size_auto_fails_without_an_effective_batch(config):

    from lowmem.plan import batch_size

    with pytest.raises(Exception, match="size"):  # accumulation.size, whose divisors are tried, is missing
        batch_size.resolve(config().knowing(batch_size="auto"))


def test_without_refusal_batch_size_auto_on_a_cpu_chooses_the_largest_size(config, monkeypatch):
    from lowmem.plan import batch_size

    tried = []
    monkeypatch.setattr(batch_size, "fits", lambda cfg, size: tried.append(size) or True)
    cfg = config("batch_size=auto", "accumulation=effective_batch", "accumulation.size=4096")
    assert batch_size.resolve(cfg).batch_size == 4096


def products(policy):
    """Returns the number of matmuls in one forward and backward pass of compiled blocks."""
    model = network("llama")
    compile_blocks(model, "aot_eager")
    policy(model)
    ids = torch.randint(0, 300, (1, 16))
    full(model, MicroBatch(ids, ids)).backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        full(model, MicroBatch(ids, ids)).backward()
    return sum(event.count for event in seen.key_averages() if event.key == "aten::mm")


def test_without_refusal_selective_checkpointing_recomputes_all_of_compiled_blocks():
    # `selective` stores no result of a matmul in a compiled block, so it recomputes all matmuls, as `every_layer` does
    assert products(policies.selective) >= products(policies.every_layer) > products(policies.none)


@pytest.mark.skipif(torch.__version__.startswith("2.11"), reason="which compiles them; nobody has compared the numbers")
def test_without_refusal_torch_compile_fails_on_dora_layers(config):
    compiled = ("adapter=dora", "compile=blocks", "compile.backend=aot_eager")
    with pytest.raises(Refused, match=r"torch\.compile failed on LlamaDecoderLayer"):
        streams.trained(config, ["weights=resident"], "llama", streams.lines("llama", *compiled))


@pytest.mark.matrix
def test_without_refusal_a_memory_limit_does_not_count_compiled_blocks(config, fit, monkeypatch):
    monkeypatch.setattr(refusals, "REFUSALS", ())
    with pytest.raises(Refused, match="Out of memory"):
        fit("memory.limit=200KiB")
    assert fit("memory.limit=200KiB", *parity.BUDGET, folder="compiled")[0]["steps"] == 4


@pytest.mark.matrix
def test_without_refusal_torch_compile_fails_with_tiled_modules():
    from lowmem.techniques.gradient_checkpointing.slices import Tiles

    model = network("llama", num_hidden_layers=1)
    compile_blocks(model, "aot_eager_decomp_partition", 0.5)
    Tiles(model, 4)
    ids = torch.randint(0, 300, (1, 16))
    with pytest.raises(Refused, match=r"torch\.compile failed on LlamaDecoderLayer"):
        full(model, MicroBatch(ids, ids)).backward()


@pytest.mark.matrix
def test_without_refusal_a_missing_compiler_fails_in_the_first_step(fit, monkeypatch, tmp_path):
    from torch._inductor import config as inductor

    monkeypatch.setattr(refusals, "REFUSALS", ())
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    missing = inductor.patch({"cpp.cxx": (None, "no-such-compiler")})
    with missing, pytest.raises(Exception, match=r"(?i)compiler|no-such-compiler"):
        fit("optim=adamw4bit", "model.architecture.n_embd=64")


def test_command_line_with_three_refusals_reports_all_three(command):
    code, said = command("optim.in_backward=true", "accumulation=fixed", "precision=16")
    assert code == 1 and all(word in said for word in ("clip=null", "accumulation=none", "precision=bf16"))


def test_accumulation_size_10_with_batches_of_4_is_refused_and_8_is_suggested(command):
    lines = ("optim.in_backward=true", "clip=null", "accumulation=effective_batch", "accumulation.size=10")
    code, said = command(*lines)
    assert code == 1 and "accumulation.size=8" in said and "Traceback" not in said


def test_check_called_from_python_refuses_clipping_with_in_backward(config):
    with pytest.raises(Refused, match="clip=null"):
        check.check(config("optim.in_backward=true"), {})
