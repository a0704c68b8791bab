"""Each strategy at a size of tile that a byte budget allows: its products, its phases and the buffers alive in them.

The same sizes are what `walk` allocates. *Workspace* is the largest phase beyond inputs and returned gradients.
"""

from __future__ import annotations

from collections.abc import Callable

from .active import CROSSOVER
from .problem import Plan, Problem
from .tokens import group_units, streamed, unit_sizes

ROW_BLOCK = 128
VOCAB_BLOCK = 128
# Rows a product of a gradient tile with the weight takes at a time, at most: on an H200 the rate rises up to here.
PRODUCT_ROWS = 3072

# Rows projected at a time, the dearest choice first. Measured on an H200 with fp32 logits at V 128,256 and 152,064:
# multiples of 384 run at the full rate from 768 on, while 896, 1,024 and 2,048 rows lose 2 to 6 %.
_LOGIT_ROWS = (1536, 1152, 768, 384, 256, ROW_BLOCK)
FULL_RATE_ROWS = 768
_FULL_RATE_STEP = 384

# Vocabulary columns a block: at most, and at least where blocks are a choice.
_MOST_COLUMNS = 8192
_LEAST_COLUMNS = 1024

# Share of the vocabulary that is active, as far as memory is set aside for columns kept until the row factor is known.
ACTIVE_SHARE = 0.125

# Floating-point operations a device does in the time it moves one byte (bf16 products against memory, H100/H200 class).
# Only the order of two strategies' costs depends on it, and only where they are close.
_FLOPS_PER_BYTE = 175


def cost(plan: Plan) -> float:
    """Time in units of one product: the products themselves plus what is moved besides."""
    p = plan.problem
    moved = 0.0
    if plan.strategy == "immediate" and p.weight_grad and not plan.whole_cache:
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
    full = min(FULL_RATE_ROWS, _round_rows(FULL_RATE_ROWS, p))
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
    if rows < min(FULL_RATE_ROWS, p.tokens) and not p.two_heads:
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
            backward = p.hidden_bytes + p.returned_bytes + p.summed_bytes
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
    return _active_cached(p, budget) if p.active else exact_cached(p, budget)


