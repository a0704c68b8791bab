"""The loss modules under liger-kernel's names: the same constructor keywords, `forward` order and returned values.

A module holds a loss object and a `CallOptions`; the mathematics is in `losses`, the tiling in `chunked`. What every
paired module shares is written once, in `paired_loss`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .chunked import ScoredTokens, fused_linear_loss, linear_logprobs
from .chunked.head import check_head
from .chunked.planner import check_tiling
from .chunked.tokens import check_ignore_index, check_target
from .kernels import LogitTransform
from .losses import DPOLoss
from .losses._checks import check_flag, check_float_tensor
from .losses.pairs import pair_count


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """How a module calls the engine: the heads' logits, and the tiling. Checked at construction."""

    ignore_index: int = -100
    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float | None = 1.0
    ref_softcap: float | None = None  # None: as softcap
    ref_logit_scale: float | None = None  # None: as logit_scale
    memory_budget: int | None = None
    logits_dtype: str = "float32"
    strategy: str = "auto"
    chunk_size: int = 1

    def __post_init__(self) -> None:
        for options in (self.policy(), self.reference()):
            scale = options["logit_scale"]
            LogitTransform(1.0 if scale is None else scale, options["softcap"], options["temperature"])
        check_ignore_index(self.ignore_index)
        check_tiling(self.strategy, self.memory_budget, self.logits_dtype)
        if isinstance(self.chunk_size, bool) or not isinstance(self.chunk_size, int):
            raise TypeError(f"chunk_size: got {self.chunk_size!r}, expected an int")
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size: got {self.chunk_size}, expected >= 1")

    def policy(self) -> dict[str, Any]:
        return {
            "ignore_index": self.ignore_index,
            "temperature": self.temperature,
            "softcap": self.softcap,
            "logit_scale": self.logit_scale,
            "memory_budget": self.memory_budget,
            "logits_dtype": self.logits_dtype,
        }

    def reference(self) -> dict[str, Any]:
        options = self.policy()
        if self.ref_softcap is not None:
            options["softcap"] = self.ref_softcap
        if self.ref_logit_scale is not None:
            options["logit_scale"] = self.ref_logit_scale
        return options

    @property
    def max_units(self) -> int | None:
        """liger-kernel's default of one pair a chunk asks for no bound here: `memory_budget` sizes the tiles."""
        return None if self.chunk_size == 1 else self.chunk_size


