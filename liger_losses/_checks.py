"""Checks of scalar options and of tensors, each message naming the argument, what was seen and what is expected."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def check_number(
    name: str, value: object, *, above: float = -math.inf, low: float = -math.inf, high: float = math.inf
) -> None:
    """Raise unless `value` is a finite Python number with `value > above` and `low <= value <= high`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: got {value!r} of type {type(value).__name__}, expected a Python number")
    if not (math.isfinite(value) and value > above and low <= value <= high):
        bounds = [f"> {above:g}"] * (above > -math.inf) + [f">= {low:g}"] * (low > -math.inf)
        bounds += [f"<= {high:g}"] * (high < math.inf)
        raise ValueError(f"{name}: got {value!r}, expected a finite number {' and '.join(bounds)}".rstrip())


def check_count(name: str, value: object) -> Tensor:
    """`value`, a whole step's count of tokens, as a tensor without dimensions; > 0 where that can be read."""
    if isinstance(value, Tensor):
        check_shape(name, value, ())
        if value.dtype == torch.bool or value.is_complex():
            raise TypeError(f"{name}: got {value.dtype}, expected a number")
        readable = value.device.type == "cpu" and not torch.compiler.is_compiling()
        if readable and not value.item() > 0:
            raise ValueError(f"{name}: got {value.item()}, expected > 0")
        return value
    check_number(name, value, above=0)
    return torch.as_tensor(value)


def check_names(argument: str, given: Iterable[str], known: tuple[str, ...]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"{argument}: got {', '.join(unknown)}, expected names out of {', '.join(known)}")


def check_divides(name: str, reduction: str) -> None:
    """Raise for a count given to a reduction that has no use for it."""
    if reduction == "sum":
        raise ValueError(f"{name}: got a count, expected none with reduction='sum', which divides by nothing")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r} of type {type(value).__name__}, expected True or False")


def check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(known)}")


def check_float_tensor(name: str, value: object, *shapes: tuple[int, ...]) -> None:
    """Raise unless `value` is a floating-point tensor of one of `shapes` (any, when none is named)."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        seen = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name}: got {seen}, expected a floating-point tensor")
    check_shape(name, value, *shapes)


def check_shape(name: str, value: Tensor, *shapes: tuple[int, ...]) -> None:
    if shapes and tuple(value.shape) not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name}: got shape {list(value.shape)}, expected {expected}")


def check_mask(mask: object, logprobs: Tensor) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        seen = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask: got {seen}, expected a torch.bool tensor, True where the token is scored")
    if mask.dim() != 2 or mask.shape != logprobs.shape:
        raise ValueError(
            f"mask: got shape {list(mask.shape)}, expected [rows, tokens], the shape of logprobs, which is "
            f"{list(logprobs.shape)}"
        )
