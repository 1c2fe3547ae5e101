"""Starts real ranks for tests, with a clean environment and a time limit, and leaves no process behind."""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warm
from marks import marked
from warm import TAG

from hvdtrain import errors

PROGRAMS = Path(__file__).with_name("programs.py")
SMALL = Path(__file__).with_name("small.py")
LIMIT = 800
FOREIGN = ("HOROVOD_", "OMPI_", "PMIX", "PRTE", "PMI_", "PALS_", "SLURM_", "MPI_", "TORCHELASTIC_", "OMP_", "UCX_")
SESSION = "HVDTRAIN_TEST_SESSION"
# Waits until the process with the number in its first argument has ended. Then kills all processes whose environment
# holds the second argument, the path of a folder, and removes that folder.
REAPER = """
import glob, os, select, shutil, signal, sys, time
try:
    select.select([os.pidfd_open(int(sys.argv[1]))], [], [])
except ProcessLookupError:
    pass
left = True
while left:
    left = False
    for path in glob.glob("/proc/[0-9]*/environ"):
        try:
            if sys.argv[2].encode() in open(path, "rb").read():
                os.kill(int(path.split("/")[2]), signal.SIGKILL)
                left = True
        except OSError:
            pass
    time.sleep(0.1)
shutil.rmtree(sys.argv[2], ignore_errors=True)
"""
LAUNCHERS = {
    "alone": lambda ranks: [],
    "mpi": lambda ranks: [_beside_python("horovodrun"), "-np", str(ranks)],
    "gloo": lambda ranks: [_beside_python("horovodrun"), "--gloo", "-np", str(ranks)],
    "torchrun": lambda ranks: [_beside_python("torchrun"), "--no-python", "--nproc-per-node", str(ranks)],
}
CONTROLLERS = ("mpi", "gloo")
# Under both controllers of horovodrun, of which one is slow.
gloo_first, mpi_first = (
    pytest.mark.parametrize("controller", marked(CONTROLLERS, fast={first}), indirect=True) for first in ("gloo", "mpi")
)

TITLES = {"torch": "PyTorch", "tensorflow": "TensorFlow"}


def _horovods() -> list[str]:
    found = importlib.util.find_spec("horovod")
    return list((found and found.submodule_search_locations) or [])


def lacking(framework: str) -> str:
    """What this machine lacks to start ranks of the framework, and how to get it; "" is nothing."""
    if not importlib.util.find_spec(framework):
        return f"needs {TITLES[framework]}: pip install -e .[{framework}]"
    if not any(Path(folder).glob(f"{framework}/mpi_lib*") for folder in _horovods()):
        return f"needs Horovod for {TITLES[framework]}: python -m hvdtrain build --frameworks torch,tensorflow"
    return ""


needs_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="needs PyTorch: pip install -e .[torch]")
needs_horovod = pytest.mark.skipif(
    not importlib.util.find_spec("horovod"), reason="needs Horovod: python -m hvdtrain build"
)
try:
    BUILT = importlib.metadata.version("horovod")
except importlib.metadata.PackageNotFoundError:
    BUILT = "none"
needs_our_horovod = pytest.mark.skipif(
    "+hvdtrain." not in BUILT, reason=f"horovod is {BUILT}: python -m hvdtrain build"
)
needs_signalled_horovodrun = pytest.mark.skipif(
    not any("def _run(" in Path(folder, "runner/mpi_run.py").read_text() for folder in _horovods()),
    reason=f"horovod is {BUILT}, of before SIGTERM and SIGHUP reached its ranks: python -m hvdtrain build",
)
NEEDS = {name: pytest.mark.skipif(bool(lacking(name)), reason=lacking(name)) for name in TITLES}
needs_tensorflow = NEEDS["tensorflow"]
needs_lightning = pytest.mark.skipif(
    not importlib.util.find_spec("lightning"), reason="needs Lightning: pip install -e .[lightning]"
)
FRAMEWORKS = [pytest.param(name, marks=mark) for name, mark in NEEDS.items()]


