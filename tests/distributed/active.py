"""Each rank of a spread vocabulary chooses its own active columns; none waits for another because of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor

from liger_losses import (
    Divergence,
    LigerFusedLinearBCELoss,
    LigerFusedLinearDPOLoss,
    fused_linear_distillation,
    fused_linear_loss,
    linear_logprobs,
    record_active_vocabulary,
)
from liger_losses.chunked import active, calls
from liger_losses.losses import CrossEntropyLoss

from .harness import DOUBLE, ROWS, H, T, V, check, close, collectives, mesh_of, tokens, whole

FIRST = 39  # column of rank 1


@contextmanager
def _plans(crossover: float, **changes: Any) -> Iterator[None]:
    """Tiles with more than that share of active columns are multiplied whole; plans are changed so."""
    before, own = active.CROSSOVER, calls.make_plan
    active.CROSSOVER = crossover
    calls.make_plan = lambda *args, **kwargs: dataclasses.replace(own(*args, **kwargs), **changes)
    try:
        yield
    finally:
        active.CROSSOVER, calls.make_plan = before, own


def _step(call: Callable[..., Any], *leaves: Tensor) -> tuple[Tensor, list[Tensor]]:
    leaves = tuple(leaf.clone().requires_grad_() for leaf in leaves)
    answer = call(*leaves)
    value = answer[0] if isinstance(answer, tuple) else answer
    (value * torch.linspace(0.5, 2, value.numel()).view(value.shape)).sum().backward()
    return value.detach(), [whole(leaf.grad) for leaf in leaves]


def _spread(*tensors: Tensor) -> list[Tensor]:
    return [distribute_tensor(tensor, mesh_of(), [Shard(0)]) for tensor in tensors]


def _losses(target: Tensor) -> Iterator[Callable[..., Any]]:
    """Of hidden, weight, bias and the rule: every way from `G` to the gradients."""
    positives = torch.stack([torch.randperm(V)[:5] for _ in range(ROWS * T)])
    teacher, teacher_weight = torch.randn(ROWS, T, 8, dtype=DOUBLE), torch.randn(V, 8, dtype=DOUBLE)
    yield lambda h, w, b, rule: linear_logprobs(h, w, target, b, strategy="cached", active_vocab=rule, softcap=5.0)
    for loss in (CrossEntropyLoss(), CrossEntropyLoss(lse_square_scale=1e-2)):
        yield lambda h, w, b, rule, one=loss: fused_linear_loss(
            one, h, w, target, b, strategy="immediate", active_vocab=rule
        )
    for strategy in ("immediate", "cached"):
        yield lambda h, w, b, rule, s=strategy: LigerFusedLinearDPOLoss(
            beta=0.3, use_ref_model=False, strategy=s, active_vocab=rule
        )(w, h, target, b)
        yield lambda h, w, b, rule, s=strategy: LigerFusedLinearBCELoss(strategy=s, active_vocab=rule)(
            w, h.flatten(0, 1), positives, b
        )
        for kind in ("jsd", "cosine"):
            options = Divergence(kind=kind, hard_weight=0.5)
            yield lambda h, w, b, rule, s=strategy, o=options: fused_linear_distillation(
                h, w, target, b, teacher_hidden=teacher, teacher_weight=teacher_weight, divergence=o, strategy=s,
                active_vocab=rule,
            )  # fmt: skip


@check
def active_columns_of_a_spread_vocabulary_with_nothing_left_out() -> None:
    hidden, weight, bias, target = tokens()
    rank = dist.get_rank()
    few = {"tile_rows": 8, "logit_rows": 4}
    for call in _losses(target):
        expected = _step(lambda h, w, b, c=call: c(h, w, b, None), hidden, weight, bias)
        # Both ranks compact every tile, or one does and the other none; tiles are kept by both, by one or by none, and
        # all of `G` where there is room and nothing to compact.
        for shares, changes in (
            ((2.0, 2.0), {}),
            ((2.0, 2.0), {"cache_bytes": 3000 * rank, **few}),
            ((2.0, -1.0), {"cache_bytes": 1 << 20, "whole_cache": False, **few}),
            ((-1.0, 2.0), {"cache_bytes": 1 << 20, "whole_cache": True, **few}),
        ):
            with _plans(shares[rank], **changes):
                seen = _step(lambda h, w, b, c=call: c(h, w, b, 0), hidden, *_spread(weight, bias))
            close(seen[0], expected[0])
            for ours, theirs in zip(seen[1], expected[1], strict=True):
                close(ours, theirs, 1e-8)


def _with_tails(gradient: Tensor, target: Tensor, eps: float) -> Tensor:
    """`G` as each rank leaves it: its columns that exceed `eps` or are a target, the others by their sums."""
    changed = gradient.clone()
    for columns in (slice(0, FIRST), slice(FIRST, V)):
        part = changed[:, columns]
        kept = (part.abs() > eps).any(0)
        inside = (target >= columns.start) & (target < columns.stop)
        kept[target[inside] - columns.start] = True
        tail = part.masked_fill(kept, 0)
        size = tail.abs().sum(0)
        part.copy_(torch.where(kept, part, tail.sum(-1, keepdim=True) * size / size.sum().clamp_min(1e-300)))
    return changed


@check
def tails_of_a_spread_vocabulary() -> None:
    hidden, weight, bias, target = tokens()
    eps = 0.02
    loss = functools.partial(linear_logprobs, strategy="cached", active_vocab=eps)
    with _plans(1.0), record_active_vocabulary() as report:
        _value, (d_hidden, d_weight, d_bias) = _step(
            lambda h, w, b: loss(h, w, target, b), hidden, *_spread(weight, bias)
        )
    assert 0 < float(report.share) < 1
    assert float(report.dropped_max) > 0
    scored = (target != -100).flatten()
    x, y = hidden.flatten(0, 1)[scored], target.flatten()[scored]
    factor = torch.linspace(0.5, 2, target.numel()).to(DOUBLE)[scored].unsqueeze(-1)
    gradient = _with_tails(torch.eye(V, dtype=DOUBLE)[y] - (x @ weight.t() + bias).softmax(-1), y, eps)
    expected = torch.zeros(target.numel(), H, dtype=DOUBLE)
    expected[scored] = factor * (gradient @ weight)
    close(d_hidden.flatten(0, 1), expected, 1e-6)  # the upstream factor is fp32
    close(d_weight, gradient.t() @ (factor * x), 1e-6)
    close(d_bias, (gradient.t() @ factor).squeeze(-1), 1e-6)


@check
def a_rank_without_a_gradient_and_the_auto_rule() -> None:
    hidden, weight, bias, target = tokens()
    target = target.clamp_max(FIRST - 1)
    bias[FIRST:] = -torch.inf  # rank 1 has no column that is possible, and no target
    for rule in (0, "auto", 0.5):
        for strategy in ("cached", "immediate"):
            call = functools.partial(fused_linear_loss, CrossEntropyLoss(), strategy=strategy)
            with _plans(1.0):
                _value, seen = _step(
                    lambda h, w, c=call, r=rule: c(h, w, target, _spread(bias)[0], active_vocab=r),
                    hidden,
                    *_spread(weight),
                )
            assert all(gradient.isfinite().all() for gradient in seen)
            assert not seen[1][FIRST:].any()
            if rule != 0.5:  # of fp64, next to nothing is left out by "auto"
                _value, exact = _step(lambda h, w, c=call: c(h, w, target, bias), hidden, weight)
                for ours, theirs in zip(seen, exact, strict=True):
                    close(ours, theirs, 1e-10)
    # bf16 leaves out what its rounding would: peaked logits, most columns in the tails.
    hidden, weight, _bias, target = tokens()
    hidden = (hidden + 4 * weight[target.clamp_min(0)]).to(torch.bfloat16)
    weight = weight.to(torch.bfloat16)
    expected = _step(lambda h, w: linear_logprobs(h, w, target), hidden, weight)[1]
    with _plans(1.0), record_active_vocabulary() as report, collectives() as sent:
        seen = _step(lambda h, w: linear_logprobs(h, w, target, active_vocab="auto"), hidden, *_spread(weight))[1]
    assert float(report.share) < 1
    assert sent["all_gather"] >= 1
    assert sent["all_reduce"] == 1, sent
    for ours, theirs in zip(seen, expected, strict=True):
        assert (ours - theirs).norm() < 1e-2 * theirs.norm()


@check
def collectives_of_an_active_vocabulary() -> None:
    """As many as without one, also where tiles are projected again in backward."""
    hidden, weight, bias, target = tokens()
    for share in (2.0, -1.0):
        (leaf,) = _spread(weight)
        leaf.requires_grad_()
        changes = {"tile_rows": 8, "logit_rows": 8, "cache_bytes": 0, "whole_cache": False}
        with collectives() as seen, _plans(share, **changes):
            linear_logprobs(
                hidden.clone().requires_grad_(), leaf, target, _spread(bias)[0], strategy="cached", active_vocab=0
            ).sum().backward()
        # Four tiles of the 27 scored tokens.
        assert (seen["all_gather"], seen["all_reduce"]) == (4, 1), seen
