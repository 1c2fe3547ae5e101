"""Horovod's own tests and examples, from its sources, on the Horovod that is installed beside this Python.

`python tests/support/upstream.py PATH [--only WORD] [--gloo|--mpi] [--tests] [--examples]`, where PATH is a checkout
or an archive of Horovod's repository at v0.28.1; its sdist has no tests. It wants mock, parameterized, tensorboard.
Data sets are made up in a temporary HOME. TF_USE_LEGACY_KERAS=1 with tf_keras tries Keras 2.
Exit code 1 where something fails that upstream_failures.txt does not name, or passes that it names.
"""

import argparse
import atexit
import builtins
import contextlib
import fnmatch
import hashlib
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

KNOWN = Path(__file__).with_name("upstream_failures.txt")
LIMIT = 900  # seconds a test file or an example may take before it is ended
SINGLE = ["run", "util", "service", "task_service", "elastic_discovery", "elastic_driver", "torch_elastic"]
EXAMPLES = ("adasum", "pytorch", "tensorflow2", "keras", "tensorflow", "elastic/pytorch", "elastic/tensorflow*")
FOREIGN = ("mxnet", "xla", "lightning", "data_service", "word2vec")  # not in our build, or in need of a download
ELASTIC = ("--min-np", "2", "--max-np", "2", "-H", "localhost:2,127.0.0.1:2")
FLAGS = (  # which an example gets where it has them
    "--epochs 1,--num-iters 1,--num-batches-per-iter 1,--num-warmup-batches 1,"
    "--batch-size 4,--val-batch-size 4,--batches-per-epoch 4,--train-dir train,--val-dir val"
)
Outcomes = dict[str, str]


def watch() -> None:
    """In a rank: accepts made-up data, and at exit writes the checksums of trained tensors into $CHECKSUMS."""
    kept: dict[int, Any] = {}
    imported = builtins.__import__

    def keep(module: Any, name: str) -> None:
        cls = getattr(module, name)
        begin = cls.__init__
        cls.__init__ = lambda self, *args, **kwargs: begin(kept.setdefault(id(self), self), *args, **kwargs)

    def accept(module: Any, name: str) -> None:
        setattr(module, name, lambda *args, **kwargs: True)

    hooks = {
        ("keras.src.utils.file_utils", "validate_file"): accept,
        ("tf_keras.src.utils.data_utils", "validate_file"): accept,
        ("torch.optim.optimizer", "Optimizer"): keep,
        ("tensorflow.python.ops.resource_variable_ops", "BaseResourceVariable"): keep,
    }

    def importing(*args: Any, **kwargs: Any) -> Any:
        found = imported(*args, **kwargs)
        for module, name in [*hooks]:
            if hasattr(sys.modules.get(module), name):
                hooks.pop((module, name))(sys.modules[module], name)
        return found

    builtins.__import__ = importing
    sys.modules["tensorboard.compat.notf"] = sys  # TensorBoard without TensorFlow, which aborts beside PyTorch
    atexit.register(lambda: Path(os.environ["CHECKSUMS"], str(os.getpid())).write_text(checksums([*kept.values()])))


def checksums(kept: list[Any]) -> str:
    """The checksums of PyTorch's optimized parameters, and of TensorFlow's trainable variables outside of graphs."""
    tensors = {id(p): p for o in kept for group in getattr(o, "param_groups", []) for p in group["params"]}
    for variable in kept:  # an _UnreadVariable is what an assignment returns; Keras counts batches in integers
        if getattr(variable, "trainable", False) and variable.dtype.is_floating:
            tensors |= {id(variable): variable} if type(variable).__name__ != "_UnreadVariable" else {}
    lines = []
    for tensor in tensors.values():
        with contextlib.suppress(NotImplementedError, AttributeError, ValueError):
            array = (tensor.detach() if hasattr(tensor, "detach") else tensor).numpy()
            lines.append(hashlib.sha256(array.tobytes()).hexdigest())
    return "\n".join(lines)


