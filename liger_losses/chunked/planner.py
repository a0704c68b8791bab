"""Which strategy, and how large its tiles: from shapes and a byte budget alone, so that a run is reproducible.

*Workspace* is what a call allocates at its peak beyond its inputs and the gradients it returns. `strategies` says what
each one takes at a budget; here is which are allowed, and which of them is the fastest.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from .._checks import check_flag, check_size
from .active import ActiveVocabulary
from .head import check_logits_dtype
from .problem import MIB, Plan, Problem
from .strategies import ACTIVE_SHARE, BUILDERS, FULL_RATE_ROWS, PRODUCT_ROWS, ROW_BLOCK, cost, exact_cached
from .tokens import SEPARABILITY

STRATEGIES = tuple(BUILDERS)


def default_budget(problem: Problem) -> int:
    """Bytes allowed when the caller names none.

    With a trainable head: what a running fp32 sum of the head's gradient takes anyway, an fp32 `[N, H]`, and 256 MiB
    for tiles. Without: 1.1875 GiB, where larger tiles stop paying. For a second model: the logits of as many rows as
    run at the full rate, 64 MiB, and what a visit to a tile takes beside. With an active vocabulary: what its columns
    take, and, as visits to logits are then a larger part of a step, 192 MiB for more of them at a time. Over ranks:
    wider sums of the hidden gradient.
    """
    rows = min(FULL_RATE_ROWS, problem.tokens)
    room = problem.two_heads * (rows * problem.teacher_row_bytes + 64 * MIB) + problem.visit_bytes
    room += problem.compaction_bytes(min(PRODUCT_ROWS, problem.tokens))
    room += problem.hidden_bytes - replace(problem, spread=False).hidden_bytes + problem.summed_bytes
    if not problem.weight_grad:
        return 1216 * MIB + room
    accumulator = problem.vocab_size * problem.hidden_size * problem.statistics_bytes
    tiles = (256 + 192 * problem.active) * MIB
    return accumulator + problem.tokens * problem.hidden_size * 4 + tiles + room


def check_tiling(
    strategy: str, memory_budget: int | None, logits_dtype: str = "float32", active_vocab: float | str | None = None
) -> None:
    """Raise for a strategy, budget, logits dtype or active vocabulary without a meaning."""
    if strategy != "auto" and strategy not in STRATEGIES:
        raise ValueError(f"strategy: got {strategy!r}, expected 'auto' or one of {STRATEGIES}")
    check_logits_dtype(logits_dtype)
    _check_resident(strategy, ActiveVocabulary.of(active_vocab) is not None)
    if memory_budget is None:
        return
    if isinstance(memory_budget, bool) or not isinstance(memory_budget, int):
        raise TypeError(f"memory_budget: got {memory_budget!r}, expected a number of bytes as an int")
    if not 0 < memory_budget < 1 << 63:
        raise ValueError(f"memory_budget: got {memory_budget}, expected bytes > 0 that fit 64 bits")


def check_deferred(strategy: str, loss: str) -> None:
    """Raise where values are handed out before the loss is known, which is what `immediate` needs; `loss` has it."""
    if strategy == "immediate":
        raise ValueError(f"strategy: got 'immediate', which is for {loss}; expected 'auto' or one of {STRATEGIES[1:]}")


def _check_resident(strategy: str, active: bool) -> None:
    if active and strategy == "recompute":
        raise ValueError(
            "strategy: got 'recompute' with active_vocab, whose columns are chosen while a tile's are all resident; "
            "expected another strategy, or active_vocab=None"
        )


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
        budget += problem.active_bytes(problem.tokens, ACTIVE_SHARE)
        if strategy == "cached":
            # Named without a budget: it takes what it needs, should all columns be active.
            tile = min(PRODUCT_ROWS, problem.tokens + ROW_BLOCK) * problem.padded_vocab * problem.compute_bytes
            budget = max(budget, exact_cached(problem, budget).workspace + tile)
    plans = [BUILDERS[name](problem, budget) for name in names]
    fitting = [plan for plan in plans if plan.workspace <= budget]
    if not fitting:
        least = min(plans, key=lambda plan: plan.workspace)
        if memory_budget is None:
            # It was named, or is the only one: it takes what it needs to project at the full rate.
            room = FULL_RATE_ROWS * (problem.padded_vocab * problem.logits_bytes + problem.teacher_row_bytes)
            return BUILDERS[least.strategy](problem, least.workspace + room)
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
        # Of equals (nothing to sum) the first is taken: with an active vocabulary the one that keeps nothing.
        names.insert(0 if p.active else len(names), "immediate")
    if not names:
        raise ValueError(
            "active_vocab: got one for a loss that differentiates entropy or lse and is not known while a tile is "
            "resident; expected None, or no gradient of those (fused_linear_loss has it for separable losses)"
        )
    return names


def _allowed(p: Problem, strategy: str) -> str:
    _check_resident(strategy, p.active)
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
        kinds = "'immediate'" if p.active else "'recompute' or 'immediate'"
        raise ValueError(
            f"strategy: got {strategy!r} for a loss that differentiates entropy or lse; expected {kinds} in "
            "fused_linear_loss, or leave those out of the differentiable statistics"
        )
    if strategy == "frozen" and (p.weight_grad or p.bias_grad):
        raise ValueError(
            "strategy: got 'frozen', but weight or bias requires a gradient; expected another strategy, or "
            "weight.requires_grad_(False)"
        )
    return strategy


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
        check_size(name, value)
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"dtype: got {dtype!r}, expected torch.float16, bfloat16, float32 or float64")
    check_flag("trainable_head", trainable_head)
    check_flag("trainable_hidden", trainable_hidden)
    check_tiling(strategy, memory_budget, logits_dtype, active_vocab)
    given = scored if isinstance(scored, Sequence) and not isinstance(scored, str) else (scored,)
    for number in given if scored is not None else ():
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"scored: got {number!r}, expected an int, or one for each row")
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
