"""Splits made by hand."""

import numpy as np

from lowmem.data.token_store import Split


def split(*documents, learned=None):
    """Args: documents: their ids; learned: for each, whether its tokens are learned; None: all are."""
    ends = np.cumsum([len(document) for document in documents])
    bits = None if learned is None else np.packbits(np.concatenate(learned).astype(bool))
    return Split(np.concatenate(documents).astype(np.uint16), ends, 3 * ends, bits)
