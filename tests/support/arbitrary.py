"""Calls a function with drawn arguments, for tests of files with arbitrary content."""

import shutil
from collections import Counter
from datetime import timedelta

from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st


def one_of(*strategies):
    """Returns a strategy that first draws one of the given strategies, and then draws from it."""
    return st.sampled_from(strategies).flatmap(lambda strategy: strategy)


def outcomes(outcome, strategies, folder, cases, again=False):
    """Calls `outcome(folder, *drawn)` for each case, with an empty folder. Returns a dict: result -> number of cases
    with this result.

    Args:
        strategies: a strategy for each drawn argument.
        cases: largest number of cases.
        again: True draws different cases in each call.
    """
    counted = Counter()

    @settings(
        max_examples=cases,
        derandomize=not again,
        database=None,
        deadline=timedelta(seconds=30),
        phases=[Phase.generate],  # without shrinking, which takes minutes
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(st.tuples(*strategies))
    def case(drawn):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        ended = outcome(folder, *drawn)
        counted[ended] += 1
        event(ended)

    case()
    print(f"\n{dict(counted.most_common())}")
    return counted
