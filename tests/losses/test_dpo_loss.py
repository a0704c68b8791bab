"""The pure function: formulas at extremes, gradients, refusals."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from liger_losses.losses import F_DIVERGENCES, LOSS_TYPES, dpo_loss, f_divergence_score

from .batch import SMOOTHED


def arguments(name: str, chosen: torch.Tensor) -> dict:
    """What the loss type needs beside log-probs."""
    row, options = LOSS_TYPES[name], {"label_smoothing": SMOOTHED.get(name, 0.0), "loss_type": name}
    if row.lengths:
        options |= {"chosen_lengths": torch.full_like(chosen, 3.0), "rejected_lengths": torch.full_like(chosen, 5.0)}
    if row.nll:
        options["chosen_nll"] = -chosen / 3
    return options


COMBINATIONS = [
    (name, divergence)
    for name, divergence in itertools.product(LOSS_TYPES, F_DIVERGENCES)
    if divergence == "reverse_kl" or LOSS_TYPES[name].any_divergence
]


@pytest.mark.parametrize(("name", "divergence"), COMBINATIONS)
def test_gradcheck(name: str, divergence: str) -> None:
    generator = torch.Generator().manual_seed(1)
    logps = [torch.randn(4, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(4)]

    def function(*logps):
        return dpo_loss(*logps, beta=0.7, f_divergence=divergence, **arguments(name, logps[0]))

    assert torch.autograd.gradcheck(function, logps)


# Log-ratios of thousands: a long response under a policy far from its reference.
EXTREMES = torch.tensor([-5e3, -300.0, -1e-3, 0.0, 1e-3, 300.0, 5e3])


# IPO squares the score; that of an exponential does not fit the dtype.
TOO_LARGE = [(name, divergence) for name in ("ipo", "ipo_sum") for divergence in ("forward_kl", "alpha_divergence")]


@pytest.mark.parametrize(("name", "divergence"), [pair for pair in COMBINATIONS if pair not in TOO_LARGE])
@pytest.mark.parametrize("beta", [0.1, 10.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_log_ratios_are_finite(name: str, divergence: str, beta: float, dtype: torch.dtype) -> None:
    pairs = torch.cartesian_prod(EXTREMES, EXTREMES).to(dtype)
    chosen, rejected = (column.clone().requires_grad_() for column in pairs.unbind(1))
    losses = dpo_loss(chosen, rejected, beta=beta, f_divergence=divergence, **arguments(name, chosen))
    assert losses.dtype == dtype
    assert losses.isfinite().all()
    gradients = torch.autograd.grad(losses.sum(), (chosen, rejected), allow_unused=True)
    assert all(gradient.isfinite().all() for gradient in gradients if gradient is not None)


@pytest.mark.parametrize("z", [-200.0, -50.0, -1.0, 0.0, 1.0, 50.0, 200.0])
def test_stable_forms_are_exact(z: float) -> None:
    """Against the formula in 60 digits."""
    mpmath = pytest.importorskip("mpmath")
    mpmath.mp.dps = 60
    x, one = mpmath.mpf(z), mpmath.mpf(1)

    def sigmoid(t):
        return one / (1 + mpmath.exp(-t))

    q, eps, tau = sigmoid(x), mpmath.mpf(0.1), mpmath.mpf(0.05)
    exact = {
        "sigmoid": -(1 - eps) * mpmath.log(q) - eps * mpmath.log(sigmoid(-x)),
        "exo_pair": q * (mpmath.log(q) - mpmath.log(1 - eps))
        + sigmoid(-x) * (mpmath.log(sigmoid(-x)) - mpmath.log(eps)),
        "discopop": -sigmoid(-x / tau) * mpmath.log(q) + sigmoid(x / tau) * mpmath.exp(-x),
        "apo_zero": 1 - sigmoid(x) + sigmoid(mpmath.mpf(0)),
    }
    value = torch.tensor([z], dtype=torch.float64)
    zero = torch.zeros_like(value)
    for name, expected in exact.items():
        smoothing = 0.1 if name in ("sigmoid", "exo_pair") else 0.0
        got = dpo_loss(value, zero, beta=1.0, loss_type=name, label_smoothing=smoothing).item()
        assert got == pytest.approx(float(expected), rel=1e-13, abs=1e-300), name


def test_ipo_divides_by_each_length() -> None:
    logps = [torch.tensor([value], dtype=torch.float64) for value in (-3.0, -7.0, -4.0, -5.0)]
    lengths = {"chosen_lengths": torch.tensor([2]), "rejected_lengths": torch.tensor([5])}
    expected = ((-3.0 + 4.0) / 2 - (-7.0 + 5.0) / 5 - 1 / (2 * 0.3)) ** 2
    assert dpo_loss(*logps, beta=0.3, loss_type="ipo", **lengths).item() == pytest.approx(expected, rel=1e-14)


def test_divergences() -> None:
    u = torch.linspace(-3, 3, 13, dtype=torch.float64)
    t = u.exp()
    torch.testing.assert_close(f_divergence_score(u, "reverse_kl"), t.log())
    torch.testing.assert_close(f_divergence_score(u, "forward_kl"), 1 - 1 / t)
    torch.testing.assert_close(f_divergence_score(u, "js_divergence"), (2 * t / (1 + t)).log())
    torch.testing.assert_close(f_divergence_score(u, "alpha_divergence", 0.25), (t**-0.75 - 1) / -0.75)
    torch.testing.assert_close(f_divergence_score(u, "alpha_divergence", 1.0), u)


def test_mixture_is_the_weighted_sum() -> None:
    generator = torch.Generator().manual_seed(2)
    logps = [torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(4)]
    names, weights = ["sigmoid", "sppo_hard", "robust"], [0.5, 2.0, -1.0]
    each = [dpo_loss(*logps, loss_type=name, label_smoothing=SMOOTHED.get(name, 0)) for name in names]
    parts = dpo_loss(*logps, loss_type=names[1:], loss_weights=weights[1:], label_smoothing=SMOOTHED["robust"])
    torch.testing.assert_close(parts, 2.0 * each[1] - each[2])
    plain = dpo_loss(*logps, loss_type=names[:2])
    torch.testing.assert_close(plain, dpo_loss(*logps) + each[1])


def test_pair_weights_and_reference_free() -> None:
    chosen, rejected, weights = torch.rand(3, 6, dtype=torch.float64).unbind(0)
    zero = torch.zeros_like(chosen)
    losses = dpo_loss(chosen, rejected, zero, zero)
    assert torch.equal(dpo_loss(chosen, rejected), losses)
    torch.testing.assert_close(dpo_loss(chosen, rejected, pair_weights=weights), losses * weights)


def test_low_precision_is_computed_in_fp32() -> None:
    chosen, rejected = (-50 * torch.rand(2, 6)).to(torch.bfloat16).unbind(0)
    losses = dpo_loss(chosen, rejected)
    assert losses.dtype == torch.float32
    assert torch.equal(losses, dpo_loss(chosen.float(), rejected.float()))


LOGPS = torch.zeros(3)
ALL_NAMES = ", ".join(LOSS_TYPES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "dpo"}, f"loss_type: got 'dpo', expected one of {ALL_NAMES}"),
        ({"loss_type": ["sigmoid", "kto_pair"]}, "loss_type: got 'kto_pair'"),
        ({"loss_type": []}, "loss_type: got an empty sequence"),
        ({"loss_type": ["sigmoid", "hinge"], "loss_weights": [1.0]}, "loss_weights: got 1 weights, expected 2"),
        ({"loss_weights": [math.nan]}, "loss_weights: got nan"),
        ({"beta": 0.0}, "beta: got 0.0, expected a finite number > 0"),
        ({"beta": math.inf}, "beta: got inf"),
        ({"label_smoothing": -0.1}, "label_smoothing: got -0.1, expected 0 <= label_smoothing < 1"),
        ({"label_smoothing": 1.0}, "label_smoothing: got 1.0"),
        (
            {"loss_type": "exo_pair"},
            "label_smoothing: got 0.0, expected 0 < label_smoothing < 1 for loss_type 'exo_pair'",
        ),
        (
            {"loss_type": "robust", "label_smoothing": 0.5},
            "label_smoothing: got 0.5, expected 0 <= label_smoothing < 0.5",
        ),
        ({"f_divergence": "tv"}, "f_divergence: got 'tv', expected one of reverse_kl, forward_kl"),
        ({"f_alpha": 0.3}, "f_alpha: got 0.3, expected the default"),
        ({"discopop_tau": 0.1}, "discopop_tau: got 0.1, expected the default"),
        ({"loss_type": "discopop", "discopop_tau": 0.0}, "discopop_tau: got 0.0, expected a finite number > 0"),
        ({"loss_type": "ipo", "rejected_lengths": LOGPS}, "chosen_lengths: got None"),
        ({"loss_type": "sigmoid_norm", "chosen_lengths": LOGPS}, "rejected_lengths: got None"),
        ({"loss_type": "sft"}, "chosen_nll: got None"),
        ({"chosen_nll": LOGPS}, "chosen_nll: got a tensor, expected None"),
        ({"chosen_lengths": LOGPS}, "chosen_lengths: got a tensor, expected None"),
        ({"ref_chosen_logps": LOGPS}, "ref_rejected_logps: got None"),
        ({"ref_chosen_logps": LOGPS, "ref_rejected_logps": torch.zeros(2)}, r"ref_rejected_logps: got shape \[2\]"),
        ({"pair_weights": torch.zeros(3, 1)}, r"pair_weights: got shape \[3, 1\], expected \[3\]"),
        ({"pair_weights": LOGPS, "loss_type": "aot"}, "pair_weights: got a weight per pair, expected none"),
    ],
)
def test_bad_value(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dpo_loss(LOGPS, LOGPS, **options)


@pytest.mark.parametrize("name", [name for name, row in LOSS_TYPES.items() if row.smoothing is None])
def test_label_smoothing_is_refused_where_it_has_no_form(name: str) -> None:
    with pytest.raises(ValueError, match=f"label_smoothing: got 0.1, expected 0 for loss_type {name}"):
        dpo_loss(LOGPS, LOGPS, **{**arguments(name, LOGPS), "label_smoothing": 0.1})


@pytest.mark.parametrize("name", [name for name, row in LOSS_TYPES.items() if not row.any_divergence])
@pytest.mark.parametrize("divergence", ["forward_kl", "js_divergence", "alpha_divergence"])
def test_divergence_is_refused_where_it_has_no_form(name: str, divergence: str) -> None:
    with pytest.raises(ValueError, match=f"f_divergence: got '{divergence}', expected 'reverse_kl' for .* {name}"):
        dpo_loss(LOGPS, LOGPS, **arguments(name, LOGPS), f_divergence=divergence)


def test_bad_type() -> None:
    with pytest.raises(TypeError, match=r"chosen_logps: got torch.int64, expected a floating-point tensor"):
        dpo_loss(LOGPS.long(), LOGPS)
    with pytest.raises(TypeError, match="rejected_logps: got float"):
        dpo_loss(LOGPS, 0.0)
    with pytest.raises(TypeError, match="loss_type: got None, expected a name or a sequence of names"):
        dpo_loss(LOGPS, LOGPS, loss_type=None)
    with pytest.raises(TypeError, match=r"loss_weights: got 0\.5, expected a sequence of numbers"):
        dpo_loss(LOGPS, LOGPS, loss_weights=0.5)
    with pytest.raises(TypeError, match=r"beta: got '0\.1' of type str"):
        dpo_loss(LOGPS, LOGPS, beta="0.1")
    with pytest.raises(ValueError, match=r"chosen_logps: got shape \[1, 3\], expected \[pairs\]"):
        dpo_loss(LOGPS[None], LOGPS[None])
