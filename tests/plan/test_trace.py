"""Tests the prediction of a run's memory by a trace of tensor shapes, against the memory that the run measures."""

import csv
import json
import random
import string
from collections import Counter

import pytest
import torch

import parity
from lowmem.model import packed_attention
from lowmem.model.document_attention import MASKED
from lowmem.plan.target import Target
from lowmem.plan.tracing.trace import Steady, trace
from lowmem.system import process

COMPILED = ("compile=blocks",)  # the allocations of compiled blocks cannot be traced
STEADY = 3  # the step at which a run is compared
SCALARS = 1024  # bytes: losses and token counts that a window keeps of its earlier micro-batches
ANSWERS = 8 * 2 * 8  # bytes: one float64 for each of 2 answers of 8 pairs, of the reference model or of the loss
OTHER_BATCH = 8 * parity.LENGTH * 4 * 8  # bytes of a batch: int64 ids and labels of 8 rows and of 8 mismatched rows
TABLES = 4096  # bytes: quantization tables that all parameters share, which an estimate per element omits
ORDER = 300 * 64 * 4  # bytes of the largest parameter: the order in which a real step updates parameters is not traced
PHASES = ("forward", "backward", "step", "evaluation")
# Matrices of 64 x 64 are the smallest whose state 8-bit optimizers hold in 8 bits.
MODELS = {
    "gpt2": ["model.architecture.n_embd=64", "model.architecture.n_layer=3", "model.architecture.vocab_size=300"],
    "llama": list(parity.MODEL),
}


