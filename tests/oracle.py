"""What the fused computations are judged by: the plain computation, in fp64, and one rule for how far off one may be.

`allowed = 2 x (error of the plain computation in the same precision) + rounding`. No tolerance is chosen by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

IGNORE = -100
DIFFERENTIABLE = ("logprob", "entropy", "lse", "mean_logprob")
STATISTICS = (*DIFFERENTIABLE, "mean_logit", "argmax", "is_top1", "log_sum_sq_prob")
EXACT = {"argmax": torch.int64, "is_top1": torch.bool}  # compared bit by bit
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

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
    def leaves(self) -> list[Tensor]:
        return [t for t in (self.hidden, self.weight, self.bias) if t is not None and t.requires_grad]

    @property
    def compute(self) -> torch.dtype:
        """The lower of the two dtypes."""
        return min((self.hidden.dtype, self.weight.dtype), key=lambda dtype: torch.finfo(dtype).bits)

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
    """Normal hidden states and weights whose logits have a standard deviation of 3."""
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


def unfused(case: Case, names: Sequence[str] = STATISTICS) -> dict[str, Tensor]:
    """Statistics of whole logits, in plain torch and the dtype of the products; zero where not scored."""
    kind = case.compute
    z = case.hidden.to(kind) @ case.weight.to(kind).T
    if case.bias is not None:
        z = z + case.bias.to(kind)
    z = transformed(z, **case.options)
    mask = case.mask
    values = read_statistics(z, case.target.masked_fill(~mask, 0), case.options.get("column_weights"))
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


def check_close(
    got: Tensor, exact: Tensor, naive: Tensor, dtype: torch.dtype, *, terms: int, scale: float = 0.0, what: str = ""
) -> None:
    """The rule, on largest absolute values.

    `dtype` is what `got` was rounded to on its way, from a sum of up to `terms` terms: those are added in fp32 (fp64),
    in any order, and their roundings walk at random. `scale` is the size of what is summed, where the result is less.
    """
    exact = exact.detach().double()
    size = max(largest(exact), scale)
    error, naive_error = largest(got.detach().double() - exact), largest(naive.detach().double() - exact)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rounding = torch.finfo(dtype).eps + terms**0.5 * torch.finfo(wide).eps
    bound = 2 * naive_error + rounding * size
    assert got.shape == exact.shape, what
    assert error <= bound, f"{what}: error {error:.3g}, of the plain computation {naive_error:.3g}, allowed {bound:.3g}"


def check_statistics(got: Mapping[str, Tensor], case: Case, *, logits: torch.dtype | None = None) -> None:
    """Statistics against fp64. Logits are fp32 (fp64 for fp64) unless `logits` says otherwise."""
    wide = torch.float64 if case.compute == torch.float64 else torch.float32
    rounded = case.rounded()
    exact, naive = unfused(rounded.to(torch.float64)), unfused(rounded.to(logits or wide))
    scale = max(largest(exact[name]) for name in ("lse", "mean_logit", "logprob", "mean_logprob"))
    for name, value in got.items():
        if name in EXACT:
            assert value.dtype == EXACT[name]
            assert torch.equal(value, exact[name])
            continue
        assert value.dtype == wide, name
        check_close(value, exact[name], naive[name], logits or wide, terms=case.terms, scale=scale, what=name)


def check_gradients(got: Sequence[Tensor], exact: Sequence[Tensor], naive: Sequence[Tensor], case: Case) -> None:
    """Gradients of the case's leaves against fp64, as the products' dtype allows."""
    for gradient, want, other, leaf in zip(got, exact, naive, case.leaves, strict=True):
        assert gradient.dtype == leaf.dtype
        check_close(gradient, want, other, case.compute, terms=case.terms, what=f"gradient of {tuple(leaf.shape)}")


def upstream(case: Case, names: Sequence[str], seed: int = 1) -> dict[str, Tensor]:
    """A gradient for each statistic, different at every position, those that are not scored included."""
    generator = torch.Generator().manual_seed(seed)
    shape = case.target.shape
    return {n: torch.randn(shape, generator=generator, dtype=torch.float64).to(case.hidden.device) for n in names}


def send_back(values: Mapping[str, Tensor], sent: Mapping[str, Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of `leaves` for the upstream gradients `sent`; zeros where a leaf is not reached."""
    if not leaves:
        return []
    if not sent:
        return [torch.zeros_like(leaf) for leaf in leaves]
    total = sum((values[name] * gradient.to(values[name].dtype)).sum() for name, gradient in sent.items())
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]


@dataclass(frozen=True)
class ToyLoss:
    """A loss of any statistics at any separability, with different coefficients for every token and statistic.

    Optional inputs: `weight` per token or row, `offset` per unit.
    """

    separability: str = "pair"
    statistics: tuple[str, ...] = ("logprob",)

    def totals(self, mask: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        rows = mask.new_ones(mask.shape[0]).sum()
        return {"tokens": mask.sum().clamp_min(1), "rows": rows.clamp_min(1)}

    def __call__(
        self, statistics: Mapping[str, Tensor], mask: Tensor, inputs: Mapping[str, Tensor], totals: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        score = sum((0.4 + k) * torch.tanh(statistics[n] / 6) for k, n in enumerate(self.statistics) if n not in EXACT)
        score = torch.where(mask, score * (2 - statistics[self.statistics[0]].tanh()), 0)
        if "weight" in inputs:
            score = score * inputs["weight"].reshape(inputs["weight"].shape + (1,) * (2 - inputs["weight"].dim()))
        if self.separability == "token":
            return score.sum() / totals["tokens"], {"score": score.detach().sum()}
        rows = score.sum(-1)
        if self.separability == "batch":
            return torch.cat([rows, rows.new_zeros(1)]).logsumexp(0), {"rows": rows.detach()}
        units = rows.view(2, -1).diff(dim=0).squeeze(0) if self.separability == "pair" else rows
        units = torch.nn.functional.softplus(units + inputs.get("offset", 0))
        return units.sum() / totals["rows"], {"units": units.detach(), "score": score.detach().sum()}


def unfused_loss(loss: Any, case: Case, inputs: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The same loss object on the statistics of whole logits."""
    values = unfused(case, loss.statistics)
    return loss(values, case.mask, inputs, loss.totals(case.mask, inputs))


def check_loss(got: tuple[Tensor, Mapping[str, Tensor]], loss: Any, case: Case, inputs: Mapping[str, Tensor]) -> None:
    """Value, metrics and gradients of a fused loss, from the tensors of `case`, against the unfused one in fp64."""
    value, metrics = got
    wide = torch.float64 if case.compute == torch.float64 else torch.float32
    assert value.dtype == wide
    rounded = case.rounded()
    exact, exact_metrics = unfused_loss(loss, rounded.to(torch.float64), inputs)
    naive, naive_metrics = unfused_loss(loss, rounded.to(wide), inputs)
    size = float(case.mask.sum().clamp_min(1))  # of a sum over tokens of terms of order one
    check_close(value, exact, naive, wide, terms=case.terms, scale=size, what="loss")
    assert set(metrics) == set(exact_metrics)
    for name, metric in metrics.items():
        check_close(metric, exact_metrics[name], naive_metrics[name], wide, terms=case.terms, scale=size, what=name)
    if not case.leaves:
        return

    def gradients(of: Case) -> tuple[Tensor, ...]:
        return torch.autograd.grad(2.5 * unfused_loss(loss, of, inputs)[0], of.leaves)

    found = torch.autograd.grad(2.5 * value, case.leaves, retain_graph=True)
    check_gradients(found, gradients(case.to(torch.float64)), gradients(case.to(case.compute)), case)
