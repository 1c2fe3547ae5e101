"""Odd loops of a program's own: on one rank and on two they end as plain PyTorch on one process does, also where they
are stopped at a random step and resumed. What ranks cannot train alike is refused by name on all of them."""

import re
import signal

import pytest
from marks import marked
from odd_drawn import LOOP_ODDITIES, LOOP_REFUSED, loop_oddities
from odd_launches import Programs, check_tensors
from ranks import NEEDS

pytestmark = [pytest.mark.launched, NEEDS["torch"], pytest.mark.timeout(900)]

ALL = range(200)
REFUSED = range(len(LOOP_ODDITIES), len(LOOP_ODDITIES) + len(LOOP_REFUSED))


def covering():
    """Few of the seeds that have each oddity at least once, and each of those that are refused."""
    missing, found = set(LOOP_ODDITIES), [*REFUSED]
    while missing:
        trained = [seed for seed in ALL if not loop_oddities(seed) & LOOP_REFUSED.keys()]
        found.append(max(trained, key=lambda seed: len(loop_oddities(seed) & missing)))
        missing -= loop_oddities(found[-1])
    return found


FIRST = covering()
SEEDS = {"first": FIRST, "more": [seed for seed in ALL if seed not in FIRST]}
assert sum(not loop_oddities(seed) & LOOP_REFUSED.keys() for seed in ALL) >= 0.85 * len(ALL)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    return Programs("torch", "odd_loops.py", tmp_path_factory.mktemp)


def check(seed, ours, theirs, ranks):
    """That it was trained alike, or refused."""
    refused = loop_oddities(seed) & LOOP_REFUSED.keys()
    if refused and (ranks > 1 or refused == {"LBFGS"}):
        assert isinstance(ours, str) and re.match(LOOP_REFUSED[refused.pop()], ours), (loop_oddities(seed), ours)
        return
    check_tensors(loop_oddities(seed), ours, theirs)


ENGINES = ("local", 1), ("horovod", 2), ("ddp", 2)


@pytest.mark.parametrize(
    ("engine", "ranks", "seeds", "how"),
    marked(
        [(*engine, seeds, how) for engine in ENGINES for seeds in SEEDS for how in ("resumed", "whole")],
        slow={"more", "whole", "horovod"},
        only_ci={"local", "ddp"},
    ),
)
def test_it_trains_as_plain_pytorch_does_or_is_refused(programs, engine, ranks, seeds, how):
    chosen = tuple(SEEDS[seeds])
    (theirs,) = programs.of_ranks(f"plain {ranks}", 1, chosen)
    for ours in programs.of_ranks(f"loop {engine}", ranks, chosen, int(how == "resumed")):
        assert ours.keys() == theirs.keys()
        for seed in chosen:
            check(seed, ours[str(seed)], theirs[str(seed)], ranks)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize(("engine", "ranks", "count"), [("local", 1, 10), ("horovod", 2, 3)])
def test_killed_or_signalled_after_a_random_step_it_resumes(programs, engine, ranks, count, number):
    for seed in [seed for seed in ALL[60:] if not loop_oddities(seed) & LOOP_REFUSED.keys()][:: 100 // count][:count]:
        (theirs,) = programs.of_ranks(f"plain {ranks}", 1, (seed,))
        for ours in programs.killed(f"loop {engine}", seed, number, ranks):
            check(seed, ours[str(seed)], theirs[str(seed)], ranks)
