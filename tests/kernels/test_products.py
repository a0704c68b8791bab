"""`matmul`: fp32 sums of 16-bit inputs, rounded once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from liger_losses.kernels import matmul, products

from ..oracle import check_close

SHAPES = [(5, 7, 3), (1, 1, 1), (40, 8, 3), (3, 8, 40), (3, 40, 8), (70, 70, 70)]


def operands(m: int, k: int, n: int, dtype: torch.dtype, *, transposed: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m * k + n)
    a, b = (torch.randn(*s, generator=generator, dtype=torch.float64).to(dtype) for s in ((m, k), (k, n)))
    return (a.t().contiguous().t(), b.t().contiguous().t()) if transposed else (a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize("accumulate", [False, True], ids=["store", "accumulate"])
def test_products(dtype: torch.dtype, transposed: bool, accumulate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_UPCAST_BLOCK", 16)  # several blocks, a ragged last one
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for shape in SHAPES:
        a, b = operands(*shape, dtype, transposed=transposed)
        for kind in {wide} if accumulate else {dtype, wide}:
            start = torch.full((shape[0], shape[2]), 0.5 if accumulate else float("nan"), dtype=kind)
            out = start.clone()
            assert matmul(a, b, out=out, accumulate=accumulate) is out
            base = start.double() if accumulate else 0
            exact = base + a.double() @ b.double()
            check_close(out, exact, base + (a.to(wide) @ b.to(wide)).double(), kind, terms=shape[1], what=str(shape))


def test_empty_operands() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((0, 3, 4), (3, 4, 0)):
            a, b = operands(*shape, dtype, transposed=False)
            assert matmul(a, b, out=torch.empty(shape[0], shape[2])).shape == (shape[0], shape[2])
        a, b = operands(3, 0, 4, dtype, transposed=False)
        assert (matmul(a, b, out=torch.empty(3, 4)) == 0).all()
        assert (matmul(a, b, out=torch.ones(3, 4), accumulate=True) == 1).all()


def test_many_small_terms_do_not_vanish() -> None:
    """B25: a running sum in 16 bits stops growing at 256."""
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    total = torch.zeros(1, 1)
    for _ in range(1000):
        matmul(one, one, out=total, accumulate=True)
    assert total.item() == 1000
