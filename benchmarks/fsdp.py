"""A step of DPO on a Llama-shaped model under FSDP2: fused, with full logits, and fused on one GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .cases import IGNORE_INDEX
from .measure import free
from .ranks import RANKS, peak, slowest


@dataclass(frozen=True)
class Shape:
    """A Llama-shaped model, and one rank's batch of pairs."""

    hidden: int = 2048
    intermediate: int = 8192
    layers: int = 16
    heads: int = 32
    vocab: int = 128256
    pairs: int = 2
    length: int = 2048


TINY_SHAPE = Shape(hidden=32, intermediate=48, layers=2, heads=4, vocab=301, pairs=1, length=12)


def _llama(shape: Shape, device: torch.device) -> Any:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=max(1, shape.heads // 4), vocab_size=shape.vocab,
        max_position_embeddings=shape.length, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    return model.train()


def _pairs(shape: Shape, rank: int, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(3, shape.vocab, (2 * shape.pairs, shape.length), generator=generator)
    labels = ids.clone()
    labels[:, : shape.length // 4] = IGNORE_INDEX
    return {"input_ids": ids.to(device), "labels": labels.to(device)}


def _dpo(logps: Tensor, reference: Tensor) -> Tensor:
    chosen, rejected = (logps - reference).chunk(2)
    return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()


def _fused_logps(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch, fused_lm_head=True).log_probs.sum(-1)


def _full_logps(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].float()
    labels = batch["labels"][:, 1:]
    found = -torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), labels, reduction="none", ignore_index=IGNORE_INDEX
    )
    return found.sum(-1)


def run(shape: Shape, device: torch.device, repeats: int) -> dict[str, Any]:
    """A step of DPO, log-probabilities of the reference known, under `fully_shard`: fused and with full logits."""
    title = (f"DPO, Llama of {shape.layers} layers, H {shape.hidden}, V {shape.vocab}: {shape.pairs} pairs of "
             f"{shape.length} tokens a rank, FSDP2")  # fmt: skip
    report: dict[str, Any] = {"case": "fsdp2-dpo", "title": title, "rows": []}
    try:
        import transformers  # noqa: F401
    except Exception as error:  # an import fails in more ways than ImportError
        report["rows"].append({"implementation": "ours, FSDP2", "status": f"missing: {error}"})
        return report
    from torch.distributed.fsdp import fully_shard

    from liger_losses.integrations.transformers import fuse_head

    rank = dist.get_rank()
    reference = torch.linspace(-1, 1, 2 * shape.pairs, device=device)
    found: dict[str, dict[str, float]] = {}

    def one(label: str, logps: Callable[[Any, dict[str, Tensor]], Tensor], shards: bool) -> None:
        row: dict[str, Any] = {"implementation": label, "ranks": RANKS if shards else 1}
        report["rows"].append(row)
        model = _llama(shape, device)
        if logps is _fused_logps:
            fuse_head(model, verify=False)
        batches = [_pairs(shape, r, device) for r in range(RANKS)]
        if shards:
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
            batches = [batches[rank]]
        with torch.no_grad():
            start = [logps(model, batch) for batch in batches]

        def step() -> float:
            # One process takes both ranks' batches in turn, as accumulation would.
            total = torch.zeros((), device=device)
            for batch, own in zip(batches, start, strict=True):
                loss = _dpo(logps(model, batch), own - reference) / len(batches)
                loss.backward()
                total += loss.detach()
            if shards:
                dist.all_reduce(total, op=dist.ReduceOp.AVG if device.type == "cuda" else dist.ReduceOp.SUM)
                total /= 1 if device.type == "cuda" else RANKS
            return float(total)

        try:
            loss = step()
            squares = torch.zeros((), device=device)
            for parameter in model.parameters():
                gradient = parameter.grad
                squares += (gradient.to_local() if hasattr(gradient, "to_local") else gradient).float().square().sum()
            if shards:
                dist.all_reduce(squares)
            found[label] = {"loss": loss, "gradient_norm": float(squares.sqrt())}
            row |= found[label]
            model.zero_grad()
            row["peak_bytes"] = peak(step, device)
            model.zero_grad()
            row["ms"] = slowest(lambda: (step(), model.zero_grad()), device, repeats, together=True)
            row["status"] = "ok"
        except torch.cuda.OutOfMemoryError:
            row["status"] = "out of memory"

    for label, logps, shards in (
        ("full logits, FSDP2", _full_logps, True),
        ("ours, FSDP2", _fused_logps, True),
        ("ours, 1 GPU, both batches", _fused_logps, False),
    ):
        one(label, logps, shards)
        free(device)
    ours, alone = (
        next(r for r in report["rows"] if r["implementation"] == n)
        for n in ("ours, FSDP2", "ours, 1 GPU, both batches")
    )
    if ours["status"] == alone["status"] == "ok":
        ours["efficiency"] = alone["ms"] / (RANKS * ours["ms"])
        ours["errors"] = {name: abs(ours[name] - alone[name]) / abs(alone[name]) for name in ("loss", "gradient_norm")}
        if max(ours["errors"].values()) > 2e-2:
            ours["status"] = "differs"
    return report
