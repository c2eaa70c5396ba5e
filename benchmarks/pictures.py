"""Draws the SVG pictures of docs/ from the results of benchmarks and from the source.

python -m benchmarks.pictures            # ten seconds

tests/test_pictures.py draws each picture again, compares the result with the file, and checks that the texts are
readable.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.capacity import RECIPES
from benchmarks.drawing import WIDTH, Picture
from benchmarks.runner import ROOT, stored
from lowmem.system.units import GIB

DOCS = ROOT / "docs"
MARGIN = 20
SAID = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "other": "CUDA context, allocator",
    "host": "host memory",
    "drive": "drive",
}


def legend(picture: Picture, y: float, kinds: dict[str, float]) -> None:
    """Draws a legend of colours. Args: kinds: key of SAID -> x coordinate of its entry."""
    for kind, x in kinds.items():
        picture.box(x, y - 9, 10, 10, kind)
        picture.text(x + 15, y, SAID[kind], size=11, role="soft")


def note(picture: Picture, words: str) -> None:
    """Writes a wrapped footnote at the bottom of a picture."""
    lines = textwrap.wrap(" ".join(words.split()), 118)
    picture.lines(MARGIN, picture.height - 16 * len(lines) - 2, lines, step=16, size=11, role="soft")


# --- capacity --------------------------------------------------------------------------------------------------------

NAMES = {"h200": "H200", "h100": "H100", "rtx4090": "RTX 4090", "rtx3060": "RTX 3060"}
WHY = {
    "141 GB": "plain mixed precision: everything on the card",
    "80 GB": "8-bit optimizer state; each gradient is freed as soon as its weight is updated",
    "24 GB": "the card keeps 16-bit weights; fp32 masters and optimizer state are in host memory",
    "12 GB": "the words of 24 GB and weights=streamed: blocks are copied to the card in turn",
    "8 GB": "a smaller batch: the card holds two blocks and the activations of one",
    "4 GB": "one sequence in a batch",
    "4 GB, with a drive": "masters and optimizer state are on a drive, in the folder scratch",
}


def capacity() -> Picture:
    """Draws bars of the memory that each recipe needs on the card, on the host and on the drive."""
    rounds = stored("capacity")["rounds"]
    rows = {name: rounds[name][0] for name in RECIPES}
    top, step, left, scale = 128, 78, 104, 2.95
    columns = {"card GiB": 572, "host GiB": 634, "drive GiB": 702, "s per 1,000 tokens": WIDTH - MARGIN}
    height = top + step * len(rows) + 80
    picture = Picture(
        height,
        "Memory to train all weights of Llama-3.1-8B",
        "Bars of the memory that seven recipes need, from a card of 141 GB down to one of 4 GB.",
    )
    picture.text(MARGIN, 32, "Llama-3.1-8B, all weights trained", size=20, bold=True)
    picture.text(WIDTH - MARGIN, 32, "predicted", size=14, role="bad", bold=True, anchor="end")
    picture.text(MARGIN, 54, "python train.py model=llama-3.1-8b seq_len=2048", size=11, mono=True)
    picture.text(352, 54, "and the words of a row:", size=11.5, role="soft")
    legend(picture, 78, {"weights": 20, "gradients": 100, "optimizer": 186, "activations": 308, "other": 402})
    legend(picture, 78, {"host": 578, "drive": 680})
    for said, x in columns.items():
        first, _, last = said.rpartition(" ")
        picture.lines(x, 98, [first, last], step=13, size=11, role="soft", anchor="end")
    for number, (name, row) in enumerate(rows.items()):
        y = top + number * step
        picture.line([(MARGIN, y - 10), (WIDTH - MARGIN, y - 10)], wide=0.75)
        size, _, beside = name.partition(", ")
        picture.text(MARGIN, y + 10, size, size=15, bold=True)
        lines = [beside.replace("with", "and"), NAMES.get(row["card"], "as RTX 3060")]
        picture.lines(MARGIN, y + 27, [*filter(None, lines)], step=14, size=10, role="soft")
        picture.text(left, y + 10, typed(row["overrides"]), size=10.5, mono=True)
        picture.text(left, y + 26, WHY[name], size=11, role="soft")
        bar(picture, row, left, y + 33, scale)
        figures = [row["card_bytes"], row["host_bytes"], row["drive_bytes"]]
        cells = [f"{size / GIB:.1f}" if size else "-" for size in figures] + [f"{row['seconds_per_1000_tokens']:.2f}"]
        for place, (cell, x) in enumerate(zip(cells, columns.values(), strict=True)):
            picture.text(x, y + 48, cell, size=13, bold=not place, anchor="end")
    note(
        picture,
        """Predicted by plan.py; none of these recipes has been run on a card. A bar is what the recipe needs, its
        outline what the card has. Times are operations and bytes at the rates of the card, for 8 and 4 GB those
        of an RTX 3060; a run takes longer. A batch of sequences of 2,048 tokens is one optimizer step. From 24 GB down,
        two cores of the host run the optimizer, so larger batches take less time per token. All assumptions:
        benchmarks/results/capacity.md""",
    )
    return picture


def typed(overrides: list[str]) -> str:
    """Returns the overrides of a row, without those that the picture's heading already shows."""
    return " ".join(line for line in overrides if line not in ("model=llama-3.1-8b", "seq_len=2048"))


