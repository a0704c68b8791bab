"""Tensors of one call of the policy module, and the pieces of a call by name."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from liger_losses.modules import LigerFusedLinearGRPOLoss

ROWS, TOKENS, HIDDEN, REF_HIDDEN, VOCAB = 5, 6, 8, 5, 13
LENGTHS = (6, 3, 5, 0, 4)


@dataclass
class Case:
    hidden: Tensor
    weight: Tensor
    ids: Tensor
    mask: Tensor
    bias: Tensor
    ref_hidden: Tensor
    ref_weight: Tensor
    ref_bias: Tensor
    inputs: dict[str, Tensor]  # by `forward`'s names

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return tuple(t for t in (self.hidden, self.weight, self.bias) if t.requires_grad)

    @property
    def reference(self) -> dict[str, Tensor]:
        return {"ref_input": self.ref_hidden, "ref_weight": self.ref_weight, "ref_bias": self.ref_bias}

    def arguments(self, module: LigerFusedLinearGRPOLoss, *more: str) -> dict[str, Tensor]:
        loss = module.loss
        names = ["advantages", *more]
        names += ["sampling_per_token_logps"] if loss.sampler_mode or loss.off_policy_mask_threshold else []
        names += ["values", "returns"] if loss.vf_coef else []
        names += ["old_values"] if loss.value_clip else []
        head = {
            "_input": self.hidden, "lin_weight": self.weight, "selected_token_ids": self.ids,
            "attention_mask": self.mask, "bias": self.bias,
        }  # fmt: skip
        return head | {n: self.inputs[n] for n in names} | (self.reference if module.use_ref_model else {})


OLD = "old_per_token_logps"
NAMES = {OLD: "old_logprobs", "vllm_is_ratio": "sampling_ratio", "sampling_per_token_logps": "sampling_logprobs",
         "ref_per_token_logps": "ref_logprobs"}  # fmt: skip


def make_case(
    dtype: torch.dtype = torch.float64,
    *,
    lengths: tuple[int, ...] = LENGTHS,
    tokens: int = TOKENS,
    trainable: str = "hidden weight bias",
) -> Case:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    ids = torch.randint(0, VOCAB, (ROWS, tokens), generator=generator)
    mask = (torch.arange(tokens) < torch.tensor(lengths).unsqueeze(1)).long()
    case = Case(
        normal(ROWS, tokens, HIDDEN), normal(VOCAB, HIDDEN), ids, mask, normal(VOCAB),
        normal(ROWS, tokens, REF_HIDDEN), normal(VOCAB, REF_HIDDEN), normal(VOCAB), {},
    )  # fmt: skip
    logprobs = (case.hidden @ case.weight.T + case.bias).double().log_softmax(-1)
    logprobs = logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1).to(torch.promote_types(dtype, torch.float32))
    old = logprobs + 0.3 * normal(ROWS, tokens)
    case.inputs = {
        "advantages": normal(ROWS),
        OLD: old,
        "ref_per_token_logps": logprobs + 0.3 * normal(ROWS, tokens),
        "sampling_per_token_logps": old + 0.4 * normal(ROWS, tokens),
        "vllm_is_ratio": (0.3 * normal(ROWS, tokens)).exp(),
        "values": normal(ROWS, tokens),
        "returns": normal(ROWS, tokens),
        "old_values": normal(ROWS, tokens),
        "num_items_in_batch": torch.tensor(31),
    }
    for name in trainable.split():
        getattr(case, name).requires_grad_()
    return case
