"""Tests the case "races between streams" of benchmarks/card with a stand-in for a card, for correct training and for
wrong variants."""

import pytest
from benchmarks.card import races as case
from benchmarks.card.case import Here

import races

pytestmark = pytest.mark.docs


@pytest.fixture
def rows(tmp_path):
    return lambda: list(case.streamed_step(Here("cpu", tmp_path)))


def test_race_benchmark_finds_races_only_in_training_that_leaves_out_a_wait(rows):
    plain, wrong = rows()
    assert plain["right"] and plain["found"]["races"] == 0, plain
    assert int(plain["found"]["copies seen"].split()[0]) > 100 and plain["found"]["streams"] > 2
    assert wrong["right"] and wrong["found"]["races"] > 0 and "first race" not in wrong["found"], wrong


def test_race_report_names_both_racing_accesses(rows, monkeypatch):
    races.copy_before_the_gradient_is_complete(monkeypatch)
    plain, _ = rows()
    report = plain["found"]["first race"]
    assert not plain["right"] and "CSAN detected a possible data race" in report
    assert "Previous access by stream device" in report and "boundary.py" in report and "/lib/python" not in report


def test_race_benchmark_whose_checker_finds_no_races_reports_its_wrong_variant_as_not_right(rows, monkeypatch):
    monkeypatch.setattr(case.Seen, "launch", lambda self, checked: lambda *_: self.operators.update("ab") or [])
    plain, wrong = rows()
    assert plain["right"] and not wrong["right"]


@pytest.mark.parametrize(
    ("count", "copies", "streams", "wrong", "is_right"),
    [
        (0, 9, 3, False, True),
        (1, 9, 3, False, False),
        (0, 0, 3, False, False),
        (0, 9, 1, False, False),
        (1, 9, 3, True, True),
        (0, 9, 3, True, False),
    ],
)
def test_race_benchmark_is_right_only_with_the_expected_races_and_with_copies_on_several_streams(
    count, copies, streams, wrong, is_right
):
    seen = case.Seen(races=["a race"] * count)
    seen.copies.update({True: copies, False: 5})
    seen.operators.update("abc"[:streams])
    assert seen.right(wrong) == is_right


def test_race_benchmark_counts_reports_of_torchs_sanitizer_and_refuses_a_run_without_it(monkeypatch):
    """The accesses are made up, because the sanitizer watches only CUDA tensors."""
    from torch.cuda._sanitizer import CUDASanitizerErrors, cuda_sanitizer

    with pytest.raises(SystemExit, match="torch was imported without TORCH_CUDA_SANITIZER=1"), case._by_torch():
        pass
    monkeypatch.setattr(cuda_sanitizer, "enabled", True)
    handler = cuda_sanitizer.dispatch.event_handler
    with case._by_torch() as (seen, _):
        for stream in (1, 2):
            errors = handler._handle_kernel_launch(stream, set(), {7}, set(), "aten::copy_", {7: ["self"]})
    assert len(errors) == len(seen.races) == 1 and "writing to argument(s) self" in seen.races[0]
    assert seen.operators == {"1": 1, "2": 1}
    with case._by_torch():
        raise CUDASanitizerErrors(errors)  # an error that ends the training must not end the benchmark case
    handler._handle_kernel_launch(3, set(), {7}, set(), "aten::copy_", {7: ["self"]})
    assert len(seen.races) == 1  # reports after the end of the case are not counted
    handler.tensors_accessed.delete_tensor(7)