def replicas(folder: Path) -> str:
    """Whether two ranks have the same checksums; those that only one of them has do not count."""
    found = sorted((path.read_text().split() for path in folder.iterdir() if path.stat().st_size), key=len)
    return "skipped" if len(found) != 2 else "passed" if set(found[0]) <= set(found[1]) else "failed"


def made_up(home: Path, side: int) -> None:
    """MNIST in Keras's form and in torchvision's, and a folder of images, in a HOME that is the working folder too."""
    from PIL import Image

    draw = np.random.default_rng(0)
    images, labels = draw.integers(0, 256, (600, side, side), "uint8"), draw.integers(0, 10, 600, "uint8")
    keras, torch = home / ".keras/datasets", home / "data/MNIST/raw"
    for folder in (home / "sums", keras, torch, *(home / split / kind for split in ("train", "val") for kind in "ab")):
        folder.mkdir(parents=True)
    for name in ("mnist.npz", "mnist-0.npz", "mnist-1.npz", "MNIST-data-0", "MNIST-data-1"):
        with (keras / name).open("wb") as file:
            np.savez(file, x_train=images, y_train=labels, x_test=images, y_test=labels)
    for split in ("train", "t10k"):
        for kind, array in ("images-idx3", draw.integers(0, 256, (600, 28, 28), "uint8")), ("labels-idx1", labels):
            header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (torch / f"{split}-{kind}-ubyte").write_bytes(header + array.tobytes())
    for folder in home.glob("*/[ab]"):
        for number in range(4):
            Image.fromarray(draw.integers(0, 256, (64, 64, 3), "uint8")).save(folder / f"{number}.png")


def run(command: list[str], home: Path, extra: dict[str, str]) -> int:
    """The exit code of a command with that HOME, where `log` gets its output; at the limit the command is ended."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, "HOME": str(home), "PATH": path, "OMP_NUM_THREADS": "1", **extra}
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=home, env=environ, stdout=log, stderr=log, start_new_session=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(LIMIT)
        os.killpg(process.pid, signal.SIGTERM)
        return process.wait()


def tests(file: Path, launcher: str, home: Path) -> tuple[int, Outcomes]:
    """A test file's exit code, and `file::test` with passed, failed or skipped: the worst of its ranks."""
    rank = "${HOROVOD_RANK-${OMPI_COMM_WORLD_RANK-0}}"
    # Not 1 for failed tests: horovodrun would end the other rank before its report.
    script = f'"$0" -m pytest -v -p no:cacheprovider "$1" --junitxml="$2/{rank}.xml" || [ $? = 1 ]'
    ranks = ["horovodrun", "-np", "2", f"--{launcher}"] if launcher else []
    code = run([*ranks, "sh", "-c", script, sys.executable, str(file), str(home)], home, {})
    outcomes, reports = Outcomes(), list(home.glob("*.xml"))
    for report in reports:
        for case in ET.parse(report).iter("testcase"):  # noqa: S314 - pytest has just written it
            kinds = {"failure": "failed", "error": "failed", "skipped": "skipped"}
            outcome = min((kinds[child.tag] for child in case if child.tag in kinds), default="passed")
            name = f"{file.name}::{case.get('name')}"
            outcomes[name] = min(outcome, outcomes.get(name, outcome))
    return code, outcomes | ({f"{file.name}::ends": "failed"} if len(reports) < (2 if launcher else 1) else {})


