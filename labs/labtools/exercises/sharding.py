"""The checks of lab 9: what a rank holds and sends, and the three stages of ZeRO by hand."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar

from labtools import sharding
from labtools.exercises import OnRanks, print_right
from labtools.exercises import sharding_mistakes as mistakes

RANKS = 4
_SHAPE, _EXAMPLES = (8, 128), 16  # large enough for the weights to outweigh everything else


class Check(OnRanks):
    """The six gaps of lab 9, of which three need four ranks."""

    lab = 9
    hints: ClassVar = {
        "states": (
            "float32: a weight, its gradient and Adam's two means have 4 bytes each.",
            "mixed: 2 bytes for a weight, and 2 for its gradient. Adam keeps its two means in float32, and one number "
            "more, to which the small updates are added.",
            "that number is a copy of the weight in float32: three numbers of 4 bytes belong to the optimizer. Both "
            "ways add up to 16.",
        ),
        "held": (
            "stage 3 divides all three by the ranks, stage 0 none.",
            "each stage divides what the one before did, and one thing more: first the optimizer's, then the "
            "gradients, then the weights.",
        ),
        "zero_1": (
            "for each layer three lines: this rank's part of its weights; the update of that; the whole layer.",
            "adam.update wants two arrays of one length: comm.part(weights[number]), and this rank's part of the "
            "gradients' sum, which one collective gives.",
            "comm.part gives a view: what adam.update does to it happens in weights[number] too. The other parts come "
            "by comm.allgather, and belong into the array that is there: weights[number][:] = ...",
        ),
        "zero_2": (
            "go through gradients(...) with a loop, and keep of each gradient only what comm.reduce_scatter gives.",
            "a dictionary {number: this rank's part}, made while backward runs. dict(gradients(...)) would keep all "
            "whole ones.",
            "then, for each layer, the three lines of zero_1, with the part that is there already.",
        ),
        "zero_3": (
            "gradients(weights_of) calls weights_of(number) each time that it needs a layer. Which collective makes a "
            "whole layer of the ranks' parts?",
            "give it a function that gathers: it is called, the layer is used, and nobody keeps it.",
            "after backward a rank has its part of each gradient, as in zero_2, and its part of the weights. The "
            "update needs no collective.",
        ),
        "sent": (
            "how many collectives go over the whole gradient, and over all weights? An allreduce counts as two.",
            "stages 1 and 2: one reduce-scatter of the gradient, one allgather of the weights. Stage 3: the weights "
            "twice, once in forward and once in backward.",
            "each sends (N - 1) / N of the whole: with one rank nothing is sent.",
        ),
    }

    def states(self, states: Callable[[int, bool], Any]) -> None:
        """Gap 1: `states(parameters, mixed)` are the bytes of weights, gradients and Adam's state."""
        given = {mixed: self._call("states", states, 1000, mixed) for mixed in (False, True)}
        self._judge("states", mistakes.of_states(given, 1000))
        print_right("4 + 4 + 8 and 2 + 2 + 12: 16 bytes for a weight, either way.")

    def held(self, held: Callable[[float, float, float, int, int], Any]) -> None:
        """Gap 2: `held(weights, gradients, optimizer, ranks, stage)` are the bytes that a rank holds."""
        given = {stage: self._call("held", held, 16.0, 32.0, 128.0, 4, stage) for stage in range(4)}
        self._judge("held", mistakes.of_held(given, (16.0, 32.0, 128.0), 4))
        print_right("with more ranks the stages tend to 16, 4, 2 and 0 bytes for a weight, in mixed precision.")

    def zero_1(self, zero_1: sharding.Step) -> None:
        """Gap 3: `zero_1(comm, weights, adam, gradients)` is one update with Adam's state in parts."""
        self._stage(1, zero_1)
        print_right("the weights are the replicated ones, with a quarter of Adam's state on each rank.")

    def zero_2(self, zero_2: sharding.Step) -> None:
        """Gap 4: `zero_2(comm, weights, adam, gradients)` is one update with the gradients in parts too."""
        self._stage(2, zero_2)
        print_right("the same weights, and a quarter of the gradients too.")

    def zero_3(self, zero_3: sharding.Step) -> None:
        """Gap 5: `zero_3(comm, parts, adam, gradients)` is one update with the weights in parts too."""
        self._stage(3, zero_3)
        print_right("the same weights, of which no rank holds more than a quarter and one layer.")

    def sent(self, sent: Callable[[float, int, int], Any]) -> None:
        """Gap 6: `sent(weights, ranks, stage)` are the bytes that a rank sends in an update."""
        given = {(n, stage): self._call("sent", sent, 600.0, n, stage) for stage in range(4) for n in (1, 2, 4, 1000)}
        self._judge("sent", mistakes.of_sent(given, 600.0))
        print_right("twice the weights, less an N-th, with stages 0, 1 and 2; three times with stage 3.")

    def _stage(self, stage: int, step: sharding.Step) -> None:
        gap = f"zero_{stage}"
        found = self._run(gap, sharding.measured, step, stage == 3, _SHAPE, _EXAMPLES, ranks=RANKS)
        self._judge(gap, mistakes.of_stage(stage, found, self._replicated))

    @cached_property
    def _replicated(self) -> Sequence[sharding.Measured]:
        return self._run("zero_1", sharding.measured, _replicated, False, _SHAPE, _EXAMPLES, ranks=RANKS)


def _replicated(comm: Any, weights: Any, adam: sharding.Adam, gradients: sharding.Gradients) -> None:
    whole = {number: comm.allreduce(gradient) for number, gradient in gradients(lambda number: weights[number])}
    for number, gradient in whole.items():
        adam.update(number, weights[number], gradient)
