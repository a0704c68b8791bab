"""Per-token statistics of logits that a caller already holds: what `linear_logprobs` is to a head.

The same tile kernels read the logits where they lie, and write their gradient to a tensor of its own: nothing of the
caller's is touched.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from .._checks import FLOATING, check_whole
from .._constants import savable
from ..kernels import (
    DIFFERENTIABLE,
    DTYPES,
    LogitTransform,
    RowState,
    differentiable_once,
    fold_tile,
    tile_gradient,
    wide_dtype,
)
from .head import refuse_transforms
from .head_tensors import HeadTensors, check_head_tensors, logit_coefficients, make_transform
from .loss import check_differentiable, check_statistics
from .tokens import check_ignore_index, check_range, check_target, upload, widened


def logit_statistics(
    logits: Tensor,  # [*, V]
    target: Tensor,  # [*] integer
    *,
    statistics: tuple[str, ...] = ("logprob",),
    differentiable: tuple[str, ...] | None = None,
    ignore_index: int = -100,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float | None = 1.0,
    column_weights: Tensor | None = None,  # [V]
) -> dict[str, Tensor]:
    """The statistics of `linear_logprobs`, of given logits: `z = softcap * tanh(logit_scale * logits / softcap) / T`.

    Args:
        logits: `[*, V]`, any floating dtype; never written to. Their gradient is a new tensor of their dtype.
        target, statistics, differentiable, ignore_index, temperature, softcap, logit_scale, column_weights: as in
            `linear_logprobs`.

    Returns:
        `{name: [*]}`, fp32 (fp64 for fp64 logits), `argmax` int64, `is_top1` bool; zero where the target is ignored.

    Raises:
        TypeError, ValueError: before any work, naming the argument.
    """
    check_statistics("statistics", statistics)
    wanted = check_differentiable(statistics, differentiable)
    check_ignore_index(ignore_index)
    if not isinstance(logits, Tensor) or logits.dtype not in FLOATING:
        seen = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
        raise TypeError(f"logits: got {seen}, expected a tensor of one of {', '.join(map(str, FLOATING))}")
    check_whole("logits", logits)
    refuse_transforms(logits)
    if not isinstance(target, Tensor):
        raise TypeError(f"target: got {type(target).__name__}, expected a torch.Tensor")
    check_target(target)
    target = widened(target)
    if logits.dim() < 1 or logits.shape[-1] < 1 or logits.shape[:-1] != target.shape:
        raise ValueError(f"logits: got shape {tuple(logits.shape)}, expected {(*target.shape, 'V')}, V >= 1")
    if not torch.compiler.is_compiling():
        check_range(target, target != ignore_index, logits.shape[-1], ignore_index)
    shape = target.shape
    tensors = check_head_tensors(
        HeadTensors(temperature if isinstance(temperature, Tensor) else None, column_weights), statistics, shape,
        logits.shape[-1], logits.device, target, ignore_index,
    )  # fmt: skip
    transform = make_transform(logit_scale, softcap, temperature)
    rows = logits.reshape(-1, logits.shape[-1])
    outputs = _statistics(
        rows if rows.stride(-1) == 1 else rows.contiguous(),
        upload(target.reshape(-1), logits.device).contiguous(),
        tensors.temperature,
        tensors.column_weights,
        ",".join(statistics),
        ",".join(wanted),
        ignore_index,
        transform.scale,
        transform.softcap,
        transform.temperature,
    )
    values = zip(statistics, outputs, strict=False)
    return {name: (v if name in wanted else v.detach()).reshape(shape) for name, v in values}


@dataclasses.dataclass(frozen=True)
class _Options:
    """Scalars of an operator call, in schema order."""

    statistics: str
    differentiable: str
    ignore_index: int
    scale: float
    softcap: float | None
    one_temperature: float

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.statistics.split(","))

    def transform(self, temperature: Tensor | None) -> LogitTransform:
        return LogitTransform(self.scale, self.softcap, self.one_temperature if temperature is None else temperature)


_TENSORS = "Tensor logits, Tensor target, Tensor? temperature, Tensor? column_weights"
_SCALARS = "str statistics, str differentiable, SymInt ignore_index, float scale, float? softcap, float one_temperature"


@torch.library.custom_op(
    "liger_losses::logit_statistics", mutates_args=(), schema=f"({_TENSORS}, {_SCALARS}) -> Tensor[]"
)
def _statistics(
    logits: Tensor,  # [N, V]
    target: Tensor,  # [N]
    temperature: Tensor | None,
    column_weights: Tensor | None,
    *scalars: Any,
) -> list[Tensor]:
    """Statistics, then `lse`."""
    options, wide = _Options(*scalars), wide_dtype(logits.dtype)
    tensors = HeadTensors(temperature, column_weights).to(wide)
    weighted = column_weights is not None
    state = RowState(logits.shape[0], options.names, device=logits.device, dtype=wide, column_weights=weighted)
    transform = options.transform(tensors.temperature)
    fold_tile(logits, None, target, state, transform, column_weights=tensors.column_weights)
    values = state.statistics(logits.shape[1], tensors.column_weights)
    scored = target != options.ignore_index
    return [torch.where(scored, values[name], 0) for name in options.names] + [state.lse]


@_statistics.register_fake
def _(logits: Tensor, target: Tensor, *rest: Any) -> list[Tensor]:
    names, wide = _Options(*rest[2:]).names, wide_dtype(logits.dtype)
    return [logits.new_empty(logits.shape[0], dtype=DTYPES.get(name, wide)) for name in (*names, "lse")]


_GRADIENTS = ", ".join(f"Tensor? d{name}" for name in DIFFERENTIABLE)


@torch.library.custom_op(
    "liger_losses::logit_statistics_backward",
    mutates_args=(),
    schema=f"({_GRADIENTS}, Tensor? entropy, Tensor lse, {_TENSORS}, {_SCALARS}) -> Tensor",
)
def _statistics_backward(
    dlogprob: Tensor | None,
    dentropy: Tensor | None,
    dlse: Tensor | None,
    dmean_logprob: Tensor | None,
    entropy: Tensor | None,
    lse: Tensor,
    logits: Tensor,
    target: Tensor,
    temperature: Tensor | None,
    column_weights: Tensor | None,
    *scalars: Any,
) -> Tensor:
    options = _Options(*scalars)
    tensors = HeadTensors(temperature, column_weights).to(lse.dtype)
    scored = target != options.ignore_index
    given = (dlogprob, dentropy, dlse, dmean_logprob)
    # A loss may send anything back to positions that are not scored, NaN included: none of it is used.
    a, h, *rest = [None if g is None else torch.where(scored, g, 0).to(lse.dtype) for g in given]
    to_lse, to_logits = logit_coefficients(rest[0], rest[1], logits.shape[1], tensors.column_weights)
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    tile_gradient(
        logits,
        None,
        target,
        lse=lse,
        logprob=lse,
        entropy=entropy,
        dlogprob=torch.zeros_like(lse) if a is None else a,
        dentropy=h,
        dlse=to_lse,
        dlogit=to_logits,
        column_weights=tensors.column_weights,
        transform=options.transform(tensors.temperature),
        out=out,
    )
    return out


@_statistics_backward.register_fake
def _(*arguments: Any) -> Tensor:
    logits: Tensor = arguments[len(DIFFERENTIABLE) + 2]
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, ctx.scalars = inputs[:4], inputs[4:]
    ctx.set_materialize_grads(False)
    names = ctx.scalars[0].split(",")
    entropy = output[names.index("entropy")] if "entropy" in names else None
    ctx.save_for_backward(*savable(*tensors), entropy, output[-1])


@differentiable_once
def _backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    *tensors, entropy, lse = ctx.saved_tensors
    names, wanted = (text.split(",") for text in ctx.scalars[:2])
    of = dict(zip(names, gradients, strict=False))
    asked = [of.get(name) if name in wanted else None for name in DIFFERENTIABLE]
    rest = (None,) * (3 + len(ctx.scalars))
    if all(gradient is None for gradient in asked):
        return (None, *rest)
    return (_statistics_backward(*asked, entropy, lse, *tensors, *ctx.scalars), *rest)


_statistics.register_autograd(_backward, setup_context=_setup_context)
