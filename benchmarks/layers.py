"""Layer kernels beside transformers' code, the compiler, torch's operator, liger-kernel, and the bandwidth floor.

Each case is one layer, forward and backward, by the device's time: the host is ahead, as it is in the midst of a
model's step. The floor is the bytes that the layer must move, each once, over the rate of a device copy measured in the
same turns. An implementation is timed if its results are as near to fp64 as twice the distance of transformers' own,
plus a rounding; ours fails the run if they are not, a peer is flagged. `alone_ms` is a step's time where nothing else
keeps the device busy, so that whichever of host and device needs longer is what counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .measure import REPEATS, milliseconds

Layer = Callable[..., Any]  # of the case's tensors; a tensor or a tuple of them
EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """A layer at one shape. ``bytes`` counts 16-bit elements read and written, forward and backward, each once."""

    name: str
    shapes: tuple[tuple[int, ...], ...]  # of the tensors that need a gradient
    elements: int  # moved
    plain: Layer  # as transformers computes it
    angles: tuple[int, ...] | None = None  # [1, T, D] of cos and sin
    heads: bool = False  # [B, T, heads, D] in memory, seen as [B, heads, T, D]


@dataclass(frozen=True)
class Implementation:
    name: str
    layers: dict[str, Callable[[], Layer]]  # by the first word of a case's name
    ours: bool = False
    needs_cuda: bool = False


def _hf_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float() if x.dtype != torch.float64 else x
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def _hf_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _hf_geglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _hf_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + _turned(q) * sin, k * cos + _turned(k) * sin


def _norm(rows: int, width: int) -> Case:
    # x, y; then x, dy, dx
    return Case(f"rms_norm {rows} x {width}", ((rows, width), (width,)), 5 * rows * width, _hf_rms_norm)


def _gated(name: str, plain: Layer, rows: int, width: int) -> Case:
    # gate, up, y; then gate, up, dy, dgate, dup
    return Case(f"{name} {rows} x {width}", ((rows, width),) * 2, 8 * rows * width, plain)


def _rope(batch: int, length: int, heads: int, kv_heads: int, size: int) -> Case:
    # q, k and their results; the same of their gradients
    shapes = ((batch, length, heads, size), (batch, length, kv_heads, size))
    return Case(
        f"rope {batch} x {length}, {heads} + {kv_heads} heads of {size}", shapes,
        4 * batch * length * (heads + kv_heads) * size, _hf_rope, (1, length, size), heads=True,
    )  # fmt: skip


CASES = (
    _norm(16384, 4096),
    _norm(16384, 2048),
    _gated("swiglu", _hf_swiglu, 16384, 14336),
    _gated("geglu", _hf_geglu, 16384, 14336),
    _rope(4, 4096, 32, 8, 128),
)
TINY = (_norm(24, 40), _gated("swiglu", _hf_swiglu, 24, 40), _gated("geglu", _hf_geglu, 24, 40), _rope(2, 6, 4, 2, 8))


def _compiled(plain: Layer) -> Layer:
    return torch.compile(plain, dynamic=False)


def _ours(name: str) -> Layer:
    from liger_losses.kernels import gated_activation, rms_norm, rotary

    return {
        "rms_norm": partial(rms_norm, eps=EPS),
        "swiglu": gated_activation,
        "geglu": partial(gated_activation, activation="gelu_tanh"),
        "rope": rotary,
    }[name]


def _liger(name: str) -> Layer:
    from liger_kernel import ops

    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        # It works in place, on what the projections made: clones keep the inputs for the next turn.
        return ops.LigerRopeFunction.apply(q.clone(), k.clone(), cos, sin)

    return {
        # offset, casting mode, in place, row mode
        "rms_norm": lambda x, w: ops.LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False, None),
        "swiglu": lambda gate, up: ops.LigerSiLUMulFunction.apply(gate, up),
        "geglu": lambda gate, up: ops.LigerGELUMulFunction.apply(gate, up),
        "rope": rope,
    }[name]


_PLAIN: dict[str, Layer] = {"rms_norm": _hf_rms_norm, "swiglu": _hf_swiglu, "geglu": _hf_geglu, "rope": _hf_rope}
IMPLEMENTATIONS = (
    Implementation("transformers, eager", {name: partial(lambda f: f, plain) for name, plain in _PLAIN.items()}),
    Implementation(
        "transformers, torch.compile", {n: partial(_compiled, f) for n, f in _PLAIN.items()}, needs_cuda=True
    ),
    Implementation("F.rms_norm", {"rms_norm": lambda: lambda x, w: F.rms_norm(x, w.shape, w, EPS)}),
    Implementation("liger-kernel", {name: partial(_liger, name) for name in _PLAIN}, needs_cuda=True),
    Implementation("ours", {name: partial(_ours, name) for name in _PLAIN}, ours=True),
)


def _tensors(case: Case, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    leaves = [normal(shape) for shape in case.shapes]
    leaves = [leaf.transpose(1, 2) for leaf in leaves] if case.heads else leaves
    constants = []
    if case.angles is not None:
        _, length, size = case.angles
        rates = 10000.0 ** -(torch.arange(0, size, 2, device=device) / size)
        angles = torch.outer(torch.arange(length, device=device), rates).repeat(1, 2).unsqueeze(0)
        constants = [angles.cos().bfloat16(), angles.sin().bfloat16()]
    return [leaf.requires_grad_() for leaf in leaves], constants


def _own(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the same strides: some peers write into what they are given, and the next one must not see that."""
    return [torch.empty_like(t).copy_(t.detach()).requires_grad_(t.requires_grad) for t in tensors]


