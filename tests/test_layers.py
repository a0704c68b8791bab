"""The layers under liger-kernel's names: state dicts and results of transformers' modules, tiling, options."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from liger_losses import layers
from liger_losses.layers import (
    LigerFusedAddRMSNorm,
    LigerGEGLUMLP,
    LigerLayerNorm,
    LigerPhi3SwiGLUMLP,
    LigerRMSNorm,
    LigerSwiGLUMLP,
    LigerTiledGEGLUMLP,
    LigerTiledSwiGLUMLP,
    liger_rotary_pos_emb,
)

CONFIG: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}


def made(name: str, config: str, *arguments: Any, **options: Any) -> tuple[Any, nn.Module]:
    """A config and the module of that name, with random parameters."""
    transformers = pytest.importorskip("transformers")
    family = config.removesuffix("Config").lower()
    modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    settings = getattr(transformers, config)(**CONFIG, **options)
    torch.manual_seed(0)
    module = getattr(modeling, name)(*(arguments or (settings,)))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    return settings, module


def check_same(ours: nn.Module, theirs: nn.Module, *, dtype: torch.dtype = torch.float64) -> None:
    ours.load_state_dict(theirs.state_dict())
    ours, theirs = ours.to(dtype), theirs.to(dtype)
    torch.manual_seed(1)
    x = torch.randn(2, 7, 16, dtype=dtype, requires_grad=True)
    results = []
    for module in (ours, theirs):
        y = module(x)
        torch.manual_seed(2)
        results.append([y, *torch.autograd.grad(y, [x, *module.parameters()], torch.randn_like(y))])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("ours", "theirs", "config", "options"),
    [
        (LigerSwiGLUMLP, "LlamaMLP", "LlamaConfig", {}),
        (LigerSwiGLUMLP, "LlamaMLP", "LlamaConfig", {"mlp_bias": True}),
        (LigerTiledSwiGLUMLP, "LlamaMLP", "LlamaConfig", {}),
        (LigerGEGLUMLP, "GemmaMLP", "GemmaConfig", {}),
        (LigerGEGLUMLP, "LlamaMLP", "LlamaConfig", {"hidden_act": "gelu"}),
        (LigerTiledGEGLUMLP, "GemmaMLP", "GemmaConfig", {}),
        (LigerPhi3SwiGLUMLP, "Phi3MLP", "Phi3Config", {}),
    ],
)
def test_mlps_of_transformers(ours: type[nn.Module], theirs: str, config: str, options: dict[str, Any]) -> None:
    settings, module = made(theirs, config, **options)
    check_same(ours(settings), module)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "config", "options"),
    [
        ("LlamaRMSNorm", "LlamaConfig", {}),
        ("GemmaRMSNorm", "GemmaConfig", {"offset": 1.0, "casting_mode": "gemma", "init_fn": "zeros"}),
        ("Olmo2RMSNorm", "Olmo2Config", {"casting_mode": "gemma"}),
    ],
)
def test_norms_of_transformers(name: str, config: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    _, module = made(name, config, 16)
    ours = LigerRMSNorm(16, **options)
    ours.load_state_dict(module.state_dict())
    ours, module = ours.to(dtype), module.to(dtype)
    x = torch.randn(5, 16, dtype=dtype)
    assert torch.equal(ours(x), module(x))


def test_initial_weights_and_representations() -> None:
    assert torch.equal(LigerRMSNorm(3).weight, torch.ones(3))
    assert torch.equal(LigerFusedAddRMSNorm(3, init_fn="zeros").weight, torch.zeros(3))
    assert LigerRMSNorm(3, elementwise_affine=False).weight is None
    assert torch.equal(LigerLayerNorm(3).bias, torch.zeros(3))
    assert LigerLayerNorm(300, bias=True).bias.std() > 0.5  # liger-kernel's surprise, kept
    assert "eps=1e-06" in repr(LigerRMSNorm(3)) + repr(LigerFusedAddRMSNorm(3)) + repr(LigerLayerNorm(3))


def test_layer_norm_is_torchs() -> None:
    theirs = nn.LayerNorm(16, eps=1e-6)
    nn.init.normal_(theirs.weight)
    nn.init.normal_(theirs.bias)
    check_same(LigerLayerNorm(16), theirs)


def test_norm_without_weight() -> None:
    x = torch.randn(4, 6)
    torch.testing.assert_close(LigerRMSNorm(6, elementwise_affine=False)(x), nn.functional.rms_norm(x, (6,), eps=1e-6))


def test_fused_add_returns_the_sum_second() -> None:
    x, residual = torch.randn(2, 4, 6)
    layer = LigerFusedAddRMSNorm(6)
    normed, total = layer(x, residual)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, nn.functional.rms_norm(total, (6,), layer.weight, 1e-6))


def tiled(shards: int | None, dtype: torch.dtype) -> LigerTiledSwiGLUMLP:
    torch.manual_seed(0)
    return LigerTiledSwiGLUMLP(SimpleNamespace(**CONFIG, hidden_act="silu"), shards).to(dtype)


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    y = module(x)
    torch.manual_seed(3)
    return [y, *torch.autograd.grad(y, [x, *module.parameters()], torch.randn_like(y))]


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 100, None])
def test_tiling_changes_nothing(shards: int | None) -> None:
    x = torch.randn(3, 7, 16, dtype=torch.float64, requires_grad=True)
    for found, wanted in zip(gradients(tiled(shards, x.dtype), x), gradients(tiled(1, x.dtype), x), strict=True):
        torch.testing.assert_close(found, wanted)


def test_tiled_gradients_are_autograds() -> None:
    """Frozen parameters get none, hooks see the whole gradient once, and a forward without gradient keeps nothing."""
    layer, x = tiled(4, torch.float64), torch.randn(5, 16, dtype=torch.float64)
    layer.up_proj.weight.requires_grad_(False)
    calls: list[Tensor] = []
    layer.gate_proj.weight.register_hook(calls.append)
    layer(x).sum().backward()
    assert layer.up_proj.weight.grad is None
    (seen,) = calls
    assert torch.equal(layer.gate_proj.weight.grad, seen)
    with torch.no_grad():
        assert not layer(x).requires_grad
    assert torch.autograd.gradcheck(layer, (x[:3].clone().requires_grad_(),))


def test_tiled_weight_gradient_is_summed_in_fp32() -> None:
    """Rounding the running sum to bf16 after each of many tiles would lose most of what is added late."""
    x = torch.randn(512, 16).bfloat16().requires_grad_()
    exact = gradients(tiled(1, torch.float64), x.detach().double().requires_grad_())
    few, many = (gradients(tiled(n, torch.bfloat16), x) for n in (1, 256))
    for e, f, m in list(zip(exact, few, many, strict=True))[2:]:
        assert (m.double() - e).abs().max() <= 2 * (f.double() - e).abs().max() + 2**-8 * e.abs().max()


def test_tiled_under_autocast() -> None:
    x = torch.randn(6, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        few, many = (gradients(tiled(n, torch.float32), x) for n in (1, 3))
    assert many[0].dtype == torch.bfloat16
    for f, m in zip(few, many, strict=True):
        torch.testing.assert_close(f, m, rtol=0.03, atol=0.03)


def test_rotary() -> None:
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    q, k = torch.randn(2, 3, 5, 16), torch.randn(2, 1, 5, 16)
    table = torch.randn(2, 40, 16)
    positions = torch.randint(0, 40, (2, 5))
    cos, sin = table[0][positions], table[1][positions]
    wanted = modeling.apply_rotary_pos_emb(q, k, cos, sin)
    swapped = [t.transpose(1, 2) for t in liger_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin, None, 2)]
    for found in (
        liger_rotary_pos_emb(q, k, cos, sin),
        liger_rotary_pos_emb(q, k, table[0], table[1], positions),
        liger_rotary_pos_emb(q, k, cos, sin, rotary_dim=16),
        swapped,
    ):
        for f, w in zip(found, wanted, strict=True):
            torch.testing.assert_close(f, w)
    halves = [torch.cat([t[..., :8]] * 2, -1) for t in (cos, sin)]
    narrow = liger_rotary_pos_emb(q, k, cos[..., :8], sin[..., :8], rotary_dim=16)
    for f, w in zip(narrow, modeling.apply_rotary_pos_emb(q, k, *halves), strict=True):
        torch.testing.assert_close(f, w)


CONFIGURED = SimpleNamespace(**CONFIG, hidden_act="relu")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LigerRMSNorm(3, init_fn="x"), "init_fn: got 'x', expected 'ones' or 'zeros'"),
        (lambda: LigerRMSNorm(3, casting_mode="x"), "casting_mode: got 'x', expected one of"),
        (lambda: LigerRMSNorm(3, offset=1.0, elementwise_affine=False), "offset: got 1.0 with elementwise_affine=False"),
        (lambda: LigerLayerNorm(3, impl="cute"), "impl: got 'cute', expected None"),
        (lambda: LigerSwiGLUMLP(CONFIGURED), "config.hidden_act: got 'relu', expected one of ['silu', 'swish']"),
        (lambda: LigerGEGLUMLP(CONFIGURED), "config.hidden_act: got 'relu', expected one of ['gelu', 'gelu_new'"),
        (lambda: LigerTiledSwiGLUMLP(SimpleNamespace(**CONFIG, hidden_act="silu"), 0), "num_shards: got 0, expected >= 1"),
        (lambda: liger_rotary_pos_emb(*torch.zeros(4, 1, 1, 1, 4), torch.zeros(1, 1, dtype=torch.int64)), "position_ids: got them with cos of shape (1, 1, 1, 4)"),
        (lambda: liger_rotary_pos_emb(*torch.zeros(2, 1, 1, 1, 4), *torch.zeros(2, 1, 1, 4), rotary_dim=3), "rotary_dim: got 3 with cos of width 4"),
    ],
)  # fmt: skip
def test_bad_arguments(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        call()
    assert message in str(caught.value)


def test_the_example_of_the_documentation_runs() -> None:
    page = Path(__file__).parent.parent / "docs" / "layers.md"
    (block,) = (b for b in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S) if "(model)" not in b)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(block, str(page), "exec", dont_inherit=True), names)
    assert names["x"].grad.shape == (2, 5, 32)
    assert names["total"].shape == names["y"].shape == (2, 5, 32)


def test_public_names() -> None:
    assert {name for name in vars(layers) if name.startswith(("Liger", "liger"))} <= set(layers.__all__)
    assert all(hasattr(layers, name) for name in layers.__all__)
