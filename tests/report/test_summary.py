"""Tests summary.json, which is complete and valid JSON or absent, and the table that a run prints at its end."""

import json

import pytest

from lowmem.report import summary
from lowmem.system.units import GIB, MIB, byte_size


def test_non_finite_values_of_the_summary_are_null(tmp_path):
    summary.write(tmp_path / "summary.json", {"loss": float("nan"), "deep": [{"x": float("inf")}], "steps": 3})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"loss": None, "deep": [{"x": None}], "steps": 3}


def test_failed_write_of_the_summary_keeps_the_old_file(tmp_path):
    file = tmp_path / "summary.json"
    summary.write(file, {"steps": 1})
    with pytest.raises(TypeError):
        summary.write(file, {"steps": object()})
    assert json.loads(file.read_text()) == {"steps": 1}


def test_summary_table_shows_units_or_a_dash_and_skipped_steps_and_an_unreached_lr_only_if_present(fit):
    whole, _ = fit("max_steps=1")
    lines = dict(line.split("  ", 1) for line in summary.table(whole).splitlines() if not line.startswith(" "))
    assert lines["parameters"].strip() == "43,264"
    assert float(lines["seconds per step"]) > 0  # a run of one step reports the time of its warm-up
    assert "seconds per step          -" in summary.table(whole | {"seconds_per_step": None})
    resident = whole["peak_bytes"]["host_rss"] / GIB  # GiB; this process may have run other tests before
    before = byte_size(whole["rss_before_model_bytes"])
    said = f"{byte_size(whole['peak_bytes']['host_rss'])} ({before} before the model was loaded)"
    assert lines["peak host memory"].strip() == said
    assert 0.2 < resident < 8
    assert "skipped" not in summary.table(whole)
    assert "2 skipped" in summary.table(whole | {"skipped_steps": 2})
    assert "highest learning rate" not in summary.table(whole)
    low = whole | {"highest_lr": 4e-4, "lr": 1e-3}  # a run that ended during its warmup
    assert "highest learning rate     0.0004 (lr=0.001)" in summary.table(low)
    assert "highest learning rate" not in summary.table(low | {"resumed_from": "step-00000040.ckpt"})


def test_summary_omits_the_version_of_a_missing_library(fit, monkeypatch):
    right = summary.version

    def without(package):
        if package in ("bitsandbytes", "torchao"):
            raise summary.PackageNotFoundError(package)
        return right(package)

    monkeypatch.setattr(summary, "version", without)
    run, _ = fit("max_steps=1")
    assert run["versions"].keys() == {"python", *summary.PACKAGES} - {"bitsandbytes", "torchao"}


def test_summary_table_has_a_line_per_rank_but_only_smallest_and_largest_of_64_ranks(fit):
    alone, _ = fit("max_steps=1")
    assert "rank 0" not in summary.table(alone) and len(alone["ranks"]) == 1
    whole = alone["weights_bytes"]
    assert whole == alone["ranks"][0]["weights"] == alone["ranks"][0]["gradients"] == 43264 * 4
    part = {"device": 3 * GIB, "host_rss": GIB, "weights": whole // 2, "gradients": GIB, "optimizer": 2 * GIB}
    shown = summary.table(alone | {"ranks": [part, part | {"device": None}]})
    assert "GiB of 2 ranks" in shown and "rank 0                  3.000, 1.000; 0.000 (50.0%), 1.000, 2.000" in shown
    assert "rank 1                  -, 1.000; " in shown
    small = {key: value and value // 1024 for key, value in part.items()}
    shown = summary.table(alone | {"ranks": [small, small]})
    assert "MiB of 2 ranks" in shown and "rank 0                  3.0, 1.0; 0.0 (" in shown
    many = [part | {"device": part["device"] + (number * 7 % 64) * GIB} for number in range(64)]
    lines = [line.split()[1] for line in summary.table(alone | {"ranks": many}).splitlines() if "  rank " in line]
    assert lines == ["0", "9"]


def test_sizes_below_one_gib_are_printed_in_mib(fit):
    assert [byte_size(size) for size in (0, MIB // 2, 12 * MIB, GIB - MIB, GIB, 3 * GIB // 2)] == [
        *("0 MiB", "0.5 MiB", "12.0 MiB", "1,023.0 MiB", "1.000 GiB", "1.500 GiB")
    ]
    whole, _ = fit("max_steps=1")
    rows = [line for line in summary.table(whole).splitlines() if "iB" in line and "host" not in line]
    assert len(rows) > 5 and all("MiB" in line and "GiB" not in line for line in rows)


def test_predicted_host_memory_is_shown_only_if_the_model_needs_more_than_the_libraries():
    pair = {"device": 2 * MIB, "host": 3 * GIB}
    known = {"predicted": {"phases": {"step": pair}}, "peak_bytes_by_phase": {"step": pair}}
    of_libraries = summary._plan_rows(known | {"rss_before_model_bytes": 2 * GIB})
    of_the_model = summary._plan_rows(known | {"rss_before_model_bytes": GIB})
    assert of_libraries[1:] == [("  step", "device 2.0 / 2.0 MiB")]
    assert of_the_model[1:] == [("  step", "device 2.0 / 2.0 MiB, host 3.000 / 3.000 GiB")]
    assert summary._plan_rows({"predicted": None, "rss_before_model_bytes": GIB}) == []


def test_summary_table_shows_learned_tokens_only_if_not_all_tokens_are_learned(fit):
    whole, _ = fit("max_steps=1")
    assert whole["tokens"] == whole["learned_tokens"] and "learned" not in summary.table(whole)
    shown = summary.table(whole | {"tokens": 30_000, "learned_tokens": 10_000})
    assert "\ntokens                    30,000\n  learned                 10,000 (33% of" in shown
