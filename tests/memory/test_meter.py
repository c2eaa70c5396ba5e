"""Tests the memory meter: phases and categories, memory of device and host, bytes on a drive, and the values of CUDA's
allocator."""

import csv
import math
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from lowmem.memory.ledger import Ledger
from lowmem.memory.meter import MemoryMeter, curve
from lowmem.offload.host_optimizer import HostOptimizer
from lowmem.offload.on_device import WeightsOnDevice
from lowmem.step.optimizer import DeviceOptimizer
from lowmem.system import process
from lowmem.system.scratch_file import PAGE, pages
from lowmem.system.units import CATEGORIES
from lowmem.techniques.precision.fp32_weights import FullPrecision
from lowmem.techniques.strategy.contract import OneDevice
from made_up import Allocator

LIVE = [f"{category}_bytes" for category in CATEGORIES]

PHASES = ("load", "forward", "backward", "step", "evaluation", "save")  # of a run that is not resumed


def read(run):
    return list(csv.DictReader((run / "memory.csv").open()))


@pytest.fixture
def rows(fit):
    _, run = fit("max_steps=25", "val_every=10", "save_every=10", "accumulation=fixed", "accumulation.batches=2")
    return read(run)


def test_memory_csv_has_rows_for_every_phase_and_live_bytes_in_sampled_steps_only(rows):
    for step in range(1, 26):
        of_step = {r["phase"]: r for r in rows if int(r["step"]) == step}
        assert {"forward", "backward", "step"} <= set(of_step)
        assert ("evaluation" in of_step) == ("save" in of_step) == (step in (10, 20, 25))
        for phase in ("forward", "backward", "step"):
            assert bool(of_step[phase]["live_peak_bytes"]) == (step <= 3 or step == 20), (step, phase)
    assert {r["phase"] for r in rows} == set(PHASES)
    assert [r["step"] for r in rows if r["phase"] == "load"] == ["0"]


def test_evaluation_before_the_first_step_is_not_counted_as_loading(fit, monkeypatch):
    peaks = iter([(100, 200), (300, 400)])  # before the evaluation, after it
    monkeypatch.setattr(process, "rss_and_peak", lambda: next(peaks, (1, 1)))
    _, run = fit("max_steps=1", "plan=off")
    (load,) = (row for row in read(run) if row["phase"] == "load")
    assert (load["rss_bytes"], load["rss_peak_bytes"]) == ("100", "200")


def test_recorded_memory_categories_sum_to_the_peak_and_equal_the_sizes_of_the_tensors(rows):
    for row in rows:
        if row["live_peak_bytes"]:
            assert sum(int(row[c]) for c in LIVE) == int(row["live_peak_bytes"])
    parameters = 43_264
    held = {r["phase"]: int(r["held_bytes"]) for r in rows if r["step"] == "5"}  # a step that is not sampled
    state = 8 * parameters + 4 * 28  # two moments, and a step count for each of the 28 tensors
    assert held == {
        "forward": 4 * parameters + state + 4 * parameters,  # in the second micro-batch, when gradients exist already
        "backward": 4 * parameters + state + 4 * parameters,
        "step": 4 * parameters + state,
    }
    first = {r["phase"]: r for r in rows if r["step"] == "1"}
    steady = {r["phase"]: r for r in rows if r["step"] == "20"}
    assert int(first["forward"]["optimizer_bytes"]) == 0
    assert int(steady["forward"]["weights_bytes"]) == 4 * parameters
    assert int(steady["forward"]["optimizer_bytes"]) == state
    assert int(steady["step"]["gradients_bytes"]) == 4 * parameters
    assert int(steady["step"]["activations_bytes"]) < 0.05 * int(steady["backward"]["activations_bytes"])
    assert int(steady["evaluation"]["activations_bytes"]) < int(steady["backward"]["activations_bytes"])
    assert int(steady["evaluation"]["gradients_bytes"]) == 0


@pytest.mark.rows("32")
@pytest.mark.parametrize("precision", ["32", "bf16-master"])
def test_recomputation_counts_as_backward_and_the_step_phase_starts_after_it(fit, monkeypatch, precision):
    """With masters, `finish` waits for copies of gradients to the host that backward has started. This wait belongs to
    the step phase."""
    meters, seen, started = [], [], MemoryMeter.on_train_start

    def start(self, *arguments):
        meters.append(self)
        started(self, *arguments)

    def told(owner, name, what):
        original = getattr(owner, name)

        def call(*arguments, **keywords):
            if arguments[0].__class__ is not GPT2Block or arguments[0].training:
                seen.append((what, meters[0]._phase))
            return original(*arguments, **keywords)

        monkeypatch.setattr(owner, name, call)

    monkeypatch.setattr(MemoryMeter, "on_train_start", start)
    told(GPT2Block, "forward", "block")
    for optimizer in (DeviceOptimizer, HostOptimizer):
        told(optimizer, "finish", "finish")
    two = ("accumulation=fixed", "accumulation.batches=2", "gradient_checkpointing=every_layer", "max_steps=1")
    fit(*two, f"precision={precision}")
    micro_batch = [("block", "forward")] * 2 + [("block", "backward")] * 2
    assert seen == [*micro_batch, *micro_batch, ("finish", "step")]


