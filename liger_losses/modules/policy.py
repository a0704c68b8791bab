"""Policy-gradient losses over a linear head."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._checks import check_choice, check_count, check_flag, check_shape, check_size
from .._constants import taken
from ..chunked.loss import check_constants
from ..chunked.placements import vocabulary_ranks
from ..chunked.tokens import check_integer, widened
from ..losses import GRPOLoss
from ..losses.policy_types import POLICY_TYPES
from .base import CallOptions, Reference, fused_loss
from .engine_options import TilingOptions, with_tiling_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

_IGNORE = -100
# The loss's inputs, by what `forward` calls them.
_NAMES = {
    "old_logprobs": "old_per_token_logps",
    "ref_logprobs": "ref_per_token_logps",
    "sampling_logprobs": "sampling_per_token_logps",
    "sampling_ratio": "vllm_is_ratio",
}


class LigerFusedLinearGRPOLoss(torch.nn.Module):
    """GRPO and its relatives (PPO, RLOO, ...) over a linear head, without the `[B, T, V]` logits.

    See `liger_losses.losses.GRPOLoss` for the loss types and every option, and `liger_losses.fused_linear_loss` for
    the engine. Types whose tokens stand alone cost 3 products over tiles of tokens; those with a sequence's ratio need
    whole rows at a time; `top_entropy_quantile` needs the whole batch.

    Args:
        beta: weight of the KL to the reference.
        compiled: accepted and without effect: there is no compile step.
        use_ref_model: False takes the policy for its own reference: the KL is 0 whatever `beta` is, and `forward`
            takes no reference. True is refused with `beta=0`, which would read none.
        chunk_size: more than 1: the tokens of at most so many sequences are in a tile together. 1, the default, sets no
            bound: `memory_budget` does. The result depends on neither.
        epsilon_low, epsilon_high, loss_type, importance_sampling_level, sapo_temperature_pos, sapo_temperature_neg,
            delta, use_bias_correction_kl, vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: of `GRPOLoss`.
        max_completion_length: the divisor of dr_grpo; a fact about the rollouts that the other types have no use for.
        temperature: of the policy's and the reference's logits.
        kl_estimator, entropy_coef, top_entropy_quantile, off_policy_mask_threshold, sampler_mode, sampler_clip_min,
            sampler_clip_max, vf_coef, value_clip, report_entropy: of `GRPOLoss`.
        num_processes: of `GRPOLoss`: ranks whose gradients are averaged. None: torch.distributed's world size, over the
            ranks of one vocabulary where `lin_weight` is spread over some, which are given the same tokens.
        named_metrics: `forward` returns the metrics of `GRPOLoss` by name instead of liger-kernel's two.
        softcap, logit_scale: of the policy's logits, and the reference's, unless `ref_softcap` and `ref_logit_scale`
            say otherwise.
        memory_budget, logits_dtype, strategy, active_vocab: of `fused_linear_loss`.

    Raises:
        TypeError, ValueError: at construction for the options, in `forward` for the tensors, before any work.
    """

    @with_tiling_options
    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
        *,
        kl_estimator: str = "k3",
        entropy_coef: float = 0.0,
        top_entropy_quantile: float = 1.0,
        off_policy_mask_threshold: float | None = None,
        sampler_mode: str | None = None,
        sampler_clip_min: float | None = None,
        sampler_clip_max: float | None = 3.0,
        vf_coef: float = 0.0,
        value_clip: float | None = None,
        report_entropy: bool = False,
        num_processes: int | None = None,
        named_metrics: bool = False,
        softcap: float | None = None,
        logit_scale: float | None = 1.0,
        ref_softcap: float | None = None,
        ref_logit_scale: float | None = None,
        **engine: Unpack[TilingOptions],
    ) -> None:
        super().__init__()
        check_flag("compiled", compiled)
        check_flag("use_ref_model", use_ref_model)
        check_flag("named_metrics", named_metrics)
        check_choice("loss_type", loss_type, tuple(POLICY_TYPES))
        if max_completion_length is not None:
            check_size("max_completion_length", max_completion_length)
        if use_ref_model and beta == 0:
            raise ValueError("use_ref_model: got True with beta=0, which reads no reference; expected False")
        self.loss = GRPOLoss(
            beta=beta,
            loss_type=loss_type,
            epsilon_low=epsilon_low,
            epsilon_high=epsilon_high,
            max_completion_length=max_completion_length if POLICY_TYPES[loss_type].divisor == "length" else None,
            importance_sampling_level=importance_sampling_level,
            sapo_temperature_pos=sapo_temperature_pos,
            sapo_temperature_neg=sapo_temperature_neg,
            delta=delta,
            use_bias_correction_kl=use_bias_correction_kl,
            vespo_k_pos=vespo_k_pos,
            vespo_lambda_pos=vespo_lambda_pos,
            vespo_k_neg=vespo_k_neg,
            vespo_lambda_neg=vespo_lambda_neg,
            kl_estimator=kl_estimator,
            entropy_coef=entropy_coef,
            top_entropy_quantile=top_entropy_quantile,
            off_policy_mask_threshold=off_policy_mask_threshold,
            sampler_mode=sampler_mode,
            sampler_clip_min=sampler_clip_min,
            sampler_clip_max=sampler_clip_max,
            vf_coef=vf_coef,
            value_clip=value_clip,
            report_entropy=report_entropy,
            num_processes=num_processes,
        )
        self._reports_kl = beta != 0
        if not use_ref_model:
            self.loss = replace(self.loss, beta=0.0)
        self.use_ref_model = use_ref_model
        self.named_metrics = named_metrics
        self.options = CallOptions(
            ignore_index=_IGNORE,
            temperature=temperature,
            softcap=softcap,
            logit_scale=logit_scale,
            ref_softcap=ref_softcap,
            ref_logit_scale=ref_logit_scale,
            chunk_size=chunk_size,
            **engine,
        )
        self.options.check_separability(self.loss.separability, f"top_entropy_quantile={top_entropy_quantile}")
        self.options.check_reference(use_ref_model)

    def forward(
        self,
        _input: Tensor,  # [B, T, H]
        lin_weight: Tensor,  # [V, H]
        selected_token_ids: Tensor,  # [B, T], aligned with _input
        attention_mask: Tensor,  # [B, T], nonzero where the token is scored
        advantages: Tensor,  # [B] or [B, T]
        bias: Tensor | None = None,  # [V]
        ref_per_token_logps: Tensor | None = None,  # [B, T]
        old_per_token_logps: Tensor | None = None,  # [B, T]
        ref_input: Tensor | None = None,  # [B, T, H']
        ref_weight: Tensor | None = None,  # [V, H']
        ref_bias: Tensor | None = None,  # [V]
        vllm_is_ratio: Tensor | None = None,  # [B], [B, 1] or [B, T]
        num_items_in_batch: Tensor | int | None = None,
        *,
        sampling_per_token_logps: Tensor | None = None,  # [B, T]
        values: Tensor | None = None,  # [B, T]
        returns: Tensor | None = None,  # [B, T]
        old_values: Tensor | None = None,  # [B, T]
    ) -> tuple[Tensor, tuple[Tensor, ...] | dict[str, Tensor]]:
        """The loss of B sampled sequences, and what is logged of them. See `GRPOLoss` for the formulas.

        What stands at masked positions, of any tensor, is never read. All tensors beside the head, its input and
        `values` are constants: one that requires a gradient is refused. The reference is given as a head and hidden
        states, or as its log-probabilities.

        Args:
            _input: `[B, T, H]`, the hidden states that go into the head, of the completions alone. Their dtype is the
                head's, but under autocast.
            lin_weight: `[V, H]`, the policy's head.
            selected_token_ids: `[B, T]` integer, the sampled token that each hidden state predicts.
            attention_mask: `[B, T]` of any dtype; a token is scored where it is not zero, whatever number it is there:
                a mask and no weight (liger-kernel multiplies by it). Weights of tokens go into `advantages` `[B, T]`.
            advantages: `[B]` or `[B, T]`.
            bias: `[V]`, the head's.
            ref_per_token_logps: `[B, T]`, in nats, in place of the reference's head.
            old_per_token_logps: `[B, T]`, in nats; None: the rollouts are the policy's own.
            ref_input: `[B, T, H']`, the reference's hidden states, of a width of their own.
            ref_weight: `[V', H']`, with a row for every scored token.
            ref_bias: `[V']`.
            vllm_is_ratio: `[B]`, `[B, 1]` or `[B, T]`, a ready-made weight of the policy term.
            num_items_in_batch: an int or `[]`, the scored tokens of the whole optimiser step, over all processes: with
                the tokens spread over ranks, `scored_count(..., gradients="sum")`, since `num_processes` makes the mean
                of it.
            sampling_per_token_logps: `[B, T]`, in nats, of the program that sampled: for `sampler_mode`, which makes a
                weight of them, and the off-policy mask.
            values, returns, old_values: `[B, T]` each, of `vf_coef` and `value_clip`; `values` gets a gradient.

        Returns:
            `(loss, (kl, clip_ratio))`: scalars, fp32 (fp64 for fp64), without `kl` for `beta=0`; the metrics are
            detached means over scored tokens, `kl` in nats. With `named_metrics`, `(loss, {name: metric})`.

        Raises:
            TypeError, ValueError: before any work, naming the argument.
        """
        target = _target(selected_token_ids, attention_mask, _input)
        given: dict[str, Any] = {
            "advantages": advantages,
            "old_logprobs": old_per_token_logps,
            "sampling_ratio": vllm_is_ratio,
            "sampling_logprobs": sampling_per_token_logps,
            "values": values,
            "returns": returns,
            "old_values": old_values,
            "num_items_in_batch": None
            if num_items_in_batch is None
            else check_count("num_items_in_batch", num_items_in_batch),
        }
        inputs = {name: tensor for name, tensor in given.items() if tensor is not None}
        ranks = vocabulary_ranks(lin_weight)
        processes = self.loss.num_processes
        if processes is None and ranks > 1:
            processes = max(torch.distributed.get_world_size() // ranks, 1)
        loss = replace(self.loss, on_policy=old_per_token_logps is None, num_processes=processes)
        options = self.options
        if options.chunk_size > 1 and loss.separability == "token":  # whose units are tokens, not sequences
            options = replace(options, chunk_size=options.chunk_size * max(target.shape[1], 1))
        _check_inputs(loss, tuple(target.shape), inputs)
        value, metrics = fused_loss(
            loss,
            options,
            _input,
            lin_weight,
            target,
            bias,
            reference=Reference(
                ref_input,
                ref_weight,
                ref_bias,
                {"ref_per_token_logps": ref_per_token_logps},
                tuple(target.shape),
                known_as="ref_logprobs",
            ),
            use_ref_model=self.use_ref_model,
            inputs=inputs,
            target_name="selected_token_ids",
        )
        if self._reports_kl and not self.use_ref_model:
            metrics["kl"] = torch.zeros_like(metrics["clip_ratio"])
        if self.named_metrics:
            return value, metrics
        return value, tuple(metrics[name] for name in (["kl"] if self._reports_kl else []) + ["clip_ratio"])

    def extra_repr(self) -> str:
        return f"{self.loss}, {self.options}"


def _check_inputs(loss: GRPOLoss, shape: tuple[int, ...], inputs: dict[str, Tensor]) -> None:
    """The loss's own check, before a reference is projected and under the names the caller used."""
    reference = {"ref_logprobs": torch.zeros((), device="cpu").expand(shape)} if loss.beta != 0 else {}
    try:
        loss.check_inputs(shape, {**inputs, **reference})
        check_constants(loss, inputs)
    except (TypeError, ValueError) as error:
        message = str(error)
        for name, caller in _NAMES.items():
            message = message.replace(name, caller)
        raise type(error)(message) from None


def _target(ids: Tensor, attention_mask: Tensor, hidden: Tensor) -> Tensor:
    """`ids` where the mask is not zero, and what is not scored elsewhere. `[B, T]` int64."""
    for name, tensor in (("selected_token_ids", ids), ("attention_mask", attention_mask), ("_input", hidden)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, expected a torch.Tensor")
    if ids.dim() != 2:
        raise ValueError(f"selected_token_ids: got shape {list(ids.shape)}, expected [sequences, tokens]")
    if hidden.dim() != 3 or hidden.shape[:2] != ids.shape:
        raise ValueError(
            f"_input: got shape {list(hidden.shape)}, expected [{ids.shape[0]}, {ids.shape[1]}, hidden size], the rows "
            "and tokens of selected_token_ids"
        )
    check_shape("attention_mask", attention_mask, tuple(ids.shape))
    check_integer("selected_token_ids", ids)
    # An id of -100 under the mask would pass for one that is not scored; -1 is refused like any other that is no class.
    ids = widened(ids)
    ignored = taken(attention_mask == 0, ids.device)
    return ids.masked_fill(ids == _IGNORE, -1).masked_fill(ignored, _IGNORE)
