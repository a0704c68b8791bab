"""Logits left as the product that they are, for trainers that compare whole distributions.

`LinearLogits` stands for `softcap(scale * (x W^T + b)) / temperature`, `[*, V]`. The few things that TRL's distillation
losses do with logits - a divergence between two of them, log-probabilities of given tokens, the k likeliest tokens -
are answered by the engine from `x` and `W`; anything else raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor

from liger_losses.chunked import Divergence, linear_divergence, linear_topk_logprobs
from liger_losses.integrations._head import backbone_of, output_head
from liger_losses.integrations._scored_logits import IGNORE_INDEX, positions_of
from liger_losses.integrations._scoring import FusedHeadReport, backbone_inputs

_TILE = 64 * 2**20  # bytes of logits at a time in which the likeliest tokens are looked for, without a budget


@dataclass(frozen=True, eq=False)
class LinearLogits:
    """Stands for logits `[*, V]`, known up to a constant per position: what it answers are log-probabilities.

    Positions that are not scored are not projected; numbers asked of them are 0.

    It is a dataclass of tensors so that DistributedDataParallel finds the parameters in it that will have a gradient.
    """

    hidden: Tensor  # [*, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    scored: Tensor  # [*] bool
    head: FusedHeadReport
    autocast: torch.dtype | None  # in which the model's forward ran
    temperature: float = 1.0
    beta: float | None = None  # of the divergence that F.kl_div is to give; None: the KL that it is asked for
    found: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict)  # tokens seen, and their log-probabilities

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.weight.shape[0]))

    @property
    def ndim(self) -> int:
        return self.hidden.dim()

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.hidden.dtype == torch.float64 else torch.float32

    def stride(self, dim: int) -> int:
        """0, of no memory: TRL hands the memory of logits to a kernel of its own where the last stride is 1."""
        return 0

    @property
    def requires_grad(self) -> bool:
        return torch.is_grad_enabled() and (self.hidden.requires_grad or self.weight.requires_grad)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.hidden.shape[0]

    def __iter__(self) -> Iterator[LinearLogits]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: Any) -> LinearLogits:
        key = positions_of(key, self.scored.dim(), _refuse)
        return replace(self, hidden=self.hidden[key], scored=self.scored[key], found={})

    def __truediv__(self, temperature: float) -> LinearLogits:
        if not isinstance(temperature, (int, float)):
            _refuse("division by a tensor")
        return replace(self, temperature=self.temperature * temperature, found={})

    def at(self, scored: Tensor) -> LinearLogits:
        """The same, scored where `scored` `[*]` says so and it was scored before."""
        return replace(self, scored=self.scored & (scored != 0), found={})

    def detach(self) -> LinearLogits:
        bias = None if self.bias is None else self.bias.detach()
        return replace(self, hidden=self.hidden.detach(), weight=self.weight.detach(), bias=bias, found={})

    def log_softmax(self, dim: int) -> LinearLogits:
        self._last(dim, "log_softmax")
        return self

    def logsumexp(self, dim: int, keepdim: bool = False) -> Tensor:
        """0: what `gather` and `topk` call logits are log-probabilities."""
        self._last(dim, "logsumexp")
        zeros = torch.zeros(self.scored.shape, dtype=self.dtype, device=self.device)
        return zeros[..., None] if keepdim else zeros

    def gather(self, dim: int, index: Tensor) -> Tensor:
        """Log-probabilities `[*, k]` of the tokens `index` `[*, k]`; 0 where nothing is scored."""
        self._last(dim, "gather")
        # TRL asks for the same tokens' more than once. They are kept, so that their address stays theirs.
        key = (index.data_ptr(), index.shape, index.stride(), index._version, torch.is_grad_enabled())
        if key not in self.found:
            self.found[key] = index, self._log_probs(index)
        return self.found[key][1]

    def topk(self, k: int, dim: int = -1) -> tuple[Tensor, Tensor]:
        """Log-probabilities and tokens, `[*, k]` each, the likeliest first."""
        self._last(dim, "topk")
        tokens = self._likeliest(k)
        return self.gather(-1, tokens), tokens

    def argmax(self, dim: int = -1) -> Tensor:
        self._last(dim, "argmax")
        return self._likeliest(1)[..., 0]

    def sum(self) -> _Nothing:
        return _Nothing(self)

    def _last(self, dim: int, name: str) -> None:
        if dim not in (-1, self.ndim - 1):
            _refuse(f"{name}(dim={dim})")

    @property
    def _options(self) -> dict[str, Any]:
        return {
            "softcap": self.head.options["softcap"],
            "logit_scale": self.head.options["logit_scale"],
        }

    @contextmanager
    def _as_in_the_forward(self) -> Iterator[None]:
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            yield

    def _log_probs(self, tokens: Tensor) -> Tensor:
        tokens = tokens.to(self.device).masked_fill(~self.scored[..., None], IGNORE_INDEX)
        options = {**self._options, "temperature": self.temperature, **self.head.engine}
        with self._as_in_the_forward():
            return linear_topk_logprobs(self.hidden, self.weight, tokens, self.bias, **options)

    @torch.no_grad()
    def _likeliest(self, k: int) -> Tensor:
        # Softcap, scale and temperature leave the order as it is, unless the scale turns it round.
        sign = -1.0 if self.head.options["logit_scale"] < 0 else 1.0
        rows = self.hidden[self.scored]
        tokens = torch.zeros(*self.scored.shape, k, dtype=torch.long, device=self.device)
        budget = _TILE if self.head.memory_budget is None else self.head.memory_budget
        height = max(1, budget // (4 * self.weight.shape[0]))
        weight, found = self.weight, []
        with self._as_in_the_forward():
            if self.autocast is None and weight.dtype != rows.dtype:
                rows, weight = rows.to(self.dtype), weight.to(self.dtype)
            for tile in rows.split(height):
                logits = torch.nn.functional.linear(tile, weight, self.bias)
                found.append((sign * logits).topk(k, dim=-1).indices)
        tokens[self.scored] = torch.cat(found)
        return tokens

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = _ANSWERS.get(function)
        if answer is None:
            _refuse(getattr(function, "__name__", str(function)))
        return answer(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> NoReturn:
        # An AttributeError would let hasattr() and defaults carry on as if logits simply lacked it.
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(name)


class _Nothing:
    """The sum of logits, known only to be finite: good for a zero that still hangs on the model's parameters."""

    def __init__(self, logits: LinearLogits) -> None:
        self._logits = logits

    def __mul__(self, factor: float) -> Tensor:
        if factor != 0:
            _refuse("their sum")
        return 0.0 * (self._logits.hidden.sum() + self._logits.weight.sum())


