"""A tracker's process: it reads the run's metrics from stdin and gives them to the library, until training ends."""

import contextlib
import fcntl
import importlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hvdtrain import files
from hvdtrain.record.journal import git_commit
from hvdtrain.terminal import STOP_SIGNALS
from hvdtrain.untrusted import one_line

LAST_SECONDS = 30
"""Seconds that a tracker has after the training's end."""
SAVE_SECONDS = 1.0
"""The fewest seconds between two notes of which steps the tracker has."""


@dataclass(frozen=True)
class Start:
    """What a tracker begins with."""

    folder: Path
    project: str
    metadata: Mapping[str, Any]
    run_id: str | None
    """The id of the run to continue; None begins a new one."""
    note: Callable[[str], None]
    """A function that writes a line into the training's log."""


class Tracker(Protocol):
    """A tracker's library, alone in its process. Every method may raise, print and be slow."""

    def start(self, start: Start) -> str:
        """Begins or continues the tracker's run, and returns its id."""

    def add(self, metrics: Mapping[str, float], step: int) -> None:
        """Stores the metrics after `step` updates."""

    def close(self, state: str) -> None:
        """Ends the run. `state` is finished, failed or stopped."""


def main(name: str, folder: Path) -> None:
    """Runs the tracker of that name for the training of the run folder."""
    for number in (signal.SIGINT, *STOP_SIGNALS):  # SLURM sends them to all of a step, a terminal as it closes
        signal.signal(number, signal.SIG_IGN)
    parent, messages = os.getppid(), os.dup(1)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with contextlib.suppress(OSError):  # the tracker of a killed run may still be writing its last points
        fcntl.flock(2, fcntl.LOCK_EX)

    def note(text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(messages, f"{one_line(text)}\n".encode())

    given = files.read_json(folder / "trackers" / f"{name}-start.json")
    follower = _Follower(folder / "trackers" / f"{name}.json", note)
    about = {**given["metadata"], "git": git_commit()}
    start = Start(folder, given["project"], about, follower.known_id(given["resumes"]), note)
    follower.start(f"{__package__}.{name}", start)
    state = "failed"  # a training that is killed never reports its end
    for record in _records(parent):
        if "state" in record:
            state = record["state"]
            break
        follower.add(record["metrics"], record["step"])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LAST_SECONDS)
    follower.close(state)
    os._exit(0)  # exit handlers may wait for a server


class _Follower:
    """Calls a tracker, reports its first failure, and keeps in a file its run id and the last step of each metric."""

    def __init__(self, path: Path, note: Callable[[str], None]) -> None:
        self._path, self._note = path, note
        self._tracker: Tracker
        self._id: str | None = None
        self._last: dict[str, int] = {}
        self._saved = 0.0
        self._has_failed = False

    def known_id(self, resumes: bool) -> str | None:
        """The run id of the run folder; None for a training that begins anew, or where the file is lost."""
        files.sweep(self._path.parent, self._path.name)
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            kept = files.read_json(self._path)
            if resumes and type(kept["id"]) is str:
                self._last = {name: int(step) for name, step in kept["last"].items()}
                return str(kept["id"])
        return None

    def start(self, module: str, start: Start) -> None:
        """Starts the class Tracker of that module, and ends the process where that fails."""
        try:
            self._tracker = importlib.import_module(module).Tracker()
            self._id = self._tracker.start(start)
        except Exception as error:
            self._note(f"it cannot start, the training continues without it: {type(error).__name__}: {error}")
            os._exit(0)
        if self._id != start.run_id:
            self._last = {}
        with self._failures_reported():
            self._save()

    def add(self, metrics: Mapping[str, float], step: int) -> None:
        """Gives the tracker the metrics but for those that it has: a resumed training makes some steps again."""
        new = {name: value for name, value in metrics.items() if step > self._last.get(name, -1)}
        if not new:
            return
        with self._failures_reported():
            self._tracker.add(new, step)
            self._last |= dict.fromkeys(new, step)
            if time.monotonic() - self._saved > SAVE_SECONDS:
                self._save()

    def close(self, state: str) -> None:
        with self._failures_reported():
            self._save()
        with self._failures_reported():
            self._tracker.close(state)

    def _save(self) -> None:
        self._saved = time.monotonic()
        files.write(self._path, json.dumps({"id": self._id, "last": self._last}))

    @contextlib.contextmanager
    def _failures_reported(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                self._note(f"it fails, the training continues: {type(error).__name__}: {error}")


def _records(parent: int) -> Iterator[dict[str, Any]]:
    """The training's records until it ends, also where a child of its process keeps the pipe open."""
    unread, alive = b"", True
    while alive:
        alive = os.getppid() == parent
        if not select.select([0], [], [], 1 if alive else 0)[0]:
            continue
        alive = True
        if not (read := os.read(0, 1 << 16)):
            return
        *lines, unread = (unread + read).split(b"\n")
        yield from map(json.loads, lines)
