"""Divergences of whole logits against the formulas as the papers write them, TRL's code, and the places of zeros."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from liger_losses.chunked import Divergence, linear_divergence
from liger_losses.losses import DIVERGENCES, divergence, logprob_divergence

V = 9
PROBABILITIES = [kind for kind, row in DIVERGENCES.items() if not row.of_logits]

# Every kind, with options that are not the defaults as well, and its formula in probabilities s and t.
CASES: list[tuple[str, dict, Callable[[Tensor, Tensor], Tensor]]] = [
    ("forward_kl", {}, lambda s, t: kl(t, s)),
    ("reverse_kl", {}, lambda s, t: kl(s, t)),
    ("jsd", {}, lambda s, t: (kl(t, (s + t) / 2) + kl(s, (s + t) / 2)) / 2),
    ("jsd", {"beta": 0.3}, lambda s, t: 0.3 * kl(t, 0.7 * s + 0.3 * t) + 0.7 * kl(s, 0.7 * s + 0.3 * t)),
    ("jsd", {"beta": 0}, lambda s, t: kl(t, s)),
    ("jsd", {"beta": 1}, lambda s, t: kl(s, t)),
    ("jsd", {"beta": 0, "endpoints": "formula"}, lambda s, t: 0 * kl(s, t)),
    ("jsd", {"beta": 1, "endpoints": "formula"}, lambda s, t: 0 * kl(s, t)),
    ("skewed_forward_kl", {}, lambda s, t: kl(t, 0.1 * t + 0.9 * s)),
    ("skewed_forward_kl", {"skew": 0.4}, lambda s, t: kl(t, 0.4 * t + 0.6 * s)),
    ("skewed_forward_kl", {"skew": 0}, lambda s, t: kl(t, s)),
    ("skewed_reverse_kl", {}, lambda s, t: kl(s, 0.1 * s + 0.9 * t)),
    ("skewed_reverse_kl", {"skew": 0}, lambda s, t: kl(s, t)),
    ("tvd", {}, lambda s, t: (s - t).abs().sum(-1) / 2),
    ("jeffreys", {}, lambda s, t: kl(s, t) + kl(t, s)),
    ("alpha", {}, lambda s, t: 4 * (1 - (s * t).sqrt().sum(-1))),
    ("alpha", {"alpha": 0.7}, lambda s, t: (1 - (t**0.7 * s**0.3).sum(-1)) / 0.21),
    ("alpha", {"alpha": -0.5}, lambda s, t: (1 - (t**-0.5 * s**1.5).sum(-1)) / -0.75),
    ("alpha", {"alpha": 2}, lambda s, t: (1 - (t**2 / s).sum(-1)) / -2),
    ("alpha", {"alpha": 0}, lambda s, t: kl(s, t)),
    ("alpha", {"alpha": 1}, lambda s, t: kl(t, s)),
    ("akl", {}, lambda s, t: adaptive(s, t, 0.5)),
    ("akl", {"mu": 0.8}, lambda s, t: adaptive(s, t, 0.8)),
]  # fmt: skip


def kl(a: Tensor, b: Tensor) -> Tensor:
    return (a * (a / b).log()).sum(-1)


def adaptive(s: Tensor, t: Tensor, mu: float) -> Tensor:
    """AKL, row by row as its paper says it."""
    values = []
    for row_s, row_t in zip(s, t, strict=True):
        head, mass = [], 0.0
        for token in row_t.argsort(descending=True).tolist():
            if mass >= mu:
                break
            head.append(token)
            mass += row_t[token].item()
        gap = (row_s - row_t).detach().abs()
        share = gap[head].sum() / gap.sum()
        values.append(share * kl(row_t, row_s) + (1 - share) * kl(row_s, row_t))
    return torch.stack(values)


def logits(rows: int = 6, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (2 * torch.randn(rows, V, generator=generator, dtype=torch.float64).to(dtype) for _ in "st")
    return student.requires_grad_(), teacher


@pytest.mark.parametrize(("kind", "options", "formula"), CASES, ids=lambda x: str(x) if not callable(x) else "")
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_is_its_formula(kind: str, options: dict, formula: Callable, temperature: float) -> None:
    student, teacher = logits()
    value = divergence(student, teacher, kind=kind, temperature=temperature, **options)
    expected = formula((student / temperature).softmax(-1), (teacher / temperature).softmax(-1))
    torch.testing.assert_close(value, expected)
    weights = torch.arange(1.0, 7.0, dtype=torch.float64)
    torch.testing.assert_close(*(torch.autograd.grad(v @ weights, student)[0] for v in (value, expected)))


def test_kinds_of_logits() -> None:
    student, teacher = logits()
    cosine = torch.nn.functional.cosine_similarity(student, teacher, dim=-1)
    torch.testing.assert_close(divergence(student, teacher, kind="cosine"), 1 - cosine)
    squares = ((student - teacher) / 2).square().mean(-1)
    torch.testing.assert_close(divergence(student, teacher, kind="mse", temperature=2.0), squares)


@pytest.mark.parametrize(
    ("alpha", "student", "teacher"),
    [(3.0, -130.0, -85.0), (4.0, -100.0, -70.0), (2.0, -110.0, -20.0), (-2.0, -55.0, -100.0), (1.5, -200.0, -60.0)],
)
def test_alpha_where_a_power_of_the_ratio_overflows(alpha: float, student: float, teacher: float) -> None:
    """In fp32, where the product with the small probability does not."""
    found = []
    for dtype in (torch.float32, torch.float64):
        s = torch.tensor([[0.0, student, -1.0]], dtype=dtype, requires_grad=True)
        value = divergence(s, torch.tensor([[0.0, teacher, -2.0]], dtype=dtype), kind="alpha", alpha=alpha)
        found.append((value, torch.autograd.grad(value.sum(), s)[0]))
    for ours, exact in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-6)


def test_a_cosine_without_direction() -> None:
    student, teacher = (values.detach().clone() for values in logits())
    student[0], teacher[1], student[2], teacher[2] = 0, 0, 0, 0
    student.requires_grad_()
    value = divergence(student, teacher, kind="cosine")
    expected = 1 - torch.nn.functional.cosine_similarity(student, teacher, dim=-1).detach()
    expected[2] = 0  # equal logits, as ever
    torch.testing.assert_close(value, expected)
    (gradient,) = torch.autograd.grad(value.sum(), student)
    assert (gradient[:3].abs() < 1e-15).all()
    assert (gradient[3:] != 0).all()


def test_every_kind_is_tested() -> None:
    assert {kind for kind, _, _ in CASES} | {"cosine", "mse"} == set(DIVERGENCES)
    assert all(row.formula and row.paper for row in DIVERGENCES.values())


# Not "akl": its weights are constants, which finite differences move.
@pytest.mark.parametrize("kind", [kind for kind in DIVERGENCES if kind != "akl"])
def test_gradcheck(kind: str) -> None:
    student, teacher = logits(3)
    scaled = {} if kind == "cosine" else {"temperature": 1.3, "scale_by_squared_temperature": True}
    assert torch.autograd.gradcheck(lambda z: divergence(z, teacher, kind=kind, **scaled), student)


@pytest.mark.parametrize("kind", [kind for kind in DIVERGENCES if kind != "cosine"])
def test_temperature_divides_both_and_its_square_is_asked_for(kind: str) -> None:
    """X12: no factor unless asked."""
    student, teacher = logits()
    plain = divergence(student, teacher, kind=kind, temperature=2.0)
    torch.testing.assert_close(plain, divergence(student / 2, teacher / 2, kind=kind))
    squared = divergence(student, teacher, kind=kind, temperature=2.0, scale_by_squared_temperature=True)
    torch.testing.assert_close(squared, 4 * plain)
    own = divergence(student, teacher, kind=kind, temperature=2.0, teacher_temperature=0.5)
    torch.testing.assert_close(own, divergence(student / 2, teacher / 0.5, kind=kind))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_student_equal_to_teacher_is_exactly_zero(kind: str, dtype: torch.dtype) -> None:
    """B05: nothing of a cross entropy is inside."""
    student, _ = logits(dtype=dtype)
    value = divergence(student, student.detach().clone(), kind=kind, temperature=1.0 if kind == "cosine" else 0.7)
    assert value.dtype == torch.promote_types(dtype, torch.float32)
    assert (value == 0).all()
    (gradient,) = torch.autograd.grad(value.sum(), student)
    assert gradient.abs().max() < 1e-6


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_never_negative_and_accurate_near_the_teacher(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    teacher = 3 * torch.randn(200, 500, generator=generator)
    student = (teacher + 1e-3 * torch.randn(200, 500, generator=generator)).requires_grad_()
    value = divergence(student, teacher, kind=kind)
    assert (value >= 0).all()
    wide = student.detach().double().requires_grad_()
    expected = divergence(wide, teacher.double(), kind=kind)
    # The difference of logits is known to 1e-7 of their size, and of these the divergence is a square.
    assert (value - expected).abs().max() < 1e-6
    gradient, truth = torch.autograd.grad(value.sum(), student)[0], torch.autograd.grad(expected.sum(), wide)[0]
    if kind != "tvd":  # its gradient is a sign
        assert (gradient - truth).norm() < 1e-3 * truth.norm()


@pytest.mark.parametrize("kind", PROBABILITIES)
def test_zero_on_both_sides_is_as_if_the_entry_were_not_there(kind: str) -> None:
    student, teacher = logits()
    without = divergence(student, teacher, kind=kind)
    padding = torch.full((6, 2), -torch.inf, dtype=torch.float64)
    wider = torch.cat([student, padding], -1).detach().requires_grad_()
    value = divergence(wider, torch.cat([teacher, padding], -1), kind=kind)
    torch.testing.assert_close(value, without)
    gradient, expected = torch.autograd.grad(value.sum(), wider)[0], torch.autograd.grad(without.sum(), student)[0]
    torch.testing.assert_close(gradient[:, :V], expected)
    assert (gradient[:, V:] == 0).all()


# Infinite where the student, or the teacher, has a zero that the other has not.
INFINITE = {
    "forward_kl": "student", "reverse_kl": "teacher", "jeffreys": "student teacher", "akl": "student teacher",
    "alpha": "", "jsd": "", "skewed_forward_kl": "", "skewed_reverse_kl": "", "tvd": "",
}  # fmt: skip


@pytest.mark.parametrize("side", ["student", "teacher"])
@pytest.mark.parametrize("kind", PROBABILITIES)
def test_zero_on_one_side(kind: str, side: str) -> None:
    student, teacher = (z.detach().clone() for z in logits())
    (student if side == "student" else teacher)[2:, 3] = -torch.inf
    student.requires_grad_()
    value = divergence(student, teacher, kind=kind)
    assert value[:2].isfinite().all()
    if side in INFINITE[kind]:
        assert (value[2:] == torch.inf).all()
    else:
        s, t = student.softmax(-1), teacher.softmax(-1)
        formula = next(f for k, options, f in CASES if k == kind and not options)
        tiny = 1e-300  # what 0 log 0 = 0 comes to
        torch.testing.assert_close(value, formula(s.clamp(min=tiny), t.clamp(min=tiny)))
    (gradient,) = torch.autograd.grad(value.sum(), student)
    assert gradient.isfinite().all()
    if side in INFINITE[kind] and side == "teacher":
        assert (gradient[2:] == 0).all()


@pytest.mark.parametrize(("alpha", "side"), [(-0.5, "teacher"), (2.0, "student")])
def test_alpha_outside_of_its_interval_is_infinite_where_a_power_is(alpha: float, side: str) -> None:
    student, teacher = (z.detach().clone() for z in logits())
    (student if side == "student" else teacher)[0, 3] = -torch.inf
    student.requires_grad_()
    value = divergence(student, teacher, kind="alpha", alpha=alpha)
    assert value[0] == torch.inf
    assert value[1:].isfinite().all()
    assert torch.autograd.grad(value.sum(), student)[0].isfinite().all()


@pytest.mark.parametrize("kind", PROBABILITIES)
def test_probabilities_that_underflow(kind: str) -> None:
    """fp32: e^-200 is 0, and its logarithm is not."""
    student = torch.tensor([[0.0, -200.0, 1.0], [0.0, 200.0, -200.0]], requires_grad=True)
    teacher = torch.tensor([[0.0, 1.0, -200.0], [200.0, 0.0, 0.0]])
    value = divergence(student, teacher, kind=kind)
    expected = divergence(student.double(), teacher.double(), kind=kind)
    torch.testing.assert_close(value, expected.float(), rtol=1e-5, atol=1e-6)
    assert torch.autograd.grad(value.sum(), student)[0].isfinite().all()


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_masked_rows_are_not_read(kind: str) -> None:
    """B04: rows outside the mask give 0 and a zero gradient, whatever they hold; all of them, too."""
    student, teacher = (z.detach().clone() for z in logits())
    mask = torch.tensor([True, False, True, False, True, False])
    expected = divergence(student, teacher, kind=kind)
    student[1], teacher[3], student[5] = torch.nan, torch.inf, -torch.inf
    student.requires_grad_()
    value = divergence(student, teacher, kind=kind, mask=mask)
    torch.testing.assert_close(value, expected.masked_fill(~mask, 0))
    (gradient,) = torch.autograd.grad(value.sum(), student)
    assert gradient.isfinite().all()
    assert (gradient[~mask] == 0).all()
    nothing = divergence(student, teacher, kind=kind, mask=torch.zeros_like(mask))
    assert (nothing == 0).all()
    assert (torch.autograd.grad(nothing.sum(), student)[0] == 0).all()


@pytest.mark.parametrize("beta", [0, 0.3, 0.5, 1])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_is_trls_generalised_jsd(beta: float, temperature: float) -> None:
    gkd = pytest.importorskip("trl.experimental.gkd.gkd_trainer")
    student, teacher = logits()
    labels = torch.tensor([1, -100, 2, 3, -100, 4])
    mask = labels != -100
    expected = gkd.GKDTrainer.generalized_jsd_loss(
        student[None], teacher[None], labels[None], beta=beta, temperature=temperature, reduction="sum"
    )
    value = divergence(student, teacher, kind="jsd", beta=beta, temperature=temperature, mask=mask).sum()
    # TRL takes log(beta) in fp32 where beta is not a power of two.
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)
    gradients = [torch.autograd.grad(v, student)[0] for v in (value, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_is_trls_chunked_divergence(beta: float) -> None:
    chunked = pytest.importorskip("trl.kernels.chunked_divergence")
    generator = torch.Generator().manual_seed(3)
    h_s, w_s, h_t, w_t = (torch.randn(*shape, generator=generator) for shape in ((7, 5), (V, 5), (7, 4), (V, 4)))
    h_s.requires_grad_(), w_s.requires_grad_()
    theirs, _ = chunked.ChunkedDivergenceFunction.apply(h_s, w_s, None, h_t, w_t, None, beta, 1.4)
    ours = divergence(h_s @ w_s.T, h_t @ w_t.T, kind="jsd", beta=beta, temperature=1.4)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    for mine, other in zip(*(torch.autograd.grad(v.sum(), (h_s, w_s)) for v in (ours, theirs)), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_shared_vocabulary_restricts_both_softmaxes() -> None:
    student, teacher = logits()
    wider = torch.cat([teacher, 5 * torch.ones(6, 3, dtype=torch.float64)], -1)
    torch.testing.assert_close(divergence(student, wider), divergence(student, teacher))
    torch.testing.assert_close(divergence(wider, student), divergence(teacher, student))


def test_padded_vocabulary_gives_zero_to_what_is_missing() -> None:
    student, teacher = logits()
    wider = torch.cat([teacher, torch.ones(6, 3, dtype=torch.float64)], -1)
    padded = torch.cat([student.softmax(-1), torch.zeros(6, 3, dtype=torch.float64)], -1)
    value = divergence(student, wider, kind="tvd", vocabulary="padded")
    torch.testing.assert_close(value, (padded - wider.softmax(-1)).abs().sum(-1) / 2)
    # Finite: the wider model has mass wherever the other has.
    assert divergence(student, wider, kind="reverse_kl", vocabulary="padded").isfinite().all()
    assert divergence(wider, student, kind="forward_kl", vocabulary="padded").isfinite().all()
    # Infinite where it has not: the gradient is there if it is the student that lacks the columns.
    student.requires_grad_()
    for kind, pair in (("forward_kl", (student, wider)), ("reverse_kl", (torch.cat([student, student], -1), teacher))):
        value = divergence(*pair, kind=kind, vocabulary="padded")
        assert (value == torch.inf).all()
        (gradient,) = torch.autograd.grad(value.sum(), student)
        assert gradient.isfinite().all()
        assert gradient.any().item() == (kind == "forward_kl")


def test_logprobs_are_taken_as_they_are() -> None:
    student, teacher = (z.log_softmax(-1).detach() for z in logits())
    for kind in PROBABILITIES:
        torch.testing.assert_close(
            logprob_divergence(student, teacher, kind=kind), divergence(student, teacher, kind=kind)
        )
    part = student[:, :4].clone().requires_grad_()
    value = logprob_divergence(part, teacher[:, :4])
    torch.testing.assert_close(value, (teacher.exp() * (teacher - student))[:, :4].sum(-1))
    torch.testing.assert_close(torch.autograd.grad(value.sum(), part)[0], -teacher[:, :4].exp())


def test_the_teacher_is_a_constant_and_nothing_is_written_to() -> None:
    student, teacher = logits()
    teacher.requires_grad_()
    copies = student.detach().clone(), teacher.detach().clone()
    value = divergence(student, teacher, kind="jsd").sum()
    assert torch.autograd.grad(value, teacher, allow_unused=True)[0] is None
    assert torch.equal(student, copies[0])
    assert torch.equal(teacher, copies[1])


def test_any_leading_shape() -> None:
    student, teacher = logits()
    whole = divergence(student, teacher)
    assert divergence(student[0], teacher[0]).shape == ()
    torch.testing.assert_close(divergence(student.view(2, 3, V), teacher.view(2, 3, V)), whole.view(2, 3))
    assert divergence(student[:0], teacher[:0]).shape == (0,)


@pytest.mark.parametrize(
    ("kind", "temperatures"),
    [
        (kind, t)
        for t in [(1.0, None), (1.6, None), (2.0, 0.8)]
        for kind in DIVERGENCES
        if kind != "cosine" or t[0] == 1
    ],
)
def test_the_fused_form_is_this(kind: str, temperatures: tuple[float, float | None]) -> None:
    generator = torch.Generator().manual_seed(4)
    h_s, w_s, h_t, w_t = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((2, 7, 5), (V, 5), (2, 7, 4), (V, 4))
    )
    h_s.requires_grad_(), w_s.requires_grad_()
    target = torch.randint(0, V, (2, 7), generator=generator)
    target[0, :3] = -100
    options = {"kind": kind, "temperature": temperatures[0], "teacher_temperature": temperatures[1]}
    options["scale_by_squared_temperature"] = kind != "cosine"
    fused = linear_divergence(
        h_s, w_s, target, teacher_hidden=h_t, teacher_weight=w_t, divergence=Divergence(**options)
    )
    unfused = divergence(h_s @ w_s.T, h_t @ w_t.T, mask=target != -100, **options)
    torch.testing.assert_close(fused, unfused)
    upstream = torch.rand(2, 7, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(*(torch.autograd.grad(v, (h_s, w_s), upstream) for v in (fused, unfused)))


@pytest.mark.parametrize("vocabulary", ["shared", "padded"])
@pytest.mark.parametrize("sizes", [(V, V + 4), (V + 4, V)], ids=str)
@pytest.mark.parametrize("strategy", ["cached", "recompute"])
def test_the_fused_form_over_vocabularies_of_two_sizes(strategy: str, sizes: tuple[int, int], vocabulary: str) -> None:
    """Where one side has no entry, too, the gradient is that of probability 0."""
    generator = torch.Generator().manual_seed(5)
    hidden, weight, teacher = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((6, 5), (sizes[0], 5), (6, sizes[1]))
    )
    hidden.requires_grad_(), weight.requires_grad_()
    target = torch.arange(6)
    tested = 0
    for kind in DIVERGENCES:
        if DIVERGENCES[kind].of_logits and vocabulary == "padded":
            continue
        options = {"kind": kind, "vocabulary": vocabulary, "temperature": 1.0 if kind == "cosine" else 1.5}
        unfused = divergence(hidden @ weight.T, teacher, **options)
        fused = linear_divergence(
            hidden, weight, target, teacher_logits=teacher, divergence=Divergence(**options), strategy=strategy
        )
        torch.testing.assert_close(fused, unfused)
        upstream = torch.rand(6, generator=generator, dtype=torch.float64)
        torch.testing.assert_close(*(torch.autograd.grad(v, (hidden, weight), upstream) for v in (fused, unfused)))
        tested += 1
    assert tested == (len(DIVERGENCES) if vocabulary == "shared" else len(DIVERGENCES) - 2)


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "jsd", "beta": 0.0},
        {"kind": "jsd", "beta": 0.3},
        {"kind": "jsd", "beta": 1.0},
        {"kind": "skewed_reverse_kl", "skew": 0.4},
        {"kind": "alpha", "alpha": -0.5},
        {"kind": "akl", "mu": 0.0},
        {"kind": "akl", "mu": 0.8},
        {"kind": "akl", "mu": 1.0},
    ],
    ids=str,
)
def test_the_fused_form_reads_the_same_numbers(options: dict) -> None:
    student, teacher = logits()
    eye = torch.eye(V, dtype=torch.float64)  # so that hidden states are logits
    target = torch.zeros(6, dtype=torch.int64)
    fused = linear_divergence(student, eye, target, teacher_logits=teacher, divergence=Divergence(**options))
    torch.testing.assert_close(fused, divergence(student, teacher, **options))


Z = torch.zeros(3, 5)
REFUSED = [
    ({"kind": "kl"}, ValueError, "kind: got 'kl', expected one of forward_kl, reverse_kl"),
    ({"beta": 0.5}, ValueError, "beta: got 0.5 with kind='forward_kl', expected None"),
    ({"kind": "jsd", "alpha": 0.5}, ValueError, "alpha: got 0.5 with kind='jsd', expected None"),
    ({"kind": "jsd", "beta": 1.5}, ValueError, "beta: got 1.5, expected a finite number >= 0 and <= 1"),
    ({"kind": "jsd", "beta": "x"}, TypeError, "beta: got 'x' of type str, expected a Python number"),
    ({"kind": "skewed_forward_kl", "skew": 1}, ValueError, "skew: got 1, expected 0 <= skew < 1"),
    ({"kind": "alpha", "alpha": float("nan")}, ValueError, "alpha: got nan, expected a finite number"),
    ({"kind": "akl", "mu": -1}, ValueError, "mu: got -1, expected a finite number >= 0"),
    ({"endpoints": "formula"}, ValueError, "endpoints: got 'formula' with kind='forward_kl', expected 'trl'"),
    ({"kind": "jsd", "endpoints": "liger"}, ValueError, "endpoints: got 'liger', expected one of trl, formula"),
    ({"temperature": 0}, ValueError, "temperature: got 0, expected a finite number > 0"),
    ({"teacher_temperature": -1.0}, ValueError, "teacher_temperature: got -1.0, expected a finite number > 0"),
    ({"scale_by_squared_temperature": 1}, TypeError, "scale_by_squared_temperature: got 1 of type int"),
    ({"vocabulary": "same"}, ValueError, "vocabulary: got 'same', expected one of shared, padded"),
    ({"student_logits": Z.long()}, TypeError, "student_logits: got torch.int64, expected a floating-point tensor"),
    ({"teacher_logits": None}, TypeError, "teacher_logits: got NoneType, expected a floating-point tensor"),
    ({"teacher_logits": Z[:2]}, ValueError, r"teacher_logits: got shape \[2, 5\], expected \[3, 'V'\]"),
    ({"student_logits": Z[:, :0]}, ValueError, r"student_logits: got shape \[3, 0\], expected \[\*, V\] with V >= 1"),
    ({"mask": torch.ones(3)}, TypeError, "mask: got torch.float32, expected a torch.bool tensor"),
    ({"mask": torch.ones(2, dtype=torch.bool)}, ValueError, r"mask: got shape \[2\], expected \[3\]"),
    ({"vocabulary": "padded", "kind": "mse"}, ValueError, "expected 'shared': a logit that is absent"),
    ({"vocabulary": "padded", "kind": "cosine"}, ValueError, "expected 'shared': a logit that is absent"),
    ({"teacher_logits": Z[:, :1]}, ValueError, "vocabulary: got 'shared' for 5 student and 1 teacher columns"),
    ({"temperature": 1e-40}, ValueError, "^temperature: got 1e-40, expected 1.2e-38 to 3.4e.38"),
    ({"teacher_temperature": 1e-40}, ValueError, "^teacher_temperature: got 1e-40, expected 1.2e-38 to 3.4e.38"),
    ({"temperature": 2.0, "kind": "cosine"}, ValueError, "temperature: got 2.0 with kind 'cosine', which has none"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "message"), REFUSED)
def test_refusals(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        divergence(**{"student_logits": Z, "teacher_logits": Z, **options})


def test_refusals_of_logprobs() -> None:
    with pytest.raises(ValueError, match="kind: got 'cosine', which is of logits"):
        logprob_divergence(Z, Z, kind="cosine")
    with pytest.raises(ValueError, match=r"teacher_logprobs: got shape \[3, 4\], expected \[3, 5\]"):
        logprob_divergence(Z, Z[:, :4])
