"""`liger-losses bench`: ours beside full logits (`--quick`), or, in a clone, the suite with the peers."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import liger_losses
from liger_losses import Divergence, fused_linear_distillation, fused_linear_loss, linear_logprobs, losses
from liger_losses.chunked.planner import STRATEGIES
from liger_losses.testing.oracle import check_close

from .doctor import default_device, environment
from .extras import MIB, CommandError, require
from .measuring import full_logprobs, median_ms, peak_bytes
from .options import make_folder
from .workloads import WORKLOADS, Workload

LOSSES = ("ce", "dpo", "simpo", "jsd")
PROMPT = 0.25


@dataclass(frozen=True)
class Size:
    """`rows` of `length` tokens, a head `[vocab, hidden]`, 16-bit on an accelerator."""

    rows: int
    length: int
    hidden: int
    vocab: int
    dtype: torch.dtype


def size_on(device: torch.device) -> Size:
    """Llama 3.2 1B's head on an accelerator, a moment's work on a CPU."""
    if device.type == "cpu":
        return Size(4, 192, 64, 8192, torch.float32)
    return Size(4, 1024, 2048, 128256, torch.bfloat16)


@dataclass
class Inputs:
    """Of one step: the policy's or student's, and the reference's or teacher's."""

    hidden: Tensor  # [R, T, H]
    weight: Tensor  # [V, H]
    other_hidden: Tensor
    other_weight: Tensor
    target: Tensor  # [R, T], -100 on the prompt

    @property
    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.hidden, self.weight

    def to(self, dtype: torch.dtype) -> Inputs:
        policy = [leaf.detach().to(dtype).requires_grad_() for leaf in self.leaves]
        return Inputs(policy[0], policy[1], self.other_hidden.to(dtype), self.other_weight.to(dtype), self.target)


def make_inputs(size: Size, device: torch.device) -> Inputs:
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    hidden, weight = normal(size.rows, size.length, size.hidden), normal(size.vocab, size.hidden) * size.hidden**-0.5
    other = hidden + 0.1 * normal(*hidden.shape), weight + 0.1 * size.hidden**-0.5 * normal(*weight.shape)
    target = torch.randint(size.vocab, (size.rows, size.length), generator=generator, device=device)
    target[:, : int(PROMPT * size.length)] = -100
    return Inputs(hidden, weight, *other, target).to(size.dtype)


def _with_reference(i: Inputs, logprobs: Callable[..., Tensor], workload: Workload) -> dict[str, Tensor]:
    if not workload.reference:
        return {}
    with torch.no_grad():
        return {"ref_logprobs": logprobs(i.other_hidden, i.other_weight, i.target)}


def full(workload: Workload, i: Inputs) -> Tensor:
    """The loss of whole logits: the same loss object on their statistics."""
    if workload.divergence:
        student, teacher = i.hidden @ i.weight.T, i.other_hidden @ i.other_weight.T
        each = losses.divergence(student, teacher, kind=workload.divergence, mask=i.target >= 0)
        return each.sum() / (i.target >= 0).sum()
    loss = workload.build()
    statistics = dict.fromkeys(loss.statistics, torch.zeros(i.target.shape, device=i.target.device))
    # The others are for metrics only, and here would cost a pass of their own.
    statistics["logprob"] = full_logprobs(i.hidden, i.weight, i.target)
    inputs, mask = _with_reference(i, full_logprobs, workload), i.target >= 0
    return loss(statistics, mask, inputs, loss.totals(mask, inputs))[0]


def fused(workload: Workload, i: Inputs, strategy: str) -> Tensor:
    """The loss without the logits."""
    if workload.divergence:
        return fused_linear_distillation(
            i.hidden,
            i.weight,
            i.target,
            teacher_hidden=i.other_hidden,
            teacher_weight=i.other_weight,
            divergence=Divergence(kind=workload.divergence),
            strategy=strategy,
        )[0]
    inputs = _with_reference(i, linear_logprobs, workload)
    return fused_linear_loss(workload.build(), i.hidden, i.weight, i.target, inputs=inputs, strategy=strategy)[0]


def _step(value: Tensor, i: Inputs) -> list[Tensor]:
    return [value, *torch.autograd.grad(value, i.leaves)]


def truth(workload: Workload, i: Inputs) -> tuple[list[Tensor], list[Tensor]]:
    """Loss, dX, dW of full logits: exact (fp64; fp32 on an accelerator, where fp64 is slow), and as they are."""
    exact = i.to(torch.float64 if i.hidden.device.type == "cpu" else torch.float32)
    return _step(full(workload, exact), exact), _step(full(workload, i), i)


def measure(
    step: Callable[[Inputs], Tensor], size: Size, i: Inputs, known: tuple[list[Tensor], list[Tensor]], repeats: int
) -> dict[str, Any]:
    """Gate first, then memory and time: a loss or a gradient that is off is not timed."""

    def train() -> list[Tensor]:
        return _step(step(i), i)

    try:
        for what, got, want, naive in zip(("loss", "dX", "dW"), train(), *known, strict=True):
            # The loss is a mean of terms of order one.
            scale = 1.0 if what == "loss" else 0.0
            check_close(got, want, naive, size.dtype, terms=size.vocab, scale=scale, what=what)
    except AssertionError as error:
        return {"failure": str(error)}
    returned = sum(leaf.nbytes for leaf in i.leaves)
    extra = max(0, peak_bytes(train, i.hidden.device) - returned)
    return {"extra_bytes": extra, "ms": median_ms(train, i.hidden.device, repeats)}


def ways_of(workload: Workload) -> dict[str, Callable[[Inputs], Tensor]]:
    """Full logits, `"auto"`, and each strategy that the loss allows with a trainable head."""
    names = ["auto", *(name for name in STRATEGIES if name != "frozen")]

    def ours(strategy: str) -> Callable[[Inputs], Tensor]:
        return lambda i: fused(workload, i, strategy)

    return {"full logits": lambda i: full(workload, i), **{f"ours, {name}": ours(name) for name in names}}


def _suite(options: argparse.Namespace) -> int:
    """The whole suite stands beside the package in a clone, with its peers, and is no part of the wheel."""
    root = Path(liger_losses.__file__).resolve().parent.parent
    if not (root / "benchmarks" / "__main__.py").is_file():
        raise CommandError(
            "bench: the suite with the peers is `python -m benchmarks` in a clone of the repository; "
            "here there is `liger-losses bench --quick`"
        )
    command = [sys.executable, "-m", "benchmarks", "run", "--repeats", str(options.repeats)]
    command += ["--out", str(Path(options.out).resolve())]
    if options.device:
        command += ["--device", str(default_device(options.device))]
    for part in options.case or ():
        command += ["--case", part]
    return subprocess.run(command, cwd=root, check=False).returncode


def run(options: argparse.Namespace) -> int:
    if not options.quick:
        return _suite(options)
    if options.case:
        raise CommandError(
            f"--case: got {options.case[0]!r} with --quick, which has four of its own; leave out one of them"
        )
    device = default_device(options.device)
    progress_bars, table_of = require("rich.progress"), require("rich.table").Table
    console = require("rich.console").Console()
    require("matplotlib")
    size, folder = size_on(device), Path(options.out)
    make_folder("--out", folder)
    count = sum(len(ways_of(WORKLOADS[name])) for name in LOSSES)
    results: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in LOSSES}
    columns = (progress_bars.TextColumn("{task.description:28s}"), progress_bars.BarColumn(),
               progress_bars.MofNCompleteColumn(), progress_bars.TimeElapsedColumn())  # fmt: skip
    inputs = make_inputs(size, device)
    with progress_bars.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=count)
        for name in LOSSES:
            workload = WORKLOADS[name]
            known = truth(workload, inputs)
            for way, step in ways_of(workload).items():
                bar.update(task, description=f"{name}: {way}")
                results[name][way] = measure(step, size, inputs, known, options.repeats)
                bar.advance(task)
    for name, rows in results.items():
        table = table_of(title=name, title_justify="left", box=None)
        table.add_column("way", min_width=18)
        for column in ("ms", "MiB", "time", "memory"):
            table.add_column(column, justify="right")
        for way, cells in _cells(rows).items():
            table.add_row(way, *cells, style="green" if way != "full logits" else None)
        console.print(table)
    path = write_report(folder, size, device, results)
    console.print(
        f"MiB: peak of forward and backward beyond inputs and gradients. written: {path}",
        highlight=False,
        soft_wrap=True,
    )
    return 1 if any("failure" in row for rows in results.values() for row in rows.values()) else 0


def _cells(rows: dict[str, dict[str, Any]]) -> dict[str, tuple[str, str, str, str]]:
    base, found = rows["full logits"], {}
    for way, row in rows.items():
        if "failure" in row:
            found[way] = ("-", "-", "-", row["failure"])
            continue
        memory = row["extra_bytes"] / base["extra_bytes"] if base.get("extra_bytes") else float("nan")
        time = row["ms"] / base["ms"] if base.get("ms") else float("nan")
        found[way] = (f"{row['ms']:.1f}", f"{row['extra_bytes'] / MIB:,.1f}", f"{time:.2f} x", f"{memory:.2f} x")
    return found


def write_report(folder: Path, size: Size, device: torch.device, results: dict[str, dict[str, dict[str, Any]]]) -> Path:
    """`report.md`, its charts and `results.json` in `folder`; returns the report."""
    from .figures import time_and_memory

    folder.mkdir(parents=True, exist_ok=True)
    where = environment()
    record = {"environment": where, "device": str(device), "size": {**asdict(size), "dtype": str(size.dtype)}}
    (folder / "results.json").write_text(json.dumps({**record, "results": results}, indent=1) + "\n")
    shape = (
        f"{size.rows} x {size.length} tokens, {int(PROMPT * 100)} % prompt, H {size.hidden:,}, V {size.vocab:,}, "
        f"{str(size.dtype).removeprefix('torch.')}"
    )
    name_of = torch.cuda.get_device_name(device) if device.type == "cuda" else where["system"]
    versions = ", ".join(f"{name} {version}" for name, version in where["packages"].items() if version)
    lines = ["# liger-losses bench --quick", "", f"{name_of}; liger-losses {where['liger-losses']}, {versions}.", ""]
    lines += [f"{shape}. Medians; MiB: peak of forward and backward beyond inputs and gradients. Random data."]
    for name, rows in results.items():
        measured = {way: row for way, row in rows.items() if "failure" not in row}
        lines += ["", f"## {name}", "", "| | ms | MiB | time | memory |", "|---|--:|--:|--:|--:|"]
        lines += [f"| {way} | {' | '.join(cells)} |" for way, cells in _cells(rows).items()]
        if not measured:
            continue
        time_and_memory(
            folder / f"{name}.png",
            f"{name}, {shape}, {name_of}",
            {way: row["ms"] for way, row in measured.items()},
            {way: row["extra_bytes"] / MIB for way, row in measured.items()},
            [way for way in measured if way != "full logits"],
        )
        lines += ["", f"![{name}: time and memory]({name}.png)"]
    path = folder / "report.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
