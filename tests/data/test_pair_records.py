"""Tests records of pairs and of rated answers: their formats, which tokens are learned, and which message each kind of
bad record causes.

Expected rows are texts with [ ] around the learned tokens, as `show=1` prints them.
"""

import json
import re
from functools import partial

import pyarrow as pa
import pytest
from pyarrow import parquet
from test_chat import tokenizer
from test_jsonl import write

from lowmem.config.accumulation import fixed
from lowmem.data import pairs, token_store
from lowmem.data.loader import Share, WindowLoader
from lowmem.data.pairs import PackedPairs, PaddedPairs
from lowmem.data.rated import RatedAnswers
from lowmem.data.sources import preference
from lowmem.data.sources.chat_template import CHATML
from lowmem.data.sources.preference import Preference, is_hub_id
from lowmem.report.show import Row, page, written
from lowmem.system.errors import Refused
from lowmem.training import build


def said(role, content, **more):
    return {"role": role, "content": content, **more}


USER, SYSTEM, A, B = said("user", "hi"), said("system", "be"), said("assistant", "yes"), said("assistant", "no")
EARLIER = [USER, said("assistant", "so"), said("user", "and?")]
ADD = {"type": "function", "function": {"name": "add"}}


def turn(role, content):
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def chatml(before, answer):
    return f"{before}<|im_start|>assistant\n[{answer}<|im_end|>]\n"


HI = turn("user", "hi")
CHATS = [chatml(HI, "yes"), chatml(HI, "no")]
LONG = HI + turn("assistant", "so") + turn("user", "and?")
TEXT, CHAT = ({"prompt": "hi", "chosen": a, "rejected": b} for a, b in ((" yes", " no"), ([A], [B])))
OTHERS = {str: TEXT | {"prompt": "other"}, list: CHAT | {"prompt": "other"}}


def validation(folder, like, **typed):
    """Writes a validation file with one pair whose prompt differs from the prompts in the training records.

    Args:
        like: str for a pair of texts, list for a pair of lists of messages.
        typed: maps keys of data= to names of fields.
    """
    other = {typed.get(key, key) or "-": value for key, value in OTHERS[like].items()}
    if like is str and "prompt" in typed:
        other = {key: "other" + str(value) for key, value in other.items()}
    return write(folder / "val" / "v.jsonl", [other])


def opened(folder, *records, like=None, **typed):
    """Returns a source of these records.

    Args:
        like: type of the answers in the validation pair (see `validation`); None: their type in the first record.
        typed: maps keys of data= to their values.
    """
    like = like or (str if isinstance(records[0].get(typed.get("chosen", "chosen")), str) else list)
    file = write(folder / "a.jsonl", records)
    return Preference(file, val_path=validation(folder, like, **typed), **typed)


def tokens_of(folder, source):
    return token_store.tokenize(source, folder / "cache", 400)


def documents(made):
    of, start, found = made.train, 0, []
    for stop in of.ends.tolist():
        found.append(written(Row(of.ids[start:stop].tolist(), of.learned(start, stop).tolist(), [0]), made.tokenizer))
        start = stop
    return found


def read(folder, *records, **typed):
    return documents(tokens_of(folder, opened(folder, *records, **typed)))


