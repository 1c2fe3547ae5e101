"""Which examples each rank sees in each step: the same ones, all ranks together, whatever their number."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Epoch:
    """The sample order and the augmentation of one epoch: a function of seed and epoch alone."""

    order: Indices
    draws: NDArray[np.float32]

    @classmethod
    def of(cls, examples: int, seed: int, epoch: int, draws: int) -> "Epoch":
        """Order [examples] and `draws` uniform numbers in [0, 1) for each example."""
        order = np.random.default_rng([seed, epoch, 0]).permutation(examples)
        numbers = np.random.default_rng([seed, epoch, 1]).random((examples, draws), dtype=np.float32)
        return cls(order, numbers)

    def share(self, start: int, global_batch: int, rank: int, size: int) -> Indices:
        """Rank's examples, [global_batch / size, rounded down or up], of the batch that begins at place `start`."""
        return self.order[start + global_batch * rank // size : start + global_batch * (rank + 1) // size]


def shard(examples: int, rank: int, size: int) -> Indices:
    """Rank's part of 0 … examples - 1 for validation: no example left out, none twice, none padded."""
    return np.arange(examples * rank // size, examples * (rank + 1) // size)
