"""Tests `weights.drive`. Training with a drive is bit-identical to training in memory, and a run on a failing drive
ends with an error that names the folder and the cause."""

import errno
import os
import resource
import subprocess
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from conftest import ROOT
from lowmem.offload.drive import OnDrive, SwapFile, SwapFiles
from lowmem.system import scratch_file
from lowmem.system.errors import DriveFailed, Refused
from lowmem.system.scratch_file import PAGE, Disk, Drive
from lowmem.training import training
from made_up import LateLane
from pairwise import pairwise
from streams import lines, trained

PRECISIONS = ("bf16-master", "16-master", "bf16-sr")
OPTIMS = ("adamw", "adamw8bit", "adafactor", "adam8bit", "lion8bit")
MATRIX = pairwise(PRECISIONS, OPTIMS, ("norm", "off"), ("fixed", "none"), ("state", "all"))
RECIPE = ("bf16-master", "adamw8bit", "off", "fixed", "state")


def run(
    config, folder, precision="bf16-master", optim="adamw8bit", clip="off", accumulation="none", holds="state", **how
):
    """Trains two optimizer steps and returns `streams.Trained`. Args: folder: value of `weights.drive`; None: no drive;
    holds: value of `weights.drive_holds`."""
    more = ("loss=tiled", "loss.columns=64", "max_steps=2")
    arguments = list(lines("llama", *more, precision=precision, optim=optim, clip=clip))
    arguments[3] = accumulation
    place = [] if folder is None else [f"weights.drive={folder}", f"weights.drive_holds={holds}"]
    return trained(config, ["weights=streamed", *place], "llama", arguments, **how)


@pytest.fixture(scope="module")
def in_memory():
    known = {}

    def get(config, *recipe):
        if recipe not in known:
            known[recipe] = run(config, None, *recipe)
        return known[recipe]

    return get


def changes_no_bit(config, in_memory, tmp_path, *recipe, **how):
    on_drive = run(config, tmp_path, *recipe, **how)
    nothing_to_store = recipe[0] == "bf16-sr" and recipe[1] == "adafactor" and recipe[4] == "state"
    assert nothing_to_store or on_drive.module.weights.drive.read_bytes > 0
    return in_memory(config, *recipe[:4]).same(on_drive)


@pytest.mark.rows("16-master-adamw-norm-fixed-state", "16-master-adamw8bit-off-none-all", "bf16-sr-adafactor-*")
@pytest.mark.parametrize("recipe", MATRIX, ids="-".join)
def test_training_with_a_drive_has_the_bits_of_training_in_memory(config, in_memory, tmp_path, recipe):
    assert changes_no_bit(config, in_memory, tmp_path, *recipe)
    assert not list(tmp_path.iterdir())  # the swap files have no names


@pytest.mark.parametrize("holds", ["state", "all"])
def test_drive_with_updates_on_a_host_thread_gives_the_bits_of_training_in_memory(config, in_memory, tmp_path, holds):
    """As on a card, the host thread reads and writes the drive while the training thread looks up the location of
    weights."""
    lane = LateLane(seed=0)
    assert changes_no_bit(config, in_memory, tmp_path, "bf16-master", "adamw8bit", "off", "fixed", holds, lane=lane)


@pytest.mark.parametrize("holds", ["state", "all"])
def test_drive_with_weights_order_by_layer_gives_the_bits_of_training_in_memory(config, tmp_path, holds):
    arguments = lines("llama", "loss=tiled", "loss.columns=64", "max_steps=2", policy="offload", clip="off")
    place = ["weights=streamed", "weights.order=by_layer"]
    drive = [f"weights.drive={tmp_path}", f"weights.drive_holds={holds}"]
    assert trained(config, place, "llama", arguments).same(trained(config, [*place, *drive], "llama", arguments))


# --- slow and failing drives ------------------------------------------------------------------------------------------


