"""Curves, heat map, events, origin, comparison and scaling: the values that a page shows."""

import functools
import json
import re

import numpy as np
import pytest
import report_folders

from hvdtrain.core.sharing import MOST_RANKS
from hvdtrain.errors import RecipeError
from hvdtrain.launch.topology import Topology
from hvdtrain.ranks.liveness import Liveness
from hvdtrain.ranks.peers import Peers
from hvdtrain.ranks.slow import FIGURES, STEPS, RankGauge, SlowWatch
from hvdtrain.record.history import MOST_COLUMNS, MOST_KEPT, POINTS, Column, Launch, Metrics, add_launches
from hvdtrain.record.journal import Journal, launch_record
from hvdtrain.record.reader import read
from hvdtrain.run.process import RunListener
from hvdtrain.tools.report import comparison, scaling
from hvdtrain.tools.report.assemble import _series, run_report
from hvdtrain.tools.report.costs import COLUMNS, axis_of, heat_map, step_parts

ALONE = Topology.alone("nid1")


def test_few_points_stay_as_they_are():
    column = Column()
    column.add(np.array([1.0, 2.0, np.nan, 4.0]), np.array([5.0, np.inf, 6.0, 7.0]))
    series = _series(column, "x")
    assert (series.x.tolist(), series.low, series.high) == ([1, 2, 4], None, None)
    assert np.array_equal(series.y, [5, np.nan, 7], equal_nan=True)
    assert series.note == "1 of 3 values are NaN, the first at step 2"


@pytest.mark.parametrize("pieces", [1, 7, 100])
def test_many_points_become_a_band_that_hides_none(pieces):
    steps = np.arange(1.0, 300_001)
    values = np.sin(steps / 2e4)
    values[123_456] = 50.0  # one spike
    column = Column()
    for some in np.array_split(np.arange(len(steps)), pieces):
        column.add(steps[some], values[some])
    assert sum(map(len, column._rows)) <= MOST_KEPT + len(steps) / pieces
    series = _series(column, "x")
    assert POINTS * 0.9 <= len(series.x) <= POINTS
    assert (np.diff(series.x) > 0).all()
    assert (series.low <= series.y).all()
    assert (series.y <= series.high).all()
    assert (series.high.max(), series.low.min()) == (50.0, values.min())
    calm = series.high < 50
    assert np.abs(series.y - np.sin(series.x / 2e4))[calm].max() < 0.05
    assert column.last is not None


def test_columns_of_damaged_records():
    metrics = Metrics()
    good = [{"kind": "step", "step": 10, "loss": 1.0}, {"kind": "step", "step": 20, "loss": 0.5}]
    bad = [{"kind": "step", "step": step, "loss": 9.0} for step in (None, "3", -1, 1.5, 1e400, 10**400, [1], {})]
    bad += [{"kind": "step", "step": 30, "loss": loss} for loss in (None, "3", 1e16, float("nan"), 10**400, [1])]
    metrics.add([*bad, *good])
    rows = metrics.steps["loss"].thinned()
    assert rows[:2, :2].tolist() == [[10, 1.0], [20, 0.5]]
    assert (rows[2:, 0] == 30).all() and np.isnan(rows[2:, 1]).all() and len(rows) == 5  # NaN, null and infinity
    assert metrics.final("loss") == 0.5


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "resumed"
    report_folders.resumed(folder)
    return run_report(folder)


def test_curves(run):
    assert [(curve.name, [series.label for series in curve.series]) for curve in run.curves] == [
        ("Accuracy", ["training", "validation"]),
        ("Loss", ["training, log lines", "training, epochs", "validation"]),
        ("Learning rate", ["Learning rate"]),
        ("Throughput", ["Throughput"]),
        ("Gradient norm", ["Gradient norm"]),
    ]
    assert run.curves[1].series[2].x.tolist() == list(range(22, 221, 22))
    note = "Peak 0.05 = 0.05 x 64/64 (rule linear); warm-up over 1 of 10 epochs, then cosine to 0 at epoch 10."
    assert run.curves[2].note == note


