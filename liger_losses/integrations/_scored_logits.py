"""Logits that were never built, for trainers that read theirs in full.

Some of TRL's trainers call `model(...).logits` and make a loss of log-probabilities of the input tokens. Their code
runs as it is: the model they call answers with `ScoredLogits`, which holds what the fused head said of each position
and knows the few things that those trainers do with logits. Anything else raises.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

IGNORE_INDEX = -100
_FIELDS = ("target", "log_probs", "entropy", "mean_logits", "is_top1")


class ScoredLogits:
    """Stands for logits `[*, V]` of which only statistics `[*]` are known.

    Two statements hold of everything it answers. A log-probability is that of the label at its position, and asking for
    that of another token gives NaN. Means over the vocabulary are those of the logits; a mean over all positions is one
    over the scored positions where a softcap keeps the others unknown.
    """

    def __init__(self, fields: dict[str, Tensor], vocabulary: int, scored_means_only: bool) -> None:
        self._fields, self._vocabulary, self._scored_means_only = fields, vocabulary, scored_means_only

    def _map(self, function: Callable[[Tensor], Any]) -> ScoredLogits:
        fields = {name: function(value) for name, value in self._fields.items()}
        return ScoredLogits(fields, self._vocabulary, self._scored_means_only)

    def _field(self, name: str) -> Tensor:
        if name not in self._fields:
            _refuse(name)
        return self._fields[name]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._field("target").shape, self._vocabulary))

    @property
    def device(self) -> torch.device:
        return self._field("target").device

    def __getitem__(self, key: Any) -> ScoredLogits:
        key = positions_of(key, self._field("target").dim(), _refuse)
        return self._map(lambda value: value[key])

    def chunk(self, chunks: int, dim: int = 0) -> tuple[ScoredLogits, ...]:
        if dim != 0:
            _refuse(f"chunk(dim={dim})")
        parts = {name: value.chunk(chunks) for name, value in self._fields.items()}
        return tuple(
            ScoredLogits({name: part[i] for name, part in parts.items()}, self._vocabulary, self._scored_means_only)
            for i in range(len(parts["target"]))
        )

    def view(self, *shape: int) -> ScoredLogits:
        if shape != (-1, self._vocabulary):
            _refuse(f"view{shape}")
        return self._map(lambda value: value.reshape(-1))

    def contiguous(self) -> ScoredLogits:
        return self

    def detach(self) -> ScoredLogits:
        return self._map(Tensor.detach)

    def mean(self, dim: int | None = None) -> Tensor:
        means = self._field("mean_logits")
        if dim == -1:
            return means
        if dim is not None:
            _refuse(f"mean({dim})")
        if not self._scored_means_only:
            return means.mean()
        scored = self._field("target") != IGNORE_INDEX
        return (means * scored).sum() / scored.sum().clamp(min=1)

    def argmax(self, dim: int) -> Tensor:
        """The label where it is the most likely token, and -1, which no label equals, elsewhere."""
        if dim != -1:
            _refuse(f"argmax({dim})")
        return torch.where(self._field("is_top1"), self._field("target"), -1)

    def log_softmax(self, dim: int) -> ScoredLogits:
        if dim != -1:
            _refuse(f"log_softmax({dim})")
        return self

    def log_probs_of(self, labels: Tensor) -> Tensor:
        """`[*]`: NaN where the label is another than the one that was scored."""
        return self._field("log_probs").masked_fill(labels != self._field("target"), float("nan"))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        name = getattr(function, "__name__", str(function))
        if function is torch.nn.functional.cross_entropy:
            return _cross_entropy(*args, **(kwargs or {}))
        if function is torch.take_along_dim:
            return _take_along_dim(*args, **(kwargs or {}))
        _refuse(name)

    def __getattr__(self, name: str) -> NoReturn:
        # An AttributeError would let hasattr() and defaults carry on as if logits simply lacked it.
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(name)


def positions_of(key: Any, positions: int, refuse: Callable[[str], NoReturn]) -> Any:
    """An index of logits `[*, V]` as one of their positions `[*]`, `positions` being their number of dimensions."""
    if not isinstance(key, tuple):
        return key
    if Ellipsis in key:
        at = key.index(Ellipsis)
        key = (*key[:at], *[slice(None)] * (positions + 2 - len(key)), *key[at + 1 :])
    if len(key) > positions and key[positions] != slice(None):
        refuse("[..., part of the vocabulary]")
    return key[:positions]


def _refuse(what: str) -> NoReturn:
    raise TypeError(
        f"the trainer asked for {what} of its logits, which were not built; unfuse_trainer(trainer) gives them back."
    )


def _cross_entropy(
    logits: ScoredLogits, labels: Tensor, weight: Any = None, *_: Any, ignore_index: int = IGNORE_INDEX,
    reduction: str = "mean", label_smoothing: float = 0.0, **__: Any,
) -> Tensor:  # fmt: skip
    if weight is not None or reduction != "mean" or label_smoothing:
        _refuse("a weighted, smoothed or unreduced cross entropy")
    counted = labels != ignore_index
    return -logits.log_probs_of(labels).masked_fill(~counted, 0.0).sum() / counted.sum()


def _take_along_dim(logits: ScoredLogits, indices: Tensor, dim: int) -> Tensor:
    if indices.shape != (*logits.shape[:-1], 1) or dim not in (-1, indices.dim() - 1):
        _refuse("several tokens a position")
    return logits.log_probs_of(indices[..., 0])[..., None]


def _selective_log_softmax(own: Callable[..., Tensor], logits: Any, index: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if not isinstance(logits, ScoredLogits):
        return own(logits, index, *args, **kwargs)
    _check_no_more(args, kwargs)
    # Positions that the caller masks afterwards bring any label, so a label that was not scored is no error here.
    return logits._field("log_probs")


def _selective_log_softmax_and_entropy(
    own: Callable[..., Any], logits: Any, index: Tensor, *args: Any, **kwargs: Any
) -> Any:
    if not isinstance(logits, ScoredLogits):
        return own(logits, index, *args, **kwargs)
    if kwargs.pop("entropy_requires_grad", True):
        _refuse("an entropy with a gradient")
    _check_no_more(args, kwargs)
    return logits._field("log_probs"), logits._field("entropy")


def _check_no_more(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Rows that row_mask leaves out are zero in both; a temperature other than 1 was not computed."""
    more = dict(kwargs)
    more.pop("row_mask", None)
    if args or more.pop("temperature", 1.0) != 1.0 or more:
        _refuse(f"selective_log_softmax with {sorted(kwargs)}")


