"""How far a run has come, and what each rank reads next: one sample order for every number of ranks."""

import itertools
import json

import numpy as np
import pytest

from hvdtrain.core.metrics import Totals
from hvdtrain.core.progress import Epoch, Progress, due, shard, train_requests, valid_requests
from hvdtrain.core.schedule import Plateau
from hvdtrain.datasets import DRAWS


def test_progress_survives_a_checkpoint():
    for progress in (Progress(), Progress(7, 1, 96, Plateau(0.25, 2, 1), Totals(0.1, 96.0, {"acc1": (3.0, 96.0)}))):
        assert Progress.from_metadata(json.loads(json.dumps(progress.metadata()))) == progress


ENDS = {  # whether the epoch is done, and the run; where a run without a plan continues
    "start": (Progress(0, 0, 0), False, False, Progress(0, 1)),
    "one batch left": (Progress(9, 0, 900), False, False, Progress(9, 1)),
    "less than a batch left": (Progress(10, 0, 901), True, False, Progress(10, 1)),
    "epoch": (Progress(10, 0, 1000), True, False, Progress(10, 1)),
    "max_steps inside": (Progress(12, 1, 200), False, True, Progress(12, 1, 200)),
    "max_steps at the end": (Progress(12, 1, 1000), True, True, Progress(12, 2)),
    "last epoch": (Progress(11, 1, 1000), True, True, Progress(11, 2)),
}


@pytest.mark.parametrize(("progress", "epoch_done", "done", "after"), ENDS.values(), ids=ENDS)
def test_the_ends(make_plan, progress, epoch_done, done, after):
    plan = make_plan("linear", epochs=2, max_steps=12)
    assert (progress.is_epoch_done(plan), progress.is_done(plan)) == (epoch_done, done)
    assert progress.after_steps(plan) == after


def test_the_next_epoch_keeps_the_step_and_the_plateau(make_plan):
    plan = make_plan("linear", lr_schedule="plateau")
    after = Progress(10, 0, 1000, train=Totals(1.0, 1000.0)).next_epoch(plan, {"valid_loss": 0.5})
    assert after == Progress(10, 1, plateau=Plateau(best=0.5))


def test_the_lr_follows_the_position_in_the_epoch(make_plan):
    plan = make_plan("linear", warmup_epochs=1.0)
    rates = [progress.lr(plan) for progress in (Progress(), Progress(sample=300), Progress(epoch=1))]
    assert rates == pytest.approx([0.05, 0.2, 0.5])


@pytest.mark.parametrize(("size", "micro_batches"), [(1, 1), (2, 1), (4, 1), (1, 5), (2, 5), (4, 5), (3, 1), (8, 1)])
def test_all_ranks_read_one_batch_in_micro_batches(make_plan, size, micro_batches):
    plan, progress = make_plan("linear", size=size, accumulation_steps=micro_batches), Progress(epoch=3, sample=200)
    starts, alone = train_requests(make_plan("linear"), progress, 0)
    assert starts == range(200, 1000, 100)
    of_ranks = [train_requests(plan, progress, rank) for rank in range(size)]
    for begins, requests in of_ranks:
        assert (begins, len(requests)) == (starts, len(starts) * micro_batches)
        for indices, draws in requests:
            assert len(indices) - 100 // size // micro_batches in {0, 100 % size > 0}
            assert draws.shape == (len(indices), DRAWS)
    for update, whole in enumerate(alone):
        micro = slice(update * micro_batches, (update + 1) * micro_batches)
        joined = zip(*(request for _, requests in of_ranks for request in requests[micro]), strict=True)
        for column, parts in zip(whole, joined, strict=True):
            np.testing.assert_array_equal(np.concatenate(parts), column)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_validation_reads_every_example_once(make_plan, size):
    plan = make_plan("linear", size=size, batch_size_per_rank=25)
    requests = [request for rank in range(size) for request in valid_requests(plan, rank)]
    assert sorted(np.concatenate([indices for indices, _ in requests])) == list(range(plan.valid_examples))
    assert all(0 < len(indices) <= plan.micro_batch and draws is None for indices, draws in requests)


def test_due():
    assert [step for step in range(1, 8) if due(step, 3)] == [3, 6]
    assert not due(3, None)


RANKS = [1, 2, 3, 4, 8]
BATCH = 24  # every number in RANKS divides it


