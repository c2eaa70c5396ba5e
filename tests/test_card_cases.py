"""Tests `python -m benchmarks.card` without a card: how a case ends, stored results, timed blocks, the page, and a
rehearsal of every case on a CPU."""

import inspect
import json
import math
import time
import warnings
from importlib import import_module
from types import SimpleNamespace

import psutil
import pytest
import torch
from benchmarks.card import __main__ as command
from benchmarks.card import beside, blocks, case, cases, idle, kernels, ours, page, prediction, recipes, whole
from benchmarks.card.blocks import Blocks
from benchmarks.card.case import Case, Here

pytestmark = pytest.mark.docs

MADE_UP = {name: Case(name, 5, f"card_cases:{name}") for name in ("well", "fails", "dies", "left_out", "wrong")}


@pytest.fixture
def here(tmp_path):
    return Here("cpu", tmp_path)


# --- one case ---------------------------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "status", "why"),
    [
        ("well", "done", None),
        ("fails", "failed", "ZeroDivisionError: at the second row"),
        ("dies", "failed", "ended by signal 6, Aborted"),
        ("left_out", "left out", "it needs a card of 9 TiB"),
    ],
)
def test_record_of_a_benchmark_case_has_its_rows_its_status_and_the_reason_of_a_failure(name, status, why):
    record = case.run(MADE_UP[name], "cpu", 60)
    assert record["status"] == status and len(record["rows"]) == 1
    assert "why" not in record if why is None else record["why"].splitlines()[-1] == why


