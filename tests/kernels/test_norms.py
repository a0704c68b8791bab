"""RMSNorm, fused residual addition and LayerNorm against fp64, in every form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_losses.kernels import CASTING_MODES, fused_add_rms_norm, layer_norm, rms_norm

from ..oracle import check_close, largest
from .conftest import INTERPRETED

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
WIDTHS = [1, 5, 7, 33, 130, 1000] + ([20000] if INTERPRETED else [8192, 65536])


def rows(width: int) -> tuple[int, int]:
    """More than the interpreter's programs, some of which then own two: it takes a second for a few wide rows."""
    return (1, 5) if INTERPRETED and width > 8192 else (3, 3)


def make(*shape: int, dtype: torch.dtype, device: str, seed: int = 0, mean: float = 0.0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64) + mean
    return values.to(device, dtype).requires_grad_()


def plain_rms(x: Tensor, weight: Tensor | None, offset: float, mode: str, eps: float = 1e-6) -> Tensor:
    """The formula in the dtype of `x`, rounding where the convention says so; in fp64 nothing rounds."""
    wide = torch.promote_types(x.dtype, F32)
    xhat = x.to(wide) * torch.rsqrt(x.to(wide).pow(2).mean(-1, keepdim=True) + eps)
    xhat = xhat.to(x.dtype) if mode == "llama" else xhat
    y = xhat if weight is None else xhat * (offset + weight.to(xhat.dtype))
    kept = x.dtype if weight is None or mode == "gemma" else torch.promote_types(x.dtype, weight.dtype)
    return y.to(kept)


def check(
    call: Callable[..., Any], plain: Callable[..., Any], tensors: list[Tensor], *, terms: int, seed: int = 9
) -> None:
    """Values and gradients of `call` against `plain` in fp64, as far off as `plain` in the tensors' dtype may be."""
    copies = [t.detach().clone() for t in tensors]

    def run(function: Callable[..., Any], leaves: list[Tensor]) -> list[Tensor]:
        outs = function(*leaves)
        outs = [outs] if isinstance(outs, Tensor) else list(outs)
        sent = [make(*o.shape, dtype=BF16, device="cpu", seed=seed + i).detach().to(o) for i, o in enumerate(outs)]
        before = [s.clone() for s in sent]
        found = torch.autograd.grad(outs, leaves, sent)
        assert all(torch.equal(s, b) for s, b in zip(sent, before, strict=True))  # B29
        return [*outs, *found]

    got, naive = run(call, tensors), run(plain, tensors)
    exact = run(plain, [t.detach().double().requires_grad_() for t in tensors])
    for index, (g, e, n) in enumerate(zip(got, exact, naive, strict=True)):
        assert g.dtype == n.dtype
        low = min((g.dtype, *(t.dtype for t in tensors)), key=lambda d: torch.finfo(d).bits)
        # The interpreter truncates where devices round: to a neighbour that is twice as far.
        check_close(g, e, n, low, terms=terms, scale=largest(e) * (1 + 3 * INTERPRETED), what=str(index))
    assert all(torch.equal(t, c) for t, c in zip(tensors, copies, strict=True))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rms_norm(device: str, width: int, dtype: torch.dtype) -> None:
    tensors = [make(*rows(width), width, dtype=dtype, device=device), make(width, dtype=dtype, device=device, seed=1)]
    check(
        lambda x, w: rms_norm(x, w, offset=1.0, eps=0.1),  # an eps at which width 1 has a gradient
        lambda x, w: plain_rms(x, w, 1.0, "llama", 0.1),
        tensors, terms=9 * width,
    )  # fmt: skip


@pytest.mark.parametrize("mode", CASTING_MODES)
@pytest.mark.parametrize(("dtype", "kept"), [(BF16, BF16), (BF16, F32), (F16, F16), (F32, BF16)])
def test_casting_modes(device: str, mode: str, dtype: torch.dtype, kept: torch.dtype) -> None:
    tensors = [make(6, 64, dtype=dtype, device=device), make(64, dtype=kept, device=device, seed=1)]
    check(lambda x, w: rms_norm(x, w, casting_mode=mode), lambda x, w: plain_rms(x, w, 0.0, mode), tensors, terms=64)


