"""LigerFusedLinearDPOLoss equals the loss object on whole logits, and liger-kernel where liger-kernel is right."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, fields

import pytest
import torch
from torch import Tensor

from liger_losses.chunked import ScoredTokens
from liger_losses.functional import liger_fused_linear_dpo
from liger_losses.losses import LOSS_TYPES
from liger_losses.modules import LigerFusedLinearDPOLoss

PAIRS, TOKENS, HIDDEN, REF_HIDDEN, VOCAB = 4, 6, 8, 5, 13
SMOOTHED = {"exo_pair": 0.1, "robust": 0.2, "aot": 0.1, "aot_unpaired": 0.1, "sigmoid": 0.1}


@dataclass
class Case:
    weight: Tensor
    hidden: Tensor
    target: Tensor
    bias: Tensor
    ref_hidden: Tensor
    ref_weight: Tensor
    ref_bias: Tensor

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden, self.weight, self.bias


def make_case(dtype: torch.dtype = torch.float64, ignore_index: int = -100, *, padded: bool = True) -> Case:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    target = torch.randint(0, VOCAB, (2 * PAIRS, TOKENS), generator=generator)
    if padded:
        lengths = torch.tensor([6, 3, 5, 2, 4, 6, 1, 3])
        target[torch.arange(TOKENS) >= lengths.unsqueeze(1)] = ignore_index
        target[1, 0] = ignore_index
    case = Case(
        normal(VOCAB, HIDDEN), normal(2 * PAIRS, TOKENS, HIDDEN), target, normal(VOCAB),
        normal(2 * PAIRS, TOKENS, REF_HIDDEN), normal(VOCAB, REF_HIDDEN), normal(VOCAB),
    )  # fmt: skip
    for leaf in case.leaves:
        leaf.requires_grad_()
    return case


def naive(module: LigerFusedLinearDPOLoss, case: Case) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss object on statistics of whole logits."""
    policy, reference = module.options.policy(), module.options.reference()
    mask = case.target != policy["ignore_index"]
    index = case.target.masked_fill(~mask, 0).unsqueeze(-1)

    def logits(hidden: Tensor, weight: Tensor, bias: Tensor, options: dict) -> Tensor:
        z, cap = options["logit_scale"] * (hidden @ weight.T + bias), options["softcap"]
        return (z if cap is None else cap * torch.tanh(z / cap)) / options["temperature"]

    z = logits(case.hidden, case.weight, case.bias, policy)
    log_p = z.log_softmax(-1)
    statistics = {
        "logprob": log_p.gather(-1, index).squeeze(-1) * mask,
        "mean_logit": z.mean(-1) * mask,
        "log_sum_sq_prob": (2 * log_p).logsumexp(-1) * mask,
    }
    inputs = {}
    if not module.loss.reference_free:
        ref = logits(case.ref_hidden, case.ref_weight, case.ref_bias, reference).log_softmax(-1)
        inputs["ref_logprobs"] = ref.gather(-1, index).squeeze(-1) * mask
    loss, metrics = module.loss(statistics, mask, inputs, module.loss.totals(mask, inputs))
    names = (
        "chosen_logps", "rejected_logps", "chosen_logits_mean", "rejected_logits_mean", "nll_loss",
        "chosen_rewards", "rejected_rewards",
    )  # fmt: skip
    return loss, tuple(metrics[name] for name in names)


def compare(module: LigerFusedLinearDPOLoss, case: Case, *arguments: Tensor) -> None:
    loss, outputs = module(*(arguments or case.arguments))
    expected, expected_outputs = naive(module, case)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(outputs, expected_outputs)
    assert not any(output.requires_grad for output in outputs)
    gradients = torch.autograd.grad(1.7 * loss, case.leaves)
    expected_gradients = torch.autograd.grad(1.7 * expected, case.leaves)
    torch.testing.assert_close(gradients, expected_gradients)


def options_of(name: str) -> dict:
    return {"loss_type": name, "label_smoothing": SMOOTHED.get(name, 0.0)}


