"""Tests examples/prove_on_a_t4.ipynb: it runs without a card, and its assertions fail if one of its claims is wrong."""

import ast
import json

import pytest
import torch
from safetensors.torch import save_file

from conftest import ROOT
from lowmem.config.check import check
from lowmem.config.settle import run_of
from lowmem.plan.job import resolved

pytestmark = pytest.mark.docs

NOTEBOOK = ROOT / "examples" / "prove_on_a_t4.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
MIB = 2**20


def cell(words: str) -> str:
    """Returns the code of the only cell that contains `words`."""
    (found,) = (code for code in CODE if words in code)
    return found


def test_notebook_cells_are_python_of_at_most_22_lines_without_stored_output():
    for code in CODE:
        ast.parse(code)
    cells = [cell for cell in CELLS if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)
    assert max(code.count("\n") for code in CODE) < 22 and len(CELLS) > 2 * len(CODE) - 6


def test_notebook_clones_and_installs_the_package_if_missing(monkeypatch):
    typed = []
    monkeypatch.setattr("subprocess.run", lambda command, check: typed.append(command))
    exec(cell("git"), {})
    assert not typed
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("sys.path", [])
    exec(cell("git"), {})
    assert [command[-1] for command in typed] == ["lowmem", "lowmem"]


@pytest.mark.parametrize("weights", ["streamed", "resident"])
def test_notebook_run_on_a_card_is_not_refused(monkeypatch, weights):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a made-up card")
    scope = {}
    exec(cell("CARD ="), scope)
    cfg = resolved(run_of([*scope["TYPED"], f"weights={weights}", "device=cpu"]), on_card=True)
    check(cfg, {})
    assert cfg.limit == 4 * 2**30 and cfg.multiplies_in == "float16" and cfg.seq_len == 1024
    assert cfg.model.architecture["n_layer"] == 24


# --- assertions of the notebook ---------------------------------------------------------------------------------------


def two_runs(folder, change=lambda weights: None, **summary):
    """Returns the variables that the notebook has after two runs.

    Args:
        change: function that changes the weights of the second run in place.
        summary: values that replace values in the summaries of both runs.
    """
    runs = {}
    for name, held in (("streamed", 10), ("resident", 30)):
        weights = {"a": torch.ones(4), "b": torch.ones(2)}
        if name == "resident":
            change(weights)
        (folder / name / "model").mkdir(parents=True)
        save_file(weights, folder / name / "model" / "model.safetensors")
        runs[name] = {"steps": 6, "skipped_steps": 1, "peak_bytes_by_category": {"weights": held}} | summary
    return {"runs": runs, "FOLDER": folder, "STEPS": 6, "torch": torch}


def a_bit_more(weights):
    weights["b"][1] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({}, None),
        ({"change": a_bit_more}, "1 of 2 tensors differ, such as b"),
        ({"change": lambda weights: weights["a"].fill_(float("nan"))}, "1 of 2 tensors differ, such as a"),
        ({"peak_bytes_by_category": {"weights": 30}}, "the weights did not stream"),
        ({"skipped_steps": 6}, "a run has not trained"),
    ],
)
def test_notebook_fails_if_final_weights_differ_or_weights_are_not_streamed_or_all_steps_are_skipped(
    tmp_path, how, message
):
    scope = two_runs(tmp_path, **how)
    if message is None:
        exec(cell("assert not different"), scope)
    else:
        with pytest.raises(AssertionError, match=message):
            exec(cell("assert not different"), scope)


@pytest.mark.parametrize(
    ("card", "predicted", "measured", "message"),
    [
        (False, 10, 10.05, None),
        (False, 10, 10.2, "predicted wrong"),
        (False, 10, 9.8, "predicted wrong"),
        (False, 16.5, 16.5, "of 16777216"),
        (True, 10, 10.4 + 32, "of 16777216"),
        (True, 1, 15, None),
        (True, 15, 15.7, None),
    ],
)
def test_notebook_fails_only_if_a_peak_exceeds_the_limit_or_the_tolerance_of_its_prediction(
    card, predicted, measured, message
):
    summary = {"predicted": {"allocated": predicted * MIB}, "peak_bytes": {"device": measured * MIB}}
    scope = {"runs": {"streamed": summary}, "LIMIT": "16MiB", "CARD": card}
    if message is None:
        exec(cell("parse_bytes"), scope)
    else:
        with pytest.raises(AssertionError, match=message):
            exec(cell("parse_bytes"), scope)


@pytest.mark.parametrize(("reserved", "fails"), [(16, False), (17, True)])
def test_notebook_fails_if_reserved_memory_on_a_card_exceeds_the_limit(tmp_path, reserved, fails):
    (tmp_path / "streamed").mkdir()
    (tmp_path / "streamed" / "memory.csv").write_text(f"step,reserved_peak_bytes\n0,\n1,{reserved}\n2,3\n")
    scope = {"runs": ["streamed"], "FOLDER": tmp_path, "CARD": True, "limit": 16}
    if fails:
        with pytest.raises(AssertionError):
            exec(cell("import csv"), scope)
    else:
        exec(cell("import csv"), scope)


# --- the complete notebook --------------------------------------------------------------------------------------------


@pytest.fixture
def execute(tmp_path, monkeypatch):
    """Returns a function that replaces a piece of the notebook's code, runs all cells in a kernel, and returns the
    cells with their outputs."""
    why = "pip install -e '.[dev]' installs what runs a notebook"
    nbclient = pytest.importorskip("nbclient", reason=why)
    pytest.importorskip("ipykernel", reason=why)
    import nbformat

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))

    def run(before="", after=""):
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        nbformat.validate(notebook)
        for one in notebook.cells:
            one.source = one.source.replace(before, after) if before else one.source
        client = nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}})
        return client.execute().cells

    return run


def test_notebook_runs_without_a_card_and_shows_both_pictures(execute):
    outputs = [output for cell in execute() for output in cell.get("outputs", [])]
    said = "".join(output["text"] for output in outputs if output["output_type"] == "stream")
    assert "tensors are equal to the bit" in said and "streamed: predicted " in said and "resident: predicted " in said
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2


def test_notebook_fails_if_the_seed_of_one_run_differs(execute):
    from nbclient.exceptions import CellExecutionError

    with pytest.raises(CellExecutionError) as raised:
        execute('run("resident")', 'run("resident", seed=1)')
    assert raised.value.ename == "AssertionError" and "52 of 52 tensors differ" in raised.value.evalue
