"""Every variant of the Triton kernels compiles for an H100 where there is none, and moves all it can at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_losses.kernels import (
    DISTILLATION,
    STATISTICS,
    Columns,
    Divergence,
    DivergenceState,
    Emit,
    LogitTransform,
    RowState,
    RowTails,
    TeacherTile,
    shard_numbers,
)

from .conftest import INTERPRETED

triton = pytest.importorskip("triton")
if INTERPRETED:
    pytest.skip("needs the compiler, not the interpreter", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from liger_losses.kernels import (  # noqa: E402
    active_columns_triton,
    bernoulli_tile_triton,
    column_choice_triton,
    column_extent_triton,
    divergence_sums_triton,
    divergence_tile_triton,
    merge_shards_triton,
    rows_triton,
    scaled_cast_triton,
    tailed_cast_triton,
    tile_gradient_triton,
    tile_statistics_triton,
)

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TYPES = {F32: "*fp32", BF16: "*bf16", F16: "*fp16", torch.int64: "*i64", torch.int32: "*i32", torch.int8: "*i8"}
ROWS, COLUMNS = 2, 1000


class Launch:
    """Stands for a kernel: what the launcher hands over becomes the signature that is compiled."""

    def __init__(self, kernel: Any, block: int | None) -> None:
        self.kernel = kernel
        self.block = block  # None: the launcher's own
        self.warps = 0
        self.assembly = ""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.launch

    def launch(self, *arguments: Any, num_warps: int, **named: Any) -> None:
        if self.block is not None:
            named["BLOCK"] = self.block
        self.warps = num_warps
        names = self.kernel.arg_names
        constants = {
            parameter.name: named[parameter.name] for parameter in self.kernel.params if parameter.is_constexpr
        }
        arguments = (*arguments, *(named[name] for name in names[len(arguments) :] if name not in constants))
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

    def vector(self, kind: str) -> int:
        """Bytes of the widest vector access to global memory, `kind` "ld" or "st"; 0 without any."""
        found = re.findall(rf"\b{kind}\.global(?:\.\w+)*?\.v(\d)\.[bfsu](\d+)", self.assembly)
        return max((int(count) * int(bits) // 8 for count, bits in found), default=0)

    def best(self, dtype: torch.dtype) -> int:
        """What a thread's share of a block allows, up to 16 bytes."""
        assert self.block is not None
        return min(16, self.block // (32 * self.warps) * dtype.itemsize)

    def atomics(self) -> list[str]:
        return re.findall(r"\b(?:atom|red)\.\S+", self.assembly)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any, str], Launch]]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def replace(module: Any, name: str) -> Launch:
        # On a GPU; the interpreter's is smaller.
        block = divergence_tile_triton._BLOCK if module is divergence_sums_triton else getattr(module, "_BLOCK", None)
        launch = Launch(getattr(module, name), block)
        monkeypatch.setattr(module, name, launch)
        return launch

    return replace


def rows(dtype: torch.dtype, *, aligned: bool) -> Tensor:
    return torch.zeros(ROWS, COLUMNS + (0 if aligned else 1), dtype=dtype)[:, :COLUMNS]


TARGET, VECTOR, COLUMN = torch.zeros(ROWS, dtype=torch.int64), torch.zeros(ROWS), torch.zeros(COLUMNS)


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
        RowState(ROWS, names, device=torch.device("cpu"), dtype=F32, column_weights=bias is not None),
        LogitTransform(softcap=softcap, temperature=1.0 if softcap is None else VECTOR), first_column=0,
        emit=emit, out=rows(out, aligned=aligned) if emit else None, column_weights=None if bias is None else COLUMN,
    )  # fmt: skip
    assert launch.assembly
    if aligned:
        assert launch.vector("ld") >= launch.best(tile)
        assert emit == Emit.NOTHING or launch.vector("st") == launch.best(out)
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
        held, COLUMN, TARGET, VECTOR, VECTOR, more, VECTOR, more, more, more, COLUMN if several else None,
        LogitTransform(softcap=softcap, temperature=1.0 if softcap is None else VECTOR),
        held if tile == out else rows(out, aligned=aligned), 0, VECTOR if from_probability else None,
    )  # fmt: skip
    assert launch.assembly
    if aligned:
        assert launch.vector("ld") >= launch.best(tile)
        assert launch.vector("st") == launch.best(out)
    assert not launch.atomics()


