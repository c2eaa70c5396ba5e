"""Patches Hydra to compose a config in a fifth of the time if the config differs from an earlier config only in typed
keys.

Hydra first merges the files of the chosen groups, and then sets the typed keys. Many tests choose the same groups and
type different keys. Therefore the process caches the merged files, and each config is a copy of them. `pickle` needs a
quarter of the time of `copy.deepcopy` to copy a config.
"""

import copy
import pickle
from functools import cache

from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import _utils, base, grammar_parser

merge_files, list_files = ConfigLoaderImpl._compose_config_from_defaults_list, config_loader_impl.create_defaults_list
parse_file, extend_path = ConfigRepository.load_config, ConfigLoaderImpl._process_config_searchpath
parse_line = OverridesParser.parse_rule
_files, _lists, _merged, _lines, _plain = {}, {}, {}, {}, set()


def install() -> None:
    config_loader_impl.create_defaults_list = kept_list
    ConfigLoaderImpl._compose_config_from_defaults_list = kept_files
    ConfigLoaderImpl._process_config_searchpath = extend_path_if_asked
    ConfigRepository.load_config = parse_file_once
    OverridesParser.parse_rule = parse_line_once
    base.parse = _utils.parse = cache(grammar_parser.parse)  # safe to cache, because parse trees are not changed
    ConfigStore.__deepcopy__ = lambda self, _: self  # loading a config from the store copies the config anyway


def places(repo) -> tuple[str, ...]:
    return tuple(source.path for source in repo.get_sources())


def parse_file_once(self, config_path):
    """Caches the content of a parsed yaml file, because parsing takes as long as merging."""
    key = (*places(self), config_path)
    if key not in _files:
        _files[key] = pickle.dumps(parse_file(self, config_path))
    return pickle.loads(_files[key])


def parse_line_once(self, line, rule):
    """Caches the parsed form of an override."""
    if (line, rule) not in _lines:
        _lines[line, rule] = parse_line(self, line, rule)
    return copy.copy(_lines[line, rule])


def extend_path_if_asked(self, config_name, parsed_overrides, repo):
    """Calls Hydra's extension of the search path only if the call may change the path, because the extension parses the
    main file again."""
    key = (*places(repo), config_name)
    typed = any(line.get_key_element() == "hydra.searchpath" for line in parsed_overrides)
    if typed or key not in _plain:
        before = places(repo)
        extend_path(self, config_name, parsed_overrides, repo)
        if not typed and places(repo) == before:
            _plain.add(key)


def kept_list(repo, config_name, overrides_list, prepend_hydra, skip_missing):
    """Caches the results of Hydra's `create_defaults_list`. The list of files depends only on the choices of groups, so
    only `config_overrides` are set anew in each call."""
    typed = [line for line in overrides_list if not line.is_sweep_override()]
    choices = [line for line in typed if repo.group_exists(line.key_or_group) and not isinstance(line.value(), dict)]
    key = (*places(repo), config_name, prepend_hydra, skip_missing, *(line.input_line for line in choices))
    if key not in _lists:
        _lists[key] = list_files(repo, config_name, choices, prepend_hydra, skip_missing)
    found = copy.copy(_lists[key])
    found.config_overrides = [line for line in typed if line not in choices]
    found.defaults = KeptList(found.defaults)
    found.defaults.key = key
    return found


class KeptList(list):
    """The list of files to merge, with the cache key of the merged config."""

    key: tuple


def kept_files(self, defaults, repo):
    key = defaults.key
    if key not in _merged:
        _merged[key] = pickle.dumps(merge_files(self, defaults, repo))
    return pickle.loads(_merged[key])
