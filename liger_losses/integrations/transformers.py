"""A fused language-model head on a live transformers model.

`model(..., labels=labels, fused_lm_head=True)` answers with per-token log-probabilities instead of logits. The keyword
and the names in the answer are those of TRL's fused head, so trainers that ask for it need no change.

`fuse_layers`, which is `liger_losses.integrations.layers`'s, does for a model's layers what this does for its head.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from liger_losses._checks import check_flag, check_temperature
from liger_losses.chunked.planner import check_tiling
from liger_losses.integrations._answer import FusedHeadOutput
from liger_losses.integrations._head import base_model, check_head, head_options, output_head
from liger_losses.integrations._layer_probes import replaced_already
from liger_losses.integrations._linear_logits import linear_logits as unprojected
from liger_losses.integrations._outputs import ModelOutput
from liger_losses.integrations._scoring import (
    DIFFERENTIABLE,
    STATISTICS,
    FusedHeadReport,
    refuse_other_answers,
    score,
)
from liger_losses.integrations._verify import verify_log_probs, verify_loss
from liger_losses.integrations.layers import LayerReport, fuse_layers, unfuse_layers

__all__ = [
    "FusedHeadOutput",
    "FusedHeadReport",
    "FusedLossOutput",
    "LayerReport",
    "fuse_head",
    "fuse_layers",
    "fuse_model",
    "unfuse_head",
    "unfuse_layers",
]

_RECORD = "_liger_fused_head"


@dataclass
class FusedLossOutput(ModelOutput):
    """Answer to `model(..., labels=labels)` of a model that `fuse_model` has fused: a loss, and no logits.

    Attributes:
        loss: Scalar, as the model's own.
        logits: None.
        aux_loss: Scalar load-balancing loss of a mixture of experts; it is part of `loss` too, times its coefficient.
        cache, past_key_values: Keys and values, with `use_cache=True` among the call's arguments.
        hidden_states, attentions, router_logits: None.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    aux_loss: Tensor | None = None
    cache: Any = None
    hidden_states: None = None
    attentions: None = None
    router_logits: None = None

    @property
    def past_key_values(self) -> Any:  # transformers' former name of cache
        return self.cache


@dataclass(frozen=True)
class _Record:
    """What a fused model remembers: its head, and what `forward` was before.

    Kept on the model and read from it at each call, so that a deep copy of the model calls its own parts.
    """

    head: FusedHeadReport
    beneath: Callable[..., Any] | None  # instance forward to call when unfused; None: the class's own
    forward: Callable[..., Any] | None  # instance attribute to put back; None: there was none
    original: Callable[..., Any] | None  # accelerate's _original_forward to put back; None: there was none
    answers_labels: bool = False  # fuse_model: labels alone ask for the fused loss
    logits_in_eval: bool = False
    loss_function: Any = None  # fuse_model: the one that the fused loss stands for


