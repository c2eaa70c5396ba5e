"""Tests runs of several processes: failed saves, and resume, mostly with another strategy or number of processes.

A resumed run saves its state before its first step, and this state must equal the checkpoint bit by bit. Then the run
trains on the rows of the unbroken run. Most runs train in fp64, so the two runs differ only by the order of sums.
"""

import pytest
import torch
from safetensors.torch import load_file

import in_float64
from lives import Job, live, several
from lowmem.config.typed_lines import key
from lowmem.saving import checkpoint
from lowmem.saving.checkpoint import complete
from same import same

pytestmark = pytest.mark.process

TOGETHER = 12  # rows of a window, summed over all processes
NEAR = 1e-9
ROWS = f"batch_size={TOGETHER}"  # for strategies in which all processes read the same rows
STEPS, AFTER = 4, 2
RUN = (
    *(in_float64.LINE, "optim=adamw", "optim.weight_decay=0.1", "lr=1e-3", "clip=0.5", "scheduler=cosine"),
    *(f"max_steps={STEPS}", "save_every=1", "checkpoint.keep=9", "logger=none"),
)
WRITERS = {"one": ("auto", 1), "fsdp": ("fsdp", 2)}


@pytest.fixture(scope="module")
def lines(small):
    """Returns a function that takes a strategy, a number of processes and further overrides, and returns all overrides
    of a run."""

    def typed(strategy, size, *more):
        ours = {key(line): line for line in (f"strategy={strategy}", f"batch_size={TOGETHER // size}", *RUN, *more)}
        return tuple(line for line in small if key(line) not in ours) + tuple(ours.values())

    return typed


@pytest.fixture(scope="module")
def written(lines, tmp_path_factory):
    """Trains unbroken runs of one and of two processes, resumed runs and failing runs. Returns (folder of all runs,
    {name of a run of two processes: [traceback of each rank, or an empty text]})."""
    base = tmp_path_factory.mktemp("written")
    live(Job(lines("auto", 1), base / "one"))
    saved = {name: f"resume={base / name / 'checkpoints' / f'step-{AFTER:08d}.ckpt'}" for name in WRITERS}
    at_once = ("saves at once",)
    jobs = [
        Job(lines("fsdp", 2), base / "fsdp"),
        Job(lines("ddp", 2, saved["fsdp"]), base / "fsdp to ddp", at_once),
        Job(lines("fsdp", 2, saved["one"]), base / "one to fsdp", at_once),
        Job(lines("fsdp", 2, "max_steps=4"), base / "full disk", ("disk full at step 3",)),
        Job(lines("fsdp", 2, f"export={base / 'fsdp'}"), base / "no export", ("no room for the export",)),
    ]
    said = several(2, *jobs)
    live(Job(lines("auto", 1, saved["fsdp"]), base / "fsdp to one", at_once))
    live(Job(lines("fsdp", 1, saved["fsdp"]), base / "fsdp to fsdp of one", at_once))
    return base, {job.folder.name: [rank[number] for rank in said] for number, job in enumerate(jobs)}


def state_of(path):
    """Returns ({name: full tensor}, everything else) of a checkpoint file or folder."""
    content = checkpoint.AtomicCheckpointIO().load_checkpoint(path)
    (optimizer,) = content["optimizer_states"]
    if path.is_dir():
        of = {name: read(optimizer["stored"], name) for name in optimizer["stored"]}
        weights = {name: read(content["state_dict"], name) for name in content["state_dict"]}
    else:
        named = content["lowmem"]["stepped"]
        of = {f"{named[at]}/{key}": one for at, state in optimizer["state"].items() for key, one in state.items()}
        weights = content["state_dict"]
    ours = {key: content["lowmem"][key] for key in ("position", "order", "tokens", "skipped_steps", "optimizer")}
    groups = [{key: one for key, one in group.items() if key != "params"} for group in optimizer["param_groups"]]
    rest = {"global_step": content["global_step"], "schedule": content["lr_schedulers"], "groups": groups} | ours
    of = {f"state/{key}": one for key, one in of.items() if not key.startswith("model.lm_head")}  # tied
    return {f"weights/{key}": one for key, one in weights.items()} | of, rest


