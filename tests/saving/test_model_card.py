"""Tests model/README.md, which contains the measurements and the command without local paths. Also tests push=, which
uploads the folder model/."""

import json
import logging
import re
import shlex
from pathlib import Path

import huggingface_hub
import pytest
import yaml

from lowmem.config.settle import run_of
from lowmem.saving.model_card import card, command
from lowmem.system.units import byte_size


@pytest.fixture
def whole(fit):
    summary, run = fit("max_steps=2", "val_every=2")
    return summary, run


def head(text):
    return yaml.safe_load(text.split("---\n")[1])


def test_model_card_has_the_numbers_of_summary_json_and_no_local_paths(whole):
    summary, run = whole
    text = (run / "model" / "README.md").read_text()
    assert text == card(json.loads((run / "summary.json").read_text()))
    assert head(text) == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["lowmem"]}
    for said in (
        f"{summary['val_loss']:.4g}",
        f"{summary['validation'][0]['perplexity']:.4g}",
        f"{summary['train_loss']:.4g}",
        byte_size(summary["peak_bytes"]["device"]),
        f"torch {summary['versions']['torch']}",
        "Trained from random initial weights on text",
        "python train.py",
    ):
        assert said in text
    assert not re.search(r"[\s'\"=`(]/\w", text) and str(Path.home()) not in text


def test_command_of_the_model_card_shortens_relative_paths_of_every_key_and_keeps_hub_ids(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "private" / "own-tokens").mkdir(parents=True)
    lines = ["adapter.path=outputs/secret/model", "data.parts.code.path=private/src", "tokenizer=private/own-tokens"]
    assert command([*lines, "data=mix"]) == (
        "python train.py 'adapter.path=<model>' 'data.parts.code.path=<src>' 'tokenizer=<own-tokens>' data=mix"
    )
    prompts = f"sample_prompts=[{'long ' * 100}and/or, {'x' * 5000}]"
    assert command([prompts]) == shlex.join(["python", "train.py", prompts])
    assert command(["data.path=[/home/me/a.txt,b.txt]"]) == "python train.py 'data.path=[<a.txt>,b.txt]'"
    assert command(["data=hub", "data.path=org/name", "model.name=org/model"]) == (
        "python train.py data=hub data.path=org/name model.name=org/model"
    )


def test_model_card_names_base_model_adapter_and_validation_sets(whole):
    sets = [{"name": name, "loss": 1.0, "perplexity": 2.718, "bits_per_byte": 0.5} for name in ("news", "wiki")]
    changed = {
        "base_model": "meta-llama/Llama-3.2-1B",
        "pretrained": True,
        "adapter_alone": True,
        "recipe": {"adapter": "qlora", "precision": "bf16"},
        "validation": sets,
        "metric": {"accuracy": 0.25},
        "data": ["chat.jsonl"],
    }
    text = card(whole[0] | changed)
    assert "4-bit" not in text and "Load the base model in NF4" in card(whole[0] | changed | {"base_in_4_bits": True})
    expected = {"base_model": "meta-llama/Llama-3.2-1B", "library_name": "peft", "pipeline_tag": "text-generation"}
    assert head(text) == expected | {"tags": ["lowmem", "qlora"]}
    for said in (
        "| wiki | 1 | 2.718 | 0.5 |",
        "| accuracy | 0.25 |",
        "| adapter | qlora |",
        "# Llama-3.2-1B, trained on",
    ):
        assert said in text


def test_command_in_the_model_card_has_no_local_paths():
    typed = ["model=hf", "model.name=meta-llama/Llama-3.2-1B", "data=text", "data.path=/home/me/my notes", "lr=1e-4"]
    more = ["hydra.run.dir=/data/x", "cache_dir=/data/y", "+a.b='~/x/y.txt'", "model.name=../models/mine", "push=me/it"]
    assert command([*typed, *more]) == (
        "python train.py model=hf model.name=meta-llama/Llama-3.2-1B data=text 'data.path=<my notes>' lr=1e-4 "
        """'+a.b='"'"'<y.txt>'"'"'' 'model.name=<mine>'"""
    )


def test_command_in_the_model_card_keeps_the_name_of_a_hub_data_set():
    assert command(["data=hub", "data.path=org/chats"]) == "python train.py data=hub data.path=org/chats"


def test_command_in_the_model_card_omits_implied_null_overrides():
    assert command(["experiment=chat_lora_8gb", "max_steps=9", "epochs=null"]) == (
        "python train.py experiment=chat_lora_8gb max_steps=9"
    )
    assert (
        command(["clip=null", "epochs=null"]) == "python train.py clip=null epochs=null"
    )  # no other override implies these nulls


# --- push= -----------------------------------------------------------------------------------------------------------


class Recorded:
    """A stand-in for `HfApi` that records its calls."""

    calls: list = []  # noqa: RUF012

    def create_repo(self, repo_id, *, private, exist_ok):
        self.calls.append(("create_repo", repo_id, private, exist_ok))

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        self.calls.append(("upload_folder", repo_id, {path.name for path in Path(folder_path).iterdir()}))
        return f"https://hub/{repo_id}"


def test_push_creates_a_private_repository_and_uploads_the_model_folder(fit, monkeypatch, caplog):
    monkeypatch.setattr(huggingface_hub, "HfApi", Recorded)
    Recorded.calls = []
    with caplog.at_level(logging.INFO):
        fit("max_steps=1", "push=me/it")
    assert Recorded.calls[0] == ("create_repo", "me/it", True, True)
    what, name, files = Recorded.calls[1]
    assert (what, name, len(Recorded.calls)) == ("upload_folder", "me/it", 2) and "https://hub/me/it" in caplog.text
    assert files >= {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}


def test_push_without_a_network_is_reported_and_the_run_is_complete(command, tmp_path):
    code, said = command("max_steps=1", "push=me/it")
    run = tmp_path / "run"
    assert code == 1 and "Traceback" not in said and not (run / "failed.txt").exists()
    assert "model/ could not be uploaded" in said and f"export={run} push=me/it" in said
    assert said.index(f"wrote {run}/: ") < said.index("could not be uploaded") and said.count("be uploaded") == 1
    assert (run / "model" / "README.md").exists() and json.loads((run / "summary.json").read_text())["steps"] == 1


def test_push_of_an_evaluation_or_to_an_invalid_hub_id_is_refused(command):
    for lines, says in ((("evaluate=x", "push=me/it"), "export=<a run>"), (("push=mine",), "a hub id")):
        code, said = command(*lines)
        assert code == 1 and says in said
    assert run_of(["push=me/it.2-b"]).push == "me/it.2-b"
