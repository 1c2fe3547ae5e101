"""What the loop needs of a framework: its collective library, the training state, a replica, and how it trains."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from hvdtrain.core.progress import Progress
from hvdtrain.core.sharing import Totals
from hvdtrain.ranks.slow import Waiting
from hvdtrain.record.checkpoint import Checkpoint, Layout


class Engine(Waiting, Protocol):
    """What the loop needs of a collective library. Every rank calls the same methods in the same order."""

    rank: int
    size: int
    device: Any
    notes: tuple[str, ...]
    """Lines for the log."""

    def broadcast(self, tensors: Any, metadata: Any) -> Any:
        """Overwrites `tensors` in place with rank 0's; returns rank 0's JSON value `metadata`."""

    def sum(self, array: np.ndarray) -> np.ndarray:
        """The sum of the ranks' arrays, on every rank."""

    def is_lost(self, error: Exception) -> bool:
        """Whether the error means that another rank is lost."""

    def close(self) -> None:
        """Ends the collective library. Ranks that wait for this one get an error instead of a hang."""


class State(Protocol):
    """A training state: weights, momentum and statistics by name, and the loss scale."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """The live tensors, not copies."""

    @property
    def scaler(self) -> Any:
        """The loss scale of float16, as a torch.amp.GradScaler; its `state_dict` is empty in another precision."""

    def start(self, layout: Layout, values: Mapping[str, Any]) -> None:
        """Creates the tensors that an optimizer would create only at its first update, as a checkpoint of this layout
        holds them. `values`: what `values()` returned for that checkpoint. Raises CheckpointError."""

    def load(self, checkpoint: Checkpoint) -> None:
        """Copies the checkpoint's arrays into the tensors. Raises CheckpointError."""

    def share(self, engine: Any) -> None:
        """Gives all ranks what rank 0 keeps beside its tensors. Every rank calls it. Raises CheckpointError."""

    def arrays(self) -> Mapping[str, np.ndarray]:
        """The tensors as they are now."""

    def snapshot(self) -> Mapping[str, np.ndarray]:
        """Copies of the tensors as they are now, on the host. The next call overwrites them."""

    def values(self) -> Mapping[str, Any]:
        """The parts of the optimizer's state that are no arrays, as JSON values by name."""

    def numbers(self) -> Mapping[str, Any]:
        """The numbers that an update depends on beside tensors: the LR, momentum and betas of each group of
        parameters, the loss scale, the count of updates."""


class Replica(Protocol):
    """A rank's copy of the model and its training state, whoever makes the updates."""

    @property
    def engine(self) -> Engine: ...

    @property
    def state(self) -> State: ...

    def totals(self) -> Totals:
        """The sums over the examples that this rank has trained on since the last call."""

    def gradient_norm(self) -> float | None:
        """The norm of the averaged gradients of the last update, before they are clipped; None where it is not known.
        In TensorFlow it is the norm of the first update since the last call."""

    def average_statistics(self) -> None:
        """Replaces BatchNorm's running statistics by their mean over the ranks."""

    def fingerprints(self) -> Sequence[int]:
        """A 64-bit digest of the weights of each of this rank's replicas."""

    def settings(self) -> Mapping[str, Any]:
        """How its framework computes: TF32, deterministic algorithms, types."""

    def after_first_step(self) -> Sequence[str]:
        """Lines for the log about what the first step has shown. Every rank calls it."""

    def learns(self) -> Hashable:
        """Which parameters the last update has changed: replicas are compared after the first update of each value."""

    def watch(self, enabled: bool) -> None:
        """Says whether replicas are compared after the next update, which then notes what `cause` follows from."""

    @property
    def cause(self) -> str:
        """Why its weights may differ from other ranks', as a key of `hvdtrain.ranks.agreement.REMEDIES`."""


class Unwatched:
    """The part of a replica whose updates are not watched."""

    cause = "weights"

    def learns(self) -> Hashable:
        return ()

    def watch(self, enabled: bool) -> None:
        pass


class Trainer(Replica, Protocol):
    """One framework: a model with its data, its updates and its validation."""

    def batches(self, progress: Progress) -> Iterator[Any]:
        """This rank's local batch of each global batch that is left of the epoch."""

    def update(self, batch: Any, lr: float, step: int) -> None:
        """Forward, backward, averaged gradients and the update; `step` updates were made before it."""

    def validate(self) -> Totals:
        """The sums over this rank's examples of the validation set."""

    def profiled(self, note: Callable[[str], None]) -> AbstractContextManager[Any]:
        """A context around all updates, which profiles them if the recipe says so; `note` writes a line of the log."""
