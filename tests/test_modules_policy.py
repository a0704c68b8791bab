"""LigerFusedLinearGRPOLoss equals its loss object on whole logits."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_losses.functional import liger_fused_linear_grpo
from liger_losses.losses import POLICY_TYPES
from liger_losses.modules import LigerFusedLinearGRPOLoss

from .chunked.test_cost import count_products  # noqa: F401, the fixture
from .losses.test_policy_trl import options_of
from .oracle import transformed
from .policy_case import NAMES, OLD, ROWS, TOKENS, VOCAB, Case, make_case

TOKEN_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "ppo")


def naive(module: LigerFusedLinearGRPOLoss, arguments: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss object on statistics of whole logits."""
    scored = arguments["attention_mask"] != 0
    index = arguments["selected_token_ids"].masked_fill(~scored, 0).unsqueeze(-1)

    def statistics(hidden: Tensor, weight: Tensor, bias: Tensor | None, options: dict[str, Any]) -> dict[str, Tensor]:
        z = hidden @ weight.T if bias is None else hidden @ weight.T + bias
        log_p = transformed(z, **{n: options[n] for n in ("logit_scale", "softcap", "temperature")}).log_softmax(-1)
        values = {"logprob": log_p.gather(-1, index).squeeze(-1), "entropy": -(log_p.exp() * log_p).sum(-1)}
        return {name: torch.where(scored, value, 0) for name, value in values.items()}

    given = {NAMES.get(n, n): v for n, v in arguments.items()}
    head = (given.pop("_input"), given.pop("lin_weight"), given.pop("bias", None))
    reference = tuple(given.pop(n, None) for n in ("ref_input", "ref_weight", "ref_bias"))
    del given["selected_token_ids"], given["attention_mask"]
    if reference[0] is not None:
        given["ref_logprobs"] = statistics(*reference, module.options.reference())["logprob"].detach()
    loss = replace(module.loss, on_policy="old_logprobs" not in given)
    inputs = loss.prepare(scored, given)
    values = {n: v for n, v in statistics(*head, module.options.policy()).items() if n in loss.statistics}
    return loss(values, scored, inputs, loss.totals(scored, inputs))


def compare(module: LigerFusedLinearGRPOLoss, case: Case, *more: str) -> None:
    arguments = case.arguments(module, *more)
    loss, metrics = module(**arguments)
    expected, expected_metrics = naive(module, arguments)
    torch.testing.assert_close(loss, expected)
    assert isinstance(metrics, dict)
    torch.testing.assert_close(metrics, expected_metrics)
    assert not any(metric.requires_grad for metric in metrics.values())
    torch.testing.assert_close(
        *(torch.autograd.grad(1.7 * value, case.leaves) for value in (loss, expected)), rtol=None, atol=None
    )


def make_module(name: str, **options: Any) -> LigerFusedLinearGRPOLoss:
    return LigerFusedLinearGRPOLoss(**(options_of(name) | options), named_metrics=True)


# the fused loss -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICY_TYPES)
@pytest.mark.parametrize("more", [(), (OLD,)], ids=["on_policy", "old"])
@pytest.mark.parametrize("strategy", ["immediate", "cached", "recompute"])
def test_loss_types(name: str, more: tuple[str, ...], strategy: str) -> None:
    compare(make_module(name, strategy=strategy, memory_budget=1 << 20), make_case(), *more)


@pytest.mark.parametrize("name", POLICY_TYPES)
def test_frozen_head(name: str) -> None:
    compare(make_module(name, strategy="frozen"), make_case(trainable="hidden"), OLD)


