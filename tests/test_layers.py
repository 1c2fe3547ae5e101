"""Each folder imports from those below it alone; the contract in setup.cfg sees where one does not."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from paths import REPOSITORY

import hvdtrain

LINT = Path(sys.executable).with_name("lint-imports")
pytestmark = pytest.mark.skipif(not LINT.exists(), reason="needs import-linter: pip install -e '.[test]'")
HIGHER = {
    "core on run": ("core/plan.py", "hvdtrain.run.loop"),
    "torch on TensorFlow": ("torch/trainer.py", "hvdtrain.tensorflow.trainer"),
    "an adapter on a tool": ("tensorflow/trainer.py", "hvdtrain.tools.bench.measure"),
}


def contract(package: Path) -> subprocess.CompletedProcess:
    environ = {**os.environ, "PYTHONPATH": str(package.parent)}
    command = [LINT, "--config", REPOSITORY / "setup.cfg", "--no-cache"]
    return subprocess.run(command, cwd=package.parent, env=environ, capture_output=True, text=True, check=False)


def test_each_layer_imports_from_those_below_it():
    done = contract(Path(hvdtrain.__file__).parent)
    assert done.returncode == 0, done.stdout
    assert "1 kept, 0 broken" in done.stdout


def test_what_imports_from_above_is_named(tmp_path):
    package = tmp_path / "hvdtrain"
    shutil.copytree(Path(hvdtrain.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    for file, higher in HIGHER.values():
        with (package / file).open("a") as module:
            module.write(f"\nimport {higher}\n")
    done = contract(package)
    assert done.returncode == 1, done.stdout
    for file, higher in HIGHER.values():
        assert f"hvdtrain.{file.removesuffix('.py').replace('/', '.')} -> {higher}" in done.stdout
