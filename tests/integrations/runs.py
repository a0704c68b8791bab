"""Three steps and an evaluation of a trainer, every number logged, and who called the head."""

from __future__ import annotations

from typing import Any

import pytest
import torch

IGNORED = ("runtime", "per_second", "total_flos", "step_time", "mfu")


def near(model: Any) -> Any:
    """A reference close to the policy: some divergences take exp of the log-ratio, which must not decide the test."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)
    return model


def run(trainer: Any, evaluate: bool = True) -> list[dict[str, float]]:
    """Every number logged in three steps and an evaluation, then the sum of the weights' magnitudes."""
    trainer.train()
    if evaluate:
        trainer.evaluate()
    logs = [
        {k: v for k, v in entry.items() if not any(word in k for word in IGNORED)}
        for entry in trainer.state.log_history
    ]
    return [*logs, {"weights": sum(p.detach().double().abs().sum().item() for p in trainer.model.parameters())}]


def assert_same(
    seen: list[dict[str, float]], expected: list[dict[str, float]], tolerance: float, exceptions: tuple[str, ...] = ()
) -> None:
    assert len(seen) == len(expected)
    losses = 0
    for ours, theirs in zip(seen, expected, strict=True):
        assert ours.keys() == theirs.keys()
        losses += "grad_norm" in theirs
        for name, value in theirs.items():
            if any(name.endswith(exception) for exception in exceptions):
                continue
            if name == "rewards/accuracies" and abs(theirs["rewards/margins"]) < 1e-5:
                continue  # the policy still is the reference: which reward is larger is decided by rounding
            if value is None:  # no sequence to take the mean of
                assert ours[name] is None, name
                continue
            assert ours[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name
    assert losses == 3


def record_head_calls(trainer: Any) -> list[str]:
    """Who has had its head called since, generation apart."""
    calls: list[str] = []
    for role in ("model", "ref_model"):
        model = getattr(trainer, role, None)
        if model is None:
            continue
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        generating: list[bool] = []

        def generate(*args: Any, own: Any = base.generate, generating: list[bool] = generating, **kwargs: Any) -> Any:
            generating.append(True)
            try:
                return own(*args, **kwargs)
            finally:
                generating.pop()

        def called(*_: Any, role: str = role, generating: list[bool] = generating) -> None:
            if not generating:
                calls.append(role)

        base.generate = generate
        base.get_output_embeddings().register_forward_hook(called)
    return calls
