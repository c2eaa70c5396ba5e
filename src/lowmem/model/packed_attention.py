"""Checks that documents in a packed row do not attend to each other, and selects the attention implementation.

If position ids restart at each document, transformers separates documents with a mask (B, 1, T, T). But if the model
gets an attention mask or a cache, transformers silently ignores the boundaries between documents.
Up to rounding, `document_attention.py` gives the same results as attention with this mask, without building the mask.

Some models do not use position ids for their masks, and recurrent layers (state spaces, linear attention) ignore
boundaries between documents. There is no list of such models, so each run tests its model in the run's precision:
before the first optimizer step, or before the evaluation if the run only evaluates. The logits of a document must not
depend on tokens of earlier documents (the gradient is zero), and up to rounding must equal the logits of this document
in a separate row. If a model fails without the mask, it is tested again with the mask. The test row is short. Sliding
windows and similar lengths may affect a row of the run, but not the test row, so these lengths are reduced for a second
test (`lengths.py`).
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lowmem.model.document_attention import BY_DOCUMENT, MASKED, by_autocast, has_kernel
from lowmem.model.lengths import check_documents, shortened
from lowmem.model.magnitude import largest_magnitude, same
from lowmem.system.errors import Refused
from lowmem.system.torch_private import attention_taken

log = logging.getLogger(__name__)

LOOKED_AT = 64  # maximum number of tokens in a test row


def separate(model: PreTrainedModel, compiled: bool = False) -> None:
    """Selects document attention if the model uses torch's SDPA. A model with another attention implementation is not
    changed, because document attention lacks additions such as the attention sinks of GPT-OSS.

    Args:
        model: the model.
        compiled: blocks are compiled. Compiled blocks do not support a varying number of documents, so they use the
            mask.
    """
    if attention_taken(model) == "sdpa":
        model.set_attn_implementation(MASKED if compiled else BY_DOCUMENT)


@contextmanager
def own_mask(model: PreTrainedModel) -> Iterator[None]:
    """Context manager in which the model has the attention implementation that it had before `separate`, because some
    models need a bool mask."""
    taken = attention_taken(model)
    model.set_attn_implementation("sdpa" if taken in (BY_DOCUMENT, MASKED) else taken)
    try:
        yield
    finally:
        model.set_attn_implementation(taken)


def keeps_apart(model: PreTrainedModel, input_ids: Tensor, longest: int = 0) -> bool:
    """Returns True if the logits of each document in a row do not depend on earlier documents, and up to rounding equal
    the logits of this document in a separate row.

    Args:
        model: the model.
        input_ids: (B, T) with T >= 4. Each row is split into three documents.
        longest: number of tokens in a row of the run. If it is at most T, no lengths are reduced for a second test.

    Raises:
        Refused: the logits contain inf or nan.
    """
    tokens = input_ids.shape[1]
    lengths = [tokens // 4, tokens // 3, tokens - tokens // 4 - tokens // 3]
    if not _keeps_apart(model, input_ids, lengths):
        return False
    # reduce sliding windows to a length between the lengths of the first two documents
    with shortened(model, tokens, longest, to=(lengths[0] + lengths[1]) // 2) as any_length:
        return not any_length or _keeps_apart(model, input_ids, lengths)


def _keeps_apart(model: PreTrainedModel, input_ids: Tensor, lengths: list[int]) -> bool:
    places = torch.cat([torch.arange(length, device=input_ids.device) for length in lengths])
    packed = {"input_ids": input_ids, "position_ids": places.expand_as(input_ids)}
    with torch.no_grad(), own_mask(model):
        documents = input_ids.split(lengths, dim=1)
        alone = torch.cat([model(input_ids=document, use_cache=False).logits for document in documents], dim=1)
    largest = largest_magnitude(alone)  # refuses inf and nan here, because the gradient would then be nan
    return _sees_nothing_before(model, packed, lengths) and _same(model, packed, alone, largest)


def _same(model: PreTrainedModel, packed: dict[str, Tensor], alone: Tensor, largest: float) -> bool:
    with torch.no_grad():
        in_row = model(**packed, use_cache=False).logits
    return same(in_row, alone, largest, [alone.dtype, _computed_in(model, alone.device.type)])


def _computed_in(model: PreTrainedModel, device: str) -> torch.dtype:
    return by_autocast(model.get_input_embeddings().weight.dtype, device)


def _sees_nothing_before(model: PreTrainedModel, packed: dict[str, Tensor], lengths: list[int]) -> bool:
    """Returns True if no document depends on an earlier document: the gradient with respect to earlier documents must
    be exactly zero, in every precision."""
    return not any(_depends(model, packed, boundary) for boundary in (lengths[0], lengths[0] + lengths[1]))


def _depends(model: PreTrainedModel, packed: dict[str, Tensor], boundary: int) -> bool:
    """Returns True if the outputs from position `boundary` on depend on tokens before `boundary`, or if this cannot be
    tested because the model does not call its embedding layer.

    Each boundary needs a separate forward pass, because compiled code frees its saved tensors in backward. If the model
    has a head, backward starts from the head's input instead of the logits, because a streamed head does not keep its
    tiles for backward. The answer is the same, since the head processes each token independently.
    """
    embedded: list[Tensor] = []
    features: list[Tensor] = []

    def caught(_, __, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1].clone()  # some models scale embeddings in place

    head = model.get_output_embeddings()
    hooks = [model.get_input_embeddings().register_forward_hook(caught)]
    if head is not None:
        hooks.append(head.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0])))
    try:
        with torch.inference_mode(False), torch.enable_grad():  # because an evaluation runs in inference mode
            packed = {name: tensor.clone() for name, tensor in packed.items()}
            logits = model(**packed, use_cache=False).logits
            # a scalar that depends on each output from `boundary` on
            behind = (features[0] if features else logits)[:, boundary:].float().logsumexp(-1).sum()
    finally:
        for hook in hooks:
            hook.remove()
    if not embedded:
        return True
    gradient = torch.autograd.grad(behind, embedded[0])[0]  # (B, T, H)
    return bool(gradient[:, :boundary].any())


def verify(model: PreTrainedModel, row: Tensor) -> None:
    """Checks that documents in a row do not attend to each other. If the check fails without a mask, selects attention
    with a mask and checks again. If the model is sharded, all ranks must call this function.

    Args:
        model: the model.
        row: (B, T), token ids of a micro-batch of the run.

    Raises:
        Refused: documents in a row attend to each other even with a mask, or depend on each other's lengths
            (`check_documents`); or the logits contain inf or nan.
    """
    input_ids, longest = row[:, :LOOKED_AT], row.shape[1]
    check_documents(model, longest)
    if attention_taken(model) == BY_DOCUMENT:
        if _works_without_mask(model, input_ids, longest):
            at_once = has_kernel(_computed_in(model, input_ids.device.type), input_ids.device)
            how = "in one call of torch's variable-length kernel" if at_once else "in one call per document"
            log.info(
                f"data.packing=documents: attention runs {how}; only layers with a sliding window shorter than a row "
                "need a (tokens, tokens) mask."
            )
            return
        model.set_attn_implementation(MASKED)
    if not keeps_apart(model, input_ids, longest):
        raise Refused(
            f"data.packing=documents: in {type(model).__name__}, documents in one row attend to each other, "
            "even with position ids that restart. Type data.packing=padded."
        )
    if attention_taken(model) == MASKED:
        log.info("data.packing=documents: every attention layer needs a (tokens, tokens) mask to separate documents.")


def _works_without_mask(model: PreTrainedModel, input_ids: Tensor, longest: int) -> bool:
    try:
        return keeps_apart(model, input_ids, longest)
    except (IndexError, RuntimeError, TypeError):  # for example if the model expects a mask with four dimensions
        return False
