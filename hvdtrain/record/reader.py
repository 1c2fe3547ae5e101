"""The one way in which every tool reads a run folder: what is there, what is missing, and whether the run is alive.

Reading takes bounded memory, and raises nothing, whatever the folder holds.
"""

import contextlib
import errno
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import pydantic_core

from hvdtrain import files
from hvdtrain.core import values
from hvdtrain.core.wording import counted
from hvdtrain.errors import RecipeError
from hvdtrain.launch import slurm
from hvdtrain.launch.slurm import SlurmError
from hvdtrain.record import checkpoint, journal
from hvdtrain.record.history import Launch, Metrics, Record, add_launches
from hvdtrain.untrusted import mapping, one_line, text, unix_time, whole

METRICS, SAMPLES = "metrics.jsonl", "samples.json"
FILES = ("status.json", METRICS, "recipe.yaml", "run.json", "plan.json", journal.NAME, "checkpoints")
"""Every run folder has at least one of these."""
CHUNK = 1 << 20
"""The bytes that are read at once; a longer line is left out."""
MOST_BYTES = 1 << 30
FAR = 1 << 26
"""The bytes at a file's end in which the newest launch is searched for."""
LAUNCH = re.compile(rb'\{"kind": ?"launch"')
ENDED = ("finished", "failed", "stopped", "left")
JOB = re.compile(r"[0-9]{1,18}(_[0-9]{1,9})?")
QUIET = 30.0
"""Seconds without a record after which it is checked whether the run's processes are still there."""
SILENT = 900.0
SILENT_PART = 0.1
"""Where that cannot be checked, a run that has not ended was killed once there was no sign of life for SILENT seconds,
and for SILENT_PART of its time so far: a run that lives writes after a hundredth of its time, unless a log line is
long in coming."""


@dataclass(frozen=True)
class Gap:
    """A file, or a part of one, that could not be read."""

    name: str
    line: str
    """What is wrong with it, and what is not known without it."""
    is_absent: bool = False
    """Whether the file is not there."""


