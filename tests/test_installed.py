"""What is imported in place of a library, as a torch.py beside the program, is named before it does harm. A wheel holds
every file of the package."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from paths import REPOSITORY

import hvdtrain
from hvdtrain import installed

TORCH, KERAS = ("numpy", "torch", "horovod", "mpi4py"), ("numpy", "tensorflow", "keras", "horovod", "mpi4py")
HIDDEN = {"torch": TORCH, "tensorflow": KERAS, "keras": KERAS, "lightning": (*TORCH, "lightning")}


def started(folder: Path, *argv: object, **environ: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "PYTHONPATH": str(Path(hvdtrain.__file__).parents[1]), **environ}
    return subprocess.run(map(str, argv), cwd=folder, env=given, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("adapter", HIDDEN)
def test_a_file_or_a_package_of_a_librarys_name_is_named(tmp_path, adapter):
    program = tmp_path / "train.py"
    program.write_text(f"import hvdtrain.{adapter}\nprint('imported')\n")
    for number, library in enumerate(HIDDEN[adapter]):
        path = tmp_path / (f"{library}.py" if number % 2 else library)
        made = path if number % 2 else path / "__init__.py"
        made.parent.mkdir(exist_ok=True)
        made.write_text("raise SystemExit('it was imported')")
        ended = started(tmp_path, sys.executable, program)
        expected = f"ImportError: {path} is imported in place of the library {library}; rename it.\n"
        assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", expected)
        made.unlink()


def test_a_folder_that_hides_nothing_is_no_fault(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for library in TORCH:
        (tmp_path / library).mkdir()
    installed.refuse(*TORCH)


def test_a_file_that_the_python_path_puts_first(tmp_path):
    (tmp_path / "torch.py").touch()
    path = f"{tmp_path}:{Path(hvdtrain.__file__).parents[1]}"
    ended = started(tmp_path, sys.executable, "-m", "hvdtrain.torch", "linear", PYTHONPATH=path)
    assert ended.stderr == f"ImportError: {tmp_path}/torch.py is imported in place of the library torch; rename it.\n"


ABSENT = """
import importlib.util, runpy, sys
found, (_, absent, module) = importlib.util.find_spec, sys.argv
importlib.util.find_spec = lambda name, package=None: None if name == absent else found(name, package)
sys.argv = ["hvdtrain", "linear"]
runpy.run_module(module, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("library", "title"), [("torch", "PyTorch"), ("tensorflow", "TensorFlow"), ("lightning", "Lightning")]
)
def test_a_framework_that_is_not_installed(tmp_path, library, title):
    ended = started(tmp_path, *warm.command("hvdtrain", "-c", ABSENT, library, f"hvdtrain.{library}"))
    remedy = f"install it: {sys.executable} -m pip install 'hvdtrain[{library}]'"
    message = f"EngineUnavailable: hvdtrain.{library} needs {title}, which {sys.prefix} has not; {remedy}\n"
    assert (ended.returncode, ended.stderr) == (2, message)
    assert not (tmp_path / "runs").exists()


def files_in(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}


def test_a_wheel_holds_every_file(tmp_path):
    """Templates, recipes, patches, and py.typed, by which a type checker reads the annotations."""
    pytest.importorskip("setuptools", reason="needs setuptools: pip install setuptools")
    build = ("-c", "import setuptools; setuptools.setup()", "--quiet", "build_py", "--build-lib", tmp_path)
    subprocess.run([sys.executable, *map(str, build)], cwd=REPOSITORY, check=True)
    package = files_in(REPOSITORY / "hvdtrain")
    assert Path("py.typed") in package
    assert files_in(tmp_path / "hvdtrain") == package