@dataclass(frozen=True)
class Reference:
    """What a caller gave of the reference model: a head and its hidden states, or log-probabilities, or nothing."""

    hidden: Tensor | None = None  # [2B, T, H']
    weight: Tensor | None = None  # [V, H']
    bias: Tensor | None = None  # [V]
    chosen_logps: Tensor | None = None  # [B]
    rejected_logps: Tensor | None = None  # [B]

    def check(self, wanted: bool, target_shape: torch.Size) -> None:
        """Raise before any work, naming the argument of `forward`."""
        head = {"ref_input": self.hidden, "ref_weight": self.weight}
        known = {"ref_chosen_logps": self.chosen_logps, "ref_rejected_logps": self.rejected_logps}
        given = [name for name, value in {**head, "ref_bias": self.bias, **known}.items() if value is not None]
        if not wanted:
            if given:
                raise ValueError(f"{given[0]}: got a tensor, expected None with use_ref_model=False")
            return
        by_head, by_logps = (any(name in given for name in names) for names in ((*head, "ref_bias"), known))
        if by_head == by_logps:
            raise ValueError(
                f"use_ref_model=True: got {', '.join(given) or 'no reference'}, expected either ref_input and "
                "ref_weight, or ref_chosen_logps and ref_rejected_logps"
            )
        for name, value in (head if by_head else known).items():
            if value is None:
                raise ValueError(f"{name}: got None, expected a tensor beside {', '.join(given)}")
            if by_logps:
                check_float_tensor(name, value, (target_shape[0] // 2,))
        if by_head:
            _check_head(("ref_input", "ref_weight", "ref_bias"), self.hidden, self.weight, self.bias, target_shape)

    def inputs(self, target: Tensor | ScoredTokens, options: CallOptions) -> dict[str, Tensor]:
        """The `inputs` of a paired loss. One product of the reference head, no gradient."""
        if self.chosen_logps is not None and self.rejected_logps is not None:
            return {"ref_logps": torch.cat([self.chosen_logps, self.rejected_logps]).detach()}
        if self.hidden is None or self.weight is None:
            return {}
        with torch.no_grad():
            logprobs = linear_logprobs(self.hidden, self.weight, target, self.bias, **options.reference())
        return {"ref_logprobs": logprobs}


def _check_head(
    names: tuple[str, str, str], hidden: Tensor | None, weight: Tensor | None, bias: Tensor | None, shape: torch.Size
) -> None:
    """The engine's own check of a head, under the names the caller used."""
    try:
        check_head(hidden, weight, bias, shape)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        message = str(error)
        for engine, caller in zip(("hidden", "weight", "bias"), names, strict=True):
            message = message.replace(engine, caller)
        raise type(error)(message) from None


def paired_loss(
    loss: DPOLoss,
    options: CallOptions,
    weight: Tensor,  # [V, H]
    hidden: Tensor,  # [2B, T, H]
    target: Tensor | ScoredTokens,  # [2B, T]
    bias: Tensor | None,  # [V]
    reference: Reference,
    use_ref_model: bool,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Checks everything, then the reference's log-probabilities, then the fused loss."""
    if not isinstance(target, (Tensor, ScoredTokens)):
        raise TypeError(f"target: got {type(target).__name__}, expected a torch.Tensor")
    if len(target.shape) != 2:
        raise ValueError(f"target: got shape {list(target.shape)}, expected [2 * pairs, tokens]")
    if isinstance(target, Tensor):
        check_target(target)
    pair_count(target.shape[0])
    _check_head(("_input", "lin_weight", "bias"), hidden, weight, bias, target.shape)
    reference.check(use_ref_model, target.shape)
    if isinstance(target, Tensor) and not torch.compiler.is_compiling():
        # Read once for both heads: on an accelerator each reading waits for the work queued so far.
        target = ScoredTokens.start(target, options.ignore_index)
    if isinstance(target, ScoredTokens):
        target.check_range(weight.shape[0] if reference.weight is None else min(len(weight), len(reference.weight)))
    return fused_linear_loss(
        loss,
        hidden,
        weight,
        target,
        bias,
        inputs=reference.inputs(target, options),
        strategy=options.strategy,
        max_units=options.max_units,
        **options.policy(),
    )


class LigerFusedLinearDPOLoss(torch.nn.Module):
    """Direct preference optimisation over a linear head, without the `[2B, T, V]` logits.

    `loss = mean over pairs of dpo_loss + alpha * NLL of the chosen responses`: see `liger_losses.losses.dpo_loss` for
    the loss types, `liger_losses.losses.DPOLoss` for the options and `liger_losses.fused_linear_loss` for the engine.

    Args:
        ignore_index: targets that are not scored.
        beta: strength of the pull towards the reference.
        alpha: weight of the NLL term; refused without `compute_nll_loss`.
        compute_nll_loss: add the NLL of the chosen responses, a mean over all their scored tokens.
        compiled: accepted and without effect: there is no compile step.
        use_ref_model: False is reference-free: its log-probabilities are taken as 0, and `forward` takes none.
        average_log_prob: sequence log-probabilities are token means instead of sums.
        chunk_size: more than 1: at most so many pairs are in a tile together. 1, the default, sets no bound: tiles are
            filled with as many pairs as `memory_budget` allows, and one pair larger than a tile is spread over several.
            In liger-kernel it bounds memory; here `memory_budget` does, and the result depends on neither. Refused
            above 1 for losses that couple all pairs of a batch.
        loss_type, label_smoothing, discopop_tau, loss_weights, f_divergence, f_alpha: of `dpo_loss`. Label smoothing
            with "sigmoid" is cDPO.
        ld_alpha, use_weighting: of `DPOLoss`.
        temperature, softcap, logit_scale: of the policy's logits, and the reference's, unless `ref_softcap` and
            `ref_logit_scale` say otherwise.
        memory_budget, logits_dtype, strategy: of `fused_linear_loss`.

    Raises:
        TypeError, ValueError: at construction for the options, in `forward` for the tensors, before any work.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        compute_nll_loss: bool = False,
        compiled: bool = True,
        use_ref_model: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        loss_type: str | Sequence[str] = "sigmoid",
        label_smoothing: float = 0.0,
        discopop_tau: float = 0.05,
        *,
        loss_weights: Sequence[float] | None = None,
        f_divergence: str = "reverse_kl",
        f_alpha: float = 0.5,
        ld_alpha: float | None = None,
        use_weighting: bool = False,
        temperature: float = 1.0,
        softcap: float | None = None,
        logit_scale: float | None = 1.0,
        ref_softcap: float | None = None,
        ref_logit_scale: float | None = None,
        memory_budget: int | None = None,
        logits_dtype: str = "float32",
        strategy: str = "auto",
    ) -> None:
        super().__init__()
        check_flag("compiled", compiled)
        check_flag("use_ref_model", use_ref_model)
        self.loss = DPOLoss(
            beta=beta,
            loss_type=loss_type,
            loss_weights=loss_weights,
            label_smoothing=label_smoothing,
            f_divergence=f_divergence,
            f_alpha=f_alpha,
            discopop_tau=discopop_tau,
            ld_alpha=ld_alpha,
            use_weighting=use_weighting,
            average_log_prob=average_log_prob,
            compute_nll_loss=compute_nll_loss,
            alpha=alpha,
            reference_free=not use_ref_model,
        )
        self.options = CallOptions(
            ignore_index=ignore_index,
            temperature=temperature,
            softcap=softcap,
            logit_scale=logit_scale,
            ref_softcap=ref_softcap,
            ref_logit_scale=ref_logit_scale,
            memory_budget=memory_budget,
            logits_dtype=logits_dtype,
            strategy=strategy,
            chunk_size=chunk_size,
        )
        if chunk_size > 1 and self.loss.separability == "batch":
            raise ValueError(
                f"chunk_size: got {chunk_size}, expected 1 for loss_type {', '.join(self.loss.type_names)}, which "
                "needs all pairs of the batch at once"
            )
        if chunk_size > 1 and strategy not in ("auto", "immediate"):
            raise ValueError(
                f"chunk_size: got {chunk_size} with strategy={strategy!r}, whose tiles hold tokens; expected 1"
            )
        if strategy == "immediate" and self.loss.separability == "batch":
            raise ValueError(
                f"strategy: got 'immediate' with loss_type {', '.join(self.loss.type_names)}, which needs all pairs of "
                "the batch at once; expected another strategy"
            )
        for name, value in (("ref_softcap", ref_softcap), ("ref_logit_scale", ref_logit_scale)):
            if value is not None and not use_ref_model:
                raise ValueError(f"{name}: got {value} with use_ref_model=False, expected None: nothing would read it")

    def forward(
        self,
        lin_weight: Tensor,  # [V, H]
        _input: Tensor,  # [2B, T, H], chosen rows first
        target: Tensor | ScoredTokens,  # [2B, T], aligned with _input
        bias: Tensor | None = None,  # [V]
        ref_input: Tensor | None = None,  # [2B, T, H']
        ref_weight: Tensor | None = None,  # [V, H']
        ref_bias: Tensor | None = None,  # [V]
        *,
        ref_chosen_logps: Tensor | None = None,  # [B]
        ref_rejected_logps: Tensor | None = None,  # [B]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The loss, and `(chosen_logps, rejected_logps, chosen_logits_mean, rejected_logits_mean, nll_loss,
        chosen_rewards, rejected_rewards)`, detached.

        The reference is a head and hidden states, or its log-probabilities computed earlier (reduced as the policy's
        are: with `average_log_prob` means, with `ld_alpha` length-desensitized); it is a constant either way. Logit
        means are over scored positions and the vocabulary.
        """
        reference = Reference(ref_input, ref_weight, ref_bias, ref_chosen_logps, ref_rejected_logps)
        loss, metrics = paired_loss(
            self.loss, self.options, lin_weight, _input, target, bias, reference, not self.loss.reference_free
        )
        names = ("chosen_logps", "rejected_logps", "chosen_logits_mean", "rejected_logits_mean", "nll_loss")
        return loss, tuple(metrics[name] for name in (*names, "chosen_rewards", "rejected_rewards"))

    def extra_repr(self) -> str:
        return f"{self.loss}, {self.options}"
