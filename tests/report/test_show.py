"""Tests the output of `show=3`: learned tokens are marked, characters are complete, and documents are separated."""

import re

import numpy as np
import pytest
from tokenizers import ByteLevelBPETokenizer, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from conftest import SMALL
from lowmem.config.check import check_values
from lowmem.data.loader import Share, WindowLoader
from lowmem.data.mix import Mixed
from lowmem.data.packing import rows
from lowmem.data.token_store import Split
from lowmem.report.show import RULE, Row, page, pieces, row_of, written
from lowmem.system.errors import Refused


@pytest.fixture(scope="module")
def letters():
    """Returns a tokenizer that has one token per byte."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["a"], vocab_size=257, special_tokens=["<|end|>"], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<|end|>")


def row(tokenizer, text, learned, starts=(0,), padding=0):
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(learned)
    return Row(ids, [mark == "x" for mark in learned], starts, padding)


def test_show_marks_learned_tokens_with_brackets_or_given_marks(letters):
    one = row(letters, "ab<|end|>cd", "-xx-x")
    assert written(one, letters) == "a[b<|end|>]c[d]"
    assert written(one, letters, ("<", ">")) == "a<b<|end|>>c<d>"


def test_show_separates_documents_by_a_rule(letters):
    one = row(letters, "ab\ncdef", "-xx-xxx", starts=(0, 3, 5), padding=1200)
    assert written(one, letters) == f"a[b\n]\n{RULE}\nc[d]\n{RULE}\n[ef]\n(1,200 padding tokens)"


def test_show_joins_tokens_of_one_character_and_replaces_partial_characters(letters):
    one = row(letters, "é🙂x", "--" + "xxxx" + "-")
    assert written(one, letters) == "é[🙂]x"
    cut = Row(one.ids[1:-2], one.learned[1:-2], (0,))
    assert written(cut, letters) == "\N{REPLACEMENT CHARACTER}[\N{REPLACEMENT CHARACTER}]"


def test_show_restores_the_spaces_of_sentencepiece_tokens():
    bpe = Tokenizer(models.BPE({"▁a": 0, "▁b": 1, "c": 2, "▁": 3, "a": 4, "b": 5}, [("▁", "a"), ("▁", "b")]))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made = PreTrainedTokenizerFast(tokenizer_object=bpe)
    assert [text for _, _, text in pieces([0, 1, 2, 0], made)] == ["a", " b", "c", " a"]


def test_show_escapes_terminal_control_characters(letters):
    one = row(letters, "a\x1b[31m\tb\r", "-" * 9)
    assert written(one, letters) == "a\\x1b[31m\tb\\r"


def split_of(letters, *documents, learned=None):
    ids = [letters(text)["input_ids"] for text in documents]
    ends = np.cumsum([len(one) for one in ids])
    bits = None if learned is None else np.packbits([mark == "x" for mark in learned])
    return Split(np.concatenate(ids).astype(np.uint16), ends, ends, bits)


DOCUMENTS = ("abc<|end|>", "de<|end|>", "fghijk<|end|>")


@pytest.mark.parametrize(
    ("packing", "expected"),
    [
        ("joined", f"a[bc<|end|>]\n{RULE}\n[de<|end|>]\n{RULE}\n[f]"),  # the label of the last token is in the next row
        ("documents", f"a[bc<|end|>]\n{RULE}\nd[e<|end|>]"),
        ("padded", "a[bc<|end|>]"),
    ],
)
def test_show_separates_joined_and_packed_documents_and_prints_one_padded_document_per_row(letters, packing, expected):
    split = split_of(letters, *DOCUMENTS)
    made = rows(split, 7, packing, "cut", "train")
    shown = [written(row_of(made, index), letters) for index in range(len(made))]
    assert expected in shown


def test_show_counts_padding_tokens(letters):
    made = rows(split_of(letters, *DOCUMENTS), 9, "documents", "cut", "train")
    assert written(row_of(made, 1), letters).endswith("(2 padding tokens)")


def test_show_ends_with_counts_of_documents_tokens_and_sequences(letters):
    split = split_of(letters, *DOCUMENTS, learned="-xxx-xx-xxxxxx")
    loader = WindowLoader(rows(split, 7, "documents", "drop", "train"), Share(1), lambda *_: 1, seed=0)
    text = page(loader, letters, 9)
    assert text.count("════ sequence") == 2 and "6 of 7 tokens learned" in text
    assert "Training: 3 documents; 14 tokens (79% learned); 2 sequences of 7 tokens; 100.0% filled" in text
    assert "\033[32m" in page(loader, letters, 1, colour=True)
    cut = WindowLoader(rows(split, 4, "documents", "cut", "train"), Share(1), lambda *_: 1, seed=0)
    assert "1 too long and cut" in page(cut, letters, 1)  # the rest of a long document is in other rows


@pytest.mark.parametrize("packing", ["joined", "documents", "padded"])
def test_show_prints_before_a_model_is_built_and_leaves_no_folder(command, tmp_path, monkeypatch, packing):
    monkeypatch.setattr("lowmem.model.loading.load", lambda *_, **__: pytest.fail("a model was built"))
    code, said = command("show=2", f"data.packing={packing}")
    assert code == 0 and "sequence 2 of" in said and "sequence 3" not in said
    assert "Training: 11 documents" in said and "(100% learned)" in said and "\033" not in said
    assert not (tmp_path / "run").exists()


def test_show_with_evaluate_is_refused(config):
    with pytest.raises(Refused, match=r"evaluate and show: one command can use only one of these keys"):
        check_values(config("show=1", "evaluate=x"))


@pytest.mark.matrix
def test_show_prints_tokens_of_random_data_and_documents_of_each_mixed_part(command, text_folder):
    code, said = command("data=random", "show=1", "seq_len=16", base=SMALL)
    assert code == 0 and "random tokens" in said and "16 of 17 tokens learned" in said
    parts = ("+data@data.parts.one=text", "+data@data.parts.two=text", "data.parts.two.packing=documents")
    paths = (f"data.parts.one.path={text_folder}", f"data.parts.two.path={text_folder}")
    code, said = command("data=mix", *parts, *paths, "show=2", base=SMALL)
    assert code == 0 and "one: 11 documents" in said and "two: 11 documents" in said
    assert re.search(r"Training: one: \S+% of the tokens in the loss", said) and "sequence 2 of" in said


def test_show_of_a_joined_row_in_a_mixture_ignores_a_document_that_begins_after_the_row(letters):
    joined, packed = (
        rows(split_of(letters, *texts, learned=learned), 4, packing, "cut", "train")
        for texts, learned, packing in (
            (("abcd", "efgh"), "-xxx-xxx", "joined"),
            (("ab", "cdef"), "xxxxxx", "documents"),
        )
    )
    mixed = Mixed({"joined": joined, "packed": packed}, None)
    assert written(row_of(mixed, 0), letters) == "a[bcd]"


def test_show_does_not_count_the_unlearned_end_of_a_joined_row_as_padding(letters):
    split = split_of(letters, "abc", "defg", learned="-xx" + "----")
    row = row_of(rows(split, 6, "joined", "cut", "train"), 0)
    assert written(row, letters) == f"a[bc]\n{RULE}\ndef"
