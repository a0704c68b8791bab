"""Layers under liger-kernel's names: norms, gated MLPs, rotary embedding.

Parameter names are those of transformers' modules, whose state dicts load. Two habits of liger-kernel's are not kept:
nothing is computed in place (the gradient that arrives and the saved activations are other people's), and weight
gradients of tiled MLPs go through autograd, so that hooks and `torch.autograd.grad` see them, once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._checks import check_size
from ._tiling import tiled_over_tokens
from .kernels import (
    CASTING_MODES,
    fused_add_rms_norm,
    gated_activation,
    layer_norm,
    packed_gated_activation,
    rms_norm,
    rotary,
)
from .kernels.registration import check_numbers

__all__ = [
    "LigerFusedAddRMSNorm",
    "LigerGEGLUMLP",
    "LigerLayerNorm",
    "LigerPhi3SwiGLUMLP",
    "LigerRMSNorm",
    "LigerSwiGLUMLP",
    "LigerTiledGEGLUMLP",
    "LigerTiledSwiGLUMLP",
    "liger_rotary_pos_emb",
    "tiled_over_tokens",
]

_INITS: dict[str, Callable[[int], Tensor]] = {"ones": torch.ones, "zeros": torch.zeros}
# Names of activations in configs -> names of the kernels.
_SILU = {"silu": "silu", "swish": "silu"}
_GELU = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


def _initial(init_fn: str, size: int) -> nn.Parameter:
    check_size("hidden_size", size)
    if init_fn not in _INITS:
        raise ValueError(f"init_fn: got {init_fn!r}, expected 'ones' or 'zeros'")
    return nn.Parameter(_INITS[init_fn](size))


class LigerRMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * (offset + weight)` (arXiv:1910.07467); see `liger_losses.kernels.rms_norm`.

    Args:
        hidden_size: Width of the last dimension.
        eps: Added to the mean square.
        offset: Added to the weight: 1 for Gemma.
        casting_mode: Where 16-bit rounding happens: `"llama"`, `"gemma"` or `"none"`. With `"llama"` a weight of a
            wider dtype widens the result, as in transformers (liger-kernel returns the dtype of the input).
        init_fn: `"ones"` or `"zeros"`.
        in_place: Accepted; without effect, since the incoming gradient is never overwritten.
        row_mode: Accepted; without effect, since the tile's shape is chosen by the width.
        elementwise_affine: False for no weight (`offset` must be 0 then).
    """

    weight: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        row_mode: bool | None = None,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__()
        weight = _initial(init_fn, hidden_size)
        if casting_mode not in CASTING_MODES:
            raise ValueError(f"casting_mode: got {casting_mode!r}, expected one of {CASTING_MODES}")
        check_numbers(eps, offset)
        if offset and not elementwise_affine:
            raise ValueError(f"offset: got {offset} with elementwise_affine=False, expected 0: there is no weight")
        self.hidden_size, self.elementwise_affine = hidden_size, elementwise_affine
        self.variance_epsilon, self.offset, self.casting_mode = eps, offset, casting_mode
        self.in_place, self.row_mode = in_place, row_mode
        self.register_parameter("weight", weight if elementwise_affine else None)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(
            hidden_states, self.weight, eps=self.variance_epsilon, offset=self.offset, casting_mode=self.casting_mode
        )

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.variance_epsilon}, offset={self.offset}, casting={self.casting_mode}"


