"""`python -m hvdtrain supervise -- srun ...`: a step that is started again when it loses a rank or a node."""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Annotated

import pydantic
import tyro
from pydantic import Field

from hvdtrain import files
from hvdtrain.core import flags
from hvdtrain.errors import JobError
from hvdtrain.launch import slurm_job
from hvdtrain.record import checkpoint, handover
from hvdtrain.tools.slurm.job_script import Option, options_of, program, program_of
from hvdtrain.tools.supervise import job
from hvdtrain.tools.supervise.decision import ENDING, End, Ended, Lost, Nodes, Requeue, Restart, decide, not_answering
from hvdtrain.tools.supervise.job import Job, controller_answers, silent_nodes
from hvdtrain.untrusted import one_line, quoted

PROG = "python -m hvdtrain supervise"
HISTORY = "history.json"
RELEASE_SECONDS = 15.0  # that the last rank of an ended step may take to let its run folder go
CUT_OFF_SECONDS = 2.0  # between two looks whether another host answers
AS_IN = "as in: python -m hvdtrain supervise -- srun python train.py"
TICK = 0.2  # seconds between two looks
FAREWELL = 2.0  # seconds for the other ranks to end by themselves once one is lost
PATIENCE = 40.0  # seconds for srun to end once they are killed: KillWait, 30 at most sites, and more
HASTE = 1.0  # the same where a node is silent: srun would wait for it
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
NO_TERMINAL = 0.3  # seconds between two Ctrl-C, by which srun knows that it is meant


@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """Runs a step of srun (after --) in a job's script, and starts it again when it loses a rank or a node.

    The lost node is given back, and a spare one takes its place; without one, a hvdtrain recipe continues on fewer
    nodes where its batch can be divided. Else the job is queued again, elsewhere. Bad input, a diverged loss, scancel
    and three starts in a row without a new checkpoint end the job.
    """

    spare: Annotated[
        int, Field(ge=0, le=1_000_000), tyro.conf.arg(help="nodes of the job that wait for one to be lost", metavar="N")
    ] = 0


def main(argv: Sequence[str]) -> int:
    """Runs the step until it ends well or cannot continue; its last exit code. Raises JobError."""
    end = argv.index("--") if "--" in argv else len(argv)
    options: Options = flags.parse(Options, PROG, argv[:end])
    words = list(argv[end + 1 :])
    check_step(words)
    job = Job.of(os.environ)
    nodes = _number(words, "nodes") or len(job.nodes) - options.spare
    if nodes < 1:
        raise JobError(
            f"--spare must be less than the job's {len(job.nodes)} nodes, got {options.spare}; request more: --nodes."
        )
    digest = hashlib.sha256("\0".join(words).encode(errors="surrogateescape")).hexdigest()[:6]
    path = Path.cwd() / f".hvdtrain-{job.number}-{digest}"
    try:
        with files.own_folder(path) as folder:
            return Supervisor(job, words, nodes, options.spare > 0, folder).run()
    except OSError as error:  # of srun too, where there is none
        raise JobError(f"{error}; submit the job from a folder of your own that its nodes may write.") from None


