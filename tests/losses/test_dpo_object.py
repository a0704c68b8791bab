"""DPOLoss on per-token statistics: contributions add up, order and padding do not matter, empty rows are harmless."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch

from liger_losses.losses import LOSS_TYPES, DPOLoss, dpo_loss

from .batch import PAIRS, SMOOTHED, TOKENS, Batch, evaluate, make_batch

EVERY_TYPE = [DPOLoss(loss_type=name, label_smoothing=SMOOTHED.get(name, 0.0)) for name in LOSS_TYPES]
OPTIONS = [
    DPOLoss(label_smoothing=0.2, beta=0.5),
    DPOLoss(average_log_prob=True),
    DPOLoss(ld_alpha=0.3),
    DPOLoss(use_weighting=True),
    DPOLoss(compute_nll_loss=True, alpha=0.7),
    DPOLoss(compute_nll_loss=True, loss_type=["ipo", "sft"], loss_weights=[1.0, 0.3]),
    DPOLoss(loss_type="exo_pair", label_smoothing=1e-3, f_divergence="js_divergence", use_weighting=True),
    DPOLoss(loss_type=["sigmoid_norm", "hinge"], f_divergence="alpha_divergence", f_alpha=0.3, ld_alpha=0.5),
    DPOLoss(reference_free=True),
    DPOLoss(loss_type=["sigmoid", "sft"], use_weighting=True),
]
CONFIGURATIONS = EVERY_TYPE + OPTIONS
SEPARABLE = [loss for loss in CONFIGURATIONS if loss.separability == "pair"]


def named(loss: DPOLoss) -> str:
    """What differs from the defaults."""
    options = {field.name: getattr(loss, field.name) for field in dataclasses.fields(loss)}
    return (
        ",".join(f"{name}={value}" for name, value in options.items() if value != getattr(DPOLoss, name)) or "default"
    )


def gradient(loss: DPOLoss, batch: Batch) -> torch.Tensor:
    batch = batch.leaf()
    return torch.autograd.grad(evaluate(loss, batch)[0], batch.logits)[0]


def test_separability() -> None:
    batch_coupled = {named(loss) for loss in CONFIGURATIONS if loss.separability == "batch"}
    assert batch_coupled == {
        "loss_type=aot,label_smoothing=0.1",
        "loss_type=aot_unpaired,label_smoothing=0.1",
        "loss_type=('sigmoid', 'sft'),use_weighting=True",
    }


@pytest.mark.parametrize("loss", SEPARABLE, ids=named)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (3, 2), (1, 4)], ids=str)
@pytest.mark.parametrize("reference", ["ref_logprobs", "ref_logps"])
def test_contributions_of_pair_subsets_add_up(loss: DPOLoss, sizes: tuple[int, ...], reference: str) -> None:
    batch = make_batch().leaf()
    statistics = batch.statistics()
    if loss.reference_free:
        inputs = {}
    elif reference == "ref_logprobs":
        inputs = {reference: batch.ref_logprobs}
    else:
        inputs = {reference: torch.linspace(-20, -5, 2 * PAIRS, dtype=torch.float64)}
    totals = loss.totals(batch.mask, inputs)
    whole, metrics = loss(statistics, batch.mask, inputs, totals)
    parts, start = [], 0
    for size in sizes:
        rows = torch.cat([torch.arange(start, start + size), torch.arange(start, start + size) + PAIRS])
        subset = ({name: value[rows] for name, value in tensors.items()} for tensors in (statistics, inputs))
        parts.append(loss(next(subset), batch.mask[rows], next(subset), totals))
        start += size
    total = sum(part[0] for part in parts)
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=0)
    for name, value in metrics.items():
        pieces = [part[1][name] for part in parts]
        joined = sum(pieces) if value.dim() == 0 else torch.cat(pieces)
        torch.testing.assert_close(joined, value, rtol=1e-12, atol=1e-15)
    expected, got = (torch.autograd.grad(value, batch.logits, retain_graph=True)[0] for value in (whole, total))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("loss", CONFIGURATIONS, ids=named)
def test_order_of_pairs_does_not_matter(loss: DPOLoss) -> None:
    batch, order = make_batch(), [3, 0, 4, 2, 1]
    value, metrics = evaluate(loss, batch)
    permuted, permuted_metrics = evaluate(loss, batch.pairs(order))
    torch.testing.assert_close(permuted, value, rtol=1e-12, atol=0)
    for name, metric in metrics.items():
        torch.testing.assert_close(permuted_metrics[name], metric if metric.dim() == 0 else metric[order])


@pytest.mark.parametrize("loss", CONFIGURATIONS, ids=named)
def test_masked_equals_sliced(loss: DPOLoss) -> None:
    """Scored tokens of every row moved to the front and the padding cut off: the same loss."""
    batch = make_batch()
    batch.mask[:, TOKENS - 1] = False  # so that every row has some padding
    width = int(batch.mask.sum(1).max())
    assert width < TOKENS
    order = (~batch.mask).int().argsort(dim=1, stable=True)[:, :width]
    sliced = Batch(
        batch.logits.gather(1, order.unsqueeze(-1).expand(-1, -1, batch.logits.shape[-1])),
        batch.ref_logprobs.gather(1, order),
        batch.target.gather(1, order),
        batch.mask.gather(1, order),
    )
    (value, metrics), (expected, expected_metrics) = evaluate(loss, batch), evaluate(loss, sliced)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    for name in metrics:
        torch.testing.assert_close(metrics[name], expected_metrics[name])


@pytest.mark.parametrize("loss", CONFIGURATIONS, ids=named)
@pytest.mark.parametrize("rows", [[1], [6], [1, 6]], ids=["chosen", "rejected", "both"])
def test_empty_row(loss: DPOLoss, rows: list[int]) -> None:
    """An empty row has log-prob 0 and a zero gradient; the other pairs are as they were."""
    batch = make_batch()
    batch.mask[rows] = False
    batch.target[rows] = -100
    value, metrics = evaluate(loss, batch)
    assert value.isfinite()
    logps = torch.cat([metrics["chosen_logps"], metrics["rejected_logps"]])
    assert (logps[rows] == 0).all()
    grad = gradient(loss, batch)
    assert grad.isfinite().all()
    assert (grad[rows] == 0).all()
    if loss.separability == "pair" and not (loss.needs("nll") or loss.compute_nll_loss):
        intact = [0, 2, 3, 4]
        others = [row for row in range(2 * PAIRS) if row not in (1, 6)]
        torch.testing.assert_close(grad[others], gradient(loss, make_batch().pairs(intact)) * 4 / 5)


@pytest.mark.parametrize("loss", CONFIGURATIONS, ids=named)
def test_nothing_scored(loss: DPOLoss) -> None:
    batch = make_batch()
    batch.mask[:] = False
    value, metrics = evaluate(loss, batch)
    assert value.isfinite()
    assert (gradient(loss, batch) == 0).all()
    assert all((metric == 0).all() for metric in metrics.values())


# WPO's weights are constants of the gradient by design; its gradients are compared with TRL's.
@pytest.mark.parametrize("loss", [loss for loss in CONFIGURATIONS if not loss.use_weighting], ids=named)
def test_gradcheck(loss: DPOLoss) -> None:
    batch = make_batch(pairs=2)
    statistics = batch.statistics()
    inputs = {} if loss.reference_free else {"ref_logprobs": batch.ref_logprobs}
    totals = loss.totals(batch.mask, inputs)

    def function(logprob: torch.Tensor) -> torch.Tensor:
        return loss({**statistics, "logprob": logprob}, batch.mask, inputs, totals)[0]

    assert torch.autograd.gradcheck(function, statistics["logprob"].clone().requires_grad_())


def test_is_dpo_loss_of_sums() -> None:
    batch = make_batch()
    value, metrics = evaluate(DPOLoss(beta=0.4), batch)
    logps = batch.statistics()["logprob"].sum(1)
    refs = batch.ref_logprobs.sum(1)
    expected = dpo_loss(logps[:PAIRS], logps[PAIRS:], refs[:PAIRS], refs[PAIRS:], beta=0.4)
    torch.testing.assert_close(value, expected.mean())
    torch.testing.assert_close(metrics["chosen_rewards"], 0.4 * (logps - refs)[:PAIRS])
    assert metrics["nll_loss"] == 0


def test_nll_is_a_token_mean_over_the_batch() -> None:
    batch = make_batch()
    plain, _ = evaluate(DPOLoss(), batch)
    value, metrics = evaluate(DPOLoss(compute_nll_loss=True, alpha=0.3), batch)
    nll = -batch.statistics()["logprob"][:PAIRS][batch.mask[:PAIRS]].mean()
    torch.testing.assert_close(metrics["nll_loss"], nll)
    torch.testing.assert_close(value, plain + 0.3 * nll)


def test_logit_means_are_over_scored_positions() -> None:
    batch = make_batch()
    _, metrics = evaluate(DPOLoss(), batch)
    torch.testing.assert_close(metrics["chosen_logits_mean"], batch.logits[:PAIRS][batch.mask[:PAIRS]].mean())
    torch.testing.assert_close(metrics["rejected_logits_mean"], batch.logits[PAIRS:][batch.mask[PAIRS:]].mean())


def test_the_reference_is_a_constant() -> None:
    batch = make_batch().leaf()
    reference = batch.ref_logprobs.clone().requires_grad_()
    value, _ = evaluate(DPOLoss(), batch, inputs={"ref_logprobs": reference})
    value.backward()
    assert reference.grad is None
    reduced, _ = evaluate(DPOLoss(), batch, inputs={"ref_logps": batch.ref_logprobs.sum(1)})
    torch.testing.assert_close(reduced, value)


def test_object() -> None:
    weights = [0.5, 0.5]
    loss = DPOLoss(loss_type=["sigmoid", "hinge"], loss_weights=weights)
    weights[0] = 7.0
    assert loss.type_weights == (0.5, 0.5)
    assert loss == DPOLoss(loss_type=("sigmoid", "hinge"), loss_weights=(0.5, 0.5))
    assert hash(loss) == hash(pickle.loads(pickle.dumps(loss)))
    assert DPOLoss().statistics == ("logprob", "mean_logit")
    assert DPOLoss(use_weighting=True).statistics == ("logprob", "mean_logit", "log_sum_sq_prob")
    with pytest.raises(dataclasses.FrozenInstanceError):
        loss.beta = 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "aot", "use_weighting": True}, "use_weighting: got a weight per pair, expected none with .*aot"),
        ({"loss_type": ["ipo", "sft"], "average_log_prob": True}, "average_log_prob: got True, expected False"),
        ({"ld_alpha": 0.5, "average_log_prob": True}, "ld_alpha: got 0.5, expected None"),
        ({"ld_alpha": 1.5}, "ld_alpha: got 1.5, expected a finite number >= 0 and <= 1"),
        ({"alpha": 0.5}, "alpha: got 0.5, expected the default"),
        ({"beta": -0.1}, "beta: got -0.1"),
        ({"loss_type": "nca"}, "loss_type: got 'nca'"),
        ({"label_smoothing": 0.1, "loss_type": "hinge"}, "label_smoothing: got 0.1, expected 0"),
    ],
)
def test_bad_option(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DPOLoss(**options)


@pytest.mark.parametrize("name", ["use_weighting", "average_log_prob", "compute_nll_loss", "reference_free"])
def test_flags_are_flags(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name}: got 1 of type int, expected True or False"):
        DPOLoss(**{name: 1})


def test_bad_inputs() -> None:
    mask = torch.ones(4, 3, dtype=torch.bool)
    logps, logprobs = torch.zeros(4), torch.zeros(4, 3)
    loss = DPOLoss()
    with pytest.raises(ValueError, match="got 3 rows, expected an even number"):
        loss.totals(mask[:3], {"ref_logps": logps[:3]})
    with pytest.raises(ValueError, match="inputs: got no reference, expected one of ref_logprobs, ref_logps"):
        loss.totals(mask, {})
    with pytest.raises(ValueError, match="inputs: got ref_logprobs and ref_logps, expected one of"):
        loss.totals(mask, {"ref_logprobs": logprobs, "ref_logps": logps})
    with pytest.raises(ValueError, match="inputs: got ref_logps, expected none with reference_free=True"):
        DPOLoss(reference_free=True).totals(mask, {"ref_logps": logps})
    with pytest.raises(ValueError, match="inputs: got advantages, expected names out of ref_logprobs, ref_logps"):
        loss.totals(mask, {"advantages": logps})
    with pytest.raises(ValueError, match=r"ref_logps: got shape \[4, 1\], expected \[4\]"):
        loss.totals(mask, {"ref_logps": logps[:, None]})
    with pytest.raises(TypeError, match=r"ref_logprobs: got torch\.int64"):
        loss.totals(mask, {"ref_logprobs": logprobs.long()})
