"""What two processes of one group check together; `test_two_processes` spawns them once and reports each check."""

from __future__ import annotations

import collections
import datetime
import json
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.deterministic
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from liger_losses import (
    Divergence,
    LigerFusedLinearBCELoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    fused_linear_distillation,
    linear_divergence,
    linear_logprobs,
)
from liger_losses.chunked import fused_linear_loss
from liger_losses.distributed import FusedHead, scored_count, shift_labels, sum_over_ranks, vocab_parallel
from liger_losses.kernels import DISTILLATION, STATISTICS
from liger_losses.losses import CrossEntropyLoss, dpo_loss

from ..distillation_oracle import KINDS

WORLD = 2
V, H, ROWS, T = 77, 16, 4, 12  # 77 columns on two ranks: 39 and 38
CHECKS: dict[str, Callable[[], None]] = {}
_DOUBLE = torch.float64


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def run(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that is not written holds NaN
    torch.utils.deterministic.fill_uninitialized_memory = True
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, timeout=datetime.timedelta(seconds=40))
    found = {}
    try:
        for name, function in CHECKS.items():
            torch.manual_seed(0)
            try:
                function()
                found[name] = ""
            except Exception:
                found[name] = traceback.format_exc()
            Path(folder, f"{rank}.json").write_text(json.dumps(found))
            dist.barrier()
    finally:
        dist.destroy_process_group()


# --- what they share -------------------------------------------------------------------------------------------------


def _mesh(name: str = "tp") -> Any:
    return init_device_mesh("cpu", (WORLD,), mesh_dim_names=(name,))


def _tokens(dtype: torch.dtype = _DOUBLE) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias and targets, the same on every rank."""
    hidden = torch.randn(ROWS, T, H, dtype=_DOUBLE).to(dtype)
    weight, bias = torch.randn(V, H, dtype=_DOUBLE).to(dtype), torch.randn(V, dtype=_DOUBLE).to(dtype)
    target = torch.randint(0, V, (ROWS, T))
    target[:, :3] = -100
    target[1] = -100
    return hidden, weight, bias, target


def _whole(gradient: Any) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _close(seen: Any, expected: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(_whole(seen), expected, rtol=tolerance, atol=tolerance)


@contextmanager
def collectives() -> Iterator[collections.Counter[str]]:
    """Calls of torch.distributed's functions, by name, and the largest tensor that one was handed."""
    seen: collections.Counter[str] = collections.Counter()
    originals = {}

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen[name] += 1
            seen["largest"] = max(seen["largest"], *(a.numel() for a in args if isinstance(a, Tensor)))
            return function(*args, **kwargs)

        return call

    for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast"):
        originals[name] = getattr(dist, name)
        setattr(dist, name, counted(name, originals[name]))
    try:
        yield seen
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


def _both_ways(
    call: Callable[[Tensor, Tensor, Tensor], dict[str, Tensor] | tuple[Tensor, Any] | Tensor],
    dtype: torch.dtype = _DOUBLE,
    tolerance: float = 1e-10,
) -> None:
    """`call(hidden, weight, bias)` with the whole head and with this rank's columns: values and gathered gradients."""
    hidden, weight, bias, _target = _tokens(dtype)
    mesh = _mesh()
    results = []
    for spread in (False, True):
        leaves = [hidden.clone(), weight.clone(), bias.clone()]
        if spread:
            leaves[1:] = [distribute_tensor(leaf, mesh, [Shard(0)]) for leaf in leaves[1:]]
        for leaf in leaves:
            leaf.requires_grad_()
        answer = call(*leaves)
        if isinstance(answer, tuple):
            answer = {"loss": answer[0]}
        if isinstance(answer, Tensor):
            answer = {"loss": answer}
        some = [value for value in answer.values() if value.requires_grad]
        sum((value * torch.linspace(0.5, 2, value.numel()).view(value.shape)).sum() for value in some).backward()
        if spread:
            assert [leaf.grad.placements for leaf in leaves[1:]] == [(Shard(0),), (Shard(0),)]
        results.append(({k: v.detach() for k, v in answer.items()}, [leaf.grad for leaf in leaves]))
    (values, gradients), (seen, seen_gradients) = results
    for name in values:
        _close(seen[name], values[name], tolerance)
    for ours, theirs in zip(seen_gradients, gradients, strict=True):
        size = float(theirs.abs().amax())
        torch.testing.assert_close(_whole(ours), theirs, rtol=10 * tolerance, atol=tolerance * max(size, 1))


# --- a vocabulary over ranks -------------------------------------------------------------------------------------------


