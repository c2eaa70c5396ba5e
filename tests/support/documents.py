"""Splits made by hand."""

import numpy as np

from lowmem.data.token_store import Split


def split(*documents, learnt=None):
    """Args: documents: their ids; learnt: for each, whether its tokens are learnt; None: all are."""
    ends = np.cumsum([len(document) for document in documents])
    bits = None if learnt is None else np.packbits(np.concatenate(learnt).astype(bool))
    return Split(np.concatenate(documents).astype(np.uint16), ends, 3 * ends, bits)