def read(stored, name):
    into = torch.empty_like(stored[name], device="cpu")
    stored.read(name, into)
    return into


def at(run, step):
    return run / "checkpoints" / f"step-{step:08d}.ckpt"


def furthest(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


READERS = ("one to fsdp", "fsdp to one", "fsdp to ddp", "fsdp to fsdp of one")


@pytest.mark.parametrize("reader", READERS)
def test_checkpoint_read_by_another_strategy_is_bit_identical_and_its_run_ends_as_the_unbroken_run(written, reader):
    base, said = written
    assert not any(said.get(reader, ())), said[reader]
    writer, reads = base / reader.split()[0], base / reader
    there, rest = state_of(at(writer, AFTER))
    here, rest_here = state_of(at(reads, AFTER))
    assert same(there, here) and same(rest, rest_here)
    assert at(reads, AFTER).is_dir() == reader.split(" to ")[1].startswith("fsdp")
    assert len(there) > 3 * 20  # more than 20 weights, each with two moments
    (ends, _), (unbroken, _) = state_of(at(reads, STEPS)), state_of(at(base / "one", STEPS))
    assert furthest(ends, unbroken) < NEAR
    exported = [load_file(run / "model" / "model.safetensors") for run in (reads, base / "one")]
    assert exported[0].keys() == exported[1].keys() and furthest(*exported) < NEAR


@pytest.mark.wrong
def test_resume_without_the_optimizer_state_ends_far_from_the_unbroken_run(written, lines):
    """Wrong on purpose: the optimizer state of the checkpoint is not loaded."""
    base, _ = written
    live(Job(lines("auto", 1, f"resume={at(base / 'fsdp', AFTER)}"), base / "forgot", ("forgets state",)))
    assert furthest(state_of(at(base / "forgot", STEPS))[0], state_of(at(base / "one", STEPS))[0]) > 1e3 * NEAR


def test_two_fsdp_processes_end_with_the_state_of_one_process_and_save_files_of_similar_size(written):
    base, said = written
    assert not any(said["fsdp"]), said["fsdp"]
    assert furthest(state_of(at(base / "fsdp", STEPS))[0], state_of(at(base / "one", STEPS))[0]) < NEAR
    parts = sorted(file.name for file in at(base / "fsdp", STEPS).iterdir())
    assert parts == ["index.pt", "part-00000.bin", "part-00001.bin"]
    sizes = [(at(base / "fsdp", STEPS) / part).stat().st_size for part in parts[1:]]
    assert max(sizes) < 1.1 * min(sizes)


def test_full_disk_of_one_rank_fails_the_save_on_all_ranks(written):
    base, said = written
    told = "Refused", "step-00000003.ckpt cannot be written (No space left on device)", "only the weights were written"
    assert len(said["full disk"]) == 2 and all(word in one for one in said["full disk"] for word in told)
    steps = sorted(path.name for path in (base / "full disk" / "checkpoints").iterdir())
    assert steps == [f"step-{step:08d}.ckpt" for step in (1, 2)]
    assert list((base / "full disk" / "model").glob("*.safetensors"))


def test_failed_export_of_one_rank_fails_on_all_ranks(written):
    base, said = written
    assert len(said["no export"]) == 2
    told = "Refused", "model cannot be written: No space left on device"
    assert all(word in one for one in said["no export"] for word in told)
    assert not list((base / "no export").rglob("*.safetensors"))


@pytest.mark.parametrize("strategy", ["tensor_parallel", "pipeline"])
def test_tensor_parallel_and_pipeline_exchange_checkpoints_with_fsdp_without_changes(
    written, lines, tmp_path, strategy
):
    """Tensor parallelism divides the weights of each block, and stores the rows of some weights in another order. A
    pipeline distributes whole blocks over the processes."""
    base, _ = written
    there, here, back = (tmp_path / name for name in ("there", "here", "back"))
    jobs = [
        Job(lines(strategy, 2, ROWS), there),
        Job(lines(strategy, 2, ROWS, f"resume={at(base / 'fsdp', AFTER)}"), here, ("saves at once",)),
        Job(lines("fsdp", 2, f"resume={at(there, AFTER)}"), back, ("saves at once",)),
    ]
    said = several(2, *jobs)
    assert not any(map(any, said)), said
    live(Job(lines("auto", 1, f"resume={at(there, AFTER)}"), tmp_path / "one", ("saves at once",)))
    for writer, reader in ((base / "fsdp", here), (there, back), (there, tmp_path / "one")):
        (saved, rest), (read_, rest_read) = state_of(at(writer, AFTER)), state_of(at(reader, AFTER))
        assert same(saved, read_) and same(rest, rest_read), (writer, reader)
        assert furthest(state_of(at(reader, STEPS))[0], state_of(at(base / "one", STEPS))[0]) < NEAR
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (there, base / "one"))
    assert ours.keys() == theirs.keys() and furthest(ours, theirs) < NEAR


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("precision", ["16", "bf16-sr"])
def test_run_resumed_with_the_same_number_of_ranks_equals_the_unbroken_run_bit_by_bit(
    lines, tmp_path, strategy, precision
):
    """The run has dropout, and stochastic rounding (bf16-sr) or a loss scale (16)."""
    drops = ("model.architecture.resid_pdrop=0.1", "model.architecture.embd_pdrop=0.1")
    typed = [line for line in lines(strategy, 2, *drops, f"precision={precision}") if line != in_float64.LINE]
    whole, again = tmp_path / "whole", tmp_path / "again"
    at_once = ("as typed", "saves at once")
    jobs = [
        Job((*typed,), whole, ("as typed",)),
        Job((*typed, f"resume={at(whole, AFTER)}"), again, at_once),
        Job((*typed, "seed=1", "max_steps=2"), tmp_path / "other", ("as typed",)),
    ]
    said = several(2, *jobs)
    assert not any(map(any, said)), said
    for step in (AFTER, STEPS):
        (one, rest), (other, rest_other) = state_of(at(whole, step)), state_of(at(again, step))
        assert same(one, other) and same(rest, rest_other), step
    contents = [checkpoint.AtomicCheckpointIO().load_checkpoint(at(run, STEPS)) for run in (whole, again)]
    scales = [[content[name] for name in content if "Float16" in name] for content in contents]
    assert scales[0] == scales[1] and bool(scales[0]) == (precision == "16")
    assert not same(state_of(at(whole, AFTER))[0], state_of(at(tmp_path / "other", AFTER))[0])


