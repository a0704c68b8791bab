"""Heads quantised by bitsandbytes, as the weight that their own forward multiplies by.

They are frozen: what trains is an adapter elsewhere. The weight is unpacked once a step, for the duration of forward
and backward; the products are those of a frozen head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def is_quantised(linear: nn.Linear) -> bool:
    """Whether it is a 4-bit or 8-bit layer of bitsandbytes whose weight is packed."""
    kind = type(linear)
    if not kind.__module__.startswith("bitsandbytes."):
        return False
    if kind.__name__ == "Linear4bit":
        return getattr(linear.weight, "quant_state", None) is not None
    return kind.__name__ == "Linear8bitLt" and linear.weight.dtype == torch.int8


@torch.no_grad()
def unpacked(linear: nn.Linear, dtype: torch.dtype) -> Tensor:
    """The weight `[V, H]` in `dtype`.

    4 bits: what the layer multiplies by. 8 bits: `int8 * scale / 127` per row; the layer itself may round its inputs
    to 8 bits too, which this does not.
    """
    layer: Any = linear
    if type(linear).__name__ == "Linear4bit":
        from bitsandbytes.functional import dequantize_4bit

        weight: Tensor = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        return weight.to(dtype)
    # The scales move from the weight to the layer's state at its first forward.
    scale = layer.weight.SCB if getattr(layer.weight, "SCB", None) is not None else layer.state.SCB
    return (layer.weight.data.float() * (scale.float()[:, None] / 127)).to(dtype)
