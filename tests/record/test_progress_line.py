"""How long a run still takes: steps and validations that are left, by a clock that a test moves."""

import sys

import pytest

from hvdtrain.core.progress import Progress, UserSampling
from hvdtrain.core.wording import duration
from hvdtrain.record.progress_line import Ahead, Estimate

LENGTHS = {  # progress, length (batch, examples, size), total, steps of this epoch, of a whole one
    "from the start": (Progress(), UserSampling(64, 1437, 2, epochs=10), 220, 22, 22),
    "resumed inside an epoch": (Progress(49, 2, 5 * 64), UserSampling(64, 1437, 2, epochs=10), 220, 17, 22),
    "cut by max_steps": (Progress(22, 1), UserSampling(64, 1437, 2, epochs=10, max_steps=30), 30, 8, 22),
    "resumed on another batch": (Progress(22, 1), UserSampling(128, 1437, 4, epochs=3), 44, 11, 11),
    "without an end": (Progress(), UserSampling(64, 1437, 2, epochs=sys.maxsize), None, 22, 22),
    "without an end but max_steps": (Progress(), UserSampling(64, 1437, 2, epochs=sys.maxsize, max_steps=5), 5, 5, 22),
    "fewer examples than a batch": (Progress(), UserSampling(64, 7, 2, epochs=2), 0, 0, 0),
}


@pytest.mark.parametrize(("progress", "length", "total", "in_epoch", "an_epoch"), LENGTHS.values(), ids=LENGTHS)
def test_what_is_ahead(progress, length, total, in_epoch, an_epoch):
    assert Ahead.from_progress(progress, length) == Ahead(total, in_epoch, an_epoch)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def run(estimate, clock, seconds, first=0):
    """Steps of so many seconds."""
    for step, duration_ in enumerate(seconds, first + 1):
        clock.now += duration_
        estimate.stepped(step)


def test_steps_and_validations_that_are_left(clock):
    estimate = Estimate(clock)
    estimate.begin_epoch(0)
    estimate.expect(Ahead(40, 10, 10), valid_batches=3)
    assert estimate.seconds_left() is None  # nothing is known yet
    run(estimate, clock, [30.0])
    assert estimate.seconds_left() == pytest.approx(39 * 30 + 4 * 30)  # a validation of 3 batches forward is one step
    run(estimate, clock, [2.0], 1)
    assert estimate.seconds_left() == pytest.approx(38 * 2 + 4 * 2)  # the first step, which compiles, counts no more
    run(estimate, clock, [2.0] * 8, 2)
    assert estimate.is_in_pause and estimate.seconds_left() == pytest.approx(30 * 2 + 4 * 2)
    clock.now += 5
    estimate.begin_epoch(10)
    estimate.expect(Ahead(40, 10, 10), valid_batches=3)
    assert estimate.seconds_left() == pytest.approx(30 * 2 + 3 * 5)  # one is measured
    clock.now += 1
    assert estimate.seconds_left() == pytest.approx(30 * 2 + 3 * 5 - 1)  # it follows the clock
    clock.now += 50
    assert estimate.seconds_left() == pytest.approx(29 * 2 + 3 * 5)  # but no step takes less than none
    assert estimate.is_slow and estimate.running == 51


def test_recent_steps_count(clock):
    estimate = Estimate(clock)
    estimate.begin_epoch(0)
    estimate.expect(Ahead(1000, 1000, 1000))
    run(estimate, clock, [5.0] + [1.0] * 200)
    assert estimate.seconds_left() == pytest.approx(799)
    run(estimate, clock, [2.0] * 30, 201)  # from now on they take twice as long: a minute later most of it is known
    assert 1450 < estimate.seconds_left() < 1540


def test_a_resumed_run_knows_at_its_second_step(clock):
    estimate = Estimate(clock)
    estimate.begin_epoch(90)
    estimate.expect(Ahead(100, 10, 20), valid_batches=0)
    run(estimate, clock, [9.0, 1.0], 90)
    assert estimate.seconds_left() == pytest.approx(8)


def test_without_an_end(clock):
    estimate = Estimate(clock)
    estimate.begin_epoch(0)
    estimate.expect(Ahead(None, 10, 10))
    run(estimate, clock, [1.0, 1.0])
    assert estimate.seconds_left() is None and not estimate.is_slow


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (99.4, "99 s"), (100, "2 min"), (5900, "98 min"), (6000, "1 h 40 min"), (3600 * 26, "26 h 0 min"),
     (86400 * 2 + 3600 * 5, "2 d 5 h")],
)  # fmt: skip
def test_durations_for_people(seconds, text):
    assert duration(seconds, rough=True) == text
