"""Tests that `wandb sync` uploads the offline parts of a resumed run as one run. A local server stands in for W&B's
server."""

import gzip
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import wandb

OWNER = {"id": "project", "name": "lowmem", "entity": {"id": "entity", "name": "me"}}


class Server(ThreadingHTTPServer):
    """A stand-in for W&B's server that answers uploads and stores the rows of each run's curves."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.rows: dict[str, list[dict]] = {}  # id of a run -> rows of its curves

    def answer(self, operation: str, name: str) -> dict:
        rows = self.rows.get(name, [])
        if operation == "UpsertBucket":
            known = {"id": name, "name": name, "displayName": name, "config": "{}", "project": OWNER}
            return {"upsertBucket": {"bucket": known | {"historyLineCount": len(rows)}, "inserted": not rows}}
        if operation == "RunResumeStatus" and rows:
            counts = {"historyLineCount": len(rows), "logLineCount": 0, "eventsLineCount": 0}
            last = {"historyTail": json.dumps([json.dumps(rows[-1])]), "summaryMetrics": json.dumps(rows[-1])}
            known = {
                "id": name,
                "name": name,
                "config": "{}",
                "tags": [],
                "eventsTail": "[]",
                "wandbConfig": '{"t": 1}',
            }
            return {"model": OWNER | {"bucket": known | counts | last}}
        viewer = {"id": "user", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}
        return {"viewer": viewer, "model": None, "createRunFiles": {"runID": name, "uploadHeaders": [], "files": []}}

    def take(self, name: str, first: int, lines: list[str]) -> None:
        rows = self.rows.setdefault(name, [])
        rows[first : first + len(lines)] = map(json.loads, lines)


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer({})

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        raw = gzip.decompress(raw) if self.headers.get("Content-Encoding") == "gzip" else raw
        if self.path.endswith("/graphql"):
            asked = json.loads(raw)
            about = asked.get("variables") or {}
            name = about.get("name") or about.get("run")
            operation = re.search(r"(?:query|mutation)\s+(\w+)", asked["query"])[1]
            return self.answer({"data": self.server.answer(operation, name)})
        if self.path.endswith("/file_stream"):
            curves = (json.loads(raw).get("files") or {}).get("wandb-history.jsonl")
            if curves:
                self.server.take(self.path.split("/")[-2], curves["offset"], curves["content"])
        return self.answer({})

    def answer(self, content: dict) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def upload(tmp_path):
    """Yields a function that uploads the folder of a run, and returns {id of a run: rows that the server has
    received}."""
    server = Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def run(folder):
        where = {"WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}", "WANDB_API_KEY": "0" * 40}
        environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
        parts = sorted(map(str, (folder / "wandb").glob("offline-run-*")))
        command = [sys.executable, "-m", "wandb", "sync", *parts]
        environment |= where | {"HOME": str(tmp_path)}
        how = {"env": environment, "cwd": tmp_path}  # where `wandb sync` leaves logs
        done = subprocess.run(command, **how, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and len(parts) == 2, done.stderr
        return server.rows

    yield run
    server.shutdown()
    server.server_close()


@pytest.mark.process
@pytest.mark.parametrize("resumes", [True, pytest.param(False, marks=pytest.mark.wrong)])
def test_wandb_run_synced_from_offline_parts_of_a_resumed_run_has_the_rows_of_both_parts(
    fit, upload, monkeypatch, resumes
):
    """The second part resumes from step 2, as after a SIGKILL at step 4. Wrong on purpose (resumes=False): the second
    part is not marked as resumed, and its rows replace rows of the first part."""
    lines = ("logger=wandb", "logger.wandb.offline=true", "save_every=2")
    _, folder = fit(*lines, "max_steps=4")
    if not resumes:
        init = wandb.init
        monkeypatch.setattr(wandb, "init", lambda **how: init(**how | {"resume": None}))
    fit(*lines, "max_steps=6", f"resume={folder}/checkpoints/step-00000002.ckpt")
    ((_, rows),) = upload(folder).items()
    losses = [row["trainer/global_step"] for row in rows if "train/loss" in row]
    steps = [row["_step"] for row in rows]
    assert (losses == [1, 2, 3, 4, 3, 4, 5, 6] and steps == sorted(set(steps))) == resumes
