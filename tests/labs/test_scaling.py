"""Lab 5: the model of a step, its fits, the published points, a step's parts, and Horovod's real timeline."""

import sys

import matplotlib.pyplot as plt
import numpy as np
import pytest

from labtools import LabError, profiling, scaling
from labtools.scaling import StepModel

pytest.importorskip("horovod.torch", reason="needs Horovod: python -m hvdtrain build")
cloudpickle = pytest.importorskip("cloudpickle", reason="needs Horovod: python -m hvdtrain build")
cloudpickle.register_pickle_by_value(sys.modules[__name__])
of_labs = pytest.mark.xdist_group("labs")  # whose ranks these tests share


@pytest.fixture(autouse=True)
def no_figures_left():
    yield
    plt.close("all")


STEPS = {  # the model, ranks, seconds of a step
    "alone": (StepModel(0.1, 1e6, 1e-8), 1, 0.1),
    "the ring of two": (StepModel(0.1, 1e6, 1e-8), 2, 0.1 + 2 * 0.5 * 1e6 * 1e-8),
    "latency": (StepModel(0.1, 1e6, 0, message_seconds=1e-3), 5, 0.1 + 8e-3),
    "hidden behind backward": (StepModel(0.1, 1e6, 1e-8, hidden=0.5), 4, 0.1),
    "partly hidden": (StepModel(0.1, 1e6, 1e-7, hidden=0.5), 4, 0.1 + 0.15 - 0.05),
    "inside a node": (StepModel(0.1, 1e6, 1e-8, node=4), 4, 0.1),
    "four nodes": (StepModel(0.1, 1e6, 1e-8, node=4), 16, 0.1 + 2 * 0.75 * 1e6 * 1e-8),
    "shared cores": (StepModel(0.1, 1e6, 0, cores=2), 4, 0.2),
    "drag": (StepModel(0.1, 1e6, 0, drag=0.01), 10, 0.2),
}


@pytest.mark.parametrize(("model", "ranks", "seconds"), STEPS.values(), ids=STEPS)
def test_the_model_of_a_step(model, ranks, seconds):
    assert model.step(ranks) == pytest.approx(seconds)
    assert model.efficiency(ranks) == pytest.approx(float(model.step(1)) / seconds)


def test_a_laptop_is_found_again():
    true = StepModel(0.2, 4e7, 3e-9, cores=2)
    found = scaling.fit_laptop([1, 2, 4], true.step([1, 2, 4]), 4e7, cores=2)
    assert found.byte_seconds == pytest.approx(3e-9)
    assert found.step(8) == pytest.approx(true.step(8))
    assert scaling.fit_laptop([1, 2], [0.2, 0.1], 4e7, cores=2).byte_seconds == 0


@pytest.mark.parametrize("network", [0, 0.3, 1])
@pytest.mark.parametrize("hidden", [0, scaling.BACKWARD])
def test_every_story_passes_through_jscs_points(network, hidden):
    model = scaling.through_jsc(network, hidden)
    for run in (scaling.JSC_NODE, scaling.JSC_NODES):
        assert model.step(run.gpus) == pytest.approx(run.step_seconds)
        efficiency = scaling.JSC_ONE.image_seconds / run.image_seconds
        assert scaling.jsc_efficiency(model, run.gpus) == pytest.approx(efficiency)


def test_the_band_opens_with_the_number_of_gpus():
    lowest, highest = scaling.jsc_band([16, 64, 1024])
    assert lowest[0] == pytest.approx(highest[0])
    assert (np.diff(highest - lowest) > 0).all()
    assert lowest[2] < 0.2
    assert 0.8 < highest[2] < 1


def test_published_points():
    assert [round(point.efficiency, 3) for point in scaling.PUBLISHED] == [1, 0.958, 0.862, 0.81, 0.9, 0.79]
    assert all(point.source for point in scaling.PUBLISHED)


def test_amdahl():
    assert scaling.gain_of_halving([0.5, 0.5]) == pytest.approx([1 / 3, 1 / 3])
    assert scaling.gain_of_halving([0.0, 2.0]) == pytest.approx([0, 1])


def test_a_typical_step_leaves_warm_up_and_hiccups_out():
    stamps = np.zeros((2, 10, 6))
    stamps[...] = np.arange(6) * 0.01 + np.arange(10)[None, :, None]
    stamps[:, 0, 5] += 5  # warm-up
    stamps[:, 4, 1:] += 3  # a hiccup
    assert profiling.typical_step(stamps) == pytest.approx([0.01] * 5)


