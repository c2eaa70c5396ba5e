"""Tests that gradient accumulation gives the gradients and weights of one big batch, with rows of different lengths,
masked tokens and a short last window. Also tests schedules of accumulation."""

import ast
import inspect
import math
from itertools import pairwise

import pytest
import torch
from lightning.pytorch import Callback

import in_float64
import oracle
import parity
from lowmem.config.accumulation import by_epoch, by_step, effective_batch, fixed
from lowmem.config.instantiate import instantiate
from lowmem.data.loader import Groups, MicroBatch, Share, ValidationLoader, WindowLoader
from lowmem.model.loading import describe
from lowmem.system.errors import Refused
from lowmem.techniques.loss import cross_entropy as losses
from lowmem.training.build import callbacks, causal_lm
from lowmem.training.module import CausalLM
from networks import fp64_loss
from tolerances import FP64, SGD_FP32

pytestmark = pytest.mark.kernels
STEPS = 5  # an epoch has 9 sequences, so a window of 8 sequences is followed by a window of 1


@pytest.fixture
def trained(config, monkeypatch):
    """Returns a function that takes the number of sequences per micro-batch, the number of micro-batches, a dtype and
    an optimizer, and returns (gradients of each step, final weights). The weights are one vector, and so are the
    gradients of a step."""

    def run(batch_size, batches, dtype="float64", optim="adamw"):
        if dtype == "float64":
            monkeypatch.setattr(losses, "full", fp64_loss)
        gradients = []
        usable = CausalLM._usable

        def recording(self, *done):
            gradients.append(torch.cat([p.grad.flatten() for p in self.model.parameters()]))
            return usable(self, *done)

        monkeypatch.setattr(CausalLM, "_usable", recording)
        lines = [f"batch_size={batch_size}", "accumulation=fixed", f"accumulation.batches={batches}"]
        lines += [in_float64.LINE] if dtype == "float64" else []
        lines += [f"optim={optim}", f"max_steps={STEPS}", "optim.weight_decay=0.1"]
        lines += ["lr=1e-3"] if optim == "adamw" else ["lr=1e-1"]
        cfg = config(*parity.overrides(), *lines, base=())
        _, weights = parity.run(cfg, wide=dtype == "float64")
        monkeypatch.setattr(CausalLM, "_usable", usable)
        return gradients, torch.cat([p.flatten() for p in weights.values()])

    return run


def furthest(one, other):
    """Returns (largest difference between gradients, largest difference between weights) of two runs of `trained`."""
    gradients = max((a - b).abs().max().item() for a, b in zip(one[0], other[0], strict=True))
    return gradients, (one[1] - other[1]).abs().max().item()


@pytest.mark.parametrize(("batch_size", "batches"), [(4, 2), (2, 4), (1, 8), (3, 3)])
def test_accumulated_gradients_and_adamw_weights_equal_the_big_batch_in_fp64(trained, batch_size, batches):
    big = trained(batch_size * batches, 1)
    gradients, weights = furthest(trained(batch_size, batches), big)
    assert gradients < FP64 and weights < FP64


def test_accumulated_sgd_weights_equal_the_big_batch_in_fp32(trained):
    _, weights = furthest(trained(2, 4, "float32", "sgd"), trained(8, 1, "float32", "sgd"))
    assert weights < SGD_FP32


def divided_by_the_full_window(self, window, index):
    return RIGHT(self, window._replace(weight=8 * 14), index)


def last_micro_batch_dropped(self, window, index):
    return RIGHT(self, window._replace(micro_batches=window.micro_batches[:-1] or window.micro_batches), index)


def mean_of_means(self, window, index):
    """Gives every micro-batch the same weight, although their numbers of labels differ (Lightning #20350)."""
    weights = [
        window.learned_tokens / (len(window.micro_batches) * batch.learned_tokens) for batch in window.micro_batches
    ]
    loss, calls = self.loss, iter(weights)
    self.loss = lambda *batch: loss(*batch) * next(calls)
    try:
        return RIGHT(self, window, index)
    finally:
        self.loss = loss


RIGHT = CausalLM.training_step


@pytest.mark.wrong
@pytest.mark.parametrize("wrong", [divided_by_the_full_window, last_micro_batch_dropped, mean_of_means])
def test_accumulation_with_a_deliberate_fault_differs_from_the_big_batch(trained, wrong, monkeypatch):
    big, big_fp32 = trained(8, 1), trained(8, 1, "float32", "sgd")
    monkeypatch.setattr(CausalLM, "training_step", wrong)
    gradients, weights = furthest(trained(2, 4), big)
    assert gradients > 1e3 * FP64 and weights > 1e3 * FP64
    assert furthest(trained(2, 4, "float32", "sgd"), big_fp32)[1] > 10 * SGD_FP32


