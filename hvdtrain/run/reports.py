"""report.html at a run's end, made by a process of its own: its libraries stay out of rank 0."""

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from hvdtrain.run.screen import SCREEN
from hvdtrain.untrusted import program

VARIABLE = "HVDTRAIN_REPORT"
"""off: no report at a run's end."""
WITHOUT_REPORT = {VARIABLE: "off"}
"""For the environment of a run that nobody will read about."""
SECONDS = 60.0
LAST_SECONDS = 10.0
"""Of a run that a signal or an error ends: the launcher may not wait."""
End = Literal["well", "error", "fault"]


def write(folder: Path, environ: Mapping[str, str], end: End) -> None:
    """Writes the report of the run folder, and prints where it is. No report is a reason to fail. After a fault nobody
    waits for it: its traceback is printed first."""
    if environ.get(VARIABLE) == "off":
        return
    with contextlib.suppress(OSError, ValueError, KeyboardInterrupt), _terminated_later(end):
        if end != "fault":
            SCREEN.waiting("writing the report")
        process = subprocess.Popen(
            program("hvdtrain", "report", str(folder), "--output", str(folder / "report.html")),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL if end == "fault" else subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        if end == "fault":
            return
        if failure := _failure(process, SECONDS if end == "well" else LAST_SECONDS):
            print(f"no report was written: {failure}; later: python -m hvdtrain report {folder}", file=sys.stderr)
        else:
            SCREEN.print(f"INFO - report: {folder / 'report.html'}")


def _failure(process: "subprocess.Popen[str]", seconds: float) -> str:
    """Why it has written none; "" where it has."""
    try:
        _, printed = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()  # and no wait for it: its file system may hang
        return f"it was not done after {seconds:.0f} s"
    last = printed.strip().rpartition("\n")[2]
    return (last or f"exit code {process.returncode}") if process.returncode else ""


@contextlib.contextmanager
def _terminated_later(end: End) -> Iterator[None]:
    """Within the block a SIGTERM is ignored after an error: launchers send it once another rank has ended."""
    if end != "error" or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
