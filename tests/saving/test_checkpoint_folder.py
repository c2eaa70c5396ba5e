"""Tests checkpoints that are folders: they are found, verified, resumed and deleted like checkpoints that are files."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import Metadata

from lives import Job, live
from lowmem.config.typed_lines import key
from lowmem.saving import checkpoint, checkpoint_folder
from lowmem.saving.checkpoint import complete, find, intact, newest
from lowmem.system import atomic_files
from lowmem.system.errors import NotFinite, Refused

RUN = ("strategy=fsdp", "max_steps=3", "save_every=1", "logger=none")


@pytest.fixture(scope="module")
def kept(small, tmp_path_factory):
    """Returns the folder of a finished FSDP run with one process."""
    folder = tmp_path_factory.mktemp("kept") / "run"
    typed = {key(line) for line in RUN}
    live(Job((*(line for line in small if key(line) not in typed), *RUN), folder, ("as typed",)))
    return folder


@pytest.fixture
def run(kept, tmp_path):
    """Returns a copy of the run `kept`."""
    return shutil.copytree(kept, tmp_path / "run")


def at(run, step):
    return run / "checkpoints" / f"step-{step:08d}.ckpt"


def damage(path):
    part = path / "part-00000.bin"
    numbers = bytearray(part.read_bytes())
    numbers[len(numbers) // 2] ^= 4
    part.write_bytes(numbers)


def test_fsdp_run_keeps_only_its_last_two_checkpoint_folders(kept):
    assert sorted(path.name for path in (kept / "checkpoints").iterdir()) == [at(kept, 2).name, at(kept, 3).name]
    assert complete(kept / "checkpoints") == [at(kept, 2), at(kept, 3)]
    assert all(map(intact, complete(kept / "checkpoints")))


def test_checkpoint_folder_is_found_by_its_run_folder_and_by_its_own_path(kept):
    assert find(str(kept)) == newest(kept) == at(kept, 3)
    assert find(str(at(kept, 2))) == at(kept, 2) and find(str(kept / "checkpoints")) == at(kept, 3)


def test_renamed_checkpoint_folder_is_found_by_its_new_name(run):
    at(run, 3).rename(run / "good")
    assert find(str(run / "good")) == run / "good"


def test_damaged_checkpoint_folder_is_skipped_or_refused_with_the_name_of_the_previous_checkpoint(run):
    damage(at(run, 3))
    assert complete(run / "checkpoints")[-1] == at(run, 3) and newest(run) == at(run, 2)
    with pytest.raises(
        Refused, match=r"step-00000003.ckpt is damaged \(its checksum does not match\).*step-00000002.ckpt"
    ):
        find(str(run))


@pytest.mark.parametrize("file", ["index.pt", "part-00000.bin"])
def test_checkpoint_folder_without_one_of_its_files_is_incomplete(run, file):
    (at(run, 3) / file).unlink()
    assert find(str(run)) == at(run, 2)
    with pytest.raises(Refused, match=r"incomplete .one of its files is missing or truncated.*step-00000002.ckpt"):
        find(str(at(run, 3)))


def test_checkpoint_folder_evaluated_and_exported_by_one_process_has_the_loss_and_weights_of_its_run(kept, fit):
    evaluated, _ = fit(f"evaluate={kept}", folder="evaluated")
    _, exported = fit(f"export={kept}", folder="exported")
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (exported, kept))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert evaluated["steps"] == 3 and evaluated["val_loss"] == pytest.approx(summary_of(kept)["val_loss"], abs=1e-6)


def summary_of(run):
    return json.loads((run / "summary.json").read_text())


def test_resume_auto_switches_between_checkpoint_folders_and_files(run, fit):
    """A run folder may contain checkpoint folders and checkpoint files at the same time."""
    fit("resume=auto", "max_steps=4", "save_every=1", folder="run")
    assert at(run, 4).is_file() and at(run, 3).is_dir() and not at(run, 2).exists()
    fit("resume=auto", "max_steps=5", "save_every=1", "strategy=fsdp", folder="run")
    assert at(run, 5).is_dir() and at(run, 4).is_file() and not at(run, 3).exists()


def test_resume_from_a_checkpoint_folder_of_another_model_or_optimizer_is_refused(kept, fit):
    with pytest.raises(Refused, match=r"is \(300, 32\) in the checkpoint and \(300, 64\) in this model"):
        fit(f"resume={kept}", "model.architecture.n_embd=64", "max_steps=5")
    with pytest.raises(Refused, match="cannot read the state of AdamW"):
        fit(f"resume={kept}", "optim=sgd", "max_steps=5")


def test_leftovers_of_a_killed_save_or_removal_are_ignored_and_deleted(run, fit, monkeypatch):
    monkeypatch.setattr(checkpoint, "delete", lambda path: None)  # the removal is killed before it deletes
    checkpoint.AtomicCheckpointIO().remove_checkpoint(at(run, 2))
    monkeypatch.undo()
    draft = run / "checkpoints" / ".step-00000002.ckpt.writing"
    assert complete(run / "checkpoints") == [at(run, 3)] and draft.is_dir()
    fit("resume=auto", "max_steps=4", folder="run")
    assert not draft.exists()


def replaced(path, monkeypatch, error, puts_back):
    """Tries to replace `path` by a new folder, whose rename fails with `error`.

    Args:
        puts_back: False leaves the old folder under its temporary name, as a kill does.
    """
    replace = atomic_files.os.replace

    def broken(source, to):
        if source == atomic_files.draft_of(path):
            raise error
        replace(source, to)

    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(atomic_files.os, "replace", broken)
        if not puts_back:
            patch.setattr(atomic_files, "put_back", lambda path: None)
        with atomic_files.atomic_write(path) as draft:
            draft.mkdir()


def test_replaced_checkpoint_folder_survives_a_failed_or_killed_save(run, monkeypatch):
    """A step is saved a second time if an evaluation after the first save finds the best loss so far."""
    replaced(at(run, 3), monkeypatch, OSError(28, "No space left on device"), puts_back=True)
    assert at(run, 3).exists() and intact(at(run, 3))
    replaced(at(run, 3), monkeypatch, KeyboardInterrupt(), puts_back=False)  # killed between the two renames
    assert not at(run, 3).exists() and atomic_files.old_of(at(run, 3)).exists()
    assert newest(run) == at(run, 3) and not atomic_files.old_of(at(run, 3)).exists()
    with atomic_files.atomic_write(at(run, 3)) as draft:
        draft.mkdir()
        (draft / "new").touch()
    assert [file.name for file in at(run, 3).iterdir()] == ["new"] and not atomic_files.old_of(at(run, 3)).exists()


def test_full_disk_while_writing_the_checkpoint_index_raises_an_os_error(tmp_path, monkeypatch):
    """torch raises a RuntimeError whose cause has the errno. The cause is lost when an error is sent to another
    process, so an OSError must be raised instead."""

    def full(*_):
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise RuntimeError("[enforce fail at inline_container.cc:672]") from error

    monkeypatch.setattr(checkpoint_folder.torch, "save", full)
    with pytest.raises(OSError, match="No space left on device") as failed:
        checkpoint_folder._Writer(tmp_path, 0, {}).finish(Metadata({}), [])
    assert failed.value.errno == 28 and failed.value.filename == str(tmp_path / checkpoint_folder.INDEX)


def test_checkpoint_with_a_non_finite_weight_is_not_saved(config, fit, monkeypatch):
    from lowmem.training.module import CausalLM

    step = CausalLM.training_step

    def poisoned(self, window, index):
        done = step(self, window, index)
        next(self.local_parameters.parameters()).data.view(-1)[0] = float("nan")
        return done

    monkeypatch.setattr(CausalLM, "training_step", poisoned)
    with pytest.raises((Refused, NotFinite), match="inf or nan at step 1, so no checkpoint was saved"):
        fit(*RUN, folder="poisoned")


@pytest.mark.matrix
def test_merged_adapter_of_a_sharded_run_equals_the_export_by_one_process(fit):
    """The base was initialized at random, so no other folder contains the base and the export is merged. The checkpoint
    has only the adapter and a digest of the base."""
    _, divided = fit(*RUN, "adapter=lora", folder="divided")
    (content, stored) = checkpoint_folder.load(at(divided, 3))
    assert all("lora_" in name for name in stored) and content["lowmem"]["base"]
    _, alone = fit(f"export={divided}", "adapter=lora", folder="alone")
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (divided, alone))
    assert ours.keys() == theirs.keys() and not any("lora" in name for name in ours)
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-7


@pytest.mark.matrix
@pytest.mark.parametrize("merged", [False, True])
def test_exported_adapter_of_a_sharded_run_on_a_pretrained_base_equals_the_export_by_one_process(kept, fit, merged):
    base = ("model=hf", f"model.name={kept / 'model'}", "adapter=lora", f"merge={merged}".lower())
    _, divided = fit(*RUN, *base, folder="divided")
    _, alone = fit(f"export={divided}", *base, folder="alone")
    name = "model.safetensors" if merged else "adapter_model.safetensors"
    ours, theirs = (load_file(folder / "model" / name) for folder in (divided, alone))
    assert ours.keys() == theirs.keys() and any("lora" in name for name in ours) != merged
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-7
    assert any(
        float(one.abs().max()) > 0 for name, one in ours.items() if merged or "lora_B" in name
    )  # the adapter was trained
