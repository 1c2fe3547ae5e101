"""Lab 9: each gap filled right, and wrong in the usual ways: a message names what is wrong. Its collectives."""

import sys

import numpy as np
import pytest
from fillings import by_gap, check_right, check_tried, check_wrong
from marks import marked

from labtools import Ranks, sharding
from labtools.exercises.sharding import Check

pytest.importorskip("torch", reason="needs PyTorch: pip install -e .[torch]")
pytest.importorskip("horovod.torch", reason="needs Horovod: python -m hvdtrain build")
cloudpickle = pytest.importorskip("cloudpickle", reason="needs Horovod: python -m hvdtrain build")
pytestmark = [pytest.mark.launched, pytest.mark.xdist_group("labs")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def ranks():
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def check(ranks):
    return Check(ranks)


def nothing(*given): ...


def states(float32=(4, 4, 8), mixed=(2, 2, 12)):
    return lambda parameters, is_mixed: [each * parameters for each in (mixed if is_mixed else float32)]


def held(weights=3, gradients=2, optimizer=1, at=int.__ge__):
    """A `held` that divides each from this stage on."""

    def held(*given):
        *sizes, ranks, stage = given
        return sum(
            size / ranks if at(stage, first) else size
            for size, first in zip(sizes, (weights, gradients, optimizer), strict=True)
        )

    return held


def sent(times=(2, 2, 2, 3), share=lambda n: (n - 1) / n):
    return lambda weights, n, stage: times[stage] * share(n) * weights


def whole_of(weights):
    return lambda number: weights[number]


def updates(comm, weights, adam, parts, gather=True):
    """Each rank updates its part of each layer."""
    for number, gradient in parts.items():
        mine = comm.part(weights[number])
        adam.update(number, mine, gradient)
        if gather:
            weights[number][:] = comm.allgather(mine)


def replicated(comm, weights, adam, gradients):
    for number, gradient in {n: comm.allreduce(g) for n, g in gradients(whole_of(weights))}.items():
        adam.update(number, weights[number], gradient)


def alone(comm, weights, adam, gradients):
    for number, gradient in dict(gradients(whole_of(weights))).items():
        adam.update(number, weights[number], gradient)


def stage_1(reduce=lambda comm, gradient: comm.reduce_scatter(gradient), gather=True):
    def zero_1(comm, weights, adam, gradients):
        for number, gradient in dict(gradients(whole_of(weights))).items():
            updates(comm, weights, adam, {number: reduce(comm, gradient)}, gather)

    return zero_1


def stage_2(reduce=lambda comm, gradient: comm.reduce_scatter(gradient), gather=True):
    def zero_2(comm, weights, adam, gradients):
        updates(comm, weights, adam, {n: reduce(comm, g) for n, g in gradients(whole_of(weights))}, gather)

    return zero_2


def stage_3(reduce=lambda comm, gradient: comm.reduce_scatter(gradient), before=nothing):
    """`before` may give another function of where the weights come from."""

    def zero_3(comm, parts, adam, gradients):
        weights_of = before(comm, parts) or (lambda number: comm.allgather(parts[number]))
        for number, gradient in {n: reduce(comm, g) for n, g in gradients(weights_of)}.items():
            adam.update(number, parts[number], gradient)

    return zero_3


def own(comm, gradient):
    return comm.part(gradient).copy()


def from_all(comm, gradient):
    return comm.part(comm.allreduce(gradient)).copy()


def all_first(comm, parts):
    whole = [comm.allgather(part) for part in parts]
    return lambda number: whole[number]


def once_more(comm, parts):
    for part in parts:
        comm.allgather(part)


def a_copy(comm, parts, adam, gradients):
    for number, gradient in gradients(lambda number: comm.allgather(parts[number])):
        adam.update(number, comm.allgather(parts[number]), comm.allreduce(gradient))


def part_and_whole(comm, weights, adam, gradients):
    for number, gradient in dict(gradients(whole_of(weights))).items():
        adam.update(number, weights[number], comm.reduce_scatter(gradient))


def rank_0_alone(comm, weights, adam, gradients):
    if comm.rank == 0:
        stage_2()(comm, weights, adam, gradients)


WRONG = {
    "states, empty": (nothing, "Gap 1, states, is still empty"),
    "states, one number": (lambda parameters, mixed: 16 * parameters, "and not three numbers: weights, grad"),
    "states, one mean": (states(float32=(4, 4, 4)), "in float32, and 4 . 4 . 8 is right: Adam keeps two numbers"),
    "states, a copy in float32": (states(float32=(4, 4, 12)), "in float32 the optimizer needs no copy of the weights"),
    "states, bits": (states(float32=(32, 32, 64)), "those are bits"),
    "states, the order": (states(float32=(8, 4, 4)), "the order is weights, gradients, optimizer"),
    "states, no copy": (states(mixed=(2, 2, 8)), "2 . 2 . 8 bytes for .* mixed .*own copy of the weights, in float32"),
    "states, Adam in 2 bytes": (states(mixed=(2, 2, 4)), "the optimizer works in float32: 4 bytes for each"),
    "states, gradients in float32": (states(mixed=(2, 4, 12)), "the gradients have 2 bytes, as the paper counts"),
    "states, always float32": (states(mixed=(4, 4, 8)), "that is float32: in mixed precision forward"),
    "states, for one weight": (lambda _, mixed: (2, 2, 12) if mixed else (4, 4, 8), "there are `parameters` of them"),
    "held, empty": (nothing, "Gap 2, held, is still empty"),
    "held, whole": (held(9, 9, 9), "nothing is divided by the ranks"),
    "held, all": (held(0, 0, 0), "everything is divided in every stage"),
    "held, too far": (held(2, 1, 0), "it is one stage too far"),
    "held, behind": (held(4, 3, 2), "it is one stage behind"),
    "held, one alone": (held(at=int.__eq__), "a stage keeps what the ones before it have divided"),
    "held, turned around": (held(1, 2, 3), "first the optimizer's state is divided, and the weights last"),
    "held, together": (lambda *given: given[3] * held()(*given), "that is what all ranks hold together"),
    "zero_1, empty": (nothing, "Gap 3, zero_1, is still empty, or changes a copy"),
    "zero_1, not gathered": (stage_1(gather=False), "new weights in its own part and old ones in the others"),
    "zero_1, its own gradient": (stage_1(own), "but not those of the replicated update: .* comm.part.gradient. is"),
    "zero_1, alone": (alone, "leaves each rank other weights: every rank updates by the gradient of its own"),
    "zero_1, replicated": (replicated, r"right update, but holds 16.\d bytes .* 10.0 are enough: Adam's state of all"),
    "zero_1, an allreduce": (stage_1(from_all), r"sends 9.\d bytes for a weight where 6.0 are enough: an allreduce"),
    "zero_1, part and whole": (
        part_and_whole,
        "stopped:.*adam.update got 16384 weights of layer 7 and a gradient of 4",
    ),
    "zero_1, rank 0 alone": (rank_0_alone, "is not for some ranks only|stopped|wait"),
    "zero_2, empty": (nothing, "Gap 4, zero_2, is still empty, or changes a copy"),
    "zero_2, as zero_1": (stage_1(), r"holds 1\d.\d bytes for a weight where 7.0 are enough: all whole gradients"),
    "zero_2, replicated": (replicated, "Adam's state of all weights lies on every rank"),
    "zero_2, not gathered": (stage_2(gather=False), "old ones in the others: they have to be gathered"),
    "zero_2, its own gradient": (stage_2(own), "comm.part.gradient. is of this rank's own; comm.reduce_scatter adds"),
    "zero_2, an allreduce": (stage_2(from_all), r"sends 9.\d bytes for a weight where 6.0 are enough: an allreduce"),
    "zero_3, empty": (nothing, "Gap 5, zero_3, is still empty, or changes a copy"),
    "zero_3, a copy": (a_copy, "is still empty, or changes a copy"),
    "zero_3, all first": (stage_3(before=all_first), r"holds \d.\d bytes .* 4.0 are enough: whole layers are kept"),
    "zero_3, its own gradient": (stage_3(own), "leaves each rank|but not those of the replicated update"),
    "zero_3, an allreduce": (stage_3(from_all), r"sends 12.\d bytes for a weight where 9.0 .*: an allreduce brings"),
    "zero_3, once more": (stage_3(before=once_more), r"sends 12.\d bytes for a weight where 9.0 are enough"),
    "zero_3, the part": (
        stage_3(before=lambda comm, parts: whole_of(parts)),
        "stopped:.*cannot reshape array of size 4096",
    ),
    "sent, empty": (nothing, "Gap 6, sent, is still empty"),
    "sent, gathered once": (sent((2, 2, 2, 2)), "stage 3 gathers each layer twice, once in forward and once in back"),
    "sent, an allreduce besides": (sent((2, 3, 3, 4)), "stages 1 and 2 need no allreduce"),
    "sent, stage 2 more": (sent((2, 2, 3, 3)), "stages 2 and 3 send no more for a gradient in parts"),
    "sent, its own part": (sent(share=lambda n: 1), "the part that a rank has already is not sent"),
    "sent, all ranks": (sent(share=lambda n: n - 1), "that is what all ranks send together"),
    "sent, stage 3 by allreduce": (sent((2, 2, 2, 4)), "that is stage 3 with an allreduce of the gradient"),
    "sent, one phase": (sent((1, 2, 2, 3)), "an allreduce is two phases"),
    "sent, an N-th": (sent(share=lambda n: 1 / n), "and not an N-th"),
}
FAST = {"zero_1, its own gradient", "zero_2, as zero_1", "zero_3, all first", "zero_3, an allreduce"}
SLOW = {name for name in WRONG if name.startswith("zero_") and name not in FAST}
RIGHT = {
    "states": states(),
    "held": held(),
    "zero_1": stage_1(),
    "zero_2": stage_2(),
    "zero_3": stage_3(),
    "sent": sent(),
}


@pytest.mark.parametrize(("gap", "filling", "message"), marked(by_gap(WRONG), slow=SLOW))
def test_mistakes_of_lab_9(check, gap, filling, message):
    check_wrong(check, message, gap, filling)


@pytest.mark.parametrize("gap", RIGHT)
def test_right_fillings(check, capsys, gap):
    check_right(check, capsys, gap, RIGHT[gap])


def test_every_gap_is_tried_in_five_wrong_ways():
    check_tried(Check, WRONG)


def collectives():
    comm, (before, *sent) = sharding.Comm(), [0] * 4
    array = np.random.default_rng(comm.rank).integers(0, 100, 3 * 2**17).astype(np.float32)
    found = []
    for number, call in enumerate(
        (comm.reduce_scatter, comm.allreduce, lambda array: comm.allgather(comm.part(array)))
    ):
        before = sharding.written()
        found.append(call(array))
        sent[number] = (sharding.written() - before) / array.nbytes
    return comm.part(array), found, sent


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_collectives_on_real_ranks(ranks, size):
    arrays = [np.random.default_rng(rank).integers(0, 100, 3 * 2**17).astype(np.float32) for rank in range(size)]
    for rank, (part, (scattered, reduced, gathered), sent) in enumerate(ranks.run(collectives, ranks=size)):
        parts = [np.split(array, size) for array in arrays]
        assert np.array_equal(part, parts[rank][rank])
        assert np.array_equal(scattered, np.split(sum(arrays), size)[rank])
        assert np.array_equal(reduced, sum(arrays))
        assert np.array_equal(gathered, np.concatenate([parts[number][number] for number in range(size)]))
        share = (size - 1) / size
        assert sent == pytest.approx([share, 2 * share, share], abs=0.01)


def test_the_gradients_of_the_ranks_add_up_and_one_rank_trains_alike(ranks):
    (one,) = ranks.run(sharding.measured, replicated, False, (3, 12), 8, ranks=1)
    for each in ranks.run(sharding.measured, stage_3(), True, (3, 12), 8):
        np.testing.assert_allclose(each.weights, one.weights, atol=1e-6)


def test_the_gradient_is_that_of_the_loss():
    x, y = sharding.batch(0, 4, 3)
    weights = [sharding.draw(number, 3).astype(np.float64) for number in range(2)]
    losses = []
    found = dict(sharding.gradients(2, x, y, 4, losses)(whole_of(weights)))
    for number, index in ((0, 2), (1, 7)):
        for sign in (1, -1):
            weights[number][index] += sign * 1e-5
            list(sharding.gradients(2, x, y, 4, losses)(whole_of(weights)))
            weights[number][index] -= sign * 1e-5
        assert found[number][index] == pytest.approx((losses[-2] - losses[-1]) / 2e-5, rel=1e-3)
