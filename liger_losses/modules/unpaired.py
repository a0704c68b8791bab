"""Losses over single responses, each labelled desirable or undesirable."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._checks import check_constant, check_flag, check_float_tensor
from ..chunked import ScoredTokens
from ..losses.unpaired import BCOLoss, KTOLoss, UnpairedLoss, check_labels, running_mean
from .base import CallOptions, Reference, check_rows, fused_loss
from .engine_options import ReferenceOptions, with_reference_options

if TYPE_CHECKING:
    from typing_extensions import Unpack


class _UnpairedModule(torch.nn.Module):
    """The call that KTO and BCO share."""

    def __init__(self, loss: UnpairedLoss, options: CallOptions, *, compiled: bool, name: str) -> None:
        super().__init__()
        check_flag("compiled", compiled)
        self.loss = loss
        self.options = options
        self.options.check_separability(loss.separability, name)
        self.options.check_reference(not loss.reference_free)

    def _check(
        self, target: Tensor | ScoredTokens, preference_labels: Tensor | None, given: dict[str, Tensor | None]
    ) -> int:
        """Rows of the batch. `given`: the arguments of the reference."""
        rows = check_rows(target, "[rows, tokens]")
        if preference_labels is None:
            raise TypeError(f"preference_labels: got None, expected a bool or integer tensor [{rows}]")
        check_labels("preference_labels", preference_labels, rows)
        if self.loss.reference_free:
            for name, value in given.items():
                if value is not None:
                    raise ValueError(
                        f"{name}: got a tensor with use_ref_model=False; construct {type(self).__name__} with "
                        "use_ref_model=True to use the reference, or pass None"
                    )
        return rows

    def _call(
        self,
        loss: UnpairedLoss,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor | ScoredTokens,
        bias: Tensor | None,
        reference: Reference,
        inputs: dict[str, Tensor],
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        value, metrics = fused_loss(
            loss,
            self.options,
            hidden,
            weight,
            target,
            bias,
            reference=reference,
            use_ref_model=not loss.reference_free,
            inputs=inputs,
        )
        logits = (weight.shape[0] * metrics[f"{side}_mean_logits_sum"] for side in ("chosen", "rejected"))
        logps, rewards = (
            tuple(metrics[f"{side}_{name}_sum"] for side in ("chosen", "rejected")) for name in ("logps", "rewards")
        )
        return value, (*logps, *logits, *rewards)

    def extra_repr(self) -> str:
        return f"{self.loss}, {self.options}"


class LigerFusedLinearKTOLoss(_UnpairedModule):
    """Kahneman-Tversky optimisation over a linear head, without the `[R, T, V]` logits.

    `loss = mean over rows of kto_loss`: see `liger_losses.losses.kto_loss` for the formulas,
    `liger_losses.losses.KTOLoss` for the options and `liger_losses.fused_linear_loss` for the engine.

    Args:
        ignore_index: targets that are not scored.
        beta: strength of the pull towards the reference.
        compiled: accepted and without effect: there is no compile step.
        use_ref_model: False, liger-kernel's default, is reference-free: the reference's log-probabilities are taken as
            0, and `forward` refuses any. True needs one.
        average_log_prob: sequence log-probabilities, the reference's too, are token means instead of sums.
        chunk_size: more than 1: at most so many rows are in a tile together. 1, the default, sets no bound:
            `memory_budget` does, and the result depends on neither.
        loss_type: "kto" or "apo_zero_unpaired".
        desirable_weight, undesirable_weight: of the two kinds of response.
        temperature, softcap, logit_scale: of the policy's logits, and the reference's, unless `ref_softcap` and
            `ref_logit_scale` say otherwise.
        memory_budget, logits_dtype, strategy, active_vocab: of `fused_linear_loss`.

    Raises:
        TypeError, ValueError: at construction for the options, in `forward` for the tensors, before any work.
    """

    @with_reference_options
    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compiled: bool = True,
        use_ref_model: bool = False,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        *,
        loss_type: str = "kto",
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        **engine: Unpack[ReferenceOptions],
    ) -> None:
        check_flag("use_ref_model", use_ref_model)
        loss = KTOLoss(
            beta=beta,
            loss_type=loss_type,
            desirable_weight=desirable_weight,
            undesirable_weight=undesirable_weight,
            average_log_prob=average_log_prob,
            reference_free=not use_ref_model,
        )
        options = CallOptions(
            ignore_index=ignore_index,
            chunk_size=chunk_size,
            **engine,
        )
        super().__init__(loss, options, compiled=compiled, name=f"loss_type {loss_type}")

    def forward(
        self,
        _input: Tensor,  # [R, T, H]
        lin_weight: Tensor,  # [V, H]
        target: Tensor | ScoredTokens,  # [R, T], aligned with _input
        bias: Tensor | None = None,  # [V]
        preference_labels: Tensor | None = None,  # [R] bool or integer; required
        ref_input: Tensor | None = None,  # [R, T, H']
        ref_weight: Tensor | None = None,  # [V, H']
        ref_bias: Tensor | None = None,  # [V]
        kl: Tensor | None = None,  # [], [1] or [R]
        *,
        ref_logps: Tensor | None = None,  # [R]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The loss of R responses, and what is logged of them.

        The reference is given as a head and hidden states, or as its log-probabilities computed earlier; it is a
        constant either way.

        Args:
            _input: `[R, T, H]`, the hidden states that go into the head, a row a response. Their dtype is the head's,
                but under autocast.
            lin_weight: `[V, H]`, the policy's head.
            target: `[R, T]` integer, the token that each hidden state is to predict (shifted by the caller);
                `ignore_index` where nothing is scored. Read without waiting where it is on the CPU, or a
                `ScoredTokens`.
            bias: `[V]`, the head's.
            preference_labels: `[R]` bool or integer, required: whether a row is desirable.
            ref_input: `[R, T, H']`, the reference's hidden states, of a width of their own.
            ref_weight: `[V', H']`, with a row for every target.
            ref_bias: `[V']`.
            kl: `[]`, `[1]` or `[R]`, in nats, a constant; None is 0. Used as it is: clamp it at 0 where it is
                estimated, after averaging over ranks.
            ref_logps: `[R]`, in nats, in place of the reference's head: sums over tokens, means with
                `average_log_prob`.

        Returns:
            `(loss, sums)`: a scalar, and six detached scalars, `(chosen_logps_sum, rejected_logps_sum,
            chosen_logits_sum, rejected_logits_sum, chosen_rewards_sum, rejected_rewards_sum)`, over the desirable and
            the undesirable rows, in nats, fp32 (fp64 for fp64). Logits are summed over scored positions and the
            vocabulary; liger-kernel's sums include prompts and padding.

        Raises:
            TypeError, ValueError: before any work, naming the argument.
        """
        given = {"ref_input": ref_input, "ref_weight": ref_weight, "ref_bias": ref_bias, "ref_logps": ref_logps}
        rows = self._check(target, preference_labels, given)
        assert preference_labels is not None
        inputs = {"labels": preference_labels}
        if kl is not None:
            assert isinstance(self.loss, KTOLoss)
            self.loss.check_kl("kl", kl, rows)
            check_constant("kl", kl)
            inputs["kl"] = kl.reshape(()) if kl.shape == (1,) else kl
        reference = Reference(ref_input, ref_weight, ref_bias, {"ref_logps": ref_logps}, (rows,))
        return self._call(self.loss, _input, lin_weight, target, bias, reference, inputs)


