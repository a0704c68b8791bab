"""How the calls behave inside autograd and torch.compile: gradcheck, repetition, ownership, operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_losses.chunked import (
    fused_linear_distillation,
    fused_linear_loss,
    linear_divergence,
    linear_logprobs,
    linear_topk_logprobs,
    logit_statistics,
)
from liger_losses.chunked.operators import token_statistics, token_statistics_backward
from liger_losses.chunked.teacher import Teacher
from liger_losses.kernels import Divergence

from ..oracle import DIFFERENTIABLE, Case, ToyLoss, make_case

CALLS: dict[str, tuple[str, tuple[str, ...]]] = {
    "cached": ("cached", ("logprob",)),
    "recompute": ("recompute", ("logprob",)),
    "recompute entropy": ("recompute", ("logprob", "entropy")),
    "recompute all": ("recompute", ("logprob", "entropy", "lse", "mean_logprob", "mean_logit")),
    "auto": ("auto", ("logprob",)),
}
LOSSES = {
    "immediate": ToyLoss("pair"),
    "immediate several": ToyLoss("pair", ("logprob", "entropy", "lse", "mean_logprob")),
    "immediate token": ToyLoss("token", ("entropy",)),
    "cached": ToyLoss("batch"),
    "recompute": ToyLoss("sequence", ("lse", "logprob")),
}


def statistics_of(case: Case, call: str) -> Callable[..., tuple[Tensor, ...]]:
    strategy, names = CALLS[call]

    def function(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
        values = linear_logprobs(hidden, weight, case.target, bias, statistics=names, strategy=strategy, **case.options)
        return tuple(values[name] for name in names)

    return function


def loss_of(case: Case, name: str) -> Callable[..., Tensor]:
    def function(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return fused_linear_loss(
            LOSSES[name], hidden, weight, case.target, bias, strategy=name.split()[0], **case.options
        )[0]

    return function


def differentiable(values: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [v for v in ((values,) if isinstance(values, Tensor) else values) if v.requires_grad]


EVERYTHING = [(statistics_of, name) for name in CALLS] + [(loss_of, name) for name in LOSSES]
every_call = pytest.mark.parametrize(("build", "name"), EVERYTHING, ids=[f"{b.__name__} {n}" for b, n in EVERYTHING])


@every_call
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 4.0, "logit_scale": 1.2, "temperature": 0.8}], ids=["plain", "all"]
)
def test_gradcheck(build: Callable[..., Any], name: str, options: dict[str, float]) -> None:
    """X05: fp64 in, fp64 throughout."""
    case = make_case(2, 3, 4, 9, **options)
    assert torch.autograd.gradcheck(build(case, name), case.leaves)


def test_gradcheck_with_a_frozen_head() -> None:
    case = make_case(2, 3, 4, 9, trainable=("hidden",), softcap=3.0)
    assert torch.autograd.gradcheck(
        lambda hidden: linear_logprobs(hidden, case.weight, case.target, case.bias, strategy="frozen", softcap=3.0),
        (case.hidden,),
    )


def test_gradcheck_with_streamed_units() -> None:
    """One pair over two tiles; the directional check, for there are many tokens."""
    case = make_case(2, 75, 3, 9, scored="all")
    loss = ToyLoss("pair", ("logprob", "entropy"))

    def function(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return fused_linear_loss(loss, hidden, weight, case.target, bias, strategy="immediate", memory_budget=50_000)[0]

    assert torch.autograd.gradcheck(function, case.leaves, fast_mode=True)


@every_call
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_backward_twice(build: Callable[..., Any], name: str, dtype: torch.dtype) -> None:
    """The same gradient both times, and nothing of the caller's written: inputs, upstream gradients, outputs."""
    case = make_case(dtype=dtype, softcap=5.0)
    outputs = differentiable(build(case, name)(*case.leaves))
    sent = [torch.randn_like(output) for output in outputs]
    owned = [case.hidden, case.weight, case.bias, case.target, *sent, *outputs]
    copies = [tensor.detach().clone() for tensor in owned]
    first = torch.autograd.grad(outputs, case.leaves, sent, retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(outputs, case.leaves, sent)
    for one, two, copy in zip(first, second, kept, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, copy)  # the second pass wrote into a buffer of its own
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(owned, copies, strict=True))


