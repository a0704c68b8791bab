"""What a fused model answers, and how: backbone, head operands, `linear_logprobs`."""

from __future__ import annotations

import inspect
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_losses.chunked import ScoredTokens, linear_logprobs
from liger_losses.chunked.placements import gathered
from liger_losses.integrations._answer import FusedHeadOutput, answer_of
from liger_losses.integrations._head import HeadOptions, backbone_of, head_options, output_head

IGNORE_INDEX = -100
# Field of FusedHeadOutput -> statistic of the engine.
STATISTICS = {
    "log_probs": "logprob",
    "entropy": "entropy",
    "log_sum_sq_probs": "log_sum_sq_prob",
    "mean_logits": "mean_logit",
    "is_top1": "is_top1",
}
DIFFERENTIABLE = ("log_probs", "entropy")


@dataclass(frozen=True)
class FusedHeadReport:
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
    active_vocab: float | str | None
    verdict: str  # of check_head
    verified: bool = False  # a few random tokens came out as from the model's own logits
    adapter: bool = False  # LoRA or DoRA on the head
    fp32: bool = False  # products outside autocast, in fp32
    mean_logits_everywhere: bool = False  # also where the label is -100, if the logits are linear in the hidden states

    @property
    def engine(self) -> dict[str, Any]:
        """What a caller of the engine hands on as it was asked for: here, so that none of it is left out anywhere."""
        return {
            "memory_budget": self.memory_budget,
            "logits_dtype": self.logits_dtype,
            "strategy": self.strategy,
            "active_vocab": self.active_vocab,
        }

    def __str__(self) -> str:
        scale, cap = self.options["logit_scale"], self.options["softcap"]
        kind = "gradient-free" if not self.differentiable else "trainable" if self.trainable else "frozen"
        facts = [
            f"{kind} head [{self.vocabulary}, {self.hidden}]",
            *(["bias"] if self.bias else []),
            *(["LoRA"] if self.adapter else []),
            *(["fp32"] if self.fp32 else []),
            *([f"logit scale {scale:g}"] if scale != 1.0 else []),
            *([f"softcap {cap:g}"] if cap is not None else []),
            *([f"temperature {self.temperature:g}"] if self.temperature != 1.0 else []),
        ]
        verdict = self.verdict + ", verified" * self.verified
        return f"{self.model}: {', '.join(facts)} ({verdict}); {', '.join(self.outputs)}"


def score(model: Any, head: FusedHeadReport, inputs: dict[str, Any]) -> FusedHeadOutput:
    """Per-token statistics and loss of the labels among `inputs`, which are those of the model's own forward."""
    labels, shift_labels = inputs.pop("labels", None), inputs.pop("shift_labels", None)
    items = inputs.pop("num_items_in_batch", None)
    ignore_index = inputs.pop("ignore_index", IGNORE_INDEX)
    if "label_smoothing" in inputs:
        raise ValueError("label_smoothing is not computed by the fused head; unfuse it, or use "
                         "liger_losses.LigerFusedLinearCrossEntropyLoss(label_smoothing=...).")  # fmt: skip
    if labels is None and shift_labels is None:
        raise ValueError("fused_lm_head=True needs labels or shift_labels: there are no logits to return without them.")
    inputs = backbone_inputs(model, head, inputs)
    linear = output_head(model)  # per call: FSDP and PEFT replace modules after fusing
    device = linear.linear.weight.device
    target = (labels[:, 1:] if shift_labels is None else shift_labels).to(device)
    # Counting the scored tokens needs the host: started before the backbone, it is known when the head is reached.
    scored = ScoredTokens(target, ignore_index)
    backbone = backbone_of(model)(**inputs)
    hidden = backbone.last_hidden_state.to(device)

    def statistics(hidden: Tensor) -> tuple[Tensor, ...]:
        # Widened before the last position goes: dropout on an adapter then draws what the head's own forward draws.
        hidden, weight, bias = linear.operands(hidden.float() if head.fp32 else hidden)
        hidden = hidden[:, :-1] if shift_labels is None else hidden
        if hidden.shape[:-1] != target.shape:
            raise ValueError(
                f"the backbone gave hidden states for {tuple(hidden.shape[:-1])} tokens and the (shifted) labels "
                f"are {tuple(target.shape)}; expected the same shape."
            )
        if head.fp32:
            weight, bias = weight.float(), None if bias is None else bias.float()
        values = linear_logprobs(
            hidden,
            weight,
            scored,
            bias,
            ignore_index=ignore_index,
            temperature=head.temperature,
            softcap=head.options["softcap"],
            logit_scale=head.options["logit_scale"],
            statistics=tuple(STATISTICS[name] for name in head.outputs),
            differentiable=tuple(STATISTICS[name] for name in head.differentiable),
            **head.engine,
        )
        if head.mean_logits_everywhere and head.options["softcap"] is None:
            values["mean_logit"] = _mean_logits(hidden, weight, bias, head)
        return tuple(values[STATISTICS[name]] for name in head.outputs)

    with torch.autocast(device.type, enabled=False) if head.fp32 else nullcontext():
        fields = dict(zip(head.outputs, linear.call(statistics, hidden), strict=True))
    mask = target != ignore_index
    log_probs = fields["log_probs"]
    count = mask.sum().clamp(min=1) if items is None else items
    # Subtracted from 0, so that a batch in which nothing is scored has the loss 0 and not -0.
    loss = (0.0 - log_probs.sum()) / (count.to(device) if isinstance(count, Tensor) else count)
    aux_loss = None
    if inputs.get("output_router_logits"):
        aux_loss = _load_balancing_loss(model, backbone, inputs.get("attention_mask")).to(device)
        loss = loss + _router_coefficient(model) * aux_loss
    return answer_of(_cache_of(backbone, inputs), loss=loss, label_mask=mask, aux_loss=aux_loss, **fields)


