"""Set-up shared by all tests: no network, one thread a worker, and no luck with uninitialised memory."""

from __future__ import annotations

import os

# These are read when torch, tokenizers and huggingface_hub are imported: set first. A test never needs the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.deterministic
from torch import Tensor


def _poison(on: bool) -> None:
    # torch fills what `empty` returns (NaN, or the largest integer) only while deterministic algorithms are asked for;
    # warn_only keeps operations that have none from raising.
    torch.use_deterministic_algorithms(on, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = on


def pytest_configure(config: pytest.Config) -> None:
    # Also in force for fixtures of a wider scope than one test.
    _poison(True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Reading memory before writing it shows up as NaN; `@pytest.mark.unpoisoned` opts out."""
    _poison(request.node.get_closest_marker("unpoisoned") is None)
    yield
    _poison(True)


@pytest.fixture
def counted_flops(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """FLOPs of the engine's matrix products since the last call of it. (torch's counter does not see `out=` products.)"""
    from liger_losses.chunked import active, deferred, hidden_gradient, recompute, walk, weight_gradient

    total = [0.0]

    def counted(a: Tensor, b: Tensor, **options: Any) -> Tensor:
        total[0] += 2.0 * a.shape[0] * a.shape[1] * b.shape[1]
        return original(a, b, **options)

    original = walk.matmul
    for module in (walk, deferred, recompute, active, hidden_gradient, weight_gradient):
        monkeypatch.setattr(module, "matmul", counted)

    def flops() -> float:
        found, total[0] = total[0], 0.0
        return found

    return flops
