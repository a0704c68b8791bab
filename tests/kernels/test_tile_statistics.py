"""`fold_tile` against the formulas in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_losses.kernels import STATISTICS, Emit, LogitTransform, RowState, fold_tile
from liger_losses.kernels.dispatch import use_triton

from ..oracle import EXACT, TRANSFORMS, check_close, largest, read_statistics, transformed

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
ROWS = 5
# Columns: a multiple of the alignment, and not; below and above the interpreter's block of 128, and CUDA's of 4096.
VOCABS = {"cpu": (64, 301), "cuda": (64, 257, 4097, 9001)}


def as_transform(options: dict[str, Any]) -> LogitTransform:
    return LogitTransform(options.get("logit_scale", 1.0), options.get("softcap"), options.get("temperature", 1.0))


def options_of(transform: str, device: str) -> dict[str, Any]:
    """A transform of the oracle's, or "rows": all of it with a temperature for each row."""
    if transform != "rows":
        return TRANSFORMS[transform]
    return {**TRANSFORMS["all"], "temperature": torch.tensor([0.5, 1.0, 0.7, 3.0, 1.3], device=device)}


def column_weights_of(vocab: int, device: str) -> Tensor:
    weights = torch.rand(vocab, generator=torch.Generator().manual_seed(1)).to(device)
    weights[vocab // 3] = 0
    return weights


def rows_of(rows: int, columns: int, dtype: torch.dtype, device: str, *, aligned: bool, fill: float = 0.0) -> Tensor:
    """`[rows, columns]`: rows on 8-element boundaries, or not."""
    stride = -(-columns // 8) * 8 if aligned else columns + 1 + columns % 2
    return torch.full((rows, stride), fill, dtype=dtype, device=device)[:, :columns]


def make_tile(
    vocab: int, dtype: torch.dtype, device: str, *, aligned: bool = True, bias: bool = True, rows: int = ROWS
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Projected rows, bias, targets: the first and last column, and the end of the first block."""
    generator = torch.Generator().manual_seed(vocab)
    tile = rows_of(rows, vocab, dtype, device, aligned=aligned)
    tile.copy_((4 * torch.randn(rows, vocab, generator=generator)).to(dtype))
    shift = torch.randn(vocab, generator=generator).to(device) if bias else None
    target = torch.tensor([0, vocab - 1, min(127, vocab - 1), vocab // 2, 3])[:rows].to(device)
    return tile, shift, target


def fold(
    tile: Tensor, bias: Tensor | None, target: Tensor, names: tuple[str, ...] = STATISTICS, *,
    options: dict[str, Any] | None = None, emit: Emit = Emit.NOTHING, out: Tensor | None = None,
    step: int | None = None, column_weights: Tensor | None = None,
) -> RowState:  # fmt: skip
    """One visit of the whole vocabulary, or blocks of `step` columns."""
    kind = torch.float64 if tile.dtype == torch.float64 else F32
    weighted = column_weights is not None
    state = RowState(tile.shape[0], names, device=tile.device, dtype=kind, column_weights=weighted)
    step = step or tile.shape[1]
    for start in range(0, tile.shape[1], step):
        block = slice(start, start + step)
        fold_tile(
            tile[:, block], None if bias is None else bias[block], target, state, as_transform(options or {}),
            first_column=start, emit=emit, out=out,
            column_weights=None if column_weights is None else column_weights[block],
        )  # fmt: skip
    return state


def logits(tile: Tensor, bias: Tensor | None, options: dict[str, Any], dtype: torch.dtype = torch.float64) -> Tensor:
    raw = tile.to(dtype)
    return transformed(raw if bias is None else raw + bias.to(dtype), **options)


def check(
    state: RowState, tile: Tensor, bias: Tensor | None, target: Tensor, options: dict[str, Any],
    column_weights: Tensor | None = None,
) -> None:  # fmt: skip
    got = state.statistics(tile.shape[1], column_weights)
    exact, naive = (
        read_statistics(logits(tile, bias, options, kind), target, column_weights) for kind in (torch.float64, F32)
    )
    scale = largest(logits(tile, bias, options))
    assert tuple(got) == state.names
    for name, value in got.items():
        if name in EXACT:
            assert torch.equal(value, exact[name])
        else:
            check_close(value, exact[name], naive[name], F32, terms=tile.shape[1], scale=scale, what=name)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("transform", ["plain", "all", "rows"])
def test_every_statistic(device: str, dtype: torch.dtype, aligned: bool, transform: str) -> None:
    for vocab in VOCABS[device]:
        tile, bias, target = make_tile(vocab, dtype, device, aligned=aligned, bias=transform != "plain")
        options = options_of(transform, device)
        check(fold(tile, bias, target, options=options), tile, bias, target, options)


@pytest.mark.parametrize("step", [None, 100])
def test_column_weights(device: str, step: int | None) -> None:
    """A column of weight 0 says nothing, be its logit -inf."""
    tile, bias, target = make_tile(257, F32, device)
    weights = column_weights_of(257, device)
    check(fold(tile, bias, target, step=step, column_weights=weights), tile, bias, target, {}, weights)
    tile[:, 257 // 3] = -float("inf")
    got = fold(tile, bias, target, ("mean_logprob",), step=step, column_weights=weights).statistics(257, weights)
    assert torch.isfinite(got["mean_logprob"]).all()


@pytest.mark.parametrize("names", [(), *((name,) for name in STATISTICS), ("lse", "entropy")], ids=str)
def test_any_statistics_alone(device: str, names: tuple[str, ...]) -> None:
    tile, bias, target = make_tile(257, F32, device)
    check(fold(tile, bias, target, names), tile, bias, target, {})


@pytest.mark.parametrize("step", [1, 100, 128, 200])
def test_vocabulary_blocks(device: str, step: int) -> None:
    vocab = 9 if step == 1 else VOCABS[device][-1]
    tile, bias, target = make_tile(vocab, F32, device, rows=3)
    check(fold(tile, bias, target, step=step, options=TRANSFORMS["all"]), tile, bias, target, TRANSFORMS["all"])


@pytest.mark.parametrize(("dtype", "written"), [(F32, F32), (F32, BF16), (F32, F16), (BF16, BF16), (F16, F16)], ids=str)
@pytest.mark.parametrize("emit", [Emit.GRADIENT, Emit.PROBABILITY], ids=lambda emit: emit.name)
@pytest.mark.parametrize("transform", ["plain", "all"])
def test_what_is_written(device: str, transform: str, emit: Emit, dtype: torch.dtype, written: torch.dtype) -> None:
    """`G = d logprob / d raw` or `p`, up to the row's factor; nothing beyond the 8-element boundary."""
    options = TRANSFORMS[transform]
    for vocab, aligned in ((VOCABS[device][-1], True), (257, False)):
        tile, bias, target = make_tile(vocab, dtype, device, aligned=aligned)
        copy = tile.clone()
        room = torch.full((ROWS + 1, vocab + 16), 7.0, dtype=written, device=device)
        out = rows_of(ROWS, vocab, written, device, aligned=True, fill=math.nan) if aligned else room[:ROWS, :vocab]
        state = fold(tile, bias, target, ("logprob",), options=options, emit=emit, out=out)
        assert torch.equal(tile, copy)
        found = out.double() * state.gradient_scale.double().unsqueeze(-1)

        def expected(kind: torch.dtype) -> Tensor:
            raw = tile.to(kind).requires_grad_()  # noqa: B023
            z = transformed(raw + bias.to(kind), **options)  # noqa: B023
            if emit == Emit.PROBABILITY:
                return z.softmax(-1)
            return torch.autograd.grad(read_statistics(z, target)["logprob"].sum(), raw)[0]  # noqa: B023

        scale = largest(logits(tile, bias, options))
        check_close(
            found, expected(torch.float64), expected(F32), written, terms=vocab, what=emit.name, scale=scale / 4
        )
        if emit == Emit.PROBABILITY:
            sums = found.sum(-1)
            assert (sums - 1).abs().max() < torch.finfo(written).eps + vocab**0.5 * torch.finfo(F32).eps
        if not aligned:
            assert (room[:, vocab + 8 :] == 7).all()
            assert (room[ROWS] == 7).all()


def test_small_probabilities_keep_their_relative_precision(device: str) -> None:
    """A bf16 entry is `p` rounded once, however small: off by 2^-8 of itself (2^-7 in Triton's interpreter, which
    truncates)."""
    tile, bias, target = make_tile(257, F32, device)
    out = rows_of(ROWS, 257, BF16, device, aligned=True)
    state = fold(tile, bias, target, ("logprob",), emit=Emit.PROBABILITY, out=out)
    p = logits(tile, bias, {}).softmax(-1)
    found = out.double() * state.gradient_scale.double().unsqueeze(-1)
    assert p.min() < 1e-9
    assert ((found - p).abs() <= torch.finfo(BF16).eps * p).all()


def test_the_targets_entry_of_a_confident_row(device: str) -> None:
    """`1 - p` of p = 1 - 1e-4 is 1e-4 in bf16, not 0: it is formed before it is rounded."""
    tile = torch.zeros(1, 64, device=device)
    tile[0, 5] = math.log(63e4)
    out = torch.empty(1, 64, dtype=BF16, device=device)
    state = fold(tile, None, torch.tensor([5], device=device), ("logprob",), emit=Emit.GRADIENT, out=out)
    found = (out.double() * state.gradient_scale.double().unsqueeze(-1))[0, 5].item()
    assert found == pytest.approx(1e-4, rel=0.01)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_the_targets_entry_survives_its_rounding(device: str, dtype: torch.dtype) -> None:
    """One entry often outweighs all the others together: the row's factor takes its rounding back."""
    tile, _, target = make_tile(300, torch.float32, device)
    out = torch.empty(*tile.shape, dtype=dtype, device=device)
    state = fold(tile, None, target, ("logprob",), emit=Emit.GRADIENT, out=out)
    found = (out.double() * state.gradient_scale.double().unsqueeze(-1)).gather(1, target.unsqueeze(-1)).squeeze(-1)
    exact = -torch.expm1(logits(tile, None, {}).log_softmax(-1).gather(1, target.unsqueeze(-1)).squeeze(-1))
    uncertain = exact > 0.5  # elsewhere the twin's normalised entry is rounded where it is small
    assert uncertain.any()
    torch.testing.assert_close(found[uncertain], exact[uncertain], rtol=torch.finfo(dtype).eps, atol=0)
    if use_triton(tile):
        torch.testing.assert_close(found[uncertain], exact[uncertain], rtol=1e-4, atol=0)


def far_rows(vocab: int, device: str) -> Tensor:
    """Rows that would break sums relative to what has been seen first."""
    generator = torch.Generator().manual_seed(0)
    tile = torch.randn(8, vocab, generator=generator)
    first = slice(0, vocab // 2)
    tile[0, first] -= 200.0  # the first block is far below the maximum
    tile[1, first] += 200.0  # and far above
    tile[2] += 1e4
    tile[3] -= 1e4
    tile[4] = 3.25  # all equal
    tile[5] *= 1e4
    tile[6, ::2] = -math.inf  # a masked vocabulary
    tile[7, first] = -math.inf  # of which the first block shows nothing
    return tile.to(device)


@pytest.mark.parametrize("step", [None, 64])
def test_extreme_rows(device: str, step: int | None) -> None:
    vocab = VOCABS[device][-1]
    tile, target = far_rows(vocab, device), torch.full((8,), vocab - 2 + vocab % 2, device=device)
    target[6] = 1
    state = fold(tile, None, target, step=step and step * vocab // 256)
    got, exact = state.statistics(vocab), read_statistics(tile.double(), target)
    naive = read_statistics(tile, target)
    for row in range(8):
        scale = tile[row].masked_fill(tile[row].isinf(), 0).abs().max().item()
        for name, value in got.items():
            if name in EXACT or (name in ("mean_logit", "mean_logprob") and row >= 6):
                assert torch.equal(value[row], exact[name][row].to(value.dtype)), (name, row)
                continue
            check_close(
                value[row], exact[name][row], naive[name][row], F32, terms=vocab, scale=scale, what=f"{name} {row}"
            )


@pytest.mark.parametrize("written", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("emit", [Emit.GRADIENT, Emit.PROBABILITY], ids=lambda emit: emit.name)
def test_what_is_written_for_extreme_rows(device: str, emit: Emit, written: torch.dtype) -> None:
    vocab = VOCABS[device][-1]
    tile, target = far_rows(vocab, device), torch.full((8,), vocab - 2 + vocab % 2, device=device)
    target[6] = 1
    out = torch.full((8, vocab), math.nan, dtype=written, device=device)
    state = fold(tile, None, target, ("logprob",), emit=emit, out=out)
    found = out.double() * state.gradient_scale.double().unsqueeze(-1)
    p, naive = tile.double().softmax(-1), tile.softmax(-1)
    hot = torch.nn.functional.one_hot(target, vocab)
    wanted = (p, naive) if emit == Emit.PROBABILITY else (hot - p, hot - naive)
    for row in range(8):
        scale = 1 + tile[row].masked_fill(tile[row].isinf(), 0).abs().max().item() * p[row].max().item() / 64
        check_close(found[row], wanted[0][row], wanted[1][row], written, terms=vocab, scale=scale, what=f"row {row}")


@pytest.mark.parametrize("written", [F32, BF16, F16], ids=str)
def test_rows_without_a_finite_logit_are_written_as_nothing(device: str, written: torch.dtype) -> None:
    """Up to an infinite factor: no number here, zero where a column of another tile is found to be finite."""
    tile, out = (
        torch.full((2, 40), -math.inf, device=device),
        torch.full((2, 40), math.nan, device=device, dtype=written),
    )
    tile[1, 7] = 3.0
    state = fold(tile, None, torch.tensor([3, 3], device=device), emit=Emit.PROBABILITY, out=out)
    assert not out[0].any()
    assert torch.equal(torch.nonzero(out[1]).squeeze(-1).cpu(), torch.tensor([7]))
    assert state.gradient_scale[0] == math.inf
    assert out[1, 7] * state.gradient_scale[1] == 1


def test_a_target_at_minus_infinity(device: str) -> None:
    tile = torch.zeros(2, 64, device=device)
    tile[0, 3] = -math.inf
    got = fold(tile, None, torch.tensor([3, 3], device=device)).statistics(64)
    assert got["logprob"][0] == -math.inf
    assert got["logprob"][1].item() == pytest.approx(-math.log(64))
    assert got["entropy"][0].item() == pytest.approx(math.log(63), rel=1e-6)


@pytest.mark.parametrize("wrong", [-1, -100, 257, 2**31 + 5, 2**40])
def test_a_target_out_of_range_is_nan_in_its_row_alone(device: str, wrong: int) -> None:
    tile, bias, target = make_tile(257, F32, device)
    out = torch.empty(ROWS, 257, device=device)
    want = fold(tile, bias, target, emit=Emit.GRADIENT, out=out).statistics(257)
    target[2] = wrong
    got = fold(tile, bias, target, emit=Emit.GRADIENT, out=out).statistics(257)
    assert got["logprob"][2].isnan()
    assert not got["is_top1"][2]
    others = torch.tensor([0, 1, 3, 4], device=device)
    for name in STATISTICS:
        assert torch.equal(got[name][others], want[name][others])
    assert torch.equal(got["lse"], want["lse"])


def test_ties_go_to_the_first(device: str) -> None:
    tile = torch.zeros(6, 300, device=device)
    tile[1:, 100] = 1.0
    tile[1:, 250] = 1.0
    target = torch.tensor([0, 100, 250, 5, 299, 99], device=device)
    for step in (None, 128, 100):
        first = fold(tile, None, target, ("argmax",), step=step).statistics(300)["argmax"]
        assert first.tolist() == [0, *[100] * 5]
        assert fold(tile, None, target, ("is_top1",), step=step).statistics(300)["is_top1"].tolist() == [
            True, True, False, False, False, False,
        ]  # fmt: skip


def test_narrow_is_a_view(device: str) -> None:
    tile, bias, target = make_tile(257, F32, device)
    state = RowState(ROWS, STATISTICS, device=tile.device, dtype=F32)
    for rows in (slice(0, 2), slice(2, ROWS)):
        part = state.narrow(rows.start, rows.stop - rows.start)
        fold_tile(tile[rows], bias, target[rows], part, LogitTransform())
    check(state, tile, bias, target, {})


def test_no_rows(device: str) -> None:
    state = RowState(0, STATISTICS, device=torch.device(device), dtype=F32)
    fold_tile(
        torch.empty(0, 9, device=device),
        None,
        torch.empty(0, dtype=torch.int64, device=device),
        state,
        LogitTransform(),
    )
    assert all(value.shape == (0,) for value in state.statistics(9).values())


def test_fp64_has_the_twin_alone(device: str) -> None:
    """The oracle's dtype has no Triton form: asking for one is refused, not passed over."""
    tile, _, target = make_tile(300, torch.float64, device)
    if use_triton(tile.float()):
        with pytest.raises(RuntimeError, match="requested for float64"):
            fold(tile, None, target)
        return
    got = fold(tile, None, target).statistics(300)
    for name, value in read_statistics(tile, target).items():
        torch.testing.assert_close(got[name], value)