@pytest.mark.parametrize(
    ("tile", "out", "aligned", "softcap"),
    [
        (F32, BF16, True, None),
        (F32, F32, True, 5.0),
        (BF16, BF16, True, 5.0),
        (F16, F16, False, None),
        (F32, None, True, 5.0),
    ],
    ids=str,
)
def test_bernoulli_kernel(
    compiler: Callable[[Any, str], Launch], tile: torch.dtype, out: torch.dtype | None, aligned: bool,
    softcap: float | None,
) -> None:  # fmt: skip
    launch = compiler(bernoulli_tile_triton, "_bernoulli_kernel")
    held = rows(tile, aligned=aligned)
    written = None if out is None else held if tile == out else rows(out, aligned=aligned)
    bernoulli_tile_triton.bernoulli_tile_triton(
        held, None if softcap is None else COLUMN, torch.zeros(ROWS, 3, dtype=torch.int64),
        torch.zeros(ROWS, 3, dtype=tile), LogitTransform(softcap=softcap, temperature=1.0 if softcap is None else VECTOR),
        VECTOR, written, None if softcap is None else VECTOR,
    )  # fmt: skip
    assert launch.assembly
    if aligned:
        assert launch.vector("ld") >= launch.best(tile)
        assert out is None or launch.vector("st") == launch.best(out)
    assert not launch.atomics()


HARD = Divergence(kind="jsd", beta=0.3, temperature=2.0, hard_weight=0.5)


@pytest.mark.parametrize(
    ("tile", "out", "aligned", "options", "names", "softcap", "probabilities"),
    [
        (F32, BF16, True, Divergence(kind="jsd"), ("distillation",), None, False),
        (F32, BF16, True, Divergence(), ("distillation",), None, False),
        (BF16, BF16, True, Divergence(), ("distillation",), None, False),
        (F32, F32, True, HARD, DISTILLATION, 5.0, False),
        (F32, F16, False, HARD, DISTILLATION, 5.0, True),
        (F32, None, True, Divergence(kind="reverse_kl"), DISTILLATION, None, True),
        *((F32, BF16, True, Divergence(kind=kind), ("distillation",), None, False)
          for kind in ("reverse_kl", "skewed_forward_kl", "skewed_reverse_kl", "tvd", "jeffreys", "alpha", "cosine", "mse")),
    ],
    ids=str,
)  # fmt: skip
def test_divergence_kernels(
    compiler: Callable[[Any, str], Launch], tile: torch.dtype, out: torch.dtype | None, aligned: bool,
    options: Divergence, names: tuple[str, ...], softcap: float | None, probabilities: bool,
) -> None:  # fmt: skip
    launch = compiler(divergence_tile_triton, "_divergence_kernel")
    student, logits = rows(tile, aligned=aligned), rows(tile, aligned=aligned)
    teacher = TeacherTile(logits, None if softcap is None else COLUMN, LogitTransform(softcap=softcap), probabilities)
    state = DivergenceState(ROWS, names, options, device=torch.device("cpu"), dtype=F32)
    transform = LogitTransform(softcap=softcap, temperature=1.0 if softcap is None else VECTOR)
    columns, written = Columns(COLUMNS, COLUMNS), None if out is None else rows(out, aligned=aligned)
    bias = None if softcap is None else COLUMN
    divergence_tile_triton.divergence_tile_triton(student, bias, TARGET, teacher, state, transform, columns, written)
    launches = [launch]
    if written is not None:
        launches.append(compiler(divergence_tile_triton, "_gradient_kernel"))
        divergence_tile_triton.divergence_gradient_triton(
            student, bias, TARGET, teacher, state, transform, columns, VECTOR, written, 0
        )
    for each in launches:
        assert each.assembly
        if aligned:
            assert each.vector("ld") >= each.best(tile)
            assert out is None or each.vector("st") == each.best(out)
        assert not each.atomics()


@pytest.mark.parametrize(
    ("tile", "aligned", "kind"),
    [(F32, True, "jsd"), (BF16, True, "forward_kl"), (F32, False, "skewed_reverse_kl")],
    ids=str,
)
def test_divergence_sums_kernel(
    compiler: Callable[[Any, str], Launch], tile: torch.dtype, aligned: bool, kind: str
) -> None:
    launch = compiler(divergence_sums_triton, "_sums_kernel")
    student, logits = rows(tile, aligned=aligned), rows(tile, aligned=aligned)
    state = DivergenceState(ROWS, ("distillation",), Divergence(kind=kind), device=torch.device("cpu"), dtype=F32)
    divergence_sums_triton.divergence_sums_triton(
        student, None, TeacherTile(logits), state, LogitTransform(), Columns(COLUMNS, COLUMNS)
    )
    assert launch.assembly
    if aligned:
        assert launch.vector("ld") >= launch.best(tile)
    assert not launch.atomics()


