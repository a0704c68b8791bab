"""Two GPUs against one: a vocabulary over both, and a Llama-shaped model under FSDP2.

Every number of two ranks is held against one rank's, and beside full logits. gloo on the CPU checks the harness.
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from .cases import CASES, IGNORE_INDEX, Case, Inputs, make_inputs
from .implementations import NAIVE
from .measure import milliseconds, train
from .ours import OURS
from .profiling import trace

RANKS = 2
SPREAD = ("ce-8192/llama3-8b", "dpo-4x2048/llama3-8b", "jsd-4096/llama3.2-1b")
SPREAD_TINY = ("ce-96/tiny", "dpo-2x24/tiny", "jsd-96/tiny")
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast")


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


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Calls of torch.distributed's collectives by name, and the elements of the largest tensor handed to one."""
    seen: Counter[str] = Counter()
    originals = {name: getattr(dist, name) for name in COLLECTIVES}

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


def _peak(work: Callable[[], object], device: torch.device) -> int | None:
    """Bytes above what was allocated before; None off CUDA."""
    if device.type != "cuda":
        work()
        return None
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _time(work: Callable[[], object], device: torch.device, repeats: int, *, together: bool) -> float:
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


def _far(seen: Tensor, expected: Tensor) -> float:
    """Relative distance in the Frobenius norm, some rows at a time."""
    difference = size = 0.0
    for a, b in zip(seen.flatten(0, -2).split(4096), expected.flatten(0, -2).split(4096), strict=True):
        difference += (a.float() - b.float()).square().sum().item()
        size += b.float().square().sum().item()
    return (difference / size) ** 0.5


def _leaf(weight: Tensor, mesh: Any) -> Any:
    """A whole weight as this rank's rows of it, a DTensor."""
    from torch.distributed.tensor import DTensor, Shard

    step = -(-len(weight) // mesh.size())
    rank = mesh.get_local_rank()
    own = weight.detach()[rank * step : (rank + 1) * step].clone()
    spread = DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=weight.shape, stride=weight.stride())
    return spread.requires_grad_(weight.requires_grad)


def _step(case: Case, inputs: Inputs, name: str) -> Callable[[], Tensor]:
    build = next(one for one in (NAIVE, *OURS) if one.name == name).build
    step = build(case, inputs, None)
    return lambda: train(step, inputs)


def spread_vocabulary(case: Case, device: torch.device, repeats: int) -> dict[str, Any]:
    """One case on one rank, ours and full logits, then ours with half of the vocabulary on each of two."""
    ours, rank = "ours (fp32 logits)", dist.get_rank()
    inputs = make_inputs(case, device)
    rows: list[dict[str, Any]] = []
    alone = _step(case, inputs, ours)
    loss = float(alone())
    expected = (inputs.hidden.grad, inputs.weight.grad)
    inputs.hidden.grad = inputs.weight.grad = None
    for name, label in ((NAIVE.name, "full logits, 1 GPU"), (ours, "ours, 1 GPU")):
        row: dict[str, Any] = {"implementation": label, "ranks": 1}
        rows.append(row)
        try:
            step = _step(case, inputs, name)
            row["peak_bytes"] = _peak(step, device)
            inputs.clear_gradients()
            # On every rank at once, each on its own device: they do not meet.
            row["ms"] = _time(step, device, repeats, together=True)
        except torch.cuda.OutOfMemoryError:
            row["status"] = "out of memory"
        inputs.clear_gradients()

    mesh = init_device_mesh(device.type, (RANKS,), mesh_dim_names=("tp",))
    spread = replace(inputs, weight=_leaf(inputs.weight, mesh))
    if inputs.reference_weight is not None:
        spread.reference_weight = _leaf(inputs.reference_weight, mesh)
    inputs.weight, inputs.reference_weight = inputs.weight.detach()[:0], None  # the whole ones are not needed any more
    step = _step(case, spread, ours)
    with counted() as calls:
        found = float(step())
    own = spread.weight.grad.to_local()
    begin = rank * -(-case.head.vocab // RANKS)
    errors = {
        "loss": abs(found - loss) / abs(loss),
        "hidden": _far(spread.hidden.grad, expected[0]),
        "weight": _far(own, expected[1][begin : begin + len(own)]),
    }
    del expected, own
    spread.clear_gradients()
    row = {"implementation": f"ours, vocabulary over {RANKS} GPUs", "ranks": RANKS, "peak_bytes": _peak(step, device)}
    spread.clear_gradients()
    row |= {"ms": _time(step, device, repeats, together=True), "errors": _largest(errors)}
    rows.append(row)
    one = next(row for row in rows if row["implementation"] == "ours, 1 GPU")
    row["efficiency"] = one["ms"] / (RANKS * row["ms"])
    largest = calls.pop("largest")
    profile: dict[str, Any] = {
        "collectives": dict(calls),
        "largest_elements": largest,
        "weight_elements_here": spread.weight.to_local().numel(),
        "hidden_elements": spread.hidden.numel(),
    }
    if device.type == "cuda":
        kernels = trace(step, device)
        profile |= {
            "nccl_kernels": [k for k in kernels["kernels"] if "nccl" in k["name"].lower()],
            "busy_share": kernels["busy_share"],
        }
    # A reduction of the hidden gradient, gathers of a few numbers a token: nothing of the weight.
    row["no_weight_in_the_loop"] = largest <= max(spread.hidden.numel(), 16 * RANKS * case.rows * case.length)
    # bf16 twice rounded: each gradient within 1 % of the other's.
    row["status"] = "ok" if max(errors.values()) < 1e-2 and row["no_weight_in_the_loop"] else "differs"
    return {"case": case.name, "title": case.title, "rows": rows, "profile": profile}


def _largest(errors: dict[str, float]) -> dict[str, float]:
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, errors)
    return {name: max(each[name] for each in said) for name in errors}


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


