"""Tests the predicted host memory of loading a model folder, whose weight files are memory-mapped."""

import pytest
import torch

from lowmem.model.loading import describe, load
from lowmem.plan.prediction import predict
from lowmem.plan.target import Target

STREAMED = ("precision=bf16-master", "weights=streamed", "gradient_checkpointing=every_layer")


@pytest.mark.parametrize(
    ("saved", "lines", "counted"),
    [("bfloat16", ["precision=32"], True), ("float32", ["precision=32"], False), ("float32", STREAMED, True)],
)
def test_host_memory_of_a_mapped_weight_file_is_counted_only_if_its_tensors_are_converted_or_copied(
    config, tmp_path, saved, lines, counted
):
    cfg = config(*lines).resolved()
    network = load(describe(cfg), getattr(torch, saved))
    network.save_pretrained(tmp_path / "model")
    file = (tmp_path / "model" / "model.safetensors").stat().st_size
    drawn = predict(cfg, Target(on_card=False))
    cfg = cfg.knowing(model={"pretrained": True, "name": str(tmp_path / "model")})
    loaded = predict(cfg, Target(on_card=False))
    assert (drawn.mapped, loaded.mapped) == (0, file if counted else 0)
    growths = [one.phases["load"].host - one.host.libraries for one in (drawn, loaded)]
    assert growths[1] - growths[0] == loaded.mapped
    assert loaded.host.total <= max(
        need.host for need in loaded.phases.values()
    )  # the operating system evicts mapped pages before it runs out of memory


def test_rank_0_loading_16_bit_files_in_fp32_is_predicted_to_hold_only_its_shard(config, tmp_path):
    """If the weights in the files have fewer bits than in the run, rank 0 holds its shard and one full tensor.
    Otherwise it holds the full model."""
    cfg = config("precision=32", "model.architecture.n_embd=256").resolved()
    network, needs = load(describe(cfg), torch.float32), {}
    for saved in ("float32", "bfloat16"):
        folder = tmp_path / saved
        network.to(getattr(torch, saved)).save_pretrained(folder)
        divided = config("model=hf", f"model.name={folder}", "seq_len=16", "strategy=fsdp", "devices=2", "plan=off")
        predicted = predict(divided.resolved(), Target(on_card=True))
        needs[saved] = predicted.phases["load"].host - predicted.host.libraries // 2 - predicted.mapped
    full = 4 * sum(p.numel() for p in network.parameters())
    assert needs["float32"] - needs["bfloat16"] == pytest.approx(full / 2, rel=0.1)  # its shard is the other half
