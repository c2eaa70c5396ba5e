"""The one error a user causes: a sentence instead of a traceback."""


class Refused(Exception):
    """What was asked, why it cannot work, what to type instead. Shown without a traceback."""
