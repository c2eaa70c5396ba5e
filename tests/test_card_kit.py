"""The kit for a card, where there is none: how cases end, what is kept and resumed, the page; every stage, in small."""

import json
import math
import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest
from benchmarks.card import __main__ as command
from benchmarks.card import (
    auto,
    correctness,
    kit,
    link,
    memory,
    page,
    pages,
    process,
    sanitizer,
    several,
    speed,
    streamed,
    xl,
)
from benchmarks.card.case import SIZES, Case, Here, LeftOut, Stage, text
from benchmarks.card.kit import Kit

from conftest import ROOT
from lowmem.config.settle import run_of
from lowmem.system.errors import Refused
from lowmem.system.units import GIB
from made_up import Allocator

pytestmark = pytest.mark.docs

STAGES = (
    Stage(1, "made up", "card_stages", seconds=60, together=2),
    Stage(2, "made up again", "card_stages", seconds=60, gib=8),
)
CARD = {"name": "NVIDIA Made-Up 3000", "memory_bytes": 12 * GIB, "driver": "1.2.3", "processor": "a CPU", "cores": 2}
CARD |= {"versions": {"torch": "2.11.0"}, "device": "cpu"}


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """(device) -> a kit of made-up stages, on a made-up card, whose page is not the project's."""
    monkeypatch.setattr(kit, "PAGE", tmp_path / "card.md")
    monkeypatch.setattr(process, "SCRATCH", tmp_path / "scratch")
    monkeypatch.setattr(kit, "text", lambda folder: text(folder, files=1, lines=10))
    monkeypatch.setattr(Kit, "_machine", lambda self: CARD)

    def make(device="cpu", stages=STAGES):
        return Kit(device, tmp_path / "card.json", stages)

    return make


def known(tmp_path):
    return json.loads((tmp_path / "card.json").read_text())


def statuses(record):
    return {name: case["status"] for name, case in record["cases"].items()}


ENDS = {"well": "done", "fails": "failed", "endless": "ended", "dies": "failed", "left out": "left out"}
ENDS["wrong"] = "done"


def test_a_case_that_fails_dies_or_does_not_end_is_recorded_and_the_others_run(made_up, tmp_path, capsys):
    assert made_up().run(STAGES[:1]) == 1
    (record,) = known(tmp_path)["stages"].values()
    assert statuses(record) == ENDS and set(record["planned"]) == set(ENDS)
    assert record["cases"]["well"]["result"] == {"device": "cpu", "text": True}
    assert "ZeroDivisionError: at the second step" in record["cases"]["fails"]["why"]
    assert record["cases"]["dies"]["result"]["half"] is True  # what it had kept by then
    assert "ended by signal 6, Aborted" in record["cases"]["dies"]["why"]
    assert "ended after 2 s" in record["cases"]["endless"]["why"]
    time.sleep(0.1)
    assert not any(_runs(record["cases"][name]["result"]["child"]) for name in ("endless", "dies"))
    said = capsys.readouterr().out
    assert "1 made up: 2 done, 2 failed, 1 ended, 1 left out, 1 NOT RIGHT; results of" in said
    assert "  wrong: done in" in said and ", and NOT RIGHT" in said
    assert "  fails: failed in" in said and "ZeroDivisionError: at the second step" in said


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_results_are_written_after_every_case(made_up, monkeypatch):
    written = []
    monkeypatch.setattr(kit, "write", lambda file, found: written.append(len(found["stages"]["1"]["cases"])))
    made_up().run(STAGES[:1])
    assert written == [1, 2, 3, 4, 5, 6, 6]


def test_resume_leaves_out_what_is_there_and_retry_does_again_what_went_wrong(made_up, tmp_path, monkeypatch):
    made_up().run(STAGES[:1])
    ran = []
    right = process.case
    monkeypatch.setattr(process, "case", lambda *arguments: (ran.append(arguments[1]), right(*arguments))[1])
    before = known(tmp_path)
    made_up().run(STAGES[:1], resume=True)
    assert ran == [] and known(tmp_path)["stages"]["1"]["cases"] == before["stages"]["1"]["cases"]
    made_up().run(STAGES[:1], retry=True)
    assert sorted(ran) == ["dies", "endless", "fails"]
    before["stages"]["1"]["cases"].pop("well")  # as if the machine had gone in the middle of it
    before["stages"]["1"]["cases"]["of an older kit"] = {"status": "failed", "why": "", "seconds": 1.0}
    (tmp_path / "card.json").write_text(json.dumps(before))
    ran.clear()
    made_up().run(STAGES[:1], resume=True)
    assert ran == ["well"] and statuses(known(tmp_path)["stages"]["1"]) == ENDS


def test_some_stages_leave_what_is_known_of_the_others(made_up, tmp_path):
    made_up().run(STAGES[1:])
    second = known(tmp_path)["stages"]["2"]
    made_up().run(STAGES[:1])
    assert known(tmp_path)["stages"].keys() == {"1", "2"} and known(tmp_path)["stages"]["2"] == second


def test_a_stage_past_its_limit_begins_nothing_more_and_says_so(made_up, tmp_path, capsys):
    # time to begin what runs at once, and for nothing after it
    short = Stage(1, "made up", "card_stages", seconds=(kit.LEAST + 0.05) / SIZES["cpu"].patience)
    start = time.monotonic()
    assert made_up(stages=[short]).run([short]) == 1
    record = known(tmp_path)["stages"]["1"]
    assert len(record["cases"]) < len(record["planned"]) and time.monotonic() - start < 30
    assert f"{len(record['planned']) - len(record['cases'])} not begun in its" in capsys.readouterr().out


