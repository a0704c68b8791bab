"""The two public calls: per-token statistics, and a loss over them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import overload

from torch import Tensor

from .call import per_token, prepare
from .calls import run_loss, token_values
from .head_tensors import HeadTensors, make_transform
from .loss import Loss, check_differentiable, check_statistics
from .planner import check_deferred
from .tokens import ScoredTokens


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
    active_vocab: float | str | None = ...,
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
    active_vocab: float | str | None = ...,
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
    active_vocab: float | str | None = None,
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
        active_vocab: take the two gradient products over those columns of the vocabulary that hold something, a tile of
            tokens at a time, and over all others as one. None: over all, gradients are exact. `"auto"`: the others'
            entries of `d logprob / d z` have a norm below that of the rounding of all entries to the products' dtype. A
            number: none of them is larger in size. Values do not change. Here for gradients of log-probabilities alone,
            in `fused_linear_loss` for those of any statistic but `mean_logprob`; not under torch.compile. See
            `docs/active_vocabulary.md`, and `record_active_vocabulary` for what was left out.

    Returns:
        A tensor `[*]`, or a dict of them by name: fp32 (fp64 for fp64 inputs), `is_top1` bool.

    Raises:
        TypeError, ValueError: before any work, for tensors that do not fit together or options without a meaning. A
            target outside `[0, V)` raises where it can be read without waiting (on the CPU, outside torch.compile), and
            is NaN elsewhere. NotImplementedError for forward-mode and second derivatives and torch.func's transforms.

    Note:
        Under autocast the products run in the autocast dtype, otherwise in the lower of the two inputs'. Gradients come
        back in each tensor's own dtype, accumulated in fp32.
    """
    if statistics is not None:
        check_statistics("statistics", statistics)
    names = ("logprob",) if statistics is None else tuple(statistics)
    wanted = check_differentiable(names, differentiable)
    check_deferred(strategy, "fused_linear_loss")
    call = prepare(hidden, weight, target, bias, ignore_index, logits_dtype)
    call.read(HeadTensors(per_token(temperature), column_weights, positives), names)
    call.transform = make_transform(logit_scale, softcap, temperature)
    values = token_values(call, names, wanted, strategy, memory_budget, active_vocab)
    return values["logprob"] if statistics is None else values


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
    active_vocab: float | str | None = None,
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
        active_vocab: as in `linear_logprobs`. A loss that differentiates entropy or lse must be separable (by token,
            sequence or pair): then the entries that are weighed are those of its own gradient.

    Returns:
        `(loss, metrics)`: a scalar, and the loss's detached metrics by name.

    Raises:
        TypeError, ValueError: before any work, naming the argument.
    """
    given = HeadTensors(per_token(temperature), column_weights, positives)
    return run_loss(
        loss, hidden, weight, target, bias, inputs,
        given=given, ignore_index=ignore_index, logit_scale=logit_scale, softcap=softcap, temperature=temperature,
        memory_budget=memory_budget, logits_dtype=logits_dtype, strategy=strategy, max_units=max_units,
        token_statistics=token_statistics, active_vocab=active_vocab,
    )  # fmt: skip
