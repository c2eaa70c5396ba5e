"""The learned tokens of 20 conversations under 13 chat templates equal the tokens that TRL's SFTTrainer learns, or
differ for a documented reason.

benchmarks/chat_templates.py compares the tokens, and every difference must have a reason in its REASONS. TRL is not a
dependency. Without TRL, the tests check only the recorded results and the code that compares rows.
"""

import json
from importlib.util import find_spec

import pytest
from benchmarks.chat_templates import TEMPLATES, UNEXPLAINED, Case, Row, case_of, left_out, measured, tokenizer
from benchmarks.runner import RESULTS

from conversations import CONVERSATIONS

TWO = CONVERSATIONS["system prompt, two answers"]
CHATML = TEMPLATES["ChatML"]


def unexplained(marks: str) -> set[str]:
    return {*marks} & {*UNEXPLAINED}


@pytest.mark.matrix
@pytest.mark.skipif(find_spec("trl") is None, reason="needs pip install -e '.[trl]'")
@pytest.mark.filterwarnings("ignore")  # TRL warns about templates
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_difference_from_the_learned_tokens_of_trl_has_a_documented_reason(name):
    wrong = {
        (title, way): marked.told
        for title, ways in measured(TEMPLATES[name]).items()
        for way, marked in ways.items()
        if unexplained(marked.marks)
    }
    assert not wrong


def test_recorded_comparison_with_trl_covers_all_cases_and_has_no_unexplained_difference():
    found = json.loads((RESULTS / "chat_templates.json").read_text())["templates"]
    again = "python -m benchmarks.chat_templates"
    assert found.keys() == TEMPLATES.keys() and all(one.keys() == CONVERSATIONS.keys() for one in found.values()), again
    cells = [one for titles in found.values() for ways in titles.values() for one in ways.values()]
    assert not any(unexplained(one["marks"]) for one in cells)
    assert sum(not {*one["marks"]} & {*"lsw-"} for one in cells) > len(cells) / 2  # lowmem accepts most cases


@pytest.fixture(scope="module")
def right() -> Case:
    return case_of(CHATML, TWO)


def test_comparison_with_trl_marks_identical_rows_as_equal(right):
    assert right.compared(right.rows).marks == "="


def test_comparison_with_trl_marks_one_row_per_answer_as_equal_to_one_row_of_all_answers(right):
    (row,) = right.rows
    first = row.learned.index(True)
    begins = [i for i in range(first, len(row.ids)) if row.learned[i] and not row.learned[i - 1]]
    rows = [Row(row.ids, [one and (i < begins[1]) for i, one in enumerate(row.learned)])]
    rows.append(Row(row.ids, [one and (i >= begins[1]) for i, one in enumerate(row.learned)]))
    assert right.compared(rows).marks == "="


def learns_a_header(ids, learned, begin, end):
    return ids, [one or i == begin - 1 for i, one in enumerate(learned)]


def leaves_out_the_first_token(ids, learned, begin, end):
    return ids, [one and i != begin for i, one in enumerate(learned)]


def leaves_out_a_token_in_the_middle(ids, learned, begin, end):
    return ids, [one and i != begin + 1 for i, one in enumerate(learned)]


def leaves_out_the_end(ids, learned, begin, end):
    return ids, [one and i != end - 1 for i, one in enumerate(learned)]


def leaves_out_an_answer(ids, learned, begin, end):
    return ids, [one and not begin <= i < end for i, one in enumerate(learned)]


def has_another_prompt(ids, learned, begin, end):
    return [ids[0] + (i == 3) if i == 3 else one for i, one in enumerate(ids)], learned


def writes_another_answer(ids, learned, begin, end):
    return [ids[begin] if i == begin + 1 else one for i, one in enumerate(ids)], learned


@pytest.mark.wrong
@pytest.mark.parametrize(
    "wrong",
    [
        learns_a_header,
        leaves_out_the_first_token,
        leaves_out_a_token_in_the_middle,
        leaves_out_the_end,
        leaves_out_an_answer,
        has_another_prompt,
        writes_another_answer,
    ],
)
def test_comparison_with_trl_marks_a_wrong_row_as_unexplained(right, wrong):
    (row,) = right.rows
    end = max(i for i, one in enumerate(row.learned) if one) + 1
    begin = max(i for i in range(end) if not row.learned[i]) + 1
    case = right._replace(rows=[Row(*wrong([*row.ids], [*row.learned], begin, end))])
    assert unexplained(case.compared(right.rows).marks)


@pytest.mark.wrong
def test_comparison_with_trl_marks_an_answer_learned_twice_as_unexplained(right):
    assert unexplained(right._replace(rows=right.rows * 2).compared(right.rows).marks)


def test_comparison_with_trl_lists_the_message_parts_that_a_template_does_not_render():
    assert left_out(CHATML, TWO) == []
    lost = left_out(CHATML, CONVERSATIONS["reasoning before a call and after"])
    assert {
        "messages.1.reasoning_content",
        "messages.1.tool_calls.0.function.arguments.city",
        "tools.0.function.name",
    } < {*lost}
    assert "messages.3.content" not in lost


def test_chatml_control_tokens_are_single_tokens_in_the_benchmark_tokenizer():
    made = tokenizer(CHATML)
    assert all(len(made(token, add_special_tokens=False).input_ids) == 1 for token in CHATML.special.split())
