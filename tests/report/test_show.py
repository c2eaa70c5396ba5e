"""What `show=3` prints: token by token the learnt ones, whole characters, documents apart."""

import pytest
from tokenizers import ByteLevelBPETokenizer, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lowmem.report.show import RULE, Row, pieces, written


@pytest.fixture(scope="module")
def letters():
    """Every byte is a token."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["a"], vocab_size=257, special_tokens=["<|end|>"], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<|end|>")


def row(tokenizer, text, learnt, starts=(0,), padding=0):
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(learnt)
    return Row(ids, [mark == "x" for mark in learnt], starts, padding)


def test_what_is_learnt_stands_in_brackets_or_in_colour(letters):
    one = row(letters, "ab<|end|>cd", "-xx-x")
    assert written(one, letters) == "a[b<|end|>]c[d]"
    assert written(one, letters, ("<", ">")) == "a<b<|end|>>c<d>"


def test_a_rule_stands_before_each_document_but_the_first(letters):
    one = row(letters, "ab\ncdef", "-xx-xxx", starts=(0, 3, 5), padding=1200)
    assert written(one, letters) == f"a[b\n]\n{RULE}\nc[d]\n{RULE}\n[ef]\n(1,200 tokens of padding)"


def test_a_character_of_several_tokens_is_whole_and_half_of_one_is_no_error(letters):
    one = row(letters, "é🙂x", "--" + "xxxx" + "-")
    assert written(one, letters) == "é[🙂]x"
    cut = Row(one.ids[1:-2], one.learnt[1:-2], (0,))
    assert written(cut, letters) == "\N{REPLACEMENT CHARACTER}[\N{REPLACEMENT CHARACTER}]"


def test_spaces_of_sentencepiece_are_those_of_the_text():
    bpe = Tokenizer(models.BPE({"▁a": 0, "▁b": 1, "c": 2, "▁": 3, "a": 4, "b": 5}, [("▁", "a"), ("▁", "b")]))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made = PreTrainedTokenizerFast(tokenizer_object=bpe)
    assert [text for _, _, text in pieces([0, 1, 2, 0], made)] == ["a", " b", "c", " a"]


def test_what_a_terminal_would_obey_is_written_out(letters):
    one = row(letters, "a\x1b[31m\tb\r", "-" * 9)
    assert written(one, letters) == "a\\x1b[31m\tb\\r"
