"""Tests checkpoint folders: any number of processes reads its shards bit-exactly, whatever number of processes wrote
the folder."""

import errno
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from test_checkpoint import Bomb

from as_rank import as_rank, part_of, saved_by
from host_memory import Highest, linux, resident
from lowmem.saving import checkpoint_folder
from lowmem.system.errors import Refused
from lowmem.system.fail_together import fail_together
from lowmem.techniques.strategy.contract import OneDevice
from new_process import in_a_new_process

ALONE = OneDevice()


def tensors(seed=0):
    torch.manual_seed(seed)
    return {
        "matrix": torch.randn(10, 6),
        "narrow": torch.randn(10, 4).bfloat16(),
        "vector": torch.randn(5),
        "tiny": torch.randn(1, 3),  # fewer rows than processes
        "codes": torch.randint(0, 255, (7, 3), dtype=torch.uint8),
        "number": torch.tensor(7.0),
    }


def read(stored, name):
    into = torch.full_like(stored[name], 0, device="cpu")
    stored.read(name, into)
    return into


def same_bits(one, other):
    one, other = one.contiguous().flatten(), other.contiguous().flatten()
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_checkpoint_of_any_number_of_processes_is_read_bit_exactly_by_any_other_number(tmp_path, size, dim):
    whole = tensors()
    saved_by(size, tmp_path / "step-00000001.ckpt", whole, {"x": 1}, dim)
    content, stored = checkpoint_folder.load(tmp_path / "step-00000001.ckpt")
    assert content == {"x": 1} and set(stored) == set(whole)
    assert checkpoint_folder.intact(tmp_path / "step-00000001.ckpt")
    for name, one in whole.items():
        assert same_bits(read(stored, name), one) and stored[name].shape == one.shape
        for count in (1, 2, 3, 4):
            for rank in range(count) if one.dim() else ():
                with as_rank(rank, count) as mesh:
                    expected = part_of(one, mesh)
                    part = part_of(torch.full_like(one, 0), mesh)
                    stored.read(name, part)
                    assert same_bits(part.to_local(), expected.to_local()), (name, rank, count)


@pytest.mark.wrong
def test_exchanged_pieces_in_a_checkpoint_index_give_wrong_values(tmp_path):
    """Wrong on purpose: two pieces of equal size are exchanged in the index."""
    whole = {"matrix": torch.randn(8, 3)}
    saved_by(2, tmp_path / "folder", whole)
    _, stored = checkpoint_folder.load(tmp_path / "folder")
    (at, sizes, piece), (other_at, _, other) = stored.tensors["matrix"]["pieces"]
    stored.tensors["matrix"]["pieces"] = [(at, sizes, other), (other_at, sizes, piece)]
    assert not same_bits(read(stored, "matrix"), whole["matrix"])


def test_replicated_tensor_is_written_once_to_a_checkpoint_folder(tmp_path):
    saved_by(4, tmp_path / "folder", {"number": torch.tensor(1.0)})
    _, stored = checkpoint_folder.load(tmp_path / "folder")
    assert len(stored.tensors["number"]["pieces"]) == 1
    assert sum(file.stat().st_size for file in (tmp_path / "folder").glob("part-*")) == 4


def test_tensor_of_a_checkpoint_folder_is_read_into_another_dtype_or_layout(tmp_path):
    whole = {"matrix": torch.randn(6, 4)}
    checkpoint_folder.save(tmp_path / "folder", whole, {}, ALONE)
    _, stored = checkpoint_folder.load(tmp_path / "folder")
    narrow, turned = torch.empty(6, 4, dtype=torch.bfloat16), torch.empty(4, 6)
    stored.read("matrix", narrow)
    stored.read("matrix", turned.t())
    assert same_bits(narrow, whole["matrix"].bfloat16()) and same_bits(turned.t(), whole["matrix"])


def test_tensors_of_a_checkpoint_folder_are_listed_under_a_prefix(tmp_path):
    checkpoint_folder.save(tmp_path / "folder", {"a/x": torch.ones(2), "b/x": torch.zeros(2)}, {}, ALONE)
    of_b = checkpoint_folder.load(tmp_path / "folder")[1].under("b/")
    assert list(of_b) == ["x"] and same_bits(read(of_b, "x"), torch.zeros(2))


# --- complete or absent ----------------------------------------------------------------------------------------------


