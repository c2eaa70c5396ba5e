"""Tests that memory.limit ends a run whose device memory exceeds the limit, and that running out of memory ends a run
with advice. Also tests the order in which offloaded block inputs are prefetched."""

import errno
import io
import json

import pytest
import torch

import snapshots
from devices import each_device
from lowmem.memory import cap
from lowmem.memory.snapshot import FILE
from lowmem.memory.tracker import OverLimit, StorageTracker, belongs
from lowmem.offload import copy_lanes
from lowmem.plan import advice, batch_size
from lowmem.system import errors
from lowmem.system.errors import Refused
from lowmem.techniques.gradient_checkpointing import boundary
from lowmem.techniques.gradient_checkpointing.boundary import Chain
from lowmem.training.module import CausalLM


@pytest.mark.parametrize(
    ("text", "size"),
    [("12GiB", 12 * 2**30), ("1.5 GiB", 3 * 2**29), ("900MiB", 900 * 2**20), (4096, 4096), ("7B", 7), (None, None)],
)
def test_memory_sizes_in_binary_units_are_parsed_to_bytes(text, size):
    assert cap.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["12GB", "12G", "lots", "-1GiB", "0", ""])
def test_memory_sizes_that_are_not_positive_numbers_in_binary_units_are_refused(text):
    with pytest.raises(Refused, match="GiB"):
        cap.parse_bytes(text)


def test_refusal_of_a_memory_limit_in_decimal_units_names_the_binary_unit(command):
    code, said = command("memory.limit=12GB")
    assert code == 1 and "12GiB" in said


def test_operator_that_exceeds_the_memory_limit_raises_an_error():
    with StorageTracker({}, limit=10_000) as tracker:
        kept = torch.zeros(1000)
        for _ in range(10):  # each tensor is freed before the next allocation
            torch.zeros(1000)
        assert tracker.now == kept.nbytes
        with pytest.raises(OverLimit, match=r"memory\.limit allows 10000"):
            torch.zeros(2000)


def test_host_memory_does_not_count_towards_the_memory_limit():
    with StorageTracker({}, limit=10_000) as tracker:
        host = torch.zeros(2000)
        belongs(host, "activations", "host")
        assert tracker.now == 0
        torch.zeros(2000)
        del host
        assert tracker.now == 0
        points = list(tracker.timeline())
    assert max(point.total for point in points) == 8000


def test_fetching_an_offloaded_block_input_returns_the_original_and_prefetches_the_previous_block_input():
    make = Chain().make
    first, second = torch.randn(3, 4), torch.randn(3, 4, requires_grad=True)
    one, two = make(0, first), make(1, second)
    assert one.host.data_ptr() != first.data_ptr()
    back = two.fetch()
    assert torch.equal(back, second) and back.requires_grad and one.back is not None and two.host is None
    assert torch.equal(one.fetch(), first)


def test_offloaded_block_inputs_of_several_micro_batches_are_prefetched_in_backward_order():
    chain = Chain()
    made = {(block, n): chain.make(block, torch.randn(2)) for block in range(2) for n in range(2)}
    order = [(1, 0), (1, 1), (0, 0), (0, 1)]
    for place, coming in zip(order, [*order[1:], None], strict=True):
        made.pop(place).fetch()
        assert [other for other, boundary in made.items() if boundary.back is not None] == ([coming] if coming else [])


def test_fetching_a_block_input_of_a_pipeline_stage_prefetches_the_previous_block_of_the_same_micro_batch():
    chain = Chain()
    made = {(n, block): chain.make(block, torch.randn(2)) for n in range(2) for block in range(3)}
    for n in range(2):
        for block in (2, 1, 0):
            made.pop((n, block)).fetch()
            back = [place for place, boundary in made.items() if boundary.back is not None]
            assert back == ([(n, block - 1)] if block else [])


def test_run_over_its_memory_limit_ends_with_advice_and_without_a_traceback(command, tmp_path):
    code, said = command("memory.limit=300KiB")
    assert code == 1 and "Out of memory" in said and "activations" in said and "Traceback" not in said


def test_memory_limit_on_cuda_sets_the_process_memory_fraction_and_resets_it(monkeypatch):
    said = []
    card = type("Card", (), {"total_memory": 48 * 2**30})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: card)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", said.append)
    with cap.capped(12 * 2**30, "cuda"):
        assert said == [0.25]
    assert said == [0.25, 1.0]
    with cap.capped(12 * 2**30, "cpu"), cap.capped(None, "cuda"):
        assert len(said) == 2


def test_cuda_memory_fraction_allows_at_least_the_limit_and_at_most_one_byte_more():
    """The wrong variant passes size / total. For some sizes, torch then allows fewer bytes than the limit."""
    totals = (12 * 2**30 - 2**22, 85_017_493_504, 25_296_044_032)
    caps = [(n * 2**21, total) for total in totals for n in range(1, 500)]
    assert all(size <= int(cap._share(size, total) * total) <= size + 1 for size, total in caps)
    assert not all(size <= int(size / total * total) for size, total in caps)


