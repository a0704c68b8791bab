"""What the ranks decide alike, whatever each one's own share looks like."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from liger_losses import Divergence, LigerFusedLinearGRPOLoss, linear_divergence, linear_logprobs
from liger_losses.distributed import FusedHead, scored_count, vocab_parallel

from .harness import DOUBLE, ROWS, WORLD, H, T, V, check, close, tokens


def _own(whole: Tensor, sizes: list[int]) -> Tensor:
    return whole.split(sizes)[dist.get_rank()].clone()


@check
def heads_one_after_another_where_one_rank_sees_no_difference() -> None:
    """A rank's own number of rows does not tell it whether the others' have changed."""
    hidden = torch.randn(ROWS, T, H, dtype=DOUBLE)
    for sizes in ([5, 4], [5, 5], [2, 3], [3, 2], [2, 2], [5, 4]):
        weight, target = torch.randn(sum(sizes), H, dtype=DOUBLE), torch.randint(0, sum(sizes), (ROWS, T))
        plain, own = weight.clone().requires_grad_(), _own(weight, sizes).requires_grad_()
        spread = vocab_parallel(own, dist.group.WORLD)
        assert spread.shape == weight.shape
        for _step in (1, 2):  # one declaration serves both
            expected, seen = linear_logprobs(hidden, plain, target), linear_logprobs(hidden, spread, target)
            close(seen, expected)
            expected.sum().backward()
            seen.sum().backward()
            assert plain.grad is not None
            close(own.grad, _own(plain.grad, sizes))


def _spread_columns(logits: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
    """Logits of which each rank has the columns of its rows of `weight`."""
    mesh = vocab_parallel(_own(weight, sizes), dist.group.WORLD).device_mesh  # type: ignore[attr-defined]
    own = logits.split(sizes, -1)[dist.get_rank()].contiguous()
    shape, stride = logits.shape, logits.stride()
    return DTensor.from_local(own, mesh, [Shard(2)], run_check=False, shape=shape, stride=stride)


@check
def distillation_of_shards_of_one_column() -> None:
    hidden, other = torch.randn(ROWS, T, H, dtype=DOUBLE), torch.randn(ROWS, T, 8, dtype=DOUBLE)
    for sizes in ([1, 11], [11, 1], [1, 1]):
        vocab = sum(sizes)
        weight, teacher = torch.randn(vocab, H, dtype=DOUBLE), torch.randn(vocab, 8, dtype=DOUBLE)
        target, logits = torch.randint(0, vocab, (ROWS, T)), torch.randn(ROWS, T, vocab, dtype=DOUBLE)
        whole = {"teacher_hidden": other, "teacher_weight": teacher}
        teachers = (
            (whole, {**whole, "teacher_weight": vocab_parallel(_own(teacher, sizes), dist.group.WORLD)}),
            (whole, whole),
            ({"teacher_logits": logits}, {"teacher_logits": logits}),
            ({"teacher_logits": logits}, {"teacher_logits": _spread_columns(logits, weight, sizes)}),
        )
        for plain, spread in teachers:
            for mix in (Divergence(hard_weight=0.5), Divergence(kind="jsd"), Divergence(soft_weight=0, hard_weight=1)):
                x, y = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
                expected = linear_divergence(x, weight, target, **plain, divergence=mix)
                own = vocab_parallel(_own(weight, sizes), dist.group.WORLD)
                seen = linear_divergence(y, own, target, **spread, divergence=mix)
                close(seen, expected)
                expected.sum().backward()
                seen.sum().backward()
                close(y.grad, x.grad)


def _rollouts() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token ids, their mask, advantages and what they were sampled with."""
    target = tokens()[3]
    old = torch.randn(ROWS, T, dtype=DOUBLE) - 4
    return target.clamp_min(0), (target != -100).long(), torch.linspace(-1, 2, ROWS, dtype=DOUBLE), old


@check
def grpo_of_sequences_over_ranks() -> None:
    """Its divisor is the count of all ranks over `num_processes`, and DDP takes the mean."""
    rank = dist.get_rank()
    hidden, (ids, mask, advantages, old) = tokens()[0], _rollouts()
    labels = ids.masked_fill(mask == 0, -100)
    own = slice(0, 5) if rank == 0 else slice(5, T)
    options = {"loss_type": "dapo", "beta": 0.0, "use_ref_model": False, "entropy_coef": 0.1}
    linear = nn.Linear(H, V, dtype=DOUBLE)
    whole = FusedHead(linear, LigerFusedLinearGRPOLoss(num_processes=1, **options))
    count = int((labels != -100).sum())
    expected, _metrics = whole(hidden, ids, mask, advantages, old_per_token_logps=old, num_items_in_batch=count)
    gradients = torch.autograd.grad(expected, list(linear.parameters()))
    spread = nn.parallel.DistributedDataParallel(FusedHead(linear, LigerFusedLinearGRPOLoss(**options)))
    loss, _metrics = spread(
        hidden[:, own], ids[:, own], mask[:, own], advantages, old_per_token_logps=old[:, own],
        num_items_in_batch=scored_count(labels[:, own], gradients="sum"),
    )  # fmt: skip
    loss.backward()
    for parameter, gradient in zip(linear.parameters(), gradients, strict=True):
        close(parameter.grad, gradient)
    total = loss.detach().clone()
    dist.all_reduce(total)
    close(total / WORLD, expected.detach())


@check
def ranks_of_one_vocabulary_are_one_process() -> None:
    hidden, weight, _bias, _target = tokens()
    ids, mask, advantages, old = _rollouts()
    options = {"loss_type": "dapo", "beta": 0.0, "use_ref_model": False}
    known = {"old_per_token_logps": old, "num_items_in_batch": 50}
    spread = vocab_parallel(_own(weight, [21, V - 21]), dist.group.WORLD)
    alone = LigerFusedLinearGRPOLoss(num_processes=1, **options)(hidden, weight, ids, mask, advantages, **known)[0]
    for given, head, factor in ((None, spread, 1), (WORLD, spread, WORLD), (None, weight, WORLD)):
        loss = LigerFusedLinearGRPOLoss(num_processes=given, **options)
        close(loss(hidden, head, ids, mask, advantages, **known)[0], alone * factor)
