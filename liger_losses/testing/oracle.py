"""What the fused computations are judged by: the plain computation, in fp64, and one rule for how far off one may be.

`allowed = 2 x (error of the plain computation in the same precision) + rounding`. No tolerance is chosen by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..chunked import Loss
from ..chunked.loss import prepared_inputs

IGNORE = -100
DIFFERENTIABLE = ("logprob", "entropy", "lse", "mean_logprob")
STATISTICS = (*DIFFERENTIABLE, "mean_logit", "argmax", "is_top1", "log_sum_sq_prob")

# What may happen to logits after the projection, with numbers at which each part shows.
TRANSFORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 5.0},
    "scale": {"logit_scale": 1.3},
    "temperature": {"temperature": 0.7},
    "all": {"softcap": 5.0, "logit_scale": 1.3, "temperature": 0.7},
}


@dataclass
class Case:
    """The tensors of one call, and what is done to its logits."""

    hidden: Tensor  # [R, T, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    target: Tensor  # [R, T]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def mask(self) -> Tensor:
        return self.target != IGNORE

    @property
    def head(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The positional arguments of the public calls."""
        return self.hidden, self.weight, self.target, self.bias

    @property
    def trained(self) -> dict[str, Tensor]:
        """The tensors that require a gradient, by name."""
        tensors = {"hidden": self.hidden, "weight": self.weight, "bias": self.bias}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None and tensor.requires_grad}

    @property
    def leaves(self) -> list[Tensor]:
        return list(self.trained.values())

    @property
    def compute(self) -> torch.dtype:
        """The lower of the two dtypes."""
        return min((self.hidden.dtype, self.weight.dtype), key=lambda dtype: torch.finfo(dtype).bits)

    @property
    def wide(self) -> torch.dtype:
        """The dtype of statistics and losses."""
        return torch.float64 if self.compute == torch.float64 else torch.float32

    @property
    def terms(self) -> int:
        """Length of the longest sum."""
        return max(self.target.numel(), *self.weight.shape)

    def to(self, dtype: torch.dtype) -> Case:
        """The same rounded values, as leaves of another dtype."""
        bias = None if self.bias is None else leaf_of(self.bias, dtype)
        return replace(self, hidden=leaf_of(self.hidden, dtype), weight=leaf_of(self.weight, dtype), bias=bias)

    def rounded(self, dtype: torch.dtype | None = None) -> Case:
        """What products in `dtype` (the lower of the two) see: the bias is added to wide logits as it is."""
        dtype = dtype or self.compute
        return replace(self, hidden=leaf_of(self.hidden, dtype), weight=leaf_of(self.weight, dtype))


