"""Divergences of distributions that exist, under liger-kernel's names: `[BT, V]` in, a number out.

The formulas are those of `liger_losses.losses`. Nothing of the caller's is written to, and a batch with nothing scored
gives 0 with a zero gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._checks import check_choice, check_flag, check_number
from ..chunked.tokens import check_ignore_index, check_integer, widened
from ..losses.divergence import check_pair, kl_terms, logprob_divergence, scored_rows
from ..losses.divergence_kinds import total_variation_terms

REDUCTIONS = ("none", "sum", "mean", "batchmean")


def _mask(shift_labels: Tensor | None, ignore_index: int, rows: torch.Size) -> Tensor | None:
    """Which rows are scored: all, when no labels are given."""
    if shift_labels is None:
        return None
    if not isinstance(shift_labels, Tensor):
        raise TypeError(f"shift_labels: got {type(shift_labels).__name__}, expected a torch.Tensor")
    check_integer("shift_labels", shift_labels)
    if shift_labels.shape != rows:
        raise ValueError(f"shift_labels: got shape {list(shift_labels.shape)}, expected {list(rows)}")
    return widened(shift_labels) != ignore_index


def _check_matrix(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 2:
        raise ValueError(f"{name}: got shape {list(tensor.shape)}, expected [BT, V]")


def _reduced(terms: Tensor, mask: Tensor | None, reduction: str) -> Tensor:
    """Of terms `[BT, V]`, zero where not scored. `batchmean` divides by the scored rows, `mean` by their entries."""
    if reduction == "none":
        return terms
    total = terms.sum()
    if reduction == "sum":
        return total
    rows: Tensor | int = max(terms.shape[0], 1) if mask is None else mask.sum().clamp_min(1)
    return total / rows if reduction == "batchmean" else total / (rows * terms.shape[1])


class LigerJSD(torch.nn.Module):
    """Generalised Jensen-Shannon divergence of log-probabilities, the mean over the scored rows.

    `D = beta KL(p||m) + (1 - beta) KL(q||m)`, `m = (1 - beta) q + beta p`, with `q` the student and `p` the teacher;
    `KL(p||q)` at `beta = 0` and `KL(q||p)` at `beta = 1` (the formula itself is 0 there). Agarwal et al., GKD,
    arXiv:2306.13649.

    Args:
        beta: in `[0, 1]`.
        ignore_index: of `shift_labels`: rows with it are not scored, whatever their log-probabilities hold.
    """

    def __init__(self, beta: float = 0.5, ignore_index: int = -100) -> None:
        super().__init__()
        check_number("beta", beta, low=0, high=1)
        check_ignore_index(ignore_index)
        self.beta, self.ignore_index = beta, ignore_index

    def forward(
        self,
        log_q: Tensor,  # [BT, V], log-probabilities of the student
        log_p: Tensor,  # [BT, V], of the teacher: a constant
        shift_labels: Tensor | None = None,  # [BT]
    ) -> Tensor:
        """The divergence.

        Args:
            log_q: `[BT, V]`, log-probabilities in nats of the student, any floating dtype.
            log_p: `[BT, V]`, of the teacher, a constant.
            shift_labels: `[BT]` integer, read only for where they are `ignore_index`, which is not scored; None: every
                row is.

        Returns:
            The mean over the scored rows in nats: a scalar, fp32 (fp64 for fp64; liger-kernel rounds it to the input's
            dtype). 0 when nothing is scored.

        Raises:
            TypeError, ValueError: before any work, naming the argument.
        """
        check_pair(("log_q", "log_p"), log_q, log_p, None)
        _check_matrix("log_q", log_q)
        mask = _mask(shift_labels, self.ignore_index, log_q.shape[:-1])
        tokens = logprob_divergence(log_q, log_p, kind="jsd", beta=self.beta, mask=mask)
        return _reduced(tokens.unsqueeze(-1), mask, "batchmean")

    def extra_repr(self) -> str:
        return f"beta={self.beta}, ignore_index={self.ignore_index}"


class LigerKLDIVLoss(torch.nn.KLDivLoss):
    """`KL(target||prediction)` of a log-probability and a distribution, as `torch.nn.KLDivLoss`: `y (log y - y_pred)`.

    Args:
        eps: probabilities of the target below it are raised to it inside the logarithm, and nowhere else. Not read
            with `log_target=True`. A target of exactly 0 contributes 0, also where `y_pred` is `-inf`.
        size_average, reduce, reduction, log_target: of `torch.nn.KLDivLoss`: `"none"` `[BT, V]`, `"sum"`, `"mean"`
            (over entries, the default), `"batchmean"` (the divergence's mean over rows). The first two are torch's
            deprecated names of a reduction.
    """

    def __init__(
        self,
        eps: float = 1e-10,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        log_target: bool = False,
    ) -> None:
        check_number("eps", eps, low=0)
        check_choice("reduction", reduction, REDUCTIONS)
        check_flag("log_target", log_target)
        super().__init__(size_average, reduce, reduction, log_target)
        self.eps = eps

    def forward(
        self,
        y_pred: Tensor,  # [BT, V], log-probabilities
        y_true: Tensor,  # [BT, V], probabilities, or with log_target their logarithms
    ) -> Tensor:
        """The divergence.

        Args:
            y_pred: `[BT, V]`, log-probabilities in nats, any floating dtype.
            y_true: `[BT, V]`, probabilities, or with `log_target` their logarithms; a constant.

        Returns:
            In nats: a scalar, or with reduction "none" `[BT, V]`; fp32 (fp64 for fp64).

        Raises:
            TypeError, ValueError: before any work, naming the argument.
        """
        check_pair(("y_pred", "y_true"), y_pred, y_true, None)
        _check_matrix("y_pred", y_pred)
        prediction, target = scored_rows(y_pred, y_true, None)
        terms = kl_terms(prediction, target, log_target=self.log_target, eps=0.0 if self.log_target else self.eps)
        return _reduced(terms, None, self.reduction)

    def extra_repr(self) -> str:
        return f"eps={self.eps}, reduction={self.reduction!r}, log_target={self.log_target}"


class LigerTVDLoss(torch.nn.Module):
    """Total variation distance of two distributions, `1/2 sum |p - q|`.

    Args:
        reduction: `"batchmean"` (over the scored rows), `"mean"` (over their entries), `"sum"` or `"none"`
            (`[BT, V]`, 0 in rows that are not scored).
        ignore_index: of `shift_labels`: rows with it are not scored, whatever they hold.
    """

    def __init__(self, reduction: str = "batchmean", ignore_index: int = -100) -> None:
        super().__init__()
        check_choice("reduction", reduction, REDUCTIONS)
        check_ignore_index(ignore_index)
        self.reduction, self.ignore_index = reduction, ignore_index

    def forward(
        self,
        p: Tensor,  # [BT, V], probabilities of the student
        q: Tensor,  # [BT, V], of the teacher: a constant
        shift_labels: Tensor | None = None,  # [BT]
    ) -> Tensor:
        """The distance.

        Args:
            p: `[BT, V]`, probabilities of the student, any floating dtype.
            q: `[BT, V]`, of the teacher, a constant.
            shift_labels: `[BT]` integer, read only for where they are `ignore_index`, which is not scored; None: every
                row is.

        Returns:
            A scalar, or with reduction "none" `[BT, V]`; fp32 (fp64 for fp64).

        Raises:
            TypeError, ValueError: before any work, naming the argument.
        """
        check_pair(("p", "q"), p, q, None)
        _check_matrix("p", p)
        mask = _mask(shift_labels, self.ignore_index, p.shape[:-1])
        student, teacher = scored_rows(p, q.detach(), mask)
        return _reduced(total_variation_terms(student, teacher), mask, self.reduction)

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, ignore_index={self.ignore_index}"
