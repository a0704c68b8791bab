"""The tensors of one call, checked before any work: head and targets, and what stands beside them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..kernels import LogitTransform
from .active import ActiveVocabulary
from .head import NAMES, Precision, check_head, choose_precision
from .head_tensors import HeadTensors, check_head_tensors
from .parallel import VocabularyShard
from .placements import local_head, local_teacher
from .tokens import ScoredTokens, check_ignore_index, check_target, widened


class Call:
    """Checked tensors of a call, flattened to `[R * T, ...]`."""

    tensors = HeadTensors()
    transform = LogitTransform()
    active: ActiveVocabulary | None = None

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor | ScoredTokens,
        ignore_index: int,
        precision: Precision,
        shard: VocabularyShard | None = None,
    ) -> None:
        self.shape = hidden.shape[:-1]
        self.shard = shard
        self.hidden = hidden.reshape(-1, hidden.shape[-1])
        self.bias = None if bias is None else bias.contiguous()  # as kernels read what has one number a column
        self.weight, self.ignore_index, self.precision = weight, ignore_index, precision
        self._target = target
        grad = torch.is_grad_enabled()
        self.needs = (
            grad and hidden.requires_grad,
            grad and weight.requires_grad,
            grad and bias is not None and bias.requires_grad,
        )

    def read(self, given: HeadTensors, names: tuple[str, ...]) -> None:
        """Check and take what shapes logits and statistics beside the head."""
        if given.teacher is not None:
            given = replace(given, teacher=local_teacher(given.teacher, self.shard))
        self.tensors = check_head_tensors(
            given, names, self.shape, self.vocab_size, self.weight.device, self.targets, self.ignore_index
        )
        if self.tensors.teacher is not None and self.shard is None:  # beside a shard the teacher's columns are as many
            self.tensors.teacher.check_shared(self.vocab_size)

    def choose_columns(self, active_vocab: object, differentiable: tuple[str, ...]) -> None:
        """Check and take the rule by which columns enter the gradient products."""
        self.active = ActiveVocabulary.of(active_vocab)
        if self.active is not None and "mean_logprob" in differentiable:
            raise ValueError(
                f"active_vocab: got {active_vocab!r} for a loss that differentiates mean_logprob (label smoothing), "
                "whose gradient is as large in every column; expected None"
            )

    @property
    def vocab_size(self) -> int:
        """Of all ranks' columns."""
        return self.weight.shape[0] if self.shard is None else self.shard.vocab_size

    @property
    def targets(self) -> Tensor:
        """As they were given."""
        return self._target.target if isinstance(self._target, ScoredTokens) else self._target

    def scored_tokens(self) -> ScoredTokens:
        target = self._target
        scored = target if isinstance(target, ScoredTokens) else ScoredTokens(target, self.ignore_index)
        scored.check_range(self.vocab_size)
        return scored

    def target_tensor(self) -> Tensor:
        """The targets `[R, T]`, for the traced path."""
        target = self.targets
        return (target if target.dim() == 2 else target.reshape(1, -1)).to(self.hidden.device)


def prepare(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor | ScoredTokens,
    bias: Tensor | None,
    ignore_index: int,
    logits_dtype: str,
    head: tuple[str, str, str] = NAMES,
) -> Call:
    """The checked head and targets of a call. Raises before any work, naming the argument; `head` are its tensors'."""
    check_ignore_index(ignore_index)
    if isinstance(target, ScoredTokens):
        target.check_ignored(ignore_index)
    elif not isinstance(target, Tensor):
        raise TypeError(f"target: got {type(target).__name__}, expected a torch.Tensor or ScoredTokens")
    else:
        check_target(target)
        target = widened(target)
    check_head(hidden, weight, bias, target.shape, head)
    hidden, weight, bias, shard = local_head(hidden, weight, bias, head)
    return Call(hidden, weight, bias, target, ignore_index, choose_precision(hidden, weight, logits_dtype, head), shard)


def per_token(temperature: float | Tensor) -> Tensor | None:
    """A temperature that is a tensor is one of the head's tensors."""
    return temperature if isinstance(temperature, Tensor) else None
