"""Tests that prose.py finds names that say nothing and phrases that are not plain English."""

import pytest

from prose import REMARKS, RULES, main, wrong

pytestmark = pytest.mark.docs


@pytest.mark.parametrize(
    ("name", "is_found"), [("held", True), ("_whole", True), ("Part", True), ("held_bytes", False)]
)
def test_prose_check_finds_names_without_meaning(tmp_path, name, is_found):
    file = tmp_path / "code.py"
    file.write_text(f"class {name}:\n    pass\n")
    assert ["could be anything" in line for line in wrong(file)] == [True] * is_found


@pytest.mark.parametrize("text", ["Of the whole, its shape.", "Returns the shape", "A pinned staging buffer"])
def test_prose_check_does_not_restrict_the_first_word_or_the_end_of_a_docstring(tmp_path, text):
    file = tmp_path / "code.py"
    file.write_text(f'def opened():\n    """{text}"""\n')
    assert not list(wrong(file))


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("test_it_is_exact", "begins with a pronoun"),
        ("test_what_is_read_is_written", "begins with a pronoun"),
        ("test_one_row_is_read", "begins with a pronoun"),
        ("test_both_ways_are_equal", "begins with a pronoun"),
        ("test_resume_is_the_same", "lacks the noun"),
        ("test_card_gives_the_same_as_a_cpu", "lacks the noun"),
        ("test_card_and_cpu_give_the_same_bits", None),
        ("test_oneway_copy_returns_the_same_assignment", None),
        ("test_items_are_read_if_those_before_are", None),
    ],
)
def test_prose_check_refuses_test_names_without_a_subject_or_a_noun(tmp_path, name, advice):
    file = tmp_path / "test_code.py"
    file.write_text(f"def {name}():\n    pass\n")
    lines = list(wrong(file))
    assert len(lines) == (advice is not None) and all(f"{file}:1: {name} {advice}" in line for line in lines)


REMARK = ["The path is no folder.", "The rules are those of torch.", "It has as many as the model."]  # one per rule
PLACES = {  # source with a place for a remark -> line of the remark
    'def f():\n    """{}"""\n': 2,
    '"""First line.\n\n    {}\n"""\n': 3,
    "x = 1  # {}\n": 1,
    "# first line\n# {}\nx = 1\n": 2,
}


@pytest.mark.parametrize(("rule", "remark"), list(zip(REMARKS, REMARK, strict=True)))
@pytest.mark.parametrize("place", PLACES)
def test_prose_check_finds_a_forbidden_phrase_in_a_docstring_or_comment(tmp_path, place, rule, remark, capsys):
    file = tmp_path / "code.py"
    file.write_text(place.format(remark))
    assert main(str(tmp_path)) == 1
    (found,) = capsys.readouterr().out.splitlines()
    assert found.startswith(f'{file}:{PLACES[place]}: "') and found.endswith(f": {REMARKS[rule]}.")


@pytest.mark.parametrize("source", ['"""The path is\n    no folder."""\n', "# the path is\n# no folder\n"])
def test_prose_check_reports_a_forbidden_phrase_over_two_lines_in_the_first_line(tmp_path, source):
    file = tmp_path / "code.py"
    file.write_text(source)
    assert [line.startswith(f'{file}:1: "is no"') for line in wrong(file)] == [True]


@pytest.mark.parametrize(
    "remark",
    [
        "There is no card here, and it is no longer than the other.",
        "The losses differ from those of a plain loop, and are compared with those of TRL.",
        "Returns twice as many as before, and as many as fit.",
        "It is not a number.",
    ],
)
@pytest.mark.parametrize("place", PLACES)
def test_plain_docstrings_and_comments_pass_the_prose_check(tmp_path, place, remark):
    (tmp_path / "code.py").write_text(place.format(remark))
    assert main(str(tmp_path)) == 0


def test_docstring_with_there_is_no_over_two_lines_passes_the_prose_check(tmp_path):
    (tmp_path / "code.py").write_text('def f():\n    """It runs if there\n    is no card."""\n')
    assert main(str(tmp_path)) == 0


def test_comment_marked_plain_is_exempt_from_the_prose_check(tmp_path):
    (tmp_path / "code.py").write_text("x = 1  # it is no number  # plain\n")
    assert main(str(tmp_path)) == 0


PHRASES = [  # one for each rule, in the order of RULES
    "Its value is no number.",
    "Field x is a list and no text.",
    "Of these files two are none.",
    "Its rows are those of a text.",
    "| `b` | the same | slower |",
    "Type 8, if the model has as many positions.",
    "Each process has folders of its own.",
    "Ask whoever made the file.",
    "Texts go with loss=full here.",
    "It stores all but the first block.",
    "Since then no run has failed.",
    "Type devices=2, say, and start again.",
    "The file holds 1 pairs of answers.",
]
FORMS = {
    "code.py": 'raise Refused("{}")\n',
    "page.md": "# A page\n\n{}\n",
    "a.yaml": "lr: 1  # {}\n",
    "a.html": "<p>{}</p>\n",
}


@pytest.mark.parametrize(("rule", "phrase"), list(zip(RULES, PHRASES, strict=True)))
@pytest.mark.parametrize("name", FORMS)
def test_prose_check_finds_a_forbidden_phrase_in_each_kind_of_file(tmp_path, name, rule, phrase, capsys):
    file = tmp_path / name
    file.write_text(FORMS[name].format(phrase))
    assert main("--texts", str(tmp_path)) == 1
    line = 3 if name == "page.md" else 1
    (found,) = capsys.readouterr().out.splitlines()
    assert found.startswith(f'{file}:{line}: "') and found.endswith(f": {RULES[rule]}.")


@pytest.mark.parametrize(
    "text",
    [
        "If there is no card, it runs on the CPU.",
        "It is no longer than the other, and no file is written.",
        "Pairs have twice as many rows.",
        "The recipe keeps as many blocks on the card as fit.",
        "These numbers differ from those of the table, and are smaller than those of a run.",
        "2 pairs, 1 pair, 11 rows, and 1 of 3 rows.",
        "A model of your own reads the same file.",
        "It is not a number.",
    ],
)
@pytest.mark.parametrize("name", FORMS)
def test_plain_text_passes_the_prose_check(tmp_path, name, text):
    (tmp_path / name).write_text(FORMS[name].format(text))
    assert main("--texts", str(tmp_path)) == 0


@pytest.mark.parametrize(
    ("name", "source", "lines"),
    [
        ("a.py", 'def f():\n    """It is no number."""\n    return "it is " "no number"\n', [3]),
        ("a.py", 'f"{len(rows)} rows"\nx = f"{len(rows)} rows"\ny = f"{n:,} rows, {name} rows"\n', [2, 3]),
        ("a.py", 'x = "it is no number"  # plain\n', []),
        ("a.yaml", "# these are those\n# of the base\nlr: is no number\n", [1]),
        ("a.md", "```sh\nit is no number\n```\n    it is no number\nit `is no` number; it is\n  no number\n", [5]),
        ("style.md", "it is no number\n", []),
    ],
)
def test_prose_check_of_texts_ignores_docstrings_code_and_quotations(tmp_path, name, source, lines, capsys):
    (tmp_path / name).write_text(source)
    main("--texts", str(tmp_path))
    assert [int(hit.split(":")[1]) for hit in capsys.readouterr().out.splitlines() if name in hit] == lines
