"""Rows of csv and parquet: rows are read as they were written, invalid rows are named, and memory is bounded."""

import csv
import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from transformers import PreTrainedTokenizerFast

from lowmem.data.sources.hub import hub
from lowmem.data.sources.jsonl import lines
from lowmem.data.sources.preference import Preference
from lowmem.data.sources.records import Records
from lowmem.data.sources.tables import csv_rows, parquet_rows, table_csv, table_parquet
from lowmem.data.token_store import train_bpe
from lowmem.system.errors import Refused
from lowmem.training import build

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
CASES = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
HOW = {"pattern": "**/*", "val_fraction": 0.3}
CHATS = HOW | {"messages": "messages"}


@pytest.fixture(scope="module")
def alphabet(tmp_path_factory):
    """Returns a tokenizer that has one token per byte and no end token."""
    file = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe([], 257, file)
    return PreTrainedTokenizerFast(tokenizer_file=str(file), clean_up_tokenization_spaces=False)


def written(folder: Path, rows, name="a.csv", **how) -> Path:
    with (folder / name).open("w", newline="", encoding="utf-8") as out:
        csv.writer(out, **how).writerows(rows)
    return folder / name


@CASES
@given(rows=st.lists(st.tuples(TEXT, TEXT), max_size=12), delimiter=st.sampled_from(",;\t|"), bom=st.booleans())
def test_csv_rows_are_read_back_as_written(tmp_path, rows, delimiter, bom):
    file = written(tmp_path, [("text", "b c"), *rows], delimiter=delimiter)
    if bom:
        file.write_bytes("\ufeff".encode() + file.read_bytes())
    typed = "tab" if delimiter == "\t" else delimiter
    read = [row.fields for row in csv_rows(file, ["text"], typed)]
    assert read == [{"text": one, "b c": other} for one, other in rows]


@CASES
@given(rows=st.lists(st.one_of(st.none(), TEXT), max_size=40), group=st.integers(1, 9))
def test_parquet_rows_are_read_back_as_written(tmp_path, rows, group):
    table = pa.table({"text": pa.array(rows, pa.string()), "other": list(range(len(rows)))})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=group)
    read = parquet_rows(tmp_path / "a.parquet", ["text"])
    assert [record[:2] for record in read] == [(f"row {i}", {"text": text}) for i, text in enumerate(rows, 1)]


@CASES
@given(raw=st.one_of(st.binary(max_size=200), st.text(alphabet='a,"\n\r;é', max_size=60).map(str.encode)))
def test_arbitrary_bytes_as_csv_or_parquet_are_read_or_refused_in_one_line(tmp_path, raw):
    (tmp_path / "a.csv").write_bytes(raw)
    (tmp_path / "a.parquet").write_bytes(raw)
    for read in (
        lambda: csv_rows(tmp_path / "a.csv", []),
        lambda: parquet_rows(tmp_path / "a.parquet", ["x"]),
    ):
        try:
            list(read())
        except Refused as error:
            assert "\n" not in str(error) and str(error).startswith(f"data: {tmp_path}")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a\ttext\n1\t2\n", "data.delimiter=tab"),
        ("text;b\n1;2\n", "data.delimiter=';'"),
        ("text\rhello\r", r"tr '\\r' '\\n' < FILE > NEW"),
        ("a,b\n1,2\n", 'its columns are "a", "b"'),
    ],
)
def test_csv_in_another_dialect_is_refused_with_advice(tmp_path, text, says):
    (tmp_path / "a.csv").write_bytes(text.encode())
    with pytest.raises(Refused, match=says):
        list(csv_rows(tmp_path / "a.csv", ["text"]))


def test_parquet_date_out_of_python_range_is_refused(tmp_path):
    parquet.write_table(pa.table({"text": pa.array([1 << 30], pa.date32())}), tmp_path / "a.parquet")
    with pytest.raises(Refused, match=r"damaged after row 0 \("):
        list(parquet_rows(tmp_path / "a.parquet", ["text"]))


