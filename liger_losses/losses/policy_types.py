"""The loss types of policy optimisation: one small function and one row of `_ROWS` each.

The formulas are in `GRPOLoss` (`policy.py`), in its notation. Every function maps `Tokens` to losses `[r, T]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Options(Protocol):
    """The options that loss types read."""

    @property
    def epsilon_low(self) -> float: ...
    @property
    def epsilon_high(self) -> float: ...
    @property
    def delta(self) -> float | None: ...
    @property
    def sapo_temperature_pos(self) -> float: ...
    @property
    def sapo_temperature_neg(self) -> float: ...
    @property
    def vespo_k_pos(self) -> float: ...
    @property
    def vespo_lambda_pos(self) -> float: ...
    @property
    def vespo_k_neg(self) -> float: ...
    @property
    def vespo_lambda_neg(self) -> float: ...


@dataclass(frozen=True)
class Tokens:
    """What a loss type may read; every tensor is `[r, T]`, or `[r, 1]` where it says so."""

    logprobs: Tensor
    log_ratio: Tensor  # of each token
    ratio: Tensor  # of each token, or of its sequence [r, 1]
    advantages: Tensor
    mask: Tensor  # bool: scored
    kept: Tensor  # bool: the tokens that the policy term is taken over
    sequence_log_weight: Tensor | None = None  # [r, 1] or [r, T], VESPO's: see `vespo_log_weight`


def bounded_exp(x: Tensor) -> Tensor:
    """`e^x`, and the dtype's largest power where that overflows: a clipped infinity would send back 0 * inf."""
    return x.clamp(max=math.floor(math.log(torch.finfo(x.dtype).max))).exp()


# VESPO bounds a sequence's weight to [1e-8, e^20], and each token's log-ratio to [-20, 20].
_LOWEST, _HIGHEST = math.log(1e-8), 20.0


def vespo_log_weight(log_ratio: Tensor) -> Tensor:
    """The log of a sequence's weight under the policy, `[r, 1]`: the sum of its tokens' bounded log-ratios."""
    return log_ratio.detach().clamp(-_HIGHEST, _HIGHEST).sum(dim=-1, keepdim=True)


def vespo_log_correction(ratio: Tensor) -> Tensor:
    """What the sampler's ratios `[r, T]` (1 where not scored) or `[r, 1]` add to it, `[r, 1]`."""
    return ratio.detach().log().clamp(_LOWEST, _HIGHEST).sum(dim=-1, keepdim=True)


def vespo_phi(t: Tokens, o: Options) -> Tensor:
    """`phi(w) = e^lambda w^k e^(-lambda w)`, a constant of the gradient; `phi(1) = 1`."""
    assert t.sequence_log_weight is not None
    log_w = t.sequence_log_weight.clamp(_LOWEST, _HIGHEST)
    positive = t.advantages >= 0
    k = _choose(positive, o.vespo_k_pos, o.vespo_k_neg, t.ratio.dtype)
    rate = _choose(positive, o.vespo_lambda_pos, o.vespo_lambda_neg, t.ratio.dtype)
    return torch.exp(rate + k * log_w - rate * log_w.exp())


def _choose(condition: Tensor, yes: float, no: float, dtype: torch.dtype) -> Tensor:
    """`yes` where the condition holds; `torch.where` of two numbers would round them to fp32."""
    return torch.full_like(condition, no, dtype=dtype).masked_fill(condition, yes)


def _clipped(t: Tokens, o: Options) -> Tensor:
    clipped = t.ratio.clamp(1 - o.epsilon_low, 1 + o.epsilon_high)
    ratio = t.ratio if o.delta is None else t.ratio.clamp(max=o.delta)
    return -torch.minimum(ratio * t.advantages, clipped * t.advantages)


def _cispo(t: Tokens, o: Options) -> Tensor:
    return -t.ratio.detach().clamp(max=o.epsilon_high) * t.advantages * t.logprobs


