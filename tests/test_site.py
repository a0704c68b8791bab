"""The documentation site builds without a warning: links, anchors, references into docstrings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("material")
pytest.importorskip("mkdocstrings")

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_site(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    pages = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.html")}
    assert {path.with_suffix(".html").name for path in (ROOT / "docs").glob("*.md")} <= set(pages)
    # It reads offline: nothing is fetched from elsewhere, though links may lead there.
    for name, page in pages.items():
        fetched = re.findall(r"<(?:script|img|link)[^>]*?(?:src|href)=\"(https?:[^\"]+)\"", page)
        assert fetched == [], name
    assert "dpo_loss" in pages["formulas.html"]
    assert "max(0, 1 - bD)" in pages["formulas.html"]
