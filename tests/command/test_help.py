"""Tests --help, which prints the comments of conf/, and tab completion."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from conftest import ROOT
from lowmem.command import help
from pages import keys_of

CONF = ROOT / "conf"
YAMLS = sorted(path.relative_to(CONF) for path in CONF.rglob("*.yaml"))
GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "hydra")
COMMENTS = {key: comment for key, comment in help.comments(CONF / "config.yaml").items() if comment}


def said(*arguments: str, script: str = "train.py") -> str:
    """Returns the standard output of a script, and asserts that the script has not imported torch."""
    line = [sys.executable, "-X", "importtime", script, *arguments]
    done = subprocess.run(
        line, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"COLUMNS": "100"}, timeout=240
    )
    assert done.returncode == 0 and " torch\n" not in done.stderr, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def typed():
    """Returns the output of `python train.py --help`."""
    return said("--help")


def unwrapped(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("name", YAMLS, ids=str)
def test_comment_parser_finds_every_key_of_each_yaml(name):
    """The expected keys come from a YAML parser. The comment parser may skip keys inside braces on one line, and list
    entries such as `override /group`."""
    found = help.comments(CONF / name)
    there = {key for key in keys_of(yaml.safe_load((CONF / name).read_text())) if "override" not in key}
    text = (CONF / name).read_text()
    in_braces = {
        key for key in found if re.search(rf"^ *(- )?{re.escape(key.split('.')[-1])}: *[{{\[]", text, re.MULTILINE)
    }
    assert found.keys() <= there
    assert all(any(key.startswith(f"{outer}.") for outer in in_braces) for key in there - found.keys())
    assert all(f"# {comment}\n" in text for comment in found.values() if comment)


def test_comment_of_each_key_and_heading_of_a_yaml_are_parsed(tmp_path):
    (tmp_path / "a.yaml").write_text("# head\n# on two lines\na: 1 # one\nb:\n  - c: x\n  d: '{e: f}' # g # h\ni: 2\n")
    assert help.comments(tmp_path / "a.yaml") == {"a": "one", "b": None, "b.c": None, "b.d": "g # h", "i": None}
    assert help.heading(tmp_path / "a.yaml") == "head on two lines"


@pytest.mark.process
def test_help_shows_every_key_of_config_yaml_with_its_comment(typed):
    assert len(COMMENTS) > 30
    for key, comment in COMMENTS.items():
        line = re.search(rf"^ +{re.escape(key.removeprefix('defaults.'))}\b", typed, re.MULTILINE)
        assert line and unwrapped(comment) in unwrapped(typed[line.start() :]), key


def test_every_overridable_key_of_config_yaml_and_five_keys_of_plan_yaml_have_comments():
    """Exceptions in config.yaml are sections, keys that groups fill, and Hydra's own keys."""
    cfg = OmegaConf.load(CONF / "config.yaml")
    for key, comment in help.comments(CONF / "config.yaml").items():
        inside = key.startswith(("trainer.", "callbacks", "hydra")) or key == "defaults"
        assert comment or inside or OmegaConf.is_config(OmegaConf.select(cfg, key)), key
    of_plan = help.comments(CONF / "plan.yaml")
    assert all(of_plan[key] for key in ("gpu", "ram", "search", "node", "rows"))


@pytest.mark.process
def test_help_shows_a_changed_comment_of_config_yaml_instead_of_the_old_comment(tmp_path, typed):
    shutil.copytree(CONF, tmp_path / "conf")
    file = tmp_path / "conf" / "config.yaml"
    text = file.read_text()
    assert text.count(COMMENTS["clip"]) == 1
    file.write_text(text.replace(COMMENTS["clip"], "longest stride of an optimizer"))
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", return_hydra_config=True)
    other = unwrapped(help.text(cfg, tmp_path / "conf"))
    assert "clip=1.0 longest stride of an optimizer" in other and unwrapped(COMMENTS["clip"]) not in other
    assert unwrapped(COMMENTS["clip"]) in unwrapped(typed)


@pytest.mark.process
@pytest.mark.parametrize("group", GROUPS)
def test_help_names_every_choice_of_every_group(typed, group):
    entry = typed[typed.index(f"\n  {group}=") + 1 :]
    entry = entry[: re.search(r"\n {0,2}\S|\n\n|$", entry).start()]  # until the next key or section
    for file in (CONF / group).glob("*.yaml"):
        assert file.stem in re.findall(r"[\w.-]*\w", unwrapped(entry))


