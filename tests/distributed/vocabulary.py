"""A vocabulary that is spread over two ranks gives what a whole one gives."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from liger_losses import (
    Divergence,
    LigerFusedLinearBCELoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    fused_linear_distillation,
    fused_linear_loss,
    linear_divergence,
    linear_logprobs,
)
from liger_losses.distributed import vocab_parallel
from liger_losses.kernels import DISTILLATION, STATISTICS
from liger_losses.losses import CrossEntropyLoss

from ..distillation_oracle import KINDS
from .harness import DOUBLE, ROWS, T, V, both_ways, check, close, collectives, mesh_of, tokens


@check
def statistics_of_a_spread_vocabulary() -> None:
    target = tokens()[3]
    weights = torch.rand(V)
    several = ("logprob", "entropy", "lse", "mean_logprob")
    for strategy, differentiable in (("cached", ("logprob",)), ("recompute", several)):
        for dtype, tolerance in ((DOUBLE, 1e-10), (torch.float32, 2e-5), (torch.bfloat16, 2e-2)):
            both_ways(
                lambda h, w, b, s=strategy, d=differentiable: linear_logprobs(
                    h,
                    w,
                    target,
                    b,
                    statistics=STATISTICS,
                    differentiable=d,
                    strategy=s,
                    softcap=5.0,
                    column_weights=weights,
                ),
                dtype,
                tolerance,
            )


@check
def cross_entropy_of_a_spread_vocabulary() -> None:
    target = tokens()[3]
    for options in ({}, {"label_smoothing": 0.1, "lse_square_scale": 1e-3, "softcap": 4.0}):
        module = LigerFusedLinearCrossEntropyLoss(**options)
        both_ways(lambda h, w, b, m=module: m(w, h, target, b))
    # Small tiles, and a loss that differentiates more than log-probabilities while they are resident.
    for strategy in ("immediate", "recompute"):
        both_ways(
            lambda h, w, b, s=strategy: fused_linear_loss(
                CrossEntropyLoss(label_smoothing=0.1),
                h,
                w,
                target,
                b,
                strategy=s,
                max_units=7 if s == "immediate" else None,
            )
        )


@check
def a_rank_whose_columns_are_all_masked() -> None:
    first = -(-V // 2)
    target = torch.where(tokens()[3] == -100, -100, tokens()[3] % first)
    mask = torch.zeros(V, dtype=DOUBLE)
    mask[first:] = -torch.inf
    for options in ({}, {"lse_square_scale": 0.1}):  # its gradient is formed from probabilities
        loss = CrossEntropyLoss(**options)
        both_ways(
            lambda h, w, b, c=loss: fused_linear_loss(
                c, h, w, target,
                b + (distribute_tensor(mask, mesh_of(), [Shard(0)]) if isinstance(b, DTensor) else mask),
                strategy="immediate",
            )
        )  # fmt: skip


@check
def dpo_of_a_spread_vocabulary() -> None:
    target, reference = tokens()[3], torch.randn(ROWS, T, 8, dtype=DOUBLE)
    reference_weight = torch.randn(V, 8, dtype=DOUBLE)
    for strategy in ("immediate", "cached"):
        module = LigerFusedLinearDPOLoss(beta=0.3, strategy=strategy)
        both_ways(
            lambda h, w, b, m=module: m(
                w, h, target, b, reference,
                distribute_tensor(reference_weight, mesh_of(), [Shard(0)]) if isinstance(w, DTensor) else reference_weight,
            )
        )  # fmt: skip


@check
def grpo_of_a_spread_vocabulary() -> None:
    target = tokens()[3]
    mask, ids = (target != -100).long(), target.clamp_min(0)
    old, reference = torch.randn(ROWS, T, dtype=DOUBLE) - 4, torch.randn(ROWS, T, dtype=DOUBLE) - 4
    for options in ({"strategy": "recompute"}, {"entropy_coef": 0.02}):
        module = LigerFusedLinearGRPOLoss(beta=0.04, loss_type="dapo", **options)
        both_ways(
            lambda h, w, b, m=module: m(
                h, w, ids, mask, torch.linspace(-1, 1, ROWS, dtype=DOUBLE), b, ref_per_token_logps=reference,
                old_per_token_logps=old,
            )
        )  # fmt: skip


@check
def labels_without_exclusion_of_a_spread_vocabulary() -> None:
    positives = torch.stack([torch.randperm(V)[:5] for _ in range(ROWS * T)])
    positives[::3, 2:] = -100
    module = LigerFusedLinearBCELoss()
    both_ways(lambda h, w, b: module(w, h.flatten(0, 1), positives, b))


@check
def every_divergence_of_two_spread_vocabularies() -> None:
    target = tokens()[3]
    generator = torch.Generator().manual_seed(5)
    hidden, weight, bias = (torch.randn(*s, dtype=DOUBLE, generator=generator) for s in ((ROWS, T, 8), (V, 8), (V,)))
    logits = torch.randn(ROWS, T, V, dtype=DOUBLE, generator=generator)
    for index, options in enumerate(KINDS):
        if options.vocabulary != "shared":
            continue

        # A teacher as a head, whose columns are spread or whole, and as whole logits.
        def teacher(spread: bool, index: int = index) -> dict[str, Tensor]:
            if index % 3 == 2:
                return {"teacher_logits": logits}
            own = distribute_tensor(weight, mesh_of(), [Shard(0)]) if spread and index % 3 == 0 else weight
            return {"teacher_hidden": hidden, "teacher_weight": own, "teacher_bias": bias}

        both_ways(
            lambda h, w, b, o=options, t=teacher, i=index: linear_divergence(
                h, w, target, b, **t(isinstance(w, DTensor)), divergence=o, statistics=DISTILLATION,
                strategy=("cached", "recompute")[i % 2], softcap=5.0,
            ),
            tolerance=1e-8,
        )  # fmt: skip
    jsd = Divergence(kind="jsd", beta=0.3, temperature=2.0, hard_weight=0.5)
    for dtype, tolerance in ((DOUBLE, 1e-10), (torch.float32, 2e-5)):
        both_ways(
            lambda h, w, b, d=dtype: fused_linear_distillation(
                h, w, target, b, teacher_hidden=hidden.to(d), teacher_weight=weight.to(d), divergence=jsd,
                strategy="immediate",
            ),
            dtype, tolerance,
        )  # fmt: skip


@check
def ties_and_masked_vocabularies() -> None:
    hidden, weight, _bias, target = tokens()
    weight[-30:] = weight[0]  # equal logits on both ranks: the first column is the maximum's
    bias = torch.zeros(V, dtype=DOUBLE)
    for masked in (slice(0, 0), slice(0, 40), slice(38, V)):  # all of a rank's columns impossible
        bias.zero_()[masked] = -torch.inf
        mesh = mesh_of()
        spread = [distribute_tensor(t, mesh, [Shard(0)]) for t in (weight, bias)]
        names = ("argmax", "is_top1", "lse", "entropy")
        whole = linear_logprobs(hidden, weight, target, bias, statistics=names)
        for name, value in linear_logprobs(hidden, spread[0], target, spread[1], statistics=names).items():
            close(value, whole[name])


@check
def shards_of_any_size_and_the_collectives_of_a_call() -> None:
    hidden, weight, bias, target = tokens()
    rank = dist.get_rank()
    own = slice(0, 21) if rank == 0 else slice(21, V)
    module = LigerFusedLinearDPOLoss(beta=0.3, use_ref_model=False)
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    module(leaves[1], leaves[0], target, leaves[2])[0].backward()
    x, w, b = hidden.clone(), weight[own].clone(), bias[own].clone()
    for leaf in (x, w, b):
        leaf.requires_grad_()
    spread = [vocab_parallel(t, dist.group.WORLD, first=own.start, vocab_size=V) for t in (w, b)]
    with collectives() as seen:
        loss, _metrics = module(spread[0], x, target, spread[1])
        forward = dict(seen)
        loss.backward()
    # One tile, and one reduction of the hidden gradient: nothing else, and no tensor of the weight's size.
    assert forward["all_gather"] == 1, forward
    assert sum(forward.values()) - forward["largest"] == 1, forward
    assert seen["all_reduce"] == 1, seen
    assert sum(seen.values()) - seen["largest"] == 2, seen
    assert seen["largest"] == hidden.numel(), seen
    close(x.grad, leaves[0].grad)
    close(w.grad, leaves[1].grad[own])
    close(b.grad, leaves[2].grad[own])
    for strategy, forwards in (("recompute", 1), ("cached", 1)):
        with collectives() as seen:
            linear_logprobs(
                hidden.clone().requires_grad_(), spread[0].detach(), target, strategy=strategy
            ).sum().backward()
        assert (seen["all_gather"], seen["all_reduce"]) == (forwards, 1), seen
    # DTensor's own collectives do not go through torch.distributed's functions. A spread head asks for none, a sharded
    # one that is no vocabulary's for one gather and one reduction.
    for name, expected in (("tp", 0), ("dp", 2)):
        sharded = distribute_tensor(weight, mesh_of(name), [Shard(0)]).requires_grad_()
        with CommDebugMode() as debug:
            module(sharded, hidden.clone().requires_grad_(), target)[0].backward()
        assert debug.get_total_counts() == expected, debug.get_comm_counts()
    with torch.no_grad(), collectives() as seen:
        linear_logprobs(hidden, spread[0], target)
    assert (seen["all_gather"], seen["all_reduce"]) == (1, 0), seen


@check
def a_frozen_head_and_hidden_states_over_ranks() -> None:
    """Sequence parallelism: hidden states come as a shard of the sequence, and so does their gradient go back."""
    hidden, weight, _bias, target = tokens()
    mesh = mesh_of()
    plain = hidden.clone().requires_grad_()
    expected = linear_logprobs(plain, weight, target)
    expected.square().sum().backward()
    spread = distribute_tensor(hidden, mesh, [Shard(1)]).requires_grad_()
    seen = linear_logprobs(spread, distribute_tensor(weight, mesh, [Shard(0)]), target)
    seen.square().sum().backward()
    close(seen, expected)
    assert spread.grad is not None
    assert spread.grad.placements == (Shard(1),)
    close(spread.grad, plain.grad)


@check
def a_replicated_or_differently_named_head_is_gathered() -> None:
    hidden, weight, _bias, target = tokens()
    for name, placement in (("tp", Replicate()), ("dp", Shard(0)), ("dp", Shard(1))):
        spread = distribute_tensor(weight, mesh_of(name), [placement]).requires_grad_()
        plain = weight.clone().requires_grad_()
        linear_logprobs(hidden, plain, target).sum().backward()
        with collectives() as seen:
            linear_logprobs(hidden, spread, target, strategy="recompute").sum().backward()
        assert seen["largest"] == 0, seen  # DTensor's own functional collectives do what there is to do
        assert spread.grad.placements == (placement,)
        close(spread.grad, plain.grad)
    # A dimension by another name, declared.
    declared = vocab_parallel(distribute_tensor(weight, mesh_of("model"), [Shard(0)]), dim="model")
    with torch.no_grad(), collectives() as seen:
        close(linear_logprobs(hidden, declared, target), linear_logprobs(hidden, weight, target))
    assert seen["all_gather"] == 1


@check
def two_heads_in_unequal_shards() -> None:
    """All ranks walk the same tiles, whatever the budget, though one of them has nine times as many columns."""
    generator = torch.Generator().manual_seed(6)
    count, wide = 700, 12

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=DOUBLE, generator=generator)

    hidden, weight, of_teacher, teacher = some(1, count, 8), some(V, 8), some(1, count, wide), some(V, wide)
    target, own = torch.zeros(1, count, dtype=torch.int64), slice(0, 8) if dist.get_rank() == 0 else slice(8, V)

    def spread(rows: Tensor) -> Tensor:
        return vocab_parallel(rows[own].clone(), dist.group.WORLD)

    def call(student: Tensor, other: Tensor, budget: int | None, strategy: str) -> Tensor:
        return linear_divergence(
            hidden, student, target, teacher_hidden=of_teacher, teacher_weight=other, memory_budget=budget,
            strategy=strategy,
        )  # fmt: skip

    whole = weight.clone().requires_grad_()
    exact = call(whole, teacher, None, "cached")
    exact.square().sum().backward()
    assert whole.grad is not None
    for strategy in ("cached", "recompute"):
        leaf = vocab_parallel(weight[own].clone(), dist.group.WORLD).detach().requires_grad_()
        least = refused(
            lambda s=strategy, w=leaf: call(w, spread(teacher), 1, s), "memory_budget: .* at least ([0-9,]+)"
        )
        for more in (0, 100_000, 300_000):
            leaf.grad = None
            value = call(leaf, spread(teacher), int(least.replace(",", "")) + more, strategy)
            close(value, exact)
            value.square().sum().backward()
            assert isinstance(leaf.grad, DTensor)
            close(leaf.grad.to_local(), whole.grad[own])
    refused(lambda: call(weight, spread(teacher), None, "cached"), "teacher_weight: got a DTensor in unequal shards")


def refused(work: Callable[[], object], pattern: str) -> str:
    """What the message's group says, or all that was found."""
    with pytest.raises(ValueError, match=pattern) as raised:
        work()
    found = re.search(pattern, str(raised.value))
    assert found is not None
    return found[found.re.groups]


