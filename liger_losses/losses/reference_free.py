"""Preference losses without a reference model: CPO, SLiC, IPO, SimPO, AlphaPO, ORPO and TPO are one shape.

`loss type (score(chosen) - score(rejected))`, plus a weight times the NLL of one of the responses. A member of the
family is a choice of each: log-probabilities summed or averaged over tokens, a score of them, one of
`REFERENCE_FREE_TYPES`, and the response whose NLL is added.

Notation of a pair: `c`, `r` are the log-probabilities of the chosen and the rejected response, sums over their scored
tokens or means; `d` is the difference of their scores; `LS` is log-sigmoid, `b` beta, `g` gamma, `e` label smoothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .._checks import check_choice, check_device, check_flag, check_float_tensor, check_number, check_shape
from .._constants import wide
from ..kernels import wide_dtype
from .f_divergence import f_divergence_score
from .pairs import pair_count, pair_metrics, pair_totals, split_pairs
from .preference_types import FLIPS, logistic
from .sequence import sequence_logprobs


def log_odds(
    logps: Tensor,  # any shape
) -> Tensor:
    """`log(p / (1 - p))` of `p = e^logps`, same shape, in fp32 or fp64.

    `logps` is kept at or below minus the dtype's epsilon, where `p` is the largest number below 1: a model that is sure
    of every token has finite odds, and no gradient that would make it surer.
    """
    check_float_tensor("logps", logps)
    logps = wide(logps)
    bounded = logps.clamp(max=-torch.finfo(logps.dtype).eps)
    return bounded - torch.log(-torch.expm1(bounded))


@dataclass(frozen=True)
class ReferenceFreeType:
    """The per-pair loss of a difference of scores, and what it reads."""

    name: str
    per_pair: Callable[[Tensor, ReferenceFreeObjective], Tensor]
    average: bool = False  # defined on token means
    smoothing: bool = False
    gamma: bool = False
    odds: bool = False  # the score is the log-odds instead of the reward


def _sigmoid(d: Tensor, o: ReferenceFreeObjective) -> Tensor:
    return logistic(o.beta * d, o.label_smoothing)


def _hinge(d: Tensor, o: ReferenceFreeObjective) -> Tensor:
    return torch.relu(1 - o.beta * d)


def _ipo(d: Tensor, o: ReferenceFreeObjective) -> Tensor:
    return (d - 0.5 / o.beta).square()


def _margin(d: Tensor, o: ReferenceFreeObjective) -> Tensor:
    return logistic(o.beta * d - o.gamma, o.label_smoothing)


def _odds_ratio(d: Tensor, o: ReferenceFreeObjective) -> Tensor:
    return o.beta * logistic(d)


_ROWS = (
    ReferenceFreeType("sigmoid", _sigmoid, smoothing=True),
    ReferenceFreeType("hinge", _hinge),
    ReferenceFreeType("ipo", _ipo, average=True),
    ReferenceFreeType("simpo", _margin, average=True, smoothing=True, gamma=True),
    ReferenceFreeType("tpo-l", _margin, average=True, smoothing=True, gamma=True),
    ReferenceFreeType("orpo", _odds_ratio, average=True, odds=True),
)

REFERENCE_FREE_TYPES: dict[str, ReferenceFreeType] = {row.name: row for row in _ROWS}


def _users(what: str) -> str:
    return ", ".join(row.name for row in _ROWS if getattr(row, what))


@dataclass(frozen=True, kw_only=True)
class ReferenceFreeObjective:
    """The options of `reference_free_loss`, checked once."""

    beta: float = 0.1
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0
    gamma: float = 0.5
    reward_alpha: float = 0.0

    def __post_init__(self) -> None:
        check_choice("loss_type", self.loss_type, tuple(REFERENCE_FREE_TYPES))
        check_number("beta", self.beta, above=0)
        check_number("label_smoothing", self.label_smoothing)
        check_number("gamma", self.gamma)
        check_number("reward_alpha", self.reward_alpha)
        if self.label_smoothing != 0 and not self.type.smoothing:
            raise ValueError(
                f"label_smoothing: got {self.label_smoothing}, expected 0 for loss_type {self.loss_type}, which has no "
                f"smoothed form; these have one: {_users('smoothing')}"
            )
        if not FLIPS.accepts(self.label_smoothing):
            raise ValueError(
                f"label_smoothing: got {self.label_smoothing}, expected {FLIPS.text} for loss_type {self.loss_type!r}"
            )
        if self.gamma != ReferenceFreeObjective.gamma and not self.type.gamma:
            raise ValueError(
                f"gamma: got {self.gamma}, expected the default: only loss_type {_users('gamma')} read it, got "
                f"{self.loss_type}"
            )
        if self.reward_alpha != 0 and self.type.odds:
            raise ValueError(
                f"reward_alpha: got {self.reward_alpha}, expected 0 with loss_type {self.loss_type}, whose score is "
                "the log-odds"
            )

    @property
    def type(self) -> ReferenceFreeType:
        return REFERENCE_FREE_TYPES[self.loss_type]

    def reward(self, logps: Tensor) -> Tensor:
        """`(1 - p^(-a)) / a` of `p = e^logps`, `a` the reward's alpha; `logps` itself at `a = 0`."""
        # It is the score of the alpha divergence of order 1 - a, taken at the log-probability instead of a log-ratio.
        return f_divergence_score(logps, "alpha_divergence", 1 - self.reward_alpha)

    def difference(self, chosen_logps: Tensor, rejected_logps: Tensor) -> Tensor:
        """`d`, `[B]`."""
        score = log_odds if self.type.odds else self.reward
        return score(chosen_logps) - score(rejected_logps)


