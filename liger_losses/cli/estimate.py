"""What a step of the loss head takes, before it runs: memory from the planner, time from a simple model.

    time = products * 2 N H V / (product rate) + bytes moved beside them / (rate of a device copy)

`N` counts the tokens that are projected: all of them with full logits, the scored ones otherwise. Forward and backward,
16-bit tensors, the reference's or teacher's projection included. Bytes moved are per logit:

| | moved per logit |
|---|---|
| full logits, eager | 46 bytes, 21 more for a reference; JSD 314, forward KL 138: fitted to the H200's results |
| TRL's fused head | 2 in forward; 2 + 2 in backward |
| ours | one read of a logit for each visit, one write of a 16-bit gradient; two visits of two logits for divergences |

and beside them the fp32 sums of gradients, read and written once for each tile. Tests hold this to within 9 % of every
row of the committed H200 results that it speaks of (most are within 3 %), and memory to within 5 %.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..chunked.planner import STRATEGIES, default_budget, plan
from ..chunked.problem import Plan
from ..chunked.strategies import cost
from .gpus import Gpu
from .models import Head
from .options import MOST_EXAMPLES, MOST_TOKENS
from .workloads import Workload

# Of TRL 1.16: tokens and vocabulary columns of its tile.
_TRL_TOKENS, _TRL_COLUMNS = 4096, 32768
# Whole fp32 tensors of logits alive at the peak (of log-probabilities: logits, log-softmax and its gradient).
_FULL_TENSORS = {None: 3, "forward_kl": 8, "jsd": 12}
_FULL_MOVED = {None: 46, "forward_kl": 138, "jsd": 314}
_FULL_REFERENCE_MOVED = 21


@dataclass(frozen=True)
class Step:
    """One step: `examples` of `length` tokens a row, whose first `prompt` share is not scored."""

    workload: Workload
    head: Head
    examples: int
    length: int
    prompt: float = 0.0
    trainable_head: bool = True
    teacher_hidden_size: int | None = None
    logits_dtype: str = "float32"
    memory_budget: int | None = None

    @property
    def rows(self) -> int:
        return self.examples * self.workload.rows

    @property
    def positions(self) -> int:
        return self.rows * self.length

    @property
    def scored_per_row(self) -> int:
        return self.length - int(self.prompt * self.length)

    @property
    def scored(self) -> int:
        return self.rows * self.scored_per_row

    @property
    def returned_bytes(self) -> int:
        """The gradients handed back, 16-bit."""
        return 2 * self.head.hidden_size * (self.positions + self.trainable_head * self.head.vocab_size)

    @property
    def hidden_bytes(self) -> int:
        """Hidden states and their gradient, and those of the second model."""
        second = self.teacher_hidden_size or self.workload.reference * self.head.hidden_size
        return 2 * self.positions * (2 * self.head.hidden_size + second)

    def product_ms(self, gpu: Gpu, tokens: int) -> float:
        return 2e-9 * tokens * self.head.hidden_size * self.head.vocab_size / gpu.tflops

    @property
    def second_products(self) -> float:
        """The reference's or the teacher's projection, in products of the policy's."""
        return (self.teacher_hidden_size or self.head.hidden_size * self.workload.reference) / self.head.hidden_size


@dataclass(frozen=True)
class Estimate:
    """`workspace` is the peak beyond inputs and returned gradients; None: does not fit the budget."""

    way: str
    products: float  # in 2 N H V over the scored tokens
    milliseconds: float
    workspace: int | None
    least: int | None = None  # the smallest memory_budget it can do with
    chosen: bool = False


def full_logits(step: Step, gpu: Gpu) -> Estimate:
    """Eager torch: logits of every position, their softmax in fp32."""
    kind = step.workload.divergence
    entries = step.positions * step.head.vocab_size
    products = 2 + step.trainable_head + step.second_products
    moved = _FULL_MOVED[kind] + _FULL_REFERENCE_MOVED * step.workload.reference
    workspace = max(0, 4 * _FULL_TENSORS[kind] * entries - step.returned_bytes)
    milliseconds = products * step.product_ms(gpu, step.positions) + 1e-9 * moved * entries / gpu.tb_s
    return Estimate("full logits, eager", products * step.positions / step.scored, milliseconds, workspace)


