"""Losses without a reference: formulas, extremes; contributions add up, empty rows are harmless."""

from __future__ import annotations

import dataclasses
import math
import pickle

import pytest
import torch
from torch import Tensor

from liger_losses.losses import (
    REFERENCE_FREE_TYPES,
    DPOLoss,
    ReferenceFreeLoss,
    dpo_loss,
    log_odds,
    reference_free_loss,
)

from .batch import VOCAB, Batch, make_batch

ROWS = 12  # of a batch: six pairs, or four units of three
SMOOTHED = {name: 0.2 for name, row in REFERENCE_FREE_TYPES.items() if row.smoothing}
OPTIONS = [
    *({"loss_type": name} for name in REFERENCE_FREE_TYPES),
    *({"loss_type": name, "label_smoothing": value} for name, value in SMOOTHED.items()),
    {"average_log_prob": True, "beta": 2.0},
    {"loss_type": "hinge", "average_log_prob": True},
    {"loss_type": "simpo", "gamma": 1.5, "beta": 2.0, "compute_nll_loss": True, "alpha": 0.3},
    {"loss_type": "simpo", "reward_alpha": 0.25, "beta": 2.0},
    {"loss_type": "simpo", "reward_alpha": -0.5, "beta": 2.0},
    {"loss_type": "ipo", "reward_alpha": 0.1},
    {"loss_type": "orpo", "compute_nll_loss": True},
    {"compute_nll_loss": True, "nll_response": "third"},
    {"loss_type": "tpo-l", "beta": 3.0, "compute_nll_loss": True, "nll_response": "third", "alpha": 0.5},
]
LOSSES = [ReferenceFreeLoss(**options) for options in OPTIONS]


def named(loss: ReferenceFreeLoss) -> str:
    values = {f.name: getattr(loss, f.name) for f in dataclasses.fields(loss)}
    return ",".join(f"{n}={v}" for n, v in values.items() if v != getattr(ReferenceFreeLoss, n)) or "default"


