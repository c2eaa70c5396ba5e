"""Tests logging to W&B: what is logged, when a run is online, and the names and identities of runs."""

import json
import socket
import struct
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import wandb
import yaml
from wandb.proto import wandb_internal_pb2

from lowmem.report import wandb as reporting
from lowmem.system.units import WORDS


@pytest.fixture
def no_account(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    wandb.teardown()  # W&B would read the settings only once per process
    yield
    wandb.teardown()


@pytest.fixture
def server():
    """Yields the URL of a local server that responds with 404."""

    class No(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), No)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture
def silent():
    """Yields the URL of a local server that accepts connections and never responds."""
    listener = socket.create_server(("127.0.0.1", 0))
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()


def test_wandb_server_counts_as_reachable_only_if_it_responds(server, silent):
    assert reporting.answers(server)
    assert not reporting.answers(silent, seconds=0.3)
    assert not reporting.answers("http://127.0.0.1:9", seconds=0.3)


def test_wandb_without_a_key_is_offline_with_one_log_line(no_account, caplog):
    with caplog.at_level("INFO"):
        assert reporting._mode(Path("a run")) == "offline"
    assert len(caplog.records) == 1 and "`wandb sync 'a run/wandb'/offline-run-*`" in caplog.text


def test_wandb_with_a_key_and_a_server_is_online(no_account, monkeypatch, server):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", server)
    assert reporting._mode(Path("a run")) == "online"


def test_wandb_with_a_key_in_netrc_and_a_server_is_online(no_account, monkeypatch, server, tmp_path):
    (tmp_path / "netrc").write_text(f"machine 127.0.0.1\n  login user\n  password {'0' * 40}\n")
    monkeypatch.setenv("WANDB_BASE_URL", server)
    assert reporting._mode(Path("a run")) == "online"


