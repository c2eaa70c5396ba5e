"""Tests that prose.py finds a name that says nothing, and phrases of texts that are not plain."""

import pytest

from prose import RULES, main, wrong

pytestmark = pytest.mark.docs


@pytest.mark.parametrize(
    ("name", "is_found"), [("held", True), ("_whole", True), ("Part", True), ("held_bytes", False)]
)
def test_meaningless_names_are_found(tmp_path, name, is_found):
    file = tmp_path / "code.py"
    file.write_text(f"class {name}:\n    pass\n")
    assert ["could be anything" in line for line in wrong(file)] == [True] * is_found


@pytest.mark.parametrize("text", ["Of the whole, its shape.", "Returns the shape", "A pinned staging buffer"])
def test_docstring_may_be_a_noun_phrase(tmp_path, text):
    file = tmp_path / "code.py"
    file.write_text(f'def opened():\n    """{text}"""\n')
    assert not list(wrong(file))


PHRASES = [  # one for each rule, in its order
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
def test_forbidden_phrase_is_found_in_each_kind_of_file(tmp_path, name, rule, phrase, capsys):
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
def test_docstrings_code_and_quotations_are_not_checked_for_phrases(tmp_path, name, source, lines, capsys):
    (tmp_path / name).write_text(source)
    main("--texts", str(tmp_path))
    assert [int(hit.split(":")[1]) for hit in capsys.readouterr().out.splitlines() if name in hit] == lines