_READERS = {
    "selective_log_softmax": _selective_log_softmax,
    "selective_log_softmax_and_entropy": _selective_log_softmax_and_entropy,
}


def reading_scored_logits(function: types.FunctionType) -> types.FunctionType:
    """The same code, in which TRL's functions that pick log-probabilities out of logits know `ScoredLogits` too.

    Only this copy sees them: the module that `function` comes from is left as it is.
    """
    names = function.__globals__
    return with_globals(
        function, {n: functools.partial(reader, names[n]) for n, reader in _READERS.items() if n in names}
    )


def with_globals(function: types.FunctionType, names: dict[str, Any]) -> types.FunctionType:
    """The same code, in which global names mean something else. The module that it comes from is left as it is."""
    ours = types.FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    ours.__kwdefaults__ = function.__kwdefaults__
    return ours


class WithoutLogits:
    """A model that answers any call with `ScoredLogits` of its input tokens, by its fused head.

    Args:
        model: Fused by `fuse_head`, in whatever wrapper: it is called as it is.
        labels_of: `input_ids [B, T]` to the labels `[B, T]` to score, not shifted, -100 elsewhere.
        vocabulary: Size of the head.
        scored_means_only: Whether mean logits are known at scored positions only.
    """

    def __init__(
        self, model: Any, labels_of: Callable[[Tensor], Tensor], vocabulary: int, scored_means_only: bool
    ) -> None:
        self._model, self._labels_of = model, labels_of
        self._vocabulary, self._scored_means_only = vocabulary, scored_means_only

    def __call__(self, input_ids: Tensor, *, logits_to_keep: int = 0, **inputs: Any) -> types.SimpleNamespace:
        labels = self._labels_of(input_ids)
        target = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        answer = self._model(input_ids=input_ids, **inputs, shift_labels=target, fused_lm_head=True)
        fields = {name: value for name in _FIELDS if (value := getattr(answer, name, None)) is not None}
        logits = ScoredLogits({**fields, "target": target}, self._vocabulary, self._scored_means_only)
        logits = logits[:, -logits_to_keep:] if logits_to_keep else logits
        return types.SimpleNamespace(logits=logits, aux_loss=answer.aux_loss)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
