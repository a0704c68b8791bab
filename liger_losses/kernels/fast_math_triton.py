"""Logarithm and reciprocal in the device's own instructions, where a kernel is bound by arithmetic.

Triton's `log2` is a polynomial of some twenty instructions and its `/` takes about eight. Numbers below the least
normal one count as 0 here: the callers keep away from them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

TINY = tl.constexpr(1.1754944e-38)  # the least normal number

# The interpreter has no library of device functions, AMD's has no such logarithm.
_NATIVE = tl.constexpr(torch.version.hip is None and not triton.knobs.runtime.interpret)


@triton.jit
def fast_log2(x):
    # Off by at most 2^-22, absolutely between 1/2 and 2 and relatively elsewhere.
    if _NATIVE:
        return libdevice.fast_log2f(x)
    else:
        return tl.log2(x)


@triton.jit
def fast_reciprocal(x):
    # Off by one unit in the last place; of up to 2^126.
    if _NATIVE:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1)
    else:
        return 1.0 / x
