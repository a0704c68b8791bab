"""The layer functions under functorch, forward-mode AD and traces; derivatives of derivatives; what they refuse."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from liger_losses.kernels import fused_add_rms_norm, gated_activation, layer_norm, packed_gated_activation, rms_norm
from liger_losses.kernels.rotary import rotary
from liger_losses.layers import (
    LigerFusedAddRMSNorm,
    LigerLayerNorm,
    LigerRMSNorm,
    LigerSwiGLUMLP,
    LigerTiledSwiGLUMLP,
    liger_rotary_pos_emb,
)

from .conftest import INTERPRETED

if INTERPRETED:
    pytest.skip("is about the twins", allow_module_level=True)


def make(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, R, W, B = (make(*shape, seed=i) for i, shape in enumerate([(4, 3, 6), (4, 3, 6), (6,), (6,)]))
Q, K = make(4, 2, 3, 8), make(4, 1, 3, 8, seed=1)
FULL, PAIR = make(2, 3, 6, seed=2), make(2, 3, 3, seed=2)
SIZES = SimpleNamespace(hidden_size=6, intermediate_size=10, hidden_act="silu")
TILED = LigerTiledSwiGLUMLP(SIZES, num_shards=2).double()


def unpacked(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else [t for t in out if t is not None]


# Functions of tensors of which the first is batched.
CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    **{f"rms_norm {mode}": (lambda x, w, mode=mode: rms_norm(x, w, offset=1.0, casting_mode=mode), (X, W)) for mode in ("llama", "gemma", "none")},
    "rms_norm without weight": (rms_norm, (X,)),
    "fused_add": (fused_add_rms_norm, (X, R, W)),
    "layer_norm": (lambda x, w, b: layer_norm(x, w, b, offset=1.0), (X, W, B)),
    **{a: (lambda g, u, a=a: gated_activation(g, u, a), (X, R)) for a in ("silu", "gelu", "gelu_tanh", "relu2")},
    "packed": (packed_gated_activation, (X,)),
    "half": (lambda q, k: rotary(q, k, *FULL), (Q, K)),
    "interleaved": (lambda q, k: rotary(q, k, *FULL, layout="interleaved"), (Q, K)),
    "half pair": (lambda q, k: rotary(q, k, *PAIR, table="pair"), (Q, K)),
    "interleaved pair": (lambda q: rotary(q, None, *PAIR, layout="interleaved", table="pair")[0], (Q,)),
    "to half": (lambda q: rotary(q[..., :6], None, *FULL, layout="interleaved_to_half")[0], (Q,)),
    "heads last": (lambda q: rotary(q.transpose(1, 2), None, *FULL, heads_dim=2)[0], (Q,)),
    "tiled": (TILED, (X,)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_transforms(name: str) -> None:
    function, tensors = CASES[name]
    leaves = [t.clone().requires_grad_() for t in tensors]
    out = unpacked(function(*leaves))
    sent = [torch.randn_like(o) for o in out]
    gradients = torch.autograd.grad(out, leaves, sent)

    def scalar(*tensors: Tensor) -> Tensor:
        return sum((o * s).sum() for o, s in zip(unpacked(function(*tensors)), sent, strict=True))

    everything = tuple(range(len(tensors)))
    for found, wanted in zip(torch.func.grad(scalar, everything)(*tensors), gradients, strict=True):
        torch.testing.assert_close(found, wanted)

    # Directional derivatives, both ways, are those of backward.
    tangents = tuple(torch.randn_like(t) for t in tensors)
    along = sum((g * t).sum() for g, t in zip(gradients, tangents, strict=True))
    torch.testing.assert_close(torch.func.jvp(scalar, tensors, tangents)[1], along)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, d) for t, d in zip(tensors, tangents, strict=True)]
        torch.testing.assert_close(forward_ad.unpack_dual(scalar(*duals)).tangent, along)

    stacked = torch.stack([tensors[0], 2 * tensors[0]])
    batched = unpacked(torch.func.vmap(lambda x: function(x, *tensors[1:]))(stacked))
    for factor in (1, 2):
        for found, wanted in zip(batched, unpacked(function(factor * tensors[0], *tensors[1:])), strict=True):
            torch.testing.assert_close(found[factor - 1], wanted)


def test_roundings_of_transforms_are_the_kernels() -> None:
    x, w = X.bfloat16(), W.bfloat16()
    for mode in ("llama", "gemma", "none"):
        for weight in (w, W.float()):
            wanted = rms_norm(x, weight, casting_mode=mode)
            found = torch.func.vmap(lambda x, weight=weight, mode=mode: rms_norm(x, weight, casting_mode=mode))(x)
            assert found.dtype == wanted.dtype
            assert torch.equal(found, wanted)
    assert torch.equal(torch.func.vmap(gated_activation)(x, R.bfloat16()), gated_activation(x, R.bfloat16()))


LEAF = X.clone().requires_grad_()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: rms_norm(x, W),
        lambda x: fused_add_rms_norm(x, R, W)[0],
        lambda x: layer_norm(x, W),
        lambda x: gated_activation(x, R),
        packed_gated_activation,
        TILED,
    ],
)
def test_second_derivatives_raise_whoever_asks(function: Callable[[Tensor], Tensor]) -> None:
    # The upstream gradient is a constant, so the graph of the first derivative holds the input alone.
    (gradient,) = torch.autograd.grad(function(LEAF).sum(), LEAF, create_graph=True)
    for unused in (False, True):
        with pytest.raises(NotImplementedError, match="second derivatives"):
            torch.autograd.grad(gradient.sum(), LEAF, allow_unused=unused, retain_graph=True)


def test_second_derivatives_raise_under_checkpointing() -> None:
    y = torch.utils.checkpoint.checkpoint(lambda x: rms_norm(x * 2, W), LEAF, use_reentrant=False)
    (gradient,) = torch.autograd.grad(y.sum(), LEAF, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(gradient.sum(), LEAF, allow_unused=True)


@pytest.mark.parametrize(
    ("function", "tensor"),
    [
        (lambda x: gated_activation(x * 2, x * 2), X),
        (lambda x: (lambda h: gated_activation(h, h))(x * 2), X),
        (lambda x: (lambda h: fused_add_rms_norm(h, h, W)[0])(x * 2), X),
        (lambda x: (lambda h: rms_norm(h, h))(x[0, 0] * 2), X),
        (lambda x: (lambda h: layer_norm(x, h, h))(x[0, 0] * 2), X),
        (lambda q: (lambda h: sum(rotary(h, h, FULL[0], FULL[0])))(q * 2), Q),
    ],
)
def test_a_tensor_given_twice_traces(function: Callable[[Tensor], Tensor], tensor: Tensor) -> None:
    torch._dynamo.reset()
    results = []
    for call in (torch.compile(function, fullgraph=True, backend="aot_eager"), function):
        x = tensor.clone().requires_grad_()
        y = call(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), x)))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("trained", [True, False])
def test_tiled_mlps_are_one_graph(trained: bool) -> None:
    torch._dynamo.reset()
    mlp = copy.deepcopy(TILED).requires_grad_(trained)
    x = LEAF.detach().clone().requires_grad_()
    leaves = [x, *mlp.parameters()] if trained else [x]
    results = []
    for call in (torch.compile(mlp, fullgraph=True, backend="aot_eager"), mlp):
        y = call(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), leaves)))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("value", [1e30, float("inf"), float("nan")])
def test_a_variance_that_overflows_shows(value: float) -> None:
    x = torch.ones(2, 8)
    x[0, ::2] = -value
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, wanted = layer_norm(a), F.layer_norm(b, (8,))
    torch.testing.assert_close(found, wanted, equal_nan=True)
    found.sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(a.grad, b.grad, equal_nan=True)


V = torch.zeros(2, 8)
HEADS, TABLE, ROWS = torch.zeros(2, 3, 5, 8), torch.zeros(1, 5, 8), torch.zeros(9, 8)
AT = torch.zeros(2, 5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rms_norm(V, eps=-1), ValueError, "eps: got -1, expected a finite number of at least 0"),
        (lambda: rms_norm(V, eps=float("nan")), ValueError, "eps: got nan, expected a finite number of at least 0"),
        (lambda: rms_norm(V, eps="1"), TypeError, "eps: got '1', expected a number"),
        (lambda: layer_norm(V, eps=None), TypeError, "eps: got None, expected a number"),
        (lambda: rms_norm(V, V[0], offset=float("nan")), ValueError, "offset: got nan, expected a finite number"),
        (lambda: layer_norm(V, V[0], offset="a"), TypeError, "offset: got 'a', expected a number"),
        (lambda: rms_norm(V, V[0].to("meta")), ValueError, "weight: got a tensor on meta, expected the device of x, cpu"),
        (lambda: rms_norm(V.to(torch.float8_e4m3fn)), TypeError, "x: got dtype torch.float8_e4m3fn, expected a floating-point tensor of 16 bits or more"),
        (lambda: layer_norm(V.to_sparse()), TypeError, "x: got a tensor of layout torch.sparse_coo, expected a dense one"),
        (lambda: fused_add_rms_norm(V, None), TypeError, "residual: got NoneType, expected a tensor"),
        (lambda: gated_activation(V, None), TypeError, "up: got NoneType, expected a tensor"),
        (lambda: gated_activation(V, V.to("meta")), ValueError, "up: got a tensor on meta, expected the device of gate, cpu"),
        (lambda: rotary(None, HEADS, TABLE, TABLE), TypeError, "q: got NoneType, expected a tensor"),
        (lambda: rotary(HEADS, HEADS[:1], TABLE, TABLE), ValueError, "k: got shape (1, 3, 5, 8) and torch.float32, expected the batch size, length and dtype of q, 2, 5 and torch.float32"),
        (lambda: liger_rotary_pos_emb(HEADS, HEADS[:, :, :4], TABLE, TABLE), ValueError, "k: got shape (2, 3, 4, 8) and torch.float32, expected the batch size, length and dtype of q, 2, 5 and torch.float32"),
        (lambda: liger_rotary_pos_emb(HEADS, None, TABLE, TABLE), TypeError, "k: got NoneType, expected a tensor"),
        (lambda: liger_rotary_pos_emb(HEADS, HEADS, TABLE, TABLE, unsqueeze_dim=0), ValueError, "unsqueeze_dim: got 0, expected 1 for [B, heads, T, D] or 2 for [B, T, heads, D]"),
        (lambda: liger_rotary_pos_emb(HEADS, HEADS, ROWS, ROWS, AT.float()), TypeError, "position_ids: got torch.float32, expected a tensor of int32 or int64"),
        (lambda: liger_rotary_pos_emb(HEADS, HEADS, ROWS, ROWS, AT.bool()), TypeError, "position_ids: got torch.bool, expected a tensor of int32 or int64"),
        (lambda: liger_rotary_pos_emb(HEADS, HEADS, ROWS, ROWS, AT + 9), ValueError, "position_ids: got positions outside of the table, expected 0 to 8"),
        (lambda: liger_rotary_pos_emb(HEADS, HEADS, ROWS, ROWS, AT - 1), ValueError, "position_ids: got positions outside of the table, expected 0 to 8"),
        (lambda: LigerRMSNorm(0), ValueError, "hidden_size: got 0, expected >= 1"),
        (lambda: LigerRMSNorm("8"), TypeError, "hidden_size: got '8', expected an int"),
        (lambda: LigerRMSNorm(8, eps=-1), ValueError, "eps: got -1, expected a finite number of at least 0"),
        (lambda: LigerFusedAddRMSNorm(8, offset="a"), TypeError, "offset: got 'a', expected a number"),
        (lambda: LigerLayerNorm(8, eps=None), TypeError, "eps: got None, expected a number"),
        (lambda: LigerSwiGLUMLP(None), TypeError, "config: got NoneType without hidden_size"),
        (lambda: LigerSwiGLUMLP(SIZES, 1.5), TypeError, "intermediate_size: got 1.5, expected an int"),
        (lambda: LigerTiledSwiGLUMLP(SIZES, num_shards=1.5), TypeError, "num_shards: got 1.5, expected an int"),
    ],
)  # fmt: skip
def test_bad_arguments(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message
