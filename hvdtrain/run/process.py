"""How a process of a run joins the other ranks, and how it ends: an error becomes one line, a status, an exit code."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, NoReturn

from hvdtrain import untrusted
from hvdtrain.core.sharing import MOST_RANKS
from hvdtrain.errors import AbortedError, DataError, HvdtrainError, OutputError, StoppedError, TopologyError
from hvdtrain.launch import ancestors, rendezvous, slurm
from hvdtrain.launch.ancestors import arguments_of, is_below_terminal_task, is_launcher_shell
from hvdtrain.launch.display import follow, print_line
from hvdtrain.launch.rendezvous import Rendezvous
from hvdtrain.launch.topology import Topology, discover
from hvdtrain.ranks.liveness import Listener
from hvdtrain.ranks.messages import Times
from hvdtrain.ranks.slow import FIGURES, columns, slowest
from hvdtrain.ranks.stacks import lost_reader
from hvdtrain.ranks.world import World
from hvdtrain.record import folder as folders
from hvdtrain.record import handover
from hvdtrain.record.folder import RunFolder
from hvdtrain.record.journal import Journal
from hvdtrain.terminal import END_SIGNALS, INTERRUPTED, SCREEN, TIME_LIMIT_SIGNALS
from hvdtrain.untrusted import program

REPORT_VARIABLE = "HVDTRAIN_REPORT"
"""The environment variable that turns off the report at a run's end, if it is off."""
WITHOUT_REPORT = {REPORT_VARIABLE: "off"}
"""The environment of a run that needs no report."""
REPORT_SECONDS = 60.0
LAST_REPORT_SECONDS = 10.0
"""The seconds that a report may take where a signal or an error ends the run: the launcher may not wait longer."""
End = Literal["well", "error", "fault"]
"""How a process ends: well, by an error that a user can fix, or by any other exception."""


class RunListener(Listener):
    """Prints what the ranks report, and records it in the run folder once there is one."""

    def __init__(self, topology: Topology, journal: Journal) -> None:
        self.topology, self.journal = topology, journal
        self.folder: RunFolder | None = None
        """The run folder, on rank 0 alone."""
        self._reasons: set[str] = set()

    def error(self, kind: type[HvdtrainError], text: str) -> None:
        print_line(self.topology, kind.__name__, text)

    def warning(self, text: str) -> None:
        print_line(self.topology, "warning", text)

    def waiting(self, text: Callable[[], str]) -> None:
        SCREEN.waiting(text)

    def lost(self, reason: str) -> None:
        if self.folder and reason not in self._reasons:
            self._reasons.add(reason)
            self.journal.event("lost", reason)
        self.status("failed", reason)

    def lost_rank_found(self, rank: int, host: str, why: str) -> None:
        handover.write(os.environ, "lost", rank=rank, host=host, why=why, step_id=slurm.step_id(os.environ))

    def vanished(self) -> None:
        # srun itself would wait minutes for a dead node before it ends the others' tasks.
        if step := slurm.step_id(os.environ):
            slurm.cancel(step)

    def signalled(self, text: str) -> None:
        self.status("stopped", text)

    def status(self, state: folders.State, text: str) -> None:
        """Writes the run's status, once there is a folder."""
        if self.folder:
            with contextlib.suppress(OSError, OutputError):  # maybe the disk is what failed
                self.folder.write_status(state, error=text)

    def ended(self, state: folders.State, text: str) -> None:
        """Writes the run's status and the launch's last record."""
        self.status(state, text)
        self.journal.end(state, untrusted.one_line(text))

    def hand_over(self, kind: str, text: str, code: int, **more: object) -> None:
        """Writes for a supervisor why the run ends, on rank 0."""
        if self.topology.is_rank_0:
            handover.write(os.environ, "error", kind=kind, text=text, code=code, **more)

    def named(self, kind: str, rank: int, text: str) -> None:
        self.journal.event(kind, text, rank=rank)

    def times(self, times: Mapping[int, Times], hosts: Mapping[int, int]) -> None:
        if self.journal.is_due("ranks"):
            shown = sorted(times) if len(times) <= MOST_RANKS else slowest(times, hosts)
            of_shown = columns(times, shown)
            figures = {name: [times[rank].figures.get(name) for rank in shown] for name in FIGURES}
            self.journal.record("ranks", step=self.journal.step, of=shown, **of_shown, figures=figures)

    def energy(self, totals: Callable[[], Mapping[str, Mapping[str, float]]], *, is_last: bool) -> None:
        if (is_last or self.journal.is_due("energy")) and (found := totals())["joules"]:
            self.journal.record("energy", **found)


