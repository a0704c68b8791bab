"""`liger_losses.testing`: losses of the library pass, wrong ones are caught, each with a message that says why."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_losses import kernels
from liger_losses.losses import BCOLoss, CrossEntropyLoss, DPOLoss, KTOLoss
from liger_losses.testing import assert_fused_matches_unfused, check_close, make_case, unfused
from liger_losses.testing.oracle import DIFFERENTIABLE, STATISTICS
from liger_losses.testing.parity import _Runner

from .oracle import ToyLoss

ROOT = Path(__file__).parents[1]


def references(rows: int, tokens: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {"ref_logprobs": torch.randn(rows, tokens, generator=generator) - 5}


def labelled(**more: tuple[str, ...]) -> Callable[..., dict[str, Tensor]]:
    """References, labels, and random numbers: `"row"`, one a row; `"batch"`, one."""

    def make(rows: int, tokens: int, generator: torch.Generator) -> dict[str, Tensor]:
        shapes = {name: (rows,) if of == "row" else () for name, of in more.items()}
        drawn = {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}
        return {"labels": torch.arange(rows) % 3 != 1, **references(rows, tokens, generator), **drawn}

    return make


RIGHT = [
    (CrossEntropyLoss(), None),
    (CrossEntropyLoss(), {"num_items_in_batch": torch.tensor(11)}),
    (CrossEntropyLoss(reduction="sum"), None),
    (DPOLoss(), references),
    (DPOLoss(loss_type="ipo", use_weighting=True, compute_nll_loss=True), references),
    (DPOLoss(loss_type="aot"), references),
    (DPOLoss(loss_type="sppo_hard", reference_free=True), None),
    (KTOLoss(desirable_weight=0.6), labelled(kl="row")),
    (KTOLoss(average_log_prob=True, beta=0.7), labelled(kl="batch")),
    (KTOLoss(loss_type="apo_zero_unpaired"), labelled()),
    (BCOLoss(), labelled(shift="batch")),
    (BCOLoss(shift_includes_batch=True), labelled(shift="batch", shift_count="batch")),
    (ToyLoss("token", ("logprob", "entropy", "lse")), None),
    (ToyLoss("pair", STATISTICS), {"weight": torch.tensor([0.5, 1.0, 2.0, 0.25]), "offset": torch.tensor([0.5, -1.0])}),
    (ToyLoss("batch", ("logprob", "entropy")), None),
]


@pytest.mark.parametrize(("loss", "inputs"), RIGHT, ids=[str(loss) for loss, _ in RIGHT])
def test_losses_that_are_right(loss: Any, inputs: Any) -> None:
    assert_fused_matches_unfused(loss, inputs=inputs)


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "inputs"), [RIGHT[i] for i in (0, 3, 5, 7, 10)], ids=lambda value: str(value)[:20])
def test_losses_that_are_right_thoroughly(loss: Any, inputs: Any) -> None:
    assert_fused_matches_unfused(loss, inputs=inputs, rows=6, thorough=True)


def test_a_mapping_fixes_rows_and_tokens() -> None:
    inputs = {"weight": torch.rand(6, 9)}
    assert_fused_matches_unfused(ToyLoss("token"), inputs=inputs, rows=6, tokens=9)
    with pytest.raises(AssertionError, match=r"raised ValueError: inputs\['weight'\]: got shape|raised RuntimeError"):
        assert_fused_matches_unfused(ToyLoss("token"), inputs=inputs)


def test_every_strategy_is_run_and_long_rows_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the grid says it covers: the plans that were made."""
    plans = []
    import liger_losses.chunked.calls as calls

    make_plan = calls.make_plan

    def recorded(*args: Any, **kwargs: Any) -> Any:
        plans.append(make_plan(*args, **kwargs))
        return plans[-1]

    monkeypatch.setattr(calls, "make_plan", recorded)
    assert_fused_matches_unfused(ToyLoss("sequence"))
    assert {plan.strategy for plan in plans} == {"immediate", "cached", "recompute", "frozen"}
    assert any(plan.strategy == "immediate" and plan.tile_rows == 128 and plan.gemms > 3 for plan in plans)
    assert any(plan.strategy == "recompute" and plan.vocab_block < plan.problem.vocab_size for plan in plans)


def test_strategies_of_a_loss() -> None:
    def of(loss: Any, *trainable: str) -> set[str]:
        return set(_Runner(loss, None, 4, 5, "cpu", 0).strategies(trainable))

    assert of(ToyLoss("pair"), "hidden", "weight") == {"auto", "immediate", "cached", "recompute"}
    assert of(ToyLoss("pair"), "hidden") == {"auto", "immediate", "cached", "recompute", "frozen"}
    assert of(ToyLoss("batch"), "weight") == {"auto", "cached", "recompute"}
    assert of(ToyLoss("pair", ("entropy",)), "weight") == {"auto", "immediate", "recompute"}


