"""The losses as functions, under liger-kernel's names and in its argument order: `_input` first, then the weight.

(The `forward` of most modules takes the weight first. That is liger-kernel's interface, too; a swap raises.)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .modules import (
    LigerCrossEntropyLoss,
    LigerFusedLinearAlphaPOLoss,
    LigerFusedLinearBCELoss,
    LigerFusedLinearBCOLoss,
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearCPOLoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearJSD,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKLDivLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
    LigerFusedLinearTPOLoss,
    LigerJSD,
    LigerKLDIVLoss,
    LigerTVDLoss,
)


def _function(
    module: type[torch.nn.Module], name: str, order: str, weight: str = "lin_weight", **defaults: Any
) -> Callable[..., Any]:
    """`module(**options)(**tensors)` as one function of both.

    `order` names the leading positional arguments, of `forward` or of the constructor alike; every other argument of
    either is keyword-only. `weight` is what `forward` calls the argument that is `weight` here. `defaults` are those
    that differ from the module's.
    """
    call, make = (inspect.signature(f).parameters for f in (module.forward, module.__init__))
    tensors = {"weight" if n == weight else n: p for n, p in call.items() if n != "self"}
    known = {**tensors, **{n: p for n, p in make.items() if n != "self"}}
    known |= {n: known[n].replace(default=value) for n, value in defaults.items()}
    leading = order.split()
    positional = [known[n].replace(name=n, kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in leading]
    rest = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for n, p in known.items() if n not in leading]
    required = tuple(n for n, p in known.items() if p.default is p.empty)
    of_forward, names = tuple(tensors), tuple(known)

    # Bound by hand: torch.compile does not follow inspect.
    def function(*args: Any, **kwargs: Any) -> Any:
        if len(args) > len(leading):
            raise TypeError(f"{name}() too many positional arguments: got {len(args)}, expected {len(leading)} at most")
        given = dict(zip(leading, args, strict=False))
        for argument in kwargs:
            if argument in given:
                raise TypeError(f"{name}() multiple values for argument {argument!r}")
            if argument not in names:
                raise TypeError(f"{name}() got an unexpected keyword argument {argument!r}")
        given.update(kwargs)
        for argument in required:
            if argument not in given:
                raise TypeError(f"{name}() missing a required argument: {argument!r}")
        options = {**defaults, **{n: value for n, value in given.items() if n not in of_forward}}
        return module(**options)(**{weight if n == "weight" else n: given[n] for n in of_forward if n in given})

    function.__name__ = function.__qualname__ = name
    function.__signature__ = inspect.Signature([*positional, *rest])  # type: ignore[attr-defined]
    renamed = f" (`weight` is its `{weight}`)" if weight in call else ""
    function.__doc__ = (
        f"`{module.__name__}` as a function; it returns and raises what the module does.\n\n"
        f"Those of its `forward`, with shapes and units{renamed}: {', '.join(f'`{n}`' for n in tensors)}. The other "
        "arguments are the constructor's. Each call makes the module anew: what a module keeps from call to call, a "
        "function does not."
    )
    return function


liger_fused_linear_dpo = _function(
    LigerFusedLinearDPOLoss,
    "liger_fused_linear_dpo",
    "_input weight target bias ref_input ref_weight ref_bias ignore_index beta compute_nll_loss compiled use_ref_model "
    "average_log_prob chunk_size loss_type label_smoothing discopop_tau alpha",
)

liger_fused_linear_orpo = _function(
    LigerFusedLinearORPOLoss,
    "liger_fused_linear_orpo",
    "_input weight target bias ignore_index beta compute_nll_loss nll_target compiled chunk_size",
)

liger_fused_linear_cpo = _function(
    LigerFusedLinearCPOLoss,
    "liger_fused_linear_cpo",
    "_input weight target bias ignore_index beta alpha label_smoothing compute_nll_loss compiled average_log_prob "
    "chunk_size",
)

# liger-kernel's function, unlike its module, does not add NLL by default.
liger_fused_linear_simpo = _function(
    LigerFusedLinearSimPOLoss,
    "liger_fused_linear_simpo",
    "_input weight target bias ignore_index beta alpha label_smoothing compute_nll_loss compiled gamma chunk_size",
    compute_nll_loss=False,
)

liger_fused_linear_alphapo = _function(
    LigerFusedLinearAlphaPOLoss,
    "liger_fused_linear_alphapo",
    "_input weight target bias ignore_index beta reward_alpha alpha label_smoothing compute_nll_loss compiled gamma "
    "chunk_size",
)

liger_fused_linear_tpo = _function(
    LigerFusedLinearTPOLoss,
    "liger_fused_linear_tpo",
    "_input weight target bias ignore_index beta alpha label_smoothing compute_nll_loss compiled gamma chunk_size",
)

liger_fused_linear_cross_entropy = _function(
    LigerFusedLinearCrossEntropyLoss,
    "liger_fused_linear_cross_entropy",
    "_input weight target bias ce_weight ignore_index lse_square_scale label_smoothing reduction softcap return_z_loss "
    "accum_dtype use_token_scaling return_token_accuracy return_predicted_tokens",
)

liger_fused_linear_bce = _function(
    LigerFusedLinearBCELoss, "liger_fused_linear_bce", "_input weight positives bias reduction ignore_index"
)

liger_cross_entropy = _function(
    LigerCrossEntropyLoss,
    "liger_cross_entropy",
    "_input target weight ignore_index reduction label_smoothing lse_square_scale softcap return_z_loss "
    "return_token_accuracy return_predicted_tokens",
    weight="",
)

liger_fused_linear_grpo = _function(
    LigerFusedLinearGRPOLoss,
    "liger_fused_linear_grpo",
    "_input weight selected_token_ids attention_mask advantages bias ref_per_token_logps old_per_token_logps ref_input "
    "ref_weight ref_bias beta epsilon_low epsilon_high loss_type max_completion_length importance_sampling_level "
    "sapo_temperature_pos sapo_temperature_neg temperature compiled use_ref_model chunk_size vllm_is_ratio delta "
    "use_bias_correction_kl vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg num_items_in_batch",
)

# liger-kernel's function, unlike its module, expects a reference by default.
liger_fused_linear_kto = _function(
    LigerFusedLinearKTOLoss,
    "liger_fused_linear_kto",
    "_input weight target preference_labels bias ref_input ref_weight ref_bias kl ignore_index beta compiled "
    "use_ref_model average_log_prob chunk_size",
    use_ref_model=True,
)

# A function keeps no running mean: `shift` is handed in, or is each batch's own.
liger_fused_linear_bco = _function(
    LigerFusedLinearBCOLoss,
    "liger_fused_linear_bco",
    "_input weight target preference_labels bias ref_input ref_weight ref_bias",
)

_TWO_HEADS = "student_input student_weight teacher_input teacher_weight "
_SOFT_AND_HARD = (
    _TWO_HEADS
    + "true_labels student_bias teacher_bias weight_hard_loss weight_soft_loss beta ignore_index temperature "
    "compiled chunk_size return_soft_hard_loss"
)

# liger-kernel has two functions of the name liger_fused_linear_jsd: its `chunked_loss` one is the first of these, its
# `transformers` one the third.
liger_fused_linear_jsd_loss = _function(
    LigerFusedLinearJSDLoss, "liger_fused_linear_jsd_loss", _SOFT_AND_HARD, weight=""
)

liger_fused_linear_cosine = _function(
    LigerFusedLinearCosineSimilarityLoss, "liger_fused_linear_cosine", _SOFT_AND_HARD, weight=""
)

liger_fused_linear_jsd = _function(
    LigerFusedLinearJSD,
    "liger_fused_linear_jsd",
    _TWO_HEADS + "shift_labels jsd_beta ignore_index temperature accum_dtype",
    weight="",
)

liger_fused_linear_kl_div = _function(
    LigerFusedLinearKLDivLoss,
    "liger_fused_linear_kl_div",
    "student_input student_weight target shift_labels reduction ignore_index temperature eps accum_dtype",
    weight="",
)


def liger_jsd(
    input: Tensor,  # [BT, V], log-probabilities of the student
    target: Tensor,  # [BT, V], of the teacher
    shift_labels: Tensor | None = None,  # [BT]
    beta: float = 0.5,
    ignore_index: int = -100,
) -> Tensor:
    """`LigerJSD` as a function: `input` `[BT, V]` is `log_q` of its `forward`, `target` `[BT, V]` its `log_p`."""
    return LigerJSD(beta, ignore_index)(input, target, shift_labels)


def liger_kl_div(
    input: Tensor,  # [BT, V], log-probabilities
    target: Tensor,  # [BT, V], probabilities, or with log_target their logarithms
    size_average: bool = True,
    reduce: bool = True,
    reduction: str = "mean",
    log_target: bool = False,
    eps: float = 1e-10,
) -> Tensor:
    """`LigerKLDIVLoss` as a function: `input` `[BT, V]` is `y_pred` of its `forward`, `target` `[BT, V]` its `y_true`.

    `size_average` and `reduce` are torch's, and only True: `reduction` says it.
    """
    for name, value in (("size_average", size_average), ("reduce", reduce)):
        if value is not True:
            raise ValueError(f"{name}: got {value!r}, expected True; reduction='sum' or 'none' says what it said")
    return LigerKLDIVLoss(eps, reduction=reduction, log_target=log_target)(input, target)


def liger_tvd(
    input: Tensor,  # [BT, V], probabilities of the student
    target: Tensor,  # [BT, V], of the teacher
    shift_labels: Tensor | None = None,  # [BT]
    reduction: str = "mean",
    ignore_index: int = -100,
) -> Tensor:
    """`LigerTVDLoss` as a function: `input` `[BT, V]` is `p` of its `forward`, `target` `[BT, V]` its `q`.

    The default reduction is liger-kernel's, another than the module's.
    """
    return LigerTVDLoss(reduction, ignore_index)(input, target, shift_labels)
