"""Errors that a user can cause. Each is shown as a sentence instead of a traceback."""


class Refused(Exception):
    """The run cannot work. The message says what was asked, why it cannot work and what to type instead."""


class NotFinite(Refused):
    """A loss, gradient or weight is inf or nan. The message says which and where; `training/training.py` adds
    advice."""


class DriveFailed(Refused):
    """A drive that holds a part of the run failed in the middle of it. `training/training.py` adds how to go on."""


class RankLost(Refused):
    """Another rank is gone or does not answer. The message names the collective that waited for it."""
