"""Checks of scalar options and of tensors, each message naming the argument, what was seen and what is expected."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# What a temperature or a softcap may be: fp32's smallest normal number, whose inverse is still finite, and its largest.
FP32_RANGE = (2.0**-126, (2 - 2.0**-23) * 2.0**127)


def is_dtensor(tensor: object) -> bool:
    """Without importing DTensor: where nobody has, there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def check_whole(name: str, tensor: object) -> None:
    """`check_dense`; and raise for a DTensor where nothing would gather it: what each rank made of its part would pass
    for the whole.
    """
    if is_dtensor(tensor):
        spread: Any = tensor
        placements = ", ".join(map(str, spread.placements))
        raise TypeError(f"{name}: got a DTensor with {placements}, expected a whole tensor: full_tensor() gathers it, "
                        "to_local() is this rank's part")  # fmt: skip
    if isinstance(tensor, Tensor):
        check_dense(name, tensor)


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise for a tensor that has not a number at every place: sparse, nested, on meta."""
    if tensor.layout != torch.strided or tensor.is_nested:
        seen = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        raise TypeError(f"{name}: got {seen}, expected a dense tensor")
    if tensor.device.type == "meta":
        raise ValueError(f"{name}: got a tensor on meta, which holds no values; expected one on a device")


def check_number(
    name: str, value: object, *, above: float = -math.inf, low: float = -math.inf, high: float = math.inf
) -> None:
    """Raise unless `value` is a finite Python number with `value > above` and `low <= value <= high`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: got {value!r} of type {type(value).__name__}, expected a Python number")
    # Comparisons, which NaN fails: they trace where torch.compile makes numbers symbolic, math.isfinite does not.
    if not (-math.inf < value < math.inf and value > above and low <= value <= high):
        bounds = [f"> {above:g}"] * (above > -math.inf) + [f">= {low:g}"] * (low > -math.inf)
        bounds += [f"<= {high:g}"] * (high < math.inf)
        raise ValueError(f"{name}: got {value!r}, expected a finite number {' and '.join(bounds)}".rstrip())


def check_weights(**weights: object) -> None:
    """Raise unless all are finite Python numbers >= 0, one of them > 0."""
    for name, value in weights.items():
        check_number(name, value, low=0)
    if not any(weights.values()):
        raise ValueError(f"{', '.join(weights)}: got 0 for all, expected one > 0")


def check_fp32_range(name: str, value: float) -> None:
    """Raise for a number > 0 that fp32 holds as 0 or infinity, or whose inverse it does."""
    if not FP32_RANGE[0] <= value <= FP32_RANGE[1]:
        raise ValueError(f"{name}: got {value}, expected {FP32_RANGE[0]:.1e} to {FP32_RANGE[1]:.1e}, so that it and "
                         "its inverse are finite in fp32")  # fmt: skip


def check_temperature(name: str, value: object) -> None:
    """Raise unless `value` is a Python number > 0 that, like its inverse, is finite in fp32."""
    check_number(name, value, above=0)
    check_fp32_range(name, value)  # type: ignore[arg-type]


def check_size(name: str, value: object) -> None:
    """Raise unless `value` is an int >= 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: got {value!r}, expected an int")
    if value < 1:
        raise ValueError(f"{name}: got {value}, expected >= 1")


def check_count(name: str, value: object) -> Tensor:
    """`value`, a whole step's count of tokens, as a tensor without dimensions; > 0 where that can be read."""
    if isinstance(value, Tensor):
        check_shape(name, value, ())
        if value.dtype == torch.bool or value.is_complex():
            raise TypeError(f"{name}: got {value.dtype}, expected a number")
        if value.is_floating_point():
            check_float_tensor(name, value)
        readable = value.device.type == "cpu" and not torch.compiler.is_compiling()
        if readable and not value.item() > 0:
            raise ValueError(f"{name}: got {value.item()}, expected > 0")
        return value
    check_number(name, value, above=0)
    if not isinstance(value, int):
        raise TypeError(f"{name}: got {value!r} of type {type(value).__name__}, expected an int or a torch.Tensor")
    return torch.as_tensor(value, device="cpu")


def check_names(argument: str, given: Iterable[str], known: tuple[str, ...]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"{argument}: got {', '.join(unknown)}, expected names out of {', '.join(known)}")


def check_divides(name: str, reduction: str) -> None:
    """Raise for a count given to a reduction that has no use for it."""
    if reduction == "sum":
        raise ValueError(f"{name}: got a count, expected none with reduction='sum', which divides by nothing")


def check_shared(teacher: int, student: int) -> None:
    """Raise where two vocabularies of different sizes share one column: a softmax over it is 1 for any model."""
    if student != teacher and min(student, teacher) == 1:
        raise ValueError(f"vocabulary: got 'shared' for {student} student and {teacher} teacher columns, of which one "
                         "is shared; expected at least 2")  # fmt: skip


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
    if value.dtype not in FLOATING:
        raise TypeError(f"{name}: got {value.dtype}, expected one of {', '.join(map(str, FLOATING))}")
    check_shape(name, value, *shapes)


def check_numbers(name: str, value: object, *shapes: tuple[int, ...]) -> None:
    """Raise unless `value` is a tensor of real numbers, whole or not, of one of `shapes`."""
    if not isinstance(value, Tensor) or value.dtype == torch.bool or value.is_complex():
        seen = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name}: got {seen}, expected a tensor of numbers")
    if value.is_floating_point():
        check_float_tensor(name, value)
    check_shape(name, value, *shapes)


def check_device(name: str, value: Tensor, other: str, like: Tensor) -> None:
    """Raise unless both are on one device."""
    if value.device != like.device:
        raise ValueError(f"{name}: got device {value.device}, expected {like.device}, that of {other}")


def check_constant(name: str, value: Tensor | None) -> None:
    """Raise for a tensor that waits for a gradient which none will send it."""
    if value is not None and torch.is_grad_enabled() and value.requires_grad:
        raise ValueError(f"{name}: got a tensor that requires a gradient, expected a constant (detach it)")


def check_shape(name: str, value: Tensor, *shapes: tuple[int, ...]) -> None:
    check_whole(name, value)
    if shapes and tuple(value.shape) not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name}: got shape {list(value.shape)}, expected {expected}")


def check_scored(mask: object, *shapes: tuple[int, ...]) -> None:
    """Raise unless `mask` is a boolean tensor of one of `shapes` (any, when none is named)."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        seen = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask: got {seen}, expected a torch.bool tensor, True where the token is scored")
    check_shape("mask", mask, *shapes)


def check_mask(mask: Tensor, logprobs: Tensor) -> None:
    """Raise unless `mask` says of each of the log-probabilities `[rows, tokens]` whether it is scored."""
    check_float_tensor("logprobs", logprobs)
    check_scored(mask)
    if mask.dim() != 2 or mask.shape != logprobs.shape:
        raise ValueError(
            f"mask: got shape {list(mask.shape)}, expected [rows, tokens], the shape of logprobs, which is "
            f"{list(logprobs.shape)}"
        )
    check_device("mask", mask, "logprobs", logprobs)
