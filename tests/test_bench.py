"""`python -m hvdtrain bench`: what it refuses, and that it measures."""

import json
import subprocess
import sys

import pytest
from ranks import needs_horovod, needs_tensorflow, needs_torch

from hvdtrain import bench
from hvdtrain.bench.measure import in_turn
from hvdtrain.errors import RecipeError


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        pytest.param(["--ranks", "0"], "--ranks must be at least 1, got 0.", id="no ranks"),
        pytest.param(["--rounds", "1"], "--rounds must be at least 2, as the first is warm-up, got 1.", id="one round"),
        pytest.param(
            ["--recipe", "linear"],
            "--recipe must have model resnet50, as the hand-written loop has, got linear.",
            id="another network",
        ),
    ],
)
def test_refusals(flags, message):
    with pytest.raises(RecipeError) as refused:
        bench.main(["overhead", *flags])
    assert str(refused.value) == message


def test_a_benchmark_that_is_not_there():
    with pytest.raises(RecipeError) as refused:
        bench.main(["overhed"])
    assert str(refused.value).startswith(
        "there is no benchmark 'overhed'. Did you mean overhead? Take one of overhead, "
    )


def test_rounds_are_made_in_turn_and_backwards():
    order = []
    found = in_turn({name: lambda name=name: order.append(name) or len(order) for name in "ab"}, rounds=2, warm_up=1)
    assert "".join(order) == "abbaab"
    assert found == {"a": [4, 5], "b": [3, 6]}


@needs_torch
@needs_horovod
def test_engines_are_measured_side_by_side():
    command = [sys.executable, "-m", "hvdtrain", "bench", "engines", "--framework", "torch", "--recipe", "linear"]
    done = subprocess.run(
        [*command, "--rounds", "1", "--steps", "3"], capture_output=True, text=True, check=True, timeout=280
    )
    *table, line = done.stdout.splitlines()
    found = {f"{row['adapter']} {row['engine']}": row for row in json.loads(line)["engines"]}
    trained = {name for name, row in found.items() if row["step_seconds"]}
    assert trained >= {"torch horovod", "torch local", "torch ddp"}
    assert found["torch modelparallel"]["reason"].startswith("DeviceError: Linear has 1 layers to split")
    assert found["torch dataparallel"]["reason"].startswith("DeviceError: engine dataparallel needs at least 2 devices")
    assert len(table) == len(found) + 2


@needs_horovod
@pytest.mark.parametrize(
    "framework", [pytest.param("torch", marks=needs_torch), pytest.param("tensorflow", marks=needs_tensorflow)]
)
def test_overhead_measures_both_loops(framework, tmp_path):
    command = [sys.executable, "-m", "hvdtrain", "bench", "overhead", "--recipe", "synthetic:tiny", "--rounds", "2"]
    command += ["--framework", framework, "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    result = json.loads((tmp_path / "overhead.json").read_text())
    assert json.loads(done.stdout.splitlines()[-2]) == result
    assert (tmp_path / "overhead.png").read_bytes().startswith(b"\x89PNG")
    assert result["framework"] == framework
    assert result["ratio"]["hvdtrain"] > 0
    assert all(seconds > 0 for times in result["step_seconds"].values() for seconds in times)
