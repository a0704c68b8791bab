"""Constants that lie on the host beside a head on an accelerator: moved, not refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import liger_losses as ll
from liger_losses import losses

pytestmark = pytest.mark.gpu

ROWS, TOKENS, WIDTH, VOCAB = 4, 5, 8, 19


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), device="cpu")


IDS = (torch.arange(ROWS * TOKENS, device="cpu") * 7 % VOCAB).view(ROWS, TOKENS)
TOKEN, ROW, LABELS = -_normal(ROWS, TOKENS).abs(), -_normal(ROWS).abs(), IDS[:, 0] > 5
CALLS: dict[str, Any] = {
    "DPO": (
        lambda h, w, **c: ll.LigerFusedLinearDPOLoss()(w, h, **c),
        {"target": IDS, "ref_chosen_logps": ROW[:2], "ref_rejected_logps": ROW[2:]},
    ),
    "KTO": (
        lambda h, w, **c: ll.LigerFusedLinearKTOLoss(use_ref_model=True)(h, w, **c),
        {"target": IDS, "preference_labels": LABELS, "ref_logps": ROW, "kl": ROW},
    ),
    "GRPO": (
        lambda h, w, **c: ll.LigerFusedLinearGRPOLoss()(h, w, **c),
        {
            "selected_token_ids": IDS, "attention_mask": IDS > 3, "advantages": ROW, "old_per_token_logps": TOKEN,
            "ref_per_token_logps": TOKEN, "num_items_in_batch": torch.tensor(30),
        },
    ),
    "cross entropy": (
        lambda h, w, **c: ll.LigerFusedLinearCrossEntropyLoss()(w, h, **c), {"target": IDS, "token_weights": -TOKEN}
    ),
    "dpo_loss": (
        lambda h, w, **c: losses.dpo_loss(h[:, 0, 0], h[:, 0, 1], loss_type="ipo", **c).sum(),
        {"ref_chosen_logps": ROW, "ref_rejected_logps": ROW, "chosen_lengths": IDS[:, 0], "rejected_lengths": IDS[:, 1]},
    ),
    "kto_loss": (
        lambda h, w, **c: losses.kto_loss(h[:, 0, 0], **c).sum(), {"labels": LABELS, "ref_logps": ROW, "kl": ROW}
    ),
    "sampled_kl": (lambda h, w, **c: losses.sampled_kl(h[..., 0], **c).sum(), {"teacher_logprobs": TOKEN}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_constants_on_the_host(name: str) -> None:
    call, constants = CALLS[name]
    gradients = []
    for device in ("cuda", "cpu"):
        hidden = _normal(ROWS, TOKENS, WIDTH).cuda().requires_grad_()
        weight = _normal(VOCAB, WIDTH).cuda().requires_grad_()
        result = call(hidden, weight, **{name: value.to(device) for name, value in constants.items()})
        loss = result if isinstance(result, Tensor) else result[0]
        gradients.append(torch.autograd.grad(loss, hidden)[0])
    torch.testing.assert_close(*gradients)
