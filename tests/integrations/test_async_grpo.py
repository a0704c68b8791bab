"""AsyncGRPOTrainer with rollouts that are there before: no server, and attention in torch in the place of its kernel."""

from __future__ import annotations

import queue
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("trl")

import datasets
import trl.experimental.async_grpo.packing as packing
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from liger_losses.integrations.trl import fuse_trainer, unfuse_trainer

from .runs import assert_same, record_head_calls, run
from .tiny import tiny_model


class _Rollouts:
    """Samples of a prompt in groups of four, some sharing the beginning of their completions."""

    def __init__(self, groups: int) -> None:
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        generator = np.random.default_rng(0)
        for group in range(groups):
            prompt, common = generator.integers(3, 200, 4), generator.integers(3, 200, 2)
            for i in range(4):
                own = generator.integers(3, 200, 3 + i)
                ids = np.concatenate([prompt, common, own] if i % 2 else [prompt, own])
                mask = (np.arange(len(ids)) >= 4).astype(np.int64)
                self.rollout_buffer.put(
                    RolloutSample(
                        prompt=[], completion=[], input_ids=ids, completion_mask=mask,
                        old_log_probs=np.where(mask, generator.normal(-5.3, 0.2, len(ids)), 0.0).astype(np.float32),
                        advantage=float(generator.normal()), model_version=0, group_id=group, metrics={"reward": i / 4},
                    )
                )  # fmt: skip

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def update_model_version(self, version: int) -> None: ...
    def check_health(self, stale_after_s: float) -> None: ...


class _Nobody:
    """In the place of a server."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, *_: Any,
    softmax_scale: float, causal: bool, **__: Any,
) -> torch.Tensor:  # fmt: skip
    """Attention of each stretch of queries to its stretch of keys, both `[tokens, heads, head_dim]`, ends aligned."""
    assert causal
    outs = []
    for q, k, v in zip(*(x.split(cu.diff().tolist()) for x, cu in ((query, cu_q), (key, cu_k), (value, cu_k)))):  # noqa: B905
        repeats = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(repeats, 1).transpose(0, 1) for x in (k, v))
        seen = torch.ones(len(q), k.shape[1], dtype=torch.bool).tril(k.shape[1] - len(q))
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), k, v, attn_mask=seen, scale=softmax_scale
        )
        outs.append(out.transpose(0, 1))
    return torch.cat(outs)


def _build(tokenizer: Any, folder: Path, **options: Any) -> Any:
    tiny_model().save_pretrained(folder / "model")
    config = AsyncGRPOConfig(
        output_dir=str(folder / "out"), per_device_train_batch_size=4, max_steps=3, learning_rate=1e-3,
        logging_steps=1, report_to="none", bf16=False, use_cpu=True, gradient_checkpointing=False, save_strategy="no",
        disable_tqdm=True, num_generations=4, token_budget=0, dtype="float32", max_staleness=100, **options,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AsyncGRPOTrainer(
            str(folder / "model"),
            args=config,
            train_dataset=datasets.Dataset.from_list([{"prompt": "the import statement"}] * 8),
            processing_class=tokenizer,
            rollout_worker=_Rollouts(groups=8),
            weight_transfer=_Nobody(),
        )


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.8}, pytest.param({"gradient_accumulation_steps": 2, "epsilon": 0.05}, marks=pytest.mark.slow)],
    ids=str,
)
def test_three_steps_equal_trls_own(
    options: dict[str, Any], tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *args: None)  # asks for a GPU's name
    monkeypatch.setattr(async_grpo_trainer, "VLLMClient", lambda *args: _Nobody())
    monkeypatch.setattr(packing, "_flash_attn", lambda: types.SimpleNamespace(flash_attn_varlen_func=_varlen))
    runs = []
    for fused in (False, True):
        trainer = _build(tokenizer, tmp_path / str(fused), **options)
        if fused:
            report = fuse_trainer(trainer)
            assert (report.products_before, report.products_after) == (4, 3)
            assert report.policy.temperature == options.get("temperature", 1.0)
            assert not report.policy.verified  # its attention wants more than token ids
            calls = record_head_calls(trainer)
        logs = run(trainer, evaluate=False)
        runs.append([{k: v for k, v in entry.items() if not k.startswith("perf/")} for entry in logs])
    assert not calls
    assert {"entropy", "ratio", "clip_ratio/low_mean"} <= runs[0][0].keys()
    assert_same(runs[1], runs[0], 1e-5)
    unfuse_trainer(trainer)
