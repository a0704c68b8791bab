"""What is refused, before any work, and with which words."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from liger_losses import LigerFusedLinearDPOLoss, linear_divergence, linear_logprobs
from liger_losses.distributed import FusedHead, scored_count, vocab_parallel

from .harness import DOUBLE, ROWS, H, T, V, check, mesh_of, tokens


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
