"""Cross entropy of the next token, summed over the tokens that count.

A loss takes the model, `input_ids` (B, T) and `labels` (B, T), where `labels[b, t]` is the token that follows
`input_ids[b, t]`, or -100 where it is not to be learnt. It returns the *sum* in fp32, so that whoever knows the tokens
of the whole window can divide by them.

`full` holds the logits (B, T, V) in the computation's dtype, again in fp32, and their gradient: at a vocabulary of
150 000 they are the peak of the run. `chunked` holds those of a few rows and computes the gradient in the forward pass,
while the chunk's logits still exist, so nothing is computed twice. Same idea: Hsu et al. 2024, arXiv 2410.10989.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowmem.data.loader import IGNORED
from lowmem.errors import Refused

SLICE = 1 << 13  # tokens of the vocabulary whose 16-bit products wait to be added in fp32


def full(model: PreTrainedModel, input_ids: Tensor, labels: Tensor) -> Tensor:
    logits = model(input_ids=input_ids, use_cache=False).logits  # (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def chunked(model: PreTrainedModel, input_ids: Tensor, labels: Tensor, rows: int) -> Tensor:
    """The same number as `full` with the logits of at most `rows` tokens in memory at once."""
    head = _linear_head(model)
    hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state  # (B, T, H)
    hidden, labels = hidden.flatten(0, 1), labels.flatten()
    if not every_label_counts(labels):  # positions that do not count never reach the head
        counted = labels != IGNORED
        hidden, labels = hidden[counted], labels[counted]
    if torch.is_autocast_enabled(hidden.device.type):  # inside the function autocast no longer acts
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    softcap = getattr(model.config, "final_logit_softcapping", None)
    return _ChunkedCrossEntropy.apply(hidden, head.weight, head.bias, labels, rows, softcap)


def every_label_counts(labels: Tensor) -> bool:
    """The one question about the data: whoever traces shapes alone must answer it instead."""
    return bool((labels != IGNORED).all())


# Attributes with which a model multiplies its logits after the head.
_LOGIT_FACTORS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier_scale")


def _linear_head(model: PreTrainedModel) -> nn.Linear:
    head = model.get_output_embeddings()
    scaled = [name for name in _LOGIT_FACTORS if getattr(model.config, name, None) not in (None, 1, 1.0)]
    if not isinstance(head, nn.Linear) or scaled:
        why = f"scales its logits ({', '.join(scaled)})" if scaled else "has no linear head"
        raise Refused(f"loss=chunked: {type(model).__name__} {why}. Type loss=full.")
    return head


class _ChunkedCrossEntropy(torch.autograd.Function):
    """sum_i -log softmax(head(hidden_i))[label_i], one chunk of rows after the other."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, rows, softcap):
        """hidden (N, H); weight (V, H); bias (V) or None; labels (N). The sum is fp32."""
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        matrix = weight.to(hidden.dtype)
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        # In fp32, 4 bytes per element of the head: a sum over thousands of rows in 16 bits would lose the small ones.
        wide = torch.promote_types(weight.dtype, torch.float32)
        d_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=wide) if needs_bias else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for part in range(0, len(labels), rows):
            rows_hidden, rows_labels = hidden[part : part + rows], labels[part : part + rows]
            logits = F.linear(rows_hidden, matrix, None if bias is None else bias.to(hidden.dtype)).float()
            if softcap is not None:
                logits = torch.tanh_(logits.div_(softcap)).mul_(softcap)
            logp = torch.log_softmax(logits, dim=-1)  # (rows, V)
            total += F.nll_loss(logp, rows_labels, reduction="sum")
            if not any(ctx.needs_input_grad):
                continue
            d_logits = logp.exp_()  # softmax minus one-hot is the gradient of the sum
            d_logits[torch.arange(len(rows_labels), device=logits.device), rows_labels] -= 1.0
            if softcap is not None:
                d_logits.mul_(1.0 - (logits / softcap).square_())
            d_rows = d_logits.to(hidden.dtype)
            if needs_hidden:
                torch.mm(d_rows, matrix, out=d_hidden[part : part + rows])
            if needs_weight:
                _add_product(d_weight, d_rows, rows_hidden)
            if needs_bias:
                d_bias += d_logits.sum(0)
            del logits, logp, d_logits, d_rows  # before the next chunk's, not after
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx, d_total):
        def scaled(gradient, dtype):  # first, so that a loss scale acts before 16 bits do
            return None if gradient is None else gradient.mul_(d_total).to(dtype)

        d_hidden, d_weight, d_bias = ctx.saved_tensors
        each = (d_hidden, None if d_hidden is None else d_hidden.dtype), (d_weight, ctx.dtype), (d_bias, ctx.dtype)
        return *(scaled(*gradient) for gradient in each), None, None, None


def _add_product(total: Tensor, d_rows: Tensor, rows_hidden: Tensor) -> None:
    """total (V, H) += d_rows (rows, V) transposed x rows_hidden (rows, H)."""
    if total.dtype == d_rows.dtype:
        total.addmm_(d_rows.T, rows_hidden)
        return
    for part, columns in zip(total.split(SLICE), d_rows.split(SLICE, dim=1), strict=True):
        part.add_(columns.T @ rows_hidden)
