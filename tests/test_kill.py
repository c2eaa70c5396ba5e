"""Killed by SIGKILL in a step or in a save: the last complete checkpoint loads, and the bits are right."""

import multiprocessing
import random
import signal

import pytest
import torch

import dying
from conftest import ROOT
from lowmem.checkpoint import complete
from lowmem.overrides import key, quoted

STEPS = 12
PARAMETERS = 28  # of the small model: steps of its masters per optimizer step
SAVES = ("half a file", "before the rename", "after the rename")
RUN = ("precision=bf16-master", "optim=adamw8bit", f"max_steps={STEPS}", "save_every=1", "model.architecture.n_embd=64")


@pytest.fixture(scope="module")
def processes():
    """Forked from a process that has imported everything and computed nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lowmem.fit", "bitsandbytes", "dying"])
    return context


@pytest.fixture
def life(processes, small, tmp_path):
    """(folder, moment) -> exit code of a run that goes on from the folder's last complete checkpoint."""
    folder, lives = tmp_path / "run", [0]

    def live(moment, renames=True):
        lives[0] += 1
        base = [o for o in small if key(o) not in {key(line) for line in RUN}]
        lines = [*base, *RUN, "logger=none"]
        if complete(folder / "checkpoints"):
            lines.append(f"resume={folder}")
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
    files = sorted((folder / "checkpoints").glob("step-*.ckpt"))
    return files == complete(folder / "checkpoints") and all(map(saved, files))


def moments(count, in_saves, seed=0):
    draw = random.Random(seed)
    steps = [("in a step", draw.randrange(2 * PARAMETERS)) for _ in range(count - in_saves)]
    found = [*steps, *((SAVES[i % len(SAVES)], draw.randrange(2)) for i in range(in_saves))]
    draw.shuffle(found)
    return found


def dies_and_goes_on(folder, live, deaths):
    for moment in deaths:
        assert live(moment) == -signal.SIGKILL, moment
        assert names_tell_the_truth(folder), moment
    assert live(None) == 0
    return saved(complete(folder / "checkpoints")[-1])


@pytest.fixture
def unbroken(fit):
    _, run = fit(*RUN, "logger=none", folder="unbroken")
    return saved(complete(run / "checkpoints")[-1])


def test_killed_twice_a_run_is_the_unbroken_run(life, unbroken):
    found = dies_and_goes_on(*life, [("half a file", 2), ("in a step", PARAMETERS + 5)])
    assert found.keys() == unbroken.keys() and all(torch.equal(found[key], unbroken[key]) for key in found)


def test_killed_ten_times_four_of_them_in_a_save_a_run_is_the_unbroken_run(life, unbroken):
    found = dies_and_goes_on(*life, moments(10, in_saves=4))
    assert found.keys() == unbroken.keys() and all(torch.equal(found[key], unbroken[key]) for key in found)


def test_a_writer_without_the_final_rename_is_caught(life):
    folder, live = life
    assert live(("half a file", 1), renames=False) == -signal.SIGKILL
    assert not names_tell_the_truth(folder)
