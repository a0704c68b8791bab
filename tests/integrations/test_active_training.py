"""Training over an active vocabulary comes out as training does, on the text of the examples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_sft_and_dpo_end_at_the_same_loss(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "active_vocabulary.py"), "--seeds", "1", "--sft-steps", "30",
         "--pairs", "36", "--out", str(out)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(out.read_text())
    for kind, number in (("sft", "training"), ("sft", "held_out"), ("dpo", "loss")):
        (exact,) = result[kind]["exact"]
        for rule in ("auto", "2^-12"):
            (run,) = result[kind][rule]
            assert abs(run[number] - exact[number]) < 0.02, (kind, number, rule)
    # At the same seeds the batches are the same; what is left is the gradients' error, beside that of bf16.
    errors = result["gradients"]
    for name in ("dX", "dW"):
        assert errors["auto"][name] < 1.5 * errors["exact"][name]
    assert errors["auto"]["share"] < 1
