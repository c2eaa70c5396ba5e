"""Tokens that a tokenizer lacks, such as those of a chat template, and their rows in the embedding and in the head.

A new row is the mean of the old ones: the start that neither stands out among the logits nor needs anything drawn.
transformers' default draws around it with the covariance of the whole embedding, which at 128k x 4096 is a product of
minutes and copies in fp32. Rows that a published model has beyond its tokenizer are used before any are made. A model
with tied heads has one matrix for both, before and after.
"""

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lowmem.data.chat_template import CHATML_TOKENS
from lowmem.data.tokens import rows_of
from lowmem.errors import Refused
from lowmem.settle import Run

SUMMED_AT_ONCE = 4096  # rows: 64 MB in fp32 at a width of 4096


class Added(NamedTuple):
    """rows: that the embedding must have; fresh: the ids of tokens that no text has held so far."""

    rows: int
    fresh: list[int]


def wanted(run: Run) -> list[str]:
    """What is typed, and what a template needs that is not the tokenizer's own."""
    parts = [run.data.arguments, *run.data.arguments.get("parts", {}).values()]
    chatml = CHATML_TOKENS if any(part.get("template") == "chatml" for part in parts) else ()
    return list(dict.fromkeys([*run.model.added_tokens, *chatml]))


def add(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str], vocab_size: int) -> Added:
    """Those that it does not have become tokens that no text is ever split into otherwise.

    Args:
        vocab_size: rows that the embedding has.
    """
    there = tokenizer.get_vocab()
    new = [token for token in tokens if token not in there]
    tokenizer.add_tokens(new, special_tokens=True)
    return Added(max(vocab_size, rows_of(tokenizer)), tokenizer.convert_tokens_to_ids(new))


def grown(config: PretrainedConfig, rows: int) -> PretrainedConfig:
    """A copy with so many rows."""
    config = copy.deepcopy(config)
    config.get_text_config(decoder=True).vocab_size = rows
    return config


@torch.no_grad()
def grow(model: PreTrainedModel, added: Added) -> None:
    """Embedding and head get `added.rows` rows, and the fresh ones the mean of the others."""
    before = model.get_input_embeddings().num_embeddings
    old = sorted({*range(before)} - {*added.fresh})
    if added.rows > before:
        model.resize_token_embeddings(added.rows, mean_resizing=False)
    for tensor in _by_token(model):  # (V, H), and (V,) of a head that has a bias
        tensor[added.fresh] = _mean(tensor, old).to(tensor.dtype)


def _by_token(model: PreTrainedModel) -> list[Tensor]:
    """Whatever has a row for each token, once where both ends of a model share it."""
    ends: list[nn.Module | None] = [model.get_input_embeddings(), model.get_output_embeddings()]
    rows = [getattr(end, name, None) for end in ends for name in ("weight", "bias")]
    return list({id(tensor): tensor for tensor in rows if tensor is not None}.values())


def _mean(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """In fp32, some rows at a time."""
    blocks = torch.tensor(rows, device=tensor.device).split(SUMMED_AT_ONCE)
    return sum(tensor[block].float().sum(0) for block in blocks) / len(rows)


def check_trained(model: PreTrainedModel, added: Added) -> None:
    """Raises: Refused: fresh rows that training leaves as they are."""
    if added.fresh and not all(tensor.requires_grad for tensor in _by_token(model)):
        raise Refused(
            "model.added_tokens: their rows of the embedding and the head start as the mean of the others and have to "
            "be trained, and here they are frozen. Type adapter=none without freeze= of them, or a model whose "
            "tokenizer has these tokens."
        )
