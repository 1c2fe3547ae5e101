"""Each folder imports from those below it alone; the contract in setup.cfg sees where one does not."""

import ast
import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from paths import REPOSITORY

import hvdtrain

LINT = Path(sys.executable).with_name("lint-imports")
pytestmark = pytest.mark.skipif(not LINT.exists(), reason="needs import-linter: pip install -e '.[test]'")
CIRCLE = "datasets/index.py", "from hvdtrain.datasets.imagenet import load"
UNTRUE = {  # a module, a line that it must not have, and what the contract prints of it
    "core on run": ("core/plan.py", "import hvdtrain.run.loop", "hvdtrain.run.loop"),
    "torch on TensorFlow": ("torch/trainer.py", "import hvdtrain.tensorflow.trainer", "hvdtrain.tensorflow.trainer"),
    "an adapter on a tool": ("keras/program.py", "import hvdtrain.tools.bench.measure", "hvdtrain.tools.bench.measure"),
    "a clock in core": ("core/plan.py", "from time import monotonic", "time"),
    "a framework by text": ("core/flags.py", "from importlib import import_module as load", "importlib"),
    "a framework": ("core/progress.py", "def load():\n    import torch", "torch"),
}
MODULES, LINES, OF_A_CLASS = 16, 400, 150
UPWARD = "engines/registry.py"
"""The table of the names that must point upward."""


def contract(package: Path) -> subprocess.CompletedProcess:
    environ = {**os.environ, "PYTHONPATH": str(package.parent)}
    command = [LINT, "--config", REPOSITORY / "setup.cfg", "--no-cache"]
    return subprocess.run(command, cwd=package.parent, env=environ, capture_output=True, text=True, check=False)


def test_each_layer_imports_from_those_below_it():
    done = contract(Path(hvdtrain.__file__).parent)
    assert done.returncode == 0, done.stdout
    assert ", 0 broken" in done.stdout


def test_what_is_untrue_is_named(tmp_path):
    package = tmp_path / "hvdtrain"
    shutil.copytree(Path(hvdtrain.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    for file, line, *_ in (*UNTRUE.values(), CIRCLE):
        with (package / file).open("a") as module:
            module.write(f"\n{line}\n")
    done = contract(package)
    assert done.returncode == 1, done.stdout
    assert "- .index -> .imagenet" in done.stdout  # the circle
    for file, _, what in UNTRUE.values():
        assert f"hvdtrain.{file.removesuffix('.py').replace('/', '.')} -> {what} " in done.stdout


def named_above(package: Path) -> list[str]:
    """The texts of modules below the frameworks that name a module of a higher layer."""
    config = configparser.ConfigParser()
    config.read(REPOSITORY / "setup.cfg")
    layers = config["importlinter:contract:layers"]["layers"].split("\n")[::-1]
    height = {name: at for at, layer in enumerate(layers) for name in re.findall(r"\w+", layer)}
    return [
        f"{file}: {node.value}"
        for path in sorted(package.rglob("*.py"))
        if (file := str(path.relative_to(package))) != UPWARD
        if (own := height.get(re.split(r"[/.]", file)[0], len(layers))) < height["torch"]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if (named := re.fullmatch(r"hvdtrain\.(\w+)\.[\w.]+(:\w+)?", node.value))
        if height[named[1]] > own
    ]


def test_names_that_point_upward_stand_in_one_table(tmp_path):
    assert named_above(Path(hvdtrain.__file__).parent) == []
    for folder in ("core", "engines"):
        (tmp_path / folder).mkdir()
    (tmp_path / "core/user_code.py").write_text("NETWORKS = 'hvdtrain.tensorflow.networks:inception_v3'\n")
    (tmp_path / UPWARD).write_text("NETWORKS = 'hvdtrain.tensorflow.networks'\n")
    assert named_above(tmp_path) == ["core/user_code.py: hvdtrain.tensorflow.networks:inception_v3"]


def test_no_folder_module_or_class_becomes_too_large():
    package = Path(hvdtrain.__file__).parent
    texts = {path: path.read_text() for path in package.rglob("*.py")}
    folders = {path.parent: len([*path.parent.glob("*.py")]) for path in texts}
    assert {str(path): number for path, number in folders.items() if number > MODULES} == {}
    assert {str(path): lines for path, text in texts.items() if (lines := text.count("\n")) > LINES} == {}
    classes = [each for text in texts.values() for each in ast.walk(ast.parse(text)) if isinstance(each, ast.ClassDef)]
    lines = [(each.name, each.end_lineno - each.lineno + 1) for each in classes]
    assert {name: number for name, number in lines if number > OF_A_CLASS} == {}