class LigerFusedAddRMSNorm(nn.Module):
    """`s = hidden_states + residual`; `forward` returns `(norm(s), s)`. Arguments as in `LigerRMSNorm`."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = False,
    ) -> None:
        super().__init__()
        if casting_mode not in CASTING_MODES:
            raise ValueError(f"casting_mode: got {casting_mode!r}, expected one of {CASTING_MODES}")
        check_numbers(eps, offset)
        self.weight = _initial(init_fn, hidden_size)
        self.variance_epsilon, self.offset, self.casting_mode, self.in_place = eps, offset, casting_mode, in_place

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return fused_add_rms_norm(
            hidden_states,
            residual,
            self.weight,
            eps=self.variance_epsilon,
            offset=self.offset,
            casting_mode=self.casting_mode,
        )

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.variance_epsilon}, offset={self.offset}"


class LigerLayerNorm(nn.Module):
    """`(x - mean) / sqrt(var + eps) * weight + bias` (arXiv:1607.06450); see `liger_losses.kernels.layer_norm`.

    Args:
        hidden_size: Width of the last dimension.
        eps: Added to the variance.
        bias: There is a bias either way. As in liger-kernel, False starts it at zero and True at random normal
            numbers: initialise it yourself unless a state dict is loaded.
        init_fn: `"ones"` or `"zeros"`, for the weight.
        impl, mode, backend: liger-kernel's choice of an implementation. There is one here; only None is accepted.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        bias: bool = False,
        init_fn: str = "ones",
        impl: None = None,
        mode: None = None,
        backend: None = None,
    ) -> None:
        super().__init__()
        for name, value in (("impl", impl), ("mode", mode), ("backend", backend)):
            if value is not None:
                raise ValueError(f"{name}: got {value!r}, expected None: use liger_losses.kernels.implementation")
        check_numbers(eps)
        self.hidden_size, self.eps, self.variance_epsilon = hidden_size, eps, eps
        self.weight = _initial(init_fn, hidden_size)
        self.bias = nn.Parameter(torch.randn(hidden_size) if bias else torch.zeros(hidden_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return layer_norm(hidden_states, self.weight, self.bias, eps=self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}"


def _activation(config: Any, known: dict[str, str], default: str | None) -> str:
    for needed in ("hidden_size", "intermediate_size"):
        if not hasattr(config, needed):
            raise TypeError(f"config: got {type(config).__name__} without {needed}")
        check_size(f"config.{needed}", getattr(config, needed))
    name = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None) or default
    if name not in known:
        raise ValueError(f"config.hidden_act: got {name!r}, expected one of {sorted(known)}")
    return known[name]


class _GatedMLP(nn.Module):
    """`down(act(gate(x)) * up(x))`."""

    def __init__(self, config: Any, intermediate_size: int | None, activation: str) -> None:
        super().__init__()
        if intermediate_size is not None:
            check_size("intermediate_size", intermediate_size)
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size if intermediate_size is None else intermediate_size
        self.activation = activation
        bias = bool(getattr(config, "mlp_bias", False))
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gated_activation(self.gate_proj(x), self.up_proj(x), self.activation))


class LigerSwiGLUMLP(_GatedMLP):
    """`down(silu(gate(x)) * up(x))` (arXiv:2002.05202).

    Args:
        config: Has hidden_size, intermediate_size, hidden_act (`silu` or `swish`), and mlp_bias or not.
        intermediate_size: Instead of the config's.
    """

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        super().__init__(config, intermediate_size, _activation(config, _SILU, None))


