"""A call run: its strategy chosen, and the walk under the autograd function or operator that goes with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._checks import check_size
from .._constants import taken
from .active_deferred import ActiveCall, ActiveFunction
from .call import Call, prepare
from .deferred import describe, forward, outside_autocast
from .head import NAMES
from .head_tensors import HeadTensors, check_differentiable_beside, make_transform
from .immediate import ImmediateCall, ImmediateFunction
from .loss import (
    KNOWN,
    Loss,
    check_inputs,
    check_loss,
    check_result,
    check_statistics,
    check_units,
    differentiable_statistics,
    only_logprob,
    prepared_inputs,
)
from .operators import token_statistics as token_statistics_operator
from .planner import make_plan
from .problem import Plan
from .tokens import ScoredOnDevice, ScoredTokens
from .walk import TileWalk


def token_values(
    call: Call,
    names: tuple[str, ...],
    wanted: tuple[str, ...],
    strategy: str,
    memory_budget: int | None,
    active_vocab: float | str | None,
) -> dict[str, Tensor]:
    """Statistics of every position in the caller's shape, those of `wanted` with a gradient."""
    call.choose_columns(active_vocab, wanted)
    if not wanted:
        call.needs = (False, False, False)
    values = _deferred(call, names, wanted, strategy, memory_budget)
    return {name: (value if name in wanted else value.detach()).reshape(call.shape) for name, value in values.items()}


def run_loss(
    loss: Loss,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor | ScoredTokens,
    bias: Tensor | None,
    inputs: Mapping[str, Tensor] | None,
    *,
    given: HeadTensors,  # as the caller has them
    ignore_index: int,
    logit_scale: float | None,
    softcap: float | None,
    temperature: float | Tensor,
    memory_budget: int | None,
    logits_dtype: str,
    strategy: str,
    max_units: int | None,
    token_statistics: tuple[str, ...],
    active_vocab: float | str | None,
    head: tuple[str, str, str] = NAMES,  # of its tensors, in messages
) -> tuple[Tensor, dict[str, Tensor]]:
    """`fused_linear_loss`, whatever stands beside the head."""
    check_loss(loss)
    inputs = {} if inputs is None else dict(inputs)
    if max_units is not None:
        check_size("max_units", max_units)
    if isinstance(hidden, Tensor) and hidden.dim() != 3:
        raise ValueError(f"{head[0]}: got shape {tuple(hidden.shape)}, expected [R, T, H]")
    call = prepare(hidden, weight, target, bias, ignore_index, logits_dtype, head)
    if max_units is not None and strategy not in ("auto", "immediate"):
        raise ValueError(
            f"max_units: got {max_units} with strategy {strategy!r}, whose tiles hold tokens; expected None, or "
            "strategy 'auto' or 'immediate'"
        )
    unit_rows = check_units(loss, hidden, inputs)
    if token_statistics is None or token_statistics:
        check_statistics("token_statistics", token_statistics, KNOWN)
    names = tuple(dict.fromkeys((*loss.statistics, *token_statistics)))
    call.read(given, names)
    call.transform = make_transform(logit_scale, softcap, temperature)
    differentiable = differentiable_statistics(loss)
    check_differentiable_beside(given.teacher, differentiable)
    call.choose_columns(active_vocab, differentiable)
    scored = None if torch.compiler.is_compiling() else call.scored_tokens().to(hidden.device)
    mask = call.target_tensor() != ignore_index if scored is None else scored.mask
    mask = taken(mask, mask.device)
    inputs = {name: taken(value, mask.device) for name, value in inputs.items()}
    inputs = prepared_inputs(loss, mask, inputs)
    check_inputs(loss, hidden, inputs, unit_rows)
    fixed = not any(value.requires_grad for value in inputs.values())
    if strategy == "immediate" and not fixed:
        raise ValueError("strategy: got 'immediate' while one of inputs requires a gradient, which only a deferred "
                         "strategy sends back; expected 'cached' or 'recompute'")  # fmt: skip
    totals = loss.totals(mask, inputs)
    if scored is not None:
        allowed = fixed and any(call.needs)
        plan = _plan(
            call, scored, differentiable, strategy, memory_budget,
            immediate_allowed=allowed, separability=loss.separability, max_units=max_units,
            unit_rows=unit_rows,
        )  # fmt: skip
        if plan.strategy == "immediate":
            return _immediate(call, scored, plan, loss, token_statistics, inputs, totals)
        values = _run(call, scored, names, differentiable, plan, memory_budget)
    else:
        values = _deferred(call, names, differentiable, strategy, memory_budget)
    shaped = {
        name: (value if name in differentiable else value.detach()).view(call.shape) for name, value in values.items()
    }
    value, metrics = loss(shaped, mask, inputs, totals)
    check_result(value, metrics)
    metrics = {name: metric.detach() for name, metric in metrics.items()}
    return value, _joined(metrics, {name: shaped[name].detach() for name in token_statistics})


def _joined(metrics: dict[str, Tensor], reported: dict[str, Tensor]) -> dict[str, Tensor]:
    both = sorted(set(metrics) & set(reported))
    if both:
        raise ValueError(f"token_statistics: got {', '.join(both)}, which the loss returns as metrics of its own")
    return metrics | reported