@pytest.mark.parametrize("name", ["dapo", "grpo", "gspo"])
@pytest.mark.parametrize("strategy", ["immediate", "cached", "recompute"])
def test_float32(name: str, strategy: str) -> None:
    compare(make_module(name, strategy=strategy), make_case(torch.float32), OLD)


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({"beta": 0.0, "use_ref_model": False}, (OLD,)),
        ({"use_bias_correction_kl": True, "kl_estimator": "k1"}, (OLD,)),
        ({"delta": 1.3, "epsilon_low": 0.1, "epsilon_high": 0.28}, (OLD, "num_items_in_batch")),
        ({"importance_sampling_level": "sequence"}, (OLD, "vllm_is_ratio")),
        ({"loss_type": "vespo"}, ("vllm_is_ratio",)),
        ({"loss_type": "vespo"}, (OLD, "vllm_is_ratio")),
        ({"entropy_coef": 0.2}, (OLD, "num_items_in_batch")),
        ({"report_entropy": True}, (OLD,)),
        ({"entropy_coef": 0.2, "loss_type": "gspo"}, (OLD,)),
        ({"sampler_mode": "token_mask"}, (OLD,)),
        ({"sampler_mode": "sequence_truncate"}, (OLD,)),
        ({"sampler_mode": "sequence_truncate"}, ()),
        ({"off_policy_mask_threshold": 0.05}, (OLD,)),
        ({"loss_type": "ppo"}, (OLD,)),
        ({"temperature": 0.7, "softcap": 5.0, "logit_scale": 1.3}, (OLD,)),
        ({"softcap": 5.0, "ref_softcap": 3.0, "ref_logit_scale": 0.5}, (OLD,)),
    ],
    ids=str,
)
@pytest.mark.parametrize("strategy", ["auto", "immediate", "recompute"])
def test_options(options: dict[str, Any], more: tuple[str, ...], strategy: str) -> None:
    compare(LigerFusedLinearGRPOLoss(**options, strategy=strategy, named_metrics=True), make_case(), *more)


@pytest.mark.parametrize("options", [{"top_entropy_quantile": 0.4}, {"top_entropy_quantile": 0.4, "entropy_coef": 0.2},
                                     {"top_entropy_quantile": 0.4, "loss_type": "gmpo"}], ids=str)  # fmt: skip
@pytest.mark.parametrize("strategy", ["auto", "recompute"])
def test_entropy_quantile(options: dict[str, Any], strategy: str) -> None:
    compare(LigerFusedLinearGRPOLoss(**options, strategy=strategy, named_metrics=True), make_case(), OLD)


@pytest.mark.parametrize("lengths", [(6,) * 5, (0, 0, 0, 0, 1), (0,) * 5], ids=["all", "one", "nothing"])
@pytest.mark.parametrize("name", POLICY_TYPES)
def test_masks(name: str, lengths: tuple[int, ...]) -> None:
    case = make_case(lengths=lengths)
    module = make_module(name)
    compare(module, case, OLD)
    if not any(lengths):
        loss, _ = module(**case.arguments(module, OLD))
        assert loss == 0
        assert all((gradient == 0).all() for gradient in torch.autograd.grad(loss, case.leaves))


def test_value_loss_trains_the_values() -> None:
    case = make_case()
    case.inputs["values"].requires_grad_()
    module = LigerFusedLinearGRPOLoss(loss_type="ppo", vf_coef=0.5, value_clip=0.2, named_metrics=True)
    compare(module, case, OLD)
    arguments = case.arguments(module, OLD)
    got, want = (torch.autograd.grad(f(), case.inputs["values"])[0]
                 for f in (lambda: module(**arguments)[0], lambda: naive(module, arguments)[0]))  # fmt: skip
    torch.testing.assert_close(got, want)
    assert (got[case.mask == 0] == 0).all()
    assert got.abs().sum() > 0


@pytest.mark.parametrize("name", TOKEN_TYPES)
def test_token_types_cost_three_products_on_tiles_of_tokens(
    name: str,
    count_products: Callable[[Any], float],  # noqa: F811
) -> None:
    """Their tiles cut rows anywhere, and the result does not depend on where."""
    results = []
    for budget, chunk_size in ((None, 1), (80_000, 1), (None, 2)):
        case = make_case(lengths=(100, 60, 90, 0, 31), tokens=100, trainable="hidden weight")
        options = {"memory_budget": budget, "chunk_size": chunk_size, "beta": 0.0, "use_ref_model": False}
        module = LigerFusedLinearGRPOLoss(**(options_of(name) | options), strategy="immediate")
        assert module.loss.separability == "token"
        loss, metrics = module(**case.arguments(module, OLD))
        loss.backward()
        assert count_products(with_bool_mask(case)) == pytest.approx(3)
        results.append((loss.detach(), metrics, case.hidden.grad, case.weight.grad))
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


def with_bool_mask(case: Case) -> Case:
    """What `count_products` reads: it sums the mask."""
    return replace(case, mask=case.mask != 0)


