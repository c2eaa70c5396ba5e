"""Trains with TRL's SFTTrainer, for comparison with the loops of `benchmarks.loops`. The rows, their order, the
optimizer and the schedule are the same as in these loops.

SFTTrainer computes the log-probabilities of the labels tile by tile from the hidden states, and so never stores the
logits of all tokens. The loss is divided by the number of tokens of the step, as in the other loops. In fp32 it differs
from the losses of those loops by about 1e-6, because the sums are rounded in another order. SFTTrainer also computes an
entropy and an accuracy, which it reads from the device at every micro-batch.

The labels are already shifted, so they are passed as `shift_labels`. SFTTrainer's own collator would lose a position of
each row.
"""

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from benchmarks.loops import Batches, Materials, Watches, adding_losses, trainer_arguments, trainer_parts


def sft(loop: Materials, watch: Watches) -> None:
    """Trains on all windows. Args: watch: its methods are called at the beginning and at the end of each step, and with
    the loss of each micro-batch."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    micro_batches = list(Batches(loop.windows))
    rows = {key: torch.cat([getattr(one, key) for one in micro_batches]).tolist() for key in ("input_ids", "labels")}
    arguments = SFTConfig(
        **trainer_arguments(loop),
        dataset_kwargs={"skip_prepare_dataset": True},
        train_sampling_strategy="sequential",
        gradient_checkpointing=loop.checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if loop.checkpointing else None,
    )
    adding_losses(SFTTrainer, watch)(
        loop.network,
        arguments,
        data_collator=collate,
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer(),
        **trainer_parts(loop, watch),
    ).train()


def collate(rows: Sequence[dict]) -> dict[str, Tensor]:
    """Returns a micro-batch of rows, which must have equal lengths. Trainer counts tokens in `labels`, SFTTrainer
    counts tokens in `attention_mask`, and the loss reads `shift_labels`."""
    ids, labels = (torch.tensor([row[key] for row in rows]) for key in ("input_ids", "labels"))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, "shift_labels": labels}


def tokenizer() -> PreTrainedTokenizerBase:
    """Returns a tokenizer with a single word. SFTTrainer requires a tokenizer, but does not use it, because the rows
    contain tokens."""
    of_one = Tokenizer(models.WordLevel({"<end>": 0}, unk_token="<end>"))
    return PreTrainedTokenizerFast(tokenizer_object=of_one, eos_token="<end>", pad_token="<end>")
