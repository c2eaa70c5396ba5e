"""Adds the 8-bit optimizers' stable embedding: a LayerNorm behind the token embedding, and a Xavier start.

Rare tokens give embeddings gradients of very different sizes, which 8-bit state stores badly; the norm evens them out.
It is for a random start only, saves no memory and costs two vectors. Source: Dettmers et al. 2022, arXiv 2110.02861,
2.3. bitsandbytes' own class enters itself in a global table; this one is only its forward pass.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowmem.system.errors import Refused


class StableEmbedding(nn.Embedding):
    def __init__(self, plain: nn.Embedding) -> None:
        dtype = plain.weight.dtype
        super().__init__(plain.num_embeddings, plain.embedding_dim, plain.padding_idx, dtype=dtype)
        nn.init.xavier_uniform_(self.weight)
        self.norm = nn.LayerNorm(plain.embedding_dim, dtype=dtype)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.norm(super().forward(input_ids))


def stabilise(model: PreTrainedModel) -> None:
    """Replaces the token embedding; a tied head stays tied to its matrix."""
    plain = model.get_input_embeddings()
    if type(plain) is not nn.Embedding:
        raise Refused(
            f"model.stable_embedding=true: {type(model).__name__} has a token embedding of its own kind "
            f"({type(plain).__name__}). Type model.stable_embedding=false optim.embedding_bits=32."
        )
    model.set_input_embeddings(StableEmbedding(plain))
    model.tie_weights()


@contextmanager
def folded(
    model: PreTrainedModel, full_precision: Callable[[nn.Parameter], Tensor] = lambda p: p.data
) -> Iterator[None]:
    """Applies the norm to every row, for an export that any program can load: the norm depends on the row alone.

    Args:
        full_precision: returns a parameter at full precision.
    """
    stable = model.get_input_embeddings()
    if not isinstance(stable, StableEmbedding):
        yield
        return
    with torch.no_grad():
        rows, norm = full_precision(stable.weight), stable.norm
        shape, weight, bias = norm.normalized_shape, full_precision(norm.weight), full_precision(norm.bias)
        plain = nn.Embedding.from_pretrained(nn.functional.layer_norm(rows, shape, weight, bias, norm.eps))
    tied = model.config.tie_word_embeddings
    model.set_input_embeddings(plain)
    model.config.tie_word_embeddings = False  # the head keeps the matrix before the norm
    try:
        yield
    finally:
        model.config.tie_word_embeddings = tied
        model.set_input_embeddings(stable)
