"""Tests that garbage collection is disabled inside `undisturbed` only."""

import gc

import pytest

from lowmem.system.without_gc import undisturbed


def test_garbage_collection_is_enabled_again_after_undisturbed_code_ends_or_fails():
    with undisturbed():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), undisturbed():
        raise ImportError
    assert gc.isenabled()


def test_disabled_garbage_collection_stays_disabled():
    gc.disable()
    try:
        with undisturbed():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
