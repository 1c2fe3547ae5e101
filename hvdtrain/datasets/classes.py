"""The classes of a training set: the label of each example, and their weights."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hvdtrain.datasets.base import Dataset
from hvdtrain.errors import DataError
from hvdtrain.untrusted import quoted

REMEDY = "give the data set `targets`, a whole number from 0 for each example"


def labels_of(dataset: Dataset, key: str) -> NDArray[np.int64] | None:
    """The label of each training example, for that key of a recipe; None where the files are not here. Raises
    DataError where the data set does not say them."""
    found: Any = getattr(dataset.train, "labels", ())
    if found is None:
        return None
    labels = np.asarray(found) if not dataset.items else np.empty(0)
    if labels.shape != (len(dataset.train),) or labels.dtype.kind not in "iu" or labels.min() < 0:
        raise DataError(f"{key} needs the label of each training example, which {dataset.name} does not say; {REMEDY}.")
    return labels.astype(np.int64)


def weights_of(
    chosen: Literal["balanced"] | Mapping[str, float] | None, labels: NDArray[np.int64] | None, dataset: Dataset
) -> tuple[float, ...]:
    """The weight of each class, by label; () where none was chosen, or labels are not known.

    Balanced are examples / (classes * examples of the class), over the classes that occur, as scikit-learn's
    compute_class_weight has it. A class that is not named, or does not occur, has weight 1. Raises DataError for a
    class that there is not.
    """
    if chosen == "balanced":
        counts = np.bincount(labels, minlength=dataset.classes or 0) if labels is not None else np.empty(0, np.int64)
        present = np.maximum(counts, 1) * np.count_nonzero(counts)
        return tuple(np.where(counts, counts.sum() / present, 1.0).tolist()) if len(counts) else ()
    numbered = {_number(name, dataset): weight for name, weight in (chosen or {}).items()}
    count = dataset.classes or len(dataset.names) or max(numbered, default=-1) + 1
    return tuple(numbered.get(label, 1.0) for label in range(count)) if numbered else ()


def _number(name: str, dataset: Dataset) -> int:
    if name in dataset.names:
        return dataset.names.index(name)
    most = dataset.classes or len(dataset.names) or 10**7
    if name.isdecimal() and int(name) < most:
        return int(name)
    raise DataError(f"class_weights names class {quoted(name)}, {dataset.name} has 0 to {most - 1}; name one of these.")