def test_a_case_that_the_end_of_its_stage_cuts_short_is_begun_again(made_up, tmp_path, monkeypatch):
    ended = {"status": "ended", "why": "(it was ended after 1 s)", "seconds": 1.0}
    monkeypatch.setattr(process, "case", lambda *_: dict(ended))
    for seconds, recorded in ((10.0, {"endless"}), (61.0, ENDS.keys())):  # one may take half a second, the others 60
        stage = Stage(1, "made up", "card_stages", seconds=seconds)
        assert made_up(stages=[stage]).run([stage]) == 1
        assert known(tmp_path)["stages"]["1"]["cases"].keys() == recorded


def test_a_card_that_is_too_small_for_a_stage_leaves_it_out(made_up, tmp_path, capsys):
    large = Stage(2, "large", "card_stages", seconds=60, gib=16)
    assert made_up(stages=[large]).run([large]) == 0
    assert known(tmp_path)["stages"]["2"]["left_out"] == "it needs 16 GiB and the card has 12.0"
    assert "2 large: left out, it needs 16 GiB and the card has 12.0" in capsys.readouterr().out


def test_results_of_another_card_are_set_aside(made_up, tmp_path, monkeypatch):
    made_up().run(STAGES[:1])
    monkeypatch.setattr(Kit, "_machine", lambda self: CARD | {"name": "another"})
    made_up().run(STAGES[1:], resume=True)
    assert known(tmp_path)["machine"]["name"] == "another" and known(tmp_path)["stages"].keys() == {"2"}
    (aside,) = tmp_path.glob("card-*.json")
    assert json.loads(aside.read_text())["machine"] == CARD


def test_a_file_of_results_that_is_cut_short_is_set_aside_too(made_up, tmp_path):
    (tmp_path / "card.json").write_text('{"machine": {"na')
    made_up().run(STAGES[:1], resume=True)
    assert statuses(known(tmp_path)["stages"]["1"]) == ENDS and len(list(tmp_path.glob("card-*.json"))) == 1


@pytest.mark.parametrize("content", ["[]", '{"machine": {"name": "NVIDIA Made-Up 3000"}, "stages": {}}'])
def test_a_file_of_another_format_is_set_aside(made_up, tmp_path, content):
    (tmp_path / "card.json").write_text(content)
    made_up().run(STAGES[:1], resume=True)
    (aside,) = tmp_path.glob("card-*.json")
    assert aside.read_text() == content and known(tmp_path)["format"] == kit.FORMAT


def test_a_wrong_result_is_an_exit_code(made_up, monkeypatch):
    only = {"right": True}
    monkeypatch.setattr(process, "case", lambda *_: {"status": "done", "result": dict(only), "seconds": 0.1})
    assert made_up().run(STAGES[:1]) == 0
    only["right"] = False
    assert made_up().run(STAGES[:1]) == 1


def test_two_kits_do_not_measure_each_other(made_up, tmp_path):
    with kit._alone(), pytest.raises(Refused, match="is at work here"):
        made_up().run(STAGES[:1])
    assert not (tmp_path / "card.json").exists()
    left = process.SCRATCH / f"{process.PREFIX}killed"
    left.mkdir()
    with kit._alone():
        assert not left.exists() and process.SCRATCH.exists()


@pytest.mark.parametrize("place", ["a file/card.json", "a folder", "/proc/nowhere/card.json"])
def test_a_place_that_cannot_be_written_is_a_sentence_before_anything_runs(tmp_path, monkeypatch, capsys, place):
    (tmp_path / "a file").touch()
    (tmp_path / "a folder").mkdir()
    monkeypatch.setattr(Kit, "_machine", None)
    assert command.main(["--to", str(tmp_path / place)]) == 2
    assert "cannot be written there" in capsys.readouterr().err


def test_a_case_that_begins_when_the_kit_is_stopped_ends_at_once(made_up, tmp_path):
    made_up()
    process.end_all()
    start = time.monotonic()
    record = process.ended(["-c", "import time; time.sleep(600)"], seconds=600)
    process.stopped.clear()
    assert record["status"] == "ended" and time.monotonic() - start < 10


def test_what_is_set_where_the_kit_is_typed_does_not_change_what_it_measures(monkeypatch, tmp_path):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("TORCH_CUDA_SANITIZER", "1")
    for visible, first in (("2,3", "2"), ("", ""), (None, "0")):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found = process._environment(tmp_path, threads=3)
        assert found["CUDA_VISIBLE_DEVICES"] == first and found["OMP_NUM_THREADS"] == "3"
        assert not found.keys() & set(process.NOT_OURS)


def test_as_many_cases_at_once_as_cores_and_the_card_have_room_for(monkeypatch):
    free = [64 * GIB]
    monkeypatch.setattr("lowmem.system.process.available_bytes", lambda: free[0])
    monkeypatch.setattr(kit.processors, "usable", lambda: 16)
    monkeypatch.setattr(kit.os, "cpu_count", lambda: 16)
    stage = Stage(3, "", "", 60, together=6, gib=8)
    assert kit._at_once(stage, 80 * GIB) == (6, 2) and kit._at_once(stage, 24 * GIB) == (3, 5)
    assert kit._at_once(stage, 12 * GIB) == (1, None) and kit._at_once(stage, None) == (6, 2)
    assert kit._at_once(Stage(4, "", "", 60), 80 * GIB) == (1, None)
    free[0] = 14 * GIB
    assert kit._at_once(stage, 80 * GIB) == (3, 5)
    monkeypatch.setattr(kit.os, "cpu_count", lambda: 128)  # of which the container has 16
    assert kit._at_once(Stage(4, "", "", 60), 80 * GIB) == (1, 16)