def test_parquet_file_with_a_damaged_page_is_refused_as_damaged(tmp_path):
    file = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": ["one", "two"] * 50}), file)
    damaged = bytearray(file.read_bytes())
    damaged[10:30] = bytes(range(20))
    file.write_bytes(damaged)
    with pytest.raises(Refused, match=r"damaged after row") as refused:
        list(parquet_rows(file, ["text"]))
    assert "\n" not in str(refused.value)


BAD = {
    "text\n1,2\n": "a.csv, line 2: the row has more cells than the header has columns (1)",
    "text,y\n1,2\n3\n": "a.csv, line 3: the row has fewer cells than the header has columns (2)",
    'x,text\n1,"2" 3\n': "a.csv, line 2: ',' expected after '\"' (in line 2)",
    "\n\ntext,y\n\na,b\n1\n": "a.csv, line 6: the row has fewer cells than the header has columns (2)",
    "x,y\n1,2\n": 'a.csv has no column "text"; its columns are "x", "y"',
    "text,y\na,b\n ,2\n": 'a.csv, line 3: field "text" is empty',
    'text,y\na,b\n"c,d\ne,f\ng"h\n': "line 3: ',' expected after '\"' (in line 5). Fix",
    "text,text\n1,2\n": 'a.csv has two columns named "text". Rename one',
    'text\n"a\n': "a.csv, line 2: unexpected end of data",
    'text\n"a\nb"\n " "\n"c\n\n': "a.csv, line 5: unexpected end of data (in line 6)",
}


@pytest.mark.parametrize("content", BAD)
def test_bad_csv_row_is_refused_with_file_and_line(tmp_path, content, alphabet):
    (tmp_path / "a.csv").write_text(content)
    (tmp_path / "b.csv").write_text("text,x\nabc,1\n")
    source = table_csv(path=str(tmp_path / "a.csv"), val_path=str(tmp_path / "b.csv"), **HOW)
    with pytest.raises(Refused) as refusal:
        list(source.encoded("train", alphabet))
    assert BAD[content] in str(refusal.value)


def test_bad_parquet_rows_with_skip_bad_are_skipped_and_counted(tmp_path, alphabet):
    parquet.write_table(pa.table({"text": ["good", None, "", "fine"]}), tmp_path / "a.parquet")
    parquet.write_table(pa.table({"text": ["validation"]}), tmp_path / "b.parquet")
    source = table_parquet(path=str(tmp_path / "a.parquet"), val_path=str(tmp_path / "b.parquet"), skip_bad=True, **HOW)
    assert [alphabet.decode(one.ids) for one in source.encoded("train", alphabet)] == ["good", "fine"]
    (note,) = source.notes()
    assert "2 of 4 train records" in note
    assert (
        'a.parquet, row 2: field "text" must be text, but is null' in note
        and 'a.parquet, row 3: field "text" is empty' in note
    )


def test_csv_in_another_encoding_is_refused_with_its_line_and_iconv(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"text\ncat\n" + "Gr\u00f6\u00dfe\n".encode("latin-1"))
    with pytest.raises(Refused, match=r"a.csv is not UTF-8 text \(line 3\).*iconv -f latin1 -t utf-8") as refusal:
        list(csv_rows(tmp_path / "a.csv", ["text"]))
    assert "on_error" not in str(refusal.value)


REFUSED = {
    "no such column": (
        lambda f: parquet.write_table(pa.table({"a": [1], "b": [2]}), f),
        'no column "text"; its columns are "a", "b"',
    ),
    "duplicate column": (
        lambda f: parquet.write_table(pa.Table.from_arrays([["a"], ["b"]], ["text", "text"]), f),
        'has two columns named "text". Rename one',
    ),
    "not parquet": (
        lambda f: f.write_bytes(b"PAR1 it is not"),
        "is not a parquet file, or is damaged after row 0 .Parquet magic",
    ),
    "truncated": (
        lambda f: f.write_bytes(_whole()[:-20]),
        "is not a parquet file, or is damaged after row 0 .Parquet magic",
    ),
    "damaged": (
        lambda f: f.write_bytes(_whole().replace(b"a text", b"\xff" * 6)),
        "damaged after row 0 ..utf-8. codec can't decode",
    ),
}