def fsdp2(shape: Shape, device: torch.device, repeats: int) -> dict[str, Any]:
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
            row["peak_bytes"] = _peak(step, device)
            model.zero_grad()
            row["ms"] = _time(lambda: (step(), model.zero_grad()), device, repeats, together=True)
            row["status"] = "ok"
        except torch.cuda.OutOfMemoryError:
            row["status"] = "out of memory"

    for label, logps, shards in (
        ("full logits, FSDP2", _full_logps, True),
        ("ours, FSDP2", _fused_logps, True),
        ("ours, 1 GPU, both batches", _fused_logps, False),
    ):
        one(label, logps, shards)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
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


def _work(rank: int, port: int, kind: str, repeats: int, out: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NCCL_NVLS_ENABLE="0")
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    more: dict[str, Any] = {}
    if kind == "cuda":
        torch.cuda.set_device(device)
        more["device_id"] = device
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=120),
        **more,
    )
    try:
        reports = []
        for name in SPREAD if kind == "cuda" else SPREAD_TINY:
            reports.append(spread_vocabulary(CASES[name], device, repeats))
            _write(rank, reports, out)
        reports.append(fsdp2(Shape() if kind == "cuda" else TINY_SHAPE, device, repeats))
        _write(rank, reports, out)
    finally:
        dist.destroy_process_group()


def _write(rank: int, reports: list[dict[str, Any]], out: str) -> None:
    if rank == 0:
        Path(out).write_text(json.dumps(reports))
        print(summary(reports[-1]), flush=True)


def run(device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """The reports of every case; those that were done, where the ranks ended early."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port, out = free.getsockname()[1], Path(folder, "reports.json")
        free.close()
        try:
            mp.spawn(_work, args=(port, device.type, repeats, str(out)), nprocs=RANKS, join=True)
        except Exception as error:
            reports = json.loads(out.read_text()) if out.exists() else []
            failure = {"implementation": "ranks", "status": f"failed: {str(error).strip().splitlines()[-1]}"}
            return [*reports, {"case": "ended early", "title": "ended early", "rows": [failure]}]
        return json.loads(out.read_text())


def failed(report: dict[str, Any]) -> list[str]:
    """What did not pass, full logits apart."""
    return [
        f"{report['case']}: {row['implementation']}: {row['status']}"
        for row in report["rows"]
        if row.get("status", "ok") != "ok" and not row["implementation"].startswith("full logits")
    ]


def summary(report: dict[str, Any]) -> str:
    lines = [f"\n{report['title']}"]
    for row in report["rows"]:
        cells = [f"{row['implementation']:<34}", f"{row['ms']:9.2f} ms" if "ms" in row else f"{'-':>12}"]
        if row.get("peak_bytes") is not None:
            cells.append(f"{row['peak_bytes'] / 2**20:10,.0f} MiB peak a rank")
        if "efficiency" in row:
            cells.append(f"efficiency {row['efficiency']:.3f}")
        cells += [f"{name} {error:.1e}" for name, error in row.get("errors", {}).items()]
        lines.append("  ".join([*cells, row.get("status", "ok")]))
    if "profile" in report:
        p = report["profile"]
        calls = ", ".join(f"{count} {name}" for name, count in p["collectives"].items())
        lines.append(
            f"collectives of a step: {calls}; the largest of {p['largest_elements']:,} elements (hidden states "
            f"{p['hidden_elements']:,}, this rank's weight {p['weight_elements_here']:,})"
        )
        for kernel in p.get("nccl_kernels", []):
            lines.append(f"  {kernel['ms']:9.3f} ms {kernel['calls']:5d} x  {kernel['name'][:90]}")
    return "\n".join(lines)


COLUMNS = ("implementation", "ranks", "ms", "efficiency", "peak MiB a rank", "errors against one GPU")
HEADER = (f"| {' | '.join(COLUMNS)} |", "|---" + "|--:" * (len(COLUMNS) - 2) + "|---|")
LEGEND = """\
bf16, forward and backward, on two GPUs of one host (NCCL). Times are medians of {repeats} repeats, the slowest rank's;
*efficiency* is the time of one GPU for all the work over twice that of two. *peak* is what a step adds to what was
allocated before it, its gradients included.
"""


def table(report: dict[str, Any]) -> list[str]:
    """One case as a Markdown table."""
    lines = [*HEADER]
    for row in report["rows"]:
        status = row.get("status", "ok")
        peak = row.get("peak_bytes")
        cells = [
            row["implementation"] + ("" if status == "ok" else f": {status}".replace("|", "/")),
            str(row.get("ranks", "-")),
            f"{row['ms']:.2f}" if "ms" in row else "-",
            f"{row['efficiency']:.3f}" if "efficiency" in row else "-",
            f"{peak / 2**20:,.0f}" if peak is not None else "-",
            ", ".join(f"{name} {error:.1e}" for name, error in row.get("errors", {}).items()) or "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if "profile" in report:
        p = report["profile"]
        calls = ", ".join(f"{count} {name}" for name, count in p["collectives"].items())
        lines += ["", f"Collectives of a step: {calls}; the largest of {p['largest_elements']:,} elements, where this "
                  f"rank's weight has {p['weight_elements_here']:,}."]  # fmt: skip
    return lines