@check
def statistics_of_a_spread_vocabulary() -> None:
    target = _tokens()[3]
    weights = torch.rand(V)
    several = ("logprob", "entropy", "lse", "mean_logprob")
    for strategy, differentiable in (("cached", ("logprob",)), ("recompute", several)):
        for dtype, tolerance in ((_DOUBLE, 1e-10), (torch.float32, 2e-5), (torch.bfloat16, 2e-2)):
            _both_ways(
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
    target = _tokens()[3]
    for options in ({}, {"label_smoothing": 0.1, "lse_square_scale": 1e-3, "softcap": 4.0}):
        module = LigerFusedLinearCrossEntropyLoss(**options)
        _both_ways(lambda h, w, b, m=module: m(w, h, target, b))
    # Small tiles, and a loss that differentiates more than log-probabilities while they are resident.
    for strategy in ("immediate", "recompute"):
        _both_ways(
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
def dpo_of_a_spread_vocabulary() -> None:
    target, reference = _tokens()[3], torch.randn(ROWS, T, 8, dtype=_DOUBLE)
    reference_weight = torch.randn(V, 8, dtype=_DOUBLE)
    for strategy in ("immediate", "cached"):
        module = LigerFusedLinearDPOLoss(beta=0.3, strategy=strategy)
        _both_ways(
            lambda h, w, b, m=module: m(
                w, h, target, b, reference,
                distribute_tensor(reference_weight, _mesh(), [Shard(0)]) if isinstance(w, DTensor) else reference_weight,
            )
        )  # fmt: skip


@check
def grpo_of_a_spread_vocabulary() -> None:
    target = _tokens()[3]
    mask, ids = (target != -100).long(), target.clamp_min(0)
    old, reference = torch.randn(ROWS, T, dtype=_DOUBLE) - 4, torch.randn(ROWS, T, dtype=_DOUBLE) - 4
    for options in ({"strategy": "recompute"}, {"entropy_coef": 0.02}):
        module = LigerFusedLinearGRPOLoss(beta=0.04, loss_type="dapo", **options)
        _both_ways(
            lambda h, w, b, m=module: m(
                h, w, ids, mask, torch.linspace(-1, 1, ROWS, dtype=_DOUBLE), b, ref_per_token_logps=reference,
                old_per_token_logps=old,
            )
        )  # fmt: skip


@check
def labels_without_exclusion_of_a_spread_vocabulary() -> None:
    positives = torch.stack([torch.randperm(V)[:5] for _ in range(ROWS * T)])
    positives[::3, 2:] = -100
    module = LigerFusedLinearBCELoss()
    _both_ways(lambda h, w, b: module(w, h.flatten(0, 1), positives, b))


@check
def every_divergence_of_two_spread_vocabularies() -> None:
    target = _tokens()[3]
    generator = torch.Generator().manual_seed(5)
    hidden, weight, bias = (torch.randn(*s, dtype=_DOUBLE, generator=generator) for s in ((ROWS, T, 8), (V, 8), (V,)))
    logits = torch.randn(ROWS, T, V, dtype=_DOUBLE, generator=generator)
    for index, options in enumerate(KINDS):
        if options.vocabulary != "shared":
            continue

        # A teacher as a head, whose columns are spread or whole, and as whole logits.
        def teacher(spread: bool, index: int = index) -> dict[str, Tensor]:
            if index % 3 == 2:
                return {"teacher_logits": logits}
            own = distribute_tensor(weight, _mesh(), [Shard(0)]) if spread and index % 3 == 0 else weight
            return {"teacher_hidden": hidden, "teacher_weight": own, "teacher_bias": bias}

        _both_ways(
            lambda h, w, b, o=options, t=teacher, i=index: linear_divergence(
                h, w, target, b, **t(isinstance(w, DTensor)), divergence=o, statistics=DISTILLATION,
                strategy=("cached", "recompute")[i % 2], softcap=5.0,
            ),
            tolerance=1e-8,
        )  # fmt: skip
    jsd = Divergence(kind="jsd", beta=0.3, temperature=2.0, hard_weight=0.5)
    for dtype, tolerance in ((_DOUBLE, 1e-10), (torch.float32, 2e-5)):
        _both_ways(
            lambda h, w, b, d=dtype: fused_linear_distillation(
                h, w, target, b, teacher_hidden=hidden.to(d), teacher_weight=weight.to(d), divergence=jsd,
                strategy="immediate",
            ),
            dtype, tolerance,
        )  # fmt: skip


@check
def ties_and_masked_vocabularies() -> None:
    hidden, weight, _bias, target = _tokens()
    weight[-30:] = weight[0]  # equal logits on both ranks: the first column is the maximum's
    bias = torch.zeros(V, dtype=_DOUBLE)
    for masked in (slice(0, 0), slice(0, 40), slice(38, V)):  # all of a rank's columns impossible
        bias.zero_()[masked] = -torch.inf
        mesh = _mesh()
        spread = [distribute_tensor(t, mesh, [Shard(0)]) for t in (weight, bias)]
        names = ("argmax", "is_top1", "lse", "entropy")
        whole = linear_logprobs(hidden, weight, target, bias, statistics=names)
        for name, value in linear_logprobs(hidden, spread[0], target, spread[1], statistics=names).items():
            _close(value, whole[name])


@check
def shards_of_any_size_and_the_collectives_of_a_call() -> None:
    hidden, weight, bias, target = _tokens()
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
    assert forward["all_gather_into_tensor"] == 1, forward
    assert sum(forward.values()) - forward["largest"] == 1, forward
    assert seen["all_reduce"] == 1, seen
    assert sum(seen.values()) - seen["largest"] == 2, seen
    assert seen["largest"] == hidden.numel(), seen
    _close(x.grad, leaves[0].grad)
    _close(w.grad, leaves[1].grad[own])
    _close(b.grad, leaves[2].grad[own])
    for strategy, forwards in (("recompute", 1), ("cached", 1)):
        with collectives() as seen:
            linear_logprobs(
                hidden.clone().requires_grad_(), spread[0].detach(), target, strategy=strategy
            ).sum().backward()
        assert (seen["all_gather_into_tensor"], seen["all_reduce"]) == (forwards, 1), seen
    with torch.no_grad(), collectives() as seen:
        linear_logprobs(hidden, spread[0], target)
    assert (seen["all_gather_into_tensor"], seen["all_reduce"]) == (1, 0), seen


@check
def a_frozen_head_and_hidden_states_over_ranks() -> None:
    """Sequence parallelism: hidden states come as a shard of the sequence, and so does their gradient go back."""
    hidden, weight, _bias, target = _tokens()
    mesh = _mesh()
    plain = hidden.clone().requires_grad_()
    expected = linear_logprobs(plain, weight, target)
    expected.square().sum().backward()
    spread = distribute_tensor(hidden, mesh, [Shard(1)]).requires_grad_()
    seen = linear_logprobs(spread, distribute_tensor(weight, mesh, [Shard(0)]), target)
    seen.square().sum().backward()
    _close(seen, expected)
    assert spread.grad is not None
    assert spread.grad.placements == (Shard(1),)
    _close(spread.grad, plain.grad)


@check
def a_replicated_or_differently_named_head_is_gathered() -> None:
    hidden, weight, _bias, target = _tokens()
    for name, placement in (("tp", Replicate()), ("dp", Shard(0)), ("dp", Shard(1))):
        spread = distribute_tensor(weight, _mesh(name), [placement]).requires_grad_()
        plain = weight.clone().requires_grad_()
        linear_logprobs(hidden, plain, target).sum().backward()
        with collectives() as seen:
            linear_logprobs(hidden, spread, target, strategy="recompute").sum().backward()
        assert seen["largest"] == 0, seen  # DTensor's own functional collectives do what there is to do
        assert spread.grad.placements == (placement,)
        _close(spread.grad, plain.grad)
    # A dimension by another name, declared.
    declared = vocab_parallel(distribute_tensor(weight, _mesh("model"), [Shard(0)]), dim="model")
    with torch.no_grad(), collectives() as seen:
        _close(linear_logprobs(hidden, declared, target), linear_logprobs(hidden, weight, target))
    assert seen["all_gather_into_tensor"] == 1


# --- data parallel -----------------------------------------------------------------------------------------------------


class _Model(nn.Module):
    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, H), nn.Tanh(), nn.Linear(H, H)).double()
        self.head = FusedHead(nn.Linear(H, V, dtype=_DOUBLE), loss)

    def forward(self, inputs: Tensor, target: Tensor, **more: Any) -> Any:
        return self.head(self.backbone(inputs), target, **more)


