"""`head_mask` and `head_share` against sorting."""

from __future__ import annotations

import pytest
import torch

from liger_losses import Divergence, linear_divergence
from liger_losses.kernels import head_mask, head_share
from liger_losses.losses import divergence

from ..distillation_oracle import head_share_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mass", [0.01, 0.5, 0.9, 0.999])
def test_the_head_is_the_fewest_that_reach_the_mass(mass: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    p = (3 * torch.randn(20, 4, 301, generator=generator, dtype=dtype)).softmax(-1)
    head = head_mask(p, mass)
    inside = torch.where(head, p, 0).sum(-1)
    assert (inside >= mass).all()
    assert (inside - torch.where(head, p, torch.inf).amin(-1) < mass).all()
    assert (torch.where(head, p, torch.inf).amin(-1) > torch.where(head, 0, p).amax(-1)).all()
    s = torch.randn(20, 4, 301, generator=generator, dtype=dtype).softmax(-1)
    torch.testing.assert_close(head_share(s, p, mass), head_share_of(s, p, mass))


@pytest.mark.parametrize(
    ("p", "mass", "head"),
    [
        ([0.5, 0.25, 0.25], 0.5, [1, 0, 0]),  # reached, and no more
        ([0.25, 0.25, 0.5], 0.6, [1, 1, 1]),  # either of two equal ones would do: both
        ([0.25, 0.25, 0.25, 0.25], 0.5, [1, 1, 1, 1]),
        ([0.5, 0.5, 0.0], 0.0, [0, 0, 0]),
        ([0.5, 0.5, 0.0], 1.0, [1, 1, 0]),
        ([1.0, 0.0, 0.0], 1.0, [1, 0, 0]),
        ([1e-30, 1.0, 0.0], 0.5, [0, 1, 0]),
    ],
    ids=str,
)
def test_ties_and_zeros(p: list[float], mass: float, head: list[int]) -> None:
    for dtype in (torch.float32, torch.float64):
        rows = torch.tensor(p, dtype=dtype)
        for order in (torch.arange(len(p)), torch.arange(len(p)).flip(0)):
            assert head_mask(rows[order], mass).int().tolist() == torch.tensor(head)[order].tolist()


def test_mass_that_rounding_leaves_short_of_one_is_all_of_it() -> None:
    p = torch.full((1, 1000), 1e-3) - 1e-7
    assert head_mask(p, 1.0).all()


def test_equal_distributions_and_nan() -> None:
    p = torch.tensor([[0.5, 0.5], [0.5, torch.nan]])
    assert head_share(p, p, 0.5).isnan().tolist() == [False, True]
    assert head_share(p, p, 0.5)[0] == 0.5


@pytest.mark.parametrize(("mu", "kind"), [(0.0, "reverse_kl"), (1.0, "forward_kl")])
@pytest.mark.parametrize("sharpness", [1.0, 60.0])  # at the second most probabilities are 0 in fp32
def test_at_its_ends_akl_is_a_kl(mu: float, kind: str, sharpness: float) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, teacher = (torch.randn(*s, generator=generator) for s in ((40, 8), (65, 8), (40, 65)))
    weight, teacher = weight * sharpness / 3, teacher * sharpness
    target = torch.zeros(40, dtype=torch.int64)
    fused = [
        linear_divergence(hidden, weight, target, teacher_logits=teacher, divergence=Divergence(kind=k, **more))
        for k, more in (("akl", {"mu": mu}), (kind, {}))
    ]
    torch.testing.assert_close(*fused, rtol=0, atol=0)
    logits = hidden @ weight.T
    torch.testing.assert_close(divergence(logits, teacher, kind="akl", mu=mu), divergence(logits, teacher, kind=kind))
