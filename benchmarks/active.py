"""Active vocabulary against the exact path: on logits as peaked as a trained model's, and on logits of one size."""

from __future__ import annotations

from typing import Any

from .cases import GEMMA, LLAMA, LLAMA_PAIR, TINY, Case, Head
from .implementations import Implementation
from .ours import row

# Log-probabilities first, gradients at the time of backward: what any loss can be built on.
DEFERRED = ("grpo",)


def _cases(llama: Head, gemma: Head, pair: tuple[Head, Head], length: int) -> tuple[Case, ...]:
    rows, long = 8, 4 * length
    return (
        Case("ce", llama, 1, long, peaked=True),
        Case("ce", llama, 1, long, frozen=True, peaked=True),
        Case("ce", gemma, 1, long, peaked=True),
        Case("dpo", llama, rows, length, 0.25, peaked=True),
        Case("dpo", llama, rows, length, 0.25, frozen=True, peaked=True),
        Case("dpo", llama, 2, long, 0.25, peaked=True),
        Case("grpo", llama, rows, length, 0.25, peaked=True),
        Case("jsd", pair[0], 1, 2 * length, teacher=pair[1], peaked=True),
        # All of one size: here it may cost, and must not gain by dropping what counts.
        Case("ce", llama, 1, long),
        Case("grpo", llama, rows, length, 0.25),
    )


CASES = _cases(LLAMA, GEMMA, LLAMA_PAIR, 2048)
SMALL = _cases(TINY, TINY, (TINY, Head("tiny-teacher", 48, TINY.vocab)), 24)


def _rows(name: str, options: dict[str, Any]) -> list[Implementation]:
    return [
        row(name, options, applies=lambda case: case.workload not in DEFERRED),
        row(f"{name}, deferred", {**options, "strategy": "cached"}, applies=lambda case: case.workload in DEFERRED),
    ]


IMPLEMENTATIONS = (
    *_rows("exact", {}),
    *_rows("active vocabulary, auto", {"active_vocab": "auto"}),
    *_rows("active vocabulary, 2^-12", {"active_vocab": 2.0**-12}),
)


def ratios(report: dict[str, Any]) -> str:
    """Times and errors over those of the exact path, a line an implementation."""
    timed = [one for one in report["rows"] if "ms" in one]
    lines = []
    for one in timed[1:] if timed and timed[0]["implementation"].startswith("exact") else []:
        errors = ", ".join(
            f"{name} {one['errors'][name]:.1e} ({timed[0]['errors'][name]:.1e})" for name in ("hidden", "weight")
            if name in one["errors"]
        )  # fmt: skip
        share = f"{one['active']['share']:.1%} of the columns" if "active" in one else ""
        lines.append(f"  {one['implementation']}: {one['ms'] / timed[0]['ms']:.2f} x exact, {share}, errors {errors}")
    return "\n".join(lines)
