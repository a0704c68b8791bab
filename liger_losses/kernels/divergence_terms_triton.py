"""The divergences' formulas in Triton, an element at a time: `divergence_tile` has them in torch.

Logarithms come in base 2, in which the device computes them; what is a value in nats is multiplied by `LN2`. A visit to
a row of two fp32 tiles leaves some 55 instructions an element before arithmetic, not memory, is what it waits for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .fast_math_triton import TINY, fast_log2, fast_reciprocal

# The first five know the row's total from its log-sum-exps and first visit.
FORMS = (
    "forward_kl", "reverse_kl", "jeffreys", "cosine", "mse", "jsd", "skewed_forward_kl", "skewed_reverse_kl", "tvd",
    "alpha",
)  # fmt: skip
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)

FORWARD = tl.constexpr(0)
REVERSE = tl.constexpr(1)
JEFFREYS = tl.constexpr(2)
COSINE = tl.constexpr(3)
MSE = tl.constexpr(4)
JSD = tl.constexpr(5)
SKEWED_FORWARD = tl.constexpr(6)
SKEWED_REVERSE = tl.constexpr(7)
TVD = tl.constexpr(8)
HALF_JSD = tl.constexpr(10)  # beta 0.5, where half of the terms are 0


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
def _jsd(logs, logt, s, t, beta, HALF: tl.constexpr):
    # With w = (s - t) / m: d = m ((1 - beta) (1 + beta w) log(1 + beta w) + beta (1 - v) log(1 - v)), v = (1 - beta) w,
    # whose series has no linear term: for near-equal models the two logarithms would cancel to nothing but rounding.
    rest = 1.0 - beta
    m = beta * t + (rest * s + TINY)
    w = (s - t) * fast_reciprocal(m)
    NEAR: tl.constexpr = 0.25 if HALF else 0.125
    near = tl.abs(w) < NEAR
    logarithm = fast_log2(tl.where(near, 1.0 + beta * w, m))
    each = s * tl.where(near, logarithm, logs - logarithm)
    if HALF:
        square = w * w
        series = 1 / 8 + square * (1 / 192 + square * (1 / 1920))
        far = (each + t * (logt - logarithm)) * (0.5 * LN2)
    else:
        b2 = beta * beta
        r2 = rest * rest
        c2 = 0.5 * beta * rest
        c3 = beta * rest * (r2 - b2) / 6
        c4 = beta * rest * (r2 * rest + b2 * beta) / 12
        c5 = beta * rest * (r2 * r2 - b2 * b2) / 20
        c6 = beta * rest * (r2 * r2 * rest + b2 * b2 * beta) / 30
        c7 = beta * rest * (r2 * r2 * r2 - b2 * b2 * b2) / 42
        series = c2 + w * (c3 + w * (c4 + w * (c5 + w * (c6 + w * c7))))
        far = each * (rest * LN2) + t * (logt - logarithm) * (beta * LN2)
    d = tl.where(near, (s - t) * w * series, tl.maximum(far, 0.0))
    g = each * (rest * LN2)
    return d, g


@triton.jit
def mixture_sums(e_s, e_t, log_e_s, kappa, first, c1, c2, c3, c4):
    # What `mixture_total` needs, added up while the normalisers of both sides are still unknown: e_s and e_t are
    # relative to some reference, and kappa, the share of e_t in the mixture, is a guess.
    other = kappa * e_t + TINY
    mixed = e_s + other
    first += e_s * (tl.maximum(log_e_s, -200.0) - fast_log2(mixed))  # finite: 0 log 0 is 0
    centred = other * fast_reciprocal(mixed) - 0.5
    power = e_s * centred
    c1 += power
    c2 += power * centred
    square = centred * centred
    power *= square
    c3 += power
    c4 += power * centred
    return first, c1, c2, c3, c4


@triton.jit
def mixture_total(sum_s, sum_t, beta, kappa, first, c1, c2, c3, c4):
    # JSD's S = (1 - beta) sum s log(s / m), and whether it is known. Let the true kappa, beta sum_s /
    # ((1 - beta) sum_t), be (1 + h) times the guess. With u = kappa e_t / (e_s + kappa e_t), log m moves by
    # log(1 + u h) = log(1 + h / 2) + log(1 + q c), q = h / (1 + h / 2), c = u - 1/2 in [-1/2, 1/2]: a series, of which
    # c^5 is taken as 5 c^3 / 16 - 5 c / 256 (Chebyshev): off by 1/512 at most, and the sixth term by less than it is.
    rest = 1.0 - beta
    h = beta / rest * (sum_s / sum_t) / kappa - 1.0
    q = h / (1.0 + 0.5 * h)
    square = q * q
    third = c3 * (1 / 3 + square / 16) - q * (c4 / 4)
    series = q * (c1 * (1.0 - square * square / 256) - q * (c2 / 2 - q * third))
    total = rest * ((first * LN2 - series) / sum_s - tl.log(1.0 + 0.5 * h) - tl.log(rest))
    # Up to here the two are half a millionth together.
    return total, tl.abs(q) <= 0.22


@triton.jit
def terms(logs, logt, parameter, FORM: tl.constexpr):
    # s, d and g: see `_terms` of the twin.
    if (FORM == JSD) or (FORM == HALF_JSD):  # noqa: SIM109
        # Finite, so that 0 log 0 is 0; the power is 0 all the same.
        logs = tl.maximum(logs, -200.0)
        logt = tl.maximum(logt, -200.0)
    s = tl.exp2(logs)
    t = tl.exp2(logt)
    neither = (logs == -float("inf")) & (logt == -float("inf"))
    x = tl.where(neither, 0.0, (logs - logt) * LN2)
    if FORM == FORWARD:
        d = _kl_term(t, s, x)
        g = -t
    elif FORM == REVERSE:
        d = _kl_term(s, t, -x)
        g = tl.where(s == 0.0, 0.0, s * x)
    elif FORM == JEFFREYS:
        d = tl.where(s == t, 0.0, (s - t) * x)
        g = tl.where(s == 0.0, 0.0, s * x) - t
    elif (FORM == JSD) or (FORM == HALF_JSD):  # noqa: SIM109
        d, g = _jsd(logs, logt, s, t, parameter, FORM == HALF_JSD)
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
        between = tl.where(neither, 0.0, tl.exp2(tl.where(neither, 0.0, parameter * logt + rest * logs)))
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
            soft = g - p * total
            if (FORM != JSD) and (FORM != HALF_JSD):
                soft = tl.where(tl.abs(total) < float("inf"), soft, 0.0)
        if HARD:
            gradient = soft * weight + hard_weight * (tl.exp(z - lse_h) - tl.where(is_target, 1.0, 0.0))
            return gradient * slope
        else:
            return soft * (weight * slope)
    elif HARD:
        return hard_weight * (tl.exp(z - lse_h) - tl.where(is_target, 1.0, 0.0)) * slope
    else:
        return tl.zeros_like(z)
