"""Tests checkpoint files: a resumed run continues at its position in the data, saving and loading need little memory,
and incomplete, damaged and unsuitable checkpoints are recognized."""

import errno
import io
import json
import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from host_memory import Highest, linux, resident
from lowmem.saving import checkpoint
from lowmem.system import atomic_files
from lowmem.system.errors import Refused
from lowmem.system.process import page_out
from new_process import in_a_new_process
from same import same


def weights_of(run, step):
    return torch.load(run / "checkpoints" / f"step-{step:08d}.ckpt", weights_only=True)["state_dict"]


# windows of 3 micro-batches with 2 sequences each
WINDOWED = ("accumulation=fixed", "accumulation.batches=3", "batch_size=2", "max_steps=9", "save_every=1000")


@pytest.mark.matrix
def test_run_resumed_inside_or_at_the_end_of_an_epoch_reads_the_sequences_of_the_unbroken_run(
    fit, tmp_path, monkeypatch
):
    from lowmem.data.packing import Joined
    from lowmem.training.module import CausalLM

    # 20 sequences: windows of 6, 6, 6 and a short one of 2
    monkeypatch.setattr(Joined, "__len__", lambda self: min(self.count, 20))
    step, read = CausalLM.training_step, []

    def recording(self, window, index):
        read[-1].append([batch.input_ids.tolist() for batch in window.micro_batches])
        return step(self, window, index)

    monkeypatch.setattr(CausalLM, "training_step", recording)
    for stop in (None, 2, 3, 4, 5):
        read.append([])
        if stop is not None:
            fit(*WINDOWED, f"max_steps={stop}", folder=f"part{stop}")
        fit(*WINDOWED, *([f"resume={tmp_path}/part{stop}"] if stop else []), folder=f"run{stop}")
    assert [sum(len(b) for b in window) for window in read[0]] == [6, 6, 6, 2, 6, 6, 6, 2, 6]
    assert all(run == read[0] for run in read[1:])


@pytest.mark.wrong
def test_resume_without_the_data_position_gives_different_weights(fit, monkeypatch):
    """Wrong on purpose: the resumed run starts at the beginning of the data, so its weights must differ."""
    from lowmem.data.loader import Position

    _, run = fit(*WINDOWED, folder="whole")
    fit(*WINDOWED, "max_steps=4", "scheduler.total_steps=9", folder="part")
    read = checkpoint.Saved.__init__

    def forgetful(self, *arguments):
        read(self, *arguments)
        self.position = Position()

    monkeypatch.setattr(checkpoint.Saved, "__init__", forgetful)
    _, again = fit(*WINDOWED, f"resume={run.parent / 'part'}", folder="again")
    assert not same(weights_of(run, 9), weights_of(again, 9))


def test_resume_on_the_command_line_repeats_the_stored_overrides(command, tmp_path):
    assert command("optim=adafactor", "precision=bf16", "max_steps=2")[0] == 0
    first, second = tmp_path / "run", tmp_path / "second"
    code, said = command(f"resume={first}", "max_steps=5", f"hydra.run.dir={second}", base=())
    assert code == 0, said
    summary = json.loads((second / "summary.json").read_text())
    assert summary["steps"] == 5 and summary["resumed_from"].endswith("step-00000002.ckpt")
    assert {"optim=adafactor", "precision=bf16", "max_steps=5"} <= set(summary["overrides"])
    rows = (second / "metrics.csv").read_text().splitlines()[1:]
    assert [int(r.split(",")[0]) for r in rows if r.split(",")[3]] == [3, 4, 5]


def test_resume_of_a_finished_run_is_refused_with_advice(command, tmp_path):
    command("max_steps=2")
    code, said = command(f"resume={tmp_path}/run", "max_steps=2", f"hydra.run.dir={tmp_path}/second")
    assert code == 1 and "max_steps=4" in said and not (tmp_path / "second").exists()


@pytest.mark.rows("optim=adafactor*")
@pytest.mark.parametrize(
    ("other", "says"),
    [
        ("model.architecture.n_embd=64", "model.architecture"),
        ("optim=adafactor", "optim="),
        ("seed=1", "seed="),
        ("seq_len=8", "seq_len="),
    ],
)
def test_resume_with_another_model_optimizer_seed_or_seq_len_is_refused(command, tmp_path, other, says):
    command("max_steps=2")
    code, said = command(f"resume={tmp_path}/run", other, "max_steps=4", f"hydra.run.dir={tmp_path}/second")
    assert code == 1 and "Traceback" not in said and says in said
    assert not (tmp_path / "second").exists()


