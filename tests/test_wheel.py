"""The wheel: what is in it, and that it works with torch alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import liger_losses

pytest.importorskip("build")

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "liger_losses"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves build/ and an egg-info where it works."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(PACKAGE, source / "liger_losses", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("benchmarks", "examples", "tests"):  # packages that must not get in
        (source / name).mkdir()
        (source / name / "__init__.py").touch()
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    (found,) = out.glob("*.whl")
    return found


def test_contents(wheel: Path) -> None:
    assert wheel.name == f"liger_losses-{liger_losses.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"liger_losses-{liger_losses.__version__}.dist-info"
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        metadata = archive.read(f"{info}/METADATA").decode()
    kept = {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.suffix in (".py", ".json") or path.name == "py.typed"
    }
    assert {name for name in names if not name.startswith(info)} == kept
    assert f"{info}/licenses/LICENSE" in names
    assert "liger-losses = liger_losses.cli.__main__:main" in entry_points
    needed = {line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line}
    assert {re.split(r"[ >=;:]+", line)[1] for line in needed} == {"torch", "triton"}


SMOKE = """
import sys

sys.meta_path.insert(0, type("Absent", (), {"find_spec": staticmethod(
    lambda name, *rest: (_ for _ in ()).throw(ModuleNotFoundError(name))
    if name.partition(".")[0] in ("triton", "trl", "transformers", "peft", "datasets", "accelerate", "rich", "matplotlib")
    else None)}))
import torch
import liger_losses
from liger_losses.cli.__main__ import main

assert "source" not in liger_losses.__file__ and liger_losses.__file__.startswith(sys.argv[1]), liger_losses.__file__
hidden, weight = torch.randn(4, 6, 8, requires_grad=True), torch.randn(33, 8, requires_grad=True)
target = torch.randint(33, (4, 6))
known = {"ref_chosen_logps": torch.zeros(2), "ref_rejected_logps": torch.zeros(2)}
loss, _ = liger_losses.LigerFusedLinearDPOLoss()(weight, hidden, target, **known)
loss.backward()
assert torch.isfinite(weight.grad).all()
assert main(["plan", "llama-3.1-8b", "--json"]) == 0
assert main(["plan", "llama-3.1-8b"]) == 2
sys.exit(main(["doctor", "--device", "cpu"]))
"""


@pytest.mark.slow
def test_works_with_torch_alone(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", SMOKE, str(tmp_path)]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert "every self-test passed" in run.stdout
    assert "pip install 'liger-losses[cli]'" in run.stderr
