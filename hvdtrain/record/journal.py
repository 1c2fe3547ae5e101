"""launches.jsonl: what each launch of a run spends its time on, and what happens in it; for reports.

Rank 0 writes it, from a thread: neither training nor the failure detector waits for a file system. A launch is one
process of rank 0, from its begin to its end; the records of a launch follow its first one, of the kind "launch".
"""

import contextlib
import functools
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hvdtrain import files, installed
from hvdtrain.launch import slurm
from hvdtrain.launch.slurm import SlurmError
from hvdtrain.launch.topology import Topology
from hvdtrain.untrusted import redacted

NAME = "launches.jsonl"
Phase = Literal[
    "start", "data", "import", "rendezvous", "model", "first_step", "training", "validation", "checkpoint", "end"
]
SHORTEST = 5.0
"""Seconds between two records of one kind that come again and again."""
PHASES_APART = 1.0
"""Seconds between two records of the phases: of a killed launch the last ones are all that is known."""
PART = 0.01
"""The part of the time since the launch began that lies between two such records: a run of days has some hundreds."""
CLOSE_SECONDS = 5.0


class Journal:
    """The clock of this process, which is in one phase at each moment; on rank 0, the records too.

    Every rank has one; without a file, records are dropped. Any thread may record; phases are the training thread's.
    """

    def __init__(self, age: float | None = None) -> None:
        """`age`: seconds since the launch began; left out: since the process did, in its first one."""
        self._begin(_age_of_first() if age is None else age)

    def _begin(self, age: float) -> None:
        self._began = time.monotonic() - age
        self._seconds: dict[str, float] = {}
        self._phase: Phase = "start"
        self._since = self._began
        self._again: dict[str, float] = {}
        """When each kind of record that comes again and again is due next."""
        self._records: queue.SimpleQueue[Mapping[str, Any] | None] | None = None
        self._thread: threading.Thread | None = None
        self._ended = False
        self.step = 0
        """Updates that the run has made."""
        self.is_finished = False
        """Whether the run has come to its end."""
        self.replica_checks = 0
        """How often the replicas were compared, and were equal."""

    @property
    def clock(self) -> float:
        """Seconds since this process began."""
        return time.monotonic() - self._began

    def enter(self, phase: Phase) -> None:
        """Ends the phase before: from now on time is spent on `phase`."""
        now = time.monotonic()
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now

    @contextlib.contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Counts the block's time as `phase`, and what follows as the phase before."""
        before = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def phases(self) -> dict[str, float]:
        """Seconds of each phase so far; their sum is `clock`."""
        self.enter(self._phase)
        return {name: round(seconds, 4) for name, seconds in self._seconds.items()}

    def open(self, folder: Path, about: Callable[[float], Mapping[str, Any]]) -> None:
        """Begins to write, on rank 0. `about` gives, of the launch's age in seconds, the first record, in the writing
        thread: it may take its time. Where this process has trained another run before, this one's launch begins now.
        """
        if self._records:
            self.close()
            self._begin(0.0)
        self._records = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_write,
            args=(folder / NAME, functools.partial(about, self.clock), self._records),
            name="launches",
            daemon=True,
        )
        self._thread.start()

    def is_due(self, kind: str, shortest: float = SHORTEST) -> bool:
        """Whether a record that comes again and again is to be written now; the next one is due later then, `shortest`
        seconds at least."""
        now = self.clock
        if self._records is None or now < self._again.get(kind, 0.0):
            return False
        self._again[kind] = now + max(shortest, PART * now)
        return True

    def mark(self, step: int, *, always: bool = False) -> None:
        """Notes the number of updates made. Now and then, or `always`, records where the time went so far."""
        self.step = step
        if self.is_due("phases", PHASES_APART) or (always and self._records):
            self.record("phases", step=step, phases=self.phases())

    def event(self, kind: str, text: str, **more: Any) -> None:
        """Records an event of a kind: resume, note, checkpoint, slow, stuck, lost, signal, requeue."""
        self.record("event", event=kind, **{"step": self.step, "text": text, **more})

    def record(self, kind: str, **values: Any) -> None:
        """Writes one line, with `clock` and `time` added."""
        if self._records and not self._ended:
            now = {"clock": round(self.clock, 4), "time": round(time.time(), 3)}
            self._records.put({"kind": kind, **now, **values})

    def end(self, state: str, text: str = "") -> None:
        """Writes the last record. A second call writes nothing."""
        values = {"state": state, "step": self.step, "text": text, "replica_checks": self.replica_checks}
        self.record("end", **values, phases=self.phases())
        self._ended = True

    def close(self) -> None:
        """Waits a little until all is written."""
        if self._records and self._thread:
            self._records.put(None)
            self._thread.join(CLOSE_SECONDS)


