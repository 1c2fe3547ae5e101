"""Starting real ranks for tests: a clean environment, a time limit, and nothing left behind."""

import contextlib
import gc
import importlib.util
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hvdtrain import errors

PROGRAMS = Path(__file__).with_name("torch_programs.py")
TAG = "HVDTRAIN_TEST_TAG"
LIMIT = 400
FOREIGN = ("HOROVOD_", "OMPI_", "PMIX", "PRTE", "PMI_", "PALS_", "SLURM_", "MPI_", "TORCHELASTIC_", "OMP_", "UCX_")
LAUNCHERS = {
    "alone": lambda ranks: [],
    "mpi": lambda ranks: [_beside_python("horovodrun"), "-np", str(ranks)],
    "gloo": lambda ranks: [_beside_python("horovodrun"), "--gloo", "-np", str(ranks)],
}
CONTROLLERS = ("mpi", "gloo")

needs_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="needs PyTorch: pip install -e .[torch]")
needs_horovod = pytest.mark.skipif(
    not importlib.util.find_spec("horovod"), reason="needs Horovod: python -m hvdtrain build"
)


@dataclass
class Ranks:
    """A started launcher and the processes below it."""

    process: subprocess.Popen[str]
    tag: str
    out: Path
    err: Path

    def wait(self, limit: float = LIMIT) -> "Ended":
        """Waits for the launcher to end by itself; at the limit everything is killed, and the test fails."""
        try:
            code = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(
                f"{self.process.args} did not end within {limit} s:\n{self.out.read_text()[-3000:]}"
                f"\n{self.err.read_text()[-3000:]}"
            )
        return Ended(code, self.out.read_text(), self.err.read_text(), self.left())

    def left(self) -> list[str]:
        """The commands of this start that outlive its launcher by more than a moment."""
        for _ in range(100):
            if not (pids := tagged(self.tag)):
                break
            time.sleep(0.05)
        return [" ".join(_words(pid, "cmdline")) for pid in pids]

    def members(self) -> dict[int, int]:
        """Process number by rank."""
        found = {}
        for pid in tagged(self.tag):
            command = _words(pid, "cmdline")
            if (
                any(word in command for word in ("hvdtrain.torch", str(PROGRAMS)))
                and Path(command[0]).name[:6] == "python"
            ):
                said = dict(word.partition("=")[::2] for word in _words(pid, "environ"))
                if rank := said.get("HOROVOD_RANK") or said.get("OMPI_COMM_WORLD_RANK"):
                    found[int(rank)] = pid
        return found

    def kill_rank(self, rank: int) -> None:
        """SIGKILL for one rank alone."""
        os.kill(self.members()[rank], signal.SIGKILL)

    def nap(self) -> None:
        """Waits for the launcher to end, but for a moment only."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.05)

    def kill(self) -> None:
        """SIGKILL for the launcher and everything it started, then waits until all of it is gone."""
        while pids := tagged(self.tag):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.2)
        self.process.wait()


@dataclass(frozen=True)
class Ended:
    """How a start ended. `left`: processes that outlived the launcher."""

    code: int
    out: str
    err: str
    left: list[str] = field(default_factory=list)

    def good(self) -> "Ended":
        """Itself, where it ended well."""
        assert self.code == 0, f"exit code {self.code}:\n{self.out[-3000:]}\n{self.err[-6000:]}"
        return self

    @property
    def lines(self) -> list[str]:
        """The lines of stderr that hvdtrain wrote, without the launcher's prefix."""
        stripped = [(line.partition("<stderr>:")[2] or line).strip() for line in self.err.splitlines()]
        return [line for line in stripped if line.partition(":")[0].partition(" ")[0] in vars(errors)]


@contextlib.contextmanager
def started(
    launcher: str, ranks: int, command: Sequence[str], cwd: Path | None = None, **environ: str
) -> Iterator[Ranks]:
    """The command under that launcher; what still runs at the end of the block is killed."""
    tag = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        with out.open("w") as to_out, err.open("w") as to_err:
            process = subprocess.Popen(
                [*LAUNCHERS[launcher](ranks), *command],
                stdin=subprocess.DEVNULL,
                stdout=to_out,
                stderr=to_err,
                text=True,
                cwd=cwd,
                env={**clean_environ(), TAG: tag, **environ},
            )
        run = Ranks(process, tag, out, err)
        try:
            yield run
        finally:
            run.kill()


def run(
    launcher: str, ranks: int, command: Sequence[str], limit: float = LIMIT, cwd: Path | None = None, **environ: str
) -> Ended:
    """The command under that launcher, to its end. Fails the test where a process is left behind."""
    with started(launcher, ranks, command, cwd, **environ) as process:
        return process.wait(limit)


def train(launcher: str, ranks: int, *argv: object, **more: Any) -> Ended:
    """`python -m hvdtrain.torch ARGV` under that launcher."""
    return run(launcher, ranks, [sys.executable, "-m", "hvdtrain.torch", *map(str, argv)], **more)


def train_here(*argv: object) -> Ended:
    """The same in this very process, alone, which saves it the start."""
    from hvdtrain import run as runs
    from hvdtrain.torch.train import train as train_with_torch

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = runs.main("torch", list(map(str, argv)), train_with_torch)
    gc.collect()  # the run folder is locked as long as its run lives
    return Ended(code, out.getvalue(), err.getvalue())


def programs(launcher: str, ranks: int, folder: Path, given: dict[str, Any], **more: Any) -> dict[str, list[Any]]:
    """By program of `torch_programs.py`, what each rank returned for the given values, by rank."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "given.json").write_text(json.dumps(given, default=str))
    run(launcher, ranks, [sys.executable, str(PROGRAMS), str(folder)], **more).good()
    told = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    return {name: [rank[name] for rank in told] for name in given}


def clean_environ() -> dict[str, str]:
    """The environment without any launcher's variables; one thread a rank."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
    return {**kept, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}


def tagged(tag: str) -> list[int]:
    """The live processes whose environment holds the tag."""
    return [
        int(path.name)
        for path in Path("/proc").iterdir()
        if path.name.isdigit() and f"{TAG}={tag}" in _words(int(path.name), "environ")
    ]


def _words(pid: int, file: str) -> list[str]:
    try:  # a zombie's are empty
        return Path(f"/proc/{pid}/{file}").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def _beside_python(tool: str) -> str:
    beside = Path(sys.executable).with_name(tool)
    return str(beside) if beside.exists() else shutil.which(tool) or tool
