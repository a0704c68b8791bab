"""LigerJSD, LigerKLDIVLoss and LigerTVDLoss: torch's and liger-kernel's numbers, and where the latter are not to be had."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from liger_losses import LigerJSD, LigerKLDIVLoss, LigerTVDLoss, functional
from liger_losses.losses import divergence

# torch has it of "mean", which divides by the entries.
pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")

BT, V = 6, 9
LABELS = torch.tensor([1, -100, 2, -100, 3, 0])
MASK = LABELS != -100


def logs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Log-probabilities of student and teacher."""
    generator = torch.Generator().manual_seed(0)
    q, p = (torch.randn(BT, V, generator=generator, dtype=torch.float64).log_softmax(-1).to(dtype) for _ in "qp")
    return q.requires_grad_(), p


@pytest.mark.parametrize("beta", [0, 0.3, 0.5, 1])
@pytest.mark.parametrize("labels", [None, LABELS])
def test_jsd(beta: float, labels: Tensor | None) -> None:
    log_q, log_p = logs()
    mask = torch.ones(BT, dtype=torch.bool) if labels is None else MASK
    value = LigerJSD(beta)(log_q, log_p, labels)
    torch.testing.assert_close(value, divergence(log_q, log_p, kind="jsd", beta=beta)[mask].mean())
    logits = log_q.detach().requires_grad_()
    through_softmax = torch.autograd.grad(LigerJSD(beta)(logits.log_softmax(-1), log_p, labels), logits)[0]
    expected = torch.autograd.grad(divergence(logits, log_p, kind="jsd", beta=beta)[mask].mean(), logits)[0]
    torch.testing.assert_close(through_softmax, expected)
    torch.testing.assert_close(functional.liger_jsd(log_q, log_p, labels, beta), value)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
@pytest.mark.parametrize("log_target", [True, False])
def test_kl_div_is_torchs(reduction: str, log_target: bool) -> None:
    log_q, log_p = logs()
    target = log_p if log_target else log_p.exp()
    loss = LigerKLDIVLoss(reduction=reduction, log_target=log_target)
    assert isinstance(loss, torch.nn.KLDivLoss)
    value = loss(log_q, target)
    expected = F.kl_div(log_q, target, reduction=reduction, log_target=log_target)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(*(torch.autograd.grad(v.square().sum(), log_q)[0] for v in (value, expected)))
    twin = functional.liger_kl_div(log_q, target, reduction=reduction, log_target=log_target)
    torch.testing.assert_close(twin, value)


def test_kl_div_raises_small_targets_to_eps() -> None:
    log_q, log_p = logs()
    target = log_p.exp()
    value = LigerKLDIVLoss(eps=0.1, reduction="sum")(log_q, target)
    torch.testing.assert_close(value, (target * (target.clamp(min=0.1).log() - log_q)).sum())


@pytest.mark.parametrize(
    ("legacy", "reduction"),
    [({"size_average": False}, "sum"), ({"reduce": False}, "none"), ({"size_average": True}, "mean")],
)
@pytest.mark.filterwarnings("ignore:size_average and reduce")
def test_kl_div_takes_torchs_older_names(legacy: dict, reduction: str) -> None:
    log_q, log_p = logs()
    value = LigerKLDIVLoss(**legacy)(log_q, log_p.exp())
    torch.testing.assert_close(value, F.kl_div(log_q, log_p.exp(), reduction=reduction))


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
@pytest.mark.parametrize("labels", [None, LABELS])
def test_tvd(reduction: str, labels: Tensor | None) -> None:
    p, q = (x.detach().exp() for x in logs())
    p.requires_grad_()
    mask = torch.ones(BT, dtype=torch.bool) if labels is None else MASK
    terms = ((p - q).abs() / 2) * mask[:, None]
    expected = {"none": terms, "sum": terms.sum(), "mean": terms[mask].mean(), "batchmean": terms.sum() / mask.sum()}[
        reduction
    ]
    value = LigerTVDLoss(reduction)(p, q, labels)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(*(torch.autograd.grad(v.square().sum(), p)[0] for v in (value, expected)))
    torch.testing.assert_close(functional.liger_tvd(p, q, labels, reduction), value)


def test_gradcheck() -> None:
    log_q, log_p = logs()
    assert torch.autograd.gradcheck(lambda x: LigerJSD(0.3)(x, log_p, LABELS), log_q)
    assert torch.autograd.gradcheck(lambda x: LigerKLDIVLoss()(x, log_p.exp()), log_q)
    assert torch.autograd.gradcheck(
        lambda x: LigerTVDLoss()(x, log_p.exp(), LABELS), log_q.detach().exp().requires_grad_()
    )


