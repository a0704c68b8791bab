"""Direct preference losses on sequence log-probabilities: the pure function `dpo_loss`.

Notation of a pair: `c`, `r` are the log-probabilities of the chosen and the rejected response under the policy, `rc`,
`rr` under the reference; `A = c - rc`, `R = r - rr`; `s_w = g(A)`, `s_l = g(R)` with `g` the f-divergence's score
(`u` itself for the reverse KL); `D = s_w - s_l`; `LS` is log-sigmoid, `S` sigmoid, `b` beta and `e` label smoothing.

`DPOLoss` (`dpo.py`) makes it a loss object on per-token statistics. A loss of another family is built alike: a pure
function, and a frozen dataclass that reduces statistics with `sequence.py` and, if its rows are pairs, shares totals,
NLL and metrics through `pairs.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._checks import check_choice, check_device, check_float_tensor, check_number, check_numbers
from .._constants import taken
from ..kernels import wide_dtype
from .f_divergence import F_DIVERGENCES, f_divergence_score
from .preference_types import LOSS_TYPES, LossType, Pairs


@dataclass(frozen=True, kw_only=True)
class DPOObjective:
    """The options of `dpo_loss`, checked once; `losses` maps sequence log-probabilities to per-pair losses."""

    beta: float = 0.1
    loss_type: str | Sequence[str] = "sigmoid"
    loss_weights: Sequence[float] | None = None
    label_smoothing: float = 0.0
    f_divergence: str = "reverse_kl"
    f_alpha: float = 0.5
    discopop_tau: float = 0.05

    def __post_init__(self) -> None:
        if not isinstance(self.loss_type, (str, Sequence)):
            raise TypeError(f"loss_type: got {self.loss_type!r}, expected a name or a sequence of names")
        if not isinstance(self.loss_weights, (Sequence, type(None))):
            raise TypeError(f"loss_weights: got {self.loss_weights!r}, expected a sequence of numbers")
        # Sequences become tuples, so that the object stays hashable and no caller's list is aliased.
        if not isinstance(self.loss_type, str):
            object.__setattr__(self, "loss_type", tuple(self.loss_type))
        if self.loss_weights is not None:
            object.__setattr__(self, "loss_weights", tuple(self.loss_weights))
        if not self.type_names:
            raise ValueError("loss_type: got an empty sequence, expected at least one loss type")
        for name in self.type_names:
            check_choice("loss_type", name, tuple(LOSS_TYPES))
        if len(self.type_weights) != len(self.type_names):
            raise ValueError(
                f"loss_weights: got {len(self.type_weights)} weights, expected {len(self.type_names)}, one for each of "
                f"loss_type {', '.join(self.type_names)}"
            )
        for weight in self.type_weights:
            check_number("loss_weights", weight)
        check_number("beta", self.beta, above=0)
        check_number("discopop_tau", self.discopop_tau, above=0)
        check_number("f_alpha", self.f_alpha)
        self._check_smoothing()
        self._check_divergence()
        if self.discopop_tau != DPOObjective.discopop_tau and "discopop" not in self.type_names:
            raise ValueError(
                f"discopop_tau: got {self.discopop_tau}, expected the default: only loss_type 'discopop' reads it"
            )

    def _check_smoothing(self) -> None:
        check_number("label_smoothing", self.label_smoothing)
        users = [(row.name, row.smoothing) for row in self.types if row.smoothing is not None]
        for name, smoothing in users:
            if not smoothing.accepts(self.label_smoothing):
                raise ValueError(
                    f"label_smoothing: got {self.label_smoothing}, expected {smoothing.text} for loss_type {name!r}"
                )
        if self.label_smoothing != 0 and not users:
            known = ", ".join(row.name for row in LOSS_TYPES.values() if row.smoothing)
            raise ValueError(
                f"label_smoothing: got {self.label_smoothing}, expected 0 for loss_type {', '.join(self.type_names)}, "
                f"which has no smoothed form; these have one: {known}"
            )

    def _check_divergence(self) -> None:
        check_choice("f_divergence", self.f_divergence, tuple(F_DIVERGENCES))
        refusing = [row.name for row in self.types if not row.any_divergence]
        if self.f_divergence != "reverse_kl" and refusing:
            known = ", ".join(row.name for row in LOSS_TYPES.values() if row.any_divergence)
            raise ValueError(
                f"f_divergence: got {self.f_divergence!r}, expected 'reverse_kl' for loss_type {', '.join(refusing)}; "
                f"log Z of another divergence cancels only in {known}"
            )
        if self.f_alpha != DPOObjective.f_alpha and self.f_divergence != "alpha_divergence":
            raise ValueError(
                f"f_alpha: got {self.f_alpha}, expected the default: only f_divergence 'alpha_divergence' reads it"
            )

    @property
    def type_names(self) -> tuple[str, ...]:
        return (self.loss_type,) if isinstance(self.loss_type, str) else tuple(self.loss_type)

    @property
    def type_weights(self) -> tuple[float, ...]:
        return (1.0,) * len(self.type_names) if self.loss_weights is None else tuple(self.loss_weights)

    @property
    def types(self) -> tuple[LossType, ...]:
        return tuple(LOSS_TYPES[name] for name in self.type_names)

    def needs(self, what: str) -> bool:
        """Whether some loss type needs `what`: "lengths" or "nll"."""
        return any(getattr(row, what) for row in self.types)

    @property
    def couples_pairs(self) -> bool:
        return any(row.separability == "batch" for row in self.types)

    def check_pair_weights(self, argument: str) -> None:
        """Raise if a factor per pair, given as `argument`, has no meaning for the loss types."""
        coupled = [row.name for row in self.types if row.separability == "batch"]
        if coupled:
            raise ValueError(
                f"{argument}: got a weight per pair, expected none with loss_type {', '.join(coupled)}, whose losses "
                "belong to quantiles of the batch, not to pairs"
            )

    def losses(
        self,
        chosen_logps: Tensor,  # [B]
        rejected_logps: Tensor,  # [B]
        ref_chosen_logps: Tensor,  # [B]
        ref_rejected_logps: Tensor,  # [B]
        lengths: tuple[Tensor, Tensor] | None,  # [B] each
        chosen_nll: Tensor | None,  # [] or [B]
        pair_weights: Tensor | None,  # [B]
    ) -> Tensor:
        """Per-pair losses `[B]` of arguments already checked; `dpo_loss` is the checked form."""
        pairs = Pairs(
            chosen_logps,
            rejected_logps,
            ref_chosen_logps,
            ref_rejected_logps,
            f_divergence_score(chosen_logps - ref_chosen_logps, self.f_divergence, self.f_alpha),
            f_divergence_score(rejected_logps - ref_rejected_logps, self.f_divergence, self.f_alpha),
            None if lengths is None else (lengths[0].clamp_min(1), lengths[1].clamp_min(1)),
            chosen_nll,
        )
        weighted = [
            weight * row.per_pair(pairs, self) for weight, row in zip(self.type_weights, self.types, strict=True)
        ]
        total = torch.stack(weighted).sum(dim=0)
        return total if pair_weights is None else total * pair_weights


def dpo_loss(
    chosen_logps: Tensor,  # [B]
    rejected_logps: Tensor,  # [B]
    ref_chosen_logps: Tensor | None = None,  # [B]
    ref_rejected_logps: Tensor | None = None,  # [B]
    *,
    beta: float = 0.1,
    loss_type: str | Sequence[str] = "sigmoid",
    loss_weights: Sequence[float] | None = None,
    label_smoothing: float = 0.0,
    f_divergence: str = "reverse_kl",
    f_alpha: float = 0.5,
    discopop_tau: float = 0.05,
    chosen_lengths: Tensor | None = None,  # [B]
    rejected_lengths: Tensor | None = None,  # [B]
    chosen_nll: Tensor | None = None,  # [] or [B]
    pair_weights: Tensor | None = None,  # [B]
) -> Tensor:
    """Per-pair losses `[B]` of direct preference optimisation and its relatives; the loss is their mean.

    With the notation at the top of this module (`n_w`, `n_l` are the lengths):

    | loss_type | loss of a pair | paper (arXiv) |
    |---|---|---|
    | sigmoid | `-(1-e) LS(bD) - e LS(-bD)`: DPO, with `e > 0` cDPO (in TRL `e` has no effect here) | 2305.18290 |
    | hinge | `max(0, 1 - bD)`: SLiC | 2305.10425 |
    | ipo | `(s_w/n_w - s_l/n_l - 1/(2b))^2` | 2310.12036 |
    | ipo_sum | `(D - 1/(2b))^2`: IPO of sums, as online DPO has it | 2310.12036, 2402.04792 |
    | sigmoid_norm | `-LS(b (s_w/n_w - s_l/n_l))` | 2411.15124 |
    | exo_pair | `KL((S(bD), S(-bD)) from (1-e, e))`, `0 < e < 1` | 2402.00856 |
    | nca_pair | `-LS(bA) - LS(-bA)/2 - LS(-bR)/2` | 2402.05369 |
    | robust | `(-(1-e) LS(bD) + e LS(-bD)) / (1-2e)`, `0 <= e < 0.5` | 2403.00409 |
    | bco_pair | `-LS(bA) - LS(-bR)`, with no running shift | 2404.04656 |
    | sppo_hard | `(A - 1/(2b))^2 + (R + 1/(2b))^2` | 2405.00675 |
    | aot | sigmoid of `sort(c-r) - sort(rc-rr)` | 2406.05882 |
    | aot_unpaired | sigmoid of `sort(A) - sort(R)` | 2406.05882 |
    | apo_zero | `1 - S(bA) + S(bR)` | 2408.06266 |
    | apo_down | `S(bA) + 1 - S(b(A-R))` | 2408.06266 |
    | discopop | `S(-z/tau) (-LS(z)) + S(z/tau) e^-z`, `z = bD` | 2406.08414 |
    | sft | `chosen_nll` | |

    Args:
        ref_chosen_logps, ref_rejected_logps: both, or neither for a reference-free loss (taken as 0).
        beta: strength of the pull towards the reference, `> 0`.
        loss_type: one name, or several for a mixture `sum_k loss_weights[k] * loss_k` (MPO, arXiv:2411.10442).
        loss_weights: one weight per loss type; 1 each when None.
        label_smoothing: the presumed share of flipped labels. Refused unless a loss type of the mixture uses it.
        f_divergence: reverse_kl, forward_kl, js_divergence or alpha_divergence (arXiv:2309.16240). All but reverse_kl
            only with loss types that read the difference of scores, and sft, which reads none.
        f_alpha: order of alpha_divergence; 1 is reverse_kl, 0 is forward_kl.
        discopop_tau: temperature of discopop's blend.
        chosen_lengths, rejected_lengths: scored tokens; ipo and sigmoid_norm need them. 0 counts as 1.
        chosen_nll: mean negative log-likelihood of a chosen token; sft needs it.
        pair_weights: a factor per pair (WPO). Refused with aot types, whose losses belong to quantiles, not to pairs.

    Log-probabilities in less than fp32 are computed in fp32. With aot types the entries are in sorted order: only
    their mean has a meaning.

    Raises:
        ValueError, TypeError: an option that no loss type of the mixture uses, a combination with no formula, a
            missing or superfluous tensor, a wrong shape; the message names the argument.
    """
    objective = DPOObjective(
        beta=beta,
        loss_type=loss_type,
        loss_weights=loss_weights,
        label_smoothing=label_smoothing,
        f_divergence=f_divergence,
        f_alpha=f_alpha,
        discopop_tau=discopop_tau,
    )
    check_float_tensor("chosen_logps", chosen_logps)
    if chosen_logps.dim() != 1:
        raise ValueError(f"chosen_logps: got shape {list(chosen_logps.shape)}, expected [pairs]")
    shape = (chosen_logps.shape[0],)
    if (ref_chosen_logps is None) != (ref_rejected_logps is None):
        missing = "ref_chosen_logps" if ref_chosen_logps is None else "ref_rejected_logps"
        raise ValueError(f"{missing}: got None, expected both reference log-probabilities, or neither")
    if ref_chosen_logps is None or ref_rejected_logps is None:
        ref_chosen_logps = ref_rejected_logps = torch.zeros_like(chosen_logps)
    check_float_tensor("rejected_logps", rejected_logps, shape)
    check_device("rejected_logps", rejected_logps, "chosen_logps", chosen_logps)
    check_float_tensor("ref_chosen_logps", ref_chosen_logps, shape)
    check_float_tensor("ref_rejected_logps", ref_rejected_logps, shape)
    for name, value, need in (
        ("chosen_lengths", chosen_lengths, "lengths"),
        ("rejected_lengths", rejected_lengths, "lengths"),
        ("chosen_nll", chosen_nll, "nll"),
    ):
        named = f"loss_type {', '.join(objective.type_names)}"
        if objective.needs(need) and value is None:
            raise ValueError(f"{name}: got None, expected a tensor: {named} needs it")
        if value is not None and not objective.needs(need):
            raise ValueError(f"{name}: got a tensor, expected None: {named} has no use for it")
    lengths = None
    if chosen_lengths is not None and rejected_lengths is not None:
        check_numbers("chosen_lengths", chosen_lengths, shape)
        check_numbers("rejected_lengths", rejected_lengths, shape)
        lengths = (taken(chosen_lengths, chosen_logps.device), taken(rejected_lengths, chosen_logps.device))
    if chosen_nll is not None:
        check_float_tensor("chosen_nll", chosen_nll, (), shape)
    if pair_weights is not None:
        check_float_tensor("pair_weights", pair_weights, shape)
        objective.check_pair_weights("pair_weights")
        pair_weights = taken(pair_weights, chosen_logps.device)
    dtype = wide_dtype(*(t.dtype for t in (chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps)))
    return objective.losses(
        chosen_logps.to(dtype),
        rejected_logps.to(dtype),
        taken(ref_chosen_logps, chosen_logps.device, dtype),
        taken(ref_rejected_logps, chosen_logps.device, dtype),
        lengths,
        chosen_nll,
        pair_weights,
    )
