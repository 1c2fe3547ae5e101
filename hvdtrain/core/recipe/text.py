"""The keys of a recipe about text. STAND-IN."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from hvdtrain.core.values import Number


class Text(BaseModel):
    """Text."""

    sequence_length: Number = Field(256, description="tokens: how many of an example are predicted")
    sequences: Literal["packed", "separate", "padded"] = Field("packed", description="tokens: how they are cut")


def check(r: Any) -> None:
    """Nothing."""
