"""The second model of a distillation, as the engine sees it: a head and hidden states, or numbers that exist."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .._checks import FLOATING, check_dense, check_shared
from ..kernels import Columns, Divergence, LogitTransform, TeacherTile, visit_bytes
from .head import Precision
from .problem import Problem


@dataclass(frozen=True)
class Teacher:
    """Never trained: what it says is constant. Either `hidden` and `weight`, or `logits`."""

    divergence: Divergence
    hidden: Tensor | None = None  # [R * T, H']
    weight: Tensor | None = None  # [V', H']
    bias: Tensor | None = None  # [V']
    logits: Tensor | None = None  # [R * T, V'] logits, log-probabilities, or probabilities
    transform: LogitTransform = field(default_factory=LogitTransform)
    probabilities: bool = False

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.hidden, self.weight, self.bias, self.logits

    @property
    def vocab_size(self) -> int:
        known = self.weight if self.logits is None else self.logits.T
        assert known is not None
        return known.shape[0]

    def columns(self, student_vocab: int) -> Columns:
        return Columns.of(student_vocab, self.vocab_size, self.divergence.vocabulary)

    def encode(self) -> str:
        """What is not a tensor, as a string: operators take no objects."""
        rest = (self.transform.scale, self.transform.softcap, self.probabilities)
        return ";".join([self.divergence.encode(), *map(str, rest)])

    @classmethod
    def decode(
        cls, text: str, hidden: Tensor | None, weight: Tensor | None, bias: Tensor | None, logits: Tensor | None
    ) -> Teacher | None:
        if not text:
            return None
        divergence, *rest = text.split(";")
        scale, softcap, probabilities = map(ast.literal_eval, rest)
        transform = LogitTransform(scale, softcap)
        return cls(Divergence.decode(divergence), hidden, weight, bias, logits, transform, probabilities)

    def tile(self, logits: Tensor, columns: slice | None = None) -> TeacherTile:
        """Of rows of its logits, or of a block of their columns."""
        first = slice(0, logits.shape[1]) if columns is None else slice(columns.start, columns.start + logits.shape[1])
        bias = None if self.bias is None else self.bias[first]
        return TeacherTile(logits, bias, self.transform, self.probabilities)

    def check_shared(self, student_vocab: int) -> None:
        """Raises where a divergence is asked of vocabularies that share one column, both as a whole."""
        if self.divergence.vocabulary == "shared" and self.divergence.soft_weight != 0:
            check_shared(self.vocab_size, student_vocab)

    def flat(self) -> Teacher:
        """Checked tensors as the engine reads them: flat and detached."""
        hidden, weight, bias, logits = (None if t is None else t.detach() for t in self.tensors)
        if logits is not None:
            logits = logits.reshape(-1, logits.shape[-1])
            logits = logits if logits.stride(-1) == 1 else logits.contiguous()
        hidden = None if hidden is None else hidden.reshape(-1, hidden.shape[-1])
        bias = None if bias is None else bias.contiguous()
        return replace(self, hidden=hidden, weight=weight, bias=bias, logits=logits)

    def computed(self, precision: Precision) -> Teacher:
        """With the weight in the dtype of the products."""
        return self if self.weight is None else replace(self, weight=self.weight.to(precision.compute))

    def describe(self, problem: Problem, precision: Precision, *, spread: bool) -> Problem:
        """`problem` with what the teacher adds. Spread over ranks it has as many columns as the student's head: those
        that the problem speaks of, for all ranks to plan alike, not this rank's own."""
        vocab_size = problem.vocab_size if spread else self.vocab_size
        columns = Columns.of(problem.vocab_size, vocab_size, self.divergence.vocabulary).teacher
        known = self.hidden if self.logits is None else self.logits
        assert known is not None
        problem = replace(problem, visit_bytes=visit_bytes(self.divergence, known.device))
        if self.logits is not None:
            return problem.beside_logits(columns, self.logits.itemsize)
        assert self.hidden is not None
        assert self.weight is not None
        return problem.beside_head(
            columns,
            self.hidden.shape[-1],
            self.hidden.itemsize,
            vocab_size=vocab_size,
            cast_weight=self.weight.dtype != precision.compute,
        )


def teacher_transform(softcap: float | None, logit_scale: float | None) -> LogitTransform:
    """Raises for the options under their public names."""
    try:
        return LogitTransform(1.0 if logit_scale is None else logit_scale, softcap)
    except (TypeError, ValueError) as error:
        raise type(error)(f"teacher_{error}") from None


def check_teacher(
    teacher: Teacher,  # its tensors as the caller has them
    shape: torch.Size,  # of the tokens
    device: torch.device,
    names: tuple[str, str, str, str] | None = None,  # that the caller knows them by
) -> None:
    """Raises before any work, naming the argument."""
    if names is None:
        rows = "teacher_probs" if teacher.probabilities else "teacher_logits"
        names = ("teacher_hidden", "teacher_weight", "teacher_bias", rows)
    given = dict(zip(names, teacher.tensors, strict=True))
    for name, tensor in given.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, expected a torch.Tensor")
        if tensor.dtype not in FLOATING:
            raise TypeError(f"{name}: got dtype {tensor.dtype}, expected one of {', '.join(map(str, FLOATING))}")
        check_dense(name, tensor)
        if tensor.device != device:
            raise ValueError(f"{name}: got device {tensor.device}, expected {device}, that of hidden")
    hidden, weight, bias, logits = teacher.tensors
    present = [name for name, tensor in given.items() if tensor is not None]
    if logits is None and (hidden is None or weight is None):
        missing = names[0] if hidden is None else names[1]
        beside = f" beside {' and '.join(present)}" if present else ""
        raise ValueError(f"{missing}: got None{beside}, expected a teacher: {names[0]} with {names[1]}, or "
                         "teacher_logits, or teacher_probs")  # fmt: skip
    if logits is not None:
        if len(present) > 1:
            raise ValueError(f"{present[0]}: got a tensor, expected None beside {names[3]}, which says it all")
        if logits.shape[:-1] != shape or logits.dim() != len(shape) + 1 or logits.shape[-1] == 0:
            raise ValueError(f"{names[3]}: got shape {tuple(logits.shape)}, expected {(*shape, 'V')}, V >= 1")
        return
    assert hidden is not None
    assert weight is not None
    if weight.dim() != 2 or 0 in weight.shape:
        raise ValueError(f"{names[1]}: got shape {tuple(weight.shape)}, expected [V, H], V >= 1 and H >= 1")
    if hidden.shape != (*shape, weight.shape[1]):
        raise ValueError(f"{names[0]}: got shape {tuple(hidden.shape)}, expected {(*shape, weight.shape[1])}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{names[2]}: got shape {tuple(bias.shape)}, expected ({weight.shape[0]},)")
