"""Tests that a pairwise selection of rows from a matrix contains every pair of values, in about as few rows as
possible."""

from itertools import combinations, product

import pytest

from pairwise import pairwise

pytestmark = pytest.mark.docs


def test_pairwise_rows_contain_every_pair_of_values():
    axes = "abcd", range(7), "xyz", (2, 3), (True, False)
    rows = pairwise(*axes)
    assert len(rows) <= 1.1 * 4 * 7 and set(rows) <= set(product(*axes)) and rows == pairwise(*axes)
    for one, other in combinations(range(len(axes)), 2):
        assert {(row[one], row[other]) for row in rows} == set(product(axes[one], axes[other]))


def test_pairwise_rows_with_a_condition_contain_every_pair_of_values_that_it_permits():
    def possible(row):
        return row[0] != "a" or row[2] == "x"

    axes = "abcd", range(5), "xyz", (2, 3)
    rows, every = pairwise(*axes, possible=possible), list(filter(possible, product(*axes)))
    assert set(rows) <= set(every) and len(rows) <= 1.2 * 4 * 5
    for one, other in combinations(range(len(axes)), 2):
        assert {(row[one], row[other]) for row in rows} == {(row[one], row[other]) for row in every}
