"""A probe of a fused model: on a few random tokens it must give what the model's own forward gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_losses.integrations._head import evaluating
from liger_losses.integrations._scoring import IGNORE_INDEX

# Of the logits' size: far above the rounding of bf16 logits and TF32 products, far below what a wrong head does.
_TOLERANCE = 2e-2


def verify_log_probs(model: Any, temperature: float) -> bool:
    """Compare the fused log-probabilities with those of the model's own logits, in evaluation mode.

    A model whose own forward wants more than token ids cannot be asked: False.

    Args:
        model: Fused by `fuse_head`, possibly prepared by accelerate.
        temperature: That of the fused head.

    Raises:
        ValueError: They differ.
    """

    def compare(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = model(input_ids=ids).logits.float() / temperature
        own = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return own, model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs, logits.abs().amax()

    return _verify(model, compare, "log-probabilities")


def verify_loss(model: Any) -> bool:
    """Compare the loss of a model fused by `fuse_model` with its own, as `verify_log_probs` does.

    Of all tokens, and of a few alone: what another target makes of each of them is lost in their mean.

    Raises:
        ValueError: They differ.
    """

    def compare(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        asked = [ids]
        for row, token in ((0, 3), (1, 5), (1, 8)):
            asked.append(torch.full_like(ids, IGNORE_INDEX))
            asked[-1][row, token] = ids[row, token]
        own = [model(input_ids=ids, labels=labels, return_logits=True) for labels in asked]
        fused = [model(input_ids=ids, labels=labels, return_logits=False).loss for labels in asked]
        return torch.stack([one.loss for one in own]), torch.stack(fused), own[0].logits.float().abs().amax()

    return _verify(model, compare, "loss")


def _verify(model: Any, compare: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]], what: str) -> bool:
    ids = _random_tokens(model)
    with evaluating(model):
        try:
            model(input_ids=ids)
        except Exception:  # needs more than token ids: nothing to compare with
            return False
        own, fused, size = compare(ids)
    difference = float((own.float() - fused.float()).abs().amax())
    allowed = _TOLERANCE * float(size) + 1e-5
    if not difference <= allowed:
        raise ValueError(
            f"{type(model).__name__}: the fused {what} of {ids.numel()} random tokens differ from the model's own by "
            f"{difference:.3g} (at most {allowed:.3g} is rounding), so training would optimise something else. "
            "verify=False skips this check."
        )
    return True


def _random_tokens(model: Any) -> Tensor:
    """`[2, 9]` token ids, none of which the config gives a meaning (padding, a picture's place)."""
    config = model.config
    special = {value for part in (config, config.get_text_config()) for name, value in part.to_dict().items()
               if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)}  # fmt: skip
    plain = [token for token in range(min(config.get_text_config().vocab_size, 4096)) if token not in special]
    generator = torch.Generator().manual_seed(0)
    picked = torch.randint(len(plain), (2, 9), generator=generator, device="cpu")
    return torch.tensor(plain, device="cpu")[picked].to(model.get_input_embeddings().weight.device)
