"""The matrix products, with fp32 accumulation and, where asked, fp32 results from low-precision inputs."""

from __future__ import annotations

import torch
from torch import Tensor

LOW_PRECISION = (torch.float16, torch.bfloat16)

# Width of the fp32 copies made where a device has no product that widens its result.
_UPCAST_BLOCK = 4096


def matmul(
    a: Tensor,  # [M, K]
    b: Tensor,  # [K, N]
    *,
    out: Tensor,  # [M, N], the inputs' dtype or fp32
    accumulate: bool = False,
) -> Tensor:
    """`out = a @ b`, or `out += a @ b`, summed in fp32 (fp64 for fp64) and rounded to `out.dtype` once.

    `a` and `b` share one dtype. `accumulate` needs an `out` of fp32 or fp64: a running sum in 16 bits loses what it is
    given (its error grows with the number of terms).
    """
    if a.shape[0] == 0 or b.shape[1] == 0:
        return out
    if a.shape[1] == 0:
        return out if accumulate else out.zero_()
    if a.dtype in LOW_PRECISION:
        if not a.is_cuda:
            return _matmul_upcast(a, b, out, accumulate)
        if out.dtype == torch.float32:
            if accumulate:
                return torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
            return torch.mm(a, b, out_dtype=torch.float32, out=out)
    if accumulate:
        return out.addmm_(a, b)
    return torch.mm(a, b, out=out)


def _matmul_upcast(a: Tensor, b: Tensor, out: Tensor, accumulate: bool) -> Tensor:
    # Blocks along the longest dimension (the vocabulary, in this library), so that the fp32 copies stay small.
    m, k, n = a.shape[0], a.shape[1], b.shape[1]
    if k >= max(m, n):
        total = out if out.dtype == torch.float32 else torch.zeros(m, n, dtype=torch.float32, device=out.device)
        if not accumulate:
            total.zero_()
        for start in range(0, k, _UPCAST_BLOCK):
            block = slice(start, start + _UPCAST_BLOCK)
            total.addmm_(a[:, block].float(), b[block].float())
        return out if total is out else out.copy_(total)
    if m >= n:
        right = b.float()
        for start in range(0, m, _UPCAST_BLOCK):
            block = slice(start, start + _UPCAST_BLOCK)
            _store(torch.mm(a[block].float(), right), out[block], accumulate)
    else:
        left = a.float()
        for start in range(0, n, _UPCAST_BLOCK):
            block = slice(start, start + _UPCAST_BLOCK)
            _store(torch.mm(left, b[:, block].float()), out[:, block], accumulate)
    return out


def _store(product: Tensor, out: Tensor, accumulate: bool) -> None:
    if accumulate:
        out.add_(product)
    else:
        out.copy_(product)
