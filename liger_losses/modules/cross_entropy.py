"""Cross entropy over a linear head, and over logits that exist."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .._checks import check_choice, check_count, check_flag, check_float_tensor, check_whole
from .._constants import taken
from ..chunked import ScoredTokens, fused_linear_loss, linear_logprobs, logit_statistics
from ..chunked.tokens import check_integer, upload, widened
from ..losses import CrossEntropyLoss, TokenSelection
from .base import CallOptions, check_accumulator, check_head_as, renamed
from .engine_options import TilingOptions, with_tiling_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

_HEAD = ("_input", "lin_weight", "bias")


class CrossEntropyOutput(NamedTuple):
    """What a cross-entropy module returns when more than the loss is asked for; None for what is not."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None  # int64, -1 where the target is ignored


class _CrossEntropy(torch.nn.Module):
    """Options, inputs and results that the modules over a head and over logits share."""

    _classes = "ce_weight"  # what the constructor calls the class weights

    def __init__(
        self,
        class_weights: Tensor | None,
        reduction: str,
        options: CallOptions,
        *,
        return_z_loss: bool,
        return_token_accuracy: bool,
        return_predicted_tokens: bool,
        **loss: Any,
    ) -> None:
        super().__init__()
        check_choice("reduction", reduction, ("mean", "sum", "none"))
        for name, value in (
            ("return_z_loss", return_z_loss),
            ("return_token_accuracy", return_token_accuracy),
            ("return_predicted_tokens", return_predicted_tokens),
        ):
            check_flag(name, value)
        self.reduction = reduction
        self.return_z_loss, self.return_token_accuracy = return_z_loss, return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens
        self.options = options
        # Not divided by anything, a token's part of the sum is its loss.
        self.loss = CrossEntropyLoss(reduction="sum" if reduction == "none" else reduction, **loss)
        if reduction == "none" and self.loss.selection is not None:
            raise ValueError("selection: got one with reduction='none', expected None: it weighs tokens within a sum")
        if return_z_loss and self.loss.lse_square_scale == 0:
            raise ValueError("return_z_loss: got True with lse_square_scale=0, expected a scale > 0")
        if class_weights is not None:
            check_float_tensor(self._classes, class_weights)
            if class_weights.dim() != 1:
                raise ValueError(f"{self._classes}: got shape {list(class_weights.shape)}, expected [V]")
        self.register_buffer("class_weights", class_weights, persistent=False)
        self.class_weights: Tensor | None

    def _check_classes(self, classes: int) -> None:
        if self.class_weights is not None and len(self.class_weights) != classes:
            raise ValueError(f"{self._classes}: got {len(self.class_weights)} weights for {classes} classes")

    def _inputs(
        self,
        target: Tensor,
        shape: torch.Size,  # of the caller's target
        token_weights: Tensor | None,
        num_items_in_batch: Tensor | int | None,
        device: torch.device,
    ) -> dict[str, Tensor]:
        """What the loss reads beside statistics, `[R, T]`; `target` is `[R, T]`."""
        inputs = {}
        if token_weights is not None:
            check_float_tensor("token_weights", token_weights, tuple(shape))
            inputs["token_weights"] = taken(token_weights.reshape(target.shape), device)
        if self.class_weights is not None:
            weights, classes = self.class_weights.to(device), upload(target, device)
            inputs["class_weights"] = weights[classes.clamp(0, len(weights) - 1)]
        if num_items_in_batch is not None:
            if self.reduction == "none":
                raise ValueError("num_items_in_batch: got a count, expected none with reduction='none'")
            inputs["num_items_in_batch"] = check_count("num_items_in_batch", num_items_in_batch)
        return inputs

    @property
    def _column_weights(self) -> Tensor | None:
        return self.class_weights if self.loss.label_smoothing > 0 else None

    @property
    def _beside(self) -> tuple[str, ...]:
        """Statistics for what is returned beside the loss."""
        return ("is_top1",) * self.return_token_accuracy + ("argmax",) * self.return_predicted_tokens

    def _result(
        self,
        loss: Tensor,
        z_loss: Tensor | None,
        statistics: Mapping[str, Tensor],
        mask: Tensor,
        shape: torch.Size,
    ) -> Tensor | CrossEntropyOutput:
        if not (self.return_z_loss or self._beside):
            return loss
        accuracy = predicted = None
        if self.return_token_accuracy:
            accuracy = statistics["is_top1"].sum() / mask.sum().clamp_min(1)
        if self.return_predicted_tokens:
            predicted = statistics["argmax"].masked_fill(~mask, -1).reshape(shape)
        return CrossEntropyOutput(loss, z_loss if self.return_z_loss else None, accuracy, predicted)

    def _of_statistics(
        self, statistics: Mapping[str, Tensor], mask: Tensor, inputs: dict[str, Tensor], shape: torch.Size
    ) -> tuple[Tensor, Tensor | None]:
        """Loss and z-loss of statistics that exist; of each token with reduction "none"."""
        inputs = self.loss.prepare(mask, inputs)
        if self.reduction == "none":
            nll, z_loss = self.loss.parts(statistics, mask, inputs)
            if z_loss is None:
                return nll.reshape(shape), None
            return (nll + z_loss).reshape(shape), z_loss.detach().reshape(shape)
        loss, metrics = self.loss(statistics, mask, inputs, self.loss.totals(mask, inputs))
        return loss, metrics.get("z_loss")

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, {self.loss}, {self.options}"


