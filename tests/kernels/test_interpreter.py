"""The Triton kernels themselves, without a GPU: this folder's tests again, under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import INTERPRETED

HERE = Path(__file__).resolve().parent


FILES = (
    "tile_statistics", "tile_gradient", "bernoulli_tile", "divergence_tile", "scaled_cast", "norms", "gated_activation",
    "rotary", "active_columns", "merge_shards", "strided",
)  # fmt: skip


@pytest.mark.skipif(INTERPRETED, reason="is the session that the test below starts")
@pytest.mark.parametrize("name", FILES)
def test_the_kernels_under_the_interpreter(name: str) -> None:
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu",
         f"tests/kernels/test_{name}.py"],
        cwd=HERE.parent.parent, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-1000:]
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout
