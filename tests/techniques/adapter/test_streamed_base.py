"""Tests that training with a streamed frozen base in 4 or 16 bits is bit-identical to training with a resident base,
and that a base on a drive is written only once."""

from contextlib import suppress

import pytest

from lowmem.model.blocks import blocks
from lowmem.model.trainable import stored_weights
from lowmem.offload.registered import Registered
from lowmem.system.errors import NotFinite
from lowmem.system.scratch_file import PAGE
from lowmem.techniques.weights.streamed import Streamed
from made_up import LateLane
from pairwise import pairwise
from streams import MODELS, POLICIES, lines, trained

STAYS, STREAMS = ["weights=resident"], ["weights=streamed"]
MATRIX = pairwise(
    MODELS,
    POLICIES,
    (2, 3),
    ("bf16-master", "16-master"),
    ("by_layer", "by_micro_batch"),
    possible=lambda row: row[1] not in ("sqrt", "every_k") or row[4] == "by_micro_batch",
)


def arguments(model, policy="every_layer", precision="bf16-master", adapter="qlora", **how):
    more = ("loss=tiled", "loss.columns=64", "max_steps=2", f"adapter={adapter}", "adapter.r=4")
    return lines(model, *more, precision=precision, policy=policy, **how)


@pytest.mark.rows("qwen3_moe-offload-3-16-master-by_layer", "gpt2-offload_attention-2-16-master-by_micro_batch")
@pytest.mark.parametrize(("model", "policy", "slots", "precision", "order"), MATRIX)
def test_streamed_qlora_base_gives_the_bits_of_a_resident_base(config, model, policy, slots, precision, order):
    asked = arguments(model, policy, precision)
    one = trained(config, STAYS, model, asked)
    other = trained(config, [*STREAMS, f"weights.slots={slots}", f"weights.order={order}"], model, asked)
    assert other.module.weights.fetched > 0 and (precision == "bf16-master" or one.skipped > 0)
    assert one.same(other)


@pytest.mark.parametrize("adapter", ["qlora", pytest.param("lora", marks=pytest.mark.matrix)])
def test_streamed_adapter_base_with_late_copies_gives_the_bits_of_a_resident_base(config, monkeypatch, adapter):
    """In the deliberately wrong variant, the device does not wait for the copies."""
    asked = arguments("llama", adapter=adapter, clip="off")

    def late():
        return trained(config, [*STREAMS, "weights.slots=3"], "llama", asked, lane=LateLane(seed=3))

    stays = trained(config, STAYS, "llama", asked)
    assert late().same(stays)
    monkeypatch.setattr(Registered, "hold", lambda *_: None)
    with suppress(NotFinite):
        assert not late().same(stays)


@pytest.mark.parametrize("adapter", ["qlora", "lora"])
def test_frozen_base_streamed_from_a_drive_is_written_once_and_gives_the_bits_of_a_resident_base(
    config, tmp_path, adapter
):
    """Every step reads the drive. A block streams all of its frozen weights, and none of its trained weights."""
    drive = [f"weights.drive={tmp_path}", "weights.drive_holds=all"]
    moved_in = []

    def watched(module):
        weights = module.weights
        weights.start = lambda sink=None: (moved_in.append(weights.drive.written_bytes), Streamed.start(weights, sink))

    on_drive = trained(config, [*STREAMS, *drive], "llama", arguments("llama", adapter=adapter), prepare=watched)
    assert on_drive.same(trained(config, STAYS, "llama", arguments("llama", adapter=adapter)))
    weights, model = on_drive.module.weights, on_drive.module.model
    weights.finish()
    assert weights.drive.written_bytes >= moved_in[0] > 0
    files = weights._on_drive._weights._every  # the first page of each file is not used
    assert weights.drive.written_bytes == sum(swap_file.size - PAGE for swap_file in files)
    assert weights.drive.read_bytes > 2 * weights.drive.written_bytes
    streaming = {tensor for host_block in weights.host_blocks for tensor in host_block.spans}
    for block in blocks(model):
        for tensor in stored_weights(block):
            assert (tensor in streaming) == (not tensor.requires_grad)


def test_block_with_a_few_frozen_weights_streams_all_its_weights(config):
    """Only a block that is mostly frozen leaves its trained weights on the device."""
    weights = trained(config, STREAMS, "llama", lines("llama", "max_steps=1", "freeze=['*.up_proj.*']")).module.weights
    for host_block, block in zip(weights.host_blocks, weights.blocks, strict=True):
        assert {*host_block.spans} == {*block.parameters()}


# --- large layers -----------------------------------------------------------------------------------------------------


@pytest.mark.matrix
def test_streamed_qlora_base_with_a_168_mib_matrix_gives_the_bits_of_a_resident_base(config):
    """With matrices above 165 MiB and three slots, bitsandbytes' own layer would compute wrong gradients: its backward
    reads the packed matrix that forward saved, and another block may be in that slot by then."""
    large = (("intermediate_size", 1_376_256), ("num_hidden_layers", 4))  # x 64: 168 MiB in bf16
    asked = [*arguments("llama", clip="off")[:-3], "max_steps=1", "adapter=qlora", "adapter.target=[o_proj]"]
    one = trained(config, STAYS, "llama", asked, changed=large)
    assert one.same(trained(config, [*STREAMS, "weights.slots=3"], "llama", asked, changed=large))
