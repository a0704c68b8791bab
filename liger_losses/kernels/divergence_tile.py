"""Two models' logits tiles -> per-token distillation, and its gradient with respect to the student's projected rows.

With student `s`, teacher `t` and a divergence `D = sum_v d(s_v, t_v)`, write `g_v = s_v dd/ds_v` and `S = sum_v g_v`:

    dD/dz_v = g_v - s_v S

so one number per row beside the two log-sum-exps makes the gradient of any such divergence, and it does not depend on
the loss built on the divergence. The hard label adds `softmax(z) - 1[v = y]` of the same row.

The values are summed in a form whose every term is >= 0. With `phi(y) = e^y - 1 - y`,

    KL(a || b) = sum_v a_v phi(log(b_v / a_v))

equals `sum_v a_v log(a_v / b_v)` because both sides' probabilities sum to 1. It is never negative, exactly 0 for equal
rows, and the rounding of the log-sum-exps enters only to second order: for near-equal models the plain form loses all
its digits to cancellation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .dispatch import use_triton
from .divergence import Divergence
from .head_mass import head_share
from .row_numbers import RowNumbers
from .tile_statistics import TWIN_ELEMENTS, row_slices
from .transform import LogitTransform

_DEVICE_TIMES = 8  # 16 MiB of an fp32 tile at a time

# A norm up to which logits have no direction to compare. (torch's normalize does not divide by less, either.)
NO_DIRECTION = 1e-12


@dataclass(frozen=True)
class TeacherTile:
    """Rows of the teacher's logits (or probabilities) and what is done to them."""

    logits: Tensor  # [rows, columns] projected rows, logits, log-probabilities or probabilities
    bias: Tensor | None = None  # [columns]
    transform: LogitTransform = field(default_factory=LogitTransform)
    probabilities: bool = False

    def rows(self, rows: slice) -> TeacherTile:
        return TeacherTile(self.logits[rows], self.bias, self.transform, self.probabilities)

    def tempered(self, rows: slice, inverse_temperature: float, dtype: torch.dtype) -> Tensor:
        logits = self.logits[rows].to(dtype)
        return self.transform.apply(torch.log(logits) if self.probabilities else logits, self.bias)[0] * (
            inverse_temperature
        )


