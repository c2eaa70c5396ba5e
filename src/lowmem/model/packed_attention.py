"""Checks that no document of a packed row sees another, and chooses how attention keeps them apart.

Given position ids, transformers separates documents by a mask (B, 1, T, T), unless it gets a mask or a cache: both make
it ignore the boundaries without a warning. `document_attention.py` does without the mask.

No list says which models hand the positions on to their masks. Some do not, and layers that run along the row (state
spaces, linear attention) know no boundary at all. So each model is tested before its first step, in the run's
precision: which tokens a document's logits depend on, and whether they are those that it has alone. A model that
changes its mask itself is tested again with one. Windows and the like that are longer than the tokens of the test, and
shorter than a row, are made shorter for a second test (`lengths.py`).
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

LOOKED_AT = 64  # tokens of a row: more than a rule that sets in at a length is likely to leave out


def separate(model: PreTrainedModel, compiled: bool = False) -> None:
    """Computes documents by themselves if the model really uses torch's attention. A model without it would accept the
    name and lose its own additions (GPT-OSS its sinks). Args: compiled: blocks are compiled, which cannot count
    documents, so they get the mask."""
    if attention_taken(model) == "sdpa":
        model.set_attn_implementation(MASKED if compiled else BY_DOCUMENT)


@contextmanager
def own_mask(model: PreTrainedModel) -> Iterator[None]:
    """Undoes `separate` inside the `with`: a model may need a mask of booleans."""
    taken = attention_taken(model)
    model.set_attn_implementation("sdpa" if taken in (BY_DOCUMENT, MASKED) else taken)
    try:
        yield
    finally:
        model.set_attn_implementation(taken)


def keeps_apart(model: PreTrainedModel, input_ids: Tensor, longest: int = 0) -> bool:
    """Returns whether documents of a row have the logits that they have alone. Args: input_ids: (B, T), T at least 4;
    longest: tokens of a row of the run."""
    tokens = input_ids.shape[1]
    lengths = [tokens // 4, tokens // 3, tokens - tokens // 4 - tokens // 3]
    if not _keeps_apart(model, input_ids, lengths):
        return False
    with shortened(model, tokens, longest, to=(lengths[0] + lengths[1]) // 2) as any_length:  # between two documents'
        return not any_length or _keeps_apart(model, input_ids, lengths)


def _keeps_apart(model: PreTrainedModel, input_ids: Tensor, lengths: list[int]) -> bool:
    places = torch.cat([torch.arange(length, device=input_ids.device) for length in lengths])
    packed = {"input_ids": input_ids, "position_ids": places.expand_as(input_ids)}
    with torch.no_grad(), own_mask(model):
        documents = input_ids.split(lengths, dim=1)
        alone = torch.cat([model(input_ids=document, use_cache=False).logits for document in documents], dim=1)
    largest = largest_magnitude(alone)  # first: the gradients of numbers that are not finite depend on everything
    return _sees_nothing_before(model, packed, lengths) and _same(model, packed, alone, largest)


def _same(model: PreTrainedModel, packed: dict[str, Tensor], alone: Tensor, largest: float) -> bool:
    with torch.no_grad():
        in_row = model(**packed, use_cache=False).logits
    return same(in_row, alone, largest, [alone.dtype, _computed_in(model, alone.device.type)])


def _computed_in(model: PreTrainedModel, device: str) -> torch.dtype:
    return by_autocast(model.get_input_embeddings().weight.dtype, device)


def _sees_nothing_before(model: PreTrainedModel, packed: dict[str, Tensor], lengths: list[int]) -> bool:
    """Returns whether no document depends on an earlier one: the gradient is exactly zero there, in any precision."""
    return not any(_depends(model, packed, boundary) for boundary in (lengths[0], lengths[0] + lengths[1]))


def _depends(model: PreTrainedModel, packed: dict[str, Tensor], boundary: int) -> bool:
    """Returns whether tokens from `boundary` on depend on those before it. Each question has a pass of its own, since
    compiled code gives up what it has stored in its backward pass. What the head gets is asked, since a head whose
    weights stream keeps none of its tiles for a backward pass, and it computes each token by itself."""
    embedded: list[Tensor] = []
    features: list[Tensor] = []

    def caught(_, __, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1].clone()  # some models scale it in place

    head = model.get_output_embeddings()
    hooks = [model.get_input_embeddings().register_forward_hook(caught)]
    if head is not None:
        hooks.append(head.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0])))
    try:
        with torch.inference_mode(False), torch.enable_grad():  # an evaluation has inference mode on and gradients off
            packed = {name: tensor.clone() for name, tensor in packed.items()}
            logits = model(**packed, use_cache=False).logits
            behind = (features[0] if features else logits)[:, boundary:].float().logsumexp(-1).sum()  # of (B, T, H)
    finally:
        for hook in hooks:
            hook.remove()
    if not embedded:
        return True
    gradient = torch.autograd.grad(behind, embedded[0])[0]  # (B, T, H)
    return bool(gradient[:, :boundary].any())


def verify(model: PreTrainedModel, row: Tensor) -> None:
    """Tests a model, and gives it the mask if it needs one. Args: row: (B, T), real tokens of the run's rows.

    Raises:
        Refused: the model mixes documents of a row.
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
    except (IndexError, RuntimeError, TypeError):  # it reads the mask as one of four dimensions
        return False