def test_memory_ledger_is_summed_in_sampled_steps_only(fit, monkeypatch):
    """A sampled step sums the ledger 12 times: after forward and after backward of each of the four micro-batches, once
    after the step, and once for each of three rows."""
    counts, sums, bytes_of, began = [], [0], Ledger.bytes, MemoryMeter.on_train_batch_start

    def counted(self, side="device"):
        sums[0] += 1
        return bytes_of(self, side)

    def begin(self, *arguments):
        counts.append(sums[0])
        began(self, *arguments)

    monkeypatch.setattr(Ledger, "bytes", counted)
    monkeypatch.setattr(MemoryMeter, "on_train_batch_start", begin)
    fit("max_steps=7", "batch_size=2", "accumulation=fixed", "accumulation.batches=4")
    windows = [after - before for before, after in pairwise(counts)]
    assert windows == [12, 12, 12, 0, 0, 0]


def test_recorded_rss_exceeds_100_mib_and_its_peak_is_at_least_the_live_memory(rows):
    assert all(int(r["rss_peak_bytes"]) >= int(r["live_peak_bytes"] or 0) for r in rows)
    assert all(int(r["rss_bytes"]) > 100 * 2**20 for r in rows)


def test_step_rows_of_memory_csv_have_the_bytes_stored_read_and_written_on_the_drive(fit, tmp_path):
    """For each matrix of a block, the drive stores the lower half of the master and both moments, except tensors
    smaller than a page."""
    streamed = ("weights=streamed", "precision=bf16-master", "optim=adamw", "gradient_checkpointing=every_layer")
    streamed += ("model.architecture.n_embd=32", "model.architecture.n_layer=6", "max_steps=6")
    _, run = fit(*streamed, f"weights.drive={tmp_path / 'drive'}")
    rows = [row for row in read(run) if row["drive_bytes"]]
    assert [(row["step"], row["phase"]) for row in rows] == [("0", "load"), *((f"{n}", "step") for n in range(1, 7))]
    matrices = (3 * 32 * 32, 32 * 32, 4 * 32 * 32, 4 * 32 * 32)  # the first two share a swap file
    sizes = [size * n for n in matrices for size in (2, 4, 4) if size * n >= PAGE]
    stored, file = 6 * sum(sizes), 6 * (3 * PAGE + sum(map(pages, sizes)))  # the first page of a file is not used
    steady = rows[3:]
    assert {int(row["drive_bytes"]) for row in steady} == {stored}
    assert {int(row["drive_written_bytes"]) for row in steady} == {file}  # bytes of this step, not of the run
    ahead = 2 * file // 6  # files of the next step's first blocks may have been read ahead
    assert abs(sum(int(row["drive_read_bytes"]) for row in steady) - len(steady) * file) <= ahead


def test_recorded_activations_grow_with_the_tokens_and_weights_do_not(fit):
    small, _ = fit("seq_len=8", "batch_size=1")
    large, _ = fit("seq_len=64", "batch_size=8", folder="large")
    ratio = [r["peak_bytes_by_category"]["activations"] for r in (large, small)]
    assert ratio[0] > 20 * ratio[1]
    assert large["peak_bytes_by_category"]["weights"] == small["peak_bytes_by_category"]["weights"]


def test_buffers_replaced_by_a_device_move_are_counted_as_weights(tmp_path):
    """`module.to(device)` keeps the parameter objects and creates new buffers."""
    meter = MemoryMeter(tmp_path / "memory.csv")
    module = torch.nn.BatchNorm1d(1024, affine=False)
    module.device, module.weights, module.ranks = torch.device("cpu"), WeightsOnDevice(), OneDevice()

    module.masters, module.optimizer = None, DeviceOptimizer(torch.optim.SGD([torch.zeros(1)]), module)

    class FakeTrainer:
        global_step, loggers = 0, ()
        precision_plugin = FullPrecision()

    meter.setup(FakeTrainer, module, "fit")
    module.running_mean, module.running_var = torch.zeros(2048), torch.zeros(2048)
    meter.on_train_start(FakeTrainer, module)
    assert meter.ledger.bytes()["weights"] == 2 * 2048 * 4 + 8  # 8 bytes: num_batches_tracked


