"""The documentation site builds without a warning: links, anchors, references into docstrings."""

from __future__ import annotations

import html
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import liger_losses
from liger_losses import functional, kernels, losses

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
    # Whatever is inherited, or made when it is imported, has its entry: a heading and what its docstring says.
    api = pages["api.html"]
    entries = set(re.findall(r'<h\d id="(liger_losses\.[\w.]+)"', api))
    modules = [name for name in liger_losses.__all__ if name.startswith("Liger")]
    wanted = {f"liger_losses.modules.{name}{part}" for name in modules for part in ("", ".forward")}
    wanted |= {f"liger_losses.functional.{name}" for name in vars(functional) if name.startswith("liger_")}
    assert wanted - entries == set()
    for name in modules:
        entry = api.split(f'id="liger_losses.modules.{name}.forward"')[1].split("<h3 id=")[0]
        (parameters,) = re.findall("Parameters:(.*?)Returns:", entry, flags=re.DOTALL)
        for argument in inspect.signature(getattr(liger_losses, name).forward).parameters:
            assert argument == "self" or argument in parameters, (name, argument)


def test_every_public_name_is_in_the_reference() -> None:
    """Names of the package, its losses and layers stand in the API reference or among the formulas, or their module does."""
    pages = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("api.md", "formulas.md"))
    shown = set(re.findall(r"^::: ([\w.]+)$", pages, flags=re.MULTILINE))
    last = {path.rpartition(".")[2] for path in shown}
    assert {"liger_losses.functional", "liger_losses.distributed", "liger_losses.layers"} <= shown
    constants = {name for name in losses.__all__ if name.isupper()}
    wanted = {*liger_losses.__all__, *losses.__all__} - constants - {"__version__", "losses"}
    # Beneath the modules of `liger_losses.layers`, and named by README.
    wanted |= {name for name in kernels.__all__ if name.endswith(("norm", "activation", "rotary"))}
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
