"""W&B without surprises: what is handed over, when it is online, and one run per job."""

import json
import socket
import struct
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import wandb
from wandb.proto import wandb_internal_pb2

from lowmem.report import wandb as reporting


@pytest.fixture
def no_account(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    wandb.teardown()  # settings are read once per process
    yield
    wandb.teardown()


@pytest.fixture
def server():
    """A server on the loopback that says no, which is an answer."""

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
    """A server that takes connections and never says a word."""
    listener = socket.create_server(("127.0.0.1", 0))
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()


def test_a_server_that_answers_and_ones_that_do_not(server, silent):
    assert reporting.answers(server)
    assert not reporting.answers(silent, seconds=0.3)
    assert not reporting.answers("http://127.0.0.1:9", seconds=0.3)


def test_without_a_key_it_is_offline_with_one_line(no_account, caplog):
    with caplog.at_level("INFO"):
        assert reporting._mode() == "offline"
    assert len(caplog.records) == 1 and "wandb sync" in caplog.text


def test_with_a_key_and_a_server_it_is_online(no_account, monkeypatch, server):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", server)
    assert reporting._mode() == "online"


def test_a_key_of_netrc_counts(no_account, monkeypatch, server, tmp_path):
    (tmp_path / "netrc").write_text(f"machine 127.0.0.1\n  login user\n  password {'0' * 40}\n")
    monkeypatch.setenv("WANDB_BASE_URL", server)
    assert reporting._mode() == "online"


def test_with_a_key_and_no_answer_it_is_offline_with_one_line(no_account, monkeypatch, silent, caplog):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", silent)
    monkeypatch.setattr(reporting, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(reporting, "answers", lambda url, answers=reporting.answers: answers(url, 0.3))
    with caplog.at_level("INFO"):
        assert reporting._mode() == "offline"
    assert len(caplog.records) == 1 and "does not answer" in caplog.text


def test_what_the_user_says_is_not_asked_again(no_account, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setattr(reporting, "answers", lambda *_: pytest.fail("asked"))
    assert reporting._mode() == "disabled"


def test_not_installed_means_csv_with_one_line(command, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(reporting, "find_spec", lambda name: None)
    code, said = command("logger=wandb")
    assert code == 0, said
    assert said.count("wandb is not installed") == 1
    assert (tmp_path / "run" / "metrics.csv").read_text().count("\n") > 4


def records(run):
    """Everything an offline run wrote.

    The file is LevelDB's log format behind a header of 7 bytes: blocks of 32 KiB, in them pieces of checksum (4),
    length (2), type (1: whole, 2: first, 3: middle, 4: last) and data.
    """
    (file,) = (run / "wandb").glob("offline-run-*/*.wandb")
    raw, at, found, parts = file.read_bytes(), 7, [], b""
    while at + 7 <= len(raw):
        left_in_block = 32768 - at % 32768
        if left_in_block < 7:
            at += left_in_block
            continue
        length, kind = struct.unpack("<HB", raw[at + 4 : at + 7])
        parts += raw[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            found.append(record)
            parts = b""
    return found


def whole(run, seconds=60):
    """The records, with the last of them: another process writes the file, and may still be at it."""
    deadline = time.monotonic() + seconds
    while True:
        found = records(run)
        if "exit" in [r.WhichOneof("record_type") for r in found]:
            return found
        assert time.monotonic() < deadline, "W&B's process never ended the run"
        time.sleep(0.1)


def test_an_offline_run_holds_configuration_curves_and_picture(command, tmp_path):
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
    assert config["max_steps"] == 4 and config["optim"]["weight_decay"] == 0.1  # before the first point
    losses = {p["trainer/global_step"]: p["train/train_loss"] for p in history if "train/train_loss" in p}
    assert list(losses) == [1, 2, 3, 4]
    names = {name for point in history for name in point}
    assert {"memory/backward_live_peak_gib", "memory/forward_rss_peak_gib", "memory/activations_gib"} <= names
    assert any(point.get("memory/picture/_type") == "images/separated" for point in history)
    metrics = [r.metric for r in kinds if r.WhichOneof("record_type") == "metric"]
    assert any(m.glob_name == "*" and m.step_metric == "trainer/global_step" for m in metrics)


def test_a_multirun_is_one_run_per_job(command, tmp_path):
    code, said = command("-m", "logger=wandb", "lr=1e-3,2e-3", "max_steps=1")
    assert code == 0, said
    for job in ("0", "1"):
        runs = [r.run for r in whole(tmp_path / "sweep" / job) if r.WhichOneof("record_type") == "run"]
        assert len({r.run_id for r in runs}) == 1
    ids = {p.name for p in (tmp_path / "sweep").glob("*/wandb/offline-run-*")}
    assert len(ids) == 2
