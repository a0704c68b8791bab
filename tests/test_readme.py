"""Every Python block of README and docs/ that is a whole program runs as it is written; the others are marked.

A block that stands beside the reader's own model and data, or continues another, has `<!-- fragment -->` on the line before
it, which no reader sees.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^(<!-- fragment -->\n)?```python\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
BLOCKS = [
    pytest.param(code, not marked, id=f"{page.name}-{number}")
    for page in PAGES
    for number, (marked, code) in enumerate(FENCE.findall(page.read_text(encoding="utf-8")), start=1)
]


def test_blocks_were_found() -> None:
    assert sum(block.values[1] for block in BLOCKS) >= 10


@pytest.mark.parametrize(("code", "whole"), BLOCKS)
def test_block_runs(code: str, whole: bool) -> None:
    program = compile(code, "block", "exec", dont_inherit=True)  # a fragment, too, is Python
    if whole:  # one that is not, and fails here, lacks its `<!-- fragment -->`
        exec(program, {"__name__": "__main__"})


def test_fences_are_all_seen() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert text.count("```python") == len(FENCE.findall(text)), page.name


def test_costs_in_the_readme_are_those_of_the_results() -> None:
    """Each row of README's table against the newest committed results: `85.2 ms` and `2,366 MiB` are its roundings."""
    from benchmarks import results

    reports: dict[str, Any] = {}
    for record in results.newest():
        for report in record.get("cases", []):
            reports.setdefault(report["case"], report)  # later ones are of other labels
    columns = [reports[case] for case in ("ce-8192/llama3-8b", "dpo-4x2048/llama3-8b", "dpo-4x2048/llama3-8b/frozen")]
    names = {
        "**ours, fp32 logits**": ("ours (fp32 logits)",) * 3,
        "ours, bf16 logits": ("ours (bf16 logits)",) * 3,
        "ours, fp32 logits, `memory_budget=4 << 30`": (None, "ours (cached, fp32)", None),
        "ours, least memory, bf16 logits": ("ours (min memory, bf16)", "ours (min memory, bf16)", None),
        "TRL 1.16": ("TRL fused head",) * 3,
        "liger-kernel 0.8.5": ("liger-kernel", "liger-kernel, compiled", "liger-kernel, compiled"),
        "full logits, torch.compile": ("full logits, torch.compile", None, None),
        "full logits, eager": ("full logits, eager",) * 3,
    }
    table = _rows("What it costs")
    floors = [f"{report['floor']['ms']:.1f} ms" for report in columns]
    assert table["floor"] == floors
    for label, rows in names.items():
        for cell, name, report in zip(table[label], rows, columns, strict=True):
            row = next((row for row in report["rows"] if row["implementation"] == name), None)
            want = "" if row is None else f"{row['ms']:.1f} ms, {row['extra_bytes'] / 2**20:,.0f} MiB"
            assert cell.replace("**", "") == want, (label, report["case"])


def _rows(heading: str) -> dict[str, list[str]]:
    """Cells of the tables under a heading of README, by the first of each row; of equal ones the first table's."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {cells[0]: cells[1:] for cells in reversed(rows)}


def test_steps_in_the_readme_are_those_of_the_results() -> None:
    from benchmarks import results

    reports = {report["case"]: report for record in results.newest() for report in record.get("trainers", [])}
    names = {
        "full logits": "TRL's loss on whole logits",
        "TRL 1.16, its fused head": "TRL",
        "`fuse_trainer`": "fuse_trainer",
        "**`fuse_trainer` and `fuse_layers`**": "fuse_trainer, fuse_layers",
    }
    table = _rows("What it costs")
    for label, name in names.items():
        for cell, case in zip(
            table[label], ("dpo-4x2048-checkpointing", "dpo-2x8192-checkpointing", "dpo-2x8192"), strict=True
        ):
            (row,) = (row for row in reports[case]["rows"] if row["implementation"] == name)
            want = f"{row['tokens_per_second']:,.0f} tokens/s, {row['peak_bytes'] / 2**30:.1f} GiB"
            assert cell.replace("**", "") == want, (label, case)


def test_what_fuse_trainer_gains_alone_is_that_of_the_results() -> None:
    """README and docs/trl.md say it in one sentence each."""
    from benchmarks import results

    speeds: dict[str, list[float]] = {}
    saved, layered, sentences = [], [], {}
    for report in (report for record in results.newest() for report in record.get("trainers", [])):
        rows = {row["implementation"]: row for row in report["rows"]}
        own, ours = rows["TRL"], rows["fuse_trainer"]
        trainer = report["case"].partition("-")[0]
        speeds.setdefault(trainer, []).append(own["ms"] / ours["ms"])
        before, after = (f"{row['peak_bytes'] / 2**30:.1f}" for row in (own, ours))
        sentences[trainer] = f"({before} to {after} GiB)"
        if trainer in ("dpo", "grpo"):
            saved.append(float(before) - float(after))
        if "fuse_trainer, fuse_layers" in rows:
            layered.append(own["ms"] / rows["fuse_trainer, fuse_layers"]["ms"])
    alone = speeds["dpo"] + speeds["grpo"]
    pages = {
        name: (ROOT / name).read_text(encoding="utf-8").replace("\n", " ") for name in ("README.md", "docs/trl.md")
    }
    for page in pages.values():
        assert f"{min(alone):.2f} to {max(alone):.2f} times" in page
        assert f"{max(saved):.1f} GiB less" in page
        assert f"{speeds['orpo'][0]:.2f} times" in page
        assert f"{speeds['gkd'][0]:.2f} times" in page
        assert sentences["orpo"] in page
        assert sentences["gkd"] in page
    assert f"{min(layered):.2f} to {max(layered):.2f} times" in pages["docs/trl.md"]


def test_charts_are_of_the_committed_results() -> None:
    """The page says what the results say, and every chart it shows is there."""
    from benchmarks import charts, results

    records = results.newest()
    shown = {case: f"{results.CHARTS}/{charts.name_of(case)}" for case in charts.CASES}
    assert (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8") == results.page(records, shown)
    for path in shown.values():
        assert (ROOT / "docs" / path).is_file()
    cases = {report["case"] for record in records for report in record.get("cases", [])}
    assert set(charts.CASES) <= cases
