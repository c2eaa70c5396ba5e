"""Tests mixtures: shares of the learned tokens, equal repetition of rows, and the order of rows. Also tests random
tokens, which are drawn, not stored."""

import json
import re
from collections import Counter
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch

from documents import split
from lowmem.config.accumulation import fixed
from lowmem.data.loader import IGNORED, Share, WindowLoader
from lowmem.data.mix import Mix, Mixed
from lowmem.data.opening import RowSettings
from lowmem.data.packing import rows, rows_class, with_positions
from lowmem.data.random_tokens import Drawn
from lowmem.data.sources.jsonl import jsonl
from lowmem.data.token_store import load_bpe, train_bpe
from lowmem.fit import fit
from lowmem.system.errors import Refused
from lowmem.training import build

T = 8


def part(first, count, learned=None, packing="joined"):
    """Returns rows of `count` documents. Document i has T tokens, all of which equal `first` + i."""
    documents = [first + np.full(T, i) for i in range(count)]
    return rows(split(*documents, learned=learned), T, packing, "cut", "train")


def half_learned(first, count):
    return part(first, count, [np.arange(T) % 2 == 0] * count)


def counted(mixed):
    """Returns the number of learned tokens of the first part, and that of the second part, whose token ids start at
    1000."""
    batch = mixed.micro_batch(np.arange(len(mixed)))
    of = Counter()
    for row, label in zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True):
        of[row[0] >= 1000] += sum(one != IGNORED for one in label)
    return of[False], of[True]


@pytest.mark.parametrize(("shares", "share"), [((3, 1), 0.75), ((1, 1), 0.5), ((1, 9), 0.1), (None, 79 / 118.5)])
def test_data_shares_of_a_mixture_are_fractions_of_learned_tokens(shares, share):
    shares = shares and dict(zip(("all", "half"), shares, strict=True))
    mixed = Mixed({"all": part(0, 80), "half": half_learned(1000, 80)}, shares)
    ours, theirs = counted(mixed)
    assert ours / (ours + theirs) == pytest.approx(share, abs=0.01)
    rows_alone = 0.5 if shares is None else shares["all"] / sum(shares.values())
    by_rows = mixed.counts[0] / len(mixed)  # the share of rows, which differs from the share of learned tokens
    assert shares is None or abs(by_rows - rows_alone) > 0.03


def test_share_of_a_mixture_part_without_learned_tokens_is_refused():
    nothing = part(1000, 80, [np.zeros(T, bool)] * 79 + [np.ones(T, bool)])
    nothing.split = split(*(np.full(T, i) for i in range(80)), learned=[np.zeros(T, bool)] * 80)
    with pytest.raises(Refused, match="no sampled row of nothing has a token in the loss"):
        Mixed({"all": part(0, 80), "nothing": nothing}, {"all": 1, "nothing": 1})
    assert len(Mixed({"all": part(0, 80), "nothing": nothing}, None)) == 79 + 79


def test_mixture_with_shares_repeats_every_row_of_the_smaller_part_equally_often():
    mixed = Mixed({"large": part(0, 41), "small": part(1000, 11)}, {"large": 1, "small": 1})
    found = Counter(mixed.micro_batch(np.arange(len(mixed))).input_ids[:, 0].tolist())
    large, small = ([found[first + i] for i in range(count)] for first, count in ((0, 40), (1000, 10)))
    assert set(large) == {1} and set(small) == {4} and len(mixed) == 80
    assert "4.00 passes per epoch" in list(mixed.describe())[1]


def test_mixture_without_shares_reads_every_row_once():
    mixed = Mixed({"one": part(0, 41), "other": part(1000, 11)}, None)
    found = mixed.micro_batch(np.arange(len(mixed))).input_ids[:, 0].tolist()
    assert sorted(found) == [*range(40), *range(1000, 1010)]


def test_mixed_micro_batch_has_the_rows_of_its_parts_in_order():
    parts = {"joined": part(0, 20), "apart": part(1000, 20, packing="documents")}
    mixed = Mixed(parts, None)
    order = np.random.default_rng(0).permutation(len(mixed))
    batch = mixed.micro_batch(order)
    for place, index in enumerate(order):
        alone = mixed.micro_batch(np.array([index])).tensors
        assert all(torch.equal(tensor[place], alone[name][0]) for name, tensor in batch.tensors.items())
    first = parts["joined"].micro_batch(np.array([3]))
    assert torch.equal(mixed.micro_batch(np.array([3])).labels, first.labels)
    assert torch.equal(mixed.micro_batch(np.array([3])).position_ids, torch.arange(T)[None])


