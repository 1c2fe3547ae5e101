"""`python -m hvdtrain bench`: what it refuses, how its answers look, what it shows, and that it measures."""

import functools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import needs_horovod, needs_tensorflow, needs_torch

from hvdtrain.errors import EngineUnavailable, OutputError, RecipeError
from hvdtrain.launch.topology import Topology
from hvdtrain.terminal import hidden
from hvdtrain.tools import bench
from hvdtrain.tools.bench import allreduce, engines, measure, ranks, train
from hvdtrain.tools.bench.engines import Contender, Measured
from hvdtrain.tools.bench.measure import Kept

LONG = [1234.5678, 1201.1234, 1340.9876]  # seconds, as many digits as there may be


REFUSALS = {
    "no ranks": ("allreduce --ranks 0", "--ranks must be at least 2, got '0'; --help lists the flags."),
    "no rounds": ("engines --rounds 0", "--rounds must be at least 1, got '0'; --help lists the flags."),
    "a benchmark that is not there": (
        "engins",
        f"there is no benchmark 'engins'. Did you mean engines? Take one of {', '.join(bench.WHATS)}.",
    ),
    **{
        f"sizes {sizes!r}": (
            f"allreduce --sizes={sizes}",
            f"--sizes must be growing numbers of megabytes above 0 and at most 4096, as in 1,10,100; got {sizes!r}.",
        )
        for sizes in ("", "0,1", "1,x", "10,1", "1,1", "5000")
    },
}


