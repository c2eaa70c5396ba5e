"""Tests the benchmarks: loops take turns, all loops compute equal losses, predictions agree with published figures, and
recorded results agree with the pages."""

import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
from argparse import ArgumentParser

import pytest
import torch
from benchmarks import published, turns
from benchmarks.loops import RECIPES
from benchmarks.quality import OPTIMIZERS, PRECISIONS, SEEDS
from benchmarks.runner import RESULTS, ROOT, options_of, stored
from benchmarks.side_by_side import LOOPS
from transformers import AutoModelForCausalLM

from lowmem.config.declarations import techniques
from lowmem.config.settle import run_of
from lowmem.model.loading import describe

pytestmark = pytest.mark.docs

# Code of a loop with a given number of steps, which writes to a file when each step begins and ends.
COUNTING = """
import json, sys, time
from benchmarks.turns import Turns
name, steps, diary = sys.argv[1], int(sys.argv[2]), open(sys.argv[3], "a")
turns = Turns()
for _ in range(steps):
    turns.next()
    print(name, "begins", file=diary, flush=True)
    time.sleep(0.02)
    print(name, "ends", file=diary, flush=True)
print(json.dumps({"seconds": turns.seconds, "tokens_per_second": 1.0}))
"""


def test_benchmark_loops_alternate_and_never_overlap(tmp_path):
    diary = tmp_path / "diary"
    found = turns.take_turns({name: ["-c", COUNTING, name, str(n), str(diary)] for name, n in (("a", 3), ("b", 2))})
    steps = [line.split() for line in diary.read_text().splitlines()]
    assert [what for _, what in steps] == ["begins", "ends"] * 5
    assert [name for name, what in steps if what == "begins"] == ["a", "b", "b", "a", "a"]
    assert [len(found[name]["seconds"]) for name in "ab"] == [
        2,
        1,
    ]  # a step is timed until the next step of the loop begins, so the last step is not timed


