"""The losses that `plan` and `bench` know by name, as far as their cost is concerned. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from liger_losses.chunked import Loss


@dataclass(frozen=True)
class Workload:
    """`loss`: a class of `liger_losses.losses`, which says what it is separable by; None for divergences, which are
    separable by token. `rows` make up one example."""

    loss: str | None
    rows: int = 1
    reference: bool = False  # a frozen model is scored on the same tokens
    divergence: str | None = None  # the kind, where a teacher's head lies beside the student's
    options: dict[str, Any] = field(default_factory=dict)

    def build(self) -> Loss:
        if self.loss is None:
            raise TypeError(f"a divergence ({self.divergence}) is no loss of log-probabilities")
        from liger_losses import losses

        loss: Loss = getattr(losses, self.loss)(**self.options)
        return loss

    @property
    def separability(self) -> str:
        return "token" if self.divergence else self.build().separability


def _reference_free(**options: Any) -> Workload:
    return Workload("ReferenceFreeLoss", rows=2, options=options)


WORKLOADS = {
    "ce": Workload("CrossEntropyLoss"),
    "dpo": Workload("DPOLoss", rows=2, reference=True),
    "orpo": _reference_free(loss_type="orpo"),
    "simpo": _reference_free(loss_type="simpo", beta=2.0),
    "cpo": _reference_free(),
    "kto": Workload("KTOLoss", reference=True),
    "grpo": Workload("GRPOLoss", reference=True, options={"beta": 0.04}),
    "grpo-no-kl": Workload("GRPOLoss"),
    "fkl": Workload(None, divergence="forward_kl"),
    "jsd": Workload(None, divergence="jsd"),
}
