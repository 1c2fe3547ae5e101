"""The checks of lab 8: a language model on several ranks."""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from hvdtrain.errors import LabError
from labtools.exercises import OnRanks, of_empty_part, print_right
from labtools.exercises import language_mistakes as mistakes
from labtools.exercises import language_ranks as on_rank
from labtools.exercises.srun import LOADED  # noqa: F401  # the lab's own

_MOST = (2.0, 1000.0)  # norms: the gradients of the check are above the one, and below the other


class Check(OnRanks):
    """The six gaps of lab 8, of which three need three ranks."""

    lab = 8
    hints: ClassVar = {
        "micro_batches": (
            "how many tokens do all ranks together work on at one time, when each has one micro-batch?",
            "an update has `tokens` of them; // divides, and gives a whole number, which range() can take.",
        ),
        "mean_per_token": (
            "which two numbers of all ranks together give the mean over all tokens?",
            "world.sum(number) gives every rank the sum over the ranks. Sum first, divide once, at the end.",
            "two sums, that of the totals and that of the counts, and one division. No rank's own mean occurs in it.",
        ),
        "ragged": (
            "the mean of means lets both ranks count alike. When does that do the most harm?",
            "when one rank has many tokens and the other few, and when these cost much more, or much less, each.",
            "what the model has seen a thousand times is cheap: a long text of self. and return. A few rare characters "
            "are dear.",
        ),
        "accumulate": (
            "gradients add up by themselves: each backward() adds to parameter.grad what is there already.",
            "the divisor is one number for all micro-batches: the targets that are not -100, over all micro-batches "
            "and all ranks. It has to be known before the first backward().",
            "first count, with (y != -100).sum().item() of every part and world.sum; then for each part the backward() "
            "of loss_sum divided by that count.",
        ),
        "reduce": (
            "the shares of all ranks add up to the gradient. Of what has the norm to be taken, and when?",
            "for each parameter, world.sum(parameter.grad) is the sum over the ranks: put it in the gradient's place.",
            "torch.nn.utils.clip_grad_norm_(parameters, most) shortens all gradients by one factor, and gives back the "
            "norm before. Behind the sum all ranks have the same norm.",
        ),
        "predicted": (
            "two terms: computing, which the ranks share, and adding up, which happens once in an update.",
            "not more than `cores` ranks compute at a time: min(ranks, cores) of them.",
            "the ring's term is 2 (N - 1) / N times `adding`, as in lab 3; on one rank that is 0.",
        ),
    }

    def micro_batches(self, micro_batches: Callable[[int, int, int, int], Any]) -> None:
        """Gap 1: `micro_batches(tokens, sequences, length, ranks)` is their number on each rank in an update."""
        cases = ((524_288, 8, 1024, 4), (524_288, 8, 1024, 64), (6144, 4, 128, 2))
        given = {case: self._call("micro_batches", micro_batches, *case) for case in cases}
        self._judge("micro_batches", mistakes.of_micro_batches(given))
        print_right("524,288 tokens are 16 micro-batches of 8 x 1024 on each of 4 ranks, and one on each of 64.")

    def mean_per_token(self, mean_per_token: Callable[[Any, float, int], Any]) -> None:
        """Gap 2: `mean_per_token(world, total, count)` is the loss per token of all ranks, from this one's."""
        full, ragged = [(60.0, 12), (10.0, 4), (8.0, 4)], [(60.0, 12), (0.0, 0), (12.0, 4)]
        found = self._run("mean_per_token", on_rank.means, mean_per_token, [full], ranks=on_rank.RANKS)
        self._judge("mean_per_token", mistakes.of_means(found, full))
        try:
            found = self._run("mean_per_token", on_rank.means, mean_per_token, [ragged], ranks=on_rank.RANKS)
        except LabError as error:
            self._judge("mean_per_token", of_empty_part(str(error), "tokens"))
            raise
        self._judge("mean_per_token", mistakes.of_means(found, ragged))
        print_right("78 nats over 20 tokens are 3.9 on every rank, also where a rank has no token.")

    def ragged(self, ragged: Any, losses: Callable[[Sequence[str]], tuple[float, int]]) -> None:
        """Gap 3: `ragged` has the texts of rank 0 and of rank 1; `losses(texts)` is the sum of the model's losses, and
        their tokens."""
        self._judge("ragged", mistakes.of_ragged(ragged))
        (first, few), (second, many) = both = [losses(texts) for texts in ragged]
        self._judge("ragged", mistakes.of_losses(both))
        exact, wrong = (first + second) / (few + many), (first / few + second / many) / 2
        print_right(
            f"{few} tokens of {first / few:.2f} and {many} of {second / many:.2f}: a token costs {exact:.2f}, "
            f"and the mean of means says {wrong:.2f}."
        )

    def accumulate(self, accumulate: Callable[[Any, Any, Any], Any]) -> None:
        """Gap 4: `accumulate(world, model, parts)` leaves this rank's share of the gradient."""
        found = self._run("accumulate", on_rank.shares, accumulate, ranks=on_rank.RANKS)
        self._judge("accumulate", mistakes.of_shares(found))
        print_right("the shares of 3 ranks with 2 micro-batches each, all ragged, add up to the gradient of one batch.")

    def reduce(self, reduce: Callable[[Any, Any, float], Any]) -> None:
        """Gap 5: `reduce(world, model, most)` makes the shares the gradient of all ranks, of norm `most` or less, and
        gives back the norm that it had."""
        found = self._run("reduce", on_rank.clipped, reduce, _MOST, ranks=on_rank.RANKS)
        self._judge("reduce", mistakes.of_clipped(found, _MOST))
        print_right(f"the norm of the sum is {found[0].norms[0]:.2f} on all ranks; it is clipped to 2, not to 1000.")

    def predicted(self, predicted: Callable[[int, int, float, float, float], Any]) -> None:
        """Gap 6: `predicted(ranks, micro_batches, micro, adding, cores)` are the seconds of an update."""
        cases = (
            (1, 8, 0.5, 0.25, math.inf),
            (2, 8, 0.5, 0.25, math.inf),
            (4, 8, 0.5, 0.25, math.inf),
            (4, 8, 0.5, 0.25, 2),
        )
        given = {case: self._call("predicted", predicted, *case) for case in cases}
        self._judge("predicted", mistakes.of_predicted(given))
        print_right("8 micro-batches of 0.5 s take 4 s on a rank, 2.25 s on 2, 1.38 s on 4, 2.38 s on 4 with 2 cores.")
