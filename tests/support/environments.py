"""Makes virtual environments with additional packages. A new environment also sees the packages of this environment,
but its own packages take precedence."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest


def python_with(place: Path, *packages: str, variable: str, dependencies: bool = False) -> str:
    """Returns the Python of an environment with these packages. Skips the test if the packages cannot be installed, for
    example without a network.

    Args:
        place: folder in which the environment is made.
        variable: name of an environment variable. If the variable is set, its value is returned: a Python that has
            these packages.
        dependencies: True also installs those dependencies of the packages that this environment lacks.
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
