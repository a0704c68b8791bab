"""`bernoulli_tile` against the formulas and autograd in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from liger_losses.kernels import INVALID_POSITIVE, bernoulli_tile

from ..oracle import check_close, largest, transformed
from .test_tile_statistics import BF16, F16, F32, ROWS, VOCABS, as_transform, make_tile, options_of, rows_of


def positives_of(vocab: int, device: str) -> Tensor:
    """None, one, several, the first and the last column; the places of the absent differ."""
    some = [[-1, -1, -1], [7, -1, -1], [5, 6, 40], [0, -1, vocab - 1], [-1, 3, 2]]
    return torch.tensor(some, device=device)


def log_likelihood(raw: Tensor, bias: Tensor | None, positives: Tensor, options: dict[str, Any]) -> Tensor:
    z = transformed(raw if bias is None else raw + bias.to(raw.dtype), **options)
    labels = torch.zeros(z.shape[0], z.shape[1] + 1, dtype=z.dtype, device=z.device)
    labels.scatter_(1, torch.where(positives < 0, z.shape[1], positives), 1.0)
    return -F.binary_cross_entropy_with_logits(z, labels[:, :-1], reduction="none").sum(-1)


@pytest.mark.parametrize(("dtype", "written"), [(F32, F32), (F32, BF16), (BF16, BF16), (F16, F16)], ids=str)
@pytest.mark.parametrize("transform", ["plain", "all", "rows"])
@pytest.mark.parametrize("step", [None, 100])
def test_likelihood_and_gradient(
    device: str, step: int | None, transform: str, dtype: torch.dtype, written: torch.dtype
) -> None:
    options = options_of(transform, device)
    for vocab, aligned in ((VOCABS[device][-1], True), (257, False)):
        tile, bias, _ = make_tile(vocab, dtype, device, aligned=aligned, bias=aligned)
        positives, factor = positives_of(vocab, device), torch.tensor([1.0, -2.0, 0.5, 3.0, 1.0], device=device)
        exact, naive = {}, {}
        for kind, result in ((torch.float64, exact), (F32, naive)):
            raw = tile.detach().to(kind).requires_grad_()
            result["total"] = log_likelihood(raw, bias, positives, options)
            result["gradient"] = torch.autograd.grad((result["total"] * factor.to(kind)).sum(), raw)[0]
        total = torch.zeros(ROWS, device=device)
        out = rows_of(ROWS, vocab, written, device, aligned=aligned, fill=float("nan"))
        for start in range(0, vocab, step or vocab):
            block = slice(start, start + (step or vocab))
            bernoulli_tile(
                tile[:, block], None if bias is None else bias[block], positives, as_transform(options), total=total,
                out=out[:, block], factor=factor, first_column=start,
            )  # fmt: skip
        check_close(total, exact["total"], naive["total"], F32, terms=vocab, scale=vocab * 1.0, what="total")
        check_close(out, exact["gradient"], naive["gradient"], written, terms=1, scale=3.0, what="gradient")


def test_many_unlikely_labels_add_up(device: str) -> None:
    """softplus(-20) is far below the rounding of 1, and a large label space is full of it."""
    tile = torch.full((2, 4096), -20.0, device=device)
    total = torch.zeros(2, device=device)
    bernoulli_tile(tile, None, torch.full((2, 1), -1, device=device), as_transform({}), total=total)
    want = -4096 * F.softplus(torch.tensor(-20.0, dtype=torch.float64))
    torch.testing.assert_close(total.double().cpu(), want.expand(2), rtol=1e-5, atol=0)


def test_in_place_and_invalid(device: str) -> None:
    tile, bias, _ = make_tile(257, F32, device)
    positives = positives_of(257, device)
    apart, total = torch.empty_like(tile), torch.zeros(ROWS, device=device)
    bernoulli_tile(tile, bias, positives, as_transform({}), out=apart)
    positives[1, 2] = INVALID_POSITIVE
    bernoulli_tile(tile, bias, positives, as_transform({}), total=total, out=tile)
    assert torch.equal(tile, apart)
    assert total.isnan().tolist() == [False, True, False, False, False]
    assert largest(total.nan_to_num()) > 0
