"""The examples run from a clean folder, few steps each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[2]


def _run(script: str, folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": ""}
    command = [sys.executable, str(ROOT / "examples" / script), "--warm-up", "6", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_dpo_trl(tmp_path: Path) -> None:
    # 61 steps are logged every second one: the last is left over for the summary.
    seen = _run("dpo_trl.py", tmp_path, "--steps", "61", "--batch-size", "1", "--held-out", "16", "--output", "out")
    for words in ("constructed from text", "runs on fused heads", "reward margin", "full logits"):
        assert words in seen
    assert (tmp_path / "out" / "dpo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_dpo_custom_loop(tmp_path: Path) -> None:
    seen = _run("dpo_custom_loop.py", tmp_path, "--steps", "4")
    assert "constructed from text" in seen
    assert "reward margin" in seen


TINY = ("--student-warm-up", "2", "--steps", "4", "--batch-size", "2", "--length", "48", "--held-out", "1000")


@pytest.mark.slow
def test_distill(tmp_path: Path) -> None:
    seen = _run("distill.py", tmp_path, *TINY, "--prompt", "16", "--output", "out")
    for words in ("student, before", "without a teacher", "off policy", "on policy"):
        assert words in seen
    assert (tmp_path / "out" / "distill.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("tail", ["bucket", "renormalise"])
def test_distill_topk(tmp_path: Path, tail: str) -> None:
    seen = _run("distill_topk.py", tmp_path, *TINY, "--top-k", "8", "--tail", tail, "--output", "out")
    for words in ("teacher on disk", "student, before", "without a teacher", "top 8 from disk"):
        assert words in seen
    assert (tmp_path / "out" / "distill_topk.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "out" / "teacher").glob("*.arrow"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("sft_trl.py", (), ("SFTTrainer", "token accuracy", "TRL's own head")),
        ("sft_trl.py", ("--loss-type", "dft"), ("SFTTrainer",)),
        ("kto_trl.py", (), ("constructed from text", "KTOTrainer", "reward of wanted")),
        ("orpo_simpo_trl.py", (), ("constructed from text", "ORPOTrainer", "with full logits of every position")),
        ("orpo_simpo_trl.py", ("--loss", "simpo"), ("CPOTrainer", "reward margin")),
        ("grpo_trl.py", ("--entropy-coef", "0.01"), ("GRPOTrainer", "reward")),
        ("gkd_trl.py", ("--lmbda", "0.5"), ("GKDTrainer", "teacher    LlamaForCausalLM", "divergence")),
        ("lora_head.py", (), ("LoRA", "those of the model's own loss", "held-out loss")),
    ],
)
def test_trainers(script: str, arguments: tuple[str, ...], words: tuple[str, ...], tmp_path: Path) -> None:
    seen = _run(script, tmp_path, "--steps", "2", "--batch-size", "4", "--held-out", "8", *arguments)
    for word in words:
        assert word in seen
