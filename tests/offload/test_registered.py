"""Tests the host memory of streamed weights. It is registered with CUDA during a run; memory that cannot be registered
is copied through staging slots."""

import threading
from collections import deque
from concurrent.futures import Future
from functools import partial

import pytest
import torch

from lowmem.offload import streamed
from lowmem.offload.copy_lanes import AtOnce, CardLane
from lowmem.offload.registered import Registered
from lowmem.techniques.weights.streamed import Streamed
from made_up import Reached, SlowLane
from networks import VOCABULARY, network
from tolerances import FP32_REORDERED
from two_models import configured, equal, ours

pytestmark = pytest.mark.kernels
WHY = "operation not permitted"


class Container(SlowLane):
    """A lane that registers at most `most` buffers at a time, as in a container that limits pinned memory."""

    def __init__(self, most):
        super().__init__()
        self.most = most

    def register(self, memory):
        if self.registered.total() == self.most:
            return WHY
        return super().register(memory)


class Shut(SlowLane):
    """A lane whose copies do not begin before `open` is set."""

    def __init__(self):
        super().__init__()
        self.open, self.asked = threading.Event(), 0

    def copy(self, to, source, after):
        self.asked += 1
        first = Reached(self.copies.submit(lambda: (self.open.wait(60), after.synchronize())))
        return super().copy(to, source, first)


class Forgetful(deque):
    """Wrong variant of a queue of staging slots: the last copy of every slot counts as complete."""

    def append(self, slot):
        super().append((slot[0], AtOnce()))


def bytes_(count):
    return torch.randint(256, (count,), dtype=torch.uint8)


@pytest.mark.rows("full-1-*", "tiled-0-*")
@pytest.mark.parametrize(
    ("loss", "most", "said"),
    [
        ("full", 9, "Pinned 0.0 GiB"),
        ("full", 1, "2 pinned staging buffers of 0 MiB"),
        ("full", 0, WHY),
        ("tiled", 0, WHY),
    ],
)
def test_streamed_weights_registered_or_staged_have_the_bits_of_resident_weights_and_are_unregistered(
    config, monkeypatch, caplog, loss, most, said
):
    """With `most` = 9, all three host blocks can be registered; with 1, one block; with 0, none. Staging slots are
    smaller than a weight. With the tiled loss, tiles of the head and rows of the embedding are copied, too."""
    lane = Container(most)
    monkeypatch.setattr(streamed, "lane_of", lambda device: lane)
    monkeypatch.setattr(streamed, "Registered", partial(Registered, slot_bytes=4096))
    where = {name: f"weights={name}" for name in ("resident", "streamed")}
    line = (
        "bf16-master",
        "adamw",
        "norm",
        "none",
        "linear",
        "gradient_checkpointing=every_layer",
        "max_steps=3",
        f"loss={loss}",
    )
    with caplog.at_level("INFO", "lowmem"):
        found = {name: ours(configured(config, *line, typed)) for name, typed in where.items()}
    assert equal(found["streamed"], found["resident"])
    assert lane.moved and said in caplog.text
    assert len(lane.registered) == min(most, 3) and lane.registered.total() == 0  # unregistered at the end of the run


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "forgetful"])
def test_staging_slot_is_refilled_after_its_copy_unless_copies_count_as_complete_at_once(wrong):
    lane, source = Container(0), bytes_(4000)
    way, to = Registered(lane, [source], slot_bytes=64), torch.zeros_like(source)
    if wrong:
        way._staging._slots = Forgetful(way._staging._slots)
    way.hold(way.copy(to, source, way.mark()))
    way.close()
    assert torch.equal(to, source) != wrong


def test_training_loop_does_not_wait_for_host_copies_into_staging():
    """The copy has ten pieces, and the copies from both slots are blocked. If the training thread itself filled the
    slots, it would wait forever for a free slot."""
    lane, source = Shut(), bytes_(640)
    lane.register = lambda memory: WHY
    way, to = Registered(lane, [source], slot_bytes=64), torch.zeros_like(source)
    landed = way.copy(to, source, way.mark())
    assert lane.asked <= 2 and not to.any()
    lane.open.set()
    way.hold(landed)
    assert lane.asked == 10 and torch.equal(to, source)
    way.close()


def test_copies_to_the_device_keep_their_order_if_only_some_use_staging():
    """All copies have the same destination, and each copy must run after the previous one. Two of the four sources are
    registered; copies of the other two use staging slots."""
    sources = [bytes_(640) for _ in range(4)]
    way, to = Registered(Container(2), sources, slot_bytes=64), torch.zeros(640, dtype=torch.uint8)
    after = way.mark()
    for source in (*sources, *reversed(sources)):
        after = way.copy(to, source, after)
    way.hold(after)
    assert torch.equal(to, sources[0])
    way.close()


