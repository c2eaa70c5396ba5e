"""Tests the random states of a resumed run, and the clock that decides when to save.

The states of a checkpoint are restored if the resumed run has the same number of processes and each of them reads the
same data as before. If several processes read equal data, the strategy must also be the same. When states are not
restored, the log says so: several processes keep the seeds of the new run, and a single process is seeded again.
"""

import logging
from types import SimpleNamespace

import pytest
import torch

from lowmem.saving import random_states
from lowmem.techniques.strategy.contract import OneDevice

CPU = torch.device("cpu")


class Several(OneDevice):
    """A strategy of several processes, as rank `rank` sees it.

    Args:
        every: data rank of each process.
    """

    several = True

    def __init__(self, rank, every):
        super().__init__()
        self.rank, self.size, self.data_rank, self.of_all = rank, len(every), every[rank], every

    def all_gather(self, said):
        return self.of_all if isinstance(said, int) else [said]


class Other(Several):
    """A strategy with another name."""


def saved(kind, data_ranks):
    """Returns a checkpoint with a different random state for each process."""
    every = []
    for rank in range(len(data_ranks)):
        torch.manual_seed(100 + rank)
        every += random_states.capture(kind(rank, data_ranks), CPU)["random_states"]
    return {"random_states": every, "strategy": kind.__name__}


def drawn_by(ranks, there, window=3):
    torch.manual_seed(7)
    random_states.restore(there, ranks, CPU, window)
    return torch.rand(4)


def of(seed):
    return torch.rand(4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("there", "here", "goes_on"),
    [
        ((Several, [0, 1]), (Several, [0, 1]), True),
        ((Several, [0, 1]), (Other, [0, 1]), True),  # every rank reads different data
        ((Several, [0, 0]), (Several, [0, 0]), True),
        ((Several, [0, 0]), (Other, [0, 0]), False),  # ranks that read the same data may divide the work in another way
        ((Several, [0, 1]), (Several, [0, 0]), False),
        ((Several, [0, 1]), (Several, [0, 1, 2]), False),
    ],
    ids=["equal", "other strategy", "equal, shared data", "other strategy, shared data", "other data", "more ranks"],
)
def test_ranks_restore_random_states_unless_their_data_or_division_of_work_may_differ(caplog, there, here, goes_on):
    content, (kind, data_ranks) = saved(*there), here
    with caplog.at_level(logging.INFO):
        drawn = [drawn_by(kind(rank, data_ranks), content) for rank in range(len(data_ranks))]
    if goes_on:
        assert all(torch.equal(one, of(100 + rank)) for rank, one in enumerate(drawn)) and not caplog.records
    else:
        assert all(torch.equal(one, of(7)) for one in drawn)  # the random state that the new run has set
        assert f"the random states of {len(there[1])} processes (Several)" in caplog.text


def test_single_process_that_resumes_a_run_of_two_is_seeded_with_seed_plus_window_number(caplog):
    two = saved(Several, [0, 1])
    drawn = [drawn_by(OneDevice(), two, window) for window in (3, 4)]
    assert torch.equal(drawn[0], of(7 + 3)) and torch.equal(drawn[1], of(7 + 4))


def test_random_state_in_a_single_process_checkpoint_is_restored(caplog):
    torch.manual_seed(100)
    assert torch.equal(drawn_by(OneDevice(), {"random_states": {"cpu": torch.get_rng_state()}}), of(100))
    assert not caplog.records


@pytest.mark.parametrize(("first", "own", "late"), [(100.0, 0.0, True), (0.0, 100.0, False)])
def test_time_to_save_is_decided_by_the_clock_of_rank_0(monkeypatch, tmp_path, first, own, late):
    """Clocks of ranks differ. In each case the rank's own clock would give the opposite answer."""
    from lowmem.saving import checkpoint

    saves = checkpoint.Checkpoints(tmp_path, "1min")
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: own)
    ranks = SimpleNamespace(broadcast=lambda said: first >= 60.0)
    assert saves._late(ranks) == late != (own >= 60.0)
    assert not checkpoint.Checkpoints(tmp_path, 10)._late(None)  # save_every in steps needs no clock
