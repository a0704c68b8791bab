"""What the checks of two processes share; `test_two_processes` spawns them once and reports each check."""

from __future__ import annotations

import collections
import datetime
import json
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.deterministic
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

WORLD = 2
V, H, ROWS, T = 77, 16, 4, 12  # 77 columns on two ranks: 39 and 38
CHECKS: dict[str, Callable[[], None]] = {}
DOUBLE = torch.float64


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def run(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that is not written holds NaN
    torch.utils.deterministic.fill_uninitialized_memory = True
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, timeout=datetime.timedelta(seconds=40))
    from . import active, agreement, engines, refusals, through_trl, vocabulary  # noqa: F401  # each adds its checks

    found = {}
    try:
        for name, function in CHECKS.items():
            torch.manual_seed(0)
            try:
                function()
                found[name] = ""
            except Exception:
                found[name] = traceback.format_exc()
            Path(folder, f"{rank}.json").write_text(json.dumps(found))
            dist.barrier()
    finally:
        dist.destroy_process_group()


# --- what they share -------------------------------------------------------------------------------------------------


def mesh_of(name: str = "tp") -> Any:
    return init_device_mesh("cpu", (WORLD,), mesh_dim_names=(name,))


def tokens(dtype: torch.dtype = DOUBLE) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias and targets, the same on every rank."""
    hidden = torch.randn(ROWS, T, H, dtype=DOUBLE).to(dtype)
    weight, bias = torch.randn(V, H, dtype=DOUBLE).to(dtype), torch.randn(V, dtype=DOUBLE).to(dtype)
    target = torch.randint(0, V, (ROWS, T))
    target[:, :3] = -100
    target[1] = -100
    return hidden, weight, bias, target


def whole(gradient: Any) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def close(seen: Any, expected: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(whole(seen), expected, rtol=tolerance, atol=tolerance)


@contextmanager
def collectives() -> Iterator[collections.Counter[str]]:
    """Calls of torch.distributed's functions, by name, and the largest tensor that one was handed."""
    seen: collections.Counter[str] = collections.Counter()
    originals = {}

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen["all_gather" if name.startswith("all_gather") else name] += 1
            seen["largest"] = max(seen["largest"], *(a.numel() for a in args if isinstance(a, Tensor)))
            return function(*args, **kwargs)

        return call

    names = (
        "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor",
        "reduce_scatter_single", "broadcast",
    )  # fmt: skip
    for name in filter(vars(dist).__contains__, names):
        originals[name] = getattr(dist, name)
        setattr(dist, name, counted(name, originals[name]))
    try:
        yield seen
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


def both_ways(
    call: Callable[[Tensor, Tensor, Tensor], dict[str, Tensor] | tuple[Tensor, Any] | Tensor],
    dtype: torch.dtype = DOUBLE,
    tolerance: float = 1e-10,
) -> None:
    """`call(hidden, weight, bias)` with the whole head and with this rank's columns: values and gathered gradients."""
    hidden, weight, bias, _target = tokens(dtype)
    mesh = mesh_of()
    results = []
    for spread in (False, True):
        leaves = [hidden.clone(), weight.clone(), bias.clone()]
        if spread:
            leaves[1:] = [distribute_tensor(leaf, mesh, [Shard(0)]) for leaf in leaves[1:]]
        for leaf in leaves:
            leaf.requires_grad_()
        answer = call(*leaves)
        if isinstance(answer, tuple):
            answer = {"loss": answer[0]}
        if isinstance(answer, Tensor):
            answer = {"loss": answer}
        some = [value for value in answer.values() if value.requires_grad]
        sum((value * torch.linspace(0.5, 2, value.numel()).view(value.shape)).sum() for value in some).backward()
        if spread:
            assert [leaf.grad.placements for leaf in leaves[1:]] == [(Shard(0),), (Shard(0),)]
        results.append(({k: v.detach() for k, v in answer.items()}, [leaf.grad for leaf in leaves]))
    (values, gradients), (seen, seen_gradients) = results
    for name in values:
        close(seen[name], values[name], tolerance)
    for ours, theirs in zip(seen_gradients, gradients, strict=True):
        size = float(theirs.abs().amax())
        torch.testing.assert_close(whole(ours), theirs, rtol=10 * tolerance, atol=tolerance * max(size, 1))