def _step(layer: Layer, leaves: Sequence[Tensor], constants: Sequence[Tensor], sent: Sequence[Tensor]) -> list[Tensor]:
    """Results and gradients, the latter as new tensors: nothing is added to a `.grad`."""
    outs = layer(*leaves, *constants)
    outs = [outs] if isinstance(outs, Tensor) else list(outs)
    return [*outs, *torch.autograd.grad(outs, leaves, [s.to(o.dtype) for s, o in zip(sent, outs, strict=True)])]


def _errors(found: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    return [
        float(torch.linalg.vector_norm(f.detach() - e.detach(), dtype=torch.float64) / e.detach().norm())
        for f, e in zip(found, exact, strict=True)
    ]


def run_case(
    case: Case, implementations: Sequence[Implementation], device: torch.device, repeats: int = REPEATS
) -> dict[str, Any]:
    """Everything about one case, ready for JSON, in the form of the loss cases' reports."""
    torch._dynamo.reset()
    kind = case.name.partition(" ")[0]
    leaves, constants = _tensors(case, device)
    outs = case.plain(*leaves, *constants)
    sent = [torch.randn_like(o) for o in ([outs] if isinstance(outs, Tensor) else outs)]
    del outs
    wide = torch.float64
    exact = _step(
        case.plain, [t.detach().to(wide).requires_grad_() for t in leaves], [t.to(wide) for t in constants], sent
    )
    naive = _errors(_step(case.plain, leaves, constants, sent), exact)
    rows: list[dict[str, Any]] = []
    works: dict[str, Callable[[], object]] = {}
    for one in (i for i in implementations if kind in i.layers):
        row: dict[str, Any] = {"implementation": one.name, "ours": one.ours, "status": "ok"}
        rows.append(row)
        if one.needs_cuda and device.type != "cuda":
            row["status"] = "needs a CUDA device"
            continue
        try:
            layer = one.layers[kind]()
            given = _own(leaves), _own(constants), _own(sent)
            row["errors"] = _errors(_step(layer, *given), exact)
        except Exception as error:  # one implementation's failure is a result, and must not hide the others'
            row["status"] = f"failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            continue
        if any(not e <= 2 * n + torch.finfo(torch.bfloat16).eps for e, n in zip(row["errors"], naive, strict=True)):
            row["status"] = "outside the error bound"
            if one.ours:
                continue
        works[one.name] = partial(_step, layer, *(_own(tensors) for tensors in (leaves, constants, sent)))
    del exact
    source = torch.empty(max(case.elements // 2, 1), dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    works["copy"] = partial(target.copy_, source)
    times: dict[str, list[float]] = {name: [] for name in works}
    alone: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(1 + repeats):
        for name, work in works.items():
            taken, by_itself = milliseconds(work, device, host_ahead=True), milliseconds(work, device)
            if turn > 0:
                times[name].append(taken)
                alone[name].append(by_itself)
    # A copy of half of the elements reads and writes as many as the layer moves.
    floor = median(times.pop("copy"))
    for row in rows:
        if row["implementation"] in times:
            row["times_ms"] = times[row["implementation"]]
            row["ms"] = median(row["times_ms"])
            row["alone_ms"] = median(alone[row["implementation"]])
            row["floor_ratio"] = row["ms"] / floor
    moved = 2 * case.elements
    return {"case": case.name, "bytes": moved, "floor_ms": floor, "copy_tb_s": moved / floor / 1e9, "rows": rows}


def failed(report: dict[str, Any]) -> list[str]:
    """Ours that did not pass, or could not run."""
    return [f"{report['case']}: {r['implementation']}" for r in report["rows"] if r["ours"] and r["status"] != "ok"]


def summary(report: dict[str, Any]) -> str:
    """One case as text: time, share of the bandwidth floor, time alone, and largest error."""
    lines = [
        f"\n{report['case']}\n{'floor (device copy)':<30}{report['floor_ms']:9.3f} ms {report['copy_tb_s']:6.2f} TB/s"
    ]
    for row in report["rows"]:
        measured = f"{'-':>9}"
        if "ms" in row:
            share = 100 / row["floor_ratio"]
            measured = f"{row['ms']:9.3f} ms {share:5.0f} % of the floor, alone {row['alone_ms']:7.3f} ms"
        errors = f"  error {max(row['errors']):.1e}" if "errors" in row else ""
        lines.append(
            f"{row['implementation']:<30}{measured}{errors}{'' if row['status'] == 'ok' else '  ' + row['status']}"
        )
    return "\n".join(lines)