def test_wandb_without_an_answering_server_is_offline_with_one_log_line(no_account, monkeypatch, silent, caplog):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", silent)
    monkeypatch.setattr(reporting, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(reporting, "answers", lambda url, answers=reporting.answers: answers(url, 0.3))
    with caplog.at_level("INFO"):
        assert reporting._mode(Path("a run")) == "offline"
    assert len(caplog.records) == 1 and "does not answer, so" in caplog.text and "wandb sync" in caplog.text


def test_wandb_mode_set_by_the_user_is_kept_without_contacting_the_server(no_account, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setattr(reporting, "answers", lambda *_: pytest.fail("asked"))
    assert reporting._mode(Path("a run")) == "disabled"


def test_missing_wandb_package_falls_back_to_csv_with_one_log_line(command, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(reporting, "find_spec", lambda name: None)
    code, said = command("logger=wandb")
    assert code == 0, said
    assert said.count("wandb is not installed") == 1
    assert (tmp_path / "run" / "metrics.csv").read_text().count("\n") > 4


def records(run):
    """Returns all complete records in the file of an offline run.

    After a header of 7 bytes the file has LevelDB's log format: blocks of 32 KiB, which contain fragments of records. A
    fragment has a checksum (4 bytes), a length (2 bytes), a type (1 byte; 1: full, 2: first, 3: middle, 4: last) and
    data.
    """
    (file,) = (run / "wandb").glob("offline-run-*/*.wandb")
    raw, at, found, parts = file.read_bytes(), 7, [], b""
    while at + 7 <= len(raw):
        left_in_block = 32768 - at % 32768
        if left_in_block < 7:
            at += left_in_block
            continue
        length, kind = struct.unpack("<HB", raw[at + 4 : at + 7])
        if at + 7 + length > len(raw):  # not yet written completely
            break
        parts += raw[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            found.append(record)
            parts = b""
    return found


def whole(run, seconds=60):
    """Waits for the last record of a run, and returns all records. Another process writes them, and may not have
    finished."""
    deadline = time.monotonic() + seconds
    while True:
        found = records(run)
        if "exit" in [r.WhichOneof("record_type") for r in found]:
            return found
        assert time.monotonic() < deadline, "W&B's process never ended the run"
        time.sleep(0.1)


def records_of(run):
    """Returns the records that describe the run, which W&B writes several times."""
    return [record.run for record in whole(run) if record.WhichOneof("record_type") == "run"]


def test_offline_wandb_run_contains_config_curves_and_memory_picture(command, tmp_path):
    code, said = command("logger=wandb", "precision=bf16")
    assert code == 0, said
    kinds = whole(tmp_path / "run")
    history = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in r.history.item}
        for r in kinds
        if r.WhichOneof("record_type") == "history"
    ]
    first_history = next(i for i, r in enumerate(kinds) if r.WhichOneof("record_type") == "history")
    config = {
        "/".join(u.nested_key) or u.key: json.loads(u.value_json)
        for r in kinds[:first_history]
        for u in [*r.config.update, *r.run.config.update]
    }
    assert (
        config["max_steps"] == 4 and config["optim"]["weight_decay"] == 0.1
    )  # logged before the first point of a curve
    losses = {p["trainer/global_step"]: p["train/loss"] for p in history if "train/loss" in p}
    assert list(losses) == [1, 2, 3, 4]
    evaluated = [point for point in history if "val/loss" in point]
    assert [point["trainer/global_step"] for point in evaluated] == [4] and "val/bits_per_byte" in evaluated[0]
    names = {name for point in history for name in point}
    of_training = {"loss", "lr", "gradient_norm", "tokens_per_second", "skipped_steps"}
    assert {name for name in names if name.startswith("train/")} == {f"train/{name}" for name in of_training}
    assert {name for name in names if name.startswith("val/")} == {"val/loss", "val/perplexity", "val/bits_per_byte"}
    on_device = {"memory/device_backward_live_peak_gib", "memory/device_activations_gib"}
    assert on_device | {"memory/host_forward_rss_peak_gib"} <= names
    assert any(point.get("memory/picture/_type") == "images/separated" for point in history)
    (chart,) = (tmp_path / "run" / "wandb").glob("offline-run-*/files/media/plotly/memory/by_category*.json")
    assert {trace["name"] for trace in json.loads(chart.read_text())["data"]} == {*WORDS.values()}
    assert all(trace["stackgroup"] == "all" for trace in json.loads(chart.read_text())["data"])
    metrics = [r.metric for r in kinds if r.WhichOneof("record_type") == "metric"]
    assert any(m.glob_name == "*" and m.step_metric == "trainer/global_step" for m in metrics)


def test_run_without_an_account_prints_only_the_sync_command_of_wandb(no_account, command, monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_SILENT")
    code, said = command("logger=wandb", "max_steps=1")
    assert code == 0 and "wandb:" not in said  # the prefix of lines from W&B
    own = [line for line in said.splitlines() if "wandb" in line]
    assert len(own) == 2 and "logged offline. Upload it with `wandb sync" in own[0]
    assert own[1].startswith(f"wrote {tmp_path}/run/: ")


@pytest.mark.process
def test_sweep_jobs_in_wandb_are_named_by_the_varied_overrides_and_share_a_group(command, tmp_path):
    code, said = command("-m", "logger=wandb", "precision=32,bf16", "lr=1e-3", "optim=sgd", "max_steps=1")
    assert code == 0, said
    jobs = [records_of(tmp_path / "sweep" / str(number)) for number in range(2)]
    assert all(len({run.run_id for run in job}) == 1 for job in jobs) and jobs[0][0].run_id != jobs[1][0].run_id
    first, second = (job[0] for job in jobs)
    # Names contain neither the number of the job nor overrides that all jobs share, such as lr=1e-3, which Hydra writes
    # in another spelling.
    assert (first.display_name, second.display_name) == ("precision=32", "precision=bf16")
    assert first.run_group == second.run_group == f"{tmp_path.name}/sweep"
    tags = set(second.tags)
    assert {"precision=bf16", "optim=sgd", "model=tiny", "data=text"} <= tags
    assert not any(tag.startswith(("logger", "hydra", "experiment")) or tag.endswith("=none") for tag in tags)


def test_single_run_in_wandb_has_its_folder_name_unless_another_name_is_typed(command, tmp_path):
    typed = ("logger.wandb.name=mine", "logger.wandb.group=ours", "logger.wandb.tags=[one,two]")
    for folder, lines in (("plain", ()), ("typed", typed)):
        assert command("logger=wandb", "max_steps=1", f"hydra.run.dir={tmp_path}/{folder}", *lines)[0] == 0
    plain, typed = (records_of(tmp_path / folder)[0] for folder in ("plain", "typed"))
    assert (plain.display_name, plain.run_group) == ("plain", "") and "optim=adamw" in plain.tags
    assert (typed.display_name, typed.run_group, sorted(typed.tags)) == ("mine", "ours", ["one", "two"])


def test_jobs_of_a_hyperparameter_search_in_wandb_are_named_by_the_tried_values(tmp_path):
    sweep = tmp_path / "2026-01-31" / "12-00-00"
    (sweep / "7" / ".hydra").mkdir(parents=True)
    typed = ["lr=tag(log,interval(1e-4,1e-2))", "precision='32','bf16'", "max_steps=20", "+trainer.x=1"]
    (sweep / "multirun.yaml").write_text(yaml.safe_dump({"hydra": {"overrides": {"task": typed}}}))
    job = ["max_steps=20", "+trainer.x=1", "lr=0.00123", "precision='32'"]
    (sweep / "7" / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(job))
    assert reporting.of_sweep(sweep / "7") == ("2026-01-31/12-00-00", "lr=0.00123 precision=32")
    long = [f"a.key.of.{n}={'x' * 30}" for n in range(9)]
    (sweep / "7" / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(long))
    assert len(reporting.of_sweep(sweep / "7")[1]) <= 128
    assert reporting.of_sweep(tmp_path) == (None, None)
    deeper = sweep / "data.path=d" / "a.txt"
    (deeper / ".hydra").mkdir(parents=True)
    (deeper / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(job))
    assert reporting.of_sweep(deeper) == ("2026-01-31/12-00-00", "lr=0.00123 precision=32")


def test_wandb_job_name_begins_with_varied_keys_and_shortens_paths(tmp_path):
    (tmp_path / "7" / ".hydra").mkdir(parents=True)
    typed = ["data.path=/a,/b", "lr=0.1,0.2", "model.name=x,y"]
    (tmp_path / "multirun.yaml").write_text(yaml.safe_dump({"hydra": {"overrides": {"task": typed}}}))
    place = f"/data/{'long/' * 40}corpus/part-1.txt"
    job = [f"cache_dir={tmp_path}", f"data.path={place}", "lr=0.2", "model.name=Qwen/Qwen3-0.6B"]
    (tmp_path / "7" / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(job))
    named = "lr=0.2 data.path=corpus/part-1.txt model.name=Qwen/Qwen3-0.6B"
    assert reporting.of_sweep(tmp_path / "7")[1] == named


def test_resumed_run_continues_its_wandb_run_and_an_evaluation_starts_another(fit, tmp_path):
    _, first = fit("logger=wandb", "logger.wandb.offline=true", "max_steps=2")
    _, again = fit("logger=wandb", "logger.wandb.offline=true", f"resume={first}", folder="again")
    ids = [next((run / "wandb").glob("offline-run-*")).name.split("-")[-1] for run in (first, again)]
    assert ids[0] == ids[1]
    _, other = fit("logger=wandb", "logger.wandb.offline=true", f"evaluate={first}", folder="other")
    assert next((other / "wandb").glob("offline-run-*")).name.split("-")[-1] != ids[0]
