"""Tests plans of runs with masters and optimizer state on a drive: their predicted bytes and time, and that the search
uses a drive only if no other recipe fits."""

import json
from collections import Counter

import pytest
import torch
from test_job import planned  # noqa: F401
from test_trace import MODELS, measured
from test_window import TAKEN, card, cfg, shapes

from lowmem.config import drives
from lowmem.config.drives import FOLDER, DriveSpace
from lowmem.offload import drive as swap_files
from lowmem.offload.drive import Sizes, SwapFiles
from lowmem.plan import host_bytes, prediction
from lowmem.plan.cost.step_time import window
from lowmem.plan.target import Target
from lowmem.plan.tracing.trace import trace
from lowmem.system.errors import Refused
from lowmem.system.scratch_file import Drive
from lowmem.techniques.weights.streamed import Streamed

STREAMED = ("weights=streamed", "gradient_checkpointing=every_layer", "loss=tiled", "loss.columns=64", "batch_size=2")
WIDE = ("model.architecture.num_hidden_layers=6", "model.architecture.hidden_size=128")
RUN = (*MODELS["llama"], *WIDE, *STREAMED, "model.architecture.intermediate_size=512", "max_steps=3", "val_every=3")
RUN += ("accumulation=fixed", "accumulation.batches=2")


@pytest.mark.rows("16-master-adafactor-state")
@pytest.mark.parametrize(
    ("precision", "optim", "holds"),
    [
        ("bf16-master", "adamw8bit", "all"),
        ("bf16-master", "adamw8bit", "state"),
        ("16-master", "adafactor", "state"),
        ("bf16-sr", "adamw", "state"),
    ],
)
def test_bytes_on_a_drive_and_in_host_memory_equal_the_prediction(
    config, fit, tmp_path, monkeypatch, precision, optim, holds
):
    """Files are predicted to the byte, and host tensors within 1 %. Wrong variants: files whose tensors are not padded
    to full pages must be smaller, and a run without a drive must need over 10 % more host memory."""
    ended, inside, stop, memory = [], Counter(), Streamed.stop, SwapFiles._memory

    def watched(swap_files, swap_file, *args, **kwargs):
        taken = memory(swap_files, swap_file, *args, **kwargs)
        inside[swap_files] = max(
            inside[swap_files], swap_files._buffer_bytes() + (0 if taken is None else swap_file.size)
        )
        return taken

    monkeypatch.setattr(Streamed, "stop", lambda weights: (ended.append(weights), stop(weights)))
    monkeypatch.setattr(SwapFiles, "_memory", watched)
    typed = [*RUN, f"precision={precision}", f"optim={optim}", f"weights.drive={tmp_path}/drive"]
    typed += [f"weights.drive_holds={holds}"]
    summary, folder = fit(*typed)
    weights, resting = ended[-1], measured(folder)["evaluation"]["host_tensor_bytes"]
    on_drive = weights._on_drive
    every = [*on_drive._masters._every, *on_drive._weights._every]
    written = [swap_file._file.size for swap_file in every if swap_file._file is not None]
    room = sum(inside[swap_files] for swap_files in (on_drive._masters, on_drive._weights))

    monkeypatch.setattr(Drive, "__init__", None)  # a trace touches no drive
    run = config(*typed).resolved()
    traced = trace(run, on_card=False)
    assert traced.drive._replace(room=0) == (
        sum(t.nbytes for t in weights.drive_tensors()),
        sum(written),
        0,
        sum(written),
        sum(swap_file.masters for swap_file in every),
        sum(swap_file._file.size for swap_file in on_drive._weights._every),
    )
    assert (traced.drive.masters == 0) == (precision == "bf16-sr") and (traced.drive.weights > 0) == (holds == "all")
    assert summary["measured"]["drive"]["total"] == summary["drive"]["bytes"] == traced.drive.tensors
    assert 0.95 * traced.drive.room < room <= traced.drive.room  # predicted as if all parts had the largest size
    needed, in_memory = (
        prediction.needs(traced, each, Target(on_card=False), 0) for each in (run, run.knowing(weights={"drive": None}))
    )
    moved, step = needed.as_dict()["drive_bytes_per_step"], measured(folder)["step"]
    assert needed.drive.total == moved["written"] == step["drive_written_bytes"] == sum(written)
    assert moved["read"] == pytest.approx(step["drive_read_bytes"], rel=0.01 if holds == "all" else 0)
    assert in_memory.drive.total == 0

    def on_host(needed):  # without the device's rows and the memory of threads
        return needed.phases["evaluation"].host - needed.phases["evaluation"].device - host_bytes.WOKEN

    # between two steps fewer tensors may be in memory than during a step
    highest = resting + traced.drive.room - sum(tensor.nbytes for tensor in on_drive.memory())
    assert on_host(needed) == pytest.approx(highest, rel=0.01)
    assert on_host(in_memory) > 1.1 * highest
    monkeypatch.setattr(swap_files, "pages", lambda size: size)
    assert trace(run, on_card=False).drive.files < sum(written)