class LigerGEGLUMLP(_GatedMLP):
    """`down(gelu(gate(x)) * up(x))` (arXiv:2002.05202).

    Args:
        config: Has hidden_size and intermediate_size. Its `hidden_activation` or `hidden_act` chooses between the exact
            GELU (`gelu`) and the one by tanh (`gelu_pytorch_tanh`, `gelu_new`, and where the config names none);
            liger-kernel takes tanh whatever the config says.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config, None, _activation(config, _GELU, "gelu_pytorch_tanh"))


class LigerPhi3SwiGLUMLP(nn.Module):
    """`down(silu(gate) * up)` with `[gate, up] = gate_up(x)`, one projection for both.

    Args:
        config: Has hidden_size, intermediate_size and hidden_act (`silu` or `swish`).
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.activation = _activation(config, _SILU, None)
        self.gate_up_proj = nn.Linear(self.hidden_size, 2 * self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(packed_gated_activation(self.gate_up_proj(x), self.activation))


class _TiledMLP(_GatedMLP):
    def __init__(self, config: Any, num_shards: int | None, activation: str) -> None:
        if num_shards is not None:
            check_size("num_shards", num_shards)
        super().__init__(config, None, activation)
        self.num_shards = num_shards

    def forward(self, x: Tensor) -> Tensor:
        shards = self.num_shards or max(1, -(-x.shape[-2] // self.hidden_size) if x.dim() > 1 else 1)
        return tiled_over_tokens(super().forward, x, shards, self)


class LigerTiledSwiGLUMLP(_TiledMLP):
    """`LigerSwiGLUMLP` on some tokens at a time; backward runs forward again, so that no activation is kept.

    Args:
        config: As in `LigerSwiGLUMLP`.
        num_shards: Pieces that the tokens are cut into; None: sequence length over hidden size, rounded up, so that a
            piece's activations are about as large as a weight.
    """

    def __init__(self, config: Any, num_shards: int | None = None) -> None:
        super().__init__(config, num_shards, _activation(config, _SILU, None))


class LigerTiledGEGLUMLP(_TiledMLP):
    """`LigerGEGLUMLP` on some tokens at a time; arguments as in `LigerTiledSwiGLUMLP`."""

    def __init__(self, config: Any, num_shards: int | None = None) -> None:
        super().__init__(config, num_shards, _activation(config, _GELU, "gelu_pytorch_tanh"))


def liger_rotary_pos_emb(
    q: Tensor,  # [B, heads, T, D]
    k: Tensor,  # [B, kv_heads, T, D]
    cos: Tensor,  # [B or 1, T, R], or [positions, R] with position_ids
    sin: Tensor,
    position_ids: Tensor | None = None,  # [B, T]
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`q cos + rotate_half(q) sin`, and the same of `k`: new tensors, in the dtypes of `q` and `k` (arXiv:2104.09864).

    Args:
        q, k: Queries and keys, with the heads at dimension `unsqueeze_dim`. Never written to.
        cos, sin: By position of each row, or a table of all positions where `position_ids` are given. They may be
            narrower than a head: the rest of it is passed on.
        position_ids: `[B, T]`, whole numbers: positions to take from a table `[positions, R]`.
        unsqueeze_dim: 1 for `[B, heads, T, D]`, 2 for `[B, T, heads, D]`.
        rotary_dim: Entries of a head to rotate, where cos and sin hold one entry per pair (`rotary_dim / 2`).

    Raises:
        ValueError: Shapes do not fit, or `position_ids` come with tables that are by position already, or leave the
            table (on a CPU; elsewhere the device asserts).
        TypeError: An input is no floating-point tensor, or `position_ids` no tensor of int32 or int64.
    """
    if unsqueeze_dim not in (1, 2):
        raise ValueError(
            f"unsqueeze_dim: got {unsqueeze_dim!r}, expected 1 for [B, heads, T, D] or 2 for [B, T, heads, D]"
        )
    for name, tensor in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, expected a tensor")
    if position_ids is not None:
        if not isinstance(position_ids, Tensor) or position_ids.dtype not in (torch.int32, torch.int64):
            seen = position_ids.dtype if isinstance(position_ids, Tensor) else type(position_ids).__name__
            raise TypeError(f"position_ids: got {seen}, expected a tensor of int32 or int64")
        if cos.dim() != 2 or sin.dim() != 2:
            raise ValueError(
                f"position_ids: got them with cos of shape {tuple(cos.shape)}; expected a table [positions, R] to take "
                "rows from. cos and sin that are by position already need no position_ids."
            )
        try:
            # Not indexing, which takes negative positions from the table's end.
            cos, sin = F.embedding(position_ids, cos), F.embedding(position_ids, sin)
        except IndexError:
            raise ValueError(
                f"position_ids: got positions outside of the table, expected 0 to {min(len(cos), len(sin)) - 1}"
            ) from None
    table = "full"
    if rotary_dim is not None:
        if cos.shape[-1] not in (rotary_dim, rotary_dim / 2):
            raise ValueError(f"rotary_dim: got {rotary_dim} with cos of width {cos.shape[-1]}, expected that or half")
        table = "full" if cos.shape[-1] == rotary_dim else "pair"
    rotated_q, rotated_k = rotary(q, k, cos, sin, table=table, heads_dim=unsqueeze_dim)
    assert rotated_k is not None
    return rotated_q, rotated_k