def test_the_oracle_has_every_statistic() -> None:
    assert set(STATISTICS) == set(kernels.STATISTICS)
    assert set(DIFFERENTIABLE) == set(kernels.DIFFERENTIABLE)
    case = make_case(scored="row", softcap=5.0)
    plain, off = unfused(case), unfused(case, off_by=torch.float64)
    for name in STATISTICS:
        differs = off[name] != plain[name]
        assert differs.any() == plain[name].is_floating_point()
        assert not differs[~case.mask].any()
        torch.testing.assert_close(off[name], plain[name], rtol=0, atol=1e-12)


def test_the_rule() -> None:
    exact, eps = torch.tensor([1.0, 3.0], dtype=torch.float64), torch.finfo(torch.float64).eps
    check_close(exact + eps, exact, exact, torch.float64, terms=1)
    check_close(exact + 0.2, exact, exact + 0.1, torch.float64, terms=1)
    for got in (exact + 0.2001, exact * torch.nan, exact[:1]):
        with pytest.raises(AssertionError, match=r"value: (error|got shape)"):
            check_close(got, exact, exact + 0.1, torch.float64, terms=1, what="value")


# Wrong losses -------------------------------------------------------------------------------------------------------


class Right:
    """A loss a row, from which the wrong ones below depart."""

    separability = "sequence"
    statistics = ("logprob",)

    def totals(self, mask: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"rows": torch.tensor(float(max(mask.shape[0], 1)))}

    def rows(self, logprob: Tensor, mask: Tensor) -> Tensor:
        return torch.nn.functional.softplus(-logprob.masked_fill(~mask, 0).sum(-1) / 9)

    def __call__(
        self, statistics: Mapping[str, Tensor], mask: Tensor, inputs: Mapping[str, Tensor], totals: Mapping[str, Tensor]
    ) -> tuple[Any, dict[str, Any]]:
        return self.of(self.rows(statistics["logprob"], mask), statistics, mask, inputs, totals)

    def of(
        self, rows: Tensor, statistics: Any, mask: Tensor, inputs: Any, totals: Mapping[str, Tensor]
    ) -> tuple[Any, dict[str, Any]]:
        return rows.sum() / totals["rows"], {"rows": rows.detach()}


class CouplesRows(Right):
    def of(self, rows, statistics, mask, inputs, totals):
        return (rows - rows.mean()).square().sum() / totals["rows"], {}


class TokensThatAreRows(Right):
    separability = "token"


class SubsetCount(Right):
    def of(self, rows, statistics, mask, inputs, totals):
        return rows.mean(), {}


class SubsetTokenCount(Right):
    def of(self, rows, statistics, mask, inputs, totals):
        return rows.sum() / mask.sum().clamp_min(1), {}


class ReadsMasked(Right):
    """Statistics are 0 where not scored, so nothing shows until something else stands there."""

    def rows(self, logprob, mask):
        return torch.nn.functional.softplus(-logprob.sum(-1) / 9)


class MultipliesByTheMask(Right):
    def rows(self, logprob, mask):
        return torch.nn.functional.softplus(-(logprob * mask).sum(-1) / 9)


class ReadsMaskedInputs(Right):
    def of(self, rows, statistics, mask, inputs, totals):
        return (rows * inputs["bonus"].mean(-1)).sum() / totals["rows"], {}


class WritesStatistics(Right):
    def rows(self, logprob, mask):
        return super().rows(logprob.data.clamp_(min=-5) + logprob - logprob.detach(), mask)


class WritesInputs(Right):
    def of(self, rows, statistics, mask, inputs, totals):
        inputs["bonus"].mul_(1.0)  # to the same values: written to all the same
        return (rows * inputs["bonus"].masked_fill(~mask, 0).sum(-1)).sum() / totals["rows"], {}


class AddsToItsInputs(Right):
    def of(self, rows, statistics, mask, inputs, totals):
        inputs["rows"] = rows
        return rows.sum() / totals["rows"], {}


class MeanMetric(Right):
    def of(self, rows, statistics, mask, inputs, totals):
        return rows.sum() / totals["rows"], {"mean": rows.detach().mean()}


class RowsInAPairsMetric(Right):
    """Entries per row of a loss over pairs: after tiles they are in another order."""

    separability = "pair"


class NotAScalar(Right):
    def of(self, rows, statistics, mask, inputs, totals):
        return rows / totals["rows"], {}


class FloatMetric(Right):
    def of(self, rows, statistics, mask, inputs, totals):
        return rows.sum() / totals["rows"], {"mean": 0.5}


class EmptyRowIsNaN(Right):
    def rows(self, logprob, mask):
        return logprob.masked_fill(~mask, 0).sum(-1) / mask.sum(-1)


class UndeclaredGradient(Right):
    statistics = ("logprob", "entropy")
    differentiable = ("logprob",)

    def of(self, rows, statistics, mask, inputs, totals):
        return (rows + statistics["entropy"].masked_fill(~mask, 0).sum(-1)).sum() / totals["rows"], {}