def test_a_reference_adds_one_product(count_products: Callable[[Any], float]) -> None:  # noqa: F811
    case = make_case(trainable="hidden weight")
    case.ref_hidden, case.ref_weight = torch.randn_like(case.hidden), torch.randn_like(case.weight)
    module = LigerFusedLinearGRPOLoss()
    module(**case.arguments(module, OLD))[0].backward()
    assert count_products(with_bool_mask(case)) == pytest.approx(4)


@pytest.mark.parametrize("name", ["dapo", "grpo", "gspo"])
@pytest.mark.parametrize("chunk_size", [1, 2, 3, 100])
def test_chunk_size_does_not_change_the_result(name: str, chunk_size: int) -> None:
    compare(make_module(name, chunk_size=chunk_size), make_case(), OLD)


# cases --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("junk", [torch.nan, torch.inf, -torch.inf, -1e4], ids=str)
@pytest.mark.parametrize("name", POLICY_TYPES)
def test_b07_b08_what_stands_at_masked_positions_is_not_read(name: str, junk: float) -> None:
    module, results = make_module(name, beta=0.1, off_policy_mask_threshold=0.05), []
    for fill, token in ((0.0, 0), (junk, -100), (junk, 10**12)):
        case = make_case()
        off = case.mask == 0
        inputs = {n: v.masked_fill(off, fill) if v.shape == off.shape else v for n, v in case.inputs.items()}
        inputs["advantages"] = inputs["advantages"].unsqueeze(1).expand(ROWS, TOKENS).masked_fill(off, fill)
        case.inputs, case.ids = inputs, case.ids.masked_fill(off, token)
        case.hidden = case.hidden.detach().masked_fill(off.unsqueeze(-1), fill).requires_grad_()
        arguments = case.arguments(module, OLD, "ref_per_token_logps", "vllm_is_ratio")
        loss, metrics = module(**{n: v for n, v in arguments.items() if n not in case.reference})
        gradients = torch.autograd.grad(loss, case.leaves)
        assert (gradients[0][off] == 0).all()
        results.append((loss, metrics, gradients))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    torch.testing.assert_close(results[2], results[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    "options", [{}, {"loss_type": "cispo"}, {"loss_type": "vespo"}, {"entropy_coef": 0.1}], ids=str
)
def test_b10_b28_accumulation_of_3_and_13_tokens_is_one_batch_of_16(options: dict[str, Any]) -> None:
    module = LigerFusedLinearGRPOLoss(**options)
    case = make_case(lengths=(3, 6, 5, 2, 0))
    whole, _ = module(**case.arguments(module, OLD))
    micro = []
    for rows in (slice(0, 1), slice(1, 5)):
        arguments = case.arguments(module, OLD)
        cut = {n: v[rows] if v.shape[0] == ROWS and n != "lin_weight" else v for n, v in arguments.items()}
        micro.append(module(**cut, num_items_in_batch=16)[0])
    torch.testing.assert_close(micro[0] + micro[1], whole)
    torch.testing.assert_close(*(torch.autograd.grad(v, case.leaves) for v in (micro[0] + micro[1], whole)))


def test_b11_truncated_completions() -> None:
    """30 tokens, 5 in a truncated row: the loss of the others alone."""
    module = LigerFusedLinearGRPOLoss()
    case = make_case(lengths=(6, 6, 6, 0, 6))
    loss, _ = module(**case.arguments(module, OLD))
    rows = torch.tensor([0, 1, 2, 4])
    arguments = case.arguments(module, OLD)
    kept = {n: v[rows] if v.shape[0] == ROWS and n != "lin_weight" else v for n, v in arguments.items()}
    torch.testing.assert_close(module(**kept)[0], loss)


def test_x02_advantages_of_tokens() -> None:
    """At every chunk size the loss of advantages repeated is that of one a row; any other shape is refused."""
    case, losses = make_case(), []
    for chunk_size in (1, 2, 4):
        for shape in ((ROWS,), (ROWS, TOKENS)):
            module = LigerFusedLinearGRPOLoss(chunk_size=chunk_size)
            row = case.inputs["advantages"]
            arguments = case.arguments(module, OLD)
            arguments["advantages"] = row if len(shape) == 1 else row.unsqueeze(1).expand(shape)
            losses.append(module(**arguments)[0])
    for loss in losses:
        torch.testing.assert_close(loss, losses[0])
    arguments["advantages"] = case.inputs["advantages"].unsqueeze(1)
    with pytest.raises(ValueError, match=r"advantages: got shape \[5, 1\], expected \[5\] or \[5, 6\]"):
        module(**arguments)


def test_no_reference_is_the_policy_itself() -> None:
    """liger-kernel's default beta with use_ref_model=False: the KL is 0, and reported."""
    case, module = make_case(), LigerFusedLinearGRPOLoss(use_ref_model=False)
    loss, metrics = module(**case.arguments(module, OLD))
    free = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False)
    expected, others = free(**case.arguments(free, OLD))
    torch.testing.assert_close(loss, expected)
    assert [len(metrics), len(others)] == [2, 1]
    assert metrics[0] == 0
    assert metrics[1] == others[0]


