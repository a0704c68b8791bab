"""The layer kernels compile for an H100 where there is none, move 16 bytes at a time, and use no atomics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from .conftest import INTERPRETED

triton = pytest.importorskip("triton")
if INTERPRETED:
    pytest.skip("needs the compiler, not the interpreter", allow_module_level=True)

from liger_losses.kernels import (  # noqa: E402
    ACTIVATIONS,
    gated_activation_triton,
    layer_norm_triton,
    rms_norm_triton,
    rotary_triton,
    rows_triton,
)

from .test_compiles import Launch  # noqa: E402

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture
def launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Launch]]:
    """Every kernel of the layers, compiled where it would run."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = {}
    for module in (rms_norm_triton, layer_norm_triton, gated_activation_triton, rotary_triton, rows_triton):
        for name in [n for n in vars(module) if n.endswith("_kernel")]:
            found[f"{module.__name__.rpartition('.')[2]}.{name}"] = launch = Launch(getattr(module, name), None)
            monkeypatch.setattr(module, name, launch)
    yield found
    for launch in found.values():
        if launch.assembly:
            assert not launch.atomics()


def check(launch: Launch, *, wide: bool = True) -> None:
    assert launch.assembly
    if wide:
        assert launch.vector("ld") == launch.vector("st") == 16


@pytest.mark.parametrize("width", [128, 4096, 32768])
@pytest.mark.parametrize(("dtype", "residual"), [(BF16, True), (F32, False)], ids=str)
def test_rms_norm(launches: dict[str, Launch], width: int, dtype: torch.dtype, residual: bool) -> None:
    x, weight, rstd = torch.zeros(3, width, dtype=dtype), torch.zeros(width, dtype=dtype), torch.zeros(3)
    more = x if residual else None
    rms_norm_triton.forward_triton(x, more, weight, x, more, rstd, 1e-6, 0.0, True)
    rms_norm_triton.backward_triton(x, more, x, weight, rstd, x, 0.0, True, True)
    assert launches["rows_triton._sum_kernel"].assembly
    check(launches[f"rms_norm_triton._forward{'_wide' if width > 16384 else ''}_kernel"])
    check(launches[f"rms_norm_triton._backward{'_wide' if width > 8192 else ''}_kernel"])


@pytest.mark.parametrize("width", [1, 130])
def test_rms_norm_of_odd_widths(launches: dict[str, Launch], width: int) -> None:
    x, rstd = torch.zeros(3, width, dtype=F16), torch.zeros(3)
    rms_norm_triton.forward_triton(x, None, None, x, None, rstd, 1e-6, 0.0, False)
    rms_norm_triton.backward_triton(x, None, x, None, rstd, x, 0.0, False, False)
    check(launches["rms_norm_triton._forward_kernel"], wide=False)
    check(launches["rms_norm_triton._backward_kernel"], wide=False)


@pytest.mark.parametrize("width", [64, 32768])
def test_layer_norm(launches: dict[str, Launch], width: int) -> None:
    x, weight, row = torch.zeros(3, width, dtype=BF16), torch.zeros(width, dtype=BF16), torch.zeros(3)
    layer_norm_triton.forward_triton(x, weight, weight, x, row, row, 1e-5, 0.0)
    layer_norm_triton.backward_triton(x, x, weight, row, row, x, weight, weight, 0.0)
    check(launches[f"layer_norm_triton._forward{'_wide' if width > 16384 else ''}_kernel"])
    check(launches[f"layer_norm_triton._backward{'_wide' if width > 8192 else ''}_kernel"])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("packed", [False, True])
def test_gated_activation(launches: dict[str, Launch], activation: str, packed: bool) -> None:
    gate, up = torch.zeros(3, 512, dtype=BF16).chunk(2, -1) if packed else torch.zeros(2, 3, 256, dtype=BF16)
    y = torch.zeros(3, 256, dtype=BF16)
    gated_activation_triton.forward_triton(gate, up, y, activation)
    gated_activation_triton.backward_triton(y, gate, up, gate, up, activation)
    check(launches["gated_activation_triton._forward_kernel"])
    check(launches["gated_activation_triton._backward_kernel"])


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("layout", ["half", "interleaved", "interleaved_to_half"])
@pytest.mark.parametrize("size", [128, 96])
def test_rotary(launches: dict[str, Launch], layout: str, inverse: bool, size: int) -> None:
    def heads(number: int) -> Tensor:
        return torch.zeros(2, 5, number, size, dtype=BF16).transpose(1, 2)

    cos: Any = torch.zeros(1, 5, 80 if size == 96 and layout != "interleaved_to_half" else size, dtype=BF16)
    rotary_triton.rotate_triton([heads(32), heads(8)], [heads(32), heads(8)], cos, cos, layout, False, 1, inverse)
    check(launches["rotary_triton._rotary_kernel"])