@dataclass
class RecordedRun:
    """What a run's files hold."""

    path: Path
    status: Mapping[str, Any] = field(default_factory=dict)
    recipe_text: str = ""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """The recipe's keys with their values."""
    recipe_name: str = ""
    plan: Mapping[str, Any] = field(default_factory=dict)
    program: Mapping[str, Any] = field(default_factory=dict)
    """What run.json holds, which a user's own program has in place of a recipe."""
    metrics: Metrics = field(default_factory=Metrics)
    recent: list[Record] = field(default_factory=list)
    """The last records of the metrics, where only the end of the file was read."""
    launches: list[Launch] = field(default_factory=list)
    samples: Mapping[str, Any] = field(default_factory=dict)  # step, prompt, texts of its language model
    changed: float = 0.0
    """When one of its files was last written, in seconds since 1970."""
    gaps: list[Gap] = field(default_factory=list)

    def lacks(self, name: str, what: str, without: str = "", *, is_absent: bool = False) -> None:
        """Notes what is wrong with the file of that name; `without`: what is not known without it."""
        self.gaps.append(Gap(name, f"{name} {what}{f': {without}' if without else ''}", is_absent))

    @property
    def launch(self) -> Launch | None:
        """The last launch."""
        return self.launches[-1] if self.launches else None

    def recent_of(self, kind: Literal["step", "epoch"]) -> list[Record]:
        """The recent records of that kind that have a step."""
        found = [record for record in self.recent if record.get("kind") == kind]
        return [record for record in found if whole(record.get("step")) is not None]

    @property
    def job_id(self) -> str:
        """The number of the last launch's job, for squeue; "" where it was in none."""
        return self.launch.job_id if self.launch and JOB.fullmatch(self.launch.job_id) else ""

    @property
    def framework(self) -> str:
        """torch or tensorflow; "" where that is not known."""
        return self._about("framework")

    @property
    def engine(self) -> str:
        return self._about("engine")

    @property
    def ranks(self) -> int | None:
        """How many ranks were launched last, else how many were planned."""
        launched = self.launch.ranks if self.launch else None
        return launched or whole(self.plan.get("size"), 1) or whole(self.program.get("ranks"), 1)

    @property
    def step(self) -> int:
        """How many updates were made."""
        launched = self.launch.last_step if self.launch else 0
        return max(self.metrics.last_step, whole(self.status.get("step")) or 0, launched)

    @property
    def total_steps(self) -> int | None:
        """The steps of the plan; those made where they are more, as an epoch has begun again with other data."""
        planned = whole(self.plan.get("total_steps"), 1)
        return planned and max(planned, self.step)

    @property
    def steps_per_epoch(self) -> int | None:
        return whole(self.plan.get("steps_per_epoch"), 1)

    @property
    def epochs(self) -> int | None:
        """After how many epochs the run ends; None where that is not known."""
        known = self.recipe, vars(self.launch) if self.launch else {}, mapping(self.plan.get("schedule"))
        return next((epochs for each in known if (epochs := whole(each.get("epochs"), 1))), None)

    @property
    def epochs_made(self) -> float:
        """How many epochs were made, as a fraction."""
        each = self.steps_per_epoch
        return self.step / each if each else float(self.metrics.last_epoch)

    @property
    def last_sign(self) -> float:
        """When there was a sign of life last, in seconds since 1970: in the records, else by the times of the files."""
        times = [unix_time(self.status.get("time")) or 0.0, self.metrics.last_time]
        if self.launch and self.launch.time:
            times.append(self.launch.time + self.launch.clock)
        return max(times) or self.changed

    @property
    def error(self) -> str:
        """Why the run failed or was stopped, in one line; "" where that is not known."""
        ended = self.launch.end.text if self.launch and self.launch.end else ""
        return text(self.status.get("error")) or ended

    @property
    def ended(self) -> str:
        """Why the run ended before the last of its epochs, in one line; "" where it did not."""
        return text(self.status.get("ended"))

    def _about(self, key: str) -> str:
        launched = self.launch.about if self.launch else {}
        return text(launched.get(key) or self.plan.get(key) or self.program.get(key), 60)


def read(path: Path, *, recent: bool = False) -> RecordedRun:
    """What the folder holds; `recent`: only its last launch and the end of its metrics, in bounded time."""
    found = RecordedRun(path)
    found.status = _mapping(found, "status.json", "how the run ended is not known")
    _read_recipe(found, recent)
    if recent:
        _read_lines(found, METRICS, found.recent.extend, _end_of)
        found.metrics.add(found.recent)
        _read_lines(found, journal.NAME, lambda records: add_launches(found.launches, records), _last_launch_of)
    else:
        _read_all(found)
        found.samples = _mapping(found, SAMPLES) if os.path.lexists(path / SAMPLES) else {}
    return found


def _read_recipe(found: RecordedRun, recent: bool) -> None:
    """Reads the recipe and its plan, or what a user's own program has in place of them."""
    if not os.path.lexists(found.path / "recipe.yaml") and os.path.lexists(found.path / "run.json"):
        found.program = _mapping(found, "run.json")
        return
    found.plan = _mapping(found, "plan.json", "the numbers of the plan are not known")
    found.recipe_text = _text(found, "recipe.yaml", "the recipe is not known")
    if not found.recipe_text:
        return
    first, _, _ = found.recipe_text.partition("\n")
    found.recipe_name = text(first.removeprefix("# ").removesuffix(", resolved")) if first[:1] == "#" else ""
    if recent:
        return
    try:
        found.recipe = mapping(mapping(values.parsed("recipe.yaml", found.recipe_text)).get("default"))
    except RecipeError as error:
        found.gaps.append(Gap("recipe.yaml", one_line(error, 200)))
        return
    if not found.recipe:
        found.lacks("recipe.yaml", "holds no recipe")


