"""`liger-losses plan`: what the loss head of a model will take on a GPU, before anything is run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .estimate import Estimate, Step, estimates, largest, with_more_memory
from .extras import MIB, CommandError, require
from .gpus import MEASURED, Gpu, gpus
from .models import Head, find_head, known_models
from .options import make_folder, memory
from .workloads import WORKLOADS

CHARTS = (".png", ".svg", ".pdf")


def run(options: argparse.Namespace) -> int:
    if options.list_models or options.list_gpus:
        lists = [_list_models] * options.list_models + [_list_gpus] * options.list_gpus
        print("\n\n".join("\n".join(lines()) for lines in lists))
        return 0
    if not options.model:
        raise CommandError(
            "plan: which model? A config.json, its folder, or an id; --list-models names those known offline"
        )
    chart = None if options.chart is None else _chart_path(options.chart)
    head, gpu, step = _read(options)
    room = None if options.memory is None else memory("--memory", options.memory, gpu.gib, gpu.name)
    found = estimates(step, gpu)
    fits = {} if room is None else {one.way: largest(step, one.way, room) for one in found}
    if options.json:
        print(json.dumps(_record(head, gpu, step, found, fits, room, options), indent=1))
    else:
        _print(_title(head, gpu, step, options), found, fits, _notes(head, gpu, step, found, fits, options))
    if chart is not None:
        new = make_folder("--chart", chart.parent)
        try:
            _chart(chart, head, gpu, step, found, options)
        except OSError as error:
            raise CommandError(f"--chart: cannot write {str(chart)!r}: {error.strerror}") from error
        # Beside --json, standard output is the JSON alone.
        print(f"chart: {chart}{', in a new folder' * new}", file=sys.stderr if options.json else sys.stdout)
    why = _nothing_fits(found, fits, gpu, options)
    if why is not None:
        sys.stdout.flush()
        print(f"liger-losses: nothing fits: {why}", file=sys.stderr)
    return 0 if why is None else 1


def _nothing_fits(
    found: list[Estimate], fits: dict[str, tuple[int, int]], gpu: Gpu, options: argparse.Namespace
) -> str | None:
    """What is too small, and for what, where no strategy of ours can do with it."""
    ours = [one for one in found if one.least is not None]
    least = min(one.least or 0 for one in ours)
    needs = f"the least of a strategy is {-(-least // MIB):,}MiB"
    if all(one.workspace is None for one in ours):
        return f"--memory-budget {options.memory_budget}: {needs}"
    if fits and not any(fits[one.way] != (0, 0) for one in ours):
        return f"--memory {options.memory}: not one example at this length, nor one token at this batch"
    if least > gpu.gib << 30:
        return f"{gpu.name} has {gpu.gib}GiB: {needs}"
    return None


def _list_models() -> list[str]:
    known = known_models()
    wide = max(map(len, known))
    lines = [f"{'model':{wide}s} {'H':>6s} {'V':>7s}"]
    for name, head in known.items():
        lines.append(f"{name:{wide}s} {head.hidden_size:6,d} {head.vocab_size:7,d}{' tied' * bool(head.tied)}")
    return lines


def _list_gpus() -> list[str]:
    known = gpus()
    lines = [
        f"{key:10s} {gpu.gib:4d} GiB {gpu.tflops:7,.0f} TFLOP/s {gpu.tb_s:5.2f} TB/s  {gpu.source}"
        for key, gpu in known.items()
    ]
    reached = known[MEASURED]
    return [
        *lines,
        f"data sheet: not measured, but {reached.tflops_share:.0%} of its products",
        f"and {reached.tb_s_share:.0%} of its bandwidth, as an {reached.name} reaches",
    ]


def _chart_path(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in CHARTS or path.is_dir():
        seen = "a folder, " if path.is_dir() else ""
        raise CommandError(f"--chart: got {text!r}, {seen}expected a file that ends in {', '.join(CHARTS)}")
    return path


def _read(options: argparse.Namespace) -> tuple[Head, Gpu, Step]:
    workload, gpu = WORKLOADS[options.loss], gpus()[options.gpu]
    budget = options.memory_budget
    if budget is not None:
        budget = memory("--memory-budget", budget, gpu.gib, gpu.name)
    if (options.teacher is not None) != (workload.divergence is not None):
        needs = [name for name, one in WORKLOADS.items() if one.divergence]
        wrong = f"goes with the losses {' and '.join(needs)} alone; the loss is {options.loss}"
        if options.teacher is None:
            wrong = f"is missing; --loss {options.loss} distils a teacher, so name its model: --teacher MODEL"
        raise CommandError(f"--teacher: {wrong}")
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
        memory_budget=budget,
    )
    return head, gpu, step


def _record(
    head: Head,
    gpu: Gpu,
    step: Step,
    found: list[Estimate],
    fits: dict[str, tuple[int, int]],
    room: int | None,
    options: argparse.Namespace,
) -> dict[str, Any]:
    def row(one: Estimate) -> dict[str, Any]:
        more = dict(zip(("largest_batch", "largest_length"), fits[one.way], strict=True)) if fits else {}
        return {**asdict(one), "fits_the_budget": one.workspace is not None, **more}

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
        "memory": room,
        "ways": [row(one) for one in found],
    }


def _title(head: Head, gpu: Gpu, step: Step, options: argparse.Namespace) -> str:
    rows = f"{options.batch} pairs, 2 x" if step.workload.rows == 2 else f"{options.batch} x"
    what = f"{options.loss}, {rows} {step.length:,} tokens, {step.scored:,} scored"
    return f"{head.name}: {what}, on {gpu.name}"


def _print(title: str, found: list[Estimate], fits: dict[str, tuple[int, int]], notes: list[str]) -> None:
    make_console = require("rich.console").Console
    make_table = require("rich.table").Table
    console = make_console()
    # In a pipe a sentence is a line; a terminal's are broken between words.
    soft_wrap = not console.is_terminal
    console.print(title, style="bold", highlight=False, soft_wrap=soft_wrap)
    names = ["way", "products", "ms", "MiB", "least\nMiB"]
    if fits:
        names += ["largest\nbatch", "largest\nlength"]
    rows = []
    for one in found:
        # What `auto` takes is marked by a character: in a pipe, and under NO_COLOR, there is neither bold nor green.
        cells = [one.way + " *" * one.chosen, f"{one.products:.2f}"]
        if one.workspace is None:
            cells += ["-", "raises"]
        else:
            cells += [f"{one.milliseconds:,.1f}", f"{one.workspace / MIB:,.0f}"]
        cells.append("" if one.least is None else f"{one.least / MIB:,.0f}")
        cells += [f"{number:,}" if number else "none" for number in fits.get(one.way, ())]
        rows.append(cells)
    for columns in _folded(list(zip(names, *rows, strict=True)), console.width):
        table = make_table(box=None)
        for column in columns:
            table.add_column(names[column], justify="right" if column else "left", vertical="bottom", no_wrap=True)
        for one, cells in zip(found, rows, strict=True):
            table.add_row(*(cells[column] for column in columns), style="bold green" if one.chosen else None)
        # As wide as its numbers are: rich would cut short what has no room even alone.
        make_console(width=max(120, console.width)).print(table)
    console.print("\n".join(notes), style="dim", highlight=False, soft_wrap=soft_wrap)


def _folded(columns: Sequence[Sequence[str]], width: int) -> list[list[int]]:
    """Which columns stand in which of the tables, one below the other, that are no wider: the first is in each."""
    first, *others = [2 + max(len(line) for cell in column for line in cell.split("\n")) for column in columns]
    tables: list[list[int]] = []
    left = 0
    for column, wide in enumerate(others, start=1):
        if not tables or wide > left:
            tables.append([0])
            left = width - first
        tables[-1].append(column)
        left -= wide
    return tables


def _notes(
    head: Head,
    gpu: Gpu,
    step: Step,
    found: list[Estimate],
    fits: dict[str, tuple[int, int]],
    options: argparse.Namespace,
) -> list[str]:
    softcap = "" if head.softcap is None else f", softcap {head.softcap:g}"
    notes = [
        f"head [{head.vocab_size:,}, {head.hidden_size:,}]{', tied' * bool(head.tied)}{softcap}, "
        f"{'trainable' if step.trainable_head else 'frozen'}, 16-bit; logits {step.logits_dtype}"
    ]
    if head.defaults:
        notes.append(f"not in the configuration, hence its class's default: {', '.join(head.defaults)}")
    if head.unsaid:
        unsaid = ", ".join(head.unsaid)
        notes.append(f"not in the configuration, and no class of transformers at hand to have a default: {unsaid}")
    more = with_more_memory(step, gpu, found)
    notes += [
        f"products: of 2 N H V over the {step.scored:,} scored tokens. MiB: peak of forward and backward beyond "
        "inputs and returned gradients.",
        "least MiB: the smallest memory_budget. *: what strategy='auto' takes.",
    ]
    if more is not None:
        budget = options.memory_budget or "the default memory_budget"
        mib = (more.least or 0) // MIB
        notes.append(
            f"{more.way} would take {more.milliseconds:,.1f} ms, less than *, but needs more than {budget}: "
            f"strategy='auto' takes it with memory_budget={mib} << 20 (here --memory-budget {mib}MiB)."
        )
    raising = [one.way for one in found if one.workspace is None]
    if raising:
        auto = "" if any(one.chosen for one in found) else ", and so does strategy='auto'"
        notes.append(
            f"raises: {', '.join(raising)} cannot do with a memory_budget of {options.memory_budget}, and the call "
            f"raises{auto}."
        )
    beyond = [one.way for one in found if one.workspace is not None and one.workspace > gpu.gib << 30]
    if beyond:
        notes.append(f"does not fit the {gpu.gib} GiB of this GPU: {', '.join(beyond)}.")
    notes.append(f"ms: products at {gpu.tflops:g} TFLOP/s, copies at {gpu.tb_s:g} TB/s: {gpu.basis}.")
    if fits:
        none = "; none: not even one example, or one token" * any(0 in pair for pair in fits.values())
        notes.append(
            f"largest: {options.memory} for hidden states (a second model's, too), their gradient and the workspace of "
            f"the least memory_budget; a length is a row's; the head is the model's{none}."
        )
    return notes


def _chart(path: Path, head: Head, gpu: Gpu, step: Step, found: list[Estimate], options: argparse.Namespace) -> None:
    from .figures import time_and_memory

    drawn = {
        f"ours, {one.way}{' (auto)' * one.chosen}" if one.least is not None else one.way: one
        for one in found
        if one.workspace is not None
    }
    raising = [one.way for one in found if one.workspace is None]
    missing = f" ({', '.join(raising)}: not within {options.memory_budget})" if raising else ""
    floor = (2 + step.trainable_head + step.second_products) * step.product_ms(gpu, step.scored)
    time_and_memory(
        path,
        f"{_title(head, gpu, step, options)}: estimated{missing}",
        {name: one.milliseconds for name, one in drawn.items()},
        {name: (one.workspace or 0) / MIB for name, one in drawn.items()},
        [name for name, one in drawn.items() if one.least is not None],
        floor=floor,
    )
