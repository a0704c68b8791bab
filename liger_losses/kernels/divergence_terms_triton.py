"""The divergences' formulas in Triton, an element at a time: `divergence_tile` has them in torch."""

from __future__ import annotations

import triton
import triton.language as tl

# The first five know the row's total from its log-sum-exps and first visit.
FORMS = (
    "forward_kl", "reverse_kl", "jeffreys", "cosine", "mse", "jsd", "skewed_forward_kl", "skewed_reverse_kl", "tvd",
    "alpha",
)  # fmt: skip
FORWARD = tl.constexpr(0)
REVERSE = tl.constexpr(1)
JEFFREYS = tl.constexpr(2)
COSINE = tl.constexpr(3)
MSE = tl.constexpr(4)
JSD = tl.constexpr(5)
SKEWED_FORWARD = tl.constexpr(6)
SKEWED_REVERSE = tl.constexpr(7)
TVD = tl.constexpr(8)


@triton.jit
def _phi(y):
    # e^y - 1 - y for |y| < 0.5, where the difference itself would lose its digits.
    return y * y * (0.5 + y * (1 / 6 + y * (1 / 24 + y * (1 / 120 + y * (1 / 720 + y * (1 / 5040))))))


@triton.jit
def _expm1(y):
    near = tl.abs(y) < 0.5
    small = tl.where(near, y, 0.0)
    return tl.where(near, small + _phi(small), tl.exp(y) - 1.0)


@triton.jit
def _log1p(w):
    u = 1.0 + w
    return tl.where(u == 1.0, w, tl.log(u) * (w / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def _kl_term(a, b, y):
    near = tl.abs(y) < 0.5
    product = tl.where(a > 0.0, a * y, 0.0)
    return tl.where(near, a * _phi(tl.where(near, y, 0.0)), b - a - product)


@triton.jit
def _mixture(x, weight):
    down = tl.abs(x)
    log_m = tl.maximum(_log1p(tl.where(x >= 0.0, weight, 1.0 - weight) * _expm1(-down)), -down)
    return tl.where(x >= 0.0, log_m, log_m - x), tl.where(x >= 0.0, log_m + x, log_m)


@triton.jit
def terms(logs, logt, parameter, FORM: tl.constexpr):
    # s, d and g: see `_terms` of the twin.
    s = tl.exp(logs)
    t = tl.exp(logt)
    neither = (logs == -float("inf")) & (logt == -float("inf"))
    x = tl.where(neither, 0.0, logs - logt)
    if FORM == FORWARD:
        d = _kl_term(t, s, x)
        g = -t
    elif FORM == REVERSE:
        d = _kl_term(s, t, -x)
        g = tl.where(s == 0.0, 0.0, s * x)
    elif FORM == JEFFREYS:
        d = tl.where(s == t, 0.0, (s - t) * x)
        g = tl.where(s == 0.0, 0.0, s * x) - t
    elif FORM == JSD:
        y_s, y_t = _mixture(x, parameter)
        m = parameter * t + (1.0 - parameter) * s
        d = parameter * _kl_term(t, m, y_t) + (1.0 - parameter) * _kl_term(s, m, y_s)
        g = tl.where(s == 0.0, 0.0, (parameter - 1.0) * s * y_s)
    elif FORM == SKEWED_FORWARD:
        y_s, y_t = _mixture(x, parameter)
        m = parameter * t + (1.0 - parameter) * s
        d = _kl_term(t, m, y_t)
        g = tl.where(m > 0.0, (parameter - 1.0) * s * (t / tl.where(m > 0.0, m, 1.0)), 0.0)
    elif FORM == SKEWED_REVERSE:
        y_s, y_t = _mixture(x, 1.0 - parameter)
        m = (1.0 - parameter) * t + parameter * s
        d = _kl_term(s, m, y_s)
        g = tl.where(s == 0.0, 0.0, -s * (y_s + parameter * (s / tl.where(m > 0.0, m, 1.0))))
    elif FORM == TVD:
        d = tl.abs(s - t) * 0.5
        g = tl.where(s > t, 0.5 * s, tl.where(s < t, -0.5 * s, 0.0))
    else:
        rest = 1.0 - parameter
        between = tl.where(neither, 0.0, tl.exp(tl.where(neither, 0.0, parameter * logt + rest * logs)))
        near = (tl.abs(x) < 0.5) & (tl.abs(rest * x) < 0.5)
        small = tl.where(near, x, 0.0)
        close = t * (rest * _phi(small) - _phi(rest * small))
        d = tl.maximum(tl.where(near, close, parameter * t + rest * s - between) / (parameter * rest), 0.0)
        g = -between / parameter
    return s, d, g


@triton.jit
def finite_logits(s, t):
    return tl.where(s == -float("inf"), 0.0, s), tl.where(t == -float("inf"), 0.0, t)


@triton.jit
def entry(
    z, slope, s, t, is_target, lse_s, lse_t, lse_h, total, parameter, weight, hard_weight,
    FORM: tl.constexpr, SOFT: tl.constexpr, HARD: tl.constexpr,
):  # fmt: skip
    gradient = tl.zeros_like(z)
    if SOFT:
        if (FORM == COSINE) or (FORM == MSE):  # noqa: SIM109
            a, b = finite_logits(s, t)
            if FORM == MSE:
                soft = 2.0 * (a - b) * total
            else:
                soft = (total * (a / lse_s) - b / lse_t) / lse_s
            soft = tl.where(s > -float("inf"), soft, 0.0)
        else:
            p, _d, g = terms(s - lse_s, t - lse_t, parameter, FORM)
            known = tl.abs(total) < float("inf")
            soft = tl.where(known, g - p * tl.where(known, total, 0.0), 0.0)
        gradient = soft * weight
    if HARD:
        gradient += hard_weight * (tl.exp(z - lse_h) - tl.where(is_target, 1.0, 0.0))
    return gradient * slope
