"""What a checkpoint's metadata must hold so that a run can resume from it."""

import contextlib
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hvdtrain.core.metrics import Totals
from hvdtrain.core.progress import Progress
from hvdtrain.errors import CheckpointError
from hvdtrain.record.checkpoint import Checkpoint, Count, ShortText, reason_of
from hvdtrain.untrusted import one_line, quoted

AnyFloat = Annotated[float, Field(allow_inf_nan=True)]
"""A float that may be NaN, as a metric is that has no value in some batch."""
MOST_METRICS = Field(max_length=1000)
APART = {"class names", "batch_size", "seed"}
"""The keys of a data description that other functions compare."""


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")


class PlateauMetadata(Strict):
    best: float | None
    waited: Count
    drops: Count


class PatienceMetadata(Strict):
    metric: ShortText = ""
    best: float | None = None
    epoch: Count = 0
    waited: Count = 0
    is_over: bool = False


class TotalsMetadata(Strict):
    loss: float
    count: float
    metrics: Annotated[dict[ShortText, Annotated[tuple[AnyFloat, AnyFloat], Field(strict=False)]], MOST_METRICS]


class ScalerMetadata(Strict):
    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: Count
    growth_tracker: Count = Field(alias="_growth_tracker")


class RunMetadata(Strict):
    """The keys of `meta` that a run resumes from; a checkpoint has others too."""

    model_config = ConfigDict(extra="ignore")

    step: Count
    epoch: Count
    sample: Count
    plateau: PlateauMetadata
    train: TotalsMetadata
    ended: ShortText
    patience: PatienceMetadata = PatienceMetadata()
    parts: Annotated[int, Field(ge=1, le=10**9)] = 1
    scaler: ScalerMetadata | Annotated[dict[str, float], Field(max_length=0)]
    """The loss scaler's state; empty where there is none."""
    optimizer: dict[str, bool | int | AnyFloat | str | None]
    data: dict[ShortText, Count | ShortText | list[str] | None]
    """A description of the examples; see `hvdtrain.datasets.Dataset.contents`."""
    samples: dict[ShortText, Any]
    """Marks of some examples; see `hvdtrain.run.samples`."""
    code: dict[ShortText, ShortText]
    """Digests of the user's modules."""


def check_names(before: Any, now: Mapping[str, Any], step: int) -> None:
    """Raises CheckpointError where the data's classes have other names, or another order, than the
    checkpoint's: the network's outputs would get other labels."""
    ours, theirs = (of.get("class names") if isinstance(of, Mapping) else None for of in (now, before))
    if isinstance(ours, list) and isinstance(theirs, list) and ours != theirs:
        pairs = enumerate(zip_longest(theirs, ours))
        label, (was, is_now) = next((label, pair) for label, pair in pairs if pair[0] != pair[1])
        named = [quoted(name) if name is not None else "not there" for name in (was, is_now)]
        raise CheckpointError(
            f"class {label} is {named[1]} in the data, {named[0]} in the checkpoint of step {step} ({len(ours)} "
            f"classes now, {len(theirs)} then): the network has learned other labels",
            remedy="restore the class folders, or give another {folder}",
        )


def news_of(before: Mapping[str, Any], now: Mapping[str, Any], progress: Progress) -> str:
    """A line for the log where the data differ from the checkpoint's; empty where they do not.

    Where the training set is another, sets `progress` to the beginning of its epoch, as a position in the order
    of the old examples means nothing in that of the new ones. Raises CheckpointError.
    """
    check_names(before, now, progress.step)
    others = [name for name in now if now[name] != before.get(name, now[name]) and name not in APART]
    if not others:
        return ""
    inside = progress.sample > 0 and any("validation" not in name for name in others)
    if inside:
        progress.sample, progress.train = 0, Totals(0.0, 0.0)
    numbers = (name for name in others if isinstance(now[name], int) and isinstance(before[name], int))
    counts = [f"{now[name]:,} {name}, {before[name]:,} then" for name in numbers]
    other = ", ".join(counts or [f"another {name}" for name in others])
    then = "this epoch begins anew with them" if inside else "the run continues with them"
    return f"the data have changed since the checkpoint of step {progress.step} ({other}): {then}"


def on_other_data(state: Checkpoint, now: Mapping[str, Any]) -> tuple[Checkpoint, list[str]]:
    """The checkpoint as a run with these data resumes from it, and lines for the log; see `news_of`."""
    progress = Progress.from_metadata(dict(state.meta))
    news = news_of(state.meta["data"], now, progress)
    return Checkpoint(state.arrays, {**state.meta, **progress.metadata()}), [news] if news else []


@contextlib.contextmanager
def as_checkpoint_error(step: int) -> Iterator[None]:
    """Turns the error of a block that misses something in a checkpoint's `meta` into a CheckpointError."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        named = f"{type(error).__name__}: {one_line(error, 200)}"
        why = reason_of(error) if isinstance(error, ValidationError) else named
        what = f"the checkpoint of step {step} cannot be resumed from: {why}"
        raise CheckpointError(what, remedy="remove it, or give another {folder}") from None


def check_resumable(meta: Mapping[str, Any]) -> None:
    """Raises CheckpointError where `meta` does not hold what a run resumes from."""
    with as_checkpoint_error(meta["step"]):
        RunMetadata.model_validate(meta)