@pytest.mark.parametrize("second", ["joined", "documents"])
def test_planner_example_of_a_mixture_has_the_tensor_names_and_input_shape_of_a_real_micro_batch(second):
    mixed = Mixed({"a": part(0, 20), "b": part(1000, 20, packing=second)}, None)
    data = {"parts": {"a": {"packing": "joined"}, "b": {"packing": second}}}
    real, found = mixed.micro_batch(np.arange(4)), rows_class(data).example(4, T)
    assert real.tensors.keys() == found.tensors.keys()
    assert found.input_ids.shape == real.input_ids.shape and found.input_ids.is_contiguous()


def windows(mixed, count, position=None):
    loader = WindowLoader(mixed, Share(3), fixed(2), 7, *([position] if position else []))
    return list(islice(loader, count))


@pytest.mark.parametrize("done", [1, 5, 13, 14, 27])
def test_mixture_resumed_after_any_window_reads_the_remaining_rows_in_order(done):
    parts = {"large": part(0, 41), "small": part(1000, 11)}
    unbroken = windows(Mixed(parts, {"large": 1, "small": 1}), 30)
    resumed = windows(Mixed(parts, {"large": 1, "small": 1}), 30 - done, unbroken[done - 1].end)
    for one, other in zip(unbroken[done:], resumed, strict=True):
        assert all(map(torch.equal, *([b.input_ids for b in w.micro_batches] for w in (one, other))))


def test_order_digest_of_a_mixture_changes_with_its_shares():
    parts = {"large": part(0, 41), "small": part(1000, 11)}
    orders = [WindowLoader(Mixed(parts, w), Share(3), fixed(2), 7).order for w in (None, {"large": 1, "small": 1})]
    assert orders[0] != orders[1]


def test_mixture_share_that_repeats_a_small_part_too_often_is_refused():
    with pytest.raises(Refused, match=r"would repeat small .* times"):
        Mixed({"large": part(0, 41), "small": part(1000, 11)}, {"large": 1e-10, "small": 1})


@pytest.fixture
def typed(small, text_folder, tmp_path):
    """Overrides of a small run on a mixture of two parts, code and notes."""
    for i in range(3):
        lines = [f'{{"text": "record {j}: {"x = self " * (j % 9 + 1)}"}}' for j in range(40)]
        (tmp_path / f"{i}.jsonl").write_text("\n".join(lines[i::3]))
    base = tuple(line for line in small if not line.startswith("data"))
    parts = ("+data@data.parts.code=text", f"data.parts.code.path={text_folder}", "+data@data.parts.notes=jsonl")
    return (*base, "data=mix", *parts, f"data.parts.notes.path={tmp_path}", "data.shares={code: 3, notes: 1}")


def test_mixture_command_trains_evaluates_each_part_and_resumes(command, typed, tmp_path):
    code, said = command("save_every=2", base=(*typed, "seed=3"))
    assert code == 0, said
    assert re.search(r"code: 7[45]\.\d% of the tokens", said) and "(75.0% requested)" in said
    names = (tmp_path / "run" / "metrics.csv").read_text().splitlines()[0]
    assert "val_loss" in names and "val_loss_notes" in names
    code, said = command(f"resume={tmp_path / 'run' / 'checkpoints' / 'step-00000002.ckpt'}", base=None)
    assert code == 0, said


def test_planner_and_data_agree_whether_a_mixture_has_position_ids(config, typed):
    cfg = config(base=typed)
    assert with_positions(cfg.data.arguments) and build.data(cfg).train.sequences.positions
    cfg = config("data.parts.notes.packing=joined", base=typed)
    assert not with_positions(cfg.data.arguments) and not build.data(cfg).train.sequences.positions


def parts_of(folder):
    """Returns {"notes": function that makes a source of texts, "talk": function that makes a source of conversations}.
    The functions accept further keys of data=jsonl."""
    lines = {
        "notes": [{"text": f"note {i} " * 9} for i in range(20)],
        "talk": [
            {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "yes " * 9}]}
            for i in range(20)
        ],
    }
    for name, records in lines.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    return {name: partial(jsonl, path=str(folder / f"{name}.jsonl"), pattern="*", val_fraction=0.2) for name in lines}


@pytest.mark.parametrize("names", [("notes", "talk"), ("talk", "notes")])
def test_plain_documents_mixed_with_conversations_end_in_the_chat_end_token(tmp_path, names):
    make = parts_of(tmp_path)
    parts = {name: make[name](**({"messages": "messages"} if name == "talk" else {})) for name in names}
    train_bpe(["yes"], 300, tmp_path / "tokenizer.json", ["<|im_start|>", "<|im_end|>"])
    wanted = RowSettings(tmp_path / "cache", 32, 0, load_bpe(tmp_path / "tokenizer.json"), [])
    of = Mix(parts).opened(wanted)
    notes = of.train.parts[names.index("notes")].split
    ends = {of.tokens.tokenizer.convert_ids_to_tokens(int(notes.ids[end - 1])) for end in notes.ends}
    assert ends == {"<|im_end|>"} == {of.tokens.tokenizer.eos_token}


