"""Measure where torch's own norms are faster than ours, for the tables in `liger_losses/kernels/tables`.

Each entry is forward and backward of one operation at one class of sizes, in microseconds a step, by two clocks: the
host's around several steps (`wall`), and the device's with the host ahead (`device`), as in the midst of a model's
step. Where every implementation keeps the device busy for less than half of its wall time, the host is what is waited
for, and `wall` decides; elsewhere `device` does. torch's is preferred where it is faster by a twentieth and its
results and gradients are as near to fp64 as ours are, within a factor of two and a rounding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_losses.kernels import fastest, layer_norm, rms_norm

EPS = 1e-6
MARGIN = 1.05
DTYPES = (torch.bfloat16, torch.float32)  # one of each size: fp16 moves what bf16 does
ROWS, WIDTHS = range(fastest.FEWEST, 9), range(4, 8)  # 16 to 65,536 and 256 to 16,384
MOST = 2**28  # elements; of larger ones torch's is never preferred
_AHEAD = 10_000_000  # device cycles, some 5 ms: time for a slow host to queue what is timed
_IN_A_ROW, _QUEUED, _TURNS = 8, 4, 5  # steps by the wall clock, steps by the device's, repetitions

Norm = Callable[..., Tensor]
# "torch" rounds once; ours in the same convention.
NORMS: dict[str, dict[str, Norm]] = {
    "rms_norm": {
        "triton": partial(rms_norm, eps=EPS, casting_mode="gemma"),
        "torch": lambda x, w: F.rms_norm(x, w.shape, w, EPS),
    },
    "layer_norm": {
        "triton": partial(layer_norm, eps=EPS),
        "torch": lambda x, w, b: F.layer_norm(x, w.shape, w, b, EPS),
    },
}


def _tensors(operation: str, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    generator = torch.Generator(device=device).manual_seed(0)
    shapes = [(rows, width), (width,), (width,)][: 2 if operation == "rms_norm" else 3]
    return [1 + torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes]


def _step(norm: Norm, leaves: Sequence[Tensor], sent: Tensor) -> list[Tensor]:
    y = norm(*leaves)
    return [y, *torch.autograd.grad(y, leaves, sent)]


def _errors(norm: Norm, tensors: Sequence[Tensor], exact: Sequence[Tensor], sent: Tensor) -> list[float]:
    found = _step(norm, [t.clone().requires_grad_() for t in tensors], sent)
    return [float((f.detach().double() - e).norm() / e.norm()) for f, e in zip(found, exact, strict=True)]


def exact(operation: str, width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch's results and gradients are as near to the truth as ours."""
    tensors = _tensors(operation, 512, width, dtype, device)
    sent = torch.randn_like(tensors[0])
    wide = [t.double().requires_grad_() for t in tensors]
    truth = [t.detach() for t in _step(NORMS[operation]["torch"], wide, sent.double())]
    ours, theirs = (_errors(NORMS[operation][name], tensors, truth, sent) for name in ("triton", "torch"))
    return all(t <= 2 * o + torch.finfo(dtype).eps for o, t in zip(ours, theirs, strict=True))


def _microseconds(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """A step's wall time, and its time on the device."""
    if device.type != "cuda":  # only the harness is of interest there
        start = time.perf_counter()
        work()
        return (1e6 * (time.perf_counter() - start),) * 2
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(_IN_A_ROW):
        work()
    torch.cuda.synchronize(device)
    wall = (time.perf_counter() - start) / _IN_A_ROW
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(_AHEAD)
    begin.record()
    for _ in range(_QUEUED):
        work()
    end.record()
    end.synchronize()
    return 1e6 * wall, 1e3 * begin.elapsed_time(end) / _QUEUED


def decide(wall: dict[str, float], device: dict[str, float]) -> str:
    """The faster one's name."""
    waits_for_host = all(device[name] < wall[name] / 2 for name in wall)
    times = wall if waits_for_host else device
    return "torch" if times["torch"] * MARGIN < times["triton"] else "triton"


def measure(operation: str, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """One entry: `rows` and `width` are classes, of which the middle is measured."""
    tensors = _tensors(operation, 4**rows, 4**width, dtype, device)
    sent, leaves = torch.randn_like(tensors[0]), [t.requires_grad_() for t in tensors]
    works = {name: partial(_step, norm, leaves, sent) for name, norm in NORMS[operation].items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for turn in range(1 + _TURNS):
        for name, work in works.items():
            both = _microseconds(work, device)
            if turn > 0:
                taken[name].append(both)
    wall, on_device = ({name: round(median(t[i] for t in times), 1) for name, times in taken.items()} for i in (0, 1))
    return {
        "operation": operation,
        "bytes": dtype.itemsize,
        "rows": rows,
        "width": width,
        "fastest": decide(wall, on_device),
        "wall_us": wall,
        "device_us": on_device,
    }


def entries(
    operations: Sequence[str], device: torch.device, rows: Sequence[int] = ROWS, widths: Sequence[int] = WIDTHS
) -> Iterator[list[dict[str, Any]]]:
    """Groups of entries, of one operation, dtype and width each."""
    for dtype in DTYPES:
        for operation in operations:
            for width in widths:
                # Ours is the kernel, whatever an older table says. (A request would take the host time to pass on.)
                with patch.object(fastest, "_of_device", lambda _: frozenset()):
                    agrees = exact(operation, 4**width, dtype, device)
                    group = [measure(operation, r, width, dtype, device) for r in rows if 4 ** (r + width) <= MOST]
                for entry in group:
                    entry["exact"] = agrees
                    entry["fastest"] = entry["fastest"] if agrees else "triton"
                yield group


def summary(group: Sequence[dict[str, Any]]) -> str:
    lines = []
    for entry in group:
        name = f"{entry['operation']} {8 * entry['bytes']} bits, {4 ** entry['rows']} x {4 ** entry['width']}"
        clocks = [
            f"{clock} {entry[f'{clock}_us']['triton']:8.1f} {entry[f'{clock}_us']['torch']:8.1f}"
            for clock in ("wall", "device")
        ]
        lines.append(f"{name:<40}{'   '.join(clocks)}   {entry['fastest']}{'' if entry['exact'] else ' (not exact)'}")
    return "\n".join(lines)