def trains():
    """A few steps with two gradients of 4 MB and four small ones; stamps [steps, 6] as the lab takes them."""
    import time

    import horovod.torch as hvd
    import torch

    hvd.init()
    tensors = {"large.weight": 1_000_000, "larger.weight": 1_000_001} | {f"small.{k}": 10 for k in range(4)}
    stamps = []
    for _ in range(3):
        time.sleep(0.1)
        start = time.time()
        handles = [hvd.allreduce_async(torch.ones(size), name=name) for name, size in tensors.items()]
        for handle in handles:
            hvd.synchronize(handle)
        stamps.append([start, start, start, start, time.time(), time.time() + 1e-3])
    return np.array(stamps)


@pytest.fixture(scope="module")
def recorded(ranks, tmp_path_factory):
    """A real timeline of Horovod's, and the stamps of rank 0."""
    path = tmp_path_factory.mktemp("timeline") / "timeline.json"
    return path, ranks.run(trains, ranks=2, environ={"HOROVOD_TIMELINE": str(path)})[0]


# Seconds: Horovod reads the two clocks of its timeline one after the other, and may be held up in between.
CLOCKS_APART = 0.03


@of_labs
def test_a_timeline_is_read(recorded):
    path, stamps = recorded
    groups, earliest = profiling.read_timeline(path), 0.0
    for step in stamps:
        first, last = step[0] - CLOCKS_APART, step[-1] + CLOCKS_APART
        here = [group for group in groups if first <= group.phases["ALLREDUCE"][0] < last]
        assert sum(group.nbytes for group in here) == 4 * (2_000_001 + 40)
        names = sorted(name for group in here for name in group.tensors)
        assert names == ["large.weight", "larger.weight", *(f"small.{k}" for k in range(4))]
        for group in here:
            begins = [span[0] for name, span in group.phases.items() if name != "MEMCPY_OUT"]
            assert earliest <= min(begins)  # the other rank may be ahead, but for the last averages
            assert all(begin <= end for begin, end in group.phases.values())
        earliest = max(group.phases["ALLREDUCE"][0] for group in here)
    assert any(len(group.tensors) > 1 for group in groups)


@of_labs
def test_a_timeline_that_was_cut_off_is_read_too(recorded, tmp_path):
    whole = recorded[0].read_text()
    cut = tmp_path / "cut.json"
    cut.write_text(whole[: int(len(whole) * 0.8)])
    assert 0 < len(profiling.read_timeline(cut)) < len(profiling.read_timeline(recorded[0]))


@pytest.mark.parametrize(
    "text", [None, "", "{}", "[]", "not json"], ids=["absent", "empty", "object", "none", "no JSON"]
)
def test_what_is_no_timeline(tmp_path, text):
    path = tmp_path / "timeline.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(LabError, match=r"There is no timeline of Horovod's in .*\nHOROVOD_TIMELINE has to be in"):
        profiling.read_timeline(path)


@of_labs
def test_the_figures(recorded):
    groups = profiling.read_timeline(recorded[0])
    timeline = profiling.draw_timeline(groups, recorded[1][1])
    labels = [label.get_text() for label in timeline.axes[0].get_yticklabels()]
    assert labels[0] == "rank 0"
    assert any("larger" in label and "MB" in label for label in labels)
    with pytest.raises(LabError, match="are both of the same run"):
        profiling.draw_timeline(groups, recorded[1][1] + 1000)
    throughput = profiling.draw_throughput([1, 2, 4], [100, 180, 200], 2)
    assert [axes.get_ylabel() for axes in throughput.axes] == ["Throughput / (images/s)", "Efficiency / %"]
    axes = plt.figure().add_subplot()
    profiling.draw_parts(axes, {1: np.array([1, 2, 3, 0, 1]) / 1e3, 2: np.array([1, 2, 3, 4, 1]) / 1e3})
    assert [text.get_text() for text in axes.texts] == ["7 ms", "11 ms"]
    for draw in (scaling.draw_published, lambda axes: scaling.draw_laptop(axes, StepModel(1, 1, 1), [1], [1.0])):
        axes = plt.figure().add_subplot()
        draw(axes)
        assert axes.get_ylabel() == "Efficiency / %"
