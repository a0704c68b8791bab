"""Which strategy, and how large its tiles: from shapes and a byte budget alone, so that a run is reproducible.

*Workspace* is what a call allocates at its peak beyond its inputs and the gradients it returns. Each strategy's phases
are written out below as the buffers alive in them; the same sizes are what `walk` allocates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from .active import CROSSOVER, ActiveVocabulary
from .head import check_logits_dtype
from .problem import MIB, Plan, Problem
from .tokens import SEPARABILITY, group_units, unit_sizes

STRATEGIES = ("immediate", "cached", "recompute", "frozen")

ROW_BLOCK = 128
VOCAB_BLOCK = 128
# Rows a product of a gradient tile with the weight takes at a time, at most: on an H200 the rate rises up to here.
PRODUCT_ROWS = 3072

# Rows projected at a time, the dearest choice first. Measured on an H200 with fp32 logits at V 128,256 and 152,064:
# multiples of 384 run at the full rate from 768 on, while 896, 1,024 and 2,048 rows lose 2 to 6 %.
_LOGIT_ROWS = (1536, 1152, 768, 384, 256, ROW_BLOCK)
_FULL_RATE_ROWS = 768

# Vocabulary columns a block: at most, and at least where blocks are a choice.
_MOST_COLUMNS = 8192
_LEAST_COLUMNS = 1024

# Share of the vocabulary that is active, as far as memory is set aside for columns kept until the row factor is known.
_ACTIVE_SHARE = 0.125

# Floating-point operations a device does in the time it moves one byte (bf16 products against memory, H100/H200 class).
# Only the order of two strategies' costs depends on it, and only where they are close.
_FLOPS_PER_BYTE = 175


def default_budget(problem: Problem) -> int:
    """Bytes allowed when the caller names none.

    With a trainable head: what a running fp32 sum of the head's gradient takes anyway, an fp32 `[N, H]`, and 256 MiB
    for tiles. Without: 1.1875 GiB, where larger tiles stop paying. For a second model: the logits of as many rows as
    run at the full rate, 64 MiB, and what a visit to a tile takes beside. With an active vocabulary: what its columns
    take.
    """
    rows = min(_FULL_RATE_ROWS, problem.tokens)
    room = problem.two_heads * (rows * problem.teacher_row_bytes + 64 * MIB) + problem.visit_bytes
    room += problem.compaction_bytes(min(PRODUCT_ROWS, problem.tokens))
    if not problem.weight_grad:
        return 1216 * MIB + room
    accumulator = problem.vocab_size * problem.hidden_size * problem.statistics_bytes
    return accumulator + problem.tokens * problem.hidden_size * 4 + 256 * MIB + room


def check_tiling(strategy: str, memory_budget: int | None, logits_dtype: str = "float32") -> None:
    """Raise for a strategy, budget or logits dtype without a meaning."""
    if strategy != "auto" and strategy not in STRATEGIES:
        raise ValueError(f"strategy: got {strategy!r}, expected 'auto' or one of {STRATEGIES}")
    check_logits_dtype(logits_dtype)
    if memory_budget is None:
        return
    if isinstance(memory_budget, bool) or not isinstance(memory_budget, int):
        raise TypeError(f"memory_budget: got {memory_budget!r}, expected a number of bytes as an int")
    if not 0 < memory_budget < 1 << 63:
        raise ValueError(f"memory_budget: got {memory_budget}, expected bytes > 0 that fit 64 bits")


def make_plan(problem: Problem, *, strategy: str = "auto", memory_budget: int | None = None) -> Plan:
    """The fastest strategy whose workspace fits `memory_budget` (default: `default_budget`)."""
    check_tiling(strategy, memory_budget)
    return _planned(problem, strategy, memory_budget)


# A call asks up to three times, and the next step's call again; the host may have a device waiting for it.
@functools.lru_cache(maxsize=64)
def _planned(problem: Problem, strategy: str, memory_budget: int | None) -> Plan:
    # Without gradients (an evaluation of a module that names a strategy) every strategy is the same walk.
    free = strategy == "auto" or not problem.any_grad
    names = _candidates(problem) if free else [_allowed(problem, strategy)]
    if not problem.any_grad:
        problem = replace(problem, active=False)  # nothing to leave out
    budget = default_budget(problem) if memory_budget is None else memory_budget
    if memory_budget is None and problem.active and problem.weight_grad and "immediate" not in names:
        budget += problem.active_bytes(problem.tokens, _ACTIVE_SHARE)
        if strategy == "cached":
            # Named without a budget: it takes what it needs, should all columns be active.
            tile = min(PRODUCT_ROWS, problem.tokens + ROW_BLOCK) * problem.padded_vocab * problem.compute_bytes
            budget = max(budget, _exact_cached(problem, budget).workspace + tile)
    plans = [_BUILDERS[name](problem, budget) for name in names]
    fitting = [plan for plan in plans if plan.workspace <= budget]
    if not fitting:
        least = min(plans, key=lambda plan: plan.workspace)
        if memory_budget is None:
            # It was named, or is the only one: it takes what it needs to project at the full rate.
            room = _FULL_RATE_ROWS * (problem.padded_vocab * problem.logits_bytes + problem.teacher_row_bytes)
            return _BUILDERS[least.strategy](problem, least.workspace + room)
        raise ValueError(
            f"memory_budget: got {budget:,} bytes, too small for one row block; strategy {least.strategy!r} needs at "
            f"least {least.workspace:,} bytes at these shapes ({problem.tokens:,} scored tokens, H "
            f"{problem.hidden_size:,}, V {problem.vocab_size:,})"
        )
    return min(fitting, key=cost)


def _candidates(p: Problem) -> list[str]:
    if not p.any_grad:
        return ["frozen"]
    if not p.weight_grad and not p.bias_grad and p.only_logprob_grad:
        return ["frozen"] if p.active else ["frozen", "recompute"]
    names = [] if p.active else ["recompute"]
    if p.only_logprob_grad:
        names.append("cached")
    if p.immediate_allowed and p.separability != "batch":
        # Of equals the first is taken: with an active vocabulary the one that keeps nothing.
        names.insert(0 if p.active else len(names), "immediate")
    if not names:
        raise ValueError(
            "active_vocab: got one for a loss that differentiates entropy or lse and is not known while a tile is "
            "resident; expected None, or no gradient of those (fused_linear_loss has it for separable losses)"
        )
    return names


def _allowed(p: Problem, strategy: str) -> str:
    if strategy == "recompute" and p.active:
        raise ValueError(
            "strategy: got 'recompute' with active_vocab, whose columns are chosen while a tile's are all resident; "
            "expected another strategy, or active_vocab=None"
        )
    if strategy == "immediate" and not p.immediate_allowed:
        raise ValueError(
            "strategy: got 'immediate', which needs a loss known while the tile is resident; expected 'cached', "
            "'recompute' or 'frozen' for per-token statistics (fused_linear_loss has it, outside torch.compile)"
        )
    if strategy == "immediate" and p.separability == "batch":
        raise ValueError(
            "strategy: got 'immediate' for a loss separable only by 'batch'; expected 'cached' or 'recompute'"
        )
    if strategy in ("cached", "frozen") and not p.only_logprob_grad:
        raise ValueError(
            f"strategy: got {strategy!r} for a loss that differentiates entropy or lse; expected 'recompute' (or "
            "'immediate' in fused_linear_loss), or leave those out of the differentiable statistics"
        )
    if strategy == "frozen" and (p.weight_grad or p.bias_grad):
        raise ValueError(
            "strategy: got 'frozen', but weight or bias requires a gradient; expected another strategy, or "
            "weight.requires_grad_(False)"
        )
    return strategy


def cost(plan: Plan) -> float:
    """Time in units of one product: the products themselves plus what is moved besides."""
    p = plan.problem
    moved = 0.0
    if plan.strategy == "immediate" and p.weight_grad and not p.active:
        moved = plan.groups * 2 * p.vocab_size * p.hidden_size * p.statistics_bytes
    elif plan.strategy == "recompute":
        blocks = -(-p.vocab_size // plan.vocab_block)
        moved = blocks * 2 * p.tokens * p.hidden_size * p.statistics_bytes
    one_product = 2 * max(p.tokens, 1) * p.hidden_size * p.vocab_size
    return plan.gemms + _slow_rows(plan.logit_rows, p) + moved * _FLOPS_PER_BYTE / one_product


def _round_rows(rows: int, p: Problem) -> int:
    needed = -(-max(p.tokens, 1) // ROW_BLOCK) * ROW_BLOCK
    return max(ROW_BLOCK, min(rows // ROW_BLOCK * ROW_BLOCK, needed))


def _logit_rows(p: Problem) -> list[int]:
    """The choices of rows projected at a time, at these shapes, the largest first."""
    choices = _LOGIT_ROWS[p.two_heads :]  # a second model's rows cost as much again, for less than 1 % beyond 1,152
    return sorted({_round_rows(rows, p) for rows in choices}, reverse=True)


def _slow_rows(logit_rows: int, p: Problem) -> float:
    """What products over few rows cost beyond one at the full rate, in products (384 rows: measured on an H200)."""
    full = min(_FULL_RATE_ROWS, _round_rows(_FULL_RATE_ROWS, p))
    return 0.17 * max(0.0, full / logit_rows - 1)


def _fixed_bytes(p: Problem) -> int:
    """Copies of weights, and what a visit to a tile takes beside."""
    return p.cast_weight * p.vocab_size * p.hidden_size * p.compute_bytes + p.teacher_fixed_bytes + p.visit_bytes


def _tile_bytes(p: Problem, tile_rows: int, logit_rows: int) -> int:
    """Gradient tile, logits, and the tile's hidden rows and products."""
    vocab = p.padded_vocab
    logits = logit_rows * (vocab * p.logits_bytes + p.teacher_row_bytes)
    return tile_rows * vocab * p.compute_bytes + logits + _tile_copies(p) * tile_rows * p.hidden_size * p.compute_bytes