@pytest.mark.parametrize("sign", ["SIGTERM", "SIGINT"])
def test_no_case_outlives_a_kit_that_is_ended(tmp_path, sign):
    code = f"""
import signal, sys
from pathlib import Path
from benchmarks.card import kit, process
from benchmarks.card.case import Stage, text
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
process.SCRATCH, kit.LEAST = Path({str(tmp_path)!r}), 0
kit.Kit._machine = lambda self: {CARD!r}
stage = Stage(1, "made up", "card_stages", seconds=60)
kit.SIZES["cpu"] = kit.SIZES["cuda"]  # whose limits are as long as they say
import card_stages
kit.Kit("cpu", Path({str(tmp_path / "card.json")!r}), [stage]).run([stage])
"""
    paths = os.pathsep.join(str(ROOT / part) for part in ("", "src", "tests/support", "tests"))
    running = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONPATH": paths})
    while len(children := psutil.Process(running.pid).children(recursive=True)) < 2:  # a case, and what it started
        time.sleep(0.02)
    running.send_signal(getattr(signal, sign))
    assert running.wait(30) not in (0, 1)
    time.sleep(0.2)
    assert not any(_runs(child.pid) for child in children)


def test_the_page_is_written_where_there_is_a_card_and_only_there(made_up, tmp_path):
    made_up().run(STAGES[:1])
    assert not (tmp_path / "card.md").exists()
    made_up("cuda").run(STAGES[:1])
    written = (tmp_path / "card.md").read_text()
    assert "NVIDIA Made-Up 3000, 12.0 GiB, driver 1.2.3" in written and "torch 2.11.0" in written
    assert "## 1. made up" in written and "| well | {'device': 'cuda', 'text': True} |" in written
    assert "- **fails** failed: ZeroDivisionError: at the second step" in written


def test_the_page_can_be_made_again_from_the_file_alone(made_up, tmp_path, capsys, monkeypatch):
    made_up().run(STAGES[:1])
    monkeypatch.setattr(process, "case", None)  # nothing is run
    made_up().table()
    assert "| well |" in capsys.readouterr().out and not (tmp_path / "card.md").exists()
    of_card = known(tmp_path)
    of_card["machine"]["device"] = "cuda"
    (tmp_path / "card.json").write_text(json.dumps(of_card))
    made_up().table()
    assert "| well |" in (tmp_path / "card.md").read_text()


@pytest.mark.parametrize("content", [None, "{", "[]", '{"stages": {}}', '{"format": 2, "machine": []}'])
def test_a_page_of_no_results_is_a_sentence_and_exit_code_2(tmp_path, capsys, content):
    file = tmp_path / "card.json"
    if content is not None:
        file.write_text(content)
    assert command.main(["--table", "--to", str(file)]) == 2
    assert "no results of this command can be read there" in capsys.readouterr().err


def test_a_result_that_a_stage_does_not_expect_costs_no_other(tmp_path):
    stages = [Stage(1, "memory", "benchmarks.card.memory", 60), STAGES[1]]
    done = {"status": "done", "seconds": 1.0}
    found = {
        "machine": CARD,
        "stages": {
            "1": {"cases": {"x": done | {"result": {"phases": None}}}, "planned": ["x"]},
            "2": {"cases": {"well": done | {"result": {}}}, "planned": ["well"]},
        },
    }
    written = page.page(found, stages)
    assert "its results cannot be told (" in written and "results of well" in written


# --- as typed ---------------------------------------------------------------------------------------------------------


def test_without_a_card_it_is_a_sentence_and_exit_code_2(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert command.main(["--to", str(tmp_path / "card.json")]) == 2
    said = capsys.readouterr().err
    assert "There is no CUDA device to run on: torch" in said and "type --device cpu for a rehearsal" in said
    assert not (tmp_path / "card.json").exists()


@pytest.mark.parametrize("typed", ["10", "0", "x", "1,10", "", "²", "1 2", "-1", "01"])
def test_a_stage_that_there_is_not_is_a_sentence(typed, capsys):
    assert command.main([f"--stages={typed}"]) == 2
    assert "there is no stage" in capsys.readouterr().err


def test_a_stage_that_is_typed_twice_runs_once(monkeypatch):
    asked = []
    monkeypatch.setattr(Kit, "run", lambda self, wanted, *_: asked.extend(stage.number for stage in wanted) or 0)
    assert command.main(["--stages", "3, 1,3"]) == 0 and asked == [3, 1]


def test_ctrl_c_is_told_in_a_sentence(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Kit, "run", interrupted)
    assert command.main(["--device", "cpu"]) == 130
    assert "--resume runs the rest" in capsys.readouterr().err


def test_versions_that_are_too_old_are_named(monkeypatch, capsys):
    monkeypatch.setattr(
        command, "version", lambda name: {"torch": "2.9.1+cu130", "lightning": "2.6.10"}.get(name, "99")
    )
    assert command.main([]) == 2
    said = capsys.readouterr().err
    assert "torch 2.9.1+cu130 is installed, and 2.11 or newer is needed" in said and "lightning" not in said


def test_what_is_not_installed_is_named(monkeypatch, capsys):
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "hydra" else True)
    assert command.main([]) == 2
    assert "hydra: not installed" in capsys.readouterr().err


def test_no_stage_needs_pytest():
    code = "import sys; sys.modules['pytest'] = None; import made_up, oracle, parity, same, tolerances, two_models"
    paths = os.pathsep.join(str(ROOT / part) for part in ("src", "tests/support", "tests"))
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": paths}, check=True, timeout=240)