def trl_head(step: Step, gpu: Gpu) -> Estimate:
    """TRL 1.16's fused head on the scored tokens: log-probabilities forward, logits again backward."""
    tokens, hidden, vocab = step.scored, step.head.hidden_size, step.head.vocab_size
    tiles = -(-tokens // _TRL_TOKENS)
    tile = 2 * min(tokens, _TRL_TOKENS) * min(vocab, _TRL_COLUMNS)
    weight = step.trainable_head * hidden * vocab
    # At the end of backward: the tile, fp32 sums and their 16-bit copies, and the gathered hidden states.
    workspace = max(0, tile + tokens * hidden * (4 + 2 + 2) + weight * (4 + 2) - step.returned_bytes)
    products = 3 + step.trainable_head + step.second_products
    sums = 8 * tokens * hidden * -(-vocab // _TRL_COLUMNS) + weight * (8 * tiles + 4 + 6)
    moved = tokens * vocab * (6 + 2 * step.workload.reference) + sums
    milliseconds = products * step.product_ms(gpu, tokens) + 1e-9 * moved / gpu.tb_s
    return Estimate("TRL 1.16 fused head", products, milliseconds, workspace)


def plan_of(step: Step, strategy: str = "auto") -> Plan:
    return plan(
        tokens=step.positions,
        scored=[step.scored_per_row] * step.rows,
        hidden_size=step.head.hidden_size,
        vocab_size=step.head.vocab_size,
        separability=step.workload.separability,
        trainable_head=step.trainable_head,
        teacher_hidden_size=step.teacher_hidden_size,
        logits_dtype=step.logits_dtype,
        memory_budget=step.memory_budget,
        strategy=strategy,
    )


def _ours_ms(made: Plan, step: Step, gpu: Gpu) -> float:
    wide = made.problem.logits_bytes
    second = 2 if step.workload.divergence else 1
    # Visits with a gradient; without one before them: streamed units, and all of them where logits are recomputed.
    once = 2 + step.trainable_head + (step.second_products if step.workload.divergence else 0)
    again = max(0.0, made.gemms - once) / (1 + (made.problem.teacher_gemms or 0))
    per_logit = second * second * wide + 2 + again * second * wide
    moved = step.scored * step.head.vocab_size * (per_logit + wide * step.workload.reference)
    reference = step.second_products if step.workload.reference else 0.0
    return (cost(made) + reference) * step.product_ms(gpu, step.scored) + 1e-9 * moved / gpu.tb_s


def _least_budget(step: Step, strategy: str) -> int:
    """The smallest budget under which `strategy` can be planned, to 1 MiB."""
    low, high = 1, 2
    while not _fits(replace(step, memory_budget=high << 20), strategy):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(replace(step, memory_budget=middle << 20), strategy) else (middle, high)
    return high << 20


def _fits(step: Step, strategy: str) -> bool:
    try:
        return plan_of(step, strategy).workspace <= (step.memory_budget or 1 << 62)
    except ValueError:
        return False


def ours(step: Step, gpu: Gpu) -> list[Estimate]:
    """Each strategy that the loss allows; the one that `"auto"` takes is `chosen`."""
    free = replace(step, memory_budget=None)
    chosen = plan_of(step).strategy if _fits(step, "auto") else None
    reference = step.second_products if step.workload.reference else 0.0
    found = []
    for strategy in STRATEGIES:
        if not _allowed(free, strategy):
            continue
        fits = _fits(step, strategy)
        made = plan_of(step if fits else free, strategy)
        found.append(
            Estimate(
                strategy,
                made.gemms + reference,
                _ours_ms(made, step, gpu),
                made.workspace if fits else None,
                _least_budget(step, strategy),
                strategy == chosen,
            )
        )
    return found


def _allowed(step: Step, strategy: str) -> bool:
    # A frozen head's other strategies do more work for nothing.
    if not step.trainable_head and strategy != "frozen":
        return False
    try:
        plan_of(step, strategy)
    except ValueError:
        return False
    return True


def estimates(step: Step, gpu: Gpu) -> list[Estimate]:
    """Full logits, TRL's head where it computes the loss, and each of our strategies."""
    peers = [full_logits(step, gpu)]
    if not step.workload.divergence:
        peers.append(trl_head(step, gpu))
    return [*peers, *ours(step, gpu)]


def with_more_memory(step: Step, gpu: Gpu, found: list[Estimate]) -> Estimate | None:
    """The fastest of our strategies, where `"auto"` takes another one only because `step.memory_budget` or its default
    is too small for it, and the GPU is not."""
    chosen = next((one for one in found if one.chosen), None)
    if chosen is None:
        return None
    budget = default_budget(plan_of(step).problem) if step.memory_budget is None else step.memory_budget
    faster = [
        one
        for one in found
        if one.least is not None and budget < one.least <= gpu.gib << 30 and one.milliseconds < chosen.milliseconds
        if plan_of(replace(step, memory_budget=one.least)).strategy == one.way
    ]
    return min(faster, key=lambda one: one.milliseconds, default=None)


def largest(step: Step, way: str, memory: int) -> tuple[int, int]:
    """Most examples at this length, and the longest rows at this many examples, that `memory` bytes hold.

    Counted are hidden states, their gradient and the workspace; not the head and its gradient, which are the model's.
    0: not even one. Searched up to 4,096 examples and 4 Mi tokens.
    """
    peers: dict[str, Callable[[Step, Gpu], Estimate]] = {
        "full logits, eager": full_logits,
        "TRL 1.16 fused head": trl_head,
    }
    anywhere = Gpu("", 0, 1.0, 1.0, 1.0, 1.0, measured=False)

    def holds(candidate: Step) -> bool:
        room = memory - candidate.hidden_bytes
        if way in peers:
            return (peers[way](candidate, anywhere).workspace or 0) <= room
        return room > 0 and _fits(replace(candidate, memory_budget=room), way)

    most = max(1, min(MOST_EXAMPLES, MOST_TOKENS // (step.workload.rows * step.length)))
    batch = _last(lambda examples: holds(replace(step, examples=examples)), most)
    length = _last(lambda length: holds(replace(step, length=length)), MOST_TOKENS // step.rows)
    return batch, length


def _last(holds: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` for which `holds`, which is true below it and false above; 0 if for none."""
    low, high = 0, 1
    while high <= most and holds(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
