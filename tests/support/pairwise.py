"""Chooses rows of a matrix so that any two values of different axes occur together in some chosen row, if a possible
row has both.

Faults that depend on combinations mostly involve only two values (Kuhn, Wallace and Gallo 2004, "Software fault
interactions and implications for software testing"). The whole matrix has about ten times more rows.
"""

from collections import Counter
from itertools import combinations, product


def pairwise(*axes, possible=lambda row: True):
    """Returns the chosen rows, which are deterministic. Each step chooses the row with the most new pairs of values.
    Among several such rows, it chooses the row whose values were used least.

    Args:
        axes: for each axis, its values.
        possible: function that returns True if a row may be chosen. (Removing impossible rows from the result would
            also remove their possible pairs.)
    """
    rows = {row: set(combinations(enumerate(row), 2)) for row in filter(possible, product(*axes))}
    left, used, chosen = set().union(*rows.values()), Counter(), []
    while left:
        row = max(rows, key=lambda row: (len(rows[row] & left), -sum(used[value] for value in enumerate(row))))
        chosen.append(row)
        used.update(enumerate(row))
        left -= rows[row]
    return chosen