# --- the stages -------------------------------------------------------------------------------------------------------

REAL = {module.STAGE.number: module for module in (link, correctness, memory, speed, xl)}


@pytest.fixture
def here(tmp_path):
    return Here("cpu", SIZES["cpu"], tmp_path, text(tmp_path / "text", files=3, lines=200))


def test_every_stage_has_its_time_and_no_case_more_than_it():
    for module in (*REAL.values(), auto, streamed, several, sanitizer):
        assert module.STAGE.seconds < 8 * 60 and module.STAGE.module == module.__name__
        for size in SIZES.values():
            assert all(isinstance(c, Case) and c.seconds <= module.STAGE.seconds for c in module.cases(size).values())
    assert len(memory.recipes()) >= 12


def test_one_recipe_has_no_kernel_but_the_one_that_holds_attentions_scores():
    """Grouped heads in fp32, no block computed again, sequences at which the scores are a large part."""
    cfg = run_of(memory.recipes()["llama: precision=32, 2 x 1024"])
    heads = cfg.model.architecture
    assert cfg.weights_dtype == "float32" and cfg.multiplies_in == "float32" and cfg.seq_len == 1024
    assert heads["num_key_value_heads"] < heads["num_attention_heads"]
    assert not cfg.technique("gradient_checkpointing").saves


def test_all_three_sizes_are_compared_and_what_could_not_be_measured_is_left_out():
    one = {"predicted": {"device_peak": 99, "reserved_peak": 110, "smallest_cap": 102}, "phases": {}}
    said = memory.says({"a": one | {"allocated": 100, "reserved": 100, "smallest_cap": 100}})
    assert "live predicted -1.0% to -1.0%" in said and "reserved predicted +10.0%" in said
    assert "smallest cap predicted +2.0% to +2.0% of measured" in said
    assert "smallest" not in memory.says({"a": one | {"allocated": 100, "reserved": 100, "smallest_cap": None}})


def test_the_link_and_the_products_are_measured(here):
    found = {
        name: link.cases(here.size)[name].run(here)
        for name in ("card", "link", "products", "gradients over the link", "weights over the link")
    }
    assert found["link"]["bytes_per_second"].keys() >= {"pinned up", "pinned down", "pageable up", "pageable down"}
    over = {f"weights up, {way}" for way in ("registered", "unregistered", "staged")}
    assert found["weights over the link"]["bytes_per_second"].keys() == over | {"memory registered"}
    assert found["products"]["operations_per_second"].keys() == {"fp32", "TF32", "bf16", "fp16"}
    assert all(
        rate > 0
        for one in found.values()
        for group in one.values()
        if isinstance(group, dict)
        for rate in group.values()
        if not isinstance(rate, str)
    )
    assert "pinned up" in link.says(found) and "| products in TF32 |" in link.table(found)


def test_on_a_card_each_way_over_the_link_is_also_measured_against_the_other(tmp_path, monkeypatch):
    """With made-up streams: the measured copy is on the present one, and more go the other way on another."""
    import torch

    copied, zeros, other = [], torch.zeros, [False]

    @contextmanager
    def stream(_):
        other[0] = True
        yield
        other[0] = False

    class Memory(torch.Tensor):
        def copy_(self, source, non_blocking=False):
            copied.append(("up" if self.place else "down", other[0]))

    def made(size, dtype, device=None, pin_memory=False):
        memory = Memory(zeros(size, dtype=dtype))
        memory.place = device
        return memory

    monkeypatch.setattr(torch, "zeros", made)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    calls = []
    monkeypatch.setattr(link, "seconds", lambda call, here: (copied.clear(), call(), calls.append([*copied]), 2.0)[-1])
    rates = link.link(Here("cuda", SIZES["cpu"], tmp_path, tmp_path))["bytes_per_second"]
    against = {name: rate for name, rate in rates.items() if "against the other way" in name}
    assert against == dict.fromkeys(against, SIZES["cpu"].moved / 2.0) and len(against) == 2
    for way, back in (("up", "down"), ("down", "up")):
        assert [*[(back, True)] * link.OTHER_WAY, (way, False)] in calls
    said = link.says({"link": {"bytes_per_second": {"pinned up": 25e9, "pinned up, against the other way": 12e9}}})
    assert said == "pinned up 25.0 GB/s, pinned up, against the other way 12.0 GB/s"


def test_a_technique_is_compared_with_the_oracle_and_a_wrong_one_is_not_right(here, monkeypatch):
    from test_parity import last_micro_batch_dropped

    case = correctness.oracle(here, "accumulation=fixed")
    assert case["right"] and correctness.says({"x": case}) == "1 of 1 right"
    last_micro_batch_dropped(monkeypatch)
    wrong = correctness.oracle(here, "accumulation=fixed")
    assert not wrong["right"] and correctness.says({"x": case, "y": wrong}) == "1 of 2 right; not y"
    assert "| y |" in correctness.table({"x": case, "y": wrong}) and "| NO |" in correctness.table({"y": wrong})


@pytest.mark.parametrize("recipe", correctness.MIXED)
def test_every_mixed_recipe_is_the_oracle(here, recipe):
    found = correctness.oracle(here, recipe)
    assert found["right"], found


def test_a_library_that_is_not_installed_leaves_its_cases_out(here, monkeypatch):
    from benchmarks.card import case

    monkeypatch.setattr(case, "find_spec", lambda name: None)
    with pytest.raises(case.LeftOut, match="bitsandbytes is not installed"):
        here.config("optim=adam8bit")


