"""Tests `plan.py longest=...`: it finds the largest value for which a recipe fits."""

from types import SimpleNamespace

import pytest
from test_job import TINY, planned  # noqa: F401

from lowmem.plan.search import longest
from lowmem.plan.search.longest import answers, lines_that_stay
from lowmem.plan.search.recipes import Plan
from lowmem.system.errors import Refused


class Made(Plan):
    """A plan in which a recipe fits if and only if `fits` is True."""

    def __init__(self, fits):
        object.__setattr__(self, "fits_", fits)

    chosen = property(lambda self: self.fits_ or None)


def tried(question, most, positions=10**9):
    asked = []

    def plan_of(lines):
        asked.append(lines)
        number = int(lines[0].partition("=")[2])
        if number > positions:
            raise Refused(f"seq_len={number}: too many")
        return Made(number <= most)

    found = list(answers(question, plan_of))
    return [int(line.partition("=")[2]) for line, _ in found], [longest._fits(answer) for _, answer in found], asked


@pytest.mark.parametrize(
    ("most", "numbers"),
    [
        (5000, [1024, 4096, 16384, 10240, 7168]),
        (12000, [1024, 4096, 16384, 10240, 13312]),
        (4096, [1024, 4096, 16384, 10240, 7168]),
        (600, [1024, 512, 768]),
        (0, [1024, 512, 256]),
    ],
)
def test_search_for_the_longest_seq_len_quadruples_or_halves_from_1024_and_then_tries_finer_steps(most, numbers):
    found, fits, _ = tried("seq_len", most)
    assert found == numbers and fits == [number <= most for number in numbers]


def test_search_for_the_longest_seq_len_counts_lengths_beyond_the_positions_of_the_model_as_not_fitting():
    found, fits, _ = tried("seq_len", 10**9, positions=4096)
    assert found == [1024, 4096, 16384, 10240, 7168] and fits == [True] * 2 + [False] * 3


def test_search_for_the_largest_batch_size_plans_each_size_with_one_micro_batch_per_step():
    found, _, asked = tried("batch_size", 3)
    assert found == [1, 4, 2, 3] and all(lines[1:] == ["accumulation=none"] for lines in asked)


@pytest.mark.parametrize(
    ("question", "left"),
    [
        ("seq_len", ["accumulation.size=8", "model.name=gpt2", "model.architecture.n_layer=2", "lr=1"]),
        ("batch_size", ["model.name=gpt2", "model.architecture.n_layer=2", "lr=1"]),
        ("model", ["accumulation.size=8", "lr=1"]),
    ],
)
def test_search_for_the_largest_batch_size_or_model_leaves_out_typed_accumulation_or_model_overrides(question, left):
    typed = ["accumulation.size=8", "model.name=gpt2", "model.architecture.n_layer=2", "lr=1"]
    assert lines_that_stay(question, typed) == left


@pytest.mark.seam
def test_plan_longest_with_search_false_is_refused(planned):  # noqa: F811
    code, said, _ = planned("gpu=1GiB", "search=false", "longest=seq_len", *TINY)
    assert code and "longest=seq_len: each answer is a search" in said


@pytest.mark.seam
def test_command_found_by_the_search_for_the_largest_batch_size_lacks_the_typed_accumulation_size(planned):  # noqa: F811
    code, said, written = planned(
        *("gpu=1GiB", "ram=64GiB", "longest=batch_size", *TINY, "accumulation=effective_batch"),
        *("accumulation.size=64", "seq_len=2048", "model.architecture.n_positions=2048"),
        *("precision=bf16", "optim=adamw", "gradient_checkpointing=none", "loss=full"),
    )
    assert code == 0, said
    assert "batch_size=1" in said and not any("size=64" in line for line in written["chosen"])


def test_search_for_the_largest_model_tries_models_from_small_to_large(monkeypatch):
    sizes = {"tiny": 3, "gpt2": 2, "smollm2-135m": 1}
    monkeypatch.setattr(longest, "run_of", lambda lines: SimpleNamespace(resolved=lambda: lines[0].split("=")[1]))
    monkeypatch.setattr(longest, "network", lambda name: SimpleNamespace(parameters=sizes.get(name, 10)))
    lines = [line for line, _ in answers("model", lambda lines: Made(fits=True))]
    assert lines[:3] == ["model=smollm2-135m", "model=gpt2", "model=tiny"]
    assert len(lines) > 10 and "model=hf" not in lines


@pytest.mark.seam
def test_search_for_the_longest_seq_len_chooses_at_most_the_positions_of_the_model_and_prints_the_command(planned):  # noqa: F811
    code, said, written = planned(
        *("gpu=1GiB", "ram=64GiB", "longest=seq_len", *TINY, "model.architecture.n_positions=512"),
        *("precision=bf16", "optim=adamw", "gradient_checkpointing=every_layer", "loss=chunked", "batch_size=1"),
    )
    assert code == 0, said
    assert "seq_len=1024" in said and "seq_len=512" in said and "supports sequences of up to 512 tokens" in said
    assert written["chosen"][-1:] == ["seq_len=512"] and len(written["recipes"]) == 1
    assert "python train.py" in said and said.index("seq_len=512") < said.index("python train.py")
