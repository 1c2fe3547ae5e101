"""Lab 3: its ring on real ranks, what it records of the sends, the model of a link, and the figures."""

import re
import sys

import jupytext
import matplotlib.pyplot as plt
import numpy as np
import paths
import pytest

from labtools import ring, run_mpi

pytest.importorskip("horovod.torch", reason="needs Horovod: python -m hvdtrain build")
cloudpickle = pytest.importorskip("cloudpickle", reason="needs Horovod: python -m hvdtrain build")
cloudpickle.register_pickle_by_value(sys.modules[__name__])
LAB = paths.LABS / "3-solution-ring_allreduce.ipynb"
COUNTS, LENGTHS = (1, 2, 3, 4), (1, 4, 7, 1000)
of_labs = pytest.mark.xdist_group("labs")


@pytest.fixture(scope="module")
def lab():
    """The functions that the notebook defines, none of them run."""
    names = {"np": np, "ring": ring}
    for cell in jupytext.read(LAB).cells:
        for function in re.findall(r"^def .*?(?=^\S|\Z)", cell.source, re.DOTALL | re.MULTILINE):
            exec(function, names)
    return names


def sums(comm, allreduce, lengths):
    """Whether the sum is right for every length of array; what was sent of each; the arrays after each send."""
    right, sent = [], []
    for length in lengths:
        array = np.arange(length) * 10 + comm.rank
        watched = ring.Watched(comm, array)
        allreduce(array, watched)
        everybody = comm.size * (np.arange(length) * 10) + sum(range(comm.size))
        right.append(bool((array == everybody).all()))
        sent.append(watched.sent_bytes)
    return right, sent


def both(comm, functions, lengths):
    return [sums(comm, function, lengths) for function in functions]


def watched(comm, allreduce):
    array = np.array([2**comm.rank] * comm.size)
    seen = ring.Watched(comm, array)
    allreduce(array, seen)
    return seen.steps


def of_rank(allreduces, lengths):
    return ring.on_first_ranks(COUNTS, both, allreduces, lengths), ring.on_first_ranks((3,), watched, allreduces[0])


@pytest.fixture(scope="module")
def on_ranks(lab):
    """What each of four ranks gave: by number of ranks its sums, and its steps among three."""
    return run_mpi(of_rank, [lab["ring_allreduce"], lab["naive_allreduce"]], LENGTHS, ranks=4)


@of_labs
def test_the_ring_and_the_naive_way_add_up_over_any_number_of_ranks(on_ranks):
    summed = [results for results, _ in on_ranks]
    assert [sorted(results) for results in summed] == [[1, 2, 3, 4], [2, 3, 4], [3, 4], [4]]
    for count in COUNTS:
        for results in summed[:count]:
            assert [right for right, _ in results[count]] == [[True] * 4] * 2
        in_ring = np.array([results[count][0][1] for results in summed[:count]])
        formula = 2 * (count - 1) / count * 8 * np.array(LENGTHS)
        assert (np.abs(in_ring - formula) <= 2 * 8 * (count - 1)).all()
        assert in_ring.sum(axis=0).tolist() == [2 * (count - 1) * 8 * length for length in LENGTHS]
        at_root = summed[0][count][1][1]
        assert at_root == [(count - 1) * 8 * length for length in LENGTHS]


@of_labs
def test_every_step_is_recorded_and_drawn(on_ranks):
    steps = [results[3] for _, results in on_ranks[:3]]
    assert [len(own) for own in steps] == [4] * 3
    for rank, own in enumerate(steps):
        assert [step.receiver for step in own] == [(rank + 1) % 3] * 4
        assert [step.first for step in own] == [(rank - k) % 3 for k in (0, 1, -1, 0)]
        assert {step.sent_bytes for step in own} == {8}
        assert own[-1].after.tolist() == [7, 7, 7]
    # After the reduce-scatter every rank has one finished chunk, and no two ranks the same.
    assert sorted(own[1].after.tolist().index(7) for own in steps) == [0, 1, 2]
    figure = ring.draw_steps(steps)
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titles == [f"Step {k}: {'reduce-scatter' if k < 3 else 'allgather'}" for k in (1, 2, 3, 4)]
    plt.close(figure)


def test_a_link_is_found_again():
    sizes = 4.0 ** np.arange(10) * 1024
    link = ring.Link(alpha=3e-5, beta=2e-10)
    found = ring.fit_to_ring(4, sizes, link.ring(4, sizes))
    assert (found.alpha, found.beta) == pytest.approx((link.alpha, link.beta))
    assert link.ring(1, sizes).tolist() == [0] * 10
    np.testing.assert_allclose(link.naive(2, sizes) - link.ring(2, sizes), sizes * link.beta)
    assert ring.fit_to_ring(4, sizes, np.full(10, 1e-3)).beta >= 0


def test_an_allreduce_ends_with_the_last_rank():
    ranks = [{"ring": [[1.0, 5.0, 3.0], [1, 1, 1]]}, {"ring": [[2.0, 1.0, 9.0], [2, 0, 4]]}]
    assert ring.until_the_last(ranks)["ring"].tolist() == [5.0, 2.0]


def test_a_panel_for_every_number_of_ranks():
    sizes = np.array([1024, 4096])
    link = ring.Link(1e-5, 1e-9)
    times = {count: {"naive": link.naive(count, sizes), "ring": link.ring(count, sizes)} for count in (2, 4)}
    figure = ring.draw_times(times, sizes, dict.fromkeys((2, 4), link))
    assert [axes.get_title() for axes in figure.axes] == ["2 ranks", "4 ranks"]
    assert figure.axes[0].get_xlabel() == "Array / MiB"
    assert figure.axes[0].get_ylabel() == "Time per allreduce / ms"
    points = figure.axes[1].lines[1].get_xydata()
    np.testing.assert_allclose(points, np.stack([sizes / 2**20, 1e3 * link.ring(4, sizes)], axis=1))
    plt.close(figure)
