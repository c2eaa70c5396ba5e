"""Tests that configs which tests compose are those that Hydra composes."""

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
    ["optim=adam8bit", "precision=16", "seed=4"],  # the same choices, typed in another order
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
    """The config with Hydra's own part, or the words of an error."""
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
    assert [outcome(lines) for lines in TYPED] == by_hydra  # perhaps made for this
    assert [outcome(lines) for lines in TYPED] == by_hydra  # and surely kept


def test_config_cached_for_other_choices_is_caught(by_hydra, monkeypatch):
    """The deliberately wrong variant: it knows files by their number alone."""
    monkeypatch.setattr(composing, "_merged", {})
    monkeypatch.setattr(composing.KeptList, "key", property(len, lambda *_: None), raising=False)
    assert [outcome(lines) for lines in TYPED] != by_hydra
