"""What columns weigh, and moving the active ones: against plain indexing."""

from __future__ import annotations

import pytest
import torch

from liger_losses.kernels import (
    ColumnExtent,
    add_rows,
    choose_columns,
    column_extent,
    gather_columns,
    gather_rows,
    tailed_cast,
)

from .conftest import INTERPRETED

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


def padded(rows: int, columns: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    """Rows on 8-element boundaries with junk behind them, as the engine's tiles are."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    buffer = torch.full((rows, -(-columns // 8) * 8), float("nan"), dtype=dtype, device=device)
    buffer[:, :columns] = values.to(dtype)
    return buffer[:, :columns]


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one part of few rows."""
    if INTERPRETED:
        from liger_losses.kernels import column_extent_triton

        monkeypatch.setattr(column_extent_triton, "_STEPS", 8)


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize(("squares", "scaled"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("shape", [(3, 5), (17, 259), (70, 33)], ids=str)
def test_extent(device: str, shape: tuple[int, int], dtype: torch.dtype, squares: bool, scaled: bool) -> None:
    tile = padded(*shape, dtype, device)
    scale = torch.linspace(-2, 3, shape[0], device=device) if scaled else None
    found = column_extent(tile, scale, squares=squares)
    weight, total, row_sums = found
    size = tile.double().abs() * (1 if scale is None else scale.double().abs().unsqueeze(-1))
    assert {values.dtype for values in found} == {F32}
    torch.testing.assert_close(weight.double(), size.square().sum(0) if squares else size.amax(0), rtol=1e-5, atol=0)
    torch.testing.assert_close(total.double(), size.sum(0), rtol=1e-5, atol=0)
    torch.testing.assert_close(row_sums.double(), tile.double().sum(1), rtol=1e-5, atol=1e-5)
    assert all(map(torch.equal, found, column_extent(tile, scale, squares=squares)))


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("squares", [False, True])
def test_a_column_with_nan_has_a_nan_total(device: str, squares: bool) -> None:
    tile = padded(9, 12, F32, device)
    tile[4, 7] = float("nan")
    assert column_extent(tile, None, squares=squares).total.isnan().nonzero().tolist() == [[7]]


def test_no_rows(device: str) -> None:
    *columns, row_sums = column_extent(torch.empty(0, 6, device=device), None, squares=True)
    assert all(values.tolist() == [0] * 6 for values in columns)
    assert row_sums.shape == (0,)


def weighed(vocab: int, device: str, rows: int, *, squares: bool) -> ColumnExtent:
    """With sizes over many octaves."""
    generator = torch.Generator().manual_seed(7)
    total = torch.exp2(-24 * torch.rand(vocab, generator=generator))
    largest = total * (0.3 + 0.7 * torch.rand(vocab, generator=generator))
    extent = total * total / 3 if squares else largest, total, torch.zeros(rows)
    return ColumnExtent(*(values.to(device) for values in extent))


@pytest.mark.parametrize("targets", [None, [], [3, 3, 7, -100, 1 << 40]], ids=str)
@pytest.mark.parametrize(
    ("eps", "share"), [(None, 2.0**-10), (None, 2.0**-3), (2.0**-12, 1.0), (0.0, 1.0), (0.9999, 1)]
)
@pytest.mark.parametrize(("vocab", "rows"), [(9, 8), (1500, 8), (1500, 5000)])
def test_choice(device: str, vocab: int, rows: int, eps: float | None, share: float, targets: list[int] | None) -> None:
    extent = weighed(vocab, device, rows, squares=eps is None)
    weight, total, _ = (values.double().cpu() for values in extent)
    target = None if targets is None else torch.tensor(targets, dtype=torch.int64, device=device)
    found = choose_columns(extent, target, eps=eps, share=share)
    always = torch.zeros(vocab, dtype=torch.bool)
    always[[t for t in targets or [] if 0 <= t < vocab]] = True
    active = found.active.cpu()
    count = int(found.count)
    if eps is not None:
        assert torch.equal(active, (weight > eps) | always)
    else:
        allowed, tail = share**2 * weight.sum(), ~active
        most = min(allowed, (4 * share) ** 2 * weight.sum() / rows)
        assert weight[tail].sum() <= 1.001 * allowed
        assert not tail.any() or weight[tail].max() <= 1.001 * most
        # No more than needs be: half an octave more of them would weigh too much, or one of them would.
        light = weight <= 1.5 * (weight[tail].max() if tail.any() else most / 2.0**24)
        chosen = light & (weight <= most / 1.5) & ~always
        assert not (chosen & active).any() or weight[light].sum() >= 0.99 * allowed
    assert active[always].all()
    assert found.ids[:count].tolist() == active.nonzero().squeeze(-1).tolist()
    rest = total.masked_fill(active, 0)
    torch.testing.assert_close(found.profile.double().cpu(), rest / rest.sum().clamp_min(1e-300), rtol=1e-5, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("eps", [None, 0.5])
def test_choice_shows_what_is_no_number(device: str, eps: float | None, bad: float) -> None:
    extent = weighed(1100, device, 8, squares=eps is None)
    for values in extent[:2]:
        values[1050] = bad
        values[:5] = 0
    found = choose_columns(extent, torch.tensor([2], device=device), eps=eps, share=2.0**-10)
    assert found.active[1050]
    assert found.active[2]
    assert not found.active[3]
    if eps is None:
        assert int(found.count) == 1100 - 4


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("rows", "vocab", "active", "width"), [(5, 40, 7, 64), (19, 131, 131, 136), (3, 9, 0, 8)])
def test_gathered_columns(device: str, rows: int, vocab: int, active: int, width: int, dtype: torch.dtype) -> None:
    tile = padded(rows, vocab, dtype, device)
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(1))[:active].sort().values.to(device)
    out = torch.full((rows, width), float("nan"), dtype=dtype, device=device)
    row_sums = tile.float().sum(1)
    assert gather_columns(tile, ids, row_sums, out) is out
    assert torch.equal(out[:, :active], tile[:, ids])
    rest = torch.ones(vocab, dtype=torch.bool, device=device)
    rest[ids] = False
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out[:, active].double(), tile[:, rest].double().sum(1), rtol=eps, atol=2e-5)
    assert (out[:, active + 1 :] == 0).all()
    row_sums[0], row_sums[1] = float("nan"), -float("inf")
    assert gather_columns(tile, ids, row_sums, out)[:2, active].tolist() == [0, 0]


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
    none = torch.empty(0, dtype=torch.int32, device=device)
    sums, ones = torch.ones(0, device=device), torch.ones(2, 3, device=device)
    assert gather_columns(ones[:0], none, sums, torch.empty(0, 8, device=device)).shape == (0, 8)
    assert gather_rows(ones, none, torch.empty(0, 3, device=device)).shape == (0, 3)
    assert add_rows(torch.ones(2, 3, device=device), None, none, torch.empty(0, 3, device=device)).sum() == 6


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize(("rows", "width", "tails"), [(5, 9, 1), (39, 520, 3), (19, 1030, 7), (8, 1024, 20)])
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
