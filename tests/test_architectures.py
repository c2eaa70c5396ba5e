"""Tests techniques on ten architectures of transformers, which have unusual parts around their blocks or in their head
(see FAMILIES). With the mark `matrix`, 20 popular architectures are tested, too."""

import logging

import pytest
import transformers
from benchmarks import architectures
from benchmarks.architectures import CELLS, build_module, configured, family, shrunk, table
from packaging.version import Version

from lowmem.data.loader import MicroBatch
from lowmem.fit import fit
from lowmem.model.blocks import blocks as blocks_of
from lowmem.system.errors import Refused

FAMILIES = {
    "gemma4": "a text model inside a model that sees and hears, with a cap",
    "modernbert-decoder": "layers between body and head; weights that are redrawn until they are inside",
    "bert": "a head that is its own little network",
    "rembert": "a head of another width than its body",
    "recurrent_gemma": "no sdpa, a cap under another name",
    "mixtral": "experts",
    "llama4_text": "a model that is its own body",
    "got_ocr2": "its first list of blocks sees",
    "mamba2": "no attention",
    "xlstm": "no attention, a cap",
}

# Popular architectures. Some have grouped heads, sliding windows, logit caps or scales, or experts.
POPULAR = (
    *("gpt2", "gptj", "gpt_neox", "opt", "bloom", "falcon", "llama", "mistral", "qwen2", "qwen3", "gemma2"),
    *("gemma3_text", "phi3", "olmo2", "cohere", "granite", "starcoder2", "qwen3_moe", "gpt_oss", "olmoe"),
)
REFUSED = {
    ("xlstm", "bf16-master"): "refused: expected m1 and m2",  # its code multiplies fp32 and 16-bit tensors
    ("mamba2", "lora"): "refused: adapter: PEFT cannot adapt this Mamba2ForCausalLM",
}

pytestmark = pytest.mark.usefixtures("as_for_families")


@pytest.mark.rows("mixtral")
@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.matrix) for name in POPULAR)])
def test_techniques_on_an_architecture_equal_their_references_except_refused_mamba2_lora_and_xlstm_bf16_master(name):
    for cell, said in family(name).items():
        refusal = REFUSED.get((name, cell))
        assert said.startswith(refusal) if refusal else said == "right", (cell, said)


@pytest.mark.wrong
def test_architecture_check_detects_a_merge_without_the_lora_scaling(monkeypatch):
    merge = architectures.merge

    def unscaled(network, dtype):
        for part in network.modules():
            if isinstance(getattr(part, "scaling", None), dict):
                part.scaling["default"] = 1.0
        merge(network, dtype)

    monkeypatch.setattr(architectures, "merge", unscaled)
    assert architectures.adapted(shrunk("llama")).startswith("wrong: merged")


def test_shrunk_architectures_keep_non_neutral_logit_scales_and_caps():
    assert shrunk("gemma2")["final_logit_softcapping"] < 1 and shrunk("cohere")["logit_scale"] != 1
    assert shrunk("granite")["logits_scaling"] != 1 and shrunk("recurrent_gemma")["logits_soft_cap"] < 1


old = pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="DbrxConfig rejects its own keys")


@pytest.mark.parametrize(
    "name", [pytest.param("dbrx", marks=old), "dots1", "ernie4_5_moe", "falcon_h1", "lfm2_moe", "reformer", "zamba2"]
)
def test_architecture_that_needs_special_config_values_has_a_positive_loss_and_finite_gradients(name):
    assert architectures.starts(shrunk(name)) == "right"


def test_draft_model_that_cannot_be_trained_alone_is_reported_as_not_built_with_the_reason():
    assert family("gemma4_assistant") == {
        "starts as typed": f"not built: {architectures.IMPOSSIBLE['gemma4_assistant']}"
    }


@pytest.mark.wrong
def test_architecture_check_detects_a_small_model_that_lacks_a_kind_of_block(monkeypatch):
    assert architectures.all_kinds(shrunk("gemma3_text")) == "right"
    monkeypatch.setattr(architectures, "DEPTHS", {})
    assert architectures.all_kinds(shrunk("gemma3_text")) == "wrong: 1 of 2 kinds of blocks"


def test_blocks_that_differ_only_by_their_index_count_as_one_kind():
    assert architectures.all_kinds(shrunk("diffllama")) == "right"


def test_architecture_check_allows_merged_logits_to_differ_by_rounding_of_the_weights():
    assert architectures.adapted(shrunk("cpmant")) == "right"


def test_architecture_whose_blocks_write_a_cache_is_refused_with_checkpointing():
    module, ids = build_module(configured(shrunk("xlm"), "gradient_checkpointing=every_layer"))
    with pytest.raises(Refused, match="cache"):
        module.loss(module.model, MicroBatch(ids[:, :-1], ids[:, 1:]))


def test_blocks_of_a_multimodal_model_are_found_in_its_text_decoder():
    module, _ = build_module(configured(shrunk("got_ocr2")))
    blocks = blocks_of(module.model)
    assert {id(b) for b in blocks} <= {id(m) for m in module.model.get_decoder().modules()}


def test_precision_that_the_code_of_a_model_cannot_run_is_refused_with_advice(config, tmp_path):
    """The code of xLSTM creates fp32 tensors and multiplies them by 16-bit weights."""
    cfg = config("model=hf", "model.name=x", "model.pretrained=false", "lr=1e-3", "precision=bf16-master", "clip=null")
    cfg = cfg.replacing("model.architecture", shrunk("xlstm"))
    with pytest.raises(Refused, match="Type precision=bf16"):
        fit(cfg, tmp_path)


def test_model_without_sdpa_uses_eager_attention_and_refuses_typed_flash_attention_2(config, tmp_path, caplog):
    cfg = config("model=hf", "model.name=x", "model.pretrained=false", "lr=1e-3")
    cfg = cfg.replacing("model.architecture", shrunk("bloom"))
    with caplog.at_level(logging.INFO, "lowmem"):
        fit(cfg, tmp_path)
    assert "BloomForCausalLM does not support it. Using eager" in caplog.text
    cfg = cfg.replacing("model.attention", "flash_attention_2")
    with pytest.raises(Refused, match=r"model.attention=flash_attention_2: .* Type model.attention=sdpa\."):
        fit(cfg, tmp_path)


def test_refusal_of_an_encoder_decoder_architecture_does_not_mention_attention(command):
    lines = ["model=hf", "model.name=x", "model.pretrained=false", "model.architecture={model_type: t5}", "lr=1e-3"]
    code, said = command(*lines)
    assert code == 1 and "t5 is an encoder-decoder" in said and "attention" not in said


def test_table_of_architectures_counts_results_and_lists_failures():
    found = {"a": dict.fromkeys(CELLS, "right"), "b": {"starts as typed": "not built: why"}}
    said = table(found)
    assert (
        "| **right** | 1 |" in said
        and "| **not built** | 1 |" in said
        and "- b, starts as typed: not built: why" in said
    )