_has_begun = False
"""Whether this process has begun a launch before, as a notebook's does."""


def _age_of_first() -> float:
    global _has_begun
    age, _has_begun = 0.0 if _has_begun else process_age(), True
    return age


def process_age() -> float:
    """For how many seconds this process has run, by Linux's clock ticks."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The name in parentheses may hold spaces; proc(5) counts the fields behind it from 3.
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    return 0.0


def _write(
    path: Path,
    about: Callable[[], Mapping[str, Any]],
    records: "queue.SimpleQueue[Mapping[str, Any] | None]",
) -> None:
    """The thread's work. A disk that fails loses reports, no training."""
    with contextlib.suppress(OSError):
        # Do not follow or wait: it may be somebody else's link or pipe.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(path, flags, 0o666)
        try:
            _end_line(file)
            _append(file, about())
            for record in iter(records.get, None):
                _append(file, record)
        finally:
            os.close(file)


def _end_line(file: int) -> None:
    """A killed launch's last line may be unfinished."""
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b"\n":
        os.write(file, b"\n")


def _append(file: int, record: Mapping[str, Any]) -> None:
    os.write(file, json.dumps(record, separators=(",", ":")).encode() + b"\n")


FORMAT = 1
JOB_SCRIPT = "job.sh"
GIT_SECONDS = 5


@dataclass(frozen=True)
class Launched:
    """What rank 0 knows of its launch from the beginning."""

    topology: Topology
    framework: str
    engine: str
    step: int
    """The step that the run resumes from."""
    valid_examples: int | None = None
    """The number of examples of each validation; None where the run does not validate."""

    def record(self, age: float) -> Mapping[str, Any]:
        """The launch's first record; it began `age` seconds ago."""
        job = slurm.job_id(os.environ)
        return {
            "kind": "launch",
            "format": FORMAT,
            "time": round(time.time() - age, 3),
            "launcher": self.topology.launcher,
            "engine": self.engine,
            "framework": self.framework,
            "ranks": self.topology.size,
            "step": self.step,
            "valid_examples": self.valid_examples,
            "job": {"id": job, "restart": os.environ.get("SLURM_RESTART_COUNT", "0")} if job else None,
            "command": redacted("\0".join(sys.orig_argv)).split("\0"),
            "cwd": _current_folder(),
            "versions": installed.versions(),
            "git": git_commit(),
        }


def record_job(folder: Path, record: Callable[..., None]) -> None:
    """Records what SLURM says of this run's job, whose script is kept in the folder, for its owner alone."""
    if not (job := slurm.job_id(os.environ)):
        return
    if times := job_times(job):
        record("job", **times)
    with contextlib.suppress(OSError, SlurmError):
        if script := slurm.batch_script(job):
            files.create_private(folder / JOB_SCRIPT, script.encode())


def _current_folder() -> str | None:
    try:
        return str(Path.cwd())
    except OSError:  # removed meanwhile
        return None


def git_commit() -> dict[str, Any] | None:
    """Commit of the current folder, and whether files that git knows have changed since; None outside of git.

    A repository's own settings name programs for git to run, so git sees its files without them.
    """
    asked = ["HEAD", "--show-toplevel", "--git-path", "index", "--git-path", "objects"]
    try:
        commit, tree, *paths = _git("rev-parse", *asked).splitlines()
        index, objects = map(os.path.abspath, paths)
        with tempfile.TemporaryDirectory() as own:
            (Path(own) / "refs").mkdir()
            (Path(own) / "HEAD").write_text(commit)
            environ = {"GIT_DIR": own, "GIT_WORK_TREE": tree, "GIT_INDEX_FILE": index, "GIT_OBJECT_DIRECTORY": objects}
            changed = _git("status", "-s", "-uno", "--ignore-submodules=all", **environ)
        return {"commit": commit, "dirty": bool(changed.strip())}
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def job_times(job_id: str) -> dict[str, float] | None:
    """When SLURM was given the job, or was given it back, and when it started it, in seconds since 1970; None where
    SLURM does not answer."""
    try:
        submit, start = slurm.query(job_id, "%V", "%S", environ={"SLURM_TIME_FORMAT": "%s"})
        return {"submit": float(submit), "start": float(start)}
    except (SlurmError, ValueError):
        return None


def _git(*arguments: str, **environ: str) -> str:
    """The output of git. Raises OSError, SubprocessError."""
    path = shutil.which("git")
    if path is None:
        raise FileNotFoundError("git")
    return subprocess.run(
        [path, "--no-optional-locks", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=GIT_SECONDS,
        check=True,
        env={**os.environ, **environ},
    ).stdout
