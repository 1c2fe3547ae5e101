"""How a process of a run begins and ends: its world, and of an error one line, the run's status and an exit code."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, NoReturn

from hvdtrain import untrusted
from hvdtrain.errors import AbortedError, HvdtrainError, OutputError, StoppedError, TopologyError
from hvdtrain.launch import rendezvous, slurm_job
from hvdtrain.launch.ancestors import arguments_of, is_below_terminal_task, is_launcher_shell
from hvdtrain.launch.topology import Topology, discover
from hvdtrain.ranks.liveness import print_error, print_warning
from hvdtrain.ranks.world import World
from hvdtrain.record import folder as folders
from hvdtrain.record import handover
from hvdtrain.record.folder import RunFolder
from hvdtrain.terminal import END_SIGNALS, INTERRUPTED, SCREEN, TIME_LIMIT_SIGNALS
from hvdtrain.untrusted import program

REPORT_VARIABLE = "HVDTRAIN_REPORT"
"""off: no report at a run's end."""
WITHOUT_REPORT = {REPORT_VARIABLE: "off"}
"""For the environment of a run that nobody will read about."""
REPORT_SECONDS = 60.0
LAST_REPORT_SECONDS = 10.0
"""Of a run that a signal or an error ends: the launcher may not wait."""
End = Literal["well", "error", "fault"]


def begin(*, insecure: bool) -> World:
    """The world that the launcher promised, begun. Raises HvdtrainError, which is printed already."""
    topology = Topology.alone()
    try:
        topology = discover(os.environ)
        if topology.launcher == "srun" and topology.size > 1 and is_below_terminal_task(os.environ):
            raise TopologyError(
                f"srun --pty gave this terminal to task 0 of {topology.size} alone, and the others ended; start this "
                f"with: srun --overlap -n{topology.size}, or for one process the terminal with: srun -n1 --pty."
            )
        world = World(topology, rendezvous.from_launcher(topology, os.environ), insecure=insecure)
        world.start()
        if topology.is_rank_0 and is_launcher_shell(arguments_of(1)):
            what = "horovodrun is the first process of this container, so SIGTERM (docker stop) does not reach it"
            print_warning(topology, f"{what}; start the container with --init, or: python -m hvdtrain build.")
    except HvdtrainError as error:
        if topology.is_rank_0 or (not error.everywhere and topology.local_rank == 0):
            print_error(topology, type(error), untrusted.one_line(error))
        raise
    step = slurm_job.step_id(os.environ)
    world.liveness.on_found = lambda rank, host, why: handover.write(
        os.environ, "lost", rank=rank, host=host, why=why, step_id=step
    )
    world.liveness.on_vanished = lambda: slurm_job.cancel_step(os.environ)
    return world


def end(code: int) -> NoReturn:
    """Ends the process with this exit code."""
    if code:  # srun --kill-on-bad-exit and mpirun end whoever has not ended yet, while the interpreter tears down
        for number in END_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


