"""The modules without a reference equal their loss object on whole logits; what they refuse."""

from __future__ import annotations

import math
import re
from importlib import import_module

import pytest
import torch
from torch import Tensor

from liger_losses import functional, modules
from liger_losses.chunked import ScoredTokens
from liger_losses.losses import reference_free_loss
from liger_losses.modules import (
    LigerFusedLinearAlphaPOLoss,
    LigerFusedLinearCPOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
    LigerFusedLinearTPOLoss,
)

from .oracle import IGNORE, TRANSFORMS, Case, check_close, check_gradients, make_case, unfused

CPO, SimPO, ORPO = LigerFusedLinearCPOLoss, LigerFusedLinearSimPOLoss, LigerFusedLinearORPOLoss
TPO, AlphaPO = LigerFusedLinearTPOLoss, LigerFusedLinearAlphaPOLoss
# Every class, and every branch of its options; in six rows, three pairs or two units of three.
CONFIGURATIONS = [
    (CPO, {}),
    (CPO, {"label_smoothing": 0.2, "beta": 0.4, "alpha": 0.3}),
    (CPO, {"average_log_prob": True, "compute_nll_loss": False}),
    (CPO, {"loss_type": "hinge"}),
    (CPO, {"loss_type": "ipo", "reward_alpha": 0.1}),
    (CPO, {"loss_type": "simpo", "gamma": 1.0}),
    (SimPO, {"beta": 2.0}),
    (SimPO, {"compute_nll_loss": False, "label_smoothing": 0.1, "gamma": 0.2}),
    (AlphaPO, {"beta": 2.0}),
    (AlphaPO, {"reward_alpha": -0.5, "compute_nll_loss": True, "alpha": 0.2}),
    (ORPO, {"beta": 0.5}),
    (ORPO, {"compute_nll_loss": False}),
    (TPO, {"beta": 0.2}),
    (TPO, {"loss_type": "tpo-l", "gamma": 1.0, "alpha": 0.5}),
    (TPO, {"loss_type": "ipo", "compute_nll_loss": False}),
]
IDS = [f"{module.__name__[16:-4]} {options}" for module, options in CONFIGURATIONS]
EVERY = [(CPO, {}), (SimPO, {}), (AlphaPO, {}), (ORPO, {}), (TPO, {})]


def arguments(case: Case) -> tuple:
    return case.weight, case.hidden, case.target, case.bias