def test_memory_sampling_changes_no_bit_of_the_weights(fit, monkeypatch):
    _, sampled = fit("max_steps=5")
    monkeypatch.setattr(MemoryMeter, "_track", lambda self: None)
    _, plain = fit("max_steps=5", folder="plain")
    one, other = (
        torch.load(run / "checkpoints" / "step-00000005.ckpt", weights_only=True)["state_dict"]
        for run in (sampled, plain)
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_compiled_blocks_stay_compiled_and_memory_by_category_is_not_measured(fit, caplog):
    from torch._dynamo.utils import counters

    counters.clear()
    with caplog.at_level("INFO", logger="lowmem"):
        summary, run = fit("val_every=2", "compile=blocks", "compile.backend=aot_eager")
    assert counters["stats"]["unique_graphs"], "the meter turned torch.compile off"
    assert "Memory by category is not measured" in caplog.text
    assert not any(r["live_peak_bytes"] for r in read(run) if r["phase"] in ("forward", "backward"))
    assert all(int(r["rss_bytes"]) for r in read(run))
    assert summary["peak_bytes_by_category"]["activations"] == 0  # tensors with an owner still have a category
    assert summary["peak_bytes"]["device"] is None  # and the peak is unknown
    assert summary["peak_bytes_by_category"]["weights"] == 4 * 43_264


def test_function_compiles_while_the_memory_tracker_is_active():
    from lowmem.memory.tracker import StorageTracker

    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    function = torch.compile(lambda x: x * 2 + 1, backend=backend)
    with StorageTracker({}):
        function(torch.ones(3))
    assert compiled


def test_values_of_the_cuda_allocator_are_recorded_per_phase(fit, monkeypatch):
    """A fake allocator stands in for that of a GPU. The meter must reset its peaks for each row, and the summary must
    have the highest of these peaks."""
    allocator = Allocator()
    allocator.install(monkeypatch)
    summary, run = fit()
    rows = [r for r in read(run) if r["phase"] != "load"]
    assert all(int(r["allocated_bytes"]) == 10 and int(r["retries"]) == 3 and int(r["ooms"]) == 1 for r in rows)
    assert all(int(r["reserved_peak_bytes"]) == 2 * int(r["allocated_peak_bytes"]) for r in rows)
    assert allocator.resets >= len(rows)
    assert summary["peak_bytes"]["device"] == max(int(r["allocated_peak_bytes"]) for r in rows)


def test_memory_metrics_have_finite_values_and_units_in_their_names():
    window = {
        "forward": {"rss_bytes": 1, "rss_peak_bytes": 2**30},
        "step": {"rss_peak_bytes": 2**29, "live_peak_bytes": 2**30},
    }
    window["step"] |= dict.fromkeys(LIVE, 2**28)
    metrics = curve(window)
    assert metrics["memory/host_forward_rss_peak_gib"] == 1.0 and metrics["memory/device_step_live_peak_gib"] == 1.0
    assert metrics["memory/device_weights_gib"] == 0.25
    assert all(re.fullmatch(r"memory/(device|host)_\w+_gib", name) for name in metrics)
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.gpu
def test_allocated_memory_on_a_card_is_tracked_memory_plus_less_than_256_mib(fit):
    """Allocated memory also includes the allocator's rounding of sizes, and cuBLAS workspaces of up to 32 MiB for each
    thread that calls cuBLAS."""
    wide = ("model.architecture.n_embd=512", "model.architecture.n_layer=4", "batch_size=64")
    summary, run = fit("device=cuda", *wide)
    rows = [row for row in read(run) if row["live_peak_bytes"] and row["phase"] in ("forward", "backward", "step")]
    for row in rows:
        live, allocated, reserved = (int(row[f"{kind}_peak_bytes"]) for kind in ("live", "allocated", "reserved"))
        assert 0.98 * live < allocated <= reserved and allocated - live < 2**28, row
    assert rows and summary["peak_bytes"]["device"] >= max(int(row["allocated_peak_bytes"]) for row in rows)


def test_memory_csv_is_read_twice_per_run(fit, monkeypatch):
    """After 100,000 steps the file has 50 MB, and its rows take 270 MB as dictionaries."""
    read_back, reader = [], csv.DictReader
    monkeypatch.setattr(csv, "DictReader", lambda file: read_back.append(Path(file.name).name) or reader(file))
    fit("max_steps=2")
    assert read_back.count("memory.csv") == 2  # at the start (for rows before a resume), and for memory.png


def test_memory_of_the_first_steps_after_a_resume_in_a_new_folder_is_tracked(fit):
    _, first = fit("max_steps=4", "save_every=4", "val_every=4", folder="first")
    summary, run = fit("max_steps=6", "val_every=6", f"resume={first}", folder="longer")
    assert all("device" in summary["peak_bytes_by_phase"][phase] for phase in ("forward", "backward", "step"))
    assert (run / "memory_step.csv").read_text().count("\n") > 10


def test_peak_bytes_in_the_summary_of_a_resumed_run_equal_its_memory_csv(fit):
    fit("max_steps=3", "save_every=2", "val_every=2", "precision=bf16-master")
    summary, run = fit("max_steps=4", "val_every=2", "precision=bf16-master", "resume=auto")
    phases = {row["phase"] for row in read(run)}
    assert summary["steps"] == 4 and summary["peak_bytes_by_phase"].keys() == phases
    for phase, sizes in summary["peak_bytes_by_phase"].items():
        rows = [row for row in read(run) if row["phase"] == phase]
        live = [int(row["live_peak_bytes"]) for row in rows if row["live_peak_bytes"]]
        assert sizes.get("device") == max(live, default=None)
        assert sizes["host"] == max(int(row["rss_peak_bytes"]) for row in rows)