def on_ranks(size: int, work: Callable[[int, Callable[[np.ndarray], np.ndarray]], Any]) -> list[Any]:
    """Calls work(rank, sum_over_ranks) on `size` threads at once. Returns what each returned, or its error."""
    given: list[np.ndarray] = [np.empty(0)] * size
    barrier = threading.Barrier(size, timeout=30)

    def on(rank: int) -> Any:
        def sum_over_ranks(array: np.ndarray) -> np.ndarray:
            given[rank] = array
            barrier.wait()
            total = np.sum(given, axis=0)
            barrier.wait()
            return total

        try:
            return work(rank, sum_over_ranks)
        except errors.HvdtrainError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(on, range(size)))


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
        """The commands of this launch that still run two minutes later; waits as long for them to end."""
        for _ in range(2400):
            if not (pids := tagged(self.tag)):
                break
            time.sleep(0.05)
        return [" ".join(fields(pid, "cmdline")) for pid in pids]

    def members(self) -> dict[int, int]:
        """Process number by rank."""
        found = {}
        for pid in tagged(self.tag):
            command = fields(pid, "cmdline")
            if any(f"hvdtrain.{name}" in command for name in TITLES) and Path(command[0]).name[:6] == "python":
                environ = dict(pair.partition("=")[::2] for pair in fields(pid, "environ"))
                names = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID", "SLURM_PROCID", "RANK")
                if rank := next(filter(None, map(environ.get, names)), None):
                    found[int(rank)] = pid
        return found

    def kill_rank(self, rank: int) -> None:
        os.kill(self.members()[rank], signal.SIGKILL)

    def nap(self) -> None:
        """Waits a moment, or less if the launcher ends."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.05)

    def kill(self) -> None:
        """Kills the launcher and everything that it started, and waits until all of it is gone."""
        while pids := tagged(self.tag):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.2)
        self.process.wait()


@dataclass(frozen=True)
class Ended:
    """How a launch ended. `left`: commands of processes that outlived the launcher."""

    code: int
    out: str
    err: str
    left: list[str] = field(default_factory=list)

    def good(self) -> "Ended":
        """This, with exit code 0; else the test fails."""
        assert self.code == 0, f"exit code {self.code}:\n{self.out[-3000:]}\n{self.err[-6000:]}"
        return self

    @property
    def lines(self) -> list[str]:
        """hvdtrain's errors on stderr, without the launcher's prefix, which may stand in the middle of a line."""
        stripped = (line.strip() for line in re.split(r"\[[\d,]+\]<stderr>:|\n", self.err))
        return [line for line in stripped if line.partition(":")[0].partition(" ")[0] in vars(errors)]


@contextlib.contextmanager
def started(
    launcher: str, ranks: int, command: Sequence[str], cwd: Path | None = None, **environ: str
) -> Iterator[Ranks]:
    """Starts the command under that launcher, and kills what still runs at the end of the block."""
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
    """Runs the command under that launcher to its end."""
    with started(launcher, ranks, command, cwd, **environ) as process:
        return process.wait(limit)


def command(framework: str, *argv: object) -> list[str]:
    """`python -m hvdtrain.FRAMEWORK ARGV`, with a small network for ResNet50, in a process forked from one in which the
    framework is loaded."""
    return warm.command(framework, SMALL, f"hvdtrain.{framework}", *argv)


def cold_command(framework: str, *argv: object) -> list[str]:
    """`python -m hvdtrain.FRAMEWORK ARGV`, as a user starts it."""
    return [sys.executable, "-m", f"hvdtrain.{framework}", *map(str, argv)]


def train(framework: str, launcher: str, ranks: int, *argv: object, **more: Any) -> Ended:
    """Runs `command(framework, *argv)` under that launcher to its end."""
    return run(launcher, ranks, command(framework, *argv), **more)


class Trainer:
    """A process that makes one run of one rank after the other, so that they are started once."""

    def __init__(self, framework: str) -> None:
        self._process = subprocess.Popen(
            warm.command(framework, PROGRAMS, framework),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=clean_environ(),
        )

    def train(self, *argv: object) -> Ended:
        """As `python -m hvdtrain.FRAMEWORK ARGV` would."""
        assert self._process.stdin and self._process.stdout
        print(json.dumps([str(argument) for argument in argv]), file=self._process.stdin, flush=True)
        return Ended(*json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def of_ranks(
    framework: str, launcher: str, ranks: int, folder: Path, given: dict[str, Any], program: Path, **more: Any
) -> list[dict[str, Any]]:
    """What each rank of `python PROGRAM FRAMEWORK FOLDER` wrote to FOLDER/rank-R.json, given the values in
    FOLDER/given.json. What was printed is in FOLDER/out."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "given.json").write_text(json.dumps(given, default=str))
    ended = run(launcher, ranks, warm.command(framework, program, framework, folder), **more).good()
    (folder / "out").write_text(ended.out)
    return left_by(ranks, folder)


