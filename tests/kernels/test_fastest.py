"""Where torch's own operator runs instead of the kernel: as the tables say, and only where it computes the same."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.__main__ import main
from benchmarks.layer_tables import decide
from liger_losses.kernels import CASTING_MODES, fastest, implementation, layer_norm, rms_norm
from liger_losses.kernels.fastest import FOLDER, OPERATIONS, preferred, size_class

from .conftest import INTERPRETED

if INTERPRETED:
    pytest.skip("is about the twins", allow_module_level=True)

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def make(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).requires_grad_()


def is_ours(y: Tensor) -> bool:
    name = type(y.grad_fn).__name__
    return name in ("_RMSNormBackward", "_LayerNormBackward")


@pytest.fixture
def all_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table on which torch is faster wherever something was measured."""
    keys = {(o, b, r, w) for o in OPERATIONS for b in (2, 4) for r in range(2, 9) for w in range(4, 8)}
    monkeypatch.setattr(fastest, "_of_device", lambda device: frozenset(keys))


def test_classes_are_centred_on_powers_of_four() -> None:
    for c in range(1, 9):
        assert [size_class(n) for n in (4**c // 2 - 1, 4**c // 2, 4**c, 2 * 4**c - 1, 2 * 4**c)] == [
            c - 1,
            c,
            c,
            c,
            c + 1,
        ]


X, W = make(32, 256), make(256, seed=1)


def test_without_a_table_nothing_is_torchs() -> None:
    assert is_ours(rms_norm(X, W, casting_mode="gemma"))
    assert is_ours(layer_norm(X, W, W))
    assert not fastest._of_device(torch.device("cpu"))


@pytest.mark.usefixtures("all_torchs")
def test_what_torch_may_run() -> None:
    wide, fine = X.detach().float().requires_grad_(), W.detach().float().requires_grad_()
    for y in (
        rms_norm(X, W, casting_mode="gemma"),
        rms_norm(X, W, casting_mode="none"),
        rms_norm(X),
        rms_norm(wide, fine),
        rms_norm(X[:1], W, casting_mode="gemma"),  # fewer rows than were measured
        layer_norm(X, W, W),
        layer_norm(X),
        layer_norm(wide, fine),
    ):
        assert not is_ours(y)


@pytest.mark.usefixtures("all_torchs")
def test_what_torch_may_not_run() -> None:
    fine = W.detach().float()
    for y in (
        rms_norm(X, W),  # rounds before the weight
        rms_norm(X, W, offset=1.0, casting_mode="gemma"),
        rms_norm(X, fine, casting_mode="gemma"),
        rms_norm(X, fine, casting_mode="none"),
        rms_norm(X.double(), W.double()),
        rms_norm(X[:, :100], casting_mode="gemma"),  # a width that was not measured
        rms_norm(X[:0], casting_mode="gemma"),
        layer_norm(X, W, W, offset=1.0),
        layer_norm(X, fine, W),
        layer_norm(X, W, fine),
    ):
        assert is_ours(y)
    with torch.autocast("cpu", BF16):
        assert is_ours(rms_norm(X, W, casting_mode="gemma"))
    with implementation("torch"):  # the twin
        assert is_ours(rms_norm(X, W, casting_mode="gemma"))


@pytest.mark.usefixtures("all_torchs")
def test_a_trace_does_not_ask() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: rms_norm(x, w, casting_mode="gemma"), fullgraph=True, backend="aot_eager")
    with implementation("torch"):
        wanted = rms_norm(X, W, casting_mode="gemma")
    assert torch.equal(compiled(X, W), wanted)
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.usefixtures("all_torchs")
@pytest.mark.parametrize("mode", CASTING_MODES)
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_torch_rounds_as_the_convention_says(mode: str, dtype: torch.dtype) -> None:
    """To the bit in 16 bits, but for the few entries where another order of sums tips a rounding. Rounding before the
    weight, as "llama" does, gives other numbers in a large part of the entries."""
    x, w = make(64, 1024, dtype=dtype), make(1024, dtype=dtype, seed=1)
    y = rms_norm(x, w, casting_mode=mode)
    with implementation("torch"):
        twin = rms_norm(x, w, casting_mode=mode)
    assert y.dtype == twin.dtype
    if dtype == F32:
        torch.testing.assert_close(y, twin, rtol=1e-6, atol=1e-7)
    else:
        assert (y != twin).float().mean() < 0.01
        operator = torch.nn.functional.rms_norm(x, w.shape, w, 1e-6)
        assert ((operator != twin).float().mean() > 0.1) == (mode == "llama")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_tables_in_the_package(path: Path) -> None:
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    counts = Counter((e["operation"], e["bytes"], e["rows"], e["width"]) for e in record["entries"])
    assert all(count == 1 for count in counts.values())
    assert preferred(record["entries"]) <= set(counts)
    for entry in record["entries"]:
        assert entry["operation"] in OPERATIONS
        assert entry["fastest"] == (decide(entry["wall_us"], entry["device_us"]) if entry["exact"] else "triton")
    assert (path.stem == "default") == (record["device"] is None)
    assert bool(record["entries"]) == (record["device"] is not None)


def test_tables_are_packaged() -> None:
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    root = Path(__file__).resolve().parents[2]
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["liger_losses"]
    packaged = {path for pattern in patterns for path in (root / "liger_losses").glob(pattern)}
    assert packaged >= set(FOLDER.iterdir())


@pytest.mark.parametrize(
    ("wall", "device", "name"),
    [
        ({"triton": 100.0, "torch": 60.0}, {"triton": 9.0, "torch": 20.0}, "torch"),  # the host is waited for
        ({"triton": 100.0, "torch": 98.0}, {"triton": 9.0, "torch": 5.0}, "triton"),  # no gain worth the change
        ({"triton": 100.0, "torch": 60.0}, {"triton": 30.0, "torch": 50.0}, "triton"),  # the device is
        ({"triton": 900.0, "torch": 700.0}, {"triton": 880.0, "torch": 690.0}, "torch"),
    ],
)
def test_which_clock_decides(wall: dict[str, float], device: dict[str, float], name: str) -> None:
    assert decide(wall, device) == name


def test_tables_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["layers", "--tables", "--device", "cpu"]
    assert main([*options, "--out", str(tmp_path), "--case", "rms_norm"]) == 0
    (path,) = tmp_path.iterdir()
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["device"] == record["environment"]["device"]
    assert [(e["operation"], e["bytes"], e["rows"], e["width"]) for e in record["entries"]] == [
        ("rms_norm", size, 2, 2) for size in (2, 4)
    ]
    assert "rms_norm 16 bits, 16 x 16" in capsys.readouterr().out
    assert main(options) == 2  # never into the package
    assert main([*options, "--out", str(tmp_path), "--case", "nothing"]) == 2
