"""Odd Keras models, optimizers and trainings: what plain Keras makes of them on one process is what every way of ours
makes of them, on one and two ranks, and once more where they are left after an epoch and resumed, or refuses."""

import json

import numpy as np
import pytest
import warm
from odd_keras_kinds import ODDITIES, REFUSED, SPARSE, oddities
from paths import SUPPORT
from ranks import left_by, needs_horovod, needs_tensorflow, once, run, train

pytestmark = [pytest.mark.launched, needs_tensorflow, needs_horovod, pytest.mark.timeout(900)]

SLOW = ("more", "tolerant", "recipe", "refused")
FIRST = [27, 35, 45, 69, 101, 171, 184, 239, 320, 20, 21]
"""Which have each oddity at least once."""
SEEDS = {"first": FIRST, "more": [seed for seed in range(len(ODDITIES) + 20) if seed not in FIRST]}
LIMITS = {"float32": 1e-6, "plain sgd": 1e-6}
"""Relative, of programs with numbers of that kind, and Keras keeps its LR in float32; 1e-12 of all others."""


@pytest.fixture(scope="module")
def became(tmp_path_factory):
    """`became("fit", 2, "first", False)`: by seed, what became of it on each rank."""

    @once
    def of(way, ranks, seeds, resumed):
        folder = tmp_path_factory.mktemp(way)
        chosen = SEEDS.get(seeds, seeds)
        if way == "recipe" and seeds in SEEDS:
            chosen = [seed for seed in chosen if not oddities(seed) & {*REFUSED, SPARSE}]
        (folder / "given.json").write_text(json.dumps({"way": way, "seeds": chosen, "resumed": resumed}))
        run(
            "alone" if ranks == 1 else "mpi", ranks, warm.command("tensorflow", SUPPORT / "odd_keras.py", folder)
        ).good()
        return left_by(ranks, folder)

    return of


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize(("way", "ranks", "resumed"), [("fit", 2, False), ("tolerant", 1, True), ("recipe", 2, True)])
def test_it_trains_as_plain_keras_does(became, way, ranks, resumed, seeds):
    (theirs,) = became("plain", 1, seeds, False)
    for ours in became(way, ranks, seeds, resumed):
        assert ours
        for seed in ours:
            has = oddities(int(seed))
            limit = max([LIMITS[each] for each in has & LIMITS.keys()], default=1e-12)
            assert not isinstance(ours[seed], str), (has, ours[seed])
            assert ours[seed].keys() == theirs[seed].keys()
            for name, values in theirs[seed].items():
                np.testing.assert_allclose(ours[seed][name], values, rtol=limit, atol=limit, err_msg=f"{has} {name}")


@pytest.mark.parametrize("oddity", sorted(REFUSED.keys() - {"train_step"}))
def test_a_recipe_refuses_what_it_has_a_key_of_its_own_for(became, oddity):
    (found,) = became("recipe", 1, (ODDITIES.index(oddity),), False)
    assert f" has {REFUSED[oddity]} of its own, which no recipe runs; drop it, and give " in next(iter(found.values()))


@pytest.mark.parametrize(("oddity", "recipe", "line"), [
    ("train_step", "compiled", "has a train_step of its own, which a recipe does not call"),
    ("average", "default", "after a step each rank has another odd/average: the forward pass changes these weights"),
    ("float32", "named", "wants weights of one type, first/kernel is float64 and narrow/kernel float32"),
])  # fmt: skip
def test_a_recipe_names_what_it_would_change(tmp_path, oddity, recipe, line):
    seed = f"seed={ODDITIES.index(oddity)}"
    given = ["--model-args", seed, "--dataset-args", seed, *([] if recipe == "named" else ["--optimizer-args", seed])]
    argv = [f"{SUPPORT / 'odd_keras.yaml'}:{recipe}", *given, "--output", tmp_path / "run"]
    ended = train("tensorflow", "mpi", 2, *argv, cwd=SUPPORT)
    assert line in ended.out + ended.err
