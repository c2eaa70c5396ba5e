"""Tests that the cached configs of tests equal the configs that Hydra composes."""

import pytest
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from omegaconf import OmegaConf

import composing
from lowmem.config import typed_lines

pytestmark = pytest.mark.docs

TYPED = (
    ["precision=16", "optim=adam8bit", "lr=3"],
    ["optim=adam8bit", "precision=16", "seed=4"],  # equal choices in another order
    ["experiment=chat_lora_8gb", "model=tiny"],
    ["data=mix", "+data@data.parts.a=random"],
    ["optim={a: 1}"],
    ["~clip", "hydra.run.dir=x"],
    ["hydra/launcher=basic"],
    ["precision=nothing"],
    ["~optim"],
    ["sed=3"],
)


def outcome(lines):
    """Returns the config as YAML, including Hydra's keys, or the `repr` of the error."""
    try:
        return OmegaConf.to_yaml(typed_lines.composed.now(lines, "config", True))
    except Exception as error:
        return repr(error)


@pytest.fixture
def by_hydra(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(config_loader_impl, "create_defaults_list", composing.list_files)
        patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", composing.merge_files)
        patch.setattr(ConfigLoaderImpl, "_process_config_searchpath", composing.extend_path)
        patch.setattr(ConfigRepository, "load_config", composing.parse_file)
        return [outcome(lines) for lines in TYPED]


def test_cached_test_config_equals_the_config_of_hydra(by_hydra):
    assert [outcome(lines) for lines in TYPED] == by_hydra  # fills the cache if it is empty
    assert [outcome(lines) for lines in TYPED] == by_hydra  # read from the cache


def test_config_cached_without_its_choices_differs_from_the_config_of_hydra(by_hydra, monkeypatch):
    """Wrong on purpose: the cache key is the number of yaml files instead of their names."""
    monkeypatch.setattr(composing, "_merged", {})
    monkeypatch.setattr(composing.KeptList, "key", property(len, lambda *_: None), raising=False)
    assert [outcome(lines) for lines in TYPED] != by_hydra
