"""The two public calls: per-token statistics, and a loss over them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, overload

import torch
from torch import Tensor

from ..kernels import LogitTransform
from .deferred import describe, forward, outside_autocast
from .head import Precision, check_head, choose_precision
from .head_tensors import HeadTensors, check_head_tensors, make_transform
from .immediate import ImmediateCall, ImmediateFunction
from .loss import (
    Loss,
    check_differentiable,
    check_loss,
    check_result,
    check_statistics,
    differentiable_statistics,
    only_logprob,
    prepared_inputs,
    rows_per_unit,
)
from .operators import token_statistics
from .planner import STRATEGIES, Plan, make_plan
from .tokens import ScoredOnDevice, ScoredTokens, check_ignore_index, check_target
from .walk import TileWalk


@overload
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor | ScoredTokens,
    bias: Tensor | None = ...,
    *,
    ignore_index: int = ...,
    temperature: float | Tensor = ...,
    softcap: float | None = ...,
    logit_scale: float | None = ...,
    column_weights: Tensor | None = ...,
    positives: Tensor | None = ...,
    statistics: None = ...,
    differentiable: tuple[str, ...] | None = ...,
    memory_budget: int | None = ...,
    logits_dtype: str = ...,
    strategy: str = ...,
) -> Tensor: ...


@overload
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor | ScoredTokens,
    bias: Tensor | None = ...,
    *,
    ignore_index: int = ...,
    temperature: float | Tensor = ...,
    softcap: float | None = ...,
    logit_scale: float | None = ...,
    column_weights: Tensor | None = ...,
    positives: Tensor | None = ...,
    statistics: tuple[str, ...],
    differentiable: tuple[str, ...] | None = ...,
    memory_budget: int | None = ...,
    logits_dtype: str = ...,
    strategy: str = ...,
) -> dict[str, Tensor]: ...


def linear_logprobs(
    hidden: Tensor,  # [*, H]
    weight: Tensor,  # [V, H]
    target: Tensor | ScoredTokens,  # [*] integer
    bias: Tensor | None = None,  # [V]
    *,
    ignore_index: int = -100,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float | None = 1.0,
    column_weights: Tensor | None = None,  # [V]
    positives: Tensor | None = None,  # [*, P] integer
    statistics: tuple[str, ...] | None = None,
    differentiable: tuple[str, ...] | None = None,
    memory_budget: int | None = None,
    logits_dtype: str = "float32",
    strategy: str = "auto",
) -> Tensor | dict[str, Tensor]:
    """Per-token log-probabilities of `target` under a linear head, without the `[*, V]` logits.

    With `z = softcap * tanh(logit_scale * (hidden @ weight.T + bias) / softcap) / temperature` and `p = softmax(z)`:

    | statistic | value | gradient |
    |---|---|---|
    | `logprob` | `log p[target]` | yes |
    | `lse` | `log sum_v exp z_v` | yes |
    | `entropy` | `-sum_v p_v log p_v` in nats | yes |
    | `mean_logprob` | `sum_v c_v log p_v / V`, `c` the column weights (what label smoothing reads) | yes |
    | `mean_logit` | `sum_v z_v / V` | no |
    | `argmax` | the first maximum of `z`, int64 | no |
    | `is_top1` | whether `target` is the first maximum of `z` | no |
    | `log_sum_sq_prob` | `log sum_v p_v^2` | no |

    Args:
        hidden: `[*, H]`, any leading shape. A 2-D leading shape is read as rows of tokens.
        weight: `[V, H]`; bias: `[V]`.
        target: `[*]`, already aligned with `hidden` (shifted by the caller). May lie on the CPU while `hidden` is on an
            accelerator: then nothing synchronises. Or a `ScoredTokens`, begun earlier with the same target.
        ignore_index: positions with this target are not projected; every statistic is 0 (False) there.
        temperature, softcap, logit_scale: of the logits, see above; `logit_scale=None` means 1. The temperature may be
            a tensor `[*]`, one for each token: a constant, like every tensor below.
        column_weights: `c [V]` of `mean_logprob`; default 1.
        positives: `[*, P]`, several labels for each token, `ignore_index` filling up: then every class is an
            independent yes or no, `logprob` is `sum_{v positive} z_v - sum_v softplus(z_v)` (binary cross entropy is
            its negative), `target` only says which tokens are scored, and no other statistic exists.
        statistics: names out of the table. None returns the log-probabilities themselves.
        differentiable: those of `statistics` whose gradient will be used; default all that have one. Log-probabilities
            alone are cheaper than with entropy or lse.
        memory_budget: bytes of workspace beyond inputs and returned gradients; None: a default from the shapes. Kept to
            on accelerators; on the CPU the torch forms of the kernels add temporaries, some 10 MiB (50 for 16-bit).
        logits_dtype: `"float32"` (products of 16-bit inputs deliver fp32 logits) or `"input"` (rounded to the compute
            dtype: faster by a few per cent, log-probabilities off by about 1e-2).
        strategy: `"auto"`, `"cached"`, `"recompute"` or `"frozen"`; see `docs/design.md`.

    Returns:
        A tensor `[*]`, or a dict of them by name: fp32 (fp64 for fp64 inputs), `is_top1` bool.

    Raises:
        TypeError, ValueError: before any work, for tensors that do not fit together or options without a meaning. A
            target outside `[0, V)` raises where it can be read without waiting (on the CPU, outside torch.compile), and
            is NaN elsewhere. NotImplementedError for forward-mode derivatives; second derivatives and torch.func
            transforms are not supported, and raise.

    Note:
        Under autocast the products run in the autocast dtype, otherwise in the lower of the two inputs'. Gradients come
        back in each tensor's own dtype, accumulated in fp32.
    """
    names = ("logprob",) if statistics is None else tuple(statistics)
    check_statistics("statistics", statistics if statistics is not None else names)
    wanted = check_differentiable(names, differentiable)
    if strategy == "immediate":
        raise ValueError("strategy: got 'immediate', which is for fused_linear_loss; expected 'auto' or one of "
                         f"{STRATEGIES[1:]}")  # fmt: skip
    prepared = _prepare(hidden, weight, target, bias, ignore_index, logits_dtype)
    tensors = check_head_tensors(
        HeadTensors(temperature if isinstance(temperature, Tensor) else None, column_weights, positives),
        names, prepared.shape, weight.shape[0], weight.device, prepared.targets, ignore_index,
    )  # fmt: skip
    transform = make_transform(logit_scale, softcap, temperature)
    if not wanted:
        prepared.needs = (False, False, False)
    values = _deferred(prepared, transform, tensors, names, wanted, strategy, memory_budget)
    shaped = {
        name: (value if name in wanted else value.detach()).reshape(prepared.shape) for name, value in values.items()
    }
    return shaped["logprob"] if statistics is None else shaped


def fused_linear_loss(
    loss: Loss,
    hidden: Tensor,  # [R, T, H]
    weight: Tensor,  # [V, H]
    target: Tensor | ScoredTokens,  # [R, T] integer
    bias: Tensor | None = None,  # [V]
    *,
    inputs: Mapping[str, Tensor] | None = None,
    ignore_index: int = -100,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float | None = 1.0,
    column_weights: Tensor | None = None,  # [V]
    positives: Tensor | None = None,  # [*, P] integer
    memory_budget: int | None = None,
    logits_dtype: str = "float32",
    strategy: str = "auto",
    max_units: int | None = None,
    token_statistics: tuple[str, ...] = (),
) -> tuple[Tensor, dict[str, Tensor]]:
    """Any loss of per-token statistics, over a linear head, without the `[R, T, V]` logits.

    `loss` is an object that follows `liger_losses.chunked.Loss`: a function of statistics, and the smallest unit
    whose contribution needs no other. Separable losses take 3 products of `2 N H V` FLOPs, 2 with a frozen head, N
    being the scored tokens (a unit larger than a tile is projected again but for its last tile). The value and its
    gradients are those of the same object called on unfused statistics, of which `logprob`, `entropy`, `lse` and
    `mean_logprob` carry a gradient; the others are numbers to report or to weight with.

    Args:
        loss: see `liger_losses.chunked.Loss`.
        hidden, weight, target, bias, ignore_index, softcap, logit_scale, memory_budget, logits_dtype: as in
            `linear_logprobs`, with `hidden` `[R, T, H]` and `target` `[R, T]`. Pair losses: chosen rows first.
        temperature, column_weights, positives: as in `linear_logprobs`, over `[R, T]`.
        inputs: what else the loss reads, by name: tensors whose first dimension counts rows (or pairs, for pair
            losses); for token losses `[R, T, ...]`. A tensor without dimensions concerns the whole batch and is handed
            on as it is.
        strategy: `"auto"`, `"immediate"`, `"cached"`, `"recompute"` or `"frozen"`.
        max_units: at most so many units (tokens, sequences, pairs) share a tile of strategy `"immediate"`. The other
            strategies' tiles hold tokens, not units, and their size does not depend on it: named with one of them, it
            is refused.

        token_statistics: statistics `[R, T]` to hand back among the metrics, whether or not the loss reads them.

    Returns:
        `(loss, metrics)`: a scalar, and the loss's detached metrics by name.

    Raises:
        TypeError, ValueError: before any work, naming the argument.
    """
    check_loss(loss)
    inputs = {} if inputs is None else dict(inputs)
    if max_units is not None and (isinstance(max_units, bool) or not isinstance(max_units, int)):
        raise TypeError(f"max_units: got {max_units!r}, expected an int")
    if max_units is not None and max_units < 1:
        raise ValueError(f"max_units: got {max_units}, expected >= 1")
    prepared = _prepare(hidden, weight, target, bias, ignore_index, logits_dtype)
    if hidden.dim() != 3:
        raise ValueError(f"hidden: got shape {tuple(hidden.shape)}, expected [R, T, H]")
    if max_units is not None and strategy not in ("auto", "immediate"):
        raise ValueError(
            f"max_units: got {max_units} with strategy {strategy!r}, whose tiles hold tokens; expected None, or "
            "strategy 'auto' or 'immediate'"
        )
    unit_rows = _check_units(loss, hidden, inputs)
    if token_statistics:
        check_statistics("token_statistics", token_statistics)
    names = tuple(dict.fromkeys((*loss.statistics, *token_statistics)))
    tensors = check_head_tensors(
        HeadTensors(temperature if isinstance(temperature, Tensor) else None, column_weights, positives),
        names, prepared.shape, weight.shape[0], weight.device, prepared.targets, ignore_index,
    )  # fmt: skip
    transform = make_transform(logit_scale, softcap, temperature)
    differentiable = differentiable_statistics(loss)
    scored = None if torch.compiler.is_compiling() else prepared.scored_tokens().to(hidden.device)
    mask = prepared.target_tensor() != ignore_index if scored is None else scored.mask
    inputs = prepared_inputs(loss, mask, inputs)
    _check_inputs(loss, hidden, inputs, unit_rows)
    fixed = not any(value.requires_grad for value in inputs.values())
    if strategy == "immediate" and not fixed:
        raise ValueError("strategy: got 'immediate' while one of inputs requires a gradient, which only a deferred "
                         "strategy sends back; expected 'cached' or 'recompute'")  # fmt: skip
    totals = loss.totals(mask, inputs)
    if scored is not None:
        allowed = fixed and any(prepared.needs)
        plan = _plan(
            prepared, scored, differentiable, strategy, memory_budget,
            immediate_allowed=allowed, separability=loss.separability, max_units=max_units,
            unit_rows=unit_rows,
        )  # fmt: skip
        if plan.strategy == "immediate":
            return _immediate(prepared, scored, transform, tensors, plan, loss, token_statistics, inputs, totals)
        values = _run(prepared, scored, transform, tensors, names, differentiable, plan.strategy, memory_budget)
    else:
        values = _deferred(prepared, transform, tensors, names, differentiable, strategy, memory_budget)
    shaped = {
        name: (value if name in differentiable else value.detach()).view(prepared.shape)
        for name, value in values.items()
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


def _check_units(loss: Loss, hidden: Tensor, inputs: Mapping[str, Tensor]) -> int:
    """Rows of one unit."""
    rows, unit_rows = hidden.shape[0], rows_per_unit(loss)
    if rows % unit_rows:
        raise ValueError(
            f"hidden: got {rows} rows for a loss over units of {unit_rows}, expected a multiple of {unit_rows}: the "
            "first rows of all units, then their second rows, and so on (pairs: chosen, then rejected)"
        )
    for name, value in inputs.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"inputs[{name!r}]: got {type(value).__name__}, expected a torch.Tensor")
    return unit_rows


def _check_inputs(loss: Loss, hidden: Tensor, inputs: Mapping[str, Tensor], unit_rows: int) -> None:
    rows, length = hidden.shape[:2]
    for name, value in inputs.items():
        if value.dim() == 0:  # of the batch, not of its rows
            continue
        if loss.separability == "token":
            if value.shape[:2] != (rows, length):
                raise ValueError(f"inputs[{name!r}]: got shape {tuple(value.shape)}, expected [{rows}, {length}, ...]")
            continue
        firsts = {"pair": (rows, rows // unit_rows), "batch": (rows, rows // 2)}.get(loss.separability, (rows,))
        if value.shape[0] not in firsts:
            raise ValueError(
                f"inputs[{name!r}]: got shape {tuple(value.shape)}, expected a first dimension of "
                + " or ".join(map(str, firsts))
            )


class _Prepared:
    """Checked tensors of a call, flattened to `[R * T, ...]`."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor | ScoredTokens,
        ignore_index: int,
        precision: Precision,
    ) -> None:
        self.shape = hidden.shape[:-1]
        self.hidden = hidden.reshape(-1, hidden.shape[-1])
        self.weight, self.bias, self.ignore_index, self.precision = weight, bias, ignore_index, precision
        self._target = target
        grad = torch.is_grad_enabled()
        self.needs = (
            grad and hidden.requires_grad,
            grad and weight.requires_grad,
            grad and bias is not None and bias.requires_grad,
        )

    def scored_tokens(self) -> ScoredTokens:
        scored = (
            self._target if isinstance(self._target, ScoredTokens) else ScoredTokens(self._target, self.ignore_index)
        )
        scored.check_range(self.weight.shape[0])
        return scored

    @property
    def targets(self) -> Tensor:
        """As they were given."""
        return self._target.target if isinstance(self._target, ScoredTokens) else self._target

    def target_tensor(self) -> Tensor:
        """The targets `[R, T]`, for the traced path."""
        target = self.targets
        return (target if target.dim() == 2 else target.reshape(1, -1)).to(self.hidden.device, torch.int64)


