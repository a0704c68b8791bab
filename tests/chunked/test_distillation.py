"""`linear_divergence` and `fused_linear_distillation` against whole logits in fp64, whatever the strategy."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_losses.chunked import (
    Divergence,
    Plan,
    ScoredTokens,
    calls,
    deferred,
    fused_linear_distillation,
    fused_linear_loss,
    hidden_gradient,
    linear_divergence,
    linear_logprobs,
    plan,
    recompute,
    walk,
    weight_gradient,
)
from liger_losses.kernels import tile_statistics
from liger_losses.losses import DIVERGENCES

from ..distillation_oracle import KINDS, NAMES, label_of, unfused_distillation
from ..oracle import IGNORE, Case, ToyLoss, check_close, make_case, transformed
from .test_cost import Allocations, per_token_bytes

BOTH, HIDDEN = ("hidden", "weight", "bias"), ("hidden",)
STRATEGIES = ("immediate", "cached", "recompute", "frozen")
BUDGETS = {"immediate": 1_000_000, "cached": 2_000_000, "recompute": 620_000, "frozen": 2_000_000}  # several tiles
JSD = Divergence(kind="jsd", beta=0.3, temperature=2.0, hard_weight=0.4, soft_weight=0.6)


@dataclass
class Pair:
    """A student's case, and a teacher of another width near it."""

    case: Case
    hidden: Tensor  # [R, T, H']
    weight: Tensor  # [V', H']
    bias: Tensor | None
    softcap: float | None = None

    def teacher(self, form: str = "head") -> dict[str, Any]:
        if form == "head":
            return {"teacher_hidden": self.hidden, "teacher_weight": self.weight, "teacher_bias": self.bias,
                    "teacher_softcap": self.softcap}  # fmt: skip
        z = self.logits(self.hidden.dtype)
        return {
            "logits": {"teacher_logits": z}, "logprobs": {"teacher_logits": z.log_softmax(-1)},
            "probs": {"teacher_probs": z.softmax(-1)},
        }[form]  # fmt: skip

    def logits(self, dtype: torch.dtype) -> Tensor:
        bias = 0 if self.bias is None else self.bias.to(dtype)
        return transformed(self.hidden.to(dtype) @ self.weight.to(dtype).T + bias, softcap=self.softcap)

    def unfused(
        self, options: Divergence, dtype: torch.dtype = torch.float64
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Every number, zero where not scored, and the leaves in `dtype` that they come from."""
        leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in self.case.leaves]
        tensors = {"hidden": self.case.hidden, "weight": self.case.weight, "bias": self.case.bias}
        tensors = {name: None if t is None else t.detach().to(dtype) for name, t in tensors.items()}
        tensors.update(zip(self.case.trained, leaves, strict=True))
        raw = tensors["hidden"] @ tensors["weight"].T
        z = transformed(raw if tensors["bias"] is None else raw + tensors["bias"], **self.case.options)
        mask = self.case.mask
        found = unfused_distillation(z[mask], self.logits(dtype)[mask], self.case.target[mask], options)
        full = {name: torch.zeros(mask.shape, dtype=dtype).masked_scatter(mask, v) for name, v in found.items()}
        return full, leaves


def make_pair(
    rows: int = 3, length: int = 60, width: int = 8, vocab: int = 300, teacher_vocab: int | None = None,
    dtype: torch.dtype = torch.float64, *, teacher_width: int = 12, **options: Any,
) -> Pair:  # fmt: skip
    case = make_case(rows, length, width, vocab, dtype, **options)
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    both = min(width, teacher_width)
    hidden, weight = normal(rows, length, teacher_width), normal(teacher_vocab or vocab, teacher_width) * 0.4
    hidden[..., :both] += case.hidden.detach()[..., :both]
    least = min(len(weight), vocab)
    weight[:least, :both] += case.weight.detach()[:least, :both].double()
    bias = normal(len(weight)).to(dtype) if case.bias is not None else None
    return Pair(case, hidden.to(dtype), weight.to(dtype), bias, softcap=case.options.get("softcap"))


def per_token(pair: Pair, options: Divergence, form: str = "head", **more: Any) -> dict[str, Tensor]:
    more.setdefault("statistics", NAMES)
    return linear_divergence(*pair.case.head, **pair.teacher(form), divergence=options, **pair.case.options, **more)


def token_weights(pair: Pair) -> Tensor:
    return torch.linspace(0.5, 1.5, pair.case.target.numel(), dtype=torch.float64).view(pair.case.target.shape)


@pytest.mark.parametrize("options", KINDS, ids=label_of)
def test_every_kind_per_token(options: Divergence) -> None:
    pair = make_pair(softcap=9.0, logit_scale=1.2)
    exact, leaves = pair.unfused(options)
    weights = token_weights(pair)
    want = torch.autograd.grad((exact["distillation"] * weights).sum(), leaves)
    for strategy in ("cached", "recompute"):
        got = per_token(pair, options, strategy=strategy, memory_budget=BUDGETS[strategy])
        torch.testing.assert_close(got, {name: exact[name].detach() for name in NAMES}, rtol=1e-9, atol=1e-10)
        # What is sent back to positions that are not scored is not used, NaN included.
        sent = torch.where(pair.case.mask, weights, torch.nan)
        torch.testing.assert_close(torch.autograd.grad(got["distillation"], pair.case.leaves, sent), want)
        assert [name for name, value in got.items() if value.requires_grad] == ["distillation"]


@pytest.mark.parametrize("scored", ["all", "prompt", "row"])
@pytest.mark.parametrize("form", ["head", "logits", "logprobs", "probs"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_teachers_and_masks(strategy: str, form: str, scored: str) -> None:
    pair = make_pair(scored=scored, trainable=HIDDEN if strategy == "frozen" else BOTH)
    weights = token_weights(pair)
    exact, leaves = pair.unfused(JSD)
    count = pair.case.mask.sum()
    loss = (exact["distillation"] * weights).sum() / count
    want = torch.autograd.grad(2 * loss, leaves)
    value, metrics = fused_linear_distillation(
        *pair.case.head, **pair.teacher(form), divergence=JSD, token_weights=weights, strategy=strategy,
        memory_budget=BUDGETS[strategy], report=("divergence", "logprob", "entropy"), token_statistics=("teacher_entropy",),
    )  # fmt: skip
    torch.testing.assert_close(value, loss.detach())
    assert set(metrics) == {"divergence", "nll", "entropy", "teacher_entropy"}
    for name, found in (("logprob", -metrics["nll"]), ("divergence", metrics["divergence"])):
        torch.testing.assert_close(found, exact[name].sum().detach() / count)
    for _ in range(2):
        found = torch.autograd.grad(2 * value, pair.case.leaves, retain_graph=True)
        torch.testing.assert_close(found, want)


def test_metrics_per_token_and_means_do_not_share_a_name() -> None:
    pair = make_pair(2, 5)
    with pytest.raises(ValueError, match=r"token_statistics: got \['divergence'\], which report has too"):
        fused_linear_distillation(
            *pair.case.head, **pair.teacher(), report=("divergence",), token_statistics=("divergence",)
        )
    _, metrics = fused_linear_distillation(*pair.case.head, **pair.teacher(), token_statistics=("divergence",))
    assert {name: metric.shape for name, metric in metrics.items()} == {"divergence": (2, 5)}
    _, metrics = fused_linear_distillation(
        *pair.case.head, **pair.teacher(), token_statistics=("teacher_entropy", "distillation")
    )
    exact, _ = pair.unfused(Divergence())
    torch.testing.assert_close(metrics["teacher_entropy"], exact["teacher_entropy"])
    torch.testing.assert_close(metrics["distillation"], exact["distillation"].detach())


@pytest.mark.parametrize("vocabulary", ["shared", "padded"])
@pytest.mark.parametrize("strategy", STRATEGIES[:3])
@pytest.mark.parametrize("sizes", [(300, 411), (411, 300)], ids=str)
def test_vocabularies_of_two_sizes(sizes: tuple[int, int], strategy: str, vocabulary: str) -> None:
    for form, kind in itertools.product(("head", "logits"), ("jsd", "tvd")):
        options = Divergence(kind=kind, vocabulary=vocabulary, hard_weight=0.5)
        pair = make_pair(2, 70, vocab=sizes[0], teacher_vocab=sizes[1])
        exact, leaves = pair.unfused(options)
        value, _ = fused_linear_distillation(
            *pair.case.head, **pair.teacher(form), divergence=options, strategy=strategy, reduction="sum"
        )
        torch.testing.assert_close(value, exact["distillation"].sum().detach())
        if vocabulary == "padded" and sizes[0] < sizes[1]:
            continue  # autograd of the oracle's -inf is NaN; the kernel's tests have the gradient
        want = torch.autograd.grad(exact["distillation"].sum(), leaves)
        if not any(gradient.isnan().any() for gradient in want):
            torch.testing.assert_close(torch.autograd.grad(value, pair.case.leaves), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES[:3])
def test_precision(strategy: str, dtype: torch.dtype) -> None:
    """B02: logits and divergence in fp32, so that the gradient's error is that of rounding it."""
    for options in (Divergence(), Divergence(kind="reverse_kl"), Divergence(kind="jsd")):
        pair = make_pair(2, 64, 64, 512, dtype=dtype, teacher_width=64, bias=False, trainable=("hidden", "weight"))
        pair.hidden = (pair.case.hidden.detach() + 0.1 * torch.randn(pair.case.hidden.shape)).to(dtype)
        pair.weight = pair.case.weight.detach()
        exact, leaves = pair.unfused(options)
        plain, plain_leaves = pair.unfused(options, torch.float32)
        want = torch.autograd.grad(exact["distillation"].sum(), leaves)
        naive = torch.autograd.grad(plain["distillation"].sum(), plain_leaves)
        value, _ = fused_linear_distillation(
            *pair.case.head, **pair.teacher(), divergence=options, strategy=strategy, reduction="sum"
        )
        total = exact["distillation"].sum()
        assert abs(value.item() - total.item()) <= 1e-5 * total.item()
        for got, true, other in zip(torch.autograd.grad(value, pair.case.leaves), want, naive, strict=True):
            assert got.dtype == dtype
            check_close(got, true, other, dtype, terms=512)
            error = (got.double() - true).norm() / true.norm()
            assert error <= torch.finfo(dtype).eps + 1e-5


def test_logits_of_16_bits_are_asked_for_and_cost_the_gradient_its_accuracy() -> None:
    """B02's input: 8 % off, as documented, against a rounding."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(1, 64, 128, generator=generator), 3 * 128**-0.5 * torch.randn(4096, 128, generator=generator)
    other = (x.bfloat16() + 0.1 * torch.randn(x.shape, generator=generator)).bfloat16()

    def gradient(dtype: torch.dtype, **options: Any) -> Tensor:
        hidden, weight = x.bfloat16().to(dtype).requires_grad_(), w.bfloat16().to(dtype)
        teacher = {"teacher_hidden": other.to(dtype), "teacher_weight": weight}
        loss, _ = fused_linear_distillation(hidden, weight, torch.zeros(1, 64).long(), **teacher, **options)
        return torch.autograd.grad(loss, hidden)[0].double()

    exact = gradient(torch.float64)
    errors = [(gradient(torch.bfloat16, **o) - exact).norm() / exact.norm() for o in ({}, {"logits_dtype": "input"})]
    assert errors[0] < 2.0**-8
    assert 0.05 < errors[1] < 0.1


def test_gradcheck() -> None:
    fast = [(options, HIDDEN, True) for options in KINDS if options.kind != "akl"]  # whose weights are constants
    for options, trainable, fast_mode in ((JSD, BOTH, False), (Divergence(kind="cosine"), BOTH, False), *fast):
        pair = make_pair(2, 3, 4, 9, trainable=trainable, softcap=5.0)

        def call(*leaves: Tensor, pair: Pair = pair, options: Divergence = options) -> Tensor:
            tensors = {"hidden": pair.case.hidden, "weight": pair.case.weight, "bias": pair.case.bias}
            tensors.update(zip(pair.case.trained, leaves, strict=True))
            case = replace(pair.case, **tensors)
            return per_token(replace(pair, case=case), options, statistics=None)

        assert torch.autograd.gradcheck(call, pair.case.leaves, fast_mode=fast_mode)


def test_adaptive_kl_against_finite_differences_of_constant_weights() -> None:
    """Its gradient is that of `w forward_kl + (1 - w) reverse_kl`, `w` a constant of each token."""
    pair = make_pair(2, 3, 4, 9, trainable=BOTH, scored="all")

    def call(kind: str, *leaves: Tensor) -> Tensor:
        case = replace(pair.case, **dict(zip(pair.case.trained, leaves, strict=True)))
        return per_token(replace(pair, case=case), Divergence(kind=kind, temperature=1.5), statistics=None)

    forward, reverse, adaptive = (call(k, *pair.case.leaves).detach() for k in ("forward_kl", "reverse_kl", "akl"))
    share = (adaptive - reverse) / (forward - reverse)
    assert ((share > 0.01) & (share < 0.99)).any()

    def mixed(*leaves: Tensor) -> Tensor:
        return share * call("forward_kl", *leaves) + (1 - share) * call("reverse_kl", *leaves)

    assert torch.autograd.gradcheck(mixed, pair.case.leaves)
    sent = torch.linspace(-1, 2, 6, dtype=torch.float64).view(2, 3)
    want = torch.autograd.grad(mixed(*pair.case.leaves), pair.case.leaves, sent)
    torch.testing.assert_close(torch.autograd.grad(call("akl", *pair.case.leaves), pair.case.leaves, sent), want)


def test_equal_models() -> None:
    """B05: a pure divergence of a model from itself is 0, with no gradient to speak of."""
    case = make_case(2, 40, 16, 200, torch.float32, bias=False, trainable=("hidden", "weight"))
    for kind in DIVERGENCES:
        value, metrics = fused_linear_distillation(
            *case.head, teacher_hidden=case.hidden.detach(), teacher_weight=case.weight.detach(),
            divergence=Divergence(kind=kind),
        )  # fmt: skip
        assert value.item() == 0 == metrics["divergence"].item()
        for gradient in torch.autograd.grad(value, case.leaves):
            assert gradient.abs().max() <= (0 if kind == "akl" else 1e-7)


@pytest.mark.parametrize("strategy", ["auto", *STRATEGIES[:3]])
def test_nothing_scored_and_normalisers(strategy: str) -> None:
    """B04: over max(1, scored tokens of the whole batch)."""
    pair = make_pair(scored="nothing")
    value, metrics = fused_linear_distillation(*pair.case.head, **pair.teacher(), divergence=JSD, strategy=strategy)
    assert value.item() == 0 == metrics["divergence"].item()
    for gradient in torch.autograd.grad(value, pair.case.leaves):
        assert not gradient.any()
    pair = make_pair(1, 32, scored="all")
    pair.case.target[0, :16] = IGNORE
    exact, _ = pair.unfused(JSD)
    options = {"divergence": JSD, "strategy": strategy, **pair.teacher()}
    mean, _ = fused_linear_distillation(*pair.case.head, **options)
    torch.testing.assert_close(mean, exact["distillation"].sum().detach() / 16)
    for count in (64, torch.tensor(64)):
        value, _ = fused_linear_distillation(*pair.case.head, **options, num_items_in_batch=count)
        torch.testing.assert_close(value, mean / 4)


def test_flat_tokens_and_scored_tokens() -> None:
    pair = make_pair(1, 50)
    hidden, weight, target, bias = pair.case.head
    want, _ = fused_linear_distillation(*pair.case.head, **pair.teacher())
    teacher = pair.teacher() | {"teacher_hidden": pair.hidden[0]}
    weights = torch.ones(50, dtype=torch.float64)
    for flat in (target[0], ScoredTokens(target[0])):
        value, metrics = fused_linear_distillation(
            hidden[0], weight, flat, bias, **teacher, token_weights=weights, token_statistics=("entropy",)
        )
        torch.testing.assert_close(value, want)
        assert metrics["entropy"].shape == (50,)


@pytest.mark.parametrize("strategy", STRATEGIES[:3])
def test_what_each_head_does_to_its_logits_is_its_own(strategy: str) -> None:
    pair = make_pair(softcap=9.0, logit_scale=1.2)
    teacher = pair.teacher() | {"teacher_softcap": 4.0, "teacher_logit_scale": 0.7}
    assert pair.bias is not None
    logits = transformed(pair.hidden @ pair.weight.T + pair.bias, softcap=4.0, logit_scale=0.7)
    given = {"divergence": JSD, "strategy": strategy, **pair.case.options}
    values = [
        fused_linear_distillation(*pair.case.head, **form, **given)[0] for form in (teacher, {"teacher_logits": logits})
    ]
    torch.testing.assert_close(*values)
    torch.testing.assert_close(*(torch.autograd.grad(value, pair.case.leaves) for value in values))


def test_a_loss_of_ones_own() -> None:
    """`distillation` is a statistic like another: whatever is made of it gets its gradient from the same matrix."""
    pair = make_pair()
    exact, leaves = pair.unfused(JSD)
    want = torch.autograd.grad(exact["distillation"].square().sum(), leaves)
    got = per_token(pair, JSD, statistics=None)
    torch.testing.assert_close(torch.autograd.grad(got.square().sum(), pair.case.leaves), want)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Shapes `[M, K] @ [K, N]` of every product."""
    seen: list[tuple[int, int, int]] = []
    original = walk.matmul

    def counted(a: Tensor, b: Tensor, **options: Any) -> Tensor:
        seen.append((a.shape[0], a.shape[1], b.shape[1]))
        return original(a, b, **options)

    for module in (walk, deferred, recompute, hidden_gradient, weight_gradient):
        monkeypatch.setattr(module, "matmul", counted)
    return seen


@pytest.mark.parametrize(
    ("strategy", "trainable", "student", "teacher"),
    [
        ("auto", BOTH[:2], 3, 1), ("immediate", BOTH[:2], 3, 1), ("cached", BOTH[:2], 3, 1),
        ("recompute", BOTH[:2], 4, 2), ("frozen", HIDDEN, 2, 1), ("auto", HIDDEN, 2, 1), ("auto", (), 1, 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["jsd", "akl"])
def test_products(
    kind: str, strategy: str, trainable: tuple[str, ...], student: int, teacher: int,
    products: list[tuple[int, int, int]],
) -> None:  # fmt: skip
    """The teacher's one and the student's three, the label's cross entropy among them; B47, B48: two with a frozen head, one without gradients."""
    pair = make_pair(4, 70, bias=False, trainable=trainable)
    n, width, other, vocab = int(pair.case.mask.sum()), 8, 12, 300
    value, _ = fused_linear_distillation(
        *pair.case.head, **pair.teacher(), strategy=strategy, divergence=Divergence(kind=kind, hard_weight=0.5)
    )
    if trainable:
        value.backward()
    work = sum(m * k * p for m, k, p in products if other in (k, p))
    assert work / (n * other * vocab) == pytest.approx(teacher)
    assert (sum(m * k * p for m, k, p in products) - work) / (n * width * vocab) == pytest.approx(student)


def test_no_grad_computes_no_gradient(products: list[tuple[int, int, int]]) -> None:
    pair = make_pair(bias=False)
    with torch.no_grad():
        per_token(pair, JSD)
    assert {k for _, k, _ in products} == {8, 12}


@pytest.mark.parametrize("strategy", ["cached", "recompute"])
def test_what_is_saved_of_the_teacher(strategy: str) -> None:
    pair = make_pair()
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        per_token(pair, JSD, strategy=strategy)
    assert (pair.weight.data_ptr() in saved) == (strategy == "recompute")


def test_compiled() -> None:
    pair = make_pair(2, 6, 8, 40)

    def function(*leaves: Tensor) -> Tensor:
        case = replace(pair.case, **dict(zip(pair.case.trained, leaves, strict=True)))
        return per_token(replace(pair, case=case), JSD, statistics=None, strategy="recompute")

    torch._dynamo.reset()
    got = torch.compile(function, fullgraph=True, backend="aot_eager")(*pair.case.leaves)
    want = function(*pair.case.leaves)
    torch.testing.assert_close(got, want)
    sent = torch.randn_like(want)
    torch.testing.assert_close(*(torch.autograd.grad(value, pair.case.leaves, sent) for value in (got, want)))


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_parity_with_trl(beta: float, temperature: float) -> None:
    module = pytest.importorskip("trl.kernels.chunked_divergence")
    pair = make_pair(1, 40, dtype=torch.float32, scored="all", logit_scale=1.2, softcap=9.0)
    hidden, weight, _, bias = pair.case.head
    trl, entropy = module.ChunkedDivergenceFunction.apply(
        hidden[0], weight, bias, pair.hidden[0], pair.weight, pair.bias, beta, temperature, 1.2, 9.0, 1.0, 9.0
    )
    got = per_token(pair, Divergence(kind="jsd", beta=beta, temperature=temperature))
    torch.testing.assert_close(got["distillation"][0], trl, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(got["entropy"][0], entropy, rtol=2e-5, atol=2e-5)
    sent = torch.linspace(-1, 1, 40)
    theirs = torch.autograd.grad(trl, pair.case.leaves, sent)
    torch.testing.assert_close(
        torch.autograd.grad(got["distillation"][0], pair.case.leaves, sent), theirs, rtol=1e-3, atol=2e-5
    )


NO_HEAD: dict[str, Any] = {"teacher_hidden": None, "teacher_weight": None, "teacher_bias": None}
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"teacher_weight": None},
        ValueError,
        "teacher_weight: got None beside teacher_hidden and teacher_bias, expected a teacher: teacher_hidden with",
    ),
    (
        {"teacher_hidden": None, "teacher_weight": None, "teacher_bias": None},
        ValueError,
        "teacher_hidden: got None, expected a teacher: teacher_hidden with teacher_weight, or teacher_logits, or "
        "teacher_probs",
    ),
    (
        {"teacher_logits": torch.zeros(2, 3, 9)},
        ValueError,
        "teacher_hidden: got a tensor, expected None beside teacher_logits",
    ),
    ({"teacher_hidden": torch.zeros(2, 3, 4)}, ValueError, "teacher_hidden: got shape (2, 3, 4), expected (2, 3, 12)"),
    ({"teacher_bias": torch.zeros(3)}, ValueError, "teacher_bias: got shape (3,), expected (9,)"),
    (
        {"teacher_weight": torch.zeros(9, 12).long()},
        TypeError,
        "teacher_weight: got dtype torch.int64, expected one of",
    ),
    ({"teacher_weight": "w"}, TypeError, "teacher_weight: got str, expected a torch.Tensor"),
    (
        {"student_hidden": torch.zeros(2, 3, 7)},
        ValueError,
        "student_hidden: got shape (2, 3, 7), expected last dimension 8 as in student_weight",
    ),
    ({"student_weight": None}, TypeError, "student_weight: got NoneType, expected a torch.Tensor"),
    ({"student_bias": torch.zeros(3)}, ValueError, "student_bias: got shape (3,), expected (9,)"),
    ({"target": None}, TypeError, "target: got NoneType, expected a torch.Tensor or ScoredTokens"),
    (
        NO_HEAD | {"teacher_probs": torch.zeros(3, 9)},
        ValueError,
        "teacher_probs: got shape (3, 9), expected (2, 3, 'V')",
    ),
    (
        NO_HEAD | {"teacher_probs": torch.zeros(2, 3, 9), "divergence": Divergence(kind="mse")},
        ValueError,
        "teacher_probs: got a tensor with kind 'mse'",
    ),
    (
        NO_HEAD | {"teacher_probs": torch.zeros(2, 3, 9), "teacher_logits": torch.zeros(2, 3, 9)},
        ValueError,
        "teacher_probs: got a tensor beside teacher_logits, expected one of them",
    ),
    ({"teacher_softcap": -1.0}, ValueError, "teacher_softcap: got -1.0, expected a finite number > 0"),
    ({"teacher_logit_scale": "x"}, TypeError, "teacher_logit_scale: got 'x', expected a number"),
    ({"divergence": "jsd"}, TypeError, "divergence: got str, expected a Divergence"),
    ({"teacher_hidden": [1]}, TypeError, "teacher_hidden: got list, expected a torch.Tensor"),
    (NO_HEAD | {"teacher_logits": "z"}, TypeError, "teacher_logits: got str, expected a torch.Tensor"),
    (NO_HEAD | {"teacher_probs": [[0.5]]}, TypeError, "teacher_probs: got list, expected a torch.Tensor"),
    ({"target": torch.zeros(2, 3, device="meta").long()}, ValueError, "target: got a tensor on meta, which holds no"),
    (
        NO_HEAD | {"teacher_logits": torch.zeros(2, 3, 1)},
        ValueError,
        "vocabulary: got 'shared' for 9 student and 1 teacher columns, of which one is shared; expected at least 2",
    ),
    ({"statistics": "divergence"}, TypeError, "statistics: got 'divergence', expected a non-empty tuple of names"),
    ({"statistics": 5}, TypeError, "statistics: got 5, expected a non-empty tuple of names"),
    ({"statistics": ("lse",)}, ValueError, "statistics: got unknown ['lse'], expected names out of"),
    ({"strategy": "immediate"}, ValueError, "strategy: got 'immediate', which is for fused_linear_distillation"),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSED, ids=[message[:60] for *_, message in REFUSED])
def test_refusals(change: dict[str, Any], error: type[Exception], message: str) -> None:
    pair = make_pair(2, 3, 8, 9)
    student = dict(zip(("student_hidden", "student_weight", "target", "student_bias"), pair.case.head, strict=True))
    per_token_alone = ("statistics", "strategy")
    for call in (linear_divergence, fused_linear_distillation)[: 1 if set(change) & set(per_token_alone) else 2]:
        with pytest.raises(error) as raised:
            call(**(student | pair.teacher() | change))
        assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kind": "kl"}, ValueError, "kind: got 'kl', expected one of forward_kl,"),
        ({"kind": "jsd", "beta": 1.5}, ValueError, "beta: got 1.5, expected a finite number >= 0 and <= 1"),
        ({"beta": 0.3}, ValueError, "beta: got 0.3 with kind 'forward_kl', which does not read it"),
        ({"kind": "skewed_forward_kl", "skew": 1.0}, ValueError, "skew: got 1.0, expected 0 <= skew < 1"),
        ({"kind": "akl", "mu": 1.5}, ValueError, "mu: got 1.5, expected a finite number >= 0 and <= 1"),
        ({"mu": 0.3}, ValueError, "mu: got 0.3 with kind 'forward_kl', which does not read it"),
        ({"kind": "alpha", "alpha": 1.0}, ValueError, "alpha: got 1.0, whose limit is forward_kl"),
        ({"temperature": 0.0}, ValueError, "temperature: got 0.0, expected a finite number > 0"),
        ({"temperature": "hot"}, TypeError, "temperature: got 'hot' of type str, expected a Python number"),
        ({"hard_weight": -1.0}, ValueError, "hard_weight: got -1.0, expected a finite number >= 0"),
        (
            {"soft_weight": 0, "hard_weight": 0.0},
            ValueError,
            "soft_weight, hard_weight: got 0 for all, expected one > 0",
        ),
        ({"vocabulary": "union"}, ValueError, "vocabulary: got 'union', expected one of shared, padded"),
        (
            {"scale_by_squared_temperature": 1},
            TypeError,
            "scale_by_squared_temperature: got 1 of type int, expected True or False",
        ),
        ({"temperature": 1e-40}, ValueError, "temperature: got 1e-40, expected 1.2e-38 to 3.4e+38, so that it and its"),
        ({"teacher_temperature": 1e39}, ValueError, "teacher_temperature: got 1e+39, expected 1.2e-38 to 3.4e+38"),
        ({"temperature": 1e20, "scale_by_squared_temperature": True}, ValueError, "temperature, squared: got 1e+40"),
        ({"kind": "mse", "vocabulary": "padded"}, ValueError, "vocabulary: got 'padded' with kind 'mse', expected"),
        ({"kind": "cosine", "vocabulary": "padded"}, ValueError, "vocabulary: got 'padded' with kind 'cosine'"),
        ({"kind": "cosine", "temperature": 2}, ValueError, "temperature: got 2 with kind 'cosine', which has none"),
        ({"kind": "cosine", "teacher_temperature": 2}, ValueError, "teacher_temperature: got 2 with kind 'cosine'"),
        (
            {"kind": "cosine", "scale_by_squared_temperature": True},
            ValueError,
            "scale_by_squared_temperature: got True",
        ),
    ],
    ids=str,
)
def test_refused_divergences(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        Divergence(**options)
    assert str(raised.value).startswith(message)


def test_statistics_of_a_teacher_need_one() -> None:
    case = make_case(2, 3, 4, 9)
    with pytest.raises(ValueError, match=r"statistics: got \['distillation'\] without a teacher"):
        fused_linear_loss(ToyLoss("token", ("distillation",)), *case.head)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("scored", ["all", "prompt"])
@pytest.mark.parametrize("form", ["head", "logits"])
def test_the_plan_is_kept(form: str, scored: str, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both logits buffers are in it: the peak beyond inputs and returned gradients is the plan's, and not far below."""
    monkeypatch.setattr(tile_statistics, "TWIN_ELEMENTS", 1 << 13)
    plans: list[Plan] = []
    make_plan = calls.make_plan
    monkeypatch.setattr(calls, "make_plan", lambda *a, **k: plans.append(make_plan(*a, **k)) or plans[-1])
    pair = make_pair(
        2, 400, 64, 4096, dtype=torch.float32, teacher_width=96, bias=False, scored=scored,
        trainable=HIDDEN if strategy == "frozen" else ("hidden", "weight"),
    )  # fmt: skip
    teacher = pair.teacher(form)
    existing = [*pair.case.head[:3], *(t for t in teacher.values() if isinstance(t, Tensor))]
    with Allocations(*existing) as seen:
        value, _ = fused_linear_distillation(*pair.case.head, **teacher, divergence=JSD, strategy=strategy)
        torch.autograd.grad(value, pair.case.leaves)
    workspace = seen.peak - sum(leaf.nbytes for leaf in pair.case.leaves)
    assert workspace <= plans[0].workspace + per_token_bytes(pair.case) + 60 * 8 * (1 << 13)
    assert workspace >= 0.8 * plans[0].workspace
    if form == "head" and scored == "all":
        found = plan(
            tokens=800, hidden_size=64, vocab_size=4096, teacher_hidden_size=96, dtype=torch.float32, scored=[400, 400],
            trainable_head=strategy != "frozen", strategy=strategy,
        )  # fmt: skip
        assert found.workspace == plans[0].workspace
        assert "two heads" in found.explain()


def test_labels_alone_do_not_ask_for_columns_that_a_teacher_shares() -> None:
    hidden, weight, target = torch.randn(5, 4), torch.randn(9, 4), torch.arange(5)
    labels = Divergence(soft_weight=0.0, hard_weight=1.0)
    seen = linear_divergence(hidden, weight, target, teacher_logits=torch.randn(5, 1), divergence=labels)
    torch.testing.assert_close(seen, -linear_logprobs(hidden, weight, target))
