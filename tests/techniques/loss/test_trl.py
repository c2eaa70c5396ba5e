"""Compares preference losses with TRL: lowmem and TRL train the same network on the same text for 20 steps, in fp32 on
the CPU.

TRL gets the text and a word-level tokenizer. lowmem gets the token ids of this text. Each of them uses its own training
loop, loss, AdamW and log-probabilities of the reference model. TRL is not a dependency: without TRL these tests are
skipped.

TRL defines two losses differently from their papers and from lowmem:

- DPO: TRL's "sigmoid" loss L(x) of a margin x ignores `label_smoothing` (e). Its "robust" loss is
  ((1 - e) L(x) - e L(-x)) / (1 - 2e). The smoothed loss (1 - e) L(x) + e L(-x) is therefore
  2 (1 - e) sigmoid - (1 - 2e) robust.
- ORPO: TRL's loss contains the mean cross-entropy of all tokens of the batch's chosen rows, with their prompts. This
  mean equals lowmem's mean over answers only if each prompt has a single token, which is never a label, and the chosen
  answers of a batch have equal lengths. ORPO is compared on such pairs.

TRL's KTO pairs each prompt with the previous answer of the batch, and the first prompt with the last answer. The rows
that lowmem gets here are paired in the same way.
"""

import copy
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback

from lowmem.config.instantiate import instantiate
from lowmem.config.settle import run_of
from lowmem.data.loader import IGNORED, Rows, Share, WindowLoader
from lowmem.data.pairs import PairBatch
from lowmem.data.rated import RatedBatch
from lowmem.model import loading
from lowmem.techniques.loss.preference import KTO
from lowmem.training.build import callbacks, causal_lm
from parity import MODEL, trainer

pytest.importorskip("trl", reason="needs pip install -e '.[trl]'")

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

pytestmark = pytest.mark.kernels
STEPS, BATCH, WINDOWS = 20, 4, 5  # WINDOWS: optimizer steps per epoch
PAD, END, VOCABULARY = 0, 1, 64
LR, DECAY = 1e-3, 0.1
RUN = (
    *MODEL,
    f"model.architecture.vocab_size={VOCABULARY}",
    f"batch_size={BATCH}",
    f"max_steps={STEPS}",
    "seq_len=32",
    f"lr={LR}",
    f"optim.weight_decay={DECAY}",
    # With eps=1e-8, a weight whose gradient is little more than rounding error could move by lr.
    "optim.eps=1e-6",
    "scheduler=constant",
    "scheduler.warmup_steps=0",
    "clip=null",
    "device=cpu",
    "logger=none",
    "data=preference",
    "data.path=x",
)
# The tolerance for fp32 sums in different orders, relative for losses and absolute for rewards. Wrong variants differ
# from TRL by at least 1e-3.
TOLERANCE = 1e-5
TRAINERS = {
    "dpo": (DPOTrainer, DPOConfig),
    "kto": (KTOTrainer, KTOConfig),
    "cpo": (CPOTrainer, CPOConfig),
    "orpo": (ORPOTrainer, ORPOConfig),
}


class Pair(NamedTuple):
    """The token ids of a preference pair, without the end token that follows each answer."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


class Rated(NamedTuple):
    """The token ids of a prompt and its answer, without the end token, and the answer's rating (True: desirable)."""

    prompt: list[int]
    completion: list[int]
    label: bool


class Course(NamedTuple):
    """The losses (steps,) and mean rewards (steps, 2) of a run, computed before each step. The columns of the rewards
    are chosen and rejected answers, or desirable and undesirable answers with KTO."""

    losses: np.ndarray
    rewards: np.ndarray

    def apart(self, other):
        """Returns the largest relative difference of the losses, and the largest absolute difference of the rewards or
        of their margins."""
        losses = np.abs(self.losses / other.losses - 1).max()
        rewards = np.abs(self.rewards - other.rewards).max()
        return losses, max(rewards, np.abs(np.diff(self.rewards - other.rewards)).max())


