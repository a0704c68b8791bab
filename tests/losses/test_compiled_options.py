"""Options that change from call to call under torch.compile, which makes their numbers symbolic."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from liger_losses.losses import bco_loss, cross_entropy_loss, dpo_loss, grpo_loss, kto_loss, reference_free_loss

MASK = torch.tensor([[True, True, False], [True, False, True]])
LABELS = torch.tensor([True, False])

CALLS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "dpo": lambda logprobs, beta: dpo_loss(*logprobs[0, :2].unsqueeze(-1), beta=beta),
    "reference free": lambda logprobs, beta: reference_free_loss(*logprobs[0, :2].unsqueeze(-1), beta=beta),
    "kto": lambda logprobs, beta: kto_loss(logprobs[:, 0], LABELS, beta=beta),
    "bco": lambda logprobs, beta: bco_loss(logprobs[:, 0], LABELS, beta=beta),
    "cross entropy": lambda logprobs, scale: cross_entropy_loss(logprobs, MASK, lse=logprobs, lse_square_scale=scale),
    "grpo": lambda logprobs, beta: grpo_loss(logprobs, MASK, logprobs[:, 0], ref_logprobs=2 * logprobs, beta=beta)[0],
}


@pytest.mark.parametrize("name", CALLS)
def test_a_number_that_changes(name: str) -> None:
    torch._dynamo.reset()
    call, logprobs = CALLS[name], -torch.rand(2, 3, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    for number in (0.1, 0.25, 0.5):
        torch.testing.assert_close(compiled(logprobs, number), call(logprobs, number))
