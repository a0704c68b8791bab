"""Active vocabulary against the exact path: on logits as peaked as a trained model's, and on logits of one size."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

from .cases import GEMMA, LLAMA, LLAMA_PAIR, TINY, Case, Head
from .implementations import PEERS, Implementation
from .measure import milliseconds
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


def _rows(name: str, options: dict[str, Any], *, peaked: bool = False) -> list[Implementation]:
    """Named by `name`; with `peaked` of cases with such logits alone."""

    def applies(case: Case, deferred: bool) -> bool:
        return (case.workload in DEFERRED) == deferred and (case.peaked or not peaked)

    return [
        row(name, options, applies=lambda case: applies(case, False)),
        row(f"{name}, deferred", {**options, "strategy": "cached"}, applies=lambda case: applies(case, True)),
    ]


def _beside(peer: Implementation, case: Case) -> bool:
    """Peers on peaked logits, where one of them leaves out columns, too; those that are quick to build."""
    return case.peaked and not case.frozen and case.workload not in DEFERRED and peer.applies(case)


IMPLEMENTATIONS = (
    *_rows("exact", {}),
    *_rows("active vocabulary, auto", {"active_vocab": "auto"}),
    # Of flat logits every entry is below such a number: what it does there is its user's to know.
    *_rows("active vocabulary, 2^-12", {"active_vocab": 2.0**-12}, peaked=True),
    *(replace(one, applies=partial(_beside, one), needs_cuda=True) for one in PEERS if "torch.compile" not in one.name),
)


SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)


def crossover(head: Head, rows: int, device: torch.device, repeats: int) -> list[dict[str, float]]:
    """Both gradient products of one tile over a share of the columns, choosing and moving them included, and over all.

    `chunked.active.CROSSOVER` is to be the share from which the two take about as long.
    """
    from liger_losses.chunked import active
    from liger_losses.chunked.active import ActiveVocabulary, HostCount, Selection, TileGradient
    from liger_losses.chunked.head import Precision
    from liger_losses.chunked.weight_gradient import WeightGradient

    kind = torch.bfloat16
    gradient = torch.rand(rows, head.vocab, device=device).to(kind)
    hidden, weight = (torch.randn(n, head.hidden, device=device).to(kind) for n in (rows, head.vocab))
    factor, product = torch.ones(rows, device=device), torch.empty_like(hidden)
    total = WeightGradient(weight.shape, Precision.of(kind, torch.float32), weight=True, bias=False)
    former, count = active.CROSSOVER, HostCount()

    def whole() -> None:
        torch.mm(gradient, weight, out=product)
        total.add(TileGradient(gradient), hidden, factor)

    def compact() -> None:
        found = Selection(ActiveVocabulary(1.5), gradient, None, None, count).gradient()
        found.product(weight, product, torch.float32)
        total.add(found, hidden, factor)

    rows_of_table = []
    try:
        active.CROSSOVER = 1.0
        whole()
        for share in SHARES:
            gradient.copy_(torch.rand(rows, head.vocab, device=device))
            gradient[0, torch.randperm(head.vocab, device=device)[: int(share * head.vocab)]] = 2
            times = {name: [milliseconds(work, device) for _ in range(repeats + 1)][1:]
                     for name, work in (("whole", whole), ("compact", compact))}  # fmt: skip
            rows_of_table.append({"share": share, **{f"{name}_ms": median(found) for name, found in times.items()}})
    finally:
        active.CROSSOVER = former
    return rows_of_table


def ratios(report: dict[str, Any]) -> str:
    """Times and errors over those of the exact path, a line an implementation."""
    timed = [one for one in report["rows"] if "ms" in one]
    lines = []
    for one in timed[1:] if timed and timed[0]["implementation"].startswith("exact") else []:
        errors = ", ".join(
            f"{name} {one['errors'][name]:.1e} ({timed[0]['errors'][name]:.1e})" for name in ("hidden", "weight")
            if name in one["errors"]
        )  # fmt: skip
        share = f"{one['active']['share']:.1%} of the columns, " if "active" in one else ""
        lines.append(f"  {one['implementation']}: {one['ms'] / timed[0]['ms']:.2f} x exact, {share}errors {errors}")
    return "\n".join(lines)
