"""`python -m hvdtrain supervise -- srun ...`: starts a step again after a rank or node was lost."""

import contextlib
import fcntl
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import pydantic
from pydantic import Field

from hvdtrain import files
from hvdtrain.core import flags
from hvdtrain.core.flags import Flag
from hvdtrain.core.wording import counted
from hvdtrain.errors import JobError
from hvdtrain.launch import slurm
from hvdtrain.record import handover, reader
from hvdtrain.tools.supervise.decision import ENDING, End, Ended, Lost, Nodes, Requeue, decide, not_answering
from hvdtrain.tools.supervise.job import (
    TICK,
    Job,
    Signals,
    beside_others,
    check_step,
    number_of,
    placed,
    run_step,
)
from hvdtrain.untrusted import one_line

HISTORY = "history.json"
RELEASE_SECONDS = 15.0  # seconds that the last rank of an ended step may take to release its run folder
CUT_OFF_SECONDS = 2.0  # seconds between two checks whether another node answers


@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """Runs a step of srun (after --) in a job's script, and starts it again when it loses a rank or
    a node.

    The lost node is given back, and a spare one takes its place; without one, a hvdtrain recipe
    continues on fewer nodes where its batch can be divided. Else the job is queued again,
    elsewhere. Bad input, a diverged loss, scancel and three starts in a row without a new
    checkpoint end the job.
    """

    spare: Annotated[
        int, Field(ge=0, le=1_000_000), Flag("nodes of the job that wait for one to be lost", metavar="N")
    ] = 0


def main(argv: Sequence[str]) -> int:
    """Runs the step until it succeeds or cannot continue; its last exit code. Raises JobError."""
    end = argv.index("--") if "--" in argv else len(argv)
    options: Options = flags.parse(Options, "python -m hvdtrain supervise", argv[:end])
    words = list(argv[end + 1 :])
    check_step(words)
    job = Job.from_environ(os.environ)
    nodes = number_of(words, "nodes") or len(job.nodes) - options.spare
    if nodes < 1:
        raise JobError(
            f"--spare must be less than the job's {counted(len(job.nodes), 'node')}, got {options.spare}; "
            "request more: --nodes."
        )
    digest = hashlib.sha256("\0".join(words).encode(errors="surrogateescape")).hexdigest()[:6]
    path = Path.cwd() / f".hvdtrain-{job.number}-{digest}"
    try:
        with files.own_folder(path) as folder:
            return Supervisor(job, words, nodes, options.spare > 0, folder).run()
    except OSError as error:  # also of srun, where it is not installed
        raise JobError(f"{error}; submit the job from a folder of your own that its nodes may write.") from None


