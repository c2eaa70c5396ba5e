"""Tests models whose rotary embedding changes with the length of the input. If a longer row or document changes the
logits of a shorter one, the model is refused."""

from types import SimpleNamespace

import pytest
import torch

from lowmem.data.loader import Rows
from lowmem.data.pairs import PaddedPairs
from lowmem.model import lengths, packed_attention
from lowmem.system.errors import Refused
from lowmem.techniques.loss import cross_entropy as losses
from networks import VOCABULARY, network

pytestmark = pytest.mark.kernels
CHANGES, LONGEST = 20, 48  # tokens
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + 2 * i for i in range(8)],
    "original_max_position_embeddings": CHANGES,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
KINDS = {
    "longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": CHANGES}),
    "dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": CHANGES}),
    "none": ("llama", {}),
}


def made(kind):
    model_type, more = KINDS[kind]
    more = {"max_position_embeddings": 64, "pad_token_id": 0} | more
    return network(model_type, **more).eval()


def tokens(rows, count):
    return torch.randint(1, VOCABULARY, (rows, count), generator=torch.Generator().manual_seed(0))


def off(model, length, beside):
    """Returns the largest change that a longer row causes in the logits of a row of `length` tokens. The longer row is
    in the same micro-batch (`beside`), or in an earlier forward pass."""
    ids = tokens(2, LONGEST)
    short = ids[:1].clone()
    short[:, length:] = 0
    with torch.no_grad():
        model(input_ids=ids[:1, :2], use_cache=False)
        alone = model(input_ids=ids[:1, :length], use_cache=False).logits
        together = model(input_ids=torch.cat([short, ids[1:]]), use_cache=False).logits
        after = model(input_ids=ids[:1, :length], use_cache=False).logits
    return ((together[:1, :length] if beside else after) - alone).abs().max().item()


# For each kind: whether logits depend on a longer row in the same micro-batch, and on one in an earlier forward pass.
DEPENDS = {"longrope": (True, False), "dynamic": (True, True), "none": (False, False)}


@pytest.mark.parametrize("kind", KINDS)
def test_length_check_finds_the_length_from_which_logits_of_longrope_and_dynamic_depend_on_longer_rows(kind):
    model = made(kind)
    rounding = 1e-6  # of logits, which are below 1 for random weights
    beside, after = off(model, CHANGES - 4, True) > 10 * rounding, off(model, CHANGES + 4, False) > 10 * rounding
    assert (beside, after) == DEPENDS[kind]
    assert lengths.depends_from(model, LONGEST, together=True) == (CHANGES if beside else None)
    assert lengths.depends_from(model, LONGEST, together=False) == (CHANGES if after else None)
    assert lengths.depends_from(model, CHANGES, together=True) is None  # no row is longer


# Rotary angles are complex numbers in Llama 4, differ by kind of layer in Gemma 3, and apply to only some dimensions of
# a head in GPT-NeoX and Qwen3.5.
@pytest.mark.parametrize("model_type", ["llama4_text", "gemma3_text", "gpt_neox", "qwen3_5_text"])
def test_length_check_of_models_with_other_rotary_embeddings_finds_no_dependence(model_type):
    model = network(model_type, max_position_embeddings=CHANGES)
    assert any(hasattr(module, "rope_type") for module in model.modules())
    assert lengths.depends_from(model, LONGEST, together=True) is None


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_length_check_leaves_the_logits_of_the_model_bit_identical(kind):
    model, ids = made(kind), tokens(1, CHANGES - 2)
    with torch.no_grad():
        before = model(input_ids=ids, use_cache=False).logits
        lengths.depends_from(model, LONGEST, together=True)
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "rows", "told"),
    [
        ("longrope", 2, r"seq_len=20 or, unless the data are pairs, batch_size=1\.$"),
        ("longrope", 1, None),
        ("dynamic", 2, r"seq_len=20\.$"),
        ("dynamic", 1, r"seq_len=20\.$"),
        ("none", 2, None),
    ],
)
def test_model_whose_padded_rows_depend_on_longer_rows_is_refused(kind, rows, told, dtype):
    model = made(kind).to(dtype)
    if told is None:
        lengths.check_rows(model, LONGEST, rows)
    else:
        with pytest.raises(Refused, match=f"packing=padded: .* longer than 20 tokens.* Type {told}"):
            lengths.check_rows(model, LONGEST, rows)
    lengths.check_rows(model, CHANGES, rows)


