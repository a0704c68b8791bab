"""The distillation modules: liger-kernel's interface, its values in fp32, and where it is wrong."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_losses import functional, modules
from liger_losses.chunked import Divergence, ScoredTokens
from liger_losses.modules import (
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearJSD,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKLDivLoss,
)

from .distillation_oracle import unfused_distillation

N, H, HT, V = 40, 8, 12, 100
NAMES = ("student_input", "student_weight", "teacher_input", "teacher_weight")
TWINS = {
    "LigerFusedLinearJSDLoss": "liger_fused_linear_jsd_loss",
    "LigerFusedLinearCosineSimilarityLoss": "liger_fused_linear_cosine",
    "LigerFusedLinearJSD": "liger_fused_linear_jsd",
    "LigerFusedLinearKLDivLoss": "liger_fused_linear_kl_div",
}


class Batch:
    """Both heads' tensors; the first tokens are ignored."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, teacher_vocab: int = V) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.leaves = [normal(N, H).requires_grad_(), normal(V, H).requires_grad_(), normal(V).requires_grad_()]
        self.teacher = [normal(N, HT), normal(teacher_vocab, HT), normal(teacher_vocab)]
        self.labels = torch.randint(0, V, (N,), generator=generator)
        self.labels[:7] = -100

    def soft_and_hard(self, module: Any) -> Any:
        (x, w, b), (tx, tw, tb) = self.leaves, self.teacher
        return module(x, w, tx, tw, self.labels, b, tb)

    def gradients(self, loss: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, self.leaves)

    def mean(self, name: str, options: Divergence) -> Tensor:
        """Of the formula, over the scored tokens."""
        (x, w, b), (tx, tw, tb), keep = self.leaves, self.teacher, self.labels != -100
        numbers = unfused_distillation((x @ w.T + b)[keep], (tx @ tw.T + tb)[keep], self.labels[keep], options)
        return numbers[name].mean()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"beta": 0.3, "temperature": 2.0, "weight_hard_loss": 0.2},
    {"beta": 0.0, "chunk_size": 16},
    {"beta": 1.0, "weight_hard_loss": 0.0, "weight_soft_loss": 1.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["LigerFusedLinearJSDLoss", "LigerFusedLinearCosineSimilarityLoss"])
def test_soft_and_hard_against_liger_kernel(name: str, options: dict[str, Any]) -> None:
    """X12: neither mixes the temperature into the cross entropy, nor makes up for it by its square."""
    peer = pytest.importorskip("liger_kernel.chunked_loss")
    batch, found = Batch(), []
    for home in (peer, modules):
        values = batch.soft_and_hard(getattr(home, name)(**options, compiled=False, return_soft_hard_loss=True))
        found.append((*(value.detach() for value in values), *batch.gradients(values[0])))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)
    loss = batch.soft_and_hard(getattr(modules, name)(**options))
    assert loss.item() == found[1][0].item()
    twin = getattr(functional, TWINS[name])
    (x, w, b), (tx, tw, tb) = batch.leaves, batch.teacher
    assert twin(x, w, tx, tw, batch.labels, b, tb, **options).item() == loss.item()


@pytest.mark.parametrize("name", sorted(TWINS))
def test_the_interface_is_liger_kernels(name: str) -> None:
    transformers = pytest.importorskip("liger_kernel.transformers")
    from liger_kernel import chunked_loss
    from liger_kernel.transformers.fused_linear_kl_div import LigerFusedLinearKLDivLoss as KLDiv

    peer = getattr(chunked_loss, name, None) or getattr(transformers, name, None) or KLDiv
    ours = getattr(modules, name)
    make, theirs = (inspect.signature(c.__init__).parameters for c in (ours, peer))
    assert list(make)[: len(theirs)] == list(theirs)
    assert [p.default for p in list(make.values())[: len(theirs)]] == [p.default for p in theirs.values()]
    assert all(p.kind is p.KEYWORD_ONLY for p in list(make.values())[len(theirs) :])
    call, theirs = (inspect.signature(c.forward).parameters for c in (ours, peer))
    assert list(call)[: len(theirs)] == list(theirs)


@pytest.mark.parametrize(
    "options", [{}, {"jsd_beta": 0.3, "temperature": 2.0}, {"jsd_beta": 0.0}, {"jsd_beta": 1.0}], ids=str
)
def test_jsd_alone(options: dict[str, Any]) -> None:
    batch = Batch(torch.float64)
    (x, w, b), (tx, tw, tb) = batch.leaves, batch.teacher
    divergence = Divergence(kind="jsd", beta=options.get("jsd_beta", 0.5), temperature=options.get("temperature", 1.0))
    want = batch.mean("divergence", divergence)
    got = LigerFusedLinearJSD(**options)(x, w, tx, tw, ScoredTokens(batch.labels), b, tb)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(batch.gradients(got), batch.gradients(want))
    batch.labels[:7] = 0  # nothing is ignored: as without labels
    got = functional.liger_fused_linear_jsd(x, w, tx, tw, None, student_bias=b, teacher_bias=tb, **options)
    torch.testing.assert_close(got, batch.mean("divergence", divergence))


