"""What every paired loss shares: rows `[2B, ...]` with the chosen half first, batch totals, NLL, common metrics."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def pair_count(rows: int) -> int:
    """Number of pairs in `rows` rows. Raises ValueError when the rows do not come in pairs."""
    if rows % 2:
        raise ValueError(
            f"target: got {rows} rows, expected an even number: the chosen half first, then the rejected half"
        )
    return rows // 2


def split_pairs(
    rows: Tensor,  # [2B, ...]
) -> tuple[Tensor, Tensor]:
    """The chosen half and the rejected half, each `[B, ...]`, as views."""
    pairs = rows.shape[0] // 2
    return rows[:pairs], rows[pairs:]


def pair_totals(
    mask: Tensor,  # [2B, T] bool, the whole batch
) -> dict[str, Tensor]:
    """Normalisers over the whole batch: `pairs`, `chosen_tokens`, `rejected_tokens`, each a scalar of at least 1."""
    pairs = pair_count(mask.shape[0])
    chosen, rejected = split_pairs(mask)
    return {
        "pairs": torch.full((), max(pairs, 1), dtype=torch.int64, device=mask.device),
        "chosen_tokens": chosen.sum().clamp_min(1),
        "rejected_tokens": rejected.sum().clamp_min(1),
    }


def chosen_response_nll(
    logprobs: Tensor,  # [2b, T]
    mask: Tensor,  # [2b, T] bool
    totals: Mapping[str, Tensor],
) -> Tensor:
    """This subset's share of the chosen responses' NLL, averaged over all chosen scored tokens of the batch. Scalar."""
    chosen, chosen_mask = split_pairs(logprobs)[0], split_pairs(mask)[0]
    return -chosen.masked_fill(~chosen_mask, 0).sum() / totals["chosen_tokens"]


def pair_metrics(
    statistics: Mapping[str, Tensor],  # mean_logit [2b, T]
    mask: Tensor,  # [2b, T] bool
    totals: Mapping[str, Tensor],
    logps: Tensor,  # [2b], sequence log-probs as the loss reduces them
    nll: Tensor,  # scalar
) -> dict[str, Tensor]:
    """The five metrics common to paired losses, detached.

    `chosen_logps`, `rejected_logps` `[b]`; `chosen_logits_mean`, `rejected_logits_mean`, `nll_loss` scalars: shares
    that add up over the subsets of a batch to the mean over its scored positions (and the vocabulary).
    """
    chosen_logps, rejected_logps = split_pairs(logps.detach())
    chosen_logits, rejected_logits = split_pairs(statistics["mean_logit"].detach().masked_fill(~mask, 0))
    return {
        "chosen_logps": chosen_logps,
        "rejected_logps": rejected_logps,
        "chosen_logits_mean": chosen_logits.sum() / totals["chosen_tokens"],
        "rejected_logits_mean": rejected_logits.sum() / totals["rejected_tokens"],
        "nll_loss": nll.detach(),
    }
