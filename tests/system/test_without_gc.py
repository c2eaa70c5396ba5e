"""Imports without Python's search for garbage, which goes on afterwards."""

import gc

import pytest

from lowmem.system.without_gc import undisturbed


def test_garbage_is_looked_for_again_afterwards_whatever_happened():
    with undisturbed():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), undisturbed():
        raise ImportError
    assert gc.isenabled()


def test_who_has_switched_it_off_keeps_it_off():
    gc.disable()
    try:
        with undisturbed():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