class DivergenceState(RowNumbers):
    """What is known of `rows` rows once their tiles have been visited, with what `RowState` offers.

    `student_lse`, `teacher_lse`: of the tempered logits that the divergence compares; `hard_lse`, `target`: of the
    student's logits as they are; `total`: `S` (for `cosine`: the cosine; then `student_lse` and `teacher_lse` hold
    the logits' norms, infinite where they have no direction; for `mse`: one over the columns); `share`: of `akl`, the
    weight of forward KL. These are what a later visit to some of the columns needs.
    """

    kept = ("student_lse", "teacher_lse", "hard_lse", "share", "total")

    student_lse: Tensor
    teacher_lse: Tensor
    hard_lse: Tensor
    share: Tensor
    total: Tensor
    value: Tensor
    target: Tensor
    gradient_scale: Tensor  # 1: `out` is final
    entropy: Tensor | None = None
    teacher_entropy: Tensor | None = None

    def __init__(
        self,
        rows: int,
        names: tuple[str, ...],
        divergence: Divergence,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.names, self.divergence = names, divergence
        values = dict.fromkeys((*self.kept, "value"), 0.0) | {"target": math.nan, "gradient_scale": 1.0}
        if "entropy" in names or "teacher_entropy" in names:
            values |= {"entropy": 0.0, "teacher_entropy": 0.0}
        self.allocate(values, rows, device, dtype)

    @property
    def reads_label(self) -> bool:
        return self.divergence.hard_weight > 0 or "logprob" in self.names

    @property
    def lse(self) -> Tensor:
        """`[5, rows]`, a view: the numbers that a visit to some of the columns needs."""
        return self.numbers[: len(self.kept)]

    @property
    def sums(self) -> Tensor:
        """`[2, rows]`, a view: `total` and `value`, which are sums over columns."""
        return self.numbers[len(self.kept) - 1 : len(self.kept) + 1]

    @classmethod
    def of_kept(cls, kept: Tensor, divergence: Divergence) -> DivergenceState:
        """From the `lse` of another, with nothing else."""
        state = cls.__new__(cls)
        state.names, state.divergence, state.held = (), divergence, cls.kept
        state.hold(kept if kept.stride(1) == 1 else kept.contiguous())
        return state

    def statistics(self, vocab_size: int, column_weights: Tensor | None = None) -> dict[str, Tensor]:
        options = self.divergence
        soft = options.weight * self.value if options.weight else torch.zeros_like(self.value)
        found = {"divergence": self.value, "distillation": soft}
        if self.reads_label:
            found["logprob"] = self.target - self.hard_lse
            if options.hard_weight:
                found["distillation"] = soft - options.hard_weight * found["logprob"]
        if self.entropy is not None and self.teacher_entropy is not None:
            found |= {"entropy": self.entropy, "teacher_entropy": self.teacher_entropy}
        return {name: found[name] for name in self.names}


@dataclass(frozen=True)
class Columns:
    """How many columns each side has in the divergence, `[soft_student, soft_teacher]`, of the columns in the tile."""

    student: int
    teacher: int

    @classmethod
    def of(cls, student: int, teacher: int, vocabulary: str) -> Columns:
        both = min(student, teacher)
        return cls(both, both) if vocabulary == "shared" else cls(student, teacher)

    def block(self, start: int, stop: int) -> Columns:
        """Those of a block of the student's columns."""
        return Columns(*(max(0, min(stop, n) - start) for n in (self.student, self.teacher)))


def divergence_tile(
    tile: Tensor,  # [rows, V] the student's projected rows, before bias and transform
    bias: Tensor | None,  # [V]
    target: Tensor,  # [rows] int64
    teacher: TeacherTile,
    state: DivergenceState,  # of these rows; written
    transform: LogitTransform,
    columns: Columns,
    *,
    out: Tensor | None = None,  # [rows, V], may be `tile`: the gradient, rounded once
) -> None:
    """Fill `state` from whole rows; with `out` also write `d distillation / d tile`.

    Rows of `out` that lie on 8-element boundaries may be written up to the boundary after their last column.
    """
    if tile.shape[0] == 0:
        return
    if use_triton(tile, _without(state.divergence)):
        from .divergence_tile_triton import divergence_tile_triton

        divergence_tile_triton(tile, bias, target, teacher, state, transform, columns, out)
        return
    for rows in _slices(tile):
        part, wide = state.narrow(rows.start, rows.stop - rows.start), state.total.dtype
        z, slope = transform.rows(rows).apply(tile[rows].to(wide), bias)
        student, tempered = _compared(z, teacher, rows, state.divergence, columns, wide)
        _fold(part, z, target[rows], student, tempered)
        if out is not None:
            out[rows] = _entries(part, z, slope, target[rows], student, tempered).to(out.dtype)


def divergence_gradient(
    tile: Tensor,  # [rows, columns] of the student
    bias: Tensor | None,  # [columns]
    target: Tensor,  # [rows] int64, column of the whole vocabulary
    teacher: TeacherTile,  # of the same columns, as far as it has them
    state: DivergenceState,  # filled by an earlier visit to whole rows
    transform: LogitTransform,
    columns: Columns,  # of this block
    *,
    factor: Tensor,  # [rows]
    out: Tensor,  # [rows, columns], may be `tile`
    first_column: int = 0,
) -> None:
    """`factor * d distillation / d tile` of a block of columns; a row of factor 0 is 0 whatever it holds."""
    if tile.shape[0] == 0:
        return
    if use_triton(tile, _without(state.divergence)):
        from .divergence_tile_triton import divergence_gradient_triton

        divergence_gradient_triton(tile, bias, target, teacher, state, transform, columns, factor, out, first_column)
        return
    for rows in _slices(tile):
        part, wide = state.narrow(rows.start, rows.stop - rows.start), state.total.dtype
        z, slope = transform.rows(rows).apply(tile[rows].to(wide), bias)
        student, tempered = _compared(z, teacher, rows, state.divergence, columns, wide)
        each = factor[rows].unsqueeze(-1)
        gradient = _entries(part, z, slope, target[rows] - first_column, student, tempered)
        out[rows] = torch.where(each != 0, gradient * each, 0).to(out.dtype)


def visit_bytes(divergence: Divergence, device: torch.device) -> int:
    """What `divergence_tile` takes beyond its arguments on an accelerator, for kinds that have the torch form alone."""
    alone = _without(divergence) is not None and device.type == "cuda"
    return alone * 17 * _DEVICE_TIMES * TWIN_ELEMENTS * 4  # 17 such fp32 tensors at the peak


def _without(divergence: Divergence) -> str | None:
    return "kind 'akl'" if divergence.form == "akl" else None


def _slices(tile: Tensor, columns: int | None = None) -> Iterator[slice]:
    # On a device it is the number of launches that costs.
    return row_slices(tile, _DEVICE_TIMES if tile.is_cuda else 1, columns)


def _compared(
    z: Tensor, teacher: TeacherTile, rows: slice, options: Divergence, columns: Columns, wide: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Tempered logits of both sides over the same columns, -inf where a side has none."""
    inverse_student, inverse_teacher = options.inverse_temperatures
    width = max(columns.student, columns.teacher)
    t = teacher.tempered(rows, inverse_teacher, wide)[:, : columns.teacher]
    s = z[:, : columns.student] * inverse_student

    def padded(values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values, (0, width - values.shape[1]), value=-math.inf)

    return padded(s), padded(t)


def _fold(state: DivergenceState, z: Tensor, target: Tensor, s: Tensor, t: Tensor) -> None:
    """The row's numbers, from all its columns."""
    form = state.divergence.form
    if state.reads_label:
        inside = (target >= 0) & (target < z.shape[1])
        found = z.gather(1, target.clamp(0, z.shape[1] - 1).unsqueeze(-1)).squeeze(-1)
        state.target.copy_(torch.where(inside, found, math.nan))
        state.hard_lse.copy_(torch.logsumexp(z, -1))
    if form == "cosine":
        a, b = _finite(s, t)
        state.student_lse.copy_(_norm(a))
        state.teacher_lse.copy_(_norm(b))
        unit_a, unit_b = a / state.student_lse.unsqueeze(-1), b / state.teacher_lse.unsqueeze(-1)
        state.total.copy_((unit_a * unit_b).sum(-1))
        # |x - y|^2 / 2 is 1 - cos of two units, and lacks a half where one of them is none.
        alone = state.student_lse.isinf() ^ state.teacher_lse.isinf()
        state.value.copy_(((unit_a - unit_b).square().sum(-1) + alone) / 2)
    elif form == "mse":
        a, b = _finite(s, t)
        state.total.fill_(1 / s.shape[1])
        state.value.copy_((a - b).square().sum(-1) * state.total)
    if form not in ("cosine", "mse") or state.entropy is not None:
        lse_s, lse_t = torch.logsumexp(s, -1), torch.logsumexp(t, -1)
        logs, logt = s - lse_s.unsqueeze(-1), t - lse_t.unsqueeze(-1)
        if state.entropy is not None and state.teacher_entropy is not None:
            for entropy, logp in ((state.entropy, logs), (state.teacher_entropy, logt)):
                entropy.copy_(-torch.where(logp > -math.inf, torch.exp(logp) * logp, 0).sum(-1))
    if form not in ("cosine", "mse"):
        state.student_lse.copy_(lse_s)
        state.teacher_lse.copy_(lse_t)
        if form == "akl":
            state.share.copy_(head_share(torch.exp(logs), torch.exp(logt), state.divergence.mu))
        value, g = _terms(state.divergence, logs, logt, state.share)
        state.value.copy_(value.sum(-1))
        state.total.copy_(g.sum(-1))


def _finite(s: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Of logits compared themselves: a side without a column has 0 there."""
    both = [torch.where(values == -math.inf, torch.zeros_like(values), values) for values in (s, t)]
    return both[0], both[1]


def _norm(rows: Tensor) -> Tensor:
    # What has no direction is divided by infinity: its cosine with anything is 0, and so is the gradient.
    norms = rows.norm(dim=-1)
    return norms.masked_fill(norms <= NO_DIRECTION, math.inf)


def _kl_term(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """`a phi(y)` with `y = log(b / a)`, for any a, b >= 0 including 0."""
    near = y.abs() < 0.5
    small = torch.where(near, y, 0)
    product = torch.where(a > 0, a * y, 0)
    return torch.where(near, a * (torch.expm1(small) - small).clamp_min(0), b - a - product)


def _mixture(x: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """`log(m / s), log(m / t)` with `m = weight t + (1 - weight) s` and `x = log(s / t)`, to full relative accuracy."""
    down = x.abs()
    above = (x >= 0).to(x.dtype)
    share = above * weight + (1 - above) * (1 - weight)
    log_m = torch.maximum(torch.log1p(share * torch.expm1(-down)), -down)
    return torch.where(x >= 0, log_m, log_m - x), torch.where(x >= 0, log_m + x, log_m)


def _terms(options: Divergence, logs: Tensor, logt: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Each column's `d` and `g`, the latter up to a multiple of `s`, which the gradient does not see."""
    s, t = torch.exp(logs), torch.exp(logt)
    neither = (logs == -math.inf) & (logt == -math.inf)
    x = torch.where(neither, 0, logs - logt)
    form, parameter = options.form, options.parameter

    def times(a: Tensor, b: Tensor) -> Tensor:  # 0 times anything is 0
        return torch.where(a == 0, 0, a * b)

    if form == "forward_kl":
        return _kl_term(t, s, x), -t
    if form == "reverse_kl":
        return _kl_term(s, t, -x), times(s, x)
    if form == "jsd":
        y_s, y_t = _mixture(x, parameter)
        m = parameter * t + (1 - parameter) * s
        value = parameter * _kl_term(t, m, y_t) + (1 - parameter) * _kl_term(s, m, y_s)
        return value, -(1 - parameter) * times(s, y_s)
    if form == "skewed_forward_kl":
        _, y_t = _mixture(x, parameter)
        m = parameter * t + (1 - parameter) * s
        return _kl_term(t, m, y_t), -(1 - parameter) * times(s, torch.where(m > 0, t / m, 0))
    if form == "skewed_reverse_kl":
        y_s, _ = _mixture(x, 1 - parameter)
        m = (1 - parameter) * t + parameter * s
        return _kl_term(s, m, y_s), -times(s, y_s + torch.where(m > 0, parameter * s / m, 0))
    if form == "tvd":
        return (s - t).abs() / 2, s * torch.sign(s - t) / 2
    if form == "jeffreys":
        return torch.where(s == t, 0, (s - t) * x), times(s, x) - t
    if form == "akl":
        w, rest = share.unsqueeze(-1), 1 - share.unsqueeze(-1)
        value = times(w, _kl_term(t, s, x)) + times(rest, _kl_term(s, t, -x))
        return value, times(w, s - t) + times(rest, times(s, x))  # s - t for -t: 0 for equal models
    assert form == "alpha"
    a = parameter
    between = torch.where(neither, 0, torch.exp(torch.where(neither, 0, a * logt + (1 - a) * logs)))
    near = x.abs() < 0.5
    small = torch.where(near, x, 0)
    close = (1 - a) * (torch.expm1(small) - small) - (torch.expm1((1 - a) * small) - (1 - a) * small)
    value = torch.where(near, t * close, a * t + (1 - a) * s - between) / (a * (1 - a))
    return value.clamp_min(0), -between / a


def _entries(
    state: DivergenceState,
    z: Tensor,
    slope: Tensor | float,
    target: Tensor,
    s: Tensor,
    t: Tensor,
) -> Tensor:
    """The gradient at the student's columns, in the statistics' dtype."""
    options, width = state.divergence, z.shape[1]

    def at(values: Tensor) -> Tensor:
        return values.unsqueeze(-1)

    gradient = torch.zeros_like(z)
    if options.weight:
        if options.form in ("cosine", "mse"):
            a, b = _finite(s, t)
            present = s > -math.inf
            if options.form == "mse":
                soft = 2 * (a - b) * at(state.total)
            else:
                soft = (at(state.total) * a / at(state.student_lse) - b / at(state.teacher_lse)) / at(state.student_lse)
            soft = torch.where(present, soft, 0)
        else:
            logs, logt = s - at(state.student_lse), t - at(state.teacher_lse)
            _, g = _terms(options, logs, logt, state.share)
            total = at(state.total)
            finite = torch.isfinite(total)
            soft = torch.where(finite, g - torch.exp(logs) * torch.where(finite, total, 0), 0)
        shared = min(soft.shape[1], width)
        gradient[:, :shared] = soft[:, :shared] * (options.weight * options.inverse_temperatures[0])
    if options.hard_weight:
        is_target = torch.arange(width, device=z.device) == at(target)
        gradient = gradient + options.hard_weight * (torch.exp(z - at(state.hard_lse)) - is_target.to(z.dtype))
    return gradient * slope
