"""A head that DeepSpeed ZeRO-3 has partitioned: gathered by its module's hooks, empty otherwise."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

pytest.importorskip("transformers")

from liger_losses import LigerFusedLinearDPOLoss
from liger_losses.distributed import FusedHead
from liger_losses.integrations.transformers import fuse_head

from .test_distributed import WORLD, _batch, _own_gradients
from .tiny import tiny_model


class _Partition:
    """Stands in for ZeRO-3 on one layer: its parameters are empty but within its forward and its backward.

    The engine's contract, by module hooks: gather before forward, free after; the same around the backward of every
    tensor that forward returned.
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        self.whole = {p: p.data for p in layer.parameters()}
        self.log: list[str] = []
        for parameter, data in self.whole.items():
            parameter.ds_id, parameter.ds_shape = 1, data.shape  # type: ignore[attr-defined]
        self.free()
        layer.register_forward_pre_hook(lambda *_: self.gather("forward"))
        layer.register_forward_hook(self.after)

    def gather(self, why: str) -> None:
        self.log.append(why)
        for parameter, data in self.whole.items():
            parameter.data = data

    def free(self) -> None:
        for parameter in self.whole:
            parameter.data = torch.empty(0)

    def after(self, _module: Any, _inputs: Any, outputs: tuple[torch.Tensor, ...]) -> None:
        self.free()
        for output in outputs:
            if output.requires_grad:
                output.register_hook(lambda gradient: self.gather("backward"))


@pytest.mark.parametrize("strategy", ["cached", "recompute"])
def test_the_modules_hooks_gather_the_head(strategy: str) -> None:
    batch = _batch(0)
    model, own = tiny_model(), tiny_model()
    own(**batch).loss.backward()
    partition = _Partition(model.lm_head)
    report = fuse_head(model, strategy=strategy)
    assert report.verdict == "not checked (partitioned weight)"
    assert (report.vocabulary, report.hidden) == (200, 32)
    partition.log.clear()
    loss = model(**batch, fused_lm_head=True).loss
    assert model.lm_head.weight.numel() == 0
    assert partition.log == ["forward"]
    loss.backward()
    assert partition.log == ["forward", "backward"]
    for (name, seen), expected in zip(model.named_parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(seen.grad, expected.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert "forward" not in vars(model.lm_head)


def test_an_adapter_on_a_partitioned_head_is_refused() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    model.get_base_model().lm_head.base_layer.weight.ds_id = 1
    with pytest.raises(ValueError, match="partitioned by DeepSpeed ZeRO-3 and has an adapter"):
        fuse_head(model)


class _Custom(torch.nn.Sequential):
    def forward(self, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self[1](self[0](inputs), target)[0]
        return loss


def _custom(strategy: str) -> _Custom:
    """A model of a custom loop, whose head is a module that answers with a loss."""
    torch.manual_seed(2)
    loss = LigerFusedLinearDPOLoss(beta=0.2, use_ref_model=False, strategy=strategy)
    return _Custom(torch.nn.Linear(6, 16), FusedHead(torch.nn.Linear(16, 60), loss))


def _pairs(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(4, 7, 6, generator=generator), torch.randint(0, 60, (4, 7), generator=generator)


def _step(rank: int, port: int) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD),
        DS_ACCELERATOR="cpu",
    )  # fmt: skip
    torch.set_num_threads(1)
    import deepspeed
    import deepspeed.comm.torch
    from deepspeed.utils import safe_get_full_grad

    deepspeed.comm.torch.build_shm_op = lambda: None  # else compiled for minutes; gloo does without
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)

    def engine_of(model: torch.nn.Module) -> Any:
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
        return deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": zero,
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
            },
        )[0]

    def check(model: torch.nn.Module, head: Any, engine: Any, loss: torch.Tensor, expected: dict[str, Any]) -> None:
        assert head.weight.numel() == 0  # freed after the forward
        engine.backward(loss)
        parameters = dict(model.named_parameters())
        for name, gradient in expected.items():
            seen = safe_get_full_grad(parameters[name])
            torch.testing.assert_close(seen, gradient, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")

    for strategy in ("cached", "recompute"):
        model = tiny_model()
        fuse_head(model, strategy=strategy)
        engine = engine_of(model)
        loss = engine(**_batch(rank), fused_lm_head=True).loss
        check(model, model.lm_head, engine, loss, _own_gradients("zero3"))
    for strategy in ("immediate", "recompute"):
        custom, same = _custom(strategy), _custom(strategy)
        (sum(same(*_pairs(each)) for each in range(WORLD)) / WORLD).backward()
        engine = engine_of(custom)
        loss = engine(*_pairs(rank))
        check(custom, custom[1], engine, loss, {name: p.grad for name, p in same.named_parameters()})
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_gradients_under_deepspeed() -> None:
    pytest.importorskip("deepspeed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_step, args=(port,), nprocs=WORLD, join=True)