def test_reference_known_in_advance() -> None:
    case = make_case()
    module = LigerFusedLinearGRPOLoss(beta=0.3)
    arguments = case.arguments(module, OLD)
    expected = module(**arguments)
    log_p = (case.ref_hidden @ case.ref_weight.T + case.ref_bias).log_softmax(-1)
    known = log_p.gather(-1, case.ids.unsqueeze(-1)).squeeze(-1)
    for name in case.reference:
        del arguments[name]
    torch.testing.assert_close(module(**arguments, ref_per_token_logps=known), expected)


@pytest.mark.parametrize("name", ["dapo", "gspo"])
def test_gradcheck(name: str) -> None:
    case = make_case(lengths=(2, 1, 0, 2, 1), tokens=2, trainable="hidden bias")
    module = make_module(name, beta=0.2)

    def function(*leaves: Tensor) -> Tensor:
        heads = dict(zip(("_input", "bias"), leaves, strict=True))
        return module(**{**case.arguments(module, OLD), **heads})[0]

    assert torch.autograd.gradcheck(function, case.leaves)


def test_bfloat16_is_no_worse_than_naive_bfloat16() -> None:
    """Against fp64 on the same rounded inputs: at most twice the error of 16-bit logits, plus a rounding."""
    low, module = make_case(torch.bfloat16), LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False)
    low.inputs = {n: v.float() if v.is_floating_point() else v for n, v in low.inputs.items()}
    exact = replace(
        low, **{n: getattr(low, n).detach().double().requires_grad_() for n in ("hidden", "weight", "bias")}
    )
    loss, _ = module(**low.arguments(module, OLD))
    assert loss.dtype == torch.float32
    truth, _ = naive(module, exact.arguments(module, OLD))
    rough, _ = naive(module, low.arguments(module, OLD))
    assert abs(loss.double() - truth) <= 2 * abs(rough.double() - truth) + 1e-5
    got, want, other = (
        torch.autograd.grad(value, case.leaves) for value, case in ((loss, low), (truth, exact), (rough, low))
    )
    for a, b, c in zip(got, want, other, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.double() - b).abs().max() <= 2 * (c.double() - b).abs().max() + 2**-8 * b.abs().max()


@pytest.mark.parametrize("name", ["dapo", "gspo"])
def test_compiles_into_one_graph(name: str) -> None:
    case, module = make_case(), make_module(name)
    arguments = case.arguments(module, OLD)
    expected = module(**arguments)
    got = torch.compile(module, fullgraph=True, backend="aot_eager")(**arguments)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(*(torch.autograd.grad(loss, case.leaves) for loss, _ in (got, expected)))


def test_nothing_of_the_callers_is_written() -> None:
    case, module = make_case(), LigerFusedLinearGRPOLoss()
    arguments = case.arguments(module, OLD)
    copies = {name: tensor.detach().clone() for name, tensor in arguments.items()}
    module(**arguments)[0].backward()
    assert all(torch.equal(arguments[name], copies[name]) for name in copies)
    assert all(case.reference[name].grad is None for name in case.reference)


def test_functional_is_the_module() -> None:
    case, module = make_case(), LigerFusedLinearGRPOLoss(beta=0.2, loss_type="sapo", softcap=4.0)
    arguments = case.arguments(module, OLD)
    weight = arguments["lin_weight"]
    named = {name: tensor for name, tensor in arguments.items() if name != "lin_weight"}
    got = liger_fused_linear_grpo(**named, weight=weight, beta=0.2, loss_type="sapo", softcap=4.0)
    torch.testing.assert_close(got, module(**arguments), rtol=0, atol=0)


# refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"loss_type": "gpro"}, ValueError, "loss_type: got 'gpro', expected one of grpo"),
        ({"beta": 0.0}, ValueError, "use_ref_model: got True with beta=0, which reads no reference; expected False"),
        ({"beta": -0.1}, ValueError, "beta: got -0.1"),
        ({"beta": "x"}, TypeError, "beta: got 'x'"),
        ({"loss_type": "dr_grpo"}, ValueError, "max_completion_length: got None"),
        ({"loss_type": "cispo", "delta": 2.0}, ValueError, "delta: got 2.0, expected the default with"),
        ({"compiled": "yes"}, TypeError, "compiled: got 'yes'"),
        ({"use_ref_model": None}, TypeError, "use_ref_model: got None"),
        ({"named_metrics": 1}, TypeError, "named_metrics: got 1"),
        ({"ref_softcap": 5.0, "use_ref_model": False}, ValueError, "ref_softcap: got 5.0 with use_ref_model=False"),
        ({"top_entropy_quantile": 0.2, "chunk_size": 2}, ValueError,
         "chunk_size: got 2, expected 1 for top_entropy_quantile=0.2"),
        ({"top_entropy_quantile": 0.2, "strategy": "immediate"}, ValueError, "strategy: got 'immediate' with top_entropy"),
        ({"chunk_size": 0}, ValueError, "chunk_size: got 0, expected >= 1"),
        ({"temperature": 0.0}, ValueError, "temperature: got 0.0"),
        ({"strategy": "fast"}, ValueError, "strategy: got 'fast'"),
    ],
)  # fmt: skip
def test_bad_option(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        LigerFusedLinearGRPOLoss(**options)


def test_max_completion_length_is_taken_by_any_type() -> None:
    assert LigerFusedLinearGRPOLoss(max_completion_length=8).loss.max_completion_length is None


def test_bad_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is refused before the reference's head is projected."""

    def unreachable(*args: object, **kwargs: object) -> None:
        raise AssertionError("work was done before the arguments were checked")

    monkeypatch.setattr("liger_losses.modules.base.linear_logprobs", unreachable)
    case, module = make_case(), LigerFusedLinearGRPOLoss()
    good = case.arguments(module, OLD)

    def refused(error: type[Exception], message: str, **bad: Any) -> None:
        with pytest.raises(error, match=message):
            module(**{**good, **bad})

    refused(TypeError, "selected_token_ids: got list", selected_token_ids=case.ids.tolist())
    refused(TypeError, r"selected_token_ids: got dtype torch\.float64", selected_token_ids=case.ids.double())
    refused(ValueError, r"selected_token_ids: got shape \[6\]", selected_token_ids=case.ids[0])
    refused(ValueError, r"attention_mask: got shape \[5, 5\], expected \[5, 6\]", attention_mask=case.mask[:, :5])
    refused(ValueError, r"_input: got shape \[5, 5, 8\], expected \[5, 6, hidden size\]", _input=case.hidden[:, :5])
    refused(ValueError, r"lin_weight: got shape|_input: got shape", lin_weight=case.weight[:, :3])
    refused(ValueError, "bias: got shape", bias=case.bias[:3])
    refused(ValueError, "got 13 at row 0", selected_token_ids=case.ids.masked_fill(case.ids == case.ids[0, 0], VOCAB))
    refused(ValueError, "got -1 at row 0", selected_token_ids=case.ids.masked_fill(case.ids == case.ids[0, 0], -100))
    refused(ValueError, "expected either ref_input and ref_weight, or ref_per_token_logps",
            ref_per_token_logps=case.inputs["ref_per_token_logps"])  # fmt: skip
    refused(ValueError, "ref_weight: got None", ref_weight=None)
    refused(
        ValueError,
        r"old_per_token_logps: got shape \[5, 5\], expected \[5, 6\]",
        old_per_token_logps=case.inputs[OLD][:, :5],
    )
    refused(ValueError, r"vllm_is_ratio: got shape \[6\]", vllm_is_ratio=torch.ones(TOKENS))
    refused(ValueError, "inputs: got advantages, old_per_token_logps, .*values", values=case.inputs["values"])
    refused(ValueError, r"num_items_in_batch: got shape \[1\]", num_items_in_batch=torch.tensor([3]))