def measured(folder) -> dict[str, dict[str, int]]:
    """Returns the rows of memory.csv for the phases of step STEADY and for the evaluation, as a dict of dicts: bytes by
    phase and column."""
    with (folder / "memory.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["live_peak_bytes"]]
    return {
        row["phase"]: {key: int(value) for key, value in row.items() if key != "phase" and value}
        for row in rows
        if int(row["step"]) == STEADY or row["phase"] == "evaluation"
    }


def traced(cfg):
    return trace(cfg.resolved(), on_card=False)


def cases():
    """Yields (choice, model) for each choice whose allocations can be traced. adamw4bit compiles its update for each
    shape of a parameter, so GPT-2 with adamw4bit is marked `matrix`."""
    for choice in [c for c in parity.CHOICES if c not in COMPILED] + ["optim.in_backward=true"]:
        for model in MODELS:
            slow = model == "gpt2" and choice == "optim=adamw4bit"
            yield pytest.param(choice, model, marks=pytest.mark.matrix if slow else ())


@pytest.fixture(scope="module")
def full_rows(tmp_path_factory) -> list[str]:
    """Writes preference pairs whose answers are longer than a row, and returns the overrides that read them. The prompt
    is one token, so every label belongs to an answer, as in the plan's example batch."""
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    draw, letters = random.Random(0), string.ascii_letters
    texts = lambda: {key: " ".join(["", *draw.choices(letters, k=90)]) for key in ("chosen", "rejected")}  # noqa: E731
    file.write_text("\n".join(json.dumps({"prompt": prompt} | texts()) for prompt in letters))
    return [f"data.path={file}", "data.too_long=cut", "data.val_fraction=0.2"]


@pytest.mark.rows(
    "precision=bf16-gpt2",
    "precision=16-master-llama",
    "optim=adafactor-llama",
    "optim.in_backward=true-gpt2",
    "accumulation=fixed-gpt2",
    "weights=streamed-llama",
    "gradient_checkpointing=every_layer-gpt2",
    "loss=tiled-llama",
    "adapter=qlora-gpt2",
)
@pytest.mark.parametrize(("choice", "model"), [*cases()])
def test_traced_peak_of_every_phase_equals_the_measurement(config, fit, full_rows, choice, model):
    typed = [*MODELS[model], choice, *parity.WITH.get(choice, [])]
    if "data=preference" in typed:
        typed += full_rows
    typed += ["max_steps=3", "val_every=3", "batch_size=8"] if not any("batch_size" in t for t in typed) else []
    _, folder = fit(*typed)
    cfg = config(*typed)
    found, phases = measured(folder), traced(cfg).phases
    for phase in PHASES:
        beyond = phases[phase].total - found[phase]["live_peak_bytes"]
        if cfg.technique("optim").steps_by is None:  # state and scratch are estimated from a probe of the optimizer
            assert abs(beyond) <= TABLES + (ORDER if phase == "step" else 0)
        else:
            allowed = SCALARS if choice.startswith("accumulation") else ANSWERS if full_rows[0] in typed else 0
            # With loss=kto, the run prefetches a second batch during the evaluation; the plan has one batch.
            allowed += OTHER_BATCH if (choice, phase) == ("loss=kto", "evaluation") else 0
            assert abs(beyond) <= allowed, (phase, phases[phase], found[phase])
            for category in ("weights", "gradients", "optimizer"):
                assert phases[phase].bytes[category] == found[phase][f"{category}_bytes"]
        if phase == "evaluation":
            assert phases[phase].host == found[phase]["host_tensor_bytes"]


@pytest.mark.rows("offload-null")
@pytest.mark.parametrize("clip", ["null", "1.0"])
@pytest.mark.parametrize("policy", ["offload", pytest.param("every_layer", marks=pytest.mark.matrix)])
def test_memory_of_an_optimizer_step_with_order_by_layer_is_predicted_to_the_byte(config, fit, clip, policy):
    """Wrong variants: predictions for one micro-batch less, and for weights.order=by_micro_batch, must be off by more
    than 10 KiB in some phase."""
    typed = [*MODELS["llama"], "weights=streamed", "precision=bf16-master", "loss=tiled", f"clip={clip}"]
    typed += [f"gradient_checkpointing={policy}", "batch_size=2", "max_steps=3", "val_every=3", "optim=adamw"]
    typed += ["accumulation=fixed"]
    by_layer = [*typed, "accumulation.batches=4", "weights.order=by_layer"]
    _, folder = fit(*by_layer)
    found, phases = measured(folder), traced(config(*by_layer)).phases
    for phase in PHASES:
        assert found[phase]["live_peak_bytes"] == phases[phase].total, phase
        for category in ("weights", "gradients", "optimizer"):
            assert phases[phase].bytes[category] == found[phase][f"{category}_bytes"], (phase, category)
    assert phases["evaluation"].host == found["evaluation"]["host_tensor_bytes"]
    for wrong in ([*by_layer, "accumulation.batches=3"], [*by_layer, "weights.order=by_micro_batch"]):
        other = traced(config(*wrong)).phases
        beyond = [other[p].total + other[p].host - phases[p].total - phases[p].host for p in PHASES]
        assert max(map(abs, beyond)) > 10 * SCALARS


PACKED = ["seq_len=512", "batch_size=2", "max_steps=3", "val_every=3", "sample_tokens=0"]


@pytest.mark.rows("gpt2-more0")
@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("gpt2", ("loss=full", "model.architecture.n_positions=512")),
        ("llama", ("gradient_checkpointing=every_layer", "precision=bf16", "loss=full")),
        ("llama", ("loss=chunked", "loss.rows=256", "precision=bf16-master")),
    ],
)
def test_predicted_memory_of_packed_documents_without_an_attention_mask_equals_the_measurement_within_1_percent(
    config, fit, monkeypatch, text_folder, tmp_path, model, more
):
    """At 512 tokens a dense mask would raise the peak of forward by more than 2 %."""
    for file in text_folder.iterdir():  # each document fills about a third of a row
        for number, start in enumerate(range(0, 60, 5)):
            lines = file.read_text().splitlines()[start : start + 5]
            (tmp_path / f"{file.stem}-{number}.txt").write_text("\n".join(lines))
    typed = [*MODELS[model], *PACKED, f"data.path={tmp_path}", "data.val_fraction=0.3", "data.packing=documents", *more]
    _, folder = fit(*typed)
    found, phases = measured(folder), traced(config(*typed)).phases
    for phase in PHASES:
        assert abs(phases[phase].total / found[phase]["live_peak_bytes"] - 1) <= 0.01, phase
    monkeypatch.setattr(packed_attention, "BY_DOCUMENT", MASKED)
    masked = traced(config(*typed)).phases
    assert masked["forward"].total > 1.02 * found["forward"]["live_peak_bytes"]


