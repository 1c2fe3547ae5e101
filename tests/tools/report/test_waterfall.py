"""Where the wall time went: parts of one axis of time, which add up whatever happened."""

import pytest
import report_folders

from hvdtrain.record.history import Launch, add_launches
from hvdtrain.record.reader import read
from hvdtrain.tools.report.costs import axis_of, waterfall

T = report_folders.BEGAN
JOB = {"id": "7", "restart": 0}
OPENING = {"start": 1.0, "import": 4.0}


def launch(time=T, step=0, **more):
    return {"kind": "launch", "time": time, "step": step, "ranks": 2, **more}


def job(submit, start):
    return {"kind": "job", "submit": T + submit, "start": T + start}


def phases(step, training, **more):
    spent = {**OPENING, "first_step": 2.0, "training": training, **more}
    return {"kind": "phases", "clock": sum(spent.values()), "step": step, "phases": spent}


def checkpoint(step, clock):
    return {"kind": "event", "event": "checkpoint", "step": step, "clock": clock, "text": ""}


def end(state, step, training, **more):
    return {**phases(step, training, **more), "kind": "end", "state": state}


def parts_of(records) -> dict[str, float]:
    launches: list[Launch] = []
    add_launches(launches, records)
    axis = axis_of(launches)
    found = waterfall(launches, axis)
    parts = {part.name: part.seconds for part in found.parts}
    assert len(parts) == len(found.parts)
    assert all(seconds > 0 for seconds in parts.values())
    assert sum(parts.values()) == pytest.approx(found.wall_seconds, abs=1e-6)
    assert axis.launches[-1] + launches[-1].clock == pytest.approx(found.wall_seconds, abs=1e-6)
    if found.goodput is not None:
        assert found.goodput == pytest.approx(parts.get("training", 0.0) / found.wall_seconds)
    return parts


