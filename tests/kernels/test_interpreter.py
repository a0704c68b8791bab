"""The Triton kernels themselves, without a GPU: this folder's tests again, under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import INTERPRETED

HERE = Path(__file__).resolve().parent


@pytest.mark.skipif(INTERPRETED, reason="is the session that the test below starts")
def test_the_kernels_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu",
         "tests/kernels/test_tile_statistics.py", "tests/kernels/test_tile_gradient.py",
         "tests/kernels/test_scaled_cast.py", "tests/kernels/test_divergence_tile.py"],
        cwd=HERE.parent.parent, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-1000:]
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout
