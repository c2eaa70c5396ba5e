"""Tests that version ranges, pinned versions and the conda environment agree, that malicious releases are excluded, and
that ignored files are not committed."""

import re
import subprocess
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement

from conftest import ROOT
from oldest import pins

pytestmark = pytest.mark.docs

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
RANGES = {
    r.name: r.specifier for r in map(Requirement, [*PROJECT["dependencies"], *EXTRAS["dev"], *EXTRAS["benchmarks"]])
}


def exact(lines):
    found = (re.fullmatch(r"([\w.-]+)==([\w.]+)", line.strip()) for line in lines)
    return {match[1]: match[2] for match in found if match}


TESTED = exact((ROOT / "requirements.txt").read_text().splitlines())


def test_conda_environment_installs_the_tested_versions():
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert conda == ["python>=3.11", "pip", {"pip": ["-r requirements.txt", "-e ."]}] and TESTED["torch"] == "2.13.0"


def test_every_dependency_has_a_tested_version_inside_its_range():
    assert TESTED.keys() == RANGES.keys()
    assert all(TESTED[name] in allowed for name, allowed in RANGES.items())


def test_oldest_environment_pins_the_lower_bound_of_every_dependency_range():
    floors = {name: {one.version for one in allowed if one.operator == ">="} for name, allowed in RANGES.items()}
    assert floors == {name: {version} for name, version in exact(pins()).items()}


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1", "2.13.0", "2.14.0", "2.15.3"])
def test_torch_2_11_to_2_15_are_allowed_and_2_10_and_2_16_are_not(version):
    assert version in RANGES["torch"] and "2.10.0" not in RANGES["torch"] and "2.16.0" not in RANGES["torch"]


def test_malicious_releases_of_lightning_are_excluded():
    assert not {"2.6.2", "2.6.3"} & {v for v in ("2.6.2", "2.6.3", "2.6.4", "2.6.6") if v in RANGES["lightning"]}
    assert "2.6.6" in RANGES["lightning"]


def test_licence_is_named_and_its_file_exists():
    assert PROJECT["license"] == "Apache-2.0" and "Apache License" in (ROOT / "LICENSE").read_text()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no clone")
def test_ignored_files_and_log_files_are_not_committed():
    ignored = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    assert not subprocess.run(ignored, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    assert not subprocess.run(
        ["git", "ls-files", "*.log"], cwd=ROOT, capture_output=True, check=True, timeout=60
    ).stdout