END = token_store.END_OF_TEXT
FORMATS = {
    "texts": (TEXT, {}, [f"hi[ yes{END}]", f"hi[ no{END}]"]),
    "no prompt": (TEXT | {"prompt": ""}, {}, [f"[ yes{END}]", f"[ no{END}]"]),
    "other names": ({"q": "hi", "a": "x", "b": "y"}, {"prompt": "q", "chosen": "a", "rejected": "b"}, None),
    "lists": (CHAT | {"prompt": [USER]}, {}, CHATS),
    "several turns": (CHAT | {"prompt": EARLIER}, {}, [chatml(LONG, "yes"), chatml(LONG, "no")]),
    "messages hold the prompt": ({"chosen": [USER, A], "rejected": [USER, B]}, {}, CHATS),
    "prompt and both answers hold the prompt": (
        {"prompt": [USER], "chosen": [USER, A], "rejected": [USER, B]},
        {},
        CHATS,
    ),
    "only chosen repeats the prompt": ({"prompt": [USER], "chosen": [USER, A], "rejected": [B]}, {}, CHATS),
    "text prompt and answer messages": (CHAT, {}, CHATS),
    "text prompt and full conversations": ({"prompt": "hi", "chosen": [USER, A], "rejected": [USER, B]}, {}, CHATS),
    "single messages": ({"prompt": USER, "chosen": A, "rejected": B}, {}, CHATS),
    "a system message": (CHAT | {"prompt": [SYSTEM, USER]}, {}, [turn("system", "be") + one for one in CHATS]),
    "prompt begins with an answer": (
        CHAT | {"prompt": [A, USER]},
        {},
        [turn("assistant", "yes") + one for one in CHATS],
    ),
    "text prompt is the last user message": (
        {"prompt": "and?", "chosen": [*EARLIER, A], "rejected": [*EARLIER, B]},
        {},
        [chatml(LONG, "yes"), chatml(LONG, "no")],
    ),
    "list prompt is the last user message": (
        {"prompt": EARLIER[2:], "chosen": [*EARLIER, A], "rejected": [*EARLIER, B]},
        {},
        [chatml(LONG, "yes"), chatml(LONG, "no")],
    ),
    "answers repeat the last prompt message": (
        {"prompt": EARLIER, "chosen": [EARLIER[2], A], "rejected": [EARLIER[2], B]},
        {},
        [chatml(LONG, "yes"), chatml(LONG, "no")],
    ),
    "list prompt with other white space": (
        {"prompt": [said("user", " hi\n")], "chosen": [USER, A], "rejected": [USER, B]},
        {},
        CHATS,
    ),
    "text prompt with other white space": ({"prompt": "hi ", "chosen": [USER, A], "rejected": [USER, B]}, {}, CHATS),
    "prompt in content parts": (
        {"prompt": [said("user", [{"type": "text", "text": "hi"}])], "chosen": [USER, A], "rejected": [USER, B]},
        {},
        CHATS,
    ),
    "extra field in the prompt only": (
        {"prompt": [USER | {"id": 1}], "chosen": [USER, A], "rejected": [USER, B]},
        {},
        CHATS,
    ),
    "null field in one answer": (
        {"prompt": [USER], "chosen": [USER | {"n": None}, A], "rejected": [USER, B]},
        {},
        CHATS,
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_last_answer_and_its_end_are_learned_in_every_pair_format(tmp_path, name):
    record, typed, expected = FORMATS[name]
    assert read(tmp_path, record, **typed) == (expected or [f"hi[x{END}]", f"hi[y{END}]"])


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        ("Q: a word\nA: yesterday", "Q: a word\nA: yes", ["Q: a word\nA:[ yesterday", "Q: a word\nA:[ yes"]),
        ("yesterday", "yes", ["[yesterday", "[yes"]),
        ("Q a", "Q a b", ["Q[ a", "Q[ a b"]),
    ],
)
def test_pair_without_a_prompt_field_takes_the_common_whole_words_as_prompt(tmp_path, chosen, rejected, expected):
    found = read(tmp_path, {"chosen": chosen, "rejected": rejected}, prompt=None)
    assert found == [f"{one}{END}]" for one in expected]


def test_answers_of_a_pair_have_the_same_prompt_tokens(tmp_path):
    for number, record in enumerate((TEXT, CHAT | {"prompt": EARLIER})):
        train = tokens_of(tmp_path / str(number), opened(tmp_path / str(number), record)).train
        learned = train.learned(0, len(train.ids))
        one, other = ((train.ids[a:b], learned[a:b]) for a, b in ((0, train.ends[0]), train.ends))
        before = [ids[: int(mask.argmax())].tolist() for ids, mask in (one, other)]
        assert before[0] == before[1] != []


