"""The arrangement of the repository: import arrows, names, version, file sizes, what may be in git."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from importlinter.cli import lint_imports

import liger_losses

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "liger_losses"
MAX_LINES = 500


def _modules_after(statements: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after `statements`."""
    code = f"{statements}\nimport json, sys\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout.splitlines()[-1]))


def _tracked_files() -> list[Path]:
    try:
        run = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("git is not installed")
    if run.returncode != 0:
        pytest.skip("not a git checkout")
    # A file deleted but not yet committed is still listed.
    return [path for name in run.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_import_arrows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    status = lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True, no_logo=True)
    assert status == 0, capsys.readouterr().out


def test_importing_the_package_imports_no_heavy_library() -> None:
    heavy = {"torch", "triton", "trl", "transformers", "datasets", "peft", "accelerate"}
    assert not _modules_after("import liger_losses") & heavy


def test_using_every_public_name_imports_no_trainer_library() -> None:
    loaded = _modules_after("from liger_losses import *")
    assert "torch" in loaded
    assert not loaded & {"trl", "transformers", "datasets", "peft", "accelerate"}


def test_public_names_resolve_and_are_listed() -> None:
    for name in liger_losses.__all__:
        assert getattr(liger_losses, name) is not None
        assert name in dir(liger_losses)
    assert set(liger_losses._HOMES) == set(liger_losses.__all__) - {"__version__"}


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = liger_losses.no_such_name


@pytest.mark.parametrize("name", ["kernels", "chunked"])
def test_no_directory_at_the_root_shadows_a_package(name: str) -> None:
    # `kernels` at the root would be imported in place of Hugging Face's package of that name by anyone running Python
    # here, and then transformers builds no model.
    assert not (ROOT / name).exists()


def test_version_has_one_source() -> None:
    try:
        installed = metadata.version("liger-losses")
    except metadata.PackageNotFoundError:
        pytest.skip("liger-losses is not installed in this environment")
    assert liger_losses.__version__ == installed


def test_changelog_has_the_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[{re.escape(liger_losses.__version__)}\]", changelog, re.MULTILINE)


def test_no_machine_path_in_git() -> None:
    # An absolute path into somebody's machine; written in pieces so that this file does not contain one itself.
    roots = ["work", "root", "tmp/wt", r"home/\w+", r"Users/\w+"]
    pattern = re.compile(r"(?<![\w./~<>{}$-])/(?:" + "|".join(roots) + ")/")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in _tracked_files()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1)
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)


def test_nothing_else_lies_about() -> None:
    """Scratch that was added by mistake shows at the top."""
    known = {".ci", ".gitignore", ".pre-commit-config.yaml", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in",
             "Makefile", "README.md", "benchmarks", "constraints.txt", "docs", "examples", "liger_losses", "mkdocs.yml",
             "pyproject.toml", "tests"}  # fmt: skip
    assert {path.relative_to(ROOT).parts[0] for path in _tracked_files()} <= known


def test_library_files_are_short() -> None:
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    assert sizes
    long = {str(path.relative_to(ROOT)): size for path, size in sizes.items() if size > MAX_LINES}
    assert not long


def test_uninitialised_memory_is_poisoned() -> None:
    assert torch.empty(3).isnan().all()
    assert torch.ones(3, dtype=torch.bfloat16).new_empty(2, 2).isnan().all()
    assert (torch.empty(3, dtype=torch.int64) == torch.iinfo(torch.int64).max).all()


@pytest.mark.unpoisoned
def test_poison_can_be_opted_out_of() -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
