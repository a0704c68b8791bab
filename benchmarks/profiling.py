"""Where one step of ours spends its time, and whether anything in it waits for the device."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from .cases import Case, make_inputs
from .implementations import Implementation
from .measure import milliseconds, train

SPAN = "profiled step"
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def _merged(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reach = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total


def trace(work: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Waits, device-to-host copies, launches and kernel times of one call of ``work``."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        torch.cuda.synchronize(device)
        with record_function(SPAN):
            work()
        torch.cuda.synchronize(device)
    events = list(profiler.events())
    span = next(event for event in events if event.name == SPAN and event.device_type.name == "CPU").time_range
    host: Counter[str] = Counter()
    kernels: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        begin, end = event.time_range.start, event.time_range.end
        if event.device_type.name == "CPU":
            host[event.name] += span.start <= begin <= span.end
        elif event.name != SPAN and begin >= span.start:
            kernels[event.name].append((begin, end))
    everything = [interval for intervals in kernels.values() for interval in intervals]
    elapsed = max(end for _, end in everything) - min(begin for begin, _ in everything)
    by_name = [
        {"name": name, "calls": len(intervals), "ms": sum(end - begin for begin, end in intervals) / 1000}
        for name, intervals in kernels.items()
    ]
    return {
        "waits": {name: host[name] for name in WAITS},
        "device_to_host_copies": sum(len(intervals) for name, intervals in kernels.items() if "DtoH" in name),
        "launches": sum(count for name, count in host.items() if "LaunchKernel" in name),
        "busy_share": _merged(everything) / elapsed,
        "kernels": sorted(by_name, key=lambda kernel: -kernel["ms"]),
    }


def forbidden_wait(work: Callable[[], object]) -> str | None:
    """The message of the first synchronisation in ``work``, or None when there is none."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return str(error).partition("\n")[0]
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return None


def run(case: Case, implementation: Implementation, device: torch.device, repeats: int = 8) -> dict[str, Any]:
    """Profile ``implementation`` on ``case``, with the target on the device and on the CPU."""
    found: dict[str, Any] = {"case": case.name, "implementation": implementation.name}
    inputs = make_inputs(case, device)
    for place, target in (("device", inputs.target), ("cpu", inputs.target.cpu())):
        placed = replace(inputs, loaded=target)
        step = implementation.build(case, placed, None)

        def work(step: Any = step, placed: Any = placed) -> None:
            train(step, placed)

        for _ in range(3):
            work()
        device_ms, host_ms = [], []
        for _ in range(repeats):
            device_ms.append(milliseconds(work, device))
            torch.cuda.synchronize(device)
            started = time.perf_counter()
            work()
            host_ms.append(1000 * (time.perf_counter() - started))
        found[place] = {"ms": median(device_ms), "host_ms": median(host_ms), **trace(work, device)}
    found["cpu"]["forbidden_wait"] = forbidden_wait(work)
    return found


def waits(found: dict[str, Any]) -> bool:
    """Whether a step with the target on the CPU, which promises not to, waits for the device."""
    step = found["cpu"]
    return any((*step["waits"].values(), step["device_to_host_copies"], step["forbidden_wait"]))


def summary(found: dict[str, Any], top: int = 15) -> str:
    lines = [f"{found['case']}, {found['implementation']}"]
    for kernel in found["device"]["kernels"][:top]:
        lines.append(f"  {kernel['ms']:9.3f} ms {kernel['calls']:5d} x  {kernel['name'][:100]}")
    for place in ("device", "cpu"):
        step = found[place]
        lines.append(
            f"target on the {place}: {step['ms']:.2f} ms, host done after {step['host_ms']:.2f} ms, "
            f"device busy {100 * step['busy_share']:.1f} %, {step['launches']} launches, "
            f"{step['device_to_host_copies']} copies to the host, waits {step['waits']}"
        )
    return "\n".join([*lines, f"first forbidden wait with the target on the CPU: {found['cpu']['forbidden_wait']}"])