class Made(Disk):
    """A drive that is slow, reports short transfers, or fails. Args: fails: (name of the method that fails, number of
    its calls that succeed first, errno); short: maximum number of bytes that a call reports as transferred; late: delay
    of each call in seconds."""

    def __init__(self, fails=("", 0, 0), short=1 << 40, late=0.0):
        self.fails, self.short, self.late = fails, short, late
        self.calls = dict.fromkeys(("create", "reserve", "read", "write"), 0)

    def _called(self, name):
        time.sleep(self.late)
        call, after, number = self.fails
        self.calls[name] += 1
        if name == call and self.calls[name] > after:
            raise OSError(number, os.strerror(number))

    def create(self, folder, direct):
        self._called("create")
        return super().create(folder, direct)

    def reserve(self, file, start, size):
        self._called("reserve")
        super().reserve(file, start, size)

    def read(self, file, into, start):
        self._called("read")
        return min(self.short, super().read(file, into, start))

    def write(self, file, data, start):
        self._called("write")
        return min(self.short, super().write(file, data, start))


@pytest.fixture
def disk(monkeypatch):
    def put(**how):
        made = Made(**how)
        monkeypatch.setattr(scratch_file, "Disk", lambda: made)
        return made

    return put


@pytest.mark.parametrize("how", [{"short": PAGE}, {"short": 3 * PAGE + 5}, {"late": 0.002}], ids=str)
def test_slow_drive_or_short_transfers_give_the_bits_of_training_in_memory(config, in_memory, tmp_path, disk, how):
    made = disk(**how)
    assert changes_no_bit(config, in_memory, tmp_path, *RECIPE)
    assert made.calls["read"] > 0


@pytest.mark.parametrize(
    ("call", "after", "number", "words"),
    [
        ("read", 4, errno.EIO, "reading or writing this drive failed (Input/output error)"),
        ("write", 8, errno.EIO, "reading or writing this drive failed (Input/output error)"),
        ("write", 8, errno.ENODEV, "reading or writing this drive failed (No such device)"),
        ("reserve", 6, errno.ENOSPC, "Type a folder on a drive with more space"),
        ("create", 3, errno.EROFS, "reading or writing this drive failed (Read-only file system)"),
    ],
)
@pytest.mark.parametrize("lane", [None, 0], ids=["here", "other thread"])
def test_failed_drive_call_ends_the_run_with_an_error_that_names_the_folder_and_the_cause(
    config, tmp_path, disk, call, after, number, words, lane
):
    disk(fails=(call, after, number))
    with pytest.raises(DriveFailed) as error:
        run(config, tmp_path, lane=None if lane is None else LateLane(lane))
    assert str(error.value).startswith(f"weights.drive={tmp_path}: ") and words in str(error.value)


def test_reading_beyond_the_end_of_a_swap_file_raises_an_error(tmp_path):
    drive = Drive(tmp_path)
    file, memory = drive.file(), scratch_file.buffer(4 * PAGE)
    file.grow(2 * PAGE)
    with pytest.raises(OSError, match="less than a page"):
        file.read(0, memoryview(memory)).result()


# --- deliberately wrong variants --------------------------------------------------------------------------------------


def without_waiting_for_a_read(monkeypatch):
    monkeypatch.setattr(SwapFile, "wait", lambda self: None)


def written_when_its_turn_begins(monkeypatch):
    bind, start = SwapFile.bind, SwapFile.start_writing

    def early(self):
        bind(self)
        if self.memory is not None:
            start(self)
            self.wait()

    monkeypatch.setattr(SwapFile, "bind", early)
    monkeypatch.setattr(
        SwapFile, "start_writing", lambda self: start(self) if not self._file or self.size > self._file.size else None
    )


@pytest.mark.wrong
@pytest.mark.parametrize("wrong", [without_waiting_for_a_read, written_when_its_turn_begins])
def test_drive_with_a_deliberate_fault_differs_from_training_in_memory(
    config, in_memory, tmp_path, disk, monkeypatch, wrong
):
    disk(late=0.002)
    wrong(monkeypatch)
    assert not changes_no_bit(config, in_memory, tmp_path, *RECIPE)


# --- swap files -------------------------------------------------------------------------------------------------------


def swap_files(folder, count=6, elements=PAGE, ahead=1):
    """Returns (the `SwapFiles`, the swap file of each block, the large tensor of each block). All elements of a large
    tensor equal the number of its block."""
    all_of_it = SwapFiles(Drive(folder))
    every = [all_of_it.new(ahead=ahead) for _ in range(count)]
    tensors = [torch.full((elements,), float(number)) for number in range(count)]
    for swap_file, tensor in zip(every, tensors, strict=True):
        all_of_it.pin(swap_file)
        all_of_it.put(swap_file, "weight", {"tensor": tensor, "small": torch.ones(3), "count": 7})
    return all_of_it, every, tensors


