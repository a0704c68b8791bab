"""The planner of clusters: the table in the documentation is what it says, and what it says is arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import cluster
from liger_losses import plan
from liger_losses.distributed import Rates, plan_cluster

PAGE = Path(__file__).resolve().parent.parent / "docs" / "distributed.md"
HEAD: dict[str, Any] = {"hidden_size": 1024, "vocab_size": 32000, "sequences": 16, "sequence_length": 2048}


def test_the_table_is_the_planners() -> None:
    text = PAGE.read_text()
    between = text.partition("<!-- cluster table -->\n")[2].partition("<!-- end -->")[0]
    assert between.splitlines() == cluster.table()


def test_one_rank_is_the_local_plan_and_says_nothing_to_anybody() -> None:
    seen = plan_cluster(**HEAD)
    local = plan(tokens=16 * 2048, scored=[2048] * 16, hidden_size=1024, vocab_size=32000)
    assert seen.local == local
    assert seen.traffic == ()
    assert seen.communication_seconds == 0
    weight, hidden = 32000 * 1024 * 2, 16 * 2048 * 1024 * 2
    assert seen.memory == local.workspace + 2 * weight + 2 * hidden
    assert seen.products_seconds == pytest.approx(3 * 2 * 16 * 2048 * 1024 * 32000 / 650e12)
    assert seen.full_logits == 16 * 2048 * 32000 * 4


def test_traffic_of_each_dimension() -> None:
    tokens, weight = 4 * 1024, 8000 * 1024 * 2
    rates = Rates(inside=100e9, between=10e9, latency=1e-5, devices=8)
    seen = plan_cluster(**HEAD, dp=4, tp=4, cp=2, rates=rates)
    assert seen.ranks == 32
    assert (seen.local.problem.positions, seen.local.problem.vocab_size) == (tokens, 8000)
    traffic = {part.what: part for part in seen.traffic}
    tiles = -(-tokens // seen.local.logit_rows)
    gathered = traffic["statistics, gathered a tile"]
    assert (gathered.received, gathered.calls) == (3 * 4 * tokens * 3, tiles)
    assert gathered.seconds == pytest.approx(tiles * 1e-5 + gathered.received / 100e9)
    assert traffic["hidden gradient, reduced"].received == 2 * 3 / 4 * tokens * 1024 * 4
    sharded = traffic["weight, gathered in forward and backward"]
    assert (sharded.received, sharded.calls) == (2 * weight * 7 / 8, 2)
    assert sharded.seconds == pytest.approx(2e-5 + sharded.received / 10e9)  # 32 ranks leave a node of 8
    assert traffic["weight gradient, reduced and scattered"].received == weight * 7 / 8
    assert seen.seconds == pytest.approx(seen.products_seconds + seen.visits_seconds + seen.communication_seconds)
    whole = plan_cluster(**HEAD, dp=4, sharding="none")
    assert [part.what for part in whole.traffic] == ["weight gradient, reduced"]
    assert whole.traffic[0].received == 2 * 3 / 4 * 32000 * 1024 * 2
    frozen = plan_cluster(**HEAD, dp=4, sharding="none", trainable_head=False)
    assert frozen.traffic == ()


def test_pairs_that_span_ranks_are_known_late() -> None:
    near, far = (plan_cluster(**HEAD, separability="pair", cp=cp, strategy="auto") for cp in (1, 4))
    assert near.local.problem.separability == "pair"
    assert far.local.problem.separability == "batch"
    assert far.local.strategy != "immediate"
    assert "units of a pair loss span 4 ranks" in far.explain()
    assert "full logits alone would be" in str(far)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"dp": 0}, ValueError, "dp: got 0, expected >= 1"),
        ({"tp": 2.0}, TypeError, "tp: got 2.0, expected an int"),
        ({"dp": 3}, ValueError, "sequences: got 16, expected a multiple of 3 (dp=3)"),
        ({"dp": 16, "separability": "pair"}, ValueError, "sequences: got 16, expected a multiple of 32 (dp=16, pairs)"),
        ({"cp": 3}, ValueError, "sequence_length: got 2048, expected a multiple of cp=3"),
        ({"tp": 32001}, ValueError, "tp: got 32001, expected at most one rank for each of the 32000 columns"),
        ({"sharding": "zero"}, ValueError, "sharding: got 'zero', expected one of ('none', 'fsdp')"),
        ({"scored_share": 0}, ValueError, "scored_share: got 0, expected a finite number > 0 and <= 1"),
        ({"scored_share": "1"}, TypeError, "scored_share: got '1' of type str, expected a Python number"),
        ({"rates": None}, TypeError, "rates: got NoneType, expected Rates"),
        ({"vocab_size": "a"}, TypeError, "vocab_size: got 'a', expected an int"),
        ({"hidden_size": 0}, ValueError, "hidden_size: got 0, expected >= 1"),
        ({"sequences": 10**12}, ValueError, "sequences: got 1000000000000, 1000000000000 a rank, expected at most"),
        ({"separability": "row"}, ValueError, "separability: got 'row'"),
    ],
)
def test_refusals(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        plan_cluster(**{**HEAD, **options})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"latency": 0}, ValueError, "latency: got 0, expected a finite number > 0"),
        ({"between": float("inf")}, ValueError, "between: got inf, expected a finite number > 0"),
        ({"memory": "4e12"}, TypeError, "memory: got '4e12' of type str, expected a Python number"),
        ({"devices": 1.5}, TypeError, "devices: got 1.5, expected an int"),
    ],
)
def test_rates_are_positive(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        Rates(**options)
