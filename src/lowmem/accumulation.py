"""Gradient accumulation: how many micro-batches make one optimizer step.

A window is the micro-batches of one optimizer step. The loader yields whole windows, each with its token count, so
that every micro-batch's loss is divided by the tokens of the *window* before its backward pass: the update is that of
one big batch, also where sequences differ in length and where an epoch ends in a short window. It saves activations
(those of one micro-batch exist at a time) and costs nothing but smaller matrix products.

Lightning's own accumulation weights a short last window too little (Lightning #19987) and gives every micro-batch the
same weight whatever its tokens (#20350).
"""

from collections.abc import Callable

from lowmem.errors import Refused

WindowSize = Callable[[int, int], int]
"""(epoch, window index since the start of the run) -> micro-batches of that window"""


def fixed(batches: int) -> WindowSize:
    """Every window has the same number of micro-batches; an epoch's last one may be shorter."""
    if batches < 1:
        raise Refused(f"accumulation.batches={batches}: a window needs at least one micro-batch.")
    return lambda epoch, window: batches
