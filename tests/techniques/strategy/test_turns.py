"""Tests work that only rank 0 does: the other ranks wait as long as rank 0 is alive, but not longer. The ranks are
threads here."""

import signal
import threading
import time
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from lowmem.system.errors import RankLost
from lowmem.system.fail_together import fail_together
from lowmem.techniques.strategy import process_group
from lowmem.techniques.strategy.rank_0_turns import Turns
from lowmem.techniques.strategy.several import Several

TIMEOUT = 0.4


class Rank:
    """The tested methods of `Several`, without a process group."""

    rank_0_first, leave_after_rank_0 = Several.rank_0_first, Several.leave_after_rank_0

    def __init__(self, store, rank):
        self.rank, self.turns = rank, Turns(store, rank == 0, TIMEOUT)


@pytest.fixture
def ranks():
    store = dist.HashStore()
    return Rank(store, 0), Rank(store, 1)


def other(does):
    """Runs `does` in another thread. Returns the thread, and a list of the errors that `does` raises."""
    raised = []

    def run():
        try:
            does()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, raised


def turn_of(first, seconds=0.0, error=None, beats=True):
    def does():
        with first.turns.heartbeat() if beats else nullcontext(), first.rank_0_first():
            time.sleep(seconds)
            if error:
                raise error

    return does


def waited(rank):
    began = time.monotonic()
    with rank.rank_0_first("read the data"):
        return time.monotonic() - began


def test_rank_waits_for_a_working_rank_0_beyond_the_timeout(ranks):
    thread, raised = other(turn_of(ranks[0], 3 * TIMEOUT))
    assert waited(ranks[1]) > 2 * TIMEOUT
    thread.join()
    assert not raised


def test_rank_0_without_a_heartbeat_is_reported_as_lost(ranks):
    """A process that was stopped by a signal sends no heartbeat, either."""
    ranks[0].turns._say("rank 0", "7")
    other(turn_of(ranks[0], 10, beats=False))
    with pytest.raises(RankLost, match=r"Rank 0 has sent no heartbeat for 0\S* seconds \(its task: read the data\)"):
        waited(ranks[1])


def test_rank_0_with_an_unresponsive_store_is_reported_as_lost(ranks):
    ranks[1].turns.store = SimpleNamespace(check=lambda _: time.sleep(10))
    with pytest.raises(RankLost, match="has sent no heartbeat"):
        waited(ranks[1])


@pytest.mark.parametrize("within", [True, False], ids=["in its turn", "between turns"])
def test_failure_of_rank_0_is_reported_to_a_waiting_rank_at_once(ranks, within):
    def fails():
        with ExitStack() as stack:
            stack.enter_context(ranks[0].turns.heartbeat())
            if within:
                stack.enter_context(ranks[0].rank_0_first())
            raise ValueError("no such data")

    ranks[1].turns.timeout = 20
    thread, raised = other(fails)
    began = time.monotonic()
    with pytest.raises(RankLost, match=r"Rank 0 failed or exited before it finished its task \(read the data\)"):
        waited(ranks[1])
    assert time.monotonic() - began < 5
    thread.join()
    assert str(raised[0]) == "no such data"


def test_signal_interrupts_a_rank_that_waits_for_rank_0(ranks):
    def told(*_):
        raise KeyboardInterrupt

    other(turn_of(ranks[0], 10))
    before = signal.signal(signal.SIGALRM, told)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            waited(ranks[1])
    finally:
        signal.signal(signal.SIGALRM, before)


def test_ranks_wait_for_rank_0_through_the_store_before_a_collective(ranks):
    """The collective in which ranks exchange whether they succeeded has a time limit, so a rank must not wait in this
    collective while rank 0 works."""
    left = []
    for rank in ranks:
        rank.all_gather = lambda said, number=rank.rank: left.append((number, time.monotonic())) or [said]

    def works():
        with ranks[0].turns.heartbeat(), fail_together(ranks[0]):
            time.sleep(2 * TIMEOUT)
            left.append(("worked", time.monotonic()))

    thread, raised = other(works)
    with fail_together(ranks[1]):
        pass
    thread.join()
    assert not raised
    assert min(left, key=lambda one: one[1])[0] == "worked"


@pytest.mark.parametrize(("device", "size", "left"), [("cpu", 2, True), ("cuda", 1, True), ("cuda", 2, False)])
def test_failed_rank_destroys_its_process_group_except_on_several_cards(monkeypatch, device, size, left):
    """On several cards, destroying the group might wait for the other ranks. In all other cases the group must be
    destroyed, because otherwise the failed rank's error would appear only after the timeout of the remaining ranks."""
    seen = []
    monkeypatch.setattr(process_group, "_join", lambda _: None)
    monkeypatch.setattr(process_group, "instantiate", lambda _: fails)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: size)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: seen.append("left"))
    strategy = SimpleNamespace(timeout=5)

    def fails(**_):
        raise ValueError("out of memory")

    run = SimpleNamespace(strategy=strategy, device=device, devices=size, several=True)
    with pytest.raises(ValueError), process_group.process_group(run):
        pass
    assert seen == ["left"] * left