class Supervisor:
    """Starts the job's step, and starts it again."""

    def __init__(self, job: Job, words: Sequence[str], wanted: int, sets_nodes: bool, folder: Path) -> None:
        """srun starts on `wanted` nodes, and is given the number if `sets_nodes`."""
        self.job, self.words, self.wanted = job, words, wanted
        tasks, nodes = number_of(words, "ntasks"), number_of(words, "nodes")
        per_node = number_of(words, "ntasks-per-node") or job.tasks_per_node
        self.tasks_per_node = _divided(tasks, nodes or wanted) if tasks else per_node
        self.folder = folder
        self.history = _read_history(self.folder / HISTORY)
        self.nodes, self.sets_nodes = job.nodes, sets_nodes
        self.signals = Signals()
        self.endpoints = slurm.endpoints(job.nodes)  # now: a node that is cut off later cannot request them

    def run(self) -> int:
        """Starts the step until it succeeds or cannot continue; the exit code. Raises OSError."""
        nodes, without, words = self.wanted, tuple[str, ...](), list(self.words)
        environ = dict(os.environ)
        while True:
            if self.sets_nodes:
                words = placed(words, nodes, self.tasks_per_node, without)
            ended, silent, fewer = self._start(words, environ, nodes)
            if ended.code == 0:
                break
            left = self.job.seconds_left()
            decision = decide(self.history, Nodes(self.nodes, self.wanted, silent, fewer, left))
            if isinstance(decision, End):
                _log(decision.why)
                break
            if self.signals.last in ENDING:  # which came after srun had ended
                break
            if isinstance(decision, Requeue):
                _log(decision.why)
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # SLURM sends it as soon as the job is queued again
                _log(slurm.requeue(self.job.number, decision.without))
                return ended.code
            nodes, without = decision.nodes, decision.without
            apart = f" without {', '.join(without)}" if without else ""
            at = f", from step {ended.checkpoint}" if ended.checkpoint else ""
            _log(f"{decision.why}; starts again on {counted(nodes, 'node')}{apart}{at}")
            environ = self._without_silent(environ, silent)
            words = beside_others(self.words)
            self.sets_nodes = self.sets_nodes or nodes != self.wanted or bool(without)
        for path in self.folder.iterdir():
            files.remove(path)
        with contextlib.suppress(OSError):
            self.folder.resolve().rmdir()
        return ended.code

    def _start(
        self, words: Sequence[str], environ: Mapping[str, str], nodes: int
    ) -> tuple[Ended, frozenset[str], frozenset[int]]:
        """One start, the nodes silent at its end, and smaller numbers of nodes that fit."""
        folder = self.folder / f"start-{len(self.history) + 1}"
        files.remove(folder)
        files.make_folder(folder)
        began = time.monotonic()
        code, silent = run_step(words, environ, folder, self.signals, self._silent)
        run, lost = handover.read(folder, "run"), handover.read(folder, "lost")
        error = handover.read(folder, "error")
        if code and run.run:
            _wait_for_release(run)
        ended = Ended(
            code=code,
            nodes=nodes,
            checkpoint=_newest_checkpoint(run) if run.run else self.history[-1].checkpoint if self.history else None,
            resumed_from=run.step,
            seconds=time.monotonic() - began,
            reports=bool(run.run or lost.host or error.kind),
            lost=self._lost(lost, silent) if lost.host else None,
            error=error,
            signalled=self.signals.last,
        )
        self.history.append(ended)
        with contextlib.suppress(OSError):  # a full disk must not end the job
            files.write(self.folder / HISTORY, json.dumps([asdict(each) for each in self.history]))
        per_node = _divided(run.ranks, nodes)
        fewer = {ranks // per_node for ranks in run.fewer if ranks % per_node == 0} if per_node else set[int]()
        return ended, silent, frozenset(fewer)

    def _silent(self) -> frozenset[str]:
        """The nodes that do not answer. Where no other node does, this one is cut off, and waits
        until one answers: if that takes long, SLURM queues the job again."""
        others = {node: self.endpoints[node] for node in self.nodes if node != self.job.nodes[0]}
        is_logged = False
        while True:
            silent = slurm.silent_nodes(others)
            if not others or len(silent) < len(others) or self.signals.last in ENDING or slurm.controller_answers():
                return silent
            if not is_logged:
                _log("neither another node nor slurmctld answers: this node is cut off, and waits until one does")
                is_logged = True
            time.sleep(CUT_OFF_SECONDS)

    def _lost(self, report: handover.Report, silent: frozenset[str]) -> Lost:
        """The rank that was lost. A rank that is cut off may have reported another first."""
        node = self.job.node_of(report.host)
        if silent and node not in silent:
            return Lost(min(silent), not_answering(silent))
        return Lost(node, report.why)

    def _without_silent(self, environ: dict[str, str], silent: frozenset[str]) -> dict[str, str]:
        """Gives silent nodes back, before SLURM misses them and ends the whole job."""
        environ = {**environ, "SLURM_OVERLAP": "1"}
        keep = tuple(node for node in self.nodes if node not in silent)
        if silent and slurm.release(self.job.number, keep, self.folder):
            self.nodes = keep
            listed, count = ",".join(keep), str(len(keep))
            environ |= {"SLURM_JOB_NODELIST": listed, "SLURM_NODELIST": listed}
            environ |= {"SLURM_JOB_NUM_NODES": count, "SLURM_NNODES": count}
        return environ


def _newest_checkpoint(run: handover.Report) -> int:
    """The newest checkpoint, or that resumed from, where the run folder is not seen."""
    saved = reader.newest_checkpoint(Path(run.run))
    return max(saved[0] if saved else 0, run.step)


def _wait_for_release(run: handover.Report) -> None:
    """Waits until rank 0 of the start that has ended has released its run folder."""
    deadline = time.monotonic() + RELEASE_SECONDS
    with contextlib.suppress(OSError, ValueError), files.opened(Path(run.run) / ".lock", follow=False) as lock:
        while time.monotonic() < deadline:
            try:
                return fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(TICK)
    return None


def _read_history(path: Path) -> list[Ended]:
    """The starts of this job before it was queued again; none where they cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return pydantic.TypeAdapter(list[Ended]).validate_python(files.read_json(path, follow=False))
    return []


def _divided(ranks: int, nodes: int) -> int | None:
    """The ranks a node, where all nodes have the same number."""
    return ranks // nodes if ranks and not ranks % nodes else None


def _log(text: str) -> None:
    if text:
        print(f"supervise: {one_line(text)}", file=sys.stderr, flush=True)