@pytest.mark.parametrize("loss", [LigerJSD(), LigerTVDLoss(), LigerTVDLoss("mean"), LigerTVDLoss("none")], ids=str)
def test_ignored_rows_are_not_read(loss: torch.nn.Module) -> None:
    """B04: divided by the scored rows of the batch; nothing scored gives 0 and a zero gradient."""
    log_q, log_p = (x.detach() for x in logs())
    expected = loss(log_q, log_p, LABELS)
    log_q[1], log_p[3] = torch.nan, torch.inf
    log_q.requires_grad_()
    value = loss(log_q, log_p, LABELS)
    torch.testing.assert_close(value, expected)
    (gradient,) = torch.autograd.grad(value.sum(), log_q)
    assert gradient.isfinite().all()
    assert (gradient[~MASK] == 0).all()
    nothing = loss(log_q, log_p, torch.full_like(LABELS, -100))
    assert (nothing == 0).all()
    assert (torch.autograd.grad(nothing.sum(), log_q)[0] == 0).all()


def test_probabilities_of_zero() -> None:
    """Entries that both rule out add nothing; liger-kernel's are NaN (see below)."""
    log_q, log_p = (x.detach().clone() for x in logs())
    log_q[:, 2], log_p[:, 2] = -torch.inf, -torch.inf
    log_q.requires_grad_()
    others = [i for i in range(V) if i != 2]
    for loss, target in (
        (LigerJSD(), log_p), (LigerJSD(0), log_p), (LigerJSD(1), log_p), (LigerKLDIVLoss(reduction="sum"), log_p.exp()),
        (LigerKLDIVLoss(reduction="sum", log_target=True), log_p),
    ):  # fmt: skip
        value = loss(log_q, target)
        torch.testing.assert_close(value, loss(log_q[:, others], target[:, others]))
        assert torch.autograd.grad(value, log_q)[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp32_inside_and_nothing_written_to(dtype: torch.dtype) -> None:
    log_q, log_p = logs(dtype)
    p, q = log_q.detach().exp().requires_grad_(), log_p.exp()
    copies = [x.detach().clone() for x in (log_q, log_p, p, q)]
    for loss, inputs in ((LigerJSD(), (log_q, log_p)), (LigerKLDIVLoss(), (log_q, q)), (LigerTVDLoss(), (p, q))):
        value = loss(*inputs)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, loss(*(x.double() for x in inputs)).float(), rtol=1e-5, atol=1e-6)
        (gradient,) = torch.autograd.grad(2 * value, inputs[0])
        assert gradient.dtype == dtype
    for tensor, copy in zip((log_q, log_p, p, q), copies, strict=True):
        assert torch.equal(tensor, copy)


