"""`liger-losses plan`: what the loss head of a model will take on a GPU, before anything is run."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .estimate import MOST_EXAMPLES, MOST_TOKENS, Estimate, Step, estimates, largest
from .extras import MIB, CommandError, parse_bytes, require
from .gpus import Gpu, gpus
from .models import Head, find_head, known_models
from .workloads import WORKLOADS


def run(options: argparse.Namespace) -> int:
    if options.list_models:
        for name, head in known_models().items():
            print(f"{name:40s} H {head.hidden_size:6,d}  V {head.vocab_size:8,d}{'  tied' * head.tied}")
        return 0
    if options.model is None:
        raise CommandError(
            "plan: which model? A config.json, its folder, or an id; --list-models names those known offline"
        )
    head, gpu, step = _read(options)
    found = estimates(step, gpu)
    memory = None if options.memory is None else _bytes("--memory", options.memory)
    fits = {} if memory is None else {one.way: largest(step, one.way, memory) for one in found}
    if options.chart is not None:
        _chart(Path(options.chart), head, gpu, step, found, options)
    if options.json:
        print(json.dumps(_record(head, gpu, step, found, fits, memory, options), indent=1))
    else:
        _print(head, gpu, step, found, fits, options)
    return 0


def _bytes(option: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise CommandError(f"{option}: {error}") from error


def _read(options: argparse.Namespace) -> tuple[Head, Gpu, Step]:
    for name, most in (("batch", MOST_EXAMPLES), ("length", MOST_TOKENS)):
        if not 1 <= getattr(options, name) <= most:
            raise CommandError(f"--{name}: got {getattr(options, name)}, expected 1 to {most:,}")
    if not 0 <= options.prompt < 1:
        raise CommandError(f"--prompt: got {options.prompt}, expected a share in [0, 1)")
    workload = WORKLOADS[options.loss]
    if (options.teacher is not None) != (workload.divergence is not None):
        needs = [name for name, one in WORKLOADS.items() if one.divergence]
        raise CommandError(
            f"--teacher: goes with the losses {' and '.join(needs)}, which need one; the loss is {options.loss}"
        )
    head = find_head(options.model)
    teacher = None if options.teacher is None else find_head(options.teacher)
    if teacher is not None and teacher.vocab_size != head.vocab_size:
        raise CommandError(
            f"--teacher: its vocabulary has {teacher.vocab_size:,} tokens, the student's {head.vocab_size:,}; the plan "
            "is for equal ones"
        )
    step = Step(
        workload,
        head,
        examples=options.batch,
        length=options.length,
        prompt=options.prompt,
        trainable_head=not options.frozen,
        teacher_hidden_size=None if teacher is None else teacher.hidden_size,
        logits_dtype=options.logits_dtype,
        memory_budget=None if options.memory_budget is None else _bytes("--memory-budget", options.memory_budget),
    )
    return head, gpus()[options.gpu], step


def _record(
    head: Head,
    gpu: Gpu,
    step: Step,
    found: list[Estimate],
    fits: dict[str, tuple[int, int]],
    memory: int | None,
    options: argparse.Namespace,
) -> dict[str, Any]:
    def row(one: Estimate) -> dict[str, Any]:
        more = dict(zip(("largest_batch", "largest_length"), fits[one.way], strict=True)) if fits else {}
        return {**asdict(one), **more}

    return {
        "model": asdict(head),
        "gpu": asdict(gpu),
        "loss": options.loss,
        "batch": options.batch,
        "length": options.length,
        "tokens": step.positions,
        "scored": step.scored,
        "trainable_head": step.trainable_head,
        "memory_budget": step.memory_budget,
        "memory": memory,
        "ways": [row(one) for one in found],
    }


def _title(head: Head, gpu: Gpu, step: Step, options: argparse.Namespace) -> str:
    what = f"{options.loss}, {options.batch} x {step.workload.rows * step.length:,} tokens, {step.scored:,} scored"
    return f"{head.name}: {what}, on {gpu.name}"


def _print(
    head: Head,
    gpu: Gpu,
    step: Step,
    found: list[Estimate],
    fits: dict[str, tuple[int, int]],
    options: argparse.Namespace,
) -> None:
    console = require("rich.console").Console()
    console.print(_title(head, gpu, step, options), style="bold", highlight=False)
    table = require("rich.table").Table(box=None)
    table.add_column("way", no_wrap=True)
    names = ["products", "ms", "MiB", "least MiB"]
    if fits:
        names += ["largest batch", "largest length"]
    for name in names:
        table.add_column(name, justify="right")
    for one in found:
        memory = "over budget" if one.workspace is None else f"{one.workspace / MIB:,.0f}"
        cells = [one.way, f"{one.products:.2f}", f"{one.milliseconds:,.1f}", memory]
        cells.append("" if one.least is None else f"{one.least / MIB:,.0f}")
        cells += [f"{number:,}" for number in fits.get(one.way, ())]
        table.add_row(*cells, style="bold green" if one.chosen else None)
    console.print(table)
    softcap = "" if head.softcap is None else f", softcap {head.softcap:g}"
    notes = [
        f"head [{head.vocab_size:,}, {head.hidden_size:,}]{', tied' * head.tied}{softcap}, "
        f"{'trainable' if step.trainable_head else 'frozen'}, 16-bit; logits {step.logits_dtype}",
        f"products: of 2 N H V over the {step.scored:,} scored tokens. MiB: peak of forward and backward beyond "
        "inputs and returned gradients.",
        "least MiB: the smallest memory_budget. Bold: what strategy='auto' takes.",
        f"ms: products at {gpu.tflops:g} TFLOP/s, copies at {gpu.tb_s:g} TB/s, "
        + ("both measured." if gpu.measured else "both from the data sheet, not measured."),
    ]
    if fits:
        notes.append(
            f"largest: {options.memory} for hidden states, their gradient and the workspace; the head is the model's."
        )
    console.print("\n".join(notes), style="dim", highlight=False)


def _chart(path: Path, head: Head, gpu: Gpu, step: Step, found: list[Estimate], options: argparse.Namespace) -> None:
    from .figures import time_and_memory

    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise CommandError(f"--chart: got {path.name}, expected a .png, .svg or .pdf file")
    drawn = {
        f"ours, {one.way}" if one.least is not None else one.way: one for one in found if one.workspace is not None
    }
    floor = (2 + step.trainable_head + step.second_products) * step.product_ms(gpu, step.scored)
    time_and_memory(
        path,
        f"{_title(head, gpu, step, options)}: estimated",
        {name: one.milliseconds for name, one in drawn.items()},
        {name: (one.workspace or 0) / MIB for name, one in drawn.items()},
        [name for name, one in drawn.items() if one.least is not None],
        floor=floor,
    )