def _rows(target: Tensor | ScoredTokens, expected: str) -> Tensor:
    """The targets `[R, T]` of one row `[N]` or of several."""
    tensor = target.target if isinstance(target, ScoredTokens) else target
    check_integer("target", tensor)
    tensor = widened(tensor)
    if tensor.dim() not in (1, 2):
        raise ValueError(f"target: got shape {list(tensor.shape)}, expected {expected}")
    return tensor if tensor.dim() == 2 else tensor.unsqueeze(0)


class LigerFusedLinearCrossEntropyLoss(_CrossEntropy):
    """Cross entropy over a linear head, without the `[N, V]` logits: `liger_losses.losses.CrossEntropyLoss`.

    Args:
        ce_weight: `[V]` class weights.
        ignore_index, lse_square_scale, label_smoothing, use_token_scaling: of `CrossEntropyLoss`.
        reduction: `"mean"`, `"sum"` or `"none"` (the loss of every token, each with a gradient of its own).
        softcap, logit_scale, temperature: of the logits.
        return_z_loss, return_token_accuracy, return_predicted_tokens: return a `CrossEntropyOutput` with these.
        accum_dtype: accepted as None or torch.float32: gradients are always summed in fp32 (fp64 for fp64).
        selection: a `liger_losses.losses.TokenSelection`, only the tokens at risk.
        memory_budget, logits_dtype, strategy, active_vocab: of `fused_linear_loss`.

    Raises:
        TypeError, ValueError: at construction for the options, in `forward` for the tensors, before any work.
    """

    @with_tiling_options
    def __init__(
        self,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        *,
        selection: TokenSelection | None = None,
        temperature: float = 1.0,
        logit_scale: float | None = 1.0,
        **engine: Unpack[TilingOptions],
    ) -> None:
        check_accumulator(accum_dtype)
        options = CallOptions(
            ignore_index=ignore_index, temperature=temperature, softcap=softcap, logit_scale=logit_scale, **engine
        )
        super().__init__(
            ce_weight,
            reduction,
            options,
            return_z_loss=return_z_loss,
            return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens,
            lse_square_scale=lse_square_scale,
            label_smoothing=label_smoothing,
            use_token_scaling=use_token_scaling,
            selection=selection,
        )
        options.check_separability(self.loss.separability, "a selection")
        if options.strategy == "immediate" and reduction == "none":
            raise ValueError("strategy: got 'immediate' with reduction='none', expected a deferred strategy")

    def forward(
        self,
        lin_weight: Tensor,  # [V, H]
        _input: Tensor,  # [N, H] or [R, T, H]
        target: Tensor | ScoredTokens,  # [N] or [R, T], aligned with _input
        bias: Tensor | None = None,  # [V]
        *,
        temperature: Tensor | float | None = None,  # or [N] or [R, T], in place of the constructor's
        token_weights: Tensor | None = None,  # [N] or [R, T]
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | CrossEntropyOutput:
        """The loss; see `CrossEntropyLoss` for what the weights and the divisor do.

        Args:
            lin_weight: `[V, H]`, the head.
            _input: `[N, H]` or `[R, T, H]`, the hidden states that go into it. Their dtype is the head's, but under
                autocast.
            target: `[N]` or `[R, T]` integer, the class of each hidden state (of a language model shifted by the
                caller); `ignore_index` where nothing is scored. Read without waiting where it is on the CPU, or a
                `ScoredTokens`.
            bias: `[V]`, the head's.
            temperature: a number, or one a token in the shape of `target`, in place of the constructor's.
            token_weights: a factor a token, in the shape of `target`, floating-point; the divisor does not count it.
            num_items_in_batch: an int or `[]`: divides in place of the scored tokens.

        Returns:
            The loss in nats, fp32 (fp64 for fp64): a scalar, or with reduction "none" the shape of `target`; with one
            of the options `return_*` a `CrossEntropyOutput`, whose `predicted_tokens` have that shape, too.

        Raises:
            TypeError, ValueError: before any work, naming the argument.
        """
        rows = _rows(target, "[N] or [R, T]")
        shape = target.shape
        if isinstance(target, ScoredTokens):
            target.check_ignored(self.options.ignore_index)
        check_head_as(_HEAD, _input, lin_weight, bias, shape)
        self._check_classes(len(lin_weight))
        inputs = self._inputs(rows, shape, token_weights, num_items_in_batch, _input.device)
        options = self.options.policy()
        if temperature is not None:
            check_whole("temperature", temperature)
            if isinstance(temperature, Tensor) and temperature.shape != shape:
                raise ValueError(f"temperature: got shape {list(temperature.shape)}, expected {list(shape)}")
            options["temperature"] = temperature.reshape(rows.shape) if isinstance(temperature, Tensor) else temperature
        options["column_weights"] = self._column_weights
        hidden = _input.reshape(*rows.shape, _input.shape[-1])
        scored = target.as_row() if isinstance(target, ScoredTokens) else rows
        mask = upload(rows != self.options.ignore_index, _input.device)
        if self.reduction == "none":
            statistics = linear_logprobs(
                hidden,
                lin_weight,
                scored,
                bias,
                statistics=tuple(dict.fromkeys((*self.loss.statistics, *self._beside))),
                differentiable=self.loss.differentiable,
                strategy=self.options.strategy,
                **options,
            )
            loss, z_loss = self._of_statistics(statistics, mask, inputs, shape)
            return self._result(loss, z_loss, statistics, mask, shape)
        loss, metrics = fused_linear_loss(
            self.loss,
            hidden,
            lin_weight,
            scored,
            bias,
            inputs=inputs,
            strategy=self.options.strategy,
            token_statistics=self._beside,
            **options,
        )
        return self._result(loss, metrics.get("z_loss"), metrics, mask, shape)


class LigerCrossEntropyLoss(_CrossEntropy):
    """Cross entropy of logits that exist: `liger_losses.losses.CrossEntropyLoss`. The logits are never written to.

    Args:
        weight: `[V]` class weights. The others, as in `LigerFusedLinearCrossEntropyLoss`.
    """

    _classes = "weight"

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        *,
        use_token_scaling: bool = False,
        selection: TokenSelection | None = None,
        temperature: float = 1.0,
        logit_scale: float | None = 1.0,
    ) -> None:
        super().__init__(
            weight,
            reduction,
            CallOptions(ignore_index=ignore_index, temperature=temperature, softcap=softcap, logit_scale=logit_scale),
            return_z_loss=return_z_loss,
            return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens,
            lse_square_scale=lse_square_scale,
            label_smoothing=label_smoothing,
            use_token_scaling=use_token_scaling,
            selection=selection,
        )

    def forward(
        self,
        _input: Tensor,  # [N, V] or [R, T, V]
        target: Tensor,  # [N] or [R, T]
        *,
        temperature: Tensor | float | None = None,  # or [N] or [R, T], in place of the constructor's
        token_weights: Tensor | None = None,  # [N] or [R, T]
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | CrossEntropyOutput:
        """The loss; see `CrossEntropyLoss` for what the weights and the divisor do.

        Args:
            _input: `[N, V]` or `[R, T, V]` logits of any floating dtype.
            target: `[N]` or `[R, T]` integer, the class of each; `ignore_index` where nothing is scored.
            temperature: a number, or one a token in the shape of `target`, in place of the constructor's.
            token_weights: a factor a token, in the shape of `target`, floating-point; the divisor does not count it.
            num_items_in_batch: an int or `[]`: divides in place of the scored tokens.

        Returns:
            The loss in nats, fp32 (fp64 for fp64): a scalar, or with reduction "none" the shape of `target`; with one
            of the options `return_*` a `CrossEntropyOutput`, whose `predicted_tokens` have that shape, too.

        Raises:
            TypeError, ValueError: before any work, naming the argument.
        """
        rows = _rows(target, "[N] or [R, T]")
        check_whole("_input", _input)
        if isinstance(_input, Tensor) and _input.dim():
            self._check_classes(_input.shape[-1])
        try:
            statistics = logit_statistics(
                _input,
                target,
                statistics=tuple(dict.fromkeys((*self.loss.statistics, *self._beside))),
                differentiable=self.loss.differentiable,
                ignore_index=self.options.ignore_index,
                temperature=self.options.temperature if temperature is None else temperature,
                softcap=self.options.softcap,
                logit_scale=self.options.logit_scale,
                column_weights=self._column_weights,
            )
        except (TypeError, ValueError) as error:
            raise renamed(error, {"logits": "_input"}) from None
        inputs = self._inputs(rows, target.shape, token_weights, num_items_in_batch, _input.device)
        mask = upload(rows != self.options.ignore_index, _input.device)
        shaped = {name: value.reshape(rows.shape) for name, value in statistics.items()}
        loss, z_loss = self._of_statistics(shaped, mask, inputs, target.shape)
        return self._result(loss, z_loss, shaped, mask, target.shape)