def _whole():
    buffer = io.BytesIO()
    parquet.write_table(pa.table({"text": ["a text"]}), buffer, compression="none", use_dictionary=False)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", REFUSED)
def test_parquet_file_that_is_damaged_or_lacks_a_single_text_column_is_refused(tmp_path, kind, alphabet):
    write, says = REFUSED[kind]
    write(tmp_path / "a.parquet")
    parquet.write_table(pa.table({"text": ["validation"]}), tmp_path / "b.parquet")
    source = table_parquet(path=str(tmp_path / "a.parquet"), val_path=str(tmp_path / "b.parquet"), **HOW)
    with pytest.raises(Refused, match=says):
        list(source.encoded("train", alphabet))


def test_added_csv_rows_move_no_other_row_between_splits(tmp_path):
    texts = [f"row number {i}" for i in range(200)]

    def sides(rows):
        written(tmp_path, [["text"], *([text] for text in rows)])
        reader = table_csv(path=str(tmp_path / "a.csv"), **HOW).reader
        return [{record.fields["text"] for record in reader.records(split)} for split in ("train", "val")]

    (train, val), (_, more) = sides(texts[:150]), sides(texts)
    assert train | val == {*texts[:150]} and not train & val and 20 < len(val) < 70
    assert val < more and not train & more


def test_parquet_column_of_message_structs_is_read_as_conversations(tmp_path):
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    parquet.write_table(pa.table({"messages": [chat]}), tmp_path / "a.parquet")
    assert [row.fields for row in parquet_rows(tmp_path / "a.parquet", ["messages"])] == [{"messages": chat}]


def test_parquet_column_of_tools_is_read_if_present(tmp_path):
    """A template that does not render these tools is refused later, as for data=jsonl."""
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    for name, columns in (("with", {"tools": [[{"name": "cat"}]]}), ("without", {})):
        parquet.write_table(pa.table({"messages": [chat], "other": [1]} | columns), tmp_path / f"{name}.parquet")
        source = table_parquet(path=str(tmp_path / f"{name}.parquet"), **CHATS)
        (record,) = source.reader.records("val")
        assert record.fields == {"messages": chat} | {key: value for key, (value,) in columns.items()}


