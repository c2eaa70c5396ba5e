"""Chooses rows of a matrix so that any two values of different axes occur together in a row.

Faults of combinations nearly always involve only two values (Kuhn, Wallace and Gallo 2004, "Software fault interactions
and implications for software testing"). All rows of the matrix would be ten times as many.
"""

from collections import Counter
from itertools import combinations, product


def pairwise(*axes, possible=lambda row: True):
    """Returns the chosen rows; the result is deterministic. Each step chooses the row with the most new pairs, and
    among several such rows the row whose values were used least.

    Args:
        axes: the values of each axis.
        possible: returns True if a row may be chosen. Removing rows afterwards would also remove their other pairs.
    """
    rows = {row: set(combinations(enumerate(row), 2)) for row in filter(possible, product(*axes))}
    left, used, chosen = set().union(*rows.values()), Counter(), []
    while left:
        row = max(rows, key=lambda row: (len(rows[row] & left), -sum(used[value] for value in enumerate(row))))
        chosen.append(row)
        used.update(enumerate(row))
        left -= rows[row]
    return chosen
