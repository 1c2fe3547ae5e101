"""PyTorch and TensorFlow train alike from one converted checkpoint, and the line as NumPy does."""

import json
import shutil

import numpy as np
import pytest
import small
from marks import marked
from ranks import needs_horovod, needs_tensorflow, needs_torch, once, programs
from worlds import losses

from hvdtrain import datasets
from hvdtrain.core import network, recipe
from hvdtrain.core import plan as plans
from hvdtrain.core.progress import Progress, train_requests
from hvdtrain.engines import frameworks
from hvdtrain.run.setup import load_dataset
from hvdtrain.tools import convert

pytestmark = [pytest.mark.launched, needs_torch, needs_tensorflow, needs_horovod, pytest.mark.timeout(900)]

FRAMEWORKS = ("torch", "tensorflow")
EVERY_STEP = ["--log-every-steps", "1"]
# The digits are not augmented. In float32 a higher LR lets one ReLU near 0 make the curves differ by rounding alone, in
# whatever framework; in float64 the recipe's own LR, momentum and warm-up are followed to the last digits.
GENTLE = ["--lr-rule", "none", "--warmup-epochs", "0", "--lr-schedule", "constant", "--base-lr", "1e-4"]
RUNS = {
    "line": ["linear", *EVERY_STEP, "--epochs", "5"],
    "momentum": ["linear", *EVERY_STEP, "--epochs", "2", "--momentum", "0.9", "--nesterov", "--weight-decay", "0.01"],
    "digits": ["digits", *EVERY_STEP, *GENTLE, "--batch-size", "16", "--max-steps", "10"],
    "float64": ["digits", *EVERY_STEP, "--batch-size", "16", "--max-steps", "3", "--precision", "float64"],
}
LIMITS = {"line": 1e-6, "momentum": 1e-6, "digits": 1e-3, "float64": 1e-12}
STEPS = {"line": 50, "momentum": 20, "digits": 10, "float64": 3}
OF_RANKS = {1: list(RUNS), 2: ["line", "digits"]}


@pytest.fixture(scope="module", autouse=True)
def _small_networks():
    """Makes `convert` expect the small network that the programs train."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "RESNETS", {"resnet50": tuple(small.SMALL_BLOCKS.values())})
        yield


def start(framework, ranks, folder, given):
    """The results of the programs on each of that many ranks."""
    return programs(framework, "alone" if ranks == 1 else "mpi", ranks, folder, given)


@pytest.fixture(scope="module")
def first_checkpoints(tmp_path_factory):
    """A folder with every run's checkpoint of step 0, made by PyTorch: FRAMEWORK-RANKS/RUN."""
    folder = tmp_path_factory.mktemp("frameworks")
    first = {name: [*argv, "--output", str(folder / "first" / name)] for name, argv in RUNS.items()}
    start("torch", 1, folder / "results-first", {"initial": {"given": first}})
    for name in RUNS:
        source = folder / "first" / name
        convert.main([str(source), "--to", "tensorflow"])
        for framework in FRAMEWORKS:
            for ranks in (1, 2):
                beginning = source.with_name(f"{name}-tensorflow") if framework == "tensorflow" else source
                target = folder / f"{framework}-{ranks}" / name / "checkpoints"
                target.mkdir(parents=True)
                shutil.copytree(beginning / "checkpoints" / "step-00000000", target / "step-00000000")
    return folder


@pytest.fixture(scope="module")
def trained(first_checkpoints):
    """`trained(framework, ranks)`: the folder of those ranks' runs."""

    @once
    def of(framework, ranks):
        folder = first_checkpoints / f"{framework}-{ranks}"
        given = {name: [*RUNS[name], "--output", str(folder / name)] for name in OF_RANKS[ranks]}
        if ranks == 2:  # whose checkpoint no test reads
            given["digits curve"] = given.pop("digits")
        more = {"one_gpu": {}} if ranks == 2 else {}
        start(framework, ranks, folder / "results", {"trainings": {"given": given}, **more})
        return folder

    return of


@pytest.mark.parametrize(
    ("ranks", "name"), marked([(ranks, name) for ranks in OF_RANKS for name in OF_RANKS[ranks]], slow={1})
)
def test_both_frameworks_have_one_curve(trained, name, ranks):
    ours, theirs = (losses(trained(framework, ranks) / name) for framework in FRAMEWORKS)
    assert len(ours) == len(theirs) == STEPS[name]
    np.testing.assert_allclose(ours, theirs, rtol=LIMITS[name])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_two_ranks_on_one_gpu_are_refused_before_nccl_is(trained, framework):
    ended = [
        json.loads((trained(framework, 2) / f"results/rank-{rank}.json").read_text())["one_gpu"] for rank in (0, 1)
    ]
    assert ended[0] == ended[1]
    assert ended[0].startswith("ranks 0 and 1 on ")
    assert " share GPU-a: NCCL takes one rank a GPU" in ended[0]


def reference(steps):
    """The losses of `line`, by NumPy in float64."""
    loaded = recipe.load("linear", {"epochs": 5})
    dataset = load_dataset(loaded)
    plan = plans.make(loaded, 1, dataset, frameworks.network_of(loaded, "torch", dataset))
    points, (slope, intercept), results = datasets.load("linear").train, (0.0, 0.0), []
    for epoch in range(5):
        progress = Progress(epoch=epoch)
        _, requests = train_requests(plan, progress, 0)
        for indices, _ in requests:
            x, y = points.x[indices, 0].astype(float), points.y[indices, 0].astype(float)
            error = slope * x + intercept - y
            results.append(np.mean(error**2))
            lr = progress.lr(plan)
            progress.advance(plan)
            slope, intercept = slope - lr * np.mean(2 * error * x), intercept - lr * np.mean(2 * error)
    return np.array(results[:steps])


@pytest.mark.parametrize("ranks", marked([1, 2], slow={1}))
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_numpy_has_the_same_line(trained, framework, ranks):
    np.testing.assert_allclose(losses(trained(framework, ranks) / "line"), reference(50), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("of", "to"), [FRAMEWORKS, FRAMEWORKS[::-1]], ids=["to TensorFlow", "to PyTorch"])
def test_a_trained_network_answers_alike_in_the_other_framework(trained, of, to, tmp_path):
    folder = tmp_path / "converted"
    source = trained(of, 1) / "digits"
    convert.main([str(source), "--to", to, "--output", str(folder)])
    answers = [
        start(framework, 1, tmp_path / framework, {"logits": {"argv": [*RUNS["digits"], "--output", str(run_folder)]}})
        for framework, run_folder in ((of, source), (to, folder))
    ]
    ours, theirs = (np.array(rank["logits"][0]) for rank in answers)
    assert ours.shape == (32, 10) and np.ptp(ours) > 0.1
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
