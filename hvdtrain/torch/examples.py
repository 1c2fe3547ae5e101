"""Map-style PyTorch data sets of users, read in one global order, the same for every number of ranks.

A Dataset must draw its random numbers inside `__getitem__`, from `random`, `numpy.random` or `torch`: these are seeded
for each sample by (seed, epoch, index), so that 1 rank and N ranks draw the same; for `collate`, by those of its first
sample.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from hvdtrain.core import user_code
from hvdtrain.core.recipe import Recipe
from hvdtrain.datasets import Dataset
from hvdtrain.ranks.stacks import READERS, mark_module
from hvdtrain.run import examples

mark_module(READERS, __name__)

Collate = Callable[[list[Any]], Any]
"""Makes a batch of a list of samples."""


def load(recipe: Recipe) -> Dataset:
    """The user's data set that the recipe names. Raises RecipeError and DataError where it cannot be read."""
    torch.default_generator.manual_seed(recipe.seed)  # a module may make its model as it is imported
    collate = user_code.load(recipe.collate, "collate") if recipe.collate else default_collate
    user_code.check_arguments(collate, recipe.collate or "default_collate", "collate", [])
    return examples.load(recipe, "map-style data sets", lambda split, name: Examples(split, name, collate))


class Examples(examples.Examples):
    """A map-style data set as a split of `hvdtrain.datasets`. `collate` makes its batches."""

    iterable = IterableDataset
    sources = "random, numpy.random or torch"
    remedy = "give it __len__ and __getitem__ (a map-style data set)"
    alike = "make them alike, or give a collate"

    def __init__(self, dataset: Any, name: str = "the data set", collate: Collate = default_collate) -> None:
        """Messages use `name`. Raises DataError where the data set is empty or cannot be read by index."""
        if isinstance(dataset, tuple | list) and dataset and all(hasattr(array, "shape") for array in dataset):
            dataset = TensorDataset(*map(torch.as_tensor, dataset))
        super().__init__(dataset, name, collate)
        if collate is not default_collate:
            self.drawing = "__getitem__ or collate"

    def seed(self, seed: int) -> None:
        super().seed(seed)
        torch.default_generator.manual_seed(seed)

    def generators(self) -> tuple[Any, ...]:
        return super().generators(), torch.get_rng_state().numpy().tobytes()

    def set_generators(self, states: tuple[Any, ...]) -> None:
        of_others, of_torch = states
        super().set_generators(of_others)
        torch.set_rng_state(torch.frombuffer(bytearray(of_torch), dtype=torch.uint8))