def test_bos_typed_for_one_part_of_a_mixture_is_reported_to_apply_to_the_others(tmp_path, caplog):
    texts = parts_of(tmp_path)["notes"]
    train_bpe(["note"], 300, tmp_path / "tokenizer.json")
    wanted = RowSettings(tmp_path / "cache", 32, 0, load_bpe(tmp_path / "tokenizer.json"), [])
    for both, reported in ((texts(bos=False), False), (texts(), True)):
        caplog.clear()
        with caplog.at_level("INFO"):
            Mix({"a": texts(bos=False), "b": both}).opened(wanted)
        assert ("data.parts: bos=false also applies to b, because" in caplog.text) == reported


def test_mixture_parts_with_different_chat_templates_are_refused(tmp_path):
    talk = partial(parts_of(tmp_path)["talk"], messages="messages")
    assert Mix({"a": talk(template="chatml"), "b": talk(template="chatml")}).chat
    with pytest.raises(Refused, match=r"a and b use different chat templates.*data\.parts\.<name>\.template"):
        Mix({"a": talk(), "b": talk(template="chatml")})


REFUSED = {
    "data.shares={code: 1}": "give one share for each source (code, notes), or null",
    "data.parts.notes.packing=padded": "Type data.parts.notes.packing=documents",
    "data.shares={code: 1, notes: 0}": "give a positive number",
    "data.parts.notes.path=/no/such": "data.parts.notes.path=/no/such: there is no such file or folder",
}


def test_mixture_part_with_several_validation_sets_is_refused(tmp_path):
    with pytest.raises(Refused, match="each part of a mixture has one validation set"):
        parts_of(tmp_path)["notes"](val_path={"x": "a.jsonl", "y": "b.jsonl"})


def nested(folder, names):
    """Opens a mixture of mixtures.

    Args:
        names: maps the name of each part to the name of its only subpart, or to "" for a part that is not a mixture.
    """
    notes = parts_of(folder)["notes"]
    train_bpe(["note"], 300, folder / "tokenizer.json", [])
    wanted = RowSettings(folder / "cache", 32, 0, load_bpe(folder / "tokenizer.json"), [])
    parts = {part: Mix({below: notes()}) if below else notes() for part, below in names.items()}
    return Mix(parts).opened(wanted)


@pytest.mark.parametrize("names", [{"a": "", "a_": ""}, {"x_": ""}, {"_": "", "__": ""}, {"a": "b_", "a_": "b"}])
def test_validation_sets_of_nested_mixtures_are_named_part_underscore_subpart(tmp_path, names):
    expected = [f"{part}_{below}" if below else part for part, below in names.items()]
    assert [*nested(tmp_path, names).val] == expected


@pytest.mark.parametrize("names", [{"a": "b_c", "a_b": "c"}, {"a_b": "", "a": "b"}])
def test_nested_mixture_parts_whose_validation_sets_share_a_name_are_refused(tmp_path, names):
    with pytest.raises(Refused, match=r"two validation sets would both be named a_b(_c)?\. Rename the part a"):
        nested(tmp_path, names)


def test_mixture_parts_whose_names_differ_by_an_underscore_are_both_evaluated(command, typed, tmp_path):
    lines = tuple(line.replace("notes", "code_") for line in typed)
    code, said = command("max_steps=1", base=tuple(line for line in lines if not line.startswith("max_steps")))
    assert code == 0, said
    sets = json.loads((tmp_path / "run" / "summary.json").read_text())["validation"]
    assert [one["name"] for one in sets] == ["code", "code_"] and sets[0]["loss"] != sets[1]["loss"]


@pytest.mark.parametrize("line", REFUSED)
def test_mixture_with_invalid_shares_packing_or_path_is_refused(command, typed, line):
    kept = tuple(other for other in typed if other.split("=")[0] != line.split("=")[0])
    code, said = command(line, base=kept)
    assert code != 0 and REFUSED[line] in said, said


def test_random_rows_are_reproducible_by_index_and_seed():
    drawn = Drawn((0, 0), 100, 300, 16)
    batch = drawn.micro_batch(np.array([5, 7]))
    assert torch.equal(batch.input_ids[1:], drawn.micro_batch(np.array([7])).input_ids)
    assert torch.equal(batch.input_ids[:, 1:], batch.labels[:, :-1])
    assert not torch.equal(batch.input_ids[0], batch.input_ids[1])
    whole = drawn.micro_batch(np.arange(100)).input_ids
    assert whole.min() >= 0 and 290 < whole.max() < 300
    assert not torch.equal(Drawn((0, 1), 100, 300, 16).micro_batch(np.arange(100)).input_ids, whole)


def test_two_runs_on_random_tokens_have_equal_validation_losses(small, config, tmp_path):
    base = tuple(line for line in small if not line.startswith("data"))
    losses = [fit(config("data=random", base=base), tmp_path / name)["val_loss"] for name in "ab"]
    assert losses[0] == losses[1] > 5.0
