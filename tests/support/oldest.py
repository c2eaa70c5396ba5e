"""Prints requirements for `make test-oldest`, which pin each dependency to the lowest version that pyproject.toml
allows."""

import re
import tomllib
from itertools import chain
from pathlib import Path


def pins() -> list[str]:
    """Returns pins, such as `torch==2.11` for `torch>=2.11,<2.16`, of the dependencies and of all extras except `trl`
    and `verify`."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = chain(project["dependencies"], *(extras[extra] for extra in extras if extra not in ("trl", "verify")))
    return [re.sub(r">=([\w.]+).*", r"==\1", requirement) for requirement in needed]


if __name__ == "__main__":
    print(*pins(), sep="\n")
