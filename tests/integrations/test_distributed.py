"""The fused head under data parallelism: gradients are synchronised, sharded heads are gathered."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

pytest.importorskip("transformers")

from liger_losses.integrations.transformers import fuse_head

from .tiny import tiny_model

WORLD = 2


def _batch(rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(3, 200, (2, 10), generator=generator)
    labels = ids.clone()
    labels[:, : 3 + rank] = -100
    return {"input_ids": ids, "labels": labels}


def _full(parameter: Any) -> torch.Tensor:
    gradient = parameter.grad
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def _model(kind: str) -> Any:
    model = tiny_model()
    if "adapter" not in kind:
        return model
    import peft

    torch.manual_seed(3)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    return peft.get_peft_model(model, lora)


def _distillation(student: Any, batch: dict[str, torch.Tensor], *asked: bool) -> torch.Tensor:
    """The forward KL from a teacher, of the logits that both models give or leave unmultiplied."""
    teacher = tiny_model(seed=1)
    fuse_head(teacher)
    keywords = {"linear_logits": True} if asked else {}
    with torch.no_grad():
        of_teacher = teacher(input_ids=batch["input_ids"], **keywords)
    logits = [of_teacher, student(input_ids=batch["input_ids"], **keywords)]
    target, source = (one if asked else one.logits for one in logits)
    kl = torch.nn.functional.kl_div(
        source.log_softmax(-1), target.log_softmax(-1), reduction="none", log_target=True
    )  # fmt: skip
    return kl.sum()


def _batches(kind: str) -> list[int]:
    """The batch of each rank: ranks of one tensor-parallel group have the same."""
    return [0] * WORLD if "tensor parallel" in kind else list(range(WORLD))


def _own_gradients(kind: str) -> dict[str, torch.Tensor]:
    """Mean over the ranks' batches of the gradients of the model's own loss, in one process."""
    model = _model(kind)
    losses = [
        _distillation(model, _batch(batch)) if "linear logits" in kind else model(**_batch(batch)).loss
        for batch in _batches(kind)
    ]
    sum(losses).div(WORLD).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


def _wrap(model: Any, kind: str) -> Any:
    if kind.startswith("ddp"):
        # As transformers' Trainer asks for it: parameters that the output does not show are taken for unused.
        return torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters="linear logits" in kind)
    if "tensor parallel" in kind:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        mesh, head = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",)), model.get_output_embeddings()
        adapted = "adapter" in kind  # as PEFT places an adapter on such a head: A on every rank, B in rows
        for part in (head.base_layer, head.lora_B["default"]) if adapted else (head,):
            parallelize_module(part, mesh, ColwiseParallel())
        return model
    from torch.distributed.fsdp import fully_shard

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for layer in base.model.layers:
        fully_shard(layer)
    if "head in its own group" in kind:
        fully_shard(base.lm_head)
    return fully_shard(model)


def _step(rank: int, kind: str, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    try:
        model = _model(kind)
        fuse_head(model, outputs=("log_probs", "mean_logits"), mean_logits_everywhere=True)
        batch = _batch(_batches(kind)[rank])
        own = model(**batch).logits[:, :-1].mean(-1)
        wrapped = _wrap(model, kind)
        if "linear logits" in kind:
            _distillation(wrapped, batch, True).backward()
        else:
            answer = wrapped(**batch, fused_lm_head=True)
            torch.testing.assert_close(answer.mean_logits, own.detach(), rtol=1e-4, atol=1e-5)
            answer.loss.backward()
        expected = _own_gradients(kind)
        for name, parameter in model.named_parameters():
            if name not in expected:
                continue
            seen = _full(parameter)
            torch.testing.assert_close(seen, expected[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "ddp",
        "fsdp2",
        "fsdp2, head in its own group",
        "ddp, linear logits",
        "ddp, adapter on the head",
        "ddp, adapter on the head, linear logits",
        "fsdp2, adapter on the head",
        "fsdp2, adapter on the head, head in its own group",
        "tensor parallel head",
        "tensor parallel head, adapter on the head",
    ],
)
def test_gradients_are_the_mean_over_ranks(kind: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_step, args=(kind, port), nprocs=WORLD, join=True)
