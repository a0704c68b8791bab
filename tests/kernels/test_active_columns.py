"""What columns weigh, and moving the active ones: against plain indexing."""

from __future__ import annotations

import pytest
import torch

from liger_losses.kernels import (
    add_rows,
    column_extent,
    gather_columns,
    gather_rows,
    tail_sums,
    tailed_cast,
    weighted_sum,
)

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


def padded(rows: int, columns: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    """Rows on 8-element boundaries with junk behind them, as the engine's tiles are."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    buffer = torch.full((rows, -(-columns // 8) * 8), float("nan"), dtype=dtype, device=device)
    buffer[:, :columns] = values.to(dtype)
    return buffer[:, :columns]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("shape", [(3, 5), (17, 259), (600, 33)], ids=str)
def test_extent(device: str, shape: tuple[int, int], dtype: torch.dtype, scaled: bool) -> None:
    tile = padded(*shape, dtype, device)
    scale = torch.linspace(-2, 3, shape[0], device=device) if scaled else None
    largest, total, squares = column_extent(tile, scale)
    size = tile.double().abs() * (1 if scale is None else scale.double().abs().unsqueeze(-1))
    assert largest.dtype == total.dtype == squares.dtype == F32
    torch.testing.assert_close(largest.double(), size.amax(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(total.double(), size.sum(0), rtol=1e-5, atol=0)
    torch.testing.assert_close(squares.double(), (size * size).sum(0), rtol=1e-5, atol=0)
    assert all(map(torch.equal, (largest, total, squares), column_extent(tile, scale)))


def test_a_column_with_nan_has_a_nan_sum(device: str) -> None:
    tile = padded(9, 12, F32, device)
    tile[4, 7] = float("nan")
    for sums in column_extent(tile, None)[1:]:
        assert sums.isnan().nonzero().tolist() == [[7]]


def test_no_rows(device: str) -> None:
    for values in column_extent(torch.empty(0, 6, device=device), None):
        assert values.tolist() == [0] * 6


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("rows", "vocab", "active", "width"), [(5, 40, 7, 64), (19, 131, 131, 136), (3, 9, 0, 8)])
def test_gathered_columns(device: str, rows: int, vocab: int, active: int, width: int, dtype: torch.dtype) -> None:
    tile = padded(rows, vocab, dtype, device)
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(1))[:active].sort().values.to(device)
    out = torch.full((rows, width), float("nan"), dtype=dtype, device=device)
    assert gather_columns(tile, ids, out) is out
    assert torch.equal(out[:, :active], tile[:, ids])
    assert (out[:, active:] == 0).all()


@pytest.mark.parametrize("width", [1, 24, 37, 2100])
@pytest.mark.parametrize(("active", "capacity"), [(7, 16), (12, 12), (0, 4)])
def test_gathered_rows_and_their_inverse(device: str, active: int, capacity: int, width: int) -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(31, width, generator=generator).to(device, BF16)
    ids = torch.randperm(31, generator=generator)[:active].to(device)
    out = torch.full((capacity, width), float("nan"), dtype=BF16, device=device)
    gather_rows(weight, ids, out)
    assert torch.equal(out[:active], weight[ids])
    assert (out[active:] == 0).all()

    total = torch.randn(31, width, generator=generator).to(device)
    expected = total.clone()
    expected[ids] += out[:active].float()
    part = out.float()
    part[active:] = float("nan")
    holding = total.clone()
    add_rows(holding, None, ids, part)
    assert torch.equal(holding, expected)

    # Rows that hold nothing yet are not read.
    written = torch.arange(31, device=device) % 2 == 0
    expected[ids] = out[:active].float() + torch.where(written[ids].unsqueeze(-1), total[ids], 0)
    total[~written] = expected[~written] = float("nan")
    expected[ids] = torch.where(written[ids].unsqueeze(-1), expected[ids], out[:active].float())
    holds = written.clone()
    holds[ids] = True
    add_rows(total, written, ids, part)
    torch.testing.assert_close(total, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(written, holds)


def test_nothing_to_move(device: str) -> None:
    none = torch.empty(0, dtype=torch.int64, device=device)
    assert gather_columns(torch.ones(2, 3, device=device), none, torch.empty(2, 0, device=device)).shape == (2, 0)
    assert gather_rows(torch.ones(2, 3, device=device), none, torch.empty(0, 3, device=device)).shape == (0, 3)
    assert add_rows(torch.ones(2, 3, device=device), None, none, torch.empty(0, 3, device=device)).sum() == 6


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", [(3, 5), (7, 259), (540, 33)], ids=str)
def test_tails(device: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    tile = padded(*shape, dtype, device)
    active = (torch.arange(shape[1], device=device) % 3) == 1
    expected = tile.double().masked_fill(active, 0).sum(-1)
    torch.testing.assert_close(tail_sums(tile, active).double(), expected, rtol=1e-5, atol=1e-4)
    weights = torch.rand(shape[0], generator=torch.Generator().manual_seed(5)).to(device)
    mean = weighted_sum(tile, weights)
    assert mean.dtype == F32
    torch.testing.assert_close(mean.double(), weights.double() @ tile.double(), rtol=1e-5, atol=1e-4)
    assert torch.equal(mean, weighted_sum(tile, weights))


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize(("rows", "width", "tails"), [(5, 9, 1), (19, 520, 3), (8, 1024, 20)])
@pytest.mark.parametrize("some", [False, True])
def test_tailed_cast(device: str, rows: int, width: int, tails: int, some: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(6)
    total, profiles, sums = (
        torch.randn(size, generator=generator).to(device) for size in ((rows, width), (tails, rows), (tails, width))
    )
    factor = torch.tensor(2.0**-24, device=device)
    written = torch.arange(rows, device=device) % 3 == 1 if some else None
    held = total.double()
    if written is not None:
        total[~written], held[~written] = float("nan"), 0
    copies = [t.clone() for t in (total, profiles, sums)]
    got = tailed_cast(total, written, profiles, sums, factor, dtype)
    exact = (held + profiles.double().t() @ sums.double()) * 2.0**-24
    assert got.dtype == dtype
    # The interpreter truncates to bf16.
    spacing = max(torch.finfo(dtype).eps * torch.finfo(dtype).tiny, 1e-5 * 2.0**-24)
    assert ((got.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + spacing).all()
    for one, copy in zip((total, profiles, sums), copies, strict=True):
        torch.testing.assert_close(one, copy, rtol=0, atol=0, equal_nan=True)


def test_tailed_cast_in_fp64() -> None:
    total, profiles, sums = (torch.randn(size, dtype=F64) for size in ((7, 4), (2, 7), (2, 4)))
    expected = (total + profiles.t() @ sums) * 3
    torch.testing.assert_close(tailed_cast(total, None, profiles, sums, torch.tensor(3.0, dtype=F64), F64), expected)
