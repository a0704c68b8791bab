"""FSDP2 over tensor parallelism on a mesh of four: a head sharded along both dimensions."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from liger_losses import linear_logprobs
from liger_losses.distributed import FusedHead

V, H, N = 77, 8, 10


def _step(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    batch = mesh["dp"].get_local_rank()
    for called in (True, False):
        torch.manual_seed(0)
        linear, whole = (nn.Linear(H, V, dtype=torch.float64) for _ in range(2))
        whole.load_state_dict(linear.state_dict())
        hidden, target = torch.randn(2, N, H, dtype=torch.float64), torch.randint(0, V, (2, N))
        (linear_logprobs(hidden, whole.weight, target, whole.bias).square().sum() / 2).backward()
        parallelize_module(linear, mesh["tp"], ColwiseParallel())
        head = FusedHead(linear)
        fully_shard(head, mesh=mesh["dp"])
        x, t = hidden[batch], target[batch]
        logprobs = head(x, t) if called else linear_logprobs(x, head.weight, t, head.bias)
        logprobs.square().sum().backward()
        for parameter, expected in ((head.weight, whole.weight), (head.bias, whole.bias)):
            assert parameter.grad.placements == parameter.placements
            torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_head_sharded_along_both_dimensions() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_step, args=(port,), nprocs=4, join=True)
