"""`active_vocab` on its way from `fuse_head`, `fuse_model` and `fuse_trainer` to the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from liger_losses import record_active_vocabulary
from liger_losses.chunked import active
from liger_losses.integrations.transformers import fuse_head, fuse_model, unfuse_head
from liger_losses.integrations.trl import fuse_trainer

from .distillation_cases import SAMPLED, TOP, build
from .test_trl import _trainer
from .tiny import tiny_model


def test_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active, "CROSSOVER", 1.0)
    model = tiny_model()
    ids = torch.randint(3, 200, (3, 12), generator=torch.Generator().manual_seed(1))

    def gradients(rule: float | None) -> dict[str, torch.Tensor]:
        fuse_model(model, active_vocab=rule)
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        unfuse_head(model)
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    exact = gradients(None)
    with record_active_vocabulary() as report:
        same = gradients(0.0)
    assert (report.tiles, report.whole_tiles) == (1, 0)
    for name, gradient in exact.items():
        torch.testing.assert_close(same[name], gradient, rtol=1e-4, atol=1e-6)
    with record_active_vocabulary() as report:
        gradients(0.1)
    assert report.share < 0.7


def test_of_a_trainer(tokenizer: Any, tmp_path: Path) -> None:
    trainer = _trainer(tokenizer, tmp_path, {})
    report = fuse_trainer(trainer, active_vocab="auto")
    assert report.policy.active_vocab == "auto"
    assert fuse_trainer(trainer, active_vocab="auto") is report
    with record_active_vocabulary() as left_out:
        trainer.train()
    assert left_out.tiles > 0  # of the policy; the reference has no gradient
    assert left_out.tiles <= trainer.state.max_steps * trainer.args.gradient_accumulation_steps


@pytest.mark.parametrize(
    ("name", "options"),
    [("distillation", {}), ("gkd", {"beta": 0.3}), ("sdft", SAMPLED), ("sdpo", TOP)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_of_a_distillation(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    trainer = build(name, tmp_path, options)
    fuse_trainer(trainer, active_vocab="auto")
    with record_active_vocabulary() as left_out:
        trainer.train()
    assert 0 < left_out.tiles <= trainer.state.max_steps


def test_refused() -> None:
    for rule, message in (("on", "active_vocab: got 'on'"), (2.0, "active_vocab: got 2.0")):
        with pytest.raises(ValueError, match=message):
            fuse_head(tiny_model(), active_vocab=rule)
    with pytest.raises(ValueError, match="active_vocab: got 'auto' with entropy among differentiable"):
        fuse_head(tiny_model(), outputs=("entropy",), active_vocab="auto")
    assert fuse_head(tiny_model(), outputs=("entropy",), differentiable=("log_probs",), active_vocab="auto").verified
