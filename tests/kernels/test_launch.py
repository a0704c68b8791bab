"""A kernel that was launched once is launched again without being looked up, with the same arguments."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_losses.kernels import (
    fused_add_rms_norm,
    gated_activation,
    implementation,
    layer_norm,
    packed_gated_activation,
    rms_norm,
    rotary,
)

from .conftest import INTERPRETED

triton = pytest.importorskip("triton")
if INTERPRETED:
    pytest.skip("needs the compiler, not the interpreter", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

from liger_losses.kernels import (  # noqa: E402
    gated_activation_triton,
    launch_triton,
    layer_norm_triton,
    rms_norm_triton,
    rotary_triton,
    rows_triton,
)

BF16 = torch.bfloat16


class Device:
    """Stands for a GPU's driver: it writes down what would be launched."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.utils = self

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        def run(x: int, y: int, z: int, stream: int, function: int, *others: Any) -> None:
            # Before the arguments: metadata of two kinds, and what to call before and after.
            arguments = tuple(a.dtype if isinstance(a, Tensor) else a for a in others[4:])
            self.launches.append(((x, y, z), source.fn.__name__, *arguments))

        return run

    def load_binary(self, *_: Any) -> tuple[int, ...]:
        return 1, 1, 32, 0, 1024

    def unload_module(self, _: int) -> None:
        pass

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


@pytest.fixture
def device(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    monkeypatch.setattr(launch_triton, "_compiled", {})
    for module in (rms_norm_triton, layer_norm_triton, gated_activation_triton, rotary_triton, rows_triton):
        for kernel in (k for n, k in vars(module).items() if n.endswith("_kernel")):
            # What is compiled here can only be launched here.
            monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    before = vars(driver).get("_active", vars(driver).get("active"))
    stand_in = Device()
    driver.set_active(stand_in)
    with implementation("triton"):
        yield stand_in
    monkeypatch.undo()
    gc.collect()  # kernels take leave of the device that they were loaded on
    driver.set_active(before)


X, R, W = torch.ones(3, 64, dtype=BF16), torch.ones(3, 64, dtype=BF16), torch.ones(64, dtype=BF16)
HEADS, TABLE = torch.ones(1, 2, 3, 16, dtype=BF16), torch.ones(1, 3, 16, dtype=BF16)


@pytest.mark.parametrize(
    ("call", "tensors", "count"),
    [
        (rms_norm, (X, W), 3),
        (lambda *t: fused_add_rms_norm(*t)[0], (X, R, W), 3),
        (layer_norm, (X, W, W), 4),
        (gated_activation, (X, R), 2),
        (lambda q: rotary(q, None, TABLE, TABLE)[0], (HEADS,), 2),
    ],
    ids=["rms_norm", "fused_add", "layer_norm", "gated", "rotary"],
)
def test_the_second_launch_is_the_first(
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[..., Tensor],
    tensors: tuple[Tensor, ...],
    count: int,
) -> None:
    leaves = [t.clone().requires_grad_() for t in tensors]

    def step() -> list[tuple[Any, ...]]:
        device.launches.clear()
        torch.autograd.backward(call(*leaves), torch.ones_like(leaves[0]))
        return list(device.launches)

    first = step()
    assert len(first) == count
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", None)  # nothing is looked up any more
    assert step() == first


def test_one_compilation_for_all_lengths(device: Device) -> None:
    """B38: lengths are run-time arguments, 1 and multiples of 16 among them."""

    def use(length: int) -> int:
        x, w = torch.ones(2, length, 64, dtype=BF16, requires_grad=True), W.clone().requires_grad_()
        heads = torch.ones(2, length, 4, 16, dtype=BF16).transpose(1, 2).requires_grad_()
        table = torch.ones(1, length, 16, dtype=BF16)
        outs = [
            rms_norm(x, w), *fused_add_rms_norm(x, x, w), layer_norm(x, w, w), gated_activation(x, x),
            packed_gated_activation(x), rotary(heads, heads, table, table)[0],
        ]  # fmt: skip
        torch.autograd.backward(outs, [torch.ones_like(o) for o in outs])
        return len(set(launch_triton._compiled.values()))

    before = use(100)
    assert before > 0
    assert {use(length) for length in (1, 16, *range(101, 111))} == {before}


def test_other_kinds_of_arguments_are_other_kernels(device: Device) -> None:
    def known() -> int:
        rows_triton.sum_partials(partial, out)
        return len(launch_triton._compiled)

    partial, out = torch.zeros(2, 8), torch.zeros(8, dtype=BF16)
    assert known() == 1
    partial, out = torch.zeros(5, 24), torch.zeros(24, dtype=BF16)
    assert known() == 1  # whatever the sizes are
    out = torch.zeros(24)
    assert known() == 2
    out = torch.zeros(25)[1:]
    assert known() == 3
    partial = torch.zeros(1, 1).expand(2**31, 24)
    assert known() == 3  # a size of 64 bits is looked up
    assert device.launches[-1][4] == 2**31
