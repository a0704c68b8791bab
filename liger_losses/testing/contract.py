"""The contract of a loss object, checked on statistics alone: nothing is fused here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..chunked import Loss
from ..chunked.loss import check_result, differentiable_statistics, prepared_inputs, rows_per_unit
from .oracle import Case, gradients_of, unfused

Tensors = Mapping[str, Tensor]


def check_contract(loss: Loss, case: Case, inputs: Tensors, *, masks_statistics: bool = False) -> None:
    """Raise AssertionError unless `loss` keeps the contract of `liger_losses.chunked.Loss` on an fp64 case.

    - It returns a scalar, finite also where rows have no scored token, and metrics that are tensors.
    - It writes to none of its arguments.
    - What per-token inputs hold where nothing is scored reaches neither the value nor a metric. With
      `masks_statistics` nor does what statistics hold there, and no gradient comes back: such a loss may also be called
      on statistics that the engine, which hands over zeros there and uses no gradient from there, has not made.
    - Contributions of disjoint sets of whole units add up to the loss, scalar metrics too; others concatenate.
    - With the same totals, a unit's gradient does not depend on other units: the separability is true.
    """
    found = unfused(case, loss.statistics)
    statistics = {name: value.detach() for name, value in found.items()}
    mask = case.mask
    _check_arguments_are_left_alone(loss, statistics, mask, inputs)
    prepared = prepared_inputs(loss, mask, inputs)
    totals = loss.totals(mask, prepared)
    value, metrics = loss(statistics, mask, prepared, totals)
    check_result(value, metrics)
    for name, tensor in {"loss": value, **{f"metric {name}": metric for name, metric in metrics.items()}}.items():
        if not tensor.isfinite().all():
            raise AssertionError(f"{name}: got {_text(tensor)}, expected finite numbers")
    _check_junk(loss, statistics, mask, inputs, masks_statistics)
    if loss.separability != "batch":
        units = _Units(loss, statistics, mask, prepared)
        _check_contributions(loss, units, totals)
        _check_coupling(loss, units, totals)


def _check_arguments_are_left_alone(loss: Loss, statistics: Tensors, mask: Tensor, inputs: Tensors) -> None:
    given = {"inputs": dict(inputs), "statistics": {n: v.clone() for n, v in statistics.items()}}
    given["mask"] = {"mask": mask.clone()}
    before = _snapshot(given)
    prepared = prepared_inputs(loss, given["mask"]["mask"], given["inputs"])
    _compare_snapshots(before, _snapshot(given), "prepare")
    given["prepared inputs"] = prepared
    before = _snapshot(given)
    totals = dict(loss.totals(given["mask"]["mask"], prepared))
    _compare_snapshots(before, _snapshot(given), "totals")
    given["totals"] = totals
    before = _snapshot(given)
    loss(given["statistics"], given["mask"]["mask"], prepared, totals)
    _compare_snapshots(before, _snapshot(given), "the call")


Snapshot = dict[tuple[str, str], tuple[int, int, Tensor]]


def _snapshot(given: Mapping[str, Tensors]) -> Snapshot:
    return {
        (group, name): (id(tensor), tensor._version, tensor.detach().clone())
        for group, tensors in given.items()
        for name, tensor in tensors.items()
    }


def _compare_snapshots(before: Snapshot, after: Snapshot, when: str) -> None:
    for group, name in {**before, **after}:
        one, two = before.get((group, name)), after.get((group, name))
        if one is None or two is None or one[:2] != two[:2] or not torch.equal(one[2], two[2]):
            raise AssertionError(f"{group}[{name!r}]: written to by {when}, expected the arguments left as they are")


def _check_junk(loss: Loss, statistics: Tensors, mask: Tensor, inputs: Tensors, masks_statistics: bool) -> None:
    """Fill what is not scored with NaN, then with large finite numbers (NaN is hidden by `nan_to_num`)."""
    unscored = ~mask
    names = differentiable_statistics(loss)

    def outcome(junk: float | None) -> dict[str, Tensor]:
        def filled(tensors: Tensors) -> dict[str, Tensor]:
            if junk is None:
                return dict(tensors)
            return {n: _fill(v, unscored, junk) if v.shape[:2] == mask.shape else v for n, v in tensors.items()}

        prepared = prepared_inputs(loss, mask, filled(inputs))
        seen = filled(statistics) if masks_statistics else dict(statistics)
        leaves = {n: seen[n].detach().clone().requires_grad_() for n in names}
        value, metrics = loss({**seen, **leaves}, mask, prepared, loss.totals(mask, prepared))
        sent = gradients_of(value, list(leaves.values()))
        result = {"the loss": value, **{f"metric {n}": m for n, m in metrics.items()}}
        used = sent if masks_statistics else [g.masked_fill(unscored, 0) for g in sent]
        return result | {f"the gradient of {n}": g for n, g in zip(leaves, used, strict=True)}

    want = outcome(None)
    for name, tensor in want.items():
        if name.startswith("the gradient") and not (tensor[unscored] == 0).all():
            raise AssertionError(f"{name} is not 0 where nothing is scored: got {_text(tensor[unscored])}")
    for junk in (torch.nan, -1e4):
        for name, tensor in outcome(junk).items():
            differs = ~torch.isclose(tensor.double(), want[name].double(), rtol=0, atol=0)
            if differs.any():
                raise AssertionError(
                    f"{name} reads positions that are not scored: with {junk} there got {_text(tensor[differs])}, "
                    f"expected {_text(want[name][differs])}; use masked_fill or where before anything else is done "
                    "with a value: to multiply by a mask, or to mask a result, leaves NaN in it or in its gradient"
                )


def _fill(tensor: Tensor, where: Tensor, junk: float) -> Tensor:
    where = where.view(where.shape + (1,) * (tensor.dim() - 2))
    if tensor.dtype == torch.bool:
        return tensor.logical_xor(where)
    # An integer may be an index: left as it is.
    return tensor.masked_fill(where, junk) if tensor.is_floating_point() else tensor


class _Units:
    """Statistics, mask and prepared inputs of a batch, and of any of its units, as the engine hands them on."""

    def __init__(self, loss: Loss, statistics: Tensors, mask: Tensor, inputs: Tensors) -> None:
        self.by_token = loss.separability == "token"
        self.statistics, self.mask, self.inputs = statistics, mask, inputs
        self.unit_rows = rows_per_unit(loss)
        self.count = int(mask.sum()) if self.by_token else mask.shape[0] // self.unit_rows
        self.positions = mask.reshape(-1).nonzero().squeeze(-1)  # of scored tokens

    def rows(self, units: Sequence[int]) -> list[int]:
        return [unit + part * self.count for part in range(self.unit_rows) for unit in units]

    def of(self, units: Sequence[int], statistics: Tensors) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
        """`(statistics, mask, inputs)` of whole units."""
        if self.by_token:
            index = self.positions[list(units)]

            def cut(value: Tensor) -> Tensor:
                return value if value.dim() == 0 else value.flatten(0, 1)[index].unsqueeze(0)

            inputs = {name: cut(value) for name, value in self.inputs.items()}
            return {name: cut(value) for name, value in statistics.items()}, cut(self.mask), inputs
        rows, per_row = self.rows(units), self.mask.shape[0]
        inputs = {
            name: value if value.dim() == 0 else value[rows if value.shape[0] == per_row else list(units)]
            for name, value in self.inputs.items()
        }
        return {name: value[rows] for name, value in statistics.items()}, self.mask[rows], inputs

    def where(self, unit: int) -> Tensor:
        """Which positions `[R, T]` belong to a unit."""
        found = torch.zeros_like(self.mask)
        if self.by_token:
            found.view(-1)[self.positions[unit]] = True
        else:
            found[self.rows([unit])] = True
        return found


def _check_contributions(loss: Loss, units: _Units, totals: Tensors) -> None:
    if units.count == 0:
        return
    every = list(range(units.count))
    whole, metrics = loss(*units.of(every, units.statistics), totals)
    batch, _ = loss(units.statistics, units.mask, units.inputs, totals)
    parts = {"one by one": [[unit] for unit in every], "in two": [every[:1], every[1:]] if every[1:] else [every]}
    for how, groups in parts.items():
        pieces = []
        for group in groups:
            piece = loss(*units.of(group, units.statistics), totals)
            check_result(*piece)
            pieces.append(piece)
        total = torch.stack([value for value, _ in pieces]).sum()
        for want in (whole, batch):
            if not _equal(total, want):
                raise AssertionError(
                    f"contributions of its {units.count} units ({loss.separability}), taken {how}, add up to "
                    f"{total.item():.6g}, the whole batch gives {want.item():.6g}: either the separability is larger, "
                    "or something is normalised with what one call sees instead of totals, those of the whole batch"
                )
        for name, metric in metrics.items():
            found = [piece[name] for _, piece in pieces]
            if metric.dim() and units.by_token:
                raise AssertionError(
                    f"metric {name}: got shape {list(metric.shape)}, expected a scalar of a token loss"
                )
            together = torch.cat(found) if metric.dim() else torch.stack(found).sum()
            if not _equal(together, metric):
                combined = "concatenated" if metric.dim() else "summed"
                raise AssertionError(
                    f"metric {name}: {combined} over its units, taken {how}, it is {_text(together)}, over the whole "
                    f"batch {_text(metric)}: scalars are summed over calls, others concatenated (one entry a unit)"
                )


def _check_coupling(loss: Loss, units: _Units, totals: Tensors) -> None:
    """Change the last unit; the gradients of the others stay."""
    if units.count < 2:
        return
    names = differentiable_statistics(loss)
    moved = units.where(units.count - 1)

    def gradients(statistics: Tensors) -> list[Tensor]:
        leaves = {name: statistics[name].detach().clone().requires_grad_() for name in names}
        value, _ = loss({**statistics, **leaves}, units.mask, units.inputs, totals)
        return gradients_of(value, list(leaves.values()))

    def other(value: Tensor) -> Tensor:
        return 0.7 * value - 0.9 if value.is_floating_point() else (value == 0).to(value.dtype)

    changed = {name: torch.where(moved & units.mask, other(value), value) for name, value in units.statistics.items()}
    for name, before, after in zip(names, gradients(units.statistics), gradients(changed), strict=True):
        if not _equal(before[~moved], after[~moved]):
            raise AssertionError(
                f"separability {loss.separability!r} is not true: the gradient of {name} of other units changed from "
                f"{_text(before[~moved])} to {_text(after[~moved])} when one unit's statistics did"
            )


def _equal(one: Tensor, two: Tensor) -> bool:
    """Equal up to the rounding of sums in another order."""
    if one.shape != two.shape:
        return False
    return torch.allclose(one.double(), two.double(), rtol=1e-9, atol=1e-12)


def _text(tensor: Tensor) -> str:
    if tensor.numel() == 1:
        return f"{tensor.item():.6g}"
    values = tensor.detach().reshape(-1)
    shown = ", ".join(f"{value:.6g}" for value in values[:4].tolist())
    return f"[{shown}{', ...' if values.numel() > 4 else ''}] of shape {list(tensor.shape)}"