def test_load_prediction_for_16_bit_weights_on_a_drive_has_buffers_instead_of_weights_in_host_memory(
    config, monkeypatch, tmp_path
):
    for name in ("read_in", "stored_in"):
        monkeypatch.setattr(host_bytes, name, lambda *_, plans: torch.bfloat16)
    typed = (*RUN, "precision=bf16-master", "optim=adamw8bit", f"weights.drive={tmp_path}")
    runs = [config(*typed, f"weights.drive_holds={holds}").resolved() for holds in ("state", "all")]
    traces = [trace(run, on_card=True) for run in runs]
    state, both = (prediction.needs(t, run, Target(on_card=True), 0) for t, run in zip(traces, runs, strict=True))
    more = traces[1].drive.room - traces[0].drive.room + 2 * host_bytes.SLOT_BYTES  # larger parts, and staging buffers
    assert state.phases["load"].host - both.phases["load"].host == traces[1].streamed - more


# --- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stepped", "waits"), [(2, 3.0), (30, 9.0)])
def test_predicted_update_time_is_the_longer_of_host_time_and_drive_traffic(stepped, waits):
    """The drive reads 10 bytes per second and writes 5. Reading and writing 30 bytes takes 9 seconds, longer than the 3
    seconds of the update on the host. Reading and writing 2 bytes takes less time than the update."""
    lines = ("precision=bf16-master", "clip=1.0", *STREAMED[:2])
    found = shapes(drive=Sizes(files=stepped, stepped=stepped))
    beside, on_drive = cfg(*lines), cfg(*lines, "weights.drive=there")
    there = card(1e9, 1e9, drive_read=10.0, drive_written=5.0)
    for device in (there, there.host):
        whole = [window(device, run, found, TAKEN | {"forward": 0.0}, 1).step for run in (beside, on_drive)]
        assert whole == pytest.approx([0.5 + 3, 0.5 + waits])


def test_streamed_weights_on_a_drive_are_predicted_to_arrive_at_the_speed_of_the_drive():
    """Forward (2 seconds) reads 20 bytes and backward (4 seconds) 10 bytes, at 2 bytes per second. The update reads and
    writes 4 bytes in 6 seconds. The next forward pass hides none of them, because the drive also reads the weights of
    that pass."""
    run = cfg("precision=bf16-master", "clip=1.0", *STREAMED[:2], "weights.drive=there", "weights.drive_holds=all")
    found = shapes(streamed=20, blocks=(2, 10), drive=Sizes(files=4, stepped=4))
    there = card(1e9, 1e9, drive_read=2.0, drive_written=1.0)
    assert window(there, run, found, TAKEN, 1) == pytest.approx((6, (10 - 2) + (5 - 4), 0.5 + 2 + 4))
    assert window(there.host, run, found, TAKEN, 1) == pytest.approx((6, 10 + 5, 0.5 + 2 + 4))
    kept = run.knowing(weights={"drive_holds": "state"})
    assert window(there, kept, found, TAKEN, 1) == pytest.approx((6, 0, 0.5 + 2 + 4 - 2))