def reference_free_loss(
    chosen_logps: Tensor,  # [B]
    rejected_logps: Tensor,  # [B]
    *,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    gamma: float = 0.5,
    reward_alpha: float = 0.0,
) -> Tensor:
    """Per-pair losses `[B]` of the preference losses without a reference; the loss is their mean, plus NLL for some.

    With the notation at the top of this module:

    | loss_type | loss of a pair | `c`, `r` | paper (arXiv) |
    |---|---|---|---|
    | sigmoid | `-(1-e) LS(bd) - e LS(-bd)`: CPO, TPO | sums | 2401.08417, 2405.16681 |
    | hinge | `max(0, 1 - bd)`: SLiC | sums | 2305.10425 |
    | ipo | `(d - 1/(2b))^2` | means | 2310.12036 |
    | simpo | `-(1-e) LS(bd - g) - e LS(g - bd)` | means | 2405.14734 |
    | tpo-l | as simpo | means | 2405.16681 |
    | orpo | `-b LS(d)`, `d` the difference of log-odds `log(p/(1-p))` | means | 2403.07691 |

    `d = c - r` but for orpo; with `reward_alpha = a` it is the difference of rewards `(1 - p^(-a)) / a` of the
    probabilities `p = e^c`, `e^r`, whose limit at `a = 0` is `c - r` (AlphaPO, arXiv:2501.03884: simpo with `a != 0`).

    Args:
        chosen_logps, rejected_logps: reduced as the table says; the caller may choose otherwise.
        beta: `> 0`; scale of the score's difference, for orpo weight of the loss.
        label_smoothing: the presumed share of flipped labels, in `[0, 1)`. Refused where the table has no `e`.
        gamma: target margin. It is subtracted from `b d`, not from `d`. Refused (but for its default) where not read.
        reward_alpha: AlphaPO's alpha, any number; 0 is the log-probability. Refused with orpo. Exponents are bounded,
            80 in fp32 and 700 in fp64, so that an improbable response has a finite loss.

    Log-probabilities in less than fp32 are computed in fp32.

    Raises:
        ValueError, TypeError: an option that the loss type does not use, a wrong shape or dtype; the message names it.
    """
    objective = ReferenceFreeObjective(
        beta=beta, loss_type=loss_type, label_smoothing=label_smoothing, gamma=gamma, reward_alpha=reward_alpha
    )
    check_float_tensor("chosen_logps", chosen_logps)
    if chosen_logps.dim() != 1:
        raise ValueError(f"chosen_logps: got shape {list(chosen_logps.shape)}, expected [pairs]")
    check_float_tensor("rejected_logps", rejected_logps, (chosen_logps.shape[0],))
    check_device("rejected_logps", rejected_logps, "chosen_logps", chosen_logps)
    dtype = wide_dtype(chosen_logps.dtype, rejected_logps.dtype)
    difference = objective.difference(chosen_logps.to(dtype), rejected_logps.to(dtype))
    return objective.type.per_pair(difference, objective)


NLL_RESPONSES = ("chosen", "third")


