"""Tests that ranks that read different data are refused before training."""

import pytest

from lowmem.system.errors import Refused
from lowmem.training import build, training


class Two:
    """A group of two ranks: this rank, and a rank that sends `other` or, if `other` is None, what this rank sends."""

    several = True

    def __init__(self, other=None):
        self.other, self.said = other, None

    def all_gather(self, said):
        self.said = said
        return [self.other or said, said]


@pytest.fixture
def of(config):
    def said(*typed):
        ranks = Two()
        training._compare(build.data(config(*typed)), ranks)
        return ranks.said

    return said


def test_data_built_twice_has_equal_digests(of):
    assert of() == of()


@pytest.mark.parametrize(
    ("typed", "what"),
    [
        ("seed=9", "the training data"),
        ("val_sequences=1", "the validat"),
    ],
)
def test_ranks_with_different_data_are_refused(config, of, typed, what):
    data = build.data(config())
    with pytest.raises(Refused, match=f"Rank 1 and rank 0 differ in .*{what}.*: they read different data. Give all"):
        training._compare(data, Two(of(typed)))
