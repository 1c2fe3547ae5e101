"""`python -m hvdtrain bench`: what it refuses, and that it measures."""

import json
import statistics
import subprocess
import sys

import pytest
from ranks import needs_horovod, needs_tensorflow, needs_torch

from hvdtrain.errors import EngineUnavailable, RecipeError
from hvdtrain.tools import bench
from hvdtrain.tools.bench import allreduce, train
from hvdtrain.tools.bench.measure import interleaved

SLOW = ("network_of_the_other_framework",)


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


def test_rounds_are_interleaved_and_backwards():
    order = []
    found = interleaved(
        {name: lambda name=name: order.append(name) or len(order) for name in "ab"}, rounds=2, warm_up=1
    )
    assert "".join(order) == "abbaab"
    assert found == {"a": [4, 5], "b": [3, 6]}


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
    assert found["torch modelparallel"]["reason"].startswith("DeviceError: Linear has 1 layers to split")
    assert found["torch dataparallel"]["reason"].startswith("DeviceError: engine dataparallel needs at least 2 devices")
    table = done.stdout.splitlines()[: 1 + len(found)]
    assert [line.split()[0] for line in table[1:]] == [row["engine"] for row in rows]
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert done.stderr == ""


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
