"""Preference losses: DPO, IPO, ORPO and SimPO for pairs of answers, KTO for rated answers.

A preference loss is a function of the log-probabilities of answers. The log-probability of an answer is a sum over its
tokens. The logits are computed in tiles of the vocabulary (`tiled.py`), so these losses need about as much memory as
loss=tiled on the same rows. The reference model of DPO, IPO and KTO is not in memory during training: its
log-probabilities are computed before training, and are part of the data (`training/reference.py`).

The loss of a window is the mean over its pairs or rated answers, independent of the size of the micro-batches.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Tensor
from transformers import PreTrainedModel

from lowmem.data.pairs import AnswerBatch, PairBatch
from lowmem.data.rated import RatedBatch
from lowmem.system.errors import Refused
from lowmem.techniques.loss.head import agrees
from lowmem.techniques.loss.mismatched import MismatchedPass
from lowmem.techniques.loss.tiled import Tiled


class AnswerLogProbs(NamedTuple):
    """The inputs of a preference loss. Each tensor has one element per answer. For pairs, the shape is (pairs, 2), and
    column 0 is the chosen answer; for rated answers, the shape is (answers, 1)."""

    # fp64, log-probability of the answer: the sum over its tokens. In fp32, the rounding error for a long answer could
    # be as large as the difference between the trained model and the reference model.
    logp: Tensor
    tokens: Tensor  # int64, number of tokens; 1 for an answer without labels, so that divisions by it are defined
    reference: Tensor  # fp64, log-probability under the reference model; zeros if the micro-batch has none
    desirable: Tensor | None = None  # bool, rating of the answer; None for pairs

    @property
    def mean(self) -> Tensor:
        return self.logp / self.tokens

    @property
    def log_ratio(self) -> Tensor:
        return self.logp - self.reference


class PreferenceLoss(Tiled):
    """Base class of preference losses.

    Args:
        beta: a number above 0; see the formula of the subclass.
        columns: tokens of the vocabulary per tile.

    Raises:
        Refused: an argument is out of range.
    """

    needs, of_pairs = PairBatch, True
    shows = ("accuracy", "margin", "reward_chosen", "reward_rejected", "logp_chosen", "logp_rejected")

    def __init__(self, beta: float, columns: int) -> None:
        super().__init__(columns)
        self.beta = _positive("beta", beta)
        self._seen: tuple[AnswerLogProbs, Tensor] | None = None

    def __call__(self, model: PreTrainedModel, batch: AnswerBatch) -> Tensor:
        answers, real = self.answers(model, batch)
        if not torch.is_grad_enabled():
            self._seen = answers, real
        return self.losses(answers).where(real, 0.0).sum().float()

    def answers(self, model: PreTrainedModel, batch: AnswerBatch) -> tuple[AnswerLogProbs, Tensor]:
        """Returns the log-probabilities of a micro-batch's answers, and a bool mask (pairs,) or (answers,). The mask is
        False for a rated answer without labels, and for a pair in which at least one answer has no labels, as in
        filler."""
        losses, learned = self.each(model, batch)
        tokens = batch.lengths.view(-1, batch.ANSWERS)
        answer = batch.answers.flatten()[learned]
        sums = losses.new_zeros(batch.lengths.numel(), dtype=torch.float64)
        logp = -sums.index_add(0, answer, losses.double()).view_as(tokens)
        reference = torch.zeros_like(logp) if batch.reference is None else batch.reference.view_as(tokens)
        return AnswerLogProbs(logp, tokens.clamp(min=1), reference), (tokens > 0).all(1)

    def verify(self, model: PreTrainedModel, batch: AnswerBatch) -> None:
        if not agrees(model, batch.inputs, tiled=True):
            raise Refused(
                f"loss: logits of {type(model).__name__} computed in tiles of the vocabulary differ from the model's "
                "own, so training would optimize a different function. Type another model=."
            )

    def losses(self, answers: AnswerLogProbs) -> Tensor:
        """Returns a tensor (pairs,) with the loss of each pair, or (answers,) with the loss of each rated answer."""
        raise NotImplementedError

    def rewards(self, answers: AnswerLogProbs) -> Tensor:
        """Returns the implicit rewards, in the shape of `answers.logp`. Training aims at higher rewards for chosen and
        desirable answers than for rejected and undesirable answers."""
        raise NotImplementedError

    def take(self) -> tuple[AnswerLogProbs, Tensor]:
        """Returns what `answers` returned for the last micro-batch that was computed without gradients. Call this
        method only once per micro-batch, because it drops the stored tensors."""
        seen, self._seen = self._seen, None
        return seen

    def figures(self) -> dict[str, Tensor]:
        answers, real = self.take()
        rewards = self.rewards(answers)
        margin = _difference(rewards)
        each = ((margin > 0).double(), margin, *rewards.unbind(1), *answers.logp.unbind(1))
        figures = dict(zip(self.shows, each, strict=True))
        if self.compares:
            figures["log_ratio"] = (answers.log_ratio / answers.tokens).mean(1)
        return {name: values.where(real, 0.0).sum() for name, values in figures.items()}


class DPO(PreferenceLoss):
    """-log sigmoid(beta * (log-ratio of chosen - log-ratio of rejected)), with log-ratios to the reference model:
    Rafailov et al. 2023, arXiv 2305.18290.

    Args:
        label_smoothing: assumed fraction of pairs whose answers are labeled the wrong way round, at least 0 and below
            0.5 (Mitchell 2023).
    """

    compares = True

    def __init__(self, beta: float = 0.1, label_smoothing: float = 0.0, columns: int = 4096) -> None:
        super().__init__(beta, columns)
        self.label_smoothing = _below_half(label_smoothing)

    def rewards(self, answers: AnswerLogProbs) -> Tensor:
        return self.beta * answers.log_ratio

    def losses(self, answers: AnswerLogProbs) -> Tensor:
        return _logistic(_difference(self.rewards(answers)), self.label_smoothing)


class IPO(PreferenceLoss):
    """(mean log-ratio of chosen - mean log-ratio of rejected - 1 / (2 beta))^2, with means over the tokens of an answer
    and log-ratios to the reference model: Azar et al. 2023, arXiv 2310.12036."""

    compares = True

    def __init__(self, beta: float = 0.1, columns: int = 4096) -> None:
        super().__init__(beta, columns)

    def rewards(self, answers: AnswerLogProbs) -> Tensor:
        return self.beta * answers.log_ratio / answers.tokens

    def losses(self, answers: AnswerLogProbs) -> Tensor:
        return (_difference(answers.log_ratio / answers.tokens) - 1 / (2 * self.beta)).square()


class ORPO(PreferenceLoss):
    """-log p(chosen) - beta * log sigmoid(log_odds(chosen) - log_odds(rejected)), where log p is the mean
    log-probability of an answer's tokens, and log_odds = log(p / (1 - p)): Hong et al. 2024, arXiv 2403.07691. Needs
    neither a reference model nor earlier supervised fine-tuning."""

    def __init__(self, beta: float = 0.1, columns: int = 4096) -> None:
        super().__init__(beta, columns)

    def rewards(self, answers: AnswerLogProbs) -> Tensor:
        return self.beta * answers.mean

    def losses(self, answers: AnswerLogProbs) -> Tensor:
        mean = answers.mean
        log_odds = mean - torch.log(-torch.expm1(mean.clamp(max=-1e-12)))  # log(p / (1 - p)); the clamp keeps p < 1
        return -mean[:, 0] + self.beta * _logistic(_difference(log_odds))


class SimPO(PreferenceLoss):
    """-log sigmoid(beta * (mean log-probability of chosen - mean log-probability of rejected) - gamma), with means over
    the tokens of an answer: Meng et al. 2024, arXiv 2405.14734. Needs no reference model.

    Args:
        gamma: target margin between the rewards of the two answers, at least 0.
        label_smoothing: see `DPO`.
    """

    def __init__(
        self, beta: float = 2.0, gamma: float = 1.0, label_smoothing: float = 0.0, columns: int = 4096
    ) -> None:
        super().__init__(beta, columns)
        self.gamma, self.label_smoothing = _number("gamma", gamma), _below_half(label_smoothing)

    def rewards(self, answers: AnswerLogProbs) -> Tensor:
        return self.beta * answers.mean

    def losses(self, answers: AnswerLogProbs) -> Tensor:
        return _logistic(_difference(self.rewards(answers)) - self.gamma, self.label_smoothing)


class KTO(PreferenceLoss):
    """weight * (1 - sigmoid(+-beta * (log-ratio - z))), with + for desirable answers, - for undesirable answers, and
    log-ratios to the reference model: Ethayarajh et al. 2024, arXiv 2402.01306.

    z is an estimate of the KL divergence to the reference model: the mean log-ratio of mismatched prompt-answer pairs,
    clamped to at least 0. The mean is over all mismatched pairs of a window, or of a validation set, on all devices. To
    compute z, the model runs on the mismatched pairs in separate forward passes without gradients (`mismatched.py`).

    Args:
        desirable_weight, undesirable_weight: `weight` for desirable and undesirable answers, at least 0 and not both 0;
            balances data with many more answers of one rating than of the other.
    """

    needs, compares = RatedBatch, True
    shows = ("accuracy", "kl", "reward_desirable", "reward_undesirable", "logp_desirable", "logp_undesirable")

    def __init__(
        self, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0, columns: int = 4096
    ) -> None:
        super().__init__(beta, columns)
        weights = {"desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
        self.weights = [_number(key, weight) for key, weight in weights.items()]
        if not any(self.weights):
            raise Refused(
                "loss.desirable_weight=0, loss.undesirable_weight=0: the model would learn nothing. Type 1 for both."
            )
        self._kl = torch.zeros(())  # z

    def answers(self, model: PreTrainedModel, batch: RatedBatch) -> tuple[AnswerLogProbs, Tensor]:
        answers, real = super().answers(model, batch)
        return answers._replace(desirable=batch.desirable), real

    def callbacks(self) -> list[Callback]:
        return [MismatchedPass(self.log_ratios, self.set_kl)]

    def log_ratios(self) -> Tensor:
        """Returns a tensor (2,): the sum of log-ratios and the number of answers of the last micro-batch that was
        computed without gradients."""
        answers, real = self.take()
        return torch.stack([answers.log_ratio[:, 0].where(real, 0.0).sum(), real.sum().double()])

    def set_kl(self, mismatched: Tensor) -> None:
        """Sets z. Args: mismatched: (2,), sum of the log-ratios of all mismatched rows, and number of these rows that
        have an answer."""
        total, count = mismatched
        self._kl = (total / count.clamp(min=1.0)).clamp(
            min=0.0
        )  # the count is 0 if no mismatched row has room for its answer

    def rewards(self, answers: AnswerLogProbs) -> Tensor:
        return self.beta * answers.log_ratio

    def losses(self, answers: AnswerLogProbs) -> Tensor:
        above = self.rewards(answers) - self.beta * self._kl
        desirable, undesirable = self.weights
        losses = torch.where(answers.desirable, desirable * torch.sigmoid(-above), undesirable * torch.sigmoid(above))
        return losses[:, 0]

    def figures(self) -> dict[str, Tensor]:
        """`accuracy` is the number of answers for which the prediction "desirable if the log-ratio is above z" is
        right, and `kl` is z times the number of answers. The other metrics are rewards and log-probabilities, each as
        (sum, count) over the answers with one rating. See `Loss.figures`."""
        answers, real = self.take()
        right = (answers.log_ratio > self._kl) == answers.desirable
        figures = {"accuracy": (right[:, 0] & real).double().sum(), "kl": self._kl * real.sum()}
        for name, values in (("reward", self.rewards(answers)), ("logp", answers.logp)):
            for side, rated in (("desirable", answers.desirable), ("undesirable", ~answers.desirable)):
                counts = rated[:, 0] & real
                figures[f"{name}_{side}"] = torch.stack([values[:, 0].where(counts, 0.0).sum(), counts.sum()])
        return figures


def _difference(values: Tensor) -> Tensor:
    """Returns a tensor (pairs,): the value of the chosen answer minus the value of the rejected answer. Args: values:
    (pairs, 2)."""
    return values[:, 0] - values[:, 1]


def _logistic(margin: Tensor, smoothing: float = 0.0) -> Tensor:
    """Returns -(1 - smoothing) log sigmoid(margin) - smoothing log sigmoid(-margin)."""
    loss = -F.logsigmoid(margin)
    return loss + smoothing * margin if smoothing else loss


def _number(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise Refused(f"loss.{key}={value}: give a number of at least 0.")
    return float(value)


def _positive(key: str, value: object) -> float:
    if _number(key, value) == 0:
        raise Refused(f"loss.{key}={value}: the model would learn nothing. Give a number above 0, such as 0.1.")
    return float(value)


def _below_half(value: object) -> float:
    if _number("label_smoothing", value) >= 0.5:
        raise Refused(
            f"loss.label_smoothing={value}: from 0.5 on, the loss would prefer the rejected answers. Give a number "
            "below 0.5."
        )
    return float(value)