def test_logged_loss_of_four_micro_batches_equals_the_loss_of_one_batch(fit):
    whole, _ = fit("batch_size=8", "max_steps=1", "lr=1e-9")
    parts, _ = fit("batch_size=2", "accumulation=fixed", "accumulation.batches=4", "max_steps=1", "lr=1e-9", folder="b")
    assert whole["tokens"] == parts["tokens"]
    assert parts["train_loss"] == pytest.approx(whole["train_loss"], rel=1e-5)


def masked_tokens_counted(self, window, index):
    every = sum(batch.labels.numel() for batch in window.micro_batches)
    return RIGHT(self, window._replace(learned_tokens=every, weight=every), index)


@pytest.mark.parametrize("wrong", [None, masked_tokens_counted])
def test_logged_loss_is_the_mean_over_tokens_with_labels_unless_masked_tokens_are_counted(config, monkeypatch, wrong):
    """The expected loss is the oracle's. Wrong variant: tokens whose labels are masked are also counted."""
    seen = []

    def recording(self, window, index):
        out = (wrong or RIGHT)(self, window, index)
        seen.append((out["loss"].item(), out["learned_tokens"]))
        return out

    monkeypatch.setattr(CausalLM, "training_step", recording)
    cfg = config(*parity.overrides("accumulation=fixed"), "max_steps=1", "lr=1e-9", base=())
    before, _ = parity.run(cfg)
    ((loss, tokens),) = seen
    assert (loss == pytest.approx(parity.expected_losses("fixed", [before])[0], rel=1e-5)) == (wrong is None)
    labels = parity.Ragged().micro_batch(torch.arange(9).numpy()).labels
    order = [i for batch in next(iter(loader(fixed(4)))).micro_batches for i in indices(batch)]
    assert (tokens == (labels[order] != losses.IGNORED).sum() < labels[order].numel()) == (wrong is None)


def loader(size, batch_size=2):
    return WindowLoader(parity.Ragged(), Share(batch_size), size, seed=0)


def indices(batch):
    """Returns the indices of the sequences in a micro-batch."""
    every = parity.Ragged().micro_batch(torch.arange(9).numpy()).input_ids
    return [int((every == row).all(1).nonzero()) for row in batch.input_ids]


def sizes(size, windows, batch_size=2):
    """Returns, for each window, the number of sequences in each micro-batch."""
    found = []
    for window, _ in zip(loader(size, batch_size), range(windows), strict=False):
        found.append([len(batch.labels) for batch in window.micro_batches])
    return found


def test_accumulation_schedule_changes_at_window_boundaries():
    # nine sequences an epoch, two at a time: 2 2 2 2 1
    assert sizes(by_step({0: 1, 3: 2}), 6) == [[2], [2], [2], [2, 1], [2, 2], [2, 2]]
    assert sizes(by_epoch({0: 2, 1: 3}), 5) == [[2, 2], [2, 2], [1], [2, 2, 2], [2, 1]]
    assert sizes(by_step({0: 3, 1: 1, 2: 4}), 3, 1) == [[1, 1, 1], [1], [1, 1, 1, 1]]


def test_steps_and_learning_rates_do_not_depend_on_a_change_of_accumulation(fit):
    """The learning rate schedule counts optimizer steps, not micro-batches."""
    lines = ("scheduler=linear", "max_steps=6", "lr=1e-2", "log_every=1", "batch_size=2")
    _, plain = fit(*lines, folder="plain")
    _, changing = fit(*lines, "accumulation=by_step", "accumulation.sizes={0: 1, 2: 3}", folder="changing")

    def column(run, name):
        header, *rows = (line.split(",") for line in (run / "metrics.csv").read_text().splitlines())
        return [row[header.index(name)] for row in rows if row[header.index("lr")]]

    assert column(changing, "step") == column(plain, "step") == list("123456")
    assert column(changing, "lr") == column(plain, "lr")
    assert [int(t) for t in column(changing, "tokens")] == [16 * n for n in (2, 4, 10, 16, 22, 28)]


def test_effective_batch_is_divided_by_micro_batch_and_devices():
    assert effective_batch(64, batch_size=8)(0, 0) == 8
    assert effective_batch(64, batch_size=8, devices=4)(0, 0) == 2
    assert effective_batch(64, batch_size=8).largest == 8


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: fixed(0), "at least one"),
        (lambda: effective_batch(10, 4), "accumulation.size=8"),
        (lambda: effective_batch(4, 2, devices=8), "accumulation.size=16"),
        (lambda: by_step({1: 2}), "accumulation.sizes="),
        (lambda: by_epoch({0: 0}), "at least 1"),
        (lambda: by_epoch({0: 2.5}), "at least 1"),
    ],
    ids=["0 batches", "indivisible size", "size below devices", "no first size", "size 0", "size 2.5"],
)
def test_zero_fractional_indivisible_or_missing_accumulation_size_is_refused(make, says):
    with pytest.raises(Refused, match=says):
        make()


