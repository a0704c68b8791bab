"""The table of `docs/distributed.md`: shapes that no machine here has, as the planner sees them."""

from __future__ import annotations

import argparse
from typing import Any

from liger_losses.distributed import ClusterPlan, plan_cluster

_MILLION = 1 << 20
# What, and the arguments of `plan_cluster`.
SHAPES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("SFT, 8B, 1 node", {"hidden_size": 4096, "vocab_size": 128256, "sequences": 16, "sequence_length": 8192, "dp": 8}),
    ("SFT, 8B, 1 node, vocabulary over 8", {"hidden_size": 4096, "vocab_size": 128256, "sequences": 16,
                                            "sequence_length": 8192, "tp": 8}),
    ("DPO, 70B, 64 GPUs", {"hidden_size": 8192, "vocab_size": 128256, "sequences": 64, "sequence_length": 4096, "dp": 8,
                           "tp": 8, "separability": "pair", "scored_share": 0.5}),
    ("SFT, 27B, V 256k, 128 GPUs, 1M tokens", {"hidden_size": 4608, "vocab_size": 256000, "sequences": 128,
                                               "sequence_length": 8192, "dp": 16, "tp": 8}),
    ("SFT, 27B, V 256k, one sequence of 1M, 256 GPUs", {"hidden_size": 4608, "vocab_size": 256000, "sequences": 1,
                                                        "sequence_length": _MILLION, "tp": 8, "cp": 32}),
    ("DPO, 27B, V 256k, a pair of 1M each, 512 GPUs", {"hidden_size": 4608, "vocab_size": 256000, "sequences": 2,
                                                       "sequence_length": _MILLION, "tp": 8, "cp": 64,
                                                       "separability": "pair", "scored_share": 0.25}),
    ("GRPO, 405B, 1024 GPUs, 4M tokens", {"hidden_size": 16384, "vocab_size": 128256, "sequences": 512,
                                          "sequence_length": 8192, "dp": 128, "tp": 8, "scored_share": 0.75}),
)  # fmt: skip
COLUMNS = ("", "dp x tp x cp", "strategy", "tokens a rank", "full logits GiB", "memory GiB", "products ms", "visits ms",
           "communication ms", "received GiB")  # fmt: skip


def row(name: str, plan: ClusterPlan) -> list[str]:
    gib = 1 << 30
    return [
        name,
        " x ".join(map(str, plan.mesh)),
        plan.local.strategy,
        f"{plan.local.problem.positions:,}",
        f"{plan.full_logits / gib:,.1f}",
        f"{plan.memory / gib:,.2f}",
        f"{1e3 * plan.products_seconds:,.1f}",
        f"{1e3 * plan.visits_seconds:,.1f}",
        f"{1e3 * plan.communication_seconds:,.1f}",
        f"{plan.received / gib:,.2f}",
    ]


def table() -> list[str]:
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|---|---" + "|--:" * (len(COLUMNS) - 3) + "|"]
    return lines + [f"| {' | '.join(row(name, plan_cluster(**options)))} |" for name, options in SHAPES]


def main() -> None:
    """`python -m benchmarks.cluster`: the table, or with a row's number all that the planner says of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("row", nargs="?", type=int, choices=range(1, len(SHAPES) + 1))
    asked = parser.parse_args().row
    print("\n".join(table()) if asked is None else plan_cluster(**SHAPES[asked - 1][1]).explain())


if __name__ == "__main__":
    main()
