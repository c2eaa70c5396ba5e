"""A technique declares itself: what it declares is known, and nothing outside of it knows its name."""

import ast
import re
from pathlib import Path

import pytest
import yaml

from conftest import ROOT
from lowmem.config import declarations as module
from lowmem.config.declarations import Technique, groups, techniques
from lowmem.config.settle import run_of
from lowmem.system.errors import Refused

SOURCE = ROOT / "src"
# (file, name) -> why it may stand there.
NAMED = {
    ("techniques/precision/cpu_products.py", "bf16"): "torch's word in the name of a question to oneDNN",
    ("plan/search/derive.py", "sgd"): "the passes are traced with the optimizer that holds nothing",
    ("plan/search/derive.py", "full"): "the parameters are traced alone, with whatever loss",
    ("plan/search/derive.py", "fixed"): "gradients of masters are summed in windows of any kind",
    ("plan/search/derive.py", "none"): "and everything else is the same in a window of any size",
    ("plan/search/candidates.py", "fixed"): "a smaller micro-batch needs a window that makes up for it",
    ("plan/job.py", "none"): "a word of a sentence",
    ("plan/tracing/trace.py", "blocks"): "those of the model",
    ("config/schema.py", "offload"): "an argument of another group has this name",
    ("plan/prediction.py", "offload"): "the same argument",
    ("techniques/adapter/lora.py", "none"): "peft's word for biases that are not trained",
    ("report/compare/charts.py", "none"): "plotly's word for no marker",
    ("report/ran.py", "none"): "a choice of that name does nothing, and is no part of a title",
}


def named(source: Path) -> set[tuple[str, str]]:
    """(file, technique) of every string of the code, sentences left out, that is the name of a technique."""
    names = {name for group in groups() for name in techniques(group)} - {"auto"}  # a value of many keys
    return {
        (str(file.relative_to(source / "lowmem")), node.value)
        for file in source.rglob("lowmem/**/*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names
    }


def sniffed(source: Path) -> list[str]:
    """Lines that look for a part of a name in a `_target_`."""
    looks = re.compile(r"\b(in (cfg|run|self)\.|startswith\(|endswith\(|==)")
    return [
        f"{file.name}: {line.strip()}"
        for file in source.rglob("lowmem/**/*.py")
        for line in file.read_text().splitlines()
        if re.search(r"\._?target_?\b", line) and looks.search(line)
    ]


def test_no_file_names_a_technique():
    assert named(SOURCE) == set(NAMED)


def test_no_file_looks_into_the_name_of_a_class():
    assert [line for line in sniffed(SOURCE) if "optimizer_side" not in line] == []


@pytest.mark.wrong
def test_a_name_and_a_look_into_one_are_seen(tmp_path):
    package = tmp_path / "lowmem"
    package.mkdir()
    wrong = 'if run.precision == "bf16-master" or "Paged" in run.optim.target:\n    pass\n'
    (package / "late.py").write_text(wrong + 'if "Paged" in cfg.optim._target_:\n    pass\n')
    assert named(tmp_path) == {("late.py", "bf16-master")} and len(sniffed(tmp_path)) == 2


@pytest.mark.rows("precision", "optim")
@pytest.mark.parametrize("group", groups())
def test_the_config_says_what_the_yaml_declares(config, group):
    for name, technique in techniques(group).items():
        more = ["accumulation.sizes={0: 1}"] if name.startswith("by_") else []
        assert config(f"{group}={name}", *more).technique(group) == technique


@pytest.mark.parametrize("group", groups())
def test_one_of_each_group_is_the_first_to_try_and_twins_exist(group):
    every = techniques(group)
    advised = [name for name, technique in every.items() if technique.advised]
    # weights stream beside a precision and a checkpointing that are chosen with them, and who has one device has no
    # others to share with: that is a plan's advice; compiled blocks save time first
    assert len(advised) == (group not in ("weights", "strategy", "compile")) and all(
        every[name].saves for name in advised
    )
    for technique in every.values():
        assert technique.on_host is None or technique.on_host in every
        assert technique.computes_as is None or technique.computes_as in every


def test_what_no_technique_declares_is_refused(tmp_path, monkeypatch, config):
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "typo.yaml").write_text(yaml.safe_dump({"declares": {"pagse": True}}))
    monkeypatch.setattr(module, "CONF", tmp_path)
    techniques.cache_clear()
    with pytest.raises(Refused, match=r"conf/optim/typo.yaml: declares.pagse means nothing here. Declare one of saves"):
        techniques("optim")
    techniques.cache_clear()
    with pytest.raises(Refused, match=r"declares\.pagse means"):
        config("+optim.declares.pagse=true").technique("optim")


def test_by_itself_a_technique_declares_nothing():
    assert Technique() == techniques("accumulation")["none"]


def test_a_strategy_of_one_process_says_so():
    """The command line asks what is declared: it does not import torch to know whether it starts ranks."""
    alone = {name: run_of([f"strategy={name}"]).several for name in techniques("strategy")}
    assert alone == {name: not declared.one_process for name, declared in techniques("strategy").items()}
