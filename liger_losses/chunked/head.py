"""The language-model head as the engine sees it, and the checks of everything that is multiplied with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._checks import FLOATING, check_dense
from ..kernels import transformed, wide_dtype


@dataclass(frozen=True)
class Precision:
    """Dtypes of one call: of the products' inputs, of the projected logits, and of statistics and accumulators."""

    compute: torch.dtype
    logits: torch.dtype
    statistics: torch.dtype

    @classmethod
    def of(cls, compute: torch.dtype, logits: torch.dtype) -> Precision:
        """Statistics and sums are fp32, and fp64 where the products are."""
        return cls(compute, logits, wide_dtype(compute))


def check_logits_dtype(logits_dtype: str) -> None:
    if logits_dtype not in ("float32", "input"):
        raise ValueError(f"logits_dtype: got {logits_dtype!r}, expected 'float32' or 'input'")


NAMES = ("hidden", "weight", "bias")


def choose_precision(
    hidden: Tensor,
    weight: Tensor,
    logits_dtype: str,
    names: tuple[str, str, str] = NAMES,  # that the caller knows the head's tensors by
) -> Precision:
    """The dtype autocast asks for, else the lower of the two; fp64 stays fp64 throughout."""
    check_logits_dtype(logits_dtype)
    kinds = {hidden.dtype, weight.dtype}
    device = hidden.device.type
    if kinds == {torch.float64}:
        return Precision.of(torch.float64, torch.float64)
    if torch.is_autocast_enabled(device):
        compute = torch.get_autocast_dtype(device)
    elif len(kinds) == 1:
        compute = hidden.dtype
    elif kinds == {torch.float16, torch.bfloat16}:
        both = ", ".join(names[:2])
        raise TypeError(f"{both}: got float16 and bfloat16, which have no lower of the two; cast one of them")
    else:
        compute = min(kinds, key=lambda dtype: torch.finfo(dtype).bits)
    logits = compute if logits_dtype == "input" else torch.float32
    return Precision.of(compute, logits)


def check_head(
    hidden: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    target_shape: torch.Size,
    names: tuple[str, str, str] = NAMES,  # that the caller knows them by
) -> None:
    """Raise before any work for tensors that do not fit together."""
    for name, tensor in zip(names, (hidden, weight, bias), strict=True):
        if tensor is None and name == names[2]:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, expected a torch.Tensor")
        if tensor.dtype not in FLOATING:
            raise TypeError(f"{name}: got dtype {tensor.dtype}, expected one of {', '.join(map(str, FLOATING))}")
        check_dense(name, tensor)
    assert hidden is not None
    assert weight is not None
    refuse_transforms(hidden, weight, bias)
    if weight.dim() != 2:
        raise ValueError(f"{names[1]}: got shape {tuple(weight.shape)}, expected [V, H]")
    vocab, width = weight.shape
    if vocab == 0 or width == 0:
        raise ValueError(f"{names[1]}: got shape {tuple(weight.shape)}, expected V >= 1 and H >= 1")
    if hidden.dim() < 1 or hidden.shape[-1] != width:
        raise ValueError(
            f"{names[0]}: got shape {tuple(hidden.shape)}, expected last dimension {width} as in {names[1]} "
            f"{tuple(weight.shape)}"
        )
    if hidden.shape[:-1] != target_shape:
        raise ValueError(
            f"target: got shape {tuple(target_shape)}, expected {tuple(hidden.shape[:-1])}, that of {names[0]} without "
            "its last dimension"
        )
    if bias is not None and bias.shape != (vocab,):
        raise ValueError(f"{names[2]}: got shape {tuple(bias.shape)}, expected ({vocab},)")
    for name, tensor in zip(names[1:], (weight, bias), strict=True):
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(f"{name}: got device {tensor.device}, expected {hidden.device}, that of {names[0]}")


def refuse_transforms(*tensors: Tensor | None) -> None:
    """Raise for what the walk, which has one backward, knows nothing of: forward-mode AD and functorch's transforms."""
    if not transformed():
        return
    for tensor in tensors:
        # Left to torch, the tangent would silently be zero.
        if tensor is not None and forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError("forward-mode derivatives (torch.func.jvp, forward_ad) are not supported")
        if tensor is not None and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise NotImplementedError("torch.func's transforms (grad, vmap, jacrev, ...) are not supported: use "
                                      "torch.autograd.grad, and tensors with all their rows")  # fmt: skip
