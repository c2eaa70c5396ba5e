"""Tests that libraries get a temporary folder for their files if the home folder is not writable."""

import os
import sys
from pathlib import Path

import pytest

from lowmem.command import cli
from lowmem.system import home


@pytest.fixture(params=["read-only", "missing", "unknown"])
def no_home(request, monkeypatch, tmp_path):
    """Returns the path of a home folder that is not writable, and removes the variables that name folders of libraries.
    `os.access` is replaced, because root may write everywhere."""
    path = {"read-only": tmp_path, "missing": tmp_path / "missing", "unknown": "~"}[request.param]
    monkeypatch.setattr(os.path, "expanduser", lambda _: str(path))
    monkeypatch.setattr(os, "access", lambda *_: False)
    for name in (*home.FOLDERS, "HF_HOME"):
        monkeypatch.setenv(name, "")  # makes monkeypatch restore the variable afterwards
        monkeypatch.delenv(name)
    return path


def test_unwritable_home_gives_libraries_a_temporary_folder_and_keeps_hf_home(no_home, monkeypatch):
    monkeypatch.setenv("MPLCONFIGDIR", "/mine")
    home.replace_if_read_only()
    folder = Path(os.environ["WANDB_DATA_DIR"])
    assert folder.is_dir() and os.environ["XDG_CACHE_HOME"] == str(folder)
    assert os.environ["MPLCONFIGDIR"] == "/mine"
    assert os.environ["HF_HOME"] == f"{no_home}/.cache/huggingface"
    home.replace_if_read_only()  # as in a child process
    assert os.environ["WANDB_DATA_DIR"] == str(folder)


def test_writable_home_folder_sets_no_folder_variable_of_a_library(no_home, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: True)
    home.replace_if_read_only()
    assert not any(name in os.environ for name in home.FOLDERS)


def test_cli_start_checks_the_home_folder_before_it_runs_a_command(monkeypatch):
    order = []
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(home, "replace_if_read_only", lambda: order.append("home"))
    cli.start(lambda: order.append("command"))
    assert order == ["home", "command"]