def test_predicted_memory_of_packed_documents_on_a_card_is_near_joined_rows_in_bf16_and_below_them_in_fp32(config):
    """In bf16, the varlen kernel saves about as much as attention over joined rows. In fp32, a fused kernel computes
    the attention of one document after another, but joined rows with grouped-query attention need the math kernel."""
    typed = [*MODELS["llama"], *PACKED]
    in_bf16, wide = [*typed, "precision=bf16"], [*typed, "precision=32"]
    documents = [trace(config(*lines, "data.packing=documents"), on_card=True).phases for lines in (in_bf16, wide)]
    joined = [trace(config(*lines, "data.packing=joined"), on_card=True).phases for lines in (in_bf16, wide)]
    mask = 2 * 512 * 512 * 2  # bytes of a mask in bf16; position ids and RoPE angles of documents need far less
    assert documents[0]["forward"].total - joined[0]["forward"].total < mask / 4
    assert documents[1]["forward"].total < 0.7 * joined[1]["forward"].total


def test_memory_of_a_tiled_sequence_is_predicted_to_the_byte(config, fit):
    typed = [*MODELS["llama"], "model.architecture.num_hidden_layers=2", "model.architecture.intermediate_size=512"]
    typed += ["seq_len=128", "batch_size=2", "max_steps=3", "val_every=3", "precision=bf16-master"]
    typed += ["gradient_checkpointing=every_layer"]
    _, folder = fit(*typed, "tile.tokens=50")
    found, phases = measured(folder), traced(config(*typed, "tile.tokens=50")).phases
    for phase in PHASES:
        assert phases[phase].total == found[phase]["live_peak_bytes"], phase
    assert traced(config(*typed)).phases["backward"].total > 1.1 * phases["backward"].total


def test_predicted_memory_of_a_tiled_sequence_is_linear_in_the_batch_size_from_8_sequences_on(config):
    """The search relies on this linearity. With fewer than 8 sequences, the gradient sums of the slices are most of the
    memory."""
    typed = [*MODELS["gpt2"], "model.architecture.n_positions=128", "seq_len=128", "gradient_checkpointing=every_layer"]
    sizes = (traced(config(*typed, "tile.tokens=50", f"batch_size={size}")).phases for size in (8, 12, 16))
    first, second, third = (phases["backward"].total for phases in sizes)
    assert first + third == 2 * second


def test_padded_rows_are_predicted_without_an_attention_mask(config):
    """The plan assumes rows without filler. Labels of padded rows are a separate tensor, which the loss does not copy;
    labels of joined rows are a view of the ids, which the loss copies."""
    joined, padded = (traced(config("seq_len=512", f"data.packing={kind}")).phases for kind in ("joined", "padded"))
    assert abs(padded["forward"].total - joined["forward"].total) < SCALARS


@pytest.mark.wrong
@pytest.mark.parametrize(
    ("real", "wrong"),
    [
        ("optim=adamw", "optim=sgd"),  # a prediction without optimizer state
        ("gradient_checkpointing=every_layer", "gradient_checkpointing=none"),
        ("gradient_checkpointing=every_layer", "one block less"),
        ("loss=full", "loss=chunked"),
        ("precision=bf16-master", "precision=bf16-true"),
    ],
)
def test_prediction_of_a_different_run_differs_from_the_measurement_by_more_than_the_tolerances(
    config, fit, real, wrong
):
    typed = [*MODELS["gpt2"], "max_steps=3", "val_every=3", "batch_size=8"]
    _, folder = fit(*typed, real)
    traces = ["model.architecture.n_layer=2", real] if wrong == "one block less" else [wrong]
    if wrong == "loss=chunked":
        traces.append("loss.rows=16")
    phases, found = traced(config(*typed, *traces)).phases, measured(folder)
    allowed = max(SCALARS, TABLES, ORDER) + 8 * 16 * 8
    assert any(abs(phases[p].total - found[p]["live_peak_bytes"]) > allowed for p in PHASES)


def test_step_that_reads_values_of_gradients_or_labels_is_traced_through_all_phases(config):
    """The overflow check of fp16, clipping by norm and a chunked loss read values of gradients or labels, which a trace
    does not have."""
    found = traced(config("precision=16", "clip=0.5", "loss=chunked", "loss.rows=7", "accumulation=fixed"))
    assert set(PHASES) <= set(found.phases)


def test_memory_timeline_of_a_long_trace_is_not_thinned(config, monkeypatch):
    """The planner finds points of a timeline by counting events, so it needs all points."""
    cfg = config("gradient_checkpointing=every_layer").resolved()
    full = trace(cfg, on_card=False)
    monkeypatch.setattr("lowmem.memory.tracker.MOST", 5)
    assert trace(cfg, on_card=False) == full


