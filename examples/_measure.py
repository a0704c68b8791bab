"""Time and peak memory of a function, said plainly how."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read at the profiler's first start; it reports each start on stderr
from torch.profiler import ProfilerActivity, profile


def peak_bytes(function: Callable[[], object], device: str) -> int:
    """Most bytes that `function` holds at once beyond what was held before.

    CUDA: `max_memory_allocated`. CPU: the running sum of the allocations and frees of torch's CPU allocator as the
    profiler records them, which sees every tensor made, inside custom ops too, and nothing outside torch.
    """
    function()  # first call: lazy initialisation is not the function's memory
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    held = peak = 0
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def median_ms(function: Callable[[], object], device: str, repeats: int = 5) -> float:
    """Median wall time of `repeats` calls, after one more."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])
