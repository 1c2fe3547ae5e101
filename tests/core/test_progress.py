"""How far a run has come, through a checkpoint and at its ends; what each rank reads next."""

import json

import numpy as np
import pytest

from hvdtrain.core.progress import Progress, due, train_requests, valid_requests
from hvdtrain.core.schedule import Plateau
from hvdtrain.core.totals import Totals
from hvdtrain.datasets import DRAWS


@pytest.mark.parametrize(
    "progress",
    [Progress(), Progress(7, 1, 96, Plateau(0.25, 2, 1), Totals(0.1, 96.0, {"acc1": (3.0, 96.0)}))],
    ids=["at the start", "inside an epoch"],
)
def test_progress_survives_a_checkpoint(progress):
    assert Progress.of(json.loads(json.dumps(progress.metadata()))) == progress


@pytest.mark.parametrize(
    ("progress", "epoch_done", "done"),
    [
        (Progress(0, 0, 0), False, False),
        (Progress(9, 0, 900), False, False),
        (Progress(10, 0, 901), True, False),
        (Progress(10, 0, 1000), True, False),
        (Progress(20, 1, 1000), True, True),
        (Progress(12, 1, 200), False, True),
    ],
    ids=["start", "one batch left", "less than a batch left", "epoch", "last epoch", "max_steps"],
)
def test_the_ends(make_plan, progress, epoch_done, done):
    plan = make_plan("linear", epochs=2, max_steps=12 if progress.step == 12 else None)
    assert (progress.is_epoch_done(plan), progress.is_done(plan)) == (epoch_done, done)


@pytest.mark.parametrize(
    ("progress", "after"),
    [
        (Progress(9, 0, 300), Progress(9, 1)),
        (Progress(10, 0, 1000), Progress(10, 1)),
        (Progress(12, 1, 200), Progress(12, 1, 200)),
        (Progress(12, 1, 1000), Progress(12, 2)),
    ],
    ids=["left early", "whole", "max_steps inside", "max_steps at the end"],
)
def test_a_run_without_a_plan_continues(make_plan, progress, after):
    assert progress.after_steps(make_plan("linear", epochs=2, max_steps=12)) == after


def test_the_next_epoch_keeps_the_step_and_the_plateau(make_plan):
    plan = make_plan("linear", lr_schedule="plateau")
    after = Progress(10, 0, 1000, train=Totals(1.0, 1000.0)).next_epoch(plan, 0.5)
    assert after == Progress(10, 1, plateau=Plateau(best=0.5))


def test_the_lr_follows_the_place_in_the_epoch(make_plan):
    plan = make_plan("linear", warmup_epochs=1.0)
    assert Progress().lr(plan) == pytest.approx(0.05)
    assert Progress(sample=300).lr(plan) == pytest.approx(0.2)
    assert Progress(epoch=1).lr(plan) == pytest.approx(0.5)


@pytest.mark.parametrize(("size", "micro_batches"), [(1, 1), (2, 1), (4, 1), (1, 5), (2, 5), (4, 5), (3, 1), (8, 1)])
def test_all_ranks_read_one_batch_in_micro_batches(make_plan, size, micro_batches):
    plan = make_plan("linear", size=size, accumulation_steps=micro_batches)
    all_requests = [train_requests(plan, Progress(epoch=3, sample=200), rank) for rank in range(size)]
    whole, (alone,) = range(200, 1000, 100), [train_requests(make_plan("linear"), Progress(epoch=3, sample=200), 0)]
    for starts, requests in all_requests:
        assert starts == whole == alone[0]
        assert len(requests) == len(starts) * micro_batches
        assert all(
            len(indices) - 100 // size // micro_batches in {0, 100 % size > 0} and draws.shape == (len(indices), DRAWS)
            for indices, draws in requests
        )
    for update in range(len(whole)):
        mine = [
            request
            for _, requests in all_requests
            for request in requests[update * micro_batches : (update + 1) * micro_batches]
        ]
        for column in (0, 1):
            np.testing.assert_array_equal(
                np.concatenate([request[column] for request in mine]), alone[1][update][column]
            )


@pytest.mark.parametrize("size", [1, 3, 4])
def test_validation_reads_every_example_once(make_plan, size):
    plan = make_plan("linear", size=size, batch_size_per_rank=25)
    requests = [request for rank in range(size) for request in valid_requests(plan, rank)]
    assert sorted(np.concatenate([indices for indices, _ in requests])) == list(range(plan.valid_examples))
    assert all(0 < len(indices) <= plan.micro_batch and draws is None for indices, draws in requests)


def test_due():
    assert [step for step in range(1, 8) if due(step, 3)] == [3, 6]
    assert not due(3, None)
