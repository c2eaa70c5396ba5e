"""Tests that the memory tracker counts each live storage once and assigns the storage to a category."""

import threading

import pytest
import torch

from lowmem.memory.ledger import Ledger, gradients, optimizer_state, weights
from lowmem.memory.tracker import StorageTracker, highest, host_side
from lowmem.system.units import CATEGORIES

KIB = 1024


def peak(tracker):
    return max(point.total for point in tracker.timeline())


def floats(kib):
    return torch.zeros(kib * KIB // 4)


def test_tracked_memory_is_the_sum_of_live_storages_after_each_event():
    with StorageTracker({}) as tracker:
        a = floats(4)
        b = a + 1
        del a
        c = b * 2  # b and c have 8 KiB; the storage of a is freed
        del b, c
    totals = [point.total // KIB for point in tracker.timeline()]
    assert totals == [0, 4, 8, 4, 8, 4, 0]


def test_memory_tracker_does_not_count_views_in_place_operations_or_out_arguments_again():
    with StorageTracker({}) as tracker:
        a = floats(4)
        a.view(2, -1).t().mul_(2)
        torch.add(a, a, out=a)
        kept = a[1:]
        del a  # the view keeps the storage
        assert peak(tracker) == 4 * KIB
        del kept
    assert list(tracker.timeline())[-1].total == 0


def test_memory_tracker_counts_storages_older_than_the_tracker_once():
    module = torch.nn.Linear(32, 32, bias=False)
    ledger = Ledger()
    ledger.own("weights", lambda: weights(module))
    with StorageTracker(ledger.storages()) as tracker:
        module.weight.detach().mul_(2)
    assert [point.bytes["weights"] for point in tracker.timeline()] == [4 * KIB]


def test_memory_tracker_assigns_gradients_and_optimizer_state_of_a_training_step_to_categories():
    module = torch.nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    ledger = Ledger()
    ledger.own("weights", lambda: weights(module))
    ledger.own("gradients", lambda: gradients(module.parameters()))
    ledger.own("optimizer", lambda: optimizer_state(optimizer))
    size = 64 * 64 * 4
    with StorageTracker(ledger.storages()) as tracker:
        loss = module(torch.randn(8, 64)).sum()
        tracker.phase = "backward"
        loss.backward()
        tracker.settle(ledger.storages())
        tracker.phase = "step"
        optimizer.step()
        tracker.settle(ledger.storages())
    last = list(tracker.timeline())[-1]
    assert last.bytes["weights"] == last.bytes["gradients"] == size
    assert last.bytes["optimizer"] == 2 * size + 4  # two moments and the step count
    peaks = highest(tracker.timeline())
    assert peaks["forward"].bytes["gradients"] == 0
    assert peaks["backward"].bytes["gradients"] == size  # from the allocation on, although `settle` assigns them later
    assert peaks["step"].bytes["other"] >= size  # temporary tensors of the step with foreach=False


def test_memory_tracker_does_not_count_host_tensors_on_the_device():
    host, device = floats(8), floats(4)
    ledger = Ledger()
    for tensor, side in ((host, "host"), (device, "device")):
        ledger.own("optimizer", lambda tensor=tensor: [tensor], side)
    with StorageTracker(ledger.storages()) as tracker:
        host.add_(1)
        born = floats(2)
        ledger.own("weights", lambda: [born], "host")
        tracker.settle(ledger.storages())
    assert peak(tracker) == 4 * KIB


@pytest.mark.parametrize("device", ["meta", None])
def test_unowned_host_memory_counts_on_a_cpu_but_not_on_a_separate_device(device):
    """Staging slots, for example, have no owner and are not on the card. `device` is the type of the separate device,
    or None if the device is the CPU itself."""
    with StorageTracker({}, device=device) as tracker:
        kept = [floats(4), torch.zeros(2 * KIB, dtype=torch.uint8, device="meta")]
        assert peak(tracker) == (2 if device else 6) * KIB
        del kept


def test_memory_ledger_counts_tied_weights_once_and_no_host_tensors_on_the_device():
    a = torch.nn.Linear(16, 16, bias=False)
    b = torch.nn.Linear(16, 16, bias=False)
    b.weight = a.weight
    ledger = Ledger()
    ledger.own("weights", lambda: [*weights(a), *weights(b), a.weight.t()])
    ledger.own("optimizer", lambda: [floats(3)], side="host")
    assert ledger.bytes() == dict.fromkeys(CATEGORIES, 0) | {"weights": KIB}


def test_optimizer_state_includes_tensors_in_nested_dicts():
    class Nested:
        state = {"p": {"block": [floats(1), {"deep": floats(2)}], "step": 3}}  # noqa: RUF012

    assert sum(t.nbytes for t in optimizer_state(Nested)) == 3 * KIB


@pytest.mark.wrong
def test_memory_tracker_without_weak_references_does_not_notice_freed_storages(monkeypatch):
    """In the wrong variant, the tracker does not keep its weak references, so it counts a freed storage forever."""

    class Forgetful(list):
        def append(self, item):
            super().append(None)

    tracker = StorageTracker({})
    tracker._references = Forgetful()
    with tracker:
        a = floats(4)
        del a
    with pytest.raises(AssertionError):
        assert list(tracker.timeline())[-1].total == 0


def test_storage_older_than_the_memory_tracker_counts_until_the_storage_is_freed():
    """Optimizer state may be replaced, and gradients may be dropped. A new storage at the address of a freed storage
    counts as a new storage."""
    held, ledger = [floats(8), floats(4)], Ledger()
    ledger.own("optimizer", lambda: held[:1])
    ledger.own("gradients", lambda: held[1:], "host")
    with StorageTracker(ledger.storages()) as tracker:
        held[0] = torch.zeros_like(held[0])
        held.pop()
        tracker.settle(ledger.storages())
    points = list(tracker.timeline())
    assert [point.total for point in points] == [8 * KIB, 16 * KIB, 8 * KIB, 8 * KIB]
    assert [point.host for point in points] == [4 * KIB, 4 * KIB, 4 * KIB, 0]
    assert [point.host_bytes["gradients"] for point in points] == [4 * KIB, 4 * KIB, 4 * KIB, 0]
    assert tracker.now == 8 * KIB and points[-1].bytes["optimizer"] == 8 * KIB


@pytest.mark.parametrize("beside", [True, False], ids=["other thread", "same thread"])
def test_allocation_during_host_work_counts_on_the_device_only_if_the_work_is_in_another_thread(beside):
    """On a card the host thread updates masters while training continues. With `beside`, the host work and the
    allocation run in different threads."""

    def work() -> None:
        with host_side():
            there.set()
            assert done.wait(60) or not beside

    there, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=work)
    with StorageTracker({}) as tracker:
        if beside:
            thread.start()
            there.wait(60)
            made = floats(4)
            done.set()
            thread.join()
        else:
            with host_side(), host_side():
                pass
            with host_side():
                made = floats(4)
    assert made.nbytes == 4 * KIB
    assert (peak(tracker) == 4 * KIB) == beside


def test_memory_tracker_counts_a_resized_storage_with_its_current_size():
    """fully_shard resizes the storages of gathered weights. The storage `early` has size 0 when tracking begins."""
    early = floats(8).untyped_storage()
    early.resize_(0)
    with StorageTracker({}) as tracker:
        a = floats(4)
        a.untyped_storage().resize_(0)
        b = floats(2)
        a.untyped_storage().resize_(4 * KIB)
        early.resize_(8 * KIB)
        early.resize_(8 * KIB)  # no change
        del a
        early.resize_(0)
    assert [point.total // KIB for point in tracker.timeline()] == [0, 4, 0, 2, 6, 14, 10, 2]
    assert b.untyped_storage().nbytes() == 2 * KIB
    assert "resize_" not in vars(torch.UntypedStorage)  # the tracker has removed its patch


def test_optimizer_state_can_be_iterated_while_states_are_added():
    class Stepping:
        state = {number: {"m": torch.zeros(4)} for number in range(3)}  # noqa: RUF012

    tensors = optimizer_state(Stepping)
    next(tensors)
    Stepping.state[3] = {"m": torch.zeros(4)}
    for state in Stepping.state.values():
        state["v"] = torch.zeros(4)
    assert len(list(tensors)) >= 2
