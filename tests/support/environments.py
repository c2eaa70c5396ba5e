"""Environments with packages that this one must not have, or does not have: they see its packages behind their own."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest


def python_with(place: Path, *packages: str, variable: str, dependencies: bool = False) -> str:
    """Returns the Python of an environment with these packages, which is made below `place` and takes a network.

    Args:
        variable: of the shell, which may name a Python that has them.
        dependencies: whether to install what they need, as far as it is not here.
    """
    if given := os.environ.get(variable):
        return given
    venv.create(place, with_pip=True)
    python = next(place.glob("*/python"))
    others = (path for path in sys.path if path.endswith("site-packages"))
    (next(place.glob("lib/*/site-packages")) / "of_this_one.pth").write_text("\n".join(others))
    how = ["-m", "pip", "install", "--quiet", "--retries", "0", "--timeout", "15"]
    how += [] if dependencies else ["--no-deps", "--ignore-installed"]
    made = subprocess.run([python, *how, *packages], capture_output=True, text=True, timeout=900)
    if made.returncode:
        pytest.skip(f"there is no network, or no {packages[0]}: set {variable}=<a python that has it>")
    return str(python)
