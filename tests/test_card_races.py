"""The case "races between streams" of benchmarks/card on the stand-in for a card, and each way in which it is wrong."""

import pytest
from benchmarks.card import races as case
from benchmarks.card.case import Here

import races

pytestmark = pytest.mark.docs


@pytest.fixture
def rows(tmp_path):
    return lambda: list(case.streamed_step(Here("cpu", tmp_path)))


def test_training_has_no_race_and_training_without_a_wait_has_one(rows):
    plain, wrong = rows()
    assert plain["right"] and plain["found"]["races"] == 0, plain
    assert int(plain["found"]["copies seen"].split()[0]) > 100 and plain["found"]["streams"] > 2
    assert wrong["right"] and wrong["found"]["races"] > 0 and "first race" not in wrong["found"], wrong


def test_race_report_names_both_accesses(rows, monkeypatch):
    races.copy_before_the_gradient_is_complete(monkeypatch)
    plain, _ = rows()
    report = plain["found"]["first race"]
    assert not plain["right"] and "CSAN detected a possible data race" in report
    assert "Previous access by stream device" in report and "boundary.py" in report and "/lib/python" not in report


def test_race_case_with_a_blind_checker_is_not_right(rows, monkeypatch):
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
def test_absence_of_races_counts_only_if_copies_were_seen(count, copies, streams, wrong, is_right):
    seen = case.Seen(races=["a race"] * count)
    seen.copies.update({True: copies, False: 5})
    seen.operators.update("abc"[:streams])
    assert seen.right(wrong) == is_right


def test_torch_sanitizer_is_read_and_a_run_without_it_fails(monkeypatch):
    """On made-up accesses: it watches tensors on CUDA alone."""
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
        raise CUDASanitizerErrors(errors)  # ends the training, and not the case
    handler._handle_kernel_launch(3, set(), {7}, set(), "aten::copy_", {7: ["self"]})
    assert len(seen.races) == 1  # it is no longer read
    handler.tensors_accessed.delete_tensor(7)
