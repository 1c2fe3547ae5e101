"""Experiment trackers: each is a process of its own, which can neither stop nor slow down a training.

A tracker's library brings its own threads, hooks, exit handlers and version of protobuf. So rank 0 loads none of
them: it writes lines of JSON to a pipe, and never waits for the process that reads them.
"""

import contextlib
import fcntl
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain import files, installed, untrusted
from hvdtrain.core.settings import TRACKERS
from hvdtrain.errors import EngineUnavailable
from hvdtrain.launch.topology import Topology

CLOSE_SECONDS = 10.0
STOP_SECONDS = 3.0
"""Seconds that the trackers have where a signal or an error ends the run, as the launcher may not wait longer."""
QUEUE_BYTES = 1 << 20


def check_installed(names: Sequence[str]) -> None:
    """Raises EngineUnavailable for a tracker whose library is not installed. Imports no library."""
    for name in names:
        found = importlib.util.find_spec(module) if (module := TRACKERS.get(name)) else None
        if module and not (found and found.origin):  # a folder of wandb's own, in the current one, has none
            raise EngineUnavailable(f"tracker {name} is not installed; pip install 'hvdtrain[{name}]'.")


def metadata(topology: Topology, framework: str, engine: str, **trained: Any) -> dict[str, Any]:
    """What a tracker stores about the run; `trained`: recipe and plan, or what replaces them. The tracker's
    process adds the git commit."""
    return {
        **untrusted.without_secrets(trained),
        "framework": framework,
        "engine": engine,
        "launcher": topology.launcher,
        "ranks": topology.size,
        "hosts": math.ceil(topology.size / topology.local_size),
        "job_id": topology.job_id,
        "versions": installed.versions(),
    }


class Trackers:
    """A run's trackers, on rank 0. The methods return lines for the log and raise nothing. Only `close` waits."""

    def __init__(
        self,
        names: Sequence[str] = (),
        folder: Path = Path(),
        project: str = "",
        metadata: Mapping[str, Any] | None = None,
        resumes: bool = False,
    ) -> None:
        """Starts those of `names` that are processes. They keep their files in the run folder `folder`.

        `project` groups runs. `resumes`: whether the run continues from a checkpoint, and so keeps its run id.
        """
        self._processes: list[_Process] = []
        self._lines: list[str] = []
        start = {"project": re.sub(r"[^\w.-]", "-", project), "metadata": metadata or {}, "resumes": resumes}
        for name in dict.fromkeys(name for name in names if TRACKERS.get(name)):
            try:
                files.make_folder(folder / "trackers")
                files.write(folder / "trackers" / f"{name}-start.json", json.dumps(start))
                self._processes.append(_Process(name, folder, self._lines))
            except (OSError, ValueError) as error:
                self._lines.append(f"tracker {name} could not be started: {error}")

    def add(self, metrics: Mapping[str, float], step: int) -> list[str]:
        """Sends the metrics after `step` updates."""
        for process in self._processes:
            process.send({"metrics": metrics, "step": step})
        return self._collected()

    def close(self, state: str) -> list[str]:
        """Ends the trackers' runs, within CLOSE_SECONDS. `state` is finished, failed or stopped."""
        seconds = CLOSE_SECONDS if state == "finished" else STOP_SECONDS
        deadline = time.monotonic() + seconds
        for process in self._processes:
            process.end(state)
        for process in self._processes:
            process.wait(deadline, seconds)
        self._processes = []  # whose pipes are closed
        return self._collected()

    def _collected(self) -> list[str]:
        for process in self._processes:
            process.read()
        lines = self._lines[:]
        self._lines.clear()
        return lines


class _Process:
    """One tracker's process. It reads lines of JSON from stdin, and prints lines for the log to stdout."""

    def __init__(self, name: str, folder: Path, lines: list[str]) -> None:
        """`lines`: to which it adds lines for the log."""
        self._name, self._lines = name, lines
        command = untrusted.program(__name__, name, str(folder.absolute()))
        # What the library prints goes into the file. The process has its own session: Ctrl-C is for the training.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(folder / "trackers" / f"{name}.log", flags, 0o666), "ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0, start_new_session=True
            )
        assert self._process.stdin and self._process.stdout
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._to, False)
        os.set_blocking(self._from, False)
        with contextlib.suppress(OSError):  # a user's pipes may be limited
            fcntl.fcntl(self._to, fcntl.F_SETPIPE_SZ, QUEUE_BYTES)
        self._unsent = self._unread = b""
        self._dropped = 0

    def send(self, record: Mapping[str, Any]) -> None:
        """Sends a record, or drops it where the process lags behind."""
        if not self._flush():
            self._unsent = json.dumps(record).encode() + b"\n"
            self._flush()
            return
        if not self._dropped:
            self._lines.append(f"tracker {self._name} lags behind: it misses points; metrics.jsonl has them all")
        self._dropped += 1

    def end(self, state: str) -> None:
        """Requests the end of the tracker's run."""
        self._unsent += json.dumps({"state": state}).encode() + b"\n"
        self._flush()

    def wait(self, deadline: float, seconds: float) -> None:
        """Waits until the process ends, and kills it at the deadline."""
        while self._process.poll() is None and time.monotonic() < deadline:
            self._flush()
            time.sleep(0.02)
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._lines.append(f"tracker {self._name} did not end within {seconds:g} s; it may miss the last points")
        elif self._process.returncode:
            self._lines.append(
                f"tracker {self._name} ended with exit code {self._process.returncode}; see trackers/{self._name}.log"
            )
        if self._dropped:
            self._lines.append(f"tracker {self._name} misses {self._dropped} points; metrics.jsonl has them")
        self._process.wait()
        self.read()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            pipe.close()

    def _flush(self) -> bytes:
        """Writes as much as the pipe takes, and returns the rest."""
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._to, self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # it has ended and given a reason; `wait` reports a crash
            self._unsent = b""
        return self._unsent

    def read(self) -> None:
        """Adds the lines that the process has printed since the last call."""
        with contextlib.suppress(OSError):
            while read := os.read(self._from, 1 << 16):
                self._unread += read
        *whole, self._unread = self._unread.split(b"\n")
        self._lines += [f"tracker {self._name}: {line.decode(errors='replace')}" for line in whole]
