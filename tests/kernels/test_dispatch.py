"""Which form of a kernel runs, and the transform that both share."""

from __future__ import annotations

import contextlib
import importlib
import threading
from typing import Any

import pytest
import torch

from liger_losses import fused_linear_loss, kernels, linear_logprobs
from liger_losses.kernels import LogitTransform, dispatch, implementation
from liger_losses.kernels.dispatch import use_triton
from liger_losses.losses import CrossEntropyLoss

from ..oracle import TRANSFORMS, transformed
from .test_tile_statistics import as_transform


def test_the_twin_runs_on_cpu_unless_triton_is_asked_for() -> None:
    tile = torch.zeros(1, 1)
    assert not use_triton(tile)
    with implementation("triton"):
        assert use_triton(tile)
        with pytest.raises(RuntimeError, match="requested for float64"):
            use_triton(tile.double())
        with implementation("torch"):
            assert not use_triton(tile)
        assert use_triton(tile)
    assert not use_triton(tile)


def test_an_unknown_form() -> None:
    with pytest.raises(ValueError, match="implementation: got 'cuda', expected 'torch' or 'triton'"):
        implementation("cuda").__enter__()


def test_a_request_never_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_triton_installed", lambda: False)
    with pytest.raises(RuntimeError, match="triton is not installed"):
        implementation("triton").__enter__()


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "gated_activation", "rotary"])
def test_a_request_reaches_backward_in_another_thread(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose backward autograd runs in a thread of its own, where the block is not known of."""
    x = torch.ones(2, 3, 4, 8, requires_grad=True)
    y: Any = {
        "rms_norm": lambda: kernels.rms_norm(x),
        "layer_norm": lambda: kernels.layer_norm(x),
        "gated_activation": lambda: kernels.gated_activation(x, x),
        "rotary": lambda: kernels.rotary(x, None, x[0].detach()[:1, :, :], x[0].detach()[:1, :, :])[0],
    }[name]
    seen: list[str | None] = []
    module = importlib.import_module(f"liger_losses.kernels.{name}")
    monkeypatch.setattr(module, "use_triton", lambda _: seen.append(dispatch.requested()))
    for request in (implementation("torch"), contextlib.nullcontext()):
        with request:
            out = y()
        thread = threading.Thread(target=out.sum().backward)
        thread.start()
        thread.join()
    assert seen == ["torch", "torch", None, None]


@pytest.mark.parametrize("strategy", ["cached", "recompute", "frozen", "immediate", "active"])
def test_a_request_reaches_the_walks_backward_in_another_thread(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(200, 8, requires_grad=strategy != "frozen")
    target = torch.arange(6)
    seen: list[str | None] = []
    for name in ("tile_statistics", "tile_gradient", "scaled_cast"):
        module = importlib.import_module(f"liger_losses.kernels.{name}")
        monkeypatch.setattr(module, "use_triton", lambda _: bool(seen.append(dispatch.requested())))
    for request, expected in ((implementation("torch"), "torch"), (contextlib.nullcontext(), None)):
        with request:
            if strategy == "immediate":
                value = fused_linear_loss(CrossEntropyLoss(), hidden[None], weight, target[None], strategy=strategy)[0]
            else:
                more = {"strategy": "cached", "active_vocab": 0.0} if strategy == "active" else {"strategy": strategy}
                value = linear_logprobs(hidden, weight, target, **more).sum()
        seen.clear()
        thread = threading.Thread(target=value.backward)
        thread.start()
        thread.join()
        assert seen
        assert set(seen) == {expected}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("bias", [False, True])
def test_transform(name: str, bias: bool) -> None:
    """B20: `softcap * tanh(scale * (r + b) / softcap) / temperature`, and its slope."""
    raw = torch.linspace(-30, 30, 61, dtype=torch.float64, requires_grad=True)
    shift = torch.linspace(1, -1, 61, dtype=torch.float64) if bias else None
    z, slope = as_transform(TRANSFORMS[name]).apply(raw, shift)
    want = transformed(raw if shift is None else raw + shift, **TRANSFORMS[name])
    torch.testing.assert_close(z, want)
    wanted = torch.autograd.grad(want.sum(), raw)[0]
    for found in (slope, as_transform(TRANSFORMS[name]).slope_at(z.detach())):
        torch.testing.assert_close(torch.as_tensor(found).expand(61).double().detach(), wanted, rtol=1e-7, atol=1e-12)


def test_transforms_compare_by_value() -> None:
    assert LogitTransform(1.3, 5.0) == LogitTransform(1.3, 5.0)
    assert len({LogitTransform(), LogitTransform(1.0), LogitTransform(2.0)}) == 2
