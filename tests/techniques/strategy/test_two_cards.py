"""Tests the strategies that can use two cards, as users run them: the loss, each rank's share of the weights, and the
ratio of measured to predicted memory.

The runs of two processes on a CPU check that the test itself reads the results correctly.
"""

import json
import math
import os
import subprocess
import sys

import pytest

from conftest import ROOT, beside
from devices import CARDS

pytestmark = pytest.mark.process
LIMIT = 300  # seconds of a run
STRATEGIES = ("ddp", "fsdp", "fsdp_offload", "tensor_parallel", "pipeline")
DIVIDED = 0.9  # upper limit of a rank's share of the weights: half, and embeddings that are not divided
MORE = 1.1  # largest ratio of measured to predicted memory
SIZES = {
    "cpu": (),
    "cuda": tuple(f"model.architecture.{line}" for line in ("n_layer=6", "n_embd=512", "n_head=8", "vocab_size=4096")),
}


@pytest.fixture
def train(small, tmp_path):
    """Returns a function that takes overrides, starts a run of two ranks, and returns its summary and a set of the
    words "True" and "False", which say whether each rank's shards are pinned."""

    def run(*overrides: str) -> tuple[dict, set[str]]:
        (seen := tmp_path / "seen").mkdir()
        watched = ("+callbacks.seen._target_=seen_on_ranks.Pinned", f"+callbacks.seen.folder={seen}")
        lines = beside(small, ("devices=2", "plan=check", "export=null", *overrides))
        path = os.pathsep.join(map(str, (ROOT / "src", ROOT / "tests" / "support")))
        done = subprocess.run(
            [sys.executable, "train.py", *lines, *watched, f"hydra.run.dir={tmp_path}/run"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads((tmp_path / "run" / "summary.json").read_text()), {f.read_text() for f in seen.iterdir()}

    return run


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.matrix), CARDS])
def test_two_ranks_of_each_strategy_hold_their_share_of_weights_and_on_cards_at_most_1_1_times_predicted_memory(
    train, device, strategy
):
    lines = (f"strategy={strategy}", f"device={device}", "precision=bf16", "optim=adamw", *SIZES[device])
    summary, pinned = train(*lines)
    ranks, shares = summary["ranks"], [rank["weights"] / summary["weights_bytes"] for rank in summary["ranks"]]
    assert len(ranks) == 2 and math.isfinite(summary["train_loss"])
    assert max(shares) == 1.0 if strategy == "ddp" else max(shares) < DIVIDED, shares
    if strategy == "fsdp_offload":
        assert pinned == {str(device == "cuda")}
    if device == "cuda":
        assert max(rank["device"] for rank in ranks) <= MORE * summary["predicted"]["allocated"]
