"""The modules without a reference have liger-kernel's interface, and its results where it is right."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

from liger_losses import functional
from liger_losses.losses import reference_free_loss

from .oracle import IGNORE, make_case
from .test_modules_reference_free import CPO, ORPO, SimPO, arguments, confident, with_prompts

PEERS = {"CPO": CPO, "SimPO": SimPO, "ORPO": ORPO}


def liger(name: str):
    return pytest.importorskip(f"liger_kernel.chunked_loss.{name.lower()}_loss", exc_type=ImportError)


@pytest.mark.parametrize("name", PEERS)
def test_interface_of_liger_kernel(name: str) -> None:
    """Its parameters come first, in its order, with its names and defaults; ours beyond are keyword-only."""
    peer = getattr(liger(name), f"LigerFusedLinear{name}Loss")
    for function in ("__init__", "forward"):
        theirs = inspect.signature(getattr(peer, function)).parameters
        ours = inspect.signature(getattr(PEERS[name], function)).parameters
        assert list(ours)[: len(theirs)] == list(theirs)
        assert {n: ours[n].default for n in theirs} == {n: p.default for n, p in theirs.items()}
        assert all(p.kind is p.KEYWORD_ONLY for p in list(ours.values())[len(theirs) :])
    function = getattr(liger(name), f"LigerFusedLinear{name}Function").forward
    theirs = list(inspect.signature(function).parameters.values())[1:]  # without ctx
    ours = list(inspect.signature(getattr(functional, f"liger_fused_linear_{name.lower()}")).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [(p.name, p.default) for p in theirs]


LIGER_OPTIONS = [
    ("CPO", {}),
    ("CPO", {"beta": 0.5, "alpha": 0.3, "label_smoothing": 0.1, "average_log_prob": True}),
    ("CPO", {"compute_nll_loss": False}),
    ("SimPO", {}),
    ("SimPO", {"beta": 2.0, "gamma": 1.0, "label_smoothing": 0.1, "compute_nll_loss": False}),
    ("ORPO", {"beta": 0.5}),
    ("ORPO", {"compute_nll_loss": False}),
    ("ORPO", {"nll_target": "prompts"}),
    ("ORPO", {"nll_target": "others"}),
]


@pytest.mark.parametrize(("name", "options"), LIGER_OPTIONS, ids=str)
@pytest.mark.parametrize("scored", ["all", "prompt"])
def test_equals_liger_kernel(name: str, options: dict, scored: str) -> None:
    """In fp32, which is what it computes in. Its logit means count padding: compared without any."""
    options = dict(options)
    peer = getattr(liger(name), f"LigerFusedLinear{name}Loss")
    ours, theirs = (make_case(rows=6, vocab=37, dtype=torch.float32, scored=scored) for _ in range(2))
    extra = ()
    if kind := options.pop("nll_target", None):
        extra = (with_prompts(ours) if kind == "prompts" else (with_prompts(ours) + 1) % 37,)
    value, outputs = PEERS[name](**options)(*arguments(ours), *extra)
    expected, expected_outputs = peer(**options, compiled=False)(*arguments(theirs), *extra)
    torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    assert len(outputs) == len(expected_outputs)
    for index, (got, want) in enumerate(zip(outputs, expected_outputs, strict=True)):
        if scored == "all" or index not in (2, 3):
            torch.testing.assert_close(got, want.to(got.dtype), rtol=1e-4, atol=1e-5)
    got, want = torch.autograd.grad(value, ours.leaves), torch.autograd.grad(expected, theirs.leaves)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)


def test_where_liger_kernel_is_wrong() -> None:
    """The smallest input for each."""
    liger_orpo, liger_simpo = liger("ORPO").LigerFusedLinearORPOLoss, liger("SimPO").LigerFusedLinearSimPOLoss
    # A certain model: log1p(-exp(0)) - log1p(-exp(0)).
    weight, hidden, target = confident()
    value, _ = liger_orpo(compiled=False)(weight, hidden, target)
    assert value.isnan()
    assert weight.grad is None
    # A row without scored tokens: a mean of nothing, which reaches the weight.
    case = make_case(rows=6, vocab=37, dtype=torch.float32)
    case.target[4] = IGNORE
    value, _ = liger_simpo(compiled=False)(*arguments(case))
    assert value.isnan()
    assert torch.autograd.grad(value, case.weight)[0].isnan().all()
    assert SimPO()(*arguments(case))[0].isfinite()
    # Nothing scored in the chosen half: NLL divides by 0.
    case.target[:] = IGNORE
    assert liger("CPO").LigerFusedLinearCPOLoss(compiled=False)(*arguments(case))[0].isnan()
    value, _ = CPO()(*arguments(case))
    assert value.item() == pytest.approx(math.log(2))
    # Logit means divide by all positions and sum them, padding's logits included.
    case = make_case(rows=2, length=8, vocab=19, dtype=torch.float32, scored="all")
    case.target[:, 4:] = IGNORE
    logits = (case.hidden @ case.weight.T + case.bias).detach()
    _, outputs = liger_simpo(compiled=False)(*arguments(case))
    torch.testing.assert_close(outputs[2], logits[0].mean())
    assert not torch.isclose(outputs[2], logits[0, :4].mean())
    # Three rows: the chosen one is silently compared with two rejected ones, and the sum divided by one pair.
    case = make_case(rows=3, vocab=37, dtype=torch.float32, scored="all")
    value, outputs = liger_simpo(compiled=False, compute_nll_loss=False)(*arguments(case))
    assert [outputs[0].shape[0], outputs[1].shape[0]] == [1, 2]
    torch.testing.assert_close(value, reference_free_loss(outputs[0].repeat(2), outputs[1], loss_type="simpo").sum())


def test_liger_kernel_sums_the_weight_gradient_in_bf16() -> None:
    peer = liger("SimPO").LigerFusedLinearSimPOLoss

    def errors(rows: int) -> tuple[float, float]:
        case = make_case(rows=rows, length=4, hidden_size=32, vocab=64, dtype=torch.bfloat16, scored="all")
        exact = case.to(torch.float64)
        truth = torch.autograd.grad(SimPO()(*arguments(exact))[0], exact.weight)[0]
        return tuple(
            (
                (torch.autograd.grad(m(*arguments(case))[0], case.weight)[0].double() - truth).norm() / truth.norm()
            ).item()
            for m in (SimPO(), peer(compiled=False))
        )

    (_, theirs_few), (ours_many, theirs_many) = errors(2), errors(128)
    assert theirs_many > 2 * theirs_few
    assert ours_many < theirs_many / 3


def test_simpos_function_and_module_differ_in_nll_as_liger_kernels() -> None:
    case = make_case(rows=6, vocab=37)
    weight, hidden, target, bias = arguments(case)
    bare = functional.liger_fused_linear_simpo(hidden, weight, target, bias)
    torch.testing.assert_close(bare, SimPO(compute_nll_loss=False)(*arguments(case)), rtol=0, atol=0)
    full = functional.liger_fused_linear_simpo(hidden, weight, target, bias, compute_nll_loss=True)
    torch.testing.assert_close(full, SimPO()(*arguments(case)), rtol=0, atol=0)
