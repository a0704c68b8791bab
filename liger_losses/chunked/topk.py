"""Log-probabilities of several tokens a position under a linear head: what a teacher stored as its top k asks for."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..kernels import differentiable_once
from .api import linear_logprobs
from .call import Call, per_token, prepare
from .deferred import outside_autocast
from .head import Precision
from .head_tensors import HeadTensors, make_transform
from .placements import vocabulary_ranks
from .planner import check_deferred, check_tiling
from .tokens import check_ignore_index, check_integer, widened

# Bytes of gathered rows of the weight at a time, where the caller names no budget.
_DEFAULT_BUDGET = 64 * 2**20


def linear_topk_logprobs(
    hidden: Tensor,  # [*, H]
    weight: Tensor,  # [V, H]
    ids: Tensor,  # [*, k] integer
    bias: Tensor | None = None,  # [V]
    *,
    ignore_index: int = -100,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float | None = 1.0,
    memory_budget: int | None = None,
    logits_dtype: str = "float32",
    strategy: str = "auto",
    active_vocab: float | str | None = None,
) -> Tensor:
    """`log softmax(z)[ids]` over the whole vocabulary, `[*, k]`, without the `[*, V]` logits; exact, differentiable.

    With m the likeliest of a token's ids, `log p_j = log p_m + z_j - z_m`: the engine gives `log p_m` at the price of
    `linear_logprobs`, and the `k` logits are products of a token's hidden state with `k` rows of the weight, gathered
    for some tokens at a time. The rows are gathered again in backward, where the weight's gradient is summed into one
    fp32 `[V, H]` tensor.

    Args:
        weight, bias: plain, or DTensors of a data-parallel mesh, which are gathered once; not spread as a vocabulary.
        ids: a slot with `ignore_index` holds nothing; its value is 0, with no gradient. A token without any other slot
            is not projected at all.
        temperature, softcap, logit_scale: as in `linear_logprobs`; a tensor of temperatures is `[*]`.
        memory_budget: bytes of the gathered rows, default 64 MiB, and the budget of `linear_logprobs`. The fp32 sum
            `[V, H]` of a head that is trained comes on top.
        logits_dtype, strategy, active_vocab: of `linear_logprobs`; the `k` logits are fp32 in any case, and their
            gradients take in all of their rows.

    Returns:
        fp32 (fp64 for fp64 inputs).

    Raises:
        TypeError, ValueError: before any work. An id outside `[0, V)` raises on the CPU, outside torch.compile, and is
            NaN elsewhere.

    Note:
        The same inputs give the same bits on every device: no sum is made by atomics.
    """
    check_ignore_index(ignore_index)
    if not isinstance(ids, Tensor):
        raise TypeError(f"ids: got {type(ids).__name__}, expected a torch.Tensor")
    check_integer("ids", ids)
    if ids.dim() == 0 or ids.shape[-1] == 0:
        raise ValueError(f"ids: got shape {tuple(ids.shape)}, expected [*, k] with k >= 1")
    if isinstance(hidden, Tensor) and hidden.dim() > 0 and hidden.shape[:-1] != ids.shape[:-1]:
        raise ValueError(f"ids: got shape {tuple(ids.shape)}, expected {(*hidden.shape[:-1], 'k')}, by hidden's "
                         f"{tuple(hidden.shape)}")  # fmt: skip
    ranks = vocabulary_ranks(weight)
    if ranks > 1:
        raise ValueError(f"weight: got a vocabulary spread over {ranks} ranks, expected a whole weight, or one sharded "
                         "for data parallelism: rows are gathered by id")  # fmt: skip
    check_tiling(strategy, memory_budget, logits_dtype, active_vocab)
    check_deferred(strategy, "fused_linear_loss")
    ids = widened(ids)
    present = ids != ignore_index
    scored = present.any(-1)
    # Whatever is checked beside the head asks which tokens are scored: any id of theirs will do.
    some = ids.masked_fill(~present, -1).amax(-1).masked_fill(~scored, ignore_index)
    call = prepare(hidden, weight, some, bias, ignore_index, logits_dtype)
    call.read(HeadTensors(per_token(temperature)), ("logprob",))
    call.transform = make_transform(logit_scale, softcap, temperature)
    ids, present, scored = (t.to(call.hidden.device) for t in (ids, present, scored))
    valid = (ids >= 0) & (ids < call.vocab_size)
    # Not while tracing: the branch would depend on data.
    readable = ids.device.type == "cpu" and not torch.compiler.is_compiling()
    if readable and bool((present & ~valid).any()):
        wrong = ids[present & ~valid][0].item()
        raise ValueError(f"ids: got {wrong}, expected {ignore_index} or an id in [0, {call.vocab_size})")
    logprobs_of = functools.partial(
        linear_logprobs, call.hidden.view(*call.shape, -1), call.weight, bias=call.bias, ignore_index=ignore_index,
        temperature=temperature, softcap=softcap, logit_scale=logit_scale, memory_budget=memory_budget,
        logits_dtype=logits_dtype, strategy=strategy, active_vocab=active_vocab,
    )  # fmt: skip
    if ids.shape[-1] == 1:
        return logprobs_of(target=ids[..., 0]).unsqueeze(-1)
    usable = present & valid
    budget = _DEFAULT_BUDGET if memory_budget is None else memory_budget
    logits = _logits_of(call, ids.masked_fill(~usable, 0), scored, budget)
    # Its logit and its probability cancel in the gradient, and are the largest that do: those the engine subtracts
    # before they are rounded.
    likeliest = logits.detach().masked_fill(~usable, -torch.inf).argmax(-1, keepdim=True)
    target = ids.masked_fill(~usable, 0).gather(-1, likeliest).squeeze(-1).masked_fill(~scored, ignore_index)
    largest = logits.gather(-1, likeliest)
    beside = torch.where(largest == -torch.inf, 0, logits - largest)
    return (logprobs_of(target=target).unsqueeze(-1) + beside).masked_fill(~valid, torch.nan).masked_fill(~present, 0)


def _logits_of(call: Call, ids: Tensor, scored: Tensor, budget: int) -> Tensor:
    """`z` of the tokens' ids `[*, k]`, all of them in `[0, V)`, as finite as `scored` tokens are."""
    slots, precision, transform = ids.shape[-1], call.precision, call.transform
    # The rows in the weight's dtype and once more in the sum's.
    row_bytes = slots * call.weight.shape[1] * (precision.compute.itemsize + precision.statistics.itemsize)
    hidden = call.hidden.masked_fill(~scored.reshape(-1, 1), 0)
    with outside_autocast(hidden.device):
        raw = _GatheredLogits.apply(
            hidden, call.weight, call.bias, ids.reshape(-1, slots), precision, max(1, budget // row_bytes)
        )
        if call.tensors.temperature is not None:
            temperature = call.tensors.temperature.to(raw).masked_fill(~scored.reshape(-1), 1)
            transform = replace(transform, temperature=temperature)
        logits, _ = transform.apply(raw, None)
    return logits.view(ids.shape)


class _GatheredLogits(torch.autograd.Function):
    """`x_i . W[id_ij] + b[id_ij]`, some tokens at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [n, H], finite
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,  # [n, k] in [0, V)
        precision: Precision,
        rows: int,  # tokens at a time
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, ids)
        ctx.precision, ctx.rows = precision, rows
        ctx.bias_dtype = None if bias is None else bias.dtype
        out = torch.empty(ids.shape, dtype=precision.statistics, device=hidden.device)
        for part in _parts(ids, rows):
            torch.bmm(_gathered(weight, ids[part], precision), _inputs(hidden[part], precision).unsqueeze(-1),
                      out=out[part].unsqueeze(-1))  # fmt: skip
        return out if bias is None else out.add_(bias.to(out.dtype)[ids])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        hidden, weight, ids = ctx.saved_tensors
        precision: Precision = ctx.precision
        needs = ctx.needs_input_grad
        d_hidden = torch.empty_like(hidden) if needs[0] else None
        wide = {"dtype": precision.statistics, "device": hidden.device}
        d_weight = torch.zeros(weight.shape, **wide) if needs[1] else None
        d_bias = torch.zeros(weight.shape[0], 1, **wide) if needs[2] else None
        for part in _parts(ids, ctx.rows):
            chosen, factor = ids[part], gradient[part]
            if d_hidden is not None:
                with outside_autocast(hidden.device):  # should the caller's backward be in it
                    product = torch.bmm(factor.unsqueeze(1), _gathered(weight, chosen, precision))
                d_hidden[part] = product.squeeze(1)
            if d_weight is not None:
                rows = factor.unsqueeze(-1) * _inputs(hidden[part], precision).unsqueeze(1)
                _add_rows(d_weight, chosen.reshape(-1), rows.flatten(0, 1))
            if d_bias is not None:
                _add_rows(d_bias, chosen.reshape(-1), factor.reshape(-1, 1))
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.squeeze(-1).to(ctx.bias_dtype),
            None,
            None,
            None,
        )


def _parts(ids: Tensor, rows: int) -> list[slice]:
    return [slice(start, start + rows) for start in range(0, ids.shape[0], rows)]


def _gathered(weight: Tensor, ids: Tensor, precision: Precision) -> Tensor:
    """`W[ids]` `[m, k, H]`, rounded to the products' dtype as the engine's are."""
    return _inputs(weight[ids], precision)


def _inputs(values: Tensor, precision: Precision) -> Tensor:
    return values.to(precision.compute).to(precision.statistics)


def _add_rows(total: Tensor, ids: Tensor, rows: Tensor) -> None:
    """`total[ids] += rows` in an order that does not change from run to run."""
    if total.is_cuda:
        # Sorts the ids and sums each one's rows in order; `index_add_` would use atomics here.
        total.index_put_((ids,), rows, accumulate=True)
    else:
        # One row after the other; `index_put_` would use atomics here.
        total.index_add_(0, ids, rows)