def left_by(ranks: int, folder: Path) -> list[dict[str, Any]]:
    """What each rank wrote to FOLDER/rank-R.json."""
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def programs(
    framework: str, launcher: str, ranks: int, folder: Path, given: dict[str, Any], **more: Any
) -> dict[str, list[Any]]:
    """By the name of a function of `programs.py` or of the framework's programs, what each rank returned for the given
    values."""
    results = of_ranks(framework, launcher, ranks, folder, given, PROGRAMS, **more)
    return {name: [rank[name] for rank in results] for name in given}


def once(make: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which is called once for the same arguments. Where that call failed, later ones fail at once."""
    made: dict[tuple[Any, ...], Any] = {}

    def of(*arguments: Any) -> Any:
        if arguments not in made:
            made[arguments] = None
            made[arguments] = make(*arguments)
        assert made[arguments], f"the launch {arguments} failed before"
        return made[arguments]

    return of


def wait_for_step(ranks: Ranks, folder: Path, step: int) -> None:
    """Waits until the run has recorded that step."""
    for _ in range(20 * LIMIT):
        if ranks.process.poll() is not None:
            pytest.fail(f"it ended before step {step}:\n{ranks.out.read_text()[-2000:]}{ranks.err.read_text()[-4000:]}")
        with_step = folder / "metrics.jsonl"
        if with_step.exists() and f'"step": {step},' in with_step.read_text():
            return
        ranks.nap()
    pytest.fail(f"step {step} did not come")


def stopped_at(ranks: Ranks, folder: Path, step: int, victim: Callable[[], int], number: int) -> Ended:
    """Sends one process the signal once the run has recorded that step. Returns how the run ended."""
    wait_for_step(ranks, folder, step)
    os.kill(victim(), number)
    return ranks.wait()


def held(step: int, rank: int = 0, until: Path | str = "") -> dict[str, str]:
    """The environment in which that rank waits once it has recorded that step, until it gets a signal or that file is
    there. The other ranks wait for it."""
    return {"HVDTRAIN_TEST_HOLD": f"{rank} {step + 1} {until}"}


def wait_until(is_so: Callable[[], object], limit: float = 240) -> None:
    """Waits until it is so. Fails the test after `limit` seconds."""
    deadline = time.monotonic() + limit
    while not is_so():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {limit} s in vain")
        time.sleep(0.02)


def clean_environ() -> dict[str, str]:
    """The environment without any launcher's variables, with one thread a rank. A process that has it is killed at the
    end of the session of tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
    kept.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes import the package
    return {**kept, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", SESSION: session()}


def session() -> str:
    """The folder of this session of tests, which all processes of pytest-xdist share. It is removed, and everything
    that was started with its name in the environment is killed, when the process ends that called this first."""
    if SESSION not in os.environ:
        folder = tempfile.mkdtemp(prefix="hvdtrain-tests-")
        nowhere = [(os.POSIX_SPAWN_OPEN, file, os.devnull, os.O_RDWR, 0) for file in range(3)]
        reaper = [sys.executable, "-IS", "-c", REAPER, str(os.getpid()), folder]
        os.posix_spawn(sys.executable, reaper, os.environ, file_actions=nowhere, setsid=True)
        os.environ[SESSION] = folder
    return os.environ[SESSION]


def tagged(tag: str) -> list[int]:
    """The live processes whose environment holds the tag, or which a warm server forked and named by it."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    names = {tag[: warm.NAME_LENGTH]}
    return [pid for pid in pids if f"{TAG}={tag}" in fields(pid, "environ") or names & {*fields(pid, "comm")}]


def fields(pid: int, file: str) -> list[str]:
    """The values in a file of /proc about the process; none where it has ended."""
    try:  # a zombie's are empty
        return Path(f"/proc/{pid}/{file}").read_bytes().decode(errors="replace").rstrip("\0\n").split("\0")
    except OSError:
        return []


def parent(pid: int) -> int:
    """The process's parent; 0 where it has ended."""
    return next((int(stat.rpartition(")")[2].split()[1]) for stat in fields(pid, "stat")), 0)


def shared_memory(pids: Iterable[int]) -> set[str]:
    """The files in /dev/shm that these processes have in their memory."""
    return {file for pid in pids for maps in fields(pid, "maps") for file in re.findall(r"/dev/shm/\S+", maps)}


def _beside_python(tool: str) -> str:
    beside = Path(sys.executable).with_name(tool)
    return str(beside) if beside.exists() else shutil.which(tool) or tool
