"""A step of TRL's DPOTrainer under FSDP2, through accelerate, against the same trainer on one GPU.

Both take the same pairs: one GPU all of them, each rank its share. Losses and gradients are held against those of fp32
on one GPU, with whole logits. Each row has a trainer of its own, made fused before accelerate shards its models.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from . import trainers
from .measure import free
from .ranks import RANKS, distance
from .trainer_states import FUSED, SHIPPED, WHOLE, Implementation
from .trainers import LLAMA_1B, TINY, Batch, Case

IMPLEMENTATIONS: tuple[Implementation, ...] = (WHOLE, SHIPPED, FUSED)
ALL_PAIRS, ALL_PAIRS_TINY = Case("dpo", 8, 2048), Case("dpo", 4, 24)
ROWS_COMPARED = 16  # every such row of the head's gradient
BAND = 2.0**-8  # what one rounding to bf16 leaves of a number


def _settings(device: torch.device) -> tuple[Case, dict[str, Any], torch.dtype]:
    return (ALL_PAIRS, LLAMA_1B, torch.bfloat16) if device.type == "cuda" else (ALL_PAIRS_TINY, TINY, torch.float32)


def fsdp2() -> dict[str, Any]:
    """Arguments of TRL's configs that let accelerate shard the models."""
    sharding = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "reshard_after_forward": True}
    return {"fsdp": True, "fsdp_config": sharding}


def share(batch: Batch, part: int, parts: int) -> Batch:
    """Some pairs of a batch that holds the chosen ones first, then the rejected ones."""

    def of(value: Tensor) -> Tensor:
        return torch.cat([half.chunk(parts)[part] for half in value.chunk(2)])

    return {name: of(value) for name, value in batch.items()}


@contextmanager
def launched() -> Iterator[None]:
    """The environment of a launcher's process, of whose group torch.distributed knows already.

    accelerate shards on accelerators only: on a CPU, to check the harness, its state is told that it may.
    """
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    there = mock.patch.dict(os.environ, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    own: Any = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **more: Any) -> None:
        own(self, *args, fsdp_plugin=fsdp_plugin, **more)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    with there, mock.patch.object(AcceleratorState, "__init__", init):
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


@contextmanager
def built(
    case: Case, state: Implementation, dtype: torch.dtype, device: torch.device, **arguments: Any
) -> Iterator[tuple[Any, Any]]:
    """A trainer in one of its states, and its model as accelerate prepares it: `(trainer, model)`."""
    free(device)
    _, config, made = _settings(device)
    models = [model.to(dtype) for model in trainers.make_models(config, 2, device, made)]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trainers.make_trainer(case, models, folder, device, **arguments)
        trainers.by_hand(trainer)
        with state[1](trainer):
            # As train() does: FSDP2 is prepared with its optimiser.
            trainer.create_optimizer()
            model, _optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
            trainer.model = model.train()
            yield trainer, model
        trainer.accelerator.free_memory()


def head_gradient(model: Any) -> Tensor:
    """Some rows of it, whole."""
    gradient: Any = model.get_output_embeddings().weight.grad
    return (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient)[::ROWS_COMPARED].float().cpu()


def _row(
    label: str, state: Implementation, case: Case, batch: Batch, device: torch.device, repeats: int, **arguments: Any
) -> tuple[dict[str, Any], Tensor | None]:
    """One implementation measured in this process, and its head's gradient."""
    row: dict[str, Any] = {"implementation": label, "status": "ok"}
    gradient = None
    dtype = _settings(device)[2]
    try:
        with built(case, state, dtype, device, **arguments) as (trainer, model):
            row |= trainers.measure_steps(trainer, model, batch, device, repeats)
            gradient = head_gradient(model)
    except torch.OutOfMemoryError:
        row["status"] = "out of memory"
    except Exception as error:  # an engine that a head cannot run on is a result, in its own words
        row["status"] = f"failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return row, gradient


def _truth(case: Case, batch: Batch, device: torch.device) -> dict[str, Any]:
    """Loss and gradient of fp32 with whole logits, one pair at a time."""
    pairs = case.rows // 2
    with built(case, WHOLE, torch.float32, device, bf16=False) as (trainer, model):
        trainers.by_hand(trainer, steps=pairs)
        losses = [trainer.training_step(model, share(batch, part, pairs), None) for part in range(pairs)]
        found = {"loss": float(torch.stack(losses).sum()), "grad_norm": trainers.gradient_norm(model)}
        found["head"] = head_gradient(model)
    return found


