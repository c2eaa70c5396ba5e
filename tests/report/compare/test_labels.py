"""Tests the labels of compared runs, which contain only what distinguishes a run from the others."""

from pathlib import Path

import pytest

from lowmem.report.compare.labels import LONG, labels, shortened
from lowmem.report.folders import RunFolder


def runs_of(*typed: str) -> list[RunFolder]:
    return [RunFolder(Path(str(i)), line.split(), None, "done") for i, line in enumerate(typed)]


def numbers(every) -> list[str]:
    return [str(i) for i in range(len(every))]


def test_run_label_omits_common_overrides_and_keys_of_unique_values():
    every = runs_of("model=gpt2 precision=bf16 lr=1e-3 loss=full", "model=gpt2 precision=32 lr=3e-3 loss=full")
    assert labels(every, numbers(every)) == ["bf16 lr=1e-3", "precision=32 lr=3e-3"]


def test_run_label_shortens_keys_to_their_last_word_unless_ambiguous():
    every = runs_of("optim.beta=1 scheduler.steps=1 model.steps=1", "optim.beta=2 scheduler.steps=2 model.steps=2")
    assert labels(every, numbers(every))[0] == "beta=1 scheduler.steps=1 model.steps=1"


def test_run_label_keeps_the_key_of_none_and_true():
    every = runs_of("accumulation=none optim=adamw x=true", "accumulation=fixed optim=sgd x=false", "optim=muon")
    assert labels(every, numbers(every)) == ["accumulation=none adamw x=true", "fixed sgd x=false", "muon"]


def test_runs_with_equal_overrides_are_labelled_by_name():
    every = runs_of("lr=1", "lr=1", "lr=2", "")
    assert labels(every, numbers(every)) == ["0 lr=1", "1 lr=1", "lr=2", "3"]
    long = [f"2026-01-31/12-00-00/{place}/of/a/cluster/with/a/long/name" for place in ("here", "there")]
    assert labels(runs_of("lr=1", "lr=1"), long) == ["…here…", "…there…"]


@pytest.mark.parametrize(
    ("values", "short"),
    [
        (["notes", "a/short/path"], ["notes", "a/short/path"]),
        (["/home/me/corpora/of/text/one", "/home/me/corpora/of/text/two"], ["…one", "…two"]),
        (["/home/me/corpora/one/train.txt", "/home/me/corpora/two/train.txt"], ["…one…", "…two…"]),
        (["lab/Model-with-a-name-0.6B-chat", "lab/Model-with-a-name-1.7B-chat"], ["…0.6B…", "…1.7B…"]),
        (["a" * 10 + "b" * 90, "c"], ["a" * 9 + "…" + "b" * 10, "c"]),
        ([], []),
    ],
)
def test_long_values_in_run_labels_are_shortened_to_the_part_that_differs(values, short):
    assert shortened(values) == short


def test_run_labels_of_long_nearly_equal_values_stay_distinct():
    alike = [f"x={'a' * 50}{middle}{'a' * 50}" for middle in "12"]
    assert labels(runs_of(*alike), numbers(alike)) == [f"{i} {'a' * 9}…{'a' * 10}" for i in range(2)]


def test_run_labels_of_fifty_runs_are_short_and_distinct(fifty):
    from lowmem.report import folders

    every = folders.runs_below(fifty)
    found, whole = labels(every, numbers(every)), [" ".join(run.overrides) for run in every]
    assert len(set(found)) == 50
    assert max(map(len, found)) < 6 * LONG < 0.6 * min(map(len, whole))  # much shorter than all overrides of a run
