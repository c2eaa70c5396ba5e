"""A choice of the rows of a matrix in which any two values of different axes occur together.

Faults of combinations nearly always involve two values (Kuhn, Wallace and Gallo 2004, "Software fault interactions
and implications for software testing"), and a matrix of all rows is ten times as large.
"""

from collections import Counter
from itertools import combinations, product


def pairwise(*axes, possible=lambda row: True):
    """Returns rows, the same ones each time: at each turn the one with most pairs that no row before had, and of
    several the one whose values were used least.

    Args:
        possible: whether a row may be chosen. To leave rows out afterwards would lose their other pairs.
    """
    rows = {row: set(combinations(enumerate(row), 2)) for row in filter(possible, product(*axes))}
    left, used, chosen = set().union(*rows.values()), Counter(), []
    while left:
        row = max(rows, key=lambda row: (len(rows[row] & left), -sum(used[value] for value in enumerate(row))))
        chosen.append(row)
        used.update(enumerate(row))
        left -= rows[row]
    return chosen