# --- plans for a drive ------------------------------------------------------------------------------------------------


def test_plan_drive_key_accepts_a_folder_or_a_size_and_refuses_other_values(tmp_path):
    assert drives.space("200GB") == DriveSpace(FOLDER, 200 * 10**9)
    assert drives.space("1.5TB", "/mine") == DriveSpace("/mine", 1500 * 10**9)
    assert drives.space("180GiB").size == 180 * 2**30
    here = drives.space(f"{tmp_path}/new")
    assert here.folder == f"{tmp_path}/new" and here.size > 0 and not (tmp_path / "new").exists()
    assert drives.space(None) is None and drives.space(None, f"{tmp_path}").folder == f"{tmp_path}"
    for wrong in ("200", "12G", "0GB", "-3GB", "5 parsecs"):
        with pytest.raises(Refused, match=f"drive={wrong}: give a folder, or a size such as 200GB or 180GiB"):
            drives.space(wrong)


def exact(*more):
    return (*MODELS["gpt2"], *STREAMED, "precision=bf16-master", "optim=adamw8bit", "clip=null", "gpu=2GiB", *more)


def hosts(planned, *more):  # noqa: F811
    """Returns the bytes of host memory that the run needs without and with a drive."""
    runs = [planned(*exact("search=false", "ram=64GiB", *more, *drive))[2] for drive in ((), ("weights.drive=there",))]
    return [run["recipes"][0]["host"]["total"] for run in runs]


@pytest.mark.matrix
@pytest.mark.parametrize("drive", ["200GB", pytest.param("folder", marks=pytest.mark.matrix)])
def test_search_uses_a_drive_only_if_nothing_else_fits(planned, monkeypatch, tmp_path, drive):  # noqa: F811
    """The model has 40M parameters. Host memory of libraries and CUDA is set to 0, so that the model needs most of the
    memory."""
    monkeypatch.setattr("lowmem.system.process.rss_bytes", lambda: 0)
    monkeypatch.setattr(host_bytes, "CUDA_ON_HOST", 0)
    large = tuple(f"model.architecture.{size}" for size in ("n_embd=512", "n_layer=12", "n_head=8"))
    memory, less = hosts(planned, *large)
    assert less < 0.95 * memory
    ram = f"ram={(memory + less) // 2}B"
    folder = FOLDER if drive == "200GB" else f"{tmp_path}/a (new) drive"
    code, said, written = planned(*exact(*large, ram, f"drive={'200GB' if drive == '200GB' else folder}"))
    chosen = written["recipes"][0]
    assert code == 0 and f"weights.drive={folder}" in written["chosen"] and chosen["traced"], said
    assert chosen["drive"]["total"] > 2**26 and "TB written per 1,000 steps" in said
    assert ("Replace FOLDER by a folder on the drive." in said) == (drive == "200GB")
    assert "reads 3.5 GB/s and writes 1.5 GB/s, as assumed here" in said
    code, said, written = planned(*exact(*large, ram))
    assert code == 2 and "or drive=200GB to also use a drive" in said
    code, said, _ = planned(*exact(*large, ram, "drive=20MiB"))
    assert code == 2
    code, _, written = planned(*exact(*large, "ram=64GiB", "drive=200GB"))  # everything fits in host memory
    assert code == 0 and not any("weights.drive" in line for line in written["chosen"])


def test_planned_run_larger_than_the_drive_does_not_fit(planned):  # noqa: F811
    typed = exact("search=false", "ram=64GiB", "weights.drive=there")
    assert planned(*typed, "drive=200GB")[0] == 0
    code, said, written = planned(*typed, "drive=20KiB")
    assert code == 2 and "It does not fit a card of 2.0 GiB and a host of 64.0 GiB and a drive of 0.0 GiB." in said
    assert json.loads(json.dumps(written))["recipes"][0]["drive"]["total"] > 20 * 2**10
