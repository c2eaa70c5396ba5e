"""A process group is left without standing still: `leaving.py` does it thousands of times where one types that."""

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
    """Runs `leaving.py --rounds` in a process of its own."""
    command = [sys.executable, leaving.__file__, "--rounds", str(number), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit)


def rounds(number: int, limit: int) -> str:
    done = run_rounds(number, limit)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.process
def test_a_hundred_process_groups_end_without_leftover_threads():
    first, last = (int(line.split()[-2]) for line in rounds(100, limit=120).splitlines())
    assert last == first


@pytest.mark.process
def test_two_thousand_process_groups_end():
    assert "2000 rounds" in rounds(2000, limit=600)


@pytest.mark.process
@pytest.mark.wrong
def test_process_group_destroyed_in_the_wrong_order_hangs():
    """Shows that the loop above can fail: after 20 to 300 rounds, one that destroys its group first stands still."""
    done = run_rounds(2000, 600, "--wrong")
    assert done.returncode == 1 and "Timeout" in done.stderr, done.stdout + done.stderr


@pytest.mark.process
def test_ten_runs_of_two_ranks_end(processes, tmp_path):
    for number in range(10):
        assert leaving.two_ranks(processes, tmp_path / str(number)) == [0, 0]


@pytest.mark.parametrize("releases", [True, False])
def test_strategy_that_outlives_its_group_keeps_no_threads(releases, monkeypatch):
    """As in a run, where it is part of Lightning's cycles. A thread that waits for the GIL when Python ends aborts the
    process."""
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
    """(whether the strategy releases what it has) -> whether the Reducer was there when its group was destroyed."""

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
def test_unreleased_ddp_reducer_is_found(at_the_end):
    """The deliberately wrong variant: some hundred such ends are enough to stand still for ever."""
    assert at_the_end(releases=False)


def test_process_group_referenced_by_a_traceback_is_kept(at_the_end, monkeypatch):
    """As in a traceback, whose frames hold DDP."""
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