@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_kl_div_of_probabilities(temperature: float, reduction: str) -> None:
    """torch's own KL divergence, with the temperature on the student's side alone, as in liger-kernel."""
    batch = Batch(torch.float64)
    x, w, _ = batch.leaves
    target = torch.softmax(batch.teacher[0] @ batch.teacher[1].T, -1)
    target[:, 3] = 0
    target = target / target.sum(-1, keepdim=True)
    keep = batch.labels != -100
    logp = (x @ w.T / temperature).log_softmax(-1)[keep]
    want = torch.nn.functional.kl_div(logp, target[keep], reduction=reduction)
    got = LigerFusedLinearKLDivLoss(reduction, temperature=temperature)(x, w, target, batch.labels)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, (x, w)), torch.autograd.grad(want, (x, w)))
    assert functional.liger_fused_linear_kl_div(x, w, target, batch.labels, reduction, -100, temperature) == got


def test_nothing_scored_and_normalisers() -> None:
    batch = Batch(torch.float64)
    whole = batch.soft_and_hard(LigerFusedLinearJSDLoss())
    (x, w, b), (tx, tw, tb) = batch.leaves, batch.teacher
    half = LigerFusedLinearJSDLoss()(x, w, tx, tw, batch.labels, b, tb, num_items_in_batch=66)
    torch.testing.assert_close(half, whole / 2)
    weights = torch.full((N,), 2.0, dtype=torch.float64)
    torch.testing.assert_close(
        LigerFusedLinearJSDLoss()(x, w, tx, tw, batch.labels, b, tb, token_weights=weights), 2 * whole
    )
    batch.labels[:] = -100
    loss = batch.soft_and_hard(LigerFusedLinearJSDLoss())
    assert loss.item() == 0
    assert not any(gradient.any() for gradient in batch.gradients(loss))


def test_rows_of_tokens() -> None:
    batch = Batch()
    (x, w, b), (tx, tw, tb) = batch.leaves, batch.teacher
    flat = batch.soft_and_hard(LigerFusedLinearJSDLoss())
    rows = LigerFusedLinearJSDLoss()(x.view(2, 20, H), w, tx.view(2, 20, HT), tw, batch.labels.view(2, 20), b, tb)
    torch.testing.assert_close(rows, flat)


def test_where_liger_kernel_is_wrong() -> None:
    """Its loss of equal models is not 0, a larger teacher's vocabulary is compared with logits of 0, bf16 is 8 % off."""
    peer = pytest.importorskip("liger_kernel.chunked_loss").LigerFusedLinearJSDLoss
    pure: dict[str, Any] = {"weight_hard_loss": 0.0, "weight_soft_loss": 1.0, "compiled": False}

    # B05, and a divergence below 0.
    batch = Batch()
    batch.teacher = [leaf.detach() for leaf in batch.leaves]
    assert batch.soft_and_hard(LigerFusedLinearJSDLoss(**pure)).item() == 0
    assert batch.soft_and_hard(peer(**pure)).item() != 0

    # Columns that only the teacher has: padding with a logit of 0 gives the student probability there.
    batch = Batch(teacher_vocab=V + 10)
    ours = batch.soft_and_hard(LigerFusedLinearJSDLoss(**pure))
    torch.testing.assert_close(ours, batch.mean("divergence", Divergence(kind="jsd")))
    assert abs(batch.soft_and_hard(peer(**pure)) - ours) > 1e-3 * ours
    cosine = pytest.importorskip("liger_kernel.chunked_loss").LigerFusedLinearCosineSimilarityLoss
    ours = batch.soft_and_hard(LigerFusedLinearCosineSimilarityLoss(**pure, beta=1.0))
    torch.testing.assert_close(ours, batch.mean("divergence", Divergence(kind="cosine")))
    assert abs(batch.soft_and_hard(cosine(**pure, beta=1.0)) - ours) > 1e-3 * ours

    # B02.
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(64, 128, generator=generator), 3 * 128**-0.5 * torch.randn(4096, 128, generator=generator))
    tx = (x.bfloat16() + 0.1 * torch.randn(64, 128, generator=generator)).bfloat16()
    labels = torch.zeros(64, dtype=torch.int64)

    def gradients(module: Any, dtype: torch.dtype) -> list[Tensor]:
        a, b = (t.bfloat16().to(dtype).requires_grad_() for t in (x, w))
        loss = module(a, b, tx.to(dtype), b.detach(), labels)
        return [g.double() for g in torch.autograd.grad(loss, (a, b))]

    for beta in (0.0, 0.5, 1.0):
        exact = gradients(LigerFusedLinearJSD(beta), torch.float64)
        found = gradients(LigerFusedLinearJSD(beta), torch.bfloat16)
        theirs = gradients(peer(beta=beta, **pure), torch.bfloat16)
        for true, mine, other in zip(exact, found, theirs, strict=True):
            # The entries of the logits' gradient are rounded to bf16 once, the result once more.
            assert (mine - true).norm() <= 2.0**-8 * true.norm()
            assert (other - true).norm() > 0.05 * true.norm()


