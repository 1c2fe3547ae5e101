"""Odd modules, callbacks and Trainers have the weights of plain Lightning on one process with each strategy, on one
and two ranks, and where they are stopped or killed at a random step and resumed."""

import signal

import pytest
from marks import marked
from odd_launches import Programs, check_alike, check_killed, check_stopped
from odd_lightning_kinds import CALLBACKS, ODDITIES, OF_RANK, OTHERS, REFUSED, oddities
from ranks import NEEDS, needs_horovod, needs_lightning

pytestmark = [
    pytest.mark.launched,
    pytest.mark.slow,
    NEEDS["torch"],
    needs_horovod,
    needs_lightning,
    pytest.mark.timeout(900),
]

FIRST = (83, 92, 117, 142, 302, 755, 1670, 2370, 15660)
"""Seeds that together have each oddity, except dropout and callbacks that only print or log."""
ALL = [seed for seed in range(len(ODDITIES) + 30) if not oddities(seed) & REFUSED]
SEEDS = {"first": FIRST, "more": tuple(seed for seed in ALL if seed not in FIRST)}
KILLED = 635


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    return Programs("lightning", "odd_lightning.py", tmp_path_factory.mktemp)


WAYS = [
    ("horovod", 2, 0), ("ddp", 2, 0), ("tolerant", 1, 0), ("tolerant", 2, signal.SIGTERM),
    ("tolerant ddp", 2, signal.SIGTERM),
]  # fmt: skip


@pytest.mark.parametrize(
    ("way", "ranks", "left", "seeds"),
    marked([(*way, seeds) for way in WAYS for seeds in SEEDS], only_ci={("tolerant", 2, "first")}),  # as in a loop
)
def test_it_trains_as_plain_lightning_does(programs, way, ranks, left, seeds):
    (theirs,) = programs.of_ranks("plain", 1, SEEDS[seeds])
    for ours in programs.of_ranks(way, ranks, SEEDS[seeds], left):
        for seed in theirs:
            if not (has := oddities(int(seed))) & OF_RANK:
                check_alike(has, ours[seed], theirs[seed], resumed=bool(left))


@pytest.mark.parametrize("seeds", SEEDS)
def test_stopped_at_a_random_step_it_has_the_same_bits(programs, seeds):
    check_stopped(programs, oddities, SEEDS[seeds])


@pytest.mark.parametrize("oddity", sorted({*CALLBACKS, *OTHERS, "own callbacks"} - REFUSED))
def test_killed_in_any_callback_it_has_the_same_bits(programs, oddity):
    check_killed(programs, oddities, ODDITIES.index(oddity))


def test_killed_at_a_random_step_it_has_the_same_bits(programs):
    check_killed(programs, oddities, KILLED)