def test_checkpoint_resumed_with_three_ranks_and_then_with_two_is_read_without_changes(written, lines, tmp_path):
    base, _ = written
    at_once, resume = ("saves at once",), f"resume={at(base / 'fsdp', AFTER)}"
    three = several(3, Job(lines("fsdp", 3, resume), tmp_path / "three", at_once))
    assert not any(map(any, three)), three
    back = several(2, Job(lines("fsdp", 2, f"resume={at(tmp_path / 'three', 3)}"), tmp_path / "two", at_once))
    assert not any(map(any, back)), back
    for writer, reader, step in ((base / "fsdp", tmp_path / "three", 2), (tmp_path / "three", tmp_path / "two", 3)):
        (there, rest), (here, rest_here) = state_of(at(writer, step)), state_of(at(reader, step))
        assert same(there, here) and same(rest, rest_here)
        assert furthest(state_of(at(reader, STEPS))[0], state_of(at(base / "one", STEPS))[0]) < NEAR


def test_fsdp_run_killed_during_a_save_keeps_the_previous_checkpoint_and_resumes_to_the_unbroken_run(
    written, lines, tmp_path
):
    run = tmp_path / "run"
    said = several(2, Job(lines("fsdp", 2), run, ("killed at step 3",)))
    assert said[1] == [] and said[0] != [""]
    assert [path.name for path in complete(run / "checkpoints")] == [f"step-{step:08d}.ckpt" for step in (1, 2)]
    again = several(2, Job(lines("fsdp", 2, "resume=auto"), run))
    assert not any(map(any, again)), again
    assert not list((run / "checkpoints").glob(".step-*"))
    assert furthest(state_of(at(run, STEPS))[0], state_of(at(written[0] / "fsdp", STEPS))[0]) == 0
