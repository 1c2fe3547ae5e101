"""What is imported in place of a library, as a torch.py beside the program, is named before it does harm."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hvdtrain

TORCH, KERAS = ("numpy", "torch", "horovod", "mpi4py"), ("numpy", "tensorflow", "keras", "horovod", "mpi4py")
HIDDEN = {"torch": TORCH, "tensorflow": KERAS, "keras": KERAS, "lightning": (*TORCH, "lightning")}


def started(folder: Path, adapter: str, *argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(f"import hvdtrain.{adapter}\nprint('imported')\n")
    given = {**os.environ, "PYTHONPATH": str(Path(hvdtrain.__file__).parents[1]), **environ}
    command = [sys.executable, *(argv or (str(folder / "train.py"),))]
    return subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("adapter", HIDDEN)
def test_a_file_or_a_package_of_a_librarys_name_is_named(tmp_path, adapter):
    for number, library in enumerate(HIDDEN[adapter]):
        path = tmp_path / (f"{library}.py" if number % 2 else library)
        made = path if number % 2 else path / "__init__.py"
        made.parent.mkdir(exist_ok=True)
        made.write_text("raise SystemExit('it was imported')")
        ended = started(tmp_path, adapter)
        expected = f"ImportError: {path} is imported in place of the library {library}; rename it.\n"
        assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", expected)
        made.unlink()


def test_a_folder_that_hides_nothing_is_no_fault(tmp_path):
    for library in HIDDEN["torch"]:
        (tmp_path / library).mkdir()
    (tmp_path / "lightning.py").touch()  # which PyTorch's adapter does not import
    assert started(tmp_path, "torch").stdout == "imported\n"


def test_a_file_that_the_python_path_puts_first(tmp_path):
    (tmp_path / "torch.py").touch()
    path = f"{tmp_path}:{Path(hvdtrain.__file__).parents[1]}"
    ended = started(tmp_path, "torch", "-m", "hvdtrain.torch", "linear", PYTHONPATH=path)
    assert ended.stderr == f"ImportError: {tmp_path}/torch.py is imported in place of the library torch; rename it.\n"


ABSENT = """
import importlib.util, runpy, sys
found, (_, absent, module) = importlib.util.find_spec, sys.argv
importlib.util.find_spec = lambda name, package=None: None if name == absent else found(name, package)
sys.argv = ["hvdtrain", "linear"]
runpy.run_module(module, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("adapter", "library", "title"),
    [
        ("torch", "torch", "PyTorch"),
        ("tensorflow", "tensorflow", "TensorFlow"),
        ("lightning", "lightning", "Lightning"),
    ],
)
def test_a_framework_that_is_not_installed(tmp_path, adapter, library, title):
    ended = started(tmp_path, adapter, "-c", ABSENT, library, f"hvdtrain.{adapter}")
    remedy = f"install it: {sys.executable} -m pip install 'hvdtrain[{library}]'"
    message = f"EngineUnavailable: hvdtrain.{adapter} needs {title}, which {sys.prefix} has not; {remedy}\n"
    assert (ended.returncode, ended.stderr) == (2, message)
    assert not (tmp_path / "runs").exists()