def test_masters_whose_bits_differ_are_found_out(here, monkeypatch):
    """The deliberately wrong variant: a naive loop that rounds otherwise."""
    import two_models

    monkeypatch.setattr(correctness, "deterministic", lambda: None)  # of the process, which is the other tests', too
    assert correctness.masters(here, "bf16-master norm")["right"]
    naive = two_models.naive
    monkeypatch.setattr(two_models, "naive", lambda cfg: ([w + 1e-7 for w in naive(cfg)[0]], *naive(cfg)[1:]))
    found = correctness.masters(here, "bf16-master norm")
    assert not found["right"] and not found["same bits"]["as the naive loop"]


@pytest.mark.parametrize(("off", "right"), [(1e-2, True), (1e-5, False), (1e-1, False)])
def test_tf32_that_is_as_near_as_fp32_is_not_tf32(tmp_path, monkeypatch, off, right):
    import parity

    on_card = Here("cuda", SIZES["cuda"], tmp_path, tmp_path)
    monkeypatch.setattr(parity, "deviations", lambda *_: (off, off, off / 100))
    assert correctness.oracle(on_card, "precision=tf32")["right"] == right


@pytest.mark.parametrize(
    ("fp32", "tf32", "has_tf32", "right"),
    [(2e-7, 3e-4, True, True), (2e-7, 2e-7, False, True), (3e-4, 3e-4, True, False), (2e-7, 2e-7, True, False)],
)
def test_fp32_that_is_tf32_and_tf32_that_is_fp32_are_found_out(fp32, tf32, has_tf32, right):
    assert link.right({"fp32": fp32, "TF32": tf32, "bf16": 2e-3, "fp16": 2e-4}, has_tf32) == right


@pytest.mark.parametrize("lost", [False, True])
def test_state_that_is_restored_goes_on_to_the_same_bits(here, monkeypatch, lost):
    """Lost: the wrong variant, whose second half begins without state."""
    from lowmem.techniques.optim import build

    if lost:
        monkeypatch.setattr(build, "_restore_paged", lambda optimizer: setattr(optimizer, "load_state_dict", id))
    found = pages.crowded(here)
    assert found["right"] != lost and found["same bits"] != lost, found
    assert "same bits: " + ("NO" if lost else "yes") in pages.says(found)


def test_a_card_is_crowded_only_where_that_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.delenv(pages.ASKED, raising=False)
    with pytest.raises(LeftOut, match=f"may hang: {pages.ASKED}=1"):
        pages.crowded(Here("cuda", SIZES["cuda"], tmp_path, tmp_path))


def test_on_a_card_state_must_be_paged_and_the_unpaged_must_not_fit():
    every = ("same bits", "same state", "unpaged runs out of memory", "paged", "paged when restored")
    assert pages.right(dict.fromkeys(every, True), on_card=True)
    assert not any(pages.right(dict.fromkeys(every, True) | {one: False}, on_card=True) for one in every)


@pytest.mark.parametrize("planned", [975, 1100, 1200])
@pytest.mark.parametrize("least", [971, 1000, 1180, 1200])
def test_the_smallest_cap_is_found_by_bisection_and_was_seen_to_work(least, planned):
    found, tried = memory.smallest_that_works(970, planned, 1200, lambda cap: cap >= least, tries=6)
    assert tried[found] and least <= found <= least + 230 / 2**6 + 1
    assert next(iter(tried)) == planned and len(tried) <= 8
    assert all(works == (cap >= least) for cap, works in tried.items())


def test_a_cap_that_should_work_and_does_not_is_no_result():
    found = memory.smallest_that_works(970, 1000, 1200, lambda cap: False, tries=6)
    assert found == (None, {1000: False, 1200: False})


@pytest.mark.parametrize(
    ("tried", "right"),
    [({1000: True, 990: False}, True), ({1000: False, 1200: True}, False), ({1000: False, 1200: False}, False)],
)
def test_a_plan_that_says_too_little_is_found_out(tried, right):
    cap = min((cap for cap, works in tried.items() if works), default=None)
    assert memory.planned_enough({"smallest_cap": cap, "tried": tried, "predicted": {"smallest_cap": 1000}}) == right


def test_a_snapshot_is_read_as_torch_writes_it(tmp_path):
    def file(*events):
        (tmp_path / "snapshot").write_bytes(pickle.dumps({"segments": [], "device_traces": [[], list(events)]}))
        return tmp_path / "snapshot"

    asked = {"action": "alloc", "frames": [{"filename": "/home/src/lowmem/fit.py", "name": "fit", "line": 1}]}
    assert memory.actions(tmp_path / "none") == set()
    assert memory.actions(file(asked, {"action": "oom"})) == {"alloc", "oom"}
    assert memory.asked_by(file(asked), "lowmem") and not memory.asked_by(file({"action": "alloc"}), "lowmem")


