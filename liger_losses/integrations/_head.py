"""What has to be known of a model's output head before it can be bypassed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from liger_losses.chunked.placements import gathered, tensor_parallel_dimension
from liger_losses.integrations import _adapters, _quantised
from liger_losses.integrations._outputs import BaseModelOutputWithPast

_PRODUCT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class HeadOptions(TypedDict):
    """The map from `x W^T + b` to the model's logits: `softcap * tanh(logit_scale * z / softcap)`."""

    softcap: float | None
    logit_scale: float


def head_options(config: Any) -> HeadOptions:
    """Read softcap and logit scale from a transformers config.

    Both have a name per family. Softcap: `final_logit_softcapping` (Gemma), `logits_soft_cap` (RecurrentGemma),
    `output_logit_soft_cap` (xLSTM). Multiplier: `logit_scale` (Cohere), `output_multiplier` (Muse),
    `lm_head_multiplier` (Falcon-H1), `logits_scaling` (Granite and MiniCPM3 divide by it, HyperCLOVA X multiplies).
    MPT's config has a `logit_scale` that transformers' model never applies.

    Args:
        config: A model's config; of a composite model the text part is read.
    """
    text = config.get_text_config()
    softcap = scale = None
    for name in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"):
        softcap = getattr(text, name, None) if softcap is None else softcap
    if text.model_type != "mpt":
        for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
            scale = getattr(text, name, None) if scale is None else scale
    scaling = getattr(text, "logits_scaling", None)
    if scale is None and scaling is not None:
        scale = scaling if text.model_type.startswith("hyperclovax") else 1.0 / scaling
    return {"softcap": softcap, "logit_scale": 1.0 if scale is None else float(scale)}


def base_model(model: Any) -> Any:
    """The transformers model inside `torch.compile`'s wrapper and PEFT's.

    Raises:
        TypeError: It is no causal language model of transformers, or is in a wrapper that has to be put on afterwards.
    """
    name = type(model).__name__
    if isinstance(model, type):
        raise TypeError(f"model: got the class {model.__name__}, expected an instance of it")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {model!r:.60} of type {name}, expected a causal language model of transformers")
    # DDP, DataParallel, FSDP1 and engines: some hand on every other attribute of what they wrap.
    if not hasattr(type(model), "get_output_embeddings") and isinstance(getattr(model, "module", None), nn.Module):
        raise TypeError(f"model: got a {name} around a {type(model.module).__name__}, expected the model itself: fuse "
                        "before wrapping")  # fmt: skip
    if isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):  # its calls go through forward of the inside
        return base_model(inner)
    if hasattr(model, "get_base_model"):
        adapted: Any = model
        return base_model(adapted.get_base_model())
    if not (hasattr(model, "get_output_embeddings") and hasattr(getattr(model, "config", None), "get_text_config")):
        raise TypeError(f"model: got a {name}, expected a causal language model of transformers, or a PeftModel of one")
    return model


def backbone_of(model: Any) -> Any:
    """The module that makes the last hidden states, with every input that the model takes (a vision tower's too).

    Raises:
        ValueError: The model has no backbone apart from itself.
    """
    # Llama 4's text model names a prefix that is not its own attribute, and base_model falls back to the model.
    backbone = model.base_model if model.base_model is not model else getattr(model, "model", None)
    if backbone is None:
        raise ValueError(f"{type(model).__name__} has no backbone apart from itself: base_model is the model.")
    return backbone


