"""Makes rows of random tokens (`data=random`). With them, a run's memory and speed can be measured without a corpus, a
pretrained tokenizer or network access.

Row i of a split is drawn with the seed (seed, split, i) each time it is read, so no tokens are stored. A model cannot
learn to predict random tokens, so the validation loss stays at about the logarithm of the vocabulary size, or above.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from lowmem.data.loader import MicroBatch, Rows
from lowmem.data.opening import Openable, Opened, RowSettings
from lowmem.data.token_store import NOTHING, Tokens, rows_of, train_tokenizer

BYTES = 257  # vocabulary size of the default tokenizer: one token per byte, and the end-of-text token


@dataclass(frozen=True)
class Random(Openable):
    """A source of random tokens.

    Args:
        rows: number of rows per epoch.
        val_rows: number of rows of the validation split.
        seed: seed of the random tokens.
    """

    rows: int
    val_rows: int
    seed: int = 0
    name: str = "random"

    def key(self) -> list:
        """Returns an empty cache key, because the trained tokenizer does not depend on the data."""
        return []

    def size(self, split: str) -> int:
        return 0

    def texts(self) -> Iterator[str]:
        return iter(())

    def opened(self, wanted: RowSettings) -> Opened:
        tokenizer = wanted.tokenizer or train_tokenizer(self, wanted.cache_dir, BYTES, wanted.special_tokens)
        train, val = (
            Drawn((self.seed, split), count, rows_of(tokenizer), wanted.seq_len)
            for split, count in enumerate((self.rows, self.val_rows))
        )
        return Opened(Tokens(NOTHING, NOTHING, tokenizer), train, {"": val})


@dataclass(frozen=True)
class Drawn(Rows):
    """Rows of random tokens. Args: seed: (seed of the source, index of the split). The seed of a row is `seed` followed
    by the row number."""

    seed: tuple[int, ...]
    count: int
    vocab_size: int
    seq_len: int

    def __len__(self) -> int:
        return self.count

    @property
    def order(self) -> dict:
        return {"random": [*self.seed, self.vocab_size]}

    def micro_batch(self, indices: np.ndarray) -> MicroBatch:
        generators = (np.random.default_rng([*self.seed, int(i)]) for i in indices)
        rows = np.stack([generator.integers(self.vocab_size, size=self.seq_len + 1) for generator in generators])
        rows = torch.from_numpy(rows)  # (B, T + 1)
        return MicroBatch(rows[:, :-1], rows[:, 1:])