REFUSED: list[tuple[type[Any], dict[str, Any], type[Exception], str]] = [
    (LigerFusedLinearJSDLoss, {"beta": 2.0}, ValueError, "beta: got 2.0, expected a finite number >= 0 and <= 1"),
    (
        LigerFusedLinearJSDLoss,
        {"weight_hard_loss": -1.0},
        ValueError,
        "weight_hard_loss: got -1.0, expected a finite number >= 0",
    ),
    (LigerFusedLinearJSDLoss, {"temperature": 0.0}, ValueError, "temperature: got 0.0, expected a finite number > 0"),
    (
        LigerFusedLinearJSD,
        {"teacher_softcap": -1.0},
        ValueError,
        "teacher_softcap: got -1.0, expected a finite number > 0",
    ),
    (LigerFusedLinearJSDLoss, {"chunk_size": 0}, ValueError, "chunk_size: got 0, expected >= 1"),
    (
        LigerFusedLinearJSDLoss,
        {"strategy": "cached", "chunk_size": 5},
        ValueError,
        "chunk_size: got 5 with strategy='cached', whose tiles hold tokens; expected 1024",
    ),
    (LigerFusedLinearJSD, {"jsd_beta": 2.0}, ValueError, "jsd_beta: got 2.0, expected a finite number >= 0 and <= 1"),
    (LigerFusedLinearJSDLoss, {"temperature": 1e-40}, ValueError, "temperature: got 1e-40, expected 1.2e-38 to"),
    (LigerFusedLinearCosineSimilarityLoss, {"temperature": 1e-40}, ValueError, "temperature: got 1e-40, expected"),
    (
        LigerFusedLinearCosineSimilarityLoss,
        {"vocabulary": "padded"},
        ValueError,
        "vocabulary: got 'padded' with kind 'cosine', expected 'shared'",
    ),
    (LigerFusedLinearJSDLoss, {"compiled": 1}, TypeError, "compiled: got 1"),
    (LigerFusedLinearJSDLoss, {"vocabulary": "both"}, ValueError, "vocabulary: got 'both', expected one of"),
    *(
        (
            module,
            {"weight_hard_loss": 0.0, "weight_soft_loss": 0},
            ValueError,
            "weight_hard_loss, weight_soft_loss: got 0 for all, expected one > 0",
        )
        for module in (LigerFusedLinearJSDLoss, LigerFusedLinearCosineSimilarityLoss)
    ),
    (LigerFusedLinearCosineSimilarityLoss, {"beta": -0.5}, ValueError, "beta: got -0.5, expected a finite number >= 0"),
    (
        LigerFusedLinearJSD,
        {"accum_dtype": torch.bfloat16},
        ValueError,
        "accum_dtype: got torch.bfloat16, expected None or torch.float32",
    ),
    (LigerFusedLinearKLDivLoss, {"reduction": "none"}, ValueError, "reduction: got 'none', expected one of"),
    (LigerFusedLinearKLDivLoss, {"eps": 0.1}, ValueError, "eps: got 0.1, expected 0 <= eps <= 1e-6"),
    (LigerFusedLinearKLDivLoss, {"strategy": "fast"}, ValueError, "strategy: got 'fast'"),
]


