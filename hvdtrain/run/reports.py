"""report.html at a run's end, made by a process of its own: its libraries stay out of rank 0."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.run.screen import SCREEN

VARIABLE = "HVDTRAIN_REPORT"
"""off: no report at a run's end."""
WITHOUT_REPORT = {VARIABLE: "off"}
"""For the environment of a run that nobody will read about."""
SECONDS = 60.0
LAST_SECONDS = 10.0
"""Of a run that a signal or an error ends: the launcher may not wait."""


def write(folder: Path, environ: Mapping[str, str], *, ended_well: bool) -> None:
    """Writes the report of the run folder, and prints where it is. No report is a reason to fail."""
    if environ.get(VARIABLE) == "off":
        return
    if not ended_well:
        with contextlib.suppress(ValueError):  # a program may train in another thread
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from the launcher, as other ranks have ended
    SCREEN.waiting("writing the report")
    command = [sys.executable, "-m", "hvdtrain", "report", str(folder)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=SECONDS if ended_well else LAST_SECONDS,
            check=False,
            start_new_session=True,
        )
        failure = done.stderr.strip().rpartition("\n")[2] if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        failure = str(error)
    if failure:
        print(f"no report was written: {failure}; later: python -m hvdtrain report {folder}", file=sys.stderr)
    else:
        SCREEN.print(f"INFO - report: {folder / 'report.html'}")
