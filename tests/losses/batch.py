"""A small preference batch, its per-token statistics read off whole logits, and slices of both."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PAIRS, TOKENS, VOCAB = 5, 7, 11

# A label smoothing for each loss type that uses one.
SMOOTHED = {"sigmoid": 0.1, "exo_pair": 0.1, "robust": 0.2, "aot": 0.1, "aot_unpaired": 0.1}


@dataclass
class Batch:
    logits: Tensor  # [2B, T, V]
    ref_logprobs: Tensor  # [2B, T]
    target: Tensor  # [2B, T], -100 where not scored
    mask: Tensor  # [2B, T] bool

    def statistics(self) -> dict[str, Tensor]:
        return read_statistics(self.logits, self.target, self.mask)

    def pairs(self, index: list[int]) -> Batch:
        """The pairs `index`, in that order."""
        count = self.mask.shape[0] // 2
        rows = torch.tensor(index + [count + i for i in index])
        return Batch(self.logits[rows], self.ref_logprobs[rows], self.target[rows], self.mask[rows])

    def leaf(self) -> Batch:
        return Batch(self.logits.detach().clone().requires_grad_(), self.ref_logprobs, self.target, self.mask)


def read_statistics(logits: Tensor, target: Tensor, mask: Tensor) -> dict[str, Tensor]:
    log_p = logits.log_softmax(-1)
    logprob = log_p.gather(-1, target.masked_fill(~mask, 0).unsqueeze(-1)).squeeze(-1)
    return {
        "logprob": torch.where(mask, logprob, 0),
        "mean_logit": torch.where(mask, logits.mean(-1), 0),
        "log_sum_sq_prob": torch.where(mask, (2 * log_p).logsumexp(-1), 0).detach(),
    }


def make_batch(pairs: int = PAIRS, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    rows = 2 * pairs
    target = torch.randint(0, VOCAB, (rows, TOKENS), generator=generator)
    # Prompts and padding of different lengths; row 0 is scored throughout.
    starts = torch.randint(0, 3, (rows, 1), generator=generator)
    stops = torch.randint(3, TOKENS + 1, (rows, 1), generator=generator)
    position = torch.arange(TOKENS)
    mask = (position >= starts) & (position < stops)
    mask[0] = True
    target = target.masked_fill(~mask, -100)
    logits = 2 * normal(rows, TOKENS, VOCAB)
    ref = read_statistics(logits + 0.7 * normal(rows, TOKENS, VOCAB), target, mask)["logprob"]
    return Batch(logits, ref, target, mask)


def evaluate(loss, batch: Batch, *, inputs: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss object on the whole batch at once: the unfused loss."""
    if inputs is None:
        inputs = {} if loss.reference_free else {"ref_logprobs": batch.ref_logprobs}
    return loss(batch.statistics(), batch.mask, inputs, loss.totals(batch.mask, inputs))