def evaluate(loss: ReferenceFreeLoss, batch: Batch, **inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return loss(batch.statistics(), batch.mask, inputs, loss.totals(batch.mask, inputs))


def gradient(loss: ReferenceFreeLoss, batch: Batch, **inputs: Tensor) -> Tensor:
    batch = batch.leaf()
    return torch.autograd.grad(evaluate(loss, batch, **inputs)[0], batch.logits)[0]


def rows_of(units: list[int], unit_rows: int) -> Tensor:
    count = ROWS // unit_rows
    return torch.tensor([part * count + unit for part in range(unit_rows) for unit in units])


def some_rows(batch: Batch, rows: Tensor) -> Batch:
    return Batch(batch.logits[rows], batch.ref_logprobs[rows], batch.target[rows], batch.mask[rows])


def prompts_and_responses(batch: Batch) -> tuple[Batch, Tensor, Tensor]:
    """The batch with its prompts scored, token ids, and the mask of its responses."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.where(batch.mask, batch.target, torch.randint(0, VOCAB, batch.mask.shape, generator=generator))
    attended = batch.mask.flip(1).cumsum(1).flip(1) > 0
    whole = Batch(batch.logits, batch.ref_logprobs, ids.masked_fill(~attended, -100), attended)
    assert int(attended.sum()) > int(batch.mask.sum())
    return whole, ids, batch.mask


# the pure function --------------------------------------------------------------------------------------------------

C, R, BETA = -1.3, -2.1, 0.7


def _ls(z: float) -> float:
    return -math.log1p(math.exp(-z))


def _odds(logp: float) -> float:
    return logp - math.log(1 - math.exp(logp))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, -_ls(BETA * (C - R))),
        ({"label_smoothing": 0.2}, -0.8 * _ls(BETA * (C - R)) - 0.2 * _ls(-BETA * (C - R))),
        ({"loss_type": "hinge"}, 1 - BETA * (C - R)),
        ({"loss_type": "ipo"}, (C - R - 1 / (2 * BETA)) ** 2),
        ({"loss_type": "simpo", "gamma": 0.4}, -_ls(BETA * (C - R) - 0.4)),
        ({"loss_type": "tpo-l"}, -_ls(BETA * (C - R) - 0.5)),
        ({"loss_type": "orpo"}, -BETA * _ls(_odds(C) - _odds(R))),
        (
            {"loss_type": "simpo", "reward_alpha": 0.3},
            -_ls(BETA * ((1 - math.exp(C) ** -0.3) / 0.3 - (1 - math.exp(R) ** -0.3) / 0.3) - 0.5),
        ),
    ],
    ids=str,
)
def test_formula(options: dict, expected: float) -> None:
    chosen, rejected = (torch.tensor([value], dtype=torch.float64) for value in (C, R))
    got = reference_free_loss(chosen, rejected, beta=BETA, **options)
    assert got.item() == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("name", REFERENCE_FREE_TYPES)
@pytest.mark.parametrize("reward_alpha", [0.0, 0.3, -0.7])
def test_gradcheck(name: str, reward_alpha: float) -> None:
    options = {"loss_type": name, "label_smoothing": SMOOTHED.get(name, 0.0), "beta": 0.7}
    options["reward_alpha"] = 0.0 if name == "orpo" else reward_alpha
    generator = torch.Generator().manual_seed(1)
    logps = [-(3 * torch.rand(5, generator=generator, dtype=torch.float64) + 0.1) for _ in range(2)]
    for tensor in logps:
        tensor.requires_grad_()
    assert torch.autograd.gradcheck(lambda c, r: reference_free_loss(c, r, **options), logps)


EXTREMES = torch.tensor([-1e5, -104.0, -20.0, -1.0, -1e-3, -1e-7, -1e-12, 0.0, 1e-8])


# orpo has no such reward, and ipo's square of an exponential does not fit the dtype.
SHAPED = [
    (name, a) for name in REFERENCE_FREE_TYPES for a in (0.0, 0.25, 2.0, -1.0) if not a or name not in ("orpo", "ipo")
]


@pytest.mark.parametrize(("name", "reward_alpha"), SHAPED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_log_probs_are_finite(name: str, reward_alpha: float, dtype: torch.dtype) -> None:
    """From a response that is out of the question to one that is certain, up to rounding above it."""
    chosen, rejected = (
        column.clone().requires_grad_() for column in torch.cartesian_prod(EXTREMES, EXTREMES).to(dtype).unbind(1)
    )
    losses = reference_free_loss(chosen, rejected, loss_type=name, reward_alpha=reward_alpha)
    assert losses.dtype == dtype
    assert losses.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(losses.sum(), (chosen, rejected)))


def test_log_odds_is_exact() -> None:
    mpmath = pytest.importorskip("mpmath")
    mpmath.mp.dps = 60
    for logp in (-1e4, -50.0, -3.0, -0.7, -0.69, -1e-3, -1e-9, -1e-15):
        x = mpmath.mpf(logp)
        expected = float(x - mpmath.log(-mpmath.expm1(x)))
        assert log_odds(torch.tensor(logp, dtype=torch.float64)).item() == pytest.approx(expected, rel=1e-14, abs=1e-15)
    certain = log_odds(torch.zeros((), dtype=torch.float32))
    assert certain.item() == pytest.approx(-math.log(2**-23), rel=1e-6)


def test_two_certain_responses_cost_log_two() -> None:
    zero = torch.zeros(2, requires_grad=True)
    losses = reference_free_loss(zero, torch.zeros(2), loss_type="orpo", beta=0.3)
    torch.testing.assert_close(losses, torch.full((2,), 0.3 * math.log(2)))
    losses.sum().backward()
    assert torch.equal(zero.grad, torch.zeros(2))


def test_alpha_of_zero_is_simpo_and_its_limit() -> None:
    chosen, rejected = -3 * torch.rand(2, 6, dtype=torch.float64)
    simpo = reference_free_loss(chosen, rejected, loss_type="simpo", beta=2.0)
    for alpha in (1e-9, 1e-5, -1e-5):
        near = reference_free_loss(chosen, rejected, loss_type="simpo", beta=2.0, reward_alpha=alpha)
        torch.testing.assert_close(near, simpo, rtol=0, atol=50 * abs(alpha))


def test_low_precision_is_computed_in_fp32() -> None:
    chosen, rejected = (-5 * torch.rand(2, 6)).to(torch.bfloat16).unbind(0)
    losses = reference_free_loss(chosen, rejected, loss_type="orpo")
    assert losses.dtype == torch.float32
    assert torch.equal(losses, reference_free_loss(chosen.float(), rejected.float(), loss_type="orpo"))


def test_online_dpo_is_dpo() -> None:
    """TRL's online DPO: sigmoid or IPO of `(c - r) - (rc - rr)`, sums over a completion's tokens."""
    batch = make_batch()
    logps, refs = batch.statistics()["logprob"].sum(1), batch.ref_logprobs.sum(1)
    logits = (logps[:5] - logps[5:]) - (refs[:5] - refs[5:])
    for name, expected in (
        ("sigmoid", -torch.nn.functional.logsigmoid(0.3 * logits)),
        ("ipo_sum", (logits - 1 / (2 * 0.3)) ** 2),
    ):
        loss = DPOLoss(beta=0.3, loss_type=name)
        inputs = {"ref_logprobs": batch.ref_logprobs}
        value, _ = loss(batch.statistics(), batch.mask, inputs, loss.totals(batch.mask, inputs))
        torch.testing.assert_close(value, expected.mean(), rtol=1e-12, atol=0)
    zero, one = torch.zeros(5, dtype=torch.float64), torch.ones(5)
    lengths = {"chosen_lengths": one, "rejected_lengths": one}
    torch.testing.assert_close(
        dpo_loss(*logps.split(5), zero, zero, loss_type="ipo", **lengths),
        dpo_loss(*logps.split(5), zero, zero, loss_type="ipo_sum"),
    )


# the loss object ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "masked"), [(loss, m) for loss in LOSSES for m in (False, True)[: 4 - loss.unit_rows]]
)
def test_contributions_of_unit_subsets_add_up(loss: ReferenceFreeLoss, masked: bool) -> None:
    batch, inputs = make_batch(6).leaf(), {}
    if masked:
        inputs["response_mask"] = torch.arange(7).expand(ROWS, 7) > 1
    statistics, totals = batch.statistics(), loss.totals(batch.mask, inputs)
    whole, metrics = loss(statistics, batch.mask, inputs, totals)
    count = ROWS // loss.unit_rows
    parts = []
    for units in ([0], [1, 2], list(range(3, count))):
        rows = rows_of(units, loss.unit_rows)
        cut = ({n: value[rows] for n, value in tensors.items()} for tensors in (statistics, inputs))
        parts.append(loss(next(cut), batch.mask[rows], next(cut), totals))
    total = sum(part[0] for part in parts)
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=0)
    for name, value in metrics.items():
        assert not value.requires_grad
        pieces = [part[1][name] for part in parts]
        torch.testing.assert_close(sum(pieces) if value.dim() == 0 else torch.cat(pieces), value)
    expected, got = (torch.autograd.grad(v, batch.logits, retain_graph=True)[0] for v in (whole, total))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("loss", LOSSES, ids=named)
def test_order_of_units_does_not_matter(loss: ReferenceFreeLoss) -> None:
    batch, order = make_batch(6), [3, 0, 2, 1, 5, 4][: ROWS // loss.unit_rows]
    value, metrics = evaluate(loss, batch)
    permuted, permuted_metrics = evaluate(loss, some_rows(batch, rows_of(order, loss.unit_rows)))
    torch.testing.assert_close(permuted, value, rtol=1e-12, atol=0)
    for name, metric in metrics.items():
        torch.testing.assert_close(permuted_metrics[name], metric if metric.dim() == 0 else metric[order])


@pytest.mark.parametrize(
    ("loss", "part"), [(loss, p) for loss in LOSSES for p in [(0,), (1,), (0, 1), (2,)][: 1 + loss.unit_rows]]
)
def test_empty_row(loss: ReferenceFreeLoss, part: tuple[int, ...]) -> None:
    """An empty row has log-prob 0 and a zero gradient; other units are as they were."""
    batch = make_batch(6)
    count = ROWS // loss.unit_rows
    rows = [1 + count * p for p in part]
    batch.mask[rows], batch.target[rows] = False, -100
    value, metrics = evaluate(loss, batch)
    assert value.isfinite()
    logps = torch.cat([metrics["chosen_logps"], metrics["rejected_logps"]])
    assert all(logps[row] == 0 for row in rows if row < 2 * count)
    grad = gradient(loss, batch)
    assert grad.isfinite().all()
    assert (grad[rows] == 0).all()
    if not loss.compute_nll_loss:
        intact = rows_of([unit for unit in range(count) if unit != 1], 2)
        expected = gradient(loss, some_rows(make_batch(6), intact)) * (count - 1) / count
        torch.testing.assert_close(grad[intact], expected)


@pytest.mark.parametrize("loss", LOSSES, ids=named)
def test_nothing_scored_and_junk_where_masked(loss: ReferenceFreeLoss) -> None:
    batch = make_batch(6)
    (value, metrics), statistics = evaluate(loss, batch), batch.statistics()
    junk = {name: torch.where(batch.mask, v, torch.nan) for name, v in statistics.items()}
    leaf = junk["logprob"].clone().requires_grad_()
    again, metrics_again = loss({**junk, "logprob": leaf}, batch.mask, {}, loss.totals(batch.mask, {}))
    torch.testing.assert_close((again, metrics_again), (value, metrics))
    assert torch.autograd.grad(again, leaf)[0].isfinite().all()
    batch.mask[:] = False
    value, metrics = evaluate(loss, batch)
    assert value.isfinite()
    assert (gradient(loss, batch) == 0).all()
    assert all((metric == 0).all() for n, metric in metrics.items() if n != "log_odds_ratio")


def test_nll_and_logit_means() -> None:
    """NLL over scored tokens of the rows named, logit means over scored tokens of the responses."""
    batch = make_batch(6)
    logprob, mask = batch.statistics()["logprob"], batch.mask
    _, metrics = evaluate(ReferenceFreeLoss(compute_nll_loss=True), batch)
    torch.testing.assert_close(metrics["nll_loss"], -logprob[:6][mask[:6]].mean())
    torch.testing.assert_close(metrics["chosen_logits_mean"], batch.logits[:6][mask[:6]].mean())
    torch.testing.assert_close(metrics["rejected_logits_mean"], batch.logits[6:][mask[6:]].mean())
    _, metrics = evaluate(ReferenceFreeLoss(compute_nll_loss=True, nll_response="third"), batch)
    torch.testing.assert_close(metrics["nll_loss"], -logprob[8:][mask[8:]].mean())
    torch.testing.assert_close(metrics["rejected_logits_mean"], batch.logits[4:8][mask[4:8]].mean())
    whole, _, responses = prompts_and_responses(batch)
    _, metrics = evaluate(ReferenceFreeLoss(compute_nll_loss=True, loss_type="orpo"), whole, response_mask=responses)
    torch.testing.assert_close(metrics["nll_loss"], -whole.statistics()["logprob"][:6][whole.mask[:6]].mean())
    torch.testing.assert_close(metrics["chosen_logits_mean"], batch.logits[:6][mask[:6]].mean())
    torch.testing.assert_close(metrics["chosen_logps"], logprob[:6].sum(1) / mask[:6].sum(1))


def test_object() -> None:
    loss = ReferenceFreeLoss(loss_type="simpo", gamma=1.0)
    assert loss == pickle.loads(pickle.dumps(loss))
    assert (loss.separability, loss.unit_rows, loss.statistics) == ("pair", 2, ("logprob", "mean_logit"))
    assert ReferenceFreeLoss(compute_nll_loss=True, nll_response="third").unit_rows == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        loss.beta = 1.0


# refusals -----------------------------------------------------------------------------------------------------------

NAMES = ", ".join(REFERENCE_FREE_TYPES)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"loss_type": "dpo"}, ValueError, f"loss_type: got 'dpo', expected one of {NAMES}"),
        ({"beta": 0.0}, ValueError, "beta: got 0.0, expected a finite number > 0"),
        ({"beta": "x"}, TypeError, "beta: got 'x' of type str"),
        ({"label_smoothing": 1.0}, ValueError, "label_smoothing: got 1.0, expected 0 <= label_smoothing < 1"),
        ({"loss_type": "hinge", "label_smoothing": 0.1}, ValueError, "label_smoothing: got 0.1, expected 0 for loss_type hinge"),
        ({"loss_type": "ipo", "label_smoothing": 0.1}, ValueError, "label_smoothing: got 0.1, expected 0 for loss_type ipo"),
        ({"loss_type": "orpo", "label_smoothing": 0.1}, ValueError, "these have one: sigmoid, simpo, tpo-l"),
        ({"gamma": 1.0}, ValueError, "gamma: got 1.0, expected the default: only loss_type simpo, tpo-l read it"),
        ({"gamma": math.nan, "loss_type": "simpo"}, ValueError, "gamma: got nan"),
        ({"reward_alpha": 0.1, "loss_type": "orpo"}, ValueError, "reward_alpha: got 0.1, expected 0 with loss_type orpo"),
        ({"reward_alpha": math.inf}, ValueError, "reward_alpha: got inf"),
        ({"alpha": 0.5}, ValueError, "alpha: got 0.5, expected the default: only the NLL term reads it"),
        ({"nll_response": "third"}, ValueError, "nll_response: got 'third', expected the default"),
        ({"nll_response": "rejected"}, ValueError, "nll_response: got 'rejected', expected one of chosen, third"),
        ({"average_log_prob": 1}, TypeError, "average_log_prob: got 1"),
        ({"compute_nll_loss": None}, TypeError, "compute_nll_loss: got None"),
    ],
)  # fmt: skip
def test_bad_option(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ReferenceFreeLoss(**options)
    own = {"average_log_prob", "compute_nll_loss", "alpha", "nll_response"}
    if not own & set(options):
        with pytest.raises(error, match=message):
            reference_free_loss(torch.zeros(2), torch.zeros(2), **options)


def test_bad_tensors() -> None:
    two, mask = torch.zeros(2), torch.ones(4, 3, dtype=torch.bool)
    for arguments, error, message in (
        ((torch.zeros(2, 1), two), ValueError, r"chosen_logps: got shape \[2, 1\], expected \[pairs\]"),
        ((two, torch.zeros(3)), ValueError, r"rejected_logps: got shape \[3\], expected \[2\]"),
        ((two, two.long()), TypeError, r"rejected_logps: got torch\.int64"),
        (([0.0], two), TypeError, "chosen_logps: got list"),
    ):
        with pytest.raises(error, match=message):
            reference_free_loss(*arguments)
    pairs, triples = ReferenceFreeLoss(), ReferenceFreeLoss(compute_nll_loss=True, nll_response="third")
    for loss, rows, inputs, error, message in (
        (pairs, 3, {}, ValueError, "target: got 3 rows, expected an even number"),
        (triples, 4, {}, ValueError, "target: got 4 rows, expected a multiple of 3"),
        (pairs, 4, {"ref_logps": two}, ValueError, "inputs: got ref_logps, expected nothing or response_mask"),
        (triples, 3, {"response_mask": mask[:3]}, ValueError, "inputs: got response_mask, expected nothing with"),
        (pairs, 4, {"response_mask": mask.long()}, TypeError, r"response_mask: got dtype torch\.int64"),
        (pairs, 4, {"response_mask": mask[:2]}, ValueError, r"response_mask: got shape \[2, 3\], expected \[4, 3\]"),
    ):
        with pytest.raises(error, match=message):
            loss.totals(mask[:rows], inputs)
