"""Chooses rows of a matrix of test cases. If two values of different axes occur together in a possible row, they also
occur together in at least one chosen row.

Faults that depend on combinations mostly involve only two values (Kuhn, Wallace and Gallo 2004, "Software fault
interactions and implications for software testing"). A full matrix of the tests has about ten times as many rows.
"""

from collections import Counter
from itertools import combinations, product


def pairwise(*axes, possible=lambda row: True):
    """Returns the chosen rows, which depend only on the arguments. Repeatedly chooses the row with the most pairs of
    values that no chosen row has; among several such rows, the row whose values were used least.

    Args:
        axes: for each axis, its values.
        possible: function that returns True if a row may be chosen. (If impossible rows were removed from the result
            instead, some possible pairs of values would be lost.)
    """
    rows = {row: set(combinations(enumerate(row), 2)) for row in filter(possible, product(*axes))}
    left, used, chosen = set().union(*rows.values()), Counter(), []
    while left:
        row = max(rows, key=lambda row: (len(rows[row] & left), -sum(used[value] for value in enumerate(row))))
        chosen.append(row)
        used.update(enumerate(row))
        left -= rows[row]
    return chosen
