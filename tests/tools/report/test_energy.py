"""Energy: SLURM's accounting by a real sacct on the PATH, and the run's own counters; each counted once."""

import pytest
import report_folders

from hvdtrain.launch import slurm
from hvdtrain.record.history import Launch, add_launches
from hvdtrain.tools.report import costs as energy

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
    found = energy.of_table(printed)
    assert (found and (found.kwh * KWH, found.seconds, found.nodes)) == (expected and pytest.approx(expected))


def test_slurms_figure_is_the_runs_and_is_requested_once(sacct):
    arguments = sacct("7|10:00|100|2|7200000\n")
    found = energy.energy(launches_of({"pm_counters": 7e6}, {"rapl": 2e6}), 4, 300)
    assert [row.source for row in found.rows] == [energy.SLURM, "Cray pm_counters", "RAPL"]
    assert found.rows[0].kwh == pytest.approx(2.0)
    assert (found.mean_watts, found.kwh_per_epoch, found.co2_grams) == pytest.approx((72_000, 0.5, 600))
    assert arguments.read_text().split()[-2:] == ["-j", "7"]
    assert {"-X", "-D"} <= set(arguments.read_text().split())


def test_a_job_that_did_something_else_too_says_so(sacct):
    sacct("7|10:00|1000|2|7200000\n")
    assert "whole job" in energy.energy(launches_of({}), 1, None).note


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
    found = energy.energy(launches_of({}), 4, 300)
    assert found.rows == ()
    assert (found.mean_watts, found.kwh_per_epoch, found.co2_grams) == (None, None, None)
    assert why in found.note


@pytest.mark.parametrize("job", ["7;rm -rf /", "-M cluster", "<b>", "7,8", "", None])
def test_only_numbers_of_jobs_are_given_to_sacct(sacct, job):
    arguments = sacct("7|10:00|100|2|7200000\n")
    assert energy.of_jobs(launches_of({}, job=job)) == (None, "the run was in no job of SLURM")
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
    found = energy.energy(launches, 2, None)
    assert (found.rows[0].source, found.rows[0].nodes) == (source, 2)
    assert found.rows[0].kwh == pytest.approx(kwh, rel=1e-3)
    assert found.mean_watts == pytest.approx(kwh * KWH / 100, rel=1e-3)
    assert found.kwh_per_epoch == pytest.approx(kwh / 2, rel=1e-3)
    assert found.co2_grams is None


def test_launches_add_up_and_records_do_not(no_sacct):
    found = energy.energy(launches_of({"rapl": 1.0 * KWH}, {"rapl": 0.5 * KWH}), 1, None)
    assert found.rows[0].kwh == pytest.approx(1.5)
    assert found.mean_watts == pytest.approx(1.5 * KWH / 200)


def test_a_launch_without_figures_is_named(no_sacct):
    found = energy.energy(launches_of({"rapl": KWH}, {}), 1, None)
    assert "1 of 2 launches" in found.note


@pytest.mark.parametrize(
    "joules", [None, [], {"rapl": "x"}, {"rapl": -1}, {"rapl": 0}, {"rapl": None}, {"rapl": 1e300}]
)
def test_damaged_counters_are_not_measured(no_sacct, joules):
    launches = [Launch({})]
    launches[0].add({"kind": "energy", "clock": 5, "joules": joules, "nodes": "x"})
    assert energy.energy(launches, 1, 300).rows == ()
