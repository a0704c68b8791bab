"""Cross-entropy modules against torch in fp64, over a head and over logits, and against liger-kernel."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import liger_losses
from liger_losses import (
    LigerCrossEntropyLoss,
    LigerFusedLinearBCELoss,
    LigerFusedLinearCrossEntropyLoss,
    functional,
    fused_linear_loss,
)
from liger_losses.losses import CrossEntropyLoss, TokenSelection
from liger_losses.modules import CrossEntropyOutput

IGNORE, ROWS, WIDTH, VOCAB = -100, 13, 6, 19
BUDGETS = [("auto", None), ("immediate", 200_000), ("cached", None), ("recompute", None)]


def tensors(dtype: torch.dtype = torch.float64, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """weight, hidden, target, bias."""
    generator = torch.Generator().manual_seed(rows)
    hidden, weight = (torch.randn(n, WIDTH, generator=generator, dtype=torch.float64) for n in (rows, VOCAB))
    bias = torch.randn(VOCAB, generator=generator, dtype=torch.float64)
    target = torch.randint(0, VOCAB, (rows,), generator=generator)
    target[1::3] = IGNORE
    return *(t.to(dtype).requires_grad_() for t in (weight, hidden)), target, bias.to(dtype).requires_grad_()


CLASS_WEIGHTS = torch.linspace(0.0, 2.0, VOCAB, dtype=torch.float64)


def reference(logits: Tensor, target: Tensor, options: dict[str, Any], weights: Tensor | None = None) -> Tensor:
    """Every option in plain torch on whole logits."""
    o = {"reduction": "mean", "label_smoothing": 0.0, "lse_square_scale": 0.0, "use_token_scaling": False} | options
    if o.get("softcap"):
        logits = o["softcap"] * torch.tanh(logits / o["softcap"])
    mask = target != IGNORE
    classes = o.get("ce_weight")
    nll = F.cross_entropy(
        logits, target, weight=classes, ignore_index=IGNORE, reduction="none", label_smoothing=o["label_smoothing"]
    )
    z_loss = o["lse_square_scale"] * logits.logsumexp(-1) ** 2 * mask
    factor = torch.ones_like(nll) if weights is None else weights
    if o["use_token_scaling"]:
        factor = factor * logits.softmax(-1).gather(-1, target.clamp_min(0).unsqueeze(-1)).squeeze(-1).detach()
    nll, z_loss = nll * factor, z_loss * factor
    if o["reduction"] == "none":
        return nll + z_loss
    if o["reduction"] == "sum":
        return (nll + z_loss).sum()
    count = mask.sum().clamp_min(1)
    return (
        nll.sum() / (count if classes is None else (classes[target.clamp_min(0)] * mask).sum()) + z_loss.sum() / count
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"lse_square_scale": 1e-2},
    "classes": {"ce_weight": CLASS_WEIGHTS},
    "classes and smoothing": {"ce_weight": CLASS_WEIGHTS, "label_smoothing": 0.2},
    "token scaling": {"use_token_scaling": True},
    "everything": {
        "ce_weight": CLASS_WEIGHTS, "label_smoothing": 0.2, "lse_square_scale": 1e-2, "softcap": 3.0,
        "use_token_scaling": True,
    },
}  # fmt: skip


def strategies_for(options: dict[str, Any]) -> list[tuple[str, int | None]]:
    deferred_only = options.get("reduction") == "none"
    several = "label_smoothing" in options or "lse_square_scale" in options
    return [
        (s, b)
        for s, b in BUDGETS
        if not (s == "immediate" and deferred_only) and not (s == "cached" and several)
    ]  # fmt: skip


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", OPTIONS)
def test_is_torch(name: str, reduction: str) -> None:
    options = {**OPTIONS[name], "reduction": reduction}
    weight, hidden, target, bias = tensors()
    leaves = (weight, hidden, bias)
    token_weights = torch.linspace(0.5, 1.5, ROWS, dtype=torch.float64)
    logits = hidden @ weight.T + bias
    want = reference(logits, target, options, token_weights)
    sent = torch.linspace(-1, 2, want.numel(), dtype=torch.float64).reshape(
        want.shape
    )  # B23: different for every token
    gradients = torch.autograd.grad(want, leaves, sent, retain_graph=True)
    for strategy, budget in strategies_for(options):
        module = LigerFusedLinearCrossEntropyLoss(**options, strategy=strategy, memory_budget=budget)
        got = module(weight, hidden, target, bias, token_weights=token_weights)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(torch.autograd.grad(got, leaves, sent), gradients)

    given = {("weight" if n == "ce_weight" else n): v for n, v in options.items()}
    leaf = logits.detach().requires_grad_()
    before = leaf.detach().clone()
    got = LigerCrossEntropyLoss(**given)(leaf, target, token_weights=token_weights)
    torch.testing.assert_close(got, want)
    other = logits.detach().requires_grad_()
    reference(other, target, options, token_weights).backward(sent)
    got.backward(sent)
    torch.testing.assert_close(leaf.grad, other.grad)
    assert torch.equal(leaf, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_low_precision(name: str, dtype: torch.dtype) -> None:
    """As close as the plain computation on the same rounded tensors, or closer."""
    weight, hidden, target, bias = tensors(dtype)
    module = LigerFusedLinearCrossEntropyLoss(**OPTIONS[name])
    got = module(weight, hidden, target, bias)
    wide = [t.detach().double().requires_grad_() for t in (weight, hidden, bias)]
    exact = reference(wide[1] @ wide[0].T + wide[2], target, OPTIONS[name])
    narrow = {n: v.float() if isinstance(v, Tensor) else v for n, v in OPTIONS[name].items()}
    plain = reference((hidden @ weight.T + bias).float(), target, narrow)
    assert abs(got - exact) <= 2 * abs(plain - exact) + 1e-6 * abs(exact)
    for ours, theirs, want in zip(
        torch.autograd.grad(got, (weight, hidden)),
        torch.autograd.grad(plain, (weight, hidden)),
        torch.autograd.grad(exact, wide[:2]),
        strict=True,
    ):
        assert ours.dtype == dtype
        error, allowed = (ours - want).abs().max(), 2 * (theirs - want).abs().max()
        assert error <= allowed + torch.finfo(dtype).eps * want.abs().max()


def test_b32_a_frozen_backbone_still_trains_the_head() -> None:
    weight, hidden, target, bias = tensors()
    loss = LigerFusedLinearCrossEntropyLoss()(weight, hidden.detach(), target, bias)
    want = F.cross_entropy(hidden.detach() @ weight.T + bias, target)
    torch.testing.assert_close(*(torch.autograd.grad(v, (weight, bias)) for v in (loss, want)))


def test_b26_a_tiny_vocabulary_and_many_tokens() -> None:
    """Almost uniform predictions, a bias, no skipping of small gradients."""
    generator = torch.Generator().manual_seed(0)
    hidden = (0.01 * torch.randn(8192, 16, generator=generator)).requires_grad_()
    weight = (0.01 * torch.randn(32, 16, generator=generator)).requires_grad_()
    bias, target = torch.zeros(32, requires_grad=True), torch.randint(0, 32, (8192,), generator=generator)
    leaves = (weight, hidden, bias)
    got = LigerFusedLinearCrossEntropyLoss()(weight, hidden, target, bias)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    want = F.cross_entropy(wide[1] @ wide[0].T + wide[2], target)
    for ours, exact in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(want, wide), strict=True):
        assert (ours - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.parametrize("parts", [(3, 10), (13, 0)])
def test_b28_micro_batches_add_up(parts: tuple[int, int]) -> None:
    """Whatever the split: the sum of losses over the count of the whole step."""
    weight, hidden, target, bias = tensors()
    count = (target != IGNORE).sum()
    for options in ({}, {"label_smoothing": 0.1, "lse_square_scale": 1e-2}, {"ce_weight": CLASS_WEIGHTS}):
        module, total = LigerFusedLinearCrossEntropyLoss(**options), torch.zeros((), dtype=torch.float64)
        for rows in (slice(0, parts[0]), slice(parts[0], sum(parts))):
            total = total + module(weight, hidden[rows], target[rows], bias, num_items_in_batch=count)
        whole = (
            LigerFusedLinearCrossEntropyLoss(**{**options, "reduction": "sum"})(weight, hidden, target, bias) / count
        )
        torch.testing.assert_close(total, whole)
        torch.testing.assert_close(*(torch.autograd.grad(v, (weight, hidden)) for v in (total, whole)))


def test_nothing_scored() -> None:
    weight, hidden, target, bias = tensors()
    for options in (
        *OPTIONS.values(),
        {"selection": TokenSelection()},
        {"selection": TokenSelection(weighting="cvar")},
    ):
        for reduction in ("mean", "sum"):
            module = LigerFusedLinearCrossEntropyLoss(**options, reduction=reduction)
            loss = module(weight, hidden, torch.full_like(target, IGNORE), bias)
            assert loss == 0
            assert not any(g.any() for g in torch.autograd.grad(loss, (weight, hidden, bias)))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("over", ["head", "logits"])
def test_what_is_returned_beside_the_loss(over: str, reduction: str) -> None:
    weight, hidden, target, bias = tensors()
    logits = hidden @ weight.T + bias
    options = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}
    options |= {"reduction": reduction, "lse_square_scale": 0.1}
    found = (
        LigerFusedLinearCrossEntropyLoss(**options)(weight, hidden, target, bias)
        if over == "head"
        else LigerCrossEntropyLoss(**options)(logits, target)
    )
    assert isinstance(found, CrossEntropyOutput)
    mask = target != IGNORE
    z_loss = 0.1 * logits.logsumexp(-1) ** 2 * mask
    want = {"mean": z_loss.sum() / mask.sum(), "sum": z_loss.sum(), "none": z_loss}[reduction]
    torch.testing.assert_close(found.loss, reference(logits, target, {"lse_square_scale": 0.1, "reduction": reduction}))
    torch.testing.assert_close(found.z_loss, want.detach())
    assert not found.z_loss.requires_grad
    assert torch.equal(found.predicted_tokens, logits.argmax(-1).masked_fill(~mask, -1))
    torch.testing.assert_close(found.token_accuracy, (logits.argmax(-1) == target)[mask].float().mean())


@pytest.mark.parametrize("shape", [(ROWS,), (1, ROWS), (ROWS, 1)], ids=str)
def test_tokens_in_one_row_or_several(shape: tuple[int, ...]) -> None:
    weight, hidden, target, bias = tensors()
    module = LigerFusedLinearCrossEntropyLoss(reduction="none", return_predicted_tokens=True)
    flat = module(weight, hidden, target, bias)
    found = module(weight, hidden.view(*shape, WIDTH), target.view(shape), bias)
    for ours, want in zip((found.loss, found.predicted_tokens), (flat.loss, flat.predicted_tokens), strict=True):
        assert torch.equal(ours, want.view(shape))


def test_b55_a_temperature_per_token() -> None:
    weight, hidden, target, bias = tensors()
    temperature = torch.linspace(0.5, 2, ROWS, dtype=torch.float64)
    logits = hidden @ weight.T + bias
    want = F.cross_entropy(logits / temperature.unsqueeze(-1), target)
    torch.testing.assert_close(
        LigerFusedLinearCrossEntropyLoss()(weight, hidden, target, bias, temperature=temperature), want
    )
    torch.testing.assert_close(LigerCrossEntropyLoss()(logits, target, temperature=temperature), want)


@pytest.mark.parametrize("weighting", ["var", "cvar"])
@pytest.mark.parametrize("by", ["loss", "entropy"])
@pytest.mark.parametrize("strategy", ["auto", "cached", "recompute"])
def test_tokens_at_risk(strategy: str, by: str, weighting: str) -> None:
    """The mean over the tokens picked, gradients through them alone."""
    weight, hidden, target, bias = tensors()
    selection = TokenSelection(by=by, quantile=0.4, weighting=weighting)
    got = LigerFusedLinearCrossEntropyLoss(selection=selection, strategy=strategy)(weight, hidden, target, bias)
    log_p = (hidden @ weight.T + bias).log_softmax(-1)[target != IGNORE]
    nll = -log_p.gather(-1, target[target != IGNORE].unsqueeze(-1)).squeeze(-1)
    score = (nll if by == "loss" else -(log_p.exp() * log_p).sum(-1)).detach()
    kept, (ranked, order) = 0.6 * len(nll), score.sort(descending=True)
    whole = int(kept)
    picked = nll[order[: whole + 1]] if weighting == "var" else nll[order[: whole + 1]] * torch.tensor(
        [1.0] * whole + [kept - whole], dtype=torch.float64
    )  # fmt: skip
    assert 0 < kept - whole < 1
    assert len(ranked.unique()) == len(ranked)
    want = picked.mean() if weighting == "var" else picked.sum() / kept
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(v, (weight, hidden, bias)) for v in (got, want)))


# liger-kernel --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["LigerFusedLinearCrossEntropyLoss", "LigerCrossEntropyLoss"])
def test_the_interface_is_liger_kernels(name: str) -> None:
    theirs = pytest.importorskip("liger_kernel.transformers")
    ours = getattr(liger_losses, name)
    for method in ("__init__", "forward"):
        expected, found = (inspect.signature(getattr(c, method)).parameters for c in (getattr(theirs, name), ours))
        assert [n for n, p in found.items() if p.kind != p.KEYWORD_ONLY] == list(expected)
        assert all(found[n].default == p.default for n, p in expected.items())


@pytest.mark.parametrize("name", ["liger_cross_entropy", "liger_fused_linear_cross_entropy"])
def test_the_functions_take_what_the_modules_do(name: str) -> None:
    weight, hidden, target, bias = tensors()
    logits = hidden @ weight.T + bias
    want = F.cross_entropy(logits, target, label_smoothing=0.1, reduction="sum")
    call = getattr(functional, name)
    first = (logits, target) if name == "liger_cross_entropy" else (hidden, weight, target, bias)
    torch.testing.assert_close(call(*first, label_smoothing=0.1, reduction="sum"), want)
    with pytest.raises(TypeError, match=name):
        call(*first, smoothing=0.1)


# binary cross entropy ------------------------------------------------------------------------------------------------


def labels() -> tuple[Tensor, Tensor]:
    positives = torch.full((ROWS, 3), IGNORE)
    positives[0] = torch.tensor([4, 4, 0])
    positives[2, 1] = VOCAB - 1
    positives[5:9, :2] = torch.tensor([7, 2])
    hot = torch.zeros(ROWS, VOCAB + 1, dtype=torch.float64)
    return positives, hot.scatter(1, positives.masked_fill(positives < 0, VOCAB), 1.0)[:, :-1]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("strategy", ["auto", "immediate", "cached", "recompute"])
def test_binary_cross_entropy(strategy: str, reduction: str) -> None:
    if strategy == "immediate" and reduction == "none":
        with pytest.raises(ValueError, match="strategy: got 'immediate' with reduction='none'"):
            LigerFusedLinearBCELoss(reduction, strategy=strategy)
        return
    weight, hidden, _, bias = tensors()
    positives, hot = labels()
    row_weights = torch.linspace(0.5, 1.5, ROWS, dtype=torch.float64)
    module = LigerFusedLinearBCELoss(reduction, softcap=4.0, strategy=strategy)
    got = module(weight, hidden, positives, bias, row_weights=row_weights)
    logits = 4 * torch.tanh((hidden @ weight.T + bias) / 4)
    want = F.binary_cross_entropy_with_logits(logits, hot, reduction="none") * row_weights.unsqueeze(-1)
    want = {"mean": want.mean(), "sum": want.sum(), "none": want.sum(-1)}[reduction]
    torch.testing.assert_close(got, want)
    sent = torch.linspace(-1, 2, want.numel(), dtype=torch.float64).reshape(want.shape)
    leaves = (weight, hidden, bias)
    torch.testing.assert_close(*(torch.autograd.grad(v, leaves, sent) for v in (got, want)))
    torch.testing.assert_close(
        functional.liger_fused_linear_bce(
            hidden, weight, positives, bias, reduction, softcap=4.0, row_weights=row_weights
        ),
        want,
    )


# refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"reduction": "batchmean"}, ValueError, "reduction: got 'batchmean', expected one of mean, sum, none"),
        ({"label_smoothing": 1.0}, ValueError, "label_smoothing: got 1.0, expected 0 <= label_smoothing < 1"),
        ({"label_smoothing": -0.1}, ValueError, "label_smoothing: got -0.1"),
        ({"lse_square_scale": -1.0}, ValueError, "lse_square_scale: got -1.0"),
        ({"softcap": 0.0}, ValueError, "softcap: got 0.0"),
        ({"return_z_loss": True}, ValueError, "return_z_loss: got True with lse_square_scale=0"),
        ({"return_z_loss": 1}, TypeError, "return_z_loss: got 1"),
        (
            {"accum_dtype": torch.bfloat16},
            ValueError,
            "accum_dtype: got torch.bfloat16, expected None or torch.float32",
        ),
        ({"ce_weight": [1.0]}, TypeError, "ce_weight: got list"),
        ({"selection": "high"}, TypeError, "selection: got str, expected a TokenSelection"),
        ({"selection": TokenSelection(), "reduction": "none"}, ValueError, "selection: got one with reduction='none'"),
        (
            {"selection": TokenSelection(), "strategy": "immediate"},
            ValueError,
            "strategy: got 'immediate' with a selec",
        ),
        ({"reduction": "none", "strategy": "immediate"}, ValueError, "strategy: got 'immediate' with reduction='none'"),
        ({"memory_budget": 0}, ValueError, "memory_budget: got 0"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        LigerFusedLinearCrossEntropyLoss(**options)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"lin_weight": None}, TypeError, "lin_weight: got NoneType"),
        ({"_input": torch.ones(ROWS, 5)}, ValueError, "_input: got shape (13, 5)"),
        (
            {"target": torch.zeros(ROWS, 1, 1).long()},
            ValueError,
            "target: got shape [13, 1, 1], expected [N] or [R, T]",
        ),
        ({"target": torch.full((ROWS,), VOCAB)}, ValueError, "target: got 19"),
        ({"token_weights": torch.ones(3)}, ValueError, "token_weights: got shape [3], expected [13]"),
        ({"token_weights": torch.ones(1, ROWS)}, ValueError, "token_weights: got shape [1, 13], expected [13]"),
        ({"token_weights": torch.ones(ROWS).long()}, TypeError, "token_weights: got torch.int64"),
        ({"temperature": torch.ones(3)}, ValueError, "temperature: got shape [3], expected [13]"),
        ({"num_items_in_batch": torch.ones(2)}, ValueError, "num_items_in_batch: got shape [2]"),
    ],
)
def test_bad_tensors(change: dict[str, Any], error: type[Exception], message: str) -> None:
    weight, hidden, target, bias = tensors(torch.float32)
    arguments = {"lin_weight": weight, "_input": hidden, "target": target, "bias": bias} | change
    with pytest.raises(error, match=re.escape(message)):
        LigerFusedLinearCrossEntropyLoss()(**arguments)


@pytest.mark.parametrize(
    ("module", "name"), [(LigerFusedLinearCrossEntropyLoss, "ce_weight"), (LigerCrossEntropyLoss, "weight")]
)
def test_class_weights_go_by_their_name(module: type, name: str) -> None:
    for wrong, error, message in (
        ([1.0, 2.0], TypeError, "got list, expected a floating-point tensor"),
        (torch.ones(VOCAB, dtype=torch.int64), TypeError, "got torch.int64, expected a floating-point tensor"),
        (torch.ones(VOCAB, 1), ValueError, "got shape [19, 1], expected [V]"),
        (torch.tensor(1.0), ValueError, "got shape [], expected [V]"),
    ):
        with pytest.raises(error, match=f"^{name}: {re.escape(message)}"):
            module(wrong)


@pytest.mark.parametrize(
    ("logits", "error", "message"),
    [
        (None, TypeError, "_input: got NoneType, expected a tensor"),
        (torch.ones(ROWS, VOCAB, dtype=torch.int64), TypeError, "_input: got torch.int64, expected a tensor"),
        (torch.tensor(1.0), ValueError, "_input: got shape (), expected (13, 'V')"),
        (torch.ones(3, VOCAB), ValueError, "_input: got shape (3, 19), expected (13, 'V')"),
    ],
)
def test_bad_logits(logits: Any, error: type[Exception], message: str) -> None:
    for module in (LigerCrossEntropyLoss(), LigerCrossEntropyLoss(torch.ones(VOCAB))):
        with pytest.raises(error, match=re.escape(message)):
            module(logits, tensors()[2])


def test_weights_of_transposed_tokens() -> None:
    """They are as many as the targets."""
    weight, hidden, target, _ = tensors(rows=12)
    wrong = {"token_weights": torch.ones(4, 3)}
    message = re.escape("token_weights: got shape [4, 3], expected [3, 4]")
    with pytest.raises(ValueError, match=message):
        LigerFusedLinearCrossEntropyLoss()(weight, hidden.view(3, 4, WIDTH), target.view(3, 4), **wrong)
    with pytest.raises(ValueError, match=message):
        LigerCrossEntropyLoss()((hidden @ weight.T).view(3, 4, VOCAB), target.view(3, 4), **wrong)


def test_options_that_do_not_go_together() -> None:
    weight, hidden, target, bias = tensors()
    with pytest.raises(ValueError, match="num_items_in_batch: got a count, expected none with reduction='none'"):
        LigerFusedLinearCrossEntropyLoss(reduction="none")(weight, hidden, target, bias, num_items_in_batch=3)
    with pytest.raises(ValueError, match="num_items_in_batch: got a count, expected none with a selection"):
        LigerFusedLinearCrossEntropyLoss(selection=TokenSelection())(weight, hidden, target, num_items_in_batch=3)
    with pytest.raises(ValueError, match="ce_weight: got 5 weights for 19 classes"):
        LigerFusedLinearCrossEntropyLoss(torch.ones(5))(weight, hidden, target)
    with pytest.raises(ValueError, match="weight: got 5 weights for 19 classes"):
        LigerCrossEntropyLoss(torch.ones(5))(torch.ones(ROWS, VOCAB), target)
    with pytest.raises(ValueError, match=re.escape("positives: got [13]")):
        LigerFusedLinearBCELoss()(weight, hidden, target)
    with pytest.raises(ValueError, match="inputs: got weights, expected names out of"):
        fused_linear_loss(CrossEntropyLoss(), hidden.unsqueeze(0), weight, target.unsqueeze(0),
                          inputs={"weights": torch.ones(1, ROWS)})  # fmt: skip


@pytest.mark.parametrize("count", [0, -3, True, torch.tensor(0), torch.tensor(-3.0), float("nan")])
def test_a_count_is_above_zero(count: Any) -> None:
    weight, hidden, target, bias = tensors()
    with pytest.raises((TypeError, ValueError), match="num_items_in_batch: got"):
        LigerFusedLinearCrossEntropyLoss()(weight, hidden, target, bias, num_items_in_batch=count)


def test_one_temperature_for_a_call() -> None:
    weight, hidden, target, bias = tensors()
    want = LigerFusedLinearCrossEntropyLoss(temperature=0.5)(weight, hidden, target, bias)
    assert torch.equal(LigerFusedLinearCrossEntropyLoss()(weight, hidden, target, bias, temperature=0.5), want)
    assert torch.equal(functional.liger_fused_linear_cross_entropy(hidden, weight, target, bias, temperature=0.5), want)