class OtherEachTime(Right):
    def of(self, rows, statistics, mask, inputs, totals):
        self.calls = getattr(self, "calls", 0) + 1
        return rows.sum() / totals["rows"], {"calls": torch.tensor(float(self.calls))}


class Raises(Right):
    def of(self, rows, statistics, mask, inputs, totals):
        return rows.view(4).sum() / totals["rows"], {}


def bonus(rows: int, tokens: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {"bonus": torch.rand(rows, tokens, generator=generator)}


@pytest.mark.parametrize(
    ("loss", "inputs", "message"),
    [
        (CouplesRows(), None, r"CouplesRows, contract, scored=all: contributions of its 4 units \(sequence\), taken one by one, add up to 0, the whole batch gives"),
        (TokensThatAreRows(), None, r"contributions of its \d+ units \(token\), taken .* either the separability is larger"),
        (SubsetCount(), None, "contributions of .* normalised with what one call sees instead of totals"),
        (SubsetTokenCount(), None, "contributions of .* normalised with what one call sees instead of totals"),
        (ReadsMasked(), None, "ReadsMasked, contract, scored=prompt: the gradient of logprob is not 0 where nothing is scored"),
        (MultipliesByTheMask(), None, r"the loss reads positions that are not scored: with nan there got nan, expected 3\."),
        (ReadsMaskedInputs(), bonus, "the loss reads positions that are not scored"),
        (WritesStatistics(), None, r"statistics\['logprob'\]: written to by the call"),
        (WritesInputs(), bonus, r"prepared inputs\['bonus'\]: written to by the call|inputs\['bonus'\]: written to by the call"),
        (AddsToItsInputs(), None, r"inputs\['rows'\]: written to by the call"),
        (MeanMetric(), None, "metric mean: summed over its units, taken one by one, it is .*, over the whole batch"),
        (RowsInAPairsMetric(), None, "metric rows: concatenated over its units"),
        (NotAScalar(), None, r"raised TypeError: loss: returned shape \(4,\), expected a tensor without dimensions"),
        (FloatMetric(), None, "raised TypeError: loss: returned metric 'mean' of type float"),
        (EmptyRowIsNaN(), None, "EmptyRowIsNaN, contract, scored=row: loss: got nan, expected finite numbers"),
        (UndeclaredGradient(), None, "strategy=auto, scored=all: gradient of hidden: error .*, allowed"),
        (OtherEachTime(), None, "metric calls"),
        (Raises(), None, "Raises, contract, scored=all: raised RuntimeError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Right) else "",
)  # fmt: skip
def test_wrong_losses_are_caught(loss: Right, inputs: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_fused_matches_unfused(loss, inputs=inputs)


def test_the_right_one_they_depart_from() -> None:
    assert_fused_matches_unfused(Right())


def test_coupling_alone_is_caught() -> None:
    """Values of single units and of sets of them agree; only the gradient of one follows another."""
    from liger_losses.testing.contract import _check_coupling, _Units

    class Coupled(Right):
        def of(self, rows, statistics, mask, inputs, totals):
            return (rows * rows.detach().sum() / rows.sum().detach() + rows * (rows.detach().mean() - 1)).sum(), {}

    case = make_case(scored="all")
    loss, statistics = Coupled(), {name: value.detach() for name, value in unfused(case, ("logprob",)).items()}
    with pytest.raises(AssertionError, match="separability 'sequence' is not true: the gradient of logprob of other"):
        _check_coupling(loss, _Units(loss, statistics, case.mask, {}), {})


def test_a_fused_computation_that_is_wrong_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The helper judges the engine, too: a gradient off by 1e-9."""
    import liger_losses.testing.parity as parity

    def off(loss, hidden, *args, **kwargs):
        value, metrics = fused(loss, hidden, *args, **kwargs)
        return value + 1e-9 * (hidden.sum() - hidden.detach().sum()), metrics

    fused = parity.fused_linear_loss
    monkeypatch.setattr(parity, "fused_linear_loss", off)
    with pytest.raises(
        AssertionError, match="CrossEntropyLoss, strategy=auto, scored=all: gradient of hidden: error 2.5e-09"
    ):
        assert_fused_matches_unfused(CrossEntropyLoss())


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="rows: got 3, expected a multiple of 2, the rows of a unit"):
        assert_fused_matches_unfused(DPOLoss(), inputs=references, rows=3)
    with pytest.raises(TypeError, match="loss: got the class Right, expected an instance"):
        assert_fused_matches_unfused(Right)


def test_needs_no_test_framework() -> None:
    code = "import sys, liger_losses.testing; sys.exit(bool({'pytest', 'hypothesis', '_pytest'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_example(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "custom_loss.py"), "--steps", "40"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert lines[0].startswith("fused == unfused")
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines if line.startswith("step")]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.1 * losses[0]