def bar(picture: Picture, row: dict, x: float, y: float, scale: float) -> None:
    """Draws the card memory that a recipe needs as a bar with a part per category, inside an outline of the card's
    size. Below, draws a bar of host memory and a bar of drive space, if the recipe needs them."""
    picture.box(x, y, row["card_size_bytes"] / GIB * scale, 18, "panel", edge="edge")
    at = x
    parts = {kind: size for kind, size in row["tensor_bytes_by_category"].items() if kind != "other"}
    parts["other"] = row["card_bytes"] - sum(parts.values())
    for kind, size in parts.items():
        if size:
            picture.box(at, y + 2, size / GIB * scale, 14, kind)
            at += size / GIB * scale
    for number, kind in enumerate(("host", "drive")):
        if row[f"{kind}_bytes"]:
            picture.box(x, y + 20 + 6 * number, row[f"{kind}_bytes"] / GIB * scale, 5, kind)


# --- card, host, drive -----------------------------------------------------------------------------------------------


class Panel(NamedTuple):
    """Where a recipe stores the bytes of a parameter, and how many bytes per parameter an optimizer step copies."""

    title: str
    typed: str
    card: dict[str, float]  # category -> bytes per parameter; likewise for host and drive
    says_card: str
    host: dict[str, float]
    says_host: str
    drive: dict[str, float]
    says_drive: str = ""
    gradients: float = 0  # bytes per parameter copied from the card to the host
    weights: float = 0  # bytes per parameter copied from the host to the card


STATE = 2.03  # bytes per parameter of adamw8bit's state: two 8-bit moments, each with an fp32 scale per 256 elements
TWO_BLOCKS = 2 * 2 / 32  # bytes of two of 32 blocks in 16 bits, divided by the number of parameters in all blocks
MASTERS = "precision=bf16-master optim=adamw8bit clip=null"
STREAMED = "gradient_checkpointing=offload loss=tiled weights=streamed"
PANELS = [
    Panel(
        title="Everything on the card",
        typed="precision=32 optim=adamw8bit",
        card={"weights": 4, "gradients": 4, "optimizer": STATE},
        says_card="4 weights, 4 gradients, 2.03 state",
        host={},
        says_host="",
        drive={},
    ),
    Panel(
        title="fp32 masters on the host",
        typed=MASTERS,
        card={"weights": 2},
        says_card="bf16 weights",
        host={"weights": 4, "optimizer": STATE},
        says_host="4 fp32 masters, 2.03 state",
        drive={},
        gradients=2,
        weights=2,
    ),
    Panel(
        title="Weights streamed block by block",
        typed=f"{MASTERS} {STREAMED}",
        card={"weights": TWO_BLOCKS},
        says_card="bf16 weights of two blocks",
        host={"weights": 4, "optimizer": STATE},
        says_host="2 upper, 2 lower, 2.03 state",
        drive={},
        gradients=2,
        weights=4,
    ),
    Panel(
        title="Masters and optimizer state on a drive",
        typed="and weights.drive=scratch",
        card={"weights": TWO_BLOCKS},
        says_card="bf16 weights of two blocks",
        host={"weights": 2},
        says_host="2 upper: the bf16 weights",
        drive={"weights": 2, "optimizer": STATE},
        says_drive="2 lower, 2.03 state",
        gradients=2,
        weights=4,
    ),
]


