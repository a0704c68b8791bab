"""The layers' operators: derivatives in fp64, schemas and fakes, torch.compile, one compilation for all lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_losses.kernels import (
    ACTIVATIONS,
    CASTING_MODES,
    fused_add_rms_norm,
    gated_activation,
    layer_norm,
    packed_gated_activation,
    rms_norm,
    rotary,
)
from liger_losses.kernels.gated_activation import gated_activation_backward, gated_activation_forward
from liger_losses.kernels.layer_norm import layer_norm_backward, layer_norm_forward
from liger_losses.kernels.rms_norm import rms_norm_backward, rms_norm_forward
from liger_losses.kernels.rotary import LAYOUTS, rotate

from .conftest import INTERPRETED

if INTERPRETED:
    pytest.skip("is about the twins", allow_module_level=True)


def make(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).requires_grad_()


X, R, W, B = (make(*shape, seed=i) for i, shape in enumerate([(3, 2, 6), (3, 2, 6), (6,), (6,)]))
Q, K = make(2, 2, 3, 4), make(2, 1, 3, 4, seed=1)
TABLES = [make(2, 3, 4, seed=i).detach() for i in (2, 3)]


@pytest.mark.parametrize("mode", CASTING_MODES)
def test_gradcheck_of_rms_norm(mode: str) -> None:
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, offset=1.0, casting_mode=mode), (X, W))
    assert torch.autograd.gradcheck(lambda *t: fused_add_rms_norm(*t, casting_mode=mode), (X, R, W))


def test_gradcheck_without_parameters() -> None:
    assert torch.autograd.gradcheck(rms_norm, (X,))
    assert torch.autograd.gradcheck(layer_norm, (X,))
    assert torch.autograd.gradcheck(layer_norm, (X, W, B))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck_of_gated_activations(activation: str) -> None:
    assert torch.autograd.gradcheck(lambda g, u: gated_activation(g, u, activation), (X, R))
    assert torch.autograd.gradcheck(lambda b: packed_gated_activation(b, activation), (X,))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradcheck_of_rotary(layout: str) -> None:
    assert torch.autograd.gradcheck(lambda q, k: rotary(q, k, *TABLES, layout=layout), (Q, K))


def test_no_second_derivative_is_made_up() -> None:
    for y in (rms_norm(X, W), layer_norm(X, W), gated_activation(X, R), rotary(Q, None, *TABLES)[0]):
        (gradient,) = torch.autograd.grad(y.square().sum(), Q if y.dim() == 4 else X, create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivatives"):
            gradient.sum().backward()


D = [t.detach() for t in (X, R, W, B)]
RSTD = D[0].reshape(6, 6).mean(-1).abs() + 1


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        (rms_norm_forward, (D[0], D[2], D[1], 1e-6, 0.0, "llama")),
        (rms_norm_forward, (D[0].float().transpose(0, 1), None, None, 1e-6, 0.0, "gemma")),
        (rms_norm_forward, (D[0].bfloat16(), D[2].float(), None, 1e-6, 0.0, "llama")),
        (rms_norm_backward, (D[0], D[1], D[0], D[2], RSTD, 0.0, "llama", True)),
        (rms_norm_backward, (D[0], None, D[0], None, RSTD, 0.0, "gemma", False)),
        (layer_norm_forward, (D[0], D[2], D[3], 1e-6, 0.0)),
        (layer_norm_backward, (D[0], D[1], D[2], D[3], RSTD, RSTD, 0.0, True, False)),
        (gated_activation_forward, (D[0], D[1], "silu")),
        (gated_activation_forward, (D[0], None, "gelu")),
        (gated_activation_backward, (D[0], D[1], D[0], "silu")),
        (gated_activation_backward, (D[0][..., :3], D[1], None, "silu")),
        (rotate, (Q.detach().transpose(1, 2).contiguous().transpose(1, 2), K.detach(), *TABLES, "half", False, 1, False)),
        (rotate, (Q.detach(), None, *TABLES, "interleaved", False, 1, True)),
    ],
)  # fmt: skip
def test_opcheck(operator: Any, arguments: tuple[Any, ...]) -> None:
    torch.library.opcheck(
        operator.op, arguments, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    )


def step(function: Callable[..., Any], *tensors: Tensor) -> list[Tensor]:
    outs = function(*tensors)
    outs = [outs] if isinstance(outs, Tensor) else list(outs)
    return [*outs, *torch.autograd.grad(sum(o.square().sum() for o in outs), tensors)]


@pytest.mark.parametrize(
    ("function", "tensors"),
    [
        (lambda x, w: rms_norm(x * 2, w, offset=1.0), (X, W)),
        (lambda x, r, w: fused_add_rms_norm(x * 2, r, w), (X, R, W)),
        (lambda x, w, b: layer_norm(x * 2, w, b), (X, W, B)),
        (lambda g, u: gated_activation(g * 2, u), (X, R)),
        (lambda b: packed_gated_activation(b * 2, "gelu_tanh"), (X,)),
        (lambda q, k: rotary(q * 2, k, *TABLES), (Q, K)),
        (lambda q: rotary(q * 2, None, *TABLES)[0], (Q,)),
    ],
    ids=["rms_norm", "fused_add", "layer_norm", "gated", "packed", "rotary", "rotary of one"],
)
def test_compile_is_one_graph(function: Callable[..., Any], tensors: tuple[Tensor, ...]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for found, wanted in zip(step(compiled, *tensors), step(function, *tensors), strict=True):
        torch.testing.assert_close(found, wanted)
