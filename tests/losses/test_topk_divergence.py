"""Teachers known at k tokens (B56), and at sampled tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from liger_losses.chunked import fused_linear_loss
from liger_losses.losses import DIVERGENCES, SampledKLLoss, divergence, logprob_divergence, sampled_kl, topk_divergence

V, K = 11, 4
F_KINDS = [kind for kind, row in DIVERGENCES.items() if row.is_f]


def case(rows: int = 5, k: int = K, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Student logits and the teacher's log-probabilities over the whole vocabulary, and the teacher's top k."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = (2 * torch.randn(rows, V, generator=generator, dtype=torch.float64).to(dtype) for _ in "st")
    log_t = teacher.log_softmax(-1)
    return student.requires_grad_(), log_t, log_t.topk(k).indices


def at(student: Tensor, log_t: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return student.log_softmax(-1).gather(-1, ids), log_t.gather(-1, ids)


def dense(probabilities: Tensor, ids: Tensor) -> Tensor:
    """Probabilities at `ids`, and 0 elsewhere."""
    return torch.zeros(len(ids), V, dtype=torch.float64).scatter(-1, ids, probabilities)


def test_drop_is_the_sum_over_k_of_the_whole_ones_terms() -> None:
    student, log_t, ids = case()
    s, t = at(student, log_t, ids)
    value = topk_divergence(s, t, tail="drop")
    torch.testing.assert_close(value, (t.exp() * (t - s)).sum(-1))
    reverse = topk_divergence(s, t, tail="drop", kind="reverse_kl")
    torch.testing.assert_close(reverse, (s.exp() * (s - t)).sum(-1))
    # The student is normalised over the vocabulary: every logit has a gradient.
    (gradient,) = torch.autograd.grad(value.sum(), student)
    torch.testing.assert_close(gradient, t.exp().sum(-1, keepdim=True) * student.softmax(-1) - dense(t.exp(), ids))


@pytest.mark.parametrize("kind", ["forward_kl", "jsd", "skewed_forward_kl", "tvd", "alpha"])
def test_renormalise_is_the_whole_divergence_from_the_renormalised_teacher(kind: str) -> None:
    student, log_t, ids = case()
    s, t = at(student, log_t, ids)
    value = topk_divergence(s, t, kind=kind)
    teacher = dense(t.softmax(-1), ids).log()
    expected = divergence(student, teacher, kind=kind)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(v.sum(), student, retain_graph=True)[0] for v in (value, expected))
    )


@pytest.mark.parametrize("kind", F_KINDS)
def test_bucket_is_the_divergence_over_k_and_one(kind: str) -> None:
    student, log_t, ids = case()
    s, t = at(student, log_t, ids)
    value = topk_divergence(s, t, kind=kind, tail="bucket")
    merged = [torch.cat([p, 1 - p.sum(-1, keepdim=True)], -1).log() for p in (s.exp(), t.exp())]
    expected = logprob_divergence(*merged, kind=kind)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(v.sum(), student, retain_graph=True)[0] for v in (value, expected))
    )
    assert (value <= divergence(student, log_t, kind=kind)).all()  # merging outcomes tells less


@pytest.mark.parametrize("kind", F_KINDS)
def test_renormalise_both_forgets_the_rest_of_the_vocabulary(kind: str) -> None:
    student, log_t, ids = case()
    s, t = at(student, log_t, ids)
    expected = divergence(student.gather(-1, ids), t, kind=kind)
    torch.testing.assert_close(topk_divergence(s, t, kind=kind, tail="renormalise_both"), expected)


@pytest.mark.parametrize("tail", ["renormalise", "bucket"])
@pytest.mark.parametrize("kind", ["forward_kl", "jsd", "tvd"])
def test_all_tokens_stored_is_the_whole_divergence(kind: str, tail: str) -> None:
    student, log_t, ids = case(k=V)
    s, t = at(student, log_t, ids)
    torch.testing.assert_close(topk_divergence(s, t, kind=kind, tail=tail), divergence(student, log_t, kind=kind))


@pytest.mark.parametrize("tail", ["renormalise_both", "bucket", "drop"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_student_equal_to_teacher_is_zero(tail: str, dtype: torch.dtype) -> None:
    _, log_t, ids = case(dtype=dtype)
    t = log_t.gather(-1, ids)
    student = t.clone().requires_grad_()
    value = topk_divergence(student, t, tail=tail)
    assert (value == 0).all()
    assert torch.autograd.grad(value.sum(), student)[0].isfinite().all()


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("bucket", [True, False])
def test_is_trls_sparse_divergence(beta: float, bucket: bool) -> None:
    """TRL's functions, on the student and teacher log-probabilities at k; without a bucket it renormalises both."""
    trl = pytest.importorskip("trl.experimental.async_distillation.async_distillation_trainer")
    student, log_t, ids = case()
    s, t = at(student, log_t, ids)
    mask = torch.ones_like(ids, dtype=torch.bool)
    if bucket:
        theirs_s, support = trl._add_tail_bucket(s, mask)
        theirs_t, _ = trl._add_tail_bucket(t, mask)
    else:
        theirs_s, theirs_t, support = s.log_softmax(-1), t.log_softmax(-1), mask
    expected = trl._jsd_divergence(theirs_s, theirs_t, beta, support).sum(-1)
    value = topk_divergence(s, t, kind="jsd", beta=beta, tail="bucket" if bucket else "renormalise_both")
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)
    gradients = (torch.autograd.grad(v.sum(), student, retain_graph=True)[0] for v in (value, expected))
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("tail", ["renormalise", "renormalise_both", "bucket", "drop"])
@pytest.mark.parametrize("kind", ["forward_kl", "jsd"])
def test_empty_slots_and_masked_rows(kind: str, tail: str) -> None:
    student, log_t, ids = case()
    s, t = (x.detach().clone() for x in at(student, log_t, ids))
    expected = topk_divergence(s[:, :3], t[:, :3], kind=kind, tail=tail)
    mask = torch.tensor([True, True, False, True, False])
    t[:, 3], s[:, 3] = -torch.inf, torch.nan  # an empty slot: the student's value is not read
    t[2], s[4] = torch.nan, torch.inf
    t[3] = -torch.inf  # nothing stored at all
    s.requires_grad_()
    value = topk_divergence(s, t, kind=kind, tail=tail, mask=mask)
    torch.testing.assert_close(value, expected.masked_fill(~mask | (torch.arange(5) == 3), 0))
    (gradient,) = torch.autograd.grad(value.sum(), s)
    assert gradient.isfinite().all()
    assert (gradient[2:] == 0).all()
    assert (gradient[:, 3] == 0).all()