ONE = {"start": 1, "import": 4, "first step": 2}
TABLE = {
    "one launch": ([launch(), end("finished", 100, 10, end=1)], {**ONE, "training": 10, "end": 1}),
    "queued": (
        [launch(T + 65), job(0, 60), end("finished", 100, 10)],
        {**ONE, "queue": 60, "start": 5 + 1, "training": 10},
    ),
    "no time but the clock": ([launch(None), end("finished", 100, 10)], {**ONE, "training": 10}),
    "killed in mid-epoch, resumed": (
        [launch(), phases(50, 5), checkpoint(50, 12), phases(90, 9), launch(T + 30, 50), end("finished", 100, 5)],
        {"start": 2, "import": 8, "first step": 4, "training": 5 + 5, "lost work": 4, "idle": 14},
    ),
    "killed, what came after the last record is lost too": (
        [launch(), phases(50, 5), checkpoint(50, 15), launch(T + 30, 50), end("finished", 100, 5)],
        {"start": 2, "import": 8, "first step": 4, "training": 10, "lost work": 3, "idle": 15},
    ),
    "killed before any checkpoint": (
        [launch(), phases(20, 2), launch(T + 9), end("finished", 100, 10)],
        {"start": 2, "import": 8, "first step": 2, "training": 10, "lost work": 4},
    ),
    "failed, with its end, before the next log line": (
        [launch(), phases(50, 5), end("failed", 50, 6), launch(T + 13, 50), end("finished", 100, 5)],
        {"start": 2, "import": 8, "first step": 4, "training": 10, "lost work": 1},
    ),
    "stopped in order: nothing is lost": (
        [launch(), phases(50, 5), end("stopped", 50, 5, checkpoint=1), launch(T + 13, 50), end("finished", 100, 5)],
        {"start": 2, "import": 8, "first step": 4, "training": 10, "checkpoints": 1},
    ),
    "two launches lost: resumed from the first one's checkpoint": (
        [
            *(launch(), phases(50, 5), phases(60, 6)),
            *(launch(T + 13, 50), phases(80, 3)),
            *(launch(T + 23, 50), end("finished", 100, 5)),
        ],
        {"start": 3, "import": 12, "first step": 4, "training": 10, "lost work": 1 + 2 + 3},
    ),
    "resumed, then from an older checkpoint, as the newest was damaged": (
        [
            *(launch(), phases(50, 5), phases(80, 8), phases(90, 9)),
            *(launch(T + 16, 80), phases(85, 1)),
            *(launch(T + 24, 50), end("finished", 100, 5)),
        ],
        {"start": 3, "import": 12, "first step": 4, "training": 10, "lost work": 4 + 3},
    ),
    "queued again: each queue by itself": (
        [
            *(launch(T + 10, job=JOB), job(0, 10), phases(50, 5)),
            *(launch(T + 100, 50, job={**JOB, "restart": 1}), job(40, 98), end("finished", 100, 5)),
        ],
        {"queue": 10 + 58, "start": 2 + 2, "import": 8, "first step": 4, "training": 10, "idle": 18},
    ),
    "started again in the same job: its queue counts once": (
        [
            *(launch(T + 10, job=JOB), job(0, 10), phases(50, 5)),
            *(launch(T + 40, 50, job=JOB), job(0, 10), end("finished", 100, 5)),
        ],
        {"queue": 10, "start": 2, "import": 8, "first step": 4, "training": 10, "idle": 18},
    ),
    "the next job was submitted while this one ran": (
        [
            *(launch(T + 10, job=JOB), job(0, 10), end("stopped", 50, 5)),
            *(launch(T + 30, 50, job={"id": "8"}), job(5, 29), end("finished", 100, 5)),
        ],
        {"queue": 10 + 7, "start": 2 + 1, "import": 8, "first step": 4, "training": 10},
    ),
    "clocks of two hosts: the second launch began before the first ended": (
        [launch(), phases(50, 5), launch(T + 10, 50), end("finished", 100, 5)],
        {"start": 2, "import": 8, "first step": 4, "training": 10},
    ),
    "clocks of two hosts: the job began after its program": (
        [launch(T + 10), job(0, 12), end("finished", 100, 5)],
        {**ONE, "queue": 10, "training": 5},
    ),
    "clocks of two hosts: a new job began before the last sign of life": (
        [
            *(launch(job=JOB), end("stopped", 50, 5)),
            *(launch(T + 14, 50, job={"id": "8"}), job(1, 11), end("finished", 100, 5)),
        ],
        {"start": 4, "import": 8, "first step": 4, "training": 10},
    ),
    "still running, in a validation": (
        [launch(), phases(50, 5), phases(50, 5, validation=3), {"kind": "energy", "clock": 17}],
        {**ONE, "training": 5, "validation": 3 + 2},
    ),
    "running, nothing but its beginning": ([launch(), {"kind": "event", "event": "slow", "clock": 3}], {"start": 3}),
    "a torn beginning": ([phases(50, 5), launch(T + 30, 50), end("finished", 100, 5)], None),
}


@pytest.mark.parametrize(("records", "expected"), TABLE.values(), ids=TABLE)
def test_parts(records, expected):
    found = parts_of(records)
    if expected is not None:
        assert found == pytest.approx(expected, abs=1e-5)


def test_no_launch_has_no_waterfall():
    assert waterfall([], axis_of([])) is None


@pytest.mark.parametrize(
    "name", ["finished", "resumed", "stopped", "failed", "killed", "running", "slow", "tensorflow"]
)
def test_runs_add_up_to_the_time_between_submit_and_end(name, tmp_path):
    report_folders.ALL[name](tmp_path)
    launches = read(tmp_path).launches
    axis = axis_of(launches)
    found = waterfall(launches, axis)
    last = launches[-1]
    by_clocks = last.time + last.clock - (launches[0].submit or launches[0].time)
    assert sum(part.seconds for part in found.parts) == pytest.approx(found.wall_seconds, abs=1e-6)
    assert found.wall_seconds == pytest.approx(by_clocks, rel=0.01)
    assert 0 < found.goodput < 1


def test_lost_work_is_what_was_made_again(tmp_path):
    run = report_folders.resumed(tmp_path)
    launches = read(tmp_path).launches
    lost = {part.name: part.seconds for part in waterfall(launches, axis_of(launches)).parts}["lost work"]
    again = (60 - 44) + (150 - 132)  # steps, each of some 0.57 s
    assert lost == pytest.approx(again * (run.seconds + 0.07), rel=0.1)
