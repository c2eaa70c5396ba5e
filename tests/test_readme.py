"""The README's commands mean what they say."""

import json
import math
import re
import shlex

import pytest
from hydra import compose, initialize_config_dir

from conftest import ROOT
from lowmem import cli

README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^    (python (?:train|plan)\.py .*)$", README, re.MULTILINE)


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
                job = "plan" if "plan.py" in command else "config"
                compose(job, overrides=overrides if one is None else [one])


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


def test_the_measured_figures_are_those_of_the_results():
    """The last column of every technique's row: peak and tokens/s relative to the shipped defaults."""
    from benchmarks.runner import medians
    from benchmarks.techniques import BASE, ROWS, of_shipped

    found = json.loads((ROOT / "benchmarks" / "results" / "techniques.json").read_text())["rounds"]
    assert found.keys() == ROWS.keys()
    peak = medians(found, "peak_bytes")
    for name in list(ROWS)[1:]:
        row = re.search(rf"^\| `{re.escape(name)}` .* \| ([^|]*) \|$", README, re.MULTILINE)
        share = peak[name] / peak[BASE]
        written = f"{'-' if math.isnan(share) else f'{share:.2f}'}, {of_shipped(found, name):.2f}"
        assert row[1].rstrip(" ¹²³⁴⁵") == written, name


def test_the_tables_about_masters_are_those_of_the_results():
    section = README.split("## A model that does not fit")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    results = "".join(
        (ROOT / "benchmarks" / "results" / f"{name}.md").read_text() for name in ("host_optimizer", "gpt2_xl")
    )
    assert len(rows) > 12 and all(row in results for row in rows)


def test_the_figure_of_the_planner_is_that_of_the_results():
    written = re.search(r"Kendall's tau is ([\d.]+)\]", README)[1]
    result = (ROOT / "benchmarks" / "results" / "plan_time.md").read_text()
    assert f"Kendall's tau {written} " in result


def test_the_depth_from_which_sqrt_wins_is_that_of_the_formulas():
    low, high = (int(n.replace(",", "")) for n in re.search(r"from\s+([\d,]+) to ([\d,]+) blocks", README).groups())
    for interior, depth in ((22, low), (34, high)):
        assert depth == pytest.approx(interior**2, rel=0.05)


def test_every_refusal_names_something_of_the_readme():
    from lowmem.refusals import REFUSALS

    for refusal in REFUSALS:
        asked = re.match(r"[\w.]+(?==)", refusal.says)
        assert asked is None or asked[0].split("=")[0] in README