@dataclass(frozen=True, kw_only=True)
class ReferenceFreeLoss(ReferenceFreeObjective):
    """`reference_free_loss` of per-token statistics, as a loss object (the protocol is in `liger_losses.chunked.loss`).

    `loss = mean over pairs of reference_free_loss + alpha * NLL`, the second term with `compute_nll_loss` only: the
    mean over the scored tokens of all responses that `nll_response` names. Rows are `[2B, T]`, the chosen half first,
    or `[3B, T]`, a third response after them. An empty row counts as a response of log-probability 0.

    | method | options |
    |---|---|
    | CPO | `compute_nll_loss=True` |
    | SLiC, IPO | `loss_type="hinge"`, `loss_type="ipo"` |
    | SimPO | `loss_type="simpo"` |
    | CPO-SimPO | `loss_type="simpo", compute_nll_loss=True` |
    | AlphaPO | `loss_type="simpo", reward_alpha=a` |
    | ORPO | `loss_type="orpo", compute_nll_loss=True` |
    | TPO, TPO-L | `nll_response="third", compute_nll_loss=True`, and `loss_type="tpo-l"` |

    `inputs` may hold `response_mask`, bool `[2B, T]`: which of the scored tokens make up the responses. The pair's term
    and the metrics of logits read no others, NLL reads every scored token of the chosen rows: prompt and completion, as
    ORPO was published. Not with a third response.

    Args: Options beyond those of reference_free_loss
        average_log_prob: token means for every loss type; False: only for those defined on them.
        compute_nll_loss, alpha: whether to add the NLL term, and its weight.
        nll_response: `"chosen"`, or `"third"`: rows of their own, read by the NLL term only.

    Metrics, detached: `chosen_logps`, `rejected_logps`, `chosen_rewards`, `rejected_rewards` (`beta` times the reward,
    for orpo times the log-probability), each `[B]`; `chosen_logits_mean`, `rejected_logits_mean`, over scored positions
    and the vocabulary; `nll_loss`, 0 without the NLL term; with orpo `log_odds_ratio`, `log_odds_chosen`: the means of
    `LS(d)` and `d`.
    """

    average_log_prob: bool = False
    compute_nll_loss: bool = False
    alpha: float = 1.0
    nll_response: str = "chosen"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("average_log_prob", self.average_log_prob)
        check_flag("compute_nll_loss", self.compute_nll_loss)
        check_number("alpha", self.alpha)
        check_choice("nll_response", self.nll_response, NLL_RESPONSES)
        for name in ("alpha", "nll_response"):
            if getattr(self, name) != getattr(ReferenceFreeLoss, name) and not self.compute_nll_loss:
                raise ValueError(
                    f"{name}: got {getattr(self, name)!r}, expected the default: only the NLL term reads it, and "
                    "compute_nll_loss is False"
                )

    @property
    def separability(self) -> str:
        return "pair"

    @property
    def statistics(self) -> tuple[str, ...]:
        return ("logprob", "mean_logit")

    @property
    def unit_rows(self) -> int:
        return 3 if self.nll_response == "third" else 2

    def unit_count(self, rows: int) -> int:
        """Number of units in `rows` rows. Raises ValueError when the rows do not come in units."""
        if self.unit_rows == 2:
            return pair_count(rows)
        if rows % 3:
            raise ValueError(
                f"target: got {rows} rows, expected a multiple of 3: the chosen responses first, then the rejected, "
                "then the third"
            )
        return rows // 3

    def totals(self, mask: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.unit_count(mask.shape[0])
        known = {"response_mask"} if self.unit_rows == 2 else set()
        unknown = sorted(set(inputs) - known)
        if unknown:
            raise ValueError(
                f"inputs: got {', '.join(unknown)}, expected {' or '.join(['nothing', *known])} with ReferenceFreeLoss "
                f"and nll_response={self.nll_response!r}"
            )
        for name, value in inputs.items():
            if value.dtype != torch.bool:
                raise TypeError(f"{name}: got dtype {value.dtype}, expected torch.bool")
            check_shape(name, value, tuple(mask.shape))
        pairs, nll = self._masks(mask, inputs)
        return {**pair_totals(pairs), "nll_tokens": nll.sum().clamp_min(1)}

    def _nll_rows(self, rows: Tensor) -> Tensor:
        """Those of `rows` `[unit_rows * b, ...]` whose NLL is taken, `[b, ...]`."""
        units = rows.shape[0] // self.unit_rows
        return rows[2 * units :] if self.nll_response == "third" else rows[:units]

    def _pairs(self, rows: Tensor) -> Tensor:
        """The chosen and the rejected rows, `[2b, ...]`."""
        return rows[: 2 * (rows.shape[0] // self.unit_rows)]

    def _masks(self, mask: Tensor, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """What the pair's term reads `[2b, T]`, and what NLL reads `[b, T]`."""
        pairs = self._pairs(mask)
        if "response_mask" in inputs:
            pairs = pairs & inputs["response_mask"]
        return pairs, self._nll_rows(mask)

    def __call__(
        self,
        statistics: Mapping[str, Tensor],
        mask: Tensor,
        inputs: Mapping[str, Tensor],
        totals: Mapping[str, Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs = statistics["logprob"]
        logprobs = wide(logprobs)
        responses, nll_mask = self._masks(mask, inputs)
        average = self.average_log_prob or self.type.average
        logps = sequence_logprobs(self._pairs(logprobs), responses, average=average)
        difference = self.difference(*split_pairs(logps))
        loss = self.type.per_pair(difference, self).sum() / totals["pairs"]
        nll = logps.new_zeros(())
        if self.compute_nll_loss:
            nll = -self._nll_rows(logprobs).masked_fill(~nll_mask, 0).sum() / totals["nll_tokens"]
            loss = loss + self.alpha * nll

        logits = {"mean_logit": self._pairs(statistics["mean_logit"])}
        metrics = pair_metrics(logits, responses, totals, logps, nll)
        rewards = self.beta * self.reward(logps.detach())
        metrics["chosen_rewards"], metrics["rejected_rewards"] = split_pairs(rewards)
        if self.type.odds:
            odds = difference.detach()
            metrics["log_odds_ratio"] = F.logsigmoid(odds).sum() / totals["pairs"]
            metrics["log_odds_chosen"] = odds.sum() / totals["pairs"]
        return loss, metrics
