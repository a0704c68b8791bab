"""`tile_gradient` against autograd in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from liger_losses.kernels import tile_gradient

from ..oracle import DIFFERENTIABLE, TRANSFORMS, check_close, read_statistics, transformed
from .test_tile_statistics import (
    BF16,
    F16,
    F32,
    ROWS,
    VOCABS,
    as_transform,
    column_weights_of,
    make_tile,
    options_of,
    rows_of,
)  # fmt: skip

COEFFICIENTS = DIFFERENTIABLE


def coefficients(device: str, rows: int = ROWS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(rows, generator=generator).to(device) for name in COEFFICIENTS}


def by_autograd(
    tile: Tensor,
    bias: Tensor | None,
    target: Tensor,
    sent: dict[str, Tensor],
    options: dict[str, Any],
    kind: torch.dtype,
    weights: Tensor | None = None,
) -> Tensor:
    raw = tile.detach().to(kind).requires_grad_()
    z = transformed(raw if bias is None else raw + bias.to(kind), **options)
    values = read_statistics(z, target, weights)
    return torch.autograd.grad(sum((values[name] * c.to(kind)).sum() for name, c in sent.items()), raw)[0]


def arguments(
    tile: Tensor,
    bias: Tensor | None,
    target: Tensor,
    sent: dict[str, Tensor],
    options: dict[str, Any],
    weights: Tensor | None = None,
) -> dict[str, Any]:
    """Statistics as the forward walk hands them over: fp32. Of `mean_logprob`, what reaches lse and the logits."""
    raw = tile.double() if bias is None else tile.double() + bias.double()
    values = read_statistics(transformed(raw, **options), target)
    zero = torch.zeros(tile.shape[0], device=tile.device)
    dlse, dlogit = sent.get("lse"), None
    if "mean_logprob" in sent:
        dlogit = sent["mean_logprob"] / tile.shape[1]
        share = 1.0 if weights is None else weights.mean()
        dlse = (zero if dlse is None else dlse) - sent["mean_logprob"] * share
    return {
        **{name: values[name].float() for name in ("logprob", "entropy", "lse")},
        "dlogprob": sent.get("logprob", zero),
        "dentropy": sent.get("entropy"),
        "dlse": dlse,
        "dlogit": dlogit,
        "column_weights": weights,
        "transform": as_transform(options),
    }


@pytest.mark.parametrize("names", [*((name,) for name in COEFFICIENTS), COEFFICIENTS], ids=str)
@pytest.mark.parametrize("transform", ["plain", "all", "rows"])
@pytest.mark.parametrize(("dtype", "written"), [(F32, F32), (F32, BF16), (BF16, BF16), (F16, F16)], ids=str)
def test_from_logits(
    device: str, dtype: torch.dtype, written: torch.dtype, transform: str, names: tuple[str, ...]
) -> None:
    options, sent = options_of(transform, device), {k: v for k, v in coefficients(device).items() if k in names}
    for vocab, aligned in ((VOCABS[device][-1], True), (257, False)):
        tile, bias, target = make_tile(vocab, dtype, device, aligned=aligned, bias=aligned)
        out = rows_of(ROWS, vocab, written, device, aligned=aligned, fill=float("nan"))
        tile_gradient(tile, bias, target, out=out, **arguments(tile, bias, target, sent, options))
        exact, naive = (by_autograd(tile, bias, target, sent, options, kind) for kind in (torch.float64, F32))
        check_close(out, exact, naive, written, terms=vocab, scale=1.0, what=str(names))


@pytest.mark.parametrize("names", [*((name,) for name in COEFFICIENTS[1:]), COEFFICIENTS], ids=str)
@pytest.mark.parametrize("transform", ["plain", "all", "rows"])
@pytest.mark.parametrize("written", [F32, BF16], ids=str)
def test_from_probabilities_in_place(device: str, written: torch.dtype, transform: str, names: tuple[str, ...]) -> None:
    """The tile holds `p` up to a factor, rounded to its dtype: the rounded tile is the naive computation."""
    options, sent = options_of(transform, device), {k: v for k, v in coefficients(device).items() if k in names}
    tile, bias, target = make_tile(VOCABS[device][-1], F32, device)
    given = arguments(tile, bias, target, sent, options)
    exact = by_autograd(tile, bias, target, sent, options, torch.float64)
    naive = by_autograd(tile.to(written), bias.to(written), target, sent, options, written)
    p = transformed(tile.double() + bias.double(), **options).softmax(-1)
    factor = torch.tensor([0.5, 1.0, 2.0, 8.0, 0.125], device=device)
    held = rows_of(ROWS, tile.shape[1], written, device, aligned=True)
    held.copy_(p / factor.double().unsqueeze(-1))
    tile_gradient(held, bias, target, out=held, probability_scale=factor, **given)
    check_close(held, exact, naive, written, terms=tile.shape[1], scale=1.0, what=str(names))


def test_zero_probabilities(device: str) -> None:
    """`p log p` of an underflowed entry is 0, not NaN."""
    vocab = 64
    tile = torch.zeros(2, vocab, device=device)
    tile[:, 7] = -1e4
    tile[1, 9] = 1e4
    target, sent = torch.tensor([1, 9], device=device), coefficients(device, 2)
    given = arguments(tile, None, target, sent, {})
    exact = by_autograd(tile, None, target, sent, {}, torch.float64)
    out = torch.empty_like(tile)
    tile_gradient(tile, None, target, out=out, **given)
    torch.testing.assert_close(out, exact.float())
    held = tile.softmax(-1)
    tile_gradient(held, None, target, out=held, probability_scale=torch.ones(2, device=device), **given)
    torch.testing.assert_close(held, exact.float())


def test_column_weights(device: str) -> None:
    tile, bias, target = make_tile(257, F32, device)
    sent, weights, out = coefficients(device), column_weights_of(257, device), torch.empty_like(tile)
    tile_gradient(tile, bias, target, out=out, **arguments(tile, bias, target, sent, {}, weights))
    exact, naive = (by_autograd(tile, bias, target, sent, {}, kind, weights) for kind in (torch.float64, F32))
    check_close(out, exact, naive, F32, terms=257, scale=1.0)


@pytest.mark.parametrize("step", [100, 128])
def test_vocabulary_blocks(device: str, step: int) -> None:
    options, sent = TRANSFORMS["all"], coefficients(device)
    tile, bias, target = make_tile(VOCABS[device][-1], F32, device)
    given = arguments(tile, bias, target, sent, options)
    whole, blocks = torch.empty_like(tile), torch.empty_like(tile)
    tile_gradient(tile, bias, target, out=whole, **given)
    for start in range(0, tile.shape[1], step):
        block = slice(start, start + step)
        tile_gradient(tile[:, block].clone(), bias[block], target, out=blocks[:, block], first_column=start, **given)
    torch.testing.assert_close(blocks, whole)


def test_no_rows(device: str) -> None:
    empty = torch.empty(0, device=device)
    tile = torch.empty(0, 9, device=device)
    tile_gradient(
        tile, None, empty.long(), lse=empty, logprob=empty, entropy=None, dlogprob=empty, dentropy=None, dlse=None,
        transform=as_transform({}), out=tile,
    )  # fmt: skip