X = torch.zeros(3, 5)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: LigerJSD(1.5), ValueError, "beta: got 1.5, expected a finite number >= 0 and <= 1"),
        (lambda: LigerJSD(ignore_index=0.5), TypeError, "ignore_index"),
        (lambda: LigerTVDLoss("average"), ValueError, "reduction: got 'average', expected one of none, sum, mean, batchmean"),
        (lambda: LigerKLDIVLoss(reduction="average"), ValueError, "reduction: got 'average'"),
        (lambda: LigerKLDIVLoss(eps=-1), ValueError, "eps: got -1, expected a finite number >= 0"),
        (lambda: LigerKLDIVLoss(log_target=1), TypeError, "log_target: got 1 of type int"),
        (lambda: LigerJSD()(X, X[:2]), ValueError, r"log_p: got shape \[2, 5\], expected \[3, 5\]"),
        (lambda: LigerJSD()(X[None], X[None]), ValueError, r"log_q: got shape \[1, 3, 5\], expected \[BT, V\]"),
        (lambda: LigerJSD()(X, X, torch.zeros(2).long()), ValueError, r"shift_labels: got shape \[2\], expected \[3\]"),
        (lambda: LigerJSD()(X, X, torch.zeros(3)), TypeError, "shift_labels: got dtype torch.float32"),
        (lambda: LigerTVDLoss()(X, X.long()), TypeError, "q: got torch.int64, expected a floating-point tensor"),
        (lambda: LigerKLDIVLoss()(X, X[:, :4]), ValueError, r"y_true: got shape \[3, 4\], expected \[3, 5\]"),
        (lambda: functional.liger_kl_div(X, X, size_average=False), ValueError, "size_average: got False, expected True; reduction='sum'"),
    ],
)  # fmt: skip
def test_refusals(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


# liger-kernel has Triton kernels only, here under Triton's interpreter, which must be asked for before the first import
# and hands floats to two of the kernels as what they are, without the methods of Triton's scalars.
THEIRS = """
import json, sys, torch
import liger_kernel.ops.kl_div, liger_kernel.ops.tvd
from liger_kernel.transformers import LigerJSD, LigerKLDIVLoss, LigerTVDLoss
class Scalar(float):
    to = lambda self, dtype: self
class Launch:
    def __init__(self, kernel): self.kernel = kernel
    def __getitem__(self, grid):
        return lambda *a, **k: self.kernel[grid](*map(scalar, a), **{n: scalar(v) for n, v in k.items()})
scalar = lambda x: Scalar(x) if type(x) is float else x
for module, name in ((liger_kernel.ops.tvd, "_tv_distance_kernel"), (liger_kernel.ops.kl_div, "_kldiv_kernel_forward")):
    setattr(module, name, Launch(getattr(module, name)))
answers = []
for name, options, q, p, labels in json.load(sys.stdin):
    q, p = torch.tensor(q).requires_grad_(), torch.tensor(p)
    try:
        value = globals()[name](**options)(q, p, *([] if labels is None else [torch.tensor(labels)]))
        value.sum().backward()
        answers.append([value.tolist(), q.grad.tolist()])
    except ZeroDivisionError as error:
        answers.append(repr(error))
print(json.dumps(answers))
"""


def liger_kernel(calls: list[tuple[str, dict, Tensor, Tensor, Tensor | None]]) -> list[Any]:
    """Value and gradient of each call, or the error it raised."""
    pytest.importorskip("liger_kernel.ops", exc_type=ImportError)
    asked = [
        (n, o, q.tolist(), p.tolist(), None if labels is None else labels.tolist()) for n, o, q, p, labels in calls
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", THEIRS], input=json.dumps(asked), env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.slow
def test_numbers_of_liger_kernel() -> None:
    """And where it is wrong: two rows that are not scored, and entries of probability 0, are no reason for an error."""
    log_q, log_p = (x.detach() for x in logs(torch.float32))
    q, p = log_q.exp(), log_p.exp()
    calls: list[tuple[str, dict, Tensor, Tensor, Tensor | None]] = [
        ("LigerJSD", {"beta": beta}, log_q, log_p, labels) for beta in (0.0, 0.3, 1.0) for labels in (None, LABELS)
    ]
    for reduction in ("none", "sum", "mean", "batchmean"):
        calls.append(("LigerKLDIVLoss", {"reduction": reduction}, log_q, p, None))
        calls.append(("LigerTVDLoss", {"reduction": reduction}, q, p, LABELS))
    calls.append(("LigerKLDIVLoss", {"log_target": True, "eps": 0.1}, log_q, log_p, None))
    calls.append(("LigerKLDIVLoss", {"eps": 0.1}, log_q, p, None))
    ruled_out = [torch.cat([x, torch.full((BT, 1), -torch.inf)], -1) for x in (log_q, log_p)]
    wrong: list[tuple[str, dict, Tensor, Tensor, Tensor | None]] = [
        ("LigerTVDLoss", {}, q, p, torch.full_like(LABELS, -100)),  # divides by 0
        ("LigerJSD", {}, *ruled_out, None),  # -inf - -inf
        ("LigerKLDIVLoss", {}, ruled_out[0], ruled_out[1].exp(), None),  # 0 * inf
        ("LigerKLDIVLoss", {"log_target": True}, *ruled_out, None),
    ]
    theirs = liger_kernel(calls + wrong)
    classes = {"LigerJSD": LigerJSD, "LigerKLDIVLoss": LigerKLDIVLoss, "LigerTVDLoss": LigerTVDLoss}
    for (name, options, student, teacher, labels), (value, gradient) in zip(calls, theirs, strict=False):
        student = student.clone().requires_grad_()
        ours = classes[name](**options)(student, teacher, *([] if labels is None else [labels]))
        torch.testing.assert_close(ours, torch.tensor(value), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            torch.autograd.grad(ours.sum(), student)[0], torch.tensor(gradient), rtol=1e-5, atol=1e-6
        )
    division, *nans = theirs[len(calls) :]
    assert division == "ZeroDivisionError('float division by zero')"
    assert all(value != value for value, _ in nans)


@pytest.mark.parametrize("name", ["LigerJSD", "LigerKLDIVLoss", "LigerTVDLoss"])
def test_interface_of_liger_kernel(name: str) -> None:
    pytest.importorskip("liger_kernel.transformers", exc_type=ImportError)
    import liger_kernel.transformers

    import liger_losses

    theirs, ours = getattr(liger_kernel.transformers, name), getattr(liger_losses, name)
    parameters = [inspect.signature(c.__init__).parameters for c in (ours, theirs)]
    if name == "LigerKLDIVLoss":  # eps, then whatever torch.nn.KLDivLoss takes
        torchs = inspect.signature(torch.nn.KLDivLoss.__init__).parameters
        parameters[1] = {"self": None, "eps": parameters[1]["eps"], **{n: p for n, p in torchs.items() if n != "self"}}
    assert list(parameters[0]) == list(parameters[1])
    assert all(p.default == parameters[1][n].default for n, p in parameters[0].items() if n != "self")
    forward = [inspect.signature(c.forward).parameters for c in (ours, theirs)]
    assert [(n, p.default) for n, p in forward[0].items()] == [(n, p.default) for n, p in forward[1].items()]


@pytest.mark.parametrize("name", ["liger_jsd", "liger_kl_div", "liger_tvd"])
def test_functions_of_liger_kernel(name: str) -> None:
    theirs = pytest.importorskip("liger_kernel.transformers.functional", exc_type=ImportError)
    signatures = [inspect.signature(getattr(m, name)).parameters for m in (functional, theirs)]
    assert [(n, p.default) for n, p in signatures[0].items()] == [(n, p.default) for n, p in signatures[1].items()]