@pytest.mark.process
def test_benchmark_case_is_ended_at_its_limit_with_its_child_processes():
    record = case.run(Case("endless", 5, "card_cases:endless"), "cpu", 8)
    assert record["status"] == "ended" and record["why"].endswith("ended after 8 s") and record["seconds"] < 40
    child = record["rows"][0]["found"]["child"]
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_environment_of_a_benchmark_case_drops_user_allocator_settings_and_keeps_one_visible_card(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    found = case._environment(str(tmp_path))
    assert "PYTORCH_ALLOC_CONF" not in found
    assert found["CUDA_VISIBLE_DEVICES"] == "3" and found["HF_HUB_OFFLINE"] == "1"


# --- the list of cases ------------------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Returns a function that takes arguments, runs the command with three made-up cases, and returns the exit code and
    the names of the cases that were begun. The cases start no processes."""
    began, results = [], {}
    monkeypatch.setattr(cases, "CASES", tuple(Case(name, 30, f"made_up:{name}") for name in "abc"))
    monkeypatch.setattr(page, "CASES", cases.CASES)
    monkeypatch.setattr(case, "described", lambda device: machine())
    monkeypatch.setattr(case, "SCRATCH", tmp_path / "scratch")

    def record(one, device, limit):
        began.append((one.name, round(limit)))
        return results.get(one.name, {"status": "done", "rows": [], "seconds": 10.0})

    monkeypatch.setattr(case, "run", record)

    def start(*typed):
        began.clear()
        code = command.main(["--device", "cpu", "--to", str(tmp_path / "card.json"), *typed])
        return code, [name for name, _ in began]

    start.began, start.results, start.file = began, results, tmp_path / "card.json"
    return start


def machine(name="a card"):
    versions = {"torch": "2.11.0"}
    return {"card": name, "card_bytes": 1 << 34, "processor": "a CPU", "cores": 2, "versions": versions}


def test_benchmark_begins_no_case_that_exceeds_the_minutes_left_and_the_next_call_runs_the_rest(
    run, monkeypatch, capsys
):
    clock = iter([0.0, 0.0, 31.0, 35.0])
    monkeypatch.setattr(command.time, "monotonic", lambda: next(clock))
    assert run("--minutes", "1") == (0, ["a"])
    said = capsys.readouterr().out
    assert "b: not begun, it takes about 30 s and 29 s are left." in said
    clock = iter([0.0, 0.0, 0.0])
    assert run("--minutes", "9") == (0, ["b", "c"])
    assert json.loads(run.file.read_text())["cases"].keys() == {"a", "b", "c"}


def test_benchmark_results_are_written_after_each_case(run, monkeypatch):
    def stopped(one, device, limit):
        if one.name == "b":
            raise KeyboardInterrupt
        return {"status": "done", "rows": [], "seconds": 10.0}

    monkeypatch.setattr(case, "run", stopped)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert json.loads(run.file.read_text())["cases"].keys() == {"a"}


def test_time_limit_of_a_benchmark_case_is_a_multiple_of_its_estimate_and_at_most_the_minutes_left(run, monkeypatch):
    monkeypatch.setitem(command.PATIENCE, "cpu", 4)
    run("--minutes", "9", "--only", "a")
    assert run.began == [("a", 120)]
    run("--minutes", "1", "--only", "b")
    assert run.began == [("b", 60)]


def test_benchmark_case_ended_by_the_minutes_runs_again_and_one_ended_by_its_limit_does_not(run):
    run.results["a"] = {"status": "ended", "rows": [], "seconds": 60.0}
    assert run("--minutes", "1", "--only", "a") == (1, ["a"])
    assert run("--minutes", "30")[1] == ["a", "b", "c"]
    assert run("--minutes", "30")[1] == []


def test_cases_named_by_the_only_option_of_the_benchmark_run_again_and_other_results_are_kept(run):
    run()
    assert run("--only", "b,c") == (0, ["b", "c"])
    assert json.loads(run.file.read_text())["cases"].keys() == {"a", "b", "c"}
    assert run("--only", "nothing")[0] == 2


def test_list_of_benchmark_cases_shows_measured_seconds_or_else_estimates(run, capsys):
    run("--only", "a")
    capsys.readouterr()
    run("--list")
    assert capsys.readouterr().out.splitlines() == ["   10 s  a: done", "   30 s  b: -", "   30 s  c: -"]


@pytest.mark.parametrize(
    "record",
    [{"status": "failed", "why": "x\nboom"}, {"status": "done", "rows": [{"run": "r", "right": False}]}],
    ids=["failed", "wrong"],
)
def test_failed_or_wrong_benchmark_case_gives_exit_code_1_and_is_named_on_the_page(run, record):
    run.results["b"] = {"rows": [], "seconds": 1.0} | record
    assert run() == (1, ["a", "b", "c"])
    text = run.file.with_suffix(".md").read_text()
    assert "- **b** failed: boom" in text or "- **r**, lowmem: NOT RIGHT" in text


def test_benchmark_results_of_another_machine_are_moved_to_another_file(run, monkeypatch):
    run()
    monkeypatch.setattr(case, "described", lambda device: machine("another card"))
    assert run("--only", "a") == (0, ["a"])
    (aside,) = run.file.parent.glob("card-*.json")
    assert json.loads(aside.read_text())["machine"]["card"] == "a card"
    assert json.loads(run.file.read_text())["cases"].keys() == {"a"}


def test_benchmark_cases_done_on_another_machine_run_again(run, monkeypatch):
    run()
    monkeypatch.setattr(case, "described", lambda device: machine("another card"))
    assert run() == (0, ["a", "b", "c"])


def test_concurrent_benchmark_call_is_refused(run, capsys):
    with case.alone() as first:
        assert first and run() == (2, [])
    assert "Another python -m benchmarks.card runs here" in capsys.readouterr().err
    assert run()[0] == 0


@pytest.mark.parametrize("minutes", ["0", "-3", "nan"])
def test_benchmark_minutes_that_are_not_positive_are_refused(run, capsys, minutes):
    assert run("--minutes", minutes) == (2, []) and "Type a larger number" in capsys.readouterr().err


def test_benchmark_without_a_card_is_refused_with_exit_code_2(run, monkeypatch, capsys):
    monkeypatch.setattr(case, "described", lambda device: None)
    assert run() == (2, []) and "--device cpu for a rehearsal" in capsys.readouterr().err


@pytest.mark.parametrize("text", ['{"cases": {"a', "[]", '{"stages": {}}', None])
def test_invalid_benchmark_results_file_is_refused_and_kept(run, capsys, text):
    run.file.mkdir() if text is None else run.file.write_text(text)
    for typed in ([], ["--list"], ["--table"]):
        assert run(*typed) == (2, []) and "no file of results of this command" in capsys.readouterr().err
    assert text is None or run.file.read_text() == text


def test_unwritable_benchmark_results_file_is_refused_before_the_first_case(run, capsys, tmp_path):
    (tmp_path / "text").write_text("")
    assert (
        run("--to", str(tmp_path / "text" / "card.json")) == (2, []) and "cannot be written" in capsys.readouterr().err
    )


def test_benchmark_with_a_missing_package_is_refused_and_names_the_package(run, monkeypatch, capsys):
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "hydra" else name)
    assert run() == (2, []) and "Not installed: hydra. Type pip install -e . first." in capsys.readouterr().err


def test_every_benchmark_case_has_a_unique_name_and_an_existing_function():
    for one in cases.CASES:
        module, function = one.run.split(":")
        assert callable(getattr(import_module(module), function))
    assert len({one.name for one in cases.CASES}) == len(cases.CASES)


def test_stored_predictions_of_the_benchmark_have_the_overrides_of_every_recipe():
    known = json.loads(prediction.FILE.read_text())
    predicted = {name: run["lines"] for name, run in known["runs"].items()}
    assert predicted == recipes.RUNS, f"type python -m benchmarks.card --predict {known['card']}"


def test_benchmark_cases_with_deterministic_runs_set_the_cublas_workspace():
    """torch reads the variable only once per process, which may happen in an earlier run without deterministic=true. So
    the environment of the case must set the variable."""
    source = {
        one.name: inspect.getsource(getattr(import_module(m), f))
        for one in cases.CASES
        for m, f in [one.run.split(":")]
    }
    deterministic = {name for name, text in source.items() if "deterministic=true" in text}
    have = {one.name for one in cases.CASES if one.environment.get("CUBLAS_WORKSPACE_CONFIG") == ":4096:8"}
    assert have == deterministic and len(have) == 2


# --- blocks -----------------------------------------------------------------------------------------------------------


class Clock(Here):
    """A machine that records every synchronization with the device."""

    def settle(self):
        waited.append(self)


waited = []


def test_timed_benchmark_block_synchronizes_the_device_only_at_its_ends(tmp_path):
    waited.clear()
    watch = Blocks(Clock("cpu", tmp_path), steps=20)
    for _ in range(watch.all_steps):
        watch.begin()
        watch.add(torch.tensor(1.0))
        watch.add(torch.tensor(2.0))
        watch.end()
    assert len(waited) == 2 and watch.all_steps == 23
    assert watch.as_dict()["steps"] == 20 and watch.losses() == [3.0] * 23


def test_warm_up_steps_of_a_benchmark_block_are_not_timed(here):
    watch = Blocks(here, steps=2, warm_up=1)
    for seconds in (0.3, 0.01, 0.01):
        watch.begin()
        time.sleep(seconds)
        watch.end()
    assert 0.02 <= watch.as_dict()["seconds"] < 0.3


def test_memory_meter_tracks_no_timed_step_of_a_benchmark(here, monkeypatch):
    steps = []
    monkeypatch.setattr(ours.MemoryMeter, "_track", lambda meter: steps.append(meter._step))
    ours.train("GPT-2 124M, bf16", here, Blocks(here, 4, warm_up=1))
    assert steps == [1] and ours.MemoryMeter.first == 3


def test_benchmark_loop_that_makes_too_few_steps_raises_an_error(here):
    watch = Blocks(here, steps=5)
    watch.begin()
    watch.end()
    with pytest.raises(SystemExit, match="made 1 of 8 steps"):
        watch.as_dict()


def test_benchmark_loops_run_forwards_and_backwards_and_a_failure_does_not_stop_other_loops(here):
    order = []

    def loop(name):
        order.append(name)
        if name == "b":
            raise ValueError("boom")
        return {"by": name, "blocks": [{"steps": 2, "seconds": float(len(order))}]}

    rows = dict(blocks.in_turns({name: lambda name=name: loop(name) for name in "abc"}, here))
    assert order == ["a", "b", "c", "c", "b", "a"]
    assert rows["a"]["blocks"] == [{"steps": 2, "seconds": 1.0}, {"steps": 2, "seconds": 6.0}]
    assert blocks.seconds_per_step(rows["a"]) == 7 / 4
    assert rows["b"]["why"] == "ValueError: boom" and blocks.seconds_per_step(rows["b"]) is None


def test_kernel_benchmark_yields_each_row_after_its_last_run_and_before_other_rows_are_complete(here, monkeypatch):
    ran, done = [], []

    def run(here, loop, by):
        ran.append(by)
        return {"blocks": [{"steps": 1, "seconds": 2.0 if by == beside.PLAIN else 1.0}], "losses": [1.0]}

    monkeypatch.setattr(kernels, "_run", run)
    for row in kernels.swapped(here):
        done.append((len(ran), row["by"], row.get("found", {}).get("speed over plain's")))
    liger = "a plain PyTorch loop, Liger's norm, rotary embedding and SwiGLU"
    assert done == [(3, beside.PLAIN, None), (4, liger, 2.0)]


def test_flops_per_token_are_6_per_trained_and_4_per_frozen_weight_plus_attention(here):
    def flops(name, *more):
        row = ours.train(name, here, Blocks(here, 1, warm_up=0), *more)
        return row["flops_per_token"]

    d, layers, width, vocabulary, seq_len = 64, 2, 64, 512, 16
    block = 2 * d * 64 + 2 * d * 32 + 3 * d * 128 + 2 * d  # q and o, k and v, the MLP, two norms
    attention = 12 * layers * width * seq_len
    every = vocabulary * d + layers * block + d
    assert flops("1.24B, bf16") == 6 * every + attention  # with tied weights, the embedding counts as the output layer
    assert flops("8B, resident, 8 x 2048") == 6 * every + attention  # untied: the embedding is not a matmul
    adapters = layers * 8 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
    for kind in ("LoRA", "QLoRA"):
        found = flops(f"8 of 32 layers of 8B, {kind}, streamed, 4 x 1024")
        assert found == 4 * every + 6 * adapters + attention


def test_idle_share_of_a_card_is_the_time_outside_all_kernel_intervals():
    assert idle.idle([(0, 2), (1, 3), (5, 10)]) == pytest.approx(0.2)
    assert idle.idle([(5, 10), (0, 10)]) == 0 and idle.idle([]) is None


class OnCard(Here):
    """A stand-in for a machine with a card."""

    def __init__(self, folder):
        super().__init__("cpu", folder)

    on_card = True

    def settle(self):
        pass


@pytest.fixture
def profiled(tmp_path, monkeypatch):
    """Returns (a `Profiled` watch that behaves as on a card, list of the synchronization debug modes that it sets)."""
    modes = []

    def set_mode(mode):
        modes.append(mode)
        if mode == "warn":
            warnings.warn("Synchronization debug mode does not yet detect all synchronizing operations", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    monkeypatch.setattr(blocks, "_sensors", dict)
    monkeypatch.setattr(idle, "profile", lambda activities: torch.profiler.profile(activities=activities[:1]))
    return idle.Profiled(OnCard(tmp_path)), modes


def test_synchronization_warnings_of_operators_are_counted_in_a_profiled_benchmark(profiled):
    watch, modes = profiled
    for _ in range(watch.all_steps):
        watch.begin()
        warnings.simplefilter("always")
        if modes == ["warn"]:
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        watch.add(torch.ones(2).sum())
        watch.end()
    assert watch.found["waits per step"] == 1 and modes == ["warn", "default"]


def test_profiled_benchmark_closed_early_restores_debug_mode_and_warnings(profiled):
    watch, modes = profiled
    showwarning = warnings.showwarning
    for _ in range(blocks.WARM_UP + idle.STEPS):
        watch.begin()
        watch.end()
    watch.begin()
    watch.close()
    assert modes == ["warn", "default"] and warnings.showwarning is showwarning
    with torch.profiler.profile():  # raises an error if the first profiler is still active
        pass


def test_profiler_annotations_and_cpu_events_are_not_counted_as_work_of_the_card():
    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    kinds = [(cuda, False), (cuda, True), (cpu, False)]
    events = [
        SimpleNamespace(device_type=kind, is_user_annotation=named, time_range=SimpleNamespace(start=i, end=i + 1))
        for i, (kind, named) in enumerate(kinds)
    ]
    assert list(idle.on_card(events)) == [(0, 1)]


# --- random weights ---------------------------------------------------------------------------------------------------


def test_benchmark_weights_drawn_from_a_pool_are_random_and_reproducible(here):
    from lowmem.model import loading

    run = ours.composed("1.24B, bf16", here)

    def drawn():
        with ours.drawn_at_once("cpu"):
            return loading.load(loading.describe(run), torch.float32)

    one, again = drawn(), drawn()
    first, second = (layer.mlp.up_proj.weight for layer in one.model.layers)
    assert first.std().item() == pytest.approx(ours.STD, rel=0.05) and not torch.equal(first, second)
    assert torch.equal(one.model.norm.weight, torch.ones(64))  # weights of norms are ones, as in a real model
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), again.parameters(), strict=True))
    plain = loading.load(loading.describe(run), torch.float32)
    assert not torch.equal(plain.model.layers[0].mlp.up_proj.weight, first)


# --- equal bits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "is_right"), [(([1.0, 2.0], [1.0, 2.0]), True), (([1.0, 2.0], [1.0, 2.1]), False), ((None, None), False)]
)
def test_streamed_benchmark_is_right_only_if_its_losses_equal_the_resident_losses(here, monkeypatch, losses, is_right):
    of_runs = iter(losses)
    monkeypatch.setattr(whole, "hidden", lambda name, here: {"blocks": []})

    def train(name, here, watch, *more):
        assert more == ("deterministic=true",)
        return {"blocks": [], "losses": next(of_runs)}

    monkeypatch.setattr(ours, "train", train)
    *_, last = whole.streamed(here)
    assert last["right"] is is_right and list(last["found"].values()) == [is_right]


def test_repeated_benchmark_run_reports_whether_bits_are_equal_and_the_cost_of_determinism(here, monkeypatch):
    losses = iter([1.0, 1.0, 1.0, 2.0])

    def train(name, here, watch, *more):
        seconds = 3.0 if more else 2.0
        return {"blocks": [{"steps": 1, "seconds": seconds}], "losses": [next(losses)]}

    monkeypatch.setattr(ours, "train", train)
    same, other = (row["found"] for row in whole.twice(here))
    assert same == {"equal bits in a second run": True, "times as long as without": 1.5}
    assert other == {"equal bits in a second run": False}


@pytest.mark.parametrize(("copied", "waited", "share"), [(4.0, 1.0, 0.75), (1.0, 2.0, 0.0), (0.0, 0.0, None)])
def test_share_of_copies_hidden_by_computation_is_1_minus_wait_over_copy_time_and_at_least_0(copied, waited, share):
    assert whole.hidden_share(copied, waited) == share


# --- memory limits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("least", [0.93, 1.0, 1.06])
def test_search_for_the_smallest_memory_limit_ends_less_than_2_percent_above_the_smallest_sufficient_limit(least):
    planned = 1 << 30
    found, tried = whole.smallest(planned, lambda cap: cap >= least * planned, tries=6)
    assert found >= least * planned and found - least * planned < 0.02 * planned and len(tried) == 6
    assert whole.smallest(planned, lambda cap: False)[0] is None


# --- the page ---------------------------------------------------------------------------------------------------------


def test_row_of_the_benchmark_page_has_prediction_and_share_of_peak_flops(monkeypatch):
    expected = {"seconds_per_step": 0.5, "peak_bytes": 2 << 30, "host_bytes": 1 << 30}
    monkeypatch.setattr(prediction, "predicted", lambda run: expected)
    row = {"run": "r", "by": "lowmem", "tokens": 1000, "flops_per_token": 989.4e9 / 4}
    row |= {"blocks": [{"steps": 2, "seconds": 1.0, "mhz": 1755.0, "celsius": 40}]}
    row |= {"peak_bytes": 3 << 30, "reserved_bytes": 4 << 30, "host_bytes": None}
    cells = list(page._cells(row, blocks.peak_flops("NVIDIA H100 80GB HBM3")))
    assert cells[2:5] == ["2,000", "0.500 / 0.500", "50.0%"]
    assert cells[5:] == ["2.00 / 3.00", "4.00", "1.0 / -", "1755, 40"]
    assert list(page._cells(row | {"by": "a plain PyTorch loop"}, None))[3:6] == ["0.500", "-", "3.00"]


def test_benchmark_page_has_predictions_only_for_results_of_a_card_and_names_their_card(run):
    name = "GPT-2 124M, bf16"
    row = {"run": name, "by": "lowmem", "tokens": 8192, "flops_per_token": 1.0}
    row |= {"blocks": [{"steps": 1, "seconds": 1.0}]}
    known = {"machine": machine(), "cases": {"a": {"status": "done", "rows": [row], "seconds": 1.0}}}
    expected = f"{prediction.predicted(name)['seconds_per_step']:.3f} / 1.000"
    assert expected in page.page(known) and "Predictions are for an H100 with 16 host cores" in page.page(known)
    known["machine"]["card"] = None
    assert expected not in page.page(known)


# --- a rehearsal of every case ----------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("one", cases.CASES, ids=lambda one: one.name)
def test_cpu_rehearsal_of_a_benchmark_case_fails_only_for_cuda_or_packages_and_has_no_wrong_row(one, here, monkeypatch):
    monkeypatch.setenv("ROW_FOLDER", str(here.folder))
    monkeypatch.setattr(beside, "steps", lambda here: 2)
    module, function = one.run.split(":")
    rows = list(getattr(import_module(module), function)(here))
    failures = [row["why"] for row in rows if "why" in row]
    assert rows and all("needs CUDA" in why or "No module named" in why for why in failures), failures
    for row in rows:
        assert all(map(math.isfinite, row.get("losses", ()))) and row.get("right", True), row
        fused = row.get("by") == "TRL SFTTrainer"  # TRL sums the loss in another order, in bf16
        assert row.get("found", {}).get("losses apart", 0) < (1e-4 if fused else 1e-6), row["by"]
        if row["run"].endswith("8 x 2048") and "tokens" in row:
            assert row["tokens"] == 8 * 16  # 16: seq_len of a rehearsal