@pytest.mark.parametrize(("argv", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(argv, message):
    with pytest.raises(RecipeError) as refused:
        bench.main(argv.split())
    assert str(refused.value) == message


def test_rounds_are_interleaved_and_backwards_and_shown():
    order, seen = [], []
    found = measure.interleaved(
        {name: lambda name=name: order.append(name) or len(order) for name in "ab"}, 2, show=seen.append
    )
    assert "".join(order) == "abbaab"
    assert found == {"a": [4, 5], "b": [3, 6]}
    assert seen[0] == "warm-up: a" and all(re.search(r"; \d+ s left$", text) for text in seen[1:])
    assert [re.sub(r"; \d+ s left$", "", text) for text in seen] == [
        "warm-up: a", "warm-up: b", "round 1 of 2: b", "round 1 of 2: a",
        "round 2 of 2: a; so far 4.0 s", "round 2 of 2: b; so far 3.0 s",
    ]  # fmt: skip


def interrupted(after, interrupt):
    """A benchmark that is interrupted after so many measurements of three contenders."""
    made = []

    def measure_once(name):
        if len(made) == after:
            interrupt()
        made.append(name)
        return float(len(made))

    def measuring(show, known):
        contenders = {name: functools.partial(measure_once, name) for name in "abc"}
        measure.interleaved(contenders, 3, 0, known=known)

    def answer(found):
        return measure.Answer("it", [str(found)], "a sentence.", {"found": found}, measure.over_rounds(found, "ms"))

    return functools.partial(measure.run, "it", measuring, answer)


SO_FAR = {0: None, 2: {"a": [1], "b": [2]}, 3: {"a": [1], "b": [2], "c": [3]}, 5: {"a": [1], "b": [2], "c": [3]}}


def terminated_twice():
    """As `timeout` does: it sends the signal to the process and to its group."""
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("interrupt", [lambda: signal.raise_signal(signal.SIGINT), terminated_twice])
@pytest.mark.parametrize(("after", "figures"), SO_FAR.items())
def test_what_interrupts_leaves_what_was_measured_so_far(after, figures, interrupt, capsys):
    run = interrupted(after, interrupt)
    if figures is None:
        with pytest.raises(KeyboardInterrupt):
            run(Kept())
        return
    assert run(Kept(json="-")) == 130
    shown = capsys.readouterr()
    assert json.loads(shown.out)["found"] == figures and json.loads(shown.out)["interrupted"]
    assert shown.err == "interrupted; this is what was measured so far:\n"


LAUNCHER = """
import json, os, signal, subprocess, sys, time
from hvdtrain.tools.bench import ranks

rank = subprocess.Popen(["sleep", "600"])
open("rank", "w").write(str(rank.pid))
ranks.keep({"figure": 3})

def end(*_):
    rank.kill()
    rank.wait()
    sys.exit(1)

signal.signal(signal.SIGTERM, end)
os.kill(os.getppid(), signal.SIGINT)
while True:
    signal.pause()
"""


def test_after_ctrl_c_no_rank_is_left(tmp_path, monkeypatch):
    (tmp_path / "measures.py").write_text(LAUNCHER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(filter(None, sys.path))}")
    monkeypatch.chdir(tmp_path)
    found = []
    with pytest.raises(KeyboardInterrupt):
        ranks.launch(["measures.py"], "local", 1, show=found.append, known=found.append)
    assert found[-1] == {"figure": 3}
    assert not Path("/proc", Path("rank").read_text()).exists()


TIMES = {
    "no data, one rank": ({"full": 2.0, "synthetic": 2.0, "io-only": 0.1}, "computing", 1.0),
    "slow files": ({"full": 5.2, "synthetic": 2.0, "io-only": 5.0}, "reading", 1.04),
    "slow network, no overlap": (
        {"full": 5.0, "synthetic": 5.0, "io-only": 0.1, "no-communication": 1.0, "communication": 4.0},
        "communication",
        1.25,
    ),
    "overlapped": (
        {"full": 4.2, "synthetic": 4.2, "io-only": 0.1, "no-communication": 4.0, "communication": 3.0},
        "computing",
        1.05,
    ),
    "slow files, several ranks": (
        {"full": 5.0, "synthetic": 2.0, "io-only": 4.0, "no-communication": 5.0, "communication": 1.0},
        "reading",
        1.25,
    ),
}


@pytest.mark.parametrize(("seconds", "slowest", "ratio"), TIMES.values(), ids=TIMES.keys())
def test_what_limits_a_step(seconds, slowest, ratio):
    sentence, found = train.limit({name: [value] for name, value in seconds.items()})
    assert sentence.startswith(f"{slowest} limits: a step takes ")
    assert found == pytest.approx(ratio)


def test_efficiency_is_the_speed_of_one_rank_that_is_left():
    times = {"full": [5.0, 4.0], "no-communication": [2.5, 2.0], "one-rank": [2.0, 2.0]}
    assert train.efficiency(times) == {"full": [0.4, 0.5], "no-communication": [0.8, 1.0]}


@pytest.fixture
def answer():
    figure = measure.Figure({"MPI": {0.1: [3.0, 1.0], 10: [200.0]}, "Gloo": {0.1: [2.0], 10: [4.0]}}, "MB", "MB/s", 10)
    return measure.Answer("it", ["a table", "<b>"], "a sentence.", {"figure": 3}, figure)


def test_what_an_answer_prints_and_leaves(answer, tmp_path, capsys):
    answer.conclude(Kept())
    assert capsys.readouterr().out == "a table\n<b>\n\nA sentence.\n"
    answer.conclude(Kept(json="-"))
    assert json.loads(capsys.readouterr().out)["figure"] == 3
    answer.conclude(Kept(json=tmp_path / "x.json", output=tmp_path / "folder"))
    assert capsys.readouterr().out == "a table\n<b>\n\nA sentence.\n"
    ours, theirs = (json.loads(path.read_text()) for path in (tmp_path / "x.json", tmp_path / "folder" / "it.json"))
    assert ours == theirs and (ours["bench"], ours["figure"]) == ("it", 3)
    page = (tmp_path / "folder" / "it.html").read_text()
    assert "<pre>a table\n&lt;b&gt;</pre>" in page and "A sentence." in page
    words = re.search(r"<desc[^>]*>(.*?)</desc>", page, re.DOTALL)[1]
    assert words.splitlines()[0] == "MPI: from 2 to 200 at MB 10; lowest 2 at 0.1, highest 200 at 10."
    assert [float(y) for y in re.findall(r'text-anchor="middle">([\d.]+)<', page)] == [0.1, 0.2, 0.5, 1, 2, 5, 10]


def test_a_file_that_cannot_be_written(answer, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="give --json a file that can be written"):
        answer.conclude(Kept(json=tmp_path / "file" / "x.json"))


def test_columns_are_aligned_and_have_about_four_digits():
    values = {"a": [0.1234], "long": [12.3, 12.0, 13.4], "c": [123.45], "d": [12345.6]}
    assert measure.table(
        ("name", "ms", "why"), [(name, measure.summary(them), "x") for name, them in values.items()]
    ) == [
        "name                      ms  why",
        "a     0.123 (0.123 to 0.123)  x",
        "long  12.30 (12.00 to 13.40)  x",
        "c     123.5 (123.5 to 123.5)  x",
        "d     12346 (12346 to 12346)  x",
    ]


def test_the_fastest_library_at_the_largest_and_the_smallest_size():
    found = {"MPI": {4000: [1.0], 10**7: [3.6]}, "Gloo": {4000: [1.01], 10**7: [2.0]}}
    assert allreduce.fastest(found) == (
        "at 10 MB Gloo is fastest, 1.8 times as fast as MPI; at 0.004 MB MPI is fastest, as fast as Gloo."
    )
    assert allreduce.fastest({"NCCL": {10**6: [1.0]}}) == "at 1 MB NCCL is fastest."


def test_the_fastest_engine():
    found = {
        Contender("torch", "local", 2): Measured([1.0], 100),
        Contender("torch", "ddp", 2): Measured([0.5], 100),
        Contender("torch", "horovod", 2): Measured([0.8], 100),
        Contender("torch", "dataparallel", 2): Measured([], reason="needs GPUs"),
    }
    assert engines.fastest(found) == (
        "torch ddp is fastest with 200.0 examples/s, 1.6 times as fast as torch horovod, 2.0 times as fast as "
        "torch local."
    )


RANK = """
import os, time
from hvdtrain.launch.topology import Topology
from hvdtrain.tools.bench import ranks

with ranks.showing(Topology.alone()) as show:
    show("round 1 of 1: it")
    while not os.path.exists("seen"):
        time.sleep(0.01)
ranks.keep({"figure": 3})
"""


def test_what_rank_0_does_is_shown_where_the_ranks_were_started(tmp_path, monkeypatch):
    (tmp_path / "measures.py").write_text(RANK)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(filter(None, sys.path))}")
    monkeypatch.chdir(tmp_path)
    seen = []

    def show(text):
        seen.append(text)
        if text == "round 1 of 1: it":
            Path("seen").touch()

    assert ranks.launch(["measures.py"], "local", 1, show=show) == {"figure": 3}
    assert (seen[0], seen[-1]) == ("starting the process that measures", "round 1 of 1: it")


def test_other_ranks_show_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv(ranks.FOLDER, str(tmp_path))
    for rank in (1, 0):
        with ranks.showing(Topology(rank, 2, rank, 2, 0, "here", "horovodrun", None)) as show:
            show(f"of rank {rank}")
        assert (tmp_path / "now").exists() == (rank == 0)
    assert (tmp_path / "now").read_text() == "of rank 0"


def test_the_table_of_engines_fits_80_columns():
    found = {
        Contender("tensorflow", "parameter-server", 16): Measured([second / 1000 for second in LONG], 65536),
        Contender("lightning", "dataparallel", 2): Measured([], reason="DeviceError: it needs at least 2 devices " * 3),
    }
    lines = engines.table(found)
    assert max(map(len, lines)) <= 80
    assert lines[0].split()[:2] == ["engine", "launch"]
    assert lines[-1].startswith("parameter-server  workers of unequal speed")


def test_an_engine_that_failed_once_is_left_out_of_the_next_round(monkeypatch):
    first, other = Contender("torch", "local", 2), Contender("torch", "dataparallel", 2)
    monkeypatch.setattr(
        engines,
        "run",
        lambda one, recipe, steps: Measured([1.0], 1, others=[0.0]) if one == first else Measured([], reason="no GPU"),
    )
    seen = []
    engines.measure_all([first, other], engines.Options(rounds=2), seen.append, hidden)
    seen = [re.sub(r"; [^;]* left$", "", text) for text in seen]
    assert seen == [
        "round 1 of 2: torch local (1 of 2)",
        "round 1 of 2: torch dataparallel (2 of 2)",
        "round 2 of 2: torch local (1 of 2); so far 1.0 s",
    ]


def test_a_round_on_a_busy_machine_is_repeated_and_marked_where_it_stays_busy(monkeypatch):
    first, other = Contender("torch", "local", 2), Contender("torch", "ddp", 2)
    rounds = {first: [(1.0, 0.0), (2.0, 0.6), (1.1, 0.05)], other: [(1.0, 0.0), (3.0, 0.5), (4.0, 0.7), (2.5, 0.3)]}

    def run(one, recipe, steps):
        seconds, others = rounds[one].pop(0)
        return Measured([seconds], 64, others=[others])

    monkeypatch.setattr(engines, "run", run)
    seen, known = [], []
    engines.measure_all([first, other], engines.Options(rounds=2), seen.append, known.append)
    found = known[-1]
    assert (found[first].seconds, found[other].seconds) == ([1.0, 1.1], [1.0, 2.5])
    assert [text.partition(":")[0] for text in seen[4:]] == ["again, as others used the machine"] * 3
    assert " ".join(engines.busy(found)) == (
        "torch ddp: in 1 of 2 rounds other programs took up to 30% of this machine; compare it on a quiet one"
    )
    assert max(map(len, engines.table(found))) <= 80


def measured(*arguments, cwd=None):
    """The results that a benchmark prints, and nothing else."""
    what, *others = arguments
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain", "bench", what, "--json", "-", *others],
        cwd=cwd,
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.launched
@needs_horovod
@pytest.mark.parametrize(
    ("framework", "engine"),
    [
        pytest.param("torch", "horovod", marks=[needs_torch, pytest.mark.slow]),
        pytest.param("torch", "ddp", marks=[needs_torch, pytest.mark.slow]),
        pytest.param("tensorflow", "horovod", marks=[needs_tensorflow, pytest.mark.slow]),
        pytest.param("tensorflow", "multiworker", marks=[needs_tensorflow, pytest.mark.slow]),
    ],
)
def test_train_measures_the_parts_of_a_step(framework, engine):
    results = measured(
        "train", "--framework", framework, "--rounds", "2", "--steps", "3", "--", "linear", "--engine", engine
    )
    assert set(results["step_seconds"]) == set(train.MEANS)
    assert all(len(values) == 2 and min(values) > 0 for values in results["step_seconds"].values())
    assert {name: len(ratios) for name, ratios in results["efficiency"].items()} == {"full": 2, "no-communication": 2}
    # Slope and intercept; the recipe sends them as float64.
    assert (results["gradient_bytes"], results["engine"], results["ranks"]) == (16, engine, 2)


@pytest.mark.launched
@pytest.mark.slow
@needs_torch
@needs_horovod
def test_allreduce_measures_each_library_and_size():
    results = measured("allreduce", "--rounds", "1", "--sizes", "0.004,1")
    found = {(row["library"], row["bytes"]): row for row in results["found"]}
    for library in ("Horovod over MPI", "Horovod over Gloo", "torch.distributed (gloo)"):
        for size in (4000, 1_000_000):
            row = found[library, size]
            assert row["algorithm_bytes_per_second"] == pytest.approx(size / statistics.median(row["seconds"]))
            assert row["bus_bytes_per_second"] == row["algorithm_bytes_per_second"]  # 2 (N - 1) / N is 1 for two


def test_bus_bandwidth_is_nccl_tests():
    assert allreduce.bus_bandwidth(100, 2.0, 4) == 75


@pytest.mark.launched
@pytest.mark.slow
@needs_torch
@needs_horovod
def test_engines_are_measured_side_by_side(tmp_path):
    command = [sys.executable, "-m", "hvdtrain", "bench", "engines", "--framework", "torch", "--recipe", "linear"]
    command += ["--rounds", "1", "--steps", "3", "--json", tmp_path / "engines.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280)
    rows = json.loads((tmp_path / "engines.json").read_text())["engines"]
    found = {f"{row['adapter']} {row['engine']}": row for row in rows}
    trained = {name for name, row in found.items() if row["step_seconds"]}
    assert trained >= {"torch horovod", "torch local", "torch ddp"}
    assert found["torch modelparallel"]["reason"].startswith("DeviceError: Linear has 1 layer to split")
    assert found["torch dataparallel"]["reason"].startswith("DeviceError: engine dataparallel needs at least 2 devices")
    table = done.stdout.splitlines()[: 1 + len(found)]
    assert [line.split()[0] for line in table[1:]] == [row["engine"] for row in rows]
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.launched
@needs_torch
def test_a_network_of_the_other_framework_is_refused(tmp_path):
    command = [sys.executable, "-m", "hvdtrain", "bench", "train", "--ranks", "1", "--"]
    command += ["synthetic:tiny", "--model", "keras.applications:ResNet50"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240)
    assert (done.returncode, done.stdout) == (EngineUnavailable.exit_code, "")
    assert done.stderr == (
        "EngineUnavailable: RecipeError: model keras.applications:ResNet50 is TensorFlow's, this run is PyTorch's; "
        "take one of torchvision, as torchvision:resnet101.\n"
    )
