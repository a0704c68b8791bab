"""A fused language-model head on a live transformers model.

`model(..., labels=labels, fused_lm_head=True)` answers with per-token log-probabilities instead of logits. The keyword
and the names in the answer are those of TRL's fused head, so trainers that ask for it need no change.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from transformers.utils import ModelOutput

from liger_losses.chunked import ScoredTokens, linear_logprobs
from liger_losses.chunked.planner import check_tiling
from liger_losses.integrations._head import HeadOptions, backbone_of, check_head, head_options, output_head

IGNORE_INDEX = -100
# Field of FusedHeadOutput -> statistic of the engine.
_STATISTICS = {
    "log_probs": "logprob",
    "entropy": "entropy",
    "log_sum_sq_probs": "log_sum_sq_prob",
    "mean_logits": "mean_logit",
    "is_top1": "is_top1",
}
_DIFFERENTIABLE = ("log_probs", "entropy")
_RECORD = "_liger_fused_head"


@dataclass
class FusedHeadOutput(ModelOutput):
    """Answer of a fused model. Per-token fields are zero where the label is -100, and None where not asked for.

    With T the length of `labels`, per-token fields are `[B, T - 1]`, field `t` scoring `labels[:, t + 1]`; with
    `shift_labels` they are `[B, T]`.

    Attributes:
        loss: Scalar: negative log-likelihood summed over scored tokens, over `num_items_in_batch` (their count when not
            given), plus `router_aux_loss_coef * aux_loss` when router logits are asked for.
        log_probs: Log-probability of each label, fp32.
        entropy: Entropy of the predicted distribution, in nats.
        log_sum_sq_probs: `log sum_v p_v^2`, without gradient.
        mean_logits: Mean over the vocabulary of the logits divided by the temperature, without gradient.
        is_top1: Whether the label is the most likely token, bool.
        label_mask: Whether the label is scored, bool.
        aux_loss: Scalar load-balancing loss of a mixture of experts.
    """

    loss: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    label_mask: Tensor | None = None
    aux_loss: Tensor | None = None


@dataclass(frozen=True)
class FusedHead:
    """What `fuse_head` put on a model."""

    model: str
    vocabulary: int
    hidden: int
    bias: bool
    trainable: bool
    options: HeadOptions
    temperature: float
    outputs: tuple[str, ...]
    differentiable: tuple[str, ...]
    memory_budget: int | None
    logits_dtype: str
    strategy: str
    verdict: str  # of check_head

    def __str__(self) -> str:
        scale, cap = self.options["logit_scale"], self.options["softcap"]
        kind = "gradient-free" if not self.differentiable else "trainable" if self.trainable else "frozen"
        facts = [
            f"{kind} head [{self.vocabulary}, {self.hidden}]",
            *(["bias"] if self.bias else []),
            *([f"logit scale {scale:g}"] if scale != 1.0 else []),
            *([f"softcap {cap:g}"] if cap is not None else []),
            *([f"temperature {self.temperature:g}"] if self.temperature != 1.0 else []),
        ]
        return f"{self.model}: {', '.join(facts)} ({self.verdict}); {', '.join(self.outputs)}"


@dataclass(frozen=True)
class _Record:
    """What a fused model remembers: its head, and what `forward` was before.

    Kept on the model and read from it at each call, so that a deep copy of the model calls its own parts.
    """

    head: FusedHead
    beneath: Callable[..., Any] | None  # instance forward to call when unfused; None: the class's own
    forward: Callable[..., Any] | None  # instance attribute to put back; None: there was none
    original: Callable[..., Any] | None  # accelerate's _original_forward to put back; None: there was none


def fuse_head(
    model: Any,  # transformers.PreTrainedModel, or a PeftModel around one
    *,
    temperature: float = 1.0,
    outputs: tuple[str, ...] = ("log_probs",),
    differentiable: tuple[str, ...] | None = None,
    memory_budget: int | None = None,
    logits_dtype: str = "float32",
    strategy: str = "auto",
    accelerator: Any = None,
) -> FusedHead:
    """Let `model(..., labels=labels, fused_lm_head=True)` answer with per-token statistics and never build the logits.

    Without the keyword the model's forward is what it was, so generation and saving are unchanged. Only `forward` of
    this instance is replaced; `unfuse_head` puts it back. A head that TRL put there is replaced, not stacked upon.
    Call it before the model is wrapped (DDP, FSDP, `accelerator.prepare`).

    Args:
        model: Causal language model. Of a PeftModel the base model is fused.
        temperature: Number that the logits are divided by.
        outputs: Per-token fields to compute, of log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1. log_probs
            is always computed.
        differentiable: Fields whose gradient may be asked for, of log_probs and entropy. None: those among `outputs`.
            Leaving entropy out when it is only logged makes backward cheaper.
        memory_budget, logits_dtype, strategy: As in `liger_losses.linear_logprobs`.
        accelerator: The `accelerate.Accelerator` that has prepared the model already, if one has: its autocast is then
            put around the fused forward as it was around the former one.

    Raises:
        ValueError: An option is out of range, or the head cannot be fused (adapter, quantised, logits that are not
            those of a plain head).
        RuntimeError: The model is fused already, or is prepared by an accelerator that was not given.
    """
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    if _RECORD in vars(model):
        raise RuntimeError(f"{type(model).__name__} has a fused head already; call unfuse_head(model) first.")
    unknown = [name for name in outputs if name not in _STATISTICS]
    if unknown:
        raise ValueError(f"outputs has {unknown}; expected names among {list(_STATISTICS)}.")
    asked = tuple(name for name in _STATISTICS if name in outputs or name == "log_probs")
    if differentiable is None:
        differentiable = tuple(name for name in _DIFFERENTIABLE if name in asked)
    if wrong := [name for name in differentiable if name not in _DIFFERENTIABLE or name not in asked]:
        raise ValueError(f"differentiable has {wrong}; expected names of outputs among {list(_DIFFERENTIABLE)}.")
    check_tiling(strategy, memory_budget, logits_dtype)
    if strategy == "immediate":
        raise ValueError("strategy: got 'immediate', which a head asked for log-probabilities cannot use; expected "
                         "'auto', 'cached', 'recompute' or 'frozen'")  # fmt: skip
    if not temperature > 0.0:
        raise ValueError(f"temperature is {temperature}; expected a positive number.")
    if "_original_forward" in vars(model) and accelerator is None:
        raise RuntimeError("model is prepared by an accelerator; give accelerator=, or fuse before preparing it.")
    options = head_options(model.config)
    linear = output_head(model)
    head = FusedHead(
        model=type(model).__name__,
        vocabulary=linear.weight.shape[0],
        hidden=linear.weight.shape[1],
        bias=linear.bias is not None,
        trainable=linear.weight.requires_grad,
        options=options,
        temperature=float(temperature),
        outputs=asked,
        differentiable=differentiable,
        memory_budget=memory_budget,
        logits_dtype=logits_dtype,
        strategy=strategy,
        verdict=check_head(model, linear, options),
    )
    forward, original = vars(model).get("forward"), vars(model).get("_original_forward")
    record = _Record(head, _without_fused_head(original or forward), forward, original)
    vars(model)[_RECORD] = record
    _set_forward(model, types.MethodType(_fused_forward_of(type(model)), model), accelerator)
    return head


def unfuse_head(model: Any, *, accelerator: Any = None) -> None:
    """Put back the forward that `fuse_head` found. If the model was prepared in between, its autocast stays around it.

    Raises:
        ValueError: The model has no head fused by `fuse_head`.
        RuntimeError: The model was prepared by an accelerator in between, which was not given.
    """
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    record: _Record | None = vars(model).get(_RECORD)
    if record is None:
        raise ValueError(f"{type(model).__name__} has no fused head; fuse_head(model) was not called on it.")
    if "_original_forward" in vars(model) and record.original is None:
        if accelerator is None:
            raise RuntimeError("model was prepared by an accelerator since it was fused; give accelerator=.")
        _set_forward(model, record.forward or types.MethodType(type(model).forward, model), accelerator)
    else:
        if record.original is not None:
            vars(model)["_original_forward"] = record.original
        if record.forward is not None:
            vars(model)["forward"] = record.forward
        else:
            vars(model).pop("forward", None)
    del vars(model)[_RECORD]


def _set_forward(model: nn.Module, forward: Callable[..., Any], accelerator: Any) -> None:
    """Set `forward` on the instance, inside accelerate's autocast and fp32 outputs where the model has them."""
    if "_original_forward" in vars(model):
        from accelerate.utils import convert_outputs_to_fp32, get_mixed_precision_context_manager

        vars(model)["_original_forward"] = forward
        autocast = get_mixed_precision_context_manager(accelerator.native_amp, accelerator.autocast_handler)
        if isinstance(forward, types.MethodType):
            forward = types.MethodType(convert_outputs_to_fp32(autocast(forward.__func__)), model)
        else:
            forward = convert_outputs_to_fp32(autocast(forward))
    vars(model)["forward"] = forward