def card_host_drive() -> Picture:
    """Draws PANELS, which show where the bytes of a parameter are stored and how many bytes a step copies."""
    top, step = 96, 142
    height = top + step * len(PANELS) + 96
    picture = Picture(
        height,
        "Where the bytes of one parameter are: card, host memory and drive",
        "Four panels: all on the card, masters on the host, weights streamed, masters and state on a drive.",
    )
    picture.text(MARGIN, 32, "Bytes per parameter: where they are, and what each step copies", size=19, bold=True)
    legend(picture, 54, {"weights": 20, "gradients": 100, "optimizer": 186})
    places = {"card": (20, 226), "host": (334, 226), "drive": (640, 140)}
    for said, (x, _) in zip(("Card", "Host memory", "Drive"), places.values(), strict=True):
        picture.text(x, 82, said, size=13, bold=True)
    for number, panel in enumerate(PANELS):
        y = top + number * step
        picture.line([(MARGIN, y - 6), (WIDTH - MARGIN, y - 6)], wide=0.75)
        picture.text(MARGIN, y + 14, panel.title, size=14, bold=True)
        picture.text(MARGIN, y + 32, panel.typed, size=10.5, mono=True)
        for place, (x, wide) in places.items():
            stack(picture, x, y + 42, wide, getattr(panel, place), getattr(panel, f"says_{place}"))
        if panel.gradients:
            exchange(picture, 250, 330, y + 42, f"gradients {panel.gradients}", f"weights {panel.weights}")
        if panel.drive:
            moved = sum(panel.drive.values())
            exchange(picture, 564, 636, y + 42, f"write {moved:g}", f"read {moved:g}")
    note(
        picture,
        """Arrows: bytes per parameter that are copied in an optimizer step of one micro-batch. Streamed weights are
        copied for forward and again for backward. A gradient is freed on the card once it is copied, and the host
        updates its master at once. Clipping by norm needs 2 bytes more on the host, for all gradients. Upper and lower:
        the 16-bit halves of an fp32 master; the upper half is the bf16 weight. Streamed: two blocks of 32 are on the
        card, as with Llama-3.1-8B. Activations are not drawn: they depend on the batch.""",
    )
    return picture


def stack(picture: Picture, x: float, y: float, wide: float, parts: dict[str, float], says: str) -> None:
    """Draws the bytes of a parameter that are stored in one place (card, host memory or drive), 20 units wide per
    byte."""
    picture.box(x, y, wide, 78, "panel", edge="edge")
    if not parts:
        picture.text(x + 12, y + 44, "nothing", size=12, role="soft")
        return
    at, total = x + 12, sum(parts.values())
    for kind, size in parts.items():
        picture.box(at, y + 12, 20 * size, 16, kind)
        at += 20 * size
    picture.text(x + 12, y + 48, f"{total:g} bytes", size=15, bold=True)
    picture.text(x + 12, y + 66, says, size=10.5, role="soft")


def exchange(picture: Picture, left: float, right: float, y: float, to_right: str, to_left: str) -> None:
    """Draws an arrow in each direction. `to_right` and `to_left` are the labels above the arrows."""
    middle = (left + right) / 2
    picture.text(middle, y + 22, to_right, size=11, anchor="middle")
    picture.arrow([(left, y + 30), (right, y + 30)], wide=2)
    picture.text(middle, y + 54, to_left, size=11, anchor="middle")
    picture.arrow([(right, y + 62), (left, y + 62)], wide=2)


# --- symptoms --------------------------------------------------------------------------------------------------------


class Symptom(NamedTuple):
    """A symptom, and the overrides that help.

    Args:
        kind: name of the mark's colour, which is a category of memory.png, "host" or "bad".
        seen: how a user recognizes it.
        words: pairs of (overrides, their price), the recommended pair first.
    """

    kind: str
    title: str
    seen: str
    words: list[tuple[str, str]]