@pytest.mark.matrix
def test_tracing_70b_parameters_takes_less_than_512_mib(config):
    """A trace has only shapes: 70B parameters in fp32 would take 260 GiB."""
    process.reset_peak_rss()
    before = process.rss_bytes()
    cfg = config(
        *("model=llama-3.1-8b", "model.pretrained=false", "precision=bf16-master", "optim=adamw8bit"),
        *("model.architecture.hidden_size=8192", "model.architecture.num_hidden_layers=80"),
        *("model.architecture.num_attention_heads=64", "model.architecture.intermediate_size=28672"),
        *("gradient_checkpointing=every_layer", "loss=chunked", "batch_size=1", "seq_len=2048"),
    )
    found = traced(cfg)
    assert 70e9 < found.parameters < 71e9
    assert found.phases["step"].bytes["weights"] == pytest.approx(2 * found.parameters, rel=0.001)
    assert process.peak_rss_bytes() - before < 2**29


def test_trace_of_a_model_that_draws_initial_weights_until_they_are_within_bounds_ends(config):
    """The model draws a truncated normal again until every number is within its bounds. A trace has no numbers, so this
    loop would never end."""
    keys = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    keys |= dict.fromkeys([f"{name}_token_id" for name in ("pad", "bos", "eos", "cls", "sep")], 0)
    cfg = config("model=hf", "model.name=x", "model.pretrained=false", "lr=1e-3")
    cfg = cfg.replacing("model.architecture", {"model_type": "modernbert-decoder", **keys})
    assert traced(cfg).parameters > 0


def test_tracing_an_endless_loop_on_a_random_number_stops_without_a_prediction(config, monkeypatch):
    from transformers import GPT2Model

    from lowmem.plan.prediction import NotPredicted, predict

    forward = GPT2Model.forward

    def waits(self, *args, **kwargs):
        while torch.rand(1) > 0.5:  # in a trace this is always true
            pass
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(GPT2Model, "forward", waits)
    monkeypatch.setattr("lowmem.plan.tracing.shapes.OPERATORS", 20_000)
    with pytest.raises(NotPredicted, match="20,000 operators"):
        predict(config().resolved(), Target(on_card=False))


def test_trace_of_two_blocks_needs_less_than_10000_operators(config, monkeypatch):
    monkeypatch.setattr(
        "lowmem.plan.tracing.shapes.OPERATORS", 10_000
    )  # for 2 blocks; the default budget is 25 times as large
    assert traced(config()).parameters > 0


def test_exceeded_operator_budget_of_a_trace_is_reported_at_any_operator(config, monkeypatch):
    """The exception must never be raised inside a query from C++ about a tensor, where it would end the process."""
    from lowmem.plan.prediction import NotPredicted, predict

    cfg = config("model=hf", "model.name=x", "model.pretrained=false", "lr=1e-3")
    cfg = cfg.replacing(
        "model.architecture", {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 300}
    )
    for operators in (1000, 1500, 1501, 1502, 1503, 2000):
        monkeypatch.setattr("lowmem.plan.tracing.shapes.OPERATORS", operators)
        with pytest.raises(NotPredicted, match="operators"):
            predict(cfg.resolved(), Target(on_card=False))


def test_exceeded_operator_budget_inside_a_pipeline_is_reported(config, monkeypatch):
    """A pipeline schedule wraps the exceptions of its stages."""
    from lowmem.plan.prediction import NotPredicted, predict

    monkeypatch.setattr("lowmem.plan.tracing.shapes.OPERATORS", 500)
    cfg = config("strategy=pipeline", "devices=2", "accumulation=fixed")
    with pytest.raises(NotPredicted, match="operators"):
        predict(cfg.resolved(), Target(on_card=False))


def test_trace_of_a_cuda_run_on_a_cpu_equals_the_cpu_trace(config):
    """With device=cuda, the config also sets the device of the precision plugin to cuda."""
    here, there = (config("precision=bf16-master", f"device={device}") for device in ("cpu", "cuda"))
    assert traced(there).phases == traced(here).phases


# --- work -------------------------------------------------------------------------------------------------------------


def bytes_each(cfg):
    """Returns the memory traffic of each phase, in bytes per parameter."""
    found, moved = traced(cfg), Counter()
    for (phase, work), times in found.work.items():
        moved[phase] += work.moved * times / found.parameters
    return moved