def test_out_of_memory_leaves_advice(here, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("ROW_FOLDER", "what the case sets is taken back")
    found = memory.out_of_memory(here)
    assert found["right"] and "Out of memory" in found["said"], found


def test_what_waits_is_what_is_longer_than_the_passes_alone():
    alone, of = {"seconds_per_step": 2.0}, {"seconds_per_step": 2.5, "host_seconds": 1.0}
    assert speed.waits(of, alone) == (0.2, 0.5)  # of one second on the host half is hidden
    assert speed.waits({"seconds_per_step": 1.9, "host_seconds": 1.0}, alone) == (0.0, 1.0)


def test_runs_of_masters_are_told_beside_the_passes_alone():
    alone = {"seconds_per_step": 2.0, "host_seconds": 0.0, "tokens_per_second": 8.0, "device_peak": GIB}
    early, late = (alone | {"seconds_per_step": s, "host_seconds": 1.0} for s in (2.0, 2.5))
    runs = dict(zip(speed.MASTERS, (alone, early, late), strict=True))
    assert "masters: 0%, 20% of the step waits" in speed.says({"masters": {"runs": runs}})
    assert "| masters that step after clipping | 2.5000 | 20% | 50% |" in speed.table({"masters": {"runs": runs}})
    away = {speed.KEPT: alone, speed.AWAY: late}
    assert "boundaries that travel: 1.25 of the time" in speed.says({"boundaries": {"runs": away}})


def test_a_card_without_room_for_four_loops_leaves_them_out(tmp_path, monkeypatch):
    monkeypatch.setattr(Here, "memory", 12 * GIB)
    with pytest.raises(LeftOut, match=r"the four loops together need 48 GiB and the card has 12\.0"):
        speed.loops(Here("cuda", SIZES["cuda"], tmp_path, tmp_path), ("bf16", "124M"), 48)


def test_a_loop_that_failed_is_told_in_the_table_and_the_others_are_compared():
    ran = {"seconds": [1.0, 1.0, 1.0, 1.0, 2.0], "tokens_per_second": 4.0, "losses": [1.0], "peak_bytes": GIB}
    slow = ran | {"seconds": [1.0, 1.0, 1.0, 2.0, 4.0]}
    one = {"loops": {"lowmem": [ran], "plain": [slow], "lightning": [{"why": "a\nno such thing"}], "trainer": []}}
    assert speed.ratio_to("plain", one) == 2.0 and speed.ratio_to("lightning", one) is None
    table = speed.table({"four loops, x": one})
    assert "lightning or lowmem failed" in speed.says({"four loops, x": one})
    assert "| lightning | no such thing | - | - | - |" in table and "| plain | 4 | 2.000 | 1.000 | - |" in table


def test_a_run_of_the_preset_that_its_time_ends_tells_what_it_had_measured(here, monkeypatch, tmp_path):
    """The process of a training that writes its files and then does not end."""
    from benchmarks import gpt2_xl

    endless = """
import sys, time, pathlib
run = pathlib.Path(sys.argv[-1].split("=", 1)[1])
run.mkdir(parents=True)
(run / "memory.csv").write_text("step,phase,allocated_peak_bytes,reserved_peak_bytes\\n1,forward,7,9\\n2,fo")
(run / "metrics.csv").write_text("step,tokens,seconds,train_loss\\n1,10,1.0,5.0\\n2,20,3.0,4.0\\n3,30,5.0,3.0\\n4,4")
time.sleep(600)
"""
    (tmp_path / "train.py").write_text(endless)
    monkeypatch.setattr(gpt2_xl, "ROOT", tmp_path)
    monkeypatch.setenv("ROW_FOLDER", str(tmp_path))
    found = gpt2_xl.capped("12GiB", ["device=cpu"], steps=30, seconds=1.5)
    assert found["ended_early"] and found["steps"] == 3 and found["losses"] == [5.0, 4.0, 3.0]
    assert found["seconds_per_step"] == 2.0 and found["tokens_per_second"] == 5.0
    assert found["allocated_peak"] == 7 and found["reserved_peak"] == 9
    assert "3 (ended by its time)" in xl.table({"x": found}) and "loss 5.00 to 3.00" in xl.says({"x": found})


@pytest.mark.parametrize(
    ("losses", "reserved", "right"),
    [
        ([5.0, 4.0], 8, True),
        ([5.0, 5.1], 8, True),  # too few to tell
        ([5.0] * 19 + [4.0], 8, True),
        ([5.0] * 19 + [5.1], 8, False),
        ([5.0, float("nan")], 8, False),
        ([5.0, 4.0], 9, False),
    ],
)
def test_the_preset_is_right_where_it_learns_within_its_cap(losses, reserved, right):
    assert xl.right({"losses": losses, "reserved_peak": reserved, "allocated_peak": 1}, cap=8) == right


def test_the_preset_that_takes_no_step_in_its_time_has_failed(here, monkeypatch):
    monkeypatch.setattr(xl, "capped", lambda *_: {"losses": [], "last_words": "loading"})
    with pytest.raises(SystemExit, match="loading\nNot one step was done within 4 s"):
        xl.preset(here, "12GiB", share=1, seconds=1)


PLANNED = {"device_peak_bytes": GIB, "reserved_peak_bytes": 2 * GIB}


def test_weights_stream_over_a_lane_that_looks_at_the_clock(here, monkeypatch):
    from lowmem.plan import at_start

    planned = SimpleNamespace(based_on=lambda rss: SimpleNamespace(as_dict=lambda: PLANNED))
    monkeypatch.setattr(at_start, "checked", lambda *_: planned)
    Allocator().install(monkeypatch)
    run = streamed.run(here, "streamed", [*streamed.XL, *here.size.small])
    assert run["copied_seconds"] > 0 and run["waited_seconds"] > 0 and run["tokens_per_second"] > 0
    told = {"a": {"runs": {"streamed": run, "resident": run | {"copied_seconds": 0}}, "asked": 1.1}}
    told["large"] = {"runs": {"streamed": run, "resident": {"why": "no | room"}}, "asked": 2.8}
    assert "a: " in streamed.says(told) and streamed.says(told).count("1.00 of the speed of resident weights") == 1
    lines = streamed.table(told).splitlines()
    assert "| a | streamed | 1.000 / " in lines[2] and "| <= 1.1 | 2.000 / " in lines[2] and lines[2].endswith("% |")
    assert lines[3].endswith("| - |") and "| large | resident | no   room | - |" in lines[5]


def test_streamed_and_resident_weights_are_predicted_and_train_the_same(here):
    runs = streamed.row(here, "GPT-2 XL, 4 x 1024")["runs"]
    assert runs["streamed"]["train_loss"] == runs["resident"]["train_loss"]
    assert runs["streamed"]["copied_seconds"] > 0 == runs["resident"]["copied_seconds"]
    assert all(run["predicted"]["device_peak"] > 0 for run in runs.values())


@pytest.mark.parametrize(
    ("loss", "other", "allocated", "is_right"),
    [(3.0, 3.01, 1.0, True), (3.0, 3.2, 1.0, False), (math.nan, math.nan, 1.0, False), (3.0, 3.0, 1.2, False)],
)
def test_streamed_weights_are_right_where_they_train_the_same_in_what_is_asked(loss, other, allocated, is_right):
    runs = {"streamed": {"train_loss": loss, "allocated": allocated * GIB}, "resident": {"train_loss": other}}
    assert streamed.right(runs, asked=1.1) == is_right
    assert not streamed.right(runs | {"resident": {"why": "no room"}}, asked=0.9)


@pytest.mark.parametrize(("copied", "waited", "share"), [(2.0, 0.5, 0.75), (2.0, 3.0, 0.0), (0.0, 0.0, None)])
def test_a_copy_is_hidden_that_the_device_did_not_stand_still_for(copied, waited, share):
    assert streamed.hidden({"copied_seconds": copied, "waited_seconds": waited}) == share


def test_streamed_weights_have_no_race_that_the_sanitizer_sees(here):
    found = sanitizer.cases(here.size)[sanitizer.RIGHT].run(here)
    assert found["right"] and not found["races"], found["races"]
    assert found["copies"]["seen"] > 100 and "no race in" in sanitizer.says({sanitizer.RIGHT: found})


def test_a_race_is_reported_as_a_failure_with_both_accesses(here, monkeypatch):
    import races

    races.copy_before_the_gradient_is_complete(monkeypatch)
    found = sanitizer.cases(here.size)[sanitizer.RIGHT].run(here)
    assert found["right"] is False and page.is_wrong({"result": found})
    report = sanitizer.table({sanitizer.RIGHT: found})
    assert "CSAN detected a possible data race" in report and "Previous access by stream device" in report
    assert "boundary.py" in report and "/lib/python" not in report
    assert sanitizer.says({sanitizer.RIGHT: found}).startswith("streamed weights: 1 race in")


def test_a_wait_that_the_stage_leaves_out_must_be_found(here, monkeypatch):
    """A sanitizer that finds nothing there is not right."""
    case = sanitizer.cases(here.size)[sanitizer.WRONG]
    found = case.run(here)
    assert found["right"] and found["races"], found
    monkeypatch.setattr(sanitizer.Seen, "launch", lambda self, checked: lambda *_: self.operators.update("ab") or [])
    assert case.run(here)["right"] is False


@pytest.mark.parametrize(
    ("races", "copies", "streams", "on_purpose", "is_right"),
    [
        (0, 9, 3, False, True),
        (1, 9, 3, False, False),
        (0, 0, 3, False, False),
        (0, 9, 1, False, False),
        (1, 9, 3, True, True),
        (0, 9, 3, True, False),
    ],
)
def test_no_race_says_something_only_where_copies_were_seen(races, copies, streams, on_purpose, is_right):
    found = {"races": ["a race"] * races, "copies": {"seen": copies, "not seen": 5}}
    assert sanitizer.right(found | {"operators": dict.fromkeys("abc"[:streams], 7)}, on_purpose) == is_right


def test_torchs_own_sanitizer_is_read_where_it_is_on_and_a_run_without_it_fails(monkeypatch):
    """On made-up accesses: it watches tensors on CUDA alone."""
    from torch.cuda._sanitizer import CUDASanitizerErrors, cuda_sanitizer

    for size in SIZES.values():
        environments = [case.environment for case in sanitizer.cases(size).values()]
        assert environments == [{"TORCH_CUDA_SANITIZER": "1"} if size.whole else {}] * 2
    with pytest.raises(SystemExit, match="torch was imported without TORCH_CUDA_SANITIZER=1"), sanitizer._by_torch():
        pass
    monkeypatch.setattr(cuda_sanitizer, "enabled", True)
    handler = cuda_sanitizer.dispatch.event_handler
    with sanitizer._by_torch() as (seen, _):
        for stream in (1, 2):
            errors = handler._handle_kernel_launch(stream, set(), {7}, set(), "aten::copy_", {7: ["self"]})
    assert len(errors) == len(seen.races) == 1 and "writing to argument(s) self" in seen.races[0]
    assert seen.operators == {"1": 1, "2": 1} and issubclass(CUDASanitizerErrors, Exception)
    handler._handle_kernel_launch(3, set(), {7}, set(), "aten::copy_", {7: ["self"]})
    assert len(seen.races) == 1  # it is no longer read
    handler.tensors_accessed.delete_tensor(7)
    monkeypatch.setattr(cuda_sanitizer, "enabled", False)


def test_with_one_card_several_are_not_run(here, monkeypatch):
    monkeypatch.setattr(several, "counted", lambda _: 1)
    for one in several.cases(SIZES["cuda"]).values():
        with pytest.raises(LeftOut, match="it needs two cards: not run"):
            one.run(here)
    names = [path.stem for path in (ROOT / "conf" / "strategy").iterdir()]
    assert {*several.STRATEGIES} <= {*names} and {*several.REHEARSED} <= several.cases(SIZES["cuda"]).keys()


@pytest.mark.parametrize("visible", [None, "4,5"])
def test_the_ranks_have_every_card_of_the_kit_and_other_cases_the_first(monkeypatch, tmp_path, visible):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    of_case = process._environment(tmp_path, None)
    assert of_case["CUDA_VISIBLE_DEVICES"] == (visible or "0")[0]
    monkeypatch.setattr(os, "environ", of_case)
    assert several.environment().get("CUDA_VISIBLE_DEVICES") == visible
    assert "OMP_NUM_THREADS" not in several.environment()  # of a case; ranks have each a share


def test_a_run_that_takes_too_long_takes_its_ranks_along(here, monkeypatch):
    """Told twice, as a person would."""
    script = here.folder / "train.py"
    script.write_text(
        "import signal, sys, time\n"
        "told = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: told.append(1) or (len(told) == 2 and sys.exit(7)))\n"
        "print('begun', flush=True)\n"
        "while True: time.sleep(0.05)\n"
    )
    monkeypatch.setattr(several, "ROOT", here.folder)
    assert several.train(here, seconds=2 / here.size.patience) == (7, "begun\n")


def ranks_that_ran(folder, size, pinned, speed, loss=3.0, weights=GIB, predicted=3 * GIB):
    """Writes what a run of stage 8 leaves, with its ranks one GiB apart."""
    ranks = [{"device": (2 + number) * GIB, "host_rss": GIB, "weights": weights} for number in range(size)]
    summary = {"ranks": ranks, "weights_bytes": size * GIB, "tokens_per_second": speed, "train_loss": loss}
    summary |= {"predicted": {"device_peak_bytes": predicted, "reserved_peak_bytes": 5 * GIB}}
    for number in range(size):
        (rank := folder / "run" / (f"rank-{number}" if number else "")).mkdir(parents=True)
        (rank / "memory.csv").write_text(f"step,phase,reserved_peak_bytes\n1,step,{(4 + number) * GIB}\n")
        seen = {"pinned": pinned, "beside": GIB - number}
        (folder / several.SEEN.format(number)).write_text(json.dumps(seen))
    (folder / "run" / "summary.json").write_text(json.dumps(summary))


def test_ranks_are_shown_beside_what_was_predicted_and_beside_one_card(tmp_path, monkeypatch):
    found, monkeys = {}, monkeypatch.setattr
    for name, size, fast in ((several.ONE, 1, 100.0), ("fsdp", 2, 150.0)):
        here = Here("cuda", SIZES["cuda"], tmp_path / name, tmp_path)
        monkeys(several, "train", lambda here, *_, s=size, t=fast: (0, ranks_that_ran(here.folder, s, False, t)))
        found[name] = several.strategy(here, name, size)
    assert found["fsdp"]["right"] and found["fsdp"]["reserved"] == [4 * GIB, 5 * GIB]
    found[several.HANGS] = {"said": "another rank did not answer in time", "seconds": 30.0}
    assert "fsdp: 3.00 GiB, and 1.00 that are not torch's, 2 ranks, 1.50 times one card" in several.says(found)
    assert "a rank that hangs: another rank did not answer in time (30 s)" in several.says(found)
    line = several.table(found).splitlines()[3]
    assert line.startswith("| fsdp | 2 | 3.000 / 3.000 (+0.0%) | 5.000 / 5.000 (+0.0%) | 2.00, 3.00 | 50.0%, 50.0% |")
    assert line.endswith("| 150 | 1.50 |")


@pytest.mark.parametrize(
    ("name", "more", "is_right"),
    [
        ("fsdp_offload", {"pinned": True}, True),
        ("fsdp_offload", {}, False),
        ("fsdp", {"loss": math.nan}, False),
        ("fsdp", {"weights": 2 * GIB}, False),  # each has all of them
        ("ddp", {"weights": 2 * GIB}, True),
        ("fsdp", {"predicted": 2 * GIB}, False),
    ],
)
def test_ranks_are_right_where_they_train_what_is_divided_pinned_and_predicted(tmp_path, name, more, is_right):
    ranks_that_ran(tmp_path, 2, **{"pinned": False, "speed": 1.0} | more)
    assert (
        several.read_results(Here("cuda", SIZES["cuda"], tmp_path, tmp_path), tmp_path / "run", name)["right"]
        == is_right
    )


@pytest.mark.parametrize(
    ("code", "said", "is_right"),
    [
        (3, "Rank 0 of 2: all_reduce: another rank did not answer in time: it hangs", True),
        (3, "Watchdog caught collective operation timeout", False),
        (0, "another rank did not answer within 20 seconds", False),
    ],
)
def test_a_rank_that_hangs_ends_the_run_with_a_sentence(here, monkeypatch, code, said, is_right):
    monkeypatch.setattr(several, "train", lambda *_, **__: (code, f"step 1\n{said}\n"))
    assert several.hang(here, 2)["right"] == is_right


def test_the_whole_kit_runs_on_stand_ins(tmp_path):
    """Every stage as typed, in small: two to four minutes on two idle cores, most of it imports."""
    file = tmp_path / "card.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.card", "--device", "cpu", "--to", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    found = json.loads(file.read_text())
    whys = [case["why"] for stage in found["stages"].values() for case in stage["cases"].values() if "why" in case]
    assert done.returncode == 0 and not whys, whys
    assert list(found["stages"]) == list("123456789")
    assert all(stage["cases"].keys() == set(stage["planned"]) for stage in found["stages"].values())
    assert done.stdout.count("| ") > 50 and "cannot be told" not in done.stdout
    assert not kit.PAGE.exists() or "no card: a rehearsal" not in kit.PAGE.read_text()
