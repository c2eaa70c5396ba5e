"""Adds tokens to a tokenizer, such as the special tokens of a chat template, and adds rows for these tokens to the
embedding and the head.

In a published model, the rows of an added token in embedding and head are initialized to the mean of the published
rows. So the logits of the token are not unusually large, and no random numbers are needed. By default, transformers
draws new rows around the mean with the covariance of the embedding. For a matrix of 128k x 4096, this would take
minutes, and memory for fp32 copies. If the embedding of a published model has more rows than its tokenizer has tokens,
the unused rows are used before new rows are added. Tied heads stay tied.
"""

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lowmem.config.settle import Run
from lowmem.data.sources.chat_template import CHATML_TOKENS
from lowmem.data.token_store import rows_of
from lowmem.system.errors import Refused

SUMMED_AT_ONCE = 4096  # number of rows that are summed at once; they take 64 MiB in fp32 for a hidden size of 4096


class Added(NamedTuple):
    """Tokens that were added to a tokenizer. Args: rows: number of rows that the embedding needs; fresh: ids of the
    added tokens."""

    rows: int
    fresh: list[int]


def wanted(run: Run) -> list[str]:
    """Returns the tokens that the model needs: model.added_tokens, and with data.template=chatml the special tokens of
    this template."""
    sources = [run.data.arguments, *run.data.arguments.get("parts", {}).values()]
    chatml = CHATML_TOKENS if any(source.get("template") == "chatml" for source in sources) else ()
    return list(dict.fromkeys([*run.model.added_tokens, *chatml]))


def add(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str], vocab_size: int) -> Added:
    """Adds the tokens that the tokenizer lacks, as special tokens.

    Args:
        tokenizer: is changed in place.
        tokens: the tokens that the tokenizer must have.
        vocab_size: number of rows of the embedding.
    """
    known = tokenizer.get_vocab()
    new = [token for token in tokens if token not in known]
    tokenizer.add_tokens(new, special_tokens=True)
    return Added(max(vocab_size, rows_of(tokenizer)), tokenizer.convert_tokens_to_ids(new))


def grown(config: PretrainedConfig, rows: int) -> PretrainedConfig:
    """Returns a copy of the config with a vocabulary of `rows` tokens."""
    config = copy.deepcopy(config)
    config.get_text_config(decoder=True).vocab_size = rows
    return config


@torch.no_grad()
def grow(model: PreTrainedModel, added: Added) -> None:
    """Extends embedding and head to `added.rows` rows if they have fewer. Sets the rows of added tokens to the mean of
    all rows that existed before, except rows of added tokens."""
    before = model.get_input_embeddings().num_embeddings
    old = sorted({*range(before)} - {*added.fresh})
    if added.rows > before:
        model.resize_token_embeddings(added.rows, mean_resizing=False)
    for tensor in _by_token(model):  # (V, H), and (V,) of a head that has a bias
        tensor[added.fresh] = _mean(tensor, old).to(tensor.dtype)


def _by_token(model: PreTrainedModel) -> list[Tensor]:
    """Returns the weights and biases of embedding and head. Each of these tensors has one row per token. Tied tensors
    are listed once."""
    ends: list[nn.Module | None] = [model.get_input_embeddings(), model.get_output_embeddings()]
    rows = [getattr(end, name, None) for end in ends for name in ("weight", "bias")]
    return list({id(tensor): tensor for tensor in rows if tensor is not None}.values())


def _mean(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Returns the mean of the given rows in fp32. Sums at most SUMMED_AT_ONCE rows at once, to save memory."""
    blocks = torch.tensor(rows, device=tensor.device).split(SUMMED_AT_ONCE)
    return sum(tensor[block].float().sum(0) for block in blocks) / len(rows)


def check_trained(model: PreTrainedModel, added: Added) -> None:
    """Raises Refused if the rows of added tokens are frozen."""
    if added.fresh and not all(tensor.requires_grad for tensor in _by_token(model)):
        raise Refused(
            "model.added_tokens: the embedding and output rows of added tokens start as the mean of the other rows and "
            "must be trained, but here they are frozen. Type adapter=none and remove these layers from freeze=, or "
            "use a model whose tokenizer has these tokens."
        )
