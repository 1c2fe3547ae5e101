"""Checkpoints as often as they are worth: what rank 0 measures, and the interval that follows."""

import pytest

from hvdtrain.core.recipe import of_program
from hvdtrain.errors import LoopError
from hvdtrain.record.writer import FIRST, Pace, daly
from hvdtrain.run.session import check_intervals


class Run:
    """Steps of 0.1 s by a clock of our own; beside a checkpoint, which takes three steps, they take 0.12 s."""

    def __init__(self, mtbf_hours: float, stall: float = 0.05, write_seconds: float = 0.36) -> None:
        self.pace, self.now, self.step, self.left = Pace(mtbf_hours, 100), 0.0, 100, 0
        self.stall, self.write_seconds = stall, write_seconds
        self.made: list[int] = []
        self.lines: list[str] = []

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self.now += 0.12 if self.left else 0.1
            self.step, self.left = self.step + 1, max(0, self.left - 1)
            self.pace.costs.stepped(self.now, is_writing=self.left > 0)
            if self.pace.due(self.step):
                self.checkpoint()

    def checkpoint(self) -> None:
        stall = self.stall if self.made else 1.0  # the first one takes the memory
        self.now, self.left = self.now + stall, 3
        self.made.append(self.step)
        self.pace.costs.written(stall, self.write_seconds)
        interval = self.pace.wanted()
        self.pace.renew(self.step, interval)
        if line := self.pace.news(interval):
            self.lines.append(line)


def test_the_interval_is_that_of_the_measured_cost():
    run = Run(mtbf_hours=1.0)
    run.go(1000)
    assert run.made[:3] == [100 + FIRST, 100 + 2 * FIRST, 100 + 3 * FIRST]
    assert run.pace.costs.step_seconds == pytest.approx(0.1)
    steps = run.made[4] - run.made[3]
    assert steps == pytest.approx(daly(0.11, 3600) / 0.1, abs=1)
    assert run.lines == [
        f"a checkpoint every {steps} steps ({steps / 10:.1f} s): one costs training 110 ms and is written in 0.4 s; "
        "mtbf_hours 1"
    ]


def test_no_checkpoint_before_the_one_before_is_written():
    run = Run(mtbf_hours=1e-6, write_seconds=1.55)
    run.go(200)
    assert run.made[4] - run.made[3] == 16


def test_the_epochs_end_is_no_step():
    run = Run(mtbf_hours=1.0)
    for _ in range(30):
        run.go(10)
        run.now += 5
        run.pace.costs.pause()
    assert run.pace.costs.step_seconds == pytest.approx(0.1)


def test_another_cost_is_reported_again():
    run = Run(mtbf_hours=0.01)
    run.go(1000)
    run.stall = 2.0
    run.go(3000)
    assert len(run.lines) > 1
    assert run.lines[-1] != run.lines[0]


def test_ranks_that_do_not_measure_keep_the_interval_that_they_are_given():
    pace = Pace(1.0, 0)
    assert next(step for step in range(50) if pace.due(step)) == FIRST
    pace.renew(FIRST, 7)
    assert next(step for step in range(FIRST, 50) if pace.due(step)) == FIRST + 7
    assert pace.news(7) is None


MISUSED = {
    "auto alone": (
        {"checkpoint_every_steps": "auto"},
        "checkpoint_every_steps='auto' needs mtbf_hours, the mean hours between failures of the whole job: those of "
        "one node divided by the job's nodes.",
    ),
    "text": ({"checkpoint_every_steps": "often"}, "checkpoint_every_steps must be a number or 'auto', got 'often'."),
    "text elsewhere": ({"keep_checkpoints": "auto"}, "keep_checkpoints must be a number, got 'auto'."),
    "no time": ({"mtbf_hours": 0.0}, "mtbf_hours must be greater than 0, got 0.0."),
    "none kept": ({"keep_checkpoints": 0}, "keep_checkpoints must be at least 1, got 0."),
}


@pytest.mark.parametrize(("given", "message"), MISUSED.values(), ids=MISUSED)
def test_a_loop_of_ones_own_is_refused_in_one_line(given, message):
    with pytest.raises(LoopError) as caught:
        check_intervals(of_program(**given))
    assert str(caught.value) == message


def test_half_an_hour_is_a_time():
    check_intervals(of_program(checkpoint_every_steps="auto", mtbf_hours=0.5))
