"""What is refused, before any work, and with which words."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from liger_losses import (
    LigerCrossEntropyLoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearJSD,
    LigerFusedLinearKLDivLoss,
    LigerJSD,
    LigerKLDIVLoss,
    LigerTVDLoss,
    fused_linear_loss,
    linear_divergence,
    linear_logprobs,
    linear_topk_logprobs,
    logit_statistics,
    losses,
)
from liger_losses.chunked import ScoredTokens
from liger_losses.distributed import FusedHead, scored_count, shift_labels, sum_over_ranks, vocab_parallel
from liger_losses.losses import CrossEntropyLoss

from .harness import DOUBLE, ROWS, WORLD, H, T, V, check, close, collectives, mesh_of, tokens


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
    _refused(lambda: FusedHead(weight), TypeError, "linear: got a torch.Tensor, expected a torch.nn.Linear")  # type: ignore[arg-type]
    _refused(
        lambda: FusedHead(nn.Linear(2, 3), nn.MSELoss()), TypeError, "loss: got MSELoss, whose forward takes no weight"
    )
    _refused(
        lambda: FusedHead(nn.Linear(2, 3), LigerFusedLinearDPOLoss(), strategy="cached"),
        TypeError,
        "options: got strategy beside",
    )
    for loss, call in ((None, "linear_logprobs"), (CrossEntropyLoss(), "fused_linear_loss")):
        _refused(
            lambda o=loss: FusedHead(nn.Linear(2, 3), o, strategy="cached", strateggy="cached"),
            TypeError,
            f"options: got strateggy, expected keyword arguments of {call}: ",
        )
        FusedHead(nn.Linear(2, 3), loss, strategy="cached", temperature=0.5)
    _refused(lambda: scored_count(target, gradients="max"), ValueError, "gradients: got 'max'")
    _refused(
        lambda: scored_count(ScoredTokens(target, 3)), ValueError, "ignore_index: got -100, but target was read with 3"
    )


@check
def shards_that_differ_raise_on_every_rank() -> None:
    weight, world, mesh = tokens()[1], dist.group.WORLD, mesh_of()
    second = dist.get_rank() == 1
    for other, kind, message in (
        (weight[:, :5], ValueError, f"weight: got shape ({V}, 5) on rank 1 of the group, expected ('rows', {H}) as on"),
        (weight[:, 0], ValueError, f"weight: got shape ({V},) on rank 1 of the group, expected ('rows', {H}) as on"),
        (
            weight.float(),
            TypeError,
            "got dtype torch.float32 on rank 1 of the group, expected torch.float64 as on rank 0",
        ),
        (weight.long(), TypeError, "got dtype torch.int64 on rank 1 of the group, expected one of torch.float16"),
        (
            weight.view(V, 4, -1),
            ValueError,
            f"weight: got shape ({V}, 4, 4) on rank 1 of the group, expected [rows, H]",
        ),
        (weight.sum(), ValueError, "weight: got shape () on rank 1 of the group, expected [rows, H]"),
    ):
        _refused(lambda o=other: vocab_parallel(o if second else weight, world), kind, message)
    # Of a DTensor nothing is exchanged: it knows.
    spread = distribute_tensor(weight, mesh, [Shard(0)])
    begin = 39 * dist.get_rank()
    _refused(
        lambda: vocab_parallel(spread, first=3), ValueError, f"first: got 3, expected {begin}, where the DTensor's"
    )
    _refused(
        lambda: vocab_parallel(spread, vocab_size=99), ValueError, f"vocab_size: got 99, expected {V}, the rows of"
    )
    whole = distribute_tensor(weight.long(), mesh, [Shard(0)])
    _refused(lambda: vocab_parallel(whole), TypeError, "weight: got dtype torch.int64, expected one of")
    cube = distribute_tensor(weight.view(V, 4, -1), mesh, [Shard(0)])
    _refused(lambda: vocab_parallel(cube), ValueError, f"weight: got shape ({V}, 4, 4), expected [rows, H]")
    own = [dist.new_group([rank]) for rank in range(WORLD)][dist.get_rank()]
    _refused(lambda: vocab_parallel(spread, own), ValueError, "beside a DTensor spread over [0, 1], expected None")
    _refused(lambda: vocab_parallel(spread, 3), TypeError, "group: got int, expected a ProcessGroup")
    uneven = vocab_parallel(weight[:7] if begin == 0 else weight[7:], world)
    for known, first in ((spread, begin), (uneven, 7 if second else 0)):
        for group in (None, world, mesh):
            assert vocab_parallel(known, group, first=first, vocab_size=V) is known
    _refused(lambda: vocab_parallel(uneven, first=1), ValueError, f"first: got 1, expected {7 if second else 0}")


@check
def arguments_that_are_no_numbers_tensors_or_groups_of_this_rank() -> None:
    weight, world = tokens()[1], dist.group.WORLD
    for name, value in (("first", "0"), ("first", 1.0), ("first", torch.tensor(0)), ("vocab_size", 12.0)):
        _refused(
            lambda n=name, v=value: vocab_parallel(weight, world, **{n: v}), TypeError, f"{name}: got {value!r} of"
        )
    _refused(lambda: vocab_parallel(weight, 3), TypeError, "group: got int, expected a ProcessGroup")
    _refused(lambda: vocab_parallel(weight.sum(), world), ValueError, "weight: got shape () on rank 0 of the group")
    _refused(lambda: shift_labels([1]), TypeError, "labels: got list, expected a torch.Tensor")  # type: ignore[arg-type]
    _refused(lambda: shift_labels(torch.tensor(3)), ValueError, "labels: got a tensor without dimensions")
    _refused(lambda: sum_over_ranks(3), TypeError, "values: got int, expected a floating-point tensor")  # type: ignore[arg-type]
    _refused(
        lambda: sum_over_ranks(torch.ones(3, dtype=torch.int64)), TypeError, "values: got torch.int64, expected a fl"
    )
    first = dist.new_group([0])
    if dist.get_rank() == 1:
        calls = (
            lambda: vocab_parallel(weight, first),
            lambda: sum_over_ranks(weight, first),
            lambda: scored_count(torch.arange(3), first),
        )
        for call in calls:
            _refused(call, ValueError, "group: got one that rank 1 is outside of")


Calls = list[tuple[str, Callable[[], object]]]


def _beside_a_head(hidden: Tensor, weight: Tensor, spread: Tensor, target: Tensor, mesh: DeviceMesh) -> Calls:
    """A temperature per token and weights per column, in every call that takes them."""
    heat = distribute_tensor(torch.ones(ROWS, T, dtype=DOUBLE), mesh, [Shard(1)])
    columns = distribute_tensor(torch.ones(V, dtype=DOUBLE), mesh, [Shard(0)])
    ids, smooth = target.clamp_min(0).unsqueeze(-1), CrossEntropyLoss(label_smoothing=0.1)
    logits, mean = torch.randn(ROWS, T, V, dtype=DOUBLE), ("mean_logprob",)
    calls: Calls = [
        ("temperature", lambda: linear_topk_logprobs(hidden, weight, ids, temperature=heat)),
        ("temperature", lambda: logit_statistics(logits, target, temperature=heat)),
        ("column_weights", lambda: logit_statistics(logits, target, statistics=mean, column_weights=columns)),
        ("temperature", lambda: LigerCrossEntropyLoss()(logits, target, temperature=heat)),
    ]
    for head in (weight, spread):
        calls += [
            ("temperature", lambda w=head: linear_logprobs(hidden, w, target, temperature=heat)),
            (
                "column_weights",
                lambda w=head: linear_logprobs(hidden, w, target, statistics=mean, column_weights=columns),
            ),
            ("temperature", lambda w=head: fused_linear_loss(smooth, hidden, w, target, temperature=heat)),
            ("column_weights", lambda w=head: fused_linear_loss(smooth, hidden, w, target, column_weights=columns)),
            (
                "inputs['token_weights']",
                lambda w=head: fused_linear_loss(smooth, hidden, w, target, inputs={"token_weights": heat}),
            ),
            ("temperature", lambda w=head: LigerFusedLinearCrossEntropyLoss()(w, hidden, target, temperature=heat)),
        ]
    return calls


def _of_pure_losses(mesh: DeviceMesh) -> Calls:
    whole, scored = -torch.ones(ROWS, T, dtype=DOUBLE), torch.ones(ROWS, T, dtype=torch.bool)
    some, mask = (distribute_tensor(tensor, mesh, [Shard(1)]) for tensor in (whole, scored))
    rows = torch.ones(ROWS, dtype=DOUBLE)
    return [
        ("logprobs", lambda: losses.sequence_logprobs(some, scored)),
        ("mask", lambda: losses.sequence_logprobs(whole, mask)),
        ("mask", lambda: losses.sequence_lengths(mask)),
        ("logprobs", lambda: losses.length_desensitized_logprobs(some, scored, 0.5)),
        ("log_sum_sq_probs", lambda: losses.alignment_weights(whole, some, scored)),
        ("logps", lambda: losses.log_odds(some)),
        ("log_ratio", lambda: losses.f_divergence_score(some, "forward_kl")),
        ("logprobs", lambda: losses.cross_entropy_loss(some, scored)),
        ("lse", lambda: losses.cross_entropy_loss(whole, scored, lse=some, lse_square_scale=0.1)),
        ("logprobs", lambda: losses.grpo_loss(some, scored, rows)),
        ("mask", lambda: losses.sampled_kl(whole, whole, mask=mask)),
    ]


@check
def the_argument_that_is_named_is_the_callers() -> None:
    hidden, weight, bias, target = tokens()
    spread = distribute_tensor(weight, mesh_of(), [Shard(0)])
    columns = distribute_tensor(hidden, mesh_of(), [Shard(2)])
    dpo, ids = LigerFusedLinearDPOLoss(), target.clamp_min(0)
    grpo = LigerFusedLinearGRPOLoss()
    mask, advantages = (target != -100).long(), torch.ones(ROWS, dtype=DOUBLE)
    beside = "got a tensor that is no DTensor beside a vocabulary-parallel weight"
    for call, message in (
        (lambda: dpo(weight, hidden, target, None, hidden, spread, bias), f"ref_bias: {beside}"),
        (lambda: dpo(spread, hidden, target, bias, hidden, weight), f"bias: {beside}"),
        (lambda: dpo(weight, hidden, target, None, columns, weight), "ref_input: got a DTensor with S(2)"),
        (lambda: dpo(weight, columns, target, None, hidden, weight), "_input: got a DTensor with S(2)"),
        (
            lambda: grpo(hidden, weight, ids, mask, advantages, ref_input=hidden, ref_weight=spread, ref_bias=bias),
            f"ref_bias: {beside}",
        ),
        (
            lambda: LigerFusedLinearKLDivLoss()(hidden, spread, torch.rand(ROWS, T, V, dtype=DOUBLE)),
            "target: got a tensor beside a vocabulary-parallel student, expected their logarithms, as teacher_logits of",
        ),
        (
            lambda: LigerFusedLinearJSD()(hidden, spread, columns, weight),
            "teacher_input: got a DTensor with S(2)",
        ),
        (
            lambda: LigerFusedLinearJSD()(columns, spread, hidden, weight),
            "student_input: got a DTensor with S(2)",
        ),
    ):
        with collectives() as seen:  # before any work
            _refused(call, ValueError, message)
        assert not seen, seen


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
        *_beside_a_head(hidden, weight, spread, target, mesh),
        *_of_pure_losses(mesh),
    ):
        _refused(call, TypeError, f"{name}: got a DTensor with")
        _refused(call, TypeError, whole)
