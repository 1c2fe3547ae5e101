"""The core needs no framework: each of its modules can be imported where the import of a framework is an error."""

import subprocess
import sys
from pathlib import Path

import hvdtrain

FORBIDDEN = ("torch", "torchvision", "tensorflow", "keras", "horovod", "mpi4py", "lightning", "pytorch_lightning")
ADAPTERS = ("torch", "tensorflow", "lightning", "keras")
HOUSE = Path(hvdtrain.__file__).parent
IMPORT = """
import importlib, sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split(","):
            raise ImportError(f"forbidden {name}")

sys.meta_path.insert(0, Forbidden())
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        print(name, error)
"""


def core() -> list[str]:
    """Every module outside the adapters; build/sources is Horovod's."""
    paths = (path.relative_to(HOUSE.parent).with_suffix("") for path in HOUSE.rglob("*.py"))
    paths = (path for path in paths if path.parts[1] not in ADAPTERS)
    ours = (path for path in paths if "sources" not in path.parts)
    names = sorted(".".join(path.parts).removesuffix(".__init__") for path in ours)
    return [name for name in names if name != "hvdtrain.__main__"]


def refused(*modules: str) -> list[str]:
    argv = [sys.executable, "-c", IMPORT, ",".join(FORBIDDEN), *modules]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_core_imports_no_framework_and_an_adapter_its_own_with_the_loop():
    assert {
        "hvdtrain.core.recipe",
        "hvdtrain.datasets.imagenet",
        "hvdtrain.tools.build",
        "hvdtrain.tools.build.prove",
    } <= set(core())
    adapters = [f"hvdtrain.{name}{part}" for name in ("torch", "tensorflow") for part in ("", ".__main__", ".trainer")]
    assert refused(*core(), *adapters) == [
        "hvdtrain.torch.trainer forbidden torch",
        "hvdtrain.tensorflow.trainer forbidden tensorflow",
    ]
