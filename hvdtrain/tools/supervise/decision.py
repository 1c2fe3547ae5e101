"""What comes next once a step of a job has ended: decided from values alone."""

import math
import signal
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

MOST_STARTS = 3  # starts in a row without a new checkpoint, after which the job ends
NEAR_LIMIT = 150.0  # seconds before the time limit from which no other start is worth it: at 120 the ranks are warned
LONG = 600.0  # seconds after which a step that reports no checkpoints counts as progress
FINAL = {"DivergedError", "ReplicaError", "StoppedError"}  # errors that would happen again, or were requested
BAD_INPUT = 2  # the exit code of an error that would happen again
CRASHES = {128 + number for number in (signal.SIGABRT, signal.SIGBUS, signal.SIGKILL, signal.SIGSEGV)}
ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}  # signals after which nothing is started again


@dataclass(frozen=True)
class Lost:
    """The rank that was lost, by the report of another one."""

    rank: int
    node: str
    why: str


@dataclass(frozen=True)
class Ended:
    """A step that has ended, with what its ranks have reported."""

    code: int
    nodes: int
    step: int | None = None  # of its newest checkpoint; None where the program reports none
    resumed: int = 0  # the step of the checkpoint from which it resumed
    seconds: float = 0.0
    reports: bool = False  # whether the program is one that reports
    lost: Lost | None = None
    error: str = ""  # the class of the error that ended rank 0
    error_code: int = 0
    named: bool = True  # whether that error says what happened: another rank's end alone does not
    near_limit: bool = False  # whether a warning of the time limit stopped it
    too_early: bool = False  # whether that came before its first step
    signalled: int = 0  # the signal that the supervisor itself was sent meanwhile


@dataclass(frozen=True)
class Nodes:
    """The nodes of the job that remain."""

    there: tuple[str, ...]
    wanted: int  # how many the training takes; others are spare
    silent: frozenset[str] = frozenset()  # those that do not answer
    smaller: frozenset[int] = frozenset()  # on how many fewer nodes the training is the same
    seconds_left: float = math.inf  # until the job's time limit


@dataclass(frozen=True)
class Restart:
    """The step is started again in this job."""

    nodes: int
    without: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Requeue:
    """The job is queued again."""

    without: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class End:
    """The job ends with the step's exit code."""

    why: str = ""  # for the log; "" where the step has said it itself


def decide(history: Sequence[Ended], nodes: Nodes) -> Restart | Requeue | End:
    """What comes after the last of these steps."""
    last = history[-1]
    if last.code == 0 or last.signalled in ENDING:
        return End()
    in_vain = _starts_without_progress(history)
    if last.near_limit and last.too_early and in_vain >= min(MOST_STARTS, len(history)):  # else queued again for ever
        return End("the job is not queued again: the warning came before the first step; ask for more time.")
    if last.near_limit:
        return Requeue((), "")
    would_happen_again = last.error in FINAL or last.error_code == BAD_INPUT
    why = None if would_happen_again else _what_was_lost(last, nodes.silent)
    if not why:
        return End()
    if in_vain >= MOST_STARTS:
        return End(f"{why}; {MOST_STARTS} starts in a row ended without a new checkpoint, so the job ends")
    return _again(history, nodes, why)


def not_answering(silent: Collection[str]) -> str:
    """A message for the log."""
    return f"{', '.join(sorted(silent))} {'does' if len(silent) == 1 else 'do'} not answer"


def _what_was_lost(last: Ended, silent: frozenset[str]) -> str | None:
    """What happened to a rank or a node, so that another start may fare better; None where nothing shows that."""
    if last.lost:
        return last.lost.why
    if silent:
        return not_answering(silent)
    if last.reports and not last.named:
        return "the ranks lost one another, and none could name which"
    if last.reports and not last.error and last.code in CRASHES:
        return f"rank 0 was killed, or crashed ({signal.Signals(last.code - 128).name})"
    return None


def _starts_without_progress(history: Sequence[Ended]) -> int:
    """How many of the last starts brought no new checkpoint."""
    count = 0
    for _, is_new in _progress(history):
        count = 0 if is_new else count + 1
    return count


def _progress(history: Sequence[Ended]) -> Iterator[tuple[Ended, bool]]:
    """Each start, and whether it brought a new checkpoint."""
    newest = history[0].resumed
    for ended in history:
        yield ended, ended.seconds >= LONG if ended.step is None else ended.step > newest
        newest = ended.step or newest


def _losses(history: Sequence[Ended]) -> tuple[Counter[str], Counter[str]]:
    """How often each node was lost: in all, and since the last new checkpoint and with it."""
    in_all, since = Counter[str](), Counter[str]()
    for ended, is_new in _progress(history):
        if is_new:
            since.clear()
        if ended.lost:
            in_all[ended.lost.node] += 1
            since[ended.lost.node] += 1
    return in_all, since


def _again(history: Sequence[Ended], nodes: Nodes, why: str) -> Restart | Requeue:
    if history[-1].reports and nodes.seconds_left < NEAR_LIMIT:
        return Requeue(tuple(sorted(nodes.silent)), f"{why}; the time limit is {nodes.seconds_left:.0f} s away")
    without = tuple(node for node in nodes.there if node in nodes.silent | _left_out(history, nodes))
    left = len(nodes.there) - len(without)
    if left >= nodes.wanted:
        return Restart(nodes.wanted, without, why)
    if fits := [count for count in nodes.smaller if count <= left]:
        return Restart(max(fits), without, why)
    return Requeue(without, f"{why}; {left} of {nodes.wanted} nodes remain, on which it cannot continue")


def _left_out(history: Sequence[Ended], nodes: Nodes) -> set[str]:
    """Nodes that answer and were lost twice: all without a new checkpoint in between; of others, who were lost most
    often, as many as spare nodes can replace."""
    losses, since = _losses(history)
    answering = [node for node in nodes.there if node not in nodes.silent]
    twice = sorted((node for node in answering if losses[node] > 1), key=lambda node: (-since[node], -losses[node]))
    replaceable = max(0, len(answering) - nodes.wanted)
    return {node for index, node in enumerate(twice) if since[node] > 1 or index < replaceable}
