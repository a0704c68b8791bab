"""LoRA and DoRA on the output head, as a plain head that is a little wider.

With rank r, `x W^T + s (x A^T) B^T = [x, s x A^T] [W, B]^T`: hidden states and weight get r more columns each, and
autograd carries their gradients on to A and B. No logits exist on the way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_losses._checks import is_dtensor
from liger_losses._extras import require
from liger_losses.chunked.placements import gathered, spread_as, spread_rows, tensor_parallel_dimension


def check(layer: Any, model: str) -> None:
    """Refuse a layer that `widen` could not write out.

    Args:
        layer: What stands in the place of the head, with a `base_layer`.
        model: Name for messages.

    Raises:
        ValueError: It is no LoRA layer, or a variant of LoRA other than DoRA, or DoRA with dropout, a bias
            or another adapter beside it.
    """
    lora = require("peft.tuners.lora", "trl")
    kind = type(layer)
    quantised = kind.__module__ == "peft.tuners.lora.bnb" and isinstance(layer, lora.LoraLayer)
    if not isinstance(layer, lora.Linear) and not quantised:
        raise ValueError(
            f"the head of {model} is a {kind.__module__}.{kind.__qualname__}: of the adapters on a head only LoRA and "
            "DoRA are known to the fused loss, another would be left out of it and never trained; take the head out "
            "of the adapter's target_modules."
        )
    if layer.fan_in_fan_out:
        raise ValueError(f"the LoRA on the head of {model} has fan_in_fan_out=True; a head's weight is [out, in].")
    active = _active(layer)
    for name in active:
        variant = type(layer.lora_variant.get(name)).__name__
        if variant == "NoneType":
            continue
        if variant != "DoraLinearVariant":
            raise ValueError(
                f"adapter {name!r} on the head of {model} is the LoRA variant {variant}; expected plain LoRA or DoRA."
            )
        if getattr(layer.lora_dropout[name], "p", 0.0) > 0.0:
            raise ValueError(
                f"adapter {name!r} on the head of {model} is DoRA with dropout, which gives W a second, dropped input; "
                "set lora_dropout=0."
            )
        if len(active) > 1 or layer.lora_B[name].bias is not None:
            raise ValueError(
                f"adapter {name!r} on the head of {model} is DoRA with a bias or beside another active adapter "
                f"({', '.join(active)}); expected it alone and without a bias."
            )


def _active(layer: Any) -> list[str]:
    """Names of the adapters that the layer's forward would add; merged, or switched off, the base alone is the head."""
    if layer.disable_adapters or layer.merged:
        return []
    return [name for name in layer.active_adapters if name in layer.lora_A]


def widen(layer: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Operands of one linear head that equals `layer(hidden)` for the adapters that are active now.

    LoRA's dropout is drawn anew at each call, as by the layer's own forward. DoRA multiplies row v of the sum by
    `m_v / ||W_v + s B_v A||`, the norm being a constant to its gradient (https://arxiv.org/abs/2402.09353, 4.3).

    Of a weight whose rows are spread over tensor-parallel ranks each has those of B (and m) too, and all have A: its
    gradient comes from the widened hidden states', which the engine hands back whole on every rank.

    Args:
        layer: A `peft.tuners.lora.Linear`, or one around a layer of bitsandbytes, that `check` has let pass.
        hidden: `[*, H]`; weight: `[V, H]`; bias: `[V]` or None. Plain tensors, or weight and bias spread over ranks.

    Returns:
        `[*, H + r]`, `[V, H + r]` and `[V]` or None, r the sum of the active adapters' ranks; placed as they came.

    Raises:
        ValueError: B is not spread as a weight is that is, or hidden states are spread beside it.
    """
    placed = weight if tensor_parallel_dimension(weight) is not None else None

    def of(name: str, parameter: Tensor) -> Tensor:
        return gathered(parameter) if placed is None else spread_rows(name, parameter, placed)

    if placed is not None:
        if is_dtensor(hidden):
            raise ValueError("hidden states: got a DTensor beside an adapter on a vocabulary-parallel head, expected "
                             "those of all tokens on every rank")  # fmt: skip
        weight = of("weight", weight)
        bias = None if bias is None else of("bias", bias)
    columns, rows = [hidden], [weight]
    for name in _active(layer):
        down, up, scaling = gathered(layer.lora_A[name].weight), layer.lora_B[name], layer.scaling[name]
        narrow = scaling * torch.nn.functional.linear(layer.lora_dropout[name](hidden.to(down.dtype)), down)
        tall = of("lora_B", up.weight)
        if name in layer.lora_variant:
            magnitude = of("lora_magnitude_vector", layer.lora_magnitude_vector[name].weight)
            scale = _dora_scale(magnitude, weight, down, tall, scaling)[:, None]
            rows[0], tall = (scale * weight).to(weight.dtype), scale * tall
        columns.append(narrow.to(hidden.dtype))
        rows.append(tall.to(weight.dtype))
        if up.bias is not None:
            bias = scaling * of("lora_B's bias", up.bias).to(weight.dtype) + (0.0 if bias is None else bias)
    wide = torch.cat(rows, dim=1)
    if placed is not None:
        wide, bias = spread_as(placed, wide), None if bias is None else spread_as(placed, bias)
    return torch.cat(columns, dim=-1), wide, bias


def _dora_scale(magnitude: Tensor, weight: Tensor, down: Tensor, up: Tensor, scaling: float) -> Tensor:
    """`m / ||W + s B A||` over rows, `[V]`."""
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        norm = torch.linalg.vector_norm(weight + scaling * (up @ down).to(weight.dtype), dim=1)
    return magnitude / norm
