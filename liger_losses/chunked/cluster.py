"""A plan for many GPUs: one rank's own plan, and what the ranks say to each other, from shapes and stated rates."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from .._checks import check_number, check_size
from .planner import make_plan, plan
from .problem import Plan, rows_summed

_GIB = 1 << 30

_MOST_ROWS = 1 << 20  # a plan lists each

SHARDING = ("none", "fsdp")


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a device does in a second, and what a link moves. Defaults: H200 class.

    `products` and `memory` are rounded down from what bf16 products of these shapes, and a copy, reach on one H200
    (benchmarks/results); those of links are stated, not measured here.
    """

    products: float = 650e12  # floating-point operations
    memory: float = 4.0e12  # bytes of device memory
    inside: float = 400e9  # bytes a rank receives from ranks of its node, in a collective
    between: float = 45e9  # bytes a rank receives from other nodes
    latency: float = 20e-6  # seconds of a collective, however small
    devices: int = 8  # of a node

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            check_number(name, value, above=0)
            if name == "devices" and not isinstance(value, int):
                raise TypeError(f"devices: got {value!r}, expected an int")


@dataclass(frozen=True)
class Traffic:
    """One kind of collective in a step of the head."""

    what: str
    received: int  # bytes, by each rank
    calls: int
    seconds: float


@dataclass(frozen=True)
class ClusterPlan:
    """What one rank of a cluster does for the head and the loss of a step. `explain()` says it in words."""

    local: Plan
    mesh: tuple[int, int, int]  # dp, tp, cp
    sharding: str
    rates: Rates
    full_logits: int  # bytes of one rank's logits in 32 bits, were they built
    stored: int  # bytes of the head's weight and its gradient that a rank keeps between steps
    gathered: int  # bytes of the gathered weight and its whole gradient, alive during the head alone
    traffic: tuple[Traffic, ...]
    products_seconds: float
    visits_seconds: float
    warnings: tuple[str, ...] = field(default=())

    @property
    def ranks(self) -> int:
        dp, tp, cp = self.mesh
        return dp * tp * cp

    @property
    def memory(self) -> int:
        """Bytes at the peak of the head on one rank: its workspace, weight, gradients and hidden states."""
        p = self.local.problem
        hidden = p.positions * p.hidden_size * p.hidden_itemsize * (1 + p.hidden_grad)
        return self.local.workspace + self.stored + self.gathered + hidden

    @property
    def communication_seconds(self) -> float:
        """None of it hidden behind other work: an upper bound."""
        return sum(part.seconds for part in self.traffic)

    @property
    def received(self) -> int:
        return sum(part.received for part in self.traffic)

    @property
    def seconds(self) -> float:
        return self.products_seconds + self.visits_seconds + self.communication_seconds

    @property
    def efficiency(self) -> float:
        """Of the time, the share that the products take."""
        return self.products_seconds / self.seconds

    def explain(self) -> str:
        dp, tp, cp = self.mesh
        p = self.local.problem
        lines = [
            f"{self.ranks:,} ranks: data {dp:,} ({self.sharding}) x tensor {tp:,} x context {cp:,}; each has "
            f"{p.positions:,} tokens and {p.vocab_size:,} columns of the vocabulary",
            *("  " + line for line in self.local.explain().splitlines()),
            f"memory        {self.memory / _GIB:,.2f} GiB a rank (workspace {self.local.workspace / _GIB:,.2f}, weight "
            f"and gradient {(self.stored + self.gathered) / _GIB:,.2f}); full logits alone would be "
            f"{self.full_logits / _GIB:,.1f} GiB",
            f"time          {1e3 * self.seconds:,.1f} ms: products {1e3 * self.products_seconds:,.1f}, visits to "
            f"logits {1e3 * self.visits_seconds:,.1f}, communication {1e3 * self.communication_seconds:,.1f}",
            *(
                f"  {part.what}: {part.received / _GIB:,.3f} GiB received in {part.calls:,} call(s), "
                f"{1e3 * part.seconds:,.2f} ms"
                for part in self.traffic
            ),
            *(f"note          {warning}" for warning in self.warnings),
        ]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.explain()