@check
def a_cosine_without_direction() -> None:
    """Of a student, of a teacher, and of the one's or the other's columns of one rank alone."""
    target, scored = tokens()[3], torch.ones(ROWS, T, 1, dtype=DOUBLE)
    scored[0, 1] = 0
    logits = torch.randn(ROWS, T, V, dtype=DOUBLE, generator=torch.Generator().manual_seed(7))
    logits[1, 2] = logits[0, 2] = scored[0, 2] = 0
    logits[2, 3, : -(-V // 2)] = 0
    logits[3, 4, -(-V // 2) :] = 0
    kind = Divergence(kind="cosine")
    for strategy in ("cached", "recompute"):
        both_ways(
            lambda h, w, b, s=strategy: linear_divergence(
                h * scored, w, target, b * 0, teacher_logits=logits, divergence=kind, strategy=s
            )
        )


@check
def parts_of_a_hidden_gradient_that_cancel() -> None:
    """Rows of the head with a large mean: each rank's part is along it, and too large for fp16; their sum is not."""
    generator = torch.Generator().manual_seed(8)
    hidden, weight = (torch.randn(*size, dtype=DOUBLE, generator=generator) for size in ((ROWS, T, 16), (V, 16)))
    weight += 40
    target = tokens()[3]

    def gradient(head: Tensor, dtype: torch.dtype, strategy: str) -> Tensor:
        leaf = hidden.to(torch.float16).to(dtype).requires_grad_()
        (4000 * linear_logprobs(leaf, head, target, strategy=strategy)).sum().backward()
        assert leaf.grad is not None
        return leaf.grad.double()

    rounded = weight.to(torch.float16)
    exact = gradient(rounded.double(), DOUBLE, "cached")
    for strategy in ("cached", "recompute"):
        for dtype in (torch.float16, torch.bfloat16):
            one = gradient(rounded.to(dtype), dtype, strategy)
            spread = gradient(distribute_tensor(rounded.to(dtype), mesh_of(), [Shard(0)]), dtype, strategy)
            errors = [(found - exact).norm() / exact.norm() for found in (one, spread)]
            assert errors[1] < 1.2 * errors[0] < 0.5, (strategy, dtype, errors)