@pytest.mark.parametrize("tail", ["renormalise", "bucket", "renormalise_both"])
def test_peaked_in_fp32(tail: str) -> None:
    """A student whose k tokens leave less than fp32 can tell, a teacher who leaves more, and the reverse: finite."""
    log_s = torch.tensor([[0.0, -30.0], [-0.5, -1.5], [0.0, -torch.inf]], requires_grad=True)
    log_t = torch.tensor([[-0.5, -1.5], [0.0, -30.0], [-1e-6, -20.0]])
    value = topk_divergence(log_s, log_t, tail=tail)
    assert value[:2].isfinite().all()
    assert (value[2] == torch.inf) == (log_t[2, 1].exp() > 0)  # the student gives 0 to a token that was stored
    assert torch.autograd.grad(value[:2].sum(), log_s)[0].isfinite().all()


ZERO = torch.full((2, 3), -2.0)
REFUSED = [
    ({"kind": "akl"}, ValueError, "kind: got 'akl', which needs the whole vocabulary; expected an f-divergence"),
    ({"kind": "cosine"}, ValueError, "kind: got 'cosine', which needs the whole vocabulary"),
    ({"tail": "keep"}, ValueError, "tail: got 'keep', expected one of renormalise, renormalise_both, bucket, drop"),
    ({"kind": "reverse_kl"}, ValueError, "tail: got 'renormalise' with kind='reverse_kl', which is infinite: the student"),
    ({"kind": "jsd", "beta": 1}, ValueError, "tail: got 'renormalise' with kind='jsd', which is infinite"),
    ({"kind": "tvd", "tail": "drop"}, ValueError, "tail: got 'drop' with kind='tvd', expected forward_kl, reverse_kl or jsd"),
    ({"skew": 0.1}, ValueError, "skew: got 0.1 with kind='forward_kl', expected None"),
    ({"teacher_logprobs": ZERO[:, :2]}, ValueError, r"teacher_logprobs: got shape \[2, 2\], expected \[2, 3\]"),
    ({"teacher_logprobs": ZERO.int()}, TypeError, "teacher_logprobs: got torch.int32, expected a floating-point"),
    ({"mask": torch.ones(3, dtype=torch.bool)}, ValueError, r"mask: got shape \[3\], expected \[2\]"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "message"), REFUSED)
