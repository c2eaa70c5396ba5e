"""Defines preference losses, which follow the papers and use all logits in fp64, and rows with answers of different
lengths.

Only the classes of rows and micro-batches are imported from lowmem.
"""

import numpy as np
import torch

from lowmem.data.loader import Rows
from lowmem.data.pairs import PackedPairBatch, PairBatch
from lowmem.data.rated import RatedBatch

IGNORED = -100


def log_probabilities(model, batch):
    """Returns (sum of the log-probabilities of each answer's tokens, number of these tokens), both in fp64. Their shape
    is (pairs, 2), or (answers, 1) for rated answers."""
    logits = model(**batch.inputs, use_cache=False).logits.double()
    logp = logits.log_softmax(-1)
    sums, counts = [], []
    for row in range(len(batch.labels)):
        starts = [0] if batch.position_ids is None else (batch.position_ids[row] == 0).nonzero().ravel().tolist()
        for number, start in enumerate(starts[: batch.lengths.shape[1]]):
            stop = [*starts, len(batch.labels[row])][number + 1]
            places = [t for t in range(start, stop) if batch.labels[row, t] != IGNORED]
            if places:
                sums.append(sum(logp[row, t, batch.labels[row, t]] for t in places))
                counts.append(len(places))
    found = torch.stack(sums), torch.tensor(counts, dtype=torch.float64)
    return tuple(each.view(-1, batch.ANSWERS) for each in found)


def reference_of(batch):
    return batch.reference[batch.lengths > 0].double().view(-1, batch.ANSWERS)


def sigmoid_loss(x):
    return torch.log1p(torch.exp(-x))


def dpo(logp, counts, reference, beta=0.1, label_smoothing=0.0):
    x = beta * ((logp[:, 0] - reference[:, 0]) - (logp[:, 1] - reference[:, 1]))
    return (1 - label_smoothing) * sigmoid_loss(x) + label_smoothing * sigmoid_loss(-x)


def ipo(logp, counts, reference, beta=0.1):
    x = (logp - reference) / counts
    return (x[:, 0] - x[:, 1] - 1 / (2 * beta)) ** 2


def orpo(logp, counts, reference, beta=0.1):
    p = torch.exp(logp / counts)
    odds = p / (1 - p)
    return -logp[:, 0] / counts[:, 0] + beta * sigmoid_loss(torch.log(odds[:, 0] / odds[:, 1]))


def simpo(logp, counts, reference, beta=2.0, gamma=1.0, label_smoothing=0.0):
    mean = logp / counts
    x = beta * (mean[:, 0] - mean[:, 1]) - gamma
    return (1 - label_smoothing) * sigmoid_loss(x) + label_smoothing * sigmoid_loss(-x)


def kto(ratio, mismatched, desirable, beta=0.1, desirable_weight=1.0, undesirable_weight=1.0):
    """Returns the KTO loss of each answer.

    Args:
        ratio: (answers,), log(policy's probability / reference's probability) of each answer.
        mismatched: (answers,), this log ratio of each mismatched answer.
        desirable: for each answer, True if the answer is desirable.
    """
    z = max(0.0, mismatched.mean().item())
    value = [1 / (1 + torch.exp(-beta * (r - z if good else z - r))) for r, good in zip(ratio, desirable, strict=True)]
    weight = [desirable_weight if good else undesirable_weight for good in desirable]
    return torch.stack([w * (1 - v) for w, v in zip(weight, value, strict=True)])


PAIRED = {"dpo": dpo, "ipo": ipo, "orpo": orpo, "simpo": simpo}
LOSSES = PAIRED | {"kto": kto}


def mean_loss(name, model, batch, **options):
    """Returns the mean loss over the pairs, or the rated answers, of a batch."""
    if name == "kto":
        ratio, mismatched = (log_probabilities(model, rows)[0] - reference_of(rows) for rows in batch.compared)
        return kto(ratio[:, 0], mismatched.detach(), batch.desirable[:, 0].tolist(), **options).mean()
    reference = None if batch.reference is None else reference_of(batch)
    return LOSSES[name](*log_probabilities(model, batch), reference, **options).mean()