def pairs(alike=False):
    """Returns random pairs. With `alike`, prompts have one token, and chosen answers of a batch have equal lengths."""
    draw = np.random.default_rng(3)

    def words(count):
        return draw.integers(END + 1, VOCABULARY, count).tolist()

    def pair(number):
        prompt, chosen, rejected = draw.integers(1, 9, 3)
        return Pair(*map(words, (1, 2 + number // BATCH, rejected) if alike else (prompt, chosen, rejected)))

    return [pair(number) for number in range(BATCH * WINDOWS)]


def ratings():
    """Returns one rated answer of each pair of `pairs()`. Two or three of the four answers of a batch are desirable."""
    labels = [True, False, True, True, False, True, False, True]
    return [
        Rated(pair.prompt, pair.chosen if number % 3 else pair.rejected, labels[number % len(labels)])
        for number, pair in enumerate(pairs())
    ]


class Written(Rows):
    """Pairs in their given order. `reference` (pairs, 2) holds the log-probabilities of the reference model. It is None
    before they are computed."""

    seq_len, reference = 32, None

    def __init__(self, pairs):
        self.pairs = pairs

    def __len__(self):
        return len(self.pairs)

    def arranged(self, permutation, rows_per_step):
        return np.sort(permutation)

    def micro_batch(self, indices):
        rows = [(pair.prompt, [*answer, END]) for pair in map(self.pairs.__getitem__, indices) for answer in pair[1:]]
        lengths = torch.tensor([[len(answer)] for _, answer in rows])
        reference = None if self.reference is None else self.reference[indices].reshape(-1, 1)
        return PairBatch(*tensors(rows), lengths=lengths, reference=reference)


class WrittenRatings(Written):
    """Rated answers in their given order. `reference` (answers, 2) holds the reference model's log-probabilities of the
    answers and of the mismatched answers."""

    def micro_batch(self, indices):
        rated = [self.pairs[index] for index in indices]
        before = [self.pairs[index - 1 if index % BATCH else index + BATCH - 1] for index in indices]
        rows, mismatched = (
            [(one.prompt, [*other.completion, END]) for one, other in zip(rated, others, strict=True)]
            for others in (rated, before)
        )
        own = after = None
        if self.reference is not None:
            own, after = self.reference[indices].split(1, dim=1)
        mismatched_ids, mismatched_labels = tensors(mismatched)
        return RatedBatch(
            *tensors(rows),
            lengths=torch.tensor([[len(answer)] for _, answer in rows]),
            reference=own,
            desirable=torch.tensor([[one.label] for one in rated]),
            mismatched_ids=mismatched_ids,
            mismatched_labels=mismatched_labels,
            mismatched_reference=after,
        )


def tensors(rows):
    """Returns the padded inputs and labels, each (B, T). A row is given as (token ids of a prompt, token ids of its
    answer)."""
    width = max(len(prompt) + len(answer) for prompt, answer in rows) - 1
    inputs, labels = np.full((len(rows), width), PAD), np.full((len(rows), width), IGNORED)
    for row, (prompt, answer) in enumerate(rows):
        tokens = prompt + answer
        inputs[row, : len(tokens) - 1] = tokens[:-1]
        labels[row, len(prompt) - 1 : len(tokens) - 1] = answer
    return torch.from_numpy(inputs), torch.from_numpy(labels)


class Watch(Callback):
    """Records the loss and the mean rewards of each step. `per_token` says that the loss computes rewards as means over
    tokens, as IPO does. The callback then records their sums over tokens, as TRL does."""

    def __init__(self, per_token):
        self.per_token, self.losses, self.rewards = per_token, [], []

    def on_train_batch_start(self, trainer, module, window, _):
        answers = logp_of(module, *window.micro_batches)
        rewards = module.own_loss.rewards(answers) * (answers.tokens if self.per_token else 1)
        if isinstance(module.own_loss, KTO):
            self.rewards.append([rewards[which].mean().item() for which in (answers.desirable, ~answers.desirable)])
        else:
            self.rewards.append(rewards.mean(0).tolist())

    def on_train_batch_end(self, trainer, module, outputs, *_):
        self.losses.append(float(outputs["loss"]))


@torch.no_grad()
def logp_of(module, batch):
    module(batch)
    return module.own_loss.take()[0]


def built(*overrides):
    torch.manual_seed(0)
    cfg = run_of([*RUN, *overrides])
    return cfg, causal_lm(cfg, loading.describe(cfg))


def ours(written, *overrides):
    """Trains with lowmem's module, computing the logits in three tiles, and returns a `Course`."""
    cfg, module = built(*overrides, "loss.columns=24")
    rows = WrittenRatings(written) if isinstance(module.own_loss, KTO) else Written(written)
    if module.own_loss.compares:
        every = rows.micro_batch(range(len(rows)))
        rows.reference = torch.cat([logp_of(module, each).logp for each in every.compared], dim=1)
    watch = Watch(per_token="loss=ipo" in overrides)
    windows = WindowLoader(rows, Share(BATCH), instantiate(cfg.accumulation), seed=0)
    plugins = list(map(instantiate, cfg.plugins))
    trainer(cfg, plugins, [*callbacks(cfg), *module.own_loss.callbacks(), watch]).fit(module, windows)
    return Course(np.array(watch.losses), np.array(watch.rewards))


def tokenizer():
    """Returns a word-level tokenizer: the token id of the word w7 is 7."""
    vocabulary = {"<pad>": PAD, "<end>": END} | {f"w{number}": number for number in range(END + 1, VOCABULARY)}
    made = Tokenizer(models.WordLevel(vocabulary))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")


def text_of(written):
    """Returns a dataset of the records' prompts and answers as text, and of their labels. Each text begins with a
    space."""
    columns = {name: [getattr(record, name) for record in written] for name in written[0]._fields}
    texts = {
        name: ["".join(f" w{number}" for number in numbers) for numbers in column]
        for name, column in columns.items()
        if name != "label"
    }
    return Dataset.from_dict(columns | texts)


def arguments(config, folder, options):
    """Returns TRL's arguments for lowmem's AdamW, a constant learning rate, no clipping, fp32 and records in order."""
    group = run_of(RUN).optim.arguments
    (beta1, beta2), eps = group["betas"], group["eps"]
    update = {"adam_beta1": beta1, "adam_beta2": beta2, "adam_epsilon": float(eps), "weight_decay": DECAY}
    rate = {"learning_rate": LR, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "optim": "adamw_torch"}
    size = {"per_device_train_batch_size": BATCH, "max_steps": STEPS, "train_sampling_strategy": "sequential"}
    plain = {"bf16": False, "use_cpu": True, "gradient_checkpointing": False, "disable_dropout": True}
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    return config(output_dir=str(folder), **update, **rate, **size, **plain, **quiet, **options)


def theirs(kind, written, folder, options):
    """Trains with TRL from the initial weights of `ours`, and returns a `Course`."""
    network = built("loss=orpo")[1].model
    theirs, config = TRAINERS[kind]
    with_reference = {"ref_model": copy.deepcopy(network)} if kind in ("dpo", "kto") else {}
    run = theirs(
        network,
        args=arguments(config, folder, options),
        train_dataset=text_of(written),
        processing_class=tokenizer(),
        **with_reference,
    )
    losses, compute = [], run.compute_loss

    def recorded(*args, **kwargs):
        losses.append(compute(*args, **kwargs))
        return losses[-1]

    run.compute_loss = recorded  # the losses in TRL's log are rounded
    run.train()
    logs = [log for log in run.state.log_history if "rewards/chosen" in log and "loss" in log]
    rewards = [[log["rewards/chosen"], log["rewards/rejected"]] for log in logs]
    return Course(np.array([loss.item() for loss in losses]), np.array(rewards))


class Case(NamedTuple):
    """The settings of one loss: lowmem's overrides (`ours`) and TRL's trainer (`kind`) and options."""

    ours: tuple[str, ...]
    kind: str  # a key of TRAINERS
    options: dict
    alike: bool = False  # see `pairs`

    @property
    def records(self):
        return ratings() if self.kind == "kto" else pairs(self.alike)


SMOOTHED = {"loss_type": ["sigmoid", "robust"], "loss_weights": [1.8, -0.8], "label_smoothing": 0.1}
SIMPO = {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 1.0}
CASES = {
    "dpo": Case(("loss=dpo", "loss.beta=0.1"), "dpo", {"beta": 0.1}),
    "dpo-smoothed": Case(("loss=dpo", "loss.beta=0.5", "loss.label_smoothing=0.1"), "dpo", SMOOTHED | {"beta": 0.5}),
    "ipo": Case(("loss=ipo", "loss.beta=0.1"), "dpo", {"loss_type": ["ipo"], "beta": 0.1}),
    "simpo": Case(("loss=simpo", "loss.beta=2", "loss.gamma=1"), "cpo", SIMPO),
    "simpo-smoothed": Case(
        ("loss=simpo", "loss.beta=2", "loss.gamma=1", "loss.label_smoothing=0.1"),
        "cpo",
        SIMPO | {"label_smoothing": 0.1},
    ),
    "orpo": Case(("loss=orpo", "loss.beta=0.5"), "orpo", {"beta": 0.5}, alike=True),
    "kto": Case(("loss=kto", "loss.beta=0.1"), "kto", {"beta": 0.1}),
    "kto-weighed": Case(
        ("loss=kto", "loss.beta=0.5", "loss.desirable_weight=0.6", "loss.undesirable_weight=1.2"),
        "kto",
        {"beta": 0.5, "desirable_weight": 0.6, "undesirable_weight": 1.2},
    ),
}


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """Returns a function that takes the name of a case, and returns TRL's `Course`."""

    @cache
    def found(name):
        case = CASES[name]
        return theirs(case.kind, case.records, tmp_path_factory.mktemp(name), case.options)

    return found


@pytest.mark.matrix
@pytest.mark.parametrize("name", CASES)
def test_twenty_preference_steps_have_the_losses_and_rewards_of_trl(name, course):
    case = CASES[name]
    found = ours(case.records, *case.ours)
    assert len(found.losses) == len(course(name).losses) == len(course(name).rewards) == STEPS
    assert max(found.apart(course(name))) < TOLERANCE


@pytest.mark.wrong
@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo", "orpo", "kto"])
def test_preference_run_with_another_beta_differs_from_trl(name, course):
    case = CASES[name]
    wrong = ours(case.records, *case.ours, "loss.beta=0.3")
    assert min(wrong.apart(course(name))) > 1000 * TOLERANCE


@pytest.mark.wrong
@pytest.mark.parametrize("name", ["dpo", "ipo"])
def test_preference_run_with_exchanged_answers_differs_from_trl(name, course):
    exchanged = [Pair(prompt, rejected, chosen) for prompt, chosen, rejected in pairs()]
    wrong = ours(exchanged, *CASES[name].ours)
    assert min(wrong.apart(course(name))) > 1000 * TOLERANCE


@pytest.mark.wrong
def test_kto_run_with_exchanged_ratings_differs_from_trl(course):
    wrong = ours([rated._replace(label=not rated.label) for rated in ratings()], *CASES["kto"].ours)
    assert min(wrong.apart(course("kto"))) > 1000 * TOLERANCE


@pytest.mark.wrong
def test_kto_run_without_the_kl_estimate_differs_from_trl(course, monkeypatch):
    monkeypatch.setattr(KTO, "set_kl", lambda self, mismatched: None)
    wrong = ours(ratings(), *CASES["kto"].ours)
    assert min(wrong.apart(course("kto"))) > 100 * TOLERANCE