def _sapo(t: Tokens, o: Options) -> Tensor:
    tau = _choose(t.advantages > 0, o.sapo_temperature_pos, o.sapo_temperature_neg, t.ratio.dtype)
    return -torch.sigmoid(tau * (t.ratio - 1)) * 4 / tau * t.advantages


def _vespo(t: Tokens, o: Options) -> Tensor:
    return -vespo_phi(t, o) * t.advantages * t.logprobs


def _gmpo(t: Tokens, o: Options) -> Tensor:
    clipped = t.log_ratio.clamp(-o.epsilon_low, o.epsilon_high)
    one_sided = torch.where(
        t.advantages > 0, torch.minimum(t.log_ratio, clipped), torch.maximum(t.log_ratio, clipped)
    ).masked_fill(~t.kept, 0)
    mean = one_sided.sum(dim=-1, keepdim=True) / t.kept.sum(dim=-1, keepdim=True).clamp_min(1)
    return -bounded_exp(mean) * t.advantages


Clips = Callable[[Tokens, Options], tuple[Tensor, Tensor]]  # which tokens lie beyond the lower and the upper bound


def _ratio_clips(t: Tokens, o: Options) -> tuple[Tensor, Tensor]:
    return t.ratio < 1 - o.epsilon_low, t.ratio > 1 + o.epsilon_high


def _cispo_clips(t: Tokens, o: Options) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(t.kept), t.ratio > o.epsilon_high


def _gmpo_clips(t: Tokens, o: Options) -> tuple[Tensor, Tensor]:
    return t.log_ratio < -o.epsilon_low, t.log_ratio > o.epsilon_high


def _no_clips(t: Tokens, o: Options) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(t.kept), torch.zeros_like(t.kept)


@dataclass(frozen=True)
class PolicyType:
    """The per-token loss, how a batch of them becomes a number, and the options that enter.

    Divisors, with `R` rows of `n_r` scored tokens, `n` together: "sequence" `R n_r` (a mean of means), "batch" `n`,
    "step" the tokens of the whole optimiser step a process (`n` unless that is told), "length"
    `R max_completion_length`, "rows" `R` (a mean of sums).
    """

    name: str
    per_token: Callable[[Tokens, Options], Tensor]
    divisor: str
    clips: Clips = _ratio_clips
    reads: tuple[str, ...] = ("epsilon_low", "epsilon_high", "delta")
    level: str | None = None  # of the ratio, where the type has but one
    ratio_of_sums: bool = False  # the sequence's ratio is that of its probabilities, not their geometric mean
    own_kept: bool = False  # leaves out low-entropy tokens itself


_SAPO = ("sapo_temperature_pos", "sapo_temperature_neg")
_VESPO = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
_LOG_CLIP = ("epsilon_low", "epsilon_high")

_ROWS = (
    PolicyType("grpo", _clipped, "sequence"),
    PolicyType("bnpo", _clipped, "batch"),
    PolicyType("dr_grpo", _clipped, "length"),
    PolicyType("dapo", _clipped, "step"),
    PolicyType("cispo", _cispo, "step", _cispo_clips, ("epsilon_high",)),
    PolicyType("sapo", _sapo, "sequence", _no_clips, _SAPO),
    PolicyType("luspo", _clipped, "rows"),
    PolicyType("vespo", _vespo, "step", _no_clips, _VESPO, level="token"),
    PolicyType("gspo", _clipped, "sequence", level="sequence"),
    PolicyType("gmpo", _gmpo, "sequence", _gmpo_clips, _LOG_CLIP, level="sequence", own_kept=True),
    PolicyType("rloo", _clipped, "sequence", level="sequence", ratio_of_sums=True),
    PolicyType("ppo", _clipped, "step"),
)

POLICY_TYPES: dict[str, PolicyType] = {row.name: row for row in _ROWS}