def test_data_assistant_all_learns_all_answers_of_a_pair(tmp_path):
    different = [USER, said("assistant", "but"), said("user", "and?"), B]
    found = read(tmp_path, {"chosen": [*EARLIER, A], "rejected": different}, assistant="all")
    assert found == [
        chatml(f"{chatml(HI, text)}{turn('user', 'and?')}", end) for text, end in (("so", "yes"), ("but", "no"))
    ]


def test_tools_of_a_pair_are_rendered_for_both_answers_or_refused_if_the_template_omits_them(tmp_path):
    with_tools = tokenizer("{% if tools %}{{ tools[0]['function']['name'] + '\\n' }}{% endif %}" + CHATML)
    source = opened(tmp_path, CHAT | {"tools": [ADD]})
    assert documents(token_store.tokenize(source, tmp_path / "cache", 0, with_tools)) == [
        f"add\n{one}" for one in CHATS
    ]
    with pytest.raises(Refused, match=r"line 1: field \"chosen\": tool 1 is missing from the text"):
        tokens_of(tmp_path, source)


def test_pairs_from_a_folder_of_parquet_equal_pairs_from_a_folder_of_jsonl(tmp_path):
    records = [{"prompt": [said("user", f"hi {i}")], "chosen": [A], "rejected": [B]} for i in range(6)]
    other = validation(tmp_path, list)
    for part in (0, 3):
        write(tmp_path / "lines" / f"{part}.jsonl", records[part : part + 3])
        table = pa.Table.from_pylist([record | {"score": 1.5} for record in records[part : part + 3]])
        (tmp_path / "tables").mkdir(exist_ok=True)
        parquet.write_table(table, tmp_path / "tables" / f"{part}.parquet")
    lines = Preference(str(tmp_path / "lines"), val_path=other)
    write(tmp_path / "tables" / "v.jsonl", [OTHERS[list]])
    tables = Preference(str(tmp_path / "tables"), "**/*", val_path=str(tmp_path / "tables" / "v.jsonl"))
    found = [documents(tokens_of(tmp_path / kind, source)) for kind, source in (("l", lines), ("t", tables))]
    assert found[0] == found[1] and len(found[0]) == 12


BAD = [
    (TEXT, {"prompt": "a", "rejected": "b"}, 'field "chosen" is missing (fields: "prompt", "rejected")'),
    (TEXT, {"chosen": "a", "rejected": "b"}, 'field "prompt" is missing; data.prompt=null takes the common'),
    (TEXT, TEXT | {"prompt": 3}, 'field "prompt" must be text, but is the number 3'),
    (TEXT, TEXT | {"rejected": " \n"}, 'field "rejected" is empty'),
    (TEXT, TEXT | {"chosen": " no"}, '"chosen" and "rejected" are identical'),
    (
        TEXT,
        TEXT | {"chosen": f"a {END}"},
        f'field "chosen" contains {END}, which the tokenizer reads as a control token',
    ),
    (TEXT, TEXT | {"rejected": [B]}, 'field "rejected" must be text, but is a list'),
    (CHAT, CHAT | {"chosen": "yes"}, 'field "chosen" must be a list of messages, but is text'),
    (CHAT, CHAT | {"chosen": []}, '"chosen" must end with a message of the assistant'),
    (CHAT, CHAT | {"chosen": [said("assistant", " ")]}, 'field "chosen": message 2 is an empty answer'),
    (CHAT, CHAT | {"chosen": [B]}, '"chosen" and "rejected" are identical'),
    (CHAT, CHAT | {"rejected": [said("assistant", "<|im_end|>")]}, 'field "rejected": message 2 (assistant) contains'),
    (CHAT, CHAT | {"chosen": [*EARLIER, A]}, '"chosen" and "rejected" differ before their last messages'),
    (CHAT, {"question": "hi", "chosen": [A], "rejected": [B]}, '"chosen" begins with an answer, and "prompt" gives no'),
    (CHAT, CHAT | {"chosen": [USER, A, USER]}, '"chosen" must end with a message of the assistant'),
    (
        CHAT,
        CHAT | {"chosen": [said("user", "else"), A]},
        '"chosen" begins with a user message that differs from "prompt"',
    ),
    (
        CHAT,
        CHAT | {"prompt": [USER], "rejected": [said("user", "no"), A]},
        '"rejected" begins with a user message that differs',
    ),
    (CHAT, CHAT | {"chosen": [SYSTEM, A], "rejected": [SYSTEM, B]}, 'field "chosen": message 2 is a system message'),
]