class RaggedPairs(Rows):
    """Pairs of answers. Prompts and answers have different lengths, and the log-probabilities of the reference model
    are random.

    Args:
        packed: True puts the two answers of a pair into one row, one after the other; False uses a row per answer.
    """

    def __init__(self, pairs, length, vocabulary, packed=False):
        self.count, self.seq_len, self.packed = pairs, length, packed
        drawn = np.random.default_rng(2)
        self.tokens = drawn.integers(0, vocabulary, (pairs, 2, length + 1))
        self.reference = -5 * drawn.random((pairs, 2)) - 60

    def __len__(self):
        return self.count

    def micro_batch(self, indices):
        tokens = torch.from_numpy(self.tokens[indices])  # (P, 2, T + 1)
        inputs, labels = tokens[..., :-1], tokens[..., 1:].clone()
        for pair, index in zip(labels, indices, strict=True):
            for side, row in enumerate(pair):
                row[self.seq_len - 1 - (int(index) + side) % 5 :] = IGNORED
                row[: 2 + int(index) % 3] = IGNORED
        lengths, reference = (labels != IGNORED).sum(-1), torch.from_numpy(self.reference[indices])
        if self.packed:
            positions = torch.arange(self.seq_len).repeat(len(indices), 2)
            rows = inputs.flatten(1), labels.flatten(1), positions
            return PackedPairBatch(*rows, lengths=lengths, reference=reference)
        rows = inputs.flatten(0, 1), labels.flatten(0, 1)
        return PairBatch(*rows, lengths=lengths.view(-1, 1), reference=reference.view(-1, 1))


class RaggedAnswers(Rows):
    """Rated answers. Prompts and answers have different lengths, and the log-probabilities of the reference model are
    random. The mismatched answer of prompt i is the answer of prompt i + 2, cyclically."""

    def __init__(self, answers, length, vocabulary):
        self.count, self.seq_len = answers, length
        drawn = np.random.default_rng(2)
        self.prompts = [drawn.integers(0, vocabulary, 3 + number % 3) for number in range(answers)]
        self.answers = [drawn.integers(0, vocabulary, length - 5 - number % 5) for number in range(answers)]
        self.desirable = drawn.random(answers) < 0.7  # with equal counts, z would have little effect
        # To the reference model, all tokens are about equally likely, and mismatched answers are a little less likely
        # than that, so z is positive.
        lengths = [[len(self.answers[(number + shift) % answers]) for shift in (0, 2)] for number in range(answers)]
        self.reference = drawn.uniform([-2, -3], [2, -1], (answers, 2)) - np.log(vocabulary) * np.array(lengths)

    def __len__(self):
        return self.count

    def rows(self, prompts, answers):
        """Returns inputs and labels, each (B, T)."""
        ids, labels = torch.zeros(2, len(prompts), self.seq_len, dtype=torch.int64)
        labels.fill_(IGNORED)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            tokens = torch.from_numpy(np.concatenate([self.prompts[prompt], self.answers[answer % self.count]]))
            ids[row, : len(tokens) - 1] = tokens[:-1]
            start = len(self.prompts[prompt])
            labels[row, start - 1 : len(tokens) - 1] = tokens[start:]
        return ids, labels

    def micro_batch(self, indices):
        ids, labels = self.rows(indices, indices)
        mismatched_ids, mismatched_labels = self.rows(indices, indices + 2)
        own, mismatched = torch.from_numpy(self.reference[indices]).split(1, dim=1)
        return RatedBatch(
            ids,
            labels,
            lengths=(labels != IGNORED).sum(1, keepdim=True),
            desirable=torch.from_numpy(self.desirable[indices])[:, None],
            reference=own,
            mismatched_ids=mismatched_ids,
            mismatched_labels=mismatched_labels,
            mismatched_reference=mismatched,
        )
