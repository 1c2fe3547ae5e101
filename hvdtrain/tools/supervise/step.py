"""One step under supervision: srun, the signals that reach it, and its end where a node no longer answers."""

import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from hvdtrain.launch import slurm_job
from hvdtrain.run import outcome
from hvdtrain.tools.supervise import job
from hvdtrain.tools.supervise.decision import ENDING

TICK = 0.2  # seconds between two looks
FAREWELL = 2.0  # seconds for the other ranks to end by themselves once one is lost
PATIENCE = 40.0  # seconds for srun to end once they are killed: KillWait, 30 at most sites, and more
HASTE = 1.0  # the same where a node is silent: srun would wait for it
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
NO_TERMINAL = 0.3  # seconds between two Ctrl-C, by which srun knows that it is meant


class Signals:
    """What this process is sent goes to the step under way, and is remembered."""

    def __init__(self) -> None:
        self.last = 0
        self.process: subprocess.Popen[bytes] | None = None
        for number in SIGNALS:
            signal.signal(number, self._received)

    def _received(self, number: int, _frame: FrameType | None) -> None:
        if self.last not in ENDING:
            self.last = number
        process = self.process
        if process and process.poll() is None:
            process.send_signal(number)
            if number == signal.SIGINT:  # srun wants two within a second
                time.sleep(NO_TERMINAL)
                process.send_signal(number)


def run(
    words: Sequence[str],
    environ: Mapping[str, str],
    folder: Path,
    signals: Signals,
    silent: Callable[[], frozenset[str]],
) -> tuple[int, frozenset[str]]:
    """Runs the step to its end. Its exit code as a shell has it, and which nodes were silent if it did not end well.

    Its ranks leave what they report in `folder`.
    """
    own = {**environ, outcome.VARIABLE: str(folder.resolve())}
    # In a session of its own: else a terminal would send it Ctrl-C too.
    process = subprocess.Popen(words, env=own, stdin=subprocess.DEVNULL, start_new_session=True)
    signals.process = process
    try:
        lost = _watch(process, folder)
        noticed = time.monotonic()
        found = silent() if lost.host else frozenset[str]()
        if lost.host:
            _end(process, own_step(lost, environ), noticed + FAREWELL, HASTE if found else PATIENCE)
    finally:
        signals.process = None
    code = process.returncode
    if code and not lost.host and signals.last not in ENDING:
        found = silent()
    return (code if code >= 0 else 128 - code), found


def _watch(process: subprocess.Popen[bytes], folder: Path) -> outcome.Report:
    """Waits until the step has ended or a rank is reported as lost; that report, or an empty one."""
    while not (lost := outcome.read(folder, "lost")).host:
        try:
            process.wait(TICK)
            return outcome.read(folder, "lost")
        except subprocess.TimeoutExpired:
            continue
    return lost


def own_step(lost: outcome.Report, environ: Mapping[str, str]) -> str:
    """The step that the report is of; "" where it is none of this job's."""
    own = re.escape(slurm_job.job_id(environ) or "")
    return lost.step_id if lost.step_id and re.fullmatch(rf"{own}\.[0-9]{{1,10}}", lost.step_id) else ""


def _end(process: subprocess.Popen[bytes], step_id: str, deadline: float, patience: float) -> None:
    """Ends a step that has lost a rank: srun alone would wait for the tasks of a silent node."""
    if _ends_within(process, deadline - time.monotonic()):
        return
    if step_id:
        job.kill(step_id)
    if not _ends_within(process, patience):
        process.kill()
        process.wait()


def _ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return False
    return True