def _read_all(found: RecordedRun) -> None:
    """Reads all metrics and all launches."""
    is_read = _read_lines(found, METRICS, found.metrics.add, without="no curves")
    if is_read and not found.metrics.steps and not found.metrics.epochs:
        found.lacks(METRICS, "has no records", "no curves")
    left_out: list[int] = []
    without = "no waterfall, events, heat map or energy"
    is_read = _read_lines(
        found, journal.NAME, lambda records: left_out.append(add_launches(found.launches, records)), without=without
    )
    if is_read and not any(launch.clock for launch in found.launches):
        found.lacks(journal.NAME, f"has no {'times' if found.launches else 'records'}", "no waterfall")
    if any(left_out):
        kept = f"{journal.NAME}: launches after the first {len(found.launches):,} are left out"
        found.gaps.append(Gap(journal.NAME, kept))


def _end_of(file: IO[bytes]) -> list[tuple[int, int]]:
    size = file.seek(0, os.SEEK_END)
    return [(max(0, size - CHUNK), size)]


def _last_launch_of(file: IO[bytes]) -> list[tuple[int, int]]:
    """Where the last launch's beginning is, and the file's end."""
    ((last, size),) = _end_of(file)
    end, after = size, b""
    while end > max(0, size - FAR):
        begin = max(0, end - CHUNK)
        file.seek(begin)
        part = file.read(end - begin) + after
        if marks := list(LAUNCH.finditer(part)):
            launch = begin + marks[-1].start()
            return [(launch, launch + CHUNK), (last, size)] if launch + CHUNK < last else [(min(launch, last), size)]
        end, after = begin, part[:20]
    return [(last, size)]


def _read_lines(
    found: RecordedRun,
    name: str,
    take: Callable[[list[Record]], Any],
    spans: Callable[[IO[bytes]], list[tuple[int, int]]] | None = None,
    without: str = "",
) -> bool:
    """Gives the records of a JSON lines file to `take`, some thousand at a time. Returns whether all could be read.

    `spans`: which parts of the file are read, each from and to a byte; left out: the whole file.
    """
    gaps, count, damaged = len(found.gaps), 0, 0
    try:
        with files.opened(found.path / name, follow=False) as file:
            status = os.fstat(file.fileno())
            found.changed = max(found.changed, status.st_mtime)
            for begin, end in spans(file) if spans else [(0, MOST_BYTES)]:
                for some in lines(file, begin, end):
                    records = [record for record in map(parsed, some) if record is not None]
                    count, damaged = count + len(some), damaged + len(some) - len(records)
                    take(records)
    except (OSError, ValueError) as error:
        _note_unreadable(found, name, error, without)
        return False
    if not spans and damaged:
        of = counted(count, "line")
        found.gaps.append(Gap(name, f"{name}: {damaged:,} of {of} cannot be read"))
    if not spans and status.st_size > MOST_BYTES:
        found.lacks(name, f"has more than {MOST_BYTES >> 30} GiB", "the rest is left out")
    return len(found.gaps) == gaps


def lines(file: IO[bytes], begin: int, end: int) -> Iterator[list[bytes]]:
    """The lines between two bytes of a file. One that is too long is replaced by one that is not JSON."""
    rest = b""
    file.seek(begin)
    while chunk := file.read(min(CHUNK, end - file.tell())):
        *lines, rest = (rest + chunk).split(b"\n")
        yield [line for line in lines if line]
        if len(rest) > CHUNK:
            rest = b"\0"
    if rest:
        yield [rest]