def naive(module, case: Case, **inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss object on statistics of whole logits."""
    statistics, loss = unfused(case, ("logprob", "mean_logit")), module.loss
    value, metrics = loss(statistics, case.mask, inputs, loss.totals(case.mask, inputs))
    return value, tuple(metrics[name] for name in module.metrics)


def compare(module, case: Case, *, given: dict | None = None, **inputs: Tensor) -> None:
    """Value, outputs and gradients by the rule of `oracle`."""
    value, outputs = module(*arguments(case), **(given or {}))
    exact_case, wide = case.to(torch.float64), torch.float64 if case.compute == torch.float64 else torch.float32
    naive_case = case.to(case.compute)
    exact, exact_outputs = naive(module, exact_case, **inputs)
    rough, rough_outputs = naive(module, naive_case, **inputs)
    size = max(1.0, exact.abs().item())
    for got, want, other in zip((value, *outputs), (exact, *exact_outputs), (rough, *rough_outputs), strict=True):
        scale = max(size, want.abs().max().item())
        check_close(got, want, other, wide, terms=case.terms, scale=scale)
    assert not any(output.requires_grad for output in outputs)
    if case.leaves:
        found = torch.autograd.grad(1.7 * value, case.leaves)
        truth, approximate = (
            torch.autograd.grad(1.7 * v, c.leaves) for v, c in ((exact, exact_case), (rough, naive_case))
        )
        check_gradients(found, truth, approximate, case)


@pytest.mark.parametrize(("module", "options"), CONFIGURATIONS, ids=IDS)
@pytest.mark.parametrize("scored", ["all", "prompt", "row", "nothing"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_equals_its_loss_on_whole_logits(module: type, options: dict, scored: str, dtype: torch.dtype) -> None:
    compare(module(**options), make_case(rows=6, vocab=37, dtype=dtype, scored=scored))


def smallest_budget(module: type, options: dict, case: Case) -> int:
    """What the planner asks for where one byte will not do."""
    with pytest.raises(ValueError, match="memory_budget: got 1 bytes, too small") as refusal:
        module(**options, memory_budget=1)(*arguments(case))
    return int(re.search(r"at least ([\d,]+) bytes", str(refusal.value)).group(1).replace(",", ""))


@pytest.mark.parametrize(("module", "options"), EVERY, ids=lambda v: getattr(v, "__name__", ""))
@pytest.mark.parametrize("strategy", ["immediate", "cached", "recompute", "frozen"])
@pytest.mark.parametrize("factor", [None, 1, 1.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "length"), [(12, 37), (6, 97)])
def test_strategies_and_budgets(
    module: type, options: dict, strategy: str, factor: float | None, dtype: torch.dtype, rows: int, length: int
) -> None:
    """The default budget, the smallest possible and one between: several tiles, the last ragged, and units larger."""
    trainable = ("hidden",) if strategy == "frozen" else ("hidden", "weight", "bias")
    case = make_case(rows=rows, length=length, vocab=131, dtype=dtype, trainable=trainable)
    options = {**options, "strategy": strategy}
    if factor:
        options["memory_budget"] = int(factor * smallest_budget(module, options, case))
    compare(module(**options), case)


@pytest.mark.parametrize(("module", "options"), EVERY, ids=lambda v: getattr(v, "__name__", ""))
@pytest.mark.parametrize("chunk_size", [1, 2, 3, 100])
def test_chunk_size_does_not_change_the_result(module: type, options: dict, chunk_size: int) -> None:
    compare(module(**options, chunk_size=chunk_size, strategy="immediate"), make_case(rows=12, vocab=37))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(("module", "options"), EVERY, ids=lambda v: getattr(v, "__name__", ""))
def test_transforms(module: type, options: dict, transform: str) -> None:
    chosen = TRANSFORMS[transform]
    compare(module(**options, **chosen), make_case(rows=6, vocab=37, **chosen))


@pytest.mark.parametrize(("module", "options"), EVERY, ids=lambda v: getattr(v, "__name__", ""))
def test_order_of_units_does_not_matter(module: type, options: dict) -> None:
    module, case = module(**options), make_case(rows=12, vocab=37)
    units = 12 // module.loss.unit_rows
    order = torch.tensor([2, 0, 3, 1, 5, 4][:units])
    rows = torch.cat([order + units * part for part in range(module.loss.unit_rows)])
    value, outputs = module(*arguments(case))
    again, outputs_again = module(case.weight, case.hidden[rows], case.target[rows], case.bias)
    torch.testing.assert_close(again, value)
    for got, want in zip(outputs_again, outputs, strict=True):
        torch.testing.assert_close(got, want if want.dim() == 0 else want[order])
    torch.testing.assert_close(torch.autograd.grad(again, case.leaves), torch.autograd.grad(value, case.leaves))


@pytest.mark.parametrize(("module", "options"), EVERY, ids=lambda v: getattr(v, "__name__", ""))
def test_an_empty_row_reaches_nothing(module: type, options: dict) -> None:
    case = make_case(rows=6, vocab=37, dtype=torch.float32)
    case.target[2] = IGNORE
    with torch.no_grad():
        case.hidden[2] = torch.nan  # what is not scored is not read
    value, outputs = module(**options)(*arguments(case))
    assert all(output.isfinite().all() for output in (value, *outputs))
    hidden, weight, bias = torch.autograd.grad(value, case.leaves)
    assert all(gradient.isfinite().all() for gradient in (hidden, weight, bias))
    assert (hidden[2] == 0).all()


@pytest.mark.parametrize(("module", "options"), EVERY, ids=lambda v: getattr(v, "__name__", ""))
def test_metrics_are_over_scored_positions(module: type, options: dict) -> None:
    """Two pairs, eight tokens, the second half not scored: means over the first half and the vocabulary."""
    module = module(**options)
    case = make_case(rows=2 * module.loss.unit_rows, length=8, vocab=19)
    case.target[:, 4:] = IGNORE
    logits = case.hidden @ case.weight.T + case.bias
    _, outputs = module(*arguments(case))
    for output, rows in ((outputs[2], slice(0, 2)), (outputs[3], slice(2, 4))):
        torch.testing.assert_close(output, logits[rows][case.mask[rows]].mean().detach())


def test_bf16_accumulation_does_not_grow_with_the_number_of_tiles() -> None:
    """SimPO, two pairs a tile: the weight gradient of 128 pairs is as far from fp64 as that of one."""

    def error(rows: int) -> float:
        case = make_case(rows=rows, length=4, hidden_size=32, vocab=64, dtype=torch.bfloat16, scored="all")
        exact = case.to(torch.float64)
        module = SimPO(strategy="immediate", chunk_size=2)
        got, truth = (torch.autograd.grad(module(*arguments(c))[0], c.weight)[0].double() for c in (case, exact))
        return ((got - truth).norm() / truth.norm()).item()

    errors = {rows: error(rows) for rows in (2, 16, 64, 256)}
    assert max(errors.values()) <= 2 * errors[2], errors
    assert max(errors.values()) < 2**-7, errors


@pytest.mark.parametrize("module", [CPO, ORPO, TPO])
def test_compiles_into_one_graph(module: type) -> None:
    module, case = module(), make_case(rows=6, vocab=37)
    expected = module(*arguments(case))
    got = torch.compile(module, fullgraph=True, backend="aot_eager")(*arguments(case))
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(*(torch.autograd.grad(loss, case.leaves) for loss, _ in (got, expected)))


def test_compiled_has_no_effect_and_counts_may_be_read_ahead() -> None:
    case = make_case(rows=6, vocab=37)
    expected = CPO()(*arguments(case))
    torch.testing.assert_close(CPO(compiled=False)(*arguments(case)), expected, rtol=0, atol=0)
    tokens = ScoredTokens(case.target)
    torch.testing.assert_close(CPO()(case.weight, case.hidden, tokens, case.bias), expected)


def test_alphapo_of_zero_is_simpo() -> None:
    case = make_case(rows=6, vocab=37)
    torch.testing.assert_close(
        AlphaPO(reward_alpha=0.0)(*arguments(case)), SimPO(compute_nll_loss=False)(*arguments(case))
    )


# ORPO ---------------------------------------------------------------------------------------------------------------


def confident() -> tuple[Tensor, Tensor, Tensor]:
    target = torch.randint(0, 8, (4, 4), generator=torch.Generator().manual_seed(0))
    hidden = 10 * torch.nn.functional.one_hot(target, 8).float()
    return (100 * torch.eye(8)).requires_grad_(), hidden.requires_grad_(), target


def test_orpo_of_a_model_that_is_certain() -> None:
    """Both odds are equal: NLL, here 0, plus beta * log 2, and finite gradients."""
    weight, hidden, target = confident()
    value, outputs = ORPO(beta=0.3)(weight, hidden, target)
    assert value.item() == pytest.approx(0.3 * math.log(2))
    assert all(output.isfinite().all() for output in outputs)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(value, (hidden, weight)))


def with_prompts(case: Case) -> Tensor:
    """Labels at every position: the case's own, and others at its prompts."""
    other = torch.randint(0, 37, case.target.shape, generator=torch.Generator().manual_seed(7))
    return torch.where(case.mask, case.target, other)


def products(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Hidden states handed to the engine, call by call."""
    seen: list[torch.Size] = []
    base = import_module("liger_losses.modules.base")
    engine = base.fused_linear_loss

    def recorded(loss, hidden, *args, **kwargs):
        seen.append(hidden.shape)
        return engine(loss, hidden, *args, **kwargs)

    monkeypatch.setattr(base, "fused_linear_loss", recorded)
    return seen


def orpo_by_hand(case: Case, nll_labels: Tensor, beta: float) -> Tensor:
    log_p = (case.hidden @ case.weight.T + case.bias).log_softmax(-1)
    mask = case.mask
    logprob = log_p.gather(-1, case.target.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    means = torch.where(mask, logprob, 0).sum(1) / mask.sum(1)
    nll = torch.nn.functional.nll_loss(log_p[:3].flatten(0, 1), nll_labels[:3].flatten(), ignore_index=IGNORE)
    return nll + reference_free_loss(*means.split(3), loss_type="orpo", beta=beta).mean()


@pytest.mark.parametrize("kind", ["same", "prompts", "less", "others"])
@pytest.mark.parametrize("strategy", ["immediate", "cached", "recompute"])
def test_nll_target(kind: str, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are projected once where `nll_target` has all labels of `target`, the chosen rows twice elsewhere."""
    case = make_case(rows=6, vocab=37)
    whole = with_prompts(case)
    nll_target = {
        "same": case.target,
        "prompts": whole,
        "less": whole.masked_fill(torch.arange(5) == 4, IGNORE),
        "others": (whole + 1) % 37,
    }[kind]
    before = nll_target.clone()
    seen = products(monkeypatch)
    module = ORPO(beta=0.4, strategy=strategy)
    value, outputs = module(*arguments(case), nll_target)
    assert [shape[0] for shape in seen] == [6 if kind in ("same", "prompts") else 9]
    expected = orpo_by_hand(case, nll_target, 0.4)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(torch.autograd.grad(value, case.leaves), torch.autograd.grad(expected, case.leaves))
    # Only NLL knows of other labels.
    plain = module(*arguments(case))[1]
    for index in (0, 1, 2, 3, 5, 6, 7, 8):
        torch.testing.assert_close(outputs[index], plain[index])
    assert torch.equal(nll_target, before)
    ahead = module(case.weight, case.hidden, ScoredTokens(case.target), case.bias, nll_target)
    torch.testing.assert_close(ahead, (value, outputs))


def test_nll_target_compiles_into_one_graph() -> None:
    module, case = ORPO(), make_case(rows=6, vocab=37)
    whole = with_prompts(case)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments(case), whole), module(*arguments(case), whole))