def _prepare(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor | ScoredTokens,
    bias: Tensor | None,
    ignore_index: int,
    logits_dtype: str,
) -> _Prepared:
    check_ignore_index(ignore_index)
    if isinstance(target, ScoredTokens):
        if target.ignore_index != ignore_index:
            raise ValueError(f"ignore_index: got {ignore_index}, but target was read with {target.ignore_index}")
    elif not isinstance(target, Tensor):
        raise TypeError(f"target: got {type(target).__name__}, expected a torch.Tensor or ScoredTokens")
    else:
        check_target(target)
    check_head(hidden, weight, bias, target.shape)
    return _Prepared(hidden, weight, bias, target, ignore_index, choose_precision(hidden, weight, logits_dtype))


def _plan(
    prepared: _Prepared,
    scored: ScoredOnDevice,
    differentiable: tuple[str, ...],
    strategy: str,
    memory_budget: int | None,
    **more: Any,
) -> Plan:
    problem = describe(
        prepared.hidden, prepared.weight, scored.row_counts, prepared.precision, prepared.needs,
        only_logprob_grad=only_logprob(differentiable), **more,
    )  # fmt: skip
    return make_plan(problem, strategy=strategy, memory_budget=memory_budget)


def _immediate(
    prepared: _Prepared,
    scored: ScoredOnDevice,
    transform: LogitTransform,
    tensors: HeadTensors,
    plan: Plan,
    loss: Loss,
    report: tuple[str, ...],
    inputs: Mapping[str, Tensor],
    totals: Mapping[str, Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    with outside_autocast(prepared.hidden.device):
        walk = _walk(prepared, scored, transform, plan, tensors)
        call = ImmediateCall(walk, loss, report, inputs, totals, prepared.needs, [])
        value, *rest = ImmediateFunction.apply(prepared.hidden, prepared.weight, prepared.bias, call)
    metrics, reported = rest[: len(call.names)], rest[len(call.names) :]
    return value, _joined(dict(zip(call.names, metrics, strict=True)), dict(zip(report, reported, strict=True)))


def _deferred(
    prepared: _Prepared,
    transform: LogitTransform,
    tensors: HeadTensors,
    names: tuple[str, ...],
    differentiable: tuple[str, ...],
    strategy: str,
    memory_budget: int | None,
) -> dict[str, Tensor]:
    if torch.compiler.is_compiling():
        resolved = _traced_strategy(prepared, differentiable, strategy)
        return _run(prepared, None, transform, tensors, names, differentiable, resolved, memory_budget)
    scored = prepared.scored_tokens().to(prepared.hidden.device)
    plan = _plan(prepared, scored, differentiable, strategy, memory_budget)
    if not any(prepared.needs):
        # Nothing for autograd to see: straight to the walk, since what is done before the first product is waited for.
        with outside_autocast(prepared.hidden.device):
            values, *_ = forward(_walk(prepared, scored, transform, plan, tensors), names, prepared.needs, 0)
        return dict(zip(names, values, strict=True))
    return _run(prepared, scored, transform, tensors, names, differentiable, plan.strategy, memory_budget)


def _walk(
    prepared: _Prepared, scored: ScoredOnDevice, transform: LogitTransform, plan: Plan, tensors: HeadTensors
) -> TileWalk:
    bias = None if prepared.bias is None else prepared.bias.detach()
    hidden, weight = prepared.hidden.detach(), prepared.weight.detach()
    return TileWalk(hidden, weight, bias, scored, transform, prepared.precision, plan, tensors)


def _traced_strategy(prepared: _Prepared, differentiable: tuple[str, ...], strategy: str) -> str:
    """While tracing, the number of scored tokens is unknown: decide from the shapes that are."""
    if strategy != "auto":
        return strategy
    one_matrix = only_logprob(differentiable)
    if not any(prepared.needs) or (one_matrix and not (prepared.needs[1] or prepared.needs[2])):
        return "frozen"
    # The cache of all positions is no larger than an fp32 sum of the head's gradient would be.
    small = prepared.hidden.shape[0] * prepared.precision.compute.itemsize <= 4 * prepared.weight.shape[1]
    return "cached" if one_matrix and small else "recompute"


def _run(
    prepared: _Prepared,
    scored: ScoredOnDevice | None,
    transform: LogitTransform,
    tensors: HeadTensors,
    names: tuple[str, ...],
    differentiable: tuple[str, ...],
    strategy: str,
    memory_budget: int | None,
) -> dict[str, Tensor]:
    precision = prepared.precision
    if scored is None:
        target, index, counts = prepared.target_tensor(), None, None
    else:
        # An operator's list argument may not be empty: no row is one row of nothing.
        target, index, counts = scored.target.view(scored.mask.shape), scored.index, list(scored.row_counts) or [0]
    outputs = token_statistics(
        prepared.hidden,
        prepared.weight,
        prepared.bias,
        target,
        index,
        counts,
        tensors.temperature,
        tensors.column_weights,
        tensors.positives,
        ",".join(names),
        ",".join(differentiable),
        prepared.ignore_index,
        transform.scale,
        transform.softcap,
        transform.temperature,
        precision.compute,
        precision.logits,
        strategy,
        memory_budget,
        *prepared.needs,
    )
    return dict(zip(names, outputs[: len(names)], strict=True))
