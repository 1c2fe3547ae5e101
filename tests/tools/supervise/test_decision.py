"""What comes next once a step has ended: the whole table."""

import signal
from dataclasses import replace

import pytest

from hvdtrain.errors import DivergedError, ReplicaError, StoppedError
from hvdtrain.record.handover import Report
from hvdtrain.tools.supervise.decision import End, Ended, Lost, Nodes, Requeue, Restart, decide

SILENT = "no heartbeat from rank 2 on c for 20 seconds: its node is down or cut off, or it hangs"
KILLED = "rank 2 on c ended without a message: killed, out of memory, or crashed"


def ended(code=1, at=120, error="", error_code=0, **more):
    """`at`: the step of the newest checkpoint."""
    of_error = {name: more.pop(name) for name in ("named", "near_limit", "too_early") if name in more}
    reported = Report(kind=error, code=error_code, **of_error)
    return Ended(code=code, nodes=3, checkpoint=at, reports=True, error=reported, **more)


def lost(node="c", why=KILLED, **more):
    return ended(137, lost=Lost(node, why), error="AbortedError", **more)


def nodes(there="abcd", wanted=3, silent="", fewer=()):
    return Nodes(tuple(there), wanted, frozenset(silent), frozenset(fewer))


NOTHING = Ended(code=137, nodes=3)
"""Of a program that reports nothing."""

ENDS = {  # the last step: what the log says of it
    "finished": (ended(0), ""),
    "bad input": (ended(2, error="PlanError", error_code=2), ""),
    "bad input, of which srun's code says nothing": (ended(137, error="DataError", error_code=2), ""),
    "bad input of another rank": (ended(137, error="AbortedError", error_code=2, named=True), ""),
    "diverged": (ended(error=DivergedError.__name__, error_code=1), ""),
    "diverged, and srun killed who was slow to end": (ended(137, error="DivergedError"), ""),
    "diverged, and a rank was lost after it": (ended(137, error="DivergedError", lost=Lost("c", KILLED)), ""),
    "replicas differ": (ended(error=ReplicaError.__name__, error_code=1), ""),
    "scancel": (ended(143, error=StoppedError.__name__, error_code=143), ""),
    "scancel, and a rank was lost on the way": (ended(143, error="StoppedError", lost=Lost("c", KILLED)), ""),
    "SIGTERM to the supervisor": (lost(signalled=signal.SIGTERM), ""),
    "Ctrl-C": (lost(signalled=signal.SIGINT), ""),
    "the terminal closed": (lost(signalled=signal.SIGHUP), ""),
    "code of the user's raises": (ended(error="ZeroDivisionError", error_code=1), ""),
    "another rank raises": (ended(error="AbortedError", error_code=1), ""),
    "nothing was reported": (ended(1), ""),
    "a program that reports nothing": (NOTHING, ""),
    "the time limit before the first step": (
        ended(140, error="StoppedError", near_limit=True, too_early=True, resumed_from=120),
        "the job is not queued again: the warning came before the first step; ask for more time.",
    ),
}


@pytest.mark.parametrize(("last", "why"), ENDS.values(), ids=ENDS)
def test_what_ends_the_job_even_beside_spare_nodes(last, why):
    assert decide([last], nodes()) == End(why)


CUT, DOWN = lost(why=SILENT), lost()
LACK = "of 3 nodes remain, on which it cannot continue"
AGAIN = {  # the last step, the nodes: what comes next
    "a killed rank: the same nodes": (DOWN, nodes("abc"), Restart(3, (), KILLED)),
    "a silent node: a spare one": (CUT, nodes(silent="c"), Restart(3, ("c",), SILENT)),
    "it hangs, but its node answers": (CUT, nodes("abc"), Restart(3, (), SILENT)),
    "two silent nodes, one spare": (CUT, nodes(silent="bc", fewer={1, 2}), Restart(2, ("b", "c"), SILENT)),
    "no spare: fewer": (CUT, nodes("abc", silent="c", fewer={1, 2}), Restart(2, ("c",), SILENT)),
    "the batch divides on one only": (CUT, nodes("abc", silent="c", fewer={1}), Restart(1, ("c",), SILENT)),
    "no fewer: queued again": (CUT, nodes("abc", silent="c"), Requeue(("c",), f"{SILENT}; 2 {LACK}")),
    "too few remain": (CUT, nodes("abc", silent="bc", fewer={2}), Requeue(("b", "c"), f"{SILENT}; 1 {LACK}")),
    "rank 0 was killed": (ended(137), nodes("abc"), Restart(3, (), "rank 0 was killed, or crashed (SIGKILL)")),
    "rank 0 crashed": (ended(139), nodes("abc"), Restart(3, (), "rank 0 was killed, or crashed (SIGSEGV)")),
    "a collective broke": (
        ended(error="AbortedError", error_code=1, named=False),
        nodes("abc"),
        Restart(3, (), "the ranks lost one another, and none could name which"),
    ),
    "any program, one silent node": (NOTHING, nodes(silent="b"), Restart(3, ("b",), "b does not answer")),
    "any program, two": (NOTHING, nodes("abcde", silent="be"), Restart(3, ("b", "e"), "b, e do not answer")),
    "any program, no spare": (NOTHING, nodes("abc", silent="b"), Requeue(("b",), f"b does not answer; 2 {LACK}")),
    "the time limit": (ended(140, error="StoppedError", near_limit=True), nodes(), Requeue((), "")),
}