@pytest.mark.parametrize(("good", "bad", "why"), BAD, ids=[f"{i} {why[:40]}" for i, (_, _, why) in enumerate(BAD)])
def test_bad_pair_is_refused_with_its_line_and_with_skip_bad_is_skipped_and_counted(tmp_path, good, bad, why):
    like, fine = type(good["chosen"]), good | {"prompt": "fine"}
    with pytest.raises(Refused) as refused:
        read(tmp_path, fine, bad, like=like)
    assert str(refused.value).startswith(f"data: a.jsonl, line 2: {why}") and "skip_bad=true" in str(refused.value)
    source = opened(tmp_path, fine, bad, good, like=like, skip_bad=True)
    assert len(documents(tokens_of(tmp_path, source))) == 4
    (note,) = source.notes()
    assert note.startswith(f"data.skip_bad=true: skipped 1 of 3 train records (a.jsonl, line 2: {why}")


def test_first_record_with_an_answer_decides_whether_pairs_are_texts_or_messages(tmp_path):
    source = opened(tmp_path, {"prompt": "a"}, {"chosen": None}, TEXT, like=str, skip_bad=True)
    assert documents(tokens_of(tmp_path, source)) == FORMATS["texts"][2]


def as_json(record):
    return {key: json.dumps(value) if isinstance(value, list | dict) else value for key, value in record.items()}


@pytest.mark.parametrize("name", [name for name, (record, _, _) in FORMATS.items() if as_json(record) != record])
def test_pair_messages_stored_as_json_text_equal_plain_messages(tmp_path, name):
    record, typed, expected = FORMATS[name]
    assert read(tmp_path, as_json(record), like=list, **typed) == expected


def test_pair_answer_that_is_json_but_not_messages_stays_text(tmp_path):
    assert read(tmp_path, TEXT | {"chosen": '["a"]', "rejected": '{"b": 1}'}) == [
        f'hi[["a"]{END}]',
        f'hi[{{"b": 1}}{END}]',
    ]


@pytest.mark.parametrize("kind", ["padded", "documents"])
def test_show_prints_both_answers_of_a_pair_with_headings_if_padded(tmp_path, kind):
    made = tokens_of(tmp_path, opened(tmp_path, TEXT))
    loader = WindowLoader(pairs.rows(made.train, 40, kind, "drop", "train"), Share(1), fixed(1), 7)
    shown = page(loader, made.tokenizer, 1)
    assert f"hi[ yes{END}]" in shown and f"hi[ no{END}]" in shown
    assert (", chosen: " in shown and ", rejected: " in shown) == (kind == "padded")


YES = "yes" + END
RATED = {
    "texts": ({"prompt": "hi", "completion": " yes", "label": True}, {}, f"hi[ {YES}]"),
    "0 and 1": ({"prompt": "hi", "completion": " yes", "label": 1}, {}, f"hi[ {YES}]"),
    "no prompt": ({"prompt": "", "completion": " yes", "label": True}, {}, f"[ {YES}]"),
    "other names": ({"q": "hi", "a": " yes", "n": 1}, {"prompt": "q", "completion": "a", "label": "n"}, f"hi[ {YES}]"),
    "a conversation": ({"messages": [*EARLIER, A], "label": True}, {}, chatml(LONG, "yes")),
    "lists": ({"prompt": EARLIER, "completion": [A], "label": True}, {}, chatml(LONG, "yes")),
    "a text beside messages": ({"prompt": "hi", "completion": [A], "label": True}, {}, CHATS[0]),
    "messages as JSON": ({"messages": json.dumps([USER, A]), "label": True}, {}, CHATS[0]),
}


