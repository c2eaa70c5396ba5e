"""Tests runs that are killed by SIGKILL in a step, in a save or after the last step: the same command resumes them, and
the finished run equals the unbroken run bit by bit."""

import multiprocessing
import random
import signal

import pytest
import torch
from safetensors.torch import load_file

import dying
from conftest import ROOT
from lowmem.config.typed_lines import key, quoted
from lowmem.saving.checkpoint import complete

PARAMETERS = 28  # parameter tensors of the small model; each optimizer step updates one master per tensor
SAVES = ("half a file", "before the rename", "after the rename")
RUN = ("precision=bf16-master", "optim=adamw8bit", "save_every=1", "model.architecture.n_embd=64")


@pytest.fixture(scope="module")
def processes():
    """Returns a multiprocessing context that forks from a server process in which the slow imports are done."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lowmem.fit", "bitsandbytes", "dying"])
    return context


@pytest.fixture
def life(processes, small, tmp_path):
    """Returns the run folder, and a function that runs the command in a process. The function takes the moment of the
    kill (or None) and the number of steps, and returns the exit code."""
    folder, lives = tmp_path / "run", [0]

    def live(moment, steps=12, renames=True, more=()):
        lives[0] += 1
        base = [o for o in small if key(o) not in {key(line) for line in RUN}]
        lines = [*base, *RUN, *more, f"max_steps={steps}", "logger=none", "resume=auto"]
        process = processes.Process(
            target=dying.live, args=(str(ROOT), [quoted(o) for o in lines], str(folder), moment, renames)
        )
        process.start()
        process.join(120)
        return process.exitcode

    return folder, live


def saved(file):
    content = torch.load(file, weights_only=True)
    return content["state_dict"] | {
        f"{index}.{key}": value
        for index, state in content["optimizer_states"][0]["state"].items()
        for key, value in state.items()
        if torch.is_tensor(value)
    }


def names_tell_the_truth(folder):
    """Returns True if every file with the name of a checkpoint is complete and can be loaded."""
    files = sorted((folder / "checkpoints").glob("step-*.ckpt"))
    return files == complete(folder / "checkpoints") and all(map(saved, files))


def moments(count, in_saves, seed=0):
    """Returns the moments of `count` kills: first, in random order, `in_saves` kills in saves and the other kills in
    steps; then one kill in the last evaluation and one in the export."""
    draw = random.Random(seed)
    found = [("in a step", draw.randrange(2 * PARAMETERS)) for _ in range(count - in_saves - 2)]
    found += [(SAVES[i % len(SAVES)], draw.randrange(2)) for i in range(in_saves)]
    draw.shuffle(found)
    return [*found, ("in the last evaluation", 0), ("in the export", 0)]


def dies_and_goes_on(folder, live, deaths, steps, more=()):
    """Kills the run at each moment of `deaths`, and resumes it after each kill. Returns the tensors of the finished run
    (see `everything`)."""
    for number, moment in enumerate(deaths, start=1):
        assert live(moment, steps, more=more) == -signal.SIGKILL, moment
        assert names_tell_the_truth(folder), moment
        newest = max((path.name for path in (folder / "checkpoints").glob("step-*.ckpt")), default="no checkpoint")
        print(f"kill {number:2}: {' '.join(map(str, moment)):<24} left {newest}")
    assert live(None, steps, more=more) == 0
    assert not list(folder.rglob("*.writing"))
    return everything(folder)


def everything(run):
    """Returns the tensors of the last checkpoint and the exported weights in one dict."""
    return saved(complete(run / "checkpoints")[-1]) | load_file(run / "model" / "model.safetensors")


@pytest.mark.process
@pytest.mark.parametrize(
    ("steps", "deaths"),
    [
        pytest.param(6, [("half a file", 1), ("in a step", PARAMETERS + 5), ("in the export", 0)], id="3 times"),
        pytest.param(40, moments(20, in_saves=8), id="20 times", marks=pytest.mark.matrix),
    ],
)
def test_run_killed_repeatedly_equals_the_unbroken_run(fit, life, steps, deaths):
    _, run = fit(*RUN, f"max_steps={steps}", "logger=none", folder="unbroken")
    unbroken, found = everything(run), dies_and_goes_on(*life, deaths, steps)
    assert found.keys() == unbroken.keys() and all(torch.equal(found[key], unbroken[key]) for key in found)


@pytest.mark.process
@pytest.mark.parametrize(
    ("steps", "deaths"),
    [
        pytest.param(4, [("in a step", PARAMETERS + 5), ("half a file", 1), ("in the export", 0)], id="3 times"),
        pytest.param(40, moments(20, in_saves=8, seed=1), id="20 times", marks=pytest.mark.matrix),
    ],
)
def test_run_with_a_drive_killed_repeatedly_equals_the_unbroken_run(fit, life, tmp_path, steps, deaths):
    streams = ("weights=streamed", "loss=tiled", "gradient_checkpointing=every_layer", "clip=null")
    drive = tmp_path / "drive"
    _, run = fit(*RUN, *streams, f"max_steps={steps}", "logger=none", folder="unbroken")
    unbroken = everything(run)
    found = dies_and_goes_on(*life, deaths, steps, (*streams, f"weights.drive={drive}"))
    assert found.keys() == unbroken.keys() and all(torch.equal(found[key], unbroken[key]) for key in found)
    assert not list(drive.iterdir())


@pytest.mark.process
@pytest.mark.wrong
def test_checkpoint_writer_without_the_final_rename_leaves_an_incomplete_checkpoint(life):
    folder, live = life
    assert live(("half a file", 1), renames=False) == -signal.SIGKILL
    assert not names_tell_the_truth(folder)
