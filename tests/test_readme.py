"""The README's commands mean what they say."""

import json
import math
import os
import random
import re
import shlex
import subprocess
import sys

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from conftest import ROOT
from lowmem.overrides import quoted

README = (ROOT / "README.md").read_text()
COMMANDS = list(dict.fromkeys(re.findall(r"^    (python (?:train|plan|compare)\.py .*)$", README, re.MULTILINE)))


def test_there_are_commands():
    assert "python train.py precision=16 optim=adam8bit" in COMMANDS
    assert "python train.py -m precision=32,16,bf16 optim=adamw,adam8bit,adafactor" in COMMANDS


def overrides_of(command: str) -> list[str]:
    return [quoted(word) for word in shlex.split(command)[2:] if not word.startswith(("-", "sweep.resume="))]


def choices(command: str) -> list[list[str]]:
    """The overrides, and of a sweep each choice by itself."""
    lines = overrides_of(command)
    if " -m " not in command:
        return [lines]
    parsed = OverridesParser.create().parse_overrides(lines)
    fixed = [o.input_line for o in parsed if not o.is_sweep_override()]
    swept = [o for o in parsed if o.is_sweep_override()]
    each = [f"{o.get_key_element()}={c}" for o in swept if o.is_discrete_sweep() for c in o.sweep_string_iterator()]
    return [[*fixed, one] for one in each]


@pytest.mark.parametrize("command", [c for c in COMMANDS if "compare.py" not in c])
def test_every_command_composes(command):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        for lines in choices(command):
            compose("plan" if "plan.py" in command else "config", overrides=lines)


WORDS = ("we", "think", "that", "a", "day", "is", "too", "short", "for", "what", "it", "holds")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a newcomer stands: their notes, and the runs that the README names by their dates."""
    folder = tmp_path_factory.mktemp("newcomer")
    (folder / "notes").mkdir()
    for number in range(20):
        thoughts = random.Random(number).choices(WORDS, k=20_000)
        (folder / "notes" / f"{number}.txt").write_text(" ".join(thoughts))
    day = "2026-01-31"
    as_typed("python train.py max_steps=1 hydra.run.dir=outputs/2026-01-31/12-00-00", folder)
    as_typed("python train.py max_steps=1 hydra.run.dir=outputs/2026-01-31/13-00-00", folder)
    as_typed(f"python train.py -m max_steps=1,2 hydra.sweep.dir=multirun/{day}/12-00-00", folder)
    return folder


def as_typed(command: str, folder, *more: str) -> str:
    words = shlex.split(command)
    words = [sys.executable, str(ROOT / words[1]), *words[2:], *more]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "WANDB_MODE": "offline"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


# Published weights are not here: the same commands, from a random start of two thin layers.
THIN = ["n_layer=2", "n_embd=64", "n_head=2", "vocab_size=4096"]
THIN_LLAMA = ["num_hidden_layers=2", "hidden_size=64", "intermediate_size=128", "num_attention_heads=4"]
THIN_LLAMA += ["num_key_value_heads=2", "head_dim=16", "vocab_size=4096", "bos_token_id=null", "eos_token_id=null"]


def beside(command: str) -> list[str]:
    """What a test of two steps types besides."""
    if "train.py" not in command or "sweep.resume" in command:
        return []
    more = ["max_steps=2", "val_sequences=16"]
    if "optuna" in command:
        more.append("hydra.sweeper.trials=3")
    thin = THIN_LLAMA if "llama" in command else THIN if re.search(r"gpt2", command) else []
    small = ["model.pretrained=false", "fit=off" if "fit=" not in command else "seq_len=64"] if thin else []
    if "experiment=gpt2_xl" in command or "llama" in command:
        small += ["seq_len=16"]
    return [*more, *small, *(f"model.architecture.{key}" for key in thin)]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_runs(command, folder):
    said = as_typed(command, folder, *beside(command))
    if "plan.py" in command:
        assert "planned in" in said
    elif "compare.py" in command or " -m " in command or "sweep.resume" in command:
        assert "validation loss" in said and "failed" not in said
    else:
        assert "peak device memory" in said


def test_both_commands_of_the_makefile_are_there():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"`?make ([\w-]+)", README):
        assert target in targets


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_every_link_leads_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text())
    assert all(((ROOT / page).parent / link).exists() for link in links if "://" not in link)


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


def test_the_table_of_the_four_loops_is_that_of_the_results():
    section = README.split("## How fast")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    result = (ROOT / "benchmarks" / "results" / "side_by_side.md").read_text()
    assert len(rows) > 20 and all(row in result for row in rows)


def test_the_tables_about_masters_are_those_of_the_results():
    section = README.split("## A model that does not fit")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    results = "".join(
        (ROOT / "benchmarks" / "results" / f"{name}.md").read_text() for name in ("host_optimizer", "gpt2_xl")
    )
    assert len(rows) > 12 and all(row in results for row in rows)


def test_the_tables_about_the_planner_are_those_of_the_results():
    section = README.split("## What fits: the planner")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    results = "".join((ROOT / "benchmarks" / "results" / f"{name}.md").read_text() for name in ("plan_error", "plans"))
    assert len(rows) > 16 and all(row in results for row in rows)


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
