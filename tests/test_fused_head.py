"""`distributed.FusedHead` on one process: how it is called."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from liger_losses import LigerFusedLinearCrossEntropyLoss, fused_linear_loss, linear_logprobs
from liger_losses.distributed import FusedHead
from liger_losses.losses import CrossEntropyLoss

LOSSES: list[Any] = [None, CrossEntropyLoss(), LigerFusedLinearCrossEntropyLoss()]


def made(loss: Any) -> tuple[FusedHead, Tensor, Tensor]:
    """Head, hidden states, target."""
    torch.manual_seed(0)
    return FusedHead(nn.Linear(8, 20), loss), torch.randn(2, 3, 8), torch.randint(20, (2, 3))


@pytest.mark.parametrize("loss", LOSSES, ids=["statistics", "object", "module"])
def test_by_position_and_by_name(loss: Any) -> None:
    head, hidden, target = made(loss)
    first = "_input" if isinstance(loss, nn.Module) else "hidden"
    if loss is None:
        want: Any = linear_logprobs(hidden, head.weight, target, head.bias)
    elif isinstance(loss, nn.Module):
        want = loss(head.weight, hidden, target, head.bias)
    else:
        want = fused_linear_loss(loss, hidden, head.weight, target, head.bias)
    for got in (head(hidden, target), head(hidden, target=target), head(**{first: hidden, "target": target})):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_what_is_no_linear_layer_is_named_in_full() -> None:
    # An adapter's class may have the name of torch's own.
    other = type("Linear", (nn.Module,), {"__module__": "peft.tuners.lora.layer"})
    message = "linear: got a peft.tuners.lora.layer.Linear, expected a torch.nn.Linear; an adapter on a head is for "
    with pytest.raises(TypeError, match=rf"^{re.escape(message)}liger_losses\.integrations.*fuse_head\(model\)$"):
        FusedHead(other())


@pytest.mark.parametrize("loss", LOSSES, ids=["statistics", "object", "module"])
def test_arguments_that_are_missing_or_too_many(loss: Any) -> None:
    head, hidden, target = made(loss)
    first = "_input" if isinstance(loss, nn.Module) else "hidden"
    for args, kwargs, message in (
        ((), {}, "missing 2 required"),
        ((hidden,), {}, "missing 1 required positional argument: 'target'"),
        ((hidden, target), {first: hidden}, f"multiple values for keyword argument '{first}'"),
        ((hidden, target, hidden, hidden, hidden, hidden), {}, "FusedHead: got 6 positional arguments, expected"),
    ):
        with pytest.raises(TypeError, match=re.escape(message)):
            head(*args, **kwargs)
