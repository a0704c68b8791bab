"""Scores of f-DPO: `g(u) = f'(e^u)` of `u = log pi - log pi_ref`, up to the constant that cancels in a pair.

Wang et al., "Beyond Reverse KL: Generalizing Direct Preference Optimization with Diverse Divergence Constraints",
arXiv:2309.16240. Adding a divergence is one function and one row of `F_DIVERGENCES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .._checks import check_choice, check_float_tensor, check_number
from .._constants import wide

# Largest exponent that is taken; beyond it the score is constant. It leaves room in the dtype for what follows (beta,
# a difference, a sum over the batch), and keeps the gradient from being 0 * inf where the loss itself is flat.
_MAX_EXPONENT = {torch.float32: 80.0, torch.float64: 700.0}


def _reverse_kl(u: Tensor, alpha: float) -> Tensor:
    return u


def _forward_kl(u: Tensor, alpha: float) -> Tensor:
    """`1 - e^-u`."""
    return _alpha_divergence(u, 0.0)


def _js_divergence(u: Tensor, alpha: float) -> Tensor:
    """`log 2 + log sigmoid(u)`."""
    return math.log(2) + F.logsigmoid(u)


def _alpha_divergence(u: Tensor, alpha: float) -> Tensor:
    """`(e^((alpha - 1) u) - 1) / (alpha - 1)`; its limit `u` at `alpha = 1`."""
    if abs(alpha - 1) < 1e-6:
        return u
    exponent = ((alpha - 1) * u).clamp(max=_MAX_EXPONENT[u.dtype])
    return torch.expm1(exponent) / (alpha - 1)


F_DIVERGENCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "reverse_kl": _reverse_kl,
    "forward_kl": _forward_kl,
    "js_divergence": _js_divergence,
    "alpha_divergence": _alpha_divergence,
}


def f_divergence_score(
    log_ratio: Tensor,  # any shape
    name: str,
    alpha: float = 0.5,  # read by "alpha_divergence" only
) -> Tensor:
    """`g(log_ratio)` of the named divergence, same shape, in fp32 (fp64). Exponents stop at 80 in fp32, 700 in fp64."""
    check_float_tensor("log_ratio", log_ratio)
    check_choice("name", name, tuple(F_DIVERGENCES))
    check_number("alpha", alpha)
    return F_DIVERGENCES[name](wide(log_ratio), alpha)
