"""The deferred walk as custom operators with fakes, forward and backward.

`torch.compile(fullgraph=True)` sees one node each, and traces whatever loss the caller computes from the statistics.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from .._constants import savable
from ..kernels import (
    DIFFERENTIABLE,
    DTYPES,
    DivergenceState,
    LogitTransform,
    differentiable_once,
    remember_implementation,
)
from .deferred import backward, describe, forward, outside_autocast
from .head import Precision
from .head_tensors import HeadTensors
from .hidden_gradient import HiddenSums
from .loss import gradient_order, only_logprob
from .parallel import VocabularyShard
from .planner import make_plan
from .problem import padded_columns
from .tokens import ScoredOnDevice, ScoredTokens
from .walk import TileWalk


@dataclasses.dataclass(frozen=True)
class CallOptions:
    """Scalars of an operator call, in schema order."""

    statistics: str
    differentiable: str
    ignore_index: int
    scale: float
    softcap: float | None
    one_temperature: float
    compute_dtype: torch.dtype
    logits_dtype: torch.dtype
    strategy: str
    memory_budget: int | None
    needs_hidden: bool
    needs_weight: bool
    needs_bias: bool
    teacher: str  # of `Teacher.encode`; "": none
    parallel: str  # of `VocabularyShard.encode`; "": the whole vocabulary is here

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.statistics.split(","))

    @property
    def needs(self) -> tuple[bool, bool, bool]:
        return self.needs_hidden, self.needs_weight, self.needs_bias

    @property
    def precision(self) -> Precision:
        return Precision.of(self.compute_dtype, self.logits_dtype)

    def walk(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        index: Tensor | None,
        row_counts: list[int] | None,
        *tensors: Tensor | None,
    ) -> TileWalk:
        if row_counts is None:
            scored = ScoredTokens(target, self.ignore_index).to(hidden.device)
        else:
            scored = ScoredOnDevice(target.reshape(-1), target != self.ignore_index, index, tuple(row_counts))
        head_tensors = HeadTensors.of_flat(self.teacher if any(t is not None for t in tensors[3:]) else "", *tensors)
        problem = describe(
            hidden, weight, scored.row_counts, self.precision, self.needs,
            teacher=head_tensors.teacher, shard=(shard := VocabularyShard.decode(self.parallel)),
            only_logprob_grad=only_logprob(tuple(filter(None, self.differentiable.split(",")))),
        )  # fmt: skip
        plan = make_plan(problem, strategy=self.strategy, memory_budget=self.memory_budget)
        transform = LogitTransform(self.scale, self.softcap, self.one_temperature)
        return TileWalk(hidden, weight, bias, scored, transform, self.precision, plan, head_tensors, shard=shard)


_HEAD = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? index, SymInt[]? row_counts, "
    "Tensor? temperature, Tensor? column_weights, Tensor? positives, "
    "Tensor? teacher_hidden, Tensor? teacher_weight, Tensor? teacher_bias, Tensor? teacher_logits"
)
_SCALARS = (  # in the order of CallOptions
    "str statistics, str differentiable, SymInt ignore_index, float scale, float? softcap, float one_temperature, "
    "ScalarType compute_dtype, ScalarType logits_dtype, str strategy, SymInt? memory_budget, "
    "bool needs_hidden, bool needs_weight, bool needs_bias, str teacher, str parallel"
)
_GRADIENTS = ", ".join(f"Tensor? d{name}" for name in DIFFERENTIABLE)
_KEPT = "Tensor? entropy, Tensor lse, Tensor gradient_scale, Tensor kept, Tensor cache"


@torch.library.custom_op("liger_losses::token_statistics", mutates_args=(), schema=f"({_HEAD}, {_SCALARS}) -> Tensor[]")
def token_statistics(
    hidden: Tensor,  # [P, H]
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,  # [R, T]
    index: Tensor | None,
    row_counts: list[int] | None,
    temperature: Tensor | None,
    column_weights: Tensor | None,
    positives: Tensor | None,
    teacher_hidden: Tensor | None,
    teacher_weight: Tensor | None,
    teacher_bias: Tensor | None,
    teacher_logits: Tensor | None,
    *scalars: Any,
) -> list[Tensor]:
    """Statistics of every position, then what backward needs."""
    options = CallOptions(*scalars)
    with outside_autocast(hidden.device):
        walk = options.walk(
            hidden, weight, bias, target, index, row_counts, temperature, column_weights, positives, teacher_hidden,
            teacher_weight, teacher_bias, teacher_logits,
        )  # fmt: skip
        rows = walk.scored.count if row_counts is not None else hidden.shape[0]
        values, lse, scale, product, cache = forward(walk, options.names, options.needs, rows)
        return [*values, lse, scale, product.kept, cache]


@token_statistics.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    index: Tensor | None,
    row_counts: list[int] | None,
    temperature: Tensor | None,
    column_weights: Tensor | None,
    positives: Tensor | None,
    teacher_hidden: Tensor | None,
    teacher_weight: Tensor | None,
    teacher_bias: Tensor | None,
    teacher_logits: Tensor | None,
    *scalars: Any,
) -> list[Tensor]:
    options = CallOptions(*scalars)
    needs_hidden, needs_weight, needs_bias = options.needs
    compute, wide = options.compute_dtype, options.precision.statistics
    values = [hidden.new_empty(hidden.shape[0], dtype=DTYPES.get(name, wide)) for name in options.names]
    kept, cache = (hidden.new_empty(0, dtype=compute) for _ in range(2))
    if options.strategy in ("cached", "frozen") and needs_hidden:
        kept = hidden.new_empty(hidden.shape, dtype=compute)
    if options.strategy == "cached" and (needs_weight or needs_bias):
        rows = sum(row_counts) if row_counts is not None else hidden.shape[0]
        cache = hidden.new_empty((rows, padded_columns(weight.shape[0])), dtype=compute)[:, : weight.shape[0]]
    one = hidden.new_empty(hidden.shape[0], dtype=wide)
    lse = hidden.new_empty((len(DivergenceState.kept), hidden.shape[0]), dtype=wide) if options.teacher else one
    return [*values, lse, torch.empty_like(one), kept, cache]


@torch.library.custom_op(
    "liger_losses::token_statistics_backward",
    mutates_args=(),
    schema=f"({_GRADIENTS}, {_KEPT}, {_HEAD}, {_SCALARS}) -> Tensor[]",
)
def token_statistics_backward(
    dlogprob: Tensor | None,
    dentropy: Tensor | None,
    dlse: Tensor | None,
    dmean_logprob: Tensor | None,
    entropy: Tensor | None,
    lse: Tensor,
    gradient_scale: Tensor,
    kept: Tensor,
    cache: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    index: Tensor | None,
    row_counts: list[int] | None,
    temperature: Tensor | None,
    column_weights: Tensor | None,
    positives: Tensor | None,
    teacher_hidden: Tensor | None,
    teacher_weight: Tensor | None,
    teacher_bias: Tensor | None,
    teacher_logits: Tensor | None,
    *scalars: Any,
) -> list[Tensor]:
    """Gradients of hidden, weight and bias; empty where not needed."""
    options = CallOptions(*scalars)
    with outside_autocast(hidden.device):
        walk = options.walk(
            hidden, weight, bias, target, index, row_counts, temperature, column_weights, positives, teacher_hidden,
            teacher_weight, teacher_bias, teacher_logits,
        )  # fmt: skip
        # A loss may send anything back to positions that are not scored, NaN included: none of it is used.
        mask = walk.scored.mask.reshape(-1)
        given = (dlogprob, dentropy, dlse, dmean_logprob)
        sent = [None if g is None else torch.where(mask, g, 0).to(lse.dtype) for g in given]
        coefficients = (torch.zeros_like(gradient_scale) if sent[0] is None else sent[0], sent[1], sent[2], sent[3])
        dtypes = (hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
        product = HiddenSums(kept)
        gradients = backward(walk, options.needs, coefficients, lse, entropy, gradient_scale, product, cache, dtypes)
        return [hidden.new_empty(0) if g is None else g for g in gradients]


@token_statistics_backward.register_fake
def _(*arguments: Any) -> list[Tensor]:
    hidden, weight, bias = arguments[9:12]
    needs = CallOptions(*arguments[-len(dataclasses.fields(CallOptions)) :]).needs
    like = (hidden, weight, weight if bias is None else bias)
    return [t.new_empty(t.shape) if need else hidden.new_empty(0) for t, need in zip(like, needs, strict=True)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    hidden, weight, bias, target, index, ctx.row_counts, *rest = inputs
    tensors, scalars = rest[:7], rest[7:]
    ctx.scalars = scalars
    options = CallOptions(*scalars)
    if options.strategy != "recompute":
        tensors = [*tensors[:3], *(None for _ in tensors[3:])]  # the teacher has said all it has to say
    remember_implementation(ctx)
    ctx.set_materialize_grads(False)
    names = options.names
    entropy = output[names.index("entropy")] if "entropy" in names else None
    given = savable(hidden, weight, bias, target, index, *tensors)
    ctx.save_for_backward(*given, entropy, *output[len(names) :])


@differentiable_once
def _backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    hidden, weight, bias, target, index, *tensors, entropy, lse, scale, kept, cache = ctx.saved_tensors
    options = CallOptions(*ctx.scalars)
    of = dict(zip(options.names, gradients, strict=False))
    wanted = options.differentiable.split(",")
    asked = [of.get(name) if name in wanted else None for name in gradient_order(options.names)]
    empty = (None,) * (11 + len(ctx.scalars))
    if all(gradient is None for gradient in asked):
        return (None, None, *empty)
    d_hidden, d_weight, d_bias = token_statistics_backward(
        *asked, entropy, lse, scale, kept, cache, hidden, weight, bias, target, index, ctx.row_counts, *tensors,
        *ctx.scalars,
    )  # fmt: skip
    return (
        d_hidden if options.needs_hidden else None,
        d_weight if options.needs_weight else None,
        d_bias if options.needs_bias else None,
        *empty[1:],
    )


token_statistics.register_autograd(_backward, setup_context=_setup_context)
