"""The documentation site builds without a warning: links, anchors, references into docstrings."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import liger_losses
from liger_losses import losses

pytest.importorskip("material")
pytest.importorskip("mkdocstrings")

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = 100


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
    # Code does not scroll at 1280 pixels (docs/assets/site.css says how wide that is).
    blocks = {name: re.findall(r"<pre[^>]*>(.*?)</pre>", page, flags=re.DOTALL) for name, page in pages.items()}
    assert sum(map(len, blocks.values())) > 100
    text = {name: html.unescape(re.sub(r"<[^>]+>", "", "\n".join(found))) for name, found in blocks.items()}
    wide = [(name, line) for name, lines in text.items() for line in lines.splitlines() if len(line) > COLUMNS]
    assert wide == []
    assert "dpo_loss" in pages["formulas.html"]
    assert "max(0, 1 - bD)" in pages["formulas.html"]


def test_every_public_name_is_in_the_reference() -> None:
    """Names of the package, its losses and layers stand in the API reference or among the formulas, or their module does."""
    pages = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("api.md", "formulas.md"))
    shown = set(re.findall(r"^::: ([\w.]+)$", pages, flags=re.MULTILINE))
    last = {path.rpartition(".")[2] for path in shown}
    assert {"liger_losses.functional", "liger_losses.distributed", "liger_losses.layers"} <= shown
    constants = {name for name in losses.__all__ if name.isupper()}
    wanted = {*liger_losses.__all__, *losses.__all__} - constants - {"__version__", "losses"}
    assert wanted - last == set()


def test_docstrings_have_no_section_that_renders_as_text() -> None:
    """`Args (more):` and `Inputs:` are no sections of a Google docstring: they come out as one long paragraph."""
    pattern = re.compile(r"^ +(?:(?:Args|Returns|Raises) \(|Inputs:)", flags=re.MULTILINE)
    found = [
        str(path.relative_to(ROOT))
        for folder in ("losses", "modules", "integrations", "testing")
        for path in (ROOT / "liger_losses" / folder).glob("*.py")
        if pattern.search(path.read_text(encoding="utf-8"))
    ]
    assert found == []
