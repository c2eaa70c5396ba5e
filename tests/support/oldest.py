"""The lowest version of each dependency that pyproject.toml admits, as pip pins: `make test-oldest` installs them."""

import re
import tomllib
from itertools import chain
from pathlib import Path


def pins() -> list[str]:
    """`torch>=2.11,<2.16` as `torch==2.11`, of what lowmem needs and of every extra but TRL, which is compared with."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = chain(project["dependencies"], *(extras[extra] for extra in extras if extra not in ("trl", "verify")))
    return [re.sub(r">=([\w.]+).*", r"==\1", requirement) for requirement in needed]


if __name__ == "__main__":
    print(*pins(), sep="\n")
