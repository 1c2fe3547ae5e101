"""Odd models and trainings: on one rank and on two, with a recipe, a loop or Lightning, they end as with plain PyTorch
on one process, also where they are stopped at a random step and resumed. What cannot be trained is refused by name."""

import json

import numpy as np
import pytest
from marks import marked
from odd_drawn import ODDITIES, ONLY_LOOPS, REFUSED, oddities
from odd_launches import Programs, check_tensors
from paths import SUPPORT
from ranks import NEEDS, train

pytestmark = [pytest.mark.launched, NEEDS["torch"], pytest.mark.timeout(900)]

REFUSED_SEEDS = [ODDITIES.index(each) for each in sorted(REFUSED)]
ALL = [seed for seed in range(len(ODDITIES) + 60) if not oddities(seed) & REFUSED]


def covering(seeds):
    """Few of the seeds that have each oddity at least once; but compiling takes every rank as long as all others."""
    seeds = [seed for seed in seeds if "compiled" not in oddities(seed)]
    missing, found = set().union(*map(oddities, seeds)), []
    while missing:
        found.append(max(seeds, key=lambda seed: len(oddities(seed) & missing)))
        missing -= oddities(found[-1])
    return found


FIRST = covering(ALL)
SEEDS = {"first": FIRST, "more": [seed for seed in ALL if seed not in FIRST]}
LIMITS = {"bfloat16": 1e-2, "float32": 1e-6}
"""Relative, of programs with numbers of that kind; 1e-12 of all others."""


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    return Programs("torch", "odd_programs.py", tmp_path_factory.mktemp)


@pytest.fixture(scope="module")
def became(programs):
    """`became("loop", "ddp", 2, "first", False)`: on each rank, by seed, the trained model or the refusal."""

    def of(way, engine, ranks, seeds, resumed):
        left_out = ONLY_LOOPS if way in {"recipe", "lightning"} else set()
        chosen = [seed for seed in SEEDS[seeds] if not oddities(seed) & left_out]
        refused = REFUSED_SEEDS if seeds == "first" and way != "plain" else []
        return programs.of_ranks(f"{way} {engine}", ranks, (*chosen, *refused), int(resumed))

    return of


def check_alike(seed, ours, theirs):
    limit = max([LIMITS[each] for each in oddities(seed) & LIMITS.keys()], default=1e-12)
    check_tensors(oddities(seed), ours, theirs, limit)


WAYS, ENGINES = ("recipe", "loop", "lightning"), (("local", 1), ("horovod", 2), ("ddp", 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "engine", "ranks", "seeds"),
    marked(
        [(way, *engine, seeds) for way in WAYS for engine in ENGINES for seeds in SEEDS],
        only_ci={("loop", "ddp", "first")},
    ),
)
def test_it_trains_as_plain_pytorch_does(became, way, engine, ranks, seeds):
    (theirs,) = became("plain", "local", 1, seeds, False)
    for rank, ours in enumerate(map(dict, became(way, engine, ranks, seeds, False))):
        refused = {oddities(int(seed)).pop(): ours.pop(seed) for seed in map(str, REFUSED_SEEDS) if seed in ours}
        assert refused.keys() == (REFUSED if seeds == "first" else set())
        is_silent = rank and way != "loop"  # a recipe's refusal is printed by rank 0, the others have its exit code
        for oddity, text in refused.items():
            assert text == "RuntimeError: 2" if is_silent else f" of the model is {oddity}" in text
        left_out = {str(seed) for seed in ALL if way != "loop" and oddities(seed) & ONLY_LOOPS}
        assert ours.keys() == theirs.keys() - left_out
        for seed in ours:
            check_alike(int(seed), ours[seed], theirs[seed])


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "ranks", "seeds"), [("local", 1, "first"), ("horovod", 2, "more")])
@pytest.mark.parametrize("way", ["recipe", "loop"])
def test_resumed_at_a_random_step_it_has_the_same_bits(became, way, engine, ranks, seeds):
    for left, whole in zip(*(became(way, engine, ranks, seeds, resumed) for resumed in (True, False)), strict=True):
        for seed in whole:
            assert left[seed] == whole[seed], oddities(int(seed))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["recipe", "loop"])
@pytest.mark.parametrize("engines", [(("horovod", 2), ("local", 1)), (("local", 1), ("ddp", 2))])
def test_resumed_on_another_number_of_ranks_it_trains_as_plain_pytorch_does(became, programs, way, engines):
    (theirs,) = became("plain", "local", 1, "first", False)
    seeds = tuple(seed for seed in FIRST if way == "loop" or not oddities(seed) & ONLY_LOOPS)
    for ours in programs.moved(way, engines, seeds):
        for seed in seeds:
            check_alike(seed, ours[str(seed)], theirs[str(seed)])


@pytest.mark.parametrize(
    ("adapter", "engine", "batch", "micro_batches", "loss"),
    marked(
        [
            ("torch", "horovod", 16, 2, "cross_entropy"),
            ("torch", "ddp", 15, 1, "cross_entropy"),  # local batches of 7 and 8
            ("lightning", "ddp", 16, 2, "torch.nn:CrossEntropyLoss"),
            ("torch", "ddp", 16, 2, "odd_programs:criterion"),
        ],
        slow={"ddp"},
    ),
)
def test_labels_that_are_left_out_are_so_over_all_ranks(tmp_path, adapter, engine, batch, micro_batches, loss):
    given = {"model": "odd_programs:Words", "dataset": "odd_programs:words", "loss": loss, "batch_size": batch}
    given |= {"precision": "float64", "epochs": 3, "base_lr": 0.5, "label_smoothing": 0.1 * ("odd" not in loss)}
    given |= {"class_weights": {0: 2.5, 1: 0}} if "odd" not in loss else {}
    (tmp_path / "words.yaml").write_text(json.dumps({"default": given}))
    argv = [tmp_path / "words.yaml", "--output"]
    train("torch", "alone", 1, *argv, tmp_path / "one", cwd=SUPPORT).good()
    more = ["--engine", engine, "--accumulation-steps", micro_batches]
    train(adapter, "mpi", 2, *argv, tmp_path / "two", *more, cwd=SUPPORT).good()
    one, two = (
        [(each["train_loss"], each["valid_loss"]) for each in records if each["kind"] == "epoch"]
        for records in (
            [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
            for name in ("one", "two")
        )
    )
    np.testing.assert_allclose(two, one, rtol=1e-12)
    assert len(one) == 3


@pytest.mark.slow
def test_the_log_names_buffers_that_depend_on_the_number_of_ranks(tmp_path):
    seed = f"seed={ODDITIES.index('average')}"
    argv = [SUPPORT / "odd.yaml", "--batch-norm", "sync"]
    argv += [each for kind in ("model", "dataset", "optimizer") for each in (f"--{kind}-args", seed)]
    ended = train("torch", "mpi", 2, *argv, "--output", tmp_path / "run", cwd=SUPPORT).good()
    line = "after a step each rank has another average: the forward pass changes these buffers by the rank's"
    assert line in ended.out
