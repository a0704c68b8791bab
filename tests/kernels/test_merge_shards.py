"""Folding each rank's columns and merging gives what folding all columns gives; both forms say the same."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from liger_losses.kernels import (
    STATISTICS,
    Emit,
    LogitTransform,
    RowState,
    fold_tile,
    implementation,
    merge_shards,
    shard_numbers,
)

ROWS, SHARD = 150, 9  # two programs, the second with rows beyond the end
PLAIN = LogitTransform()
NAMES = [
    ("logprob",),
    ("entropy",),
    ("is_top1",),
    ("argmax", "log_sum_sq_prob", "mean_logit"),
    STATISTICS,
]


def logits(ranks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows as they come, and those that are likely to go wrong, with their targets."""
    generator = torch.Generator().manual_seed(ranks)
    tile = 4 * torch.randn(ROWS, ranks * SHARD, generator=generator, dtype=torch.float64)
    target = torch.randint(0, ranks * SHARD, (ROWS,), generator=generator)
    tile[0, :SHARD] = -math.inf  # the first rank's columns are masked: all there are, if it is alone
    tile[1, -SHARD:] = -math.inf
    tile[2] = -math.inf
    tile[3] = 1.0  # ties between all
    tile[4, ranks * SHARD // 2 :: 3] = 50.0
    tile[5, -1] = math.nan
    tile[6, 0] = 90.0
    tile[6, -1] = -90.0
    tile[7] *= 1000
    target[8], target[9], target[10] = -100, ranks * SHARD, ranks * SHARD - 1
    return tile.to(dtype), target


def folded(
    tile: Tensor, target: Tensor, names: tuple[str, ...], ranks: int, device: str
) -> tuple[list[RowState], list[Tensor]]:
    """Each rank's state, rows of a larger one, and what it wrote."""
    weights = torch.linspace(0, 2, tile.shape[1], dtype=tile.dtype, device=device)
    states, written = [], []
    with implementation("torch"):
        for own, some in zip(tile.chunk(ranks, 1), weights.chunk(ranks), strict=True):
            weighted = "mean_logit" in names
            state = RowState(ROWS + 5, names, device=own.device, dtype=tile.dtype, column_weights=weighted)
            state = state.narrow(3, ROWS)
            out = torch.empty_like(own)
            fold_tile(
                own, None, target, state, PLAIN, first_column=len(states) * own.shape[1], emit=Emit.PROBABILITY,
                out=out, column_weights=some,
            )  # fmt: skip
            states.append(state)
            written.append(out)
    return states, written


def merged(states: list[RowState], target: Tensor) -> None:
    everyone = torch.stack([shard_numbers(state) for state in states])
    for state in states:
        merge_shards(everyone, state, target)


@pytest.mark.parametrize("names", NAMES, ids=" ".join)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_shards_make_up_the_whole(device: str, names: tuple[str, ...], ranks: int) -> None:
    tile, target = (t.to(device) for t in logits(ranks, torch.float32))
    states, written = folded(tile, target, names, ranks, device)
    merged(states, target)
    (whole,), _ = folded(tile, target, names, 1, device)
    number = torch.ones(ROWS, dtype=torch.bool, device=device)
    number[[2, 5]] = False  # without a probability to speak of; how they end up is seen below
    number[0] = ranks > 1
    number[1] = ranks > 1
    weights = torch.linspace(0, 2, tile.shape[1], device=device)
    expected = whole.statistics(tile.shape[1], weights)
    for state in states:
        for name, values in state.statistics(tile.shape[1], weights).items():
            assert values.dtype == expected[name].dtype
            torch.testing.assert_close(values[number], expected[name][number], rtol=2e-6, atol=2e-5, equal_nan=True)
        for name, values in zip(state.held[:-1], state.numbers[:-1], strict=True):
            torch.testing.assert_close(values, getattr(states[0], name), rtol=0, atol=0, equal_nan=True)
    p = torch.cat([out * s.gradient_scale.unsqueeze(-1) for out, s in zip(written, states, strict=True)], 1)
    torch.testing.assert_close(p[number], torch.softmax(tile.double(), -1).float()[number], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("names", NAMES, ids=" ".join)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_both_forms_agree(device: str, names: tuple[str, ...], ranks: int) -> None:
    tile, target = (t.to(device) for t in logits(ranks, torch.float32))
    states, _ = folded(tile, target, names, ranks, device)
    others, _ = folded(tile, target, names, ranks, device)
    merged(states, target)
    with implementation("torch"):
        merged(others, target)
    for state, other in zip(states, others, strict=True):
        torch.testing.assert_close(state.numbers, other.numbers, rtol=2e-6, atol=1e-6, equal_nan=True)
        for mine, theirs in ((state.argmax, other.argmax), (state.is_top1, other.is_top1)):
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine, theirs)


def test_rows_without_numbers(device: str) -> None:
    tile, target = (t.to(device) for t in logits(3, torch.float32))
    states, _ = folded(tile, target, STATISTICS, 3, device)
    merged(states, target)
    for state in states:
        assert state.max[2] == -math.inf
        assert state.sum_exp[2] == state.weighted[2] == 0
        assert state.argmax[2] == 0
        assert state.max[5].isnan()
        assert state.sum_exp[5].isnan()
        assert state.argmax[3] == 0  # of equal columns the first
        assert torch.equal(state.target[[8, 9]].isnan(), torch.tensor([True, True], device=device))
        assert state.target[10] == tile[10, -1]
        assert state.gradient_scale[2].isnan()  # no row of probabilities


def test_no_rows(device: str) -> None:
    state = RowState(0, ("logprob",), device=torch.device(device), dtype=torch.float32)
    merge_shards(shard_numbers(state).expand(2, -1, -1), state, torch.zeros(0, dtype=torch.int64, device=device))
    assert state.max.shape == (0,)


def test_double_precision() -> None:  # which has the torch form alone
    tile, target = logits(4, torch.float64)
    states, _ = folded(tile, target, STATISTICS, 4, "cpu")
    merged(states, target)
    expected = torch.log_softmax(tile, -1).gather(1, target.clamp(0, 35).unsqueeze(-1)).squeeze(-1)
    some = slice(10, None)
    torch.testing.assert_close(states[2].statistics(36, torch.ones(36))["logprob"][some], expected[some])