def plan_cluster(
    *,
    hidden_size: int,
    vocab_size: int,
    sequences: int,
    sequence_length: int,
    dp: int = 1,
    tp: int = 1,
    cp: int = 1,
    sharding: str = "fsdp",
    separability: str = "token",
    scored_share: float = 1.0,
    dtype: torch.dtype = torch.bfloat16,
    logits_dtype: str = "float32",
    trainable_head: bool = True,
    memory_budget: int | None = None,
    strategy: str = "auto",
    rates: Rates = Rates(),
) -> ClusterPlan:
    """Memory and time of the head and its loss on each rank of a cluster: `plan` for the local shapes, and the traffic.

    Tensor parallelism spreads the vocabulary, context parallelism each sequence, data parallelism the sequences. Ranks
    are laid out with tensor parallelism innermost, then context, then data; a collective inside a node runs at
    `rates.inside`, another at `rates.between`. Nothing is assumed to overlap.

    Args:
        hidden_size, vocab_size: of the head.
        sequences, sequence_length: of one forward of the whole cluster; pairs count as two sequences.
        dp, tp, cp: sizes of the mesh. sequences and sequence_length are multiples of dp and cp.
        sharding: of the head along dp x cp: `"fsdp"` (FSDP2, ZeRO-3: a shard each, gathered in forward and in
            backward) or `"none"` (DDP: whole on each rank, gradients reduced).
        separability: of the loss. With cp > 1 sequences and pairs span ranks: their loss is known only after a
            reduction, which plans as `"batch"`.
        scored_share: share of the tokens that is scored, in (0, 1].
        dtype, logits_dtype, trainable_head, memory_budget, strategy: as in `plan`; the budget is of one rank.
        rates: see `Rates`.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    sizes = {
        "hidden_size": hidden_size, "vocab_size": vocab_size,
        "sequences": sequences, "sequence_length": sequence_length, "dp": dp, "tp": tp, "cp": cp,
    }  # fmt: skip
    for name, value in sizes.items():
        check_size(name, value)
    if not isinstance(rates, Rates):
        raise TypeError(f"rates: got {type(rates).__name__}, expected Rates")
    if sharding not in SHARDING:
        raise ValueError(f"sharding: got {sharding!r}, expected one of {SHARDING}")
    check_number("scored_share", scored_share, above=0, high=1)
    units = dp * (2 if separability == "pair" else 1)
    if sequences % units:
        raise ValueError(f"sequences: got {sequences}, expected a multiple of {units} (dp={dp}"
                         f"{', pairs' if units > dp else ''})")  # fmt: skip
    if sequences // dp > _MOST_ROWS:
        raise ValueError(f"sequences: got {sequences}, {sequences // dp} a rank, expected at most {_MOST_ROWS} on each")
    if sequence_length % cp:
        raise ValueError(f"sequence_length: got {sequence_length}, expected a multiple of cp={cp}")
    if tp > vocab_size:
        raise ValueError(f"tp: got {tp}, expected at most one rank for each of the {vocab_size} columns")
    rows, length = sequences // dp, sequence_length // cp
    columns = -(-vocab_size // tp)
    spanning = cp > 1 and separability in ("sequence", "pair")
    local = plan(
        tokens=rows * length,
        hidden_size=hidden_size,
        vocab_size=columns,
        scored=[max(1, round(length * scored_share))] * rows,
        dtype=dtype,
        logits_dtype=logits_dtype,
        separability="batch" if spanning else separability,
        trainable_head=trainable_head,
        memory_budget=memory_budget,
        strategy=strategy,
    )
    if tp > 1:
        local = make_plan(replace(local.problem, spread=True), strategy=strategy, memory_budget=memory_budget)
    p = local.problem
    head = columns * hidden_size * dtype.itemsize
    shards = dp * cp if sharding == "fsdp" else 1
    held = (1 + trainable_head) * head
    entries = p.tokens * columns
    gradients = p.hidden_grad or p.weight_grad
    # fp32 logits are read once and G written; a vocabulary that is spread is read again, once the ranks have met.
    read = p.logits_bytes * (1 + (tp > 1 and gradients and local.strategy != "recompute"))
    visits = entries * (read + p.compute_bytes) + (entries * p.logits_bytes if local.strategy == "recompute" else 0)
    notes = []
    if spanning:
        notes.append(f"units of a {separability} loss span {cp} ranks: log-probabilities first, then the loss")
    if tp > 1 and tp > rates.devices:
        notes.append(f"tensor parallelism over {tp} ranks leaves the node of {rates.devices}")
    return ClusterPlan(
        local=local,
        mesh=(dp, tp, cp),
        sharding=sharding,
        rates=rates,
        full_logits=rows * length * columns * 4,
        stored=-(-held // shards),
        gathered=held if shards > 1 else 0,
        traffic=tuple(_traffic(local, head, sequences // dp, (dp, tp, cp), sharding, spanning, rates)),
        products_seconds=local.gemms * 2 * p.tokens * hidden_size * columns / rates.products,
        visits_seconds=visits / rates.memory,
        warnings=tuple(notes),
    )


def _traffic(
    local: Plan, head: int, rows: int, mesh: tuple[int, int, int], sharding: str, spanning: bool, rates: Rates
) -> list[Traffic]:
    dp, tp, cp = mesh
    p = local.problem
    found = []

    def add(what: str, received: float, calls: int, reach: int) -> None:
        rate = rates.inside if reach <= rates.devices else rates.between
        found.append(Traffic(what, round(received), calls, calls * rates.latency + received / rate))

    if tp > 1:
        tiles = 1 if local.strategy == "recompute" else -(-p.tokens // local.logit_rows)
        # Maximum, sum and the target's logit of each token, from every other rank.
        add("statistics, gathered a tile", 3 * p.statistics_bytes * p.tokens * (tp - 1), tiles, tp)
        if p.hidden_grad:
            calls = 1 if local.strategy == "recompute" else -(-p.positions // rows_summed(p.hidden_size))
            add("hidden gradient, reduced", 2 * (tp - 1) / tp * p.hidden_bytes, calls, tp)
    if spanning:
        add("log-probabilities of sequences, summed", 2 * 2 * (cp - 1) / cp * rows * p.statistics_bytes, 2, tp * cp)
    ranks = dp * cp
    if ranks > 1:
        share = (ranks - 1) / ranks
        if sharding == "fsdp":
            add("weight, gathered in forward and backward", (1 + p.any_grad) * share * head, 1 + p.any_grad, tp * ranks)
            if p.weight_grad:
                add("weight gradient, reduced and scattered", share * head, 1, tp * ranks)
        elif p.weight_grad:
            add("weight gradient, reduced", 2 * share * head, 1, tp * ranks)
    return found