@pytest.mark.parametrize(
    ("batch", "size", "lengths"),
    [
        (100, 8, [12, 13] * 4),
        (7, 3, [2, 2, 3]),
        (4, 4, [1] * 4),
        *((BATCH, size, [BATCH // size] * size) for size in RANKS),
    ],
)
def test_the_ranks_batches_joined_are_the_batch_of_one_rank(batch, size, lengths):
    order = Epoch.shuffled(1437, seed=3, epoch=7, draws=2)
    for start in range(0, 1437 - batch + 1, batch):
        batches = [order.local_batch(start, batch, rank, size) for rank in range(size)]
        assert [len(batch) for batch in batches] == lengths
        np.testing.assert_array_equal(np.concatenate(batches), order.local_batch(start, batch, 0, 1))


def test_an_epoch_is_a_permutation_and_draws_lie_in_the_unit_interval():
    epoch = Epoch.shuffled(1000, seed=1, epoch=2, draws=8)
    assert sorted(epoch.order) == list(range(1000))
    assert (epoch.draws.shape, epoch.draws.dtype) == ((1000, 8), np.float32)
    assert 0 <= epoch.draws.min() < 0.01 and 0.99 < epoch.draws.max() < 1


def test_an_items_examples_stay_together_and_share_their_draws():
    items = (5, 5, 5, 3)
    epoch = Epoch.by_item(items, seed=1, epoch=2, draws=3)
    firsts, which = np.cumsum([0, *items]), np.repeat(range(4), items)
    runs = np.split(epoch.order, np.flatnonzero(np.diff(which[epoch.order])) + 1)
    assert sorted(run.tolist() for run in runs) == [list(range(a, b)) for a, b in itertools.pairwise(firsts)]
    assert len(np.unique(epoch.draws, axis=0)) == len(np.unique(np.c_[which, epoch.draws], axis=0)) == 4
    orders = {tuple(Epoch.by_item(items, seed=1, epoch=each, draws=0).order) for each in range(9)}
    assert len(orders) > 4


def test_order_and_draws_depend_on_seed_and_epoch():
    one = Epoch.shuffled(50, seed=1, epoch=2, draws=3)
    for seed, epoch in [(2, 2), (1, 3), (2, 1)]:
        other = Epoch.shuffled(50, seed, epoch, draws=3)
        assert (one.order != other.order).any()
        assert (one.draws != other.draws).any()


def test_order_and_draws_are_the_same_in_every_version():
    # A run may be resumed with a newer version, and must not read again what it has read.
    epoch = Epoch.shuffled(10, seed=0, epoch=0, draws=1)
    assert epoch.order.tolist() == [4, 6, 2, 7, 3, 5, 9, 0, 8, 1]
    assert epoch.draws[0] == np.float32(0.8897822)


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize(("first", "second"), [(24, 48), (48, 24), (24, 120)])
def test_a_run_resumed_with_another_batch_reads_each_remaining_sample_once(size, first, second):
    epoch = Epoch.shuffled(480, 9, 4, 1)
    for offset in (first, 3 * first, 5 * first):
        read = [epoch.local_batch(start, first, rank, 4) for start in range(0, offset, first) for rank in range(4)]
        starts = range(offset, 480 - second + 1, second)
        read += [epoch.local_batch(start, second, rank, size) for start in starts for rank in range(size)]
        np.testing.assert_array_equal(np.concatenate(read), epoch.order[: 480 - (480 - offset) % second])


@pytest.mark.parametrize("size", [*RANKS, 7, 1000])
@pytest.mark.parametrize("examples", [1, 7, 8, 360, 1000])
def test_validation_shards_partition(examples, size):
    shards = [shard(examples, rank, size) for rank in range(size)]
    assert np.concatenate(shards).tolist() == list(range(examples))
    lengths = [len(shard) for shard in shards]
    assert max(lengths) - min(lengths) <= 1
    assert shard(1_281_167, 999_999, 1_000_000).tolist() == [1_281_165, 1_281_166]


SHARDS = (700, 701, 3, 650, 699, 702, 400, 145)


def by_shard(seed=1, epoch=2, size=3, batch=30):
    return Epoch.by_shard(SHARDS, seed, epoch, 2, batch, size)


@pytest.mark.parametrize(("batch", "size"), [(30, 1), (30, 3), (64, 4), (31, 3), (4000, 8)])
def test_by_shard_each_rank_reads_a_run_of_its_own(batch, size):
    """As many examples as the others to one, no example twice, and few shards."""
    epoch, steps = by_shard(size=size, batch=batch), 4000 // batch
    assert sorted(epoch.order) == list(range(4000))
    shard_of = np.repeat(np.arange(len(SHARDS)), SHARDS)
    read = []
    for rank in range(size):
        batches = [epoch.local_batch(k * batch, batch, rank, size) for k in range(steps)]
        assert {len(batch) for batch in batches} == {batch * (rank + 1) // size - batch * rank // size}
        read.append(set(np.concatenate(batches).tolist()))
    assert sum(map(len, read)) == len(set.union(*read)) == steps * batch
    readers = sum(len({shard_of[k] for k in mine}) for mine in read)
    assert readers <= len(SHARDS) + size - 1


def test_by_shard_a_window_is_mixed_and_no_more(monkeypatch):
    monkeypatch.setattr("hvdtrain.core.progress.WINDOW", 100)
    epoch = Epoch.by_shard((1000,), 0, 0, 1, 50, 2)
    for rank in range(2):
        mine = np.concatenate([epoch.local_batch(start, 50, rank, 2) for start in range(0, 1000, 50)]) - 500 * rank
        assert (mine // 100).tolist() == sorted(mine // 100)
        assert abs(np.corrcoef(mine % 100, np.arange(500) % 100)[0, 1]) < 0.15


def test_by_shard_order_depends_on_seed_and_epoch():
    one, again = by_shard(), by_shard()
    np.testing.assert_array_equal(one.order, again.order)
    np.testing.assert_array_equal(one.draws, Epoch.shuffled(4000, 1, 2, 2).draws)
    for other in (by_shard(seed=2), by_shard(epoch=3)):
        assert (one.order != other.order).mean() > 0.9
    shard_of = np.repeat(np.arange(len(SHARDS)), SHARDS)
    assert len({shard_of[by_shard(epoch=epoch).order[0]] for epoch in range(12)}) > 3