def test_refusals(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        topk_divergence(**{"student_logprobs": ZERO, "teacher_logprobs": ZERO, **options})


@pytest.mark.parametrize(
    ("estimator", "mean", "gradient_of"),
    [("k1", "reverse_kl", None), ("k2", None, "reverse_kl"), ("k3", "reverse_kl", "forward_kl")],
)
def test_estimators_in_expectation(estimator: str, mean: str | None, gradient_of: str | None) -> None:
    """Over all tokens, each with the probability with which the student samples it."""
    student, log_t, _ = case()
    log_s = student.log_softmax(-1)
    estimates = sampled_kl(log_s, log_t, estimator=estimator)
    sampled = log_s.exp().detach()
    expectation = (sampled * estimates).sum(-1)
    if mean:
        torch.testing.assert_close(expectation, divergence(student, log_t, kind=mean))
    (gradient,) = torch.autograd.grad(expectation.sum(), student, retain_graph=True)
    expected = torch.zeros_like(student)
    if gradient_of:
        (expected,) = torch.autograd.grad(divergence(student, log_t, kind=gradient_of).sum(), student)
    torch.testing.assert_close(gradient, expected)


def test_sampled_positions_outside_the_mask_are_not_read() -> None:
    s = torch.tensor([-1.0, torch.nan, -2.0], requires_grad=True)
    t = torch.tensor([-1.5, 0.0, -torch.inf])
    mask = torch.tensor([True, False, False])
    for estimator in ("k1", "k2", "k3"):
        value = sampled_kl(s, t, estimator=estimator, mask=mask)
        assert (value[1:] == 0).all()
        gradient = torch.autograd.grad(value.sum(), s)[0]
        assert gradient.isfinite().all()
        assert (gradient[1:] == 0).all()


@pytest.mark.parametrize("strategy", ["auto", "immediate", "cached", "recompute", "frozen"])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_fused_sampled_kl(estimator: str, strategy: str) -> None:
    generator = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((3, 5, 6), (V, 6)))
    hidden.requires_grad_(), weight.requires_grad_(strategy != "frozen")
    target = torch.randint(0, V, (3, 5), generator=generator)
    target[0, :2], target[2] = -100, -100
    mask = target != -100
    teacher = torch.randn(3, 5, generator=generator, dtype=torch.float64).masked_fill(~mask, torch.nan)
    weights = torch.rand(3, 5, generator=generator, dtype=torch.float64)
    leaves = [x for x in (hidden, weight) if x.requires_grad]
    loss, metrics = fused_linear_loss(
        SampledKLLoss(estimator=estimator), hidden, weight, target, strategy=strategy,
        inputs={"teacher_logprobs": teacher, "token_weights": weights},
    )  # fmt: skip
    logprobs = (hidden @ weight.T).log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
    expected = (sampled_kl(logprobs, teacher, estimator=estimator, mask=mask) * weights).sum() / mask.sum()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(value, leaves) for value in (loss, expected)))
    torch.testing.assert_close(metrics["reverse_kl"], (logprobs - teacher)[mask].mean().detach())


def test_sampled_micro_batches_add_up() -> None:
    logprobs, teacher = torch.randn(2, 4, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)
    mask, loss = torch.ones(2, 4, dtype=torch.bool), SampledKLLoss()

    def value(rows: slice, count: int | None) -> Tensor:
        inputs = {"teacher_logprobs": teacher[rows]} | (
            {} if count is None else {"num_items_in_batch": torch.tensor(count)}
        )
        inputs = loss.prepare(mask[rows], inputs)
        return loss({"logprob": logprobs[rows]}, mask[rows], inputs, loss.totals(mask[rows], inputs))[0]

    torch.testing.assert_close(value(slice(0, 1), 8) + value(slice(1, 2), 8), value(slice(0, 2), None))


def test_sampled_refusals() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="estimator: got 'k4', expected one of k1, k2, k3"):
        SampledKLLoss(estimator="k4")
    with pytest.raises(ValueError, match="inputs: got no teacher_logprobs"):
        SampledKLLoss().prepare(mask, {})
    with pytest.raises(ValueError, match="inputs: got advantages, expected names out of teacher_logprobs"):
        SampledKLLoss().prepare(mask, {"advantages": ZERO})
    with pytest.raises(ValueError, match=r"teacher_logprobs: got shape \[2, 2\], expected \[2, 3\]"):
        sampled_kl(ZERO, ZERO[:, :2])