def rated(folder, *records, **typed):
    like = str if isinstance(records[0].get(typed.get("completion", "completion")), str) else list
    return opened(folder, *records, like=like, **typed)


@pytest.mark.parametrize("name", RATED)
def test_rated_answer_is_stored_as_a_pair_with_an_empty_other_answer(tmp_path, name):
    record, typed, expected = RATED[name]
    label = typed.get("label", "label")
    worse = record | {label: type(record[label])(0)}
    assert documents(tokens_of(tmp_path, rated(tmp_path, record, worse, **typed))) == [expected, "", "", expected]


def test_pairs_and_rated_answers_in_one_file_are_all_read_in_order(tmp_path):
    found = documents(tokens_of(tmp_path, rated(tmp_path, RATED["texts"][0], TEXT)))
    assert found == [f"hi[ {YES}]", "", *FORMATS["texts"][2]]


def test_rated_answers_from_parquet_equal_rated_answers_from_jsonl(tmp_path):
    record = {"prompt": [USER], "completion": [A], "label": False}
    for name, rows in (("a", [record] * 2), ("v", [{"prompt": "other", "completion": [A], "label": True}])):
        write(tmp_path / "lines" / f"{name}.jsonl", rows)
        (tmp_path / "tables").mkdir(exist_ok=True)
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "tables" / f"{name}.parquet")
    sources = [
        Preference(str(tmp_path / kind / f"a.{end}"), val_path=str(tmp_path / kind / f"v.{end}"))
        for kind, end in (("lines", "jsonl"), ("tables", "parquet"))
    ]
    found = [documents(tokens_of(tmp_path / str(number), source)) for number, source in enumerate(sources)]
    assert found[0] == found[1] == ["", CHATS[0]] * 2


LONE, TURNS = RATED["texts"][0], RATED["a conversation"][0]
BAD_RATINGS = [
    (LONE, {"prompt": "a", "completion": "b"}, 'field "label" is missing (fields: "prompt", "completion")'),
    (LONE, {"prompt": "a", "label": True}, 'field "completion" is missing'),
    (LONE, {"completion": "a", "label": True}, 'field "prompt" is missing'),
    (LONE, LONE | {"label": "yes"}, 'field "label" must be true or false, but is text'),
    (LONE, LONE | {"label": None}, 'field "label" must be true or false, but is null'),
    (LONE, LONE | {"label": 2}, 'field "label" must be true or false, but is the number 2'),
    (LONE, LONE | {"label": 0.5}, 'field "label" must be true or false, but is the number 0.5'),
    (LONE, LONE | {"completion": " "}, 'field "completion" is empty'),
    (LONE, LONE | {"completion": [A]}, 'field "completion" must be text, but is a list'),
    (TURNS, {"messages": [USER], "label": True}, '"messages" must end with a message of the assistant'),
    (
        TURNS,
        {"messages": [A], "label": True},
        '"messages" begins with an answer, and "prompt" gives no message before it',
    ),
    (TURNS, {"messages": [USER, said("assistant", " ")], "label": True}, 'field "messages": message 2 is an empty'),
    (
        TURNS,
        TURNS | {"prompt": "else"},
        '"messages" begins with a user message that differs from "prompt"',
    ),
    (
        TURNS,
        {"prompt": "else", "messages": json.dumps([USER, A]), "label": True},
        '"messages" begins with a user message that differs',
    ),
    (
        TURNS,
        {"prompt": [USER], "completion": "yes", "label": True},
        'field "completion" must be a list of messages, but is text',
    ),
]