def fuse_head(
    model: Any,  # transformers.PreTrainedModel, or a PeftModel around one
    *,
    temperature: float = 1.0,
    outputs: tuple[str, ...] = ("log_probs",),
    differentiable: tuple[str, ...] | None = None,
    memory_budget: int | None = None,
    logits_dtype: str = "float32",
    strategy: str = "auto",
    active_vocab: float | str | None = None,
    accelerator: Any = None,
    fp32: bool = False,
    mean_logits_everywhere: bool = False,
    verify: bool = True,
) -> FusedHeadReport:
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
        memory_budget, logits_dtype, strategy, active_vocab: As in `liger_losses.linear_logprobs`.
        accelerator: The `accelerate.Accelerator` that has prepared the model already, if one has: its autocast is then
            put around the fused forward as it was around the former one.
        fp32: Run the head in fp32, outside autocast.
        mean_logits_everywhere: Give mean_logits where the label is -100 too. Without a softcap it costs one product
            with the mean of the head; with one, only scored positions have it.
        verify: Hold the log-probabilities of a few random tokens against those of the model's own logits.

    Raises:
        TypeError: `model` is no language model, or is wrapped already; or an option is of another type.
        ValueError: An option is out of range, the head cannot be fused (an encoder-decoder's, an adapter other than
            LoRA and DoRA, quantised other than by bitsandbytes, logits that are not those of a plain head), or what it
            gives is not what the model gives.
        RuntimeError: The model is fused already, or is prepared by an accelerator that was not given.
    """
    model = base_model(model)
    if _record_of(model) is not None:
        raise RuntimeError(f"{type(model).__name__} has a fused head already; call unfuse_head(model) first.")
    for option, flag in (("fp32", fp32), ("mean_logits_everywhere", mean_logits_everywhere), ("verify", verify)):
        check_flag(option, flag)
    for option, fields in (("outputs", outputs), ("differentiable", differentiable)):
        if isinstance(fields, str) or not isinstance(fields, Iterable | None):
            raise TypeError(f"{option}: got {fields!r} of type {type(fields).__name__}, expected a tuple of names")
    unknown = [name for name in outputs if name not in STATISTICS]
    if unknown:
        raise ValueError(f"outputs has {unknown}; expected names among {list(STATISTICS)}.")
    asked = tuple(name for name in STATISTICS if name in outputs or name == "log_probs")
    if differentiable is None:
        differentiable = tuple(name for name in DIFFERENTIABLE if name in asked)
    if wrong := [name for name in differentiable if name not in DIFFERENTIABLE or name not in asked]:
        raise ValueError(f"differentiable has {wrong}; expected names of outputs among {list(DIFFERENTIABLE)}.")
    check_tiling(strategy, memory_budget, logits_dtype, active_vocab)
    if active_vocab is not None and "entropy" in differentiable:
        raise ValueError(f"active_vocab: got {active_vocab!r} with entropy among differentiable, expected None")
    if strategy == "immediate":
        raise ValueError("strategy: got 'immediate', which a head asked for log-probabilities cannot use; expected "
                         "'auto', 'cached', 'recompute' or 'frozen'")  # fmt: skip
    check_temperature("temperature", temperature)
    if "_original_forward" in vars(model) and accelerator is None:
        raise RuntimeError("model is prepared by an accelerator; give accelerator=, or fuse before preparing it.")
    if getattr(model.config, "is_encoder_decoder", False):  # whose labels are its decoder's inputs, and not shifted
        raise ValueError(f"{type(model).__name__} is an encoder-decoder; expected a causal language model.")
    options = head_options(model.config)
    linear = output_head(model)
    head = FusedHeadReport(
        model=type(model).__name__,
        vocabulary=linear.shape[0],
        hidden=linear.shape[1],
        bias=linear.linear.bias is not None,
        trainable=linear.trainable,
        options=options,
        temperature=float(temperature),
        outputs=asked,
        differentiable=differentiable,
        memory_budget=memory_budget,
        logits_dtype=logits_dtype,
        strategy=strategy,
        active_vocab=active_vocab,
        verdict=check_head(model, linear, options),
        adapter=linear.adapter is not None,
        fp32=fp32,
        mean_logits_everywhere=mean_logits_everywhere,
    )
    forward, original = vars(model).get("forward"), vars(model).get("_original_forward")
    record = _Record(head, _without_fused_head(original or forward), forward, original)
    vars(model)[_RECORD] = record
    _set_forward(model, types.MethodType(_fused_forward_of(type(model)), model), accelerator)
    return _verified(model, accelerator, lambda: verify_log_probs(model, temperature)) if verify else head


def fuse_model(
    model: Any,  # transformers.PreTrainedModel, or a PeftModel around one
    *,
    logits_in_eval: bool = False,
    memory_budget: int | None = None,
    logits_dtype: str = "float32",
    strategy: str = "auto",
    active_vocab: float | str | None = None,
    accelerator: Any = None,
    verify: bool = True,
) -> FusedHeadReport:
    """Let `model(..., labels=labels)` compute its causal-LM loss without the logits: for `transformers.Trainer`,
    accelerate loops and any other code that reads `.loss`.

    The loss is the model's own: labels shifted here (or `shift_labels` as they are), `ignore_index`, the mean over
    scored tokens or their sum over `num_items_in_batch`, plus the load-balancing loss of a mixture of experts. Whatever
    else the call brings (pictures, positions) goes to the backbone. The answer is a `FusedLossOutput`, whose logits are
    None. Logits, and the rest of the model's own answer, are had by `model(..., labels=labels, return_logits=True)`,
    by `logits_in_eval=True`, and by any call without labels. A batch without a scored token has loss 0, where the
    model's own is NaN. `unfuse_head(model)` undoes it.

    Args:
        model, accelerator: As in `fuse_head`.
        logits_in_eval: In evaluation mode run the model's own forward, for code that reads logits there
            (`compute_metrics`, `preprocess_logits_for_metrics`).
        memory_budget, logits_dtype, strategy, active_vocab: As in `liger_losses.linear_logprobs`.
        verify: Hold the loss of a few random tokens against the model's own.

    Raises:
        TypeError: As `fuse_head`.
        ValueError: As `fuse_head`; or the model's loss is not the one for causal language models.
        RuntimeError: As `fuse_head`.

    Example:
        >>> fuse_model(model)
        >>> Trainer(model, args, train_dataset=dataset).train()
    """
    model = base_model(model)
    for option, flag in (("logits_in_eval", logits_in_eval), ("verify", verify)):
        check_flag(option, flag)
    loss_function = getattr(model, "loss_function", None)
    loss = getattr(loss_function, "__name__", "ForCausalLMLoss")
    if loss != "ForCausalLMLoss":
        raise ValueError(f"{type(model).__name__} computes {loss} of its labels; expected ForCausalLMLoss.")
    head = fuse_head(
        model, memory_budget=memory_budget, logits_dtype=logits_dtype, strategy=strategy,
        active_vocab=active_vocab, accelerator=accelerator, verify=False,
    )  # fmt: skip
    vars(model)[_RECORD] = replace(
        vars(model)[_RECORD], answers_labels=True, logits_in_eval=logits_in_eval, loss_function=loss_function
    )
    return _verified(model, accelerator, lambda: verify_loss(model)) if verify else head


def _verified(model: Any, accelerator: Any, verify: Callable[[], bool]) -> FusedHeadReport:
    """The model's head with the verdict of `verify` written down; the model unfused where that raises."""
    try:
        record: _Record = vars(model)[_RECORD]
        head = replace(record.head, verified=verify())
    except Exception:
        unfuse_head(model, accelerator=accelerator)
        raise
    vars(model)[_RECORD] = replace(record, head=head)
    return head


