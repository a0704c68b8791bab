"""`scaled_cast`: a product in fp32, rounded once."""

from __future__ import annotations

import pytest
import torch

from liger_losses.kernels import RowTails, scaled_cast

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("kind", "dtype"), [(F32, BF16), (F32, F16), (BF16, BF16), (F16, F16), (BF16, F32), (F32, F32)]
)
@pytest.mark.parametrize("per_row", [True, False], ids=["a factor per row", "one factor"])
@pytest.mark.parametrize("shape", [(5, 17), (3, 2056), (1, 8), (6,)], ids=str)
def test_product(device: str, shape: tuple[int, ...], per_row: bool, kind: torch.dtype, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(shape, generator=generator).to(device, kind)
    factor = torch.randn(shape[:1] if per_row else (), generator=generator).to(device)
    copies = rows.clone(), factor.clone()
    got = scaled_cast(rows, factor, dtype)
    exact = rows.double() * (factor.double().unsqueeze(-1) if per_row and len(shape) == 2 else factor.double())
    assert got.dtype == dtype
    # One rounding of the product to fp32, one to the dtype; the interpreter truncates to bf16.
    relative, spacing = torch.finfo(dtype).eps + torch.finfo(F32).eps, torch.finfo(dtype).eps * torch.finfo(dtype).tiny
    assert ((got.double() - exact).abs() <= relative * exact.abs() + spacing).all()
    assert torch.equal(rows, copies[0])
    assert torch.equal(factor, copies[1])


@pytest.mark.parametrize(("kind", "dtype"), [(BF16, BF16), (F16, F16), (F32, F32), (F64, F64)])
@pytest.mark.parametrize("per_row", [True, False], ids=["a factor per row", "one factor"])
@pytest.mark.parametrize(("count", "width"), [(5, 17), (3, 2056)])
def test_tails(device: str, count: int, width: int, per_row: bool, kind: torch.dtype, dtype: torch.dtype) -> None:
    """A tail each, of either tile or of none; nothing is read of a row that has none."""
    generator, wide = torch.Generator().manual_seed(0), F64 if kind == F64 else F32
    rows = torch.randn(count, width, generator=generator).to(device, kind)
    factor, sizes = torch.randn(2, count, generator=generator).to(device, wide)
    factor = factor if per_row else factor[0]
    sums = torch.randn(2, width, generator=generator).to(device, wide)
    which = (torch.arange(count, device=device) % 3 - 1).int()
    tails = sizes.unsqueeze(-1) * sums[which.clamp_min(0).long()] * (which >= 0).unsqueeze(-1)
    exact = (rows.double() + tails.double()) * (factor.double().unsqueeze(-1) if per_row else factor.double())
    got = scaled_cast(rows, factor, dtype, RowTails(sizes.masked_fill(which < 0, float("nan")), which, sums))
    assert got.dtype == dtype
    bound = torch.finfo(dtype).eps + 4 * torch.finfo(wide).eps
    size = rows.double().abs() + tails.double().abs()
    assert ((got.double() - exact).abs() <= bound * size * factor.double().abs().max() + 1e-7).all()


def test_the_edges(device: str) -> None:
    for shape in ((0, 8), (8, 0)):
        assert scaled_cast(torch.empty(shape, device=device), torch.ones(shape[0], device=device), BF16).shape == shape
    strided = torch.randn(8, 16, device=device)[:, ::2]
    torch.testing.assert_close(scaled_cast(strided, torch.full((8,), 2.0, device=device), F32), 2 * strided)
    wide = torch.randn(3, 8, device=device, dtype=torch.float64)
    torch.testing.assert_close(scaled_cast(wide, wide[:, 0], torch.float64), wide * wide[:, :1])
    # A factor that fp16 has no room for, on a sum that it has none for: the product has.
    small = scaled_cast(torch.full((2, 8), 2.0**24, device=device), torch.full((2,), 2.0**-24, device=device), F16)
    assert (small == 1).all()