@dataclass(frozen=True)
class OutputHead:
    """A plain linear layer, and the LoRA layer around it if there is one."""

    linear: nn.Linear
    adapter: Any = None  # peft.tuners.lora.Linear

    @property
    def shape(self) -> tuple[int, int]:
        """`(V, H)` of the whole weight, of which a packed one says nothing and a partitioned one keeps a note."""
        if _quantised.is_quantised(self.linear):
            return self.linear.out_features, self.linear.in_features
        weight = self.linear.weight
        vocabulary, hidden = getattr(weight, "ds_shape", weight.shape)
        return vocabulary, hidden

    def weight(self, dtype: torch.dtype) -> Tensor:
        """`W` as one plain tensor, in its own dtype; a quantised one in `dtype`."""
        if _quantised.is_quantised(self.linear):
            return _quantised.unpacked(self.linear, dtype)
        return gathered(self.linear.weight)

    @property
    def trainable(self) -> bool:
        """Whether anything that the head's product reads takes a gradient."""
        layer = self.linear if self.adapter is None else self.adapter
        return any(parameter.requires_grad for parameter in layer.parameters())

    def call(self, function: Callable[[Tensor], tuple[Tensor, ...]], hidden: Tensor) -> tuple[Tensor, ...]:
        """`function(hidden)`, which reads the head's parameters.

        Where DeepSpeed ZeRO-3 has partitioned them, as the layer's own forward: its hooks then gather them before, free
        them after, and do both again around the backward of what is returned.
        """
        if not hasattr(self.linear.weight, "ds_id"):
            return function(hidden)
        shadowed = vars(self.linear).get("forward")
        vars(self.linear)["forward"] = function
        try:
            return self.linear(hidden)
        finally:
            del vars(self.linear)["forward"]
            if shadowed is not None:
                vars(self.linear)["forward"] = shadowed

    def operands(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """`(x, W, b)` whose `x W^T + b` is what the head makes of `hidden`: with LoRA, wider by the adapters' ranks."""
        if tensor_parallel_dimension(self.linear.weight) is not None:  # the engine's own to deal with
            spread = hidden, self.linear.weight, self.linear.bias
            return spread if self.adapter is None else _adapters.widen(self.adapter, *spread)
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        weight = self.weight(dtype)
        bias = None if self.linear.bias is None else gathered(self.linear.bias)
        return (hidden, weight, bias) if self.adapter is None else _adapters.widen(self.adapter, hidden, weight, bias)


def output_head(model: Any) -> OutputHead:
    """The head of `model` as the linear layer that it has to be, with LoRA or DoRA on it or not.

    A head kept whole by PEFT's `modules_to_save` is resolved to the copy that the model's own forward would call.

    Raises:
        ValueError: The head is missing, carries an adapter of another kind, is quantised in another way than by
            bitsandbytes, or keeps its weight elsewhere: its weight alone would not give the model's logits, or would
            leave the adapter untrained.
    """
    head = model.get_output_embeddings()
    name = type(model).__name__
    if head is None:
        raise ValueError(
            f"{name} has no output head: get_output_embeddings() is None. Expected a causal language model."
        )
    while hasattr(head, "modules_to_save") and hasattr(head, "original_module"):
        active = [] if head.disable_adapters else head.active_adapters
        head = head.modules_to_save[active[0]] if active else head.original_module
    adapter = head if hasattr(head, "base_layer") else None
    if adapter is not None:
        _adapters.check(adapter, name)
        head = adapter.base_layer
    kind = type(head)
    if not isinstance(head, nn.Linear):
        raise ValueError(
            f"the head of {name} is a {kind.__module__}.{kind.__qualname__}: only the weight and bias of a "
            "torch.nn.Linear are known to give the logits."
        )
    weight = head.weight
    if adapter is not None and hasattr(weight, "ds_id"):
        raise ValueError(
            f"the head of {name} is partitioned by DeepSpeed ZeRO-3 and has an adapter, whose parts are gathered one "
            "by one; take the head out of the adapter's target_modules, or use FSDP2, or ZeRO stage 2 or lower."
        )
    if weight.is_meta:
        raise ValueError(f"the head of {name} has its weight on the meta device (offloaded or not loaded yet).")
    # Quantised layers subclass nn.Linear; what betrays them is the weight: an integer or 8-bit dtype, or its own class.
    plain = type(weight.data) in (Tensor, DTensor)
    if (weight.dtype not in _PRODUCT_DTYPES or not plain) and not _quantised.is_quantised(head):
        raise ValueError(
            f"the head of {name} is a {kind.__qualname__} with a {type(weight.data).__name__} of {weight.dtype}: of "
            "quantised heads only those of bitsandbytes are supported, on the device that they are quantised on; keep "
            "the head in 16 or 32 bits."
        )
    return OutputHead(head, adapter)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients; afterwards each module has its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


class _StubOutput(BaseModelOutputWithPast):
    """Last hidden states, and None for whatever else a model may look for in its backbone's output."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def check_head(model: Any, head: OutputHead, options: HeadOptions) -> str:
    """Hold `options` against the logits that the model's own forward makes of three random hidden states.

    The backbone is replaced by those hidden states for the one call, so the cost is three rows of the head. It catches
    the models whose config says nothing of what happens after the head: a learned scale per token, a masked or cut
    vocabulary, a projection before the head.

    Returns:
        "checked", or "not checked (why)" where the forward cannot be run so.

    Raises:
        ValueError: The logits differ.
    """
    backbone = backbone_of(model)
    if isinstance(head.linear.weight, DTensor):
        return "not checked (sharded weight)"
    if hasattr(head.linear.weight, "ds_id"):
        return "not checked (partitioned weight)"
    weight = head.weight(model.dtype)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 3, head.shape[1], generator=generator, device="cpu").to(weight.device)
    with evaluating(model), torch.autocast(weight.device.type, enabled=False):
        # A spread of 10 is far enough into every softcap in use to tell it from none.
        raw = hidden @ weight.float().T
        hidden = (hidden * (10.0 / raw.std().clamp(min=1e-6))).to(weight.dtype)
        expected = nn.functional.linear(*head.operands(hidden)).float() * options["logit_scale"]
        if (cap := options["softcap"]) is not None:
            expected = cap * torch.tanh(expected / cap)
        shadowed = vars(backbone).get("forward")
        calls: list[int] = []

        def stub(*args: Any, **kwargs: Any) -> _StubOutput:
            calls.append(1)
            return _StubOutput(last_hidden_state=hidden)

        vars(backbone)["forward"] = stub
        try:
            ids = torch.zeros(1, 3, dtype=torch.long, device=weight.device)
            seen = type(model).forward(model, input_ids=ids).logits.float()
        except Exception as error:  # a forward that needs more than ids: no verdict, and the report says so
            return f"not checked ({type(error).__name__})"
        finally:
            del vars(backbone)["forward"]
            if shadowed is not None:
                vars(backbone)["forward"] = shadowed
        if not calls:  # OPT's model calls the decoder inside its backbone
            return "not checked (the model does not call its backbone)"
        # Half precision rounds the model's logits at 2^-8; a wrong scale or cap moves them by far more than 2 %.
        if seen.shape != expected.shape or (seen - expected).abs().max() > 0.02 * expected.abs().max():
            raise ValueError(
                f"the logits of {type(model).__name__} are not softcap * tanh(logit_scale * (x W^T + b) / softcap) "
                f"with softcap={options['softcap']} and logit_scale={options['logit_scale']} as read from its config, "
                "so its head cannot be fused."
            )
    return "checked"
