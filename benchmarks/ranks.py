"""What benchmarks over several ranks share: times, peaks, distances, and collectives counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .measure import free, milliseconds

RANKS = 2
COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor",
    "reduce_scatter_single", "broadcast",
)  # fmt: skip


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Calls of torch.distributed's collectives by name, and the elements of the largest tensor handed to one."""
    seen: Counter[str] = Counter()
    originals = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen[name] += 1
            seen["largest"] = max(seen["largest"], *(a.numel() for a in args if isinstance(a, Tensor)))
            return function(*args, **kwargs)

        return call

    for name, function in originals.items():
        setattr(dist, name, counting(name, function))
    try:
        yield seen
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


def peak(work: Callable[[], object], device: torch.device) -> int | None:
    """Bytes above what was allocated before; None off CUDA."""
    if device.type != "cuda":
        work()
        return None
    free(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def slowest(work: Callable[[], object], device: torch.device, repeats: int, *, together: bool) -> float:
    """Median milliseconds; of ranks that work together, the slowest's."""
    taken = []
    for turn in range(repeats + 1):
        if together:
            dist.barrier()
        each = milliseconds(work, device)
        taken += [each] if turn else []
    said: list[Any] = [median(taken)]
    if together:
        said = [None] * dist.get_world_size()
        dist.all_gather_object(said, median(taken))
    return max(said)


def distance(seen: Tensor, expected: Tensor) -> float:
    """Relative distance in the Frobenius norm, some rows at a time."""
    difference = size = 0.0
    for a, b in zip(seen.flatten(0, -2).split(4096), expected.flatten(0, -2).split(4096), strict=True):
        difference += (a.float() - b.float()).square().sum().item()
        size += b.float().square().sum().item()
    return (difference / size) ** 0.5


def largest(errors: dict[str, float]) -> dict[str, float]:
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, errors)
    return {name: max(each[name] for each in said) for name in errors}
