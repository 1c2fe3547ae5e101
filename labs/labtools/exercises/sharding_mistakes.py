"""What is wrong with a gap of lab 9, in words, from the numbers given and what the ranks then have. None where it
is right.

Each text continues "Gap 3, zero_1, ".
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from labtools import sharding
from labtools.exercises import first_of, listed

EMPTY = "is still empty: it gives back nothing (if it computes something, a `return` is missing)."
_CLOSE = 1e-5
_MARGIN = 1.0  # bytes for a weight: what else a rank holds, and sends
_HELD = {1: 4 + 4 + 8 / 4, 2: 4 + 8 / 4 + 4 / 4, 3: 16 / 4}  # bytes for a weight in float32, on four ranks
_SENT = {1: 6.0, 2: 6.0, 3: 9.0}


def of_states(given: Mapping[bool, Any], parameters: int) -> str | None:
    """From the bytes given, by whether the precision is mixed."""
    right = {False: (4, 4, 8), True: (2, 2, 12)}
    known = {
        False: {
            (4, 4, 4): "Adam keeps two numbers for each weight, the mean and the mean square",
            (4, 4, 12): "in float32 the optimizer needs no copy of the weights: they have 4 bytes already",
            (4, 0, 8): "the gradients are missing",
            (8, 4, 4): "the order is weights, gradients, optimizer",
            (32, 32, 64): "those are bits",
            (2, 2, 12): "that is mixed precision; a number in float32 has 4 bytes",
        },
        True: {
            (2, 2, 8): "the optimizer's own copy of the weights, in float32, is missing",
            (2, 2, 4): "the optimizer works in float32: 4 bytes for each of its numbers, and it has three",
            (2, 2, 6): "the optimizer works in float32: 4 bytes for each of its three numbers",
            (2, 4, 12): "the gradients have 2 bytes, as the paper counts",
            (4, 4, 8): "that is float32: in mixed precision forward and backward use 2 bytes for a number",
            (4, 2, 12): "the weights with which forward computes have 2 bytes; those of 4 are the optimizer's",
        },
    }
    for mixed, triple in given.items():
        name = "mixed precision" if mixed else "float32"
        if triple is None:
            return EMPTY
        if np.shape(triple) != (3,):
            return f"gives back {triple!r:.60} for {name}, and not three numbers: weights, gradients, optimizer."
        each = tuple(np.asarray(triple, float) / parameters)
        if each != right[mixed]:
            alone = "those are bytes for one weight: there are `parameters` of them"
            why = known[mixed].get(each) or (
                alone if tuple(triple) == right[mixed] else "count the numbers of a weight"
            )
            shown, wanted = (" + ".join(f"{value:g}" for value in values) for values in (each, right[mixed]))
            return f"gives {shown} bytes for a weight in {name}, and {wanted} is right: {why}."
    return None


def of_held(given: Mapping[int, Any], states: tuple[float, float, float], ranks: int) -> str | None:
    """From the bytes given by stage, for these bytes of weights, gradients and optimizer."""

    def divided(*by: bool) -> float:
        return sum(size / ranks if each else size for size, each in zip(states, by, strict=True))

    right = {stage: divided(stage >= 3, stage >= 2, stage >= 1) for stage in range(4)}
    known: dict[str, Callable[[int], float]] = {
        "that is what all ranks hold together": lambda stage: ranks * right[stage],
        "nothing is divided by the ranks": lambda stage: right[0],
        "everything is divided in every stage": lambda stage: right[3],
        "it is one stage too far": lambda stage: right[min(3, stage + 1)],
        "it is one stage behind": lambda stage: right[max(0, stage - 1)],
        "a stage keeps what the ones before it have divided: it divides one thing more": lambda stage: divided(
            stage == 3, stage == 2, stage == 1
        ),
        "first the optimizer's state is divided, and the weights last": lambda stage: divided(
            stage >= 1, stage >= 2, stage >= 3
        ),
    }
    if any(value is None for value in given.values()):
        return EMPTY
    if np.allclose([given[stage] for stage in right], list(right.values())):
        return None
    alike = (text for text, of in known.items() if np.allclose([given[s] for s in right], [of(s) for s in right]))
    return (
        f"gives {listed([float(given[stage]) for stage in right])} bytes for stages 0 to 3 on {ranks} ranks, of "
        f"{listed(states)}, and {listed(list(right.values()))} is right: {next(alike, 'go stage by stage')}."
    )


def of_stage(stage: int, found: Sequence[sharding.Measured], right: Sequence[sharding.Measured]) -> str | None:
    """From what each rank had after three updates, and what it has by replicated ones."""
    count, numbers = found[0].weights.shape
    first = np.array([sharding.draw(number, round(numbers**0.5)) for number in range(count)])
    weights = np.array([each.weights for each in found])
    if not np.array_equal(weights, np.broadcast_to(right[0].weights, weights.shape)) and not np.allclose(
        weights, right[0].weights, atol=_CLOSE
    ):
        return _of_weights(weights, first)
    return _of_bytes(stage, max(each.held for each in found), max(each.sent for each in found))


def _of_weights(weights: Any, first: Any) -> str:
    """From the weights [rank, layer, n], which are not the replicated ones, and those before the updates."""
    parts = np.array_split(np.arange(weights.shape[2]), len(weights))
    changed = [[bool((own[:, part] != first[:, part]).any()) for part in parts] for own in weights]
    own_alone = [[rank == number for number in range(len(parts))] for rank in range(len(parts))]
    return first_of(
        (
            not np.any(changed),
            "is still empty, or changes a copy: after three updates the weights are what they were.",
        ),
        (
            changed == own_alone,
            "leaves each rank with new weights in its own part and old ones in the others: they have to be gathered, "
            "and put into weights[number][:].",
        ),
        (
            np.ptp(weights, axis=0).max() > _CLOSE,
            "leaves each rank other weights: every rank updates by the gradient of its own examples. The gradients of "
            "all have to be added up, by comm.reduce_scatter.",
        ),
        (
            True,
            "leaves all ranks the same weights, but not those of the replicated update: each part has to be updated by "
            "the sum of all ranks' gradients. comm.part(gradient) is of this rank's own; comm.reduce_scatter adds up.",
        ),
    )  # type: ignore[return-value]


def _of_bytes(stage: int, held: float, sent: float) -> str | None:
    """From the bytes for a weight, where the weights are right."""
    too_much = held > _HELD[stage] + _MARGIN
    holds = f"makes the right update, but holds {held:.1f} bytes for a weight where {_HELD[stage]:.1f} are enough: "
    return first_of(
        (
            too_much and held > 14,
            holds + "Adam's state of all weights lies on every rank. It is as long as what adam.update is given: give "
            "it this rank's part.",
        ),
        (
            too_much and stage == 2,
            holds + "all whole gradients are kept until backward is over. Reduce each as it comes, and keep the part.",
        ),
        (
            too_much and stage == 3,
            holds + "whole layers are kept. Gather a layer inside the function that gradients() calls, each time, and "
            "keep nothing of it; of a gradient keep the part.",
        ),
        (too_much, holds + "something is kept besides weights, gradients and this rank's state."),
        (
            sent > _SENT[stage] + _MARGIN,
            f"makes the right update, but sends {sent:.1f} bytes for a weight where {_SENT[stage]:.1f} are enough: "
            + (
                "an allreduce brings every rank the whole sum, of which it needs its part alone."
                if stage < 3 or sent > 11
                else "a layer is gathered once in forward and once in backward, and not again."
            ),
        ),
    )


def of_sent(given: Mapping[tuple[int, int], Any], weights: float) -> str | None:
    """From the bytes given, by ranks and stage."""

    def ring(n: int) -> float:
        return (n - 1) / n * weights

    times = (2, 2, 2, 3)
    known: dict[str, Callable[[int, int], float]] = {
        "stage 3 gathers each layer twice, once in forward and once in backward": lambda n, stage: 2 * ring(n),
        "stages 1 and 2 need no allreduce: a reduce-scatter, and an allgather of the weights": lambda n, stage: (
            (2, 3, 3, 4)[stage] * ring(n)
        ),
        "stages 2 and 3 send no more for a gradient in parts: a reduce-scatter has always been half of an allreduce": (
            lambda n, stage: (2, 2, 3, 3)[stage] * ring(n)
        ),
        "the part that a rank has already is not sent: (N - 1) / N": lambda n, stage: times[stage] * weights,
        "that is what all ranks send together": lambda n, stage: times[stage] * ring(n) * n,
        "that is stage 3 with an allreduce of the gradient: a reduce-scatter is enough": lambda n, stage: (
            (2, 2, 2, 4)[stage] * ring(n)
        ),
        "an allreduce is two phases, each of (N - 1) / N": lambda n, stage: (1, 2, 2, 3)[stage] * ring(n),
        "a collective is (N - 1) / N of the whole, and not an N-th": lambda n, stage: times[stage] * weights / n,
    }
    if any(value is None for value in given.values()):
        return EMPTY
    if all(np.isclose(value, times[stage] * ring(n)) for (n, stage), value in given.items()):
        return None
    alike = (text for text, of in known.items() if all(np.isclose(given[case], of(*case)) for case in given))
    shown = [float(given[4, stage]) for stage in range(4)]
    return (
        f"gives {listed(shown)} bytes for stages 0 to 3, of {weights:.0f} on 4 ranks, and "
        f"{listed([times[stage] * ring(4) for stage in range(4)])} is right: "
        f"{next(alike, 'count reduce-scatters and allgathers')}."
    )
