"""What the ranks decide alike, whatever each one's own share looks like."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from liger_losses import Divergence, linear_divergence, linear_logprobs
from liger_losses.distributed import vocab_parallel

from .harness import DOUBLE, ROWS, H, T, check, close


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