def start(*, insecure: bool, is_program: bool = True) -> "RankProcess":
    """Joins the ranks that the launcher has started, for a user's program or a recipe. Raises HvdtrainError, which it
    has printed already."""
    topology = Topology.alone()
    ancestors.end_children_with_this()
    try:
        topology = discover(os.environ)
        if topology.row.by_slurm and topology.size > 1 and is_below_terminal_task(os.environ):
            raise TopologyError(
                f"srun --pty gave this terminal to task 0 of {topology.size} alone, and the others ended; start this "
                f"with: srun --overlap -n{topology.size}, or for one process the terminal with: srun -n1 --pty."
            )
        follow(topology, is_program=is_program)
        process = RankProcess(topology, rendezvous.from_launcher(topology, os.environ), insecure=insecure)
        process.world.start()
        if topology.is_rank_0 and is_launcher_shell(arguments_of(1)):
            what = "horovodrun is the first process of this container, so SIGTERM (docker stop) does not reach it"
            print_line(topology, "warning", f"{what}; start the container with --init, or: python -m hvdtrain build.")
    except HvdtrainError as error:
        SCREEN.close()
        if topology.is_rank_0 or (not error.everywhere and topology.local_rank == 0):
            print_line(topology, type(error).__name__, untrusted.one_line(error))
        raise
    return process


def end(code: int) -> NoReturn:
    """Ends the process with this exit code."""
    if code:  # srun --kill-on-bad-exit and mpirun send signals while the interpreter is still shutting down
        for number in END_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


class RankProcess:
    """A context around everything that this rank does. At its end the rank leaves the others in order. An error that a
    user can fix becomes one line and the exit code in `code`; any other exception is raised again."""

    def __init__(self, topology: Topology, rendezvous: Rendezvous | None = None, *, insecure: bool = False) -> None:
        """`rendezvous`, `insecure`: see World."""
        self.output = HvdtrainError.folder
        """How the run folder is given, in messages."""
        self.topology, self.journal = topology, Journal()
        self.listener = RunListener(topology, self.journal)
        self.world = World(topology, rendezvous, self.listener, insecure=insecure)
        self.began = False
        """Whether training has begun. From then on an error may be that of any single rank."""
        self.generates = False
        """Whether the run has a language model, which continues a text for the report."""
        self.code, self._pid = 0, os.getpid()

    def __enter__(self) -> "RankProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if os.getpid() != self._pid:  # a child that the program has forked is no rank
            return False
        with contextlib.closing(SCREEN):
            return self._left(error)

    def _left(self, error: BaseException | None) -> bool:
        end: End = "well"
        error = _of_system(error, self.world.liveness.kills)
        try:
            self.world.count_energy()
            if isinstance(error, HvdtrainError):
                self.code = self._fail(error)
            elif isinstance(error, KeyboardInterrupt):
                self.code = self._interrupted()
            elif isinstance(error, SystemExit) and self.world.liveness.in_steps and not self.journal.is_finished:
                end = "error" if self._exits(error) else "well"
            elif error is None or isinstance(error, SystemExit):  # the exit after --help
                if error and not self.journal.is_finished:
                    self.listener.status("left", "the program exited before the first step")
                self.journal.end()
                self.world.leave(None)
            else:
                end, text = "fault", f"{type(error).__name__}: {error}"
                self.listener.hand_over(type(error).__name__, str(error), 1)
                self.listener.ended("failed", text)
                self.world.leave(text)
        except BaseException as another:
            self.world.leave(f"{type(another).__name__}: {another}")
            raise
        self._let_go("error" if self.code else end, reports=not isinstance(error, OutputError))
        return bool(self.code)

    def close_run(self) -> None:
        """Closes the run that this process has trained, before it opens another one in another folder."""
        if self.listener.folder:
            self.world.count_energy(anew=True)
            self.journal.end()
            self._let_go("well")

    def _let_go(self, end: End, *, reports: bool = True) -> None:
        """Writes the report, unless the folder cannot be written, and closes the run folder."""
        self.journal.close()
        if self.listener.folder:
            if reports and (self.journal.step or end != "error"):  # of what was refused there is nothing to report
                write_report(self.listener.folder.path, os.environ, end, generates=self.generates)
            self.listener.folder.lock.close()  # so that this process can open the folder again

    def _exits(self, error: SystemExit) -> int:
        """Ends the run where the program exits in the middle of it. Returns the exit code: the program's own, but never
        0 for a rank that exits where others continue."""
        own = error.code & 255 if isinstance(error.code, int) else int(error.code is not None)
        made = self.journal.made()
        if self.world.stop.exits(own):
            text = f"the program exited after {made}; the same command continues from the last checkpoint"
            self.listener.ended("left", text)
            if self.topology.is_rank_0:
                self.listener.warning(f"{text}.")
            self.world.leave()
            return own
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        who, reason = f"rank {self.topology.rank} on {self.topology.host}", self.world.liveness.reason
        alone = AbortedError(f"{who} exited with code {own} after {made}, and not all ranks did: {reason}", own or 1)
        alone.everywhere = False
        self.code = self._fail(alone)
        return self.code

    def _interrupted(self) -> int:
        if self.topology.is_rank_0:
            print("interrupted; the same command resumes from the last checkpoint", file=sys.stderr, flush=True)
        self.listener.ended("stopped", "interrupted")
        self.world.leave("interrupted", INTERRUPTED)
        return INTERRUPTED

    def _fail(self, error: HvdtrainError) -> int:
        stops = isinstance(error, StoppedError) or error.exit_code == INTERRUPTED
        state: folders.State = "stopped" if stops else "failed"
        error.folder = self.output
        self.listener.status(state, str(error))
        stop = self.world.stop
        self.listener.hand_over(
            type(error).__name__,
            untrusted.one_line(error),
            error.exit_code,
            named=not isinstance(error, AbortedError) or error.reason is not None,
            near_limit=isinstance(error, StoppedError) and stop.signal in TIME_LIMIT_SIGNALS,
            too_early=stop.too_early,
        )
        # Before training, a host's first rank reports an error for all of the host. During training, or where the error
        # is this rank's alone, as a variable that only this rank lacks, the rank reports it by itself.
        topology = self.topology
        is_own = not error.everywhere and (type(error).everywhere or self.began or topology.local_rank == 0)
        reports_error = topology.is_rank_0 or is_own
        if reports_error and not error.reported:
            self.listener.error(type(error), untrusted.one_line(error))
        if isinstance(error, StoppedError):
            self.journal.event("signal", str(error))
            if topology.is_rank_0:
                self._requeue()  # before it leaves: srun ends rank 0 as soon as another rank has ended
        self.journal.end(state, untrusted.one_line(error))
        if not reports_error:
            self.world.wait_for_rank_0()
        self.world.leave(getattr(error, "reason", None) or str(error), error.exit_code)
        return error.exit_code

    def _requeue(self) -> None:
        """Queues the job again where a warning of its time limit stopped the run; a cancelled job stays cancelled. A
        supervisor, which runs outside of any container, does this by itself."""
        job_id = slurm.job_id(os.environ) or self.topology.job_id
        if not job_id or self.world.stop.signal not in TIME_LIMIT_SIGNALS or handover.is_supervised(os.environ):
            return
        if self.world.stop.too_early:  # it would be queued again and again without training
            message = f"job {job_id} is not queued again: the warning came before the first step; ask for more time."
        else:
            message = slurm.requeue(job_id)
        self.journal.event("requeue", message)
        print(message, file=sys.stderr, flush=True)


