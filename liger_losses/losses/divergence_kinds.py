"""The kinds of divergence between a student and a teacher: one function and one row of `DIVERGENCES` each.

Everything is exact where a probability is 0 (`0 log 0 = 0`, in the gradient as well), and infinite only where the
mathematics is: a KL whose first argument has mass where the second has none. A token whose divergence is infinite
through the teacher's zeros sends no gradient back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import NO_DIRECTION, head_share


@dataclass(frozen=True)
class DivergenceNumbers:
    """The numbers that a kind reads, each already checked."""

    beta: float = 0.5
    skew: float = 0.1
    alpha: float = 0.5
    mu: float = 0.5
    endpoints: str = "trl"


@dataclass(frozen=True)
class DivergenceKind:
    """A row of `DIVERGENCES`: `function(student, teacher, numbers)` sums over the last dimension.

    It is given log-probabilities, or logits where `of_logits`. `reads` names the options of the kind and their
    defaults.
    """

    function: Callable[[Tensor, Tensor, DivergenceNumbers], Tensor]
    formula: str
    paper: str
    reads: tuple[tuple[str, float], ...] = ()
    of_logits: bool = False
    is_f: bool = True  # an f-divergence: a sum of one term an entry, and never larger when entries are merged


def log_ratio(log_s: Tensor, log_t: Tensor) -> Tensor:
    """`log s - log t`, 0 where both are 0."""
    neither = (log_s == -torch.inf) & (log_t == -torch.inf)
    return (log_s - log_t).masked_fill(neither, 0)


def _log_mix(u: Tensor, w: float) -> Tensor:
    """`log(w + (1 - w) e^u)`: accurate for `u` near 0, finite wherever it is for infinite `u`."""
    below, above = u.clamp(max=0), u.clamp(min=0)
    return torch.where(
        u <= 0,
        torch.log1p((1 - w) * torch.expm1(below)),
        above + torch.log1p(w * torch.expm1(-above)),
    )


def probability_times(log_p: Tensor, values: Tensor) -> Tensor:
    """`p * values` per entry; what stands where `p = 0` is not read."""
    p = log_p.exp()
    return p * values.masked_fill(p == 0, 0)


def total_variation_terms(p: Tensor, q: Tensor) -> Tensor:
    """`|p - q| / 2` of every entry."""
    return (p - q).abs() / 2


def _forward_kl(log_s: Tensor, log_t: Tensor, numbers: DivergenceNumbers) -> Tensor:
    return probability_times(log_t, -log_ratio(log_s, log_t)).sum(-1)


def _reverse_kl(log_s: Tensor, log_t: Tensor, numbers: DivergenceNumbers) -> Tensor:
    ratio = log_ratio(log_s, log_t)
    infinite = (ratio == torch.inf) & (log_s.exp() > 0)
    return _with_infinite(probability_times(log_s, ratio.masked_fill(infinite, 0)).sum(-1), infinite.any(-1))


def _with_infinite(value: Tensor, infinite: Tensor) -> Tensor:
    """`value`, infinite and without a gradient where `infinite`: autograd would make NaN of infinity times 0."""
    return value.masked_fill(infinite, torch.inf)


def _jsd(log_s: Tensor, log_t: Tensor, numbers: DivergenceNumbers) -> Tensor:
    beta = numbers.beta
    if beta in (0, 1):
        if numbers.endpoints == "formula":
            return (log_s.exp() * 0).sum(-1)
        return (_reverse_kl if beta else _forward_kl)(log_s, log_t, numbers)
    u = log_ratio(log_s, log_t)
    teacher, student = probability_times(log_t, -_log_mix(u, beta)), probability_times(log_s, -_log_mix(-u, 1 - beta))
    return (beta * teacher + (1 - beta) * student).sum(-1)


def _skewed_forward_kl(log_s: Tensor, log_t: Tensor, numbers: DivergenceNumbers) -> Tensor:
    if numbers.skew == 0:
        return _forward_kl(log_s, log_t, numbers)
    return probability_times(log_t, -_log_mix(log_ratio(log_s, log_t), numbers.skew)).sum(-1)


def _skewed_reverse_kl(log_s: Tensor, log_t: Tensor, numbers: DivergenceNumbers) -> Tensor:
    if numbers.skew == 0:
        return _reverse_kl(log_s, log_t, numbers)
    return probability_times(log_s, -_log_mix(-log_ratio(log_s, log_t), numbers.skew)).sum(-1)


def _tvd(log_s: Tensor, log_t: Tensor, numbers: DivergenceNumbers) -> Tensor:
    return total_variation_terms(log_s.exp(), log_t.exp()).sum(-1)


def _jeffreys(log_s: Tensor, log_t: Tensor, numbers: DivergenceNumbers) -> Tensor:
    reverse = _reverse_kl(log_s, log_t, numbers)
    return _with_infinite(_forward_kl(log_s, log_t, numbers) + reverse, reverse == torch.inf)


def _alpha(log_s: Tensor, log_t: Tensor, numbers: DivergenceNumbers) -> Tensor:
    alpha = numbers.alpha
    if abs(alpha) < 1e-6:
        return _reverse_kl(log_s, log_t, numbers)
    if abs(alpha - 1) < 1e-6:
        return _forward_kl(log_s, log_t, numbers)
    # alpha t + (1 - alpha) s - t^alpha s^(1 - alpha), relative to the larger of t and s: no difference of near-equal
    # sums. Where a power of their ratio would overflow, which the product with a small probability need not, as it is.
    u = log_ratio(log_s, log_t)
    infinite = ((u == torch.inf) & (log_s.exp() > 0)) if alpha < 0 else ((u == -torch.inf) & (log_t.exp() > 0))
    if not 0 < alpha < 1:
        u = u.masked_fill(infinite, 0)
    far = torch.maximum((1 - alpha) * u.clamp(max=0), -alpha * u.clamp(min=0)) > math.log(torch.finfo(u.dtype).max) / 2
    u = u.masked_fill(far, 0)
    below, above = u.clamp(max=0), u.clamp(min=0)
    terms = torch.where(
        u <= 0,
        probability_times(log_t, (1 - alpha) * torch.expm1(below) - torch.expm1((1 - alpha) * below)),
        probability_times(log_s, alpha * torch.expm1(-above) - torch.expm1(-alpha * above)),
    )
    log_s, log_t = log_s.masked_fill(~far, 0), log_t.masked_fill(~far, 0)
    power = torch.exp(alpha * log_t + (1 - alpha) * log_s)
    terms = torch.where(far, alpha * log_t.exp() + (1 - alpha) * log_s.exp() - power, terms)
    value = terms.sum(-1) / (alpha * (1 - alpha))
    return value if 0 < alpha < 1 else _with_infinite(value, infinite.any(-1))


def _akl(log_s: Tensor, log_t: Tensor, numbers: DivergenceNumbers) -> Tensor:
    if numbers.mu == 1:
        return _forward_kl(log_s, log_t, numbers)  # rounded sums of probabilities reach 1 before the last of them
    with torch.no_grad():
        share = head_share(log_s.exp(), log_t.exp(), numbers.mu)
    forward, reverse = _forward_kl(log_s, log_t, numbers), _reverse_kl(log_s, log_t, numbers)
    value = share * forward.masked_fill(share == 0, 0) + (1 - share) * reverse.masked_fill(share == 1, 0)
    return _with_infinite(value, (reverse == torch.inf) & (share < 1))


def _finite_on_either(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Logits with 0 for entries that both models rule out."""
    neither = (student == -torch.inf) & (teacher == -torch.inf)
    return student.masked_fill(neither, 0), teacher.masked_fill(neither, 0)


