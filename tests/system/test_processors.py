import os

import pytest

from lowmem.system import processors


@pytest.mark.parametrize("quota, usable", [("200000 100000", 2), ("50000 100000", 1), ("max 100000", 3), (None, 3)])
def test_number_of_usable_processors_respects_affinity_and_container_quota(quota, usable, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 4, 5}, raising=False)
    monkeypatch.setattr(processors, "_QUOTA", tmp_path / "cpu.max")
    if quota:
        (tmp_path / "cpu.max").write_text(quota)
    assert processors.usable() == usable
