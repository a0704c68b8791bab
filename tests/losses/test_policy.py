"""GRPOLoss and grpo_loss: contributions add up, padding reaches nothing, normalisers are those of the step."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_losses.losses import POLICY_TYPES, GRPOLoss, grpo_loss
from liger_losses.losses.policy_terms import KL_ESTIMATORS, top_entropy_mask, value_loss

from .policy_batch import ROWS, TOKENS, Rollouts, evaluate, make_rollouts
from .test_policy_trl import options_of

EVERY_TYPE = [GRPOLoss(**options_of(name), beta=0.1) for name in POLICY_TYPES]
OPTIONS = [
    GRPOLoss(on_policy=True),
    GRPOLoss(delta=1.5, epsilon_high=0.1),
    GRPOLoss(beta=0.1, kl_estimator="k1", use_bias_correction_kl=True),
    GRPOLoss(beta=0.1, kl_estimator="k2"),
    GRPOLoss(entropy_coef=0.2),
    GRPOLoss(loss_type="grpo", importance_sampling_level="sequence", entropy_coef=0.2),
    GRPOLoss(sampler_mode="token_mask", report_entropy=True),
    GRPOLoss(sampler_mode="sequence_truncate"),
    GRPOLoss(sampler_mode="sequence_truncate", on_policy=True),
    GRPOLoss(loss_type="vespo", on_policy=True),
    GRPOLoss(loss_type="vespo", sampler_mode="token_truncate"),
    GRPOLoss(loss_type="vespo", sampler_mode="token_truncate", on_policy=True),
    GRPOLoss(loss_type="cispo", importance_sampling_level="sequence", epsilon_high=1.1),
    GRPOLoss(off_policy_mask_threshold=0.01),
    GRPOLoss(top_entropy_quantile=0.3, entropy_coef=0.1),
    GRPOLoss(loss_type="ppo", vf_coef=0.5, value_clip=0.2),
    GRPOLoss(loss_type="ppo", vf_coef=0.5),
]
CONFIGURATIONS = EVERY_TYPE + OPTIONS


def named(loss: GRPOLoss) -> str:
    """What differs from the defaults."""
    options = {field.name: getattr(loss, field.name) for field in dataclasses.fields(loss)}
    return ",".join(f"{n}={v}" for n, v in options.items() if v != getattr(GRPOLoss, n)) or "default"


def gradient(loss: GRPOLoss, batch: Rollouts, inputs: dict[str, Tensor] | None = None) -> Tensor:
    batch = batch.leaf()
    return torch.autograd.grad(evaluate(loss, batch, inputs)[0], batch.logits)[0]


# separability -------------------------------------------------------------------------------------------------------


def test_separability_is_the_smallest_true_one() -> None:
    assert {name for name in POLICY_TYPES if GRPOLoss(**options_of(name)).separability == "token"} == {
        "grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "ppo",
    }  # fmt: skip
    assert {named(loss): loss.separability for loss in OPTIONS if loss.separability != "token"} == {
        "loss_type=grpo,importance_sampling_level=sequence,entropy_coef=0.2": "sequence",
        "sampler_mode=sequence_truncate,on_policy=True": "sequence",
        "loss_type=vespo,sampler_mode=token_truncate": "sequence",
        "loss_type=vespo,sampler_mode=token_truncate,on_policy=True": "sequence",
        "loss_type=cispo,epsilon_high=1.1,importance_sampling_level=sequence": "sequence",
        "off_policy_mask_threshold=0.01": "sequence",
        "entropy_coef=0.1,top_entropy_quantile=0.3": "batch",
    }


def units_of(loss: GRPOLoss, batch: Rollouts) -> list[Any]:
    """Index of subsets of whole units, as the engine cuts them: scored tokens in a row, or rows."""
    if loss.separability == "sequence":
        return [torch.tensor([0]), torch.tensor([1, 2, 3]), torch.tensor([4])]
    return list(batch.mask.flatten().nonzero().squeeze(1).split(5))


@pytest.mark.parametrize("loss", [loss for loss in CONFIGURATIONS if loss.separability != "batch"], ids=named)
def test_contributions_of_units_add_up(loss: GRPOLoss) -> None:
    batch = make_rollouts().leaf()
    statistics = {name: value for name, value in batch.statistics().items() if name in loss.statistics}
    inputs = loss.prepare(batch.mask, batch.wanted(loss))
    totals = loss.totals(batch.mask, inputs)
    whole, metrics = loss(statistics, batch.mask, inputs, totals)

    def part(value: Tensor, index: Tensor) -> Tensor:
        if value.dim() == 0:
            return value
        return value[index] if loss.separability == "sequence" else value.reshape(-1)[index].unsqueeze(0)

    parts = [
        loss(
            {n: part(v, index) for n, v in statistics.items()},
            part(batch.mask, index),
            {n: part(v, index) for n, v in inputs.items()},
            totals,
        )
        for index in units_of(loss, batch)
    ]
    total = sum(value for value, _ in parts)
    torch.testing.assert_close(total, whole, rtol=1e-10, atol=1e-14)
    for name, metric in metrics.items():
        assert not metric.requires_grad
        torch.testing.assert_close(sum(m[name] for _, m in parts), metric, rtol=1e-10, atol=1e-14)
    expected, got = (torch.autograd.grad(v, batch.logits, retain_graph=True)[0] for v in (whole, total))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-14)


# padding ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, -1e4], ids=str)
@pytest.mark.parametrize("loss", CONFIGURATIONS, ids=named)
def test_b07_b08_padding_reaches_nothing(loss: GRPOLoss, junk: float) -> None:
    """In any input and in the statistics themselves: value, gradient and metrics are bit for bit the same."""
    clean = make_rollouts()
    wanted = clean.wanted(loss)

    def run(fill: float) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
        inputs = {n: v.masked_fill(~clean.mask, fill) if v.dim() == 2 else v for n, v in wanted.items()}
        inputs = loss.prepare(clean.mask, inputs)
        leaves = {n: v.masked_fill(~clean.mask, fill).requires_grad_() for n, v in clean.statistics().items()}
        statistics = {n: v for n, v in leaves.items() if n in loss.statistics}
        value, metrics = loss(statistics, clean.mask, inputs, loss.totals(clean.mask, inputs))
        return value, metrics, list(torch.autograd.grad(value, [statistics[n] for n in loss.differentiable]))

    expected, got = run(0.0), run(junk)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    for sent in got[2]:
        assert (sent[~clean.mask] == 0).all()


def test_b08_luspo_of_token_ratios() -> None:
    """The mean over rows of sums over scored tokens."""
    batch = make_rollouts()
    value, _ = evaluate(GRPOLoss(loss_type="luspo"), batch)
    logprob, advantages = batch.statistics()["logprob"], batch.inputs["advantages"].unsqueeze(1)
    ratio = (logprob - batch.inputs["old_logprobs"]).exp()
    losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    torch.testing.assert_close(value, (losses * batch.mask).sum() / ROWS)


@pytest.mark.parametrize("loss", CONFIGURATIONS, ids=named)
def test_b13_an_empty_row_and_an_empty_batch(loss: GRPOLoss) -> None:
    batch = make_rollouts()
    batch.mask[1] = False
    value, _ = evaluate(loss, batch)
    grad = gradient(loss, batch)
    assert value.isfinite()
    assert grad.isfinite().all()
    assert (grad[1] == 0).all()
    assert grad[0].abs().max() > 0
    batch.mask[:] = False
    value, metrics = evaluate(loss, batch)
    assert value == 0
    assert (gradient(loss, batch) == 0).all()
    assert all(metric == 0 for metric in metrics.values())


def test_b11_truncated_completions_leave_sum_and_count() -> None:
    """30 tokens, 5 of them in a masked row: divided by 25."""
    logprobs = torch.zeros(6, 5, dtype=torch.float64)
    mask = torch.ones(6, 5, dtype=torch.bool)
    mask[5] = False
    advantages = torch.tensor([1.0, 2, 3, 4, 5, 1000], dtype=torch.float64)
    for name in ("dapo", "bnpo", "ppo"):
        value, _ = grpo_loss(logprobs, mask, advantages, loss_type=name)
        assert value.item() == pytest.approx(-5 * 15 / 25)


# normalisers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"beta": 0.1}, {"entropy_coef": 0.2}, {"loss_type": "vespo"},
                                     {"loss_type": "cispo"}, {"loss_type": "ppo"}], ids=str)  # fmt: skip
def test_b10_b28_micro_batches_of_3_and_13_tokens_are_one_of_16(options: dict[str, Any]) -> None:
    loss = GRPOLoss(**options)
    batch = make_rollouts().leaf()
    batch.mask[:] = False
    batch.mask[0, :3] = True
    batch.mask[1:3, :5] = True
    batch.mask[3, :3] = True
    inputs = batch.wanted(loss)
    whole, _ = evaluate(loss, batch, inputs)
    pieces = []
    for rows in (slice(0, 1), slice(1, 4)):
        part = Rollouts(batch.logits[rows], batch.target[rows], batch.mask[rows])
        micro = {n: v[rows] for n, v in inputs.items()} | {"num_items_in_batch": torch.tensor(16)}
        pieces.append(evaluate(loss, part, micro)[0])
    total = pieces[0] + pieces[1]
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(*(torch.autograd.grad(v, batch.logits)[0] for v in (total, whole)))


@pytest.mark.parametrize("count", [torch.tensor(40), torch.tensor(40.0), 40])
def test_step_tokens_are_shared_by_processes(count: Tensor | int) -> None:
    batch = make_rollouts()
    arguments = (batch.statistics()["logprob"], batch.mask, batch.inputs["advantages"])
    alone, _ = grpo_loss(*arguments)
    shared, _ = grpo_loss(*arguments, num_items_in_batch=count, num_processes=4)
    torch.testing.assert_close(shared, alone * batch.mask.sum() / 10)


def test_step_tokens_are_shared_by_the_processes_of_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_rollouts()
    arguments = (batch.statistics()["logprob"], batch.mask, batch.inputs["advantages"])
    expected, _ = grpo_loss(*arguments, num_items_in_batch=40, num_processes=2)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    torch.testing.assert_close(grpo_loss(*arguments, num_items_in_batch=40)[0], expected)


@pytest.mark.parametrize("quantile", [1.0, 0.4])
def test_the_entropy_bonus_is_a_share_of_the_steps_mean(quantile: float) -> None:
    batch = make_rollouts()
    options = {"top_entropy_quantile": quantile, "entropy_coef": 0.3}
    bonus = []
    for more in ({}, {"num_items_in_batch": torch.tensor(46)}):
        loss, without = GRPOLoss(**options), GRPOLoss(**{**options, "entropy_coef": 0.0})
        inputs = batch.wanted(loss) | more
        bonus.append(evaluate(without, batch, inputs)[0] - evaluate(loss, batch, inputs)[0])
    entropy = batch.statistics()["entropy"]
    kept = top_entropy_mask(entropy, batch.mask, quantile)
    torch.testing.assert_close(bonus[0], 0.3 * entropy[kept].mean())
    torch.testing.assert_close(bonus[1], bonus[0] * batch.mask.sum() / 46)


def test_x02_advantages_of_rows_and_of_tokens() -> None:
    batch = make_rollouts()
    loss = GRPOLoss()
    by_row, _ = evaluate(loss, batch)
    inputs = batch.wanted(loss)
    inputs["advantages"] = inputs["advantages"].unsqueeze(1).expand(ROWS, TOKENS)
    torch.testing.assert_close(evaluate(loss, batch, inputs)[0], by_row)
    for shape in ((ROWS, 1), (1, TOKENS), (TOKENS,), (ROWS, TOKENS, 1), ()):
        inputs["advantages"] = torch.zeros(shape, dtype=torch.float64)
        with pytest.raises(ValueError, match=rf"advantages: got shape .*, expected \[{ROWS}\] or \[{ROWS}, {TOKENS}\]"):
            evaluate(loss, batch, inputs)


def test_a_ready_ratio_in_each_shape() -> None:
    batch = make_rollouts()
    rows = torch.tensor([0.5, 1.0, 2.0, 0.0, 1.5], dtype=torch.float64)
    for loss in (GRPOLoss(), GRPOLoss(loss_type="vespo"), GRPOLoss(loss_type="vespo", on_policy=True)):
        values = []
        for ratio in (rows, rows.unsqueeze(1), rows.unsqueeze(1).expand(ROWS, TOKENS)):
            values.append(evaluate(loss, batch, batch.wanted(loss) | {"sampling_ratio": ratio})[0])
        torch.testing.assert_close(values[0], values[1])
        if loss.loss_type == "dapo":
            torch.testing.assert_close(values[0], values[2])
    # VESPO takes a row's ratio once, and the product of its tokens'.
    per_token = torch.where(batch.mask, 1.1, torch.nan).double()
    product = 1.1 ** batch.mask.sum(1).double()
    by_token, by_row = (
        evaluate(loss, batch, batch.wanted(loss) | {"sampling_ratio": ratio})[0] for ratio in (per_token, product)
    )
    torch.testing.assert_close(by_token, by_row)


# formulas -----------------------------------------------------------------------------------------------------------


def test_kl_estimators() -> None:
    d = torch.tensor([-0.7, 0.0, 1.3], dtype=torch.float64)
    expected = {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}
    for name, estimate in KL_ESTIMATORS.items():
        torch.testing.assert_close(estimate(d), expected[name])
    # Under its own samples, the mean of each estimator that is exact is the divergence.
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.5, 0.3]).double()
    for name in ("k1", "k3"):
        torch.testing.assert_close((p * KL_ESTIMATORS[name]((p / q).log())).sum(), (p * (p / q).log()).sum())


def test_corrected_k1_has_the_gradient_of_the_divergence() -> None:
    """On-policy, the mean over samples of grad(ratio * k1) is grad KL; that of grad k1 is 0."""
    logits = torch.tensor([0.3, -0.5, 1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    log_p = logits.log_softmax(0)
    share = log_p.exp().detach()
    (want,) = torch.autograd.grad((log_p.exp() * (log_p - reference)).sum(), logits, retain_graph=True)
    for corrected in (True, False):
        total = logits.new_zeros(())
        for token in range(3):
            loss, _ = grpo_loss(
                log_p[token].view(1, 1), torch.ones(1, 1, dtype=torch.bool), torch.zeros(1).double(),
                ref_logprobs=reference[token].view(1, 1), beta=1.0, kl_estimator="k1",
                use_bias_correction_kl=corrected,
            )  # fmt: skip
            total = total + share[token] * loss
        (got,) = torch.autograd.grad(total, logits, retain_graph=True)
        torch.testing.assert_close(got, want if corrected else torch.zeros_like(want), atol=1e-12, rtol=1e-9)


def test_dual_clip_is_a_two_sided_clip() -> None:
    """For a < 0 the objective min(r a, clip(r) a) is kept above c a: arXiv:1912.09729, Eq. 5."""
    log_ratio = torch.linspace(-3, 3, 60, dtype=torch.float64).view(1, -1)
    mask = torch.ones_like(log_ratio, dtype=torch.bool)
    for a in (-1.5, 0.7):
        advantages = torch.full_like(log_ratio, a)
        value, _ = grpo_loss(log_ratio, mask, advantages, old_logprobs=torch.zeros_like(log_ratio), delta=3.0)
        ratio = log_ratio.exp()
        clipped = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
        torch.testing.assert_close(value, -(clipped.clamp_min(3.0 * a) if a < 0 else clipped).mean())


def test_ppo_is_dapo_and_a_value_loss() -> None:
    batch = make_rollouts()
    loss = GRPOLoss(loss_type="ppo", vf_coef=0.7, value_clip=0.2)
    inputs = batch.wanted(loss)
    inputs["values"] = inputs["values"].clone().requires_grad_()
    value, metrics = evaluate(loss, batch, inputs)
    policy, _ = evaluate(GRPOLoss(), batch)
    values, returns, old = (batch.inputs[n][batch.mask] for n in ("values", "returns", "old_values"))
    near = old + (values - old).clamp(-0.2, 0.2)
    expected = torch.maximum((values - returns) ** 2, (near - returns) ** 2).mean() / 2
    torch.testing.assert_close(metrics["value_loss"], expected)
    torch.testing.assert_close(value, policy + 0.7 * expected)
    (sent,) = torch.autograd.grad(value, inputs["values"])
    assert (sent[~batch.mask] == 0).all()
    assert sent.abs().sum() > 0
    torch.testing.assert_close(value_loss(values, returns, None, None), (values - returns) ** 2 / 2)


@pytest.mark.parametrize("quantile", [0.0, 0.2, 0.35, 0.5, 1.0])
def test_top_entropy_mask(quantile: float) -> None:
    batch = make_rollouts()
    entropy = batch.statistics()["entropy"]
    threshold = torch.quantile(entropy[batch.mask], 1 - quantile)
    got = top_entropy_mask(torch.where(batch.mask, entropy, torch.nan), batch.mask, quantile)
    assert torch.equal(got, batch.mask & (entropy >= threshold))
    if quantile in (0.0, 1.0):
        assert got.sum() == (1 if quantile == 0 else batch.mask.sum())
    assert not top_entropy_mask(entropy, torch.zeros_like(batch.mask), quantile).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", POLICY_TYPES)
def test_a_ratio_that_overflows_sends_no_nan_back(name: str, dtype: torch.dtype) -> None:
    """A clipped token has the gradient 0, not 0 * inf."""
    loss = GRPOLoss(**options_of(name))
    batch = make_rollouts(dtype=dtype)
    inputs = batch.wanted(loss)
    inputs["advantages"] = torch.ones_like(inputs["advantages"])
    inputs["old_logprobs"] = inputs["old_logprobs"].clone()
    inputs["old_logprobs"][0, 0] = -5000.0
    value, _ = evaluate(loss, batch, inputs)
    assert value.isfinite()
    assert value.dtype == dtype
    assert gradient(loss, batch, inputs).isfinite().all()


@pytest.mark.parametrize("loss", [
    loss for loss in CONFIGURATIONS
    # Constants of the gradient by design: phi, the clipped ratio of cispo, o = sg(l).
    if loss.loss_type not in ("vespo", "cispo") and not loss.on_policy and loss.top_entropy_quantile == 1
], ids=named)  # fmt: skip
def test_gradcheck(loss: GRPOLoss) -> None:
    batch = make_rollouts()
    inputs = loss.prepare(batch.mask, batch.wanted(loss))
    totals = loss.totals(batch.mask, inputs)
    leaves = [batch.statistics()[n].clone().requires_grad_() for n in loss.statistics]

    def function(*values: Tensor) -> Tensor:
        return loss(dict(zip(loss.statistics, values, strict=True)), batch.mask, inputs, totals)[0]

    if loss.differentiable != loss.statistics:
        leaves[1].requires_grad_(False)
    assert torch.autograd.gradcheck(function, leaves)


def test_inputs_are_constants_and_not_written() -> None:
    loss = GRPOLoss(beta=0.1, sampler_mode="token_truncate", loss_type="ppo", vf_coef=0.1, value_clip=0.1)
    batch = make_rollouts().leaf()
    inputs = {n: v.clone().requires_grad_() for n, v in batch.wanted(loss).items()}
    copies = {n: v.detach().clone() for n, v in inputs.items()}
    evaluate(loss, batch, inputs)[0].backward()
    assert {n for n, v in inputs.items() if v.grad is not None} == {"values"}
    assert all(torch.equal(inputs[n], copies[n]) for n in inputs)


def test_the_pure_function_is_the_object() -> None:
    batch = make_rollouts()
    statistics = batch.statistics()
    loss = GRPOLoss(loss_type="sapo", beta=0.2, entropy_coef=0.1)
    given = {n: batch.inputs[n] for n in ("old_logprobs", "ref_logprobs")}
    got = grpo_loss(
        statistics["logprob"], batch.mask, batch.inputs["advantages"], **given, entropy=statistics["entropy"],
        loss_type="sapo", beta=0.2, entropy_coef=0.1,
    )  # fmt: skip
    torch.testing.assert_close(got, evaluate(loss, batch))
    with pytest.raises(ValueError, match="entropy: got None, expected it with entropy_coef"):
        grpo_loss(statistics["logprob"], batch.mask, batch.inputs["advantages"], entropy_coef=0.1)
    with pytest.raises(ValueError, match="entropy: got a tensor, expected it with entropy_coef"):
        grpo_loss(statistics["logprob"], batch.mask, batch.inputs["advantages"], entropy=statistics["entropy"])
