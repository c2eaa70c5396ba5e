"""Tests that memory contains streamed weights only once while they are loaded, moved to host blocks, saved and read
from a checkpoint. The tests measure the peak of anonymous resident memory (Linux: RssAnon) of a new process."""

import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from host_masters import made
from host_memory import Highest, linux
from lowmem.model.loading import _of_type
from lowmem.offload.host_weight import SplitHostWeight
from lowmem.saving.checkpoint import AtomicCheckpointIO
from lowmem.step.fp32_halves import joined
from lowmem.techniques.loss.cross_entropy import full
from lowmem.techniques.weights.streamed import Streamed
from lowmem.training.module import CausalLM, Placement, Update
from new_process import in_a_new_process

WRONG = ("moving", "saving", "reading")
KEYS = {"vocab_size": 2000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}


def module():
    """Returns (module with fp32 weights, number of bytes of these weights)."""
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(_of_type("llama", **KEYS, num_attention_heads=4))
    network.to_empty(device="cpu")
    for p in network.parameters():
        p.data.fill_(0.1)
    return CausalLM(network, full, Update(None, None), Placement(Streamed(network))), sum(
        p.nbytes for p in network.parameters()
    )


def highest(work):
    """Returns how far memory rises above its present level while `work` runs, in bytes."""
    with Highest() as found:
        work()
    return found.rise


@linux
@pytest.mark.parametrize("wrong", ["", *(pytest.param(w, marks=pytest.mark.matrix) for w in WRONG)])
@in_a_new_process
def test_streamed_split_weights_are_moved_saved_and_loaded_without_a_second_copy(tmp_path, wrong, monkeypatch):
    """Wrong on purpose: the fp32 weights are not freed ("moving"), weights are saved as fp32 ("saving"), or all joined
    weights stay in memory ("reading"). Exactly the step of this name must exceed its bound."""
    ours, weights = module()
    masters, file = [], tmp_path / "step-00000001.ckpt"
    held = [p.data for p in ours.parameters()] if wrong == "moving" else []
    rises = {"moving": highest(lambda: masters.append(made(ours, weights=ours.weights)))}
    (callback,) = masters

    def save():
        checkpoint = {"state_dict": ours.state_dict()}
        callback.on_save_checkpoint(None, ours, checkpoint)
        AtomicCheckpointIO().save_checkpoint(checkpoint, file)

    def read():
        content = AtomicCheckpointIO().load_checkpoint(file)
        other._rests = content["rests"]
        other.load_state_dict(content["state_dict"])

    with monkeypatch.context() as patch:
        if wrong == "saving":
            patch.setattr(SplitHostWeight, "checkpoint_tensor", property(lambda self: self.full_precision))
        rises["saving"] = highest(save)
    save()
    other, _ = module()
    if wrong == "reading":
        monkeypatch.setattr("lowmem.training.module.joined", lambda *halves: held.append(joined(*halves)) or held[-1])
    rises["reading"] = highest(read)
    # Bounds of the rise, as shares of the fp32 weights. Moving needs the 16-bit weights of one block and of resident
    # layers, saving needs almost nothing, and reading needs one tensor.
    most = {"moving": 0.35, "saving": 0.05, "reading": 0.25}
    assert {name for name, rise in rises.items() if rise > most[name] * weights} == ({wrong} if wrong else set())
    for one, two in zip(ours.parameters(), other.parameters(), strict=True):
        assert torch.equal(callback.full_precision(one), two)


LOADS = """
import sys, threading, time, torch
from pathlib import Path
from lowmem.config import schema
from lowmem.model import loading
from host_masters import made
from lowmem.techniques.precision.masters import BFloat16Master
from lowmem.techniques.precision.weights_16bit import BFloat16Stochastic
from lowmem.techniques.weights.streamed import Streamed
how = dict(name=sys.argv[1], pretrained=True, trust_remote_code=False, attention="sdpa", architecture=None)
spec = schema.Model.model_construct(**how)
kind, dtype = (BFloat16Master, torch.float32) if sys.argv[2] == "halves" else (BFloat16Stochastic, torch.bfloat16)
def anonymous():
    return next(int(l.split()[1]) for l in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in l) * 1024
described = loading.Described(spec, loading.architecture(spec))
peak, done = 0, False
before = anonymous()
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous()); time.sleep(0.0005)
thread = threading.Thread(target=watch); thread.start()
network = loading.load(described, dtype)
held = [p.data.clone() for p in network.parameters()] if sys.argv[3] == "wrong" else []
made(network, kind(), Streamed(network))
done = True; thread.join()
print(max(peak, anonymous()) - before)
"""


@linux
@pytest.mark.process
@pytest.mark.parametrize("wrong", ["", "wrong"])
@pytest.mark.parametrize("held", ["halves", "at random"])
def test_loading_files_of_a_streamed_model_holds_its_weights_once_in_memory(tmp_path, held, wrong):
    """Loads a model of 350 MB from several files. Loading may also need a 16-bit block, an fp32 tensor and the memory
    of imports. Wrong on purpose (wrong="wrong"): all loaded weights are copied."""
    keys = {"vocab_size": 20_000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(
            _of_type("llama", **keys, num_attention_heads=8), dtype=torch.bfloat16
        )
    network.to_empty(device="cpu")
    network.save_pretrained(tmp_path, max_shard_size="60MB")
    many, largest = sum(p.numel() for p in network.parameters()), 20_000 * 1024
    block = sum(p.numel() for p in network.model.layers[0].parameters())
    run = [sys.executable, "-c", LOADS, str(tmp_path), held, wrong]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # host_masters is in tests/support
    said = subprocess.run(run, capture_output=True, text=True, check=True, timeout=240, env=env).stdout
    peak = int(said.split()[-1])
    # Bytes after loading. With masters (halves), each weight takes 4 bytes, and resident layers also have 16-bit
    # weights. Without masters, each weight takes 2 bytes, and resident layers are copied.
    ends = 4 * many + 2 * 2 * largest if held == "halves" else 2 * many + 2 * 2 * largest
    assert (peak < ends + 2 * block + 4 * largest + 40e6) != bool(wrong)