def test_events_are_on_the_axis_of_the_waterfall(run):
    shown = [(event.kind, event.step) for event in run.events if event.kind != "checkpoint"]
    assert shown[:4] == [("launch", None), ("lost", 60), ("requeue", 60), ("launch", 44)]  # one event for one kill
    assert [event.at for event in run.events] == sorted(event.at for event in run.events)
    assert run.events[0].at == pytest.approx(95)
    assert run.events[-1].at == pytest.approx(run.waterfall.wall_seconds, abs=1e-5)


def test_origin(run):
    origin = run.origin
    assert (origin.launcher, origin.engine, origin.framework, origin.ranks) == ("srun", "horovod", "torch", 2)
    assert (origin.hosts, origin.job_id) == (("node1", "node2"), "4711")
    assert origin.command == "srun --nodes=2 --ntasks=2 python -m hvdtrain.torch digits"
    assert origin.plan[1] == "batch       64 = 2 ranks x 32"
    assert origin.differences == ()


def test_the_difference_to_the_shipped_recipe(tmp_path):
    report_folders.failed(tmp_path)
    assert run_report(tmp_path).origin.differences == (("base_lr", "0.05", "5"),)


def test_texts_of_others_have_no_control_characters(tmp_path):
    report_folders.hostile(tmp_path)
    report = run_report(tmp_path)
    texts = json.dumps(
        [report.verdict.headline, report.verdict.details, *map(str, report.events), report.origin.command],
        ensure_ascii=False,
    )
    assert "<script>" in texts
    assert texts.isprintable()
    assert all(line.isprintable() for line in report.origin.recipe.splitlines())


def launch_of(records, ranks) -> list[Launch]:
    launches: list[Launch] = []
    hosts = [f"node{rank}" for rank in range(ranks)]
    add_launches(launches, [{"kind": "launch", "time": 1.764e9, "ranks": ranks, "hosts": hosts}, *records])
    return launches


def times_of(clock, computing, **more):
    return {"kind": "ranks", "clock": clock, "computing": computing, **more}


def test_one_row_says_everything_of_a_figure_of_each_rank(tmp_path, monkeypatch):
    monkeypatch.setitem(
        FIGURES, "threads", RankGauge("most threads", lambda: 7.0, lambda value: f"{value:.0f} threads")
    )
    journal = Journal(0.0)
    journal.open(tmp_path, functools.partial(launch_record, ALONE, "torch", "local", 0, None, None))
    watch = SlowWatch(Liveness(Peers(ALONE), RunListener(ALONE, journal)))
    watch.step_begins()
    for _ in range(STEPS):
        watch.step_ended(0.0, None)
    journal.close()
    numbers = dict(run_report(tmp_path).numbers)
    assert numbers["Most threads"] == "7 threads, rank 0"
    assert re.fullmatch(r"[\d.]+ GiB, rank 0", numbers["Peak memory"])


def test_a_long_runs_heat_map_is_thinned():
    records = [times_of(clock, [0.1, 0.1 + clock / 1e5]) for clock in range(10_000)]
    launches = launch_of(records, 2)
    assert len(launches[0].times) <= MOST_COLUMNS
    heat = heat_map(launches, axis_of(launches))
    assert heat.seconds.shape[0] == 2
    assert COLUMNS // 2 <= heat.seconds.shape[1] <= COLUMNS
    assert np.allclose(heat.seconds[0], 0.1)
    assert np.abs(heat.seconds[1] - 0.1 - heat.at / 1e5).max() < 0.001


def test_of_many_ranks_the_named_ones_are_kept():
    records = [times_of(n, [0.1] * MOST_RANKS, of=list(range(n * 100, n * 100 + MOST_RANKS))) for n in range(4)]
    slow = {
        "kind": "event",
        "event": "slow",
        "clock": 3,
        "rank": 540,
        "text": "rank 540 on node540 is slow in reading: x",
    }
    launches = launch_of([*records, slow], 1000)
    heat = heat_map(launches, axis_of(launches))
    assert len(heat.rows) == MOST_RANKS
    (row,) = heat.slow
    assert heat.rows[row] == "rank 540 on node540"
    assert np.isnan(heat.seconds[row]).sum() == 3


