"""What the loop needs of a framework beside its engine and its state: a replica, and how it trains."""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hvdtrain.core.metrics import Totals
from hvdtrain.core.plan import Plan
from hvdtrain.core.progress import Progress
from hvdtrain.core.recipe import Recipe
from hvdtrain.core.sharing import Sum
from hvdtrain.core.wording import counted
from hvdtrain.datasets import Dataset
from hvdtrain.engines import Engine
from hvdtrain.errors import OutOfMemoryError
from hvdtrain.record.writer import State


def first_loss(recipe: Recipe, own: Totals, sum_over_ranks: Sum) -> list[str]:
    """A line for the log on the loss of a run's first batch, where it began with given weights. Every rank calls it."""
    if not recipe.init_from:
        return []
    return [
        f"loss of the first batch, by the weights of {recipe.init_from}: {own.over_ranks(sum_over_ranks).mean_loss:.6g}"
    ]


class Place(NamedTuple):
    """Where a run ran out of memory: after `step` updates."""

    plan: Plan
    dataset: Dataset
    rank: int
    step: int


def out_of_memory(
    at: Place, asked: str, peak: float, kept: Callable[..., Sequence[tuple[str, int]]], keys: list[str]
) -> OutOfMemoryError:
    """The error of a step that does not fit: `asked` for what, `peak` bytes, how `kept` counts what forward keeps, and
    the `keys` that would help."""
    r, micro_batch, planned = at.plan.recipe, at.plan.micro_batch, ""
    with contextlib.suppress(Exception):
        whole, *by = kept(r.model_copy(update={"workers": 0}), at.dataset, examples=micro_batch)
        most = ", ".join(f"{name} {size / 2**20:,.1f} MiB" for name, size in by[:3])
        planned = f"; by the plan {at.plan.state_bytes / 2**20:,.1f} MiB of state and {whole[1] / 2**20:,.1f} MiB of "
        planned += f"activations{f', most in {most}' if most else ''}"
    keys = [f"accumulation_steps: {2 * r.accumulation_steps}"] * (micro_batch > 1) + keys
    return OutOfMemoryError(
        f"rank {at.rank}: a micro-batch of {counted(micro_batch, 'example')} does not fit at step {at.step + 1}: "
        f"{asked}, the peak was {peak / 2**20:,.1f} MiB{planned}; give {' or '.join(keys)}."
    )


class Replica(Protocol):
    """A rank's copy of the model and its training state, whoever makes the updates."""

    engine: Engine
    state: State
    begun: Sequence[str] = ()
    """Lines for the log on the weights that rank 0 begins with."""

    def totals(self) -> Totals:
        """The sums over the examples that this rank has trained on since the last call."""

    def gradient_norm(self) -> float | None:
        """The norm of the averaged gradients of the last update, before they are clipped; None where it is not known.
        In TensorFlow it is the norm of the first update since the last call."""
        return None

    def gradient_noise(self) -> NDArray[np.float64] | None:
        """This rank's sums for `hvdtrain.core.recipe.noise.estimated` since the last call; None where the recipe does
        not ask for them."""
        return None

    def average_statistics(self) -> None:
        """Replaces BatchNorm's running statistics by their mean over the ranks."""

    def fingerprints(self) -> Sequence[int]:
        """A 64-bit digest of the weights of each of this rank's replicas."""

    def settings(self) -> Mapping[str, Any]:
        """How its framework computes: TF32, deterministic algorithms, types."""

    def after_first_step(self) -> Sequence[str]:
        """Lines for the log about what the first step has shown. Every rank calls it."""
        return ()

    def learns(self) -> Hashable:
        """Which parameters the last update has changed: replicas are compared after the first update of each value."""
        return ()

    def watch(self, enabled: bool) -> None:
        """Says whether replicas are compared after the next update, which then notes what `cause` follows from."""
        return

    @property
    def cause(self) -> str:
        """Why its weights may differ from other ranks', as a key of `hvdtrain.ranks.agreement.REMEDIES`."""
        return "weights"


class Trainer(Replica, Protocol):
    """One framework: a model with its data, its updates and its validation."""

    parts: int = 1
    """Into how many parts each micro-batch is divided, so that it fits into memory."""

    def batches(self, progress: Progress) -> Iterator[Any]:
        """This rank's local batch of each global batch that is left of the epoch."""

    def update(self, batch: Any, lr: float, step: int) -> None:
        """Forward, backward, averaged gradients and the update; `step` updates were made before it."""

    def validate(self) -> Totals:
        """The sums over this rank's examples of the validation set."""

    def profiled(self, note: Callable[[str], None]) -> AbstractContextManager[Any]:
        """A context around all updates, which profiles them if the recipe says so; `note` writes a line of the log."""