class FullDisk:
    """A file on a full disk: every write raises an OSError."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("at", ["_written", "_entry"])
def test_failed_save_leaves_only_the_previous_checkpoint_folder(tmp_path, monkeypatch, at):
    path = tmp_path / "step-00000001.ckpt"
    checkpoint_folder.save(path, {"x": torch.ones(3)}, {}, ALONE)
    monkeypatch.setattr(checkpoint_folder, at, lambda *_: FullDisk(None).write(b""))
    with pytest.raises(OSError, match="No space") as failed:
        checkpoint_folder.save(path, {"x": torch.zeros(3)}, {}, ALONE)
    assert failed.value.errno == errno.ENOSPC and failed.value.filename == str(path)
    assert [one.name for one in tmp_path.iterdir()] == [path.name] and checkpoint_folder.intact(path)
    assert same_bits(read(checkpoint_folder.load(path)[1], "x"), torch.ones(3))


@pytest.mark.parametrize("there", ["file", "folder"])
def test_checkpoint_folder_replaces_an_existing_file_or_folder(tmp_path, there):
    path = tmp_path / "step-00000001.ckpt"
    if there == "file":
        path.write_text("")
    else:
        path.mkdir()
        (path / "part-00007.bin").write_text("of more processes")
    checkpoint_folder.save(path, {"x": torch.ones(3)}, {}, ALONE)
    assert sorted(one.name for one in path.iterdir()) == ["index.pt", "part-00000.bin"]


@pytest.mark.parametrize(
    ("failure", "heard"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "x"), (OSError, r"\[Errno 28\]")),
        (Refused("A sentence."), (Refused, "A sentence.")),
        (KeyError("k"), (RuntimeError, "Rank 1: KeyError: 'k'")),
        (None, None),
    ],
    ids=["os error", "refusal", "other error", "none"],
)
def test_error_of_one_process_is_raised_on_all_processes_of_a_save(failure, heard):
    said = []

    def tells():
        with fail_together(
            SimpleNamespace(leave_after_rank_0=nullcontext, all_gather=lambda one: said.append(one) or [None, one])
        ):
            if failure:
                raise failure

    def hears():
        with fail_together(SimpleNamespace(leave_after_rank_0=nullcontext, all_gather=lambda one: [one, said[0]])):
            pass

    if failure is None:
        tells()
        return hears()
    with pytest.raises(type(failure)):
        tells()
    with pytest.raises(heard[0], match=heard[1]):
        hears()


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compares", [True, False])
def test_flipped_bit_in_a_checkpoint_folder_is_detected_only_if_digests_are_compared(tmp_path, monkeypatch, compares):
    """Flips one bit in every eleventh byte of each file, one byte at a time. Wrong on purpose (compares=False): digests
    are not compared, and at least one flip must remain unnoticed."""
    whole, path = tensors(), tmp_path / "step-00000001.ckpt"
    saved_by(2, path, whole, {"steps": 7})
    if not compares:
        monkeypatch.setattr(checkpoint_folder, "intact", lambda _: True)
    missed = 0
    for file in path.iterdir():
        written = file.read_bytes()
        for at in range(0, len(written), 11):
            flipped = bytearray(written)
            flipped[at] ^= 1 << at % 8
            file.write_bytes(flipped)
            missed += checkpoint_folder.intact(path) and not is_what_was_written(path, whole)
        file.write_bytes(written)
    assert (missed == 0) == compares


def is_what_was_written(path, whole):
    try:
        content, stored = checkpoint_folder.load(path)
        return content == {"steps": 7} and all(same_bits(read(stored, name), one) for name, one in whole.items())
    except Exception:  # damage that makes loading fail is noticed
        return True


@pytest.mark.parametrize("file", ["index.pt", "part-00000.bin", "part-00001.bin"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_checkpoint_folder_with_a_missing_or_truncated_file_is_incomplete(tmp_path, file, damage):
    saved_by(2, path := tmp_path / "step-00000001.ckpt", tensors())
    assert checkpoint_folder.has_its_end(path) and checkpoint_folder.intact(path)
    if damage == "missing":
        (path / file).unlink()
    else:
        (path / file).write_bytes((path / file).read_bytes()[:-2])
    assert not checkpoint_folder.has_its_end(path) and not checkpoint_folder.intact(path)


def test_checkpoint_index_that_runs_code_is_not_loaded(tmp_path):
    checkpoint_folder.save(
        path := tmp_path / "folder", {"x": torch.ones(3)}, {"bomb": Bomb(tmp_path / "went off")}, ALONE
    )
    with pytest.raises(Exception, match=r"[Uu]nsupported|weights_only"):
        checkpoint_folder.load(path)
    assert (
        not checkpoint_folder.has_its_end(path)
        and not checkpoint_folder.intact(path)
        and not (tmp_path / "went off").exists()
    )


# --- memory ----------------------------------------------------------------------------------------------------------

COUNT, EACH = 10, 2_000_000  # number of tensors, and elements of each (8 MB in fp32)


@linux
@pytest.mark.parametrize("wrong", [False, True])
@in_a_new_process
def test_saving_a_checkpoint_folder_holds_a_copy_of_one_tensor_at_a_time_unless_copies_are_kept(
    tmp_path, monkeypatch, wrong
):
    """The tensors are not contiguous, so each must be copied, as a tensor on a card must be. Wrong on purpose
    (wrong=True): all copies are kept, as torch's writer keeps them."""
    whole, written, kept = {str(i): torch.ones(4, EACH // 4).t() for i in range(COUNT)}, checkpoint_folder._written, []

    def keeping(tensor, name, stream):
        kept.append(tensor.contiguous())
        return written(kept[-1], name, stream)

    if wrong:
        monkeypatch.setattr(checkpoint_folder, "_written", keeping)
    with Highest() as highest:
        checkpoint_folder.save(tmp_path / "folder", whole, {}, ALONE)
    assert (highest.rise < 2.5 * EACH * 4) != wrong


@linux
def test_reading_one_shard_keeps_only_that_shard_in_memory(tmp_path):
    """Each of ten tensors has four rows in a file, and one row is read."""
    saved_by(1, tmp_path / "folder", {str(i): torch.full((4, EACH // 4), float(i)) for i in range(COUNT)})
    _, stored = checkpoint_folder.load(tmp_path / "folder")
    before, most = resident("RssFile"), 0
    with as_rank(1, 4) as mesh:
        for name in stored:
            part = part_of(torch.empty(4, EACH // 4), mesh)
            stored.read(name, part)
            assert bool((part.to_local() == float(name)).all())
            most = max(most, resident("RssFile") - before)
    assert most < 0.5 * EACH * 4