class Supervisor:
    """The starts of one step in one job."""

    def __init__(self, job: Job, words: Sequence[str], wanted: int, gives_nodes: bool, folder: Path) -> None:
        """`wanted`: on how many nodes; `gives_nodes`: whether srun must be given that number; `folder`: this user's."""
        self.job, self.words, self.wanted = job, words, wanted
        tasks, nodes = _number(words, "ntasks"), _number(words, "nodes")
        per_node = _number(words, "ntasks-per-node") or job.tasks_per_node
        self.tasks_per_node = _divided(tasks, nodes or wanted) if tasks else per_node
        self.folder = folder
        self.history = _read_history(self.folder / HISTORY)
        self.there, self.gives_nodes = job.nodes, gives_nodes
        self.signals = Signals()
        self.endpoints = job.endpoints()  # now: one that is cut off later cannot request them

    def run(self) -> int:
        """Starts and starts again; the exit code. Raises OSError."""
        nodes, without, words = self.wanted, tuple[str, ...](), list(self.words)
        environ = dict(os.environ)
        while True:
            if self.gives_nodes:
                words = placed(words, nodes, self.tasks_per_node, without)
            ended, silent, smaller = self._start(words, environ, nodes)
            if ended.code == 0:
                break
            left = self.job.seconds_left()
            decision = decide(self.history, Nodes(self.there, self.wanted, silent, smaller, left))
            if isinstance(decision, End):
                _log(decision.why)
                break
            if self.signals.last in ENDING:  # sent after the step had ended
                break
            if isinstance(decision, Requeue):
                self._requeue(decision)
                return ended.code
            nodes, without = decision.nodes, decision.without
            _log(self._restarting(decision, ended))
            environ = self._without_silent(environ, silent)
            words = beside_others(self.words)
            self.gives_nodes = self.gives_nodes or nodes != self.wanted or bool(without)
        for path in self.folder.iterdir():
            files.remove(path)
        with contextlib.suppress(OSError):
            self.folder.resolve().rmdir()
        return ended.code

    def _start(
        self, words: Sequence[str], environ: Mapping[str, str], nodes: int
    ) -> tuple[Ended, frozenset[str], frozenset[int]]:
        """One start to its end; which nodes are silent then, and on how many fewer the training is the same."""
        folder = self.folder / f"start-{len(self.history) + 1}"
        files.remove(folder)
        files.make_folder(folder)
        began = time.monotonic()
        code, silent = run_step(words, environ, folder, self.signals, self._silent)
        run = handover.read(folder, "run")
        if code and run.run:
            _wait_for_release(run)
        ended = self._ended(folder, run, code, nodes, time.monotonic() - began, silent)
        self.history.append(ended)
        with contextlib.suppress(OSError):  # a full disk must not end the job
            files.write(self.folder / HISTORY, json.dumps([asdict(each) for each in self.history]))
        each = _divided(run.ranks, nodes)
        smaller = frozenset(size // each for size in run.fewer if size % each == 0) if each else frozenset[int]()
        return ended, silent, smaller

    def _silent(self) -> frozenset[str]:
        """The nodes that do not answer. Where no other host does, this one is cut off, and not they: it waits. SLURM
        queues the job again if that takes long."""
        own, is_logged = self.job.nodes[0], False
        others = {node: self.endpoints[node] for node in self.there if node != own}
        while True:
            silent = silent_nodes(others)
            if not others or len(silent) < len(others) or self.signals.last in ENDING or controller_answers():
                return silent
            if not is_logged:
                _log("neither another node nor slurmctld answers: this node is cut off, and waits until one does")
                is_logged = True
            time.sleep(CUT_OFF_SECONDS)

    def _ended(
        self, folder: Path, run: handover.Report, code: int, nodes: int, seconds: float, silent: frozenset[str]
    ) -> Ended:
        lost, error = handover.read(folder, "lost"), handover.read(folder, "error")
        return Ended(
            code=code,
            nodes=nodes,
            resumed=run.step,
            step=_newest_step(run) if run.run else next((each.step for each in reversed(self.history)), None),
            seconds=seconds,
            reports=bool(run.run or lost.host or error.kind),
            lost=self._lost(lost, silent) if lost.host else None,
            error=error.kind,
            error_code=error.code,
            named=error.named,
            near_limit=error.near_limit,
            too_early=error.too_early,
            signalled=self.signals.last,
        )

    def _lost(self, report: handover.Report, silent: frozenset[str]) -> Lost:
        """Who was lost. A rank that was cut off has lost the others, and may have been the first to report it."""
        node = self.job.node_of(report.host)
        if silent and node not in silent:
            return Lost(report.rank, min(silent), not_answering(silent))
        return Lost(report.rank, node, report.why)

    def _restarting(self, decision: Restart, ended: Ended) -> str:
        nodes = f"{decision.nodes} node{'s' if decision.nodes > 1 else ''}"
        without = f" without {', '.join(decision.without)}" if decision.without else ""
        at = f", from step {ended.step}" if ended.step else ""
        return f"{decision.why}; starts again on {nodes}{without}{at}"

    def _without_silent(self, environ: dict[str, str], silent: frozenset[str]) -> dict[str, str]:
        """Gives silent nodes back, before SLURM misses them and ends the whole job."""
        environ = {**environ, "SLURM_OVERLAP": "1"}
        keep = tuple(node for node in self.there if node not in silent)
        if silent and self.job.release(keep, self.folder):
            self.there = keep
            listed, count = ",".join(keep), str(len(keep))
            environ |= {"SLURM_JOB_NODELIST": listed, "SLURM_NODELIST": listed}
            environ |= {"SLURM_JOB_NUM_NODES": count, "SLURM_NNODES": count}
        return environ

    def _requeue(self, decision: Requeue) -> None:
        if decision.why:
            _log(decision.why)
        _log(self.job.requeue(decision.without))


def _newest_step(run: handover.Report) -> int:
    """Of the newest checkpoint; where its folder is not seen here, as from outside of a container, of the one that the
    run has resumed from."""
    saved = checkpoint.committed(Path(run.run) / "checkpoints")
    numbers = [int(found[1]) for path in saved if (found := checkpoint.NAME.fullmatch(path.name))]
    return max([*numbers, run.step])


def _wait_for_release(run: handover.Report) -> None:
    """Waits until the ended step's rank 0 holds its run folder no longer."""
    deadline = time.monotonic() + RELEASE_SECONDS
    with contextlib.suppress(OSError, ValueError), files.opened(Path(run.run) / ".lock", follow=False) as lock:
        while time.monotonic() < deadline:
            try:
                return fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(TICK)
    return None


def _read_history(path: Path) -> list[Ended]:
    """The starts of this job before it was queued again."""
    with contextlib.suppress(OSError, ValueError):
        return pydantic.TypeAdapter(list[Ended]).validate_python(files.read_json(path, follow=False))
    return []


def _divided(ranks: int, nodes: int) -> int | None:
    """Ranks a node, where each has as many."""
    return ranks // nodes if ranks and not ranks % nodes else None


def _log(text: str) -> None:
    if text:
        print(f"supervise: {one_line(text)}", file=sys.stderr, flush=True)


def check_step(words: Sequence[str]) -> None:
    """Raises JobError where they start no step."""
    if not words:
        raise JobError(f"no step to supervise; give it after --, {AS_IN}")
    if program(words) != "srun":
        raise JobError(
            f"what is supervised must be a step of srun, got {quoted(words[0])}; put srun before it, {AS_IN}"
        )
    if not program_of(words):
        raise JobError(f"srun must have a program to start, got none; {AS_IN}")


def _number(words: Sequence[str], name: str) -> int | None:
    """The value of that option of srun, where it is a number."""
    values = [option.value for option, _ in _own_options(words) if option.name == name]
    return int(values[-1]) if values and values[-1].isdecimal() else None


def placed(words: Sequence[str], nodes: int, tasks_per_node: int | None, without: Collection[str]) -> list[str]:
    """The same step on so many nodes."""
    options = _own_options(words)
    excluded = [option.value for option, _ in options if option.name == "exclude"]
    left_out = ",".join([*excluded, *without])
    added = [f"--nodes={nodes}", *([f"--ntasks={nodes * tasks_per_node}"] if tasks_per_node else [])]
    added += [f"--exclude={left_out}"] if left_out else []
    dropped = {"nodes", "exclude", *(["ntasks"] if tasks_per_node else [])}
    own = [word for option, given in options if option.name not in dropped for word in given]
    return [words[0], *added, *own, *program_of(words)]


def beside_others(words: Sequence[str]) -> list[str]:
    """The same step without memory of its own: one that has not ended on a silent node still holds the job's."""
    own = [word for option, given in _own_options(words) if option.name != "mem" for word in given]
    return [words[0], "--mem=0", *own, *program_of(words)]


def _own_options(words: Sequence[str]) -> list[tuple[Option, Sequence[str]]]:
    """srun's own options, each with the words that give it."""
    own, found = words[1 : len(words) - len(program_of(words))], list[tuple[Option, Sequence[str]]]()
    while own:
        length = 1 if len(own) == 1 or own[1].startswith("-") else 2
        found.append((options_of(own, 0)[0], own[:length]))
        own = own[length:]
    return found


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


def run_step(
    words: Sequence[str],
    environ: Mapping[str, str],
    folder: Path,
    signals: Signals,
    silent: Callable[[], frozenset[str]],
) -> tuple[int, frozenset[str]]:
    """Runs the step to its end. Its exit code as a shell has it, and which nodes were silent if it did not end well.

    Its ranks leave what they report in `folder`.
    """
    own = {**environ, handover.VARIABLE: str(folder.resolve())}
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


def _watch(process: subprocess.Popen[bytes], folder: Path) -> handover.Report:
    """Waits until the step has ended or a rank is reported as lost; that report, or an empty one."""
    while not (lost := handover.read(folder, "lost")).host:
        try:
            process.wait(TICK)
            return handover.read(folder, "lost")
        except subprocess.TimeoutExpired:
            continue
    return lost


def own_step(lost: handover.Report, environ: Mapping[str, str]) -> str:
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