@pytest.mark.parametrize("ahead", [1, 3])
def test_blocks_swapped_to_a_drive_take_at_most_the_memory_of_prefetched_blocks_plus_two_and_keep_changes(
    tmp_path, ahead
):
    blocks, every, tensors = swap_files(tmp_path, ahead=ahead)
    for _ in range(3):
        for number, swap_file in enumerate(every):
            blocks.pin(swap_file)
            assert sum(memory.nbytes for memory in blocks.memory()) <= (ahead + 2) * swap_file.size
            tensors[number] += 1
    blocks.finish()
    assert [tensor[0].item() for tensor in tensors] == [number + 3 for number in range(6)]
    assert all(bool((tensor == tensor[0]).all()) for tensor in tensors)
    blocks.check()


@pytest.mark.parametrize("ahead", [1, 3])
def test_next_blocks_are_prefetched_from_the_drive_and_each_block_is_read_once_per_round(tmp_path, ahead):
    blocks, every, _ = swap_files(tmp_path, ahead=ahead)
    for _ in range(3):  # in the first round the next block is not known yet
        before = blocks.drive.read_bytes
        for number, swap_file in enumerate(every):
            while any(other.moving() for other in blocks._inside):
                time.sleep(0.001)
            blocks.pin(swap_file)
            ahead_of_it = [every[(number + more) % 6].memory is not None for more in range(1, ahead + 1)]
    assert all(ahead_of_it) and blocks.drive.read_bytes - before == sum(swap_file.size for swap_file in every)


def test_drive_buffers_of_a_mixture_of_experts_hold_one_block_ahead_and_routers_stay_in_memory():
    """A block has a small router, attention, and two stacks of experts, one twice as large as the other. The buffers
    must hold the file that is being written, the pinned file and the files of one block ahead, which takes less memory
    than four buffers of the size of the larger stack."""
    router, attention, up, down = (torch.nn.Parameter(torch.zeros(n)) for n in (2000, 40_000, 2_000_000, 1_000_000))
    blocks = [[torch.nn.Parameter(p.clone()) for p in (router, attention, up, down)] for _ in range(6)]
    on_drive = OnDrive(None, blocks, (), weights_too=False)
    for block in blocks:
        for number, p in enumerate(block):
            on_drive.put(p, str(number), {"master": torch.zeros(p.numel())})
    sizes = on_drive.sizes
    assert sizes.masters == 6 * 4 * (40_000 + 2_000_000 + 1_000_000)  # the routers stay in memory
    largest, block_size = 4 * 2_000_000, 4 * 3_040_000
    assert block_size + largest <= sizes.room <= 2 * block_size < 4 * largest


def test_dense_first_blocks_do_not_enlarge_the_drive_buffers_of_a_mixture_of_experts():
    """Each of the three dense blocks has five files. Each mixture-of-experts block has two files, ten times as large.
    The buffers must hold two large files ahead, not five."""
    dense, expert = ([torch.zeros(n)] * count for n, count in ((100_000, 5), (1_000_000, 2)))
    blocks = [[torch.nn.Parameter(p.clone()) for p in block] for block in [dense] * 3 + [expert] * 4]
    on_drive = OnDrive(None, blocks, (), weights_too=False)
    for number, p in enumerate(p for block in blocks for p in block):
        on_drive.put(p, str(number), {"master": torch.zeros(p.numel())})
    assert 4 * 4_000_000 <= on_drive.sizes.room < 5 * 4_000_000


def test_tensors_below_a_page_are_not_swapped_to_a_drive(tmp_path):
    blocks, _, _ = swap_files(tmp_path)
    assert blocks.tensors() and all(tensor.nbytes >= PAGE for tensor in blocks.tensors())


def test_writing_to_an_unpinned_tensor_swapped_to_a_drive_kills_the_process(tmp_path):
    blocks, every, tensors = swap_files(tmp_path)
    blocks.pin(every[-1])
    child = os.fork()
    if not child:
        tensors[0].add_(1)  # the data is a read-only view of the mapped file
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_checkpoint_of_tensors_swapped_to_a_drive_has_the_size_of_the_tensors(tmp_path):
    *_, tensors = swap_files(tmp_path)
    torch.save(tensors, tmp_path / "saved")
    assert (tmp_path / "saved").stat().st_size < 1.1 * sum(tensor.nbytes for tensor in tensors) + 8 * PAGE