def _cosine(student: Tensor, teacher: Tensor, numbers: DivergenceNumbers) -> Tensor:
    student, teacher = _finite_on_either(student, teacher)
    (a, zero_a), (b, zero_b) = _unit(student), _unit(teacher)
    # |a - b|^2 = 2 - 2 cos of two units: exactly 0 for equal logits, where 1 - cos is what rounding leaves.
    return ((a - b).square().sum(-1) + (zero_a ^ zero_b)) / 2


def _unit(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Logits over their norm, and where they have no direction: there they stay 0, and so does their gradient."""
    norms = logits.norm(dim=-1, keepdim=True)
    none = norms <= NO_DIRECTION
    return logits / norms.masked_fill(none, torch.inf), none.squeeze(-1)


def _mse(student: Tensor, teacher: Tensor, numbers: DivergenceNumbers) -> Tensor:
    student, teacher = _finite_on_either(student, teacher)
    return (student - teacher).square().mean(-1)


_SKEW = "Ko et al., DistiLLM, arXiv:2402.03898"
_HINTON = "Hinton, Vinyals and Dean, Distilling the Knowledge in a Neural Network, arXiv:1503.02531"

# t: teacher, s: student, z_t and z_s: their logits.
DIVERGENCES: dict[str, DivergenceKind] = {
    "forward_kl": DivergenceKind(_forward_kl, "KL(t||s) = sum t log(t / s)", _HINTON),
    "reverse_kl": DivergenceKind(_reverse_kl, "KL(s||t) = sum s log(s / t)", "Gu et al., MiniLLM, arXiv:2306.08543"),
    "jsd": DivergenceKind(
        _jsd,
        "beta KL(t||m) + (1 - beta) KL(s||m), m = (1 - beta) s + beta t",
        "Agarwal et al., GKD, arXiv:2306.13649",
        (("beta", 0.5),),
    ),
    "skewed_forward_kl": DivergenceKind(_skewed_forward_kl, "KL(t || skew t + (1 - skew) s)", _SKEW, (("skew", 0.1),)),
    "skewed_reverse_kl": DivergenceKind(_skewed_reverse_kl, "KL(s || skew s + (1 - skew) t)", _SKEW, (("skew", 0.1),)),
    "tvd": DivergenceKind(_tvd, "1/2 sum |s - t|", "Wen et al., f-distill, arXiv:2307.15190"),
    "jeffreys": DivergenceKind(
        _jeffreys, "KL(t||s) + KL(s||t)", "Jeffreys, An invariant form for the prior probability, 1946"
    ),
    "alpha": DivergenceKind(
        _alpha,
        "(1 - sum t^alpha s^(1 - alpha)) / (alpha (1 - alpha)); KL(s||t) at 0, KL(t||s) at 1",
        "Wang et al., AlphaNet, arXiv:2102.07954",
        (("alpha", 0.5),),
    ),
    "akl": DivergenceKind(
        _akl,
        "w KL(t||s) + (1 - w) KL(s||t), w = sum over head |t - s| / sum |t - s| (constant); head: fewest most "
        "probable tokens of t that reach the mass mu, with all of the last one's probability",
        "Wu et al., Rethinking Kullback-Leibler Divergence in Knowledge Distillation, arXiv:2404.02657",
        (("mu", 0.5),),
        is_f=False,
    ),
    "cosine": DivergenceKind(_cosine, "1 - cos(z_s, z_t)", _HINTON, of_logits=True, is_f=False),
    "mse": DivergenceKind(
        _mse, "mean over V of (z_s - z_t)^2", "Kim et al., arXiv:2105.08919", of_logits=True, is_f=False
    ),
}


def must_cover(kind: str, numbers: DivergenceNumbers) -> set[str]:
    """The models that must give a probability wherever the other does, or else the divergence is infinite."""
    alpha, trl = numbers.alpha, numbers.endpoints == "trl"
    student = (
        kind in ("forward_kl", "jeffreys")
        or (kind == "akl" and numbers.mu > 0)
        or (kind == "skewed_forward_kl" and numbers.skew == 0)
        or (kind == "alpha" and alpha >= 1)
        or (kind == "jsd" and numbers.beta == 0 and trl)
    )
    teacher = (
        kind in ("reverse_kl", "jeffreys")
        or (kind == "akl" and numbers.mu < 1)
        or (kind == "skewed_reverse_kl" and numbers.skew == 0)
        or (kind == "alpha" and alpha <= 0)
        or (kind == "jsd" and numbers.beta == 1 and trl)
    )
    return {side for side, must in (("student", student), ("teacher", teacher)) if must}
