"""The engines that a run can name."""

from typing import Any

import numpy as np

from hvdtrain.engines.registry import Setup


class Engine:
    """A collective library, as the loop needs it; each framework adds verbs. Every rank calls the same methods in the
    same order. This class itself is one rank alone, for which every collective is the identity."""

    rank = 0
    size = 1
    device: Any
    notes: tuple[str, ...] = ()
    """Lines for the log."""

    @classmethod
    def open(cls, setup: Setup) -> "Engine":
        """The engine, joined with the other ranks and bound to its devices. Raises HvdtrainError."""
        raise NotImplementedError

    @property
    def waited(self) -> float | None:
        """For how many seconds this rank has waited for the others' gradients so far; None where the engine does not
        know, or has one process."""
        return None

    @property
    def world(self) -> tuple[int, int]:
        """The rank and the number of ranks, according to the library."""
        return self.rank, self.size

    def broadcast(self, tensors: Any, metadata: Any) -> Any:
        """Overwrites `tensors`, which have the same names, shapes and dtypes on all ranks, in place with rank 0's;
        returns rank 0's JSON value `metadata`."""
        return metadata

    def sum(self, array: np.ndarray) -> np.ndarray:
        """The sum of the ranks' arrays, on every rank: of the shape and dtype that all of them have."""
        return array

    def is_lost(self, error: Exception) -> bool:
        """Whether the error means that another rank is lost."""
        return False

    def close(self) -> None:
        """Ends the collective library. Ranks that wait for this one get an error instead of a hang."""
