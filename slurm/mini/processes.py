"""Processes on the machine: started, recognised again, ended; and commands that must succeed."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from mini import ClusterError

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENVIRON = {"PATH": PATH, "LANG": "C.UTF-8", "HOME": "/root"}


class Process(NamedTuple):
    """One process for good: the number alone may be another's by now."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> "Process":
        """The process that has this number now."""
        return cls(pid, _start_time(pid) or 0)

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return _start_time(self.pid) == self.start


def _start_time(pid: int) -> int | None:
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else int(fields[18])


def end(processes: Sequence[Process], how: signal.Signals = signal.SIGKILL) -> None:
    """Ends them all. Killing process 1 of a node ends everything on it, and its mounts and links go with it."""
    for process in processes:
        if process.alive:
            os.kill(process.pid, how)
    wait(lambda: not any(process.alive for process in processes), 60, "a killed process to end")


def wait(ready: Callable[[], bool], seconds: float, what: str) -> None:
    """Returns as soon as `ready`. Raises ClusterError after so many seconds."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise ClusterError(f"waited {seconds:g} s in vain for {what}")
        time.sleep(0.02)


def run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """A command's end and all its output. Raises ClusterError with its last line where it must not fail, yet does."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=60,
        check=False,
        env=ENVIRON,
    )
    if check and done.returncode:
        raise ClusterError(
            f"{' '.join(command)}: {(done.stdout.strip().splitlines() or ['failed without output'])[-1]}"
        )
    return done


def inside(process: Process, *command: str, check: bool = True) -> str:
    """The output of a command that runs as root on the node of this process."""
    return run("nsenter", f"--target={process.pid}", "-m", "-u", "-i", "-n", "-p", *command, check=check).stdout


def in_network(process: Process, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """A command of the machine in the network of this process."""
    return run("nsenter", f"--target={process.pid}", "-n", *command, check=check)