@pytest.mark.parametrize(("module", "options", "error", "message"), REFUSED, ids=[m for *_, m in REFUSED])
def test_refused_options(module: type[Any], options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        module(**options)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"student_input": torch.zeros(N, 3)}, ValueError, "student_input: got shape (40, 3), expected last dimension 8"),
        ({"teacher_input": torch.zeros(N, 3)}, ValueError, "teacher_input: got shape (40, 3), expected (40, 12)"),
        ({"teacher_weight": torch.zeros(3)}, ValueError, "teacher_weight: got shape (3,), expected [V, H]"),
        ({"true_labels": torch.zeros(3).long()}, ValueError, "true_labels: got shape (3,), expected (40,)"),
        ({"true_labels": torch.zeros(N)}, TypeError, "true_labels: got dtype torch.float32, expected an integer dtype"),
        ({"true_labels": None}, TypeError, "true_labels: got NoneType, expected a torch.Tensor"),
        ({"true_labels": torch.full((N,), V)}, ValueError, "true_labels: got 100 at row 0, position 0"),
        ({"token_weights": torch.ones(3)}, ValueError, "token_weights: got shape [3], expected [40]"),
        ({"num_items_in_batch": 2.5}, TypeError, "num_items_in_batch: got 2.5 of type float, expected an int"),
        ({"teacher_input": None}, TypeError, "teacher_input: got NoneType, expected a torch.Tensor"),
        ({"teacher_weight": None}, TypeError, "teacher_weight: got NoneType, expected a torch.Tensor"),
    ],
    ids=str,
)  # fmt: skip
def test_refused_tensors(change: dict[str, Any], error: type[Exception], message: str) -> None:
    batch = Batch()
    given = dict(zip(NAMES, (*batch.leaves[:2], *batch.teacher[:2]), strict=True)) | {"true_labels": batch.labels}
    with pytest.raises(error) as raised:
        LigerFusedLinearJSDLoss()(**(given | change))
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("module", "change", "error", "message"),
    [
        (LigerFusedLinearJSD, {"teacher_input": None}, TypeError, "teacher_input: got NoneType, expected a torch.Tensor"),
        (LigerFusedLinearKLDivLoss, {"target": None}, TypeError, "target: got NoneType, expected a torch.Tensor"),
        (LigerFusedLinearKLDivLoss, {"target": [1]}, TypeError, "target: got list, expected a torch.Tensor"),
        (LigerFusedLinearKLDivLoss, {"target": torch.ones(N, V - 1)}, ValueError,
         "target: got shape (40, 99), expected 100 columns, the student's vocabulary"),
        (LigerFusedLinearKLDivLoss, {"target": torch.ones(3, V)}, ValueError, "target: got shape (3, 100), expected (40,"),
    ],
    ids=str,
)  # fmt: skip
def test_refused_teachers(module: type[Any], change: dict[str, Any], error: type[Exception], message: str) -> None:
    batch = Batch()
    given: dict[str, Any] = {"student_input": batch.leaves[0], "student_weight": batch.leaves[1]}
    if module is LigerFusedLinearJSD:
        given |= {"teacher_input": batch.teacher[0], "teacher_weight": batch.teacher[1]}
    with pytest.raises(error) as raised:
        module()(**(given | change))
    assert str(raised.value).startswith(message)


def test_soft_and_hard_are_terms_of_the_loss() -> None:
    """Under token weights and a step's count as well: what is weighted by the soft and the hard weight."""
    batch = Batch(torch.float64)
    (x, w, b), (tx, tw, tb) = batch.leaves, batch.teacher
    for cls in (LigerFusedLinearJSDLoss, LigerFusedLinearCosineSimilarityLoss):
        module = cls(weight_hard_loss=0.2, weight_soft_loss=0.7, return_soft_hard_loss=True)
        loss, soft, hard = module(
            x, w, tx, tw, batch.labels, b, tb, num_items_in_batch=50,
            token_weights=torch.linspace(0.5, 3, N, dtype=torch.float64),
        )  # fmt: skip
        torch.testing.assert_close(loss, 0.7 * soft + 0.2 * hard)
        assert not soft.requires_grad


def test_cosine_takes_a_temperature_that_changes_nothing() -> None:
    batch = Batch(torch.float64)
    plain, tempered = (
        batch.soft_and_hard(LigerFusedLinearCosineSimilarityLoss(temperature=t, return_soft_hard_loss=True))
        for t in (1.0, 2.0)
    )
    torch.testing.assert_close(plain, tempered, rtol=0, atol=0)


def test_a_target_is_normalised_and_may_be_weighted() -> None:
    """Where rows do not sum to 1, torch's and liger-kernel's number is another."""
    batch = Batch(torch.float64)
    x, w, _ = batch.leaves
    target = torch.softmax(batch.teacher[0] @ batch.teacher[1].T, -1)
    module, keep = LigerFusedLinearKLDivLoss(), batch.labels != -100
    loss = module(x, w, target, batch.labels)
    torch.testing.assert_close(module(x, w, 3 * target, batch.labels), loss)
    logp = (x @ w.T).log_softmax(-1)[keep]
    assert abs(torch.nn.functional.kl_div(logp, 3 * target[keep], reduction="batchmean") - loss) > 0.1
    twice = module(x, w, target, batch.labels, token_weights=torch.full((N,), 2.0, dtype=torch.float64))
    torch.testing.assert_close(twice, 2 * loss)
    torch.testing.assert_close(module(x, w, target, batch.labels, num_items_in_batch=66), loss / 2)
