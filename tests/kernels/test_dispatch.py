"""Which form of a kernel runs, and the transform that both share."""

from __future__ import annotations

import pytest
import torch

from liger_losses.kernels import LogitTransform, dispatch, implementation
from liger_losses.kernels.dispatch import use_triton

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