@pytest.mark.parametrize("width", [33, 1024] + ([] if INTERPRETED else [20000]))
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_fused_add(device: str, width: int, dtype: torch.dtype) -> None:
    tensors = [make(4, width, dtype=dtype, device=device, seed=i) for i in range(2)]
    tensors.append(make(width, dtype=dtype, device=device, seed=2))

    def plain(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return plain_rms(total, weight, 0.0, "gemma"), total

    check(lambda *t: fused_add_rms_norm(*t, casting_mode="gemma"), plain, tensors, terms=width)


@pytest.mark.parametrize("used", [0, 1])
def test_fused_add_of_which_one_result_is_used(device: str, used: int) -> None:
    tensors = [make(4, 16, dtype=F32, device=device, seed=i) for i in range(2)]
    found = torch.autograd.grad(fused_add_rms_norm(*tensors)[used].square().sum(), tensors)
    total = tensors[0].detach() + tensors[1].detach()
    want = total.requires_grad_()
    (wanted,) = torch.autograd.grad((plain_rms(want, None, 0.0, "llama") if used == 0 else want).square().sum(), want)
    for gradient in found:
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm(device: str, width: int) -> None:
    """B36: widths that are no power of two, around a mean of 1000."""
    if width == 1:
        x = make(4, 1, dtype=F32, device=device)
        assert torch.equal(layer_norm(x), torch.zeros_like(x))
        return
    tensors = [make(*rows(width), width, dtype=F32, device=device, mean=1000.0)]
    tensors += [make(width, dtype=F32, device=device, seed=i) for i in (1, 2)]
    check(
        layer_norm, lambda x, w, b: torch.nn.functional.layer_norm(x, (width,), w, b), tensors, terms=1000**2
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_layer_norm_with_offset_and_without_bias(device: str, dtype: torch.dtype) -> None:
    tensors = [make(5, 130, dtype=dtype, device=device), make(130, dtype=dtype, device=device, seed=1)]
    check(
        lambda x, w: layer_norm(x, w, offset=1.0), lambda x, w: torch.nn.functional.layer_norm(x, (130,), 1 + w),
        tensors, terms=650,
    )  # fmt: skip


@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_the_edges(device: str, norm: Callable[..., Tensor]) -> None:
    weight = make(8, dtype=F32, device=device, seed=1)
    for shape in ((0, 8), (2, 0, 8)):
        x = torch.empty(shape, device=device, requires_grad=True)
        y = norm(x, weight)
        assert y.shape == shape
        gradients = torch.autograd.grad(y.sum(), (x, weight))
        assert gradients[0].shape == shape
        assert torch.equal(gradients[1], torch.zeros_like(weight))
    # Rows that are not dense, columns that are not neighbours, and a gradient that has no memory of its own.
    wide = make(6, 4, 16, dtype=F32, device=device)
    for view in (wide[:, ::2, :8], wide[..., ::2], wide.transpose(0, 1)[..., :8], wide[..., 1:9]):
        dense = view.detach().clone().requires_grad_()
        got, want = norm(view, weight), norm(dense, weight)
        # Other strides may be another compilation, whose sums are as good and not the same.
        torch.testing.assert_close(got, want)
        gradient = torch.autograd.grad(got.sum(), wide, retain_graph=True)[0]
        assert gradient.count_nonzero() <= view.numel()
        sent = torch.autograd.grad(got, view, torch.ones_like(got))[0]
        torch.testing.assert_close(sent, torch.autograd.grad(want.sum(), dense)[0])


def test_a_shared_gradient_arrives_unharmed(device: str) -> None:
    """B29: the residual stream's gradient also goes to the norm."""
    h, w1, w2 = (make(*s, dtype=F32, device=device, seed=i) for i, s in enumerate([(4, 8), (8,), (8,)]))
    sent = make(4, 8, dtype=F32, device=device, seed=5).detach()
    for build in (lambda f: f(h, w1) + h, lambda f: f(h, w1) + f(h, w2)):
        kept = sent.clone()
        got = torch.autograd.grad(build(rms_norm), h, kept)[0]
        assert torch.equal(kept, sent)
        torch.testing.assert_close(
            got, torch.autograd.grad(build(lambda x, w: plain_rms(x, w, 0.0, "llama")), h, sent)[0]
        )


@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_backward_twice(device: str, norm: Callable[..., Tensor]) -> None:
    """B31: what is saved for backward is the caller's, and stays."""
    x, w = make(5, 33, dtype=F32, device=device), make(33, dtype=F32, device=device, seed=1)
    y = norm(x, w)
    kept = y.detach().clone()
    first = torch.autograd.grad(y.square().sum(), (x, w), retain_graph=True)
    second = torch.autograd.grad(y.square().sum(), (x, w))
    assert all(torch.equal(f, s) for f, s in zip(first, second, strict=True))
    assert torch.equal(y, kept)


def test_only_requested_gradients(device: str) -> None:
    x, w = make(4, 8, dtype=F32, device=device), make(8, dtype=F32, device=device)
    assert torch.autograd.grad(rms_norm(x.detach(), w).sum(), w)[0].shape == (8,)
    assert torch.autograd.grad(rms_norm(x, w.detach()).sum(), x)[0].shape == (4, 8)
    with torch.no_grad():
        assert not rms_norm(x, w).requires_grad


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rms_norm(torch.zeros(2, 3), torch.zeros(4)), ValueError, "weight: got shape (4,), expected (3,), the last size of x"),
        (lambda: rms_norm(torch.zeros(2, 3), casting_mode="x"), ValueError, "casting_mode: got 'x', expected one of ('llama', 'gemma', 'none')"),
        (lambda: rms_norm(torch.zeros(2, 3), offset=1.0), ValueError, "offset: got 1.0 without a weight, expected 0"),
        (lambda: rms_norm(torch.zeros(2, 3, dtype=torch.int64)), TypeError, "x: got dtype torch.int64, expected a floating-point tensor of 16 bits or more"),
        (lambda: rms_norm(torch.tensor(1.0)), ValueError, "x: got a scalar, expected [..., H]"),
        (lambda: fused_add_rms_norm(torch.zeros(2, 3), torch.zeros(3)), ValueError, "residual: got shape (3,), expected that of x, (2, 3)"),
        (lambda: layer_norm(torch.zeros(2, 3), None, torch.zeros(2)), ValueError, "bias: got shape (2,), expected (3,), the last size of x"),
        (lambda: layer_norm([1.0]), TypeError, "x: got list, expected a tensor"),
    ],
)  # fmt: skip
def test_bad_arguments(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message


@pytest.mark.parametrize("width", [8, 20000])
def test_a_variance_that_overflows_is_nan(width: int, device: str) -> None:
    x = torch.ones(2, width, device=device)
    x[0, ::2] = -1e30
    x.requires_grad_()
    y = layer_norm(x)
    y.sum().backward()
    assert x.grad is not None
    for found in (y, x.grad):
        assert found[0].isnan().all()
        assert found[1].isfinite().all()