def test_drive_without_o_direct_uses_the_page_cache_and_gives_the_bits_of_training_in_memory(
    config, in_memory, tmp_path, monkeypatch
):
    def refuses(self, folder, direct):
        if direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return create(self, folder, direct)

    create = Disk.create
    monkeypatch.setattr(Disk, "create", refuses)
    assert not Drive(tmp_path).direct
    assert changes_no_bit(config, in_memory, tmp_path, *RECIPE)


def test_drive_folder_on_tmpfs_is_recognized_as_memory(tmp_path):
    assert not scratch_file.is_memory(ROOT)
    if Path("/dev/shm").is_dir():
        assert scratch_file.is_memory(Path("/dev/shm/made/later"))


@pytest.mark.process
@pytest.mark.matrix
def test_full_drive_ends_the_run_with_no_space_left_on_device(config, tmp_path):
    image, folder = tmp_path / "image", tmp_path / "mounted"
    folder.mkdir()
    image.write_bytes(bytes(1 << 18))
    commands = [["mkfs.ext4", "-q", "-F", image], ["mount", "-o", "loop", image, folder]]
    try:
        for command in commands:
            subprocess.run(command, check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting takes root and a loop device")
    try:
        with pytest.raises(DriveFailed, match="No space left on device"):
            run(config, folder)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True, timeout=60)


def test_drive_does_not_change_the_peak_memory_of_the_device(fit, tmp_path):
    typed = ("precision=bf16-master", "optim=adamw8bit", "weights=streamed", "gradient_checkpointing=every_layer")
    typed += ("loss=tiled", "clip=null", "max_steps=2", "logger=none", "model.architecture.n_embd=64")
    peaks = []
    for holds in ("", "state", "all"):
        place = (f"weights.drive={tmp_path}/drive", f"weights.drive_holds={holds}") if holds else ()
        summary, _ = fit(*typed, *place, folder=f"run-{holds}")
        peaks.append(summary["peak_bytes"]["device"])
    assert peaks[0] == peaks[1] == peaks[2]


def test_block_on_a_drive_uses_two_file_descriptors_for_any_number_of_tensors(tmp_path):
    before, blocks = len(os.listdir("/proc/self/fd")), SwapFiles(Drive(tmp_path))
    every = [blocks.new() for _ in range(6)]
    for swap_file in (*every, *every):
        blocks.pin(swap_file)
        more = len(blocks._every[0].tensors())
        blocks.put(swap_file, "weight", {str(number + more): torch.ones(PAGE) for number in range(8)})
    blocks.finish()
    assert len(os.listdir("/proc/self/fd")) - before <= 2 * len(every)


@pytest.mark.matrix
def test_adamw4bit_with_a_drive_gives_the_bits_of_training_in_memory(config, in_memory, tmp_path):
    assert changes_no_bit(config, in_memory, tmp_path, "bf16-master", "adamw4bit", "off", "none", "state")


@pytest.mark.parametrize("refused", [False, True], ids=["runs", "refused"])
def test_run_with_a_drive_restores_the_open_file_limit(fit, tmp_path, monkeypatch, refused):
    """In the "refused" case, the run raises an error after it has raised the limit."""
    before, seen, assembled = resource.getrlimit(resource.RLIMIT_NOFILE), [], training._assembled
    few = (1024, before[1])

    def looking(*arguments):
        seen.append(resource.getrlimit(resource.RLIMIT_NOFILE))
        if refused:
            raise Refused("for another reason")
        return assembled(*arguments)

    monkeypatch.setattr(training, "_assembled", looking)
    recipe = ("weights=streamed", "precision=bf16-master", "optim=adamw", "gradient_checkpointing=every_layer")
    resource.setrlimit(resource.RLIMIT_NOFILE, few)
    try:
        with pytest.raises(Refused, match="another reason") if refused else nullcontext():
            fit(*recipe, f"weights.drive={tmp_path}/drive", "max_steps=1")
        assert seen[0][0] > few[0] and resource.getrlimit(resource.RLIMIT_NOFILE) == few
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
