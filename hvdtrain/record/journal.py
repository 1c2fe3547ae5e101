"""launches.jsonl: what each launch of a run spends its time on, and what happens in it; for reports.

Rank 0 writes it in a thread, so that neither training nor the failure detector waits for a file system. A launch is
one process of rank 0. Its records follow its first one, which is of the kind "launch".
"""

import contextlib
import functools
import itertools
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
from pathlib import Path
from typing import Any, Literal

from hvdtrain import files, installed
from hvdtrain.launch import ancestors, slurm
from hvdtrain.launch.devices import visible_gpus
from hvdtrain.launch.slurm import SlurmError
from hvdtrain.launch.topology import Topology
from hvdtrain.untrusted import redacted

NAME = "launches.jsonl"
Phase = Literal[
    "start", "data", "import", "rendezvous", "model", "first_step", "training", "validation", "checkpoint", "end"
]
SHORTEST = 5.0
"""The fewest seconds between two records of a kind that is written again and again."""
PHASES_APART = 1.0
"""The same for records of phases, the last of which is all that is known of a killed launch."""
PART = 0.01
"""The fewest seconds between two such records, as a part of the launch's age: in days it writes only some hundreds."""
CLOSE_SECONDS = 5.0


class Journal:
    """How long this process has spent in each phase; on rank 0 also its records.

    Every rank has one, which drops records while no file is open. Any thread may record. The training thread alone
    changes the phase.
    """

    def __init__(self, age: float | None = None) -> None:
        """`age`: seconds since the launch began; left out: since the process began, for its first launch."""
        global _has_begun
        if age is None:
            age, _has_begun = 0.0 if _has_begun else process_age(), True
        self._begin(age)

    def _begin(self, age: float) -> None:
        self._began = time.monotonic() - age
        self._seconds: dict[str, float] = {}
        self._phase: Phase = "start"
        self._since = self._began
        self._again: dict[str, float] = {}
        """When a record of each repeated kind may be written next."""
        self._records: queue.SimpleQueue[Mapping[str, Any] | None] | None = None
        self._thread: threading.Thread | None = None
        self._ended = False
        self._epochs = 0
        self.step = 0
        """The number of updates that the run has made."""
        self.is_finished = False
        """Whether the run is complete."""
        self.made: Callable[[], str] = lambda: "no step"
        """Returns how many steps the run has made, of how many, as text."""
        self.replica_checks = 0
        """How often the replicas were compared and were equal."""

    @property
    def clock(self) -> float:
        """Seconds since this process began."""
        return time.monotonic() - self._began

    def enter(self, phase: Phase) -> None:
        """Begins a phase, and ends the one before."""
        now = time.monotonic()
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now

    @contextlib.contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Counts the block's time as `phase`, and then returns to the phase before."""
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
        """Begins to write, on rank 0. Where this process has trained another run before, a new launch begins now.

        `about` returns the first record, given the launch's age in seconds. It runs in the writing thread, so that it
        may be slow.
        """
        if self._records:
            self.close()
            self._begin(0.0)
        self._records = queue.SimpleQueue()
        given = (folder / NAME, functools.partial(about, self.clock), self._records)
        self._thread = threading.Thread(target=_write, args=given, name="launches", daemon=True)
        self._thread.start()

    def is_due(self, kind: str, shortest: float = SHORTEST) -> bool:
        """Whether a record of a repeated kind is to be written now; the next one is then due after `shortest` seconds
        or more."""
        now = self.clock
        if self._records is None or now < self._again.get(kind, 0.0):
            return False
        self._again[kind] = now + max(shortest, PART * now)
        return True

    def mark(self, step: int, *, always: bool = False) -> None:
        """Notes the number of updates made. Now and then, or `always`, records the time spent in each phase."""
        self.step = step
        if self.is_due("phases", PHASES_APART) or (always and self._records):
            self.record("phases", step=step, phases=self.phases())

    def event(self, kind: str, text: str, **more: Any) -> None:
        """Records an event of a kind: resume, note, checkpoint, slow, stuck, lost, signal, requeue."""
        self.record("event", event=kind, **{"step": self.step, "text": text, **more})

    def epochs(self, planned: int) -> None:
        """Records after how many epochs the run ends, where that is another number than before."""
        if planned != self._epochs:
            self._epochs = planned
            self.record("length", epochs=planned)

    def record(self, kind: str, **values: Any) -> None:
        """Writes one line, with `clock` and `time` added."""
        if self._records and not self._ended:
            now = {"clock": round(self.clock, 4), "time": round(time.time(), 3)}
            self._records.put({"kind": kind, **now, **values})

    def end(self, state: str = "", text: str = "") -> None:
        """Writes the last record: without a `state`, that the run is finished, or stopped before. A second call writes
        nothing."""
        state = state or ("finished" if self.is_finished else "stopped")
        values = {"state": state, "step": self.step, "text": text, "replica_checks": self.replica_checks}
        self.record("end", **values, phases=self.phases())
        self._ended = True

    def close(self) -> None:
        """Waits for a short time until everything is written."""
        if self._records and self._thread:
            self._records.put(None)
            self._thread.join(CLOSE_SECONDS)