@pytest.mark.parametrize(("good", "bad", "why"), BAD_RATINGS, ids=[why[:45] for _, _, why in BAD_RATINGS])
def test_bad_rated_answer_is_refused_with_its_line_and_with_skip_bad_is_skipped_and_counted(tmp_path, good, bad, why):
    with pytest.raises(Refused) as refused:
        tokens_of(tmp_path, rated(tmp_path, good, bad))
    assert str(refused.value).startswith(f"data: a.jsonl, line 2: {why}") and "skip_bad=true" in str(refused.value)
    source = rated(tmp_path, good, bad, good, skip_bad=True)
    assert len(documents(tokens_of(tmp_path, source))) == 4
    assert "skipped 1 of 3 train records" in source.notes()[0]


Q = "Q: 2+2?\nA:"
REPEATED = {"prompt": Q, "chosen": f"{Q} 4", "rejected": f"{Q} 5"}
ONCE = {"prompt": Q, "chosen": " 4", "rejected": " 5"}
JQ = r"""jq -c '\."prompt" as \$p \| \."completion" \|= ltrimstr\(\$p\)' FILE > NEW\.$"""


@pytest.mark.parametrize(
    ("records", "told"),
    [
        ([REPEATED] * 3, r"the answer repeats the prompt in 3 of 3 train records.*Type data\.prompt=null, which takes"),
        ([REPEATED, REPEATED, ONCE], "in 2 of 3 train records"),
        ([REPEATED | {"prompt": f" {Q}\n"}], "in 1 of 1 train record,"),
        ([{"prompt": Q, "completion": f"{Q} 4", "label": True}] * 2, f"in 2 of 2 train records.*Remove it: {JQ}"),
        ([REPEATED, ONCE], None),
        (
            [REPEATED | {"chosen": " 4"}] * 2,
            f"in 2 of 2 train records.*Remove it: {JQ.replace('completion', 'rejected')}",
        ),
        (
            [{key: text.replace("?\n", "? ") for key, text in REPEATED.items()} | {"prompt": Q}],
            "in 1 of 1 train record,",
        ),
        ([ONCE | {"prompt": ""}], None),
    ],
    ids=[
        *("all records", "two of three records", "other white space", "rated answers"),
        *("half of the records, not reported", "one of two answers", "space for a line break"),
        "empty prompt, not reported",
    ],
)
def test_prompt_repeated_in_most_answers_is_reported_with_advice_and_otherwise_not(tmp_path, records, told):
    source = opened(tmp_path, *records, like=str)
    tokens_of(tmp_path, source)
    if told is None:
        assert source.notes() == []
    else:
        (note,) = source.notes()
        assert re.search(told, note)


def test_data_prompt_null_on_answers_that_repeat_the_prompt_removes_the_repetition(tmp_path):
    found = read(tmp_path, REPEATED, prompt=None)
    assert found == [f"{Q}[ 4{END}]", f"{Q}[ 5{END}]"] == read(tmp_path / "once", ONCE)


def test_rated_text_answer_left_without_a_prompt_by_data_prompt_null_is_refused(tmp_path):
    file = write(tmp_path / "a.jsonl", [LONE] * 2)
    with pytest.raises(Refused, match=r"data\.prompt=null leaves it without a prompt"):
        tokens_of(tmp_path, Preference(file, val_path=validation(tmp_path, str), prompt=None))