def _plan(
    call: Call,
    scored: ScoredOnDevice,
    differentiable: tuple[str, ...],
    strategy: str,
    memory_budget: int | None,
    **more: Any,
) -> Plan:
    problem = describe(
        call.hidden, call.weight, scored.row_counts, call.precision, call.needs, call.tensors.teacher,
        shard=call.shard, only_logprob_grad=only_logprob(differentiable), active=call.active is not None, **more,
    )  # fmt: skip
    return make_plan(problem, strategy=strategy, memory_budget=memory_budget)


def _immediate(
    call: Call,
    scored: ScoredOnDevice,
    plan: Plan,
    loss: Loss,
    report: tuple[str, ...],
    inputs: Mapping[str, Tensor],
    totals: Mapping[str, Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    with outside_autocast(call.hidden.device):
        walk = _walk(call, scored, plan)
        work = ImmediateCall(walk, loss, report, inputs, totals, call.needs, [])
        value, *rest = ImmediateFunction.apply(call.hidden, call.weight, call.bias, work)
    metrics, reported = rest[: len(work.names)], rest[len(work.names) :]
    return value, _joined(dict(zip(work.names, metrics, strict=True)), dict(zip(report, reported, strict=True)))


def _deferred(
    call: Call,
    names: tuple[str, ...],
    differentiable: tuple[str, ...],
    strategy: str,
    memory_budget: int | None,
) -> dict[str, Tensor]:
    if torch.compiler.is_compiling():
        resolved = _traced_strategy(call, differentiable, strategy)
        return _operator(call, None, names, differentiable, resolved, memory_budget)
    scored = call.scored_tokens().to(call.hidden.device)
    plan = _plan(call, scored, differentiable, strategy, memory_budget)
    if not any(call.needs):
        # Nothing for autograd to see: straight to the walk, since what is done before the first product is waited for.
        with outside_autocast(call.hidden.device):
            values, *_ = forward(_walk(call, scored, plan), names, call.needs, 0)
        return dict(zip(names, values, strict=True))
    return _run(call, scored, names, differentiable, plan, memory_budget)


def _walk(call: Call, scored: ScoredOnDevice, plan: Plan) -> TileWalk:
    bias = None if call.bias is None else call.bias.detach()
    hidden, weight = call.hidden.detach(), call.weight.detach()
    return TileWalk(
        hidden, weight, bias, scored, call.transform, call.precision, plan, call.tensors, call.active, call.shard
    )


def _traced_strategy(call: Call, differentiable: tuple[str, ...], strategy: str) -> str:
    """While tracing, the number of scored tokens is unknown: decide from the shapes that are."""
    if strategy != "auto":
        return strategy
    one_matrix = only_logprob(differentiable)
    if not any(call.needs) or (one_matrix and not (call.needs[1] or call.needs[2])):
        return "frozen"
    # The cache of all positions is no larger than an fp32 sum of the head's gradient would be.
    small = call.hidden.shape[0] * call.precision.compute.itemsize <= 4 * call.weight.shape[1]
    return "cached" if one_matrix and small else "recompute"


def _run(
    call: Call,
    scored: ScoredOnDevice,
    names: tuple[str, ...],
    differentiable: tuple[str, ...],
    plan: Plan,
    memory_budget: int | None,
) -> dict[str, Tensor]:
    if not plan.problem.active or not differentiable:
        return _operator(call, scored, names, differentiable, plan.strategy, memory_budget)
    (one,) = differentiable
    # What the walk is made of, without the caller's tensors: those autograd keeps, and checks.
    transform, precision, active, shard = call.transform, call.precision, call.active, call.shard

    def walk(hidden: Tensor, weight: Tensor, bias: Tensor | None, tensors: HeadTensors) -> TileWalk:
        return TileWalk(hidden, weight, bias, scored, transform, precision, plan, tensors, active, shard)

    work = ActiveCall(walk, call.tensors, names, one, call.needs)
    return dict(zip(names, ActiveFunction.apply(call.hidden, call.weight, call.bias, work), strict=True))


def _operator(
    call: Call,
    scored: ScoredOnDevice | None,
    names: tuple[str, ...],
    differentiable: tuple[str, ...],
    strategy: str,
    memory_budget: int | None,
) -> dict[str, Tensor]:
    precision = call.precision
    if scored is None:
        target, index, counts = call.target_tensor(), None, None
    else:
        # An operator's list argument may not be empty: no row is one row of nothing.
        target, index, counts = scored.target.view(scored.mask.shape), scored.index, list(scored.row_counts) or [0]
    outputs = token_statistics_operator(
        call.hidden,
        call.weight,
        call.bias,
        target,
        index,
        counts,
        *call.tensors.flat,
        ",".join(names),
        ",".join(differentiable),
        call.ignore_index,
        call.transform.scale,
        call.transform.softcap,
        call.transform.temperature,
        precision.compute,
        precision.logits,
        strategy,
        memory_budget,
        *call.needs,
        "" if call.tensors.teacher is None else call.tensors.teacher.encode(),
        "" if call.shard is None else call.shard.encode(),
    )
    return dict(zip(names, outputs[: len(names)], strict=True))
