"""Tests that a run prints only expected lines, and that none of them is wider than a terminal."""

import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from contextlib import suppress
from pathlib import Path

import pytest

from conftest import ROOT, SMALL
from lowmem.system.terminal import folded

NUMBER, BYTES = r"[\d.,]+(e-\d+)?", r"[\d.,]+ [MG]iB"
BAR = r"\|[^|]*\| \d+/\d+ \[(\d\d:\d\d|\?) left(, loss [\d.]+, [\d,]+ tokens/s, peak [\d.]+ MiB)?\]"
# Patterns of all lines that a run may print.
FORMS = [
    r"",
    r"Tokenizing data=text",
    r"step \d+: loss [\d.]+, validation [\d.]+, [\d.]+ bits per byte, [\d,]+ tokens/s",
    rf"(parameters|optimizer steps|tokens|train loss|validation loss|perplexity|bits per byte|tokens/s) +{NUMBER}",
    r"optimizer                 [\w.]+",
    rf"(seconds per step) +({NUMBER}|-)",
    rf"(peak device memory|  weights|  gradients|  optimizer state|  activations|  temporaries) +{BYTES}",
    rf"peak host memory +{BYTES} \({BYTES} before the model was loaded\)",
    r"predicted / measured +",
    rf"  (load|forward|backward|step|evaluation|save) +((device|host) [\d.]+ / {BYTES}(, )?)+",
    r"A sample:",
    r"(wrote run/: )?((\w+/|\w+\.\w+)(, |,?$))+",
    r"python train\.py (generate=run '?prompt=.+|evaluate=run|resume=run max_steps=8)",
    BAR,
    rf"evaluating {BAR}",
]
OF_WANDB = [
    r"W&B: no API key, so this run is logged offline\. Upload it with `wandb sync",
    r"\S+/wandb/offline-run-\*`\.",
]


@pytest.fixture
def folder():
    """Yields a folder with a short path, because long paths in messages are not broken and would exceed 80 columns."""
    with tempfile.TemporaryDirectory(prefix="lm") as folder:
        yield Path(folder)


def environment(home):
    mine = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "HF_"))}
    return mine | {"HOME": str(home), "NETRC": f"{home}/netrc", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/src"}


def typed(logger):
    """Returns a `python train.py` command with a small model, for a user without a W&B account."""
    small = [line for line in SMALL if not line.startswith(("logger", "plan", "sample_tokens", "val_every"))]
    text = ["data=text", "data.path=text", "cache_dir=cache", "hydra.run.dir=run"]
    return [sys.executable, f"{ROOT}/train.py", *small, *text, "val_every=2", "sample_tokens=24", *logger]


def noise(said, forms):
    """Returns the lines that match none of the allowed forms. Lines of the sample are not checked."""
    before, _, after = said.partition("A sample:\n")
    _, _, wrote = after.partition("\nwrote ")
    lines = [*before.split("\n"), *f"wrote {wrote}".split("\n")]
    return [line for line in lines if not any(re.fullmatch(form, line) for form in forms)]


def wide(said, columns=80):
    return [line for line in said.split("\n") if len(line) > columns]


@pytest.mark.process
@pytest.mark.parametrize("logger", [(), ("logger=csv",)], ids=["default", "csv"])
def test_run_prints_no_lines_of_other_libraries_and_none_wider_than_80_columns(folder, text_folder, logger):
    shutil.copytree(text_folder, folder / "text")
    done = subprocess.run(
        typed(logger),
        cwd=folder,
        env=environment(folder) | {"COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0 and done.stderr == ""
    said = done.stdout
    assert noise(said, FORMS + ([] if logger else OF_WANDB)) == [] and wide(said) == []
    assert "A sample:" in said and "step 4: loss" in said and said.count("wrote ") == 1
    assert said.count("\npython train.py ") == 3


@pytest.mark.process
def test_progress_bars_fit_a_terminal_of_80_columns(folder, text_folder):
    shutil.copytree(text_folder, folder / "text")
    code, said = on_a_terminal(typed(("logger=csv",)), folder)
    assert code == 0
    drawn = said.replace("\r\n", "\n").replace("\r", "\n")
    drawn = "\n".join(line.rstrip() if not line.startswith("predicted") else line for line in drawn.split("\n"))
    assert noise(drawn, [*FORMS, r" *"]) == [] and wide(drawn) == []
    assert re.search(rf"^{BAR}$", drawn, re.M) and re.search(rf"^evaluating {BAR}$", drawn, re.M)
    assert "4/4 [00:00 left, loss" in drawn
    assert "left" not in drawn[drawn.index("parameters  ") :]  # no bar is drawn again below the table


def on_a_terminal(command, folder):
    """Runs a command with a terminal of 80 columns as its output. Returns (exit code, output)."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(command, cwd=folder, env=environment(folder), stdout=theirs, stderr=theirs)
    os.close(theirs)
    said = b""
    with suppress(OSError):  # reading past the end of a terminal raises an error
        while piece := os.read(ours, 65536):
            said += piece
    os.close(ours)
    return process.wait(), said.decode()


@pytest.mark.wrong
@pytest.mark.parametrize("printed", ["wandb: View project", "x" * 81, "[transformers] LOAD REPORT from: x"])
def test_check_of_output_finds_lines_of_other_libraries_and_lines_wider_than_80_columns(printed):
    assert noise(f"\n{printed}\nA sample:\nany text\n\nwrote run/: model/\n", FORMS) == [printed]
    assert bool(wide(printed)) == (len(printed) > 80)


def test_progress_bar_of_ten_thousand_steps_and_ten_hours_fits_80_columns(monkeypatch):
    from lowmem.report import metrics

    figures = ", loss 8.184, 123,298 tokens/s, peak 10.16 GiB"
    for n, total in ((0, 10), (450, 450), (9_999, 10_000)):
        shown = metrics.tqdm.format_meter(
            n, total, 36_000.0 * n / total, ncols=79, bar_format=metrics.BAR, postfix=figures[2:]
        )
        assert len(shown) <= 79 and shown.endswith(f"left{figures}]")


@pytest.mark.process
def test_error_message_is_wrapped_between_words_to_the_terminal_width(folder):
    done = subprocess.run(
        [sys.executable, f"{ROOT}/train.py", "data=text", "data.path=none", "logger=csv", "device=cpu", "plan=off"],
        cwd=folder,
        env=environment(folder) | {"COLUMNS": "40"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1 and wide(done.stderr, 40) == []
    assert " ".join(done.stderr.split()) == ("data.path=none: there is no such file or folder. Give one that exists.")


def test_text_wrapped_to_the_terminal_width_keeps_its_words_and_indentation(monkeypatch):
    text = "A sentence that is long\n  and one that is indented\n\nshort"
    assert folded(text) == text  # output to a pipe is not wrapped
    monkeypatch.setenv("COLUMNS", "16")
    assert folded(text) == "A sentence that\nis long\n  and one that\n  is indented\n\nshort"
    assert folded(f"see {'/a' * 20}") == f"see\n{'/a' * 20}"  # a path is not broken, so that a user can copy it


def test_interpolation_error_of_the_config_is_printed_without_a_traceback(command):
    """Hydra by itself would print "Error executing job with overrides" before the error."""
    for line in ("debug=${nope}", "logger=wandb logger.wandb.project=${nope}", "lr=${nope}"):
        code, said = command(*line.split(" "))
        assert code == 1 and "Error executing" not in said and "Traceback" not in said, said
        assert "Interpolation key 'nope' not found" in said
