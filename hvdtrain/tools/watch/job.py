"""What SLURM says of a job, requested beside the display: a busy controller answers late."""

import re
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass

SECONDS = 10.0
"""Between two requests, and for one."""
FORMAT = "%T|%r|%V|%S|%L|%N|%Z"
NUMBER = re.compile(r"[0-9]{1,18}(_[0-9]{1,9})?")
WAITING = {"PENDING", "REQUEUED", "CONFIGURING", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"}
GONE = "GONE"
"""A job that squeue knows no longer."""


@dataclass(frozen=True)
class Job:
    """A job as squeue shows it."""

    number: str
    state: str = ""
    """As RUNNING; "" where SLURM has not answered."""
    reason: str = ""
    submit: str = ""
    """When it was submitted."""
    start: str = ""
    """When it is expected to start, or did."""
    left: str = ""
    """Of its time limit."""
    nodes: str = ""
    folder: str = ""
    """In which it was submitted."""

    @property
    def is_waiting(self) -> bool:
        """Whether it will start, or start again."""
        return self.state in WAITING

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.state == GONE


def requested(number: str) -> Job:
    """What squeue says of the job now."""
    squeue = shutil.which("squeue")
    if not squeue:
        return Job(number)
    command = [squeue, "--noheader", f"--jobs={number}", f"--format={FORMAT}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return Job(number)
    return parsed(number, done.returncode, done.stdout, done.stderr)


def parsed(number: str, code: int, out: str, err: str) -> Job:
    """The job of squeue's answer."""
    fields = out.partition("\n")[0].split("|")
    if code == 0 and len(fields) == FORMAT.count("|") + 1:
        return Job(number, *(value.strip() for value in fields))
    # Soon after its end it is listed no more, then SLURM knows no such job.
    is_gone = (code == 0 and not out.strip()) or "Invalid job id" in err
    return Job(number, GONE if is_gone else "")


class Squeue:
    """The newest answer on one job; a request is under way now and then."""

    def __init__(self, number: str) -> None:
        self._number, self._answer, self._next = number, Job(number), 0.0
        self._asking = threading.Thread()

    def job(self, *, waits: bool = False) -> Job:
        """What is known; `waits` for an answer."""
        if waits:
            self._ask()
        elif not self._asking.is_alive() and time.monotonic() >= self._next:
            self._next = time.monotonic() + SECONDS
            self._asking = threading.Thread(target=self._ask, daemon=True)  # Ctrl-C does not wait for it
            self._asking.start()
        return self._answer

    def _ask(self) -> None:
        self._answer = requested(self._number)