def called(**arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


# The arguments of each call lack keys that another call has. The missing keys are at three levels of nesting.
CALLS = [
    called(city="Paris"),
    called(unit="C", at={"x": 1.5}),
    called(at={"y": {"deep": "no"}}, several=[{"a": "1"}, {}, {"b": "3"}]),
]


def streamed(folder, monkeypatch):
    """Returns the records that a stream passes to its encoder."""
    seen = []
    monkeypatch.setattr(Records, "documents", lambda self, records, *_: seen.extend(records) or [])
    source = hub(str(folder), messages="messages", streaming=True)
    source.tokenizer = None
    source.documents(list(source.table.rows("train")), 0, "train")
    return seen


READERS = {
    "parquet": lambda folder, _: table_parquet(path=str(folder), **CHATS).reader.all_records("train"),
    "hub": lambda folder, _: hub(str(folder), messages="messages").reader.all_records("train"),
    "stream": streamed,
    "preference": lambda folder, _: Preference(str(folder / "train.parquet")).reader.all_records("train"),
}


@pytest.mark.parametrize("reader", READERS)
def test_parquet_schema_adds_no_null_fields_to_nested_rows(tmp_path, monkeypatch, reader):
    records = [{"messages": messages, "label": True} for messages in CALLS]
    table = pa.Table.from_pylist(records)
    assert "'unit': None" in str(table.to_pylist()[0]), "the schema has to add something"
    parquet.write_table(table, tmp_path / "train.parquet")
    read = READERS[reader](tmp_path, monkeypatch)
    assert [record.fields["messages"] for record in read] == CALLS


def test_parquet_map_column_is_read_as_an_object(tmp_path):
    rows = pa.array([[("city", "Paris")], []], pa.map_(pa.string(), pa.string()))
    parquet.write_table(pa.table({"text": rows}), tmp_path / "a.parquet")
    assert [row.fields["text"] for row in parquet_rows(tmp_path / "a.parquet", ["text"])] == [{"city": "Paris"}, {}]


def test_null_in_a_jsonl_value_is_kept(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": called(city=None)}))
    assert [record.fields["messages"] for record in lines(tmp_path / "a.jsonl")] == [called(city=None)]


def scanned(file):
    """Yields the rows of a file as `datasets` reads them. This is the deliberately wrong variant, which needs more
    memory."""
    how = pa.dataset.ParquetFragmentScanOptions(use_buffered_stream=True, pre_buffer=False)
    fragment = pa.dataset.ParquetFileFormat(default_fragment_scan_options=how).make_fragment(file.open("rb"))
    for batch in fragment.to_batches(batch_size=64, columns=["text"], batch_readahead=0, fragment_readahead=0):
        yield from batch.to_pylist()


@pytest.mark.parametrize(
    "read", [lambda file: parquet_rows(file, ["text"]), scanned], ids=["lowmem", "wrong variant, as datasets"]
)
def test_large_parquet_row_group_is_read_within_8_mib_of_memory_unless_read_by_the_scanner_of_datasets(tmp_path, read):
    count, size = 8_000, 4_000
    table = pa.table({"text": [f"{i:06d}" * (size // 6) for i in range(count)]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=count, use_dictionary=False, compression="snappy")
    whole = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(whole)  # counts the allocations from here on
    pa.set_memory_pool(pool)
    try:
        assert sum(1 for _ in read(tmp_path / "a.parquet")) == count
    finally:
        pa.set_memory_pool(whole)
    ours = read is not scanned
    assert (pool.max_memory() < 8 << 20) == ours, f"{pool.max_memory() >> 20} of {count * size >> 20} MiB"


WRITERS = {
    "jsonl": lambda file, texts: file.write_text("\n".join(json.dumps({"text": text}) for text in texts)),
    "csv": lambda file, texts: written(file.parent, [["id", "text"], *enumerate(texts)], file.name),
    "parquet": lambda file, texts: parquet.write_table(pa.table({"text": texts}), file, row_group_size=20),
}


def test_equal_texts_give_equal_tokens_from_every_file_format(config, tmp_path):
    texts = [f"text {i}: " + "x = self ( ) " * (i % 7 + 1) for i in range(60)]
    found = []
    for kind in WRITERS:
        files = tmp_path / f"train.{kind}", tmp_path / f"val.{kind}"
        for file, some in zip(files, (texts[6:], texts[:6]), strict=True):
            WRITERS[kind](file, some)
        typed = (f"data={kind}", f"data.path={files[0]}", f"data.val_path={files[1]}")
        tokens = build.data(config(*typed)).tokens
        found.append([array.tolist() for split in (tokens.train, tokens.val) for array in (split.ids, split.ends)])
    assert found[0] == found[1] == found[2] and len(found[0][1]) == 54


def test_parquet_run_repeated_or_resumed_has_the_losses_of_the_unbroken_run(fit, tmp_path):
    texts = [f"text {i}: " + "x = self ( ) " * (i % 7 + 1) for i in range(60)]
    WRITERS["parquet"](tmp_path / "a.parquet", texts)
    typed = ("data=parquet", f"data.path={tmp_path / 'a.parquet'}", "save_every=2")
    one, folder = fit(*typed, folder="one")
    again, _ = fit(*typed, folder="again")
    resumed, _ = fit(*typed, f"resume={folder / 'checkpoints' / 'step-00000002.ckpt'}", folder="resumed")
    assert one["val_loss"] == again["val_loss"] == resumed["val_loss"]
    assert one["train_loss"] == again["train_loss"]