@pytest.mark.unpoisoned
@every_call
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits(build: Callable[..., Any], name: str, dtype: torch.dtype) -> None:
    def run() -> list[Tensor]:
        case = make_case(4, 40, 16, 130, dtype=dtype)
        outputs = differentiable(build(case, name)(*case.leaves))
        return [*outputs, *torch.autograd.grad([output.sum() for output in outputs], case.leaves)]

    assert all(torch.equal(one, two) for one, two in zip(run(), run(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_all_strategies_agree(dtype: torch.dtype) -> None:
    """On one loss of log-probabilities, within the rounding of sums taken in another order."""
    case, loss = make_case(6, 30, 8, 130, dtype=dtype), ToyLoss("pair", ("logprob", "mean_logit"))
    found = {}
    for strategy in ("immediate", "cached", "recompute", "auto"):
        value, metrics = fused_linear_loss(loss, *case.head, strategy=strategy)
        found[strategy] = [value.detach(), *metrics.values(), *torch.autograd.grad(value, case.leaves)]
    for strategy in ("cached", "recompute", "auto"):
        torch.testing.assert_close(found[strategy], found["immediate"])
    case.weight.requires_grad_(False)
    case.bias.requires_grad_(False)
    value, _ = fused_linear_loss(loss, *case.head, strategy="frozen")
    torch.testing.assert_close(value, found["immediate"][0])
    index = 1 + len(metrics)
    torch.testing.assert_close(torch.autograd.grad(value, case.hidden)[0], found["immediate"][index])


def test_only_what_is_asked_for_comes_back() -> None:
    case = make_case(trainable=("weight",))
    for name in ("immediate", "cached", "recompute"):
        loss_of(case, name)(case.hidden, case.weight, case.bias).backward()
        assert case.weight.grad is not None
        assert case.hidden.grad is None
        assert case.bias.grad is None


def test_hidden_states_without_a_gradient_are_not_held() -> None:
    """Known gradients need them no more: whoever owns them may write over them before backward."""
    case = make_case(trainable=("weight",))
    loss = fused_linear_loss(ToyLoss("pair"), *case.head, strategy="immediate")[0]
    (before,) = torch.autograd.grad(loss, case.weight, retain_graph=True)
    case.hidden.zero_()
    assert torch.equal(torch.autograd.grad(loss, case.weight)[0], before)


def test_an_unused_statistic_sends_nothing_back() -> None:
    case = make_case()
    values = linear_logprobs(*case.head, statistics=("logprob", "entropy", "lse"))
    with_all = torch.autograd.grad(values["logprob"].sum(), case.leaves)
    alone = torch.autograd.grad(linear_logprobs(*case.head).sum(), case.leaves)
    torch.testing.assert_close(with_all, alone)


def test_a_graph_that_does_not_reach_the_loss() -> None:
    """Metrics are detached; a second output of the same graph is not disturbed by an unused loss."""
    case = make_case()
    value, metrics = fused_linear_loss(ToyLoss("pair"), *case.head)
    assert value.requires_grad
    assert not any(metric.requires_grad for metric in metrics.values())


# operators and torch.compile ----------------------------------------------------------------------------------------


def operator_arguments(
    case: Case, names: str, grads: str, strategy: str, index: bool, teacher: Teacher | None = None
) -> tuple[Any, ...]:
    flat = case.target.reshape(-1)
    positions = (flat != -100).nonzero().squeeze(1) if index else None
    counts = (case.target != -100).sum(-1).tolist() if index else None
    temperature = torch.linspace(0.5, 1.5, flat.numel(), dtype=torch.float64) if "entropy" in names else None
    weights = torch.linspace(0, 2, case.weight.shape[0], dtype=torch.float64) if "mean_logprob" in names else None
    return (
        case.hidden.detach().reshape(-1, case.hidden.shape[-1]).requires_grad_(case.hidden.requires_grad), case.weight,
        case.bias, case.target, positions, counts, temperature, weights, None,
        *(teacher.tensors if teacher else (None,) * 4), names, grads, -100, 1.2, 5.0, 0.9, torch.float64, torch.float64,
        strategy, None, *(bool(t is not None and t.requires_grad) for t in (case.hidden, case.weight, case.bias)),
        teacher.encode() if teacher else "", "",
    )  # fmt: skip


@pytest.mark.parametrize("index", [True, False], ids=["eager", "traced"])
@pytest.mark.parametrize(
    ("strategy", "names", "trainable"),
    [
        ("cached", "logprob,mean_logit,is_top1", ("hidden", "weight", "bias")),
        ("cached", "logprob", ("weight",)),
        ("recompute", "logprob,entropy,lse,mean_logprob", ("hidden", "weight", "bias")),
        ("recompute", "entropy,log_sum_sq_prob", ("hidden", "bias")),
        ("frozen", "logprob", ("hidden",)),
    ],
)
def test_opcheck(strategy: str, names: str, trainable: tuple[str, ...], index: bool) -> None:
    case = make_case(2, 3, 4, 9, trainable=trainable)
    grads = ",".join(name for name in names.split(",") if name in DIFFERENTIABLE)
    torch.library.opcheck(token_statistics, operator_arguments(case, names, grads, strategy, index))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("index", [True, False], ids=["eager", "traced"])
@pytest.mark.parametrize(
    ("strategy", "names"), [("cached", "logprob"), ("recompute", "logprob,entropy,lse,mean_logprob")]
)
def test_opcheck_of_the_backward(strategy: str, names: str, index: bool, turned: bool) -> None:
    """Gradients lie row by row, also where hidden states and weight lie column by column."""
    case = make_case(2, 3, 4, 9)
    arguments = [
        a.detach() if isinstance(a, Tensor) else a for a in operator_arguments(case, names, names, strategy, index)
    ]
    if turned:
        arguments[:2] = [tensor.T.contiguous().T for tensor in arguments[:2]]
    outputs = token_statistics(*arguments)
    count = len(names.split(","))
    sent = [torch.randn_like(output) for output in outputs[:count]] + [None] * (4 - count)
    entropy = outputs[1] if count > 1 else None
    torch.library.opcheck(token_statistics_backward, (*sent, entropy, *outputs[count:], *arguments))


@pytest.mark.parametrize("index", [True, False], ids=["eager", "traced"])
@pytest.mark.parametrize("strategy", ["cached", "recompute"])
@pytest.mark.parametrize("head", [True, False], ids=["head", "logits"])
def test_opcheck_beside_a_teacher(head: bool, strategy: str, index: bool) -> None:
    case = make_case(2, 3, 4, 9)
    numbers = torch.randn(6, 5, dtype=torch.float64), torch.randn(9, 5, dtype=torch.float64)
    divergence = Divergence(kind="jsd", hard_weight=0.5)
    teacher = Teacher(divergence, *numbers) if head else Teacher(divergence, logits=torch.randn(6, 9))
    names = "distillation,divergence,logprob"
    arguments = operator_arguments(case, names, "distillation", strategy, index, teacher)
    torch.library.opcheck(token_statistics, arguments)
    plain = [a.detach() if isinstance(a, Tensor) else a for a in arguments]
    outputs = token_statistics(*plain)
    sent = [torch.randn_like(outputs[0]), None, None, None]
    torch.library.opcheck(token_statistics_backward, (*sent, None, *outputs[3:], *plain))


@pytest.fixture
def compile_cleanly() -> Iterator[None]:
    """No state of another test; inductor's cache on disk does not know when an operator's schema has changed."""
    import torch._inductor.config as inductor

    torch._dynamo.reset()
    with inductor.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


def check_compiled(function: Callable[..., Any], case: Case, backend: str) -> None:
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    got, want = differentiable(compiled(*case.leaves)), differentiable(function(*case.leaves))
    torch.testing.assert_close(got, want)
    sent = [torch.randn_like(output) for output in want]
    torch.testing.assert_close(*(torch.autograd.grad(outputs, case.leaves, sent) for outputs in (got, want)))


@pytest.mark.usefixtures("compile_cleanly")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("build", "name"),
    [(b, n) for b, n in EVERYTHING if not n.startswith("immediate")],
    ids=[f"{b.__name__} {n}" for b, n in EVERYTHING if not n.startswith("immediate")],
)
def test_compiles_into_one_graph(build: Callable[..., Any], name: str, backend: str) -> None:
    check_compiled(build(make_case(), name), make_case(), backend)


@pytest.mark.usefixtures("compile_cleanly")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("trainable", [("hidden",), ("weight",), ("hidden", "weight", "bias")], ids=str)
def test_a_fused_loss_compiles_with_auto(trainable: tuple[str, ...], backend: str) -> None:
    case, loss = make_case(trainable=trainable, dtype=torch.float32), ToyLoss("pair", ("logprob", "mean_logit"))

    def function(*leaves: Tensor) -> Tensor:
        given = dict(zip(trainable, leaves, strict=True))
        tensors = {"hidden": case.hidden, "weight": case.weight, "bias": case.bias} | given
        return fused_linear_loss(loss, target=case.target, **tensors)[0]

    check_compiled(function, case, backend)


@pytest.mark.usefixtures("compile_cleanly")
def test_immediate_is_refused_while_tracing() -> None:
    case = make_case()
    with pytest.raises(Exception, match=r"'immediate'.*outside torch\.compile"):
        torch.compile(loss_of(case, "immediate"), fullgraph=True, backend="aot_eager")(*case.leaves)


@pytest.mark.usefixtures("compile_cleanly")
def test_a_compiled_call_serves_other_lengths() -> None:
    """Dynamic shapes: one graph, whatever the length and the mask."""
    compiled = torch.compile(linear_logprobs, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (5, 6, 9):
        case = make_case(3, length, scored="prompt")
        torch.testing.assert_close(compiled(*case.head), linear_logprobs(*case.head))


@pytest.mark.parametrize(("build", "name"), EVERYTHING, ids=[f"{b.__name__} {n}" for b, n in EVERYTHING])
def test_a_second_derivative_raises(build: Callable[..., Any], name: str) -> None:
    """Also where the upstream gradient is a constant: a gradient penalty must not silently contribute nothing."""
    case = make_case()
    value = sum(v.sum() for v in differentiable(build(case, name)(*case.leaves)))
    gradient = torch.autograd.grad(value, case.weight, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="second derivatives are not supported"):
        gradient.square().sum().backward()
    for leaf in case.leaves:  # a graph of its own, of which only what leads to this leaf is looked at
        value = sum(v.sum() for v in differentiable(build(case, name)(*case.leaves)))
        gradient = torch.autograd.grad(value, case.weight, create_graph=True)[0]
        with pytest.raises(NotImplementedError, match="second derivatives are not supported"):
            torch.autograd.grad(value + gradient.square().sum(), leaf)


SECOND = {
    "logit_statistics": lambda h, w, t: logit_statistics(h @ w.T, t)["logprob"],
    "entropy of logits": lambda h, w, t: logit_statistics(h @ w.T, t, statistics=("entropy",))["entropy"],
    "linear_topk_logprobs": lambda h, w, t: linear_topk_logprobs(h, w, t.unsqueeze(-1)),
    "linear_divergence": lambda h, w, t: linear_divergence(h, w, t, teacher_hidden=h.detach(), teacher_weight=-w),
    "fused_linear_distillation": lambda h, w, t: fused_linear_distillation(
        h, w, t, teacher_logits=torch.zeros(*t.shape, len(w)).double()
    )[0],
}  # fmt: skip


@pytest.mark.parametrize("penalised", [0, 1])
@pytest.mark.parametrize("name", SECOND)
def test_so_does_that_of_other_calls(name: str, penalised: int) -> None:
    case = make_case()
    leaves = case.leaves[:2]
    value = SECOND[name](*leaves, case.target).sum()
    gradient = torch.autograd.grad(value, leaves[penalised], create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="second derivatives are not supported"):
        torch.autograd.grad(gradient.square().sum(), leaves[1 - penalised])