def leaf_of(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to(dtype, copy=True).requires_grad_(tensor.requires_grad)


def make_case(
    rows: int = 4,
    length: int = 5,
    hidden_size: int = 17,
    vocab: int = 257,
    dtype: torch.dtype = torch.float64,
    *,
    weight_dtype: torch.dtype | None = None,
    bias: bool = True,
    scored: str = "prompt",  # "all", "prompt", "row", "nothing"
    trainable: Sequence[str] = ("hidden", "weight", "bias"),
    seed: int = 0,
    device: str = "cpu",
    **options: Any,
) -> Case:
    """Normal hidden states and weights whose logits have a standard deviation of 3.

    `scored`: every position; all but prompts of different lengths; all but one row; none. `options` are those of
    `fused_linear_loss` that concern the logits.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(name: str, size: float, kind: torch.dtype, *shape: int) -> Tensor:
        values = size * torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.to(device, kind).requires_grad_(name in trainable)

    kind = weight_dtype or dtype
    hidden = normal("hidden", 1.0, dtype, rows, length, hidden_size)
    weight = normal("weight", 3 * hidden_size**-0.5, kind, vocab, hidden_size)
    shift = normal("bias", 1.0, kind, vocab) if bias else None
    target = torch.randint(0, vocab, (rows, length), generator=generator)
    if scored == "prompt":  # of different lengths; the first row has none
        starts = torch.arange(rows).unsqueeze(1) * length // (rows + 1)
        target[torch.arange(length) < starts] = IGNORE
    elif scored == "row":
        target[rows // 2] = IGNORE
    elif scored == "nothing":
        target[:] = IGNORE
    return Case(hidden, weight, shift, target.to(device), options)


def unfused(case: Case, names: Sequence[str] = STATISTICS, *, off_by: torch.dtype | None = None) -> dict[str, Tensor]:
    """Statistics of whole logits, in plain torch and the dtype of the products; zero where not scored.

    With `off_by`, each is off, one way or the other, by the rounding that `check_close` grants a statistic of that
    dtype: what a loss makes of it is how far its value may be off, too.
    """
    kind = case.compute
    z = case.hidden.to(kind) @ case.weight.to(kind).T
    if case.bias is not None:
        z = z + case.bias.to(kind)
    z = transformed(z, **case.options)
    mask = case.mask
    values = read_statistics(z, case.target.masked_fill(~mask, 0), case.options.get("column_weights"))
    if off_by is not None:
        size = rounding_of(off_by, case.terms) * max(largest(values[name]) for name in DIFFERENTIABLE)
        generator = torch.Generator().manual_seed(0)
        for name, value in values.items():
            if value.is_floating_point():
                signs = 2 * torch.randint(0, 2, value.shape, generator=generator) - 1
                values[name] = value + size * signs.to(value)
    return {name: torch.where(mask, values[name], torch.zeros_like(values[name])) for name in names}


def transformed(
    z: Tensor,
    *,
    logit_scale: float | None = None,
    softcap: float | None = None,
    temperature: float | Tensor = 1.0,
    column_weights: Tensor | None = None,
) -> Tensor:
    """Scale first, then softcap, then temperature."""
    temperature = temperature.to(z.dtype).unsqueeze(-1) if isinstance(temperature, Tensor) else temperature
    z = z if logit_scale is None else z * logit_scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    return z / temperature


def read_statistics(z: Tensor, target: Tensor, column_weights: Tensor | None = None) -> dict[str, Tensor]:
    """Every statistic of whole logits `[*, V]`, in their dtype."""
    log_p = torch.nn.functional.log_softmax(z, -1)
    weighted = log_p if column_weights is None else log_p * column_weights.to(z.dtype)
    return {
        "logprob": log_p.gather(-1, target.long().unsqueeze(-1)).squeeze(-1),
        "entropy": -torch.where(log_p > -torch.inf, log_p.exp() * log_p, 0).sum(-1),
        "lse": z.logsumexp(-1),
        "mean_logprob": weighted.mean(-1),
        "mean_logit": z.mean(-1).detach(),
        "argmax": z.argmax(-1),
        "is_top1": z.argmax(-1) == target,
        "log_sum_sq_prob": (2 * log_p).logsumexp(-1).detach(),
    }


def largest(tensor: Tensor) -> float:
    return tensor.detach().double().abs().max().item() if tensor.numel() else 0.0


def rounding_of(dtype: torch.dtype, terms: int) -> float:
    """Of a sum of up to `terms` terms, relative: added in fp32 (fp64), in any order, then rounded to `dtype`."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.finfo(dtype).eps + terms**0.5 * torch.finfo(wide).eps


def check_close(
    got: Tensor, exact: Tensor, naive: Tensor, dtype: torch.dtype, *, terms: int, scale: float = 0.0, what: str = ""
) -> None:
    """The rule, on largest absolute values. Raises AssertionError.

    `dtype` is what `got` was rounded to on its way, from a sum of up to `terms` terms: those are added in fp32 (fp64),
    in any order, and their roundings walk at random. `scale` is the size of what is summed, where the result is less.
    """
    if got.shape != exact.shape:
        raise AssertionError(f"{what}: got shape {list(got.shape)}, expected {list(exact.shape)}")
    exact = exact.detach().double()
    size = max(largest(exact), scale)
    error, naive_error = largest(got.detach().double() - exact), largest(naive.detach().double() - exact)
    bound = 2 * naive_error + rounding_of(dtype, terms) * size
    # `error` may be NaN, which is not <= anything.
    if not error <= bound:
        raise AssertionError(
            f"{what}: error {error:.3g}, of the plain computation {naive_error:.3g}, allowed {bound:.3g}"
        )


def unfused_loss(
    loss: Loss, case: Case, inputs: Mapping[str, Tensor], *, off_by: torch.dtype | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The same loss object on the statistics of whole logits."""
    statistics = unfused(case, loss.statistics, off_by=off_by)
    prepared = prepared_inputs(loss, case.mask, inputs)
    return loss(statistics, case.mask, prepared, loss.totals(case.mask, prepared))


def check_loss(got: tuple[Tensor, Mapping[str, Tensor]], loss: Loss, case: Case, inputs: Mapping[str, Tensor]) -> None:
    """Value, metrics and gradients of a fused loss, from the tensors of `case`, against the unfused one in fp64.

    `inputs` are wide enough for fp64. Raises AssertionError.
    """
    value, metrics = got
    wide, rounded = case.wide, case.rounded()
    if value.dtype != wide:
        raise AssertionError(f"loss: got dtype {value.dtype}, expected {wide}")
    exact, exact_metrics = unfused_loss(loss, rounded.to(torch.float64), inputs)
    naive, naive_metrics = unfused_loss(loss, rounded.to(wide), inputs)
    # What the loss makes of statistics that are off by a rounding, which a lucky plain computation may not show.
    off, off_metrics = unfused_loss(loss, rounded.to(torch.float64), inputs, off_by=wide)
    size = float(case.mask.sum().clamp_min(1))  # of a sum over tokens of terms of order one
    check_close(value, exact, _further(exact, naive, off), wide, terms=case.terms, scale=size, what="loss")
    if set(metrics) != set(exact_metrics):
        raise AssertionError(f"metrics: got {sorted(metrics)}, expected {sorted(exact_metrics)}")
    for name, metric in metrics.items():
        want = exact_metrics[name]
        other = _further(want, naive_metrics[name], off_metrics[name])
        check_close(metric, want, other, wide, terms=case.terms, scale=size, what=f"metric {name}")
    if not case.leaves:
        return

    def gradients(of: Case, off_by: torch.dtype | None = None) -> list[Tensor]:
        return gradients_of(2.5 * unfused_loss(loss, of, inputs, off_by=off_by)[0], of.leaves)

    found = gradients_of(2.5 * value, case.leaves)
    wanted, plain = gradients(case.to(torch.float64)), gradients(case.to(case.compute))
    rough = gradients(case.to(torch.float64), wide)
    for (name, leaf), gradient, want, *others in zip(case.trained.items(), found, wanted, plain, rough, strict=True):
        if gradient.dtype != leaf.dtype:
            raise AssertionError(f"gradient of {name}: got dtype {gradient.dtype}, expected {leaf.dtype}")
        other = _further(want, *others)
        check_close(gradient, want, other, case.compute, terms=case.terms, what=f"gradient of {name}")


def _further(exact: Tensor, *others: Tensor) -> Tensor:
    """Which of `others` is further from `exact`."""
    return max(others, key=lambda other: largest(other.detach().double() - exact.detach().double()))


def gradients_of(value: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of a scalar, zeros where it does not depend on a leaf."""
    if not value.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(value, list(leaves), retain_graph=True, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]