def test_file_of_single_rated_answers_is_read_for_kto_and_refused_for_simpo_and_packing(config, tmp_path):
    records = [LONE | {"prompt": f"hi {i}", "label": i % 2 == 0} for i in range(40)]
    file = write(tmp_path / "a.jsonl", records)
    typed = partial(config, "data=preference", f"data.path={file}")
    data = build.data(typed("loss=kto"))
    assert isinstance(data.train.sequences, RatedAnswers)
    shown = page(data.train, data.tokens.tokenizer, 8)
    assert ", desirable: " in shown and ", undesirable: " in shown and f"[ {YES}]" in shown
    assert f"Training: {len(data.train.sequences)} documents" in shown
    with pytest.raises(Refused, match=r"with a single rated answer.*Type loss=kto"):
        build.data(typed("loss=simpo"))
    with pytest.raises(Refused, match=r"data\.packing=documents: rated answers must be padded"):
        build.data(typed("loss=kto", "data.packing=documents"))


def test_preference_path_of_two_names_and_a_slash_is_a_hub_id_unless_the_path_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("org/name") and is_hub_id("org-1/name_2.5")
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert not is_hub_id("org/name") and not is_hub_id(str(tmp_path))
    for path in ("no/such.jsonl", "no/such.parquet", "name", "../name", "./name", "a/b/c", "~no/x", "x" * 5000):
        with pytest.raises(Refused, match="there is no such file or folder"):
            is_hub_id(path)


def test_dpo_run_builds_padded_pairs_or_with_packing_documents_packed_pairs(config, tmp_path):
    file = write(tmp_path / "a.jsonl", [TEXT | {"prompt": f"hi {i}"} for i in range(40)])
    typed = partial(config, "data=preference", "loss=dpo", f"data.path={file}")
    assert isinstance(build.data(typed()).train.sequences, PaddedPairs)
    assert isinstance(build.data(typed("data.packing=documents", "seq_len=32")).train.sequences, PackedPairs)
    with pytest.raises(Refused, match=r"data\.path=no/such\.jsonl: there is no such file or folder"):
        build.data(typed("data.path=no/such.jsonl"))


def test_all_pairs_of_one_prompt_are_in_one_split(tmp_path, config):
    """Ranked answers give several pairs per prompt. If the split were made by pair, training would read answers of
    validation pairs."""
    ranked = [
        {"prompt": f"Count to {n}.", "chosen": f"{n} a{better}", "rejected": f"{n} a{worse}"}
        for n in range(40)
        for better in range(3)
        for worse in range(better + 1, 4)
    ]
    file = tmp_path / "ranked.jsonl"
    file.write_text("\n".join(map(json.dumps, ranked)))
    source = Preference(str(file), val_fraction=0.1)
    sides = [{record.fields["prompt"] for record in source.reader.records(split)} for split in ("train", "val")]
    assert all(sides) and not sides[0] & sides[1] and len(sides[0] | sides[1]) == 40


@pytest.mark.parametrize(("rated", "line"), [(False, 2), (True, 3)])
def test_too_long_answer_of_a_pair_is_refused_with_its_line_also_after_rated_answers(tmp_path, rated, line):
    """Each record is stored as two documents, of which one is empty for a rated answer."""
    records = [TEXT, TEXT | {"prompt": "one", "chosen": " long" * 90}]
    if rated:
        single = {"prompt": "two", "completion": " yes", "label": True}
        records = [single, single | {"prompt": "three", "label": False}, records[1]]
    source = opened(tmp_path, *records, like=str, too_long="refuse", rated=rated)
    made = tokens_of(tmp_path, source)
    with pytest.raises(Refused, match=rf"data\.too_long=refuse: .* has 1 .* The first one is a\.jsonl, line {line}\.$"):
        source.rows(made.train, 64, "train")


def test_preference_records_of_a_hub_data_set_equal_records_of_a_file(tmp_path, monkeypatch):
    """A local folder stands in for a data set of the hub."""
    single = {"prompt": "two", "completion": " yes", "label": True}
    records = [single, single | {"prompt": "three", "label": False}, TEXT | {"prompt": "one"}]
    fields = [*single, "chosen", "rejected"]
    (tmp_path / "set").mkdir()
    table = pa.table({name: [record.get(name) for record in records] for name in fields})
    for split in ("train", "test"):
        parquet.write_table(table, tmp_path / "set" / f"{split}-0.parquet")
    wanted = read(tmp_path, *records, like=str, rated=True)
    monkeypatch.setattr(preference, "is_hub_id", lambda path: True)
    monkeypatch.setattr(token_store.Twice, "check", lambda self: None)  # both splits have the same records
    source = Preference(str(tmp_path / "set"), val_split="test", rated=True)
    assert documents(tokens_of(tmp_path, source)) == wanted and len(wanted) == 6


