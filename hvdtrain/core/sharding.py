"""Which examples each rank sees in each step. The global batch is the same for any number of ranks."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

WINDOW = 4096
"""Examples of one rank that are mixed where it reads shard after shard; some 500 MB of ImageNet."""


@dataclass(frozen=True)
class Epoch:
    """The sample order and the augmentation of one epoch: a function of seed and epoch alone."""

    order: Indices
    draws: NDArray[np.float32]

    @classmethod
    def by_shard(
        cls, shards: Sequence[int], seed: int, epoch: int, draws: int, global_batch: int, size: int
    ) -> "Epoch":
        """As `of`, for ranks that read one shard after the other; `shards` holds the number of examples in each.

        The shards, in an order drawn anew, are dealt to the ranks as runs of equal length; a rank's examples are
        mixed within WINDOW of its run. The order thus depends on batch and ranks, and
        `local_batch` reads each rank's own run.
        """
        random = np.random.default_rng([seed, epoch, 0])
        run = _permuted(shards, random)
        batches = len(run) // global_batch
        cuts = [batches * (global_batch * rank // size) for rank in range(size + 1)]
        runs = [_mixed(run[first:last], random).reshape(batches, -1) for first, last in itertools.pairwise(cuts)]
        order = np.concatenate([np.concatenate(runs, axis=1).ravel(), run[batches * global_batch :]])
        return cls(order, cls.of(len(run), seed, epoch, draws).draws)

    @classmethod
    def of(cls, examples: int, seed: int, epoch: int, draws: int) -> "Epoch":
        """Order [examples] and `draws` uniform numbers in [0, 1) for each example."""
        order = np.random.default_rng([seed, epoch, 0]).permutation(examples)
        numbers = np.random.default_rng([seed, epoch, 1]).random((examples, draws), dtype=np.float32)
        return cls(order, numbers)

    @classmethod
    def by_item(cls, items: Sequence[int], seed: int, epoch: int, draws: int) -> "Epoch":
        """As `of`, for examples that are computed item by item; `items` holds the number of examples in each. Items are
        permuted, an item's examples stay together and share their draws."""
        order = _permuted(items, np.random.default_rng([seed, epoch, 0]))
        numbers = np.random.default_rng([seed, epoch, 1]).random((len(items), draws), dtype=np.float32)
        return cls(order, np.repeat(numbers, items, axis=0))

    def local_batch(self, start: int, global_batch: int, rank: int, size: int) -> Indices:
        """A rank's examples, [global_batch / size, rounded down or up], of the global batch that begins at `start`."""
        return self.order[start + global_batch * rank // size : start + global_batch * (rank + 1) // size]


def _permuted(sizes: Sequence[int], random: np.random.Generator) -> Indices:
    """The indices of runs of these sizes, the runs in an order drawn anew."""
    firsts = np.cumsum([0, *sizes])
    return np.concatenate([np.arange(firsts[k], firsts[k + 1]) for k in random.permutation(len(sizes))])


def _mixed(run: Indices, random: np.random.Generator) -> Indices:
    return np.concatenate([run[:0], *(random.permutation(run[k : k + WINDOW]) for k in range(0, len(run), WINDOW))])


def shard(examples: int, rank: int, size: int) -> Indices:
    """The rank's indices among 0 … examples - 1 for validation: none left out, none twice, none padded."""
    return np.arange(examples * rank // size, examples * (rank + 1) // size)
