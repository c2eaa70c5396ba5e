"""Tests the drawn pictures of docs/: the committed files are current and readable, and the overrides and folders in
them exist."""

import json
import re
import xml.etree.ElementTree as ET
from itertools import combinations
from typing import NamedTuple

import pytest
from benchmarks import pictures
from benchmarks.drawing import WIDTH, Picture
from benchmarks.runner import RESULTS
from matplotlib import font_manager

import pages
from conftest import ROOT
from lowmem.config.settle import run_of
from lowmem.plan.tracing.stand_in import state_bytes_per_parameter
from lowmem.training import build
from test_imports import ROOMS, imports

pytestmark = pytest.mark.docs

NAMES = [*pictures.PICTURES]
SVG = "{http://www.w3.org/2000/svg}"
# Wider than the fonts that browsers use for system-ui: a text that fits with this font also fits with those fonts.
FONTS = {
    (mono, bold): font_manager.get_font(
        font_manager.findfont(
            font_manager.FontProperties(
                family="DejaVu Sans Mono" if mono else "DejaVu Sans", weight="bold" if bold else "normal"
            )
        )
    )
    for mono in (False, True)
    for bold in (False, True)
}


def file_of(name: str):
    return ROOT / "docs" / f"{name}.svg"


class Placed(NamedTuple):
    words: str
    left: float
    top: float
    right: float
    bottom: float


def texts(svg: str) -> list[Placed]:
    """Returns all texts of a picture with their bounding boxes."""
    return [placed(node) for node in ET.fromstring(svg).iter(f"{SVG}text")]


def placed(node) -> Placed:
    x, y, size = (float(node.get(key)) for key in ("x", "y", "font-size"))
    font = FONTS["mono" in node.get("class"), node.get("font-weight") == "600"]
    font.set_size(size, 72)
    font.set_text(node.text)
    wide = font.get_width_height()[0] / 64
    left = x - {"start": 0, "middle": wide / 2, "end": wide}[node.get("text-anchor", "start")]
    return Placed(node.text, left, y - 0.76 * size, left + wide, y + 0.22 * size)


def unreadable(svg: str) -> list[str]:
    """Returns a message for each text that exceeds the picture, overlaps another text, or is too small."""
    found, height = texts(svg), float(ET.fromstring(svg).get("height"))
    wrong = [f"{t.words}: outside" for t in found if t.left < 8 or t.right > WIDTH - 8 or t.bottom > height - 4]
    for one, other in combinations(found, 2):
        if one.left < other.right and other.left < one.right and one.top < other.bottom and other.top < one.bottom:
            wrong.append(f"{one.words}: on {other.words}")
    sizes = re.findall(r'<text [^>]*font-size="([\d.]+)"', svg)
    return wrong + [f"a text of {size}" for size in sizes if float(size) < 10]


def unknown(svg: str) -> list[str]:
    """Returns the overrides in a picture that conf/ does not know."""
    return [wrong for text in texts(svg) for wrong in pages.unknown_keys(f"`{text.words}`")]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "refusal"])
def test_drawn_documentation_picture_equals_the_committed_file(name):
    assert pictures.PICTURES[name]().svg() == file_of(name).read_text(encoding="utf-8")


@pytest.mark.process
def test_committed_picture_of_a_refusal_equals_the_picture_of_the_printed_text():
    assert pictures.refusal().svg() == file_of("refusal").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_texts_of_a_documentation_picture_are_large_enough_inside_and_do_not_overlap(name):
    assert unreadable(file_of(name).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("name", NAMES)
def test_overrides_in_a_documentation_picture_exist_in_conf(name):
    assert unknown(file_of(name).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("name", NAMES)
def test_documentation_picture_is_a_small_file_with_two_themes_and_no_font(name):
    svg = file_of(name).read_text(encoding="utf-8")
    assert 2_000 < len(svg.encode()) < 15_000
    assert "prefers-color-scheme:dark" in svg and "font-family:system-ui, sans-serif" in svg
    assert "<image" not in svg and "@font-face" not in svg and 'class="page"' in svg
    for role in set(re.findall(r'class="(\w+)', svg)) - {"mono"}:
        assert f".{role}{{" in svg and svg.count(f"--{role}:") == 2


def test_check_of_documentation_pictures_finds_overlaps_and_unknown_overrides():
    picture = Picture(100, "bad", "bad")
    picture.text(20, 40, "optim=adamw9bit")
    picture.text(60, 44, "on it")
    picture.text(700, 80, "leaves at the right")
    svg = picture.svg()
    assert unreadable(svg) == ["leaves at the right: outside", "optim=adamw9bit: on on it"]
    assert unknown(svg) == ["optim=adamw9bit"]


@pytest.mark.parametrize("symptom", pictures.SYMPTOMS, ids=lambda symptom: symptom.title)
def test_overrides_in_the_picture_of_symptoms_are_not_refused(symptom):
    """Checks the first overrides alone, and then both sets of overrides together. If both have a key, the second value
    wins."""
    (first, _), (second, _) = symptom.words
    both = dict(word.split("=", 1) for word in f"{first} {second}".split())
    if "weights" in both:  # streamed weights need masters and recomputed blocks
        both = {"precision": "bf16-master", "gradient_checkpointing": "offload", **both}
    beside = "python train.py model=gpt2 memory.limit=12GiB"  # batch_size=auto needs a limit without a card
    lines = [f"    {beside} {words}" for words in (first, " ".join(f"{key}={value}" for key, value in both.items()))]
    assert pages.refused("\n".join(lines)) == []


@pytest.mark.parametrize("panel", pictures.PANELS, ids=lambda panel: panel.title)
def test_overrides_of_a_panel_in_the_card_host_drive_picture_are_not_refused(panel):
    words = panel.typed.replace("and ", f"{pictures.MASTERS} {pictures.STREAMED} ")
    assert pages.refused(f"    python train.py {words}") == []


def test_bytes_in_the_card_host_drive_picture_equal_the_recorded_capacity_results():
    rows = {name: row for name, (row,) in json.loads((RESULTS / "capacity.json").read_text())["rounds"].items()}
    state, _ = state_bytes_per_parameter(build.optimizer(run_of(["optim=adamw8bit"])))
    assert state == pytest.approx(pictures.STATE, abs=0.005)
    _, masters, _, drive = pictures.PANELS
    row = rows["24 GB"]
    assert row["tensor_bytes_by_category"]["weights"] / row["parameters"] == pytest.approx(
        masters.card["weights"], 0.01
    )
    row = rows["4 GB, with a drive"]
    assert row["drive_bytes"] / row["parameters"] == pytest.approx(sum(drive.drive.values()), 0.01)


def test_picture_of_the_source_folders_has_their_order_and_all_imports():
    assert (*pictures.ROOMS,) == ROOMS[::-1]
    graph = imports(ROOT / "src")
    found = {room: set() for room in ROOMS}
    for name, others in graph.items():
        for other in others:
            if "." in name and "." in other and name.split(".")[1] != other.split(".")[1]:
                found[name.split(".")[1]].add(other.split(".")[1])
    assert pictures.imported() == found