@pytest.mark.parametrize(
    ("of_hub", "typed", "words"),
    [
        (False, {"subset": "en"}, r"data\.subset=: .*data\.path=.*, a local file or folder\. Leave out data\.subset\."),
        (False, {"split": "test"}, r"data\.split=: .* does not apply"),
        (True, {"val_path": "x"}, r"val_path=: .* does not apply .*, a data set of the hub \(there is no such file\)"),
        (True, {"pattern": "*.parquet"}, r"data\.pattern=: .* Correct data\.path, or leave out data\.pattern\."),
        (True, {"val_split": "train"}, r"data\.val_split=train: data\.split is train, too"),
    ],
)
def test_preference_key_that_does_not_apply_to_the_source_is_refused(tmp_path, monkeypatch, of_hub, typed, words):
    monkeypatch.setattr(preference, "is_hub_id", lambda path: of_hub)
    with pytest.raises(Refused, match=words):
        Preference(str(tmp_path), **typed)


def test_preference_file_with_one_prompt_is_refused(tmp_path):
    file = write(tmp_path / "one.jsonl", [TEXT, TEXT | {"rejected": " never"}])
    with pytest.raises(Refused, match="too few distinct prompts"):
        tokens_of(tmp_path, Preference(file))


def test_preference_records_of_one_prompt_share_a_group_but_keep_identities_as_long_as_the_records(tmp_path):
    """The number of records that are tokenized in one batch is limited by the lengths of their `identity` values."""
    long = [{"prompt": "hi", "chosen": "x" * 5000, "rejected": str(number)} for number in range(2)]
    other = {"prompt": "hello", "chosen": "a", "rejected": "b"}
    source = Preference(write(tmp_path / "a.jsonl", [*long, other]), val_path=write(tmp_path / "b.jsonl", [other]))
    one, two, three = source.reader.all_records("train")
    assert one.group == two.group != three.group and one.identity != two.identity
    assert min(len(one.identity), len(two.identity)) > 5000


@pytest.mark.parametrize("prompts", [4, 5, 10])
def test_two_prompts_of_rated_answers_but_one_of_pairs_are_held_out_for_validation(tmp_path, prompts):
    """KTO pairs each answer with another prompt, so a validation set of rated answers needs two prompts."""
    records = [LONE | {"prompt": f"hi {i}", "label": label} for i in range(prompts) for label in (True, False)]
    file = write(tmp_path / "a.jsonl", records)
    for rated, held_out in ((True, 2), (False, 1)):
        source = Preference(file, val_fraction=0.001, rated=rated)
        sides = [{r.fields["prompt"] for r in source.reader.records(split)} for split in ("train", "val")]
        assert [len(side) for side in sides] == [prompts - held_out, held_out] and not sides[0] & sides[1]
    source = Preference(file, val_fraction=0.001, rated=True)
    made = tokens_of(tmp_path, source)
    assert len(source.rows(made.val, 40, "val")) == 4


def test_validation_with_one_rated_prompt_is_refused_with_val_path_advice(tmp_path):
    file = write(tmp_path / "a.jsonl", [LONE | {"prompt": f"hi {i}"} for i in range(3)])
    source = Preference(file, rated=True)
    with pytest.raises(
        Refused, match=r"val split has 1 answer but only one prompt.*data\.val_path=<a file with several pro"
    ):
        source.rows(tokens_of(tmp_path, source).val, 40, "val")
