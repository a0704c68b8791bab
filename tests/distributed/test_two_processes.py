"""Two gloo processes on the CPU: one step equals that of one process, loss and every gradient."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch.multiprocessing as mp

from . import active, agreement, engines, refusals, through_trl, vocabulary  # noqa: F401  # each adds its checks
from .harness import CHECKS, WORLD, run


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank says of each check: nothing, or a traceback. They are spawned once for all checks."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(run, args=(port, str(folder)), nprocs=WORLD, join=True)
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("name", CHECKS)
def test_two_processes(found: list[dict[str, str]], name: str) -> None:
    for rank, said in enumerate(found):
        assert said[name] == "", f"rank {rank}:\n{said[name]}"
