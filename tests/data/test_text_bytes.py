"""Bits per byte: only the text bytes of learned labels count, and `label_bytes` and the token store count the same
number of bytes."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lowmem.data import token_store
from lowmem.data.bits_per_byte import bits_per_byte, label_bytes
from lowmem.data.loader import IGNORED, MicroBatch, Share, ValidationLoader
from lowmem.data.packing import Joined
from lowmem.data.sources import text_files


@pytest.fixture
def made(text_folder, tmp_path):
    return token_store.tokenize(text_files.text(str(text_folder), "*.txt", 0.3), tmp_path / "cache", 300)


def pieces(tmp_path):
    """Returns a tokenizer like SentencePiece's: it inserts a space before the first word, and a character outside the
    vocabulary has one token per byte."""
    words = ["wörd", "other", "läst"]
    ids = {token: i for i, token in enumerate(["<unk>", "<end>", *(f"▁{w}" for w in words), "<0xC3>", "<0x9F>"])}
    model = Tokenizer(models.Unigram([(token, -1.0) for token in ids], unk_id=0, byte_fallback=True))
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    model.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>")


def batch(rows, learned=None):
    """Returns a micro-batch.

    Args:
        rows: (B, T + 1) tokens.
        learned: (B, T) bool, True for learned labels; None: all labels are learned.
    """
    ids = torch.tensor(np.asarray(rows, np.int64))
    labels = ids[:, 1:].clone()
    if learned is not None:
        labels[~torch.tensor(learned)] = IGNORED
    return MicroBatch(ids[:, :-1], labels)


def test_label_bytes_of_plain_text_equal_the_bytes_of_the_token_store(made):
    loader = ValidationLoader(Joined(made.val, 16, "val"), Share(4), 50)
    known = made.val_bytes(loader.predicted + 1) - made.val_bytes(1)
    assert label_bytes(made.tokenizer, loader) == (loader.predicted, known) == (800, known)
    assert bits_per_byte(made, loader)(np.log(2)) == pytest.approx(800 / known, rel=1e-12)
    assert bits_per_byte(made, loader)(2.0) != pytest.approx(2.0 / np.log(2))  # which would be bits per token


def test_label_bytes_of_a_sentencepiece_row_are_the_bytes_that_its_labels_add(tmp_path):
    """The first word, of 5 bytes, is never a label."""
    tokenizer = pieces(tmp_path)
    ids = tokenizer("wörd other läst wördß")["input_ids"] + [tokenizer.eos_token_id]
    assert len(ids) == 7
    assert label_bytes(tokenizer, [batch([ids])]) == (6, len(" other läst wördß".encode()))
    rows = [
        ids[:4],
        ids[3:],
    ]  # ▁wörd ends the first row and begins the second, whose labels are the bytes of ß and the end token
    assert sum(label_bytes(tokenizer, [batch([row])])[1] for row in rows) == len(" other läst wördß".encode())
    alone = [
        len(tokenizer.decode(row[1:], skip_special_tokens=True).encode()) for row in rows
    ]  # the wrong variant decodes each row alone
    assert sum(alone) != len(" other läst wördß".encode())


@pytest.mark.parametrize("level", ["bytes", "words"])
def test_tokens_that_are_not_learned_have_no_label_bytes(made, tmp_path, level):
    tokenizer = made.tokenizer if level == "bytes" else pieces(tmp_path)
    ids = tokenizer("return if x" if level == "bytes" else "other läst wörd")["input_ids"]
    ids = [*ids, tokenizer.eos_token_id, *ids]
    learned = np.zeros((1, len(ids) - 1), bool)
    learned[0, len(ids) // 2 - 2] = learned[0, -1] = True  # both copies of the last word
    learned[0, len(ids) // 2 - 1] = True  # the end token
    last = tokenizer.decode(ids).removeprefix(tokenizer.decode(ids[:-1]))
    assert label_bytes(tokenizer, [batch([ids], learned)]) == (3, 2 * len(last.encode()))
