"""The checks of lab 2: each runs a learner's function on real ranks, and explains what these then have and do."""

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import LabError
from labtools.exercises import Exercise, listed, print_right
from labtools.exercises import horovod_mistakes as mistakes
from labtools.exercises import horovod_ranks as on_rank
from labtools.exercises.horovod_ranks import BASE_BATCH, BASE_LR
from labtools.ranks import Ranks

_SIZE = 4
_EPOCHS = 6
_SECONDS = 10.0  # for ranks that wait for one another; a check takes less than two

Array = NDArray[Any]


class Check(Exercise):
    """The five gaps of lab 2, which need four ranks."""

    lab = 2
    hints: ClassVar = {
        "init": (
            "which functions does `hvd` have? Type `hvd.` and press Tab.",
            "the function that starts Horovod has the name of this gap. Without parentheses nothing is called.",
        ),
        "shard": (
            "each rank takes a part of the same array; which one depends on a number that only this rank has.",
            "with 4 ranks, rank 1 could take the positions 1, 5, 9, ... What are the start and the stride?",
            "a slice `batch[start::stride]`, in which one of the two is the rank, and the other the number of ranks.",
        ),
        "scale": (
            "first compute the global batch: how many examples do all ranks take together in a step?",
            "then apply the formula above: how many times base_batch is that?",
            "4 ranks with 50 examples each have a global batch of 200, which is 4 times a base_batch of 50.",
        ),
        "wrap": (
            "the class is hvd.DistributedOptimizer; help(hvd.DistributedOptimizer) lists what it takes.",
            "it takes the optimizer, and named_parameters, which `model` can give. Return what it makes.",
        ),
        "broadcast": (
            "hvd.broadcast_parameters takes a dictionary of tensors, which `model.state_dict()` is.",
            "its neighbour for the momentum is hvd.broadcast_optimizer_state. Both take the same root_rank.",
            "every rank calls both, also rank 0; the root is the rank whose values all take over.",
        ),
    }

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks

    def init(self, init: Callable[[], Any]) -> None:
        """Gap 1: after `init()` every process knows the others."""
        worlds = self._run("init", on_rank.world, init)
        self._judge("init", mistakes.of_init(worlds))
        print_right(f"{_SIZE} processes have become ranks {listed(range(_SIZE))} of {_SIZE}.")

    def shard(self, shard: Callable[[Array], Any]) -> None:
        """Gap 2: `shard(batch)` is this rank's local batch of the numbers [global batch] of examples."""
        numbers = 200 + np.random.default_rng(0).permutation(800)  # none of which is a position in the batch, too
        large, small = numbers[:200], numbers[200:212]
        on_four = self._run("shard", on_rank.local_batches, shard, [large, small])
        local_batches = [each[0] for each in on_four]
        mistake = mistakes.of_shard(large, local_batches)
        if mistake and mistakes.is_same(local_batches):
            gradients = listed(self._run("shard", on_rank.gradient, shard, large))
            mistake += (
                f"\nAll compute one and the same gradient, for the slope {gradients} on ranks 0, 1, 2, 3. "
                "Their mean is that of one rank: three of the four work for nothing."
            )
        self._judge("shard", mistake)
        on_two = self._run("shard", on_rank.local_batches, shard, [large], ranks=2)
        for batch, there, where, name in (
            (small, [each[1] for each in on_four], "for one of 12", "len(batch)"),
            (large, [each[0] for each in on_two], "on 2", "hvd.size()"),
        ):
            mistake = mistakes.of_shard(batch, there)
            message = f"is right for a batch of 200 on 4 ranks, but not {where}: there it {mistake} Use {name}."
            self._judge("shard", mistake and message)
        print_right("each of the 200 examples is on one rank, 50 on each.")

    def scale(self, scale: Callable[[float, int, int], Any]) -> None:
        """Gap 3: `scale(base_lr, base_batch, local_batch_size)` is the LR where each rank takes so many examples."""
        cases = [(BASE_LR, BASE_BATCH, BASE_BATCH), (BASE_LR, _SIZE * BASE_BATCH, BASE_BATCH), (0.3, BASE_BATCH, 20)]
        on_four = self._run("scale", on_rank.rates, scale, cases)
        if any(rate is None for rates in on_four for rate in rates):
            self._judge("scale", "is still empty: it gives back no learning rate.")
        on_two = self._run("scale", on_rank.rates, scale, cases[:1], ranks=2)
        mistake, shown = mistakes.of_scale(np.array(on_four), on_two[0][0])
        if mistake and shown:
            mistake += "\n" + self._consequence(*shown)
        self._judge("scale", mistake)
        print_right("0.1 x 200/50 = 0.4 for 4 ranks with 50 examples each, 0.1 where the global batch is kept.")

    def wrap(self, wrap: Callable[[Any, Any], Any]) -> None:
        """Gap 4: `wrap(optimizer, model)` is an optimizer that averages the gradients over the ranks."""
        runs = self._run("wrap", on_rank.train, wrap, on_rank.broadcast_state, _SIZE * BASE_LR)
        if any(run is None for run in runs):
            self._judge("wrap", "is still empty: it gives back no optimizer (if it makes one, a `return` is missing).")
        right = self._run("wrap", on_rank.train, on_rank.average, on_rank.broadcast_state, _SIZE * BASE_LR)[0]
        self._judge("wrap", mistakes.of_wrap(np.array([run.path for run in runs]), right.path))
        print_right(f"after 5 steps on different examples all ranks are at slope {runs[0].path[-1, 0]:.4f}.")

    def broadcast(self, broadcast: Callable[[Any, Any], Any]) -> None:
        """Gap 5: `broadcast(model, optimizer)` gives all ranks the weights and the momentum of rank 0."""
        runs = self._run("broadcast", on_rank.train, on_rank.average, broadcast, _SIZE * BASE_LR, True)
        right = self._run("broadcast", on_rank.train, on_rank.average, on_rank.broadcast_state, _SIZE * BASE_LR, True)[
            0
        ]
        before, paths = np.array([run.before for run in runs]), np.array([run.path for run in runs])
        self._judge("broadcast", mistakes.of_broadcast(before, paths, right.path))
        print_right(f"all ranks start from rank 0's slope {before[0, 0]:.4f}, with its momentum, and stay together.")

    def _run(self, gap: str, function: Callable[..., Any], *arguments: Any, ranks: int = _SIZE) -> list[Any]:
        past: list[int] = []
        try:
            return self._ranks.run(
                function, *arguments, ranks=ranks, seconds=_SECONDS, watch=lambda rank, _: past.append(rank)
            )
        except LabError as error:
            raise self._wrong(gap, f"{mistakes.failure(str(error), sorted(past), ranks)}\n{error}") from None

    def _consequence(self, lrs: Array, base_batch: int) -> str:
        """What the LRs [rank] do on the ranks, beside what one process does with batches of `base_batch`."""
        # Weights alone: the optimizer's state would bring rank 0's LR along.
        train = (on_rank.average, on_rank.broadcast_weights)
        paths = [run.path for run in self._run("scale", on_rank.train, *train, lrs, False, BASE_BATCH, _EPOCHS)]
        alone = self._run("scale", on_rank.train, *train, BASE_LR, False, base_batch, _EPOCHS, ranks=1)[0].path
        slopes = [float(path[-1, 0]) for path in paths]
        there = f"slopes {listed(slopes)}" if np.ptp(slopes) > 1e-5 else f"slope {slopes[0]:.2f}"
        diverged = " (it has diverged)" if max(map(abs, slopes)) > 10 else ""
        return (
            f"From slope {alone[0, 0]:.2f}, {_EPOCHS} epochs of {len(paths[0]) // _EPOCHS} steps lead to "
            f"{there}{diverged}; one process with batches of {base_batch} at {BASE_LR} gets to {alone[-1, 0]:.2f}."
        )