def test_traced_traffic_of_an_optimizer_step_is_the_sum_of_norm_clipping_and_update(config):
    """Bytes per parameter in fp32: the norm reads the gradient (4), clipping reads and writes the gradient (8), and
    fused AdamW moves 28."""
    found = bytes_each(config("clip=1.0"))
    assert found["step"] == pytest.approx(4 + 8, rel=0.02) and found["update"] == pytest.approx(28, rel=0.02)
    found = bytes_each(config("clip=null"))
    assert found["step"] == pytest.approx(4, rel=0.02) and found["update"] == pytest.approx(28, rel=0.02)
    assert not found["sum"]


def test_traced_traffic_of_an_optimizer_step_in_backward_is_counted_once_and_not_as_backward(config):
    after, inside = (bytes_each(config("clip=null", f"optim.in_backward={on}")) for on in ("false", "true"))
    for phase in ("forward", "backward", "step", "update"):
        assert inside[phase] == pytest.approx(after[phase], rel=0.02), phase


def test_traced_host_masters_sum_gradients_and_step_with_hand_computed_traffic(config):
    """Numbers are bytes per parameter. In a window of one micro-batch, 16-bit gradients are copied (4), read for the
    norm (2), widened to fp32 (6), unscaled and clipped (16), and used in the update (28). Then masters are rounded to
    weights (8). In a window of several micro-batches each gradient is added to an fp32 sum (10), the norm reads the sum
    (4), and the update copies the sum (8) instead of widening a gradient (6)."""
    one = bytes_each(config("precision=bf16-master", "clip=1.0"))
    assert [one[phase] for phase in ("sum", "step", "update")] == pytest.approx([4, 2, 58], rel=0.02)
    some = bytes_each(config("precision=bf16-master", "clip=1.0", "accumulation=fixed", "accumulation.batches=2"))
    assert [some[phase] for phase in ("sum", "step", "update")] == pytest.approx([10, 4, 60], rel=0.02)
    early = bytes_each(config("precision=bf16-master", "clip=null"))
    assert early["update"] == pytest.approx(58 + 2, rel=0.02)  # the update also checks that the gradient is finite
    assert early["backward"] == pytest.approx(one["backward"], rel=0.02) and early["step"] < 0.01


def test_traced_adafactor_on_16_bit_weights_moves_150_to_220_bytes_per_parameter(config):
    """Adafactor with stochastic rounding is a sequence of operators, each of which reads and writes memory. A single
    fused kernel would move about 6 bytes."""
    found = bytes_each(config("precision=bf16-sr", "optim=adafactor"))
    assert 150 < found["update"] < 220 and found["step"] == pytest.approx(2 + 4, rel=0.02)


STREAMED = ("weights=streamed", "gradient_checkpointing=every_layer")


@pytest.mark.parametrize(
    "lines",
    [
        ("precision=bf16-master", "optim=adafactor"),
        ("precision=bf16-sr", "optim=adafactor", *STREAMED),
        (
            "precision=bf16-master",
            "optim=adamw8bit",
            "clip=null",
            *STREAMED,
        ),  # streamed weights are updated during backward
    ],
    ids=["masters", "streamed", "streamed masters updated in backward"],
)
def test_tracing_the_host_step_of_one_weight_per_shape_equals_tracing_the_step_of_every_weight(
    config, monkeypatch, lines
):
    found, steps = traced(config(*lines)), Counter()

    def every(state, weight, known):
        def step(*given, own=weight.step):
            steps[weight.name] += 1
            own(*given)

        return step

    monkeypatch.setattr(Steady, "_one_of_a_kind", every)
    whole = traced(config(*lines))
    assert len(steps) > 10 and (found.work, found.phases) == (whole.work, whole.phases)


def test_traced_traffic_of_recomputation_counts_as_backward_and_leaves_the_step_unchanged(config):
    plain, again = (bytes_each(config(f"gradient_checkpointing={kind}")) for kind in ("none", "every_layer"))
    assert again["forward"] == pytest.approx(plain["forward"], rel=0.02) and again["backward"] > 1.2 * plain["backward"]
    assert again["step"] == plain["step"]


def test_traced_optimizer_state_of_a_third_parameter_is_derived_from_two_parameters_of_its_shape():
    from lowmem.plan.tracing.trace import another

    table = torch.ones(4)  # shared by all parameters
    first, second = ({"step": 1, "moments": [torch.ones(2, 3)], "table": table} for _ in range(2))
    third = another(first, second)
    assert third["step"] == 1 and third["table"] is table
    (moment,) = third["moments"]
    assert moment.shape == (2, 3) and moment is not second["moments"][0]