@pytest.mark.gpu
def test_memory_limit_on_a_card_fails_a_larger_allocation_until_the_limit_is_removed():
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + 2**28
    with cap.capped(room, "cuda"):
        torch.empty(2**27, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**29, dtype=torch.uint8, device="cuda")
    torch.empty(2**29, dtype=torch.uint8, device="cuda")


WIDE = ("model.architecture.n_embd=1024", "model.architecture.n_layer=8")  # 100M parameters
TOO_LARGE = {"cpu": ("memory.limit=300KiB",), "cuda": ("memory.limit=300MiB", *WIDE)}


@each_device
def test_out_of_memory_ends_a_run_with_advice_and_on_cuda_also_with_a_snapshot(command, tmp_path, device):
    code, said = command(f"device={device}", *TOO_LARGE[device])
    assert code == 1 and "Out of memory" in said and "Traceback" not in said
    assert "Memory at the peak, by category" in said and "Try these overrides" in said
    assert ("oom" in snapshots.actions(tmp_path / "run" / FILE)) == (device == "cuda")


CUDA = "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
CUDA += "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
SAID = [
    (
        torch.OutOfMemoryError,
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a ...",
        "device",
    ),
    (torch.AcceleratorError, f"CUDA error: out of memory\n{CUDA}", "device"),
    (RuntimeError, f"CUDA error: out of memory\n{CUDA}", "device"),
    (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "device"),
    (RuntimeError, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "device"),
    (RuntimeError, "Triton Error [CUDA]: out of memory", "device"),
    (RuntimeError, "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory", "host"),
    (RuntimeError, "unable to mmap 4096 bytes from file </f>: Cannot allocate memory (12)", "host"),
    (MemoryError, "", "host"),
    (OverLimit, "The device is out of memory: live tensors take 3 bytes, and memory.limit allows 2", "device"),
    (RuntimeError, "CUDA error: an illegal memory access was encountered", None),
    (RuntimeError, "mat1 and mat2 shapes cannot be multiplied (4x8 and 4x8)", None),
    (ValueError, "out of memory", None),
]


@pytest.mark.parametrize(("kind", "said", "side"), SAID, ids=[f"{kind.__name__}-{said[:40]}" for kind, said, _ in SAID])
def test_errors_of_libraries_are_classified_as_out_of_memory_on_device_or_host_or_neither(kind, said, side):
    error = kind.__new__(kind, said)
    error.args = (said,)
    assert errors.out_of_memory(error) == side
    assert errors.out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory")) == "host"


@pytest.fixture
def no_pinned_memory(monkeypatch):
    """Makes every pinned allocation after the first fail. If host memory cannot be pinned because it is full, CUDA
    raises the same error as for a full card."""
    empty, made = torch.empty, []

    def full(*shape, pin_memory=False, **how):
        made.extend([pin_memory] if pin_memory else [])
        if len(made) > 1:
            raise RuntimeError(f"CUDA error: out of memory\n{CUDA}")
        return empty(*shape, **how)

    class OnHost(copy_lanes.AtOnceLane):
        staging = copy_lanes.CardLane.staging

    monkeypatch.setattr(torch, "empty", full)
    monkeypatch.setattr(boundary, "_lane", lambda _: OnHost())


def test_failed_pinning_of_host_memory_ends_the_run_with_advice(no_pinned_memory, command):
    code, said = command("gradient_checkpointing=offload", "max_steps=1")
    assert code == 1 and "Out of memory" in said and "seq_len=8" in said and "Traceback" not in said


def test_failed_pinning_raises_a_memory_error_that_counts_as_out_of_memory_on_the_host(no_pinned_memory):
    lane = boundary._lane(torch.device("cuda"))
    lane.staging(4)
    with pytest.raises(MemoryError, match="host memory cannot be pinned") as full:
        lane.staging(4)
    assert errors.out_of_memory(full.value) == "host"


def test_advice_for_full_host_memory_does_not_suggest_gradient_checkpointing():
    used = {"gradient_checkpointing": "none", "precision": "32", "weights": "resident"}
    suggested = advice.advice(used, batch_size=8, seq_len=128, windows={0: 1})
    tries = {side: advice.out_of_memory(side, {"weights": 2**30}, suggested) for side in ("device", "host")}
    assert "Out of memory on the host" in tries["host"] and "seq_len=64" in tries["host"]
    of_masters = advice.out_of_memory("host", {"optimizer": 2**30}, suggested)
    assert "  optim=" in of_masters and "  optim=" not in tries["host"]
    assert "gradient_checkpointing=" in tries["device"] and "gradient_checkpointing=" not in tries["host"]


@pytest.mark.parametrize("said", [said for kind, said, side in SAID if kind is RuntimeError and side == "device"])
def test_batch_size_trial_that_runs_out_of_memory_exits_with_the_code_for_does_not_fit(config, monkeypatch, said):
    def full(*_):
        raise RuntimeError(said)

    monkeypatch.setattr(CausalLM, "training_step", full)
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(config("batch_size=4").resolved().as_dict())))
    with pytest.raises(SystemExit) as ended:
        batch_size.main()
    assert ended.value.code == batch_size.DOES_NOT_FIT