def _without_fused_head(forward: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """The instance forward below TRL's fused head; `forward` itself where there is none."""
    function: Any = getattr(forward, "__func__", forward)
    code = getattr(function, "__code__", None)
    if code is None or "fused_lm_head" not in code.co_varnames or "original_forward" not in code.co_freevars:
        return forward
    beneath = inspect.getclosurevars(function).nonlocals["original_forward"]
    owner = getattr(beneath, "__self__", None)
    # The class's own forward needs no instance attribute: it is looked up on the class.
    if owner is not None and beneath.__func__ is type(owner).forward:
        return None
    return _without_fused_head(beneath)


def _fused_forward_of(model_class: type) -> Callable[..., Any]:
    own_forward: Callable[..., Any] = model_class.forward  # type: ignore[attr-defined]

    # `generate` and Trainer read the signature of forward: they must see the model's own.
    @functools.wraps(own_forward)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        record: _Record = vars(self)[_RECORD]
        if fused_lm_head:
            positional = dict(zip(list(inspect.signature(own_forward).parameters)[1:], args, strict=False))
            return _score(self, record.head, {**positional, **kwargs})
        if record.beneath is not None:
            return record.beneath(*args, **kwargs)
        return own_forward(self, *args, **kwargs)

    return forward


def _score(model: Any, head: FusedHead, inputs: dict[str, Any]) -> FusedHeadOutput:
    labels, shift_labels = inputs.pop("labels", None), inputs.pop("shift_labels", None)
    items = inputs.pop("num_items_in_batch", None)
    if labels is None and shift_labels is None:
        raise ValueError("fused_lm_head=True needs labels or shift_labels: there are no logits to return without them.")
    keep = inputs.pop("logits_to_keep", None)
    if isinstance(keep, Tensor) or keep:
        raise ValueError("logits_to_keep has no meaning with fused_lm_head=True: mask labels with -100 instead.")
    for name in ("output_hidden_states", "output_attentions"):
        if inputs.get(name):
            raise ValueError(f"{name}=True is not supported with fused_lm_head=True.")
    if inputs.pop("return_dict", None) is False:
        raise ValueError("return_dict=False is not supported with fused_lm_head=True.")
    inputs["use_cache"] = False
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        inputs.setdefault("output_router_logits", True)

    linear = output_head(model)  # per call: FSDP and PEFT replace modules after fusing
    device = linear.weight.device
    target = (labels[:, 1:] if shift_labels is None else shift_labels).to(device)
    # Counting the scored tokens needs the host: started before the backbone, it is known when the head is reached.
    scored = ScoredTokens.start(target, IGNORE_INDEX)
    backbone = backbone_of(model)(**inputs)
    hidden = backbone.last_hidden_state
    hidden = (hidden[:, :-1] if shift_labels is None else hidden).to(device)
    if hidden.shape[:-1] != target.shape:
        raise ValueError(
            f"the backbone gave hidden states for {tuple(hidden.shape[:-1])} tokens and the (shifted) labels "
            f"are {tuple(target.shape)}; expected the same shape."
        )
    weight: Tensor = linear.weight
    bias: Tensor | None = linear.bias
    weight, bias = _gathered(weight), None if bias is None else _gathered(bias)
    values = linear_logprobs(
        hidden,
        weight,
        scored,
        bias,
        ignore_index=IGNORE_INDEX,
        temperature=head.temperature,
        softcap=head.options["softcap"],
        logit_scale=head.options["logit_scale"],
        statistics=tuple(_STATISTICS[name] for name in head.outputs),
        differentiable=tuple(_STATISTICS[name] for name in head.differentiable),
        memory_budget=head.memory_budget,
        logits_dtype=head.logits_dtype,
        strategy=head.strategy,
    )
    mask = target != IGNORE_INDEX
    log_probs = values["logprob"]
    count = mask.sum().clamp(min=1) if items is None else items
    loss = -log_probs.sum() / (count.to(device) if isinstance(count, Tensor) else count)
    aux_loss = None
    if inputs.get("output_router_logits"):
        aux_loss = _load_balancing_loss(model, backbone, inputs.get("attention_mask")).to(device)
        loss = loss + _router_coefficient(model) * aux_loss
    fields = {name: values[_STATISTICS[name]] for name in head.outputs}
    return FusedHeadOutput(loss=loss, label_mask=mask, aux_loss=aux_loss, **fields)


def _gathered(parameter: Tensor) -> Tensor:
    """The whole of a sharded parameter, gathered once for all tiles.

    Its gradient goes back as the mean over ranks. Left to itself DTensor takes every rank's gradient for the same one
    and keeps of each rank only its shard, which is right under tensor parallelism alone; the mean is right there too.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.full_tensor(grad_placements=[Partial("avg")] * parameter.device_mesh.ndim)


def _load_balancing_loss(model: Any, backbone: Any, attention_mask: Tensor | None) -> Tensor:
    """The load-balancing loss by the function of the model's own module, as the model's own forward calls it."""
    name = type(model).__name__
    function = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    expected = ["gate_logits", "num_experts", "top_k", "attention_mask"]
    if function is None or list(inspect.signature(function).parameters) != expected:
        raise ValueError(
            f"output_router_logits=True: the load-balancing loss of {name} is not known to the fused head."
        )
    router_logits = getattr(backbone, "router_logits", None)
    if router_logits is None:
        raise ValueError(f"output_router_logits=True: the backbone of {name} returned no router logits.")
    text = model.config.get_text_config()
    experts = [
        getattr(model, "num_experts", None),
        *(getattr(text, n, None) for n in ("num_experts", "num_local_experts")),
    ]
    top_k = [getattr(model, "num_experts_per_tok", None), getattr(text, "num_experts_per_tok", None)]
    first = next((n for n in experts if n is not None), None), next((k for k in top_k if k is not None), None)
    value = function(router_logits, *first, attention_mask)
    return value if isinstance(value, Tensor) else torch.tensor(float(value))


def _router_coefficient(model: Any) -> float:
    """Weight of the load-balancing loss in the model's own loss; 0 where neither model nor config declares one."""
    text = model.config.get_text_config()
    return float(getattr(model, "router_aux_loss_coef", getattr(text, "router_aux_loss_coef", 0.0)))
