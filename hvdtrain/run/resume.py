"""What a checkpoint's metadata must hold for a run to resume from it."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hvdtrain.errors import CheckpointError
from hvdtrain.run.checkpoint import Count, ShortText, reason_of

AnyFloat = Annotated[float, Field(allow_inf_nan=True)]
"""As of a metric that has no value in some batch."""
MOST_METRICS = Field(max_length=1000)


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class PlateauMetadata(Strict):
    best: float | None
    waited: Count
    drops: Count


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
    """The keys of a checkpoint's `meta` that a run resumes from."""

    step: Count
    epoch: Count
    sample: Count
    plateau: PlateauMetadata
    train: TotalsMetadata
    scaler: ScalerMetadata | Annotated[dict[str, float], Field(max_length=0)]
    """Empty where there is none."""
    optimizer: dict[str, bool | int | AnyFloat | str | None] = {}


def check_resumable(meta: Mapping[str, Any]) -> None:
    """Raises CheckpointError where a checkpoint's `meta` is not what a run writes."""
    try:
        RunMetadata.model_validate(meta)
    except ValidationError as error:
        what = f"the checkpoint of step {meta['step']} cannot be resumed from: {reason_of(error)}"
        raise CheckpointError(f"{what}; remove it, or give another --output.") from None
