"""DDP, FSDP2 and context parallelism: one step equals that of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from liger_losses import LigerFusedLinearCrossEntropyLoss, LigerFusedLinearDPOLoss, linear_logprobs
from liger_losses.distributed import FusedHead, scored_count, shift_labels, sum_over_ranks
from liger_losses.losses import dpo_loss

from .harness import DOUBLE, ROWS, WORLD, H, T, V, check, close, tokens


class _Model(nn.Module):
    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, H), nn.Tanh(), nn.Linear(H, H)).double()
        self.head = FusedHead(nn.Linear(H, V, dtype=DOUBLE), loss)

    def forward(self, inputs: Tensor, target: Tensor, **more: Any) -> Any:
        return self.head(self.backbone(inputs), target, **more)


def _batch(rank: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(10 + rank)
    inputs = torch.randn(ROWS, T, 6, dtype=DOUBLE, generator=generator)
    target = torch.randint(0, V, (ROWS, T), generator=generator)
    target[:, : 2 + 3 * rank] = -100
    reference = {f"ref_{side}_logps": torch.randn(ROWS // 2, dtype=DOUBLE, generator=generator) - 30
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
    close(loss, losses[dist.get_rank()])
    for name, parameter in model.named_parameters():
        close(parameter.grad, expected[name])
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
    hidden = torch.randn(ROWS, T, H, dtype=DOUBLE)
    target = tokens()[3]
    expected = model.head.weight.detach().clone().requires_grad_()
    bias = model.head.bias.detach().clone()
    linear_logprobs(hidden, expected, target, bias).sum().backward()
    fully_shard(model.head)
    linear_logprobs(hidden, model.head.weight, target, model.head.bias).sum().backward()
    assert model.head.weight.grad.placements == model.head.weight.placements
    close(model.head.weight.grad, expected.grad)


@check
def token_means_over_ranks() -> None:
    """A token mean over all ranks' tokens, where ranks score different numbers of them."""
    loss = LigerFusedLinearCrossEntropyLoss()
    torch.manual_seed(1)
    model = _Model(loss)
    batches = [_batch(rank) for rank in range(WORLD)]
    wrapped = nn.parallel.DistributedDataParallel(model)
    for scored in (None, 1):  # the second time one token of all ranks': a share of a half each
        inputs, target = (torch.cat([b[i] for b in batches]) for i in range(2))
        target = (
            target if scored is None else target.masked_fill(torch.arange(target.numel()).view_as(target) != 9, -100)
        )
        model.zero_grad()
        model(inputs, target).backward()
        expected = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        own = inputs.chunk(WORLD)[dist.get_rank()], target.chunk(WORLD)[dist.get_rank()]
        wrapped(*own, num_items_in_batch=scored_count(own[1])).backward()
        for name, parameter in model.named_parameters():
            close(parameter.grad, expected[name])


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
    close(loss, expected_loss.detach())
    for name, parameter in model.named_parameters():
        close(parameter.grad, expected[name])
