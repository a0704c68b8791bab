"""What is refused, before any work, and with which words."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from liger_losses import (
    LigerCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerJSD,
    LigerKLDIVLoss,
    LigerTVDLoss,
    linear_divergence,
    linear_logprobs,
    linear_topk_logprobs,
    logit_statistics,
)
from liger_losses.distributed import FusedHead, scored_count, shift_labels, sum_over_ranks, vocab_parallel

from .harness import DOUBLE, ROWS, H, T, V, check, close, mesh_of, tokens


def _refused(call: Callable[[], object], kind: type[Exception], message: str) -> None:
    try:
        call()
    except kind as error:
        assert message in str(error), str(error)
    else:
        raise AssertionError(f"accepted, expected {kind.__name__}: {message}")


@check
def refusals() -> None:
    hidden, weight, bias, target = tokens()
    rank = dist.get_rank()
    half = weight[:39] if rank == 0 else weight[39:]
    world = dist.group.WORLD
    for first, message in (
        ([0, 38], "shards that overlap: rank 1 of the group begins at 38, expected 39"),
        ([0, 40], "shards that leave a gap: rank 1 of the group begins at 40, expected 39"),
        ([1, 39], "shards that leave a gap: rank 0 of the group begins at 1, expected 0"),
    ):
        _refused(lambda f=first: vocab_parallel(half, world, first=f[rank]), ValueError, message)
    _refused(
        lambda: vocab_parallel(half, world, vocab_size=80),
        ValueError,
        "got shards of 77 rows in all, expected vocab_size=80",
    )
    empty = weight[:0] if rank else weight
    _refused(lambda: vocab_parallel(empty, world), ValueError, "expected consecutive ones of at least one row")
    _refused(lambda: vocab_parallel(weight), TypeError, "group: got NoneType beside a weight that is no DTensor")
    _refused(
        lambda: vocab_parallel(half, mesh_of("dp")),
        ValueError,
        "dim: got 'tp', expected a dimension of the mesh, ('dp',)",
    )
    mesh = mesh_of()
    replicated = distribute_tensor(weight, mesh, [Replicate()])
    _refused(
        lambda: vocab_parallel(replicated),
        ValueError,
        "along 'tp', expected Shard(0)",
    )
    _refused(
        lambda: vocab_parallel(replicated, dim="model"),
        ValueError,
        "dim: got 'model', expected a dimension of the mesh, ('tp',)",
    )
    _refused(
        lambda: vocab_parallel(half.to("meta"), world), ValueError, "weight: got device meta, expected that of hidden"
    )
    spread = distribute_tensor(weight, mesh, [Shard(0)])
    _refused(lambda: linear_logprobs(hidden.to("meta"), spread, target), ValueError, "hidden: got a tensor on meta")
    _refused(
        lambda: linear_logprobs(hidden, spread, target, bias),
        ValueError,
        "bias: got a tensor that is no DTensor beside a vocabulary-parallel weight",
    )
    _refused(
        lambda: linear_logprobs(hidden, weight, target, distribute_tensor(bias, mesh, [Shard(0)])),
        ValueError,
        "beside a weight that is not",
    )
    _refused(
        lambda: linear_logprobs(distribute_tensor(hidden, mesh, [Shard(2)]), spread, target),
        ValueError,
        "hidden: got a DTensor with",
    )
    high = target.clone()
    high[0, -1] = V
    _refused(lambda: linear_logprobs(hidden, spread, high), ValueError, f"expected a class in [0, {V})")
    narrow = torch.randn(60, H, dtype=DOUBLE)
    _refused(
        lambda: linear_divergence(hidden, spread, target, teacher_hidden=hidden, teacher_weight=narrow),
        ValueError,
        "teacher_weight: got 60 rows beside a vocabulary-parallel student",
    )
    probabilities = torch.rand(ROWS, T, V, dtype=DOUBLE)
    _refused(
        lambda: linear_divergence(hidden, spread, target, teacher_probs=probabilities),
        ValueError,
        "teacher_probs: got a tensor beside a vocabulary-parallel student",
    )
    _refused(lambda: FusedHead(weight), TypeError, "linear: got Tensor")  # type: ignore[arg-type]
    _refused(
        lambda: FusedHead(nn.Linear(2, 3), nn.MSELoss()), TypeError, "loss: got MSELoss, whose forward takes no weight"
    )
    _refused(
        lambda: FusedHead(nn.Linear(2, 3), LigerFusedLinearDPOLoss(), strategy="cached"),
        TypeError,
        "options: got strategy beside",
    )
    _refused(lambda: scored_count(target, gradients="max"), ValueError, "gradients: got 'max'")


@check
def arguments_that_are_no_numbers_tensors_or_groups_of_this_rank() -> None:
    weight, world = tokens()[1], dist.group.WORLD
    for name, value in (("first", "0"), ("first", 1.0), ("first", torch.tensor(0)), ("vocab_size", 12.0)):
        _refused(
            lambda n=name, v=value: vocab_parallel(weight, world, **{n: v}), TypeError, f"{name}: got {value!r} of"
        )
    _refused(lambda: vocab_parallel(weight, 3), TypeError, "group: got int, expected a ProcessGroup")
    _refused(lambda: vocab_parallel(weight.sum(), world), ValueError, "weight: got a tensor without dimensions")
    _refused(lambda: shift_labels([1]), TypeError, "labels: got list, expected a torch.Tensor")  # type: ignore[arg-type]
    _refused(lambda: shift_labels(torch.tensor(3)), ValueError, "labels: got a tensor without dimensions")
    _refused(lambda: sum_over_ranks(3), TypeError, "values: got int, expected a torch.Tensor")  # type: ignore[arg-type]
    first = dist.new_group([0])
    if dist.get_rank() == 1:
        calls = (
            lambda: vocab_parallel(weight, first),
            lambda: sum_over_ranks(weight, first),
            lambda: scored_count(torch.arange(3), first),
        )
        for call in calls:
            _refused(call, ValueError, "group: got one that rank 1 is outside of")


@check
def dtensors_where_a_whole_tensor_is_wanted() -> None:
    hidden, weight, bias, target = tokens()
    ids, mesh = target.clamp_min(0).unsqueeze(-1).expand(ROWS, T, 2), mesh_of()
    spread = distribute_tensor(weight, mesh, [Shard(0)])
    _refused(
        lambda: linear_topk_logprobs(hidden, spread, ids), ValueError, "weight: got a vocabulary spread over 2 ranks"
    )
    plain, sharded = weight.clone().requires_grad_(), distribute_tensor(weight, mesh_of("dp"), [Shard(0)])
    sharded.requires_grad_()
    expected, seen = (linear_topk_logprobs(hidden, w, ids, bias) for w in (plain, sharded))
    close(seen, expected)
    expected.sum().backward()
    seen.sum().backward()
    assert sharded.grad is not None
    close(sharded.grad, plain.grad)
    logits = torch.randn(8, V, dtype=DOUBLE)
    apart, labels = distribute_tensor(logits, mesh, [Shard(1)]), torch.arange(8)
    shared = distribute_tensor(labels, mesh, [Replicate()])
    whole = "expected a whole tensor"
    for name, call in (
        ("logits", lambda: logit_statistics(apart, labels)),
        ("target", lambda: logit_statistics(logits, shared)),
        ("_input", lambda: LigerCrossEntropyLoss()(apart, labels)),
        ("target", lambda: LigerCrossEntropyLoss()(logits, shared)),
        ("log_q", lambda: LigerJSD()(apart, logits)),
        ("log_p", lambda: LigerJSD()(logits, apart)),
        ("shift_labels", lambda: LigerJSD()(logits, logits, shared)),
        ("y_pred", lambda: LigerKLDIVLoss()(apart, logits)),
        ("q", lambda: LigerTVDLoss()(logits, apart)),
        ("target", lambda: linear_logprobs(hidden[0, :8], weight, shared)),
        ("target", lambda: linear_logprobs(hidden[0, :8], spread, shared)),
        ("ids", lambda: linear_topk_logprobs(hidden[0, :8], weight, shared.unsqueeze(-1))),
        ("values", lambda: sum_over_ranks(apart)),
    ):
        _refused(call, TypeError, f"{name}: got a DTensor with")
        _refused(call, TypeError, whole)
