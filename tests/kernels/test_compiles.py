"""Every variant of the Triton kernels compiles for an H100 on a machine that has none, and moves 16 bytes at a time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_losses.kernels import STATISTICS, Emit, LogitTransform, RowState

from .conftest import INTERPRETED

triton = pytest.importorskip("triton")
if INTERPRETED:
    pytest.skip("needs the compiler, not the interpreter", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from liger_losses.kernels import tile_gradient_triton, tile_statistics_triton  # noqa: E402

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TYPES = {F32: "*fp32", BF16: "*bf16", F16: "*fp16", torch.int64: "*i64"}
ROWS, COLUMNS = 2, 1000


class Launch:
    """Stands for a kernel: what the launcher hands over becomes the signature that is compiled."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.assembly = ""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.launch

    def launch(self, *arguments: Any, num_warps: int, **constants: Any) -> None:
        constants["BLOCK"] = 4096  # what it is on a GPU
        names = self.kernel.arg_names
        signature, attributes = dict.fromkeys(constants, "constexpr"), {}
        for index, (name, value) in enumerate(zip(names, arguments, strict=False)):
            if isinstance(value, Tensor):
                signature[name] = TYPES[value.dtype]
                if value.data_ptr() % 16 == 0:
                    attributes[(index,)] = [["tt.divisibility", 16]]
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
        source = ASTSource(
            fn=self.kernel, signature={name: signature[name] for name in names},
            constexprs={(names.index(name),): value for name, value in constants.items()}, attrs=attributes,
        )  # fmt: skip
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
        self.assembly = compiled.asm["ptx"]

    def accesses(self) -> Counter[str]:
        """Global loads and stores by width, e.g. `ld.v4`."""
        return Counter(
            f"{kind}{width or ''}" for kind, width in re.findall(r"\b(ld|st)\.global(\.v\d)?\.", self.assembly)
        )

    def atomics(self) -> list[str]:
        return re.findall(r"\b(?:atom|red)\.\S+", self.assembly)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any, str], Launch]]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def replace(module: Any, name: str) -> Launch:
        launch = Launch(getattr(module, name))
        monkeypatch.setattr(module, name, launch)
        return launch

    return replace


def rows(dtype: torch.dtype, *, aligned: bool) -> Tensor:
    return torch.zeros(ROWS, COLUMNS + (0 if aligned else 1), dtype=dtype)[:, :COLUMNS]


TARGET, VECTOR = torch.zeros(ROWS, dtype=torch.int64), torch.zeros(ROWS)


@pytest.mark.parametrize(
    ("tile", "out", "aligned", "names", "emit", "softcap", "bias"),
    [
        (F32, BF16, True, ("logprob", "mean_logit"), Emit.GRADIENT, None, None),
        (F32, BF16, True, STATISTICS, Emit.PROBABILITY, 5.0, F32),
        (F32, F32, True, ("logprob",), Emit.GRADIENT, None, BF16),
        (F32, F16, True, STATISTICS, Emit.GRADIENT, 5.0, F16),
        (BF16, BF16, True, ("logprob",), Emit.GRADIENT, None, None),
        (F16, F16, True, ("logprob",), Emit.PROBABILITY, None, None),
        (F32, BF16, True, STATISTICS, Emit.NOTHING, 5.0, BF16),
        (F32, BF16, False, STATISTICS, Emit.GRADIENT, 5.0, BF16),
        (F32, F16, False, ("logprob",), Emit.GRADIENT, None, None),
    ],
    ids=str,
)
def test_statistics_kernel(
    compiler: Callable[[Any, str], Launch], tile: torch.dtype, out: torch.dtype, aligned: bool,
    names: tuple[str, ...], emit: Emit, softcap: float | None, bias: torch.dtype | None,
) -> None:  # fmt: skip
    launch = compiler(tile_statistics_triton, "_fold_kernel")
    tile_statistics_triton.fold_tile_triton(
        rows(tile, aligned=aligned), None if bias is None else torch.zeros(COLUMNS, dtype=bias), TARGET,
        RowState(ROWS, names, device=torch.device("cpu"), dtype=F32), LogitTransform(softcap=softcap), first_column=0,
        emit=emit, out=rows(out, aligned=aligned) if emit else None,
    )  # fmt: skip
    seen = launch.accesses()
    assert seen["ld"] + seen["ld.v4"] > 0
    if aligned:
        assert seen["ld.v4"] >= 2  # the first block, and the loop
        assert emit == Emit.NOTHING or seen["st.v4"] > 0
    assert not launch.atomics()  # the same bits twice


@pytest.mark.parametrize(
    ("tile", "out", "aligned", "several", "softcap", "from_probability"),
    [
        (F32, BF16, True, False, None, False),
        (F32, BF16, True, True, 5.0, False),
        (BF16, BF16, True, True, 5.0, True),
        (F16, F16, True, True, None, True),
        (F32, F32, True, True, None, False),
        (F32, BF16, False, True, 5.0, False),
    ],
    ids=str,
)
def test_gradient_kernel(
    compiler: Callable[[Any, str], Launch], tile: torch.dtype, out: torch.dtype, aligned: bool, several: bool,
    softcap: float | None, from_probability: bool,
) -> None:  # fmt: skip
    launch = compiler(tile_gradient_triton, "_gradient_kernel")
    held = rows(tile, aligned=aligned)
    more = VECTOR if several else None
    tile_gradient_triton.tile_gradient_triton(
        held, torch.zeros(COLUMNS), TARGET, VECTOR, VECTOR, more, VECTOR, more, more, LogitTransform(softcap=softcap),
        held if tile == out else rows(out, aligned=aligned), 0, VECTOR if from_probability else None,
    )  # fmt: skip
    seen = launch.accesses()
    assert seen["ld"] + seen["ld.v4"] > 0
    if aligned:
        assert seen["ld.v4"] > 0
        assert seen["st.v4"] > 0
    assert not launch.atomics()