@pytest.mark.parametrize(
    ("kind", "told"),
    [("longrope", "seq_len=20 or, .*data.packing=padded batch_size=1"), ("dynamic", "seq_len=20"), ("none", None)],
)
def test_model_whose_packed_documents_depend_on_the_longest_document_is_refused(kind, told):
    """A check of only the first 16 or 20 tokens finds no error, because no document among them is long."""
    model, row = made(kind), tokens(1, LONGEST)
    packed_attention.separate(model)
    assert packed_attention.keeps_apart(model, row[:, :16])
    packed_attention.verify(model, row[:, :CHANGES])
    if told is None:
        packed_attention.verify(model, row)
        return
    with pytest.raises(Refused, match=rf"packing=documents: .* longer than 20 tokens.* Type {told}\.$"):
        packed_attention.verify(model, row)


BEYOND, ROW = 100, 128  # BEYOND: more than the checked tokens, and less than a row


@pytest.mark.parametrize("model_type", ["gemma3_text", "mistral"])
def test_separation_check_shortens_long_attention_windows_and_restores_them(model_type):
    model, row = network(model_type, max_position_embeddings=256, sliding_window=BEYOND).eval(), tokens(1, ROW)
    packed_attention.separate(model)
    seen, forward = set(), model.forward

    def windows():
        return {
            vars(part)["sliding_window"] for part in (model.config, *model.modules()) if "sliding_window" in vars(part)
        }

    def looking(**inputs):
        seen.update(windows())
        return forward(**inputs)

    before, model.forward = windows(), looking
    packed_attention.verify(model, row)
    assert BEYOND in before and seen == before | {18} and windows() == before


def test_model_whose_attention_scale_depends_on_the_position_in_a_packed_row_is_refused():
    """Llama 4 derives the attention scale from the index of a token in its row, so a later document gets a different
    scale than in a row of its own."""
    more = {
        "max_position_embeddings": 256,
        "num_local_experts": 2,
        "intermediate_size_mlp": 64,
        "no_rope_layers": [0, 0],
    }
    model = network("llama4_text", attention_chunk_size=BEYOND, floor_scale=BEYOND, **more).eval()
    row = tokens(1, ROW)
    packed_attention.separate(model)
    assert packed_attention.keeps_apart(model, row[:, :64])
    packed_attention.verify(model, row[:, :BEYOND])
    with pytest.raises(Refused, match="attend to each other"):
        packed_attention.verify(model, row)


def test_length_check_runs_before_training_and_validation_for_padded_rows_only(monkeypatch):
    asked, share = [], SimpleNamespace(batch_size=3)
    monkeypatch.setattr(lengths, "check_rows", lambda *called: asked.append(called[1:]))
    pairs = SimpleNamespace(filler=True, positions=False, longest=77, example=PaddedPairs.example)
    loaders = [SimpleNamespace(sequences=rows, share=share) for rows in (pairs, Rows())]  # plain `Rows` have no filler
    sets = [SimpleNamespace(micro_batches=loader) for loader in loaders]
    trainer = SimpleNamespace(train_dataloader=loaders[0], val_dataloaders=sets, validating=True)
    module = SimpleNamespace(model="the model", loss=losses.Function(losses.full), tiles=None)
    losses.Verified().on_train_start(trainer, module)
    losses.Verified().on_validation_start(trainer, module)
    assert asked == [(77, 6)] * 3