def example(file: Path, launcher: str, home: Path) -> tuple[int, Outcomes]:
    """An example's exit code, and whether it runs and leaves equal replicas."""
    text = file.read_text()
    made_up(home, 28 if re.search(r"\b28\b", text) else 6)  # small where it takes any, and thousands of steps
    (home / "sitecustomize.py").write_text(f"import runpy\nrunpy.run_path({__file__!r})['watch']()\n")
    flags = [word for flag in FLAGS.split(",") if f"'{flag.split()[0]}'" in text for word in flag.split()]
    extra = {"PYTHONPATH": f"{home}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "CHECKSUMS": str(home / "sums")}
    ranks = ["horovodrun", "-np", "2", f"--{launcher}", *(ELASTIC if "elastic" in file.name else ())]
    code = run([*ranks, sys.executable, str(file), *flags], home, extra)
    equal = replicas(home / "sums") if code == 0 else "skipped"
    return code, {f"{file.name}::runs": "failed" if code else "passed", f"{file.name}::equal replicas": equal}


def known() -> list[str]:
    """The patterns of what cannot pass with this Keras; the file gives the reason of each."""
    keras = "keras2/" if os.environ.get("TF_USE_LEGACY_KERAS") == "1" else "keras3/"
    return [line.split(": ")[0].removeprefix(keras) for line in KNOWN.read_text().splitlines()]


def unpacked(path: Path, folder: Path) -> Path:
    """The folder of the sources, unpacked into `folder` where they are an archive."""
    if path.is_file():
        shutil.unpack_archive(path, folder / "archive")
        path = next((folder / "archive").iterdir())
    if not (path / "test/parallel").is_dir():
        sys.exit(f"{path} has no test/parallel: give Horovod's repository at v0.28.1; its sdist leaves the tests out.")
    return path.resolve()


def jobs(sources: Path, launchers: list[str], kinds: list[str]) -> Iterator[tuple[str, Callable[[Path], Any]]]:
    """What to run: its name, and a function of its HOME."""
    for name in SINGLE if "tests" in kinds else ():
        yield f"test_{name}.py", partial(tests, sources / f"test/single/test_{name}.py", "")
    places = {"tests": ("test/parallel/test_*.py",), "examples": [f"examples/{folder}/*.py" for folder in EXAMPLES]}
    for launcher, kind in product(launchers, kinds):
        for file in (file for place in places[kind] for file in sorted(sources.glob(place))):
            if not any(word in file.name for word in FOREIGN) and (launcher == "gloo" or "elastic" not in file.name):
                yield f"{launcher} {kind} {file.name}", partial(tests if kind == "tests" else example, file, launcher)


def row(what: str, code: int, outcomes: Outcomes, reasons: list[str]) -> list[str]:
    """The failures that have no reason, after it has printed a line of the table."""
    failures = [name for name, outcome in outcomes.items() if outcome == "failed"]
    unknown = [name for name in failures if not any(fnmatch.fnmatchcase(name, pattern) for pattern in reasons)]
    counts = "/".join(str(list(outcomes.values()).count(kind)) for kind in ("passed", "failed", "skipped"))
    print(f"{what} | {code} | {counts} | {', '.join(name.partition('::')[2] for name in unknown)}", flush=True)
    return unknown


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--only", default="", metavar="WORD", help="only what has WORD in its name")
    parser.add_argument("--logs", type=Path, help="a folder that keeps the output of each")
    for flag in ("gloo", "mpi", "tests", "examples"):
        parser.add_argument(f"--{flag}", action="store_true")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    launchers = [name for name in ("gloo", "mpi") if getattr(args, name)] or ["gloo", "mpi"]
    kinds = [name for name in ("tests", "examples") if getattr(args, name)] or ["tests", "examples"]
    reasons, unknown, seen = known(), [], dict[str, set[str]]()
    print("what | exit code | passed/failed/skipped | failures without a reason", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        sources = unpacked(args.path, Path(temporary))
        for what, job in jobs(sources, launchers, kinds):
            if args.only in what:
                (home := Path(temporary, what.replace(" ", "-"))).mkdir()
                code, outcomes = job(home)
                unknown += row(what, code, outcomes, reasons)
                for name, outcome in outcomes.items():
                    seen.setdefault(name, set()).add(outcome)
                if args.logs:
                    shutil.copy(home / "log", args.logs / home.name)
    stale = [p for p in reasons if (hits := fnmatch.filter(seen, p)) and not any("failed" in seen[h] for h in hits)]
    for pattern in stale:
        print(f"passes now, take it from {KNOWN.name}: {pattern}")
    return int(bool(unknown or stale))


if __name__ == "__main__":
    sys.exit(main())