@pytest.mark.parametrize("strategy", ["immediate", "cached", "recompute"])
def test_response_mask(strategy: str) -> None:
    case = make_case(rows=6, vocab=37)
    responses, whole = case.mask, with_prompts(case)
    everything = Case(case.hidden, case.weight, case.bias, whole)
    module = ORPO(strategy=strategy)
    compare(module, everything, given={"response_mask": responses}, response_mask=responses)
    got = module(*arguments(everything), response_mask=responses)
    torch.testing.assert_close(got, module(*arguments(case), whole))


@pytest.mark.parametrize("name", ["CPO", "ORPO", "AlphaPO", "TPO"])
def test_functional_is_the_module(name: str) -> None:
    case = make_case(rows=6, vocab=37)
    weight, hidden, target, bias = arguments(case)
    function = getattr(functional, f"liger_fused_linear_{name.lower()}")
    module = getattr(modules, f"LigerFusedLinear{name}Loss")(beta=0.3, softcap=4.0)
    got = function(hidden, weight, target, bias, beta=0.3, softcap=4.0)
    torch.testing.assert_close(got, module(*arguments(case)), rtol=0, atol=0)
    with pytest.raises(TypeError, match="soft_cap"):
        function(hidden, weight, target, bias, soft_cap=4.0)


# refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "options", "error", "message"),
    [
        (CPO, {"loss_type": "tpo-l"}, ValueError, "loss_type: got 'tpo-l', expected one of sigmoid, hinge, ipo, simpo"),
        (CPO, {"loss_type": "orpo", "compute_nll_loss": False}, ValueError, "loss_type: got 'orpo', expected one of"),
        (TPO, {"loss_type": "simpo"}, ValueError, "loss_type: got 'simpo', expected one of sigmoid, hinge, ipo, tpo-l"),
        (CPO, {"gamma": 1.0}, ValueError, "gamma: got 1.0, expected the default"),
        (CPO, {"loss_type": "hinge", "label_smoothing": 0.1}, ValueError, "label_smoothing: got 0.1, expected 0"),
        (SimPO, {"compute_nll_loss": False, "alpha": 0.5}, ValueError, "alpha: got 0.5, expected the default"),
        (AlphaPO, {"alpha": 0.5}, ValueError, "alpha: got 0.5, expected the default"),
        (AlphaPO, {"reward_alpha": math.nan}, ValueError, "reward_alpha: got nan"),
        (TPO, {"gamma": 0.2}, ValueError, "gamma: got 0.2, expected the default"),
        (ORPO, {"beta": 0.0}, ValueError, "beta: got 0.0"),
        (ORPO, {"compiled": "yes"}, TypeError, "compiled: got 'yes'"),
        (ORPO, {"chunk_size": 0}, ValueError, "chunk_size: got 0, expected >= 1"),
        (SimPO, {"chunk_size": 2, "strategy": "cached"}, ValueError, "chunk_size: got 2 with strategy='cached'"),
        (SimPO, {"ignore_index": 1.5}, TypeError, "ignore_index: got 1.5, expected an int"),
        (SimPO, {"softcap": 0.0}, ValueError, "softcap: got 0.0"),
        (SimPO, {"logits_dtype": "bf16"}, ValueError, "logits_dtype: got 'bf16'"),
        (SimPO, {"ref_softcap": 5.0}, TypeError, "unexpected keyword argument 'ref_softcap'"),
        (SimPO, {"reward_alpha": 0.5}, TypeError, "unexpected keyword argument 'reward_alpha'"),
    ],
)  # fmt: skip
def test_bad_option(module: type, options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        module(**options)


def test_bad_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is refused before the engine is called."""
    seen, case = products(monkeypatch), make_case(rows=6, vocab=37)
    weight, hidden, target, bias = arguments(case)
    mask = case.mask

    def refused(module, error: type[Exception], message: str, *given: object, **named: object) -> None:
        with pytest.raises(error, match=message):
            module(*given, **named)

    for module in (CPO(), SimPO(), AlphaPO(), ORPO(), TPO(compute_nll_loss=False)):
        refused(module, ValueError, "target: got 5 rows, expected an even number", weight, hidden[:5], target[:5], bias)
    refused(TPO(), ValueError, "target: got 4 rows, expected a multiple of 3", weight, hidden[:4], target[:4], bias)
    refused(
        TPO(), ValueError, r"target: got shape \[5\], expected \[3 \* pairs, tokens\]", weight, hidden[0], target[0]
    )
    refused(
        CPO(), ValueError, r"target: got shape \[5\], expected \[2 \* pairs, tokens\]", weight, hidden[0], target[0]
    )
    refused(CPO(), ValueError, "lin_weight: got shape", hidden, weight, target)
    refused(CPO(), TypeError, "target: got list", weight, hidden, target.tolist())
    refused(CPO(), ValueError, "bias: got shape", weight, hidden, target, bias[:3])
    orpo, free = ORPO(), ORPO(compute_nll_loss=False)
    refused(
        orpo, ValueError, r"nll_target: got shape \[3, 5\], expected \[6, 5\]", weight, hidden, target, bias, target[:3]
    )
    refused(orpo, TypeError, "nll_target: got list", weight, hidden, target, bias, target.tolist())
    refused(orpo, TypeError, r"nll_target: got dtype torch\.float64", weight, hidden, target, bias, target.double())
    refused(orpo, ValueError, "lin_weight: got shape", hidden, weight, target, None, target)
    refused(
        free,
        ValueError,
        "nll_target: got a tensor, expected None with compute_nll_loss=False",
        weight,
        hidden,
        target,
        bias,
        target,
    )
    refused(free, ValueError, "response_mask: got a tensor, expected None", weight, hidden, target, response_mask=mask)
    refused(
        orpo,
        ValueError,
        "response_mask: got a tensor beside nll_target",
        weight,
        hidden,
        target,
        bias,
        target,
        response_mask=mask,
    )
    assert not seen
    refused(
        orpo, TypeError, r"response_mask: got dtype torch\.int64", weight, hidden, target, response_mask=mask.long()
    )
    refused(
        orpo,
        ValueError,
        r"target: got 37 at row",
        weight,
        hidden,
        target,
        bias,
        target.masked_fill(target == target[0, 0], 37),
    )