def _batch(rank: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(10 + rank)
    inputs = torch.randn(ROWS, T, 6, dtype=_DOUBLE, generator=generator)
    target = torch.randint(0, V, (ROWS, T), generator=generator)
    target[:, : 2 + 3 * rank] = -100
    reference = {f"ref_{side}_logps": torch.randn(ROWS // 2, dtype=_DOUBLE, generator=generator) - 30
                 for side in ("chosen", "rejected")}  # fmt: skip
    return inputs, target, reference


def _mean_over_ranks(model: nn.Module) -> tuple[list[Tensor], dict[str, Tensor]]:
    losses = []
    for rank in range(WORLD):
        inputs, target, reference = _batch(rank)
        losses.append(model(inputs, target, **reference)[0])
    torch.stack(losses).mean().backward()
    return [loss.detach() for loss in losses], {n: p.grad for n, p in model.named_parameters()}


def _data_parallel(wrap: Callable[[nn.Module], nn.Module], **options: Any) -> Any:
    def build() -> _Model:
        torch.manual_seed(1)
        return _Model(LigerFusedLinearDPOLoss(beta=0.2, **options))

    losses, expected = _mean_over_ranks(build())
    model = build()
    wrapped = wrap(model)
    inputs, target, reference = _batch(dist.get_rank())
    loss, _metrics = wrapped(inputs, target, **reference)
    loss.backward()
    _close(loss, losses[dist.get_rank()])
    for name, parameter in model.named_parameters():
        _close(parameter.grad, expected[name])
    return model


@check
def ddp_with_a_head_that_is_a_module() -> None:
    _data_parallel(nn.parallel.DistributedDataParallel)


@check
def fsdp2_with_a_head_that_is_a_module() -> None:
    for strategy in ("auto", "recompute"):
        for reshard in (True, False):

            def wrap(model: Any, reshard: bool = reshard) -> nn.Module:
                fully_shard(model.head, reshard_after_forward=reshard)
                return fully_shard(model, reshard_after_forward=reshard)

            model = _data_parallel(wrap, strategy=strategy)
            assert isinstance(model.head.weight, DTensor)
            assert model.head.weight.grad.placements == (Shard(0),)


@check
def fsdp2_head_that_is_read_outside_of_its_forward() -> None:
    """A DTensor weight in a bare call: gathered once, the gradient in the parameter's placement and the mean."""
    model = _Model(None)
    hidden = torch.randn(ROWS, T, H, dtype=_DOUBLE)
    target = _tokens()[3]
    expected = model.head.weight.detach().clone().requires_grad_()
    bias = model.head.bias.detach().clone()
    linear_logprobs(hidden, expected, target, bias).sum().backward()
    fully_shard(model.head)
    linear_logprobs(hidden, model.head.weight, target, model.head.bias).sum().backward()
    assert model.head.weight.grad.placements == model.head.weight.placements
    _close(model.head.weight.grad, expected.grad)


@check
def token_means_over_ranks() -> None:
    """A token mean over all ranks' tokens, where ranks score different numbers of them."""
    loss = LigerFusedLinearCrossEntropyLoss()
    torch.manual_seed(1)
    model = _Model(loss)
    batches = [_batch(rank) for rank in range(WORLD)]
    inputs, target = (torch.cat([b[i] for b in batches]) for i in range(2))
    model(inputs, target).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    inputs, target, _reference = batches[dist.get_rank()]
    wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped(inputs, target, num_items_in_batch=scored_count(target)).backward()
    for name, parameter in model.named_parameters():
        _close(parameter.grad, expected[name], 1e-6)  # the count is fp32


# --- context parallel --------------------------------------------------------------------------------------------------


@check
def context_parallel_dpo() -> None:
    """Pairs whose sequences lie on two ranks."""
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = _Model(None)
    inputs, _target, reference = _batch(0)
    labels = torch.randint(0, V, (ROWS, T))
    labels[:, :4] = -100
    target = shift_labels(labels)
    assert target[:, -1].eq(-100).all()
    assert target[:, :-1].equal(labels[:, 1:])

    def loss_of(logps: Tensor) -> Tensor:
        chosen, rejected = logps.chunk(2)
        losses = dpo_loss(chosen, rejected, reference["ref_chosen_logps"], reference["ref_rejected_logps"], beta=0.2)
        return (losses[0] if isinstance(losses, tuple) else losses).mean()

    expected_loss = loss_of(model(inputs, target).sum(-1))
    expected_loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    own = slice(0, 5) if rank == 0 else slice(5, T)
    wrapped = nn.parallel.DistributedDataParallel(model)
    loss = loss_of(sum_over_ranks(wrapped(inputs[:, own], target[:, own]).sum(-1)))
    loss.backward()
    _close(loss, expected_loss.detach())
    for name, parameter in model.named_parameters():
        _close(parameter.grad, expected[name])


# --- refusals ----------------------------------------------------------------------------------------------------------


def _refused(call: Callable[[], object], kind: type[Exception], message: str) -> None:
    try:
        call()
    except kind as error:
        assert message in str(error), str(error)
    else:
        raise AssertionError(f"accepted, expected {kind.__name__}: {message}")


@check
def refusals() -> None:
    hidden, weight, bias, target = _tokens()
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
        lambda: vocab_parallel(half, _mesh("dp")),
        ValueError,
        "dim: got 'tp', expected a dimension of the mesh, ('dp',)",
    )
    mesh = _mesh()
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
    _refused(
        lambda: linear_logprobs(hidden.to("meta"), spread, target), ValueError, "weight: got device cpu, expected meta"
    )
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
    narrow = torch.randn(60, H, dtype=_DOUBLE)
    _refused(
        lambda: linear_divergence(hidden, spread, target, teacher_hidden=hidden, teacher_weight=narrow),
        ValueError,
        "teacher_weight: got 60 rows beside a vocabulary-parallel student",
    )
    probabilities = torch.rand(ROWS, T, V, dtype=_DOUBLE)
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
