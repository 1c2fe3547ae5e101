"""Odd Keras models, optimizers and trainings: what plain Keras makes of them on one process is what every way of ours
makes of them, on one and two ranks, and once more where they are left or killed and resumed, or refuses."""

import signal

import pytest
from odd_keras_kinds import CALLBACKS, FITS, ODDITIES, OF_RANK, OTHERS, REFUSED, SPARSE, UNRESUMED, fits, oddities
from odd_launches import Programs, check_alike, check_killed, check_stopped, check_tensors
from paths import SUPPORT
from ranks import needs_horovod, needs_tensorflow, train

# Slow, as they find what test_keras.py does not.
pytestmark = [pytest.mark.launched, pytest.mark.slow, needs_tensorflow, needs_horovod, pytest.mark.timeout(900)]

FIRST = [30, 35, 53, 62, 105, 136, 296, 386]
"""The seeds with most oddities."""
SEEDS = {"first": FIRST, "more": [seed for seed in range(len(ODDITIES) + 20) if seed not in FIRST]}
LIMITS = {"float32": 1e-6, "plain sgd": 1e-6}
"""Relative limits of programs in float32, and of those whose LR Keras keeps in float32; all others have 1e-12."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return Programs("tensorflow", "odd_keras.py", tmp_path_factory.mktemp)


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize(("way", "ranks", "left"), [("fit", 2, 0), ("tolerant", 1, 1), ("recipe", 2, 1)])
def test_it_trains_as_plain_keras_does(models, way, ranks, left, seeds):
    (theirs,) = models.of_ranks("plain", 1, tuple(SEEDS[seeds]))
    refused = {*REFUSED, SPARSE} if way == "recipe" else set()
    chosen = tuple(seed for seed in SEEDS[seeds] if not oddities(seed) & refused)
    for ours in models.of_ranks(way, ranks, chosen, left):
        assert ours
        for seed in ours:
            check_as_plain(int(seed), ours[seed], theirs[seed])


def check_as_plain(seed, ours, theirs):
    has = oddities(seed)
    limit = max([LIMITS[each] for each in has & LIMITS.keys()], default=1e-12)
    check_tensors(has, ours, theirs, limit)


@pytest.mark.parametrize("way", ["recipe", "tolerant"])
def test_resumed_on_another_number_of_ranks_it_trains_as_plain_keras_does(models, way):
    (theirs,) = models.of_ranks("plain", 1, tuple(FIRST))
    refused = {*REFUSED, SPARSE} if way == "recipe" else set()
    chosen = tuple(seed for seed in FIRST if not oddities(seed) & refused)
    (ours,) = models.moved(way, (("", 2), ("", 1)), chosen)
    for seed in ours:
        check_as_plain(int(seed), ours[seed], theirs[seed])


@pytest.mark.parametrize("oddity", sorted(REFUSED.keys() - {"train_step"}))
def test_a_recipe_refuses_what_it_has_a_key_of_its_own_for(models, oddity):
    (found,) = models.of_ranks("recipe", 1, (ODDITIES.index(oddity),))
    assert f" has {REFUSED[oddity]} of its own, which no recipe runs; drop it, and give " in next(iter(found.values()))


@pytest.mark.parametrize(("oddity", "recipe", "line"), [
    ("train_step", "compiled", "has a train_step of its own, which a recipe does not call"),
    ("average", "default", "after a step each rank has another odd/average: the forward pass changes these weights"),
])  # fmt: skip
def test_a_recipe_names_what_it_would_change(tmp_path, oddity, recipe, line):
    seed = f"seed={ODDITIES.index(oddity)}"
    given = ["--model-args", seed, "--dataset-args", seed, *([] if recipe == "named" else ["--optimizer-args", seed])]
    argv = [f"{SUPPORT / 'odd_keras.yaml'}:{recipe}", *given, "--output", tmp_path / "run"]
    ended = train("tensorflow", "mpi", 2, *argv, cwd=SUPPORT)
    assert line in ended.out + ended.err


MASKED = {"masking", "zero masked"}
FEW = (81, 105, 330, 835, 1010, 1588, 1712, 6078)
"""Seeds of odd_keras_fits.py that together have each oddity, except dropout."""
ALL = [seed for seed in range(len(FITS) + 52) if not fits(seed) & UNRESUMED.keys()]
REST = tuple(seed for seed in ALL if seed not in FEW)
FITTED = {"few": FEW, "more": REST[::2], "most": REST[1::2]}
KILLED = 1168


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    return Programs("tensorflow", "odd_keras_fits.py", tmp_path_factory.mktemp)


@pytest.mark.parametrize("seeds", FITTED)
@pytest.mark.parametrize(("way", "ranks", "left"), [
    ("fit", 2, 0), ("tolerant", 1, 0), ("tolerant", 2, signal.SIGTERM),
])  # fmt: skip
def test_it_fits_as_plain_keras_does(programs, way, ranks, left, seeds):
    (theirs,) = programs.of_ranks("plain", 1, FITTED[seeds])
    for ours in programs.of_ranks(way, ranks, FITTED[seeds], left):
        for seed in theirs:
            if not (has := fits(int(seed))) & OF_RANK:
                limit = 1e-5 if {"synchronized norm"} & has and has & MASKED else 1e-12  # Keras adds 1e-7 to the count
                check_alike(has, ours[seed], theirs[seed], resumed=bool(left), limit=limit)


@pytest.mark.parametrize("seeds", FITTED)
def test_stopped_at_a_random_step_it_has_the_same_bits(programs, seeds):
    check_stopped(programs, fits, FITTED[seeds])


@pytest.mark.parametrize("oddity", [each for each in (*CALLBACKS, *OTHERS, "own callbacks") if each not in UNRESUMED])
def test_killed_in_any_callback_it_has_the_same_bits(programs, oddity):
    check_killed(programs, fits, FITS.index(oddity))


def test_killed_at_a_random_step_it_has_the_same_bits(programs):
    check_killed(programs, fits, KILLED)


@pytest.mark.parametrize("oddity", UNRESUMED)
def test_what_fault_tolerance_cannot_resume_is_refused_by_name(programs, oddity):
    (found,) = programs.of_ranks("tolerant", 1, (FITS.index(oddity),))
    assert UNRESUMED[oddity] in found[str(FITS.index(oddity))], found