def test_save_on_a_full_disk_leaves_the_last_complete_checkpoint(tmp_path, monkeypatch):
    writer = checkpoint.AtomicCheckpointIO()
    folder = tmp_path / "checkpoints"
    writer.save_checkpoint({"x": torch.ones(10)}, folder / "step-00000001.ckpt")

    def full_disk(_):
        raise OSError("No space left on device")

    monkeypatch.setattr(atomic_files.os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        writer.save_checkpoint({"x": torch.ones(10)}, folder / "step-00000002.ckpt")
    assert checkpoint.find(str(tmp_path)).name == "step-00000001.ckpt"


def test_newest_complete_checkpoint_is_found_and_a_truncated_one_is_skipped(tmp_path):
    writer, folder = checkpoint.AtomicCheckpointIO(), tmp_path / "checkpoints"
    for step in (9, 10, 100):
        writer.save_checkpoint({"x": torch.ones(1000)}, folder / f"step-{step:08d}.ckpt")
    newest = folder / "step-00000100.ckpt"
    newest.write_bytes(newest.read_bytes()[:-200])
    assert checkpoint.find(str(tmp_path)).name == "step-00000010.ckpt"
    with pytest.raises(Refused, match="step-00000010"):
        checkpoint.find(str(newest))


def test_run_keeps_only_its_last_two_checkpoints(fit):
    _, run = fit("save_every=1", "max_steps=5")
    assert [p.name for p in checkpoint.complete(run / "checkpoints")] == ["step-00000004.ckpt", "step-00000005.ckpt"]


# --- memory while saving and resuming ---------------------------------------------------------------------------------

TENSORS, EACH = 10, 5_000_000  # number of tensors, and elements of each (20 MB in fp32)


@pytest.mark.matrix
@linux
@pytest.mark.parametrize("wrong", [False, True])
@in_a_new_process
def test_saving_a_checkpoint_adds_under_5_percent_of_its_size_to_memory_unless_it_is_built_in_memory(
    tmp_path, monkeypatch, wrong
):
    """Wrong on purpose (wrong=True): the complete file is built in memory before it is written."""
    content = {str(i): torch.ones(EACH) for i in range(TENSORS)}
    save = torch.save

    def whole_at_first(content, stream):
        save(content, whole := io.BytesIO())
        stream.write(whole.getbuffer())

    if wrong:
        monkeypatch.setattr(checkpoint.torch, "save", whole_at_first)
    with Highest() as highest:
        checkpoint.AtomicCheckpointIO().save_checkpoint(content, tmp_path / "step-00000001.ckpt")
    assert (highest.rise < 0.05 * TENSORS * EACH * 4) != wrong


@pytest.mark.matrix
@linux
@pytest.mark.parametrize("let_go", [True, False])
def test_pages_of_a_mapped_checkpoint_are_released_only_by_page_out_and_keep_their_values(tmp_path, let_go):
    path = tmp_path / "step-00000001.ckpt"
    checkpoint.AtomicCheckpointIO().save_checkpoint({str(i): torch.full((EACH,), i) for i in range(TENSORS)}, path)
    before = resident("RssFile")
    mapped = checkpoint.AtomicCheckpointIO().load_checkpoint(path)
    copies = {name: tensor.clone() for name, tensor in mapped.items()}
    if let_go:
        page_out(mapped.values())
    still = resident("RssFile") - before
    assert (still < 0.1 * TENSORS * EACH * 8) == let_go
    assert all(
        torch.equal(mapped[name], copies[name]) for name in copies
    )  # released pages are read from the file again


@linux
def test_page_out_of_a_tensor_that_is_not_mapped_keeps_its_values():
    tensor = torch.arange(EACH)
    page_out([tensor])
    assert torch.equal(tensor, torch.arange(EACH))


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compares", [True, False])
def test_flipped_bit_in_a_checkpoint_file_is_detected_only_if_digests_are_compared(tmp_path, compares):
    """Flips one bit in every eleventh byte of the file, one byte at a time. Wrong on purpose (compares=False): digests
    are not compared, and at least one flip must remain unnoticed."""
    content, path = {"x": torch.arange(300), "steps": 7, "name": "a"}, tmp_path / "step-00000001.ckpt"
    writer = checkpoint.AtomicCheckpointIO()
    writer.save_checkpoint(content, path)
    written, missed = path.read_bytes(), 0
    for at in range(0, len(written), 11):
        flipped = bytearray(written)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        if not compares or checkpoint.intact(path):
            with suppress(Exception):  # damage that makes loading fail is noticed
                missed += not same(writer.load_checkpoint(path), content)
    assert (missed == 0) == compares


def test_zeroed_page_in_a_checkpoint_is_detected(tmp_path):
    path = tmp_path / "step-00000001.ckpt"
    checkpoint.AtomicCheckpointIO().save_checkpoint({str(i): torch.randn(EACH) for i in range(TENSORS)}, path)
    assert checkpoint.intact(path)
    with path.open("r+b") as stream:
        stream.seek(path.stat().st_size // 3)
        stream.write(bytes(4096))
    assert not checkpoint.intact(path)


class Bomb:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


@pytest.mark.parametrize("trusting", [False, True])
def test_pickle_that_runs_code_is_refused_as_checkpoint(fit, tmp_path, monkeypatch, trusting):
    """Wrong on purpose (trusting=True): the checkpoint is loaded with weights_only=False, which must create the
    folder."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    torch.save({"lowmem": Bomb(tmp_path / "went off")}, run / "checkpoints" / "step-00000001.ckpt")
    if trusting:
        load = torch.load
        monkeypatch.setattr(checkpoint.torch, "load", lambda path, **how: load(path, **how | {"weights_only": False}))
    for line in (f"resume={run}", "resume=auto", f"evaluate={run}", f"export={run}"):
        with pytest.raises(Refused, match="not a lowmem checkpoint"):
            fit(line)
        assert (tmp_path / "went off").exists() == trusting
        if trusting:
            break


ORDER = {"sequences": 9, "seq_len": 8, "seed": 1}
APART = ORDER | {"packing": "padded", "too_long": "cut", "documents": "a", "together": 4}


@pytest.mark.parametrize(
    ("there", "here", "said"),
    [
        (ORDER | {"text": "a"}, ORDER | {"text": "b"}, "the text differs. Type the data= of"),
        (
            ORDER,
            ORDER | {"seq_len": 16, "sequences": 4, "text": "a"},
            "seq_len was 8 in that run and is 16 now. Type the seq_",
        ),
        (APART, APART | {"together": 2}, "batch_size was 4 in that run and is 2 now. Type the batch_size= of"),
        (
            APART,
            ORDER | {"text": "a"},
            "data.packing was padded in that run and is joined now. Type the data.packing= of",
        ),
        (APART, APART | {"seed": 2, "documents": "b"}, "the text differs. Type the seed= and data= of"),
        ({"mix": [["a", 3, 3, {}]]}, {"mix": [["a", 4, 4, {"text": "a"}]]}, "the text differs. Type the data= of"),
        (ORDER, ORDER | {"text": "a"}, None),  # a checkpoint of a version without digests
        ({"mix": [["a", 3, 3, {}]]}, {"mix": [["a", 3, 3, {"text": "a"}]]}, None),
    ],
)
def test_resume_with_another_data_order_is_refused_with_the_keys_that_changed(there, here, said):
    if said is None:
        return continued(there, here)
    with pytest.raises(Refused) as refused:
        continued(there, here)
    assert said in str(refused.value) and "{" not in str(refused.value)


@pytest.mark.parametrize(
    ("template", "begin", "here", "told"),
    [
        ("a", None, {"text": "b"}, True),
        ("a", "[]", {"text": "b"}, False),  # a checkpoint of this version
        (None, None, {"text": "b"}, False),  # plain texts, not conversations
        ("a", None, {"seed": 2}, False),
    ],
)
def test_refused_resume_explains_changed_conversation_rows_only_for_earlier_versions(template, begin, here, told):
    there = ORDER | {"text": "a"}
    with pytest.raises(Refused) as refused:
        continued(there, there | here, template=template, begin=begin)
    assert ("earlier version of lowmem split these conversations into rows differently" in str(refused.value)) == told


def continued(there: dict, here: dict, template: str | None = None, begin: str | None = None) -> None:
    saved = SimpleNamespace(order=there, asked="resume=x", optimizer="sgd", template=template, begin=begin)
    module = SimpleNamespace(update=SimpleNamespace(optimizer=SimpleNamespace(name="sgd")))
    checkpoint.Saved.check_training(saved, module, SimpleNamespace(order=here))


def test_checkpoint_that_vanishes_while_a_folder_is_listed_is_skipped(fit):
    _, run = fit("max_steps=1")
    (run / "checkpoints" / "step-00000009.ckpt").symlink_to("/no/such/file")
    assert checkpoint.find(str(run)).name == "step-00000001.ckpt"


def test_checkpoint_that_may_not_be_read_raises_permission_denied_not_truncated(fit, monkeypatch):
    _, run = fit("max_steps=1")
    opened = Path.open

    def denied(path, *arguments, **keywords):
        if path.suffix == ".ckpt":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *arguments, **keywords)

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(PermissionError):
        checkpoint.find(str(run))


def test_evaluation_of_an_exported_folder_without_checkpoint_is_refused_with_its_model_folder(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(Refused, match=rf"no complete checkpoint\. Type evaluate={tmp_path / 'model'}\.$"):
        checkpoint.find(str(tmp_path), "evaluate")
    with pytest.raises(Refused, match="Start without resume="):
        checkpoint.find(str(tmp_path))