@pytest.mark.process
def test_help_is_at_most_80_columns_wide(typed):
    wide = [line for line in typed.splitlines() if len(line) > 80]
    assert not wide


@pytest.mark.process
def test_help_shows_the_keys_of_typed_choices_with_the_typed_values():
    text = said("precision=bf16-master", "optim=muon", "loss=chunked", "loss.rows=7", "data=text", "--help")
    assert "loss.rows=7" in text and "tokens whose logits exist at once" in text
    assert "optim=muon" in text and "Muon for the matrices inside the blocks" in text
    assert "data.path=???" in text and "precision.early_step=true" in text
    assert "loss.rows" not in said("--help")


@pytest.mark.process
def test_help_shows_keys_removed_on_the_command_line_with_a_tilde():
    text = said("~clip", "memory=null", "--help")
    assert "  ~clip " in text and "  ~memory.limit " in text and unwrapped(COMMENTS["clip"]) in unwrapped(text)


@pytest.mark.process
def test_help_of_the_planner_shows_every_key_of_plan_yaml_with_its_comment():
    text = unwrapped(said("--help", script="plan.py"))
    for key, comment in help.comments(CONF / "plan.yaml").items():
        assert not comment or (f"{key}=" in text and unwrapped(comment) in text)
    assert "lr=" in text and "python plan.py" in text


@pytest.mark.process
def test_help_of_compare_mentions_comparison_csv():
    assert "comparison.csv" in said("--help", script="compare.py")


@pytest.mark.process
def test_help_piped_into_head_writes_no_error():
    line = f"{shlex.quote(sys.executable)} train.py --help | head -n 1"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.stdout.startswith("python train.py") and not done.stderr


# --- tab completion --------------------------------------------------------------------------------------------------


def completed(line: str, script: str = "train.py") -> list[str]:
    """Returns the completions of a line, requested as bash does."""
    environment = os.environ | {"COMP_LINE": line, "COMP_POINT": str(len(line))}
    words = [sys.executable, script, "-sc", "query=bash"]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.process
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("python train.py optim=lion", ["optim=lion8bit"]),
        ("python train.py precision=16-", ["precision=16-master", "precision=16-true"]),
        ("python train.py precision=16 cli", ["clip=", "clip_value="]),  # Hydra would parse 16 as a number
        ("python train.py -m precision=16,32 optim=adam8bit optim.emb", ["optim.embedding_bits="]),
    ],
)
def test_tab_completion_offers_the_matching_choices_and_keys(line, expected):
    assert completed(line) == expected


@pytest.mark.process
def test_tab_completion_of_plan_py_offers_the_key_gpu():
    assert completed("python plan.py gp", "plan.py") == ["gpu="]


@pytest.fixture
def in_bash(tmp_path):
    """Returns a function that takes a line of bash that installs completion, and returns the completion of optim=lion
    and whether another project's script ran."""
    (tmp_path / "stranger.py").write_text("open('ran', 'w').close()\n")
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (tmp_path / "python").chmod(0o755)

    def run(install: str) -> tuple[str, bool]:
        script = f"""
            export PATH={shlex.quote(str(tmp_path))}:$PATH
            cd {shlex.quote(str(ROOT))}
            {install}
            try() {{
                COMP_LINE=$1 COMP_POINT=${{#1}} COMP_CWORD=2
                hydra_bash_completion
                echo ${{COMPREPLY[*]}}
            }}
            try "python train.py optim=lion"
            cd {shlex.quote(str(tmp_path))}
            try "python stranger.py a"
        """
        done = subprocess.run(["bash", "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=240)
        return done.stdout.split("\n")[0], (tmp_path / "ran").exists()

    return run


@pytest.mark.process
def test_documented_tab_completion_line_completes_and_does_not_run_other_scripts(in_bash):
    install = next(
        line.strip() for line in (ROOT / "docs/install.md").read_text().splitlines() if "-sc install=bash" in line
    )
    assert in_bash(install) == ("optim=lion8bit", False)


@pytest.mark.process
def test_wrong_variant_with_hydras_own_tab_completion_runs_the_script_of_another_project(in_bash):
    """To complete arguments, Hydra's own completion runs whatever script the line names."""
    assert in_bash('eval "$(python train.py -sc install=bash)"') == ("optim=lion8bit", True)