SYMPTOMS = [
    Symptom(
        "weights",
        "Weights are too large",
        "blue fills the card from the start",
        [
            (
                "precision=bf16-master optim=adamw8bit",
                "host memory: 6 to 10 bytes per parameter; the CPU runs the optimizer",
            ),
            (
                "weights=streamed gradient_checkpointing=offload",
                "copies 4 bytes per parameter to the card in each micro-batch",
            ),
        ],
    ),
    Symptom(
        "optimizer",
        "Optimizer state is too large",
        "purple: AdamW needs 8 bytes per parameter",
        [
            ("optim=adamw8bit", "state is rounded to 8 bits; 2 bytes per parameter remain"),
            ("optim=adafactor", "no momentum; hardly any state remains"),
        ],
    ),
    Symptom(
        "gradients",
        "Gradients are too large",
        "orange is highest at the end of backward",
        [
            ("optim.in_backward=true clip=null", "no clipping by norm, no gradient accumulation"),
            ("precision=bf16-sr", "weights are rounded at random in each step"),
        ],
    ),
    Symptom(
        "activations",
        "Activations are too large",
        "green: a hill that grows through forward",
        [
            ("batch_size=auto accumulation=effective_batch", "smaller matrix products; the same update"),
            ("gradient_checkpointing=every_layer", "one more forward pass: about a fifth more time"),
        ],
    ),
    Symptom(
        "activations",
        "Logits are too large",
        "green: a spike between forward and backward",
        [
            ("loss=chunked", "hardly any time"),
            ("loss=tiled", "one more product with the output layer"),
        ],
    ),
    Symptom(
        "host",
        "Host memory is too small",
        "the plan or the run names the host",
        [
            ("clip=null", "no clipping by norm; without accumulation no gradients are on the host"),
            (
                "weights=streamed weights.drive=scratch",
                "each step reads and writes 4 bytes per parameter, which wears the drive",
            ),
        ],
    ),
    Symptom(
        "bad",
        "It does not fit anyway",
        "plan.py finds no recipe that fits",
        [
            ("adapter=qlora", "trains an adapter; the frozen weights are rounded to 4 bits"),
            ("seq_len=1024", "the model sees less context"),
        ],
    ),
]


def symptoms() -> Picture:
    """Draws a decision tree from each symptom to the overrides that help, with the price of each override."""
    top, step, trunk = 112, 88, 34
    height = top + step * len(SYMPTOMS) + 16
    picture = Picture(
        height,
        "Which word to type first",
        "A decision tree from seven symptoms to the override to type, and its price.",
    )
    picture.box(MARGIN, 16, WIDTH - 2 * MARGIN, 62, "panel", edge="edge")
    picture.text(MARGIN + 14, 42, "Memory ran out. What is highest in memory.png?", size=18, bold=True)
    about = "The run lists the same categories. Type the first words of a row; if that is not enough, add the second."
    picture.text(MARGIN + 14, 64, about, size=12, role="soft")
    picture.line([(trunk, 78), (trunk, top + step * (len(SYMPTOMS) - 1) + 22)])
    for number, symptom in enumerate(SYMPTOMS):
        y = top + number * step
        picture.arrow([(trunk, y + 22), (60, y + 22)])
        picture.box(60, y - 8, WIDTH - MARGIN - 60, step - 12, "panel", edge="edge")
        picture.box(60, y + 2, 6, step - 32, symptom.kind)
        picture.text(78, y + 18, symptom.title, size=14, bold=True)
        picture.lines(78, y + 38, textwrap.wrap(symptom.seen, 30), step=16, size=11.5, role="soft")
        picture.arrow([(304, y + 22), (322, y + 22)])
        for place, (word, price) in enumerate(symptom.words):
            picture.text(332, y + 10 + 33 * place, word, size=12, mono=True, bold=not place)
            picture.text(332, y + 25 + 33 * place, price, size=11, role="soft")
    return picture


# --- a refusal -------------------------------------------------------------------------------------------------------

REFUSED = "python train.py optim.in_backward=true accumulation=fixed accumulation.batches=4"
COLUMNS = 80