class Ending:
    """Around all that a rank does: the farewell at the block's end. An error that a user can meet is reported in one
    line, and is then `code`; another one is raised again, once the other ranks know of it."""

    def __init__(self, world: World) -> None:
        self.world, self.topology = world, world.topology
        self.began = False
        """Whether training has begun, after which ranks may fail one by one."""
        self.folder: RunFolder | None = None
        self.code = 0

    def __enter__(self) -> "Ending":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        end: End = "well"
        try:
            self.world.energy.close()
            self.world.record_energy()
            if isinstance(error, HvdtrainError):
                self.code = self._fail(error)
            elif isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
                full = f"{error.filename or 'the run folder'}: {error.strerror}; free space, then start again."
                self.code = self._fail(OutputError(full))
            elif isinstance(error, KeyboardInterrupt):
                self.code = self._interrupted()
            else:  # a fault, or --help's exit
                fault = error is not None and not isinstance(error, SystemExit)
                if fault:
                    end = "fault"
                    self._record(type(error).__name__, str(error), 1)
                    self._ended("failed", f"{type(error).__name__}: {error}")
                else:
                    self.world.launch.end("finished" if self.world.launch.is_finished else "stopped")
                self.world.leave(f"{type(error).__name__}: {error}" if fault else None)
        except BaseException as another:
            self.world.leave(f"{type(another).__name__}: {another}")
            raise
        self._let_go("error" if self.code else end)
        return bool(self.code)

    def begin_another(self) -> None:
        """This process has trained a run, and trains another one in another folder."""
        if self.folder:
            self.world.record_energy()
            self.world.energy.book.begin()
            self.world.launch.end("finished" if self.world.launch.is_finished else "stopped")
            self._let_go("well")

    def _let_go(self, end: End) -> None:
        """Closes the run folder, whose report is written."""
        self.world.launch.close()
        if self.folder:
            write_report(self.folder.path, os.environ, end)
            self.folder.lock.close()  # this process may open the folder again

    def _ended(self, state: folders.State, text: str) -> None:
        """The run's status and the launch's last record."""
        if self.folder:
            with contextlib.suppress(OSError):  # the disk may be what failed
                self.folder.write_status(state, error=text)
        self.world.launch.end(state, untrusted.one_line(text))

    def _record(self, kind: str, text: str, code: int, **more: object) -> None:
        """Why rank 0 ends, for a supervisor."""
        if self.topology.is_rank_0:
            handover.write(os.environ, "error", kind=kind, text=text, code=code, **more)

    def _interrupted(self) -> int:
        if self.topology.is_rank_0:
            print("interrupted; the same command resumes from the last checkpoint", file=sys.stderr, flush=True)
        self._ended("stopped", "interrupted")
        self.world.leave("interrupted", INTERRUPTED)
        return INTERRUPTED

    def _fail(self, error: HvdtrainError) -> int:
        stops = isinstance(error, StoppedError) or error.exit_code == INTERRUPTED
        state: folders.State = "stopped" if stops else "failed"
        if self.folder:
            with contextlib.suppress(OSError):  # the disk may be what failed
                self.folder.write_status(state, error=str(error))
        stop = self.world.stop
        self._record(
            type(error).__name__,
            untrusted.one_line(error),
            error.exit_code,
            named=not isinstance(error, AbortedError) or error.reason is not None,
            near_limit=isinstance(error, StoppedError) and stop.signal in TIME_LIMIT_SIGNALS,
            too_early=stop.too_early,
        )
        # Before training, a host's first rank reports for the host; later, a damaged file may be one rank's alone.
        topology = self.topology
        is_own = not error.everywhere and type(error).everywhere  # this rank's alone, as a variable that it has not
        first = is_own or self.began or topology.local_rank == 0
        reports_error = topology.is_rank_0 or (not error.everywhere and first)
        if reports_error and not error.reported:
            print_error(topology, type(error), untrusted.one_line(error))
        if isinstance(error, StoppedError):
            self.world.launch.event("signal", str(error))
        if topology.is_rank_0 and isinstance(error, StoppedError):
            _requeue(self.world)  # before the farewell: srun ends rank 0 as soon as another rank has ended
        self.world.launch.end(state, untrusted.one_line(error))
        if not reports_error:
            self.world.wait_for_rank_0()
        self.world.leave(str(error), error.exit_code)
        return error.exit_code


def _requeue(world: World) -> None:
    """Queues the job again if a warning of its time limit stopped the run; a cancelled job stays cancelled. A
    supervisor does it itself, outside of any container."""
    job_id = slurm_job.job_id(os.environ) or world.topology.job_id
    if not job_id or world.stop.signal not in TIME_LIMIT_SIGNALS or handover.is_supervised(os.environ):
        return
    if world.stop.too_early:  # else it would be queued again for ever, one step a time
        message = f"job {job_id} is not queued again: the warning came before the first step; ask for more time."
    else:
        message = slurm_job.requeue(job_id)
    world.launch.event("requeue", message)
    print(message, file=sys.stderr, flush=True)


def write_report(folder: Path, environ: Mapping[str, str], end: End) -> None:
    """Writes the report of the run folder, and prints where it is. No report is a reason to fail. After a fault nobody
    waits for it: its traceback is printed first."""
    if environ.get(REPORT_VARIABLE) == "off":
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
        if failure := _report_failure(process, REPORT_SECONDS if end == "well" else LAST_REPORT_SECONDS):
            print(f"no report was written: {failure}; later: python -m hvdtrain report {folder}", file=sys.stderr)
        else:
            SCREEN.print(f"INFO - report: {folder / 'report.html'}")


def _report_failure(process: "subprocess.Popen[str]", seconds: float) -> str:
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
