"""A choice of the rows of a matrix in which any two values of different axes occur together.

Faults of combinations are nearly always those of two values (Kuhn, Wallace and Gallo 2004, "Software fault interactions
and implications for software testing"), and a matrix of all rows is ten times as large.
"""

from itertools import combinations, product


def pairwise(*axes):
    """Return rows, the same ones each time: at each turn the first row that has most pairs which no row before had."""
    rows = {row: pairs(row) for row in product(*axes)}
    left = set().union(*rows.values())
    chosen = []
    while left:
        row = max(rows, key=lambda row: len(rows[row] & left))
        chosen.append(row)
        left -= rows[row]
    return chosen


def pairs(row):
    return set(combinations(enumerate(row), 2))
