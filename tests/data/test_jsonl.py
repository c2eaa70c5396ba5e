"""Tests lines of JSON as documents: which tokens are learned, and which message each kind of bad line causes."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import strategies as st

from arbitrary import one_of, outcomes
from lowmem.data import token_store
from lowmem.data.sources import jsonl, records, text_files
from lowmem.system.errors import Refused


def write(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [one if isinstance(one, bytes) else json.dumps(one, ensure_ascii=False).encode() for one in records]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return str(path)


def opened(path, val_fraction=0.2, pattern="**/*.jsonl", **typed):
    return jsonl.jsonl(path=path, pattern=pattern, val_fraction=val_fraction, **typed)


def made_of(folder, path, **typed):
    return token_store.tokenize(opened(path, **typed), folder / "cache", 400)


def documents(made, split):
    """Returns the text of each document of a split, without its end token."""
    of = getattr(made, split)
    said = [made.tokenizer.decode(ids) for ids in np.split(of.ids, of.ends[:-1])]
    assert all(text.endswith(token_store.END_OF_TEXT) for text in said)
    return [text.removesuffix(token_store.END_OF_TEXT) for text in said]


TEXTS = [f'Größe {i} of {i * i}, and\nwords 数据 "{i}"' for i in range(50)]


def test_every_jsonl_line_is_a_document_of_exactly_one_split(tmp_path):
    made = made_of(tmp_path, write(tmp_path / "one.jsonl", [{"text": text, "id": 3} for text in TEXTS]))
    train, val = (documents(made, split) for split in ("train", "val"))
    assert sorted(train + val) == sorted(TEXTS) and 3 <= len(val) <= 20
    assert made.val.text_bytes[-1] == sum(len(text.encode()) for text in val) and made.val.learned_bits is None


def test_bom_crlf_blank_lines_and_missing_final_newline_leave_the_jsonl_tokens_unchanged(tmp_path):
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (tmp_path / "plain.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "odd.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n  \r\n\r\n".join(lines).encode())
    plain, odd = (made_of(tmp_path, str(tmp_path / f"{name}.jsonl")) for name in ("plain", "odd"))
    assert np.array_equal(plain.train.ids, odd.train.ids) and np.array_equal(plain.val.ends, odd.val.ends)


def test_added_or_reordered_jsonl_lines_move_no_other_line_between_splits(tmp_path):
    def held_out(texts):
        source = opened(write(tmp_path / "one.jsonl", [{"text": text} for text in texts]))
        return {record.fields["text"] for record in source.reader.records("val")}

    before = held_out(TEXTS)
    assert held_out([*TEXTS, "another", "and more"]) - {"another", "and more"} == before
    assert held_out(TEXTS[::-1]) == before


def test_two_to_four_jsonl_lines_hold_out_exactly_one_for_validation(tmp_path):
    for count in (2, 3, 4):
        source = opened(write(tmp_path / "one.jsonl", [{"text": text} for text in TEXTS[:count]]), 0.001)
        sizes = [len(list(source.reader.records(split))) for split in ("train", "val")]
        assert sizes == [count - 1, 1]


def test_several_jsonl_files_are_split_by_file_unless_val_path_is_set(tmp_path):
    for i in range(4):
        write(tmp_path / "in" / f"{i}.jsonl", [{"text": text} for text in TEXTS[i * 10 : i * 10 + 10]])
    made = made_of(tmp_path, str(tmp_path / "in"), val_fraction=0.25)
    assert documents(made, "val") in [TEXTS[i : i + 10] for i in (0, 10, 20, 30)]
    other = write(tmp_path / "other.jsonl", [{"text": text} for text in TEXTS[40:]])
    made = made_of(tmp_path, str(tmp_path / "in"), val_path=other)
    assert documents(made, "val") == TEXTS[40:] and documents(made, "train") == TEXTS[:40]


def test_completion_and_its_end_are_learned_and_the_prompt_is_not(tmp_path):
    pairs = [(f"What is {i} of it? ", f" It is 数 {i}.\n") for i in range(40)]
    path = write(tmp_path / "one.jsonl", [{"q": q, "a": a} for q, a in pairs])
    made = made_of(tmp_path, path, prompt="q", completion="a")
    start, seen = 0, 0
    for stop in made.train.ends.tolist():
        learned, ids = made.train.learned(start, stop), made.train.ids[start:stop]
        said = made.tokenizer.decode(ids[~learned]), made.tokenizer.decode(ids[learned])
        assert (said[0], said[1].removesuffix(token_store.END_OF_TEXT)) in pairs and ids[
            -1
        ] == made.tokenizer.eos_token_id
        start, seen = stop, seen + 1
    assert seen > 20 and 0.2 < made.train.learned(0, start).mean() < 0.9
    assert np.array_equal(made.train.learned(3, 70), made.train.learned(0, start)[3:70])


@pytest.mark.wrong
def test_wrong_variant_that_also_learns_the_prompt_fails_the_completion_test(tmp_path, monkeypatch):
    """The deliberately wrong variant marks every token as learned."""
    monkeypatch.setattr(
        token_store._Bits, "add", lambda self, learned, count, add=token_store._Bits.add: add(self, None, count)
    )
    with pytest.raises(AssertionError):
        test_completion_and_its_end_are_learned_and_the_prompt_is_not(tmp_path)


BAD = [
    (b'{"text": "a"', "the line is not valid JSON (expecting"),
    (b"text", 'the line is not valid JSON (expecting value at character 0, near "text")'),
    (b'{"text": "a\0b"}', "the line is not valid JSON (invalid control character"),
    (b'{"text": "a\\u0000b"}', 'field "text" contains a null character (U+0000)'),
    (b'{"text": "\\ud800"}', 'field "text" contains an unpaired surrogate'),
    (b'["text"]', "the line must be a JSON object, but is a list"),
    (b"3", "the line must be a JSON object, but is the number 3"),
    (b'{"body": "a", "id": 1}', 'field "text" is missing (fields: "body", "id")'),
    (b"{}", 'field "text" is missing (fields: none)'),
    (b'{"text": 3}', 'field "text" must be text, but is the number 3'),
    (b'{"text": null}', 'field "text" must be text, but is null'),
    (b'{"text": ["a"]}', 'field "text" must be text, but is a list'),
    (b'{"text": " \\n"}', 'field "text" is empty'),
    (
        '{"text": "Größe"}'.encode("latin-1"),
        "the line is not valid UTF-8 (at byte 12); convert the file with iconv -f latin1 -t utf-8",
    ),
    (b'{"text": ' + b"9" * 5000 + b"}", "the line cannot be read as JSON (exceeds the limit"),
    (b"[" * 100_000, "the line cannot be read as JSON (maximum recursion depth"),
    (b'{"text": "' + b"x" * 300_000 + b'"}', "the line is longer than 200,000 bytes"),
    (b'{"text": "x"}' + b" " * 300_000 + b"garbage", "the line is longer than 200,000 bytes"),
]


@pytest.mark.parametrize(("line", "said"), BAD, ids=[said[:30] for _, said in BAD])
def test_bad_jsonl_line_is_refused_with_its_number_and_with_skip_bad_is_skipped_and_counted(
    tmp_path, monkeypatch, caplog, line, said
):
    monkeypatch.setattr(jsonl, "LONGEST", 200_000)
    good = [{"text": text} for text in TEXTS]
    path = write(tmp_path / "notes.jsonl", [*good[:7], line, *good[7:]])
    other = write(tmp_path / "other.jsonl", [{"text": "other words"}])
    with pytest.raises(Refused) as refused:
        made_of(tmp_path, path, val_path=other)
    assert str(refused.value).startswith(f"data: notes.jsonl, line 8: {said}") and "skip_bad=true" in str(refused.value)
    for _ in range(2):  # tokenized, then read from the cache
        caplog.clear()
        with caplog.at_level("INFO"):
            made = made_of(tmp_path, path, val_path=other, skip_bad=True)
        assert documents(made, "train") == TEXTS
        assert f"data.skip_bad=true: skipped 1 of 51 train records (notes.jsonl, line 8: {said}" in caplog.text


def test_log_counts_all_skipped_jsonl_lines_and_names_the_first_three(tmp_path, caplog):
    path = write(tmp_path / "a.jsonl", [b"1", {"text": "words"}, b"2", b"3", b"4"])
    other = write(tmp_path / "other.jsonl", [{"text": "other words"}])
    with caplog.at_level("INFO"):
        made_of(tmp_path, path, val_path=other, skip_bad=True)
    assert "skipped 4 of 5 train records (a.jsonl, line 1: " in caplog.text
    assert "line 4: " in caplog.text and "line 5: " not in caplog.text and "; and others)" in caplog.text


@pytest.mark.parametrize("longer", [1, 5, 200_000, 1_000_000])
def test_overlong_jsonl_line_is_read_only_up_to_one_byte_beyond_the_limit(tmp_path, monkeypatch, longer):
    monkeypatch.setattr(jsonl, "LONGEST", 100_000)
    lines = [b'{"text": "a"}', b'"' + b"x" * (100_000 + longer - 1), b'{"text": "b"}']
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\n".join(lines))
    where, _, found, _ = zip(*jsonl.lines(file), strict=True)
    assert (
        where == ("line 1", "line 2", "line 3")
        and found[0] == lines[0]
        and found[2] == lines[2]
        and len(found[1]) == 100_001
    )


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ({"field": "a", "messages": "b"}, r"data.field and data.messages: a record is either"),
        ({"prompt": "a", "messages": "b"}, r"data.prompt and data.messages: a record is either"),
        ({"prompt": "a"}, r"data.prompt=a: data.completion is not set. Type"),
        ({"completion": "a"}, r"data.completion=a: data.prompt is not set. Type"),
        (
            {"encoding": "latin1"},
            r"data.encoding=latin1: only UTF-8 .* Type iconv -f latin1 -t utf-8 FILE",
        ),
    ],
)
def test_jsonl_source_with_conflicting_or_incomplete_keys_or_another_encoding_is_refused(tmp_path, typed, said):
    path = write(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "b"}])
    with pytest.raises(Refused, match=said):
        opened(path, **typed)


def test_two_steps_on_jsonl_completions_count_fewer_tokens_than_positions_and_have_a_val_loss_of_4_to_7(fit, tmp_path):
    pairs = [{"q": f"What is {i}? ", "a": f"It is {i}."} for i in range(60)]
    path = write(tmp_path / "one.jsonl", pairs)
    lines = ("data=jsonl", f"data.path={path}", "data.prompt=q", "data.completion=a", "data.pattern=*")
    summary, _ = fit(*lines, "seq_len=32", "max_steps=2")
    assert 0 < summary["tokens"] < 2 * 4 * 32 and 4 < summary["val_loss"] < 7


# --- validation on training data --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl", "text"])
def test_validation_set_with_30_of_50_documents_from_training_is_refused(tmp_path, kind):
    for folder, texts in (("train", TEXTS), ("val", [*TEXTS[:30], *(f"other {text}" for text in TEXTS[:20])])):
        (tmp_path / folder).mkdir()
        if kind == "jsonl":
            write(tmp_path / folder / "a.jsonl", [{"text": text} for text in texts])
        else:
            for i, text in enumerate(texts):
                (tmp_path / folder / f"{i}.txt").write_text(text)
    paths = str(tmp_path / "train"), str(tmp_path / "val")
    read = opened(paths[0], val_path=paths[1]) if kind == "jsonl" else text_files.text(paths[0], "*", 0.1, paths[1])
    with pytest.raises(Refused, match=r"30 of 50 distinct validation documents.*leak"):
        token_store.tokenize(read, tmp_path / "cache", 300)
    assert not list((tmp_path / "cache").iterdir())


def test_validation_with_half_of_its_records_in_training_is_accepted(tmp_path):
    paths = [
        write(tmp_path / f"{i}.jsonl", [{"text": t} for t in texts]) for i, texts in enumerate((TEXTS, TEXTS[40:]))
    ]
    more = [{"text": f"other {text}"} for text in TEXTS[:10]]
    write(tmp_path / "1.jsonl", [*({"text": t} for t in TEXTS[40:]), *more])
    assert len(made_of(tmp_path, paths[0], val_path=paths[1]).val.ends) == 20


# --- arbitrary contents -----------------------------------------------------------------------------------------------

SENTENCES = (
    "data.path has too few distinct records",
    "line ",
    "contain no text",
    "there is no text in it",
    "would leak training data",
    "one sequence needs",
)
values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=80)
good = st.builds(
    lambda text, number: {"text": f"{number} {text}", "q": f"{text}?", "a": f"{text} {number}!"}, texts, st.integers()
)
lines = one_of(
    good.map(lambda record: json.dumps(record).encode()),
    good.map(lambda record: json.dumps(record, ensure_ascii=False).encode()),
    st.dictionaries(st.sampled_from(["text", "q", "a", "b"]), values, max_size=4).map(lambda r: json.dumps(r).encode()),
    values.map(lambda value: json.dumps(value).encode()),
    good.map(lambda record: json.dumps(record).encode()[:-3]),
    good.map(lambda record: json.dumps(record, ensure_ascii=False).encode("utf-16")),
    st.sampled_from([line for line, _ in BAD[:-3]]),
    st.binary(max_size=60),
)
many_good = st.lists(good.map(lambda record: json.dumps(record).encode()), max_size=30)
contents = one_of(many_good, st.lists(lines, min_size=1, max_size=12)).map(b"\n".join)


def outcome(folder, of_train, of_val, skip_bad, pairs):
    """Returns "tokens" if the files are tokenized, or the phrase of SENTENCES in the message if the files are refused.
    Errors other than `Refused` are raised."""
    (folder / "train.jsonl").write_bytes(of_train)
    if of_val is not None:
        (folder / "val.jsonl").write_bytes(of_val)
    typed = {"prompt": "q", "completion": "a"} if pairs else {}
    val_path = None if of_val is None else str(folder / "val.jsonl")
    try:
        made = made_of(folder, str(folder / "train.jsonl"), val_path=val_path, skip_bad=skip_bad, **typed)
    except Refused as error:
        assert str(error).isprintable() and str(error).endswith(".")
        assert not skip_bad or "line " not in str(error).partition("data.skip_bad")[0]
        assert not (folder / "cache").exists() or not list((folder / "cache").iterdir())
        return next(words for words in SENTENCES if words in str(error))
    found = documents(made, "train") + documents(made, "val")
    assert Counter(found) == Counter(read_again([of_train, of_val or b""], pairs))
    return "tokens"


def read_again(contents, pairs):
    """Yields the text of each valid line, decoded without code of lowmem."""
    for content in contents:
        for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
            try:
                record = json.loads(line.decode())
                names = ("q", "a") if pairs else ("text",)
                text = "".join(record[name] for name in names)
                if text.encode() and "\0" not in text and record[names[-1]].strip():
                    yield text
            except (ValueError, TypeError, KeyError, AttributeError):
                pass


DRAWN = (contents, st.none() | contents, st.sampled_from([False, False, True]), st.booleans())


@pytest.mark.parametrize("cases", [60, pytest.param(500, marks=pytest.mark.matrix)])
def test_tokens_of_arbitrary_jsonl_lines_decode_to_the_texts_of_valid_lines_or_files_are_refused(cases, tmp_path):
    counted = outcomes(outcome, DRAWN, tmp_path / "case", cases, again=cases > 60)
    assert counted["tokens"] > cases / 10 and counted["line "] > cases / 10


@pytest.mark.wrong
def test_planted_jsonl_reader_faults_fail_the_arbitrary_lines_test(tmp_path, monkeypatch):
    """With each planted fault, the test of arbitrary lines must raise an error other than `Refused`."""
    for of, name, fault in (
        (jsonl, "fields_of", json.loads),
        (records, "place", lambda line: 1 / (len(line) % 20)),
    ):
        with monkeypatch.context() as planted, pytest.raises((ValueError, AttributeError, ZeroDivisionError)):
            planted.setattr(of, name, fault)
            outcomes(outcome, DRAWN, tmp_path / name, 200)


@pytest.mark.parametrize("count", [1, 40])
def test_jsonl_of_identical_records_is_refused_because_the_training_split_would_be_empty(tmp_path, count):
    with pytest.raises(Refused, match=r"the training split is empty.*too few distinct records\. Type data.val_path="):
        made_of(tmp_path, write(tmp_path / "a.jsonl", [{"text": "the same"}] * count), val_fraction=0.01)


def test_control_token_in_a_jsonl_record_is_refused_or_skipped_with_skip_bad(tmp_path):
    """An end token inside a text would end the document there, and the model would learn to stop."""
    said = f"one{token_store.END_OF_TEXT} two"
    for fields, typed in (
        ({"text": said}, {}),
        ({"q": said, "a": "yes"}, {"prompt": "q", "completion": "a"}),
        ({"q": "so?", "a": said}, {"prompt": "q", "completion": "a"}),
    ):
        others = [{name: f"{value} {i}".replace(said, "one") for name, value in fields.items()} for i in range(40)]
        path = write(tmp_path / "one.jsonl", [*others, fields])
        with pytest.raises(Refused, match=r'line 41: field ".*" contains <\|endoftext\|>.*write it differently'):
            made_of(tmp_path, path, **typed)
        made = made_of(tmp_path, path, skip_bad=True, **typed)
        for split in (made.train, made.val):
            assert np.array_equal(np.flatnonzero(split.ids == made.tokenizer.eos_token_id), split.ends - 1)


def test_refusal_of_a_too_long_jsonl_document_names_its_line_unless_a_parsed_record_was_left_out(tmp_path):
    """The line number counts blank lines and lines of invalid JSON. No line is named if a record of valid JSON was left
    out."""
    texts = [*TEXTS[:3], "a longer one, " * 60, *TEXTS[3:], "the longest one, " * 90]
    lines = [json.dumps({"text": text}).encode() for text in texts]
    whole = write(tmp_path / "long.jsonl", [*lines[:2], b"", *lines[2:]])
    damaged = write(tmp_path / "bad.jsonl", [b"{", *lines])
    left_out = write(tmp_path / "left_out.jsonl", [b'{"text": 5}', *lines])
    write(tmp_path / "val" / "short.jsonl", [{"text": "short"}])
    named_by_file = {
        whole: " The first one is long.jsonl, line 5.",
        damaged: " The first one is bad.jsonl, line 5.",
    }
    for path, named in (named_by_file | {left_out: ""}).items():
        source = opened(path, val_path=str(tmp_path / "val"), packing="padded", too_long="refuse", skip_bad=True)
        made = token_store.tokenize(source, tmp_path / "cache", 400)
        with pytest.raises(Refused, match=r"train split has 2 documents longer than seq_len=\d+ \(of 52\)") as refused:
            source.rows(made.train, 64, "train")
        assert str(refused.value).endswith(f"data.too_long=cut or drop.{named}")


@pytest.mark.parametrize(("answer", "told"), [("Q{}: {}", 2), (" {}", 0)])
def test_completions_that_repeat_their_prompt_are_reported_for_both_splits(tmp_path, answer, told):
    records = [{"q": f"Q{i}:", "a": answer.format(i, i)} for i in range(20)]
    source = opened(write(tmp_path / "a.jsonl", records), prompt="q", completion="a")
    token_store.tokenize(source, tmp_path / "cache", 400)
    notes = source.notes()
    assert len(notes) == told
    assert all("repeats the prompt" in one and """jq -c '."q" as $p | ."a" |= ltrimstr($p)'""" in one for one in notes)


@pytest.mark.parametrize("least", [1, 2, 3])
def test_records_with_the_lowest_hashes_are_held_out_if_the_fraction_is_too_small(least):
    """If a fraction holds out too few distinct records, it is raised until it holds out `least` of them, or half of all
    distinct records if that is fewer, but at least one. Any other fraction is not changed."""
    named = [f"record {number % 40}".encode() for number in range(80)]
    for count in range(1, 40):
        for share in (1e-9, 0.05, 0.5):
            of = records.held_out(named[:count] * 2, share, least)
            numbers = sorted({records.place(name) for name in named[:count]})
            wanted = max(sum(number < share for number in numbers), max(1, min(least, count // 2)))
            assert [number for number in numbers if number < of] == numbers[:wanted]
            assert of == share or wanted > sum(number < share for number in numbers)
