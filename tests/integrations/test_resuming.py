"""Training that is interrupted, by a checkpoint or by an overflow in fp16, goes on as without the fused head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from liger_losses.integrations.transformers import fuse_head, fuse_model
from liger_losses.integrations.trl import fuse_trainer

from . import distillation_cases, trainer_cases
from .runs import IGNORED
from .tiny import tiny_model

STEPS = 4


def _build(name: str, tokenizer: Any, folder: Path, **options: Any) -> Any:
    settings = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 2, "warmup_steps": 1, **options}
    if name in distillation_cases.TRAINERS:
        return distillation_cases.build(name, folder, settings)
    return trainer_cases.build(name, tokenizer, folder, settings)


def _history(trainer: Any, resume_from: Path | None = None) -> tuple[list[dict[str, float]], list[torch.Tensor]]:
    """What each step logged, and the weights at the end."""
    trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
    logs = [
        {k: v for k, v in entry.items() if not any(word in k for word in (*IGNORED, "num_tokens"))}  # TRL counts anew
        for entry in trainer.state.log_history
        if "grad_norm" in entry
    ]
    return logs, [p.detach().clone() for p in trainer.model.parameters()]


@pytest.mark.parametrize(
    "name", ["gkd", *(pytest.param(n, marks=pytest.mark.slow) for n in ("sft", "kto", "orpo", "cpo", "grpo", "sdft"))]
)
def test_a_freshly_fused_trainer_resumes(name: str, tokenizer: Any, tmp_path: Path) -> None:
    whole = _build(name, tokenizer, tmp_path / "whole")
    fuse_trainer(whole)
    expected, weights = _history(whole)
    assert len(expected) == STEPS
    checkpoint = tmp_path / "whole" / "out" / "checkpoint-2"
    assert checkpoint.is_dir()
    resumed = _build(name, tokenizer, tmp_path / "resumed")
    fuse_trainer(resumed)
    seen, seen_weights = _history(resumed, checkpoint)
    assert resumed.state.global_step == STEPS
    for ours, theirs in zip(seen[-2:], expected[-2:], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6)
    for ours_, theirs_ in zip(seen_weights, weights, strict=True):
        torch.testing.assert_close(ours_, theirs_)


def _of_model(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=labels).loss


def _of_fused_head(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=labels, fused_lm_head=True).loss


@pytest.mark.parametrize(
    ("fuse", "loss_of"), [(fuse_model, _of_model), (fuse_head, _of_fused_head)], ids=["fuse_model", "fuse_head"]
)
def test_an_overflow_in_fp16_is_a_skipped_step(
    fuse: Callable[[Any], Any], loss_of: Callable[..., torch.Tensor]
) -> None:
    runs = []
    for fused in (False, True):
        model = tiny_model("llama_tied")
        if fused:
            fuse(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        # The first scale overflows fp16 anywhere; one step back it is an ordinary one.
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60, backoff_factor=2.0**-50, growth_interval=1000)
        generator = torch.Generator().manual_seed(0)
        seen: list[tuple[float, float, float]] = []
        for _ in range(4):
            ids = torch.randint(3, 200, (3, 12), generator=generator)
            labels = ids.clone()
            labels[:, :4] = -100
            before = sum(p.detach().double().abs().sum().item() for p in model.parameters())
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_of(model, ids, labels) if fused else _of_model(model, ids, labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            after = sum(p.detach().double().abs().sum().item() for p in model.parameters())
            seen.append((loss.item(), norm, scaler.get_scale()))
            assert (before == after) == (len(seen) == 1), "the first step alone is skipped"
        runs.append(seen)
    native, fused_run = runs
    assert native[0][2] == fused_run[0][2] == 2.0**10
    assert not torch.isfinite(torch.tensor([native[0][1], fused_run[0][1]])).any()
    for ours, theirs in zip(fused_run, native, strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=2e-3)
        assert ours[2] == theirs[2]
    for ours, theirs in zip(fused_run[1:], native[1:], strict=True):
        assert ours[1] == pytest.approx(theirs[1], rel=1e-2)