def test_reading_counts_as_own_time_and_waiting_does_not():
    records = [times_of(1, [0.1, 0.2], reading=[0.05, None], waiting=[0.3, 0.2])]
    launches = launch_of(records, 2)
    assert heat_map(launches, axis_of(launches)).seconds[:, 0].tolist() == pytest.approx([0.15, 0.2])
    assert step_parts(launches) == pytest.approx({"reading": 0.05, "computing": 0.15, "waiting for other ranks": 0.25})


@pytest.mark.parametrize(
    "record",
    [
        times_of(1, [0.1, 0.2], of=[0]),
        times_of(1, [0.1, 0.2], of=["a", "b"]),
        times_of(1, [0.1], waiting=[0.1, 0.2, 0.3], of="x"),
        times_of(1, "x"),
        times_of(1, None),
    ],
)
def test_damaged_times_are_left_out(record):
    launches = launch_of([record], 2)
    assert heat_map(launches, axis_of(launches)) is None


def test_comparison_of_seeds(tmp_path):
    report_folders.seeds(tmp_path)
    found = comparison([run_report(path) for path in sorted(tmp_path.iterdir())])
    assert found.columns == ("seed-0", "seed-1", "seed-2")
    assert [row for row in found.rows if row[0] != "result"] == [("recipe", "seed", ("0", "1", "2"))]
    assert "machine" not in [row[1] for row in found.rows]
    assert ("result", "validation accuracy", ("0.9722", "0.9778", "0.975")) in found.rows
    assert found.seeds[:3] == (
        "Validation accuracy over 3 runs with seeds 0, 1, 2: 0.9750 ± 0.0028 (standard deviation), 0.9722 to 0.9778.",
        "Validation loss over these runs: 0.1062 ± 0 (standard deviation), 0.1062 to 0.1062.",
        "Training loss over these runs: 0.02617 ± 0 (standard deviation), 0.02617 to 0.02617.",
    )
    assert [len(curve.series) for curve in found.curves] == [3, 3, 3, 3]


def test_comparison_of_frameworks_and_of_odd_runs(tmp_path):
    names = ("finished", "tensorflow", "own_program", "failed")
    for name in names:
        report_folders.ALL[name](tmp_path / name)
    (tmp_path / "empty").mkdir()
    report_folders.finished(tmp_path / "busy", processor=0.2)
    found = comparison([run_report(tmp_path / name) for name in (*names, "empty", "busy")])
    rows = {row[1]: row[2] for row in found.rows}
    assert rows["framework"] == ("torch", "tensorflow", "torch", "torch", "-", "torch")
    assert rows["state"] == ("finished", "finished", "finished", "failed", "unknown", "finished")
    assert rows["machine"] == ("-", "-", "-", "-", "-", "did other work: times say little")
    assert rows["base_lr"] == ("0.05", "0.05", "-", "5", "-", "0.05")
    assert found.seeds == ()


def test_runs_of_one_name_are_numbered(tmp_path):
    for name in ("a", "b"):
        report_folders.finished(tmp_path / name / "run")
    runs = [run_report(tmp_path / name / "run") for name in ("a", "b")]
    assert comparison(runs).columns == ("1: run", "2: run")


