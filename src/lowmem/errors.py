"""The errors that a user causes: a sentence instead of a traceback."""


class Refused(Exception):
    """What was asked, why it cannot work, what to type instead. Shown without a traceback."""


class NotFinite(Refused):
    """A loss, gradient or weight is inf or nan: which, and where. `training.py` adds what to do about it."""


class RankLost(Refused):
    """Another rank is gone or does not answer: which collective waited for it. Its own end, not this, is the cause."""