def refusal() -> Picture:
    """Draws a terminal with the real output of a refused command."""
    lines = [line for paragraph in printed(REFUSED) for line in textwrap.wrap(paragraph, COLUMNS)]
    step, top = 20, 76
    height = top + step * (len(lines) + 1) + 22
    picture = Picture(height, "A refusal", f"A terminal. {REFUSED} prints: {' '.join(lines)}")
    picture.box(MARGIN, 16, WIDTH - 2 * MARGIN, height - 32, "panel", edge="edge")
    for number, role in enumerate(("bad", "gradients", "activations")):
        picture.box(MARGIN + 16 + 20 * number, 30, 11, 11, role)
    picture.text(MARGIN + 18, top, f"$ {REFUSED}", size=13.5, mono=True, bold=True)
    picture.lines(MARGIN + 18, top + step + 4, lines, step=step, size=13.5, mono=True)
    return picture


def printed(command: str) -> list[str]:
    """Returns the lines that a refused command prints. Raises: RuntimeError: the command is not refused."""
    _, program, *overrides = shlex.split(command)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(ROOT / program), *overrides],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
        )
    if done.returncode == 0 or "Traceback" in done.stderr:
        raise RuntimeError(f"{command} is not refused:\n{done.stdout}{done.stderr}")
    return (done.stdout + done.stderr).strip().splitlines()


# --- the map ---------------------------------------------------------------------------------------------------------

ROOMS = {  # from top to bottom: a folder imports only from the folders below it
    "command": "command line, processes, --help",
    "fit": "fit.py: one run from start to end",
    "plan": "predicts memory and time, searches recipes",
    "training": "the LightningModule and its Trainer",
    "saving": "checkpoints and exports",
    "report": "metrics, charts, summaries, comparison",
    "techniques": "one folder per group of conf/",
    "offload": "moves weights between card, host and drive",
    "step": "arithmetic of one optimizer step",
    "model": "loads the network, generates text",
    "data": "files to rows of tokens",
    "config": "typed overrides to one frozen Run",
    "memory": "measures bytes by category",
    "system": "files, processes, private parts of torch",
}


def modules() -> Picture:
    """Draws the folders of src/lowmem in a column. The dots in a folder's row mark the folders from which it
    imports."""
    top, step, cell, left = 76, 40, 23, 480
    height = top + step * len(ROOMS) + 34
    picture = Picture(
        height, "The folders of src/lowmem", "Fourteen folders in a column: each imports only from those below it."
    )
    picture.text(MARGIN, 32, "src/lowmem: a folder imports only from those below it", size=19, bold=True)
    picture.text(
        MARGIN, 54, "A dot: the folder of the row imports from the folder of the column.", size=12, role="soft"
    )
    found, names = imported(), [*ROOMS]
    for number, (room, says) in enumerate(ROOMS.items()):
        y = top + number * step
        picture.box(MARGIN, y, 416, 30, "panel", edge="edge")
        picture.text(MARGIN + 12, y + 20, room, size=13, bold=True)
        picture.text(MARGIN + 112, y + 20, says, size=12, role="soft")
        if number:
            picture.arrow([(MARGIN + 50, y - 10), (MARGIN + 50, y)])
            picture.text(left + (number - 1) * cell + 6, y + 19, room, size=10.5, role="soft", anchor="end")
        for other in sorted(found[room]):
            x = left + (names.index(other) - 1) * cell
            picture.box(x - 5, y + 10, 10, 10, "weights")
    return picture


def imported() -> dict[str, set[str]]:
    """Returns a dict that maps the name of each folder of src/lowmem to the names of the other folders from which its
    files import."""
    source, found = ROOT / "src" / "lowmem", {room: set() for room in ROOMS}
    for file in source.rglob("*.py"):
        room = file.relative_to(source).with_suffix("").parts[0]
        for other in re.findall(r"^\s*(?:from|import) lowmem\.(\w+)", file.read_text(), re.MULTILINE):
            if other != room:
                found[room].add(other)
    return found


# ---------------------------------------------------------------------------------------------------------------------

PICTURES: dict[str, Callable[[], Picture]] = {
    "capacity": capacity,
    "card-host-drive": card_host_drive,
    "symptoms": symptoms,
    "refusal": refusal,
    "map": modules,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pictures", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PICTURES, default=list(PICTURES))
    for name in parser.parse_args().only:
        (file := DOCS / f"{name}.svg").write_text(PICTURES[name]().svg(), encoding="utf-8")
        print(f"wrote {file.relative_to(ROOT)}, {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
