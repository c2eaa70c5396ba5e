"""Tests that leaving a process group does not hang. `leaving.py` leaves as many groups as its command line states."""

import gc
import subprocess
import sys
import time
from weakref import ref

import leaving
import pytest
import torch
import torch.distributed as dist

from lowmem.techniques.strategy import process_group
from lowmem.techniques.strategy.ddp import DataParallel
from lowmem.techniques.strategy.several import Several


def run_rounds(number: int, limit: int, *options: str) -> subprocess.CompletedProcess:
    """Runs `leaving.py --rounds` in a new process."""
    command = [sys.executable, leaving.__file__, "--rounds", str(number), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit)


def rounds(number: int, limit: int) -> str:
    done = run_rounds(number, limit)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.process
def test_leaving_a_hundred_process_groups_does_not_leak_threads():
    first, last = (int(line.split()[-2]) for line in rounds(100, limit=120).splitlines())
    assert last == first


@pytest.mark.process
def test_leaving_two_thousand_process_groups_does_not_hang():
    assert "2000 rounds" in rounds(2000, limit=600)


@pytest.mark.process
@pytest.mark.wrong
def test_process_group_destroyed_before_ddp_hangs_within_2000_rounds():
    """The deliberately wrong variant shows that the test above can fail: one in 20 to 300 such rounds hangs."""
    done = run_rounds(2000, 600, "--wrong")
    assert done.returncode == 1 and "Timeout" in done.stderr, done.stdout + done.stderr


@pytest.mark.process
def test_ten_ddp_runs_of_two_ranks_end_with_exit_code_0(processes, tmp_path):
    for number in range(10):
        assert leaving.two_ranks(processes, tmp_path / str(number)) == [0, 0]


@pytest.mark.parametrize("releases", [True, False], ids=["released", "not released"])
def test_strategy_that_outlives_its_process_group_keeps_no_gloo_threads_unless_release_is_left_out(
    releases, monkeypatch
):
    """In a run, reference cycles of Lightning keep the strategy alive. A thread that waits for the GIL when Python
    exits aborts the process."""
    if not releases:  # the deliberately wrong variant
        monkeypatch.setattr(Several, "release", lambda self: None)
    before = leaving.gloo_threads()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ranks = DataParallel()
    ranks.before_training(leaving.Trained())
    ranks.forward(torch.ones(2, 8)).backward()
    of_group = leaving.gloo_threads() - before
    process_group.leave(ranks)
    end = time.monotonic() + (10 if releases else 0.1)  # the system lists a thread for a moment after it was joined
    while of_group & leaving.gloo_threads() and time.monotonic() < end:
        time.sleep(0.001)
    assert of_group and bool(of_group & leaving.gloo_threads()) == (not releases)


@pytest.fixture
def at_the_end(monkeypatch):
    """Returns a function that leaves a group, and returns True if DDP's Reducer still existed when the group was
    destroyed. Its argument `releases` says whether the strategy releases DDP first."""

    def leave(releases):
        destroy, seen = dist.destroy_process_group, []
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        ranks = DataParallel()
        ranks.before_training(leaving.Trained())
        ranks.forward(torch.ones(2, 8)).backward()
        reducer = ref(ranks.forward.reducer)
        monkeypatch.setattr(dist, "destroy_process_group", lambda: (seen.append(reducer() is not None), destroy()))
        if not releases:
            monkeypatch.setattr(DataParallel, "release", lambda self: None)
        process_group.leave(ranks)
        return seen == [True]

    return leave


def test_ddp_reducer_is_freed_before_its_group_is_destroyed(at_the_end, monkeypatch):
    monkeypatch.setattr(process_group, "_still_referenced", kept := [])
    assert not at_the_end(releases=True) and not kept


@pytest.mark.wrong
def test_unreleased_ddp_reducer_still_exists_when_its_group_is_destroyed(at_the_end):
    """The deliberately wrong variant does not release DDP. About one in several hundred such exits hangs."""
    assert at_the_end(releases=False)


def test_process_group_referenced_by_a_traceback_is_kept_until_the_reference_is_gone(at_the_end, monkeypatch):
    """The frames of a traceback hold references to DDP."""
    held = []
    monkeypatch.setattr(leaving.Trained, "forward", lambda self, x: held.append(self.wrapper()) or self.model(x).sum())
    monkeypatch.setattr(process_group, "_still_referenced", kept := [])
    ready = DataParallel.before_training

    def remembering(self, module):
        ready(self, module)
        module.wrapper = lambda: self.forward

    monkeypatch.setattr(DataParallel, "before_training", remembering)
    assert at_the_end(releases=True) and len(kept) == 1
    held.clear()
    gc.collect()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    process_group.leave()
    assert not kept, "a notebook whose runs fail again and again would pile up threads"
