"""What follows a start of the step that has ended: a restart, a requeue or the end."""

import math
import signal
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from hvdtrain.record.handover import Report

MOST_STARTS = 3  # starts in a row without a new checkpoint that end the job
NEAR_LIMIT = 150.0  # seconds before the time limit in which nothing is started again: at 120 ranks are warned
LONG = 600.0  # seconds after which a start that reports no checkpoints counts as progress
FINAL = {"DivergedError", "ReplicaError", "StoppedError"}  # errors that would happen again, or were requested
BAD_INPUT = 2  # the exit code of an error that would happen again
CRASHES = {128 + number for number in (signal.SIGABRT, signal.SIGBUS, signal.SIGKILL, signal.SIGSEGV)}
NO_ERROR = Report()
ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}  # signals after which nothing is started again


@dataclass(frozen=True)
class Lost:
    """The loss of a rank, as another rank reported it."""

    node: str
    why: str


@dataclass(frozen=True)
class Ended:
    """A start of the job's step that has ended, with what its ranks reported."""

    code: int  # srun's exit code
    nodes: int
    checkpoint: int | None = None  # the training step of the newest one; None where the program reports none
    resumed_from: int = 0  # the training step of the checkpoint that it resumed from
    seconds: float = 0.0
    reports: bool = False  # whether the program is one that reports
    lost: Lost | None = None
    error: Report = NO_ERROR  # rank 0's, of the error that ended it; empty without one
    signalled: int = 0  # the signal that the supervisor itself was sent meanwhile


@dataclass(frozen=True)
class Nodes:
    """The nodes that the job still has."""

    names: tuple[str, ...]
    wanted: int  # how many the training takes; others are spare
    silent: frozenset[str] = frozenset()  # those that do not answer
    fewer: frozenset[int] = frozenset()  # numbers of nodes below `wanted` on which the training is the same
    seconds_left: float = math.inf  # until the job's time limit


@dataclass(frozen=True)
class Restart:
    """The step is started again in this job, on so many nodes, without those named."""

    nodes: int
    without: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Requeue:
    """The job is queued again, to run without the nodes named."""

    without: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class End:
    """The job ends with srun's exit code."""

    why: str = ""  # for the log; "" where the ranks have printed it


def decide(history: Sequence[Ended], nodes: Nodes) -> Restart | Requeue | End:
    """What comes after the last of these starts."""
    last = history[-1]
    if last.code == 0 or last.signalled in ENDING:
        return End()
    made = [index for index, is_new in enumerate(_progress(history), 1) if is_new]
    in_vain = len(history) - max(made, default=0)  # the starts since the last one that wrote a new checkpoint
    if (
        last.error.near_limit and last.error.too_early and in_vain >= min(MOST_STARTS, len(history))
    ):  # or it is queued for ever
        return End("the job is not queued again: the warning came before the first step; ask for more time.")
    if last.error.near_limit:
        return Requeue((), "")
    would_happen_again = last.error.kind in FINAL or last.error.code == BAD_INPUT
    why = None if would_happen_again else _what_was_lost(last, nodes.silent)
    if not why:
        return End()
    if in_vain >= MOST_STARTS:
        return End(f"{why}; {MOST_STARTS} starts in a row ended without a new checkpoint, so the job ends")
    return _again(history, nodes, why)


def not_answering(silent: Collection[str]) -> str:
    """The message that these nodes do not answer."""
    return f"{', '.join(sorted(silent))} {'does' if len(silent) == 1 else 'do'} not answer"


def _what_was_lost(last: Ended, silent: frozenset[str]) -> str | None:
    """Why another start may succeed: what happened to a rank or node; None if nothing did."""
    if last.lost:
        return last.lost.why
    if silent:
        return not_answering(silent)
    if last.reports and not last.error.named:
        return "the ranks lost one another, and none could name which"
    if last.reports and not last.error.kind and last.code in CRASHES:
        return f"rank 0 was killed, or crashed ({signal.Signals(last.code - 128).name})"
    return None


def _progress(history: Sequence[Ended]) -> Iterator[bool]:
    """Whether each start wrote a new checkpoint."""
    newest = history[0].resumed_from
    for ended in history:
        yield ended.seconds >= LONG if ended.checkpoint is None else ended.checkpoint > newest
        newest = ended.checkpoint or newest


def _again(history: Sequence[Ended], nodes: Nodes, why: str) -> Restart | Requeue:
    """A restart on the nodes that are left, or a requeue where they are too few."""
    if history[-1].reports and nodes.seconds_left < NEAR_LIMIT:
        return Requeue(tuple(sorted(nodes.silent)), f"{why}; the time limit is {nodes.seconds_left:.0f} s away")
    without = tuple(node for node in nodes.names if node in nodes.silent | _left_out(history, nodes))
    left = len(nodes.names) - len(without)
    if fits := [count for count in {nodes.wanted, *nodes.fewer} if count <= left]:
        return Restart(max(fits), without, why)
    return Requeue(without, f"{why}; {left} of {nodes.wanted} nodes remain, on which it cannot continue")


def _left_out(history: Sequence[Ended], nodes: Nodes) -> set[str]:
    """The nodes that answer, but were lost twice: all that were without a new checkpoint in
    between; of others as many as spare nodes can replace."""
    losses, since = Counter[str](), Counter[str]()
    for ended, is_new in zip(history, _progress(history), strict=True):
        if is_new:
            since.clear()
        if ended.lost:
            losses[ended.lost.node] += 1
            since[ended.lost.node] += 1
    answering = [node for node in nodes.names if node not in nodes.silent]
    twice = sorted((node for node in answering if losses[node] > 1), key=lambda node: (-since[node], -losses[node]))
    replaceable = max(0, len(answering) - nodes.wanted)
    return {node for index, node in enumerate(twice) if since[node] > 1 or index < replaceable}
