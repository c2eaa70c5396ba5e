"""memory.limit ends a run where the card would have; what waits on the host does not count."""

import pytest
import torch

from lowmem.memory import cap
from lowmem.memory.tracker import OverLimit, StorageTracker, belongs
from lowmem.system.errors import Refused
from lowmem.techniques.gradient_checkpointing.boundary import Chain


@pytest.mark.parametrize(
    ("text", "size"),
    [("12GiB", 12 * 2**30), ("1.5 GiB", 3 * 2**29), ("900MiB", 900 * 2**20), (4096, 4096), ("7B", 7), (None, None)],
)
def test_sizes_are_read_with_their_units(text, size):
    assert cap.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["12GB", "12G", "lots", "-1GiB", "0", ""])
def test_other_units_are_refused(text):
    with pytest.raises(Refused, match="GiB"):
        cap.parse_bytes(text)


def test_a_bad_size_is_refused_as_typed(command):
    code, said = command("memory.limit=12GB")
    assert code == 1 and "12GiB" in said


def test_the_operator_that_exceeds_the_limit_raises():
    with StorageTracker({}, limit=10_000) as tracker:
        kept = torch.zeros(1000)
        for _ in range(10):  # freed in time
            torch.zeros(1000)
        assert tracker.now == kept.nbytes
        with pytest.raises(OverLimit, match="10000 allowed"):
            torch.zeros(2000)


def test_what_is_on_the_host_does_not_count():
    with StorageTracker({}, limit=10_000) as tracker:
        host = torch.zeros(2000)
        belongs(host, "activations", "host")
        assert tracker.now == 0
        torch.zeros(2000)
        del host
        assert tracker.now == 0
        points = list(tracker.timeline())
    assert max(point.total for point in points) == 8000


def test_a_boundary_comes_back_as_it_was_and_starts_the_one_before():
    make = Chain().make
    first, second = torch.randn(3, 4), torch.randn(3, 4, requires_grad=True)
    one, two = make(0, first), make(1, second)
    assert one.host.data_ptr() != first.data_ptr()
    back = two.fetch()
    assert torch.equal(back, second) and back.requires_grad and one.back is not None and two.host is None
    assert torch.equal(one.fetch(), first)


def test_boundaries_of_several_micro_batches_come_back_in_the_order_in_which_backward_needs_them():
    chain = Chain()
    made = {(block, n): chain.make(block, torch.randn(2)) for block in range(2) for n in range(2)}
    order = [(1, 0), (1, 1), (0, 0), (0, 1)]
    for place, coming in zip(order, [*order[1:], None], strict=True):
        made.pop(place).fetch()
        assert [other for other, boundary in made.items() if boundary.back is not None] == ([coming] if coming else [])


def test_the_run_ends_in_advice_and_not_in_the_kernel(command, tmp_path):
    code, said = command("memory.limit=300KiB")
    assert code == 1 and "Out of memory" in said and "activations" in said and "Traceback" not in said


def test_the_cap_on_cuda_is_a_share_of_the_card_and_is_lifted(monkeypatch):
    said = []
    card = type("Card", (), {"total_memory": 48 * 2**30})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: card)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", said.append)
    with cap.capped(12 * 2**30, "cuda"):
        assert said == [0.25]
    assert said == [0.25, 1.0]
    with cap.capped(12 * 2**30, "cpu"), cap.capped(None, "cuda"):
        assert len(said) == 2


def test_the_share_of_a_card_is_not_a_byte_less_than_the_cap():
    """The deliberately wrong variant: the quotient itself, of which torch makes one byte less for many sizes."""
    totals = (12 * 2**30 - 2**22, 85_017_493_504, 25_296_044_032)
    caps = [(n * 2**21, total) for total in totals for n in range(1, 500)]
    assert all(size <= int(cap._share(size, total) * total) <= size + 1 for size, total in caps)
    assert not all(size <= int(size / total * total) for size, total in caps)


@pytest.mark.gpu
def test_on_a_card_the_cap_ends_an_allocation_and_is_lifted():
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + 2**28
    with cap.capped(room, "cuda"):
        torch.empty(2**27, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**29, dtype=torch.uint8, device="cuda")
    torch.empty(2**29, dtype=torch.uint8, device="cuda")


@pytest.mark.gpu
def test_on_a_card_the_run_ends_in_advice_and_leaves_a_snapshot(command, tmp_path):
    """100M parameters in 300 MiB."""
    wide = ("model.architecture.n_embd=1024", "model.architecture.n_layer=8")
    code, said = command("device=cuda", "memory.limit=300MiB", *wide)
    assert code == 1 and "Out of memory" in said and "Try, one after the other" in said and "Traceback" not in said
    assert (tmp_path / "run" / "memory_snapshot.pickle").stat().st_size > 1000
