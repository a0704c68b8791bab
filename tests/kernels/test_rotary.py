"""Rotary embedding against fp64 and against transformers' functions, in every form."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_losses.kernels import rotary
from liger_losses.kernels.rotary import LAYOUTS

from .conftest import INTERPRETED
from .test_norms import BF16, F16, F32, check, make


def plain(x: Tensor, cos: Tensor, sin: Tensor, layout: str, table: str, heads_dim: int) -> Tensor:
    cos, sin = cos.unsqueeze(heads_dim).to(x.dtype), sin.unsqueeze(heads_dim).to(x.dtype)
    if table == "pair":
        cos, sin = (
            t.repeat_interleave(2, -1) if layout == "interleaved" else torch.cat([t, t], -1) for t in (cos, sin)
        )
    width = cos.shape[-1]
    x, rest = x[..., :width], x[..., width:]
    if layout == "interleaved_to_half":
        x = torch.cat([x[..., ::2], x[..., 1::2]], -1)
    if layout == "interleaved":
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    else:
        turned = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1)
    return torch.cat([x * cos + turned * sin, rest], -1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("table", ["full", "pair"])
@pytest.mark.parametrize("heads_dim", [1, 2])
@pytest.mark.parametrize(("width", "size"), [(16, 16), (6, 6), (6, 11)])
@pytest.mark.parametrize("dtype", [F32] if INTERPRETED else [F32, BF16])
def test_rotation(
    device: str, layout: str, table: str, heads_dim: int, width: int, size: int, dtype: torch.dtype
) -> None:
    """B37: positions of each row, odd lengths, q that is not contiguous, and nothing written."""
    if layout == "interleaved_to_half":
        size = width
    batch, length = 2, 5
    q, k = (make(batch, length, n, size, dtype=dtype, device=device, seed=n) for n in (3, 1))
    if heads_dim == 1:
        q, k = q.detach().transpose(1, 2).requires_grad_(), k.detach().transpose(1, 2).requires_grad_()
        assert not q.is_contiguous()
    columns = width if table == "full" else width // 2
    cos, sin = (make(batch, length, columns, dtype=dtype, device=device, seed=9 + i).detach() for i in range(2))
    check(
        lambda *heads: rotary(*heads, cos, sin, layout=layout, table=table, heads_dim=heads_dim),
        lambda *heads: [plain(x, cos, sin, layout, table, heads_dim) for x in heads],
        [q, k], terms=8,
    )  # fmt: skip
    rotated = rotary(q, None, cos, sin, layout=layout, table=table, heads_dim=heads_dim)
    assert rotated[1] is None
    assert rotated[0].stride() == q.stride()


def test_one_table_for_all_rows(device: str) -> None:
    q, k = (make(2, n, 5, 8, dtype=F32, device=device, seed=n) for n in (3, 1))
    cos, sin = (make(5, 8, dtype=F32, device=device, seed=9 + i).detach() for i in range(2))
    for tables in ((cos, sin), (cos[None], sin[None]), (cos.expand(2, 5, 8), sin.expand(2, 5, 8))):
        torch.testing.assert_close(rotary(q, k, *tables)[0], plain(q, cos[None], sin[None], "half", "full", 1))


def test_half_of_the_results_used(device: str) -> None:
    q, k = (make(2, n, 5, 8, dtype=F32, device=device, seed=n) for n in (3, 1))
    cos, sin = (make(1, 5, 8, dtype=F32, device=device, seed=9 + i).detach() for i in range(2))
    for index, leaf in enumerate((q, k)):
        (found,) = torch.autograd.grad(rotary(q, k, cos, sin)[index].square().sum(), leaf)
        (wanted,) = torch.autograd.grad(plain(leaf, cos, sin, "half", "full", 1).square().sum(), leaf)
        torch.testing.assert_close(found, wanted)


def test_no_tokens(device: str) -> None:
    q = torch.empty(2, 3, 0, 8, device=device, requires_grad=True)
    out, _ = rotary(q, None, torch.empty(1, 0, 8, device=device), torch.empty(1, 0, 8, device=device))
    assert torch.autograd.grad(out.sum(), q)[0].shape == out.shape == q.shape


@pytest.mark.parametrize(
    ("family", "function", "options", "width"),
    [
        ("llama", "apply_rotary_pos_emb", {"layout": "half"}, 16),
        ("phi3", "apply_rotary_pos_emb", {"layout": "half"}, 8),
        ("cohere", "apply_rotary_pos_emb", {"layout": "interleaved"}, 16),
        ("glm", "apply_rotary_pos_emb", {"layout": "interleaved", "table": "pair"}, 8),
        ("deepseek_v3", "apply_rotary_pos_emb_interleave", {"layout": "interleaved_to_half", "table": "pair"}, 16),
    ],
)
@pytest.mark.parametrize("dtype", [F32, F16])
def test_transformers(
    device: str, family: str, function: str, options: dict[str, Any], width: int, dtype: torch.dtype
) -> None:
    modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    q, k = (make(2, n, 5, 16, dtype=dtype, device=device, seed=n) for n in (3, 1))
    cos, sin = (make(2, 5, width, dtype=dtype, device=device, seed=9 + i).detach() for i in range(2))
    given = [t[..., : width // 2] if options.get("table") == "pair" else t for t in (cos, sin)]
    for found, wanted in zip(rotary(q, k, *given, **options), getattr(modeling, function)(q, k, cos, sin), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=8 * torch.finfo(dtype).eps)


HEADS, TABLE = torch.zeros(2, 3, 5, 8), torch.zeros(1, 5, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rotary(HEADS, None, TABLE, TABLE, layout="x"), "layout: got 'x', expected one of ('half', 'interleaved', 'interleaved_to_half')"),
        (lambda: rotary(HEADS, None, TABLE, TABLE, table="x"), "table: got 'x', expected one of ('full', 'pair')"),
        (lambda: rotary(HEADS, None, TABLE, TABLE, heads_dim=3), "heads_dim: got 3, expected 1 for [B, heads, T, D] or 2 for [B, T, heads, D]"),
        (lambda: rotary(HEADS, None, TABLE, TABLE[:, :4]), "cos, sin: got shapes (1, 5, 8) and (1, 4, 8), expected [B or 1, T, R] for both"),
        (lambda: rotary(HEADS, None, TABLE, TABLE, heads_dim=2), "cos, sin: got shape (1, 5, 8), expected [2 or 1, 3, R] for q"),
        (lambda: rotary(HEADS[0], None, TABLE, TABLE), "q: got shape (3, 5, 8), expected four dimensions"),
        (lambda: rotary(HEADS, HEADS.half(), TABLE, TABLE), "k: got shape (2, 3, 5, 8) and torch.float16, expected the batch size, length and dtype of q, 2, 5 and torch.float32"),
        (lambda: rotary(HEADS, None, TABLE, TABLE, table="pair"), "cos, sin: got tables for 16 rotated entries, expected an even number of at most 8 of q's head (all of them with 'interleaved_to_half')"),
        (lambda: rotary(HEADS, None, TABLE.clone().requires_grad_(), TABLE), "cos, sin: got tables that require a gradient, expected constants; detach them"),
    ],
)  # fmt: skip
def test_bad_arguments(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call()