@pytest.mark.parametrize("names", [("logprob",), ("entropy", "is_top1"), STATISTICS], ids=" ".join)
def test_merge_kernel(compiler: Callable[[Any, str], Launch], names: tuple[str, ...]) -> None:
    launch = compiler(merge_shards_triton, "_merge_kernel")
    state = RowState(ROWS, names, device=torch.device("cpu"), dtype=F32, column_weights=True)
    merge_shards_triton.merge_shards_triton(torch.stack([shard_numbers(state)] * 3), state, TARGET)
    assert launch.assembly
    assert not launch.atomics()


@pytest.mark.parametrize(("kind", "dtype"), [(F32, BF16), (BF16, BF16), (F32, F16), (F32, F32)], ids=str)
@pytest.mark.parametrize(("per_row", "tails"), [(True, False), (False, False), (True, True)])
def test_scaled_cast_kernel(
    compiler: Callable[[Any, str], Launch], kind: torch.dtype, dtype: torch.dtype, per_row: bool, tails: bool
) -> None:
    launch = compiler(scaled_cast_triton, "_scaled_cast_kernel")
    scaled_cast_triton.scaled_cast_triton(
        torch.zeros(ROWS, COLUMNS, dtype=kind),
        VECTOR if per_row else VECTOR[0],
        torch.zeros(ROWS, COLUMNS, dtype=dtype),
        RowTails(VECTOR, TARGET.int(), torch.zeros(2, COLUMNS)) if tails else None,
    )
    assert launch.vector("ld") == launch.best(kind)
    assert launch.vector("st") == launch.best(dtype)


@pytest.mark.parametrize(
    ("kind", "aligned", "scale"), [(BF16, True, VECTOR), (F16, True, None), (BF16, False, VECTOR)], ids=str
)
def test_active_vocabulary_kernels(
    compiler: Callable[[Any, str], Launch], kind: torch.dtype, aligned: bool, scale: Tensor | None
) -> None:
    extent = compiler(column_extent_triton, "_extent_kernel")
    compiler(rows_triton, "_sum_kernel")
    summed = compiler(column_extent_triton, "_extent_sum_kernel")
    chosen = [compiler(column_choice_triton, f"_{name}_kernel") for name in ("below", "mark", "compact")]
    columns, gathered, added = (
        compiler(active_columns_triton, f"_{name}_kernel") for name in ("gather_columns", "gather_rows", "add_rows")
    )
    tile, ids = rows(kind, aligned=aligned), torch.arange(3, dtype=torch.int32)
    width = 2048 if aligned else 2047
    weight, out, sums, part = (torch.zeros(9, width, dtype=t) for t in (kind, kind, F32, F32))
    weighed = column_extent_triton.column_extent_triton(tile, scale, squares=aligned)
    column_choice_triton.choose_columns_triton(weighed, TARGET, None if aligned else 0.1, 0.1)
    active_columns_triton.gather_columns_triton(tile, ids, VECTOR, torch.zeros(ROWS, 8, dtype=kind))
    active_columns_triton.gather_rows_triton(weight, ids, out)
    active_columns_triton.add_rows_triton(sums, torch.zeros(9, dtype=torch.bool) if aligned else None, ids, part)
    for launch in (extent, summed, *chosen, columns, gathered, added):
        assert launch.assembly
        assert not launch.atomics()  # the same bits twice
        assert not aligned or launch in (extent, summed, *chosen, columns) or launch.vector("ld") == 16
    # It reads ahead, into shared memory.
    assert not aligned or re.search(r"cp\.async\.cg\.shared\.global\b.*, 0x10\b", extent.assembly)
    assert not aligned or gathered.vector("st") == added.vector("st") == 16


@pytest.mark.parametrize(("name", "tails"), [("few", 3), ("few", 8), ("many", 9)])
@pytest.mark.parametrize(("dtype", "some"), [(BF16, True), (F16, True), (F32, False)], ids=str)
def test_tailed_cast_kernels(
    compiler: Callable[[Any, str], Launch], dtype: torch.dtype, some: bool, name: str, tails: int
) -> None:
    launch = compiler(tailed_cast_triton, f"_{name}_tails_kernel")
    total, profiles, sums = (torch.zeros(size) for size in ((ROWS, 1024), (tails, ROWS), (tails, 1024)))
    written = torch.zeros(ROWS, dtype=torch.bool) if some else None
    tailed_cast_triton.tailed_cast_triton(total, written, profiles, sums, VECTOR[0], total.to(dtype))
    assert launch.vector("ld") == 16
    assert launch.vector("st") == 16