class LigerFusedLinearBCOLoss(_UnpairedModule):
    """Binary classifier optimisation over a linear head, without the `[R, T, V]` logits.

    `loss = mean over rows of bco_loss`, with `shift` a running mean of rewards: see `liger_losses.losses.bco_loss` for
    the formula and `liger_losses.fused_linear_loss` for the engine. (liger-kernel has no such class; the arguments
    follow its KTO class, except that `use_ref_model` is True.)

    The mean over all rewards seen is kept in the buffers `running_mean` (fp64, whatever dtype the module is cast to)
    and `running_count`, and saved with the module:

    - `forward` in training mode adds its batch's rewards, once a call, gradients enabled or not. Backward does not
      touch it, so that repeated backwards of one loss agree; a forward that is run again (activation checkpointing
      around the loss) counts its batch again.
    - A batch whose rewards are not finite (fp16 that overflowed: a gradient scaler skips that step) is left out of it.
    - `forward` in evaluation mode reads the mean and leaves it.
    - An update makes new tensors: what `state_dict()` handed out earlier, and graphs of earlier losses, keep theirs.
    - Nothing is exchanged between ranks. For a mean over all of them, hand `forward` a `shift`.

    Args:
        ignore_index, beta, compiled, average_log_prob, chunk_size: as in `LigerFusedLinearKTOLoss`; `chunk_size` above
            1 is refused with `shift_includes_batch`.
        use_ref_model: whether there is a reference; False takes its log-probabilities as 0.
        shift_includes_batch: in training mode the shift is the mean after this batch is added (as in TRL's former
            BCOTrainer), which needs all rewards of the batch before the first gradient. False: the mean of earlier
            batches alone (0 at first), and rows are independent: any strategy, tiles of a few rows.
        temperature, softcap, logit_scale, ref_softcap, ref_logit_scale, memory_budget, logits_dtype, strategy,
            active_vocab: as in `LigerFusedLinearKTOLoss`.

    Raises:
        TypeError, ValueError: at construction for the options, in `forward` for the tensors, before any work.
    """

    running_mean: Tensor
    running_count: Tensor

    @with_reference_options
    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compiled: bool = True,
        use_ref_model: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        *,
        shift_includes_batch: bool = True,
        **engine: Unpack[ReferenceOptions],
    ) -> None:
        check_flag("use_ref_model", use_ref_model)
        loss = BCOLoss(
            beta=beta,
            average_log_prob=average_log_prob,
            reference_free=not use_ref_model,
            shift_includes_batch=shift_includes_batch,
        )
        options = CallOptions(
            ignore_index=ignore_index,
            chunk_size=chunk_size,
            **engine,
        )
        super().__init__(loss, options, compiled=compiled, name=f"shift_includes_batch={shift_includes_batch}")
        self.register_buffer("running_mean", torch.zeros((), dtype=torch.float64))
        self.register_buffer("running_count", torch.zeros((), dtype=torch.int64))

    def reset_parameters(self) -> None:
        """Forget the rewards seen (and give buffers made with `to_empty` a value)."""
        self.running_mean = torch.zeros_like(self.running_mean)
        self.running_count = torch.zeros_like(self.running_count)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        mean = self.running_mean
        super()._apply(fn, recurse)
        if self.running_mean.dtype != mean.dtype:
            # The cast of a model to 16 bits is not meant for a mean over a whole run.
            self.running_mean = mean.to(self.running_mean.device)
        return self

    def forward(
        self,
        _input: Tensor,  # [R, T, H]
        lin_weight: Tensor,  # [V, H]
        target: Tensor | ScoredTokens,  # [R, T], aligned with _input
        bias: Tensor | None = None,  # [V]
        preference_labels: Tensor | None = None,  # [R] bool or integer; required
        ref_input: Tensor | None = None,  # [R, T, H']
        ref_weight: Tensor | None = None,  # [V, H']
        ref_bias: Tensor | None = None,  # [V]
        *,
        ref_logps: Tensor | None = None,  # [R]
        shift: Tensor | None = None,  # []
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The loss of R responses, and what is logged of them; all but `shift` as in `LigerFusedLinearKTOLoss`.

        Args:
            _input: `[R, T, H]`, the hidden states that go into the head, a row a response. Their dtype is the head's,
                but under autocast.
            lin_weight: `[V, H]`, the policy's head.
            target: `[R, T]` integer, the token that each hidden state is to predict (shifted by the caller);
                `ignore_index` where nothing is scored. Read without waiting where it is on the CPU, or a
                `ScoredTokens`.
            bias: `[V]`, the head's.
            preference_labels: `[R]` bool or integer, required: whether a row is desirable.
            ref_input: `[R, T, H']`, the reference's hidden states, of a width of their own.
            ref_weight: `[V', H']`, with a row for every target.
            ref_bias: `[V']`.
            ref_logps: `[R]`, in nats, in place of the reference's head: sums over tokens, means with
                `average_log_prob`.
            shift: `[]`, a reward in nats, a constant: used as it is in place of the running mean, which this call then
                neither reads nor updates.

        Returns:
            `(loss, sums)`: a scalar, and six detached scalars, `(chosen_logps_sum, rejected_logps_sum,
            chosen_logits_sum, rejected_logits_sum, chosen_rewards_sum, rejected_rewards_sum)`, over the desirable and
            the undesirable rows, in nats, fp32 (fp64 for fp64). Rewards are not shifted.

        Raises:
            TypeError, ValueError: before any work, naming the argument.
        """
        given = {"ref_input": ref_input, "ref_weight": ref_weight, "ref_bias": ref_bias, "ref_logps": ref_logps}
        rows = self._check(target, preference_labels, given)
        assert preference_labels is not None
        loss = self.loss
        assert isinstance(loss, BCOLoss)
        updates = self.training and shift is None
        if loss.shift_includes_batch and not updates:
            loss = dataclasses.replace(loss, shift_includes_batch=False)
        if shift is not None:
            check_float_tensor("shift", shift, ())
            check_constant("shift", shift)
        count, mean = self.running_count, self.running_mean
        inputs = {"labels": preference_labels, "shift": mean if shift is None else shift}
        if loss.shift_includes_batch:
            inputs["shift_count"] = count
        reference = Reference(ref_input, ref_weight, ref_bias, {"ref_logps": ref_logps}, (rows,))
        value, outputs = self._call(loss, _input, lin_weight, target, bias, reference, inputs)
        if updates:
            # Not by attribute: torch.compile does not follow how a module made while tracing tells that it is a buffer.
            buffers = self._buffers
            buffers["running_count"], buffers["running_mean"] = running_mean(
                count, mean, outputs[-2] + outputs[-1], rows
            )
        return value, outputs