def test_wait_of_a_benchmark_loop_for_another_loop_is_not_timed(monkeypatch):
    clock = [0.0]

    def wait(*_) -> bytes:
        clock[0] += 100.0
        return b"."

    monkeypatch.setenv(turns.PIPES, "0 1")
    monkeypatch.setattr(turns.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(turns.os, "read", wait)
    monkeypatch.setattr(turns.os, "write", lambda *_: None)
    loop = turns.Turns()
    for _ in range(3):
        loop.next()
        clock[0] += 1.0
    assert loop.seconds == [1.0, 1.0]


def test_failing_benchmark_loop_is_reported_and_other_loops_finish(tmp_path):
    broken = "import sys; sys.exit('no such model')"
    rows = {"broken": ["-c", broken], "whole": ["-c", COUNTING, "whole", "2", str(tmp_path / "diary")]}
    with pytest.raises(SystemExit, match="no such model"):
        turns.take_turns(rows)
    assert (tmp_path / "diary").read_text().count("whole ends") == 2


def test_single_benchmark_loop_runs_without_waiting_for_other_loops(monkeypatch):
    monkeypatch.delenv(turns.PIPES, raising=False)
    alone = turns.Turns()
    alone.next()
    alone.next()
    assert len(alone.seconds) == 1


def test_benchmark_with_the_row_option_prints_the_row_as_json_and_exits(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark", "--row", "tiny", "seq_len=8"])
    with pytest.raises(SystemExit) as end:
        options_of(ArgumentParser(), lambda *words: {"words": words})
    assert end.value.code is None and json.loads(capsys.readouterr().out) == {"words": ["tiny", "seq_len=8"]}


def test_benchmark_without_the_row_option_returns_its_parsed_options(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmark"])
    assert options_of(ArgumentParser(), pytest.fail).row is None


def test_benchmark_speed_ratio_is_the_median_of_paired_steps_after_the_warm_up():
    ours = [{"seconds": [9.0, 1.0, 2.0]}, {"seconds": [9.0, 4.0, 1.0]}]
    theirs = [{"seconds": [1.0, 1.0, 4.0]}, {"seconds": [1.0, 2.0, 3.0]}]
    assert turns.speed_ratio(ours, theirs, warm_up=1) == 1.5  # the median of 1, 2, 0.5 and 3
    assert turns.difference(ours, theirs, warm_up=1) == -1.0  # the median of 0, -2, 2 and -2


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_of_each_benchmark_loop_equal_the_plain_pytorch_loop_bit_by_bit(recipe):
    rows = {loop: ["-m", "benchmarks.loops", loop, recipe, "tiny"] for loop in LOOPS}
    losses = {loop: one["losses"] for loop, one in turns.take_turns(rows).items()}
    assert losses["plain"][-1] < losses["plain"][0] - 0.5  # the loop trains
    assert all(losses[loop] == losses["plain"] for loop in LOOPS), losses


def test_benchmark_loop_that_sums_the_norm_in_another_order_has_different_losses():
    """Wrong on purpose: a plain loop adds the gradient norms of the parameters in reverse order."""
    wrong = """
import json, torch
from benchmarks import loops
right = torch.nn.utils.clip_grad_norm_
torch.nn.utils.clip_grad_norm_ = lambda parameters, largest: right(list(parameters)[::-1], largest)
print(json.dumps(loops.LOOPS["plain"]("adafactor", "tiny")))
"""
    rows = {"wrong": ["-c", wrong], "plain": ["-m", "benchmarks.loops", "plain", "adafactor", "tiny"]}
    found = turns.take_turns(rows)
    assert found["wrong"]["losses"] != found["plain"]["losses"]


def test_every_published_figure_has_a_url_commit_unit_and_card():
    assert len(published.ALL) >= 10
    for one in published.ALL:
        assert one.url.startswith("https://github.com/") and re.fullmatch("[0-9a-f]{40}", one.commit), one.name
        assert one.unit in ("GB", "GiB") and one.measure in ("allocated", "active", "reserved"), one.name
        assert one.card and one.differs and one.bytes > 10**9, one.name
    assert len({one.name for one in published.ALL}) == len({one.figure for one in published.ALL}) == len(published.ALL)


def test_recorded_comparison_with_published_peaks_has_the_current_overrides_and_published_bytes():
    found = json.loads((RESULTS / "published.json").read_text())["figures"]
    assert {name: tuple(of["overrides"]) for name, of in found.items()} == {o.name: o.overrides for o in published.ALL}
    assert {name: of["published_bytes"] for name, of in found.items()} == {
        o.name: round(o.bytes) for o in published.ALL
    }


def test_recorded_predictions_differ_from_published_peaks_by_5_percent_in_the_median_and_12_at_most():
    found = json.loads((RESULTS / "published.json").read_text())["figures"]
    errors = sorted(abs(published.error(of)) for of in found.values())
    assert statistics.median(errors) <= 0.05 and errors[-1] <= 0.12


@pytest.mark.parametrize(
    "wrong", [(), ("gradient_checkpointing=every_layer",), ("seq_len=900",)], ids=("right", "checkpointed", "shorter")
)
def test_published_peak_is_predicted_within_5_percent_only_with_the_published_settings(wrong):
    """Uses the smallest published model: a GPT-2 of 163M parameters with an untied head, on an A100."""
    (one,) = (one for one in published.ALL if "7. flash" in one.name)
    asked = dataclasses.replace(one, overrides=(*one.overrides, *wrong))
    assert (abs(published.predicted(asked) / one.bytes - 1) <= 0.05) == (not wrong)


# maps words in the name of a published figure to the parameter count that the project or its published config states
COUNTED = {"TinyLlama": 1_100_048_384, "Qwen2.5": 2_022_229_504, "StableCode": 566_369_280, "in the book": 163_009_536}
COUNTED |= {"5 x 2048 packed": 3_212_749_824, "Llama 2 7B": 6_738_415_616, "Llama 2 1B": 1_004_348_928}


@pytest.mark.parametrize("name", COUNTED)
def test_planned_model_has_the_published_parameter_count(name):
    (one,) = (one for one in published.ALL if name in one.name)
    cfg = run_of(one.overrides)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(describe(cfg, plans=True).grown)
    assert sum(p.numel() for p in theirs.parameters()) == COUNTED[name]


def test_streamed_benchmark_counts_two_copies_of_each_block_except_one_within_20_percent(tmp_path):
    """Runs only the row `link` with one micro-batch, which takes seconds. Rows with more micro-batches count bytes in
    the same way."""
    command = [sys.executable, "-m", "benchmarks.streamed", "--row", "link", "1"]
    row = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"ROW_FOLDER": str(tmp_path)}, capture_output=True, timeout=280
    )
    assert row.returncode == 0, row.stderr.decode()
    copied = json.loads(row.stdout.splitlines()[-1])
    up = (2 * copied["blocks"] - 1) / copied["blocks"] * copied["streamed"]
    assert copied["bytes"]["blocks"] == pytest.approx(up, rel=0.2)


# --- quality ----------------------------------------------------------------------------------------------------------


def measured_quality():
    """Returns ({name: increase in bits per byte}, spread of fp32's bits per byte across seeds). The increase of a
    precision is relative to fp32. The increase of an optimizer is relative to AdamW, and both optimizers run with
    bf16-master."""
    rows = {name: figures["new"] for name, figures in stored("quality")["rows"].items()}
    plain = {seed: rows[f"precision=32 seed={seed}"] for seed in SEEDS}
    lost = {
        name: statistics.mean(rows[f"precision={name} seed={seed}"] - plain[seed] for seed in SEEDS)
        for name in PRECISIONS[1:]
    }
    lost |= {name: rows[f"precision={name}"] - plain[0] for name in ("16", "16-true")}
    masters = rows["precision=bf16-master seed=0"]
    lost |= {name: rows[f"optim={name} precision=bf16-master"] - masters for name in OPTIMIZERS}
    return lost, max(plain.values()) - min(plain.values())


def test_planner_tries_only_techniques_whose_measured_loss_differs_less_than_between_seeds():
    lost, spread = measured_quality()
    tried = {
        name
        for group in ("precision", "optim")
        for name, technique in techniques(group).items()
        if technique.tried and name in lost
    }
    assert {"bf16-sr", "bf16-master", "adafactor", "adam8bit"} <= tried
    assert all(lost[name] < spread for name in tried)
    assert all(lost[name] > spread for name in ("bf16-true", "16-true", "adamw4bit"))  # none of these may be tried
    assert not tried & {"bf16-true", "16-true", "adamw4bit"}


def test_quality_on_the_page_of_techniques_equals_the_measured_loss_difference():
    lost, spread = measured_quality()
    page = (ROOT / "docs" / "techniques.md").read_text()
    stated = dict(re.findall(r"\| `(?:precision|optim)=([\w-]+)` \|.*; quality ([+-]?[\d.]+) \|", page))
    assert len(stated) == 7 + 5 and f"differs by {spread:.3f} between seeds" in page
    assert {name: float(figure) for name, figure in stated.items()} == {name: round(lost[name], 3) for name in stated}


def test_quality_in_the_symptom_table_of_the_readme_is_the_measured_difference():
    lost, spread = measured_quality()
    rows = {name: figures["new"] for name, figures in stored("quality")["rows"].items()}
    lost["qlora"] = rows["adapter=qlora precision=bf16"] - rows["precision=32 seed=0"]
    page = (ROOT / "README.md").read_text()
    table = page.partition("| symptom |")[2].partition("\n\n")[0]
    lines = [line.split(" | ") for line in table.splitlines()[2:]]
    stated = [
        (re.findall(r"`(?:optim|precision|adapter)=([\w-]+)`", typed), re.findall(r"[+-]?[\d.]+", quality))
        for _, typed, _, quality in lines
    ]
    figures = [pair for names, numbers in stated if numbers for pair in zip(names, map(float, numbers), strict=True)]
    assert [name for name, _ in figures] == ["adamw8bit", "adafactor", "bf16-master", "qlora", "qlora"]
    assert all(figure == round(lost[name], 3) for name, figure in figures)
    assert f"differ by up to {spread:.3f}" in page