def _errors(row: dict[str, Any], gradient: Tensor, true: dict[str, Any]) -> dict[str, float]:
    errors = {name: abs(row[name] - true[name]) / abs(true[name]) for name in ("loss", "grad_norm")}
    return errors | {"head's gradient": distance(gradient, true["head"])}


def empty(device: torch.device) -> dict[str, Any]:
    """The report before there is anything in it."""
    case, config, _ = _settings(device)
    title = f"TRL's DPOTrainer, Llama of {config['num_hidden_layers']} layers, H {config['hidden_size']}, V " \
            f"{config['vocab_size']}: {case.rows // 2} pairs of {case.length} tokens in all, FSDP2"  # fmt: skip
    return {"case": "fsdp2-trl-dpo", "title": title, "rows": []}


def alone(device: torch.device, repeats: int) -> dict[str, Any]:
    """The report of one GPU with every pair, as `sharded` goes on with it; tensors and all.

    For a process that sees one GPU: of several, transformers would make replicas.
    """
    report = empty(device)
    case, config, _ = _settings(device)
    trainers.prepare_imports()
    try:
        import trl  # noqa: F401
    except Exception as error:  # an import fails in more ways than ImportError
        report["rows"].append({"implementation": "fuse_trainer", "status": f"missing: {error}"})
        return report
    batch = trainers.make_batch(case, config["vocab_size"], device)
    report["truth"] = _truth(case, batch, device)
    for state in IMPLEMENTATIONS:
        row, gradient = _row(f"{state[0]}, 1 GPU", state, case, batch, device, repeats)
        row["ranks"] = 1
        if gradient is not None:
            row["errors"] = _errors(row, gradient, report["truth"])
            row["tokens_per_second"] = 1000 * case.rows * case.length / row["ms"]
        report["rows"].append(row)
    # What TRL's own two heads leave of fp32 on one GPU is what bf16 costs: three times that is the bound for all.
    known = [row["errors"] for row in report["rows"][:2] if "errors" in row]
    for name in known[0] if known else ():
        report.setdefault("error_bound", {})[name] = max(3 * max(errors[name] for errors in known), BAND)
    _judge(report)
    return report


def _judge(report: dict[str, Any]) -> None:
    for row in report["rows"]:
        bound = report.get("error_bound", {})
        if row["status"] == "ok" and any(error > bound.get(name, 0) for name, error in row["errors"].items()):
            row["status"] = "differs"


def sharded(report: dict[str, Any], device: torch.device, repeats: int) -> dict[str, Any]:
    """`alone`'s report with the ranks' rows, without its tensors."""
    true = report.pop("truth", None)
    if true is None:
        return report
    case, config, _ = _settings(device)
    trainers.prepare_imports()
    whole = trainers.make_batch(case, config["vocab_size"], device)
    own = Case(case.trainer, case.rows // RANKS, case.length)
    batch = share(whole, dist.get_rank(), RANKS)
    with launched():
        for state in IMPLEMENTATIONS:
            found, gradient = _row(f"{state[0]}, FSDP2", state, own, batch, device, repeats, **fsdp2())
            said: list[Any] = [None] * RANKS
            dist.all_gather_object(said, found)
            row = next((each for each in said if each["status"] != "ok"), found)
            row["ranks"] = RANKS
            if row["status"] == "ok" and gradient is not None:
                row["loss"] = sum(each["loss"] for each in said) / RANKS
                row["ms"] = max(each["ms"] for each in said)
                row["peak_bytes"] = None if row["peak_bytes"] is None else max(each["peak_bytes"] for each in said)
                row["errors"] = _errors(row, gradient, true)
                row["tokens_per_second"] = 1000 * case.rows * case.length / row["ms"]
                one = next(r for r in report["rows"] if r["implementation"] == f"{state[0]}, 1 GPU")
                if "ms" in one:
                    row["efficiency"] = one["ms"] / (RANKS * row["ms"])
            report["rows"].append(row)
    _judge(report)
    return report