def test_scaling_of_a_benchmark(tmp_path):
    report_folders.bench_scaling(tmp_path)
    (weak, strong), missing = scaling.scalings(tmp_path)
    assert missing == ()
    assert [row.ranks for row in weak.rows] == [1, 2, 4]
    four = weak.rows[2]
    assert four.efficiency == pytest.approx((1.01 / 1.15, 1.0 / 1.18, 1.02 / 1.12), rel=1e-3)
    assert four.speedup == pytest.approx(4 * four.efficiency[0])
    assert four.examples_per_second == pytest.approx(64 / 1.15)
    assert strong.rows[2].efficiency[0] == pytest.approx(1.01 / (4 * 0.35), rel=0.01)
    assert [ranks for ranks, *_ in weak.predicted] == [1, 2, 4, 8, 16]
    assert all(low <= middle <= high for _, middle, low, high in weak.predicted)
    assert strong.predicted == strong.published == ()
    assert dict(weak.published)["JSC: ResNet50, ImageNet on A100"][2] == (16, pytest.approx(0.862, abs=1e-3))
    assert weak.sentence.startswith("4 ranks are 3.51 times as fast as 1")
    assert weak.sentence.endswith(" Resnet50: batch 16 a rank, on laptop.")


def test_ranks_that_share_cores_are_not_shown_beside_a_cluster(tmp_path):
    report_folders.bench_scaling(tmp_path)
    results = json.loads((tmp_path / "scaling.json").read_text())
    (tmp_path / "scaling.json").write_text(json.dumps(results | {"cores": 2, "ranks_per_node": 4}))
    (weak, _), _ = scaling.scalings(tmp_path)
    assert weak.published == ()
    assert weak.sentence.endswith("on laptop. 4 ranks shared 2 cores: that is no measure of a cluster.")


def test_scaling_of_runs(tmp_path):
    runs = report_folders.sweep(tmp_path)
    ((weak,), missing) = scaling.scalings(tmp_path)
    assert (weak.mode, missing) == ("weak", ())
    assert [row.ranks for row in weak.rows] == [run.ranks for run in runs]
    assert [ranks for ranks, *_ in weak.communication] == [1, 2, 4]
    for (_, computing, waiting), run in zip(weak.communication, runs, strict=True):
        assert computing == pytest.approx(run.seconds + report_folders.READING, rel=0.1)
        assert waiting == pytest.approx(report_folders.WAITING, abs=0.03)


def test_strong_scaling_of_runs(tmp_path):
    for ranks, seconds in {1: 1.0, 2: 0.6}.items():
        for round_number in range(ranks):  # as many rounds as ranks
            report_folders.finished(tmp_path / f"{ranks}-{round_number}", ranks=ranks, rank_seconds=seconds, seed=ranks)
    ((strong,), _) = scaling.scalings(tmp_path)
    assert strong.mode == "strong"
    assert [len(row.step_seconds) for row in strong.rows] == [1, 2]
    assert strong.rows[1].efficiency[0] == pytest.approx(1.07 / (2 * 0.67), rel=0.1)


NO_SWEEPS = {
    "nothing": {},
    "no JSON": {"scaling.json": "{"},
    "no figures": {"scaling.json": '{"batch": 16, "weak": {"1": []}}'},
    "one number of ranks": {"scaling.json": '{"batch": 16, "weak": {"1": [1.0]}}'},
    "texts": {"scaling.json": '{"batch": "x", "weak": {"1": ["a"], "b": 1}, "strong": []}'},
    "infinite": {"scaling.json": '{"batch": 16, "weak": {"1": [1e999], "2": [NaN]}}'},
    "a run": {"run/metrics.jsonl": '{"kind": "step", "step": 1, "examples_per_second": 5.0}\n'},
}


@pytest.mark.parametrize("files", NO_SWEEPS.values(), ids=NO_SWEEPS)
def test_no_sweep_is_one_line(files, tmp_path):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    with pytest.raises(RecipeError, match="has no two runs on different numbers of ranks"):
        scaling.scalings(tmp_path)


@pytest.mark.parametrize(
    "weak",
    [{"1": [1.0], "2": [1e-9]}, {"1": [1e12], "2": [1e-9]}, {"3": [1.0, 2.0], "7": [5.0]}, {"1": [1.0], "16384": [1]}],
)
def test_odd_figures_give_a_scaling(weak, tmp_path):
    (tmp_path / "scaling.json").write_text(json.dumps({"batch": 16, "weak": weak, "ranks_per_node": 10**9}))
    ((found,), _) = scaling.scalings(tmp_path)
    assert found.rows[0].speedup == pytest.approx(1)
    assert len(found.rows) == 2
    assert np.isfinite([value for row in found.predicted for value in row]).all()


