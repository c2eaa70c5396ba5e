"""The second process of a search: it finds what this one would, and is gone afterwards."""

import os
import signal

import psutil
import pytest

from lowmem.config.settle import run_of
from lowmem.plan.job import resolved
from lowmem.plan.search import helper as helpers
from lowmem.plan.search.helper import Helper
from lowmem.plan.tracing.trace import trace


def cfg(*typed):
    return resolved(run_of(["batch_size=2", "seq_len=16", *typed], "plan"), on_card=True)


def job(cfg, depth=2):
    return cfg.as_dict(), True, depth, None


@pytest.mark.process
def test_it_finds_what_this_process_finds_and_ends_with_it():
    first, second = cfg("optim=adamw"), cfg("precision=bf16-sr", "optim=adafactor")
    with Helper() as helper:
        process = psutil.Process(helper._process.pid)
        found = helper.traces([job(first), job(second, depth=3)])
        assert helper.rss_bytes > 100 << 20
    assert found == [trace(first, True, 2), trace(second, True, 3)]
    assert found != [trace(first, True, 3), trace(second, True, 3)]
    assert not process.is_running()


@pytest.mark.process
def test_it_ends_when_nobody_is_left_to_ask():
    helper = Helper()
    helper._process.stdin.close()  # as the system does when this process is killed
    assert helper._process.wait(timeout=120) == 0
    helper._process.stdout.close()


@pytest.mark.process
@pytest.mark.rows("killed")
@pytest.mark.parametrize("ends", ["killed", "cannot trace"])
def test_what_it_cannot_trace_is_left_to_this_process(ends):
    with Helper() as helper:
        if ends == "killed":
            os.kill(helper._process.pid, signal.SIGKILL)
        assert helper.traces([({}, True, 2, None)]) is None
        assert helper.traces([job(cfg())]) is None


def test_with_one_processor_there_is_none(monkeypatch):
    monkeypatch.setattr(helpers.processors, "usable", lambda: 1)
    assert helpers.helper() is None
