"""The job of a supervisor: its nodes, the words of its srun, and one start of its step."""

import math
import re
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hvdtrain.errors import JobError, TopologyError
from hvdtrain.launch import slurm
from hvdtrain.launch.slurm import SlurmError
from hvdtrain.record import handover
from hvdtrain.tools.slurm.script import Option, program, program_of, split
from hvdtrain.tools.supervise.decision import ENDING
from hvdtrain.untrusted import quoted

LEFT = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")  # days, hours, minutes, seconds
NOT_ALLOCATED = "supervise runs in a job's script, in front of its srun; here is no job. Submit one: sbatch FILE"
AS_IN = "as in: python -m hvdtrain supervise -- srun python train.py"
TICK = 0.2  # seconds between two checks whether srun has ended
FAREWELL = 2.0  # seconds in which the other ranks may end by themselves once one is lost
PATIENCE = 40.0  # seconds in which srun may end once they are killed: more than KillWait, 30 at most sites
HASTE = 1.0  # the same where a node is silent, for which srun would wait
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
BETWEEN_INTERRUPTS = 0.3  # seconds between two SIGINT, of which srun wants two within a second


@dataclass(frozen=True)
class Job:
    """The job, as its script's environment describes it."""

    number: str  # as SLURM's commands take it
    nodes: tuple[str, ...]
    tasks_per_node: int | None  # None where nodes have different numbers

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "Job":
        """The job of that environment. Raises JobError where there is none."""
        number, listed = slurm.job_id(environ), environ.get("SLURM_JOB_NODELIST")
        if not number or not listed:
            raise JobError(NOT_ALLOCATED)
        try:
            groups = slurm.tasks_per_node(environ.get("SLURM_TASKS_PER_NODE", ""))
            nodes = tuple(slurm.hosts(listed))
        except (ValueError, TopologyError):
            raise JobError(NOT_ALLOCATED) from None
        given = environ.get("SLURM_NTASKS_PER_NODE", "")
        counts = {int(given)} if given.isdecimal() else {tasks for tasks, _ in groups}
        return cls(number, nodes, counts.pop() if len(counts) == 1 else None)

    def node_of(self, host: str) -> str:
        """The node with that hostname."""
        return host if host in self.nodes else host.partition(".")[0]

    def seconds_left(self) -> float:
        """Seconds until the time limit; infinite where SLURM reports none."""
        shown = None
        with suppress(SlurmError):
            shown = LEFT.fullmatch(slurm.query(self.number, "%L")[0])
        if not shown:
            return math.inf
        days, hours, minutes, seconds = (int(digits or 0) for digits in shown.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def check_step(words: Sequence[str]) -> None:
    """Raises JobError where the words are no srun with a program."""
    if not words:
        raise JobError(f"no step to supervise; give it after --, {AS_IN}")
    if program(words) != "srun":
        raise JobError(
            f"what is supervised must be a step of srun, got {quoted(words[0])}; put srun before it, {AS_IN}"
        )
    if not program_of(words):
        raise JobError(f"srun must have a program to start, got none; {AS_IN}")


def number_of(words: Sequence[str], name: str) -> int | None:
    """The value of that option of srun, where it is given as a number."""
    values = [option.value for option, _ in _srun_options(words) if option.name == name]
    return int(values[-1]) if values and values[-1].isdecimal() else None


def placed(words: Sequence[str], nodes: int, tasks_per_node: int | None, without: Collection[str]) -> list[str]:
    """The words of srun for the same step on so many nodes, without those named."""
    excluded = [option.value for option, _ in _srun_options(words) if option.name == "exclude"]
    ntasks = nodes * tasks_per_node if tasks_per_node else None
    added = {"nodes": nodes, "ntasks": ntasks, "exclude": ",".join([*excluded, *without])}
    return _with(words, {name: value for name, value in added.items() if value})


def beside_others(words: Sequence[str]) -> list[str]:
    """The words of srun without memory of its own, which a step that hangs still holds."""
    return _with(words, {"mem": 0})


def _with(words: Sequence[str], added: Mapping[str, object]) -> list[str]:
    """The words of srun with these options, in place of those of the same names."""
    kept = [word for option, given in _srun_options(words) if option.name not in added for word in given]
    return [words[0], *(f"--{name}={value}" for name, value in added.items()), *kept, *program_of(words)]


def _srun_options(words: Sequence[str]) -> list[tuple[Option, Sequence[str]]]:
    """The options of srun, without those of its program, each with the words that give it."""
    left, found = words[1 : len(words) - len(program_of(words))], list[tuple[Option, Sequence[str]]]()
    while left:
        length = 1 if len(left) == 1 or left[1].startswith("-") else 2
        found.append((split(left)[0][0], left[:length]))
        left = left[length:]
    return found


class Signals:
    """Passes signals on to srun, and remembers the last one, or the first that ends."""

    def __init__(self) -> None:
        self.last = self._missed = 0
        self.process: subprocess.Popen[bytes] | None = None
        for number in SIGNALS:
            signal.signal(number, self._received)

    def _received(self, number: int, _frame: FrameType | None) -> None:
        if self.last not in ENDING:
            self.last = number
        process = self.process
        if not process:  # it may have been started, and not be noted yet
            self._missed = self.last
        elif process.poll() is None:
            process.send_signal(number)
            if number == signal.SIGINT:
                time.sleep(BETWEEN_INTERRUPTS)
                process.send_signal(number)

    def follow(self, process: subprocess.Popen[bytes]) -> None:
        """Passes on to this process what comes from now on, and what came while there was none."""
        self.process, missed, self._missed = process, self._missed, 0
        if missed:
            self._received(missed, None)


def run_step(
    words: Sequence[str],
    environ: Mapping[str, str],
    folder: Path,
    signals: Signals,
    silent: Callable[[], frozenset[str]],
) -> tuple[int, frozenset[str]]:
    """Runs srun to its end. Returns its exit code as a shell has it, and the nodes that were silent
    if it failed.

    The ranks leave their reports in `folder`.
    """
    environ = {**environ, handover.VARIABLE: str(folder.resolve())}
    # In a session of its own, as a terminal would send it Ctrl-C too.
    process = subprocess.Popen(words, env=environ, stdin=subprocess.DEVNULL, start_new_session=True)
    signals.follow(process)
    try:
        lost = _watch(process, folder)
        noticed = time.monotonic()
        found = silent() if lost.host else frozenset[str]()
        if lost.host:
            _end(process, step_of_this_job(lost, environ), noticed + FAREWELL, HASTE if found else PATIENCE)
    finally:
        signals.process = None
    code = process.returncode
    if code and not lost.host and signals.last not in ENDING:
        found = silent()
    return (code if code >= 0 else 128 - code), found


def _watch(process: subprocess.Popen[bytes], folder: Path) -> handover.Report:
    """Waits until srun has ended or a rank is reported as lost; that report, or an empty one."""
    while not (lost := handover.read(folder, "lost")).host:
        if _ends_within(process, TICK):
            return handover.read(folder, "lost")
    return lost


def step_of_this_job(lost: handover.Report, environ: Mapping[str, str]) -> str:
    """The step that the report is of, as scancel takes it; "" where it is no step of this job."""
    job = re.escape(slurm.job_id(environ) or "")
    return lost.step_id if lost.step_id and re.fullmatch(rf"{job}\.[0-9]{{1,10}}", lost.step_id) else ""


def _end(process: subprocess.Popen[bytes], step_id: str, deadline: float, patience: float) -> None:
    """Ends srun after a rank was lost: by itself it would wait for the tasks of a silent node."""
    if _ends_within(process, deadline - time.monotonic()):
        return
    if step_id:
        slurm.cancel(step_id, "--signal=KILL")
    if not _ends_within(process, patience):
        process.kill()
        process.wait()


def _ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return False
    return True
