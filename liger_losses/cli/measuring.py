"""Time and peak memory of a function, said plainly how."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

IN_A_ROW = 3  # steps between two events
AHEAD = 50_000_000  # device cycles, some 30 ms


def milliseconds(work: Callable[[], object], device: torch.device, *, host_ahead: bool = False) -> float:
    """Time of ``work``: by device events around several in a row on CUDA, by the host's clock elsewhere.

    One more goes before them: as in training, the host prepares a step while the device finishes the last.

    ``host_ahead``: the device is kept busy until all of them are queued, as it is in the midst of a model's step. What
    is read is then the device's time alone, also where the host would need longer.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return 1000 * (time.perf_counter() - start)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    if host_ahead:
        torch.cuda._sleep(AHEAD)
    else:
        work()
    begin.record()
    for _ in range(IN_A_ROW):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / IN_A_ROW


def median_ms(work: Callable[[], object], device: torch.device | str, repeats: int = 5) -> float:
    """Median `milliseconds` of `repeats` calls, after one more."""
    device = torch.device(device)
    return statistics.median([milliseconds(work, device) for _ in range(repeats + 1)][1:])


def peak_bytes(function: Callable[[], object], device: torch.device | str) -> int:
    """Most bytes that `function` holds at once beyond what was held before.

    CUDA: `max_memory_allocated`. CPU: the running sum of the allocations and frees of torch's CPU allocator as the
    profiler records them, which sees every tensor made, inside custom ops too, and nothing outside torch.
    """
    device = torch.device(device)
    function()  # first call: lazy initialisation is not the function's memory
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read at the profiler's first start; it reports each on stderr
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    held = peak = 0
    events = profiler.profiler.kineto_results.events()
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def full_logprobs(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Log-probabilities of the targets from logits in full, softmax in fp32: what a model without a fused loss does.

    `[*, H]`, `[V, H]`, `[*]` with -100 where not scored (0 there) to `[*]`.
    """
    logits = (hidden @ weight.T).flatten(0, -2).to(torch.promote_types(hidden.dtype, torch.float32))
    nll = torch.nn.functional.cross_entropy(logits, target.flatten(), ignore_index=-100, reduction="none")
    return -nll.view(target.shape)