@pytest.mark.parametrize("name", LOSS_TYPES)
def test_loss_types(name: str) -> None:
    compare(LigerFusedLinearDPOLoss(**options_of(name)), make_case())


@pytest.mark.parametrize(
    "options",
    [
        {"compute_nll_loss": True, "alpha": 0.3},
        {"average_log_prob": True, "beta": 0.5},
        {"ld_alpha": 0.4},
        {"use_weighting": True},
        {"use_weighting": True, "loss_type": ["sigmoid", "sft"]},
        {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
        {"f_divergence": "js_divergence", "loss_type": "ipo"},
        {"f_divergence": "alpha_divergence", "f_alpha": 0.2},
        {"temperature": 0.7, "softcap": 5.0, "logit_scale": 1.3},
        {"softcap": 5.0, "ref_softcap": 3.0, "ref_logit_scale": 0.5},
        {"logit_scale": 0.5},
        {"memory_budget": 1 << 20},
        {"compiled": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("strategy", ["auto", "cached", "recompute"])
def test_options(options: dict, strategy: str) -> None:
    compare(LigerFusedLinearDPOLoss(**options, strategy=strategy), make_case())


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 100])
def test_chunk_size_does_not_change_the_result(chunk_size: int) -> None:
    compare(LigerFusedLinearDPOLoss(chunk_size=chunk_size, compute_nll_loss=True, strategy="immediate"), make_case())


def test_chunk_size_is_an_upper_bound_above_one() -> None:
    bounds = [LigerFusedLinearDPOLoss(chunk_size=size).options.max_units for size in (1, 2, 7)]
    assert bounds == [None, 2, 7]


def test_reference_free() -> None:
    case = make_case()
    compare(LigerFusedLinearDPOLoss(use_ref_model=False), case, case.weight, case.hidden, case.target, case.bias)


@pytest.mark.parametrize("ignore_index", [-100, -1, 7])
def test_ignore_index(ignore_index: int) -> None:
    compare(LigerFusedLinearDPOLoss(ignore_index=ignore_index), make_case(ignore_index=ignore_index))


@pytest.mark.parametrize("options", [{}, {"average_log_prob": True}, {"ld_alpha": 0.4}], ids=str)
def test_reference_known_in_advance(options: dict) -> None:
    """The reference's log-probs from one run given to another: the same loss, gradients and rewards."""
    case, module = make_case(), LigerFusedLinearDPOLoss(beta=0.3, **options)
    loss, outputs = module(*case.arguments)
    known = {
        f"ref_{side}_logps": logps - rewards / 0.3
        for side, logps, rewards in (("chosen", outputs[0], outputs[5]), ("rejected", outputs[1], outputs[6]))
    }
    again, outputs_again = module(case.weight, case.hidden, case.target, case.bias, **known)
    torch.testing.assert_close(again, loss)
    torch.testing.assert_close(outputs_again, outputs)
    torch.testing.assert_close(torch.autograd.grad(again, case.leaves), torch.autograd.grad(loss, case.leaves))


def test_no_gradient_reaches_the_reference() -> None:
    case = make_case()
    references = (case.ref_hidden, case.ref_weight, case.ref_bias)
    for tensor in references:
        tensor.requires_grad_()
    LigerFusedLinearDPOLoss()(*case.arguments)[0].backward()
    assert all(tensor.grad is None for tensor in references)
    assert all(leaf.grad is not None for leaf in case.leaves)


def test_empty_row_leaves_no_trace() -> None:
    case = make_case()
    case.target[2] = -100
    module = LigerFusedLinearDPOLoss(average_log_prob=True, compute_nll_loss=True)
    compare(module, case)
    loss, outputs = module(*case.arguments)
    assert outputs[0][2] == 0
    hidden, weight, _ = torch.autograd.grad(loss, case.leaves)
    assert weight.isfinite().all()
    assert (hidden[2] == 0).all()
    case.target[:] = -100
    loss, outputs = module(*case.arguments)
    assert all((gradient == 0).all() for gradient in torch.autograd.grad(loss, case.leaves))
    assert all((output == 0).all() for output in outputs)


def test_gradcheck() -> None:
    case = make_case()
    module = LigerFusedLinearDPOLoss(label_smoothing=0.1, compute_nll_loss=True)
    rows = torch.tensor([0, 1, PAIRS, PAIRS + 1])
    hidden = case.hidden.detach()[rows, :3].clone().requires_grad_()
    known = {"ref_chosen_logps": torch.tensor([-9.0, -4.0]), "ref_rejected_logps": torch.tensor([-8.0, -6.0])}

    def function(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return module(weight, hidden, case.target[rows, :3], bias, **known)[0]

    assert torch.autograd.gradcheck(function, (hidden, case.weight, case.bias))


def test_bfloat16_is_no_worse_than_naive_bfloat16() -> None:
    """Against fp64 on the same rounded inputs: at most twice the error of 16-bit logits, plus a rounding."""
    low = make_case(torch.bfloat16)
    exact = Case(*(a.detach().double() if a.is_floating_point() else a for a in low.arguments))
    for leaf in exact.leaves:
        leaf.requires_grad_()
    module = LigerFusedLinearDPOLoss()
    truth, _ = naive(module, exact)
    loss, _ = module(*low.arguments)
    assert loss.dtype == torch.float32
    rough, _ = naive(module, low)
    assert abs(loss.double() - truth) <= 2 * abs(rough.double() - truth) + 1e-5 * truth.abs()
    gradients, truths, roughs = (
        torch.autograd.grad(value, case.leaves) for value, case in ((loss, low), (truth, exact), (rough, low))
    )
    for got, want, other in zip(gradients, truths, roughs, strict=True):
        assert got.dtype == torch.bfloat16
        error, naive_error = ((tensor.double() - want).abs().max() for tensor in (got, other))
        assert error <= 2 * naive_error + 2**-8 * want.abs().max()


def test_compiles_into_one_graph() -> None:
    case, module = make_case(), LigerFusedLinearDPOLoss(compute_nll_loss=True)
    expected = module(*case.arguments)
    got = torch.compile(module, fullgraph=True, backend="aot_eager")(*case.arguments)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(*(torch.autograd.grad(loss, case.leaves) for loss, _ in (got, expected)))


def test_nothing_of_the_callers_is_written() -> None:
    case = make_case()
    copies = [argument.detach().clone() for argument in case.arguments]
    LigerFusedLinearDPOLoss()(*case.arguments)[0].backward()
    assert all(torch.equal(argument, copy) for argument, copy in zip(case.arguments, copies, strict=True))


def test_counts_read_ahead() -> None:
    case, module = make_case(), LigerFusedLinearDPOLoss()
    tokens = ScoredTokens(case.target)
    arguments = (case.weight, case.hidden, tokens, *case.arguments[3:])
    torch.testing.assert_close(module(*arguments), module(*case.arguments))


def test_functional_is_the_module() -> None:
    case = make_case()
    module = LigerFusedLinearDPOLoss(compute_nll_loss=True, alpha=0.5, ld_alpha=0.3, softcap=4.0)
    expected = module(*case.arguments)
    weight, hidden, *rest = case.arguments
    got = liger_fused_linear_dpo(hidden, weight, *rest, compute_nll_loss=True, alpha=0.5, ld_alpha=0.3, softcap=4.0)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    with pytest.raises(TypeError, match="soft_cap"):
        liger_fused_linear_dpo(hidden, weight, *rest, soft_cap=4.0)


# liger-kernel -------------------------------------------------------------------------------------------------------

LIGER_TYPES = [
    "sigmoid", "hinge", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop",
]  # fmt: skip


@pytest.fixture(scope="module")
def liger() -> type:
    return pytest.importorskip("liger_kernel.chunked_loss.dpo_loss", exc_type=ImportError).LigerFusedLinearDPOLoss


def test_interface_of_liger_kernel(liger: type) -> None:
    """Its parameters come first, in its order, with its names and defaults; ours beyond are keyword-only."""
    for function in ("__init__", "forward"):
        theirs = inspect.signature(getattr(liger, function)).parameters
        ours = inspect.signature(getattr(LigerFusedLinearDPOLoss, function)).parameters
        assert list(ours)[: len(theirs)] == list(theirs)
        assert {name: ours[name].default for name in theirs} == {name: p.default for name, p in theirs.items()}
        assert all(p.kind is p.KEYWORD_ONLY for p in list(ours.values())[len(theirs) :])


def test_argument_order_of_liger_kernels_function(liger: type) -> None:
    from liger_kernel.chunked_loss.dpo_loss import LigerFusedLinearDPOFunction

    theirs = list(inspect.signature(LigerFusedLinearDPOFunction.forward).parameters.values())[1:]  # without ctx
    ours = list(inspect.signature(liger_fused_linear_dpo).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(theirs)]] == [(p.name, p.default) for p in theirs]


@pytest.mark.parametrize("loss_type", LIGER_TYPES)
@pytest.mark.parametrize("average_log_prob", [False, True])
@pytest.mark.parametrize("use_ref_model", [False, True])
def test_equals_liger_kernel(liger: type, loss_type: str, average_log_prob: bool, use_ref_model: bool) -> None:
    """In fp32, which is what it computes in. Its logit means count padding, so they are compared without any."""
    options = {
        "loss_type": loss_type,
        # With sigmoid it ignores the smoothing.
        "label_smoothing": 0.0 if loss_type == "sigmoid" else SMOOTHED.get(loss_type, 0.0),
        "average_log_prob": average_log_prob,
        "use_ref_model": use_ref_model,
        "compute_nll_loss": True,
        "alpha": 0.6,
        "beta": 0.2,
        "compiled": False,
    }
    for padded in (False, True):
        ours, theirs = (make_case(torch.float32, padded=padded) for _ in range(2))
        count = 7 if use_ref_model else 4
        loss, outputs = LigerFusedLinearDPOLoss(**options)(*ours.arguments[:count])
        expected, expected_outputs = liger(**options)(*theirs.arguments[:count])
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
        for index, (got, want) in enumerate(zip(outputs, expected_outputs, strict=True)):
            if padded and index in (2, 3):
                continue
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        loss.backward()
        expected.backward()
        for got, want in zip(ours.leaves, theirs.leaves, strict=True):
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-3, atol=1e-4)


# refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"loss_type": "dpo"}, ValueError, "loss_type: got 'dpo', expected one of sigmoid, hinge, ipo"),
        ({"loss_type": "exo_pair"}, ValueError, "label_smoothing: got 0.0"),
        ({"loss_type": "ipo", "label_smoothing": 0.1}, ValueError, "label_smoothing: got 0.1, expected 0 for"),
        ({"loss_type": "ipo", "average_log_prob": True}, ValueError, "average_log_prob: got True"),
        ({"loss_type": "aot", "use_weighting": True}, ValueError, "use_weighting: got"),
        ({"loss_type": "aot", "chunk_size": 2}, ValueError, "chunk_size: got 2, expected 1 for loss_type aot"),
        ({"loss_type": "aot", "strategy": "immediate"}, ValueError, "strategy: got 'immediate' with loss_type aot"),
        ({"chunk_size": 2, "strategy": "cached"}, ValueError, "chunk_size: got 2 with strategy='cached'"),
        ({"ref_softcap": 5.0, "use_ref_model": False}, ValueError, "ref_softcap: got 5.0 with use_ref_model=False"),
        ({"ref_logit_scale": 0.5, "use_ref_model": False}, ValueError, "ref_logit_scale: got 0.5"),
        ({"ignore_index": "x"}, TypeError, "ignore_index: got 'x', expected an int"),
        ({"chunk_size": None}, TypeError, "chunk_size: got None, expected an int"),
        ({"chunk_size": 0}, ValueError, "chunk_size: got 0, expected >= 1"),
        ({"chunk_size": 1.5}, TypeError, "chunk_size: got 1.5, expected an int"),
        ({"memory_budget": 0}, ValueError, "memory_budget: got 0"),
        ({"alpha": 0.5}, ValueError, "alpha: got 0.5"),
        ({"beta": 0.0}, ValueError, "beta: got 0.0"),
        ({"compiled": "yes"}, TypeError, "compiled: got 'yes'"),
        ({"use_ref_model": None}, TypeError, "use_ref_model: got None"),
        ({"temperature": 0.0}, ValueError, "temperature: got 0.0"),
        ({"softcap": -1.0}, ValueError, "softcap: got -1.0"),
        ({"ref_softcap": 0.0}, ValueError, "softcap: got 0.0"),
        ({"strategy": "fast"}, ValueError, "strategy: got 'fast', expected 'auto' or one of"),
        ({"logits_dtype": "bfloat16"}, ValueError, "logits_dtype: got 'bfloat16', expected 'float32' or 'input'"),
    ],
)  # fmt: skip
def test_bad_option(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        LigerFusedLinearDPOLoss(**options)


def test_bad_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is refused before the reference's head is projected."""

    def unreachable(*args: object, **kwargs: object) -> None:
        raise AssertionError("work was done before the arguments were checked")

    monkeypatch.setattr("liger_losses.modules.base.linear_logprobs", unreachable)
    case, module = make_case(), LigerFusedLinearDPOLoss()
    weight, hidden, target, bias, ref_hidden, ref_weight, ref_bias = case.arguments
    logps = torch.zeros(PAIRS)
    reference = {"ref_input": ref_hidden, "ref_weight": ref_weight, "ref_bias": ref_bias}
    known = {"ref_chosen_logps": logps, "ref_rejected_logps": logps}

    def refused(error: type[Exception], message: str, *arguments: object, **named: object) -> None:
        with pytest.raises(error, match=message):
            module(*arguments, **named)

    refused(
        ValueError, "target: got 7 rows, expected an even number", weight, hidden[:7], target[:7], bias, **reference
    )
    refused(ValueError, r"target: got shape \[6\]", weight, hidden[0], target[0], bias, **reference)
    refused(TypeError, r"target: got dtype torch\.float64", weight, hidden, target.double(), bias, **reference)
    refused(TypeError, "target: got list", weight, hidden, target.tolist(), bias, **reference)
    refused(
        ValueError, r"_input: got shape .*expected last dimension 7 as in lin_weight", weight[:, :7], hidden, target
    )
    refused(ValueError, r"target: got shape .*that of _input", weight, hidden, target[:, :5], bias, **reference)
    refused(ValueError, r"^bias: got shape \(12,\)", weight, hidden, target, bias[:12], **reference)
    refused(ValueError, r"lin_weight: got shape", hidden, weight, target, bias, **reference)
    refused(ValueError, r"target: got 13 at row 0", weight, hidden,
            target.masked_fill(target == target[0, 0], VOCAB), bias, **reference)  # fmt: skip
    refused(ValueError, "got no reference, expected either ref_input and ref_weight", weight, hidden, target)
    refused(ValueError, "expected either ref_input and ref_weight", weight, hidden, target, **reference, **known)
    refused(ValueError, "ref_weight: got None", weight, hidden, target, ref_input=ref_hidden)
    refused(ValueError, "ref_input: got None", weight, hidden, target, ref_bias=ref_bias, ref_weight=ref_weight)
    refused(ValueError, "ref_rejected_logps: got None", weight, hidden, target, ref_chosen_logps=logps)
    refused(ValueError, r"ref_chosen_logps: got shape \[3\], expected \[4\]", weight, hidden, target,
            ref_chosen_logps=logps[:3], ref_rejected_logps=logps)  # fmt: skip
    refused(ValueError, r"ref_input: got shape .*as in ref_weight", weight, hidden, target, ref_input=hidden,
            ref_weight=ref_weight)  # fmt: skip
    refused(ValueError, r"target: got shape .*that of ref_input", weight, hidden, target, ref_input=ref_hidden[:, :5],
            ref_weight=ref_weight)  # fmt: skip
    refused(ValueError, "ref_bias: got shape", weight, hidden, target, bias, ref_hidden, ref_weight, ref_bias[:3])
    free = LigerFusedLinearDPOLoss(use_ref_model=False)
    for extra in (reference, known):
        with pytest.raises(ValueError, match=r"got a tensor, expected None with use_ref_model=False"):
            free(weight, hidden, target, bias, **extra)