def test_a_damaged_benchmark_beside_runs(tmp_path):
    report_folders.sweep(tmp_path)
    (tmp_path / "scaling.json").write_bytes(bytes(100))
    found, missing = scaling.scalings(tmp_path)
    assert len(found) == 1
    assert missing[0].startswith("scaling.json cannot be read")


def test_what_a_folder_is_read_as(tmp_path):
    report_folders.own_program(tmp_path)
    run = read(tmp_path)
    assert run.program["model"].startswith("UNet")
    assert run.gaps == []


def test_a_benchs_communication_is_what_the_ranks_waited(tmp_path):
    """Only of those numbers of ranks, and those rounds, in which it is known."""
    results = {"batch": 8, "weak": {"1": [1.0, 1.0], "2": [1.5, 1.3], "4": [9.0, 9.0]}}
    results["waiting"] = {"weak": {"1": [], "2": [0.4], "4": ["x"], "8": [1.0]}}
    (tmp_path / "scaling.json").write_text(json.dumps(results))
    (weak,), _ = scaling.scalings(tmp_path)
    assert weak.communication == ((2, pytest.approx(1.0), 0.4),)


def program_folder(folder, f1, *flags, typed="horovodrun"):
    """A run of a user's own loop, which named its highest f1, was killed once, and was to make 30 epochs."""
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"framework": "torch", "highest": "f1", "lowest": None}))
    epochs = [
        {"kind": "epoch", "step": 9 * k, "epoch": k, "train_loss": 1 / k, "f1": each} for k, each in enumerate(f1, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in epochs))
    (folder / "status.json").write_text(json.dumps({"state": "finished", "time": 2e9, "ended": "f1 is no better"}))
    launch = {"kind": "launch", "time": 2e9, "launcher": "mpirun", "typed": typed, "ranks": 2}
    launch |= {"command": ["python3", "f1.py", *flags]}
    lost, why = {"kind": "event", "event": "lost", "text": "rank 1 ended without a message"}, "all ranks end"
    records = [launch, {"kind": "world", "hosts": ["a", "a"]}, {"kind": "length", "epochs": 30}, lost | {"clock": 5}]
    records += [{"kind": "end", "state": "failed", "text": f"rank 1 ended without a message; {why}", "clock": 6}]
    records += [launch, {"kind": "length", "epochs": 30}, {"kind": "end", "state": "finished", "clock": 9}]
    (folder / "launches.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return run_report(folder)


def test_a_program_is_shown_by_the_metric_that_it_names(tmp_path):
    first = program_folder(tmp_path / "a", [0.3, 0.7, 0.6], "--lr", ".1", "--seed", "1")
    assert first.numbers[:4] == (
        ("Best f1", "0.7000, epoch 2"), ("F1", "0.6000"), ("Training loss", "0.3333"), ("Epochs", "3 of 30"),
    )  # fmt: skip
    assert [curve.name for curve in first.curves] == ["f1", "Loss"]
    assert first.verdict.headline == "Ended early after epoch 3 of 30: f1 is no better."
    assert [event.kind for event in first.events] == ["launch", "lost", "launch", "end"]
    assert first.origin.command == "horovodrun -np 2 python f1.py --lr .1 --seed 1"
    second = program_folder(tmp_path / "b", [0.8], "--lr=.2", "--seed", "1", typed="<b>\x1b")
    assert second.origin.command == "mpirun -np 2 python f1.py --lr=.2 --seed 1"
    both = comparison([first, second])
    assert [row for row in both.rows if row[1] in {"command", "best f1"}] == [
        ("launch", "command", ("--lr .1", "--lr=.2")), ("result", "best f1", ("0.7", "0.8")),
    ]  # fmt: skip
    assert both.curves[0].name == "f1, epochs"