def divergence(student: LinearLogits, teacher: LinearLogits, beta: float) -> Tensor:
    """Per position `[*]`: generalised JSD with TRL's `beta` (0: forward KL, 1: reverse); 0 where nothing is scored."""
    kind = Divergence(
        kind="jsd", beta=float(beta), temperature=student.temperature, teacher_temperature=teacher.temperature
    )
    target = (~(student.scored & teacher.scored)).long() * IGNORE_INDEX
    # Two models may have been run in different precision; as of logits, the teacher's numbers are what counts.
    hidden, weight, bias = (None if t is None else t.detach() for t in (teacher.hidden, teacher.weight, teacher.bias))
    options = teacher.head.options
    with student._as_in_the_forward():
        return linear_divergence(
            student.hidden, student.weight, target, student.bias,
            teacher_hidden=hidden, teacher_weight=weight, teacher_bias=bias, divergence=kind,
            teacher_softcap=options["softcap"], teacher_logit_scale=options["logit_scale"],
            **student._options, **student.head.engine,
        )  # fmt: skip


def _kl_div(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean",
    log_target: bool = False,
) -> Tensor:  # fmt: skip
    """`F.kl_div` of two log-softmaxes, already summed over the vocabulary: `[*]`, not `[*, V]`."""
    if reduction != "none" or not log_target or not isinstance(input, LinearLogits):
        _refuse("another kl_div than that of log-probabilities, unreduced")
    if not isinstance(target, LinearLogits):
        _refuse("a kl_div against other numbers")
    student, teacher, beta = (target, input, 1.0) if target.requires_grad else (input, target, 0.0)
    if teacher.requires_grad:
        _refuse("a divergence with a gradient to both models")
    return divergence(student, teacher, beta if input.beta is None else input.beta)


_ANSWERS: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.kl_div: _kl_div,
    torch.nn.functional.log_softmax: lambda logits, dim, *_, **__: logits.log_softmax(dim),
    torch.log_softmax: lambda logits, dim, *_, **__: logits.log_softmax(dim),
    torch.logsumexp: LinearLogits.logsumexp,
    torch.gather: LinearLogits.gather,
    torch.topk: LinearLogits.topk,
}


def _refuse(what: str) -> NoReturn:
    raise TypeError(
        f"the trainer asked for {what} of its logits, which were not built; unfuse_trainer(trainer) gives them back."
    )


def linear_logits(model: Any, head: FusedHeadReport, inputs: dict[str, Any]) -> LinearLogits:
    """What `model(linear_logits=True)` answers: its logits at every position, not multiplied out."""
    linear = output_head(model)
    hidden = backbone_of(model)(**backbone_inputs(model, head, inputs)).last_hidden_state.to(
        linear.linear.weight.device
    )
    hidden, weight, bias = linear.operands(hidden)
    kind = hidden.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    scored = torch.ones(hidden.shape[:-1], dtype=torch.bool, device=hidden.device)
    # Views have a grad_fn, by which DistributedDataParallel learns that the head's parameters are used.
    weight, bias = weight.view_as(weight), None if bias is None else bias.view_as(bias)
    logits = LinearLogits(hidden, weight, bias, scored, head, autocast)
    return logits if torch.is_grad_enabled() else logits.detach()


class WithLinearLogits:
    """A model that answers any call with `LinearLogits`.

    Args:
        model: Fused by `fuse_head`, in whatever wrapper: it is called as it is.
        scored: `[B, T]`, not shifted: whether a token of the input is scored, by the position before it.
    """

    def __init__(self, model: Any, scored: Tensor) -> None:
        self._model, self._scored = model, scored

    def __call__(self, input_ids: Tensor, *, logits_to_keep: int = 0, **inputs: Any) -> SimpleNamespace:
        logits: LinearLogits = self._model(input_ids=input_ids, **inputs, linear_logits=True)
        scored = torch.nn.functional.pad(self._scored[:, 1:] != 0, (0, 1)).to(logits.device)
        logits = logits.at(scored)
        return SimpleNamespace(logits=logits[:, -logits_to_keep:] if logits_to_keep else logits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