def backbone_inputs(model: Any, head: FusedHeadReport, inputs: dict[str, Any]) -> dict[str, Any]:
    """`inputs` as the backbone takes them; raises for what asks for another answer than the fused head's."""
    if (now := head_options(model.config)) != head.options:
        raise RuntimeError(f"the config of {head.model} says {now} of its logits, and said {head.options} when it was "
                           "fused; unfuse it and fuse it again")  # fmt: skip
    returned = {"return_dict": getattr(model.config, "return_dict", None)}  # the backbone goes by it too
    refuse_other_answers({**returned, **inputs}, "leave fused_lm_head=True out for the model's own answer")
    inputs = {name: value for name, value in inputs.items() if name not in ("logits_to_keep", "return_dict")}
    if _needs_no_cache(inputs):
        inputs["use_cache"] = False
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        inputs.setdefault("output_router_logits", True)
    return inputs


def _needs_no_cache(inputs: dict[str, Any]) -> bool:
    """Whether the config's `use_cache` may be overruled: none was asked for, and no mask depends on there being one.

    Attention masks do where positions come without a mask: transformers then reads off them which tokens were packed
    into one row, but only without a cache, so that a cache lets tokens see those of other sequences.
    """
    if any(inputs.get(name) is not None for name in ("use_cache", "cache", "past_key_values")):
        return False
    return inputs.get("position_ids") is None or inputs.get("attention_mask") is not None


def _cache_of(backbone: Any, inputs: dict[str, Any]) -> Any:
    """The keys and values of the call, for the caller who said that he wants them."""
    if not inputs.get("use_cache"):
        return None
    own = getattr(backbone, "cache", None)
    return getattr(backbone, "past_key_values", None) if own is None else own  # its name until transformers 5.24


def refuse_other_answers(inputs: dict[str, Any], instead: str, *configs: Any) -> None:
    """Raise for what the fused head's answer would have to hold beside what it does, in a call's inputs or a config."""
    keep = inputs.get("logits_to_keep")
    if isinstance(keep, Tensor) or keep:
        raise ValueError(f"logits_to_keep: got {keep!r:.60} for an answer that has no logits; expected labels of -100 "
                         f"at the other positions, or {instead}")  # fmt: skip
    for name, wanted in (("output_hidden_states", True), ("output_attentions", True), ("return_dict", False)):
        given = inputs.get(name)
        sources = [] if given is None else [(name, given)]
        sources = sources or [(f"config.{name}", getattr(config, name, None)) for config in configs]
        for source, value in sources:
            if value is not None and bool(value) is wanted:
                raise ValueError(f"{source}: got {value!r}, which the fused answer does not follow; expected "
                                 f"{not wanted}, or {instead}")  # fmt: skip


@torch.no_grad()
def _mean_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, head: FusedHeadReport) -> Tensor:
    """Mean over the vocabulary of the logits at every position: linear in the head, so one product with its mean."""
    # Of a weight that is spread over ranks, its sum alone is gathered.
    mean = hidden.float() @ (gathered(weight.sum(dim=0, dtype=torch.float32)) / weight.shape[0])
    if bias is not None:
        mean = mean + gathered(bias.float().sum()) / bias.shape[0]
    return mean * (head.options["logit_scale"] / head.temperature)


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
    return value if isinstance(value, Tensor) else torch.tensor(float(value), device="cpu")


def _router_coefficient(model: Any) -> float:
    """Weight of the load-balancing loss in the model's own loss; 0 where neither model nor config declares one."""
    text = model.config.get_text_config()
    return float(getattr(model, "router_aux_loss_coef", getattr(text, "router_aux_loss_coef", 0.0)))
