"""Any loss object, fused in every way it may be, against itself on whole logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..chunked import Loss, fused_linear_loss
from ..chunked.loss import check_loss as check_protocol
from ..chunked.loss import differentiable_statistics, only_logprob, rows_per_unit
from .contract import check_contract
from .oracle import TRANSFORMS, Case, check_loss, gradients_of, make_case

Inputs = Mapping[str, Tensor] | Callable[[int, int, torch.Generator], Mapping[str, Tensor]] | None

_MASKS = ("all", "prompt", "row", "nothing")
_HEAD = ("hidden", "weight", "bias")


def assert_fused_matches_unfused(
    loss: Loss,
    *,
    inputs: Inputs = None,
    rows: int = 4,
    tokens: int = 5,
    masks_statistics: bool = False,
    thorough: bool = False,
    device: str = "cpu",
    seed: int = 0,
) -> None:
    """Raise AssertionError unless `loss`, fused, is `loss` on whole logits, and keeps the contract of a loss object.

    Compared are value, metrics and the gradients of hidden states, weight and bias: in fp64, where only the order of
    sums may differ, and in fp32 and bf16, where the error against fp64 may be twice that of the plain computation in
    the same precision, plus a rounding. The cases: every strategy that the loss may run under; all positions scored,
    prompts, a row and everything left out; one unit, one token a row, an odd vocabulary, units larger than a tile and
    a ragged last one; a frozen head, frozen hidden states; softcap, scale, temperature; no bias. The same call twice
    gives the same bits. What the contract asks of the loss itself is listed at `check_contract`.

    Args:
        loss: an object that follows `liger_losses.chunked.Loss`.
        inputs: what the loss reads beside statistics: a mapping of tensors for `rows` rows of `tokens` tokens, or (then
            cases of all shapes are run) a function `(rows, tokens, generator) -> mapping`. Floating-point ones are cast
            to the dtype of the statistics.
        rows: rows of a batch, a multiple of those of a unit.
        tokens: length of a row.
        masks_statistics: whether the loss is also meant for statistics that the engine has not made, whose unscored
            positions may hold anything. See `check_contract`.
        thorough: also the product of masks, transforms, dtypes (fp16 too), shapes and strategies: half a minute. The
            default takes a few seconds.
        device: where to run.
        seed: of the data.

    Raises:
        AssertionError: naming the case, what differed and by how much.
        TypeError, ValueError: for a `loss` without the protocol's members, or `rows` that are not whole units.
    """
    check_protocol(loss)
    unit_rows = rows_per_unit(loss)
    if rows < 1 or rows % unit_rows:
        raise ValueError(f"rows: got {rows}, expected a multiple of {unit_rows}, the rows of a unit")
    run = _Runner(loss, inputs, rows, tokens, masks_statistics, device, seed)
    for scored in _MASKS:
        run.contract(scored=scored)
    for scored in _MASKS:
        for strategy in run.strategies():
            run(scored=scored, strategy=strategy)
    for strategy in run.strategies():
        run.twice(strategy=strategy)
        for dtype in (torch.float32, torch.bfloat16):
            run(dtype=dtype, strategy=strategy)
    for options in TRANSFORMS.values():
        run(**options)
    run(bias=False)
    for trainable in (("hidden",), ("weight",), ("bias",), ("weight", "bias"), ()):
        for strategy in run.strategies(trainable):
            run(trainable=trainable, strategy=strategy)
    run(trainable=("hidden",), dtype=torch.bfloat16)
    for strategy in run.strategies():
        # Batch losses have no smaller batch that is sure to make sense.
        run(strategy=strategy, rows=rows if loss.separability == "batch" else unit_rows)
        run(strategy=strategy, length=1, scored="all")
        run(strategy=strategy, vocab=3, hidden_size=1)
        # Streamed and ragged: rows longer than the smallest tile of 128 tokens.
        run(strategy=strategy, length=150, hidden_size=8, vocab=40, scored="all", tight=True)
        run(strategy=strategy, length=150, hidden_size=8, vocab=40, tight=True)
    if "immediate" in run.strategies():
        for units in (1, 3):
            run(strategy="immediate", max_units=units)
            run(strategy="immediate", max_units=units, scored="row")
    run(strategy="recompute", length=150, hidden_size=3, vocab=1500, tight=True)  # several vocabulary blocks
    if thorough:
        dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        for scored, dtype, (_, options), strategy in product(_MASKS, dtypes, TRANSFORMS.items(), run.strategies()):
            for length, vocab in ((tokens, 257), (1, 40), (40, 40)):
                run(scored=scored, dtype=dtype, strategy=strategy, length=length, vocab=vocab, **options)
            run(scored=scored, dtype=dtype, strategy=strategy, bias=False, trainable=("hidden", "weight"), **options)


class _Runner:
    """Makes cases, names them, and runs a loss on each."""

    def __init__(
        self, loss: Loss, inputs: Inputs, rows: int, tokens: int, masks_statistics: bool, device: str, seed: int
    ) -> None:
        self.masks_statistics = masks_statistics
        self.loss, self.device, self.seed = loss, device, seed
        self.rows, self.tokens = rows, tokens
        self._inputs = inputs
        self._one_matrix = only_logprob(differentiable_statistics(loss))

    def strategies(self, trainable: tuple[str, ...] = _HEAD) -> list[str]:
        """Those that a loss may run under; without gradients all are the same walk."""
        found = ["auto", "recompute"]
        if self.loss.separability != "batch" and trainable:
            found.append("immediate")
        if self._one_matrix:
            found.append("cached")
            if not {"weight", "bias"} & set(trainable):
                found.append("frozen")
        return found

    def __call__(
        self, *, strategy: str = "auto", tight: bool = False, max_units: int | None = None, **options: Any
    ) -> None:
        made = self._make(**options)
        if made is None:
            return
        case, inputs = made
        budget = 1024 if tight else None  # raised until the planner accepts it
        extra = [f"max_units={max_units}"] * (max_units is not None) + ["smallest memory budget"] * tight
        with self._named(f"strategy={strategy}", *extra, **options):
            while True:
                try:
                    got = self._fused(case, inputs, strategy, max_units=max_units, memory_budget=budget)
                    break
                except ValueError as error:
                    if budget is None or not str(error).startswith("memory_budget"):
                        raise
                    budget += budget // 8
            check_loss(got, self.loss, case, inputs)

    def contract(self, **options: Any) -> None:
        made = self._make(**options)
        if made is not None:
            with self._named("contract", **options):
                check_contract(self.loss, *made, masks_statistics=self.masks_statistics)

    def twice(self, *, strategy: str) -> None:
        """The same bits from the same tensors."""
        made = self._make()
        assert made is not None
        case, inputs = made

        def outcome() -> dict[str, Tensor]:
            value, metrics = self._fused(case, inputs, strategy)
            named = zip(case.trained, gradients_of(value, case.leaves), strict=True)
            return {
                "loss": value,
                **{f"metric {name}": metric for name, metric in metrics.items()},
                **{f"gradient of {name}": gradient for name, gradient in named},
            }

        with self._named(f"strategy={strategy}", "twice"):
            first = outcome()
            for name, tensor in outcome().items():
                if not torch.equal(tensor, first[name]):
                    raise AssertionError(f"{name}: other bits the second time, expected the same from the same tensors")

    def _fused(
        self,
        case: Case,
        inputs: Mapping[str, Tensor],
        strategy: str,
        max_units: int | None = None,
        memory_budget: int | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return fused_linear_loss(
            self.loss,
            *case.head,
            inputs={name: _cast(value, case.wide) for name, value in inputs.items()},
            strategy=strategy,
            max_units=max_units,
            memory_budget=memory_budget,
            **case.options,
        )

    def _make(self, **options: Any) -> tuple[Case, dict[str, Tensor]] | None:
        """A case, and its inputs in fp64; None where a mapping of inputs has another shape."""
        shape = {"rows": self.rows, "length": self.tokens}
        options = {**shape, **options}
        rows, length = options["rows"], options["length"]
        if callable(self._inputs):
            inputs = dict(self._inputs(rows, length, torch.Generator().manual_seed(self.seed + 1)))
        else:
            inputs = dict(self._inputs or {})
            dimensions = max((value.dim() for value in inputs.values()), default=0)
            if (dimensions > 0 and rows != self.rows) or (dimensions > 1 and length != self.tokens):
                return None
        case = make_case(**options, seed=self.seed, device=self.device)
        inputs = {name: value.detach().to(self.device) for name, value in inputs.items()}
        # Rounded first to what the fused call is given, so that both read the same numbers.
        return case, {name: _cast(_cast(value, case.wide), torch.float64) for name, value in inputs.items()}

    @contextmanager
    def _named(self, *words: str, **options: Any) -> Iterator[None]:
        """Every failure says which loss and which case."""
        try:
            yield
        except Exception as error:
            shown = [f"{name}={value}" for name, value in options.items()]
            text = str(error) if isinstance(error, AssertionError) else f"raised {type(error).__name__}: {error}"
            raise AssertionError(f"{type(self.loss).__name__}, {', '.join([*words, *shown])}: {text}") from error


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value
