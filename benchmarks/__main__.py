"""Time ours beside its peers, itself or one GPU (`run`, the default), profile a step, write a page (`report`)."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from liger_losses.kernels import fastest

from . import active, charts, distributed, layer_tables, layers, measure, profiling, results, trainers
from .cases import CASES, LLAMA, TINY
from .ours import IMPLEMENTATIONS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    label = argparse.ArgumentParser(add_help=False)
    label.add_argument("--label", default="", help="keep and report this run apart from those of other labels")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--out", type=Path, default=results.RESULTS, help="folder for the JSON file")
    shared.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    shared.add_argument("--commit", help="commit to record where there is no git checkout")
    run = commands.add_parser("run", parents=[shared, label], help="time all implementations")
    run.add_argument("--quick", action="store_true", help="one head, one shape a workload")
    run.add_argument("--case", action="append", help="only cases whose name contains this; repeatable")
    run.add_argument("--impl", action="append", help="only implementations whose name contains this; repeatable")
    run.add_argument("--repeats", type=int, default=measure.REPEATS)
    run.add_argument("--reference", choices=("float64", "float32"), default="float64", help="dtype of the true result")
    run.add_argument("--list", action="store_true", help="name cases and implementations, and stop")
    trace = commands.add_parser("profile", parents=[shared], help="profile one step and look for synchronisation")
    trace.add_argument("--case", default="dpo-4x2048/llama3-8b", choices=list(CASES), metavar="CASE")
    trace.add_argument("--impl", default="ours (fp32 logits)")
    layer = commands.add_parser("layers", parents=[shared], help="time the layer kernels")
    layer.add_argument("--case", action="append", help="only cases whose name contains this; repeatable")
    layer.add_argument("--repeats", type=int, default=measure.REPEATS)
    layer.add_argument(
        "--tables", action="store_true", help="write the table of where torch's norms are faster instead"
    )
    trainer = commands.add_parser("trainers", parents=[shared, label], help="time a step of TRL's trainers")
    trainer.add_argument("--case", action="append", help="only cases whose name contains this; repeatable")
    trainer.add_argument("--repeats", type=int, default=trainers.REPEATS)
    columns = commands.add_parser("active", parents=[shared], help="time the active vocabulary beside the exact path")
    columns.add_argument("--case", action="append", help="only cases whose name contains this; repeatable")
    columns.add_argument("--repeats", type=int, default=measure.REPEATS)
    columns.add_argument("--reference", choices=("float64", "float32"), default="float64", help="of the true result")
    columns.add_argument("--crossover", action="store_true", help="instead: one tile over shares of its columns")
    several = commands.add_parser("distributed", parents=[shared], help="two GPUs against one")
    several.add_argument("--repeats", type=int, default=3)
    report = commands.add_parser("report", help="write docs/benchmarks.md and its charts from the newest results")
    report.add_argument("files", nargs="*", type=Path, help="results to use instead of the newest of each device")
    report.add_argument("--page", type=Path, default=results.PAGE)
    return parser


def _refuse(message: str) -> int:
    print(message, file=sys.stderr)
    return 2


def _record(options: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    # The command as another machine would type it: without where its output went.
    here = [index for index, word in enumerate(arguments) if word in ("--out", "--commit")]
    kept = [word for index, word in enumerate(arguments) if index not in here and index - 1 not in here]
    environment = results.environment(torch.device(options.device), options.commit)
    return {"command": shlex.join(["python", "-m", "benchmarks", *kept]), "environment": environment}


def _named(cases: Iterable[Any], options: argparse.Namespace) -> list[Any]:
    """Those that `--case` asks for."""
    return [case for case in cases if not options.case or any(part in case.name for part in options.case)]


def _verdict(failures: list[str], path: Path | None = None) -> int:
    """The last line, and the exit status."""
    written = "" if path is None else f"written: {path.name}; "
    print(f"\n{written}{'not passed: ' + '; '.join(failures) if failures else 'ours passed every gate'}")
    return 1 if failures else 0


def _measured(
    cases: list[Any],
    implementations: Sequence[Any],
    options: argparse.Namespace,
    record: dict[str, Any],
    more: Callable[[dict[str, Any]], list[str]] = lambda report: [],
) -> int:
    """Run the cases under the record's label; `more` are lines under a case's rows."""
    device, reference = torch.device(options.device), getattr(torch, options.reference)
    settling = measure.SETTLING_S if device.type == "cuda" else None
    record["settings"] = {
        "warm_ups": measure.WARM_UPS, "settling_s": settling, "repeats": options.repeats,
        "reference": options.reference,
    }  # fmt: skip
    record["cases"] = []
    path = None
    for case in cases:
        started = time.perf_counter()
        report = measure.run_case(case, implementations, device, options.repeats, reference)
        record["cases"].append(report)
        # After every case: a run cut short keeps what it measured.
        path = results.save(record, options.out, kind=f"-{record['label']}" * bool(record["label"]))
        seconds = f"({time.perf_counter() - started:.0f} s)"
        print("\n".join([results.summary(report), *more(report), seconds]), flush=True)
    return _verdict([failure for report in record["cases"] for failure in measure.failed(report)], path)


def _run(options: argparse.Namespace, record: dict[str, Any]) -> int:
    device = torch.device(options.device)
    suites = ("quick",) if options.quick else ("quick", "default", *(("harness",) if options.case else ()))
    cases = _named((case for case in CASES.values() if case.suite in suites), options)
    chosen = [one for one in IMPLEMENTATIONS if not options.impl or any(part in one.name for part in options.impl)]
    if not cases or not chosen:
        return _refuse("no case or no implementation has such a name; --list names what there is")
    if device.type == "cpu" and any(case.suite != "harness" for case in cases):
        return _refuse("these shapes need a GPU; on a CPU, check the harness itself with --case tiny")
    record["label"] = options.label
    return _measured(cases, chosen, options, record)


def _profile(options: argparse.Namespace, record: dict[str, Any]) -> int:
    device = torch.device(options.device)
    implementation = next((one for one in IMPLEMENTATIONS if one.name == options.impl), None)
    if implementation is None or device.type != "cuda":
        return _refuse(f"cannot profile {options.impl!r}: needs a CUDA device and one of run --list's implementations")
    if why := implementation.missing(device):
        return _refuse(f"cannot profile {options.impl!r}: {why}")
    record["profile"] = profiling.run(CASES[options.case], implementation, device)
    path = results.save(record, options.out, kind="-profile")
    print(f"{profiling.summary(record['profile'])}\n\nwritten: {path.name}")
    return 1 if profiling.waits(record["profile"]) else 0


def _layers(options: argparse.Namespace, record: dict[str, Any]) -> int:
    device = torch.device(options.device)
    # Elsewhere than on a GPU the harness itself is checked, at shapes of a moment.
    cases = _named(layers.CASES if device.type == "cuda" else layers.TINY, options)
    if not cases:
        return _refuse("no layer case has such a name")
    record["settings"] = {"repeats": options.repeats}
    record["layers"] = []
    for case in cases:
        report = layers.run_case(case, layers.IMPLEMENTATIONS, device, options.repeats)
        record["layers"].append(report)
        path = results.save(record, options.out, kind="-layers")
        print(layers.summary(report), flush=True)
    return _verdict([failure for report in record["layers"] for failure in layers.failed(report)], path)


def _tables(options: argparse.Namespace, record: dict[str, Any]) -> int:
    device = torch.device(options.device)
    chosen = [name for name in fastest.OPERATIONS if not options.case or any(part in name for part in options.case)]
    if not chosen:
        return _refuse(f"no operation has such a name; there are {', '.join(fastest.OPERATIONS)}")
    folder = fastest.FOLDER if options.out == results.RESULTS else options.out
    # A table of a CPU would be obeyed there, where nobody trains.
    if device.type != "cuda" and folder == fastest.FOLDER:
        return _refuse("tables are for GPUs; on a CPU, check the harness itself with --out")
    sizes = {} if device.type == "cuda" else {"rows": (2,), "widths": (2,)}
    table = {"device": record["environment"]["device"], **record, "entries": []}
    for group in layer_tables.entries(chosen, device, **sizes):
        table["entries"] += group
        # After every group: a run cut short keeps what it measured.
        path = results.save_table(table, folder)
        print(layer_tables.summary(group), flush=True)
    print(f"\nwritten: {path.name}")
    return 0


def _trainers(options: argparse.Namespace, record: dict[str, Any]) -> int:
    device = torch.device(options.device)
    cases = _named(trainers.CASES if device.type == "cuda" else trainers.QUICK, options)
    if not cases:
        return _refuse("no trainer case has such a name")
    record["settings"] = {"repeats": options.repeats}
    record["label"], record["trainers"] = options.label, []

    def save(report: dict[str, Any]) -> None:
        record["trainers"].append(report)
        results.save(record, options.out, kind="-trainers" + f"-{options.label}" * bool(options.label))

    return _verdict(trainers.run(tuple(cases), device, options.repeats, save))


def _active(options: argparse.Namespace, record: dict[str, Any]) -> int:
    device = torch.device(options.device)
    if options.crossover:
        head, rows = (LLAMA, 3072) if device.type == "cuda" else (TINY, 64)
        record["crossover"] = active.crossover(head, rows, device, options.repeats)
        path = results.save(record, options.out, kind="-crossover")
        for row in record["crossover"]:
            print(f"{row['share']:5.0%} of the columns {row['compact_ms']:8.2f} ms, all {row['whole_ms']:8.2f} ms")
        print(f"written: {path.name}")
        return 0
    cases = _named(active.CASES if device.type == "cuda" else active.SMALL, options)
    if not cases:
        return _refuse("no case has such a name")
    record["label"] = "active"
    return _measured(cases, active.IMPLEMENTATIONS, options, record, lambda report: [active.ratios(report)])


def _distributed(options: argparse.Namespace, record: dict[str, Any]) -> int:
    device = torch.device(options.device)
    if device.type == "cuda" and torch.cuda.device_count() < distributed.RANKS:
        return _refuse(f"needs {distributed.RANKS} GPUs; --device cpu checks the harness with gloo")
    record["settings"] = {"repeats": options.repeats}
    record["distributed"] = distributed.run(device, options.repeats)
    path = results.save(record, options.out, kind="-distributed")
    return _verdict([failure for report in record["distributed"] for failure in distributed.failed(report)], path)


def _report(options: argparse.Namespace) -> int:
    records = [json.loads(path.read_text()) for path in options.files] or results.newest()
    if not records:
        return _refuse("no results yet: run `python -m benchmarks` on a machine with a GPU")
    options.page.parent.mkdir(parents=True, exist_ok=True)
    drawn = charts.draw(records, options.page.parent / results.CHARTS)
    options.page.write_text(results.page(records, {case: f"{results.CHARTS}/{name}" for case, name in drawn.items()}))
    return 0


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    named = arguments and (not arguments[0].startswith("-") or arguments[0] in ("-h", "--help"))
    options = _parser().parse_args(arguments if named else ["run", *arguments])
    if options.command == "report":
        return _report(options)
    if options.command == "run" and options.list:
        print("\n".join([case.title for case in CASES.values()] + [""] + [one.name for one in IMPLEMENTATIONS]))
        return 0
    commands = {
        "run": _run,
        "profile": _profile,
        "layers": _layers,
        "trainers": _trainers,
        "active": _active,
        "distributed": _distributed,
    }
    command = _tables if options.command == "layers" and options.tables else commands[options.command]
    return command(options, _record(options, arguments))


if __name__ == "__main__":
    sys.exit(main())