@pytest.mark.parametrize(("last", "there", "next_"), AGAIN.values(), ids=AGAIN)
def test_what_starts_again(last, there, next_):
    assert decide([last], there) == next_


TWICE = {  # the losses, the nodes: what comes next
    "a spare node": ([lost(at=100), lost(at=200)], "abcd", Restart(3, ("c",), KILLED)),
    "no spare node": ([lost(at=100), lost(at=200)], "abc", Restart(3, (), KILLED)),
    "two such nodes, one spare": (
        [lost(at=10), lost("b", at=20), lost(at=30), lost("b", at=40), lost(at=50)],
        "abcd",
        Restart(3, ("c",), KILLED),
    ),
    "without progress": (
        [lost(at=100), lost(at=100)],
        "abc",
        Requeue(("c",), f"{KILLED}; 2 {LACK}"),
    ),
    "of two nodes": ([lost(at=100), lost("b", at=200)], "abcd", Restart(3, (), KILLED)),
}


@pytest.mark.parametrize(("history", "there", "next_"), TWICE.values(), ids=TWICE)
def test_a_node_that_loses_a_rank_twice(history, there, next_):
    assert decide(history, nodes(there)) == next_


WARNED = ended(140, 100, error="StoppedError", near_limit=True, too_early=True)


def test_a_warning_before_the_first_step_of_a_restart_queues_the_job_again():
    assert decide([lost(at=100), WARNED], nodes()) == Requeue((), "")
    assert isinstance(decide([lost(at=100), WARNED, WARNED], nodes()), Requeue)
    assert isinstance(decide([lost(at=100), WARNED, WARNED, WARNED], nodes()), End)
    assert isinstance(decide([lost(at=0), replace(WARNED, checkpoint=0)], nodes()), End)


def test_near_the_time_limit_the_job_is_queued_again_rather_than_started():
    near = replace(nodes(silent="c"), seconds_left=140.0)
    assert decide([lost(why=SILENT)], near) == Requeue(("c",), f"{SILENT}; the time limit is 140 s away")
    assert isinstance(decide([lost()], replace(near, seconds_left=160.0)), Restart)
    assert isinstance(decide([NOTHING], near), Restart)


def test_what_a_run_has_resumed_from_is_no_progress():
    history = [lost(at=500, resumed_from=500)] * 3
    assert isinstance(decide(history, nodes("abcde")), End)
    assert isinstance(decide([lost(at=510, resumed_from=500), *history[:2]], nodes("abcde")), Restart)


STARTS = {  # steps of the newest checkpoint after each start: whether the last may be followed by another
    "no checkpoint at all": ([0, 0, 0], False),
    "two without one": ([0, 0], True),
    "each brings one": ([10, 20, 30, 40], True),
    "three after the last": ([10, 10, 10, 10], False),
    "two after the last": ([10, 10, 10], True),
    "one in between": ([0, 0, 10, 10, 10], True),
    "after a pause": ([10, 20, 20, 20, 20], False),
}


@pytest.mark.parametrize(("steps", "again"), STARTS.values(), ids=STARTS)
def test_three_starts_without_a_new_checkpoint_end_the_job(steps, again):
    history = [lost(node, at=step) for node, step in zip("abcde", steps, strict=False)]
    decision = decide(history, nodes("abcde"))
    assert isinstance(decision, Restart) == again
    if not again:
        assert decision == End(f"{KILLED}; 3 starts in a row ended without a new checkpoint, so the job ends")


def test_a_program_without_reports_makes_progress_by_time():
    for seconds, again in (([1, 1, 1], False), ([1, 1, 3600, 1, 1], True), ([3600] * 5, True)):
        history = [Ended(code=1, nodes=3, seconds=each) for each in seconds]
        assert isinstance(decide(history, nodes(silent="d")), Restart) == again
