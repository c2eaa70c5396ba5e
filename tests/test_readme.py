"""The README's commands mean what they say."""

import re
import shlex

import pytest
from hydra import compose, initialize_config_dir

from conftest import ROOT
from lowmem import cli

README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^    (python train\.py .*)$", README, re.MULTILINE)


def test_there_are_commands():
    assert "python train.py precision=16 optim=adam8bit" in COMMANDS
    assert "python train.py -m precision=32,16,bf16 optim=adamw,adam8bit,adafactor" in COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_composes(command):
    overrides = [cli.quoted(word) for word in shlex.split(command)[2:] if not word.startswith("-")]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        for sweep in overrides if "-m" in command else [None]:
            # each choice of a sweep by itself
            for one in (
                [None] if sweep is None else [f"{sweep.split('=')[0]}={c}" for c in sweep.split("=")[1].split(",")]
            ):
                compose("config", overrides=overrides if one is None else [one])


def test_both_commands_of_the_makefile_are_there():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"`?make ([\w-]+)", README):
        assert target in targets


def test_no_figure_is_missing():
    assert not re.search(r"\bM_\w+|OVERHEAD_TABLE|TECHNIQUES_MACHINE", README)


def test_the_notebook_example_is_what_fit_takes(tmp_path, small, monkeypatch):
    """The block runs as it stands, in the repository, on a smaller model and another folder."""
    import hydra

    block = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
    block = block.replace("outputs/notebook", str(tmp_path / "run")).replace(
        'config_path="conf"', f'config_dir="{ROOT}/conf"'
    )
    block = block.replace("import compose, initialize\n", "import compose, initialize_config_dir as initialize\n")
    real = hydra.compose
    monkeypatch.setattr(hydra, "compose", lambda name, lines: real(name, [*lines, *small, "max_steps=2"]))
    scope = {}
    exec(block, scope)
    assert scope["summary"]["steps"] == 2 and (tmp_path / "run" / "summary.json").exists()
