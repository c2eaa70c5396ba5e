"""Tests the properties that techniques declare in their yaml files."""

import pytest
import yaml

from lowmem.config import declarations as module
from lowmem.config.declarations import Technique, groups, techniques
from lowmem.config.settle import run_of
from lowmem.system.errors import Refused


@pytest.mark.rows("precision", "optim")
@pytest.mark.parametrize("group", groups())
def test_technique_in_the_config_equals_the_declaration_in_its_yaml(config, group):
    for name, technique in techniques(group).items():
        more = ["accumulation.sizes={0: 1}"] if name.startswith("by_") else []
        assert config(f"{group}={name}", *more).technique(group) == technique


@pytest.mark.parametrize("group", groups())
def test_every_group_except_weights_strategy_and_compile_advises_one_technique_that_saves_memory(group):
    every = techniques(group)
    advised = [name for name, technique in every.items() if technique.advised]
    # These three groups have no advised technique: streamed weights need certain choices of precision and
    # gradient_checkpointing, a strategy needs several devices, and compiled blocks mainly save time.
    assert len(advised) == (group not in ("weights", "strategy", "compile")) and all(
        every[name].saves for name in advised
    )


@pytest.mark.parametrize("group", groups())
def test_declared_host_variant_is_in_the_group_and_optimizers_step_by_element_or_matrix(group):
    every = techniques(group)
    for technique in every.values():
        assert technique.on_host is None or technique.on_host in every
        assert technique.steps_by in (None, "element", "matrix")


def test_declaration_of_an_unknown_property_is_refused(tmp_path, monkeypatch, config):
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "typo.yaml").write_text(yaml.safe_dump({"declares": {"pagse": True}}))
    monkeypatch.setattr(module, "CONF", tmp_path)
    techniques.cache_clear()
    with pytest.raises(Refused, match=r"conf/optim/typo.yaml: declares.pagse is not a .*Declare one of saves"):
        techniques("optim")
    techniques.cache_clear()
    with pytest.raises(Refused, match=r"declares\.pagse is not a property"):
        config("+optim.declares.pagse=true").technique("optim")


def test_accumulation_none_which_declares_nothing_equals_a_technique_of_default_values():
    assert Technique() == techniques("accumulation")["none"]


def test_strategy_declares_several_processes_exactly_if_its_class_needs_them():
    """The command line decides before torch is imported whether to start ranks, so it reads the declaration, not the
    class."""
    runs = [run_of([f"strategy={name}"]) for name in techniques("strategy")]
    assert [run.several for run in runs] == [run.strategy_class.several for run in runs]
