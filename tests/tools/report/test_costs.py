"""Energy: SLURM's accounting by a real sacct on the PATH, and the run's own counters; each counted once. Where the wall
time went: parts of one axis of time, which add up whatever happened."""

import pytest
import report_folders

from hvdtrain.launch import slurm
from hvdtrain.record.history import Launch, add_launches
from hvdtrain.record.reader import read
from hvdtrain.tools.report import costs
from hvdtrain.tools.report.costs import axis_of, waterfall

KWH = 3.6e6


def launches_of(*joules, job="7", clock=100.0, nodes=2) -> list[Launch]:
    """One launch for each mapping of joules."""
    records = []
    for each in joules:
        records.append({"kind": "launch", "time": report_folders.BEGAN, "job": job and {"id": job, "restart": 0}})
        records.append({"kind": "energy", "clock": 50.0, "joules": dict.fromkeys(each, 1.0)})
        records.append({"kind": "energy", "clock": clock, "joules": each, "nodes": dict.fromkeys(each, nodes)})
    found: list[Launch] = []
    add_launches(found, records)
    return found


@pytest.fixture
def sacct(tmp_path, monkeypatch):
    """`sacct(text)`: from now on sacct prints that; its arguments are in the file that this returns."""

    def make(printed: str, after: str = ""):
        script, arguments = tmp_path / "sacct", tmp_path / "arguments"
        (tmp_path / "printed").write_text(printed)
        script.write_text(f'#!/bin/sh\necho "$@" > {arguments}\n/bin/cat {tmp_path / "printed"}\n{after}\n')
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        return arguments

    return make


@pytest.fixture
def no_sacct(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))


# JobIDRaw, Start, ElapsedRaw, NNodes, ConsumedEnergyRaw
TABLES = {
    "one job": ("7|2026-11-25T10:00:00|100|2|3600000\n", (3.6e6, 100, 2)),
    "queued again: both starts": ("7|10:00|100|2|1000\n7|11:00|50|3|500\n", (1500, 150, 3)),
    "a line twice": ("7|10:00|100|2|1000\n7|10:00|100|2|1000\n", (1000, 100, 2)),
    "two jobs": ("7|10:00|100|2|1000\n8|11:00|50|2|500\n", (1500, 150, 2)),
    "a start that is still queued": ("7|10:00|100|2|1000\n7|Unknown|0|0|\n", (1000, 100, 2)),
    "no figure": ("7|10:00|100|2|0\n", None),
    "empty": ("7|10:00|100|2|\n", None),
    "one of two starts without a figure": ("7|10:00|100|2|1000\n7|11:00|50|2|0\n", None),
    "what SLURM prints for no value": ("7|10:00|100|2|18446744073709551614\n", None),
    "negative": ("7|10:00|100|2|-5\n", None),
    "words": ("slurm: error|x\n\n7|a|b|c|d\n", None),
    "nothing": ("", None),
}


@pytest.mark.parametrize(("printed", "expected"), TABLES.values(), ids=TABLES)
def test_what_sacct_prints(printed, expected):
    found = costs.of_table(printed)
    assert (found and (found.kwh * KWH, found.seconds, found.nodes)) == (expected and pytest.approx(expected))


def test_slurms_figure_is_the_runs_and_is_requested_once(sacct):
    arguments = sacct("7|10:00|100|2|7200000\n")
    found = costs.energy(launches_of({"pm_counters": 7e6}, {"rapl": 2e6}), 4, 300)
    assert [row.source for row in found.rows] == [costs.SLURM, "Cray pm_counters", "RAPL"]
    assert found.rows[0].kwh == pytest.approx(2.0)
    assert (found.mean_watts, found.kwh_per_epoch, found.co2_grams) == pytest.approx((72_000, 0.5, 600))
    assert arguments.read_text().split()[-2:] == ["-j", "7"]
    assert {"-X", "-D"} <= set(arguments.read_text().split())


def test_a_job_that_did_something_else_too_says_so(sacct):
    sacct("7|10:00|1000|2|7200000\n")
    assert "whole job" in costs.energy(launches_of({}), 1, None).note


@pytest.mark.parametrize(
    ("printed", "after", "why"),
    [
        ("7|10:00|100|2|0\n", "", "SLURM has no energy of job 7"),
        ("", "exit 1", "sacct has failed"),
        ("", "exec /bin/sleep 60", "did not answer within 0.2 s"),
    ],
    ids=["no figure", "fails", "hangs"],
)
def test_sacct_without_an_answer(sacct, monkeypatch, printed, after, why):
    if "sleep" in after:  # else a busy machine could take as long
        monkeypatch.setitem(slurm.LIMITS, "sacct", 0.2)
    sacct(printed, after)
    found = costs.energy(launches_of({}), 4, 300)
    assert found.rows == ()
    assert (found.mean_watts, found.kwh_per_epoch, found.co2_grams) == (None, None, None)
    assert why in found.note


@pytest.mark.parametrize("job", ["7;rm -rf /", "-M cluster", "<b>", "7,8", "", None])
def test_only_numbers_of_jobs_are_given_to_sacct(sacct, job):
    arguments = sacct("7|10:00|100|2|7200000\n")
    assert costs.of_jobs(launches_of({}, job=job)) == (None, "the run was in no job of SLURM")
    assert not arguments.exists()


COUNTERS = {
    "whole nodes before their parts": ({"rapl": 1.0, "pm_counters": 3.0, "nvml": 1.0}, "Cray pm_counters", 3.0),
    "GPUs and processors together": ({"rapl": 1.0, "nvml": 2.5}, "NVML + RAPL", 3.5),
    "AMD's GPUs and processors": ({"rapl": 1.0, "amdsmi": 2.0}, "amdsmi + RAPL", 3.0),
    "GPUs alone": ({"nvml": 2.0}, "NVML", 2.0),
    "processors alone": ({"rapl": 1.0}, "RAPL", 1.0),
}


@pytest.mark.parametrize(("counted", "source", "kwh"), COUNTERS.values(), ids=COUNTERS)
def test_the_runs_figure(no_sacct, counted, source, kwh):
    launches = launches_of({name: each * KWH for name, each in counted.items()})
    found = costs.energy(launches, 2, None)
    assert (found.rows[0].source, found.rows[0].nodes) == (source, 2)
    assert found.rows[0].kwh == pytest.approx(kwh, rel=1e-3)
    assert found.mean_watts == pytest.approx(kwh * KWH / 100, rel=1e-3)
    assert found.kwh_per_epoch == pytest.approx(kwh / 2, rel=1e-3)
    assert found.co2_grams is None


def test_launches_add_up_and_records_do_not(no_sacct):
    found = costs.energy(launches_of({"rapl": 1.0 * KWH}, {"rapl": 0.5 * KWH}), 1, None)
    assert found.rows[0].kwh == pytest.approx(1.5)
    assert found.mean_watts == pytest.approx(1.5 * KWH / 200)


def test_a_launch_without_figures_is_named(no_sacct):
    found = costs.energy(launches_of({"rapl": KWH}, {}), 1, None)
    assert "1 of 2 launches" in found.note


@pytest.mark.parametrize(
    "joules", [None, [], {"rapl": "x"}, {"rapl": -1}, {"rapl": 0}, {"rapl": None}, {"rapl": 1e300}]
)
def test_damaged_counters_are_not_measured(no_sacct, joules):
    launches = [Launch({})]
    launches[0].add({"kind": "energy", "clock": 5, "joules": joules, "nodes": "x"})
    assert costs.energy(launches, 1, 300).rows == ()


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
