"""Makes splits of token ids for tests."""

import numpy as np

from lowmem.data.token_store import Split


def split(*documents, learned=None):
    """Returns a split of these documents, in which each token stands for 3 bytes of text.

    Args:
        documents: token ids of each document.
        learned: for each document, bools of its tokens, True if the token is learned; None: all tokens are learned.
    """
    ends = np.cumsum([len(document) for document in documents])
    bits = None if learned is None else np.packbits(np.concatenate(learned).astype(bool))
    return Split(np.concatenate(documents).astype(np.uint16), ends, 3 * ends, bits)