def test_effective_batch_not_divisible_by_batch_size_is_refused_with_advice(command, tmp_path):
    code, said = command("accumulation=effective_batch", "accumulation.size=10")
    assert code == 1 and "accumulation.size=8" in said and "Traceback" not in said


@pytest.mark.matrix
def test_accumulation_by_step_accepts_typed_sizes_and_is_refused_without_sizes(command, tmp_path):
    code, said = command("accumulation=by_step", "accumulation.sizes={0: 1, 2: 3}")
    assert code == 0, said
    code, said = command("accumulation=by_step", f"hydra.run.dir={tmp_path}/second")
    assert code == 1 and "accumulation.sizes" in said


def test_learned_tokens_of_a_micro_batch_are_the_tokens_with_labels():
    rows = torch.zeros(3, 5, dtype=torch.long)
    labels = rows.clone()
    labels[0, :4] = -100
    assert MicroBatch(rows, rows).learned_tokens == 15 and MicroBatch(rows, labels).learned_tokens == 11
    assert MicroBatch(rows, torch.full_like(rows, losses.IGNORED)).learned_tokens == 0


def test_ranks_divide_the_sequences_of_a_window_and_know_its_total_tokens():
    """Each sequence of the window is on exactly one rank."""
    whole = next(iter(WindowLoader(parity.Ragged(), Share(4), fixed(2), seed=0)))
    shares = [
        next(iter(WindowLoader(parity.Ragged(), Share(2, rank=r, world_size=2), fixed(2), seed=0))) for r in (0, 1)
    ]
    assert {share.learned_tokens for share in shares} == {whole.learned_tokens}
    assert sum(batch.learned_tokens for share in shares for batch in share.micro_batches) == whole.learned_tokens
    read, shared = (
        sorted(i for window in windows for batch in window.micro_batches for i in indices(batch))
        for windows in ([whole], shares)
    )
    assert read == shared and len({*read}) == 8


def imported(module):
    """Returns the top-level packages that a module imports."""
    nodes = list(ast.walk(ast.parse(inspect.getsource(module))))
    named = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    named += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in named}


def test_oracle_does_not_import_lowmem():
    assert "torch" in imported(oracle) and "lowmem" not in imported(oracle)
    assert "lowmem" in imported(parity)  # `imported` finds an import of lowmem


class Silent(parity.Ragged):
    """Sequences of which at most one has labels."""

    def __init__(self, telling=0):
        super().__init__()
        self.telling = telling

    def micro_batch(self, indices):
        batch = super().micro_batch(indices)
        batch.labels[torch.as_tensor(indices) != self.telling] = losses.IGNORED
        return batch


@pytest.mark.parametrize("precision", ["32", "bf16-master"])
def test_window_without_labels_changes_no_weight_and_counts_as_skipped_step(config, precision):
    """The logged loss, a mean over zero tokens, must be finite. The optimizer step must be skipped, because it would
    apply weight decay and momentum even with zero gradients."""
    cfg = config(*parity.overrides(f"precision={precision}"), "batch_size=1", "max_steps=2", base=())
    module = causal_lm(cfg, describe(cfg))
    read = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, module, outputs, window, _):
            weights = [p.detach().to(torch.float32, copy=True) for p in module.model.parameters()]
            read.append((outputs["stepped"], float(outputs["loss"]), window.learned_tokens, weights))

    watching = [*callbacks(cfg), Watch()]
    training = parity.trainer(cfg, list(map(instantiate, cfg.plugins)), watching)
    training.fit(module, WindowLoader(Silent(), Share(1), fixed(1), seed=0))
    assert [stepped for stepped, *_ in read] == [tokens > 0 for _, _, tokens, _ in read]
    assert module.skipped_steps == len(read) - 2 and module.position.window == len(read)
    for (_, _, _, before), (stepped, loss, _, after) in pairwise(read):
        same = all(map(torch.equal, before, after))
        assert same != stepped and math.isfinite(loss)


def test_validation_without_labels_gives_val_loss_none(config):
    cfg = config(*parity.overrides(), base=())
    module = causal_lm(cfg, describe(cfg))
    for telling in (0, None):
        training = parity.trainer(cfg, list(map(instantiate, cfg.plugins)), [])
        training.validate(module, Groups(ValidationLoader(Silent(telling), Share(2), 4)), verbose=False)
        assert (module.val_loss is None) == (telling is None)
