"""The protocol of a loss, and how the engine calls one on some of a batch's units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

from .._checks import check_constant, check_whole
from ..kernels import DIFFERENTIABLE, DISTILLATION, STATISTICS
from .tokens import SEPARABILITY

# One matrix, whatever the loss: each of these has a gradient that the loss only scales, row by row.
_ONE_MATRIX = ("logprob", "distillation")
_WITH_GRADIENT = (*DIFFERENTIABLE, "distillation")
KNOWN = tuple(dict.fromkeys((*STATISTICS, *DISTILLATION)))


@runtime_checkable
class Loss(Protocol):
    """A pure function of per-token statistics, and what the engine must know to call it.

    Four members are optional. `differentiable` names those of `statistics` that the loss differentiates (default: all
    that have a gradient). `unit_rows` is the number of rows of a unit of separability `"pair"` (default 2: chosen and
    rejected; 3 adds one more response); unit `i` of `n` holds the rows `i`, `n + i`, `2 n + i`.

    A third, `constants`, names inputs without a gradient: while gradients are enabled, one that requires a gradient is
    refused. (Those that are not named get what the loss sends them, from a deferred strategy.)

    A fourth, `prepare(mask, inputs) -> inputs`, is called once with the whole batch, before `totals`: there a loss
    checks its inputs, brings them to a first dimension of rows (for token losses to `[R, T, ...]`) and adds what
    follows from the batch and not from the statistics, such as a weight per token. All inputs are on the head's device.

    Statistics are 0 where nothing is scored, and no gradient from there is used; inputs hold there what the caller
    gave, which must reach nothing: mask it before anything else is done with it.

    Contributions add up: called on disjoint sets of whole units that make up the batch, the returned scalars sum to the
    loss. Normalise with `totals`, which are taken over the whole batch, never with what is counted inside the call.
    """

    @property
    def separability(self) -> str:
        """The smallest unit whose contribution needs no other: `"token"`, `"sequence"`, `"pair"` or `"batch"`."""
        ...

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the statistics the loss reads."""
        ...

    def totals(
        self,
        mask: Tensor,  # [R, T] bool
        inputs: Mapping[str, Tensor],
    ) -> Mapping[str, Tensor]:
        """Normalisers over the whole batch, computed once."""
        ...

    def __call__(
        self,
        statistics: Mapping[str, Tensor],  # name -> [r, T], zero where not scored
        mask: Tensor,  # [r, T] bool
        inputs: Mapping[str, Tensor],
        totals: Mapping[str, Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Contribution of some whole units (pairs: `r = 2 b`, chosen first; tokens: `r = 1`), and metrics.

        `inputs` are those of these units; one without dimensions concerns the batch and comes as it is.

        A scalar metric is summed over calls; one whose first dimension counts units is concatenated.
        """
        ...


def check_loss(loss: object) -> Loss:
    """Raise unless `loss` follows the protocol with known names."""
    if isinstance(loss, type):
        raise TypeError(f"loss: got the class {loss.__name__}, expected an instance of it")
    if not isinstance(loss, Loss) or not callable(loss):
        missing = [name for name in ("separability", "statistics", "totals") if not hasattr(loss, name)]
        raise TypeError(
            f"loss: got {type(loss).__name__} without {', '.join(missing) or '__call__'}; expected an object that "
            "follows liger_losses.chunked.Loss"
        )
    if loss.separability not in SEPARABILITY:
        raise ValueError(f"loss.separability: got {loss.separability!r}, expected one of {SEPARABILITY}")
    check_statistics("loss.statistics", loss.statistics, KNOWN)
    return loss


def check_statistics(argument: str, names: tuple[str, ...], known: tuple[str, ...] = STATISTICS) -> None:
    if not isinstance(names, (tuple, list)) or not names:
        raise TypeError(f"{argument}: got {names!r}, expected a non-empty tuple of names out of {known}")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"{argument}: got unknown {unknown}, expected names out of {known}")
    if len(set(names)) < len(names):
        raise ValueError(f"{argument}: got {tuple(names)}, expected each name once")


def rows_per_unit(loss: Loss) -> int:
    """Rows that belong to one unit: 1, or for a loss over pairs its `unit_rows`."""
    if loss.separability != "pair":
        return 1
    rows: object = getattr(loss, "unit_rows", 2)
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 2:
        raise ValueError(f"loss.unit_rows: got {rows!r}, expected an int >= 2")
    return rows


def check_units(loss: Loss, hidden: Tensor, inputs: Mapping[str, Tensor]) -> int:
    """Rows of one unit; raises unless the rows come in whole units and the inputs are tensors."""
    rows, unit_rows = hidden.shape[0], rows_per_unit(loss)
    if rows % unit_rows:
        raise ValueError(
            f"hidden: got {rows} rows for a loss over units of {unit_rows}, expected a multiple of {unit_rows}: the "
            "first rows of all units, then their second rows, and so on (pairs: chosen, then rejected)"
        )
    for name, value in inputs.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"inputs[{name!r}]: got {type(value).__name__}, expected a torch.Tensor")
        check_whole(f"inputs[{name!r}]", value)
    check_constants(loss, inputs)
    return unit_rows


def prepared_inputs(loss: Loss, mask: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs as the loss wants them cut into units."""
    prepare = getattr(loss, "prepare", None)
    return dict(inputs if prepare is None else prepare(mask, inputs))


def check_constants(loss: Loss, inputs: Mapping[str, Tensor]) -> None:
    """Raise for an input that waits for a gradient which the loss has none for."""
    for name in getattr(loss, "constants", ()):
        check_constant(name, inputs.get(name))


def check_inputs(loss: Loss, hidden: Tensor, inputs: Mapping[str, Tensor], unit_rows: int) -> None:
    """Raise unless the prepared inputs can be cut into units as the hidden states are."""
    rows, length = hidden.shape[:2]
    for name, value in inputs.items():
        if value.dim() == 0:  # of the batch, not of its rows
            continue
        if loss.separability == "token":
            if value.shape[:2] != (rows, length):
                raise ValueError(f"inputs[{name!r}]: got shape {tuple(value.shape)}, expected [{rows}, {length}, ...]")
            continue
        firsts = {"pair": (rows, rows // unit_rows), "batch": (rows, rows // 2)}.get(loss.separability, (rows,))
        if value.shape[0] not in firsts:
            raise ValueError(
                f"inputs[{name!r}]: got shape {tuple(value.shape)}, expected a first dimension of "
                + " or ".join(map(str, firsts))
            )


def check_differentiable(statistics: tuple[str, ...], asked: tuple[str, ...] | None) -> tuple[str, ...]:
    """The statistics whose gradient will be used; all that have one when nothing is asked."""
    if asked is None:
        return tuple(name for name in statistics if name in DIFFERENTIABLE)
    if asked:
        check_statistics("differentiable", asked, DIFFERENTIABLE)
    absent = [name for name in asked if name not in statistics]
    if absent:
        raise ValueError(f"differentiable: got {absent}, expected names out of statistics {tuple(statistics)}")
    return tuple(asked)


def differentiable_statistics(loss: Loss) -> tuple[str, ...]:
    """The statistics whose gradient the loss may send back."""
    declared: tuple[str, ...] | None = getattr(loss, "differentiable", None)
    if declared is None:
        return tuple(name for name in loss.statistics if name in _WITH_GRADIENT)
    if declared:
        check_statistics("loss.differentiable", declared, _WITH_GRADIENT)
    absent = [name for name in declared if name not in loss.statistics]
    if absent:
        raise ValueError(f"loss.differentiable: got {absent}, expected names out of loss.statistics {loss.statistics}")
    return tuple(declared)


def only_logprob(differentiable: tuple[str, ...]) -> bool:
    """Whether no other statistic sends a gradient back: then one matrix serves every loss (docs/design.md)."""
    return all(name in _ONE_MATRIX for name in differentiable)


def gradient_order(names: tuple[str, ...]) -> tuple[str, ...]:
    """The statistics whose gradients the walk takes, in its order; the first is that of the one matrix."""
    return ("distillation", *DIFFERENTIABLE[1:]) if "distillation" in names else DIFFERENTIABLE


def check_result(value: object, metrics: Mapping[str, object]) -> None:
    """Raise unless a loss returned a scalar tensor and metrics that are tensors, the same under every strategy."""
    if not isinstance(value, Tensor) or value.dim() != 0:
        seen = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"loss: returned {seen}, expected a tensor without dimensions")
    for name, metric in metrics.items():
        if not isinstance(metric, Tensor):
            raise TypeError(f"loss: returned metric {name!r} of type {type(metric).__name__}, expected a torch.Tensor")
