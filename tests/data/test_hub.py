"""Tests that data=hub reads, from local folders laid out like data sets of the hub, the records that data=csv or
data=jsonl reads."""

import json
from itertools import islice

import datasets
import pytest
from test_stream import loader, numbers, tokenizer  # noqa: F401

from lowmem.data.loader import Position
from lowmem.data.sources.hub import FileRows, hub
from lowmem.data.sources.jsonl import jsonl
from lowmem.data.sources.tables import table_csv
from lowmem.data.token_store import load_bpe
from lowmem.system.errors import Refused

HOW = {"prompt": "q", "completion": "a"}


def made_lines(answers):
    return "".join(json.dumps({"q": f"Q{number}", "a": answer}) + "\n" for number, answer in enumerate(answers))


def table(answers, cell=","):
    return "".join(f"{q}{cell}{a}\n" for q, a in [("q", "a"), *((f"Q{i}", a) for i, a in enumerate(answers))])


FILES = {
    "dates": ("a.jsonl", made_lines(["2024-05-01", "2024-05-02"])),
    "numbers, then texts": ("a.ndjson", made_lines(["12", "x", "2024-05-01"])),
    "leading zeros": ("a.csv", table(["007", "012"])),
    "words that mean null": ("a.csv", table(["007", "NA", "null", "None", "nan"])),
    "booleans": ("a.csv", table(["True", "false"])),
    "quoted newline": ("a.csv", table(['"1\n2"', "3.0"])),
    "tabs": ("a.tsv", table(["007", "1e5"], "\t")),
}


@pytest.mark.parametrize("name", FILES)
def test_hub_folder_and_file_source_read_the_same_records(tmp_path, name):
    file, content = FILES[name]
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / file).write_text(content)
    typed = {"path": str(tmp_path / "set"), "pattern": "**/*", "val_fraction": 0.05}
    wanted = table_csv(**typed, delimiter="tab" if "\t" in content else ",", **HOW) if "sv" in file else None
    wanted = list((wanted or jsonl(**typed, **HOW)).reader.all_records("train"))
    found = list(hub(typed["path"], **HOW).reader.all_records("train"))
    assert [record[:2] for record in found] == [record[:2] for record in wanted] and len(found) > 1
    assert all(isinstance(record.fields["a"], str) for record in found)


def test_hub_folder_reads_each_split_from_the_files_named_after_the_split(tmp_path):
    for name, answer in (("data/train-0.csv", "01"), ("data/train-1.csv", "02"), ("data/test-0.csv", "03")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(table([answer]))
    reader = hub(str(tmp_path), val_split="test", **HOW).reader
    read = {split: [(r.where, r.fields["a"]) for r in reader.records(split)] for split in ("train", "val")}
    assert read["train"] == [("data/train-0.csv, line 2", "01"), ("data/train-1.csv, line 2", "02")]
    assert read["val"] == [("data/test-0.csv, line 2", "03")]


def encode_all(source, tokenizer):  # noqa: F811
    source.forget("train")
    return list(source.documents(source.reader.all_records("train"), "train", load_bpe(tokenizer / "tokenizer.json")))


def test_bad_line_in_a_hub_folder_is_refused_with_file_and_line(tmp_path, tokenizer):  # noqa: F811
    (tmp_path / "a.jsonl").write_text(made_lines(["1", "2"]) + "{no\n")
    with pytest.raises(
        Refused, match=r"^data: a\.jsonl, line 3: the line is not valid JSON .* Fix it, or type data\.skip_bad"
    ):
        encode_all(hub(str(tmp_path), **HOW), tokenizer)


def test_other_csv_separator_is_refused_unless_the_readme_of_the_folder_names_it(tmp_path):
    (tmp_path / "a.csv").write_text(table(["007"], ";"))
    with pytest.raises(Refused, match=r"Type data=csv data\.delimiter=';'"):
        list(hub(str(tmp_path), **HOW).reader.all_records("train"))
    (tmp_path / "README.md").write_text('---\nconfigs:\n- config_name: default\n  sep: ";"\n  data_files: a.csv\n---\n')
    assert [record.fields["a"] for record in hub(str(tmp_path), **HOW).reader.all_records("train")] == ["007"]


def test_skiprows_in_a_hub_readme_are_applied_and_text_that_datasets_reads_as_a_number_is_refused(tmp_path, tokenizer):  # noqa: F811
    """The error names data=csv and data=jsonl, which do not guess types."""
    (tmp_path / "a.csv").write_text("a comment\n" + table(["007"]))
    (tmp_path / "README.md").write_text("---\nconfigs:\n- config_name: x\n  skiprows: 1\n  data_files: a.csv\n---\n")
    with pytest.raises(
        Refused, match=r'"a" must be text, but is the number 7.*type data=csv or data=jsonl data\.path='
    ):
        encode_all(hub(str(tmp_path), "x", **HOW), tokenizer)


def test_value_that_datasets_guesses_to_be_a_date_is_refused_with_other_sources_as_advice(tmp_path, tokenizer):  # noqa: F811
    (tmp_path / "a.json").write_text(json.dumps([{"q": "x", "a": "2024-05-01"}]))
    with pytest.raises(
        Refused, match=r"must be text, but is a datetime\. .* type data=csv or data=jsonl data\.path=<the fi"
    ):
        encode_all(hub(str(tmp_path), **HOW), tokenizer)


@pytest.fixture(params=["csv", "jsonl"])
def folder(request, tmp_path):
    """Returns a folder with three files of seven rows each."""
    write = {"csv": lambda texts: "text\n" + "\n".join(texts), "jsonl": lambda texts: _lines_of(texts)}[request.param]
    for number in range(3):
        texts = [f"shard {number} row {row}: " + "x = self ( ) " * (row % 5 + 1) for row in range(7)]
        (tmp_path / f"train-{number}.{request.param}").write_text(write(texts))
    return tmp_path


def _lines_of(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def test_streamed_hub_folder_of_csv_or_jsonl_resumes_bit_exactly_from_any_window(folder, tokenizer):  # noqa: F811
    """The compared windows cross the boundaries of blocks and of files, and the end of an epoch."""
    assert isinstance(hub(str(folder)).reader.rows("train"), FileRows)
    unbroken = list(islice(loader(folder, tokenizer), 30))
    assert len({window.end.epoch for window in unbroken}) > 1, "an epoch has to end"
    for done in range(1, 26, 3):
        resumed = islice(loader(folder, tokenizer, Position(*unbroken[done - 1].end)), 4)
        assert [numbers(window) for window in resumed] == [numbers(window) for window in unbroken[done : done + 4]]


def test_stream_position_saved_by_datasets_in_an_older_version_is_continued(folder):
    """Older versions of lowmem read these files with `datasets`, and their checkpoints contain the state of its
    stream."""
    older = iter(stream := datasets.load_dataset(str(folder), split="train", streaming=True))
    passed = [next(older)["text"] for _ in range(9)]
    reader = hub(str(folder)).reader
    going_on = reader.rows("train", stream.state_dict())
    rest = [reader.record(row, "train", 0).fields["text"] for row in going_on]
    assert passed + rest == [record.fields["text"] for record in reader.all_records("train")]
    assert len(rest) == 12 and "file" not in going_on.state_dict()