def unfuse_head(model: Any, *, accelerator: Any = None) -> None:
    """Put back the forward that `fuse_head` found. If the model was prepared in between, its autocast stays around it.

    Raises:
        TypeError: `model` is no language model, or is in a wrapper such as DDP's.
        ValueError: The model has no head fused by `fuse_head`.
        RuntimeError: The model was prepared by an accelerator in between, which was not given.
    """
    model = base_model(model)
    record = _record_of(model)
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


def _record_of(model: nn.Module) -> _Record | None:
    """None for a model that is not fused; one that pickle has brought back has a record, and its class's forward."""
    return vars(model).get(_RECORD) if replaced_already(model) else None


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
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, linear_logits: bool = False, **kwargs: Any) -> Any:
        record: _Record = vars(self)[_RECORD]
        if fused_lm_head or linear_logits or record.answers_labels:
            names = list(inspect.signature(own_forward).parameters)[1:]
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            if fused_lm_head:
                return score(self, record.head, given)
            if linear_logits:
                return unprojected(self, record.head, given)
            if "return_logits" in kwargs:
                asked = kwargs.pop("return_logits")
                check_flag("return_logits", asked)
                del given["return_logits"]
            else:
                asked = record.logits_in_eval and not self.training
            if not asked and (given.get("labels") is not None or given.get("shift_labels") is not None):
                if getattr(self, "loss_function", None) != record.loss_function:
                    raise RuntimeError("model.loss_function was set after fuse_model(model), which computes the one of "
                                       "before; call unfuse_head(model) first.")  # fmt: skip
                instead = "return_logits=True beside it, which gives the model's own answer"
                refuse_other_answers(given, instead, self.config, self.config.get_text_config())
                answer = score(self, record.head, given)
                return FusedLossOutput(loss=answer.loss, aux_loss=answer.aux_loss, cache=answer.cache)
        if record.beneath is not None:
            return record.beneath(*args, **kwargs)
        return own_forward(self, *args, **kwargs)

    return forward
