"""Two GPUs against one: a vocabulary over both, a Llama-shaped model under FSDP2, and TRL's DPOTrainer on one.

Every number of two ranks is held against one rank's, and beside full logits. gloo on the CPU checks the harness.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from . import fsdp, trainers_fsdp
from .cases import CASES, Case, Inputs, make_inputs
from .implementations import NAIVE
from .measure import train
from .ours import OURS
from .profiling import trace
from .ranks import RANKS, counted, distance, largest, peak, slowest

SPREAD = ("ce-8192/llama3-8b", "dpo-4x2048/llama3-8b", "jsd-4096/llama3.2-1b")
ONE_GPU = "one-gpu.pt"
SPREAD_TINY = ("ce-96/tiny", "dpo-2x24/tiny", "jsd-96/tiny")


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
            row["peak_bytes"] = peak(step, device)
            inputs.clear_gradients()
            # On every rank at once, each on its own device: they do not meet.
            row["ms"] = slowest(step, device, repeats, together=True)
        except torch.cuda.OutOfMemoryError:
            row["status"] = "out of memory"
        inputs.clear_gradients()

    mesh = init_device_mesh(device.type, (RANKS,), mesh_dim_names=("tp",))
    spread = replace(inputs, weight=_leaf(inputs.weight, mesh))
    if inputs.reference_weight is not None:
        spread.reference_weight = _leaf(inputs.reference_weight, mesh)
    inputs.weight, inputs.reference_weight = inputs.weight.new_empty(0), None  # the whole ones are not needed any more
    step = _step(case, spread, ours)
    with counted() as calls:
        found = float(step())
    own = spread.weight.grad.to_local()
    begin = rank * -(-case.head.vocab // RANKS)
    errors = {
        "loss": abs(found - loss) / abs(loss),
        "hidden": distance(spread.hidden.grad, expected[0]),
        "weight": distance(own, expected[1][begin : begin + len(own)]),
    }
    del expected, own
    spread.clear_gradients()
    row = {"implementation": f"ours, vocabulary over {RANKS} GPUs", "ranks": RANKS, "peak_bytes": peak(step, device)}
    spread.clear_gradients()
    row |= {"ms": slowest(step, device, repeats, together=True), "errors": largest(errors)}
    rows.append(row)
    one = next(row for row in rows if row["implementation"] == "ours, 1 GPU")
    row["efficiency"] = one["ms"] / (RANKS * row["ms"])
    biggest = calls.pop("largest")
    profile: dict[str, Any] = {
        "collectives": dict(calls),
        "largest_elements": biggest,
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
    row["no_weight_in_the_loop"] = biggest <= max(spread.hidden.numel(), 16 * RANKS * case.rows * case.length)
    # bf16 twice rounded: each gradient within 1 % of the other's.
    row["status"] = "ok" if max(errors.values()) < 1e-2 and row["no_weight_in_the_loop"] else "differs"
    return {"case": case.name, "title": case.title, "rows": rows, "profile": profile}


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
        reports.append(fsdp.run(fsdp.Shape() if kind == "cuda" else fsdp.TINY_SHAPE, device, repeats))
        _write(rank, reports, out)
        one_gpu = torch.load(Path(out).with_name(ONE_GPU))
        reports.append(trainers_fsdp.sharded(one_gpu, device, repeats))
        _write(rank, reports, out)
    finally:
        dist.destroy_process_group()


def _write(rank: int, reports: list[dict[str, Any]], out: str) -> None:
    if rank == 0:
        Path(out).write_text(json.dumps(reports))
        print(summary(reports[-1]), flush=True)


def _work_alone(_rank: int, kind: str, repeats: int, out: str) -> None:
    torch.save(trainers_fsdp.alone(torch.device(kind), repeats), out)


def _run_alone(device: torch.device, repeats: int, out: Path) -> None:
    """In a process of its own, which no launcher and no second GPU is seen from."""
    name = "CUDA_VISIBLE_DEVICES"
    first = os.environ.get(name, "0").partition(",")[0]
    try:
        with mock.patch.dict(os.environ, {name: first}):
            mp.spawn(_work_alone, args=(device.type, repeats, str(out)), nprocs=1, join=True)
    except Exception as error:
        why = f"failed on one GPU: {str(error).strip().splitlines()[-1]}"
        report = trainers_fsdp.empty(device)
        report["rows"].append({"implementation": "fuse_trainer", "status": why})
        torch.save(report, out)


def run(device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """The reports of every case; those that were done, where the ranks ended early."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port, out = free.getsockname()[1], Path(folder, "reports.json")
        free.close()
        _run_alone(device, repeats, out.with_name(ONE_GPU))
        try:
            mp.spawn(_work, args=(port, device.type, repeats, str(out)), nprocs=RANKS, join=True)
        except Exception as error:
            reports = json.loads(out.read_text()) if out.exists() else []
            failure = {"implementation": "ranks", "status": f"failed: {str(error).strip().splitlines()[-1]}"}
            return [*reports, {"case": "ended early", "title": "ended early", "rows": [failure]}]
        return json.loads(out.read_text())


def failed(report: dict[str, Any]) -> list[str]:
    """What did not pass, others' heads apart."""
    return [
        f"{report['case']}: {row['implementation']}: {row['status']}"
        for row in report["rows"]
        if row.get("status", "ok") != "ok" and not row["implementation"].startswith(("full logits", "TRL"))
    ]


def summary(report: dict[str, Any]) -> str:
    lines = [f"\n{report['title']}"]
    for row in report["rows"]:
        cells = [f"{row['implementation']:<34}", f"{row['ms']:9.2f} ms" if "ms" in row else f"{'-':>12}"]
        if "tokens_per_second" in row:
            cells.append(f"{row['tokens_per_second']:10,.0f} tokens/s")
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


COLUMNS = ("implementation", "ranks", "ms", "tokens/s", "efficiency", "peak MiB a rank", "errors")
HEADER = (f"| {' | '.join(COLUMNS)} |", "|---" + "|--:" * (len(COLUMNS) - 2) + "|---|")
LEGEND = """\
bf16, forward and backward, on two GPUs of one host (NCCL). Times are medians of {repeats} repeats, the slowest rank's;
*efficiency* is the time of one GPU for all the work over twice that of two. *peak* is what a step adds to what was
allocated before it, its gradients included; errors are against one GPU.

Through TRL the trainer's own `training_step` is timed, without the optimiser's, models sharded by accelerate from
arguments of TRL's; *peak* is all memory allocated, both models' share included; errors are against fp32 and whole
logits on one GPU, and pass within three times what TRL's heads have there in bf16.
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
            f"{row['tokens_per_second']:,.0f}" if "tokens_per_second" in row else "-",
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
