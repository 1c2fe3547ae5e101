"""Odd models and trainings: what plain PyTorch makes of them on one process is what every way of ours makes of them, on
one and two ranks, and once more where they are left at a random step and resumed; or they are refused by name."""

import json

import numpy as np
import pytest
from odd_launches import Programs
from odd_programs import ODDITIES, ONLY_LOOPS, REFUSED, oddities
from paths import SUPPORT
from ranks import NEEDS, train

pytestmark = [pytest.mark.launched, NEEDS["torch"], pytest.mark.timeout(900)]

SLOW = (
    "more", "[recipe-ddp", "[recipe-horovod", "[lightning-", "bits", "[torch-ddp-1", "[lightning", "[loop-local",
    "[loop-ddp", "[lazy", "[average",
)  # fmt: skip
ALL = [seed for seed in range(len(ODDITIES) + 60) if not oddities(seed) & REFUSED]
FIRST = []
for each in sorted(ALL, key=lambda seed: -len(oddities(seed))):  # few that have each oddity at least once
    # Compiling takes every rank as long as all others.
    if "compiled" not in oddities(each) and not oddities(each) <= set().union(*map(oddities, FIRST)):
        FIRST.append(each)
SEEDS = {"first": FIRST, "more": [seed for seed in ALL if seed not in FIRST]}
LIMITS = {"bfloat16": 1e-2, "float32": 1e-6}
"""Relative, of programs with numbers of that kind; 1e-12 of all others."""


@pytest.fixture(scope="module")
def became(tmp_path_factory):
    """`became("loop", "ddp", 2, "first", False)`: by seed, what became of it on each rank."""
    programs = Programs("torch", "odd_programs.py", tmp_path_factory.mktemp)

    def of(way, engine, ranks, seeds, resumed):
        left_out = ONLY_LOOPS if way in {"recipe", "lightning"} else set()
        chosen = tuple(seed for seed in SEEDS.get(seeds, seeds) if not oddities(seed) & left_out)
        return programs.of_ranks(f"{way} {engine}", ranks, chosen, int(resumed))

    return of


def check_alike(seed, ours, theirs):
    """Every tensor of the trained model."""
    assert not isinstance(ours, str), (oddities(seed), ours)
    limit = max([LIMITS[each] for each in oddities(seed) & LIMITS.keys()], default=1e-12)
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], values, rtol=limit, atol=limit, err_msg=f"{oddities(seed)} {name}")


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize(("engine", "ranks"), [("local", 1), ("horovod", 2), ("ddp", 2)])
@pytest.mark.parametrize("way", ["recipe", "loop", "lightning"])
def test_it_trains_as_plain_pytorch_does(became, way, engine, ranks, seeds):
    (theirs,) = became("plain", "local", 1, seeds, False)
    for ours in became(way, engine, ranks, seeds, False):
        left_out = {str(seed) for seed in ALL if way != "loop" and oddities(seed) & ONLY_LOOPS}
        assert ours.keys() == theirs.keys() - left_out
        for seed in ours:
            check_alike(int(seed), ours[seed], theirs[seed])


@pytest.mark.parametrize(("engine", "ranks", "seeds"), [("local", 1, "first"), ("horovod", 2, "more")])
@pytest.mark.parametrize("way", ["recipe", "loop"])
def test_resumed_at_a_random_step_it_has_the_same_bits(became, way, engine, ranks, seeds):
    for left, whole in zip(*(became(way, engine, ranks, seeds, resumed) for resumed in (True, False)), strict=True):
        for seed in whole:
            assert left[seed] == whole[seed], oddities(int(seed))


@pytest.mark.parametrize("oddity", sorted(REFUSED))
def test_what_cannot_be_trained_is_refused_by_name(became, oddity):
    seed = ODDITIES.index(oddity)
    for way in ("recipe", "loop"):
        (found,) = became(way, "local", 1, (seed,), False)
        assert f" of the model is {oddity}" in found[str(seed)], found


@pytest.mark.parametrize(
    ("adapter", "engine", "batch", "micro_batches", "loss"),
    [
        ("torch", "horovod", 16, 2, "cross_entropy"),
        ("torch", "ddp", 15, 1, "cross_entropy"),  # local batches of 7 and 8
        ("lightning", "ddp", 16, 2, "torch.nn:CrossEntropyLoss"),
        ("torch", "ddp", 16, 2, "odd_programs:criterion"),
    ],
)
def test_labels_that_are_left_out_are_so_over_all_ranks(tmp_path, adapter, engine, batch, micro_batches, loss):
    given = {"model": "odd_programs:Words", "dataset": "odd_programs:words", "loss": loss, "batch_size": batch}
    given |= {"precision": "float64", "epochs": 3, "base_lr": 0.5, "label_smoothing": 0.1 * ("odd" not in loss)}
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


def test_a_step_with_a_mean_over_words_is_named(tmp_path):
    given = {"model": "odd_programs:Words", "dataset": "odd_programs:words", "step": "odd_programs:of_words"}
    given |= {"batch_size": 16, "epochs": 1, "base_lr": 0.1}
    (tmp_path / "words.yaml").write_text(json.dumps({"default": given}))
    ended = train("torch", "alone", 1, tmp_path / "words.yaml", "--output", tmp_path / "one", cwd=SUPPORT).good()
    line = "step odd_programs:of_words: cross_entropy with weights or labels that are left out is no mean over examples"
    assert ended.out.count(line) == 1


@pytest.mark.parametrize(
    ("oddity", "line"),
    {
        "average": "after a step each rank has another average: the forward pass changes these buffers by the rank's",
        "groups": "LR of the optimizer's groups: x0.1 for ",
    }.items(),
)
def test_the_log_names_what_depends_on_the_number_of_ranks_and_lrs(tmp_path, oddity, line):
    seed = f"seed={ODDITIES.index(oddity)}"
    argv = [SUPPORT / "odd.yaml", "--batch-norm", "sync"]
    argv += [each for kind in ("model", "dataset", "optimizer") for each in (f"--{kind}-args", seed)]
    ended = train("torch", "mpi", 2, *argv, "--output", tmp_path / "run", cwd=SUPPORT).good()
    assert line in ended.out