def parsed(line: bytes) -> Record | None:
    """The JSON object in a line; None where there is none."""
    try:
        value = pydantic_core.from_json(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _mapping(found: RecordedRun, name: str, without: str = "") -> Mapping[str, Any]:
    """The mapping in a small JSON file; `without`: what is not known without it."""
    content = _text(found, name, without)
    if not content:
        return {}
    try:
        if isinstance(value := files.parse_json(content), dict):
            return value
        found.lacks(name, "holds no object", without)
    except ValueError as error:
        found.lacks(name, f"is not JSON ({one_line(error, 80)})", without)
    return {}


def _text(found: RecordedRun, name: str, without: str) -> str:
    path = found.path / name
    try:
        content = files.read(path, follow=False)
        found.changed = max(found.changed, path.lstat().st_mtime)
        if content.strip(" \n\0"):
            return content
        found.lacks(name, "is empty", without)
    except (OSError, ValueError) as error:
        _note_unreadable(found, name, error, without)
    return ""


def _note_unreadable(found: RecordedRun, name: str, error: OSError | ValueError, without: str) -> None:
    if isinstance(error, FileNotFoundError):
        found.lacks(name, "is not there", without, is_absent=True)
        return
    why = one_line(getattr(error, "strerror", None) or error, 80)
    if isinstance(error, OSError) and error.errno == errno.ENXIO:
        why = "it is not a regular file"
    if isinstance(error, UnicodeDecodeError):
        why = "it is not UTF-8"
    found.lacks(name, f"cannot be read ({why})", without)


def recorded_state(path: Path) -> str:
    """The state in the folder's status.json; "" where it cannot be read."""
    return text(_mapping(RecordedRun(path), "status.json").get("state"), 20)


def state_of(run: RecordedRun, now: float, is_job_over: Callable[[], bool | None] | None = None) -> str:
    """finished, failed, stopped, left, running, killed (its processes are gone or silent, no end is recorded), unknown.

    A recorded end counts first, then whether a process of this host holds the folder, then whether SLURM knows the
    job, then the clock. `is_job_over` returns SLURM's answer, None for none; left out: SLURM is asked here.
    """
    launch, status = run.launch, text(run.status.get("state"), 20)
    for recorded in (status, launch.end.state if launch and launch.end else ""):
        if recorded in ENDED:
            return recorded
    if status != "running" and not launch:
        return "unknown"
    silent = now - run.last_sign
    if silent < QUIET:
        return "running"
    if launch and launch.hosts[:1] == [socket.gethostname()]:
        return "running" if _is_held(run.path) else "killed"
    is_over = is_job_over() if is_job_over else _is_over(run.job_id)
    if is_over is None:
        is_over = silent >= max(SILENT, SILENT_PART * (launch.clock if launch else 0.0))
    return "killed" if is_over else "running"


def _is_over(job: str) -> bool | None:
    """Whether SLURM no longer knows the job; None where there is no job, or SLURM does not answer."""
    try:
        return not slurm.query(job, "%T") if job else None
    except SlurmError as error:
        return True if error.cause == "gone" else None


def _is_held(folder: Path) -> bool:
    """Whether a process of this host holds the folder. It takes no lock, which a run could then not have."""
    try:
        status = (folder / ".lock").stat()
        locks = Path("/proc/locks").read_text(encoding="ascii")
    except (OSError, ValueError):
        return True
    mark = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino} "
    lock = str((folder / ".lock").resolve())
    for process in Path("/proc").glob("[0-9]*") if mark not in locks else ():  # some file systems have no locks
        with contextlib.suppress(OSError):  # somebody else's, or it has ended
            if any(str(each.readlink()) == lock for each in (process / "fd").iterdir()):
                return True
    return mark in locks


def newest_checkpoint(folder: Path) -> tuple[int, float] | None:
    """The step of the newest checkpoint, and when it was written, in seconds since 1970; None without one."""
    with contextlib.suppress(OSError, ValueError):
        for path in checkpoint.committed(folder / "checkpoints")[-1:]:
            return int(path.name.rpartition("-")[2]), path.stat().st_mtime
    return None


def written(folder: Path) -> float | None:
    """When one of the run's files was last written, in seconds since 1970; None where it is no run's folder."""
    times = list[float]()
    for name in FILES:
        with contextlib.suppress(OSError):
            times.append((folder / name).lstat().st_mtime)
    return max(times, default=None)