def _of_system(error: BaseException | None, kills: Callable[[], int]) -> BaseException | None:
    """The error; that of a reader that is lost, or of a full disk, as one that a user can fix."""
    if isinstance(error, OSError | EOFError | RuntimeError) and (lost := lost_reader(error, kills())):
        return DataError(lost)
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return OutputError(f"{error.filename or 'the run folder'}: {error.strerror}; free space, then start again.")
    return error


def write_report(folder: Path, environ: Mapping[str, str], end: End, *, generates: bool = False) -> None:
    """Writes the report of the run folder, and prints its path. A report that cannot be written fails no run. After a
    fault the process does not wait for the report, so that its traceback comes first. Where the run ended well and
    `generates`, its best model continues a text three times before."""
    if environ.get(REPORT_VARIABLE) == "off":
        return
    with contextlib.suppress(OSError, ValueError, KeyboardInterrupt), _terminated_later(end):
        if generates and end == "well":
            SCREEN.waiting("generating samples for the report")
            command = "generate", str(folder), "--best", "--keep"
            process = _started(*command, environ={**environ, "CUDA_VISIBLE_DEVICES": "-1"})
            if failure := _report_failure(process, REPORT_SECONDS):
                print(f"no samples were generated: {failure}", file=sys.stderr)
        if end != "fault":
            SCREEN.waiting("writing the report")
        process = _started("report", str(folder), "--output", str(folder / "report.html"), waits=end != "fault")
        if end == "fault":
            return
        if failure := _report_failure(process, REPORT_SECONDS if end == "well" else LAST_REPORT_SECONDS):
            print(f"no report was written: {failure}; later: python -m hvdtrain report {folder}", file=sys.stderr)
        else:
            SCREEN.print(f"INFO - report: {folder / 'report.html'}")


def _started(*command: str, environ: Mapping[str, str] | None = None, waits: bool = True) -> "subprocess.Popen[str]":
    """A process of this command of hvdtrain's; `waits`: its errors are read."""
    return subprocess.Popen(
        program("hvdtrain", *command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE if waits else subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,
        env=environ,
    )


def _report_failure(process: "subprocess.Popen[str]", seconds: float) -> str:
    """Why the process has not written the report; "" where it has."""
    try:
        _, printed = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()  # without a wait for its end: its file system may hang
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