_has_begun = False
"""Whether this process has begun a launch before, as a notebook's may have."""


def process_age() -> float:
    """For how many seconds this process has run."""
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
    """The thread's work. Where the disk fails, records are lost and training continues."""
    with contextlib.suppress(OSError):
        # Do not follow or wait: it may be somebody else's link or pipe.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(path, flags, 0o666)
        try:
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":  # the last line of a killed launch is unfinished
                os.write(file, b"\n")
            for record in itertools.chain([about()], iter(records.get, None)):
                os.write(file, json.dumps(record, separators=(",", ":")).encode() + b"\n")
        finally:
            os.close(file)


JOB_SCRIPT = "job.sh"
GIT_SECONDS = 5


def launch_record(
    topology: Topology,
    framework: str,
    engine: str,
    step: int,
    valid_examples: int | None,
    classes: int | None,
    age: float,
) -> Mapping[str, Any]:
    """The first record of a launch that began `age` seconds ago, and resumes from `step`.

    `valid_examples`, `classes`: how many each validation and the data set have; None where there is none.
    """
    job, cwd = slurm.job_id(os.environ), None
    with contextlib.suppress(OSError):  # it was removed meanwhile
        cwd = str(Path.cwd())
    return {
        "kind": "launch",
        "time": round(time.time() - age, 3),
        "launcher": topology.launcher,
        "typed": ancestors.typed_launcher(),
        "engine": engine,
        "framework": framework,
        "ranks": topology.size,
        "step": step,
        "valid_examples": valid_examples,
        "classes": classes,
        "gpus": visible_gpus(os.environ),
        "job": {"id": job, "restart": os.environ.get("SLURM_RESTART_COUNT", "0")} if job else None,
        "command": redacted("\0".join(sys.orig_argv)).split("\0"),
        "cwd": cwd,
        "versions": installed.versions(),
        "git": git_commit(),
    }


def record_job(folder: Path, record: Callable[..., None]) -> None:
    """Records when SLURM was given this run's job and started it. Keeps the job's script in the folder, for its owner
    alone to read."""
    if not (job := slurm.job_id(os.environ)):
        return
    with contextlib.suppress(SlurmError, ValueError):
        submit, start = slurm.query(job, "%V", "%S", environ={"SLURM_TIME_FORMAT": "%s"})
        record("job", submit=float(submit), start=float(start))
    with contextlib.suppress(OSError, SlurmError):
        if script := slurm.batch_script(job):
            files.create_private(folder / JOB_SCRIPT, script.encode())


def git_commit() -> dict[str, Any] | None:
    """The commit of the current folder, and whether files that git knows have changed since; None outside of git.

    A repository's own settings may name programs for git to run, so git is given its files without its settings.
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


def _git(*arguments: str, **environ: str) -> str:
    """The output of git. Raises OSError, SubprocessError."""
    path = shutil.which("git")
    if path is None:
        raise FileNotFoundError("git")
    command, null = [path, "--no-optional-locks", *arguments], subprocess.DEVNULL
    env = {**os.environ, **environ}
    return subprocess.check_output(command, stdin=null, stderr=null, text=True, timeout=GIT_SECONDS, env=env)
