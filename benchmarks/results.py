"""Results: the environment they hold for, JSON, and Markdown tables."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch

from . import distributed, trainers

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
CHARTS = "assets"  # beside the page
PACKAGES = ("torch", "triton", "transformers", "trl", "liger-kernel", "cut-cross-entropy")


def _version(package: str) -> str | None:
    """Version by metadata, or by the module's own word where only the unpacked module is on the path."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        return str(getattr(importlib.import_module(package.replace("-", "_")), "__version__", "unknown"))
    except Exception:  # a peer that does not import has no version, whatever it raised
        return None


def _output(*command: str) -> str | None:
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=ROOT, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return found.strip().partition("\n")[0] or None


def environment(device: torch.device, commit: str | None = None) -> dict[str, Any]:
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else f"CPU ({platform.machine()})",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "python": platform.python_version(),
        "packages": {package: _version(package) for package in PACKAGES},
        "commit": commit or _output("git", "describe", "--always", "--dirty", "--abbrev=12"),
        "date": date.today().isoformat(),
    }


def _slug(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def save(record: dict[str, Any], folder: Path, kind: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_slug(record['environment']['device'])}-{record['environment']['date']}{kind}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def save_table(table: dict[str, Any], folder: Path) -> Path:
    """A device has one table; an entry is a line."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_slug(table['device'])}.json"
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in table.items() if name != "entries"]
    rows = ",\n  ".join(json.dumps(entry) for entry in table["entries"])
    path.write_text("{\n" + ",\n".join([*lines, f' "entries": [\n  {rows}\n ]']) + "\n}\n")
    return path


KINDS = ("cases", "layers", "trainers", "distributed")


def newest(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The newest record of each device, kind of benchmark and label: losses, layers, trainers. Profiles are none."""
    records = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    records.sort(key=lambda record: record["environment"]["date"])
    found = {
        (record["environment"]["device"], kind, record.get("label", "")): record
        for kind in KINDS
        for record in records
        if kind in record
    }
    return [found[key] for key in sorted(found)]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _mib(value: int | None) -> str:
    return _number(None if value is None else value / 2**20, ",.0f")


COLUMNS = ("implementation", "ms", "x floor", "x ours", "extra MiB", "predicted MiB", "log-prob", "loss", "dX", "dW")
HEADER = (f"| {' | '.join(COLUMNS)} |", "|---" + "|--:" * (len(COLUMNS) - 1) + "|")


def table(report: dict[str, Any]) -> list[str]:
    """One case as a Markdown table, its floor above it."""
    ours = next((row.get("ms") for row in report["rows"] if row["ours"]), None)  # the first of ours is the default
    products = " + ".join(f"{name} {ms:.2f}" for name, ms in report["floor"]["products_ms"].items())
    lines = [f"Floor: {products} = **{report['floor']['ms']:.2f} ms**", "", *HEADER]
    for row in report["rows"]:
        name = row["implementation"] + ("" if row["status"] == "ok" else f": {row['status']}".replace("|", "/"))
        if row["memory_budget"] is not None:
            name += f", budget {_mib(row['memory_budget'])} MiB"
        if "active" in row:
            name += f", {row['active']['share']:.1%} of the columns"
        relative = row["ms"] / ours if "ms" in row and ours else None
        cells = [name, _number(row.get("ms"), ".2f"), _number(row.get("floor_ratio"), ".3f"), _number(relative, ".2f")]
        cells += [_mib(row.get("extra_bytes")), _mib(row.get("predicted_bytes"))]
        cells += [_number(row.get("errors", {}).get(key), ".1e") for key in ("logprob", "loss", "hidden", "weight")]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


LAYER_COLUMNS = ("implementation", "ms", "% of the floor", "largest error")
LAYER_HEADER = (f"| {' | '.join(LAYER_COLUMNS)} |", "|---" + "|--:" * (len(LAYER_COLUMNS) - 1) + "|")


def layer_table(report: dict[str, Any]) -> list[str]:
    """One layer as a Markdown table, its floor above it."""
    lines = [f"Floor: **{report['floor_ms']:.3f} ms**, a copy at {report['copy_tb_s']:.2f} TB/s", "", *LAYER_HEADER]
    for row in report["rows"]:
        name = row["implementation"] + ("" if row["status"] == "ok" else f": {row['status']}".replace("|", "/"))
        share = 100 / row["floor_ratio"] if "ms" in row else None
        error = max(row["errors"]) if "errors" in row else None
        cells = [name, _number(row.get("ms"), ".3f"), _number(share, ".0f"), _number(error, ".1e")]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _settling(settings: Mapping[str, Any]) -> str:
    """What the GPU was doing before each turn, where it was seen to."""
    seconds = settings.get("settling_s")
    return "" if seconds is None else f" (each at work for {seconds} s before it counts, on a hot GPU)"


LAYER_LEGEND = """\
One layer, forward and backward, bf16. Times are medians of {repeats} repeats, all implementations taking turns, of the
device alone: the host is kept ahead, as it is in the midst of a model's step. (Alone and eager, a call is bound by the
host: launching a Triton kernel through autograd takes it longer than torch's own operator.)

- *floor*: the bytes that the layer must move, each once, at the rate of a device copy timed in the same turns.
- *largest error*: of a result or a gradient against fp64 (Frobenius norm, relative).
"""


LEGEND = """\
Forward and backward, bf16, random data, one case at a time. Times are medians of {repeats} repeats after at least
{warm_ups} warm-ups, all implementations taking turns{settling}, read with device events.

- *floor*: the matrix products that the exact result needs, over the scored tokens, each as one product, timed in the
  same turns. *x floor* is the time over that sum.
- *x ours*: the time over that of `ours (fp32 logits)`.
- *extra MiB*: peak memory of one forward and backward above what was allocated before it, less the returned gradients;
  `.grad` is None before each step.
- *predicted MiB*: what the planner announces for the same step.
- *log-prob*, *loss*, *dX*, *dW*: errors against {reference} at the timed shape: the largest of a log-probability, and
  the relative ones of the loss and of the gradients (Frobenius norm). An implementation passes when each relative error
  is at most twice that of full logits in bf16 plus a rounding. Ours is not timed unless it passes; a peer that does not
  pass is flagged.
"""


LEGENDS = {
    "cases": LEGEND,
    "layers": LAYER_LEGEND,
    "trainers": trainers.LEGEND,
    "distributed": distributed.LEGEND,
}


# Of records with cases, by label; other kinds of records have their own.
HEADINGS = {
    "": "Losses", "active": "Active vocabulary", "distillation": "Distillation",
    "layers": "Layers", "trainers": "Trainers", "distributed": "Several GPUs",
}  # fmt: skip

INTRODUCTION = """\
Every table and chart is made from the committed `benchmarks/results` by `python -m benchmarks report`. `make bench`
measures them anew on a GPU of yours, `liger-losses bench --quick` a part of them in a minute. README has what they come
to.

A section is one run, with its command, versions and conditions. Cases are named `loss-tokens/head`: *frozen* where the
head gets no gradient, *peaked* where logits are as sharp as a trained model's.
"""


def _heading(record: dict[str, Any]) -> str:
    kind = next(kind for kind in KINDS if kind in record)
    label = record.get("label") or ("" if kind == "cases" else kind)
    return HEADINGS.get(label, label)


def _titled(report: dict[str, Any]) -> list[str]:
    """A heading short enough for a table of contents, and the rest of the title below it."""
    name, _, rest = report["title"].partition(": ")
    return [f"### {name}", "", f"{rest}."] if rest else [f"### {name}"]


def page(records: Iterable[dict[str, Any]], charts: Mapping[str, str] | None = None) -> str:
    """The whole page of results; `charts`: of some cases, where their chart is."""
    left = dict(charts or {})  # a case that was measured again beside something else has its chart once
    lines = ["<!-- Generated by `python -m benchmarks report`. Edit the benchmarks, not this page. -->", "# Benchmarks"]
    lines += ["", INTRODUCTION.rstrip()]
    for record in records:
        where = record["environment"]
        versions = ", ".join(f"{name} {version or 'missing'}" for name, version in where["packages"].items())
        lines += [
            "",
            f"## {_heading(record)}, {where['device']}, {where['date']}",
            "",
            f"`{record['command']}` at commit `{where['commit']}`;",
        ]
        lines += [f"driver {where['driver']}, CUDA {where['cuda']}, Python {where['python']}, {versions}."]
        legend = next(text for kind, text in LEGENDS.items() if kind in record)
        lines += ["", legend.format(settling=_settling(record["settings"]), **record["settings"]).rstrip()]
        for report in record.get("cases", []):
            lines += ["", *_titled(report), ""]
            if chart := left.pop(report["case"], None):
                lines += [f"![{report['case']}: time and peak memory]({chart})", ""]
            lines += table(report)
        for report in record.get("layers", []):
            lines += ["", f"### {report['case']}", "", *layer_table(report)]
        for report in record.get("trainers", []):
            lines += ["", *_titled(report), "", *trainers.table(report)]
        for report in record.get("distributed", []):
            lines += ["", *_titled(report), "", *distributed.table(report)]
    return "\n".join(lines) + "\n"


def summary(report: dict[str, Any]) -> str:
    """The few columns of a case that fit a terminal."""
    lines = [f"\n{report['title']}\n{'floor':<34}{report['floor']['ms']:9.2f} ms"]
    for row in report["rows"]:
        measured = f"{row['ms']:9.2f} ms {row['floor_ratio']:6.3f} x" if "ms" in row else f"{'-':>9}"
        if row.get("extra_bytes") is not None:
            measured += f" {_mib(row['extra_bytes']):>8} MiB"
        lines.append(f"{row['implementation']:<34}{measured}{'' if row['status'] == 'ok' else '  ' + row['status']}")
    return "\n".join(lines)
