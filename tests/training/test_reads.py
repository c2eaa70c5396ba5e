"""Tests that the host reads a value from the device only once per optimizer step. `device_reads.py` explains which
reads are counted."""

import pytest
import torch

from device_reads import as_on_a_card
from lowmem.memory.tracker import host_side
from lowmem.offload.host_optimizer import HostOptimizer
from lowmem.training.module import CausalLM

# Number of the window (of 3) whose reads are counted. In this window the optimizer state exists already, and nothing is
# logged, evaluated or saved.
WINDOW = 2
FOUR = ("accumulation=fixed", "accumulation.batches=4", "batch_size=2")
MASTERS, EARLY = ("precision=bf16-master", *FOUR), ("clip=null",)
STREAMED = (*MASTERS, "weights=streamed", "gradient_checkpointing=every_layer", "optim=adamw8bit")
BY_LAYER = (*STREAMED, "weights.order=by_layer")
SHAPE = "{model_type: mixtral, vocab_size: 300, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
SHAPE += "num_attention_heads: 2, num_key_value_heads: 1, num_local_experts: 4, output_router_logits: true}"
MIXTURE = ("model=hf", "model.name=mixture", "model.pretrained=false", f"model.architecture={SHAPE}", *FOUR)
DOCUMENTS = ("data=jsonl", "data.path=notes.jsonl", "data.packing=documents", "seq_len=48", *FOUR)
SHAPE = "{model_type: mistral, vocab_size: 300, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
SHAPE += "num_attention_heads: 2, num_key_value_heads: 1, sliding_window: 8}"
SLIDING = ("model=hf", "model.name=sliding", "model.pretrained=false", f"model.architecture={SHAPE}")
# recipe -> (overrides, largest accepted number of device reads in a window)
RECIPES = {
    "plain": ((), 1),
    "accumulation": (FOUR, 1),
    "no clipping": (("clip=null",), 1),
    "clip_value": (("clip=null", "clip_value=0.01"), 1),
    "skip": (("on_nonfinite=skip", *FOUR), 1),
    "chunked": (("loss=chunked", *FOUR), 1),
    "tiled": (("loss=tiled", *FOUR), 1),
    "mixture": (MIXTURE, 1),
    "lora": (("adapter=lora",), 1),
    "in backward": (("optim.in_backward=true", "clip=null"), 1),
    "bf16-sr": (("precision=bf16-sr",), 1),
    "masters": (MASTERS, 1),
    "masters early": ((*MASTERS, *EARLY), 1),
    "masters of a mixture": ((*MIXTURE, "precision=bf16-master"), 1),
    "streamed": (STREAMED, 1),
    "streamed early": ((*STREAMED, *EARLY), 1),
    "by layer": (BY_LAYER, 1),
    "by layer early": ((*BY_LAYER, *EARLY), 1),
    "16-master": (("precision=16-master", *FOUR), 1),  # overflow is found in gradients that are already on the host
    "16": (("precision=16", *FOUR), 1),
    "16-true": (("precision=16-true", *FOUR), 1),
    "documents": ((*DOCUMENTS, "loss=full"), 1),
    "documents, checkpointing": ((*DOCUMENTS, "gradient_checkpointing=every_layer"), 1),
    "documents, by layer": ((*DOCUMENTS, *BY_LAYER), 1),
    "documents, window": ((*SLIDING, *DOCUMENTS), 1),  # sliding window shorter than a row, so attention needs a mask
}


@pytest.fixture
def reads_of(fit, tmp_path, monkeypatch):
    """Returns a function that takes overrides and returns the device reads of a run of three steps. The file of
    DOCUMENTS has notes so short that a row has several of them."""
    monkeypatch.chdir(tmp_path)
    notes = (" ".join(f"note{j}" for j in range(i % 7 + 2)) for i in range(400))
    (tmp_path / "notes.jsonl").write_text("".join(f'{{"text": "{note}"}}\n' for note in notes))

    def run(*lines):
        with as_on_a_card() as reads:
            fit("max_steps=3", "log_every=100", *lines)
        return reads

    return run


@pytest.mark.rows("plain", "mixture", "masters early", "by layer", "16")
@pytest.mark.parametrize("recipe", RECIPES)
def test_optimizer_step_reads_values_from_the_device_once(reads_of, recipe):
    lines, most = RECIPES[recipe]
    reads = reads_of(*lines)
    read = reads.lines(WINDOW)
    assert 1 <= read.total() <= most, read
    if recipe.startswith("documents"):  # transformers reads from host memory where documents begin
        assert not (of_model := reads.lines(WINDOW, of_model=True)), of_model


def test_step_with_logging_reads_only_its_four_logged_values_in_addition(reads_of):
    """The logged values are the loss, the auxiliary loss, the gradient norm and the balance of experts."""
    read = reads_of(*MIXTURE, "log_every=1").lines(WINDOW)
    logged = sum(count for line, count in read.items() if line.startswith("lowmem/report/"))
    assert (read.total(), logged) == (5, 4), read


def item_of_each_micro_batch(monkeypatch):
    right = CausalLM._run_micro_batch

    def reads_the_loss(self, micro_batch, weight, sums):
        right(self, micro_batch, weight, sums)
        sums.loss.item()

    monkeypatch.setattr(CausalLM, "_run_micro_batch", reads_the_loss)


def labels_counted_on_the_device(monkeypatch):
    monkeypatch.setattr("lowmem.data.loader.COUNTS", ())


def lengths_read_in_each_layer(monkeypatch):
    monkeypatch.setattr("lowmem.model.document_attention.lengths_of", lambda first, _: first.diff().tolist())


def documents_asked_of_the_mask(monkeypatch):
    monkeypatch.setattr("lowmem.model.document_attention.known_first_tokens", lambda *_: None)


def weight_read_by_the_host_thread(monkeypatch):
    right = HostOptimizer._step

    def reads_the_weight(self, master, *how):
        right(self, master, *how)
        master.weight.flatten()[0].item()

    monkeypatch.setattr(HostOptimizer, "_step", reads_the_weight)


@pytest.mark.wrong
@pytest.mark.parametrize(
    ("wrong", "recipe"),
    [
        (item_of_each_micro_batch, "accumulation"),
        (item_of_each_micro_batch, "by layer"),
        (labels_counted_on_the_device, "mixture"),
        (labels_counted_on_the_device, "documents"),
        (lengths_read_in_each_layer, "documents"),
        (documents_asked_of_the_mask, "documents, checkpointing"),
        (weight_read_by_the_host_thread, "masters early"),
    ],
)
def test_additional_device_reads_in_an_optimizer_step_are_counted(reads_of, monkeypatch, wrong, recipe):
    wrong(monkeypatch)
    lines, most = RECIPES[recipe]
    assert reads_of(*lines).lines(WINDOW).total() >= most + 4


def test_reads_of_device_tensors_are_counted_and_reads_of_host_tensors_are_not():
    with as_on_a_card() as reads:
        reads.window = 0
        device = torch.ones(3)
        with host_side():
            host = torch.ones(3)
        for tensor, count in ((host, 0), (host.sum() + 1, 0), (device, 1), (device + host[0], 1), (device[:1], 1)):
            for read in (
                lambda t: t.sum().item(),
                torch.nonzero,
                torch.Tensor.tolist,
                lambda t: t.reshape(-1)[t.reshape(-1) > 0],
            ):
                before = len(reads.seen)
                read(tensor)
                assert len(reads.seen) - before == count