def test_error_of_a_staged_copy_is_raised_where_it_is_awaited_and_memory_is_unregistered():
    class Broken(Container):
        def copy(self, to, source, after):
            raise ZeroDivisionError("in the copy")

    lane, sources = Broken(1), [bytes_(640), bytes_(640)]
    way = Registered(lane, sources, slot_bytes=64)
    landed = way.copy(torch.zeros(640, dtype=torch.uint8), sources[1], way.mark())
    with pytest.raises(ZeroDivisionError, match="in the copy"):
        way.hold(landed)
    with pytest.raises(ZeroDivisionError, match="in the copy"):
        way.close()
    assert lane.registered.total() == 0


@pytest.mark.parametrize("most", [0, 9])
def test_streamed_evaluation_in_inference_mode_has_the_logits_of_resident_weights(monkeypatch, most):
    """Inference mode is thread-local: the "staging" thread does not inherit the mode."""
    monkeypatch.setattr(streamed, "Registered", partial(Registered, slot_bytes=4096))
    whole, apart = (network("llama", tie_word_embeddings=False).eval() for _ in range(2))
    weights = Streamed(apart, head_in_tiles=True)
    weights.move_in(torch.device("cpu"))
    weights.lane, ids = Container(most), torch.randint(0, VOCABULARY, (2, 9))
    with torch.inference_mode():
        weights.start()
        torch.testing.assert_close(apart(ids).logits, whole(ids).logits, rtol=0, atol=FP32_REORDERED)
    weights.stop()


@pytest.mark.parametrize("failed", ["copy", "step"])
def test_parameters_have_the_original_bits_after_a_streamed_copy_or_update_has_failed(failed):
    class Broken(SlowLane):
        def copy(self, to, source, after):
            raise ZeroDivisionError("in the copy")

    model = network("llama", tie_word_embeddings=False)
    right = [p.detach().clone() for p in model.parameters()]
    weights = Streamed(model)
    weights.move_in(torch.device("cpu"))
    lane = weights.lane = Container(0)
    weights.start()
    if failed == "copy":
        lane.copy = Broken().copy
        weights._fetch(0)
    else:
        step = Future()
        step.set_exception(ZeroDivisionError("in a step"))
        weights.host_blocks[0].updates.append(step)
    weights.stop()
    assert all(map(torch.equal, right, model.parameters()))
    assert not weights._hooks and not weights._slots


# --- on a card --------------------------------------------------------------------------------------------------------


@pytest.fixture
def lane():
    return CardLane(torch.device("cuda"))


@pytest.mark.gpu
def test_memory_registered_on_a_card_is_pinned_in_place_until_unregistered(lane):
    memory = bytes_(5_000_001)
    place = memory.data_ptr()
    assert lane.register(memory) is None and memory.is_pinned() and memory.data_ptr() == place
    lane.unregister(memory)
    assert not memory.is_pinned()


@pytest.mark.gpu
def test_registered_memory_on_a_card_is_unregistered_when_freed(lane):
    array = bytes_(5_000_000).numpy()
    memory, view = torch.from_numpy(array), torch.from_numpy(array)  # the same memory, which outlives `memory`
    assert lane.register(memory) is None and view.is_pinned()
    del memory
    assert not view.is_pinned()


@pytest.mark.gpu
def test_failed_registration_on_a_card_is_reported_and_leaves_no_cuda_error(lane):
    memory = bytes_(5_000_000)
    assert lane.register(memory) is None
    assert "already" in lane.register(memory)
    assert torch.ones(3, device="cuda").sum().item() == 3
    lane.unregister(memory)


@pytest.mark.gpu
@pytest.mark.parametrize("refused", [False, True], ids=["registered", "staged"])
def test_streamed_weights_on_a_card_have_the_bits_of_resident_weights(
    config, deterministic, lane, monkeypatch, refused
):
    if refused:
        lane.register = lambda memory: WHY
    monkeypatch.setattr(streamed, "lane_of", lambda device: lane)
    monkeypatch.setattr(streamed, "Registered", partial(Registered, slot_bytes=4096))
    line = ("bf16-master", "adamw8bit", "norm", "fixed", "linear", "gradient_checkpointing=every_layer", "device=cuda")
    resident = ours(configured(config, *line))
    assert equal(ours(configured(config, *line, "weights=streamed")), resident)
