"""A loss that no library has, in a few lines: tested, then trained fused, on a tiny head.

Graded preferences. Annotators who say *how much* better one response is give each pair a grade in `[-1, 1]`: 1, the
chosen one is far better; 0, no difference. DPO and its relatives push every pair apart. Here the squashed gap of mean
token log-probabilities is regressed on the grade, so that pairs of equal worth are pulled together:

    loss = mean over pairs of (tanh(scale * (mean logprob chosen - mean logprob rejected)) - grade)^2
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_losses import fused_linear_loss
from liger_losses.losses import sequence_logprobs
from liger_losses.testing import assert_fused_matches_unfused


@dataclass(frozen=True)
class GradedPreferenceLoss:
    """Reads `grade` `[B]`. Rows are `[2B, T]`, chosen first."""

    scale: float = 0.5
    separability = "pair"  # no pair needs to know of another: gradients are formed while a tile of logits is resident
    statistics = ("logprob",)

    def totals(self, mask: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of the whole batch, while the call below may see only some of its pairs."""
        return {"pairs": torch.full((), max(mask.shape[0] // 2, 1), device=mask.device)}

    def __call__(
        self, statistics: Mapping[str, Tensor], mask: Tensor, inputs: Mapping[str, Tensor], totals: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        chosen, rejected = sequence_logprobs(statistics["logprob"], mask, average=True).chunk(2)
        gap = torch.tanh(self.scale * (chosen - rejected))
        return (gap - inputs["grade"]).square().sum() / totals["pairs"], {"gap": gap.detach()}


def grades(rows: int, tokens: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {"grade": 2 * torch.rand(rows // 2, generator=generator, dtype=torch.float64) - 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    loss = GradedPreferenceLoss()
    assert_fused_matches_unfused(loss, inputs=grades)
    print("fused == unfused: every strategy, mask, dtype and tile size; the loss keeps its contract")

    generator = torch.Generator().manual_seed(0)
    pairs, tokens, width, vocab = 16, 12, 32, 500
    hidden = torch.randn(2 * pairs, tokens, width, generator=generator)
    target = torch.randint(0, vocab, (2 * pairs, tokens), generator=generator)
    target[:, :3] = -100  # the prompt
    # Half of the pairs are of equal worth, the others are told apart.
    grade = torch.cat([torch.zeros(pairs // 2), torch.full((pairs // 2,), 0.8)])
    weight = (torch.randn(vocab, width, generator=generator) * width**-0.5).requires_grad_()
    optimizer = torch.optim.Adam([weight], lr=0.02)
    for step in range(args.steps + 1):
        value, metrics = fused_linear_loss(loss, hidden, weight, target, inputs={"grade": grade})
        if step % max(args.steps // 5, 1) == 0:
            equal, apart = metrics["gap"].chunk(2)
            print(
                f"step {step:3d}  loss {value.item():.4f}  mean size of the gap of equal pairs "
                f"{equal.abs().mean().item():.3f}, gap of graded pairs {apart.mean().item():.3f} (grade 0.8)"
            )
        value.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