def _tile_copies(p: Problem) -> int:
    """`[rows, H]` tensors of a tile: scaled hidden rows, and where tokens are gathered, the rows and their product."""
    contiguous = p.tokens == p.positions and p.hidden_itemsize == p.compute_bytes and p.separability == "token"
    return 1 if contiguous else 3


def _largest(fits: Callable[[int], int], budget: int, p: Problem) -> int:
    """Largest multiple of ROW_BLOCK rows for which `fits(rows)` bytes stay within `budget` (at least one block)."""
    low, high = 1, _round_rows(p.tokens + ROW_BLOCK, p) // ROW_BLOCK
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * ROW_BLOCK) <= budget else (low, middle - 1)
    return low * ROW_BLOCK


def _compact_bytes(p: Problem) -> int:
    """A copy of the scored hidden states, where they are not simply all of them."""
    return 0 if p.tokens == p.positions else p.tokens * p.hidden_size * p.compute_bytes


def _statistics_alone(p: Problem, budget: int) -> tuple[int, int, int]:
    """Rows a tile, columns a tile, and workspace, of a walk without gradients: the logits buffer is the tile.

    Whole rows while enough of them fit for the full rate; with less memory all tokens over a block of the vocabulary,
    because a product over few rows reads the weight for little arithmetic.
    """

    def rows_bytes(rows: int) -> int:
        each = p.padded_vocab * p.logits_bytes + p.teacher_row_bytes + p.hidden_size * p.compute_bytes
        return rows * each + _fixed_bytes(p)

    choices = _logit_rows(p)
    rows = next((rows for rows in choices if rows_bytes(rows) <= budget), choices[-1])
    if rows < min(_FULL_RATE_ROWS, p.tokens) and not p.two_heads:
        fixed = _compact_bytes(p) + _fixed_bytes(p)
        columns = min(_MOST_COLUMNS, (budget - fixed) // (p.tokens * p.logits_bytes)) // VOCAB_BLOCK * VOCAB_BLOCK
        if _LEAST_COLUMNS <= columns < p.vocab_size:
            return -(-p.tokens // ROW_BLOCK) * ROW_BLOCK, columns, fixed + columns * p.tokens * p.logits_bytes
    return rows, p.vocab_size, rows_bytes(rows)


def _plan_frozen(p: Problem, budget: int) -> Plan:
    if not p.any_grad:
        rows, columns, workspace = _statistics_alone(p, budget)
        gemms = 1.0 + p.teacher_gemms
        return Plan(p, "frozen", rows, rows, p.vocab_size, gemms, workspace, budget, forward_columns=columns)

    def plan_with(logit_rows: int) -> Plan:
        def workspace_of(rows: int) -> int:
            forward = p.hidden_bytes + _tile_bytes(p, rows, logit_rows) + _fixed_bytes(p) + p.compaction_bytes(rows)
            backward = p.hidden_bytes + p.returned_bytes
            return max(forward, backward) - p.returned_bytes

        # Whole projections: a tile's last one would otherwise be a slow one.
        rows = max(1, min(PRODUCT_ROWS, _largest(workspace_of, budget, p)) // logit_rows) * logit_rows
        return Plan(p, "frozen", rows, logit_rows, p.vocab_size, 2.0 + p.teacher_gemms, workspace_of(rows), budget)

    return min(map(plan_with, _logit_rows(p)), key=_fast_rows)


def _fast_rows(plan: Plan) -> tuple[int, float, int]:
    """Sorts plans of one strategy: those that fit, at full rate, with the largest products; of others the smallest."""
    if plan.workspace > plan.budget:
        return plan.workspace, 0.0, 0
    return 0, _slow_rows(plan.logit_rows, plan.problem), -plan.tile_rows


def _plan_cached(p: Problem, budget: int) -> Plan:
    return _active_cached(p, budget) if p.active else _exact_cached(p, budget)


def _active_cached(p: Problem, budget: int) -> Plan:
    """The active columns of every tile are kept, as far as there is room; other tiles are projected again.

    Unless the first tile is multiplied whole, and so much can be kept: then everything is done as without.
    """
    accumulator = p.weight_grad * p.vocab_size * p.hidden_size * p.statistics_bytes
    kept = p.hidden_grad * p.hidden_bytes

    def workspace_of(rows: int, logit_rows: int) -> int:
        tile = _tile_bytes(p, rows, logit_rows) + p.compaction_bytes(rows) + _fixed_bytes(p)
        finishing = kept + accumulator + p.returned_bytes
        return max(kept + accumulator + tile, finishing) - p.returned_bytes

    def plan_with(logit_rows: int) -> Plan:
        reserve = p.active_bytes(p.tokens, _ACTIVE_SHARE)
        largest = _largest(lambda rows: workspace_of(rows, logit_rows) + reserve, budget, p)
        rows = max(1, min(PRODUCT_ROWS, largest) // logit_rows) * logit_rows
        needed = workspace_of(rows, logit_rows)
        cache = max(0, min(budget - needed, p.active_bytes(p.tokens, CROSSOVER)))
        whole = _exact_cached(p, budget).workspace + rows * p.padded_vocab * p.compute_bytes
        once = 1.0 + p.teacher_gemms
        gemms = once + p.hidden_grad + p.weight_grad + once * (whole > budget)
        return Plan(
            p, "cached", rows, logit_rows, p.vocab_size, gemms, max(needed + cache, whole * (whole <= budget)), budget,
            cache_bytes=cache, whole_cache=whole <= budget,
        )  # fmt: skip

    return min(map(plan_with, _logit_rows(p)), key=_fast_rows)


def _exact_cached(p: Problem, budget: int) -> Plan:
    cache = p.tokens * p.padded_vocab * p.compute_bytes
    kept = p.hidden_grad * p.hidden_bytes
    scaled = p.weight_grad * (1 + (_tile_copies(p) > 1)) * p.tokens * p.hidden_size * p.compute_bytes
    rows = _round_rows(min(PRODUCT_ROWS, p.tokens), p)
    wide = p.weight_grad * p.wide_weight_sum * p.vocab_size * p.hidden_size * p.statistics_bytes

    def workspace_of(logit_rows: int) -> int:
        tile = _tile_bytes(p, rows, logit_rows) - rows * p.padded_vocab * p.compute_bytes
        forward = kept + cache + tile + _fixed_bytes(p)
        backward = kept + cache + p.returned_weight + max(scaled + wide, p.returned_hidden)
        return max(forward, backward) - p.returned_bytes

    choices = _logit_rows(p)
    logit_rows = next((rows for rows in choices if workspace_of(rows) <= budget), choices[-1])
    gemms = 1.0 + p.hidden_grad + p.weight_grad + p.teacher_gemms
    return Plan(p, "cached", rows, logit_rows, p.vocab_size, gemms, workspace_of(logit_rows), budget)


def _plan_immediate(p: Problem, budget: int) -> Plan:
    # Logits and gradient tile share the budget: fewer rows projected at a time where that lets a unit stay whole.
    plans = [_immediate_with(p, budget, rows) for rows in _logit_rows(p)]
    return min(plans, key=lambda plan: (plan.workspace > budget, cost(plan)))


def _immediate_with(p: Problem, budget: int, logit_rows: int) -> Plan:
    accumulator = p.weight_grad * p.vocab_size * p.hidden_size * p.statistics_bytes
    kept = p.hidden_grad * p.hidden_bytes

    longest = max(unit_sizes(p.row_counts, p.unit_rows), default=0) if p.separability in ("sequence", "pair") else 0

    def reserve(rows: int) -> int:
        """For the active columns of a unit's tiles, until its factors are known."""
        return p.active * p.active_bytes(max(0, longest - rows), _ACTIVE_SHARE)

    def workspace_of(rows: int) -> int:
        tile = _tile_bytes(p, rows, min(rows, logit_rows)) + p.compaction_bytes(rows) + reserve(rows)
        forward = accumulator + kept + tile + _fixed_bytes(p)
        backward = accumulator + kept + p.returned_bytes
        return max(forward, backward) - p.returned_bytes

    capacity = _largest(workspace_of, budget, p)
    groups = group_units(_rows_or_one(p), p.separability, capacity, p.max_units, p.unit_rows)
    largest = max(group.count for group in groups)
    rows = _round_rows(min(capacity, -(-largest // ROW_BLOCK) * ROW_BLOCK), p)
    if p.active and largest > rows > logit_rows:
        rows -= rows % logit_rows  # whole projections: every tile of a unit is one of many
    again = sum(_streamed(group.count, rows) for group in groups) if p.weight_grad or p.bias_grad else 0
    once = 1.0 + p.teacher_gemms
    gemms = once + p.hidden_grad + p.weight_grad + once * again / max(1, p.tokens)
    logit_rows = min(rows, logit_rows)
    workspace, cache = workspace_of(rows), reserve(rows)
    if cache:
        more = max(0, min(budget - workspace, p.active_bytes(longest - rows, CROSSOVER) - cache))
        workspace, cache = workspace + more, cache + more
    return Plan(
        p, "immediate", rows, logit_rows, p.vocab_size, gemms, workspace, budget, len(groups), cache_bytes=cache
    )


def _streamed(count: int, rows: int) -> int:
    """Tokens of a group that are projected again: all but its last tile."""
    return 0 if count <= rows else (count - 1) // rows * rows


def _rows_or_one(p: Problem) -> tuple[int, ...]:
    return p.row_counts or ((p.tokens,) if p.tokens else ())


def _plan_recompute(p: Problem, budget: int) -> Plan:
    compact = _compact_bytes(p) + p.teacher_compact_bytes
    accumulator = p.hidden_grad * p.tokens * p.hidden_size * p.statistics_bytes
    kinds = p.logits_bytes + p.teacher_column_bytes + (0 if p.in_place else p.compute_bytes)
    per_column = max(p.tokens, 1) * kinds
    rows, forward_columns, forward = _statistics_alone(p, budget)

    def workspace_of(columns: int) -> int:
        walking = compact + accumulator + columns * per_column + p.returned_weight + _fixed_bytes(p)
        # The hidden gradient is cast, and where tokens are scattered the cast is a copy beside the result.
        cast = p.hidden_grad * (p.tokens < p.positions) * p.tokens * p.hidden_size * p.hidden_itemsize
        finishing = accumulator + cast + p.returned_bytes
        return max(forward, walking, finishing) - p.returned_bytes

    most = min(_MOST_COLUMNS, -(-p.vocab_size // VOCAB_BLOCK) * VOCAB_BLOCK)
    columns = most
    while columns > VOCAB_BLOCK and workspace_of(columns) > budget:
        columns -= VOCAB_BLOCK
    gemms = 2.0 + p.hidden_grad + p.weight_grad + 2 * p.teacher_gemms
    workspace = workspace_of(columns)
    return Plan(p, "recompute", rows, rows, columns, gemms, workspace, budget, forward_columns=forward_columns)


_BUILDERS: dict[str, Callable[[Problem, int], Plan]] = {
    "immediate": _plan_immediate,
    "cached": _plan_cached,
    "recompute": _plan_recompute,
    "frozen": _plan_frozen,
}


def plan(
    *,
    tokens: int,
    hidden_size: int,
    vocab_size: int,
    scored: int | Sequence[int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    logits_dtype: str = "float32",
    separability: str = "token",
    trainable_head: bool = True,
    trainable_hidden: bool = True,
    teacher_hidden_size: int | None = None,
    memory_budget: int | None = None,
    strategy: str = "auto",
    active_vocab: float | str | None = None,
) -> Plan:
    """The plan of a `fused_linear_loss` with these shapes, without calling it.

    Args:
        tokens: positions, scored or not (rows x length).
        hidden_size, vocab_size: of the head.
        scored: scored tokens: their number, or one number per row (pairs: chosen rows first). Default: all. A single
            number is one row (for pairs: one pair).
        dtype: of the products. logits_dtype: `"float32"` or `"input"`.
        separability: of the loss: `"token"`, `"sequence"`, `"pair"`, `"batch"`.
        trainable_head, trainable_hidden: whether the weight and the hidden states need gradients.
        teacher_hidden_size: of a second model's head over the same vocabulary, for distillation.
        memory_budget: bytes beyond inputs and returned gradients. strategy, active_vocab: as in `fused_linear_loss`.

    Returns:
        A `Plan`; `plan.explain()` says it in words, `plan.workspace` is the predicted peak in bytes.
    """
    if separability not in SEPARABILITY:
        raise ValueError(f"separability: got {separability!r}, expected one of {SEPARABILITY}")
    sizes = {"tokens": tokens, "hidden_size": hidden_size, "vocab_size": vocab_size}
    if teacher_hidden_size is not None:
        sizes["teacher_hidden_size"] = teacher_hidden_size
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: got {value!r}, expected an int")
        if value < 1:
            raise ValueError(f"{name}: got {value}, expected >= 1")
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"dtype: got {dtype!r}, expected torch.float16, bfloat16, float32 or float64")
    for name, flag in (("trainable_head", trainable_head), ("trainable_hidden", trainable_hidden)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: got {flag!r}, expected True or False")
    check_tiling(strategy, memory_budget, logits_dtype)
    if scored is None or isinstance(scored, int):
        # One number stands for one row, or for a pair of two.
        total = tokens if scored is None else scored
        counts: tuple[int, ...] = (total - total // 2, total // 2) if separability == "pair" else (total,)
    else:
        counts = tuple(scored)
    if min(counts, default=0) < 0:
        raise ValueError(f"scored: got {min(counts)}, expected counts >= 0")
    if sum(counts) > tokens:
        raise ValueError(f"scored: got {sum(counts)}, more than tokens={tokens}")
    if separability == "pair" and len(counts) % 2:
        raise ValueError(f"scored: got {len(counts)} rows for pairs, expected an even number, chosen rows first")
    size = dtype.itemsize
    wide = 8 if dtype == torch.float64 else 4
    problem = Problem(
        tokens=sum(counts),
        positions=tokens,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        compute_bytes=size,
        logits_bytes=size if logits_dtype == "input" else wide,
        statistics_bytes=wide,
        hidden_itemsize=size,
        weight_itemsize=size,
        hidden_grad=trainable_hidden,
        weight_grad=trainable_head,
        immediate_allowed=True,
        separability=separability,
        row_counts=counts,
        unit_rows=2 if separability == "pair" else 1,
        active=ActiveVocabulary.of(active_vocab) is not None,
    )
    if teacher_hidden_size is not None:
        problem = problem.beside_head(vocab_size, teacher_hidden_size, size, vocab_size=vocab_size)
    return make_plan(problem, strategy=strategy, memory_budget=memory_budget)
