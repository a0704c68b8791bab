"""The loss types of direct preference optimisation: one small function and one row of `_ROWS` each.

The formulas are in `dpo_loss` (`preference.py`), in its notation. Every function maps `Pairs` to losses `[B]` and is
finite, gradient included, wherever the exact value fits the dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Options(Protocol):
    """The options that loss types read."""

    @property
    def beta(self) -> float: ...
    @property
    def label_smoothing(self) -> float: ...
    @property
    def discopop_tau(self) -> float: ...


@dataclass(frozen=True)
class Pairs:
    """What a loss type may read of `B` pairs; every tensor is `[B]`."""

    chosen_logps: Tensor
    rejected_logps: Tensor
    ref_chosen_logps: Tensor
    ref_rejected_logps: Tensor
    chosen_score: Tensor
    rejected_score: Tensor
    lengths: tuple[Tensor, Tensor] | None  # scored tokens, chosen and rejected, at least 1
    chosen_nll: Tensor | None

    @property
    def chosen_ratio(self) -> Tensor:
        return self.chosen_logps - self.ref_chosen_logps

    @property
    def rejected_ratio(self) -> Tensor:
        return self.rejected_logps - self.ref_rejected_logps

    @property
    def margin(self) -> Tensor:
        return self.chosen_score - self.rejected_score

    @property
    def mean_margin(self) -> Tensor:
        """Margin of scores per token."""
        assert self.lengths is not None
        return self.chosen_score / self.lengths[0] - self.rejected_score / self.lengths[1]


def logistic(z: Tensor, smoothing: float = 0.0) -> Tensor:
    """`-(1 - e) LS(z) - e LS(-z)`."""
    if smoothing == 0:
        return -F.logsigmoid(z)
    return -(1 - smoothing) * F.logsigmoid(z) - smoothing * F.logsigmoid(-z)


def _sigmoid(p: Pairs, o: Options) -> Tensor:
    return logistic(o.beta * p.margin, o.label_smoothing)


def _hinge(p: Pairs, o: Options) -> Tensor:
    return torch.relu(1 - o.beta * p.margin)


def _ipo(p: Pairs, o: Options) -> Tensor:
    return (p.mean_margin - 0.5 / o.beta).square()


def _ipo_sum(p: Pairs, o: Options) -> Tensor:
    return (p.margin - 0.5 / o.beta).square()


def _sigmoid_norm(p: Pairs, o: Options) -> Tensor:
    return logistic(o.beta * p.mean_margin)


def _exo_pair(p: Pairs, o: Options) -> Tensor:
    """KL of `(S(bD), S(-bD))` from `(1 - e, e)`."""
    z = o.beta * p.margin
    log_clean, log_flipped = math.log1p(-o.label_smoothing), math.log(o.label_smoothing)
    return torch.sigmoid(z) * (F.logsigmoid(z) - log_clean) + torch.sigmoid(-z) * (F.logsigmoid(-z) - log_flipped)


def _nca_pair(p: Pairs, o: Options) -> Tensor:
    chosen, rejected = o.beta * p.chosen_ratio, o.beta * p.rejected_ratio
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def _robust(p: Pairs, o: Options) -> Tensor:
    """The unbiased estimate of the clean loss when a share `e` of the labels is flipped."""
    z = o.beta * p.margin
    if o.label_smoothing == 0:
        return logistic(z)
    return (logistic(z) * (1 - o.label_smoothing) - logistic(-z) * o.label_smoothing) / (1 - 2 * o.label_smoothing)


def _bco_pair(p: Pairs, o: Options) -> Tensor:
    return logistic(o.beta * p.chosen_ratio) + logistic(-o.beta * p.rejected_ratio)


def _sppo_hard(p: Pairs, o: Options) -> Tensor:
    return (p.chosen_ratio - 0.5 / o.beta).square() + (p.rejected_ratio + 0.5 / o.beta).square()


def _aot(p: Pairs, o: Options) -> Tensor:
    policy, reference = p.chosen_logps - p.rejected_logps, p.ref_chosen_logps - p.ref_rejected_logps
    return logistic(o.beta * (policy.sort().values - reference.sort().values), o.label_smoothing)


def _aot_unpaired(p: Pairs, o: Options) -> Tensor:
    return logistic(o.beta * (p.chosen_ratio.sort().values - p.rejected_ratio.sort().values), o.label_smoothing)


def _apo_zero(p: Pairs, o: Options) -> Tensor:
    return torch.sigmoid(-o.beta * p.chosen_ratio) + torch.sigmoid(o.beta * p.rejected_ratio)


def _apo_down(p: Pairs, o: Options) -> Tensor:
    return torch.sigmoid(o.beta * p.chosen_ratio) + torch.sigmoid(-o.beta * (p.chosen_ratio - p.rejected_ratio))


def _discopop(p: Pairs, o: Options) -> Tensor:
    z = o.beta * p.margin
    # S(z / tau) e^-z as one exponential: the factors under- and overflow where their product is finite.
    return torch.sigmoid(-z / o.discopop_tau) * logistic(z) + torch.exp(F.logsigmoid(z / o.discopop_tau) - z)


def _sft(p: Pairs, o: Options) -> Tensor:
    assert p.chosen_nll is not None
    return p.chosen_nll.expand_as(p.chosen_logps)


@dataclass(frozen=True)
class Smoothing:
    """The label smoothings that a loss type has a formula for."""

    text: str
    accepts: Callable[[float], bool]


FLIPS = Smoothing("0 <= label_smoothing < 1", lambda e: 0 <= e < 1)
_CLEAN = Smoothing("0 <= label_smoothing < 0.5", lambda e: 0 <= e < 0.5)
_PROPER = Smoothing("0 < label_smoothing < 1", lambda e: 0 < e < 1)


@dataclass(frozen=True)
class LossType:
    """The per-pair loss and what it accepts."""

    name: str
    per_pair: Callable[[Pairs, Options], Tensor]
    smoothing: Smoothing | None = None  # None: label smoothing is refused
    any_divergence: bool = False  # reads scores through their difference, where f-DPO's unknown log Z cancels
    lengths: bool = False  # needs chosen_lengths and rejected_lengths
    nll: bool = False  # needs chosen_nll
    separability: str = "pair"  # "batch": couples the pairs, so it has no weight per pair either


_ROWS = (
    LossType("sigmoid", _sigmoid, FLIPS, any_divergence=True),
    LossType("hinge", _hinge, any_divergence=True),
    LossType("ipo", _ipo, any_divergence=True, lengths=True),
    LossType("ipo_sum", _ipo_sum, any_divergence=True),
    LossType("sigmoid_norm", _sigmoid_norm, any_divergence=True, lengths=True),
    LossType("exo_pair", _exo_pair, _PROPER, any_divergence=True),
    LossType("nca_pair", _nca_pair),
    LossType("robust", _robust, _CLEAN, any_divergence=True),
    LossType("bco_pair", _bco_pair),
    LossType("sppo_hard", _sppo_hard),
    LossType("aot", _aot, FLIPS, separability="batch"),
    LossType("aot_unpaired", _aot_unpaired, FLIPS, separability="batch"),
    LossType("apo_zero", _apo_zero),
    LossType("apo_down", _apo_down),
    LossType("discopop", _discopop, any_divergence=True),
    LossType("sft", _sft, any_divergence=True, nll=True),
)

LOSS_TYPES: dict[str, LossType] = {row.name: row for row in _ROWS}