def _active_cached(p: Problem, budget: int) -> Plan:
    """The active columns of every tile are kept, as far as there is room; other tiles are projected again.

    Unless the first tile is multiplied whole, and so much can be kept: then everything is done as without.
    """
    accumulator = p.weight_grad * p.vocab_size * p.hidden_size * p.statistics_bytes
    kept = p.hidden_grad * p.hidden_bytes

    def workspace_of(rows: int, logit_rows: int) -> int:
        tile = _tile_bytes(p, rows, logit_rows) + p.compaction_bytes(rows) + _fixed_bytes(p)
        finishing = kept + accumulator + p.returned_bytes + p.summed_bytes
        return max(kept + accumulator + tile, finishing) - p.returned_bytes

    def plan_with(logit_rows: int) -> Plan:
        reserve = p.active_bytes(p.tokens, ACTIVE_SHARE)
        largest = _largest(lambda rows: workspace_of(rows, logit_rows) + reserve, budget, p)
        rows = max(1, min(PRODUCT_ROWS, largest) // logit_rows) * logit_rows
        needed = workspace_of(rows, logit_rows)
        cache = max(0, min(budget - needed, p.active_bytes(p.tokens, CROSSOVER)))
        whole = _whole_cache(p, budget, rows)
        once = 1.0 + p.teacher_gemms
        gemms = once + p.hidden_grad + p.weight_grad + once * (whole > budget)
        return Plan(
            p, "cached", rows, logit_rows, p.vocab_size, gemms, max(needed + cache, whole * (whole <= budget)), budget,
            cache_bytes=cache, whole_cache=whole <= budget,
        )  # fmt: skip

    return min(map(plan_with, _logit_rows(p)), key=_fast_rows)


def _whole_cache(p: Problem, budget: int, rows: int) -> int:
    """Bytes, where the first tile's `rows` turned out to be multiplied whole and all of `G` is kept from there on."""
    return exact_cached(p, budget).workspace + rows * p.padded_vocab * p.compute_bytes


def exact_cached(p: Problem, budget: int) -> Plan:
    cache = p.tokens * p.padded_vocab * p.compute_bytes
    kept = p.hidden_grad * p.hidden_bytes
    scaled = p.weight_grad * (1 + (_tile_copies(p) > 1)) * p.tokens * p.hidden_size * p.compute_bytes
    rows = _round_rows(min(PRODUCT_ROWS, p.tokens), p)
    wide = p.weight_grad * p.wide_weight_sum * p.vocab_size * p.hidden_size * p.statistics_bytes

    def workspace_of(logit_rows: int) -> int:
        tile = _tile_bytes(p, rows, logit_rows) - rows * p.padded_vocab * p.compute_bytes
        forward = kept + cache + tile + _fixed_bytes(p)
        backward = kept + cache + p.returned_weight + max(scaled + wide, p.returned_hidden + p.summed_bytes)
        return max(forward, backward) - p.returned_bytes

    choices = _logit_rows(p)
    logit_rows = next((rows for rows in choices if workspace_of(rows) <= budget), choices[-1])
    gemms = 1.0 + p.hidden_grad + p.weight_grad + p.teacher_gemms
    return Plan(p, "cached", rows, logit_rows, p.vocab_size, gemms, workspace_of(logit_rows), budget)


def _plan_immediate(p: Problem, budget: int) -> Plan:
    # Logits and gradient tile share the budget: fewer rows projected at a time where that lets a unit stay whole.
    plans = [_immediate_with(p, budget, rows) for rows in _logit_rows(p)]
    return min(plans, key=lambda plan: (plan.workspace > budget, cost(plan), plan.groups))


def _immediate_with(p: Problem, budget: int, logit_rows: int) -> Plan:
    accumulator = p.weight_grad * p.vocab_size * p.hidden_size * p.statistics_bytes
    kept = p.hidden_grad * p.hidden_bytes

    longest = max(unit_sizes(p.row_counts, p.unit_rows), default=0) if p.separability in ("sequence", "pair") else 0

    def reserve(rows: int) -> int:
        """For the active columns of a unit's tiles, until its factors are known."""
        return p.active * p.active_bytes(max(0, longest - rows), ACTIVE_SHARE)

    def workspace_of(rows: int) -> int:
        tile = _tile_bytes(p, rows, min(rows, logit_rows)) + p.compaction_bytes(rows) + reserve(rows)
        forward = accumulator + kept + tile + _fixed_bytes(p)
        backward = accumulator + kept + p.returned_bytes + p.summed_bytes
        return max(forward, backward) - p.returned_bytes

    capacity = _largest(workspace_of, budget, p)
    if p.separability == "token":
        capacity = _even(p.tokens, capacity, logit_rows)
    groups = group_units(_rows_or_one(p), p.separability, capacity, p.max_units, p.unit_rows)
    largest = max(group.count for group in groups)
    rows = _round_rows(min(capacity, -(-largest // ROW_BLOCK) * ROW_BLOCK), p)
    if p.active and largest > rows > logit_rows:
        rows -= rows % logit_rows  # whole projections: every tile of a unit is one of many
    again = sum(streamed(group.count, rows) for group in groups) if p.weight_grad or p.bias_grad else 0
    once = 1.0 + p.teacher_gemms
    gemms = once + p.hidden_grad + p.weight_grad + once * again / max(1, p.tokens)
    logit_rows = min(rows, logit_rows)
    workspace, cache = workspace_of(rows), reserve(rows)
    if cache:
        more = max(0, min(budget - workspace, p.active_bytes(longest - rows, CROSSOVER) - cache))
        workspace, cache = workspace + more, cache + more
    keeps = p.active and p.separability == "token" and p.weight_grad and not p.wide_weight_sum
    whole = _whole_cache(p, budget, rows) if keeps else budget + 1
    if whole <= budget:
        workspace = max(workspace, whole)
    return Plan(
        p, "immediate", rows, logit_rows, p.vocab_size, gemms, workspace, budget, len(groups), cache_bytes=cache,
        whole_cache=whole <= budget,
    )  # fmt: skip


def _even(tokens: int, capacity: int, logit_rows: int) -> int:
    """Rows a tile: no more tiles than with `capacity` rows each, of nearly one size, and projected at the full rate.

    A tile costs the host as much whatever its size, and the last one's work is done with the device waiting.
    """
    each = -(-tokens // -(-max(tokens, 1) // capacity))
    sizes = (-(-each // step) * step for step in (logit_rows, _FULL_RATE_STEP, ROW_BLOCK))
    return next((rows for rows in sizes if 0 < rows <= capacity), capacity)


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
        finishing = accumulator + cast + p.returned_bytes + p.summed_bytes
        return max(forward, walking, finishing) - p.returned_bytes

    most = min(_MOST_COLUMNS, -(-p.vocab_size // VOCAB_BLOCK) * VOCAB_BLOCK)
    columns = most
    while columns > VOCAB_BLOCK and workspace_of(columns) > budget:
        columns -= VOCAB_BLOCK
    gemms = 2.0 + p.hidden_grad + p.weight_grad + 2 * p.teacher_gemms
    workspace = workspace_of(columns)
    return Plan(p, "recompute", rows, rows, columns, gemms, workspace, budget, forward_columns=forward_columns)


BUILDERS: dict[str, Callable[[Problem, int], Plan]] = {
    "immediate": _plan_immediate,
    "cached": _plan_cached,
    "recompute": _plan_recompute,
    "frozen": _plan_frozen,
}
