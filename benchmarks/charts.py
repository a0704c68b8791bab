"""Charts of committed results: time and memory of one case, ours and the peers'."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from liger_losses.cli.extras import MIB
from liger_losses.cli.figures import time_and_memory

# One of each kind: charts of all cases would say the same thirty times.
CASES = ("ce-8192/llama3-8b", "dpo-4x2048/llama3-8b", "dpo-4x2048/llama3-8b/frozen", "simpo-4x2048/llama3-8b",
         "jsd-4096/llama3.2-1b", "dpo-4x2048/llama3-8b/peaked")  # fmt: skip


def name_of(case: str) -> str:
    return case.replace("/", "-").replace(".", "") + ".svg"


def draw(records: Iterable[dict[str, Any]], folder: Path) -> dict[str, str]:
    """Write the charts of `CASES` into `folder`; file names by case."""
    found = {}
    for record in records:
        for report in record.get("cases", []):
            if report["case"] not in CASES or report["case"] in found:  # measured again beside something else
                continue
            rows = {_label(row): row for row in report["rows"] if "ms" in row and row.get("extra_bytes") is not None}
            if not rows:
                continue
            what, shape = report["case"].partition("-")[0].upper(), report["title"].partition(": ")[2]
            path = folder / name_of(report["case"])
            time_and_memory(
                path,
                f"{what}: {shape}; {record['environment']['device']}",
                {name: row["ms"] for name, row in rows.items()},
                {name: row["extra_bytes"] / MIB for name, row in rows.items()},
                [name for name, row in rows.items() if row["ours"]],
                floor=report["floor"]["ms"],
            )
            found[report["case"]] = path.name
    return found


def _label(row: dict[str, Any]) -> str:
    return row["implementation"] + ("" if row["status"] == "ok" else f" ({row['status']})")
